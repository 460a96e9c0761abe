"""The same small steps on real threads: the operating system decides the order."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from typing import Literal, get_args

from transformers import PreTrainedModel

from kvlab.pools.contract import CachePool
from kvlab.request import Request, Run
from kvlab.schedule import Executor

Lock = Literal["none", "admit", "operation", "request"]
LOCKS = get_args(Lock)
"""What one lock covers. none: nothing. admit: admissions, and nothing that they leave for later: a
lock that lies. operation: every operation, until all that it left for later is done. request: a
whole life, from admission to release, so that requests come one after another."""


def run_threads(
    model: PreTrainedModel, requests: Sequence[Request], pool: CachePool, lock: Lock = "none"
) -> dict[str, Run]:
    """Serve each request on a thread of its own; all of them start at once.

    Raises:
        ValueError: An unknown lock, or two requests with one id.
        Exception: Whatever a thread raised first; the others have come to their end by then.
    """
    if lock not in LOCKS:
        raise ValueError(f"unknown lock {lock!r}; use one of {', '.join(LOCKS)}")
    ids = [r.id for r in requests]
    if len(set(ids)) < len(ids):
        raise ValueError(f"request ids must be unique, got {ids}")
    mutex = threading.Lock()
    nothing = contextlib.nullcontext()
    life = mutex if lock == "request" else nothing
    operation = mutex if lock == "operation" else nothing
    admission = mutex if lock in ("admit", "operation") else nothing
    executor = Executor(model, pool, lock=lock in ("operation", "request"))
    start = threading.Barrier(len(requests))
    runs = {r.id: Run(r) for r in requests}
    errors: list[Exception] = []

    def serve(run: Run) -> None:
        start.wait()
        try:
            with life:
                with admission:
                    if not executor.admit(run):
                        raise RuntimeError(f"no room for {run.request.id!r}: give each a slot")
                new = list(run.request.tokens[run.num_cached_tokens :])
                while not run.finished:
                    with operation:
                        executor.forward([run], [new])
                    new = run.tokens[-1:]
                with operation:
                    executor.release(run)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=serve, args=(run,)) for run in runs.values()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    executor.release_all()
    if errors:
        raise errors[0]
    return runs
