"""Named faults: pools with one method that is wrong, sorted by what goes wrong."""

from kvlab.faults import key, layout, lifetime, position, scale, stale
from kvlab.faults.catalogue import CATALOGUE, Delayed, Kind, bug, fault, make_pool
from kvlab.faults.extras import EXTRAS
from kvlab.faults.layout import misaligned

__all__ = [
    "CATALOGUE",
    "EXTRAS",
    "Delayed",
    "Kind",
    "bug",
    "fault",
    "key",
    "layout",
    "lifetime",
    "make_pool",
    "misaligned",
    "position",
    "scale",
    "stale",
]
