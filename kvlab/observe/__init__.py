"""What a run can carry: observers that watch attention, owners and bytes."""

from kvlab.observe.attention import AttentionProbe, AttentionStep, first_foreign_read
from kvlab.observe.checksums import ChangedBytes, Checksums
from kvlab.observe.ownership import ForeignRead, OwnershipGuard

__all__ = [
    "AttentionProbe",
    "AttentionStep",
    "ChangedBytes",
    "Checksums",
    "ForeignRead",
    "OwnershipGuard",
    "first_foreign_read",
]
