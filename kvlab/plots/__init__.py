"""All pictures that notebooks share. Importing it sets the look, once."""

from kvlab.plots.cache import (
    kv_heatmap,
    layers_by_difference,
    memory_curves,
    prefix_positions,
    work_curves,
    work_grid,
)
from kvlab.plots.experiment import answer_strips, attention_pair, slots, verdict_grid
from kvlab.plots.style import save, use_style

__all__ = [
    "answer_strips",
    "attention_pair",
    "kv_heatmap",
    "layers_by_difference",
    "memory_curves",
    "prefix_positions",
    "save",
    "slots",
    "use_style",
    "verdict_grid",
    "work_curves",
    "work_grid",
]
