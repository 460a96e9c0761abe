"""Histories on fresh pools: drawn, judged by all rules, replayed, and made shorter."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from transformers import PretrainedConfig

from kvlab.check.dye import Dye
from kvlab.check.generate import Author, Sizes
from kvlab.check.history import Anomaly, History, Outcome, Player
from kvlab.interleave import Move, among
from kvlab.observe.conflicts import conflicts
from kvlab.pools.contract import CachePool, Logs, PoolFactory, fresh
from kvlab.pools.events import EventLog
from kvlab.request import Request

AT_MOST = 16
"""Requests at once; a pool that takes more counts as unbounded."""


@dataclass(frozen=True)
class Trace:
    """What one history showed.

    Attributes:
        history: As it was played.
        anomalies: What was wrong.
        exercised: How often each situation came up.
        outcomes: What became of each move.
    """

    history: History
    anomalies: Sequence[Anomaly]
    exercised: Counter[str]
    outcomes: Sequence[Outcome] = ()

    @property
    def telling(self) -> bool:
        """Whether it shows a wrong row or hit."""
        return bool(self.anomalies) and self.anomalies[0].rule in ("read", "hit")


class Bench:
    """Fresh pools of one factory, and their sizes.

    Attributes:
        first: What was wrong already while the sizes were found out.
    """

    def __init__(
        self,
        factory: PoolFactory,
        config: PretrainedConfig,
        journal: Callable[[str], None] | None = None,
    ) -> None:
        self.factory, self.config, self.dye = factory, config, Dye(config)
        self.journal = journal
        self.first: Trace | None = None
        self.sizes = Sizes(0, 0, 0, False)  # until they are found out
        self.sizes = self._sizes()

    def pool(self) -> CachePool:
        return fresh(self.factory, self.config)

    def _player(
        self,
        requests: dict[str, Request],
        chunk: int | None,
        shared: bool,
        what: str,
        settle: bool = False,
    ) -> Player:
        if self.journal is not None:
            self.journal(what)
        limit = self.sizes.limit
        return Player(
            self.pool(), dict(requests), self.dye, chunk, shared, settle, self.journal, limit
        )

    def _sizes(self) -> Sizes:
        low, high = 1, 256
        while low < high:
            middle = (low + high + 1) // 2
            try:
                self.pool().admit(Request("probe", (3,), middle))
                low = middle
            except Exception:  # what raises wrongly is seen when it is played
                high = middle - 1
        rows = min(low, 24)
        player = self._player({}, None, True, "a fresh pool")
        room = fill(player, rows, "probe")
        if player.anomalies:
            history = History(dict(player.requests), tuple(player.moves))
            self.first = Trace(history, player.anomalies, player.exercised)
        return Sizes(low, rows, max(1, room), room < AT_MOST)

    def draw(self, seed: int) -> Trace:
        """The history of a seed, with what is asked of the pool at its end."""
        chunk, shared = random_settings(seed)
        player = self._player({}, chunk, shared, f"seed {seed}")
        Author(player, self.sizes, seed).write()
        return self._judged(player)

    def play(self, history: History, settle: bool = False, finish: bool = True) -> Trace:
        """A history again, move by move, on a fresh pool; with what is asked at its end."""
        player = self._player(history.requests, history.chunk, history.shared, "again", settle)
        for move in history.moves:
            player.play(move)
            if player.anomalies:
                break
        if finish:
            return self._judged(player)
        return Trace(history, player.anomalies, player.exercised, player.outcomes)

    def _judged(self, player: Player) -> Trace:
        """What is asked at the end of a history; it becomes part of it where it shows something."""
        chunk, moves, requests = player.chunk, tuple(player.moves), dict(player.requests)
        if not player.anomalies and "full" in player.outcomes:
            self._without_refused(History(requests, moves, chunk, player.shared), player)
        if not player.anomalies:
            self._finish(player)
            if player.anomalies and player.anomalies[0].rule in ("read", "hit", "error"):
                moves, requests = tuple(player.moves), dict(player.requests)
        history = History(requests, moves, chunk, player.shared)
        return Trace(history, player.anomalies, player.exercised, player.outcomes)

    def conflicts(self, history: History) -> list[str] | None:
        """The kinds of contradiction in the pool's own log of a history; `None` without a log."""
        player = self._player(history.requests, history.chunk, history.shared, "again")
        if not isinstance(player.pool, Logs):
            return None
        log = player.pool.events = EventLog()
        for move in history.moves:
            player.play(move)
        player.release_all()
        return [c.kind for c in conflicts(log.events)]

    def _finish(self, player: Player) -> None:
        """Who is still there looks once more; then all leave, and the pool is as empty as new."""
        for label in list(player.lives):
            if not player.anomalies:
                player.play(Move((label,)))
        if player.anomalies:
            return
        player.release_all()
        for round in range(2):
            if player.anomalies:
                return
            # At first nobody is refused, so that what a refusal takes is not taken for a leak.
            name, at_most = (("fill", self.sizes.room), ("refill", AT_MOST))[round]
            admitted = fill(player, self.sizes.rows, name, at_most)
            if player.anomalies or not self.sizes.bounded:
                continue
            if admitted != self.sizes.room:
                what = "lost" if admitted < self.sizes.room else "given twice"
                text = (
                    f"when all have left, the pool admits {admitted} requests of "
                    f"{self.sizes.rows} rows, a fresh one {self.sizes.room}"
                )
                player.anomalies.append(
                    Anomaly("conservation", "", len(player.moves) - 1, what, text)
                )

    def _without_refused(self, history: History, player: Player) -> None:
        """Take the refused moves out: what is refused later must stay the same."""
        kept = [i for i, o in enumerate(player.outcomes[: len(history.moves)]) if o != "full"]
        again = self._player(
            history.requests, history.chunk, history.shared, "again", player.settle_always
        )
        for i in kept:
            outcome = again.play(history.moves[i])
            if outcome != player.outcomes[i] or again.anomalies:
                outcome_then = "wrong" if again.anomalies else outcome
                text = (
                    f"{history.moves[i]} is {player.outcomes[i]}, and {outcome_then} where the "
                    "refused moves before it are left out"
                )
                player.anomalies.append(Anomaly("refusal", "", i, "changed", text))
                return


