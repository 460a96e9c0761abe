"""Every known fault is found by the default budget and named, as one of two names at most."""

import importlib

import pytest

from kvlab.check import check
from kvlab.faults import CATALOGUE, make_pool
from kvlab.faults.extras import EXTRAS

FOREIGN = {
    f"{design}: {fault}": (design, fault)
    for design in ("hashed_blocks", "checkpoints", "host_offload", "ring")
    for fault in importlib.import_module(f"tests.foreign.{design}").FAULTS
}
FAULTS = {**CATALOGUE, **EXTRAS}
MISSED = {"truncate keeps the hash"}
"""Nobody has thought of a history that shows it, as long as writes are announced."""
MISNAMED = {
    "last reader writes": "leak of memory",
    "walks on after a split": "leak of memory",
}
"""What is named after its other symptom, which is there as well."""


@pytest.mark.parametrize("name", sorted(FAULTS.keys() - MISSED))
def test_a_fault_of_the_catalogue_is_found_and_named(name):
    report = check(lambda config: make_pool(FAULTS[name], config))
    assert report.trace is not None, name
    assert MISNAMED.get(name, FAULTS[name].kind) in report.diagnosis.kinds, str(report)


@pytest.mark.parametrize("name", FOREIGN)
def test_a_fault_by_another_hand_is_found_and_named(name):
    """These four designs were at hand while the classifier was written."""
    design, fault = FOREIGN[name]
    module = importlib.import_module(f"tests.foreign.{design}")
    report = check(lambda config: module.build(config, fault))
    assert report.trace is not None, name
    assert set(report.diagnosis.kinds) & set(module.FAULTS[fault][0]), str(report)


@pytest.mark.parametrize("seed", range(0, 20_000, 1_000))
def test_the_tree_that_walked_on_after_a_split_is_found_from_every_seed(seed):
    pool = EXTRAS["walks on after a split"]
    report = check(lambda config: make_pool(pool, config), seed=seed, name=False)
    assert report.trace is not None
