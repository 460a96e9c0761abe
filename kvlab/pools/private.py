"""Pools in which nothing is shared: a cache, or a whole pool, for each request."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from transformers import Cache, DynamicCache, PretrainedConfig

from kvlab.pools.contract import CachePool, Lease
from kvlab.request import Request


@dataclass
class PrivateLease:
    """A cache that nobody else knows."""

    cache: Cache
    num_cached_tokens: int = 0


class PrivatePool:
    """The pool contract in ten lines, around a cache that transformers brings."""

    def __init__(self, config: PretrainedConfig) -> None:
        self.config = config

    def admit(self, request: Request) -> PrivateLease:
        """A fresh cache; there is always room."""
        return PrivateLease(DynamicCache(config=self.config))

    def release(self, lease: Lease) -> None:
        """Nothing to take back: the memory goes with the lease."""


class PoolForEach:
    """A fresh pool for each request: private, and rounded as the pools of `factory` round."""

    def __init__(self, factory: Callable[[], CachePool]) -> None:
        self.factory = factory
        self._pools: dict[int, CachePool] = {}

    def admit(self, request: Request) -> Lease:
        """The first request of a pool that nobody else will use."""
        pool = self.factory()
        lease = pool.admit(request)
        self._pools[id(lease)] = pool
        return lease

    def release(self, lease: Lease) -> None:
        """Give the lease back to its pool, and the pool up."""
        self._pools.pop(id(lease)).release(lease)
