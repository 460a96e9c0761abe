"""One look for all pictures: colours, fonts, and where the README's pictures go."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import matplotlib.pyplot as plt
import seaborn as sns
from matplotlib import font_manager
from matplotlib.figure import Figure

# Okabe-Ito: told apart by colour-blind readers. Owners also carry a hatch, never colour alone.
BLUE, ORANGE, GREEN, PURPLE, GREY = "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#999999"
VERDICT_STYLE = {
    "isolated": ("#DCEAF4", ""),
    "near-tie": ("#F0E442", "..."),
    "disturbed": ("#CC79A7", "\\\\\\"),
    "contaminated": ("#E69F00", "///"),
}

FONT = Path(__file__).parents[1] / "fonts" / "KVLabSansSC-Regular.otf"
FONT_NAME = "KVLab Sans SC"


def use_style() -> None:
    """Set the look once; called on import. The bundled font brings the Chinese characters."""
    sns.set_theme(style="white", context="notebook")
    font_manager.fontManager.addfont(str(FONT))
    plt.rcParams.update(
        {
            "font.family": ["DejaVu Sans", FONT_NAME],
            "figure.dpi": 100,
            "savefig.dpi": 130,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.titlesize": 11,
            "axes.labelsize": 10,
            "hatch.linewidth": 0.6,
        }
    )


use_style()


def owner_colours(names: Sequence[str]) -> dict[str, str]:
    """One colour for each owner, in the order given."""
    return dict(zip(dict.fromkeys(names), (BLUE, ORANGE, GREEN, PURPLE), strict=False))


def owner_hatches(names: Sequence[str]) -> dict[str, str]:
    """One hatch for each owner, since colour alone must not tell them apart."""
    return dict(zip(dict.fromkeys(names), ("", "///", "...", "xxx"), strict=False))


def save(figure: Figure, name: str) -> None:
    """Write a picture for the README where `KVLAB_FIGURES` names a folder, else do nothing."""
    folder = os.environ.get("KVLAB_FIGURES")
    if folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
        figure.savefig(Path(folder) / f"{name}.png", bbox_inches="tight", metadata={"Software": ""})
