"""The lab's controls, driven without a browser."""

import pytest

from kvlab import lab


@pytest.fixture(scope="module")
def slot_lab(bundled):
    return lab.SlotLab(bundled, ["D and E: two passphrases"])


def test_the_switch_is_linked_in_the_browser_to_pages_that_are_there_already(slot_lab):
    assert len(slot_lab.links) == 3  # the presets, and the states of two stacks
    for state in lab.STATES:
        page = slot_lab.pages["D and E: two passphrases", state].value
        assert '<img alt="Attention heatmaps' in page
        assert 'aria-label="answer of D"' in page
    texts = {p.value for p in slot_lab.pages.values()}
    assert len(texts) == len(lab.STATES) + 1


def test_the_closer_look_follows_layer_head_and_step(slot_lab):
    slot_lab.state.value = "same slot, overwritten"
    assert slot_lab.layer.value == "all, the strongest layer"  # never an empty menu
    seen = slot_lab.detail.value
    slot_lab.layer.value = "layer 2"
    slot_lab.step.value = 4
    assert slot_lab.detail.value != seen
    assert '<img alt="Attention of D, token 4' in slot_lab.detail.value
    assert "D, token 4" in slot_lab.detail.value
    slot_lab.reader.index = 1
    assert "E, token 4: 0 of" in slot_lab.detail.value
    slot_lab.head.value = "head 0"
    whole = slot_lab.detail.value
    slot_lab.head.value = "head 1"
    assert slot_lab.detail.value != whole
    slot_lab.reader.index = 0


def test_empty_text_gets_a_message_beside_its_field_and_nothing_runs(slot_lab):
    slot_lab.texts["A"].value = "口令是什么"
    slot_lab.texts["B"].value = "  "
    slot_lab.compute()
    assert "empty" in slot_lab.messages["B"].value
    assert "alert" not in slot_lab.messages["A"].value
    assert (lab.OWN, "isolated") not in slot_lab.scenes


def test_text_longer_than_the_slot_gets_a_message_with_numbers(slot_lab):
    slot_lab.texts["B"].value = "很" * 200
    assert "201 tokens" in slot_lab.messages["B"].value
    assert "shorten" in slot_lab.messages["B"].value


def test_unknown_characters_are_marked_as_bytes(slot_lab):
    slot_lab.texts["B"].value = "哲<b>"
    told = slot_lab.messages["B"].value
    assert "3 of them bytes" in told
    assert "dashed" in told
    assert "<b>" not in told.replace("<b role", "")


def test_own_text_is_run_in_every_state_and_shown(slot_lab):
    slot_lab.texts["A"].value = "系统提示：你是一个助手。3+4等于几"
    slot_lab.texts["B"].value = "系统提示：你是一个助手。5+2等于几"
    slot_lab.state.value = "same slot, overwritten"
    slot_lab.compute()
    assert slot_lab.preset.value == lab.OWN
    assert not slot_lab.run.disabled
    assert slot_lab.busy.value == ""
    for state in lab.STATES:
        assert "3+4" in slot_lab.pages[lab.OWN, state].value
    assert slot_lab.scene.victim == "A"
