"""Where keys and values live."""

from kvlab.pools.contract import CachePool, Lease, OwnedLease, Owner, PoolFull
from kvlab.pools.private import PoolForEach, PrivatePool
from kvlab.pools.quantised import QuantisedSlotPool, QuantisedTieredPool
from kvlab.pools.simple import SimpleCachePool
from kvlab.pools.tiered import TieredCachePool
from kvlab.pools.view import BatchView

__all__ = [
    "BatchView",
    "CachePool",
    "Lease",
    "OwnedLease",
    "Owner",
    "PoolForEach",
    "PoolFull",
    "PrivatePool",
    "QuantisedSlotPool",
    "QuantisedTieredPool",
    "SimpleCachePool",
    "TieredCachePool",
]
