"""Trials, thresholds and leads."""

import numpy as np
import pytest
import torch

from kvlab import fingerprints
from kvlab.fingerprints import FAMILIES, Alarms, Trace, roc, total_variation


@pytest.fixture(scope="module")
def traces(bundled):
    trials = [fingerprints.draw_trial(bundled, seed, 8) for seed in range(4)]
    return fingerprints.measure(bundled, trials, pairs=2)


def test_a_seed_gives_the_same_trial_again(bundled):
    assert fingerprints.draw_trial(bundled, 5) == fingerprints.draw_trial(bundled, 5)
    kinds = {fingerprints.draw_trial(bundled, s).kind for s in range(2)}
    assert kinds == {"append", "overwrite"}


def test_every_collision_has_a_clean_twin_that_reads_nothing_foreign(traces):
    assert len(traces) == 4 * 2 * 2
    for trace in traces:
        masses = trace.numbers["foreign mass"]
        if trace.kind == "clean":
            assert masses.max() == 0
            assert trace.divergence is None
            assert not trace.exposed
        else:
            assert (masses.max() > 0) == trace.exposed
    exposed = {(t.kind, t.role) for t in traces if t.exposed}
    assert exposed >= {("overwrite", "first"), ("append", "second")}


def test_the_sign_of_the_owners_is_never_later_than_the_damage(traces):
    for trace in traces:
        if trace.divergence is not None:
            assert trace.moment is not None
            assert trace.moment <= trace.divergence


def test_total_variation_lays_the_newest_rows_on_each_other():
    one = torch.tensor([[0.5, 0.5]])
    assert total_variation(one, one) == 0
    assert total_variation(torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]])) == 1
    assert total_variation(torch.tensor([[0.2, 0.4, 0.4]]), one) == pytest.approx(0.2)


def flat(seed, kind, level, divergence=None, moment=2):
    """A made-up trace whose statistics all have one level, over four steps."""
    numbers = {name: np.full(4, level) for name in list(FAMILIES)[:4]}
    numbers |= {n: np.array([[level], [0.0], [1.0], [2.0]]) for n in ("entropy", "maximum")}
    return Trace(seed, kind, "first", 10, 3, moment, divergence, numbers)


def test_thresholds_come_from_calibrating_clean_runs_only():
    clean = [flat(seed, "clean", float(seed)) for seed in range(400)]
    alarms = Alarms.calibrate(clean)
    used = [s for s in range(400) if s % 4 in (0, 1)]
    assert alarms.thresholds["foreign mass"] in used
    over = np.mean([s > alarms.thresholds["foreign mass"] for s in used])
    assert 0 < over <= 0.01


def test_the_lead_is_the_first_wrong_token_minus_the_first_alarm():
    clean = [flat(seed, "clean", 0.1) for seed in range(8)]
    table = Alarms.calibrate(clean).table([flat(9, "overwrite", 0.9, divergence=4)])
    row = table[table.statistic == "foreign mass"].iloc[0]
    assert (row.fired, row.lead, row.damaged, row.score) == (1, 3, True, 0.9)


def test_a_perfect_score_has_area_one_and_a_useless_one_half():
    assert roc([3.0, 4.0], [1.0, 2.0])[2] == 1
    assert roc([1.0, 2.0], [1.0, 2.0])[2] == 0.5
    false, true, _ = roc([3.0, 4.0], [1.0, 3.5])
    assert (false[0], true[0], false[-1], true[-1]) == (0, 0, 1, 1)
