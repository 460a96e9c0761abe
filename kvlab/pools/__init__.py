"""Where keys and values live."""

from kvlab.pools.batch import BatchView
from kvlab.pools.contract import CachePool, Lease, OwnedLease, Owner, PoolFull
from kvlab.pools.private import PoolForEach, PrivatePool
from kvlab.pools.quantised import QuantisedSlotPool, QuantisedTieredPool
from kvlab.pools.slots import SimpleCachePool
from kvlab.pools.tiered import TieredCachePool

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
