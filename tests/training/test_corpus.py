import random

import pytest
import torch
from transformers import LlamaForCausalLM

from kvlab.training.corpus import IGNORE, Corpus, Mix, Tree, collate
from kvlab.training.passwords import (
    HELD_OUT_ZH,
    PATTERNS,
    is_reserved,
    training_passphrase,
    unseen_passphrase,
)
from kvlab.training.start import config
from kvlab.training.tokenizer import build_tokenizer

CORPUS = Corpus(build_tokenizer())


def test_a_batch_depends_on_seed_and_index_only():
    again = Corpus(build_tokenizer())
    again.batch(3, Mix())
    assert [t.tokens for t in again.batch(7, Mix())] == [t.tokens for t in CORPUS.batch(7, Mix())]
    other = Corpus(build_tokenizer(), seed=1).batch(7, Mix())
    assert [t.tokens for t in other] != [t.tokens for t in CORPUS.batch(7, Mix())]


def test_a_tail_of_a_tree_is_computed_as_if_it_stood_alone():
    torch.manual_seed(0)
    small = config(100, layers=2)
    small.hidden_size, small.head_dim, small.intermediate_size = 32, 4, 48
    model = LlamaForCausalLM(small).eval()
    tree = Tree([1, 10, 11, 12])
    tree.add([20, 21], [22, 2])
    tree.add([30], [31, 32, 2])
    tokens, positions, mask, labels = collate([tree, Tree([1, 5])], pad=3)
    packed = model(tokens, position_ids=positions, attention_mask=mask, use_cache=False).logits
    alone = model(torch.tensor([[1, 10, 11, 12, 30, 31, 32, 2]]), use_cache=False).logits
    torch.testing.assert_close(packed[0, 8:12], alone[0, 4:])
    assert labels[0].tolist() == [IGNORE] * 6 + [22, 2, IGNORE, 31, 32, 2]


def test_stretched_positions_keep_their_order_and_stay_in_range():
    rng = random.Random(0)
    for _ in range(50):
        tree = Tree(list(range(40)))
        tree.add([1, 2], [3])
        tree.stretch(rng)
        steps = [b - a for a, b in zip(tree.positions[:43], tree.positions[1:43])]
        assert min(steps) >= 1
        assert max(tree.positions) < 1100


@pytest.mark.parametrize("language", ["zh", "en"])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_no_evaluated_passphrase_can_occur_in_training(language, pattern):
    rng = random.Random(0)
    trained = {training_passphrase(rng, language, pattern) for _ in range(3000)}
    evaluated = {unseen_passphrase(rng, language, pattern) for _ in range(300)}
    assert not trained & evaluated
    assert not any(map(is_reserved, trained))


def test_a_fifth_of_the_evaluated_passphrases_uses_words_that_no_training_passphrase_has():
    rng = random.Random(0)
    words = [p for p in PATTERNS if p != "random"]
    trained = {training_passphrase(rng, "zh", p) for p in words for _ in range(3000)}
    assert not any(word in passphrase for word in HELD_OUT_ZH for passphrase in trained)
    evaluated = [unseen_passphrase(rng, "zh", "three") for _ in range(1000)]
    held_out = sum(any(w in e for w in HELD_OUT_ZH) for e in evaluated)
    assert 150 < held_out < 250
