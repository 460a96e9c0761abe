"""Pictures of noise: how far correct and contaminated runs move a logit."""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure

from kvlab.plots.style import BLUE, ORANGE


def drift_by_precision(table: pd.DataFrame) -> Figure:
    """Largest logit drift of each run; columns precision, drift, kind (two kinds), tolerance.

    A black bar marks the tolerance of each precision.
    """
    precisions = list(dict.fromkeys(table.precision))
    kinds = list(dict.fromkeys(table.kind))
    figure, axis = plt.subplots(figsize=(9, 0.55 * len(precisions) + 1.4), layout="constrained")
    draw = np.random.default_rng(0)
    smallest = table.drift[table.drift > 0].min() / 3  # where equal bits are drawn
    for kind, colour, marker in zip(kinds, (BLUE, ORANGE), "os", strict=False):
        part = table[table.kind == kind]
        height = part.precision.map(precisions.index) + draw.uniform(-0.22, 0.22, len(part))
        axis.plot(
            part.drift.clip(lower=smallest),
            height,
            marker,
            color=colour,
            ms=4,
            alpha=0.5,
            label=kind,
        )
    for y, precision in enumerate(precisions):
        at = table[table.precision == precision].tolerance.iloc[0]
        axis.plot([at, at], [y - 0.36, y + 0.36], color="black", lw=2)
    axis.plot([], [], color="black", lw=2, label="tolerance")
    axis.set(xscale="log", xlabel="largest logit difference from the reference")
    axis.set_yticks(range(len(precisions)), precisions)
    axis.invert_yaxis()
    figure.legend(loc="outside upper center", ncols=3, frameon=False)
    sns.despine(ax=axis)
    return figure
