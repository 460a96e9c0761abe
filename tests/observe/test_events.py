"""The event log: what pools write, what a file brings back, and what the finder convicts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conftest import prompt

import kvlab.observe
from kvlab.check.__main__ import main
from kvlab.interleave import moves, replay
from kvlab.observe import EventLog, conflicts, parse_log, read_log, write_log
from kvlab.observe.events import lives
from kvlab.pools import SimpleCachePool, TieredCachePool
from kvlab.schedule import run

EXAMPLE = Path(kvlab.observe.__file__).with_name("example_log.jsonl")


def record(kind, request="a", places=(0,), start=0, length=0, size=8, time=0, **more):
    return {
        "kind": kind,
        "request": request,
        "places": list(places),
        "start": start,
        "length": length,
        "size": size,
        "time": time,
        **more,
    }


def found(*records):
    """Kinds of the conflicts of a log whose records come in this order."""
    log = parse_log([r | {"time": i} for i, r in enumerate(records)])
    assert not log.errors
    return [c.kind for c in conflicts(log.events)]


def pools(model):
    return [
        SimpleCachePool.for_model(model.config, 3, 64),
        TieredCachePool.for_model(model.config, 14, block_size=4),
    ]


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize(("order", "batch"), [("serial", 1), ("round_robin", 3), (5, 2)])
def test_correct_pools_write_logs_without_conflict(tiny, which, order, batch):
    pool = pools(tiny)[which]
    pool.events = EventLog()
    requests = [prompt(f"r{i}", 20, i % 2) for i in range(6)]
    run(tiny, requests, pool, order, batch)
    run(tiny, requests, pool, order, batch)
    assert {"admit", "write", "read", "release"} <= {e.kind for e in pool.events.events}
    assert conflicts(pool.events.events) == []


def test_tiered_log_names_hits_copies_and_evictions(tiny):
    pool = pools(tiny)[1]
    pool.events = EventLog()
    run(tiny, [prompt(f"r{i}", 18, i // 2 % 3) for i in range(9)], pool, "serial")
    assert {"hit", "copy", "evict"} <= {e.kind for e in pool.events.events}


def test_log_survives_the_way_to_a_file_and_back(tiny, tmp_path):
    pool = pools(tiny)[1]
    pool.events = EventLog()
    run(tiny, [prompt(f"r{i}", 9, 0) for i in range(3)], pool)
    write_log(pool.events.events, tmp_path / "log.jsonl")
    back = read_log(tmp_path / "log.jsonl")
    assert back.events == pool.events.events
    assert back.errors == []


def test_malformed_lines_are_numbered_and_the_rest_is_read():
    good = json.dumps(record("admit"))
    lines = [good, "{not json", "", json.dumps(record("fly")), json.dumps(record("write", size=0))]
    log = parse_log(lines)
    assert len(log.events) == 1
    assert [e.split(":")[0] for e in log.errors] == ["line 2", "line 4", "line 5"]


def test_record_without_a_number_names_the_field():
    broken = record("write")
    broken["start"] = "three"
    assert "start" in parse_log([broken]).errors[0]
    assert "request" in parse_log([record("read", request="")]).errors[0]
    assert "places" in parse_log([record("copy", places=(1,))]).errors[0]


def test_a_life_in_order_is_no_conflict():
    assert not found(
        record("admit"), record("write", length=3), record("read", length=3), record("release")
    )


def test_two_owners_of_one_place():
    kinds = found(record("admit"), record("admit", "b"), record("write", "b", length=2))
    assert kinds == ["given twice", "overlapping write"]


def test_use_after_free():
    assert "use after free" in found(record("admit"), record("release"), record("write", length=1))


def test_read_before_write_and_foreign_read():
    assert found(record("admit"), record("read", length=1)) == ["read before write"]
    assert "foreign read" in found(
        record("admit"),
        record("write", length=2),
        record("release"),
        record("admit", "b"),
        record("read", "b", length=1),
    )


def test_write_that_does_not_begin_at_the_length():
    kinds = found(record("admit"), record("write", length=2), record("write", start=3, length=1))
    assert kinds == ["wrong start"]
    assert found(record("admit", start=4)) == ["wrong start"]


def test_write_past_the_capacity():
    assert "past capacity" in found(record("admit"), record("write", length=9))


def test_double_free():
    assert found(record("admit"), record("release"), record("release")) == ["double free"]
    assert found(record("admit"), record("release", places=(0, 0))) == ["double free"]


def test_free_under_a_reader():
    assert found(record("admit"), record("evict", request="")) == ["freed under a reader"]
    assert found(record("admit"), record("reset", request="")) == ["freed under a reader"]


@pytest.mark.parametrize(
    ("hit", "kinds"),
    [
        ({"tokens": [1, 2]}, []),
        ({"tokens": [1, 3]}, ["wrong hit"]),
        ({"tokens": [1, 2], "context": {"tenant": "x"}}, ["wrong hit"]),
        ({"tokens": [1, 2], "context": None}, ["wrong hit"]),
        ({"tokens": [1, 2, 9], "length": 3}, ["wrong hit"]),
    ],
)
def test_hit_must_be_on_equal_written_rows(hit, kinds):
    fields = {"length": 2, **hit}
    assert (
        found(
            record("admit"),
            record("write", length=2, tokens=[1, 2]),
            record("release"),
            record("hit", "b", **fields),
        )
        == kinds
    )


def test_block_behind_another_prefix_is_a_wrong_hit():
    """Equal tokens of one block are not enough: what stands before them counts."""
    kinds = found(
        record("admit", places=(0, 1), size=2),
        record("write", places=(0, 1), size=2, length=4, tokens=[1, 2, 3, 4]),
        record("release", places=(0, 1), size=2),
        record("admit", "b", places=(2,), size=2),
        record("write", "b", places=(2,), size=2, length=2, tokens=[7, 8]),
        record("release", "b", places=(2,), size=2),
        record("hit", "c", places=(2, 1), size=2, length=4, tokens=[7, 8, 3, 4]),
    )
    assert kinds == ["wrong hit"]


def test_slot_that_goes_on_behind_its_own_prefix_is_no_conflict():
    """Servers that keep a slot's rows as the next request's prefix write in place."""
    assert not found(
        record("admit"),
        record("write", length=3, tokens=[1, 2, 3]),
        record("release"),
        record("hit", "b", length=2, tokens=[1, 2]),
        record("admit", "b", start=2),
        record("write", "b", start=2, length=2, tokens=[5, 6]),
        record("read", "b", length=4),
    )


def test_conflict_names_both_parties_rows_and_records():
    log = read_log(EXAMPLE)
    first = next(c for c in conflicts(log.events) if c.kind == "overlapping write")
    assert {first.party, first.other} == {"alice", "bob"}
    assert first.first is not None
    assert first.first.step < first.second.step
    assert str(first.rows[0]) in str(first)


def test_lives_sort_every_place_by_time(tiny):
    pool = pools(tiny)[0]
    pool.events = EventLog()
    run(tiny, [prompt(f"r{i}", 4, i, 2) for i in range(3)], pool, "round_robin")
    table = lives(pool.events.events)
    for _, life in table.groupby("place"):
        assert life.step.is_monotonic_increasing
        assert life.kind.iloc[0] == "reset"


def test_shell_tells_conflicts_none_and_unreadable_apart(tiny, tmp_path, capsys):
    assert main(["--log", str(EXAMPLE)]) == 1
    assert "given twice" in capsys.readouterr().out
    clean = SimpleCachePool.for_model(tiny.config, 1, 64)
    clean.events = EventLog()
    run(tiny, [prompt("a", 4, 0)], clean)
    write_log(clean.events.events, tmp_path / "clean.jsonl")
    assert main(["--log", str(tmp_path / "clean.jsonl")]) == 0
    (tmp_path / "junk").write_text("a\nb\n")
    assert main(["--log", str(tmp_path / "junk")]) == 2
    assert main(["--log", str(tmp_path / "missing")]) == 2
    assert "line 1" in capsys.readouterr().err


def test_malformed_line_does_not_hide_the_conflicts(tmp_path, capsys):
    lines = EXAMPLE.read_text().splitlines()
    lines.insert(3, "half a li")
    (tmp_path / "log").write_text("\n".join(lines))
    assert main(["--log", str(tmp_path / "log")]) == 1
    captured = capsys.readouterr()
    assert "line 4" in captured.err
    assert "1 lines could not be read" in captured.out


def test_every_fault_of_ownership_is_seen_in_an_interleaving(tiny):
    pool = SimpleCachePool.for_model(tiny.config, 2, 64)
    pool.events = EventLog()
    pool.collide("b", "a", "overwrite")
    replay(tiny, [prompt("a", 4, 0), prompt("b", 3, 1)], pool, moves("a a b b a b"))
    kinds = {c.kind for c in conflicts(pool.events.events)}
    assert {"given twice", "freed under a reader", "overlapping write", "foreign read"} <= kinds
