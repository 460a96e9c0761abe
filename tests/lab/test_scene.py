"""Scenes of the lab tell what happened, and nothing else."""

import re

import pytest
from conftest import prompt

from kvlab import lab
from kvlab.lab.page import marked
from kvlab.passphrase import Experiment
from kvlab.prompts import LANGUAGES


@pytest.fixture(scope="module")
def scenes(bundled):
    first, second = lab.preset(bundled, "D and E: two passphrases")
    made, references = {}, None
    for state in lab.STATES:
        made[state] = lab.play(bundled, first, second, state, references)
        references = made[state].references
    return made


def test_isolated_nobody_is_harmed_and_the_sentence_says_so(scenes):
    scene = scenes["isolated"]
    assert scene.victim is None
    for name in scene.names:
        assert scene.divergence(name) is None
        assert scene.exposure(name) is None
        assert (
            scene.sentence(name)
            == f"{name} answers as if it were alone, and reads only its own rows."
        )


def test_overwriting_harms_the_first_and_the_sentence_says_how(scenes):
    scene = scenes["same slot, overwritten"]
    assert scene.victim == "D"
    assert scene.exposure("D") == 2
    told = scene.sentence("D")
    assert told.startswith(
        f"From token {scene.divergence('D')} on, D answers the question of E, word"
    )
    assert "from token 2 on it reads rows of E" in told
    assert scene.foreign_words("D") == ["蓝鲸七号"]


def test_appending_harms_the_second(scenes):
    scene = scenes["same slot, appended"]
    assert scene.victim == "E"
    assert scene.exposure("E") == 1
    assert scene.exposure("D") is None


def test_exposure_without_damage_is_told_apart(bundled):
    first, second = lab.preset(bundled, "A and C: two system prompts")
    scene = lab.play(bundled, first, second, "same slot, appended")
    assert scene.victim is None
    assert "exposure without damage" in scene.sentence("C")


@pytest.mark.parametrize("state", lab.STATES)
def test_each_state_gives_the_tokens_of_its_arm(bundled, scenes, state):
    runs = Experiment(bundled, LANGUAGES["zh"]).run(lab.STATES[state], "D", "E")
    for name in "DE":
        assert scenes[state].runs[name].tokens == runs[name].tokens


def test_writes_cover_every_row_once_in_order(scenes):
    scene = scenes["isolated"]
    for name in scene.names:
        rows = [
            r for w in scene.writes if w.request == name for r in range(w.start, w.start + w.count)
        ]
        assert rows == list(range(scene.runs[name].request.rows_needed))[: len(rows)]
        assert len(rows) == len(scene.runs[name].request.tokens) + len(scene.runs[name].tokens) - 1
    assert len({w.slot for w in scene.writes}) == 2
    assert len({w.slot for w in scenes["same slot, overwritten"].writes}) == 1


def test_two_texts_that_do_not_fit_into_a_slot_are_refused_with_a_number(bundled):
    with pytest.raises(ValueError, match=r"take away \d+ tokens"):
        lab.play(bundled, prompt("a", 90, 1), prompt("b", 90, 2), "isolated")


def test_an_unknown_state_is_refused(bundled):
    with pytest.raises(ValueError, match="unknown state"):
        lab.play(bundled, prompt("a", 5, 1), prompt("b", 5, 2), "broken")


def test_marks_are_the_characters_that_differ():
    page = marked("等于4。", "等于2。")
    assert re.findall(r"<mark[^>]*>(.*?)</mark>", page) == ["4"]
    assert "underline" in page
    assert "&lt;b&gt;" in marked("<b>", "")
    assert marked("same", "same") == "same"


def test_the_page_shows_question_answer_and_what_it_should_be(scenes):
    page = lab.answers(scenes["same slot, overwritten"])
    assert 'aria-label="answer of D"' in page
    assert "(victim)" in page
    assert "口令是红狐三组。" in page
    assert "<mark" in page


def test_the_alternative_text_counts_foreign_rows(scenes):
    assert "D reads 0 foreign rows" in lab.picture_alt(scenes["isolated"])
    assert "a slot each" in lab.picture_alt(scenes["isolated"])
    assert re.search(r"D reads [1-9]\d* foreign", lab.picture_alt(scenes["same slot, overwritten"]))
