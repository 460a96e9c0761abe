"""What a fault is: a pool with one method that is wrong, and what is known about it."""

from __future__ import annotations

import ast
import difflib
import inspect
import textwrap
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any, Literal, TypeVar

from transformers import PretrainedConfig

from kvlab.pools import BatchView, Lease, SimpleCachePool, TieredCachePool
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


def fault(
    name: str,
    kind: Kind,
    reports: Sequence[str] = (),
    catalogue: dict[str, PoolType] = CATALOGUE,
) -> Callable[[P], P]:
    """Put a pool into the catalogue.

    Args:
        reports: Public reports of this mistake, such as "vLLM #3264"; empty where none is known.
    """

    def register(pool_type: P) -> P:
        if name in catalogue:
            raise ValueError(f"the catalogue has a fault {name!r} already")
        if not pool_type.__doc__:
            raise ValueError(f"fault {name!r} needs a docstring: report, symptom, evidence")
        pool_type.name, pool_type.kind, pool_type.reports = name, kind, tuple(reports)  # type: ignore[union-attr]
        catalogue[name] = pool_type
        return pool_type

    return register


def make_pool(
    pool_type: PoolType, config: PretrainedConfig, **options: Any
) -> SimpleCachePool | TieredCachePool:
    """A pool of a size that shows every fault: ten slots of 96 rows, or 64 blocks of 4.

    `options` go to the pool, and may ask for other sizes.
    """
    if issubclass(pool_type, SimpleCachePool):
        return pool_type.for_model(config, **({"num_slots": 10, "max_seq_len": 96} | options))
    return pool_type.for_model(config, **({"num_blocks": 64, "block_size": 4} | options))


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

    def log(self, kind: str, request: Request | None, *rest: Any, **named: Any) -> None:
        """Every logged admission, write and release lets time go by for the jobs."""
        super().log(kind, request, *rest, **named)  # type: ignore[misc]
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


class OwnView(SimpleCachePool):
    """A slot pool that brings its own view of a batch, as tuned servers do."""

    view_type: type[BatchView] = BatchView

    def batch(self, leases: Sequence[Lease], counts: Sequence[int], shared: bool) -> Any:
        """The leases as one cache; `None` for a lone lease, which is a cache itself."""
        if len(leases) == 1:
            return None
        view = self.view_type(leases, counts)
        view.pool = self
        return view


def bug(pool_type: PoolType) -> str:
    """The method that is wrong, as a diff against the right one.

    It is a method of the pool itself, or of one of the parts that the pool is put together from.
    """
    for owner in [pool_type, *_parts(pool_type)]:
        for name, wrong in vars(owner).items():
            if not isinstance(wrong, (FunctionType, property)) or "BUG" not in _source(wrong):
                continue
            home = next((b for b in owner.__mro__[1:] if name in vars(b)), None)
            if home is None:  # a part of its own design
                return "\n".join([f"{owner.__name__}.{name}", *_body(wrong)])
            if "super()." in _source(wrong):  # it wraps the right one: a diff would hide that
                return "\n".join([f"{home.__name__}.{name}, wrapped", *_body(wrong)])
            right = _body(vars(home)[name])
            text = list(difflib.unified_diff(right, _body(wrong), n=30, lineterm=""))[3:]
            return "\n".join([f"{home.__name__}.{name}", *text])
    raise ValueError(f"{pool_type.__name__} marks no line with BUG")


def _parts(pool_type: PoolType) -> list[type]:
    """The classes that a faulty pool puts in the place of the right ones, and theirs."""
    parts: list[type] = []
    queue: list[type] = [pool_type]
    while queue:
        owner = queue.pop(0)
        new = [v for n, v in vars(owner).items() if n.endswith("_type") and isinstance(v, type)]
        parts += new
        queue += new
    return parts


def _source(method: FunctionType | property) -> str:
    function = method.fget if isinstance(method, property) else method
    return textwrap.dedent(inspect.getsource(function)) if function else ""


def _body(method: FunctionType | property) -> list[str]:
    """The lines of a method without its docstring."""
    lines = _source(method).splitlines()
    function = ast.parse("\n".join(lines)).body[0]
    if not isinstance(function, ast.FunctionDef) or ast.get_docstring(function) is None:
        return lines
    first = function.body[0]
    return [*lines[: first.lineno - 1], *lines[first.end_lineno :]]
