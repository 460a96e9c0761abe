"""What a run can carry: observers of attention, owners and bytes; and the log of its events."""

from kvlab.observe.attention import AttentionProbe, AttentionStep, first_foreign_read
from kvlab.observe.checksums import ChangedBytes, Checksums
from kvlab.observe.conflicts import Conflict, conflicts
from kvlab.observe.events import Event, EventLog, parse_log, read_log, write_log
from kvlab.observe.ownership import ForeignRead, OwnershipGuard

__all__ = [
    "AttentionProbe",
    "AttentionStep",
    "ChangedBytes",
    "Checksums",
    "Conflict",
    "Event",
    "EventLog",
    "ForeignRead",
    "OwnershipGuard",
    "conflicts",
    "first_foreign_read",
    "parse_log",
    "read_log",
    "write_log",
]
