"""Faults of forks, truncations and parking change an answer; the right pools change none."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from conftest import prompt

from kvlab.decode import recompute
from kvlab.faults import EXTRAS, bug, make_pool
from kvlab.interleave import moves, replay
from kvlab.observe import EventLog, OwnershipGuard, conflicts
from kvlab.pools import PoolForEach, QuantisedSlotPool, SimpleCachePool, TieredCachePool
from kvlab.request import Request
from kvlab.schedule import run

# "fork": A has written its prompt and two tokens, then B goes on otherwise.
ORDERS = {
    "fork": "A A A A A>B A B A B A B A B A B A B",
    "fork, then the first leaves": "A A A A A>B A! B B C C C C B C B C B",
    "truncate": "A A A A A<2 A A A A A A",
    "truncate into a fork": "A A A A>B B B A<7 A C C A C A C A B A B A B C B C",
    "truncate all, with a neighbour": "A A A B B A<30 A B A B A A A A B A B",
    "park": "A A A A~ B B B A B A B B A A A A A A B",
    "park and come back to a fresh place": "A A A A~ B B B B C C C A C A C B A B A A A",
    "park beside a stranger": "A A A A~ C C C C A A A",
    "park and truncate": "A A A A~ B B A A<3 A B A B A A A",
}


def reference(model, pool_type, request):
    """The right tokens: of a recompute, or of the request alone where codes round."""
    if not getattr(pool_type, "rounds", False):
        return recompute(model, request).tokens
    alone = PoolForEach(lambda: make_pool(QuantisedSlotPool, model.config))
    return run(model, [request], alone)[request.id].tokens


def wrong(model, pool_type):
    """In which orders an answer is another than the right one."""
    a, c = prompt("A", 9, 1, 6), prompt("C", 14, 3, 6)
    written = reference(model, pool_type, a)[:2]
    requests = [a, Request("B", (*a.tokens, *written, 7, 8), 6), c]
    answers = {r.id: reference(model, pool_type, r) for r in requests}
    found = []
    for name, order in ORDERS.items():
        runs = replay(
            model, requests, make_pool(pool_type, model.config), moves(order + " A B C" * 12)
        )
        ended = {r: x.tokens for r, x in runs.items() if x.finished}
        assert len(ended) == 3, f"{name}: not all came to their end"
        if any(answers[r] != tokens for r, tokens in ended.items()):
            found.append(name)
    return found


@pytest.mark.parametrize("pool_type", [SimpleCachePool, TieredCachePool])
@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_the_logs_of_right_pools_contradict_nothing(tiny, pool_type, order):
    a, c = prompt("A", 9, 1, 6), prompt("C", 14, 3, 6)
    b = Request("B", (*a.tokens, *recompute(tiny, a).tokens[:2], 7, 8), 6)
    pool, guard = make_pool(pool_type, tiny.config), OwnershipGuard()
    pool.events = EventLog()
    replay(tiny, [a, b, c], pool, moves(order), [guard])
    assert conflicts(pool.events.events) == []
    assert guard.verdict == "clean"


@pytest.mark.parametrize("pool_type", [SimpleCachePool, TieredCachePool, QuantisedSlotPool])
def test_right_pools_give_the_right_answers_in_every_order(tiny, pool_type):
    assert wrong(tiny, pool_type) == []


# The stale hash needs a rewritten prompt, which a schedule of requests does not do; the tree needs
# four prompts. Both have tests of their own.
OTHERS = {"truncate keeps the hash", "walks on after a split"}


@pytest.mark.parametrize("name", sorted(EXTRAS.keys() - OTHERS))
def test_a_fault_of_an_extra_changes_an_answer(tiny, name):
    assert wrong(tiny, EXTRAS[name]), name


@pytest.mark.parametrize("name", EXTRAS)
def test_every_fault_shows_its_wrong_line(name):
    assert "BUG" in bug(EXTRAS[name])


@pytest.mark.parametrize("name", [None, "truncate keeps the hash"])
def test_a_prompt_that_was_rewritten_is_found_by_the_stale_hash_only(tiny, name):
    """A prompt is taken back and another written, unannounced; then the first one comes again."""
    pool = make_pool(EXTRAS[name] if name else TieredCachePool, tiny.config)
    first = prompt("first", 12, 5, 3)
    lease = pool.admit(first)
    lease.announce(list(first.tokens))
    feed(lease, first.tokens)
    pool.truncate(lease, 0)
    feed(lease, prompt("other", 12, 6).tokens)
    pool.blocks.evict(64)  # of what was stored before, nothing is left
    pool.release(lease)
    again = pool.admit(replace(first, id="again"))
    assert (again.num_cached_tokens > 0) == (name is not None)


def feed(lease, tokens):
    rows = torch.tensor(tokens).float()[None, None, :, None].expand(1, 2, -1, 8)
    for layer in lease.cache.layers:
        layer.update(rows, rows)
