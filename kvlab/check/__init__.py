"""Does a cache pool keep its requests apart? One function and one command.

    from kvlab.check import check
    report = check(MyPool)
    assert report.ok, report

or `python -m kvlab.check package.module:factory`. Histories of moves over the pool contract are
drawn by seeds and played on fresh pools with rows that say what they are; five rules judge what the
pool hands back:

- read: every row is the right one, with its number and its mask;
- hit: never longer than the longest prefix that was completely written in that known context;
- refusal: without a refused move, everything later is the same;
- conservation: when all have left, the pool takes what a fresh one takes;
- and what never came up is "not exercised", never "passed".
"""

from __future__ import annotations

import html
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import pandas as pd
from transformers import PretrainedConfig

from kvlab.check.classify import Diagnosis, classify
from kvlab.check.generate import Sizes
from kvlab.check.history import Anomaly, History
from kvlab.check.run import Bench, Trace, shorten
from kvlab.models import tiny_config
from kvlab.pools.contract import PoolFactory

__all__ = ["Anomaly", "Diagnosis", "History", "Report", "check", "replay"]

BUDGETS = {"quick": 60, "full": 600}
"""Histories; a verdict never depends on a clock."""

SITUATIONS = (
    "at once", "batch", "hit", "partial hit", "full", "abort within a prefill", "a name came back",
    "fork", "truncate", "parked",
)  # fmt: skip
NEEDED = ("at once", "abort within a prefill", "a name came back")
"""Without these nothing can be said about any pool."""


@dataclass
class Report:
    """What a check found.

    Attributes:
        histories: How many were played.
        sizes: What a fresh pool takes.
        exercised: How often each situation came up.
        trace: The shortest history that shows an anomaly, and what it shows.
        diagnosis: The class of the fault.
    """

    histories: int
    sizes: Sizes | None = None
    exercised: Counter[str] = field(default_factory=Counter)
    trace: Trace | None = None
    diagnosis: Diagnosis | None = None

    @property
    def ok(self) -> bool:
        return self.verdict == "isolated"

    @property
    def missing(self) -> list[str]:
        """Situations that never came up and without which a pool cannot be called isolated."""
        return [name for name in NEEDED if not self.exercised[name]]

    @property
    def verdict(self) -> Literal["isolated", "contaminated", "not enough exercised"]:
        if self.trace is not None:
            return "contaminated"
        return "not enough exercised" if self.missing else "isolated"

    @property
    def exit_code(self) -> int:
        return {"isolated": 0, "contaminated": 1, "not enough exercised": 3}[self.verdict]

    @property
    def table(self) -> pd.DataFrame:
        """How often each situation came up; 0 is not exercised."""
        counts = {name: self.exercised[name] for name in SITUATIONS}
        return pd.DataFrame({"situation": counts.keys(), "times": counts.values()})

    def __str__(self) -> str:
        lines = [f"{self.verdict} ({self.histories} histories)"]
        if self.trace is not None:
            lines += [
                f"class: {self.diagnosis}",
                f"what: {self.trace.anomalies[0]}",
                f"shortest history: {self.trace.history}",
                *(f"  {label}: {r}" for label, r in self.trace.history.requests.items()),
            ]
        never = [name for name in SITUATIONS if not self.exercised[name]]
        counts = ", ".join(f"{n} {self.exercised[n]}" for n in SITUATIONS if self.exercised[n])
        lines.append(f"exercised: {counts or 'nothing'}")
        if never:
            lines.append(f"not exercised: {', '.join(never)}")
        if not self.exercised["hit"]:
            lines.append("nothing was ever shared: it isolates by not sharing")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"

    def to_json(self) -> str:
        """Everything, as JSON; `history` can be replayed."""
        found = self.trace
        return json.dumps(
            {
                "verdict": self.verdict,
                "histories": self.histories,
                "exercised": dict(self.exercised),
                "class": list(self.diagnosis.kinds) if self.diagnosis else None,
                "because": self.diagnosis.rule if self.diagnosis else None,
                "anomalies": [str(a) for a in found.anomalies] if found else [],
                "history": json.loads(found.history.to_json()) if found else None,
            },
            ensure_ascii=False,
            indent=1,
        )


def check(
    factory: PoolFactory,
    config: PretrainedConfig | None = None,
    budget: Literal["quick", "full"] | int = "quick",
    seed: int = 0,
    name: bool = True,
    journal: Callable[[str], None] | None = None,
) -> Report:
    """Play histories on fresh pools of a factory, until one shows that it does not isolate.

    Args:
        factory: `factory(config)` (or `factory()`) returns a fresh pool at every call.
        config: The model's configuration that the pool is made for; a tiny one by default.
        budget: How many histories: "quick" (60), "full" (600), or a number.
        seed: Of the first history.
        name: Whether to shorten the history that fails and to name the class of the fault.
        journal: Is told each move before it is made.

    Runs in this process, so a pool that hangs hangs the caller: the command can end it.

    Raises:
        ValueError: A budget that is none.
    """
    histories = BUDGETS.get(budget, budget) if isinstance(budget, str) else budget
    if not isinstance(histories, int) or histories < 1:
        raise ValueError(f"budget must be 'quick', 'full' or a number from 1 on, got {budget!r}")
    report = Report(0)
    bench = Bench(factory, config or tiny_config(), journal)
    report.sizes, report.trace = bench.sizes, bench.first
    last = histories
    while report.histories < last and (report.trace is None or not report.trace.telling):
        trace = bench.draw(seed + report.histories)
        report.histories += 1
        most = max(report.exercised["at once"], trace.exercised["at once"])
        report.exercised += trace.exercised
        report.exercised["at once"] = most
        if trace.anomalies and (report.trace is None or trace.telling):
            # Wrong rows and hits tell more of the cause than a count: look a little further.
            report.trace = trace
            last = min(histories, report.histories + 20)
    if report.exercised["at once"] < 2:
        del report.exercised["at once"]
    if report.trace is not None and name:
        report.trace = shorten(bench, report.trace)
        anomaly = report.trace.anomalies[0]
        report.diagnosis = classify(bench, report.trace.history, anomaly)
    return report


def replay(factory: PoolFactory, history: History, config: PretrainedConfig | None = None) -> Trace:
    """Play one history again on a fresh pool."""
    return Bench(factory, config or tiny_config()).play(history)