def random_settings(seed: int) -> tuple[int | None, bool]:
    """Chunk and way of sharing of a seed's history."""
    return (None, None, 1, 3, 4, 5)[seed % 6], seed % 2 == 0


def fill(player: Player, rows: int, name: str, at_most: int = AT_MOST) -> int:
    """Admit requests of `rows` rows until the pool is full; each writes, reads again, and leaves.

    Returns how many were in.
    """
    labels = [f"{name}{i}" for i in range(at_most)]
    seed = sum(map(ord, name))
    for i, label in enumerate(labels):
        new = min(2, rows)
        tokens = tuple(3 + (seed + 37 * i + 11 * j) % 700 for j in range(rows - new + 1))
        player.requests[label] = Request(label, tokens, new)
        if player.play(Move((label,))) != "done":
            break
    inside = [label for label in labels if label in player.lives]
    for _ in range(2):
        for label in inside:
            life = player.lives.get(label)
            if life is not None and not life.over and not player.anomalies:
                player.play(Move((label,), "whole"))
    for label in inside:
        if label in player.lives:
            player.play(Move((label,), "abort"))
    player.settle()
    return len(inside)


def shorten(bench: Bench, trace: Trace, replays: int = 400) -> Trace:
    """The shortest history found that breaks the same rule: moves are left out, then requests.

    What is seen while moves are made needs nothing of what is asked at the end.
    """
    first, left = trace.anomalies[0], replays
    finish = first.rule in ("conservation", "refusal")
    best = trace
    if not finish:
        cut = trace.history.moves[: first.at + 1]
        best = replace(trace, history=replace(trace.history, moves=cut))

    def shorter(moves: Sequence[Move]) -> bool:
        nonlocal left, best
        left -= 1
        tried = bench.play(replace(best.history, moves=tuple(moves)), finish=finish)
        if not any(a.rule == first.rule for a in tried.anomalies):
            return False
        history = replace(best.history, moves=tuple(moves))
        if not finish:
            history = replace(history, moves=history.moves[: tried.anomalies[0].at + 1])
        best = replace(tried, history=history)
        return True

    for label in list(best.history.requests):
        others = [name for name in best.history.requests if name != label]
        kept = tuple(among(best.history.moves, others))
        if left > 0 and kept != best.history.moves:
            shorter(kept)
    size = max(1, len(best.history.moves) // 2)
    while left > 0:
        at, before = 0, len(best.history.moves)
        while at < len(best.history.moves) and left > 0:
            moves = best.history.moves
            if not shorter(moves[:at] + moves[at + size :]):
                at += size
        if size == 1 and len(best.history.moves) == before:
            break
        size = max(1, size // 2)
    used = {label for move in best.history.moves for label in move.requests}
    requests = {k: v for k, v in best.history.requests.items() if k in used}
    return replace(best, history=replace(best.history, requests=requests))
