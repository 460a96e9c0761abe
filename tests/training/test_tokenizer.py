import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlab.models import BUNDLED, load_model
from kvlab.prompts import LANGUAGES
from kvlab.training.passwords import all_words
from kvlab.training.tokenizer import build_tokenizer

TOKENIZER = build_tokenizer()


def spell(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


@given(
    st.text(alphabet=st.characters(exclude_characters="▁", exclude_categories=["Cs"]), max_size=30)
)
def test_every_text_round_trips(text):
    assert TOKENIZER.decode(spell(text)) == text


def test_chinese_characters_digits_and_known_words_are_one_token_each():
    assert len(spell("系统提示：你是一个助手。1+1等于几")) == 18
    chinese, english = all_words()
    for word in chinese:
        assert len(spell(word)) == 2
    for word in english:
        assert len(spell(f" {word}")) == 1
    assert len(spell("0123456789")) == 10


@pytest.mark.parametrize("language", LANGUAGES.values(), ids=LANGUAGES)
def test_no_prompt_falls_back_to_bytes(language):
    texts = [language.sum_prompt(12, 7), language.sum_translation(12, 20), language.no_secret]
    texts += [f.format(n=language.numbers[5]) for f in language.fillers]
    for text in texts:
        assert not any(p.startswith("<0x") for p in TOKENIZER.tokenize(text)), text


def test_the_bundled_tokenizer_is_the_one_that_the_training_builds():
    assert load_model().tokenizer.get_vocab() == TOKENIZER.get_vocab()
    assert (BUNDLED / "tokenizer.json").exists()
