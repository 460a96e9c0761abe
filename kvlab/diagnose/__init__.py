"""From symptom to class: discriminating experiments on a pool of which only the contract is known.

`python -m kvlab.diagnose package.module:factory` runs them on your pool,
`python -m kvlab.diagnose --log FILE` looks for conflicts in the event log of any server.
"""

from __future__ import annotations

import html
from dataclasses import dataclass
from typing import Literal

import pandas as pd
from transformers import PreTrainedModel

from kvlab.diagnose.experiments import EXPERIMENTS
from kvlab.diagnose.rules import Finding, Shown, article_rule, conclude
from kvlab.diagnose.scenes import Seen, Stage
from kvlab.faults.catalogue import Kind
from kvlab.pools.contract import PoolFactory

__all__ = ["Diagnosis", "Finding", "PoolFactory", "article_rule", "diagnose", "run_experiments"]


@dataclass(frozen=True)
class Diagnosis:
    """What the experiments say about a pool.

    Attributes:
        kind: The class, or `None` where nothing (or not enough) was seen.
        confidence: "sure": the observation excludes the other classes; "likely": it does not;
            "no fault seen"; "not enough evidence": something is wrong, but no row of the cache.
        rule: The rule that decided, in words.
        evidence: The observation behind it.
        shown: Everything that was seen, by experiment.
    """

    kind: Kind | None
    confidence: Literal["sure", "likely", "no fault seen", "not enough evidence"]
    rule: str
    evidence: str
    shown: Shown

    @property
    def table(self) -> pd.DataFrame:
        """One row for each experiment: what it asked, whether it was wrong, what was seen first."""
        return pd.DataFrame(
            [
                {
                    "experiment": e.name,
                    "question": e.question,
                    "wrong": self.shown[e.name].wrong,
                    "seen first": self.shown[e.name].first,
                }
                for e in EXPERIMENTS
            ]
        )

    def __str__(self) -> str:
        return f"{self.kind or 'no class'} ({self.confidence}): {self.rule}. {self.evidence}"

    def _repr_html_(self) -> str:
        return f"<p>{html.escape(str(self))}</p>{self.table.to_html(index=False)}"


def run_experiments(pool_factory: PoolFactory, model: PreTrainedModel) -> dict[str, Seen]:
    """Play every experiment on fresh pools, see `kvlab.diagnose.experiments`."""
    stage = Stage(pool_factory, model)
    return {e.name: e.play(stage) for e in EXPERIMENTS}


def diagnose(pool_factory: PoolFactory, model: PreTrainedModel) -> Diagnosis:
    """Find out which class of fault a pool has.

    Only the contract of the pool is used: admit, release, what the leases' caches read and write,
    and the optional extras `batch`, `settle` and `events` where it has them.

    Args:
        pool_factory: `factory(model.config)` (or `factory()`) returns a fresh pool at every call.
        model: Gives the shapes; its weights are not used.
    """
    shown = run_experiments(pool_factory, model)
    finding = conclude(shown)
    if finding is not None:
        sure: Literal["sure", "likely"] = "sure" if finding.sure else "likely"
        return Diagnosis(finding.kind, sure, finding.rule, finding.evidence, shown)
    troubled = [name for name, seen in shown.items() if seen.errors or seen.conflicts]
    if troubled:
        seen = shown[troubled[0]]
        what = [*seen.errors, *map(str, seen.conflicts or [])][0]
        why = "every row was right, but the pool raised an error or its log contradicts itself"
        return Diagnosis(None, "not enough evidence", why, f"{troubled[0]}: {what}", shown)
    why = "every row that was read was the right one, in every experiment"
    return Diagnosis(None, "no fault seen", why, f"{len(shown)} experiments", shown)
