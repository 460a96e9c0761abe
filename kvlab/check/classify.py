"""From an anomaly and a few replays of its shortest history to the class of the fault."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from kvlab.check.history import Anomaly, History
from kvlab.check.run import Bench
from kvlab.interleave import Move

NUMBERS = ("number", "mask")
OWNERSHIP = ("given twice", "overlapping write", "freed under a reader", "double free")


@dataclass(frozen=True)
class Diagnosis:
    """What a clue concluded.

    Attributes:
        kinds: The class; a second one where the observation fits both.
        rule: The clue, in words.
    """

    kinds: tuple[str, ...]
    rule: str

    def __str__(self) -> str:
        return f"{' or '.join(self.kinds)}: {self.rule}"


class Replays:
    """Variants of one history, each played when it is first asked for.

    Attributes:
        anomaly: What the history itself shows.
    """

    def __init__(self, bench: Bench, history: History, anomaly: Anomaly) -> None:
        self.bench, self.history, self.anomaly = bench, history, anomaly
        self.finish = anomaly.rule in ("conservation", "refusal")

    def _wrong(self, history: History, settle: bool = False) -> bool:
        # One move more each: what a later one has overwritten is seen at the next read.
        look = tuple(Move((label,)) for label in history.requests)
        history = replace(history, moves=history.moves + look + look)
        return bool(self.bench.play(history, settle, self.finish).anomalies)

    @cached_property
    def settled(self) -> bool:
        """Still wrong when everything left for later is done after each move."""
        return self._wrong(self.history, settle=True)

    @cached_property
    def serial(self) -> bool:
        """Still wrong when each request comes, ends and leaves before the next one comes."""
        moves: list[Move] = []
        for label, request in self.history.requests.items():
            own = [m for m in _alone(self.history.moves) if m.requests == (label,)]
            through = [Move((label,))] * (request.rows_needed + 3)
            ends = own[-1:] and own[-1].kind == "abort"
            moves += own if ends else [*own, *through]
        return self._wrong(replace(self.history, moves=tuple(moves)))

    @cached_property
    def alone(self) -> bool:
        """Wrong when the one that saw it is the only one there."""
        label = self.anomaly.label
        if label not in self.history.requests:
            return False
        moves = tuple(m for m in _alone(self.history.moves) if m.requests == (label,))
        rest = (Move((label,)),) * 40
        requests = {label: self.history.requests[label]}
        return self._wrong(replace(self.history, moves=moves + rest, requests=requests))

    @cached_property
    def apart(self) -> bool:
        """Still wrong when each has a context of its own, so that no hit is due."""
        requests = {
            label: replace(r, context=(("check", label),))
            for label, r in self.history.requests.items()
        }
        return self._wrong(replace(self.history, requests=requests))

    @cached_property
    def nowhere(self) -> bool:
        """Still wrong when no context is known, so that nothing is found and nothing is left."""
        requests = {k: replace(r, context=None) for k, r in self.history.requests.items()}
        return self._wrong(replace(self.history, requests=requests))

    @cached_property
    def shifted(self) -> bool:
        """Still wrong when prompts of different contexts have nothing in common."""
        contexts = list(
            dict.fromkeys(map(repr, (r.context for r in self.history.requests.values())))
        )
        requests = {
            label: replace(
                r, tokens=tuple(t + 1 + contexts.index(repr(r.context)) for t in r.tokens)
            )
            for label, r in self.history.requests.items()
        }
        return self._wrong(replace(self.history, requests=requests))

    @cached_property
    def renamed(self) -> bool:
        """Still wrong when no name returns."""
        requests = {k: replace(r, id=k) for k, r in self.history.requests.items()}
        return self._wrong(replace(self.history, requests=requests))

    @cached_property
    def one_by_one(self) -> bool:
        """Still wrong when nobody shares a forward pass."""
        return self._wrong(replace(self.history, moves=tuple(_alone(self.history.moves))))

    @cached_property
    def unrefused(self) -> bool:
        """Still wrong without the moves that were refused."""
        outcomes = self.bench.play(self.history).outcomes
        pairs = zip(self.history.moves, outcomes, strict=False)
        moves = tuple(move for move, outcome in pairs if outcome != "full")
        return self._wrong(replace(self.history, moves=moves))

    def without(self, kind: str) -> bool:
        """Still wrong without the moves of a kind."""
        moves = tuple(m for m in self.history.moves if m.kind != kind)
        return self._wrong(replace(self.history, moves=moves))

    @cached_property
    def _conflicts(self) -> list[str] | None:
        return self.bench.conflicts(self.history)

    @cached_property
    def owners(self) -> bool | None:
        """Whether the pool's own log shows a place with two owners; `None` if it keeps no log."""
        found = self._conflicts
        return None if found is None else any(kind in OWNERSHIP for kind in found)

    @property
    def names_return(self) -> bool:
        ids = [r.id for r in self.history.requests.values()]
        return len(set(ids)) < len(ids)

    def uses(self, kind: str) -> bool:
        return any(m.kind == kind for m in self.history.moves)


