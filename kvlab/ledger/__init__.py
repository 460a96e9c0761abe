"""The ledger: what the article claims, what was measured, and the verdict.

A notebook records a claim in one line: `book.claim("A1", victims=Rate(44, 44))`. What the claim
says and by which rule it is judged stands in `kvlab.ledger.claims`. Where the environment variable
`KVLAB_RECORD` names a folder, the notebook's part of the record is written there; elsewhere claims
are only shown.
"""

from __future__ import annotations

import html
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvlab.ledger.claims import CLAIMS, Measured, Statement, Verdict
from kvlab.ledger.values import Count, Rate, Rounding, Time, Value, Varying

__all__ = ["Claim", "Count", "Ledger", "Rate", "Rounding", "Time", "Varying", "dump"]


@dataclass(frozen=True, repr=False)
class Claim:
    """One claim with its verdict; the notebook shows it as text."""

    id: str
    statement: Statement
    measured: Measured
    verdict: Verdict

    def as_dict(self) -> dict[str, Any]:
        measured = {name: value.as_dict() for name, value in self.measured.items()}
        return {"id": self.id, "verdict": self.verdict, "measured": measured}

    def __repr__(self) -> str:
        return f"Claim {self.id}: {self.verdict}"

    def _repr_markdown_(self) -> str:
        numbers = "; ".join(f"{name}: {value}" for name, value in self.measured.items())
        return (
            f"**Claim {self.id}: {self.verdict}.** {self.statement.text}\n\n"
            f"Measured: {numbers}.\n\nRule: {self.statement.rule}.\n\n{self.statement.note}"
        )


@dataclass(repr=False)
class Ledger:
    """The claims, tolerances and token sequences of one notebook.

    Args:
        notebook: Name of the notebook, without its extension.
        statements: What can be claimed, by id: `kvlab.ledger.claims.CLAIMS`.
    """

    notebook: str
    statements: Mapping[str, Statement] = field(default_factory=lambda: CLAIMS)
    claims: dict[str, Claim] = field(default_factory=dict, init=False)
    tolerances: dict[str, float] = field(default_factory=dict, init=False)
    sequences: dict[str, dict[str, Any]] = field(default_factory=dict, init=False)

    def claim(self, id: str, **measured: Any) -> Claim:
        """Judge and record a claim; a second call with the same id replaces the first.

        Args:
            id: Of a statement.
            measured: A `Value` for each name, or anything plain, which is a `Count`. In names,
                underscores stand for spaces.

        Raises:
            ValueError: Unknown id, nothing measured, or a number that is not finite.
            KeyError: The rule asks for a name that was not measured.
        """
        if id not in self.statements:
            raise ValueError(f"unknown claim {id!r}; kvlab/ledger/claims.py has all")
        if not measured:
            raise ValueError(f"claim {id} has nothing measured; a verdict needs numbers")
        values = {
            name.replace("_", " "): value if isinstance(value, Value) else Count(value)
            for name, value in measured.items()
        }
        statement = self.statements[id]
        claim = self.claims[id] = Claim(id, statement, values, statement.judge(values))
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
        rounded = [float(f"{m:.3g}") for m in margins]  # the digits behind differ by machine
        self.sequences[name] = {"dtype": dtype, "tokens": list(tokens), "margins": rounded}

    def save(self) -> None:
        """Write this notebook's part of the record where `KVLAB_RECORD` says, if it says."""
        folder = os.environ.get("KVLAB_RECORD")
        if not folder:
            return
        part = {
            "claims": [c.as_dict() for c in self.claims.values()],
            "tolerances": self.tolerances,
            "sequences": self.sequences,
        }
        path = Path(folder) / f"{self.notebook}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dump(part), encoding="utf-8")

    def __repr__(self) -> str:
        return f"Ledger of {self.notebook}: {len(self.claims)} claims"

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td>{c.id}</td><td style='text-align:left'>{html.escape(c.statement.text)}</td>"
            f"<td>{c.verdict}</td></tr>"
            for c in self.claims.values()
        )
        return f"<table><tr><th>claim</th><th>statement</th><th>verdict</th></tr>{rows}</table>"


def dump(record: Mapping[str, Any]) -> str:
    """A record as JSON with every list of numbers on one line, so that a diff can be read."""
    text = json.dumps(record, ensure_ascii=False, indent=1, sort_keys=True)
    return re.sub(r"\[[-0-9.,\s]+\]", lambda m: " ".join(m[0].split()), text) + "\n"
