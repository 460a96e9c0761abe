import pytest

from kvlab.prompts import EN, LANGUAGES, ZH, is_well_formed


@pytest.mark.parametrize("language", LANGUAGES.values(), ids=LANGUAGES)
def test_every_right_answer_is_well_formed(language):
    for a, b in [(0, 0), (9, 9), (12, 20)]:
        assert is_well_formed(language.sum_answer(a, b))
        assert is_well_formed(language.sum_translation(a, b))
    assert is_well_formed(language.secret_answer("蓝鲸七号"))
    assert is_well_formed(language.no_secret)


def test_a_wrong_number_is_still_well_formed():
    assert is_well_formed("答：你问2加2等于几。1加2等于3，所以答案是3。")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "口令是",
        "答：你问1加1等于几。",
        "答答答答",
        "Translation: what is 问 plus one?",
        "口令是红。狐。",
    ],
)
def test_broken_grammar_is_not_well_formed(text):
    assert not is_well_formed(text)


def test_the_articles_prompts_are_spelled_as_in_the_article():
    assert ZH.sum_prompt(1, 1) == "系统提示：你是一个助手。1+1等于几"
    assert ZH.sum_prompt(1, 1, ZH.translator) == "系统提示：你是一个翻译。1+1等于几"
    assert EN.secret_prompt("amber falcon seven").startswith("System: you are an assistant. The")
