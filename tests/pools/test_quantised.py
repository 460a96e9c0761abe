import pytest
import torch

from kvlab.detectors import Evidence, detect, workload
from kvlab.models import tiny_model
from kvlab.pools import PoolForEach, QuantisedSlotPool, QuantisedTieredPool
from kvlab.pools.quantised import row_scales, to_codes
from kvlab.references import References
from kvlab.request import Request
from kvlab.schedule import run

MODEL = tiny_model()
CONFIG = MODEL.config
FACTORIES = {
    "a scale per token": lambda c: QuantisedSlotPool.for_model(c, 10, 96),
    "a scale per block": lambda c: QuantisedSlotPool.for_model(c, 10, 96, granularity="block"),
    "a scale per slot": lambda c: QuantisedSlotPool.for_model(c, 10, 96, granularity="slot"),
    "tiers": lambda c: QuantisedTieredPool.for_model(c, 64, block_size=4),
}


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_codes_are_the_nearest_and_zeros_stay_zeros():
    rows = torch.tensor([[[1.0, -2.0, 0.5], [0.0, 0.0, 0.0]]])
    scale = row_scales(rows)
    codes = to_codes(rows, scale)
    assert codes.dtype == torch.int8
    assert codes[0, 0].tolist() == [64, -127, 32]
    assert torch.allclose(codes * scale, rows, atol=float(scale.max()) / 2)
    assert not codes[0, 1].any()


@pytest.mark.parametrize("name", ["a scale per slot", "tiers"])
def test_no_detector_alarms_at_a_rounded_pool(name):
    alarms = detect(Evidence(FACTORIES[name], References(MODEL), workload(MODEL)))
    assert not [d for d, a in alarms.items() if a.raised]


def test_the_rows_are_codes_and_take_a_quarter():
    pool = QuantisedSlotPool.for_model(CONFIG, 2, 16)
    assert pool.arena.key.dtype == torch.int8
    tiers = QuantisedTieredPool.for_model(CONFIG, 4)
    assert tiers.arena.key.dtype == torch.int8


def test_a_prefix_is_found_and_read_with_its_scales():
    pool = QuantisedTieredPool.for_model(CONFIG, 32, block_size=4)
    first = Request("a", tuple(range(3, 17)), 4)
    one = run(MODEL, [first], pool)["a"]
    two = run(MODEL, [Request("b", first.tokens, 4)], pool)["b"]
    assert two.num_cached_tokens == 13
    assert two.tokens == one.tokens
    pool.check()


def test_nan_is_refused_where_it_cannot_be_held():
    with pytest.raises(ValueError, match="cannot hold NaN"):
        QuantisedSlotPool.for_model(CONFIG, 2, 16, nan_fill=True)
    with pytest.raises(ValueError, match="cannot hold NaN"):
        QuantisedTieredPool.for_model(CONFIG, 4, nan_fill=True)


def test_a_pool_for_each_gives_every_request_its_own():
    made = []

    def factory():
        made.append(QuantisedSlotPool.for_model(CONFIG, 1, 32))
        return made[-1]

    requests = [Request(n, (5, 6, 7), 3) for n in "ab"]
    run(MODEL, requests, PoolForEach(factory), "round_robin", 2)
    assert len(made) == 2
    assert not any(pool.assignment for pool in made)
