"""What a fault is: a pool with one method that is wrong, and what is known about it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

from transformers import PretrainedConfig

from kvlab.pools import SimpleCachePool, TieredCachePool
from kvlab.request import Request

Kind = Literal["stale state", "key", "lifetime", "position", "layout", "scale"]
"""The classes. stale state: something outlives its request. key: two contexts get one key.
lifetime: rows are freed, given, published, read or written at the wrong moment. position: a wrong
offset, position, or table. layout: heads, keys and values, or strides read as something else.
scale: the scale of quantised rows is missing, old, or another's."""

PoolType = type[SimpleCachePool] | type[TieredCachePool]
P = TypeVar("P", bound=PoolType)

CATALOGUE: dict[str, PoolType] = {}
"""Every named fault. Each has `name`, `kind` and `reports` (numbers of the list in notebook 06)."""


def fault(name: str, kind: Kind, reports: Sequence[str] = ()) -> Callable[[P], P]:
    """Put a pool into the catalogue.

    Args:
        reports: Public reports of this mistake, such as "vLLM #3264"; empty where none is known.
    """

    def register(pool_type: P) -> P:
        if name in CATALOGUE:
            raise ValueError(f"the catalogue has a fault {name!r} already")
        if not pool_type.__doc__:
            raise ValueError(f"fault {name!r} needs a docstring: report, symptom, evidence")
        pool_type.name, pool_type.kind, pool_type.reports = name, kind, tuple(reports)  # type: ignore[union-attr]
        CATALOGUE[name] = pool_type
        return pool_type

    return register


def make_pool(
    pool_type: PoolType, config: PretrainedConfig, **options: Any
) -> SimpleCachePool | TieredCachePool:
    """A pool of a size that shows every fault: ten slots of 96 rows, or 64 blocks of 4."""
    if issubclass(pool_type, SimpleCachePool):
        return pool_type.for_model(config, num_slots=10, max_seq_len=96, **options)
    return pool_type.for_model(config, num_blocks=64, block_size=4, **options)


class Delayed:
    """A pool that leaves some of its work for later: a queue, a second thread, a transfer.

    Each job is released by a number of further operations (admissions, writes, releases), so that
    an order of steps replays the race exactly. A lock that covers every writer waits for the jobs:
    `settle`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.jobs: list[tuple[int, Callable[[], None]]] = []

    def later(self, operations: int, job: Callable[[], None]) -> None:
        """Do `job` when so many operations have gone by."""
        self.jobs.append((operations, job))

    def log(self, kind: str, request: Request | None, *rest: Any) -> None:
        """Every logged admission, write and release lets time go by for the jobs."""
        super().log(kind, request, *rest)  # type: ignore[misc]
        if kind in ("admit", "write", "release"):
            waiting, self.jobs = self.jobs, []
            due = [job for left, job in waiting if left <= 1]
            self.jobs += [(left - 1, job) for left, job in waiting if left > 1]
            for job in due:
                job()

    def settle(self) -> None:
        """Do now what was left for later."""
        while self.jobs:
            self.jobs.pop(0)[1]()
