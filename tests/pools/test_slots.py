import pytest
import torch
from conftest import prompt
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab import decode
from kvlab.pools import CachePool, Lease, PoolFull, PrivatePool, SimpleCachePool
from kvlab.request import Request
from kvlab.schedule import run


def make(slots: int = 2, rows: int = 32) -> SimpleCachePool:
    return SimpleCachePool(num_slots=slots, num_layers=3, num_heads=2, head_dim=8, max_seq_len=rows)


def snapshot(pool: SimpleCachePool) -> tuple:
    return (
        dict(pool.assignment),
        [(s.length, s.generation) for s in pool.slots],
        pool.arena.key.clone(),
    )


def same(a: tuple, b: tuple) -> bool:
    return a[:2] == b[:2] and torch.equal(a[2], b[2])


def test_a_slot_has_the_shape_layers_heads_rows_head_dim():
    pool = make(slots=3, rows=20)
    assert len(pool.slots) == 3
    for slot in pool.slots:
        assert slot.key.shape == slot.value.shape == (3, 2, 20, 8)
        assert slot.length == 0
    assert pool.arena.nbytes == 2 * 3 * 3 * 2 * 20 * 8 * 4


def test_both_pools_fit_the_contract(tiny):
    for pool in (make(), PrivatePool(tiny.config)):
        assert isinstance(pool, CachePool)
        assert isinstance(pool.admit(prompt("a", 3, 0)), Lease)


@pytest.mark.parametrize(
    "size", ["num_slots", "num_layers", "num_heads", "head_dim", "max_seq_len"]
)
def test_a_pool_without_extent_is_refused(size):
    sizes = {"num_slots": 1, "num_layers": 1, "num_heads": 1, "head_dim": 1, "max_seq_len": 1}
    with pytest.raises(ValueError, match="at least 1"):
        SimpleCachePool(**(sizes | {size: 0}))


def test_a_full_pool_refuses_before_anything_is_written():
    pool = make(slots=1)
    pool.admit(prompt("a", 3, 0))
    before = snapshot(pool)
    with pytest.raises(PoolFull, match="release a request"):
        pool.admit(prompt("b", 3, 0))
    assert same(snapshot(pool), before)


def test_a_request_longer_than_a_slot_is_refused_before_anything_is_written():
    pool = make(rows=10)
    before = snapshot(pool)
    with pytest.raises(ValueError, match="needs 11 rows"):
        pool.admit(prompt("a", 4, 0, max_new_tokens=8))
    assert same(snapshot(pool), before)
    pool.admit(prompt("a", 3, 0, max_new_tokens=8))  # exactly full


def test_a_request_id_is_admitted_once():
    pool = make()
    pool.admit(prompt("a", 3, 0))
    with pytest.raises(ValueError, match="already admitted"):
        pool.admit(prompt("a", 3, 0))


def test_a_lease_is_released_once():
    pool = make()
    lease = pool.admit(prompt("a", 3, 0))
    pool.release(lease)
    with pytest.raises(KeyError, match="released twice"):
        pool.release(lease)


def test_unknown_kinds_of_collision_are_refused():
    pool = make()
    with pytest.raises(ValueError, match="'overwrite' or 'append'"):
        pool.collide("b", "a", "sideways")
    with pytest.raises(ValueError, match="itself"):
        pool.collide("a", "a", "append")


def test_every_row_knows_request_generation_position_and_token(tiny):
    a, b = prompt("a", 4, 0, max_new_tokens=3), prompt("b", 2, 1, max_new_tokens=2)
    pool = SimpleCachePool.for_model(tiny.config, 1, 32)
    runs = run(tiny, [a, b], pool, "serial")
    owners = pool.slots[0].owners
    assert [o.token for o in owners[:3]] == [*b.tokens, runs["b"].tokens[0]]
    assert {(o.request, o.generation) for o in owners[:3]} == {("b", 2)}
    # Behind them lie the rows of the request before, still signed by it.
    assert [o.token for o in owners[3:6]] == [a.tokens[3], *runs["a"].tokens[:2]]
    assert {(o.request, o.generation) for o in owners[3:6]} == {("a", 1)}
    assert [o.position for o in owners[:6]] == list(range(6))
    assert owners[6] is None


def test_overwriting_harms_the_first_request_only(tiny):
    a, b = prompt("a", 6, 0), prompt("b", 6, 1)
    pool = SimpleCachePool.for_model(tiny.config, 2, 64)
    pool.collide("b", "a", "overwrite")
    runs = run(tiny, [a, b], pool, "round_robin")
    assert runs["a"].tokens != decode.recompute(tiny, a).tokens
    assert runs["b"].tokens == decode.recompute(tiny, b).tokens


def test_appending_harms_the_second_request_only(tiny):
    a, b = prompt("a", 6, 0), prompt("b", 6, 1)
    pool = SimpleCachePool.for_model(tiny.config, 2, 64)
    pool.collide("b", "a", "append")
    runs = run(tiny, [a, b], pool, "round_robin")
    assert runs["a"].tokens == decode.recompute(tiny, a).tokens
    assert runs["b"].tokens != decode.recompute(tiny, b).tokens
    assert runs["b"].steps[0].start == 6


def test_a_stale_length_needs_no_concurrency(tiny):
    a, b = prompt("a", 6, 0), prompt("b", 6, 1)
    pool = SimpleCachePool.for_model(tiny.config, 2, 64)
    pool.collide("b", "a", "append")
    runs = run(tiny, [a, b], pool, "serial")
    assert runs["b"].steps[0].start == a.rows_needed
    assert runs["b"].tokens != decode.recompute(tiny, b).tokens


def test_a_collision_with_somebody_who_was_never_here_gives_a_free_slot(tiny):
    b = prompt("b", 6, 1)
    pool = SimpleCachePool.for_model(tiny.config, 2, 64)
    pool.collide("b", "a", "append")
    assert run(tiny, [b], pool)["b"].tokens == decode.recompute(tiny, b).tokens


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5)), max_size=30))
def test_no_sequence_of_admissions_and_releases_gives_one_slot_to_two(actions):
    pool, held = make(slots=3), {}
    for admit, number in actions:
        name = f"r{number}"
        if admit and name not in held:
            if len(held) == 3:
                with pytest.raises(PoolFull):
                    pool.admit(Request(name, (1, 2), 4))
            else:
                held[name] = pool.admit(Request(name, (1, 2), 4))
                assert held[name].cache.get_seq_length() == 0
        elif not admit and name in held:
            pool.release(held.pop(name))
        slots = [pool.assignment[n] for n in held]
        assert len(set(slots)) == len(slots) == len(pool.assignment)
