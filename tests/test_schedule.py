import pytest
from conftest import prompt

from kvlab import decode
from kvlab.pools import PoolFull, PrivatePool, SimpleCachePool
from kvlab.schedule import run


@pytest.mark.parametrize("order", ["serial", "round_robin", 0, 1, 2])
@pytest.mark.parametrize("slots", [1, 2, 4])
def test_isolated_requests_give_the_tokens_of_the_recompute_in_every_order(
    tiny, requests, order, slots
):
    pool = SimpleCachePool.for_model(tiny.config, slots, 32)
    runs = run(tiny, requests, pool, order)
    assert list(runs) == [r.id for r in requests]
    for request in requests:
        assert runs[request.id].tokens == decode.recompute(tiny, request).tokens
    assert pool.assignment == {}


def ticks(runs):
    return {name: [s.tick for s in ran.steps] for name, ran in runs.items()}


def test_a_seed_replays_the_same_schedule_and_another_seed_another_one(tiny, requests):
    first, again, other = (
        ticks(run(tiny, requests, PrivatePool(tiny.config), seed)) for seed in (3, 3, 4)
    )
    assert first == again
    assert first != other


def test_round_robin_moves_everybody_one_step_in_turn(tiny):
    a, b = prompt("a", 3, 0, 3), prompt("b", 3, 1, 3)
    runs = run(tiny, [a, b], PrivatePool(tiny.config), "round_robin")
    assert ticks(runs) == {"a": [0, 2, 4], "b": [1, 3, 5]}


def test_serial_finishes_one_before_the_next_one_starts(tiny):
    a, b = prompt("a", 3, 0, 3), prompt("b", 3, 1, 3)
    runs = run(tiny, [a, b], PrivatePool(tiny.config), "serial")
    assert ticks(runs) == {"a": [0, 1, 2], "b": [3, 4, 5]}


def test_a_batch_moves_together(tiny):
    some = [prompt(n, 3, i, 3) for i, n in enumerate("abc")]
    runs = run(tiny, some, PrivatePool(tiny.config), "round_robin", batch_size=3)
    assert ticks(runs) == {name: [0, 1, 2] for name in "abc"}


def test_stop_tokens_end_an_answer_early(tiny):
    request = prompt("a", 5, 0)
    full = decode.recompute(tiny, request).tokens
    stopped = type(request)("a", request.tokens, 8, stop_tokens=(full[2],))
    expected = full[: full.index(full[2]) + 1]
    assert run(tiny, [stopped], PrivatePool(tiny.config))["a"].tokens == expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"order": "sideways"}, "unknown order"),
        ({"batch_size": 0}, "batch_size"),
        ({"requests": [prompt("a", 3, 0), prompt("a", 4, 1)]}, "unique"),
    ],
)
def test_bad_input_is_refused_before_anything_is_admitted(tiny, change, message):
    pool = SimpleCachePool.for_model(tiny.config, 2, 32)
    arguments = {"requests": [prompt("a", 3, 0)]} | change
    with pytest.raises(ValueError, match=message):
        run(tiny, pool=pool, **arguments)
    assert all(s.generation == 0 for s in pool.slots)


class NoRoom(PrivatePool):
    def admit(self, request):
        raise PoolFull("never")


@pytest.mark.parametrize("order", ["serial", "round_robin", 5])
def test_a_request_that_an_empty_pool_refuses_is_an_error_and_not_an_endless_wait(tiny, order):
    with pytest.raises(PoolFull, match="empty pool"):
        run(tiny, [prompt("a", 3, 0)], NoRoom(tiny.config), order)


def test_an_error_in_the_middle_gives_all_leases_back(tiny, monkeypatch):
    pool = SimpleCachePool.for_model(tiny.config, 2, 32)
    too_long = prompt("b", 30, 1, 8)
    with pytest.raises(ValueError, match="needs 37 rows"):
        run(tiny, [prompt("a", 3, 0), too_long], pool, "round_robin")
    assert pool.assignment == {}
