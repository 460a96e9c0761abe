"""The conflict finder: what in an event log must not happen, whatever system wrote it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

from kvlab.pools.events import Event
from kvlab.request import Context, known

ConflictKind = Literal[
    "given twice",
    "overlapping write",
    "use after free",
    "read before write",
    "foreign read",
    "wrong start",
    "past capacity",
    "double free",
    "freed under a reader",
    "wrong hit",
]

Row = tuple[int, int]
"""A place, and an offset in it."""


@dataclass(frozen=True)
class Conflict:
    """Two records that contradict each other.

    Attributes:
        party: Request of the later record (empty: the pool itself).
        other: The other party; empty where there is none.
        place: The first place concerned.
        rows: First and last row concerned, counted within the request of the later record.
        first: The earlier record, `None` where something is missing that should have happened.
        second: The later record.
    """

    kind: ConflictKind
    party: str
    other: str
    place: int
    rows: tuple[int, int]
    first: Event | None
    second: Event
    why: str

    def __str__(self) -> str:
        before = f"record {self.first.step}" if self.first else "no record before"
        rows = f"rows {self.rows[0]} to {self.rows[1]} of place {self.place}"
        return f"{self.kind}: {self.why} ({rows}; {before}, record {self.second.step})"


@dataclass
class _Life:
    """One request from its admission to its release."""

    number: int
    admitted: Event
    places: dict[int, Event] = field(default_factory=dict)  # held, with the record that gave it
    granted: set[int] = field(default_factory=set)  # of these, what a hit gave: read-only
    copied: set[int] = field(default_factory=set)  # its own places that begin with such rows
    length: int = 0
    history: tuple[int, ...] = ()  # hash of all tokens up to each row, as far as known
    parked: list[_Written | None] = field(default_factory=list)  # rows in host memory


@dataclass
class _Written:
    """Who wrote a row last."""

    request: str
    life: int
    event: Event
    history: int | None  # hash of the tokens from row 0 up to this one


def conflicts(events: Iterable[Event]) -> list[Conflict]:
    """Everything in a log that contradicts isolation, in the order of the log.

    It knows no pool: only that a place belongs to whom it was given, that a request writes behind
    its own rows, and that it reads what itself or a finished equal prefix has written.
    """
    finder = _Finder()
    for event in sorted(events, key=lambda e: (e.time, e.step)):
        handler: Callable[[Event], Iterator[Conflict]] = getattr(finder, event.kind)
        finder.found += handler(event)
    # A wrong pair goes on being wrong with every further record: the first one says it.
    once = {(c.kind, c.party, c.other, c.place): c for c in reversed(finder.found)}
    return sorted(once.values(), key=lambda c: (c.second.time, c.second.step))


class _Finder:
    """Plays the log; one method for each kind of record."""

    def __init__(self) -> None:
        self.found: list[Conflict] = []
        self.live: dict[str, _Life] = {}
        self.freed: dict[int, Event] = {}  # places whose last holder left, with that record
        self.gone: dict[str, Event] = {}
        self.rows: dict[Row, _Written] = {}
        self.lives = 0

    def _holders(self, place: int, but: str) -> list[str]:
        return [r for r, life in self.live.items() if r != but and place in life.places]

    def _life(self, event: Event) -> _Life:
        life = self.live.get(event.request)
        if life is None:
            self.lives += 1
            life = self.live[event.request] = _Life(self.lives, event)
        return life

    def admit(self, event: Event) -> Iterator[Conflict]:
        """Places are given: nobody else may hold them, and the pointer stands behind the hit."""
        life = self._life(event)
        for place in event.places:
            for other in self._holders(place, event.request):
                first = self.live[other].places[place]
                yield self._conflict(
                    "given twice",
                    event,
                    f"{event.request!r} gets a place that {other!r} holds",
                    first,
                    other,
                    place,
                )
            if place in life.granted:  # a slot whose own rows are the prefix: it may go on there
                life.granted.discard(place)
                life.copied.add(place)
            life.places[place] = event
        if event.start != life.length:
            yield self._conflict(
                "wrong start",
                event,
                f"{event.request!r} starts at row {event.start}, its length is {life.length}",
                self.freed.get(next(iter(event.places), -1)),
            )
            life.length = event.start  # say it once
        for place in event.places:
            self.freed.pop(place, None)

    def hit(self, event: Event) -> Iterator[Conflict]:
        """A prefix is granted: it must be written, and by an equal history in an equal context."""
        unknown = known(event.context) is None
        yield from self._grant(
            event, lambda theirs: unknown or known(theirs) != known(event.context)
        )
        life = self.live[event.request]
        for place in event.places:
            (life.copied if place in life.places else life.granted).add(place)
            life.places.setdefault(place, event)

    def fork(self, event: Event) -> Iterator[Conflict]:
        """Another request's rows are granted: as a hit, but the context may be unknown to both, and
        whoever is left alone with a place may write there."""
        yield from self._grant(event, lambda theirs: theirs != event.context)
        life = self.live[event.request]
        for place in event.places:
            life.copied.add(place)
            life.places.setdefault(place, event)

    def _grant(self, event: Event, other_context: Callable[[Context], bool]) -> Iterator[Conflict]:
        life = self._life(event)
        history = _histories((), event.tokens)
        wrong: tuple[int, str, _Written | None] | None = None
        for i in range(event.length):
            place, offset = event.places[i // event.size], i % event.size
            written = self.rows.get((place, offset))
            if written is None:
                wrong = wrong or (i, "which nobody has written", None)
            elif other_context(written.event.context):
                wrong = wrong or (i, "whose context is another", written)
            elif event.tokens and written.history not in (None, history[i]):
                wrong = wrong or (i, "whose tokens differ", written)
        if wrong:
            row, why, written = wrong
            yield self._conflict(
                "wrong hit",
                event,
                f"{event.request!r} is granted row {row}, {why}",
                written.event if written else None,
                written.request if written else "",
                event.places[row // event.size],
                (row, event.start + event.length - 1),
            )
        life.length, life.history = event.length, history

    def write(self, event: Event) -> Iterator[Conflict]:
        """Rows are written: by their only holder, behind its own rows, within its places."""
        yield from self._use(event)
        offset = event.start % event.size
        if offset + event.length > event.size * len(event.places):
            yield self._conflict("past capacity", event, f"{event.request!r} leaves its places")
        life = self.live.get(event.request)
        if life is None:
            return
        if event.start != life.length:
            yield self._conflict(
                "wrong start",
                event,
                f"{event.request!r} writes from row {event.start}, its length is {life.length}",
                life.admitted,
            )
        if len(life.history) >= event.start:
            history = _histories(life.history[: event.start], event.tokens)
        else:
            history = ()
        for i in range(event.length):
            index = (offset + i) // event.size
            if index >= len(event.places):
                break
            place = event.places[index]
            row = (place, (offset + i) % event.size)
            written = self.rows.get(row)
            for other in self._holders(place, event.request):
                theirs = written if written is not None and written.request == other else None
                yield self._conflict(
                    "overlapping write",
                    event,
                    f"{event.request!r} writes into a place that {other!r} holds",
                    theirs.event if theirs else self.live[other].places[place],
                    other,
                    place,
                )
            if place in life.granted:
                yield self._conflict(
                    "overlapping write",
                    event,
                    f"{event.request!r} writes into a prefix that it may only read",
                    life.places[place],
                    place=place,
                )
            chain = history[event.start + i] if len(history) > event.start + i else None
            self.rows[row] = _Written(event.request, life.number, event, chain)
        life.length, life.history = event.start + event.length, history

    def read(self, event: Event) -> Iterator[Conflict]:
        """Rows are read: they must be the reader's own, or granted by a hit."""
        yield from self._use(event)
        life = self.live.get(event.request)
        if life is None:
            return
        for i in range(event.length):
            at = event.start % event.size + i
            if at // event.size >= len(event.places):
                break
            place = event.places[at // event.size]
            written = self.rows.get((place, at % event.size))
            kind: ConflictKind
            if written is None:
                kind = "read before write"
            elif written.life != life.number and place not in life.granted | life.copied:
                kind = "foreign read"
            else:
                continue
            other = written.request if written else ""
            why = f"{event.request!r} reads row {event.start + i}, "
            why += f"last written by {other!r}" if other else "which nobody has written"
            row = (event.start + i, event.start + i)
            first = written.event if written else None
            yield self._conflict(kind, event, why, first, other, place, row)

    def truncate(self, event: Event) -> Iterator[Conflict]:
        """Rows are taken back: the next write starts here."""
        yield from self._use(event)
        life = self._life(event)
        if event.start > life.length:
            why = f"{event.request!r} keeps {event.start} rows of {life.length}"
            yield self._conflict("wrong start", event, why)
        life.length, life.history = event.start, life.history[: event.start]

    def park(self, event: Event) -> Iterator[Conflict]:
        """Rows leave their places, which are free then."""
        yield from self._use(event)
        life = self._life(event)
        size, places = event.size, event.places
        life.parked = [
            self.rows.get((places[i // size], i % size))
            for i in range(min(event.length, size * len(places)))
        ]
        yield from self._return(event, life, tuple(life.places))
        life.granted, life.copied = set(), set()

    def resume(self, event: Event) -> Iterator[Conflict]:
        """Rows come back, to places that are given now."""
        life = self._life(event)
        yield from self.admit(replace(event, start=life.length))
        for i, written in enumerate(life.parked):
            if written is not None:
                self.rows[event.places[i // event.size], i % event.size] = written
        life.copied = set(event.places)

    def spare(self, event: Event) -> Iterator[Conflict]:
        """Unused places are given back."""
        life = self._life(event)
        yield from self._return(event, life, event.places)

    def _return(self, event: Event, life: _Life, places: Iterable[int]) -> Iterator[Conflict]:
        for place in places:
            if life.places.pop(place, None) is None:
                why = f"{event.request!r} gives place {place} back without holding it"
                yield self._conflict("double free", event, why, life.admitted, place=place)
            self.freed[place] = event

    def release(self, event: Event) -> Iterator[Conflict]:
        """Places are given back, once."""
        life = self.live.pop(event.request, None)
        if life is None:
            yield self._conflict(
                "double free",
                event,
                f"{event.request!r} gives back what it does not hold",
                self.gone.get(event.request),
            )
            return
        for place in dict.fromkeys(event.places):
            if place not in life.places or event.places.count(place) > 1:
                yield self._conflict(
                    "double free",
                    event,
                    f"{event.request!r} gives place {place} back "
                    + ("twice" if place in life.places else "without holding it"),
                    life.admitted,
                    place=place,
                )
        self.gone[event.request] = event
        for place in life.places:
            self.freed[place] = event

    def reset(self, event: Event) -> Iterator[Conflict]:
        """A length becomes 0: nobody else may hold the place."""
        yield from self._under_reader(event, "is reset")

    def evict(self, event: Event) -> Iterator[Conflict]:
        """A stored prefix goes: nobody may hold its places."""
        yield from self._under_reader(event, "is evicted")
        for place in event.places:
            self.freed[place] = event

    def _under_reader(self, event: Event, what: str) -> Iterator[Conflict]:
        for place in event.places:
            for other in self._holders(place, event.request):
                yield self._conflict(
                    "freed under a reader",
                    event,
                    f"place {place} {what} while {other!r} holds it",
                    self.live[other].places[place],
                    other,
                    place,
                )

    def copy(self, event: Event) -> Iterator[Conflict]:
        """Copy-on-write: from here on the request holds the target instead of the source."""
        source, target = event.places
        yield from self._use(replace(event, places=(source,)))
        for other in self._holders(target, event.request):
            why = f"{event.request!r} copies into a place that {other!r} holds"
            yield self._conflict(
                "given twice", event, why, self.live[other].places[target], other, target
            )
        for offset in range(event.length):
            if (source, offset) in self.rows:
                self.rows[target, offset] = self.rows[source, offset]
        life = self.live.get(event.request)
        if life is not None:
            life.places.pop(source, None)
            life.places.setdefault(target, event)
            life.granted.discard(source)
            life.copied.add(target)

    def _use(self, event: Event) -> Iterator[Conflict]:
        """Whoever touches a place must hold it."""
        life = self.live.get(event.request)
        lost = [p for p in event.places if life is None or p not in life.places]
        if lost:
            yield self._conflict(
                "use after free",
                event,
                f"{event.request!r} uses place {lost[0]} without holding it",
                self.gone.get(event.request) or self.freed.get(lost[0]),
                place=lost[0],
            )

    def _conflict(
        self,
        kind: ConflictKind,
        event: Event,
        why: str,
        first: Event | None = None,
        other: str = "",
        place: int | None = None,
        rows: tuple[int, int] | None = None,
    ) -> Conflict:
        return Conflict(
            kind,
            event.request,
            other,
            next(iter(event.places), -1) if place is None else place,
            rows or (event.start, event.start + max(event.length, 1) - 1),
            first,
            event,
            why,
        )


def _histories(before: tuple[int, ...], tokens: tuple[int, ...] | None) -> tuple[int, ...]:
    """For every row the hash of all tokens up to it; a chain, so that a splice is seen."""
    if tokens is None:
        return ()
    chain = list(before)
    for token in tokens:
        chain.append(hash((chain[-1] if chain else None, token)))
    return tuple(chain)
