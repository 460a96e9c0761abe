"""What a planted change does to the comparison with the record."""

import sys
from pathlib import Path

import pytest

from kvlab.ledger import Count, Rate, Rounding, Time, Varying

sys.path.insert(0, str(Path(__file__).parents[1] / "ci"))
from compare import Differences, differences


def part(verdict="reproduced", tokens=(1, 2, 3), **changes):
    """A small record of one notebook."""
    values = {"count": Rate(3, 4), "exact": Count(7), "ratio": Time(5.0, 2, 50)}
    values |= {"tiny": Rounding(2e-5), "races": Varying(3, 2, 5)} | changes
    measured = {name: value.as_dict() for name, value in values.items()}
    return {
        "claims": [{"id": "A1", "verdict": verdict, "measured": measured}],
        "tolerances": {"float32": 1e-4},
        "sequences": {
            "a": {"dtype": "float32", "tokens": list(tokens), "margins": [5.0, 1e-6, 4.0]}
        },
    }


def compare(**changes):
    return differences({"01_x": part(**changes)}, {"01_x": part()})


def test_a_record_agrees_with_itself():
    assert compare() == Differences()


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"count": Rate(2, 4)}, "01_x A1: count is 2 of 4, recorded 3 of 4"),
        ({"exact": Count(8)}, "01_x A1: exact is 8, recorded 7"),
        ({"tiny": Rounding(1e-3)}, "01_x A1: tiny is 0.001, recorded 2e-05"),
        ({"races": Varying(6, 2, 9)}, "01_x A1: races is 6 (2 to 9), recorded 3 (2 to 5)"),
        ({"exact": Time(7, 1, 9)}, "01_x A1: exact is 7x, recorded 7"),
        ({"other": Count(1)}, "01_x A1: other: missing in the record"),
        ({"verdict": "refuted"}, "01_x A1: refuted, recorded reproduced"),
        ({"tokens": (1, 2, 9)}, "01_x a: token 3 is 9, recorded 3"),
        ({"tokens": (9, 2, 3)}, "01_x a: token 1 is 9, recorded 1"),
        ({"tokens": (1, 2)}, "01_x a: 2 tokens, recorded 3"),
    ],
)
def test_one_planted_change_fails_and_names_the_command_that_runs_this_notebook(change, line):
    assert compare(**change).failures == [f"{line} (alone: make reproduce ONLY=01)"]


def test_a_time_outside_its_bounds_is_reported_and_does_not_fail():
    found = compare(ratio=Time(60.0, 2, 50))
    assert found == Differences(times=["01_x A1: ratio is 60x, recorded 5x"])


def test_another_token_at_a_near_tie_is_reported_and_does_not_fail():
    found = compare(tokens=(1, 9, 9))
    assert not found.failures
    assert "token 2 differs at a margin of 1e-06" in found.near_ties[0]


def test_values_that_follow_from_a_near_tie_are_reported_and_do_not_fail():
    found = compare(tokens=(1, 9, 9), count=Rate(2, 4))
    assert not found.failures
    assert len(found.near_ties) == 2


def test_what_is_missing_on_one_side_fails():
    assert differences({}, {"01_x": part()}).failures == ["01_x: missing in the fresh run"]
    assert differences({"01_x": part()}, {}).failures == ["01_x: missing in the record"]
    fresh = part() | {"sequences": {}, "claims": []}
    assert len(differences({"01_x": fresh}, {"01_x": part()}).failures) == 2
