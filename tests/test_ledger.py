import copy
import json

import pytest

from kvlab.ledger import Count, Ledger, Rate, Rounding, Time, Varying
from kvlab.ledger.values import read

A1 = {"colliding_runs_with_a_victim": Rate(3, 4)}


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (Count(7), "7"),
        (Count([6, 8, 0.123456]), "6, 8, 0.1235"),
        (Rate(3, 4), "3 of 4"),
        (Rounding(2.345e-5), "2.35e-05"),
        (Varying(3, 2, 50), "3 (2 to 50)"),
        (Time(5.123, 2, 50), "5.12x"),
        (Time(0.822, 0.6, 0.95, unit="%"), "82%"),
    ],
)
def test_every_kind_of_value_prints_itself_and_survives_the_record(value, shown):
    assert str(value) == shown
    assert read(json.loads(json.dumps(value.as_dict()))) == value


@pytest.mark.parametrize(
    ("recorded", "agree", "differ"),
    [
        (Count(7), Count(7), Count(8)),
        (Count(0.5), Count(0.5 + 1e-9), Count(0.51)),
        (Rate(3, 4), Rate(3, 4), Rate(6, 8)),
        (Rounding(2e-5), Rounding(1.9e-4), Rounding(1e-3)),
        (Rounding(0.0), Rounding(9e-7), Rounding(2e-5)),
        (Varying(3, 2, 5), Varying(5, 0, 9), Varying(6, 0, 9)),
        (Time(5, 2, 50), Time(40, 2, 50), Time(60, 2, 100)),
    ],
)
def test_every_kind_of_value_agrees_by_the_rule_of_the_record(recorded, agree, differ):
    assert agree.agrees(recorded)
    assert not differ.agrees(recorded)


def test_only_a_time_never_decides():
    assert [kind.decides for kind in (Count, Rate, Rounding, Varying, Time)] == [True] * 4 + [False]


@pytest.mark.parametrize(("hits", "n"), [(5, 4), (-1, 4), (0, 0)])
def test_an_impossible_rate_is_refused(hits, n):
    with pytest.raises(ValueError, match="rate"):
        Rate(hits, n)


@pytest.mark.parametrize("kind", [Count, Rounding])
def test_what_is_not_a_number_is_refused(kind):
    with pytest.raises(ValueError, match="nan is not a number"):
        kind(float("nan"))


def test_a_notebook_writes_its_part_where_the_environment_says(tmp_path, monkeypatch):
    book = Ledger("01_x")
    book.claim("A1", **A1)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setenv("KVLAB_RECORD", str(tmp_path))
    book.sequence("a", "float32", [1, 2], [3.14159, 2.0])
    book.tolerance("float32", 1e-4)
    written = json.loads((tmp_path / "01_x.json").read_text())
    assert written["claims"][0]["id"] == "A1"
    assert written["sequences"]["a"] == {
        "dtype": "float32",
        "tokens": [1, 2],
        "margins": [3.14, 2.0],
    }
    assert '"tokens": [ 1, 2 ]' in (tmp_path / "01_x.json").read_text()


def test_a_claim_needs_an_id_of_the_table_and_what_its_rule_asks_for():
    book = Ledger("x")
    with pytest.raises(ValueError, match="unknown claim 'Z9'"):
        book.claim("Z9", n=1)
    with pytest.raises(ValueError, match="nothing measured"):
        book.claim("A1")
    with pytest.raises(KeyError, match="colliding runs with a victim"):
        book.claim("A1", n=1)
    assert not book.claims


def test_the_verdict_follows_from_what_was_measured_and_the_claim_tells_the_rule():
    some = Ledger("x").claim("A1", **A1)
    assert some.verdict == "qualified"
    assert Ledger("x").claim("A1", colliding_runs_with_a_victim=Rate(4, 4)).verdict == "reproduced"
    assert "colliding runs with a victim: 3 of 4" in some._repr_markdown_()
    assert "reproduced: every colliding run has a victim" in some._repr_markdown_()
    assert copy.deepcopy(some) == some
