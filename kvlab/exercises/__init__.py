"""Checks for the exercises: each says what is right, or names the mistake that it recognises."""

from kvlab.exercises.attention import check_distance, check_foreign, check_threshold, check_watch
from kvlab.exercises.audit import EchoEngine, audited, check_leaky, check_trust
from kvlab.exercises.cache import check_megabytes, check_rows, check_shared, check_step
from kvlab.exercises.causes import check_conflict, check_mystery, mystery
from kvlab.exercises.conformance import check_orders, check_pool
from kvlab.exercises.experiment import check_first_difference, check_judge
from kvlab.exercises.pools import check_saved, check_write
from kvlab.exercises.precision import check_noise, check_scales
from kvlab.exercises.timing import check_context, check_fewest
from kvlab.exercises.vision import check_line_key, check_reach

__all__ = [
    "EchoEngine",
    "audited",
    "check_conflict",
    "check_context",
    "check_distance",
    "check_fewest",
    "check_first_difference",
    "check_foreign",
    "check_judge",
    "check_leaky",
    "check_line_key",
    "check_megabytes",
    "check_mystery",
    "check_noise",
    "check_orders",
    "check_pool",
    "check_reach",
    "check_rows",
    "check_saved",
    "check_scales",
    "check_shared",
    "check_step",
    "check_threshold",
    "check_trust",
    "check_watch",
    "check_write",
    "mystery",
]
