"""The experiments: small scenes that one class of fault spoils and the others do not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedModel

from kvlab.dye import DyedModel, Misread, OverHit
from kvlab.interleave import Move, among, replay
from kvlab.observe.conflicts import Conflict, conflicts
from kvlab.pools.contract import PoolFactory, fresh
from kvlab.request import Context, Request
from kvlab.schedule import run
from kvlab.workloads import longest_request, most_requests, random_request


@dataclass
class Seen:
    """What one scene showed.

    Attributes:
        misreads: Wrong rows, see `kvlab.dye`.
        over_hits: Hits that are longer than any equal prefix.
        conflicts: What the pool's own event log contradicts; `None` where it keeps none.
        errors: What the pool raised in correct use.
        hits: Prompt tokens that the pool said were there, all requests together.
    """

    misreads: list[Misread] = field(default_factory=list)
    over_hits: list[OverHit] = field(default_factory=list)
    conflicts: list[Conflict] | None = None
    errors: list[str] = field(default_factory=list)
    hits: int = 0

    @property
    def wrong(self) -> bool:
        return bool(self.misreads or self.over_hits)

    def __add__(self, other: Seen) -> Seen:
        logs = [c for c in (self.conflicts, other.conflicts) if c is not None]
        return Seen(
            self.misreads + other.misreads,
            self.over_hits + other.over_hits,
            [c for log in logs for c in log] if logs else None,
            self.errors + other.errors,
            self.hits + other.hits,
        )

    @property
    def first(self) -> str:
        """The first thing that was wrong, in words."""
        found = [*self.over_hits, *self.misreads, *self.errors]
        return str(found[0]) if found else "nothing wrong"


class Stage:
    """Sets up pools and requests of fitting sizes, and plays scenes with dyed rows.

    Args:
        factory: Gives a fresh pool at every call.
        model: Its configuration gives the shapes; the scenes themselves compute nothing.

    Attributes:
        rows: The longest request that a fresh pool admits, in rows (at most 192).
        room: How many requests of 24 rows it admits at once (at most 24).
    """

    def __init__(self, factory: PoolFactory, model: PreTrainedModel) -> None:
        self.factory, self.model = factory, model
        self.config = model.config
        self.vocab = int(self.config.get_text_config().vocab_size)
        self.rows = longest_request(factory, self.config, 192)
        self.small = min(24, self.rows)
        self.room = most_requests(factory, self.config, self.small, 24)

    def request(
        self, id: str, length: int, seed: int, new: int = 4, context: Context = ()
    ) -> Request:
        """A random prompt of `length` tokens, see `random_request`."""
        return random_request(id, length, seed, self.vocab, new, context)

    def fits(self, *requests: Request) -> list[Request]:
        """Those that are not too long for this pool."""
        return [r for r in requests if r.rows_needed <= self.rows]

    def play(self, *scenes: Callable[[DyedModel], Any], apart: bool = True) -> Seen:
        """Play scenes one after another on one fresh pool, and collect what was wrong."""
        dyed = DyedModel(
            fresh(self.factory, self.config),
            self.config,
            self.model.dtype,
            self.model.device,
            apart,
        )
        seen = Seen()
        for scene in scenes:
            try:
                scene(dyed)
            except Exception as error:  # a faulty pool may raise anything at all
                seen.errors.append(f"{type(error).__name__}: {error}")
        seen.misreads, seen.over_hits = dyed.misreads, dyed.over_hits
        seen.hits = sum(life.lease.num_cached_tokens for life in dyed.all_lives)
        log = getattr(dyed.pool, "events", None)
        if log is not None:
            seen.conflicts = conflicts(log.events)
        return seen

    def serial(self, requests: Sequence[Request]) -> Callable[[DyedModel], Any]:
        """One after another; names may come back."""

        def scene(dyed: DyedModel) -> None:
            for request in self.fits(*requests):
                run(dyed, [request], dyed.pool, "serial", observers=[dyed])

        return scene

    def moves(
        self,
        requests: Sequence[Request],
        order: Sequence[Move],
        lock: bool = False,
        chunk: int | None = None,
    ) -> Callable[[DyedModel], Any]:
        """Move by move."""

        kept = self.fits(*requests)
        moves = among(order, [r.id for r in kept])

        def scene(dyed: DyedModel) -> None:
            replay(dyed, kept, dyed.pool, moves, [dyed], lock, chunk)

        return scene
