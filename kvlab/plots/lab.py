"""Pictures of the slot-collision lab: whose rows are read, and who wrote them when."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import matplotlib.pyplot as plt
import numpy as np
import seaborn as sns
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from kvlab.plots.style import GREY, owner_colours, owner_hatches

STRIP = 1.6
"""Height of the owner strip, in rows of the heatmap."""


@dataclass(frozen=True)
class Panel:
    """The attention of one request: S generated tokens over T cache rows.

    Attributes:
        weights: NaN where a row did not exist yet.
        owners: Who wrote each row last, by name; `None` for nobody.
        foreign: Which rows are not the reader's.
        marks: Steps (counted from 1) with a remark beside them.
    """

    title: str
    weights: Float[np.ndarray, "S T"]
    columns: Sequence[str]
    steps: Sequence[str]
    owners: Sequence[str | None]
    foreign: Sequence[bool]
    marks: Mapping[int, str]


def tick_labels(axis: Axes, labels: Sequence[str], which: Literal["x", "y"]) -> None:
    """Token texts along an axis; words are turned, single characters are not."""
    texts = [x.strip() or "␣" for x in labels]
    places = np.arange(len(texts)) + 0.5
    if which == "x":
        turn = 90 if max(map(len, texts)) > 3 else 0
        axis.set_xticks(places, texts, rotation=turn)
    else:
        axis.set_yticks(places, texts)
    axis.tick_params(axis=which, labelsize=7.5, length=0, pad=2)


def owner_legend(colours: Mapping[str, str]) -> list[Patch]:
    """One entry for each owner, and one for foreign rows."""
    return [
        *(Patch(fc=c, alpha=0.75, label=f"written by {n}") for n, c in colours.items()),
        Patch(fc="white", ec="black", hatch="////", lw=0.5, label="foreign to the reader"),
    ]


def heat(axis: Axes, panel: Panel, colours: Mapping[str, str], width: int) -> None:
    """One heatmap with the owners of its columns below; hatched where they are foreign."""
    steps = len(panel.steps)
    mesh = axis.pcolormesh(panel.weights, cmap="cividis", vmin=0, vmax=1)
    for x, (owner, foreign) in enumerate(zip(panel.owners, panel.foreign, strict=True)):
        axis.add_patch(
            Rectangle(
                (x, steps + 0.3),
                1,
                STRIP - 0.3,
                fc=colours[owner] if owner else "white",
                ec="black" if foreign else "white",
                hatch="////" if foreign else "",
                lw=0.5,
                alpha=0.75,
            )
        )
    for step, text in panel.marks.items():
        end = np.flatnonzero(~np.isnan(panel.weights[step - 1]))[-1] + 1
        axis.text(end + 0.4, step - 0.5, f"◀ {text}", va="center", fontsize=8)
    axis.set(xlim=(0, width), ylim=(steps + STRIP, 0), ylabel="generated token")
    axis.set_title(panel.title, loc="left")
    tick_labels(axis, panel.columns, "x")
    tick_labels(axis, panel.steps, "y")
    sns.despine(ax=axis, left=True, bottom=True)
    bar = plt.colorbar(mesh, ax=axis, pad=0.01, fraction=0.025)
    bar.set_label("attention", size=8)
    bar.ax.tick_params(labelsize=7)


def timeline(
    axis: Axes, writes: Sequence[tuple[int, str, int, int]], colours: Mapping[str, str], title: str
) -> None:
    """Who wrote which rows of a slot when: `(turn, request, first row, number of rows)`."""
    hatches = owner_hatches(list(colours))
    for turn, request, start, count in writes:
        axis.add_patch(
            Rectangle(
                (turn, start),
                0.9,
                count,
                fc=colours[request],
                ec="white",
                hatch=hatches[request],
                lw=0.3,
            )
        )
    axis.set(xlabel="turn", ylabel="row")
    axis.set_title(title, loc="left")
    sns.despine(ax=axis)


def lab_scene(
    panels: Sequence[Panel],
    slots: Mapping[int, Sequence[tuple[int, str, int, int]]],
    names: Sequence[str],
) -> Figure:
    """The heatmaps of all requests and the timeline of every slot that was written.

    Args:
        slots: The writes of each slot, see `timeline`.
        names: The requests in order of arrival, for their colours.
    """
    colours = owner_colours(names)
    heights = [len(p.steps) * 0.15 + 0.9 for p in panels]
    figure = plt.figure(figsize=(11, sum(heights) + 2.6), layout="constrained")
    grid = figure.add_gridspec(len(panels) + 1, 1, height_ratios=[*heights, 2.3])
    for i, panel in enumerate(panels):
        heat(figure.add_subplot(grid[i]), panel, colours, max(len(p.columns) for p in panels))
    below = grid[len(panels)].subgridspec(1, 2)
    turns = 1 + max(w[0] for writes in slots.values() for w in writes)
    rows = max(w[2] + w[3] for writes in slots.values() for w in writes)
    for i, (slot, writes) in enumerate(sorted(slots.items())):
        axis = figure.add_subplot(below[i] if len(slots) > 1 else below[:])
        timeline(axis, writes, colours, f"who wrote which rows of slot {slot}, and when")
        axis.set(xlim=(0, turns), ylim=(rows, 0))
    figure.legend(handles=owner_legend(colours), loc="outside lower center", ncols=4, frameon=False)
    return figure


def step_detail(panel: Panel, step: int, names: Sequence[str]) -> Figure:
    """One generated token: its weights as bars over the rows, coloured by owner."""
    colours = owner_colours(names)
    weights = panel.weights[step - 1]
    figure, axis = plt.subplots(figsize=(11, 2.2), layout="constrained")
    for x, (weight, owner, foreign) in enumerate(
        zip(weights, panel.owners, panel.foreign, strict=True)
    ):
        if not np.isnan(weight):
            axis.bar(
                x + 0.5,
                weight,
                0.9,
                color=colours[owner] if owner else GREY,
                hatch="////" if foreign else "",
                ec="white",
            )
    axis.set(xlim=(0, len(weights)), ylim=(0, 1), ylabel="attention")
    axis.set_title(panel.title, loc="left")
    tick_labels(axis, panel.columns, "x")
    sns.despine(ax=axis)
    return figure


def side_by_side(panels: Sequence[Panel], names: Sequence[str]) -> Figure:
    """The same request in two states, beside each other on one scale."""
    colours = owner_colours(names)
    height = max(len(p.steps) for p in panels) * 0.2 + 1.6
    figure, axes = plt.subplots(
        1, len(panels), figsize=(6.6 * len(panels), height), layout="constrained"
    )
    for axis, panel in zip(np.atleast_1d(axes), panels, strict=True):
        heat(axis, panel, colours, max(len(p.columns) for p in panels) + 2)  # room for remarks
    figure.legend(handles=owner_legend(colours), loc="outside lower center", ncols=4, frameon=False)
    return figure
