"""A conformance suite for anybody's cache pool.

    from kvlab.conformance import check
    report = check(MyPool, profile="quick")
    assert report.ok, report

or `python -m kvlab.conformance package.module:factory`.
"""

from __future__ import annotations

import html
import json
import time
from dataclasses import dataclass, field
from typing import Literal

import pandas as pd
from transformers import PreTrainedModel

from kvlab.conformance.bench import Bench, Failure, NotApplicable, Profile, play_again
from kvlab.conformance.cases import CASES
from kvlab.models import tiny_model
from kvlab.pools.contract import PoolFactory
from kvlab.references import References

__all__ = ["CASES", "Failure", "Report", "Row", "check", "play_again"]


@dataclass(frozen=True)
class Row:
    """What one case said."""

    case: str
    result: Literal["passed", "failed", "not applicable"]
    runs: int
    seconds: float
    failures: int
    first: str


@dataclass
class Report:
    """What the suite found.

    Attributes:
        rows: One for each case that was played.
        failures: Every wrong answer, with what is needed to see it again (`play_again`).
        sharing: "shares prefixes", or "isolates by not sharing": then equal prompts never met.
        profile: "quick" or "full".
    """

    profile: Profile
    rows: list[Row] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    sharing: str = ""

    @property
    def ok(self) -> bool:
        return not self.failures

    @property
    def table(self) -> pd.DataFrame:
        """One row for each case."""
        return pd.DataFrame([vars(r) for r in self.rows]).drop(columns="seconds")

    def to_json(self) -> str:
        """Everything, as JSON."""
        return json.dumps(
            {
                "ok": self.ok,
                "profile": self.profile,
                "sharing": self.sharing,
                "cases": [vars(r) for r in self.rows],
                "failures": [f.as_dict() for f in self.failures],
            },
            ensure_ascii=False,
            indent=1,
        )

    def __str__(self) -> str:
        lines = [f"{r.case:18} {r.result:15} {r.runs:5} runs  {r.first}" for r in self.rows]
        verdict = "isolated" if self.ok else f"contaminated: {len(self.failures)} failures"
        return "\n".join([*lines, f"{verdict} ({self.profile} profile, {self.sharing})"])

    def _repr_html_(self) -> str:
        last = str(self).splitlines()[-1]
        return f"{self.table.to_html(index=False)}<p>{html.escape(last)}</p>"


def check(
    pool_factory: PoolFactory,
    model: PreTrainedModel | None = None,
    profile: Profile = "quick",
    block_size: int = 16,
    shares_prefixes: bool | None = None,
    max_requests: int | None = None,
    references: References | None = None,
    stop_at_first: bool = False,
) -> Report:
    """Run the suite on fresh pools of a factory.

    Args:
        pool_factory: `factory(model.config)` (or `factory()`) returns a fresh pool at every call.
        model: The model that serves; a tiny one of random weights by default.
        profile: "quick", for every change, or "full", which plays every order and every edge.
        block_size: Rows in a block, where the edges of a prefix lie.
        shares_prefixes: Whether requests that agree must report cached tokens: the positive
            control, since a pool that shares nothing passes everything else. `None`: only report.
        max_requests: Requests at once; found out, up to 16, if `None`.
        references: The right answers, if several pools are judged by the same model.
        stop_at_first: Leave off after the first case that fails.

    Raises:
        ValueError: An unknown profile, or a size that is not positive.
    """
    if profile not in ("quick", "full"):
        raise ValueError(f"unknown profile {profile!r}; use 'quick' or 'full'")
    if block_size < 1 or (max_requests is not None and max_requests < 1):
        raise ValueError("block_size and max_requests must be at least 1")
    if references is None:
        references = References(model if model is not None else tiny_model())
    references = references.beside(pool_factory)
    bench = Bench(pool_factory, references, profile, block_size, max_requests)
    report = Report(profile)
    for name, case in CASES.items():
        bench.begin(name)
        before, began = len(bench.failures), time.perf_counter()
        result: Literal["passed", "failed", "not applicable"] = "passed"
        first = ""
        hits = bench.hits
        try:
            case(bench)
        except NotApplicable as reason:
            result, first = "not applicable", str(reason)
        except Exception as error:  # the pool raised where it should not
            bench.fail("", f"raised {type(error).__name__}: {error}")
        if name == "twins" and shares_prefixes and bench.hits == hits:
            bench.fail("twin", "reports no cached tokens, although equal requests must share")
        failed = bench.failures[before:]
        if failed:
            result, first = "failed", str(failed[0])
        seconds = time.perf_counter() - began
        report.rows.append(Row(name, result, bench.runs, seconds, len(failed), first))
        if failed and stop_at_first:
            break
    report.failures = bench.failures
    report.sharing = "shares prefixes" if bench.hits else "isolates by not sharing"
    return report
