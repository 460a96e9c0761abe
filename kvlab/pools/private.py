"""PrivatePool: a transformers DynamicCache for each request; nothing is shared."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import Cache, DynamicCache, PretrainedConfig

from kvlab.pools.contract import Lease
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
