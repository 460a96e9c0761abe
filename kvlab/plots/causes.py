"""Pictures for finding a cause: the life of every place, and what answers to which fault."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib.colors
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from kvlab.observe.conflicts import Conflict
from kvlab.plots.style import BLUE, GREEN, GREY, ORANGE, PURPLE, owner_colours, owner_hatches
from kvlab.pools.events import Event

KIND_COLOURS = {
    "stale state": BLUE,
    "key": ORANGE,
    "lifetime": GREEN,
    "position": PURPLE,
    "layout": "#56B4E9",
    "scale": GREY,
}


def slot_lives(
    events: Sequence[Event], found: Sequence[Conflict] = (), title: str = "", most: int = 12
) -> Figure:
    """Rows: places; x: the records of the log; bars: who holds a place; marks: what happens.

    A number stands where rows are written: the length of the request behind that write. A cross
    marks the second record of a conflict.
    """
    places = sorted({p for e in events for p in e.places})[:most]
    names = list(dict.fromkeys(e.request for e in events if e.request))
    colours, hatches = owner_colours(names), owner_hatches(names)
    last = max(e.step for e in events) + 1
    figure, axis = plt.subplots(
        figsize=(min(14, max(7, 0.32 * last)), 0.6 * len(places) + 1.3), layout="constrained"
    )
    for y, place in enumerate(places):
        spans: list[tuple[str, int, int]] = []
        begun: dict[str, int] = {}
        for e in events:
            if e.kind == "release" and e.request in begun:
                spans.append((e.request, begun.pop(e.request), e.step))
            elif place in e.places and e.request:
                begun.setdefault(e.request, e.step)
        spans += [(name, start, last) for name, start in begun.items()]
        for i, (name, start, end) in enumerate(spans):
            crowd = [s for s in spans[:i] if s[1] < end and start < s[2]]
            low = y + 0.12 + 0.38 * (len(crowd) % 2)
            axis.add_patch(
                Rectangle(
                    (start - 0.4, low),
                    end - start + 0.8,
                    0.36,
                    fc=colours.get(name, GREY),
                    hatch=hatches.get(name, ""),
                    ec="#888888",
                    alpha=0.5,
                )
            )
            for e in events:
                if e.request == name and place in e.places and e.kind == "write":
                    end_row = e.start + e.length
                    axis.text(e.step, low + 0.18, end_row, ha="center", va="center", size=7.5)
        resets = [e.step for e in events if e.kind == "reset" and place in e.places]
        axis.plot(resets, [y + 0.5] * len(resets), "|", color="black", ms=16, mew=2)
        crossed = [c.second.step for c in found if c.place == place]
        axis.plot(crossed, [y + 0.95] * len(crossed), "x", color="black", ms=7, mew=2)
    axis.set(xlim=(-1, last + 1), ylim=(len(places) + 0.1, 0), xlabel="record of the log")
    axis.set_yticks(np.arange(len(places)) + 0.5, [f"place {p}" for p in places])
    handles = [
        Patch(fc=colours[n], hatch=hatches[n], alpha=0.5, label=f"held by {n}") for n in colours
    ]
    axis.plot([], [], "|", color="black", ms=12, mew=2, label="length set to 0")
    axis.plot([], [], "x", color="black", ms=7, mew=2, label="conflict")
    marks = axis.get_legend_handles_labels()[0]
    figure.legend(
        handles=[*handles, *marks], loc="outside upper right", ncols=6, frameon=False, fontsize=9
    )
    axis.set_title(title, loc="left")
    sns.despine(ax=axis, left=True)
    return figure


def detector_matrix(table: pd.DataFrame, kinds: Mapping[str, str]) -> Figure:
    """Faults by detectors: a filled cell with a dot where the detector raises its alarm.

    Args:
        table: One row for each fault, one column for each detector: True, False, or None.
        kinds: The class of each fault; rows are grouped by it.
    """
    figure, axis = plt.subplots(
        figsize=(0.62 * len(table.columns) + 4.2, 0.26 * len(table) + 1.9), layout="constrained"
    )
    for y, (name, row) in enumerate(table.iterrows()):
        colour = KIND_COLOURS[kinds[str(name)]]
        for x, raised in enumerate(row):
            face = colour if raised else "white"
            axis.add_patch(Rectangle((x, y), 1, 1, fc=face, ec="#CCCCCC", alpha=0.75))
            if raised is None or raised:
                sign = "?" if raised is None else "●"
                axis.text(x + 0.5, y + 0.5, sign, ha="center", va="center", size=7)
    axis.set(xlim=(0, len(table.columns)), ylim=(len(table), 0))
    axis.set_yticks(np.arange(len(table)) + 0.5, list(table.index), fontsize=8)
    axis.set_xticks(
        np.arange(len(table.columns)) + 0.5, list(table.columns), rotation=40, ha="left", fontsize=9
    )
    axis.xaxis.tick_top()
    axis.tick_params(length=0)
    shown = dict.fromkeys(kinds[str(n)] for n in table.index)
    handles = [Patch(fc=KIND_COLOURS[k], alpha=0.75, label=k) for k in shown]
    figure.legend(handles=handles, loc="outside lower center", ncols=6, frameon=False, fontsize=9)
    sns.despine(ax=axis, left=True, bottom=True)
    return figure


def confusion(tables: Mapping[str, pd.DataFrame]) -> Figure:
    """True class by named class, one panel for each rule; the diagonal is right."""
    figure, axes = plt.subplots(
        1, len(tables), figsize=(5.4 * len(tables), 3.6), layout="constrained", squeeze=False
    )
    for axis, (title, table) in zip(axes[0], tables.items(), strict=True):
        numbers = table.to_numpy()
        sns.heatmap(
            table,
            annot=True,
            fmt="d",
            cmap="cividis",
            cbar=False,
            vmin=0,
            vmax=max(int(t.to_numpy().max()) for t in tables.values()),
            linewidths=0.5,
            ax=axis,
        )
        right = sum(int(table.loc[k, k]) for k in table.index if k in table.columns)
        axis.set_title(f"{title}: {right} of {int(numbers.sum())} right", loc="left")
        axis.set(xlabel="named", ylabel="is")
        axis.tick_params(axis="x", rotation=35)
    return figure


def outcome_bars(counts: Mapping[str, Sequence[int]], labels: Sequence[str]) -> Figure:
    """How often each outcome came, one group of bars for each way to run.

    Args:
        counts: For each way, one number for every outcome of `labels`.
    """
    figure, axis = plt.subplots(figsize=(9, 3.2), layout="constrained")
    left = np.zeros(len(counts))
    hatches = ("", "///", "...", "xxx", "--")
    looks = zip((BLUE, ORANGE, GREEN, PURPLE, GREY), hatches, strict=True)
    for i, (label, (colour, hatch)) in enumerate(zip(labels, looks, strict=False)):
        width = np.array([c[i] for c in counts.values()])
        axis.barh(
            range(len(counts)),
            width,
            left=left,
            color=colour,
            hatch=hatch,
            ec="white",
            alpha=0.8,
            label=label,
        )
        left += width
    axis.set_yticks(range(len(counts)), list(counts))
    axis.invert_yaxis()
    axis.set_xlabel("runs")
    figure.legend(loc="outside lower center", ncols=1, frameon=False, fontsize=9)
    sns.despine(ax=axis)
    return figure


def orders(
    pictures: Mapping[str, tuple[Sequence[Sequence[str]], Sequence[bool]]], names: Sequence[str]
) -> Figure:
    """Every order of small steps as a row of cells, wrong ones above, one panel a title.

    Args:
        pictures: Title, then the orders (whose step it is, step by step) and whether each is wrong.
        names: The requests, in the order of their colours.
    """
    colours, hatches = owner_colours(names), owner_hatches(names)
    figure, axes = plt.subplots(
        1, len(pictures), figsize=(4.2 * len(pictures), 5.2), layout="constrained", squeeze=False
    )
    for axis, (title, (all_orders, wrong)) in zip(axes[0], pictures.items(), strict=True):
        ranked = sorted(range(len(all_orders)), key=lambda i: (not wrong[i], list(all_orders[i])))
        picture = np.array([[names.index(n) for n in all_orders[i]] for i in ranked])
        shades = np.array([matplotlib.colors.to_rgb(colours[n]) for n in names])
        image = shades[picture] * 0.55 + 0.45
        bad = sum(wrong)
        image[bad:] = image[bad:] * 0.25 + 0.75
        axis.imshow(image, aspect="auto", interpolation="nearest")
        axis.axhline(bad - 0.5, color="black", lw=1.2)
        axis.set(xlabel="step", ylabel="order, wrong ones above the line")
        axis.set_title(f"{title}: {bad} of {len(wrong)} wrong", loc="left")
    handles = [Patch(fc=colours[n], hatch=hatches[n], alpha=0.55, label=n) for n in names]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False)
    return figure


def chance_to_find(curves: Mapping[str, tuple[Sequence[int], Sequence[float]]]) -> Figure:
    """How likely so many random orders meet a bug: title, then numbers of orders and chances."""
    figure, axis = plt.subplots(figsize=(6.5, 3.2), layout="constrained")
    looks = zip((BLUE, ORANGE, GREEN, PURPLE, GREY), "osD^v", strict=True)
    for (name, (counts, chances)), (colour, marker) in zip(curves.items(), looks, strict=False):
        axis.plot(counts, chances, color=colour, marker=marker, label=name)
    axis.set(xscale="log", xlabel="random orders tried", ylabel="chance to meet the bug")
    axis.set_ylim(0, 1.05)
    axis.legend(frameon=False, fontsize=8, loc="center right")
    sns.despine(ax=axis)
    return figure


def smallest_numbers(table: pd.DataFrame) -> Figure:
    """How many requests a fault needs to show: columns fault, kind, needs (0: not shown)."""
    needs = sorted(table.needs.unique(), key=lambda n: (n == 0, n))
    labels = [str(n) if n else "not shown" for n in needs]
    figure, axis = plt.subplots(figsize=(8, 3.2), layout="constrained")
    bottom = np.zeros(len(needs))
    hatches = dict(zip(KIND_COLOURS, ("", "///", "...", "xxx", "--", "++"), strict=True))
    for kind, colour in KIND_COLOURS.items():
        height = np.array([((table.needs == n) & (table.kind == kind)).sum() for n in needs])
        if height.any():
            axis.bar(
                labels,
                height,
                bottom=bottom,
                color=colour,
                alpha=0.75,
                ec="white",
                hatch=hatches[kind],
                label=kind,
            )
            bottom += height
    axis.set(xlabel="requests that are needed", ylabel="faults")
    axis.legend(frameon=False, fontsize=9)
    sns.despine(ax=axis)
    return figure
