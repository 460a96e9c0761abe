"""The ledger: what the article claims, what was measured, and the verdict.

Each notebook records its claims. Where the environment variable `KVLAB_RECORD` names a folder, the
notebook's part of the record is written there; elsewhere claims are only shown.
"""

from __future__ import annotations

import html
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

Verdict = Literal["reproduced", "qualified", "refuted"]
VERDICTS = ("reproduced", "qualified", "refuted")
FLOOR = 1e-6
"""Rounding errors below this are not told apart: one machine's 0 is another one's 1e-7."""


def rate(hits: int, n: int) -> dict[str, float | int]:
    """A share with its counts: `hits` of `n`."""
    if not 0 <= hits <= n or n == 0:
        raise ValueError(f"a rate needs 0 <= hits <= n and n > 0, got {hits} of {n}")
    return {"value": hits / n, "hits": hits, "n": n}


def rounding(value: float, factor: float = 10.0) -> dict[str, float]:
    """A number at the level of rounding errors; another machine may differ by `factor`."""
    return {"value": value, "factor": factor}


def timed(value: float, low: float, high: float, unit: str = "x") -> dict[str, float | str | bool]:
    """What a clock has told: an observation beside the verdict, usually from `low` to `high`.

    A busy machine may tell anything, so another value is reported and never fails. `unit`: "x" for
    a ratio, "%" for a share.
    """
    return {"value": value, "low": low, "high": high, "unit": unit, "clock": True}


def varying(value: float, low: float, high: float) -> dict[str, float | str]:
    """A number that real threads or a machine may move from `low` to `high`, and no further."""
    return {"value": value, "low": low, "high": high, "unit": ""}


@dataclass(frozen=True)
class Claim:
    """One claim with its verdict; the notebook shows it as a small table."""

    id: str
    statement: str
    measured: Mapping[str, Any]
    verdict: Verdict
    note: str
    notebook: str

    def _repr_markdown_(self) -> str:
        numbers = "; ".join(f"{name}: {show(value)}" for name, value in self.measured.items())
        return (
            f"**Claim {self.id}: {self.verdict}.** {self.statement}\n\n"
            f"Measured: {numbers}.\n\n{self.note}"
        )


def show(value: Any) -> str:
    """A measured value as text: `3 of 4`, `2.3e-05`, `5.1x`."""
    if isinstance(value, Mapping):
        if "hits" in value:
            return f"{value['hits']} of {value['n']}"
        unit = value.get("unit", "")
        return f"{value['value']:.0%}" if unit == "%" else f"{value['value']:.3g}{unit}"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(show, value))
    return str(value)


class Ledger:
    """The claims, tolerances and token sequences of one notebook.

    Args:
        notebook: Name of the notebook, without its extension.
    """

    def __init__(self, notebook: str) -> None:
        self.notebook = notebook
        self.claims: dict[str, Claim] = {}
        self.tolerances: dict[str, float] = {}
        self.sequences: dict[str, dict[str, Any]] = {}

    def claim(
        self, id: str, statement: str, measured: Mapping[str, Any], verdict: Verdict, note: str
    ) -> Claim:
        """Record a claim; a second call with the same id replaces the first.

        Raises:
            ValueError: Unknown verdict, nothing measured, or a number that is not finite.
        """
        if verdict not in VERDICTS:
            raise ValueError(f"unknown verdict {verdict!r}; use one of {', '.join(VERDICTS)}")
        if not measured:
            raise ValueError(f"claim {id} has nothing measured; a verdict needs numbers")
        plain = json.loads(json.dumps(measured, default=lambda x: x.item()))
        for name, value in plain.items():
            number = value["value"] if isinstance(value, dict) else value
            if isinstance(number, float) and not math.isfinite(number):
                raise ValueError(f"claim {id}: {name} is {number}")
        claim = Claim(id, statement, plain, verdict, note, self.notebook)
        self.claims[id] = claim
        self.save()
        return claim

    def tolerance(self, dtype: str, value: float) -> None:
        """Record how far rounding moves a logit in `dtype`."""
        self.tolerances[dtype] = value
        self.save()

    def sequence(
        self, name: str, dtype: str, tokens: Sequence[int], margins: Sequence[float]
    ) -> None:
        """Record the tokens of one run; later runs are compared with them token by token."""
        rounded = [round(m, 4) for m in margins]
        self.sequences[name] = {"dtype": dtype, "tokens": list(tokens), "margins": rounded}

    def save(self) -> None:
        """Write this notebook's part of the record where `KVLAB_RECORD` says, if it says."""
        folder = os.environ.get("KVLAB_RECORD")
        if not folder:
            return
        part = {
            "claims": [asdict(c) for c in self.claims.values()],
            "tolerances": self.tolerances,
            "sequences": self.sequences,
        }
        path = Path(folder) / f"{self.notebook}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dump(part), encoding="utf-8")

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td>{c.id}</td><td style='text-align:left'>{html.escape(c.statement)}</td>"
            f"<td>{c.verdict}</td></tr>"
            for c in self.claims.values()
        )
        return f"<table><tr><th>claim</th><th>statement</th><th>verdict</th></tr>{rows}</table>"


