"""What a pool writes into its log: one record for every operation on the cache."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from kvlab.request import Context

EventKind = Literal[
    "admit", "hit", "fork", "write", "read", "copy", "truncate", "spare", "park", "resume",
    "release", "reset", "evict",
]  # fmt: skip


@dataclass(frozen=True)
class Event:
    """One operation of one request on some rows.

    Row `r` of a request lies in the place (slot or block) that holds its rows from
    `r - r % size` on, at offset `r % size`. `places` lists the places of the rows
    `start` to `start + length - 1` in this order.

    Attributes:
        kind: admit: `places` are given to the request, its write pointer stands at `start`.
            hit, fork: `length` rows of a finished prefix, or of another request, are granted, from
            row 0 on.
            write, read: of `length` rows from `start` on.
            truncate: the rows from `start` on are taken back; the places stay.
        spare: the request gives back `places` that it turned out not to need.
        park, resume: `length` rows leave all `places`, and come back to others.
        release: the request gives back all its `places`.
            reset: the length of a place was set to 0.
            evict: a stored prefix was dropped from `places`.
            copy: `length` rows of `places[0]` were copied to `places[1]`, for row `start`.
        request: Id of the request; empty where the pool acts on its own (evict).
        places: Ids of slots or blocks.
        start: First row, counted within the request.
        length: Number of rows.
        size: Rows in a place.
        time: Monotonic clock, nanoseconds.
        step: Logical clock: the number of the record.
        tokens: Token ids of the rows, where they are known.
        context: What else the rows depend on, see `Request.context`.
    """

    kind: EventKind
    request: str
    places: tuple[int, ...]
    start: int
    length: int
    size: int
    time: int
    step: int
    tokens: tuple[int, ...] | None = None
    context: Context = ()


@dataclass
class EventLog:
    """The records of one pool, oldest first. Give it to a pool as `pool.events`."""

    events: list[Event] = field(default_factory=list)

    def record(
        self,
        kind: EventKind,
        request: str,
        places: Sequence[int],
        start: int,
        length: int,
        size: int,
        tokens: Sequence[int] | None = None,
        context: Context = (),
    ) -> None:
        """Append one record with both clocks."""
        known = None if tokens is None or -1 in tokens else tuple(tokens)
        now, step = time.monotonic_ns(), len(self.events)
        self.events.append(
            Event(kind, request, tuple(places), start, length, size, now, step, known, context)
        )
