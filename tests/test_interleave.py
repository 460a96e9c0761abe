"""Orders of small steps: what a move does, and that an order can be replayed."""

from __future__ import annotations

import itertools
import math

import pytest
from conftest import prompt

from kvlab.decode import recompute
from kvlab.interleave import Move, interleavings, moves, replay, shuffled, steps_of
from kvlab.pools import PrivatePool, SimpleCachePool, TieredCachePool


def test_moves_are_read_from_a_line():
    assert moves("a a+b b!") == [Move(("a",)), Move(("a", "b")), Move(("b",), "abort")]
    assert " ".join(map(str, moves("a a+b b!"))) == "a a+b b!"
    more = "a* . a~ a>b a<12"
    assert moves(more) == [
        Move(("a",), "whole"),
        Move((), "settle"),
        Move(("a",), "park"),
        Move(("a", "b"), "fork"),
        Move(("a",), "truncate", 12),
    ]
    assert " ".join(map(str, moves(more))) == more


@pytest.mark.parametrize(
    "word", ["+b", "a>", ">b", "a+b>c", "a<", "a<x", "a<0", "a+b<1", "a!b", "a~~"]
)
def test_moves_that_cannot_be_read_are_named(word):
    with pytest.raises(ValueError, match="cannot read"):
        moves(f"a {word}")


def test_two_lives_of_five_steps_have_252_interleavings():
    orders = list(interleavings("a", "b", 5))
    assert len(orders) == math.comb(10, 5) == 252
    assert len({tuple(o) for o in orders}) == 252


def test_any_interleaving_on_a_correct_pool_gives_the_reference(tiny):
    requests = [prompt("a", 5, 0, 3), prompt("b", 7, 1, 3)]
    wanted = {r.id: recompute(tiny, r).tokens for r in requests}
    for order in itertools.islice(interleavings("a", "b", 5), 0, 252, 25):
        runs = replay(tiny, requests, SimpleCachePool.for_model(tiny.config, 2, 32), order)
        assert {name: run.tokens for name, run in runs.items()} == wanted


@pytest.mark.parametrize("chunk", [1, 2, 3, 6, 7])
def test_chunked_prefill_gives_the_reference(tiny, chunk):
    request = prompt("a", 7, 3, 4)
    for pool in (
        SimpleCachePool.for_model(tiny.config, 1, 32),
        TieredCachePool.for_model(tiny.config, 8, block_size=4),
        PrivatePool(tiny.config),
    ):
        order = [Move(("a",))] * steps_of(request, chunk)
        run = replay(tiny, [request], pool, order, chunk=chunk)["a"]
        assert run.tokens == recompute(tiny, request).tokens


def test_aborted_request_comes_back_under_its_name(tiny):
    request = prompt("a", 5, 0, 3)
    pool = SimpleCachePool.for_model(tiny.config, 1, 32)
    run = replay(tiny, [request], pool, moves("a a a a! a a a a a"))["a"]
    assert run.tokens == recompute(tiny, request).tokens
    assert not pool.assignment


def test_full_pool_keeps_a_request_outside_until_its_next_move(tiny):
    requests = [prompt("a", 5, 0, 2), prompt("b", 5, 1, 2)]
    pool = SimpleCachePool.for_model(tiny.config, 1, 32)
    runs = replay(tiny, requests, pool, moves("a b a b a b a b b b b"))
    assert runs["b"].tokens == recompute(tiny, requests[1]).tokens


def test_who_is_not_through_is_given_back(tiny):
    pool = SimpleCachePool.for_model(tiny.config, 1, 32)
    replay(tiny, [prompt("a", 5, 0, 8)], pool, moves("a a a"))
    assert not pool.assignment


def test_move_of_an_unknown_request_is_refused_before_anything_happens(tiny):
    with pytest.raises(ValueError, match="unknown requests: z"):
        replay(tiny, [prompt("a", 5, 0)], PrivatePool(tiny.config), moves("a z"))


def test_a_seed_replays_its_order():
    requests = [prompt("a", 5, 0), prompt("b", 5, 1)]
    assert shuffled(requests, 3) == shuffled(requests, 3)
    assert shuffled(requests, 3) != shuffled(requests, 4)
