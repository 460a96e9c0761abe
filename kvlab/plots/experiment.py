"""Pictures of the passphrase experiment: slots, verdicts, answers, attention."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from jaxtyping import Float
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from kvlab.plots.style import ORANGE, VERDICT_STYLE, owner_colours, owner_hatches


def slots(pool_owners: Sequence[Sequence[tuple[str, str] | None]], title: str) -> Figure:
    """Rows of slots with the text and the owner of each row: `(owner, text)` or `None`."""
    height = 0.55 * len(pool_owners) + 1.1
    widest = max(map(len, pool_owners))
    figure, axis = plt.subplots(figsize=(max(7, 0.25 * widest), height), layout="constrained")
    names = sorted({o[0] for slot in pool_owners for o in slot if o})
    colours, hatches = owner_colours(names), owner_hatches(names)
    for y, slot in enumerate(pool_owners):
        for x, owner in enumerate(slot):
            face = colours[owner[0]] if owner else "white"
            hatch = hatches[owner[0]] if owner else ""
            axis.add_patch(
                Rectangle((x, y + 0.1), 0.94, 0.8, fc=face, ec="#CCCCCC", hatch=hatch, alpha=0.55)
            )
            if owner:
                axis.text(x + 0.47, y + 0.5, owner[1].strip()[:3], ha="center", va="center", size=8)
    axis.set(xlim=(0, widest), ylim=(len(pool_owners), 0), xlabel="row")
    axis.set_yticks(
        np.arange(len(pool_owners)) + 0.5, [f"slot {i}" for i in range(len(pool_owners))]
    )
    axis.set_title(title)
    axis.legend(
        handles=[
            Patch(fc=colours[n], hatch=hatches[n], alpha=0.55, label=f"written by {n}")
            for n in names
        ],
        frameon=False,
        ncols=4,
        loc="upper right",
        bbox_to_anchor=(1, 1.0 + 0.45 / height),
    )
    sns.despine(ax=axis, left=True)
    return figure


def verdict_grid(table: pd.DataFrame, columns: Sequence[str], title: str = "") -> Figure:
    """Arms by runs: colour and hatch say the verdict, the number is the first differing token.

    `table` needs the columns arm, verdict, first_divergence and those named in `columns`, whose
    values become the column labels.
    """
    labels = table[list(columns)].astype(str).agg(" ".join, axis=1)
    order = list(dict.fromkeys(labels))
    arms = list(dict.fromkeys(table.arm))
    figure, axis = plt.subplots(
        figsize=(0.62 * len(order) + 2, 0.5 * len(arms) + 2.2), layout="constrained"
    )
    for (_, row), label in zip(table.iterrows(), labels, strict=True):
        x, y = order.index(label), arms.index(row.arm)
        colour, hatch = VERDICT_STYLE[row.verdict]
        axis.add_patch(Rectangle((x, y), 0.94, 0.9, fc=colour, ec="white", hatch=hatch))
        if pd.notna(row.first_divergence):
            axis.text(
                x + 0.47,
                y + 0.45,
                f"{row.first_divergence:.0f}",
                ha="center",
                va="center",
                bbox={"fc": "white", "ec": "none", "pad": 1},
            )
    axis.set(xlim=(0, len(order)), ylim=(len(arms), 0), title=title)
    axis.set_xticks(np.arange(len(order)) + 0.47, order, rotation=60, ha="right", fontsize=8)
    axis.set_yticks(np.arange(len(arms)) + 0.45, arms)
    used = [v for v in VERDICT_STYLE if v in set(table.verdict)]
    figure.legend(
        handles=[
            Patch(fc=VERDICT_STYLE[v][0], hatch=VERDICT_STYLE[v][1], ec="#BBBBBB", label=v)
            for v in used
        ],
        loc="outside upper right",
        ncols=4,
        frameon=False,
    )
    sns.despine(ax=axis, left=True, bottom=True)
    return figure


def answer_strips(rows: Sequence[tuple[str, Sequence[str], Sequence[bool]]], title: str) -> Figure:
    """Answers as rows of token boxes: `(label, token texts, foreign or not)`."""
    widest = max(len(texts) for _, texts, _ in rows)
    figure, axis = plt.subplots(
        figsize=(min(13, 0.5 * widest + 2.2), 0.5 * len(rows) + 1.0), layout="constrained"
    )
    for y, (_, texts, foreign) in enumerate(rows):
        for x, (text, bad) in enumerate(zip(texts, foreign, strict=True)):
            axis.add_patch(
                Rectangle(
                    (x, y + 0.08),
                    0.95,
                    0.84,
                    fc=ORANGE if bad else "#DCEAF4",
                    ec="white",
                    hatch="///" if bad else "",
                    alpha=0.75,
                )
            )
            size = 9 if len(text) < 4 else 6 if len(text) < 9 else 5
            axis.text(x + 0.47, y + 0.5, text.strip(), ha="center", va="center", fontsize=size)
    axis.set(xlim=(0, widest), ylim=(len(rows), 0), title=title, xlabel="generated token")
    axis.set_yticks(np.arange(len(rows)) + 0.5, [label for label, _, _ in rows])
    axis.set_xticks(np.arange(widest) + 0.47, range(1, widest + 1), fontsize=7)
    axis.legend(
        handles=[Patch(fc=ORANGE, hatch="///", ec="white", alpha=0.75, label="only the partner's")],
        frameon=False,
        loc="lower right",
        bbox_to_anchor=(1, 1),
    )
    sns.despine(ax=axis, left=True, bottom=True)
    return figure


def attention_pair(
    clean: Float[np.ndarray, "S T"],
    colliding: Float[np.ndarray, "S T"],
    columns: tuple[Sequence[str], Sequence[str]],
    steps: tuple[Sequence[str], Sequence[str]],
    foreign: Sequence[bool],
    title: str,
) -> Figure:
    """Attention of a clean and a colliding run on one scale, and their difference.

    Rows are generated tokens, columns the rows of the slot; hatched labels mark rows that another
    request wrote last.

    Args:
        columns: Token texts of the slot's rows, clean and colliding.
        steps: Token texts of the two answers.
        foreign: Which rows belong to somebody else in the colliding run.
    """
    figure, axes = plt.subplots(
        3, 1, figsize=(11, 2.1 + 0.62 * len(clean)), layout="constrained", sharex=False
    )
    top = float(max(np.nanmax(clean), np.nanmax(colliding)))
    difference = colliding - clean
    reach = float(np.nanmax(np.abs(difference)))
    panels = (
        (clean, "clean: a slot of its own", columns[0], steps[0], "cividis", 0.0, top),
        (colliding, "colliding: one slot for two", columns[1], steps[1], "cividis", 0.0, top),
        (difference, "difference", columns[1], steps[1], "vlag", -reach, reach),
    )
    for axis, (values, name, labels, tokens, cmap, low, high) in zip(axes, panels, strict=True):
        sns.heatmap(values, ax=axis, cmap=cmap, vmin=low, vmax=high, cbar_kws={"pad": 0.01})
        axis.set_title(name)
        turn = 90 if max(map(len, labels)) > 4 else 0  # words are turned, characters are not
        axis.set_xticks(np.arange(len(labels)) + 0.5, [x.strip() for x in labels], rotation=turn)
        axis.set_yticks(np.arange(len(tokens)) + 0.5, [x.strip() for x in tokens], rotation=0)
        axis.tick_params(labelsize=7)
        if name != panels[0][1]:
            for label, is_foreign in zip(axis.get_xticklabels(), foreign, strict=True):
                if is_foreign:
                    label.set_bbox(
                        {"fc": ORANGE, "ec": "none", "hatch": "///", "pad": 1, "alpha": 0.6}
                    )
    figure.suptitle(title, fontsize=11)
    return figure
