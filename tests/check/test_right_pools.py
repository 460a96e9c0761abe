"""The check is silent on pools that isolate, whoever wrote them, and says what it never met."""

import importlib

import pytest
from transformers import DynamicCache

from kvlab.check import Report, check
from kvlab.models import tiny_config
from kvlab.pools import (
    PoolForEach,
    PrivatePool,
    QuantisedSlotPool,
    QuantisedTieredPool,
    SimpleCachePool,
    TieredCachePool,
)

FOREIGN = ("hashed_blocks", "checkpoints", "host_offload", "ring")
OURS = {
    "slots": lambda c: SimpleCachePool.for_model(c, 4, 40),
    "many slots": lambda c: SimpleCachePool.for_model(c, 10, 96),
    "blocks of 1": lambda c: TieredCachePool.for_model(c, 96, block_size=1),
    "blocks of 4": lambda c: TieredCachePool.for_model(c, 24, block_size=4),
    "blocks of 16": lambda c: TieredCachePool.for_model(c, 10, block_size=16),
    "codes, a scale per token": lambda c: QuantisedSlotPool.for_model(c, 4, 40),
    "codes, a scale per block": lambda c: QuantisedSlotPool.for_model(
        c, 4, 40, granularity="block"
    ),
    "codes, a scale per slot": lambda c: QuantisedSlotPool.for_model(c, 4, 40, granularity="slot"),
    "codes in blocks": lambda c: QuantisedTieredPool.for_model(c, 24, block_size=4),
    "private": PrivatePool,
    "private, in place": lambda c: PoolForEach(lambda: SimpleCachePool.for_model(c, 1, 96)),
}


@pytest.mark.parametrize("name", OURS)
def test_our_own_pools_are_isolated(name):
    report = check(OURS[name], budget=30)
    assert report.trace is None, str(report)


@pytest.mark.parametrize("design", FOREIGN)
def test_right_pools_by_other_hands_are_isolated(design):
    module = importlib.import_module(f"tests.foreign.{design}")
    report = check(module.build, budget=40)
    assert report.ok, str(report)


def test_a_pool_that_shares_nothing_says_so():
    report = check(OURS["slots"], budget=30)
    assert "it isolates by not sharing" in str(report)
    assert "not exercised: hit, partial hit" in str(report)


def test_what_was_hardly_played_is_not_called_isolated():
    report = check(OURS["slots"], budget=1)
    assert (report.verdict, report.exit_code) == ("not enough exercised", 3)
    assert Report(0).missing


@pytest.mark.parametrize("budget", ["much", 0, 1.5])
def test_a_budget_that_is_none_is_refused(budget):
    with pytest.raises(ValueError, match="budget must be"):
        check(OURS["slots"], budget=budget)


def test_a_cache_of_transformers_for_each_request_is_isolated():
    class Lease:
        def __init__(self):
            self.cache, self.num_cached_tokens = DynamicCache(config=tiny_config()), 0

    class Pool:
        def admit(self, request):
            return Lease()

        def release(self, lease):
            pass

    assert check(Pool, budget=30).trace is None
