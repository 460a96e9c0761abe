"""From what the experiments showed to a class: the decision procedure, rule by rule."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kvlab.diagnose.scenes import Seen
from kvlab.faults.catalogue import Kind

ALONE = ("lone", "long")
SERIAL_REUSE = ("reused", "after abort")
ONE_BY_ONE = ("side by side", "coming and going", "family")
LOCKED = {"coming and going": "coming and going, locked", "family": "family, locked"}
NUMBERS = ("number", "mask")
OWNERSHIP = ("given twice", "overlapping write", "freed under a reader", "double free", "wrong hit")

Shown = Mapping[str, Seen]


@dataclass(frozen=True)
class Finding:
    """What a rule concluded.

    Attributes:
        kind: The class of the fault.
        rule: The rule, in words.
        evidence: The observation that it rests on.
        sure: Whether the observation excludes the other classes, or only makes one likely.
    """

    kind: Kind
    rule: str
    evidence: str
    sure: bool


def _content(shown: Shown) -> Finding | None:
    """What a wrong row is says most: another head, another scale."""
    kinds: tuple[Kind, ...] = ("layout", "scale")
    for kind in kinds:
        for name, seen in shown.items():
            for misread in seen.misreads:
                if misread.what == kind:
                    why = {
                        "layout": "own rows come back as those of another head, kind or order",
                        "scale": "own rows come back times a factor",
                    }[kind]
                    return Finding(kind, why, f"{name}: {misread}", True)
    return None


def _alone(shown: Shown) -> Finding | None:
    """A lone request on a fresh pool shares nothing: only its places can be wrong."""
    for name in ALONE:
        if shown[name].misreads:
            why = "wrong for one request alone on a fresh pool"
            return Finding("position", why, f"{name}: {shown[name].first}", True)
    return None


def _key(shown: Shown) -> Finding | None:
    """A hit that is longer than what is equal."""
    for name, seen in shown.items():
        if seen.over_hits:
            why = "a hit is longer than any equal prefix of its context"
            return Finding("key", why, f"{name}: {seen.over_hits[0]}", True)
    return None


def _stale(shown: Shown) -> Finding | None:
    """Served one after another: right on a fresh place, wrong on a used one, without any hit."""
    for name in SERIAL_REUSE:
        for misread in shown[name].misreads:
            if not misread.cached and not misread.changed:
                why = "served one after another: right on a fresh place, wrong on a used one"
                return Finding("stale state", why, f"{name}: {misread}", True)
    if shown["returned"].misreads and not any(shown[n].misreads for n in ONE_BY_ONE):
        why = "wrong only for a name that was here before"
        return Finding("stale state", why, f"returned: {shown['returned'].first}", True)
    return None


def _numbers(shown: Shown) -> Finding | None:
    """Rows are right, their numbers or masks are not.

    Where requests meet one by one, a wrong length may be that of another request whose rows came
    with it: then this rule is silent.
    """
    rows_too = any(m.what not in NUMBERS for n in ONE_BY_ONE for m in shown[n].misreads)
    for name, seen in shown.items():
        for misread in seen.misreads:
            if misread.what in NUMBERS and (misread.cached or not rows_too):
                why = "positions or masks are wrong, in batches or after a hit only"
                return Finding("position", why, f"{name}: {misread}", True)
    return None


def _lock(shown: Shown) -> Finding | None:
    """Gone under a lock that covers every operation."""
    for name, locked in LOCKED.items():
        if shown[name].misreads and not shown[locked].misreads:
            why = "gone under a lock that covers every operation"
            return Finding("lifetime", why, f"{name}: {shown[name].first}", True)
    return None


def _batch_only(shown: Shown) -> Finding | None:
    """Right one by one, wrong in one forward pass."""
    others = [n for n in shown if "batched" not in n]
    batches = [n for n in shown if "batched" in n and shown[n].misreads]
    if batches and not any(shown[n].misreads for n in others):
        why = "right one by one, wrong in a batch"
        return Finding("position", why, f"{batches[0]}: {shown[batches[0]].first}", True)
    return None


def _log(shown: Shown) -> Finding | None:
    """The pool's own log contradicts itself about who holds what."""
    for name, seen in shown.items():
        found = [c for c in seen.conflicts or [] if c.kind in OWNERSHIP]
        if found and any(s.misreads for s in shown.values()):
            why = "rows of others, and the event log shows that a place had two owners"
            return Finding("lifetime", why, f"{name}: {found[0]}", True)
    return None


def _off_the_table(shown: Shown) -> Finding | None:
    """Foreign rows although the log is in order: they are not where the log says."""
    for name, seen in shown.items():
        if seen.conflicts is None:
            continue
        for misread in seen.misreads:
            if misread.what == "position" or (misread.what == "foreign" and not misread.gone):
                why = "rows of others, although the event log gives every place one owner"
                return Finding("position", why, f"{name}: {misread}", False)
    return None


def _rest(shown: Shown) -> Finding | None:
    """Rows are not what was written, on a hit that was due or beside others."""
    for name, seen in shown.items():
        if seen.misreads:
            first = seen.misreads[0]
            own = first.what == "position" and not first.changed
            why = (
                "own rows stand in another place"
                if own
                else "rows were freed, overwritten or published at the wrong moment"
            )
            kind: Kind = "position" if own else "lifetime"
            return Finding(kind, why, f"{name}: {seen.first}", False)
    return None


RULES: tuple[Callable[[Shown], Finding | None], ...] = (
    _key,
    _content,
    _alone,
    _stale,
    _numbers,
    _lock,
    _log,
    _batch_only,
    _off_the_table,
    _rest,
)
"""The first rule that applies decides."""


def conclude(shown: Shown) -> Finding | None:
    """The first rule's finding, or `None` where no experiment went wrong."""
    return next((f for f in (rule(shown) for rule in RULES) if f is not None), None)


def article_rule(shown: Shown) -> Kind | None:
    """The article's order of tests: lock first, then the length log, then the hash keys.

    It names one of three patterns; `None` where none of its tests speaks.
    """
    if not any(seen.wrong for seen in shown.values()):
        return None
    if _lock(shown) is not None:
        return "lifetime"
    found = {c.kind for seen in shown.values() for c in seen.conflicts or []}
    if "wrong start" in found:
        return "stale state"
    if any(seen.over_hits for seen in shown.values()) or "wrong hit" in found:
        return "key"
    return None
