"""Detectors: small independent questions to the same evidence, and the evidence itself.

A workload is a list of sessions; each session plays on a fresh pool. The evidence holds what the
sessions left behind: tokens, logits, attention, owners, checksums, lengths, events. A detector is a
function of the evidence and answers with an `Alarm`: raised, not raised, or cannot see.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import pandas as pd
from transformers import PreTrainedModel

from kvlab.diagnose.scenes import Stage
from kvlab.dye import common_prefix
from kvlab.interleave import Move, replay
from kvlab.observe import AttentionProbe, AttentionStep, Checksums, OwnershipGuard
from kvlab.observe.conflicts import Conflict, conflicts
from kvlab.pools import PrivatePool
from kvlab.pools.contract import PoolFactory, fresh
from kvlab.pools.events import EventLog
from kvlab.references import FAR, References
from kvlab.request import Context, Request, Run, known
from kvlab.schedule import run
from kvlab.verdict import Comparison
from kvlab.workloads import churn, together

Arm = Literal["serial", "concurrent"]


@dataclass(frozen=True)
class Part:
    """Requests in one order: a list of moves, or one after another where there is none."""

    requests: tuple[Request, ...]
    order: tuple[Move, ...] | None = None
    chunk: int | None = None


@dataclass(frozen=True)
class Session:
    """Parts that are played one after another on one fresh pool."""

    name: str
    parts: tuple[Part, ...]

    @property
    def arm(self) -> Arm:
        return "serial" if all(p.order is None for p in self.parts) else "concurrent"


@dataclass
class Played:
    """What one session left behind."""

    session: Session
    runs: list[Run] = field(default_factory=list)
    attention: dict[int, list[AttentionStep]] = field(default_factory=dict)  # by index of the run
    guard: OwnershipGuard = field(default_factory=lambda: OwnershipGuard(stop=False))
    checksums: Checksums = field(default_factory=lambda: Checksums(block_size=4, stop=False))
    log: EventLog | None = None
    errors: list[str] = field(default_factory=list)


def play(factory: PoolFactory, model: PreTrainedModel, session: Session, lock: bool) -> Played:
    """Play a session on a fresh pool, with every observer on."""
    pool = fresh(factory, model.config)
    played = Played(session)
    if hasattr(pool, "events"):
        pool.events = played.log = EventLog()
    for part in session.parts:
        probe = AttentionProbe()
        observers = [probe, played.guard, played.checksums]
        try:
            if part.order is None:
                runs = run(model, part.requests, pool, "serial", 1, observers, lock)
            else:
                runs = replay(model, part.requests, pool, part.order, observers, lock, part.chunk)
        except Exception as error:  # a faulty pool may raise anything at all
            played.errors.append(f"{type(error).__name__}: {error}")
            continue
        for one in runs.values():
            if one.steps:
                played.attention[len(played.runs)] = probe.steps.get(one.request.id, [])
                played.runs.append(one)
    return played


class Evidence:
    """All sessions of a workload on the pools of one factory; what is asked for is played once."""

    def __init__(
        self, factory: PoolFactory, references: References, workload: Sequence[Session]
    ) -> None:
        self.factory, self.workload = factory, workload
        self.references = references.beside(factory)
        self._played: dict[bool, list[Played]] = {}

    def played(self, lock: bool = False) -> list[Played]:
        """Every session, without or with a lock around every operation."""
        if lock not in self._played:
            model = self.references.model
            self._played[lock] = [play(self.factory, model, s, lock) for s in self.workload]
        return self._played[lock]

    def comparisons(self, lock: bool = False, arm: Arm | None = None) -> list[Comparison]:
        """Every run beside its cold recompute. Aborted runs are compared as far as they came."""
        found = []
        for played in self.played(lock):
            if arm is None or played.session.arm == arm:
                found += [self.references.judge(one) for one in played.runs]
        return found

    def conflicts(self) -> list[Conflict] | None:
        """What the event logs contradict; `None` where there is no log."""
        logs = [p.log for p in self.played() if p.log is not None]
        return [c for log in logs for c in conflicts(log.events)] if logs else None


@dataclass(frozen=True)
class Alarm:
    """A detector's answer: `raised` is `None` where it cannot see."""

    raised: bool | None
    why: str = ""