def _alone(moves: Sequence[Move]) -> list[Move]:
    """Shared forward passes taken apart."""
    return [
        single
        for m in moves
        for single in (
            [Move((r,)) for r in m.requests] if m.kind == "step" and len(m.requests) > 1 else [m]
        )
    ]


@dataclass(frozen=True)
class Clue:
    """A test of the anomaly and of the replays, and the classes that it decides for."""

    kinds: tuple[str, ...]
    words: str
    holds: Callable[[Anomaly, Replays], bool]


def _what(*names: str) -> Callable[[Anomaly, Replays], bool]:
    return lambda a, r: a.what in names


CLUES: tuple[Clue, ...] = (
    Clue(
        ("refusal changed something",),
        "what follows is another where the refused moves are left out",
        lambda a, r: a.rule == "refusal",
    ),
    Clue(
        ("lifetime",),
        "a hit on rows that were admitted and never completely written",
        _what("not written"),
    ),
    Clue(
        ("layout",), "own rows come back as those of another head, kind or order", _what("layout")
    ),
    Clue(("scale",), "own rows come back times a factor", _what("scale")),
    Clue(
        ("stale state", "key"),
        "gone when no name returns",
        lambda a, r: r.names_return and not r.renamed,
    ),
    Clue(
        ("key",),
        "a hit is longer than any equal prefix that was written in its context",
        lambda a, r: a.rule == "hit" and not r.uses("fork"),
    ),
    Clue(
        ("key",),
        "the rows of equal tokens in another context",
        lambda a, r: a.twin and not r.shifted,
    ),
    Clue(
        ("lifetime",),
        "gone when everything left for later is done at once",
        lambda a, r: not r.settled,
    ),
    Clue(
        ("refusal changed something", "leak of memory"),
        "when all have left, the pool takes fewer than a fresh one, and not without the refused",
        lambda a, r: a.what == "lost" and not r.unrefused,
    ),
    Clue(
        ("leak of memory",),
        "when all have left, the pool takes fewer than a fresh one",
        lambda a, r: a.what == "lost",
    ),
    Clue(
        ("stale state",),
        "gone when no rows are taken back",
        lambda a, r: (
            r.uses("truncate")
            and not r.uses("fork")
            and a.what in (*NUMBERS, "position")
            and not a.changed
            and not r.without("truncate")
        ),
    ),
    Clue(
        ("position",),
        "wrong for one request alone on a fresh pool",
        lambda a, r: a.rule == "read" and r.alone,
    ),
    Clue(
        ("position",),
        "right one by one, wrong in one forward pass",
        lambda a, r: not r.one_by_one,
    ),
    Clue(
        ("position",),
        "rows are right after a hit, their numbers or masks are not",
        lambda a, r: a.what in NUMBERS and not r.nowhere,
    ),
    Clue(
        ("stale state",),
        "begins at another's length, although nobody else is there",
        lambda a, r: a.what == "number" and a.lone and not a.cached,
    ),
    Clue(
        ("stale state",),
        "one after another: right on a fresh place, wrong on a used one, without a hit",
        lambda a, r: (
            a.rule == "read"
            and a.what != "position"
            and not a.cached
            and not a.changed
            and r.serial
            and r.nowhere
        ),
    ),
    Clue(
        ("key",),
        "rows of another context without a hit; gone when all contexts are apart",
        lambda a, r: a.what == "foreign" and not a.cached and not a.changed and not r.apart,
    ),
    Clue(
        ("lifetime",),
        "the pool's own log gives a place to two",
        lambda a, r: r.owners is True,
    ),
    Clue(
        ("key",),
        "rows of the same places of another prompt, and the pool's own log gives every place to "
        "one",
        lambda a, r: r.owners is False and a.cached and not a.changed and a.same_place,
    ),
    Clue(
        ("position", "lifetime"),
        "rows of others, although the pool's own log gives every place to one",
        lambda a, r: r.owners is False and a.rule == "read",
    ),
    Clue(
        ("lifetime", "stale state"),
        "rows that were taken back and written anew are granted under their old tokens",
        lambda a, r: r.uses("truncate") and a.cached and not r.without("truncate"),
    ),
    Clue(
        ("lifetime", "leak of memory"),
        "an operation fails that the contract does not let fail",
        lambda a, r: a.rule == "error",
    ),
    Clue(
        ("lifetime", "position"),
        "rows were freed, overwritten or published at the wrong moment",
        lambda a, r: True,
    ),
)
"""The first that holds decides."""


def classify(bench: Bench, history: History, anomaly: Anomaly) -> Diagnosis:
    """The class of the fault that `history` shows as `anomaly`."""
    replays = Replays(bench, history, anomaly)
    clue = next(clue for clue in CLUES if clue.holds(anomaly, replays))
    return Diagnosis(clue.kinds, clue.words)
