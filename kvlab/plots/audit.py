"""Pictures of an audit: what each arm found, and what first-token times tell a stranger."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure

from kvlab.plots.style import BLUE, GREY, ORANGE, PURPLE

KINDS = {
    "equal": ("#DCEAF4", ""),
    "near-tie": ("#F0E442", "..."),
    "contaminated": (ORANGE, "///"),
    "leak": (PURPLE, "xxx"),
    "failed": (GREY, "\\\\\\"),
}


def audit_arms(counts: Mapping[str, Mapping[str, int]]) -> Figure:
    """Answers of each arm by what they were; `counts` maps the arm to kinds and numbers."""
    figure, axis = plt.subplots(figsize=(9, 0.42 * len(counts) + 1.2), layout="constrained")
    names = list(counts)
    left = np.zeros(len(names))
    for kind, (colour, hatch) in KINDS.items():
        widths = np.array([counts[n].get(kind, 0) for n in names], float)
        if not widths.any():
            continue
        axis.barh(names, widths, 0.7, left=left, fc=colour, hatch=hatch, ec="#666666", label=kind)
        for y, (width, start) in enumerate(zip(widths, left, strict=True)):
            if width:
                box = {"fc": "white", "ec": "none", "pad": 0.8, "alpha": 0.8}
                place = {"ha": "center", "va": "center", "fontsize": 8, "bbox": box}
                axis.text(start + width / 2, y, f"{width:.0f}", **place)
        left += widths
    axis.invert_yaxis()
    axis.set(xlabel="answers")
    figure.legend(loc="outside upper center", ncols=len(KINDS), frameon=False)
    sns.despine(ax=axis, left=True)
    return figure


def first_token_times(groups: Mapping[str, tuple[Sequence[float], Sequence[float]]]) -> Figure:
    """Right and wrong guesses at another tenant's beginning; times over the median wrong one."""
    figure, axis = plt.subplots(figsize=(8, 0.9 * len(groups) + 1.2), layout="constrained")
    for y, (right, wrong) in enumerate(groups.values()):
        unit = float(np.median(wrong))
        for times, colour, marker, up, label in (
            (right, ORANGE, "o", -0.15, "right guess"),
            (wrong, BLUE, "s", 0.15, "wrong guess"),
        ):
            heights = np.full(len(times), y + up)
            name = label if y == 0 else None
            axis.plot(np.array(times) / unit, heights, marker, color=colour, alpha=0.6, label=name)
    axis.set_yticks(range(len(groups)), list(groups))
    axis.set_ylim(len(groups) - 0.5, -0.5)
    axis.set_xlim(left=0)
    axis.set_xlabel("time to first token / median of wrong guesses")
    figure.legend(loc="outside upper center", ncols=2, frameon=False)
    sns.despine(ax=axis)
    return figure


VERDICT_LOOK = {
    "isolated": ("#DCEAF4", "isolated"),
    "cannot tell": ("#F0E442", "cannot\ntell"),
    "contaminated": (ORANGE, "contami-\nnated"),
    "leak": (PURPLE, "leak"),
}


def engine_grid(table: pd.DataFrame) -> Figure:
    """Engines by arms; each cell names the worst that the arm found, `""` where it did not run."""
    worst = {"equal": "isolated", "near-tie": "isolated", "failed": "cannot tell"}
    figure, axis = plt.subplots(
        figsize=(1.05 * len(table.columns) + 3.6, 0.5 * len(table) + 1.8), layout="constrained"
    )
    for y, (_, row) in enumerate(table.iterrows()):
        for x, kind in enumerate(row):
            look = VERDICT_LOOK.get(worst.get(kind, kind))
            face, text = look if look else ("white", "-")
            axis.add_patch(plt.Rectangle((x, y), 0.95, 0.9, fc=face, ec="#666666"))
            axis.text(x + 0.475, y + 0.45, text, ha="center", va="center", fontsize=7.5)
    axis.set(xlim=(0, len(table.columns)), ylim=(len(table), 0))
    axis.set_yticks(np.arange(len(table)) + 0.45, list(table.index))
    wrapped = [textwrap.fill(str(c), 14) for c in table.columns]
    axis.set_xticks(np.arange(len(table.columns)) + 0.475, wrapped, fontsize=7.5)
    axis.xaxis.tick_top()
    axis.tick_params(length=0)
    sns.despine(ax=axis, left=True, bottom=True)
    return figure
