"""The workbench of the suite: it plays requests on a pool and judges every answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from transformers import PreTrainedModel

from kvlab.dye import Contract, common_prefix
from kvlab.interleave import Move, among, moves, replay
from kvlab.pools.contract import CachePool, Lease, PoolFactory, fresh
from kvlab.references import References
from kvlab.request import Context, Request, Run, known
from kvlab.schedule import run
from kvlab.workloads import longest_request, most_requests, random_request

Profile = Literal["quick", "full"]


LIMIT = 4096
"""A pool that admits a request of so many rows is taken to have no capacity."""


class NotApplicable(Exception):
    """The pool does not have the edge that a case asks for; the message says which."""


@dataclass(frozen=True)
class Play:
    """Requests that were on a pool together, and their order.

    Attributes:
        requests: In the order of their ids in `order`.
        order: The moves as a line, see `kvlab.interleave.moves`. "serial": one after another;
            "round_robin": all of them in one batch, who finds no room waits.
    """

    requests: tuple[Request, ...]
    order: str = "serial"
    chunk: int | None = None

    def on(self, pool: CachePool, model: PreTrainedModel) -> dict[str, Run]:
        """Play it."""
        if self.order == "serial":
            return run(model, self.requests, pool)
        if self.order == "round_robin":
            return run(model, self.requests, pool, "round_robin", len(self.requests))
        return replay(model, self.requests, pool, moves(self.order), chunk=self.chunk)


@dataclass(frozen=True)
class Failure:
    """One wrong answer, and what is needed to see it again.

    Attributes:
        case: Name of the case.
        request: Id of the request.
        why: What was wrong, in words.
        plays: Everything that was on the pool, oldest first; the last one went wrong.
        token: The first generated token that differs, counted from 1; `None` if none does.
        margin: The reference's top-1 minus top-2 logit there.
    """

    case: str
    request: str
    why: str
    plays: tuple[Play, ...] = ()
    token: int | None = None
    margin: float | None = None

    @property
    def order(self) -> str:
        """The moves of the play that went wrong."""
        return self.plays[-1].order if self.plays else ""

    def __str__(self) -> str:
        where = f", first at token {self.token} (margin {self.margin:.2g})" if self.token else ""
        order = self.order if len(self.order) < 60 else self.order[:57] + "..."
        before = f" behind {len(self.plays) - 1} others" if len(self.plays) > 1 else ""
        return f"{self.case}: {self.request!r} {self.why}{where}; order: {order}{before}"

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def play_again(
    failure: Failure, pool_factory: PoolFactory, model: PreTrainedModel
) -> dict[str, Run]:
    """Play a failure once more on a fresh pool; the runs of the play that went wrong."""
    pool = fresh(pool_factory, model.config)
    runs: dict[str, Run] = {}
    for play in failure.plays:
        runs = play.on(pool, model)
    return runs


class Bench:
    """Fresh pools, fitting requests, and the judge.

    Args:
        block_size: Rows in a block, where the edges of a prefix lie.
        max_requests: Requests at once; found out (up to 16) if not given.

    Attributes:
        limit: The longest request that the pool admits, in rows.
        rows: The longest request that the cases use.
        room: Requests at once.
        failures: What was wrong so far.
        hits: Prompt tokens that the pool said were there, all requests together.
        runs: How many requests were judged.
    """

    def __init__(
        self,
        pool_factory: PoolFactory,
        references: References,
        profile: Profile,
        block_size: int,
        max_requests: int | None,
    ) -> None:
        self.factory, self.references, self.profile = pool_factory, references, profile
        self.model, self.block = references.model, block_size
        self.vocab = int(self.model.config.get_text_config().vocab_size)
        self.failures: list[Failure] = []
        self.case, self.hits, self.runs = "", 0, 0
        self._alive: list[CachePool] = []
        self._plays: dict[int, list[Play]] = {}
        config = self.model.config
        self.limit = longest_request(pool_factory, config, LIMIT)
        self.rows = min(self.limit, 160)
        self.room = max_requests or most_requests(pool_factory, config, min(5, self.limit), 16)

    @property
    def full(self) -> bool:
        return self.profile == "full"

    def pool(self) -> CachePool:
        """A fresh pool, reduced to its contract; its hits are checked from here on."""
        seen: list[tuple[Context, tuple[int, ...]]] = []
        plays: list[Play] = []

        def admitted(request: Request, lease: Lease) -> None:
            hit, key = lease.num_cached_tokens, known(request.context)
            self.hits += hit
            equal = max(
                (
                    common_prefix(request.tokens, tokens)
                    for context, tokens in seen
                    if key is not None and known(context) == key
                ),
                default=0,
            )
            if hit > equal:
                why = f"is granted {hit} cached tokens, at most {equal} are equal in its context"
                self.failures.append(Failure(self.case, request.id, why, tuple(plays)))
            seen.append((request.context, request.tokens))

        pool = Contract(fresh(self.factory, self.model.config), admitted)
        self._alive.append(pool)  # an id must not be given again within a case
        self._plays[id(pool)] = plays
        return pool

    def begin(self, case: str) -> None:
        """Forget the pools of the case before."""
        self.case, self.runs = case, 0
        self._plays.clear()
        self._alive.clear()

    def request(
        self, id: str, length: int, seed: int, new: int = 4, context: Context = ()
    ) -> Request:
        """A random prompt of `length` tokens, see `random_request`."""
        return random_request(id, length, seed, self.vocab, new, context)

    def fits(self, *requests: Request) -> list[Request]:
        """Those that are not too long for this pool."""
        return [r for r in requests if r.rows_needed <= self.limit]

    def serial(self, requests: Sequence[Request], pool: CachePool | None = None) -> None:
        """One after another."""
        pool = self.pool() if pool is None else pool
        for request in self.fits(*requests):
            self._play(Play((request,)), pool)

    def orders(
        self,
        requests: Sequence[Request],
        order: Sequence[Move],
        pool: CachePool | None = None,
        chunk: int | None = None,
    ) -> None:
        """Move by move."""
        kept = self.fits(*requests)  # a small pool has fewer guests, not other rules
        if kept:
            line = " ".join(map(str, among(order, [r.id for r in kept])))
            self._play(Play(tuple(kept), line, chunk), self.pool() if pool is None else pool)

    def all_at_once(self, requests: Sequence[Request]) -> None:
        """All of them in one batch; who finds no room waits for a release."""
        kept = self.fits(*requests)
        if kept:
            self._play(Play(tuple(kept), "round_robin"), self.pool())

    def _play(self, play: Play, pool: CachePool) -> None:
        plays = self._plays[id(pool)]
        plays.append(play)
        try:
            runs = play.on(pool, self.model)
        except Exception as error:  # somebody else's pool may raise anything at all
            why = f"raised {type(error).__name__}: {error}"
            self.failures.append(Failure(self.case, play.requests[0].id, why, tuple(plays)))
            return
        for name, one in runs.items():
            self.judge(name, one, plays)

    def judge(self, name: str, one: Run, plays: Sequence[Play] = ()) -> None:
        """Compare one answer with its cold recompute."""
        self.runs += 1
        if not one.steps:
            return
        seen = self.references.judge(one)
        if self.references.far_off(seen):
            why = "has logits far off" if seen.same_tokens else "answers other tokens"
            token, margin = seen.first_divergence, seen.margin
            self.failures.append(Failure(self.case, name, why, tuple(plays), token, margin))

    def fail(self, request: str, why: str) -> None:
        """Something was wrong that is no answer."""
        self.failures.append(Failure(self.case, request, why))