Detector = Callable[[Evidence], Alarm]


def output_parity(evidence: Evidence) -> Alarm:
    """Do all answers equal the cold recompute? A flipped near-tie is no alarm."""
    wrong = [c for c in evidence.comparisons() if c.verdict == "contaminated"]
    return Alarm(bool(wrong), f"{len(wrong)} answers differ")


def serial_repeated(evidence: Evidence) -> Alarm:
    """Served one after another, in several orders and again: is every answer right?"""
    wrong = [c for c in evidence.comparisons(arm="serial") if c.verdict == "contaminated"]
    return Alarm(bool(wrong), f"{len(wrong)} serial answers differ")


def global_lock(evidence: Evidence) -> Alarm:
    """Is it wrong without a lock around every operation, and right with one?"""
    wrong = [
        sum(c.verdict == "contaminated" for c in evidence.comparisons(lock))
        for lock in (False, True)
    ]
    return Alarm(wrong[0] > 0 and wrong[1] == 0, f"{wrong[0]} without, {wrong[1]} with the lock")


def length_log(evidence: Evidence) -> Alarm:
    """Does every forward pass begin behind the rows that its request has?"""
    jumps = 0
    for played in evidence.played():
        for one in played.runs:
            at = None
            for step in one.steps:
                if at is None and step.wrote + one.num_cached_tokens == len(one.request.tokens):
                    at = one.num_cached_tokens  # the prompt in one piece
                jumps += at is not None and step.start != at
                at = step.start + step.wrote
    return Alarm(jumps > 0, f"{jumps} passes began elsewhere")


def key_histogram(evidence: Evidence) -> Alarm:
    """Is any hit longer than what an earlier request of the same context has in common with it?"""
    logs = [p.log for p in evidence.played() if p.log is not None]
    if not logs:
        return Alarm(None, "the pool keeps no event log")
    too_long = 0
    for played in evidence.played():
        prompts = {r.id: r for part in played.session.parts for r in part.requests}
        before: list[tuple[Context, tuple[int, ...]]] = []
        for event in played.log.events if played.log else []:
            if event.request not in prompts:
                continue
            tokens = prompts[event.request].tokens
            if event.kind == "hit":
                equal = [
                    common_prefix(tokens, theirs)
                    for context, theirs in before
                    if known(context) is not None and known(context) == known(event.context)
                ]
                too_long += event.length > max(equal, default=0)
            if event.kind == "admit":
                before.append((event.context, tokens))
    return Alarm(too_long > 0, f"{too_long} hits are longer than what is equal")


def ownership(evidence: Evidence) -> Alarm:
    """Does anybody read a row that somebody else wrote last, or nobody?"""
    guards = [p.guard for p in evidence.played()]
    if all(g.verdict == "cannot see" for g in guards):
        return Alarm(None, "the pool does not record owners")
    found = [f for g in guards for f in g.found]
    return Alarm(bool(found), str(found[0]) if found else "")


def attention_statistics(evidence: Evidence) -> Alarm:
    """Do maximum and entropy of attention stay where a private cache has them?"""
    largest = 0.0
    for played in evidence.played():
        for i, steps in played.attention.items():
            wanted = evidence.references.attention(played.runs[i].request)
            reference = evidence.references.run(played.runs[i].request)
            for n, (ours, theirs) in enumerate(zip(steps, wanted, strict=False)):
                for one, other in (
                    (ours.maximum, theirs.maximum),
                    (ours.entropy, theirs.entropy),
                ):
                    largest = max(largest, (one - other).abs().max().item())
                # Behind the first other token the two runs are no longer the same question.
                if played.runs[i].tokens[n] != reference.tokens[n]:
                    break
    return Alarm(largest > 1e-2, f"moved by {largest:.2g} at most")