def dump(record: Mapping[str, Any]) -> str:
    """A record as JSON with every list of numbers on one line, so that a diff can be read."""
    text = json.dumps(record, ensure_ascii=False, indent=1, sort_keys=True)
    return re.sub(r"\[[-0-9.,\s]+\]", lambda m: " ".join(m[0].split()), text) + "\n"


@dataclass
class Differences:
    """What a fresh record says otherwise: only `failures` count, the others are reported."""

    failures: list[str]
    near_ties: list[str]
    times: list[str]


def differences(fresh: Mapping[str, Any], recorded: Mapping[str, Any]) -> Differences:
    """Compare two records, each `{notebook: part}` with parts as `Ledger.save` writes them.

    Tokens, counts and verdicts must be equal. A token may differ from a step on whose recorded
    margin is below the tolerance of its dtype: that is a near-tie, and so are the counts of the
    same notebook that follow from it. Rounding errors must stay within their bounds. Times outside
    of theirs are told apart: the machine is slower or busier, which is no failure.
    """
    failures: list[str] = []
    near_ties: list[str] = []
    times: list[str] = []
    for notebook in sorted({*fresh, *recorded}):
        if notebook not in fresh or notebook not in recorded:
            where = "fresh run" if notebook not in fresh else "record"
            failures.append(f"{notebook}: missing in the {where}")
            continue
        ours, theirs = fresh[notebook], recorded[notebook]
        flipped = _compare_sequences(notebook, ours, theirs, failures, near_ties)
        mine = {c["id"]: c for c in ours["claims"]}
        known = {c["id"]: c for c in theirs["claims"]}
        for id in sorted({*mine, *known}):
            if id not in mine or id not in known:
                where = "fresh run" if id not in mine else "record"
                failures.append(f"{notebook} {id}: missing in the {where}")
                continue
            if mine[id]["verdict"] != known[id]["verdict"]:
                failures.append(
                    f"{notebook} {id}: {mine[id]['verdict']}, recorded {known[id]['verdict']}"
                )
            for name in sorted({*mine[id]["measured"], *known[id]["measured"]}):
                a, b = mine[id]["measured"].get(name), known[id]["measured"].get(name)
                if not _agree(a, b):
                    text = f"{notebook} {id}: {name} is {show(a)}, recorded {show(b)}"
                    clock = (
                        isinstance(a, dict)
                        and isinstance(b, dict)
                        and "clock" in a
                        and "clock" in b
                    )
                    (times if clock else near_ties if flipped else failures).append(text)
    return Differences(failures, near_ties, times)


def _compare_sequences(
    notebook: str,
    ours: Mapping[str, Any],
    theirs: Mapping[str, Any],
    failures: list[str],
    near_ties: list[str],
) -> bool:
    """Token sequences of one notebook; returns whether a near-tie has flipped."""
    flipped = False
    for name in sorted({*ours["sequences"], *theirs["sequences"]}):
        a, b = ours["sequences"].get(name), theirs["sequences"].get(name)
        if a is None or b is None:
            failures.append(
                f"{notebook} {name}: missing in the {'fresh run' if a is None else 'record'}"
            )
            continue
        if a["tokens"] == b["tokens"]:
            continue
        pairs = zip(a["tokens"], b["tokens"], strict=False)
        step = next((i for i, (x, y) in enumerate(pairs) if x != y), None)
        tolerance = theirs["tolerances"].get(b["dtype"], 0.0)
        if step is not None and b["margins"][step] < tolerance:
            flipped = True
            near_ties.append(
                f"{notebook} {name}: token {step + 1} differs at a margin of {b['margins'][step]}"
            )
        else:
            at = "its length" if step is None else f"token {step + 1}"
            failures.append(f"{notebook} {name}: {at} differs from the record")
    return flipped


def _agree(a: Any, b: Any) -> bool:
    """Whether two measured values agree by the rule that the recorded one carries."""
    if isinstance(a, dict) and isinstance(b, dict):
        if a.keys() != b.keys():
            return False
        if "low" in b:
            return b["low"] <= a["value"] <= b["high"]
        if "factor" in b:
            small, large = sorted(max(abs(x["value"]), FLOOR) for x in (a, b))
            return bool(large <= b["factor"] * small)
        if "hits" in b:
            return (a["hits"], a["n"]) == (b["hits"], b["n"])
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=1e-6)
    return bool(a == b)
