"""The catalogue: what it holds, and that each fault is what it says."""

from __future__ import annotations

from collections import Counter

import pytest
from conftest import prompt

from kvlab.decode import cached
from kvlab.detectors import DETECTORS, Evidence, References, clean_schedule, detect, workload
from kvlab.diagnose import article_rule, diagnose
from kvlab.faults import CATALOGUE, fault, make_pool, misaligned
from kvlab.models import tiny_model
from kvlab.pools import PrivatePool, SimpleCachePool, TieredCachePool
from kvlab.schedule import run
from kvlab.verdict import drift

# All of them are detected and diagnosed in notebook 06; here the first of each class and pool.
SOME = list({(f.kind, issubclass(f, TieredCachePool)): n for n, f in CATALOGUE.items()}.values())


@pytest.fixture(scope="module")
def references():
    return References(tiny_model())


def test_at_least_24_faults_and_two_of_every_class_on_both_pools():
    kinds = Counter(f.kind for f in CATALOGUE.values())
    assert len(CATALOGUE) >= 24
    assert min(kinds.values()) >= 2
    assert {issubclass(f, TieredCachePool) for f in CATALOGUE.values()} == {True, False}


def test_every_fault_says_what_was_reported_and_what_shows_it():
    for name, pool_type in CATALOGUE.items():
        assert "vidence" in pool_type.__doc__, name


def test_a_name_is_given_once():
    with pytest.raises(ValueError, match="already"):
        fault("stale length", "stale state")(type("Again", (SimpleCachePool,), {"__doc__": "x"}))


@pytest.mark.parametrize("name", SOME)
def test_fault_is_detected(references, name):
    factory = lambda config: make_pool(CATALOGUE[name], config)  # noqa: E731
    alarms = detect(Evidence(factory, references, workload(references.model)))
    assert any(a.raised for a in alarms.values()), name


@pytest.mark.parametrize("name", SOME)
def test_diagnosis_names_the_class(name):
    model = tiny_model()
    diagnosis = diagnose(lambda config: make_pool(CATALOGUE[name], config), model)
    assert diagnosis.kind == CATALOGUE[name].kind, str(diagnosis)


@pytest.mark.parametrize("pool_type", [SimpleCachePool, TieredCachePool])
def test_correct_pools_raise_no_alarm(references, pool_type):
    factory = lambda config: make_pool(pool_type, config)  # noqa: E731
    for session in [
        workload(references.model),
        *([clean_schedule(references.model, s)] for s in range(10)),
    ]:
        alarms = detect(Evidence(factory, references, session))
        assert {n: a.why for n, a in alarms.items() if a.raised} == {}


def test_detectors_that_need_a_log_cannot_see_without_one(references):
    alarms = detect(Evidence(PrivatePool, references, [clean_schedule(references.model, 1)]))
    assert {n for n in DETECTORS if alarms[n].raised is None} == {
        "key histogram",
        "ownership",
        "event conflicts",
    }


def test_more_wrong_heads_move_the_logits_further(references):
    model, request = references.model, prompt("a", 12, 3, 3)
    right = cached(model, request)
    moved = [
        drift(run(model, [request], make_pool(misaligned(n), model.config))["a"], right)
        for n in (1, 2)
    ]
    assert all(m > 100 * references.tolerance for m in moved)


def test_articles_rule_is_silent_on_a_correct_pool():
    diagnosis = diagnose(lambda c: make_pool(SimpleCachePool, c), tiny_model())
    assert article_rule(diagnosis.shown) is None
    assert diagnosis.confidence == "no fault seen"
