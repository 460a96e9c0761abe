"""Compare what a fresh run has measured with the committed record."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvlab.ledger.values import read


@dataclass
class Differences:
    """What a fresh record says otherwise: only `failures` count, the others are reported."""

    failures: list[str] = field(default_factory=list)
    near_ties: list[str] = field(default_factory=list)
    times: list[str] = field(default_factory=list)


def differences(fresh: Mapping[str, Any], recorded: Mapping[str, Any]) -> Differences:
    """Compare two records, each `{notebook: part}` with parts as `Ledger.save` writes them.

    Tokens and verdicts must be equal, and measured values agree as their kind says. A token may
    differ from a step on whose recorded margin is below the tolerance of its dtype: that is a
    near-tie, and so are the values of the same notebook that follow from it. Times outside of
    theirs are told apart: the machine is slower or busier, which is no failure.
    """
    found = Differences()
    for notebook, ours, theirs in _pairs(fresh, recorded, found.failures, "{}"):
        wrong: list[str] = []
        flipped = _sequences(notebook, ours, theirs, wrong, found.near_ties)
        follows = found.near_ties if flipped else wrong
        for mine, known in _claims(notebook, ours, theirs, wrong):
            claim = f"{notebook} {known['id']}"
            if mine["verdict"] != known["verdict"]:
                wrong.append(f"{claim}: {mine['verdict']}, recorded {known['verdict']}")
            measured = mine["measured"], known["measured"]
            for name, a, b in _pairs(*measured, wrong, f"{claim}: {{}}"):
                one, other = read(a), read(b)
                if type(one) is not type(other) or not one.agrees(other):
                    line = f"{claim}: {name} is {one}, recorded {other}"
                    clock = not one.decides and not other.decides
                    (found.times if clock else follows).append(line)
        found.failures += [f"{w} (alone: make reproduce ONLY={notebook[:2]})" for w in wrong]
    return found


def _pairs(
    ours: Mapping[str, Any], theirs: Mapping[str, Any], missing: list[str], what: str
) -> Iterator[tuple[str, Any, Any]]:
    """What both have, by name; the others are told of as missing."""
    for name in sorted({*ours, *theirs}):
        if name in ours and name in theirs:
            yield name, ours[name], theirs[name]
        else:
            where = "fresh run" if name not in ours else "record"
            missing.append(f"{what.format(name)}: missing in the {where}")


def _claims(
    notebook: str, ours: Mapping[str, Any], theirs: Mapping[str, Any], missing: list[str]
) -> Iterator[tuple[Any, Any]]:
    mine, known = ({c["id"]: c for c in part["claims"]} for part in (ours, theirs))
    for _, a, b in _pairs(mine, known, missing, f"{notebook} {{}}"):
        yield a, b


def _sequences(
    notebook: str,
    ours: Mapping[str, Any],
    theirs: Mapping[str, Any],
    failures: list[str],
    near_ties: list[str],
) -> bool:
    """Token sequences of one notebook; returns whether a near-tie has flipped."""
    flipped = False
    both = ours["sequences"], theirs["sequences"]
    for name, a, b in _pairs(*both, failures, f"{notebook} {{}}"):
        if a["tokens"] == b["tokens"]:
            continue
        pairs = zip(a["tokens"], b["tokens"], strict=False)
        step = next((i for i, (x, y) in enumerate(pairs) if x != y), None)
        tolerance = theirs["tolerances"].get(b["dtype"], 0.0)
        if step is None:
            lengths = len(a["tokens"]), len(b["tokens"])
            failures.append(f"{notebook} {name}: {lengths[0]} tokens, recorded {lengths[1]}")
        elif b["margins"][step] < tolerance:
            flipped = True
            near_ties.append(
                f"{notebook} {name}: token {step + 1} differs at a margin of {b['margins'][step]}"
            )
        else:
            x, y = a["tokens"][step], b["tokens"][step]
            failures.append(f"{notebook} {name}: token {step + 1} is {x}, recorded {y}")
    return flipped
