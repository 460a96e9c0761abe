"""Any order of small steps, move by move: steps of a life, aborts, forks, truncations, parking."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from transformers import PreTrainedModel

from kvlab.forward import Observer
from kvlab.pools.contract import CachePool, PoolFull
from kvlab.request import Request, Run
from kvlab.schedule import Executor

Kind = Literal["step", "whole", "abort", "fork", "truncate", "park", "settle"]
SIGNS: dict[str, Kind] = {"*": "whole", "!": "abort", "~": "park", ">": "fork", "<": "truncate"}
MARKS = {kind: sign for sign, kind in SIGNS.items()}


@dataclass(frozen=True)
class Move:
    """What happens next.

    Attributes:
        kind: step: these requests move one small step further. The steps of a life are: admit (or
            come back, if it is parked), prefill (one chunk), one decode for every further token,
            release. Several requests that decode share a forward pass.
            whole: a step, in which a prompt is computed to its end whatever the chunk.
            abort, park: they give their rows back; for good, or until their next step.
            fork: the second request goes on from the rows of the first; that is its admission.
            truncate: `count` rows are taken back, and the tokens that came of them.
            settle: the pool finishes what it left for later; nobody moves.
    """

    requests: tuple[str, ...]
    kind: Kind = "step"
    count: int = 0

    def __str__(self) -> str:
        if self.kind == "settle":
            return "."
        if self.kind == "fork":
            return ">".join(self.requests)
        if self.kind == "truncate":
            return f"{self.requests[0]}<{self.count}"
        return "+".join(self.requests) + MARKS.get(self.kind, "")


def moves(text: str) -> list[Move]:
    """Moves from a line such as `"A A B A+B A! B"`: one step of A ..., A and B together, A aborts.

    Further signs: `A>B` (B forks off A), `A<2` (A takes back two rows), `A~` (A is parked), `A*`
    (a step that leaves nothing of a prompt), and a lone `.` (the pool settles).

    Raises:
        ValueError: A move that cannot be read.
    """
    found = []
    for word in text.split():
        if word == ".":
            found.append(Move((), "settle"))
            continue
        sign = next((c for c in word if c in SIGNS), "")
        left, _, right = word.partition(sign) if sign else (word, "", "")
        names, kind = tuple(left.split("+")), SIGNS.get(sign, "step")
        alone, count = len(names) == 1, 0
        if kind == "fork":
            names, right = (*names, right), ""
        elif kind == "truncate" and right.isdecimal():
            count, right = int(right), ""
        wrong = kind in ("fork", "truncate") and not (alone and (count or kind == "fork"))
        if right or wrong or not all(names):
            raise ValueError(
                f"cannot read the move {word!r}; write A, A+B, A*, A!, A~, A>B, A<2 or ."
            )
        found.append(Move(names, kind, count))
    return found


def among(order: Sequence[Move], names: Sequence[str]) -> list[Move]:
    """The same order without the requests that are not among `names`."""
    kept = [replace(m, requests=tuple(n for n in m.requests if n in names)) for m in order]
    least = {"fork": 2, "settle": 0}
    return [m for m in kept if len(m.requests) >= least.get(m.kind, 1)]


def steps_of(request: Request, chunk: int | None = None) -> int:
    """Small steps of a whole life when nothing is cached: admit, prefill, decodes, release."""
    chunks = 1 if chunk is None else -(-len(request.tokens) // chunk)
    return 1 + chunks + (request.max_new_tokens - 1) + 1


def interleavings(first: str, second: str, steps: int) -> Iterator[list[Move]]:
    """Every order of two lives of `steps` small steps each: `(2 steps)! / steps!^2` of them."""
    for places in itertools.combinations(range(2 * steps), steps):
        chosen = set(places)
        yield [Move((first if i in chosen else second,)) for i in range(2 * steps)]


def shuffled(requests: Sequence[Request], seed: int, chunk: int | None = None) -> list[Move]:
    """The small steps of all requests in an order drawn by a seed."""
    steps = [Move((r.id,)) for r in requests for _ in range(steps_of(r, chunk))]
    random.Random(seed).shuffle(steps)
    return steps


def replay(
    model: PreTrainedModel,
    requests: Sequence[Request],
    pool: CachePool,
    order: Sequence[Move],
    observers: Sequence[Observer] = (),
    lock: bool = False,
    chunk: int | None = None,
) -> dict[str, Run]:
    """Play `order` on a pool and return the runs by id; who is not through then is aborted.

    A request whose admission finds the pool full stays outside and tries again at its next move.
    An aborted request can come back: its next move admits it anew, under its old name. A move of a
    request that is over does nothing.

    Args:
        chunk: Prompt tokens of one prefill step; all by default.
        lock: See `kvlab.schedule.run`.

    Raises:
        ValueError: Two requests with one id, or a move of a request that is not there.
    """
    ids = [r.id for r in requests]
    if len(set(ids)) < len(ids):
        raise ValueError(f"request ids must be unique, got {ids}")
    unknown = {name for move in order for name in move.requests} - set(ids)
    if unknown:
        raise ValueError(f"moves of unknown requests: {', '.join(sorted(unknown))}")
    player = _Player(Executor(model, pool, observers, lock), requests, chunk)
    try:
        for move in order:
            player.play(move)
    finally:
        player.executor.release_all()
    return player.runs


class _Player:
    """Knows how far each request has come."""

    def __init__(self, executor: Executor, requests: Sequence[Request], chunk: int | None) -> None:
        self.executor, self.chunk = executor, chunk
        self.runs = {r.id: Run(r) for r in requests}
        self.over: set[str] = set()
        self.written: dict[str, int] = {}  # rows of those that have generated nothing yet
        self.parked: set[str] = set()

    def play(self, move: Move) -> None:
        active = [self.runs[name] for name in move.requests if name not in self.over]
        here = [run for run in active if run.request.id in self.executor.leases]
        if move.kind in ("step", "whole"):
            self._step(active, None if move.kind == "whole" else self.chunk)
        elif move.kind == "fork":
            self._fork(here, active)
        elif move.kind == "settle":
            self.executor.settle()
        else:
            for run in here:
                self._take_back(run, move)
        self.executor.tick += 1

    def _take_back(self, run: Run, move: Move) -> None:
        executor, name = self.executor, run.request.id
        if move.kind == "abort":
            executor.release(run)
            self.parked.discard(name)
            self.runs[name] = Run(run.request)
        elif name not in self.parked:
            if move.kind == "park":
                executor.park(run)
                self.parked.add(name)
            else:
                self.written[name] = max(0, self._written(run) - move.count)
                executor.truncate(run, self.written[name])

    def _fork(self, here: Sequence[Run], active: Sequence[Run]) -> None:
        """Nothing, if the first is not here, or the second already is."""
        if len(active) == 2 and here == [active[0]] and active[0].request.id not in self.parked:
            self.executor.fork(*active)
            self.written[active[1].request.id] = active[1].num_cached_tokens

    def _written(self, run: Run) -> int:
        """Rows that are there: the newest token's is written one step later."""
        if run.steps:
            return len(run.request.tokens) + len(run.steps) - 1
        return self.written[run.request.id]

    def _step(self, active: Sequence[Run], chunk: int | None) -> None:
        executor, decoding = self.executor, []
        for run in active:
            if run.request.id in self.parked:
                if executor.resume(run):
                    self.parked.discard(run.request.id)
            elif run.request.id not in executor.leases:
                executor.admit(run)
                self.written[run.request.id] = run.num_cached_tokens
            elif run.finished:
                executor.release(run)
                self.over.add(run.request.id)
            elif run.steps:
                decoding.append(run)
            else:
                self._prefill(run, chunk)
        if decoding:
            with contextlib.suppress(PoolFull):  # a copy found no block: they try again
                executor.forward(decoding, [r.tokens[-1:] for r in decoding])

    def _prefill(self, run: Run, chunk: int | None) -> None:
        tokens = run.request.tokens
        start, end = self._written(run), len(tokens)
        if chunk is not None:
            end = min(end, start + chunk)
        with contextlib.suppress(PoolFull):
            self.executor.forward([run], [list(tokens[start:end])], complete=end == len(tokens))
            self.written[run.request.id] = end
