"""The diagnosis that notebooks 06 and 09 still show; new pools are judged by kvlab.check."""

from __future__ import annotations

from kvlab.diagnose import diagnose
from kvlab.dye import Contract, DyedModel
from kvlab.faults import CATALOGUE, make_pool
from kvlab.models import tiny_model
from kvlab.pools import SimpleCachePool, TieredCachePool
from kvlab.request import Request
from kvlab.schedule import run


def test_the_proxy_shows_the_contract_and_nothing_else(tiny):
    proxy = Contract(SimpleCachePool.for_model(tiny.config, 1, 8), lambda request, lease: None)
    assert proxy.events is not None
    assert not hasattr(proxy, "slots")
    assert not hasattr(proxy, "settle")


def test_dyed_rows_come_back_right_from_a_correct_pool(tiny):
    for pool in (
        SimpleCachePool.for_model(tiny.config, 2, 32),
        TieredCachePool.for_model(tiny.config, 20, block_size=4),
    ):
        dyed = DyedModel(pool, tiny.config)
        requests = [Request(f"r{i}", tuple(range(5, 15 + i)), 4) for i in range(4)]
        run(dyed, requests, dyed.pool, "round_robin", 2, [dyed])
        assert dyed.misreads == []
        assert dyed.over_hits == []


def test_table_of_a_diagnosis_lists_every_experiment():
    fault = CATALOGUE["stale length"]
    diagnosis = diagnose(lambda config: make_pool(fault, config), tiny_model())
    assert diagnosis.kind == "stale state"
    assert diagnosis.table.wrong.any()
    assert set(diagnosis.table.experiment) == set(diagnosis.shown)
