"""Pictures of early signs: when each statistic fires, and what it can tell apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from jaxtyping import Float
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from kvlab.plots.style import BLUE, GREEN, GREY, ORANGE, PURPLE

WHEN = {
    "before the text": (BLUE, ""),
    "with the first wrong word": (GREEN, "...."),
    "after it": (ORANGE, "////"),
    "never": ("white", ""),
}


def when_fired(table: pd.DataFrame) -> Figure:
    """For each statistic, the share of damaged runs in which it fired before, with, after the text.

    `table` has one row for each run and statistic, with the columns statistic and lead.
    """
    lead = table.lead
    when = np.select(
        [lead.isna(), lead > 0, lead == 0],
        ["never", "before the text", "with the first wrong word"],
        "after it",
    )
    names = list(dict.fromkeys(table.statistic))
    counts = pd.crosstab(table.statistic, when).reindex(index=names, columns=list(WHEN)).fillna(0)
    shares = counts.div(counts.sum(axis=1), axis=0)
    figure, axis = plt.subplots(figsize=(9, 0.5 * len(names) + 1.4), layout="constrained")
    left = np.zeros(len(names))
    for label, (colour, hatch) in WHEN.items():
        style = {"color": colour, "hatch": hatch, "ec": "#555555", "lw": 0.6, "label": label}
        axis.barh(names, shares[label], 0.7, left=left, **style)
        for y, (width, start) in enumerate(zip(shares[label], left, strict=True)):
            if width > 0.05:
                axis.text(
                    start + width / 2,
                    y,
                    f"{width:.0%}",
                    ha="center",
                    va="center",
                    fontsize=8,
                    bbox={"fc": "white", "ec": "none", "pad": 1},
                )
        left += shares[label].to_numpy()
    axis.invert_yaxis()
    axis.set(xlim=(0, 1), xlabel=f"share of the {len(table) // len(names)} damaged runs")
    axis.xaxis.set_major_formatter("{x:.0%}")
    figure.legend(loc="outside upper center", ncols=4, frameon=False)
    sns.despine(ax=axis, left=True)
    return figure


Curve = tuple[Float[np.ndarray, " N"], Float[np.ndarray, " N"], float]
STYLES = (
    (BLUE, "-"),
    (ORANGE, "--"),
    (GREEN, "-"),
    (PURPLE, "--"),
    ("black", ":"),
    (GREY, "-."),
)


def roc_curves(panels: Mapping[str, Mapping[str, Curve]]) -> Figure:
    """Receiver operating characteristics, one panel for each question that is asked of the scores.

    Args:
        panels: Title, then statistic, then false alarm rates, true alarm rates and area.
    """
    figure, axes = plt.subplots(
        1, len(panels), figsize=(5 * len(panels), 4.6), layout="constrained"
    )
    for axis, (title, curves) in zip(np.atleast_1d(axes), panels.items(), strict=True):
        for (name, curve), (colour, line) in zip(curves.items(), STYLES, strict=False):
            false, true, area = curve
            axis.plot(false, true, color=colour, ls=line, label=f"{name} ({area:.2f})")
        axis.plot([0, 1], [0, 1], color="#CCCCCC", lw=1)
        axis.set(title=title, xlabel="false alarms", ylabel="found")
        axis.set(xlim=(-0.02, 1), ylim=(0, 1.02))
        axis.legend(frameon=False, loc="lower right", fontsize=8, title="statistic (area)")
        sns.despine(ax=axis)
    return figure


def first_wrong_token(table: pd.DataFrame, column: str, label: str) -> Figure:
    """When the text went wrong against a length: columns kind, role, divergence and `column`."""
    figure, axis = plt.subplots(figsize=(7.5, 3.8), layout="constrained")
    groups = (
        ("append", "second", BLUE, "o"),
        ("overwrite", "first", ORANGE, "s"),
        ("overwrite", "second", PURPLE, "^"),
    )
    axis.axhspan(4.5, 8.5, color="#EEEEEE", label="tokens 5 to 8, as the article says")
    for kind, role, colour, marker in groups:
        part = table[(table.kind == kind) & (table.role == role)]
        axis.scatter(
            part[column],
            part.divergence,
            c=colour,
            marker=marker,
            s=28,
            alpha=0.7,
            label=f"{kind}, {role} request",
        )
    axis.set(xlabel=label, ylabel="first wrong token", ylim=(0, None))
    axis.yaxis.set_major_locator(MaxNLocator(integer=True))
    axis.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    sns.despine(ax=axis)
    return figure


def attention_by_layer(distances: Mapping[str, Sequence[float]], floor: float) -> Figure:
    """Attention distance of every layer in one step, for a damage to a key and to a value."""
    figure, axis = plt.subplots(figsize=(7, 3), layout="constrained")
    width = 0.8 / len(distances)
    styles = ((BLUE, ""), (ORANGE, "////"), (GREEN, "...."))
    for i, ((name, values), (colour, hatch)) in enumerate(
        zip(distances.items(), styles, strict=False)
    ):
        places = np.arange(len(values)) + (i - (len(distances) - 1) / 2) * width
        shown = np.maximum(values, floor)
        axis.bar(places, shown, width, color=colour, hatch=hatch, ec="white", label=name)
        for x, value in zip(places, values, strict=True):
            if value == 0:
                axis.text(x, floor * 1.4, "0", ha="center", fontsize=8)
    axis.set(yscale="log", ylim=(floor, 2), xlabel="layer", ylabel="attention distance")
    axis.set_xticks(range(len(next(iter(distances.values())))))
    axis.legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    sns.despine(ax=axis)
    return figure
