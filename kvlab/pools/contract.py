"""What a cache pool must offer, so that anybody's pool fits: two methods and a lease.

Everything else is an extra, and each has a protocol here: who needs one asks with `isinstance`, and
reports "cannot see" or "not exercised" where it is missing, never "clean".
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from transformers import Cache, PretrainedConfig

from kvlab.pools.events import EventLog
from kvlab.request import Request


class PoolFull(RuntimeError):
    """No room now; nothing was written. Release a request and try again."""


@runtime_checkable
class Lease(Protocol):
    """The right of one request to read and write rows of a pool.

    Attributes:
        cache: The transformers `Cache` through which a model reads and writes these rows.
        num_cached_tokens: Prompt tokens that are there already at admission (a prefix hit, or what
            a fork took over), else 0.
    """

    cache: Cache
    num_cached_tokens: int


@runtime_checkable
class CachePool(Protocol):
    """Memory for keys and values that requests share."""

    def admit(self, request: Request) -> Lease:
        """Give `request` rows of its own.

        Raises:
            PoolFull: No room now. Nothing was written.
            ValueError: The request can never be served. Nothing was written.
        """
        ...

    def release(self, lease: Lease) -> None:
        """Take the rows back, at the end of a request or at its abort, at any step."""
        ...


class Owner(NamedTuple):
    """Who wrote a row last: request, the number of its admission, position, token id.

    `token` is -1 where the writer did not say which token it wrote.
    """

    request: str
    generation: int
    position: int
    token: int


@runtime_checkable
class OwnedLease(Lease, Protocol):
    """Extra: a lease of a pool that records owners.

    Both lists have one entry for each row that the lease holds, in the order in which it reads.
    """

    def owners(self) -> list[Owner | None]:
        """Who wrote each row last; `None` if nobody has."""
        ...

    def foreign(self) -> list[bool]:
        """Whether the row is neither the reader's own (same request and generation) nor part of a
        finished prefix, or of a fork, that the lease grants. A row of a shared slot is foreign once
        somebody else has written it, although the lease names it."""
        ...


@runtime_checkable
class AnnouncedLease(Lease, Protocol):
    """Extra: a lease that wants to know which tokens the next forward pass writes."""

    def announce(self, tokens: list[int]) -> None: ...


@runtime_checkable
class Batches(Protocol):
    """Extra: a pool with its own view of several leases as one cache."""

    def batch(self, leases: Sequence[Any], counts: Sequence[int], shared: bool) -> Cache | None:
        """The leases as the cache of one forward pass; lease `b` brings `counts[b]` tokens.

        `None` where a lone lease is its own best cache. `shared`: a common prefix may be handed to
        attention apart from the rest, so that it is read once.
        """
        ...


@runtime_checkable
class Settles(Protocol):
    """Extra: a pool that leaves work for later, and can be told to finish it now, so that a lock
    can cover it."""

    def settle(self) -> None: ...


@runtime_checkable
class Logs(Protocol):
    """Extra: a pool that records every operation once it is given a log."""

    events: EventLog | None


@runtime_checkable
class Forks(Protocol):
    """Extra: parallel answers and beams."""

    def fork(self, lease: Any, request: Request) -> Lease:
        """Another continuation of the same rows.

        `request.tokens` are those that `lease` has written so far, prompt and answer, and whatever
        follows; at least the last one is left to compute. Rows are shared, and whoever writes into
        them first copies them; a pool that cannot share copies at once. The rows taken over are not
        foreign.

        Raises:
            PoolFull: No room now. Nothing was written.
            ValueError: Other tokens, another context, a name that is taken, or a lease that is
                parked or was given back. Nothing was written.
        """
        ...


@runtime_checkable
class Truncates(Protocol):
    """Extra: rows can be taken back, as rejected speculative tokens are."""

    def truncate(self, lease: Any, length: int) -> None:
        """Keep the first `length` rows; the next write starts behind them.

        Only this view gets shorter: rows that others read are neither freed nor overwritten, and
        the next write into them copies first. That copy needs a block, which was not set aside at
        admission: in a full pool the write raises `PoolFull`, before anything is written.

        Raises:
            ValueError: More rows than there are, fewer than none, or a lease that is parked or was
                given back.
        """
        ...


@runtime_checkable
class Parks(Protocol):
    """Extra: preemption, with the rows moved to host memory and back."""

    def park(self, lease: Any) -> None:
        """Move the rows out and give their places back. A parked lease can be resumed or released.

        Raises:
            ValueError: It is parked already, or was given back.
        """
        ...

    def resume(self, lease: Any) -> None:
        """Move the rows back, to whatever places are free; they keep their owners.

        Raises:
            PoolFull: No room now; it stays parked.
            ValueError: It is not parked.
        """
        ...


PoolFactory = Callable[..., CachePool]
"""`factory(config)`, or `factory()`: a fresh pool at every call."""


def fresh(factory: PoolFactory, config: PretrainedConfig) -> CachePool:
    """A new pool from a factory, with or without the model's configuration as argument."""
    try:
        inspect.signature(factory).bind(config)
    except TypeError:
        return factory()
    except ValueError:  # a builtin without a signature
        pass
    return factory(config)
