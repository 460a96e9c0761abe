"""Thresholds from clean runs, when a statistic fires, and what it can tell apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from jaxtyping import Float
from scipy import stats

from kvlab.fingerprints.trials import Trace

FAMILIES = {
    "attention distance": "with a reference",
    "logit drift": "with a reference",
    "foreign mass": "with owners",
    "foreign among top three": "with owners",
    "entropy": "from the weights alone",
    "maximum": "from the weights alone",
}
"""Every statistic, and what it needs."""


@dataclass(frozen=True)
class Alarms:
    """Every statistic as one number a step, with the threshold that clean runs give it.

    Half of the clean runs (see `is_calibration`) set means, deviations and thresholds; the other
    half is kept to see how often a statistic cries without a reason.
    """

    thresholds: dict[str, float]
    centres: dict[str, tuple[Float[np.ndarray, " LH"], Float[np.ndarray, " LH"]]]

    @classmethod
    def calibrate(cls, traces: Sequence[Trace], false_alarms: float = 0.01) -> Alarms:
        """Thresholds that this share of the calibrating clean runs exceeds at most."""
        clean = [t for t in traces if t.kind == "clean" and is_calibration(t)]
        centres = {}
        for name in FAMILIES:
            if clean[0].numbers[name].ndim == 2:
                steps = np.concatenate([t.numbers[name] for t in clean])
                centres[name] = steps.mean(0), steps.std(0)
        fresh = cls({}, centres)
        thresholds = {
            name: float(
                np.quantile(
                    [fresh.score(t, name).max() for t in clean],
                    1 - false_alarms,
                    method="inverted_cdf",
                )
            )
            for name in FAMILIES
        }
        return cls(thresholds, centres)

    def score(self, trace: Trace, name: str) -> Float[np.ndarray, " S"]:
        """The statistic step by step; for heads, the largest deviation in standard deviations."""
        values = trace.numbers[name]
        if name not in self.centres:
            return values
        mean, deviation = self.centres[name]
        return np.abs((values - mean) / deviation).max(-1)

    def table(self, traces: Sequence[Trace]) -> pd.DataFrame:
        """One row for each run and statistic: when it fired, the lead, and the score.

        `lead` is the text's first wrong token minus the statistic's first alarm; `score` is taken
        at the first token that reads foreign rows, in a clean run at the same token.
        """
        rows = []
        for t in traces:
            for name in FAMILIES:
                score = self.score(t, name)
                over = np.flatnonzero(score > self.thresholds[name])
                fired = int(over[0]) + 1 if len(over) else None
                rows.append(
                    {
                        "seed": t.seed,
                        "kind": t.kind,
                        "role": t.role,
                        "shared_rows": t.shared_rows,
                        "parting": t.parting,
                        "exposed": t.exposed,
                        "damaged": t.divergence is not None,
                        "divergence": t.divergence,
                        "statistic": name,
                        "fired": fired,
                        "lead": t.divergence - fired if t.divergence and fired else None,
                        "score": float(score[t.moment - 1]) if t.moment else None,
                    }
                )
        return pd.DataFrame(rows)


def is_calibration(trace: Trace) -> bool:
    """Whether a clean run sets thresholds (or else tests them); pairs are split, not runs."""
    return trace.seed % 4 in (0, 1)


def roc(
    positive: Sequence[float], negative: Sequence[float]
) -> tuple[Float[np.ndarray, " N"], Float[np.ndarray, " N"], float]:
    """False and true alarm rates over all thresholds, and the area under the curve.

    The area is the Mann-Whitney U divided by the number of pairs (Hanley and McNeil, 1982).
    """
    thresholds = np.sort(np.unique([*positive, *negative]))[::-1]
    edges = np.concatenate([[np.inf], thresholds])
    false = np.array([(np.asarray(negative) >= t).mean() for t in edges])
    true = np.array([(np.asarray(positive) >= t).mean() for t in edges])
    u = stats.mannwhitneyu(positive, negative).statistic
    return false, true, float(u / (len(positive) * len(negative)))