def checksum(evidence: Evidence) -> Alarm:
    """Do rows stay as they were when their request first read them?"""
    found = [f for p in evidence.played() for f in p.checksums.found]
    return Alarm(bool(found), str(found[0]) if found else "")


def event_conflicts(evidence: Evidence) -> Alarm:
    """Does the event log contradict isolation?"""
    found = evidence.conflicts()
    if found is None:
        return Alarm(None, "the pool keeps no event log")
    return Alarm(bool(found), str(found[0]) if found else "")


def logit_drift(evidence: Evidence) -> Alarm:
    """Does any logit move further than rounding moves it?"""
    moved = max((c.drift for c in evidence.comparisons()), default=0.0)
    limit = FAR * evidence.references.tolerance
    return Alarm(moved > limit, f"moved by {moved:.2g}, the limit is {limit:.2g}")


DETECTORS: dict[str, Detector] = {
    "output parity": output_parity,
    "serial, repeated": serial_repeated,
    "global lock": global_lock,
    "length log": length_log,
    "key histogram": key_histogram,
    "ownership": ownership,
    "attention statistics": attention_statistics,
    "checksum": checksum,
    "event conflicts": event_conflicts,
    "logit drift": logit_drift,
}


def detect(evidence: Evidence) -> dict[str, Alarm]:
    """Ask every detector."""
    return {name: detector(evidence) for name, detector in DETECTORS.items()}


def matrix(
    factories: dict[str, PoolFactory], references: References, workload: Sequence[Session]
) -> pd.DataFrame:
    """Which detector answers to which pool: one row for each pool, one column for each detector."""
    rows = {
        name: {d: a.raised for d, a in detect(Evidence(f, references, workload)).items()}
        for name, f in factories.items()
    }
    return pd.DataFrame.from_dict(rows, orient="index", columns=list(DETECTORS)).astype(object)


