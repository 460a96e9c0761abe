"""Pictures of the vision transformer: digits, and where foreign features are looked at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
from jaxtyping import Float
from matplotlib.figure import Figure

Picture = Float[np.ndarray, "S S"]


def foreign_maps(
    images: Sequence[Picture], labels: Sequence[str], maps: Mapping[str, Sequence[Picture]]
) -> Figure:
    """Images in the first row; below, one row for each server, the foreign share at each pixel.

    Args:
        images: What was asked, one a column.
        labels: Above each column.
        maps: For each server, the share of each pixel's attention that went to foreign features,
            from 0 to 1, one picture a column.
    """
    rows, columns = len(maps) + 1, len(images)
    figure, axes = plt.subplots(
        rows,
        columns,
        figsize=(1.9 * columns + 2.6, 1.75 * rows),
        layout="constrained",
        squeeze=False,
    )
    for axis, image, label in zip(axes[0], images, labels, strict=True):
        axis.imshow(image, cmap="Greys", vmin=0, vmax=1)
        axis.set_title(label, fontsize=9)
    shown = None
    for line, (name, pictures) in zip(axes[1:], maps.items(), strict=True):
        for axis, picture in zip(line, pictures, strict=True):
            shown = axis.imshow(picture, cmap="cividis", vmin=0, vmax=1)
            axis.set_xlabel(f"mean {picture.mean():.0%}", fontsize=8)
        line[0].set_ylabel(name, fontsize=8.5, rotation=0, ha="right", va="center")
    axes[0][0].set_ylabel("image", fontsize=8.5, rotation=0, ha="right", va="center")
    for axis in axes.flat:
        axis.set_xticks([])
        axis.set_yticks([])
    if shown is not None:
        figure.colorbar(shown, ax=axes, shrink=0.5, label="attention on foreign features")
    return figure


def digits(images: Sequence[Picture], labels: Sequence[str]) -> Figure:
    """A row of images with a label above each."""
    figure, axes = plt.subplots(
        1, len(images), figsize=(1.1 * len(images), 1.5), layout="constrained"
    )
    for axis, image, label in zip(axes, images, labels, strict=True):
        axis.imshow(image, cmap="Greys", vmin=0, vmax=1)
        axis.set_title(label, fontsize=9)
        axis.axis("off")
    return figure
