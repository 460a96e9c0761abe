"""Which scenes are played, in which order, and what each of them asks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from kvlab.diagnose.scenes import Seen, Stage
from kvlab.interleave import Move
from kvlab.request import Context, Request
from kvlab.workloads import churn, together

CONTEXTS: tuple[Context, ...] = (
    (),
    (("tenant", "a"),),
    (("tenant", "b"),),
    (("adapter", "a"),),
    (("adapter", "b"),),
    (("adapter", "a"), ("version", "1")),
    (("adapter", "a"), ("version", "2")),
    (("adapter", "a"), ("tenant", "b")),
    (("adapter", "b"), ("tenant", "a")),
    *((("image", f"{i:08x}"),) for i in range(0, 1 << 30, 1 << 26)),
    (("salt", "a"),),
    (("image", None),),
    None,
)


@dataclass(frozen=True)
class Experiment:
    """A question, and the scene that answers it."""

    name: str
    question: str
    play: Callable[[Stage], Seen]


def lone(stage: Stage) -> Seen:
    request = stage.request("a", min(9, stage.small - 4), 1)
    seen = stage.play(stage.serial([request]))
    for chunk in (1, 3):
        if request.rows_needed <= stage.rows:
            order = [Move(("a",))] * 20
            seen += stage.play(stage.moves([request], order, chunk=chunk))
    return seen


def long(stage: Stage) -> Seen:
    half = max(1, stage.rows // 2)
    return stage.play(stage.serial([stage.request("a", half, 2, stage.rows - half + 1)]))


def reused(stage: Stage) -> Seen:
    """More requests than places, long ones before short ones, none with anything in common."""
    lengths = [stage.small - 6, 3, stage.small - 9, 5, 2] * 5
    requests = [stage.request(f"r{i}", max(1, n), 100 + i) for i, n in enumerate(lengths)]
    return stage.play(stage.serial(stage.fits(*requests)))


def after_abort(stage: Stage) -> Seen:
    scenes = []
    for steps in range(1, 7):
        first = stage.request(f"a{steps}", max(1, stage.small - 8), 200 + steps, 5)
        second = stage.request(f"b{steps}", 4, 300 + steps)
        if len(stage.fits(first, second)) == 2:
            abort = [*[Move((first.id,))] * steps, Move((first.id,), kind="abort")]
            scenes += [stage.moves([first], abort, lock=True, chunk=3), stage.serial([second])]
            scenes.append(stage.serial([replace(first, id=f"c{steps}")]))
    return stage.play(*scenes)


def returned(stage: Stage) -> Seen:
    """The same names come back with other prompts, beside requests that hold their old places."""
    lengths = (stage.small - 8, 4, 6)
    first = [stage.request(f"r{i}", max(1, n), 400 + i) for i, n in enumerate(lengths)]
    others = [stage.request(f"x{i}", max(1, n), 410 + i) for i, n in enumerate(lengths)]
    again = [stage.request(f"r{i}", max(1, n), 420 + i) for i, n in enumerate(lengths)]
    both = [r for pair in zip(others, again, strict=True) for r in pair][: stage.room]
    seen = Seen()
    for context in ((), None):  # with and without a prefix tier that keeps the old places
        once, now = ([replace(r, context=context) for r in part] for part in (first, both))
        seen += stage.play(stage.serial(once), stage.moves(now, together(now)))
    return seen


def warm(stage: Stage) -> Seen:
    """Equal prompts, and prompts that begin equally: every hit is one that must be right."""
    requests = []
    for seed, length in enumerate((6, 7, 8, 12, 17, 20)):
        base = stage.request(f"base {length}", length, 500 + seed, 3)
        other = stage.request("", length, 550 + seed).tokens
        third = stage.request("", length, 570 + seed).tokens
        cut = length * 2 // 3
        # Forks inside and at the end, and each of them again after the others have written.
        family = [
            base,
            replace(base, id=f"twin {length}"),
            replace(base, id=f"fork {length}", tokens=base.tokens[:cut] + other[: length - cut]),
            replace(base, id=f"longer {length}", tokens=base.tokens + other[:3]),
            replace(base, id=f"again {length}"),
            replace(base, id=f"other {length}", tokens=base.tokens + third[:3]),
            replace(base, id=f"last {length}", tokens=base.tokens + other[:3]),
            replace(base, id=f"fork again {length}", tokens=base.tokens[:cut] + third[:3]),
            replace(base, id=f"end {length}"),
        ]
        requests += family
    scene = stage.serial(stage.fits(*requests))
    return stage.play(scene) + stage.play(scene, apart=False)


def near_misses(stage: Stage) -> Seen:
    """Prompts and contexts that are almost equal: no hit may be longer than what is equal."""
    prompts: list[Request] = []
    base = stage.request("base", 18, 600, 1)
    prompts.append(base)
    for position in range(18):
        for shift in (1, 16, 128, 256, 512):
            tokens = list(base.tokens)
            tokens[position] = 3 + (tokens[position] - 3 + shift) % (stage.vocab - 3)
            prompts.append(replace(base, id=f"p{position} {shift}", tokens=tuple(tokens)))
    other = stage.request("other", 18, 601, 1)
    prompts += [other, replace(base, id="sorted", tokens=tuple(sorted(base.tokens)))]
    for block in (1, 2, 3, 4, 8):
        for at in range(0, 18 - block, block):
            spliced = [*other.tokens]
            spliced[at : at + block] = base.tokens[at : at + block]
            prompts.append(replace(base, id=f"splice {block} {at}", tokens=tuple(spliced)))
    in_contexts = [
        replace(stage.request("", 9, 602, 1), id=f"context {i}", context=context)
        for i, context in enumerate(CONTEXTS)
    ]
    seen = stage.play(stage.serial(stage.fits(*prompts)))
    seen += stage.play(stage.serial(stage.fits(*in_contexts)))
    if seen.hits:  # a pool that shares: enough strangers that a short hash meets itself
        strangers = [stage.request(f"random {i}", 5, 700 + i, 1) for i in range(400)]
        seen += stage.play(stage.serial(stage.fits(*strangers)))
    return seen


def side_by_side(stage: Stage) -> Seen:
    """As many as there is room for, on a fresh pool, one by one; nobody leaves, nothing equal."""
    requests = _mixed(stage, 800)
    return stage.play(stage.moves(requests, together(requests)))


def batched(stage: Stage) -> Seen:
    """The same, decoded in one batch of every size."""
    requests = _mixed(stage, 800)
    seen, most = Seen(), len(requests)
    for size in sorted({s for s in (2, 3, 5, 8, most - 2, most - 1, most) if 2 <= s <= most}):
        turn = requests[-size:]
        inside = [Move((r.id,)) for r in requests]
        order = [*inside, *inside, *[Move(tuple(r.id for r in turn))] * 3]
        order += [Move(tuple(r.id for r in reversed(turn)))]
        seen += stage.play(stage.moves(requests, order))
    return seen


def _mixed(stage: Stage, seed: int) -> list[Request]:
    top = max(2, stage.small - 8)
    lengths = [2 + (5 * i) % top for i in range(stage.room)]
    requests = [stage.request(f"r{i}", n, seed + i, 5) for i, n in enumerate(lengths)]
    return stage.fits(*requests)


def coming_and_going(stage: Stage, lock: bool = False, batch: bool = False) -> Seen:
    """Requests with nothing in common come, go and are aborted; more than there is room for."""
    scenes = []
    for seed in range(3):
        requests = [
            stage.request(
                f"{seed} r{i}", 2 + (7 * i) % max(2, stage.small - 8), 900 + 50 * seed + i
            )
            for i in range(24)
        ]
        requests = stage.fits(*requests)
        order = churn(requests, seed, stage.room, batch)
        scenes.append(stage.moves(requests, order, lock, chunk=4))
    return stage.play(*scenes)


def family(stage: Stage, lock: bool = False, batch: bool = False) -> Seen:
    """Requests that begin equally come and go, until the pool is full."""
    stems = [stage.request("", 14, 1000 + s).tokens for s in range(5)]
    scenes = []
    for seed in range(3):
        requests = []
        for i in range(24):
            stem = stems[(i * 7 + seed) % len(stems)][: 6 + (5 * i) % 9]
            tail = stage.request("", 1 + i % 4, 1100 + 40 * seed + i).tokens
            requests.append(Request(f"{seed} f{i}", stem + tail, 4))
        # One long request now and then needs everything that can be evicted.
        long = stage.request(f"{seed} long", max(1, stage.rows * 2 // 3), 1300 + seed)
        requests.insert(12, long)
        requests = stage.fits(*requests)
        order = churn(requests, 50 + seed, stage.room, batch)
        scenes.append(stage.moves(requests, order, lock))
    return stage.play(*scenes)


EXPERIMENTS = (
    Experiment("lone", "one request, cold, on a fresh pool", lone),
    Experiment("long", "one request that fills its place", long),
    Experiment("reused", "one after another on used places", reused),
    Experiment("after abort", "one after another, behind an abort at each step", after_abort),
    Experiment("warm", "hits on equal prefixes, one after another", warm),
    Experiment("near misses", "almost equal prompts and contexts", near_misses),
    Experiment("side by side", "several at once, one by one, nobody leaves", side_by_side),
    Experiment("batched", "the same in one forward pass", batched),
    Experiment("coming and going", "several at once, with releases and aborts", coming_and_going),
    Experiment(
        "coming and going, batched",
        "the same in batches",
        lambda stage: coming_and_going(stage, batch=True),
    ),
    Experiment("family", "the same with equal prefixes, in a full pool", family),
    Experiment("family, batched", "the same in batches", lambda s: family(s, batch=True)),
    Experiment("returned", "names that were here before", returned),
    Experiment(
        "coming and going, locked",
        "under a lock that covers every operation",
        lambda stage: coming_and_going(stage, lock=True),
    ),
    Experiment("family, locked", "the same lock", lambda stage: family(stage, lock=True)),
)