def workload(model: PreTrainedModel) -> list[Session]:
    """Sessions that give every fault of the catalogue its occasion, in few forward passes.

    Made for pools of `kvlab.faults.make_pool`: ten requests at once, 96 rows at most.
    """
    stage = Stage(lambda config: PrivatePool(config), model)
    ask = stage.request

    def after(name: str, *parts: Part) -> Session:
        return Session(name, parts)

    reused = [ask(f"r{i}", n, i) for i, n in enumerate((18, 3, 12, 2, 9))]
    aborted = ask("gone", 14, 30, 6)
    next_one = ask("next", 5, 31, 6)
    base = ask("base", 14, 40)
    tail = ask("", 9, 41).tokens
    warm = [
        base,
        replace(base, id="twin"),
        replace(base, id="fork", tokens=base.tokens[:10] + tail[:4]),
        replace(base, id="again"),
        replace(base, id="longer", tokens=base.tokens + tail),
        replace(base, id="other", tokens=base.tokens + tail[::-1]),
        replace(base, id="last", tokens=base.tokens + tail),
    ]
    misses = [
        replace(base, id=f"shift {p}", tokens=_shifted(base.tokens, p, shift, stage.vocab))
        for p, shift in ((0, 256), (3, 1), (9, 1), (11, 512), (12, 1))
    ]
    splice = ask("splice", 14, 42)
    misses.append(replace(splice, tokens=splice.tokens[:4] + base.tokens[4:12] + splice.tokens[4:]))
    contexts: tuple[Context, ...] = (
        (("adapter", "a"), ("version", "1")),
        (("adapter", "a"), ("version", "2")),
        (("adapter", "b"), ("version", "1")),
        (("tenant", "a"), ("version", "1")),
        (("tenant", "b"), ("version", "1")),
        *((("image", f"picture {i}"),) for i in range(6)),
        (("image", None),),
    )
    asked = [replace(base, id=f"context {i}", context=c) for i, c in enumerate(contexts)]
    short = [replace(ask(f"b{i}", 4, 60 + i), max_new_tokens=1) for i in range(16)]
    many = [ask(f"m{i}", 3 + 2 * i % 11, 80 + i) for i in range(10)]
    stems = [ask("", 12, 100 + i).tokens for i in range(3)]
    family = [
        Request(f"f{i}", stems[i % 3][: 6 + (5 * i) % 7] + ask("", 1 + i % 4, 110 + i).tokens, 3)
        for i in range(14)
    ]
    readers = [replace(f, id=f"reader {f.id}", max_new_tokens=4) for f in family[:4]]
    # Three of them need more blocks than there are beside the readers: the last one has to wait.
    large = [ask(f"large {i}", 86, 130 + i, 2) for i in range(3)]
    crowd = [Move((r.id,)) for r in [*readers, *readers, *large, *large]]
    crowd += [Move((r.id,)) for r in [*readers, *readers, *readers, *readers, *large, *large]]
    guests = [ask(f"g{i}", 4 + (7 * i) % 12, 140 + i) for i in range(14)]
    names = [replace(ask(f"n{i}", 6, 160 + i), context=None) for i in range(3)]
    others = [replace(ask(f"o{i}", 6, 170 + i), context=None) for i in range(3)]
    again = [replace(ask(f"n{i}", 6, 180 + i), context=None) for i in range(3)]
    back = [r for pair in zip(others, again, strict=True) for r in pair]
    inside = [Move((r.id,)) for r in many]
    odd = [Move(tuple(r.id for r in many[::-1])), Move(tuple(r.id for r in many[1:]))]
    return [
        after("used places", Part(tuple(reused)), Part(tuple(reused[::-1]))),
        after(
            "after an abort",
            Part((aborted,), (*[Move(("gone",))] * 3, Move(("gone",), kind="abort")), 5),
            Part((next_one,)),
            Part((replace(aborted, id="back"),)),
        ),
        after("warm", *[Part((r,)) for r in warm]),
        after("near misses", Part((base,)), *[Part((r,)) for r in [*misses, *asked]]),
        after("strangers", Part(tuple(short))),
        after("long", Part((ask("long", 40, 50, 30),))),
        after("side by side", Part(tuple(many), tuple(together(many)))),
        after("in batches", Part(tuple(many), (*inside, *inside, *odd, *odd))),
        after("guests", Part(tuple(guests), tuple(churn(guests, 1, 9)), chunk=5)),
        after("family", Part(tuple(family), tuple(churn(family, 2, 9)))),
        after("family in batches", Part(tuple(family), tuple(churn(family, 3, 9, batched=True)))),
        after("full", Part(tuple(family[:4])), Part((*readers, *large), tuple(crowd))),
        after("names come back", Part(tuple(names)), Part(tuple(back), tuple(together(back)))),
    ]


def clean_schedule(model: PreTrainedModel, seed: int) -> Session:
    """A random session: lengths, shared stems, contexts, aborts, batches and order by a seed."""
    stage = Stage(lambda config: PrivatePool(config), model)
    draw = random.Random(seed)
    stems = [stage.request("", 10, 10 * seed + i).tokens for i in range(2)]
    requests = []
    for i in range(draw.randint(2, 5)):
        stem = draw.choice(stems)[: draw.randint(0, 10)]
        tail = stage.request("", draw.randint(1, 8), 10 * seed + i + 2).tokens
        context: Context = draw.choice([(), (("tenant", "a"),), (("tenant", "b"),), None])
        requests.append(Request(f"q{i}", stem + tail, draw.randint(1, 4), context=context))
    order = churn(requests, seed, draw.randint(1, 5), draw.random() < 0.5)
    part = Part(tuple(requests), tuple(order), draw.choice([None, 3]))
    return Session(f"clean {seed}", (part, Part(tuple(requests))))


def _shifted(tokens: tuple[int, ...], at: int, by: int, vocab: int) -> tuple[int, ...]:
    changed = list(tokens)
    changed[at] = 3 + (changed[at] - 3 + by) % (vocab - 3)
    return tuple(changed)
