"""All pictures that notebooks share. Importing it sets the look, once."""

from kvlab.plots.audit import audit_arms, engine_grid, first_token_times
from kvlab.plots.cache import (
    kv_heatmap,
    layers_by_difference,
    memory_curves,
    prefix_positions,
    work_curves,
    work_grid,
)
from kvlab.plots.causes import (
    chance_to_find,
    confusion,
    detector_matrix,
    orders,
    outcome_bars,
    slot_lives,
    smallest_numbers,
)
from kvlab.plots.experiment import answer_strips, attention_pair, slots, verdict_grid
from kvlab.plots.fingerprints import (
    attention_by_layer,
    first_wrong_token,
    roc_curves,
    when_fired,
)
from kvlab.plots.lab import Panel, lab_scene, side_by_side, step_detail
from kvlab.plots.precision import drift_by_precision
from kvlab.plots.style import save, use_style
from kvlab.plots.tiers import block_holders, blocks, lookup_times, memory_saved, sweep
from kvlab.plots.timing import hits_and_misses, price_and_leak, probes_needed
from kvlab.plots.vision import digits, foreign_maps

__all__ = [
    "Panel",
    "answer_strips",
    "attention_by_layer",
    "attention_pair",
    "audit_arms",
    "block_holders",
    "blocks",
    "chance_to_find",
    "confusion",
    "detector_matrix",
    "digits",
    "drift_by_precision",
    "engine_grid",
    "first_token_times",
    "first_wrong_token",
    "foreign_maps",
    "hits_and_misses",
    "kv_heatmap",
    "lab_scene",
    "layers_by_difference",
    "lookup_times",
    "memory_curves",
    "memory_saved",
    "orders",
    "outcome_bars",
    "prefix_positions",
    "price_and_leak",
    "probes_needed",
    "roc_curves",
    "save",
    "side_by_side",
    "slot_lives",
    "slots",
    "smallest_numbers",
    "step_detail",
    "sweep",
    "use_style",
    "verdict_grid",
    "when_fired",
    "work_curves",
    "work_grid",
]
