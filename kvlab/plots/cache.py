"""Pictures of what a cache holds, saves and costs: notebooks 01 and 02."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from jaxtyping import Float
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from torch import Tensor

from kvlab.plots.style import BLUE, GREEN, GREY, ORANGE


def work_grid(prompt: int = 4, steps: int = 5) -> Figure:
    """Which tokens are computed at each step, without and with a cache."""
    figure, axes = plt.subplots(1, 2, figsize=(9.5, 3.2), sharey=True, layout="constrained")
    for axis, cache in zip(axes, (False, True), strict=True):
        for step in range(steps):
            for column in range(prompt + step):
                computed = not cache or step == 0 or column == prompt + step - 1
                axis.add_patch(
                    Rectangle(
                        (column, step),
                        0.9,
                        0.9,
                        facecolor=ORANGE if computed else BLUE,
                        hatch="" if computed else "...",
                        edgecolor="white",
                    )
                )
        axis.set(xlim=(0, prompt + steps - 1), ylim=(steps, 0), xlabel="token", aspect="equal")
        axis.set_xticks(np.arange(prompt + steps - 1) + 0.45, range(1, prompt + steps))
        axis.set_yticks(np.arange(steps) + 0.45, range(1, steps + 1))
        axis.set_title("with a cache" if cache else "without a cache")
        sns.despine(ax=axis, left=True, bottom=True)
    axes[0].set_ylabel("generated token")
    figure.legend(
        handles=[
            Patch(facecolor=ORANGE, label="computed now"),
            Patch(facecolor=BLUE, hatch="...", edgecolor="white", label="card read from the desk"),
        ],
        loc="outside lower center",
        ncols=2,
        frameon=False,
    )
    return figure


def work_curves(table: pd.DataFrame, crossover: float) -> Figure:
    """Counted and measured work of one step against length; see notebook 01.

    `table` has the columns length, way ("recompute", "cached"), counted, seconds.
    """
    figure, axes = plt.subplots(1, 2, figsize=(9.5, 3.6), layout="constrained")
    for axis, column in zip(axes, ("counted", "seconds"), strict=True):
        base = table.loc[(table.way == "cached"), column].iloc[0]
        for way, colour, marker in (("recompute", ORANGE, "o"), ("cached", BLUE, "s")):
            part = table[table.way == way]
            axis.plot(part.length, part[column] / base, color=colour, marker=marker, label=way)
        axis.set(xscale="log", yscale="log", xlabel="tokens so far")
        axis.set_xticks(table.length.unique(), table.length.unique(), rotation=45)
        axis.minorticks_off()
        axis.set_ylabel("one step / shortest cached step")
    axes[0].axvline(crossover, color=GREY, ls="--", lw=1)
    axes[0].text(crossover * 0.93, 12, "attention passes\nprojections", ha="right", fontsize=8)
    axes[0].set_title("multiply-adds, counted")
    axes[1].set_title("time, measured")
    axes[0].legend(frameon=False)
    return figure


def layers_by_difference(differences: Sequence[float], title: str) -> Figure:
    """One bar a layer: how far the keys of one token move when its history changes."""
    figure, axis = plt.subplots(figsize=(6, 2.8), layout="constrained")
    axis.bar(range(len(differences)), differences, color=BLUE)
    axis.set(xlabel="layer", ylabel="largest key difference", title=title)
    return figure


def kv_heatmap(norms: Float[Tensor, "L H"], title: str) -> Figure:
    """Mean length of the stored vectors for every layer and head."""
    figure, axis = plt.subplots(figsize=(5, 3.2), layout="constrained")
    sns.heatmap(
        norms.numpy(), cmap="cividis", annot=True, fmt=".1f", annot_kws={"size": 8}, ax=axis
    )
    axis.set(xlabel="head", ylabel="layer", title=title)
    return figure


def memory_curves(table: pd.DataFrame) -> Figure:
    """Cache memory against the number of requests; columns requests, gigabytes, preset."""
    figure, axis = plt.subplots(figsize=(6.5, 3.4), layout="constrained")
    styles = zip(table.preset.unique(), (ORANGE, BLUE, GREEN), "osD", strict=False)
    for preset, colour, marker in styles:
        part = table[table.preset == preset]
        axis.plot(part.requests, part.gigabytes, color=colour, marker=marker, label=preset)
    axis.set(xlabel="concurrent requests", ylabel="GB of keys and values")
    axis.legend(frameon=False)
    return figure


def prefix_positions(drifts: Sequence[float], changed: Sequence[bool], tolerance: float) -> Figure:
    """Damage of one wrong token in a shared prefix, by the position of that token."""
    figure, axis = plt.subplots(figsize=(8, 3), layout="constrained")
    for i, (value, bad) in enumerate(zip(drifts, changed, strict=True)):
        axis.bar(i, value, color=ORANGE if bad else BLUE, hatch="///" if bad else "", ec="white")
    axis.axhline(tolerance, color="black", ls="--", lw=1)
    axis.set(yscale="log", ylim=(tolerance / 10, None))
    axis.set_xlabel("position of the token that differs")
    axis.set_ylabel("largest logit change")
    axis.legend(
        handles=[
            Patch(facecolor=ORANGE, hatch="///", ec="white", label="answer changed"),
            Patch(facecolor=BLUE, label="answer kept"),
            plt.Line2D([], [], color="black", ls="--", label="rounding"),
        ],
        frameon=False,
        ncols=3,
        loc="upper center",
        bbox_to_anchor=(0.5, 1.22),
    )
    return figure
