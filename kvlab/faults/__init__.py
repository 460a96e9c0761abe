"""Named faults: pools with one method that is wrong, sorted by what goes wrong."""

from kvlab.faults import key, layout, lifetime, position, stale
from kvlab.faults.catalogue import CATALOGUE, Delayed, Kind, fault, make_pool
from kvlab.faults.layout import misaligned

__all__ = [
    "CATALOGUE",
    "Delayed",
    "Kind",
    "fault",
    "key",
    "layout",
    "lifetime",
    "make_pool",
    "misaligned",
    "position",
    "stale",
]
