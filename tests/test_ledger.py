import copy
import json

import pytest

from kvlab import ledger


def part(**changes):
    """A small record of one notebook."""
    claims = {
        "count": ledger.rate(3, 4),
        "exact": 7,
        "ratio": ledger.timed(5.0, 2, 50),
        "tiny": ledger.rounding(2e-5),
    } | changes
    claim = {"id": "A1", "statement": "s", "measured": claims, "verdict": "reproduced"}
    sequence = {"dtype": "float32", "tokens": [1, 2, 3], "margins": [5.0, 1e-6, 4.0]}
    return {
        "claims": [claim | {"note": "n", "notebook": "01_x"}],
        "tolerances": {"float32": 1e-4},
        "sequences": {"a": sequence},
    }


def changed(**changes):
    return ledger.differences({"01_x": part(**changes)}, {"01_x": part()})


def test_a_record_agrees_with_itself():
    assert changed() == ledger.Differences([], [], [])


def test_a_changed_count_fails():
    assert "count is 2 of 4, recorded 3 of 4" in changed(count=ledger.rate(2, 4)).failures[0]
    assert changed(exact=8).failures


def test_a_ratio_of_times_outside_its_bounds_is_reported_and_does_not_fail():
    assert changed(ratio=ledger.timed(40.0, 2, 50)) == ledger.Differences([], [], [])
    found = changed(ratio=ledger.timed(60.0, 2, 50))
    assert not found.failures
    assert "ratio is 60x, recorded 5x" in found.times[0]


def test_a_share_of_time_is_shown_as_one():
    assert ledger.show(ledger.timed(0.822, 0.6, 0.95, unit="%")) == "82%"


def test_a_number_of_threads_outside_its_bounds_fails():
    recorded = {"01_x": part(races=ledger.varying(3, 2, 5))}
    fresh = {"01_x": part(races=ledger.varying(6, 2, 5))}
    assert ledger.differences(fresh, recorded).failures


def test_a_time_in_the_place_of_a_count_fails():
    assert changed(exact=ledger.timed(7, 1, 9)).failures


def test_a_rounding_error_may_move_by_its_factor_only():
    assert not changed(tiny=ledger.rounding(1.9e-4)).failures
    assert changed(tiny=ledger.rounding(1e-3)).failures
    zero, small = ledger.rounding(0.0), ledger.rounding(9e-7)
    assert ledger._agree(zero, small)


def test_a_changed_verdict_fails():
    fresh = part()
    fresh["claims"][0]["verdict"] = "refuted"
    assert ledger.differences({"01_x": fresh}, {"01_x": part()}).failures


def with_tokens(tokens, **changes):
    fresh = part(**changes)
    fresh["sequences"]["a"]["tokens"] = tokens
    return ledger.differences({"01_x": fresh}, {"01_x": part()})


def test_another_token_at_a_wide_margin_fails():
    assert with_tokens([1, 2, 9]).failures
    assert with_tokens([9, 2, 3]).failures
    assert with_tokens([1, 2]).failures


def test_another_token_at_a_near_tie_is_reported_and_does_not_fail():
    found = with_tokens([1, 9, 9])
    assert not found.failures
    assert "token 2 differs at a margin of 1e-06" in found.near_ties[0]


def test_counts_that_follow_from_a_near_tie_are_reported_and_do_not_fail():
    found = with_tokens([1, 9, 9], count=ledger.rate(2, 4))
    assert not found.failures
    assert len(found.near_ties) == 2


def test_what_is_missing_on_one_side_fails():
    assert ledger.differences({}, {"01_x": part()}).failures == ["01_x: missing in the fresh run"]
    assert ledger.differences({"01_x": part()}, {}).failures == ["01_x: missing in the record"]
    fresh = part()
    fresh["sequences"], fresh["claims"] = {}, []
    assert len(ledger.differences({"01_x": fresh}, {"01_x": part()}).failures) == 2


def test_a_notebook_writes_its_part_where_the_environment_says(tmp_path, monkeypatch):
    book = ledger.Ledger("01_x")
    book.claim("A1", "s", {"n": 1}, "reproduced", "n")
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setenv("KVLAB_RECORD", str(tmp_path))
    book.sequence("a", "float32", [1, 2], [3.14159, 2.0])
    book.tolerance("float32", 1e-4)
    written = json.loads((tmp_path / "01_x.json").read_text())
    assert written["claims"][0]["id"] == "A1"
    assert written["sequences"]["a"]["tokens"] == [1, 2]
    assert '"tokens": [ 1, 2 ]' in (tmp_path / "01_x.json").read_text()


@pytest.mark.parametrize(
    ("measured", "verdict", "message"),
    [
        ({}, "reproduced", "nothing measured"),
        ({"n": 1}, "true", "unknown verdict"),
        ({"n": float("nan")}, "reproduced", "is nan"),
    ],
)
def test_a_claim_needs_numbers_and_a_known_verdict(measured, verdict, message):
    with pytest.raises(ValueError, match=message):
        ledger.Ledger("x").claim("A1", "s", measured, verdict, "n")


@pytest.mark.parametrize(("hits", "n"), [(5, 4), (-1, 4), (0, 0)])
def test_an_impossible_rate_is_refused(hits, n):
    with pytest.raises(ValueError, match="rate"):
        ledger.rate(hits, n)


def test_a_claim_shows_rates_with_their_counts():
    claim = ledger.Ledger("x").claim("A1", "s", {"hit": ledger.rate(3, 4)}, "qualified", "n")
    assert "hit: 3 of 4" in claim._repr_markdown_()
    assert copy.deepcopy(claim) == claim
