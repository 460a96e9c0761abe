"""Pictures of the tiered pool: whose blocks, and what sharing saves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from kvlab.plots.style import BLUE, GREEN, GREY, ORANGE, PURPLE
from kvlab.pools import TieredCachePool


def blocks(states: Mapping[str, Sequence[tuple[int, frozenset[str]]]]) -> Figure:
    """Blocks of a pool at several moments: number of holders, and who they are.

    Args:
        states: Title, then `(ref_count, holders)` of every block, see `block_holders`.
    """
    names = sorted({h for s in states.values() for _, held in s for h in held if h != "tree"})
    colours = dict(zip(names, (ORANGE, GREEN, PURPLE, GREY), strict=False))
    widest = max(map(len, states.values()))
    figure, axis = plt.subplots(
        figsize=(max(7, 0.62 * widest + 3), 0.75 * len(states) + 0.9), layout="constrained"
    )
    for y, held_by in enumerate(states.values()):
        for x, (count, holders) in enumerate(held_by):
            readers = sorted(holders - {"tree"})
            face = "white" if not holders else BLUE if "tree" in holders else colours[readers[0]]
            hatch = "..." if "tree" in holders else ""
            axis.add_patch(
                Rectangle((x, y + 0.08), 0.92, 0.84, fc=face, ec="#888888", hatch=hatch, alpha=0.6)
            )
            if count:
                who = "+".join([*readers, *(["tree"] if "tree" in holders else [])])
                label = {"fc": "white", "ec": "none", "pad": 1, "alpha": 0.85}
                axis.text(
                    x + 0.46,
                    y + 0.5,
                    f"{count}\n{who}",
                    ha="center",
                    va="center",
                    fontsize=7.5,
                    bbox=label,
                )
    axis.set(xlim=(0, widest), ylim=(len(states), 0), xlabel="block")
    axis.set_yticks(np.arange(len(states)) + 0.5, list(states))
    axis.set_xticks(np.arange(widest) + 0.46, range(widest), fontsize=8)
    handles = [Patch(fc=BLUE, hatch="...", ec="#888888", alpha=0.6, label="prefix tier, read-only")]
    handles += [Patch(fc=c, alpha=0.6, label=f"private to {n}") for n, c in colours.items()]
    figure.legend(handles=handles, loc="outside upper right", ncols=4, frameon=False)
    sns.despine(ax=axis, left=True, bottom=True)
    return figure


def block_holders(pool: TieredCachePool) -> list[tuple[int, frozenset[str]]]:
    """Reference count and holders of every block: request ids, and "tree" for the prefix tier."""
    holders: list[set[str]] = [set() for _ in range(pool.arena.num_blocks)]
    for name, lease in pool.leases.items():
        for block in (*lease.table.blocks, *lease.table.spare):
            holders[block].add(name)
    for node in pool.blocks.tree.nodes():
        holders[node.block].add("tree")
    return [(c, frozenset(h)) for c, h in zip(pool.blocks.ref_count, holders, strict=True)]


def memory_saved(table: pd.DataFrame, claimed: float) -> Figure:
    """Memory saved; columns requests, prefix, private, saved and formula, one prefix a panel.

    Points are measured pools, lines the formula; the dashed line is what the article claims.
    """
    prefixes = sorted(table.prefix.unique())
    figure, axes = plt.subplots(
        1, len(prefixes), figsize=(3.1 * len(prefixes), 3.2), sharey=True, layout="constrained"
    )
    private = sorted(table.private.unique())
    styles = zip(private, (BLUE, ORANGE, GREEN, PURPLE), "osD^", strict=False)
    looks = {u: (c, m) for u, c, m in styles}
    for axis, prefix in zip(np.atleast_1d(axes), prefixes, strict=True):
        for u, (colour, marker) in looks.items():
            part = table[(table.prefix == prefix) & (table.private == u)].sort_values("requests")
            axis.plot(part.requests, part.formula, color=colour, lw=1)
            axis.plot(
                part.requests, part.saved, color=colour, marker=marker, ls="", ms=5, label=f"{u}"
            )
        axis.axhline(claimed, color="black", ls="--", lw=1)
        axis.set(xscale="log", title=f"{prefix} shared tokens", xlabel="requests")
        ticks = sorted(table.requests.unique())
        axis.set_xticks(ticks, ticks)
        axis.minorticks_off()
        axis.yaxis.set_major_formatter("{x:.0%}")
        sns.despine(ax=axis)
    np.atleast_1d(axes)[0].set_ylabel("memory saved")
    np.atleast_1d(axes)[-1].legend(title="private rows", frameon=False, fontsize=8)
    return figure


def sweep(table: pd.DataFrame, columns: Mapping[str, str]) -> Figure:
    """Private against shared along requests, prefix and private rows.

    `table` has the columns along ("requests", "prefix", "private"), x, way and those of `columns`
    (name: label), which become the rows of the picture; each is divided by its smallest value.
    """
    along = {"requests": "requests", "prefix": "shared tokens", "private": "private rows"}
    figure, axes = plt.subplots(
        len(columns),
        3,
        figsize=(11, 2.7 * len(columns)),
        layout="constrained",
        sharey="row",
        squeeze=False,
    )
    looks = {"all private": (ORANGE, "s", "-"), "prefix shared": (BLUE, "o", "-")}
    looks |= {"least bytes, private": (ORANGE, "", ":"), "least bytes, shared": (BLUE, "", ":")}
    for lines, (column, label) in zip(axes, columns.items(), strict=True):
        base = table[column].min()
        for axis, (key, name) in zip(lines, along.items(), strict=True):
            for way, (colour, marker, line) in looks.items():
                part = table[(table.along == key) & (table.way == way)].dropna(subset=[column])
                if len(part):
                    axis.plot(
                        part.x, part[column] / base, color=colour, marker=marker, ls=line, label=way
                    )
            axis.set(xlabel=name, yscale="log")
            sns.despine(ax=axis)
        lines[0].set_ylabel(label)
    axes[0][0].legend(frameon=False, fontsize=8)
    return figure


def lookup_times(table: pd.DataFrame) -> Figure:
    """Time of one lookup against the number of stored prefixes; columns stored, way, ratio."""
    figure, axis = plt.subplots(figsize=(6.5, 3.2), layout="constrained")
    styles = zip(table.way.unique(), (BLUE, ORANGE, GREEN), "osD", strict=False)
    for way, colour, marker in styles:
        part = table[table.way == way]
        axis.plot(part.stored, part.ratio, color=colour, marker=marker, label=way)
    axis.set(xscale="log", xlabel="stored prefixes", ylabel="time / time of one prefill")
    axis.set(yscale="log")
    axis.legend(frameon=False)
    sns.despine(ax=axis)
    return figure
