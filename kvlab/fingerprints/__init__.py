"""Does attention tell first? Many seeded collisions, each with a clean twin, and when signs appear.

The statistics come in two families. With a reference run: how far attention and logits are from
those of a clean run of the same request. Without one: what a server could compute from the run
alone, with the owners of the rows or from the weights only.
"""

from kvlab.fingerprints.alarms import FAMILIES, Alarms, is_calibration, roc
from kvlab.fingerprints.trials import Trace, Trial, draw_trial, measure, total_variation

__all__ = [
    "FAMILIES",
    "Alarms",
    "Trace",
    "Trial",
    "draw_trial",
    "is_calibration",
    "measure",
    "roc",
    "total_variation",
]
