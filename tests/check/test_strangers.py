"""Pools that were written for an older diagnosis, which knew nothing of this check."""

from __future__ import annotations

import copy

import pytest
from transformers import DynamicCache

from kvlab.check import check
from kvlab.faults import make_pool
from kvlab.pools import SimpleCachePool, TieredCachePool
from kvlab.pools.lease import LeaseLayer
from kvlab.pools.prefix import PrefixTree
from kvlab.pools.slots import SlotLease
from kvlab.request import known


class Wrapped:
    """A stranger's pool: a DynamicCache for each request, kept by name."""

    def __init__(self, config):
        self.config = config

    def admit(self, request):
        lease = type("Lease", (), {})()
        lease.cache, lease.num_cached_tokens = DynamicCache(config=self.config), 0
        return lease

    def release(self, lease):
        pass


class Recycles(Wrapped):
    """Caches come back without being emptied."""

    def __init__(self, config):
        super().__init__(config)
        self.used = []

    def admit(self, request):
        lease = super().admit(request)
        if self.used:
            lease.cache = self.used.pop()
        return lease

    def release(self, lease):
        self.used.append(lease.cache)


class OneForAll(Wrapped):
    """Two live requests get one cache as soon as there are three."""

    def __init__(self, config):
        super().__init__(config)
        self.live = []

    def admit(self, request):
        lease = super().admit(request)
        if len(self.live) >= 2:
            lease.cache = self.live[0].cache
        self.live.append(lease)
        return lease

    def release(self, lease):
        self.live.remove(lease)


class FirstTokenKey(Wrapped):
    """A prompt cache whose key is the first token and the length."""

    def __init__(self, config):
        super().__init__(config)
        self.stored = {}

    def admit(self, request):
        lease = super().admit(request)
        key = (request.tokens[0], len(request.tokens))
        if key in self.stored and len(request.tokens) > 1:
            lease.cache = copy.deepcopy(self.stored[key])
            lease.cache.crop(len(request.tokens) - 1 - lease.cache.get_seq_length())
            lease.num_cached_tokens = len(request.tokens) - 1
        lease.key, lease.prompt = key, len(request.tokens)
        return lease

    def release(self, lease):
        if lease.cache.get_seq_length() >= lease.prompt:
            self.stored[lease.key] = lease.cache


class SwapsKinds(Wrapped):
    """The cache hands values back as keys."""

    def admit(self, request):
        lease = super().admit(request)
        inner = lease.cache.update
        lease.cache.update = lambda *a, **k: inner(*a, **k)[::-1]
        return lease


def test_a_strangers_correct_pool_is_isolated():
    assert check(Wrapped, budget=30).trace is None


@pytest.mark.parametrize(
    ("pool_type", "kind"),
    [
        (Recycles, "stale state"),
        (OneForAll, "lifetime"),
        (FirstTokenKey, "key"),
        (SwapsKinds, "layout"),
    ],
)
def test_a_strangers_faulty_pool_gets_its_class(pool_type, kind):
    report = check(pool_type)
    assert kind in report.diagnosis.kinds, str(report)


class OldestWhenFull(SimpleCachePool):
    def free_slot(self, request):
        free = super().free_slot(request)
        return 0 if free is None else free


class WritesOneEarly(LeaseLayer):
    def update(self, key, value, *args, **kwargs):
        counter, at = self.lease.counter, self.get_seq_length()
        if key.shape[2] > 1 or at <= 8:
            return super().update(key, value)
        counter[self.layer] = at - 1
        super().update(key, value)
        counter[self.layer] = at + 1
        rows = self.lease.arena.read(self.layer, self.lease.where(0, at + 1))
        return rows[0][None], rows[1][None]


class ScalesLate(LeaseLayer):
    def update(self, key, value, *args, **kwargs):
        key, value = super().update(key, value)
        return key * (1.5 if self.get_seq_length() > 12 else 1.0), value


class SecondLayerStale(SlotLease):
    def __init__(self, pool, request, slot):
        super().__init__(pool, request, slot)
        self.counter[1:] = [getattr(slot, "left", 0)] * (len(self.counter) - 1)

    def signed(self, start, end, tokens):
        super().signed(start, end, tokens)
        self.slot.left = end


class FirstFieldOnly(PrefixTree):
    def root_key(self, context):
        key = known(context)
        return key and key[:1]


def slots_with(layer=LeaseLayer, lease=SlotLease):
    held = type("Held", (lease,), {"layer_type": layer})
    return type("Pool", (SimpleCachePool,), {"lease_type": held})


@pytest.mark.parametrize(
    ("pool_type", "kind"),
    [
        (OldestWhenFull, "lifetime"),
        (slots_with(WritesOneEarly), "position"),
        (slots_with(ScalesLate), "scale"),
        (slots_with(lease=SecondLayerStale), "stale state"),
        (type("Pool", (TieredCachePool,), {"tree_type": FirstFieldOnly}), "key"),
    ],
    ids=["oldest when full", "one early", "scales late", "second layer stale", "first field only"],
)
def test_faults_outside_the_catalogue_get_their_class(pool_type, kind):
    report = check(lambda config: make_pool(pool_type, config))
    assert kind in report.diagnosis.kinds, str(report)
