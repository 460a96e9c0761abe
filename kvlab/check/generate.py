"""Histories drawn by a seed: families of prompts, and orders that depend on what the pool did.

A draw is our own and not hypothesis': each move is chosen while the history is played, so that it
can go where the pool is full or a prefix is wanted, and the same seed gives the same history with
any version of a library. Every history leaves out some of the possibilities (swarm testing), since
a mixture of everything hides what needs much of one thing.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from kvlab.check.history import Life, Player
from kvlab.interleave import Move
from kvlab.request import Context, Request

CONTEXTS: tuple[tuple[Context, ...], ...] = (
    ((), None),
    ((("adapter", "a"),), (("adapter", "b"),), ()),
    ((("adapter", "a"), ("version", "1")), (("adapter", "a"), ("version", "2"))),
    ((("adapter", "a"), ("tenant", "b")), (("adapter", "b"), ("tenant", "a"))),
    ((("adapter", "x"),), (("tenant", "x"),), (("salt", "x"),)),
    ((("tenant", "ab"), ("user", "c")), (("tenant", "a"), ("user", "bc"))),
    ((("image", None),), (("image", "00000000"),), ()),
    ((("tenant", "a"),), (("tenant", "b"),), None),
)
"""Groups of neighbours: what a key without tags, without a field, or without care confuses."""

BORDERS = [b * n + d for b in (4, 8, 16) for n in (1, 2, 3) for d in (-1, 0, 1)]


@dataclass(frozen=True)
class Sizes:
    """What a fresh pool takes.

    Attributes:
        limit: Rows of the longest request.
        rows: Rows of an ordinary one.
        room: How many of these it holds at once.
        bounded: Whether a request too many was refused at all.
    """

    limit: int
    rows: int
    room: int
    bounded: bool


class Author:
    """Writes one history while it is played.

    Args:
        player: Of a fresh pool; its requests are added here.
        seed: Of everything that is drawn.
    """

    def __init__(self, player: Player, sizes: Sizes, seed: int) -> None:
        draw = self.draw = random.Random(seed)
        self.player, self.sizes = player, sizes
        self.at_once = draw.choice([1, 2, 3, sizes.room, sizes.room + 2])
        self.count = draw.choice([4, 8, 12, 20])
        self.contexts = self._contexts(seed)
        self.related = draw.choice([0.0, 0.5, 0.9, 0.9]) if len(self.contexts) == 1 else 0.9
        self.kinds = [*SHARING, *draw.sample(sorted(RELATIONS), draw.randint(0, len(RELATIONS)))]
        self.returning = draw.choice([0.0, 0.0, 0.5])
        self.long = draw.choice([0.0, 0.0, 0.3])
        self.new = draw.choice([1, 3, 6, 14])
        self.weights = {
            "step": 6.0,
            "batch": draw.choice([0, 0, 4]),
            "abort": draw.choice([0, 0.3, 1.5]),
            "fork": draw.choice([0, 0, 1]),
            "truncate": draw.choice([0, 0, 1]),
            "park": draw.choice([0, 0, 1]),
            "settle": draw.choice([0, 0, 1]),
        }
        if len(self.contexts) > 9:  # a crowd: a short hash of its contexts meets itself
            self.count, self.new, self.at_once, self.related = 60, 1, 1, 0.95
            self.kinds = ["equal"]
        self.free_names: list[str] = []
        self.earlier: list[tuple[int, ...]] = []  # sequences that were there before

    def _contexts(self, seed: int) -> Sequence[Context]:
        """One context in every other history; the groups of neighbours in turn in the others."""
        turn, which = divmod(seed, 2)
        if not which:
            return [()]
        if turn % (len(CONTEXTS) + 1) == len(CONTEXTS):
            return [(("image", f"{self.draw.getrandbits(32):08x}"),) for _ in range(60)]
        return CONTEXTS[turn % (len(CONTEXTS) + 1)]

    def write(self) -> None:
        """Play until every request has come and gone, or the pool has shown something wrong."""
        player, made = self.player, 0
        while not player.anomalies and len(player.moves) < 40 * self.count:
            inside = list(player.lives.values())
            more = made < self.count and (not inside or len(inside) < self.at_once)
            if more and (not inside or self.draw.random() < 0.6):
                self._newcomer(made)
                made += 1
                continue
            if not inside:
                return
            move = self._next(inside, made)
            if move.kind == "fork":
                made += 1
            label = move.requests[0] if move.requests else ""
            life = player.lives.get(label)
            if life is not None and move.kind == "truncate":
                self._remember(life.sequence[: life.done])
            player.play(move)
            if life is not None and label not in player.lives:
                self._remember(life.sequence[: life.done])
                self.free_names.append(life.request.id)

    def _remember(self, tokens: Sequence[int]) -> None:
        if tokens:
            self.earlier.append(tuple(tokens))

    def _next(self, inside: list[Life], made: int) -> Move:
        draw = self.draw
        kind = draw.choices(list(self.weights), list(self.weights.values()))[0]
        life = draw.choice(inside)
        if kind == "batch":
            ready = [x.label for x in inside if x.prefilled and not x.over and not x.parked]
            if len(ready) > 1:
                return Move(tuple(draw.sample(ready, draw.randint(2, min(8, len(ready))))))
        elif kind == "fork" and life.done and not life.parked and len(inside) < self.at_once:
            label = self._label(made)
            room = self.sizes.limit - life.done
            if room > 1:
                tail = tuple(
                    draw.randrange(3, 700) for _ in range(min(room - 1, draw.randint(1, 3)))
                )
                new = min(self.new, room - len(tail))
                self.player.requests[label] = Request(label, tail, max(1, new))
                return Move((life.label, label), "fork")
        elif kind == "truncate" and life.done:
            return Move((life.label,), "truncate", draw.randint(1, min(6, life.done)))
        elif kind == "settle":
            return Move((), "settle")
        elif kind in ("abort", "park"):
            return Move((life.label,), "abort" if kind == "abort" else "park")
        return Move((life.label,))

    def _label(self, index: int) -> str:
        return chr(ord("A") + index % 26) + (str(index // 26) if index >= 26 else "")

    def _newcomer(self, index: int) -> None:
        """A new request, and its admission."""
        label = self._label(index)
        name = label
        if self.free_names and self.draw.random() < self.returning:
            name = self.draw.choice(self.free_names)
        self.player.requests[label] = self._request(name)
        self.player.play(Move((label,)))
        if label not in self.player.lives:  # full, or its name is taken: it does not come back
            self._remember(self.player.requests[label].tokens)
            self.player.over.add(label)

    def _request(self, name: str) -> Request:
        draw, limit = self.draw, self.sizes.limit
        new = min(self.new, max(1, limit - 1))
        longest = limit - new + 1
        tokens = self._fresh(longest)
        if self.earlier and draw.random() < self.related:
            relation = RELATIONS[draw.choice(self.kinds)]
            tokens = tuple(relation(draw, draw.choice(self.earlier[-8:]), tokens))[:longest]
        context = draw.choice(self.contexts)
        self._remember(tokens)
        return Request(name, tokens, new, context=context)

    def _fresh(self, longest: int) -> tuple[int, ...]:
        draw = self.draw
        length = draw.choice([draw.randint(1, 12), draw.choice(BORDERS), draw.randint(8, 40)])
        if draw.random() < self.long:
            length = longest
        length = min(length, longest)
        low = draw.choice([0, 3])
        return tuple(draw.randrange(low, 700) for _ in range(max(1, length)))


def _cut(draw: random.Random, prompt: Sequence[int]) -> int:
    """A place in a prompt; often at a border of a block, or beside one."""
    places = [b for b in BORDERS if b < len(prompt)]
    if places and draw.random() < 0.5:
        return draw.choice(places)
    return draw.randrange(len(prompt))


def _changed(prompt: Sequence[int], changes: dict[int, int]) -> list[int]:
    return [max(0, t + changes.get(i, 0)) for i, t in enumerate(prompt)]


def _balanced(draw: random.Random, prompt: Sequence[int], factor: int) -> list[int]:
    """Two tokens changed so that a sum, or a polynomial with this base, stays the same."""
    if len(prompt) < 2:
        return list(prompt)
    i = draw.randrange(len(prompt) - 1)
    j = i + 1 if factor > 1 or draw.random() < 0.5 else draw.randrange(i + 1, len(prompt))
    return _changed(prompt, {i: 1, j: -factor})


def _xor(draw: random.Random, prompt: Sequence[int]) -> list[int]:
    tokens, i, j = list(prompt), draw.randrange(len(prompt)), draw.randrange(len(prompt))
    bits = draw.choice([1, 3, 8])
    tokens[i] ^= bits
    tokens[j] ^= bits
    return tokens


def _swapped(draw: random.Random, prompt: Sequence[int]) -> list[int]:
    tokens, i, j = list(prompt), draw.randrange(len(prompt)), draw.randrange(len(prompt))
    tokens[i], tokens[j] = tokens[j], tokens[i]
    return tokens


def _one_place(draw: random.Random, prompt: Sequence[int]) -> list[int]:
    tokens, i = list(prompt), _cut(draw, prompt)
    tokens[i] = (tokens[i] + draw.choice([1, 16, 128, 256, 512])) % 800
    return tokens


def _spliced(draw: random.Random, prompt: Sequence[int], fresh: Sequence[int]) -> list[int]:
    """Another beginning, and then the same tokens at the same places."""
    cut = _cut(draw, prompt)
    head = [*fresh, *range(3, 3 + cut)][:cut]
    return [*head, *prompt[cut:]]


SHARING = ("equal", "extends", "forks off")
RELATIONS = {
    "equal": lambda draw, old, new: old,
    "extends": lambda draw, old, new: (*old, *new[: draw.randint(1, 6)]),
    "begins like": lambda draw, old, new: old[: _cut(draw, old) + 1],
    "forks off": lambda draw, old, new: (*old[: _cut(draw, old)], *new[: draw.randint(1, 9)]),
    "one place": lambda draw, old, new: _one_place(draw, old),
    "same sum": lambda draw, old, new: _balanced(draw, old, 1),
    "same polynomial": lambda draw, old, new: _balanced(draw, old, draw.choice([2, 31, 131, 257])),
    "same exclusive or": lambda draw, old, new: _xor(draw, old),
    "same set": lambda draw, old, new: _swapped(draw, old),
    "padded": lambda draw, old, new: (*old, *[0] * draw.randint(1, 4)),
    "spliced": lambda draw, old, new: _spliced(draw, old, new),
    "repeated": lambda draw, old, new: (*old, *old),
}
"""How a prompt comes from an earlier one: what caches share, and what weak keys confuse."""
