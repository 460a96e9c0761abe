"""Pictures of timing: hits beside misses, how many probes suffice, what a defence costs."""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure

from kvlab.plots.style import BLUE, GREEN, ORANGE, PURPLE


def hits_and_misses(table: pd.DataFrame, unit: str) -> Figure:
    """Share of probes answered by a time, hits against misses; one panel for each tier.

    `table` has the columns tier, kind ("hit" or "miss") and time. Where the two lines lie on each
    other, time tells nothing.
    """
    tiers = list(dict.fromkeys(table.tier))
    figure, axes = plt.subplots(
        1,
        len(tiers),
        figsize=(2.9 * len(tiers) + 0.4, 3.0),
        sharey=True,
        sharex=True,
        layout="constrained",
        squeeze=False,
    )
    highest = table.time.quantile(0.98) * 1.15
    for axis, tier in zip(axes[0], tiers, strict=True):
        for kind, colour, line in (("hit", ORANGE, "-"), ("miss", BLUE, "--")):
            times = np.sort(table[(table.tier == tier) & (table.kind == kind)].time)
            shares = np.arange(1, len(times) + 1) / len(times)
            axis.step(times, shares, color=colour, ls=line, label=kind, where="post")
        axis.set(title=tier, xlabel=unit, xlim=(0, highest))
        sns.despine(ax=axis)
    axes[0][0].set_ylabel("share answered")
    axes[0][0].yaxis.set_major_formatter("{x:.0%}")
    axes[0][-1].legend(frameon=False, loc="lower right")
    return figure


def probes_needed(table: pd.DataFrame) -> Figure:
    """How often the test finds the gap, by the number of probes; columns probes, found, noise."""
    figure, axis = plt.subplots(figsize=(7, 3.2), layout="constrained")
    styles = zip(table.noise.unique(), (BLUE, GREEN, ORANGE, PURPLE), "osD^", strict=False)
    for noise, colour, marker in styles:
        part = table[table.noise == noise]
        axis.plot(part.probes, part.found, color=colour, marker=marker, label=noise)
    axis.set(xscale="log", xlabel="hits, and as many misses", ylabel="gap found")
    ticks = sorted(table.probes.unique())
    axis.set_xticks(ticks, ticks)
    axis.minorticks_off()
    axis.yaxis.set_major_formatter("{x:.0%}")
    axis.legend(title="noise", frameon=False)
    sns.despine(ax=axis)
    return figure


def price_and_leak(table: pd.DataFrame) -> Figure:
    """Two bars for each defence: what it keeps of the savings, what it still gives away.

    `table` is indexed by the defence, its columns are shares between 0 and 1.
    """
    figure, axis = plt.subplots(figsize=(8, 0.75 * len(table) + 1.3), layout="constrained")
    height = 0.8 / len(table.columns)
    looks = zip((BLUE, GREEN, ORANGE, PURPLE), ("", "...", "///", "xxx"), strict=False)
    for i, (column, (colour, hatch)) in enumerate(zip(table.columns, looks, strict=False)):
        places = np.arange(len(table)) + (i - (len(table.columns) - 1) / 2) * height
        bars = axis.barh(
            places, table[column], height, label=column, fc=colour, hatch=hatch, ec="w"
        )
        axis.bar_label(bars, [f"{v:.0%}" for v in table[column]], padding=3, fontsize=8)
    axis.set_yticks(range(len(table)), list(table.index))
    axis.set_xlim(0, 1.1)
    axis.invert_yaxis()
    axis.xaxis.set_major_formatter("{x:.0%}")
    figure.legend(loc="outside upper center", ncols=len(table.columns), frameon=False, fontsize=9)
    sns.despine(ax=axis, left=True)
    return figure
