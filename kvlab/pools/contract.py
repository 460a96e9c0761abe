"""What a cache pool must offer, so that anybody's pool fits: two methods and a lease."""

from __future__ import annotations

from typing import NamedTuple, Protocol, runtime_checkable

from transformers import Cache

from kvlab.request import Request


class PoolFull(RuntimeError):
    """No room for another request now; nothing was written. Release one and try again."""


@runtime_checkable
class Lease(Protocol):
    """The right of one request to read and write rows of a pool.

    Attributes:
        cache: The transformers `Cache` through which a model reads and writes these rows.
        num_cached_tokens: Prompt tokens that are there already at admission (a prefix hit), else 0.
    """

    cache: Cache
    num_cached_tokens: int


class Owner(NamedTuple):
    """Who wrote a row last: request, how often its slot had been handed out, position, token id.

    `token` is -1 where the writer did not say which token it wrote.
    """

    request: str
    generation: int
    position: int
    token: int


@runtime_checkable
class OwnedLease(Lease, Protocol):
    """A lease of a pool that records owners: an optional extra.

    Both lists have one entry for each row that the lease holds, in the order in which it reads.
    """

    def owners(self) -> list[Owner | None]:
        """Who wrote each row last; `None` if nobody has."""
        ...

    def foreign(self) -> list[bool]:
        """Whether the row is neither the reader's own (same request and generation) nor part of a
        finished prefix that the lease grants. A row of a shared slot is foreign once somebody else
        has written it, although the lease names it."""
        ...


@runtime_checkable
class CachePool(Protocol):
    """Memory for keys and values that requests share.

    Optional extras, each told by its name: `batch(leases, counts, shared)` (the pool's own view of
    several leases), `events` (a log of every operation), `settle()` (finish whatever was left to be
    done later, so that a lock can cover it), and ownership (`OwnedLease`). Who needs one that is
    missing reports "cannot see", never "clean".
    """

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
