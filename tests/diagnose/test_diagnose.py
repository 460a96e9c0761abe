"""Diagnosis beyond the catalogue: other people's pools, faulty and correct."""

from __future__ import annotations

import copy

import pytest
from transformers import DynamicCache

from kvlab.diagnose import diagnose
from kvlab.diagnose.__main__ import load_factory, main
from kvlab.dye import Contract, DyedModel
from kvlab.faults import make_pool
from kvlab.models import tiny_model
from kvlab.pools import PrivatePool, SimpleCachePool, TieredCachePool
from kvlab.pools.lease import LeaseLayer
from kvlab.pools.prefix import PrefixTree
from kvlab.pools.slots import SlotLease
from kvlab.request import Request, known
from kvlab.schedule import run


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


@pytest.mark.parametrize("pool_type", [Wrapped, PrivatePool])
def test_a_strangers_correct_pool_has_no_fault(pool_type):
    assert diagnose(pool_type, tiny_model()).confidence == "no fault seen"


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
    diagnosis = diagnose(pool_type, tiny_model())
    assert diagnosis.kind == kind, str(diagnosis)


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
    diagnosis = diagnose(lambda config: make_pool(pool_type, config), tiny_model())
    assert diagnosis.kind == kind, str(diagnosis)


def test_factory_without_argument_will_do():
    model = tiny_model()
    pool = lambda: TieredCachePool.for_model(model.config, 40, block_size=4)  # noqa: E731
    assert diagnose(pool, model).confidence == "no fault seen"


def test_pool_that_only_raises_is_not_guessed_at():
    class Broken(Wrapped):
        def release(self, lease):
            raise RuntimeError("out of order")

    diagnosis = diagnose(Broken, tiny_model())
    assert diagnosis.kind is None
    assert diagnosis.confidence == "not enough evidence"
    assert "out of order" in diagnosis.evidence


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
    diagnosis = diagnose(Recycles, tiny_model())
    assert diagnosis.table.wrong.any()
    assert set(diagnosis.table.experiment) == set(diagnosis.shown)


def test_shell_diagnoses_a_pool_of_the_current_folder(tmp_path, monkeypatch, capsys):
    (tmp_path / "mine.py").write_text("from kvlab.pools import PrivatePool as Pool\nthing = 3\n")
    monkeypatch.chdir(tmp_path)
    assert main(["mine:Pool"]) == 0
    assert "no fault seen" in capsys.readouterr().out
    assert main(["mine:thing"]) == 2
    assert main(["mine:Missing"]) == 2
    assert main(["nowhere:Pool"]) == 2
    with pytest.raises(ValueError, match="form"):
        load_factory("mine")
