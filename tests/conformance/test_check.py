"""The suite: silent on correct pools, also a stranger's; loud on broken ones."""

from __future__ import annotations

import json

import pytest
from transformers import DynamicCache, StaticCache

from kvlab.conformance import CASES, check, play_again
from kvlab.conformance.__main__ import main
from kvlab.faults import CATALOGUE, make_pool
from kvlab.models import tiny_model
from kvlab.pools import SimpleCachePool, TieredCachePool
from kvlab.references import References

# One of each kind; notebook 08 runs all of them.
SOME = list({f.kind: n for n, f in CATALOGUE.items()}.values())


@pytest.fixture(scope="module")
def references():
    return References(tiny_model())


class Lease:
    def __init__(self, cache):
        self.cache, self.num_cached_tokens = cache, 0


class Wraps:
    """A stranger's pool, written against the contract alone."""

    def __init__(self, config):
        self.config = config

    def admit(self, request):
        return Lease(DynamicCache(config=self.config))

    def release(self, lease):
        pass


class WrapsAndForgets(Wraps):
    """The same, but caches are handed on without being emptied."""

    free: list

    def __init__(self, config):
        super().__init__(config)
        self.free = []

    def admit(self, request):
        return Lease(self.free.pop()) if self.free else super().admit(request)

    def release(self, lease):
        self.free.append(lease.cache)


class Three(Wraps):
    """Takes three requests at a time, and mixes up the second and the third."""

    def __init__(self, config):
        super().__init__(config)
        self.live = []

    def admit(self, request):
        from kvlab.pools import PoolFull

        if len(self.live) == 3:
            raise PoolFull("three are enough")
        lease = super().admit(request)
        if len(self.live) == 2:
            lease.cache = self.live[1].cache
        self.live.append(lease)
        return lease

    def release(self, lease):
        self.live.remove(lease)


@pytest.mark.parametrize(
    ("pool_type", "block", "sharing"),
    [(SimpleCachePool, 16, False), (TieredCachePool, 4, True)],
)
def test_our_pools_pass_the_quick_profile(references, pool_type, block, sharing):
    report = check(
        lambda c: make_pool(pool_type, c),
        block_size=block,
        shares_prefixes=sharing,
        references=references,
    )
    assert report.ok, str(report)
    assert [r.case for r in report.rows] == list(CASES)
    assert report.sharing == ("shares prefixes" if sharing else "isolates by not sharing")


def test_a_strangers_pool_passes_and_has_no_capacity(references):
    report = check(Wraps, references=references)
    assert report.ok, str(report)
    assert report.sharing == "isolates by not sharing"
    assert [r.case for r in report.rows if r.result == "not applicable"] == ["capacity"]


@pytest.mark.parametrize(
    "factory",
    [
        lambda c: SimpleCachePool.for_model(c, 1, 64),
        lambda c: SimpleCachePool.for_model(c, 3, 8),
        lambda c: SimpleCachePool.for_model(c, 2, 3),
        lambda c: TieredCachePool.for_model(c, 6, block_size=4),
        lambda c: TieredCachePool.for_model(c, 80, block_size=1),
    ],
    ids=["one slot", "eight rows", "three rows", "six blocks", "blocks of one"],
)
def test_small_pools_of_ours_pass(references, factory):
    report = check(factory, references=references)
    assert report.ok, str(report)


def test_a_pool_of_static_caches_passes(references):
    class Static(Wraps):
        def admit(self, request):
            return Lease(StaticCache(config=self.config, max_cache_len=256))

    report = check(Static, references=references)
    assert report.ok, str(report)


@pytest.mark.parametrize("pool_type", [WrapsAndForgets, Three])
def test_its_broken_copies_fail(references, pool_type):
    assert not check(pool_type, references=references, stop_at_first=True).ok


@pytest.mark.parametrize("name", SOME)
def test_faults_are_killed(references, name):
    block = 4 if issubclass(CATALOGUE[name], TieredCachePool) else 16
    report = check(
        lambda c: make_pool(CATALOGUE[name], c),
        block_size=block,
        references=references,
        stop_at_first=True,
    )
    assert not report.ok, name


def test_pool_that_never_shares_fails_the_positive_control(references):
    report = check(Wraps, shares_prefixes=True, references=references)
    assert [r.case for r in report.rows if r.result == "failed"] == ["twins"]
    assert "no cached tokens" in str(report)


def test_a_failure_can_be_played_again(references):
    factory = lambda c: make_pool(CATALOGUE["check then take"], c)  # noqa: E731
    report = check(factory, references=references)
    failure = next(f for f in report.failures if f.token is not None and f.order != "serial")
    runs = play_again(failure, factory, references.model)
    seen = references.judge(runs[failure.request])
    assert seen.first_divergence == failure.token
    assert failure.margin == seen.margin


def test_the_shortest_order_is_short(references):
    factory = lambda c: make_pool(CATALOGUE["abort skips the reset"], c)  # noqa: E731
    report = check(factory, references=references)
    shrunk = [f for f in report.failures if f.case == "shortest order"]
    assert shrunk
    assert len(shrunk[0].order.split()) <= 6


def test_report_is_text_table_and_json(references):
    report = check(WrapsAndForgets, references=references)
    told = json.loads(report.to_json())
    assert told["ok"] is False
    assert {"plays", "token", "margin"} <= set(told["failures"][0])
    assert "contaminated" in str(report).splitlines()[-1]
    assert "<table" in report._repr_html_()


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match="profile"):
        check(Wraps, profile="slow")
    with pytest.raises(ValueError, match="at least 1"):
        check(Wraps, block_size=0)


def test_shell_tells_isolated_contaminated_and_broken_apart(tmp_path, monkeypatch, capsys):
    (tmp_path / "pools_of_mine.py").write_text(
        "from kvlab.pools import PrivatePool as Good\n"
        "class Bad(Good):\n"
        "    one = None\n"
        "    def admit(self, request):\n"
        "        self.one = self.one or super().admit(request)\n"
        "        return self.one\n"
        "def broken(config):\n"
        "    raise OSError('no memory')\n"
    )
    monkeypatch.chdir(tmp_path)
    assert main(["pools_of_mine:Good", "--json", "report.json"]) == 0
    assert json.loads((tmp_path / "report.json").read_text())["ok"] is True
    assert main(["pools_of_mine:Bad"]) == 1
    assert main(["pools_of_mine:broken"]) == 2
    assert main(["pools_of_mine:Missing"]) == 2
    assert "no memory" in capsys.readouterr().err
