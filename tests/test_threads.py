"""Real threads over the same steps."""

from __future__ import annotations

import pytest
from conftest import prompt

from kvlab.decode import recompute
from kvlab.faults import CATALOGUE
from kvlab.pools import SimpleCachePool
from kvlab.threads import run_threads

REQUESTS = [prompt("a", 6, 0, 6), prompt("b", 9, 1, 6)]


@pytest.mark.parametrize("lock", ["none", "admit", "operation", "request"])
def test_a_correct_pool_needs_no_lock_around_forward_passes(tiny, lock):
    pool = SimpleCachePool.for_model(tiny.config, 2, 32)
    runs = run_threads(tiny, REQUESTS, pool, lock)
    for request in REQUESTS:
        assert runs[request.id].tokens == recompute(tiny, request).tokens


@pytest.mark.parametrize("lock", ["operation", "request"])
def test_a_lock_that_covers_every_writer_ends_the_race(tiny, lock):
    wanted = {r.id: recompute(tiny, r).tokens for r in REQUESTS}
    for _ in range(10):
        pool = CATALOGUE["check then take"].for_model(tiny.config, 2, 32)
        runs = run_threads(tiny, REQUESTS, pool, lock)
        assert {name: run.tokens for name, run in runs.items()} == wanted


def test_an_error_of_a_thread_reaches_the_caller_and_nothing_is_left(tiny):
    pool = SimpleCachePool.for_model(tiny.config, 1, 32)
    pool.admit(prompt("other", 3, 2))
    with pytest.raises(RuntimeError, match="no room"):
        run_threads(tiny, REQUESTS, pool)
    assert list(pool.assignment) == ["other"]


def test_unknown_lock_is_refused(tiny):
    with pytest.raises(ValueError, match="unknown lock"):
        run_threads(tiny, REQUESTS, SimpleCachePool.for_model(tiny.config, 2, 32), "half")
