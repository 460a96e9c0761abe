"""Any order of small steps, move by move: admit, prefill, decode, release, or abort."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from transformers import PreTrainedModel

from kvlab.forward import Observer
from kvlab.pools.contract import CachePool
from kvlab.request import Request, Run
from kvlab.schedule import Executor


@dataclass(frozen=True)
class Move:
    """What happens next: these requests move one small step further, or they are aborted.

    The steps of a life are: admit, prefill (one chunk), one decode for every further token,
    release. Several requests that decode share a forward pass.
    """

    requests: tuple[str, ...]
    abort: bool = False

    def __str__(self) -> str:
        return "+".join(self.requests) + ("!" if self.abort else "")


def moves(text: str) -> list[Move]:
    """Moves from a line such as `"A A B A+B A! B"`: one step of A ..., A and B together, A aborts.

    Raises:
        ValueError: A move without a request.
    """
    found = []
    for word in text.split():
        names = tuple(word.rstrip("!").split("+"))
        if not all(names):
            raise ValueError(f"cannot read the move {word!r}; write A, A+B or A!")
        found.append(Move(names, word.endswith("!")))
    return found


def among(order: Sequence[Move], names: Sequence[str]) -> list[Move]:
    """The same order without the requests that are not among `names`."""
    kept = [Move(tuple(n for n in m.requests if n in names), m.abort) for m in order]
    return [move for move in kept if move.requests]


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
        self.written: dict[str, int] = {}  # prompt tokens that are in the cache

    def play(self, move: Move) -> None:
        executor = self.executor
        active = [self.runs[name] for name in move.requests if name not in self.over]
        if move.abort:
            for run in active:
                if run.request.id in executor.leases:
                    executor.release(run)
                    self.runs[run.request.id] = Run(run.request)
            executor.tick += 1
            return
        decoding = []
        for run in active:
            if run.request.id not in executor.leases:
                executor.admit(run)
                self.written[run.request.id] = run.num_cached_tokens
            elif run.finished:
                executor.release(run)
                self.over.add(run.request.id)
            elif run.steps:
                decoding.append(run)
            else:
                self._prefill(run)
        if decoding:
            executor.forward(decoding, [r.tokens[-1:] for r in decoding])
        executor.tick += 1

    def _prefill(self, run: Run) -> None:
        name, tokens = run.request.id, run.request.tokens
        start, end = self.written[name], len(tokens)
        if self.chunk is not None:
            end = min(end, start + self.chunk)
        self.executor.forward([run], [list(tokens[start:end])], complete=end == len(tokens))
        self.written[name] = end
