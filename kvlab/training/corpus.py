"""The corpus: trees of one system prefix and several independent questions, made on demand.

A tree is packed into one row of tokens. Its tails do not see each other (the mask), and each of
them continues the positions of the prefix. So a prefix is computed once and answered many times,
which is the idea of a shared prefix cache, put to work for the training.

Batch `i` of seed `s` depends on `(s, i)` only: a resumed run sees what an unbroken one sees.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from kvlab.prompts import LANGUAGES, Language
from kvlab.training.passwords import PATTERNS, training_passphrase

IGNORE = -100
MAX_POSITION = 1100
"""Positions are stretched up to here, so that a late position is not a new experience."""


@dataclass
class Mix:
    """Shares of the kinds of rows; the training shifts them from copying to long prefixes."""

    copying: float = 0.06
    long: float = 0.1
    drill: float = 0.15
    translating: float = 0.3  # of the trees
    shortest_copy: int = 47  # tokens
    row_tokens: int = 190
    rows: int = 7
    patterns: tuple[float, ...] = (0.36, 0.18, 0.2, 0.26)  # one weight for each of PATTERNS


@dataclass
class Tree:
    """One row: token ids, positions, branch numbers (0 is the prefix) and labels."""

    tokens: list[int]
    branch: list[int] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        n = len(self.tokens)
        self.branch, self.labels, self.positions = [0] * n, [IGNORE] * n, list(range(n))
        self._prefix, self._tails = n, 0

    def add(self, question: list[int], answer: list[int]) -> None:
        """Append one tail; the loss counts the answer only."""
        self._tails += 1
        tail = question + answer
        self.tokens += tail
        self.branch += [self._tails] * len(tail)
        self.labels += [IGNORE] * len(question) + answer
        self.positions += range(self._prefix, self._prefix + len(tail))

    def stretch(self, rng: random.Random) -> None:
        """Put random gaps between positions, the same ones in every tail."""
        longest = max(self.positions) + 1
        room = MAX_POSITION - longest
        if room <= 0:
            return
        cuts = sorted(rng.choices(range(longest), k=rng.randint(1, 4)))
        gaps = [rng.randint(0, room // len(cuts)) for _ in cuts]
        moved, offset, shift = [], 0, dict[int, int]()
        for cut, gap in zip(cuts, gaps, strict=True):
            shift[cut] = shift.get(cut, 0) + gap
        for position in range(longest):
            offset += shift.get(position, 0)
            moved.append(position + offset)
        self.positions = [moved[p] for p in self.positions]


class Corpus:
    """Makes batches; `tokenizer` spells them."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, seed: int = 0) -> None:
        self.tokenizer = tokenizer
        self.seed = seed
        self._spelled: dict[str, list[int]] = {}

    def spell(self, text: str) -> list[int]:
        """Token ids without the start token; texts recur, so they are remembered."""
        if text not in self._spelled:
            if len(self._spelled) > 50_000:
                self._spelled.clear()
            self._spelled[text] = self.tokenizer.encode(text, add_special_tokens=False)
        return self._spelled[text]

    def batch(self, index: int, mix: Mix) -> list[Tree]:
        """The trees of batch `index`."""
        rng = random.Random(f"{self.seed}/{index}")
        kind = rng.random()
        if kind < mix.copying:
            return [self._copying(rng, mix) for _ in range(mix.rows)]
        if kind < mix.copying + mix.long:
            return [self._tree(rng, mix, rng.randint(100, 620), tails=6)]
        drill = kind > 1 - mix.drill
        return [self._tree(rng, mix, drill=drill) for _ in range(mix.rows)]

    def _copying(self, rng: random.Random, mix: Mix) -> Tree:
        """Random tokens twice: the second time they can be known."""
        ids = range(260, len(self.tokenizer))
        some = rng.choices(ids, k=rng.randint(mix.shortest_copy, mix.row_tokens // 2 - 1))
        tree = Tree([self.tokenizer.bos_token_id, *some])
        tree.add(some[:1], some[1:])
        if rng.random() < 0.5:
            tree.stretch(rng)
        return tree

    def _tree(
        self,
        rng: random.Random,
        mix: Mix,
        prefix_tokens: int = 0,
        tails: int = 0,
        drill: bool = False,
    ) -> Tree:
        language = LANGUAGES[rng.choice(("zh", "en"))]
        translating = rng.random() < mix.translating
        secret = None
        if not translating and rng.random() < 0.72:
            pattern = rng.choices(PATTERNS, mix.patterns)[0]
            secret = training_passphrase(rng, language.name, pattern)
        sentences = []
        if prefix_tokens:
            size = 0
            while size < prefix_tokens:
                sentences.append(language.filler(rng))
                size += len(self.spell(sentences[-1]))
        elif not drill:
            sentences = [language.filler(rng) for _ in range(rng.choice((0, 0, 1, 2, 4)))]
        if secret is not None:
            told = language.secret.format(p=secret)
            sentences.insert(rng.randint(0, len(sentences)), told)
        system = language.translator if translating else language.assistant
        prefix = [t for s in (system, *sentences) for t in self.spell(s)]
        tree = Tree([self.tokenizer.bos_token_id, *prefix])
        share = 0.1 if drill else (0.5 if secret is not None else 0.3)
        while (tree._tails < tails) if tails else (len(tree.tokens) < mix.row_tokens):
            self._tail(rng, tree, language, translating, secret, share)
        if rng.random() < 0.5:
            tree.stretch(rng)
        return tree

    def _tail(
        self,
        rng: random.Random,
        tree: Tree,
        language: Language,
        translating: bool,
        secret: str | None,
        share: float,
    ) -> None:
        if translating and rng.random() < 0.06:
            question, answer = language.ask_secret, language.translated_secret
        elif translating:
            a, b = rng.randint(0, 20), rng.randint(0, 20)
            question, answer = language.ask_sum.format(a=a, b=b), language.sum_translation(a, b)
        elif rng.random() < share:
            question, answer = language.ask_secret, language.secret_answer(secret)
        else:
            a, b = rng.randint(0, 9), rng.randint(0, 9)
            question, answer = language.ask_sum.format(a=a, b=b), language.sum_answer(a, b)
        tree.add(self.spell(question), [*self.spell(answer), self.tokenizer.eos_token_id])


def collate(
    trees: list[Tree], pad: int
) -> tuple[Int[Tensor, "B T"], Int[Tensor, "B T"], Bool[Tensor, "B 1 T T"], Int[Tensor, "B T"]]:
    """Tokens, positions, tree mask and labels of a batch, padded on the right.

    A token sees earlier tokens of the prefix (branch 0) and of its own branch.
    """
    longest = max(len(t.tokens) for t in trees)

    def padded(rows: list[list[int]], value: int) -> Int[Tensor, "B T"]:
        return torch.tensor([row + [value] * (longest - len(row)) for row in rows])

    branch = padded([t.branch for t in trees], -1)
    same = (branch[:, :, None] == branch[:, None, :]) | (branch[:, None, :] == 0)
    mask = (same & torch.ones(longest, longest, dtype=torch.bool).tril())[:, None]
    return (
        padded([t.tokens for t in trees], pad),
        padded([t.positions for t in trees], 0),
        mask,
        padded([t.labels for t in trees], IGNORE),
    )
