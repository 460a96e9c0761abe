"""The suite that notebook 08 still shows; new pools are judged by kvlab.check."""

from __future__ import annotations

import json

import pytest
from transformers import DynamicCache

from kvlab.conformance import check, play_again
from kvlab.faults import CATALOGUE, make_pool
from kvlab.models import tiny_model
from kvlab.references import References


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
