from math import comb

import numpy as np
import pytest

from kvlab.timing import compare_times, ks_p, recover, smallest_p


def test_times_that_are_apart_leak_and_equal_ones_do_not():
    rng = np.random.default_rng(0)
    slow, fast = rng.normal(10, 1, 60), rng.normal(5, 1, 60)
    gap = compare_times(fast, slow)
    assert gap.leaks
    assert gap.low <= gap.auc <= gap.high
    assert gap.auc > 0.99
    assert gap.effect > 3
    assert not compare_times(slow[:30], slow[30:]).leaks


def test_hits_that_come_later_are_no_leak_of_this_kind():
    rng = np.random.default_rng(1)
    late, early = rng.normal(10, 1, 60), rng.normal(5, 1, 60)
    gap = compare_times(late, early)
    assert not gap.leaks
    assert gap.auc < 0.01


def test_the_false_alarm_rate_is_below_alpha():
    rng = np.random.default_rng(2)
    alarms = sum(ks_p(*rng.normal(0, 1, (2, 20))) < 0.05 for _ in range(400))
    assert alarms <= 0.05 * 400 + 2 * (0.05 * 0.95 * 400) ** 0.5


def test_the_smallest_p_is_one_order_of_all():
    for n in (3, 7, 20):
        assert smallest_p(n, n) == pytest.approx(1 / comb(2 * n, n))


def test_too_few_or_broken_probes_are_refused():
    with pytest.raises(ValueError, match="take more probes"):
        compare_times([1.0] * 6, [2.0] * 6)
    with pytest.raises(ValueError, match="finite"):
        compare_times([1.0] * 20, [float("nan")] * 20)


def test_the_attack_reads_what_a_counter_tells():
    secret, known = (5, 3, 8), (1, 2)

    def score(guess):
        whole = (*known, *secret)
        return float(guess == whole[: len(guess)])

    got = recover(known, [range(10)] * 3, score, enough=1.0)
    assert got.tokens == secret
    assert got.probes == sum(t + 1 for t in secret)


def test_the_attack_ends_where_nothing_hits():
    got = recover((1,), [range(10)] * 3, lambda guess: 0.0, enough=1.0)
    assert got.tokens == ()
    assert got.probes == 10


def test_without_a_threshold_the_best_guess_is_taken_and_a_wrong_turn_stays():
    got = recover((), [range(3)] * 2, lambda guess: -abs(guess[-1] - 1))
    assert got.tokens == (1, 1)
    assert got.probes == 6
