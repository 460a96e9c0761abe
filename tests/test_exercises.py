import math

import pytest

from kvlab import exercises
from kvlab.forward import Observer
from kvlab.pools import PrivatePool

CHECKS = [
    exercises.check_rows,
    exercises.check_step,
    exercises.check_megabytes,
    exercises.check_shared,
    exercises.check_first_difference,
    exercises.check_judge,
    exercises.check_foreign,
    exercises.check_watch,
    exercises.check_distance,
    exercises.check_threshold,
    exercises.check_saved,
    exercises.check_write,
    exercises.check_conflict,
    exercises.check_orders,
    exercises.check_pool,
    exercises.check_fewest,
    exercises.check_context,
    exercises.check_scales,
    exercises.check_noise,
    exercises.check_reach,
    exercises.check_line_key,
    exercises.check_trust,
    exercises.check_leaky,
]


@pytest.mark.parametrize("check", CHECKS)
def test_an_open_exercise_is_called_open(check, capsys):
    def stub(*args, **kwargs):
        raise NotImplementedError

    assert check(stub) is False
    assert "still open" in capsys.readouterr().out


def copy_without_leaving(table, count, index, free):
    table[index] = free.pop()
    count[table[index]] = 1


def copy_always(table, count, index, free):
    count[table[index]] -= 1
    table[index] = free.pop() if free else 99
    count[table[index]] = 1


@pytest.mark.parametrize(
    ("check", "mistake", "hint"),
    [
        (exercises.check_rows, lambda p, g: p + g, "not yet fed back"),
        (exercises.check_rows, lambda p, g: g, "prompt"),
        (
            exercises.check_megabytes,
            lambda layers, kv_heads, head_dim, tokens, number_bytes: (
                layers * kv_heads * head_dim * tokens * number_bytes / 1e6
            ),
            "a key and a value",
        ),
        (exercises.check_shared, lambda a, b: sum(x == y for x, y in zip(a, b)), "another history"),
        (
            exercises.check_shared,
            lambda a, b: next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), len(b)),
            "Leave one",
        ),
        (
            exercises.check_first_difference,
            lambda a, b: next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), None),
            "from 1",
        ),
        (
            exercises.check_first_difference,
            lambda a, b: next((i for i, (x, y) in enumerate(zip(a, b), 1) if x != y), None),
            "stops early",
        ),
        (
            exercises.check_judge,
            lambda same, margin, drift, t: (
                ("isolated" if drift <= t else "disturbed")
                if same
                else ("near-tie" if margin <= 2 * t else "contaminated")
            ),
            "no excuse",
        ),
        (
            exercises.check_foreign,
            lambda owners, request, generation: [o is None or o.request != request for o in owners],
            "generation",
        ),
        (
            exercises.check_foreign,
            lambda owners, request, generation: [
                o is not None and o[:2] != (request, generation) for o in owners
            ],
            "nobody",
        ),
        (
            exercises.check_distance,
            lambda one, other: float((one[-3:] - other[-3:]).abs().sum()),
            "half",
        ),
        (
            exercises.check_distance,
            lambda one, other: float((one[:3] - other[:3]).abs().sum() / 2),
            "newest",
        ),
        (exercises.check_threshold, lambda clean, share: max(clean), "higher than it needs"),
        (exercises.check_threshold, lambda clean, share: sum(clean) / len(clean), "lie above"),
        (exercises.check_saved, lambda n, p, u: p / (p + u), "n - 1"),
        (exercises.check_saved, lambda n, p, u: (n - 1) / n, "private rows"),
        (exercises.check_write, lambda table, count, index, free: None, "copy first"),
        (exercises.check_write, copy_without_leaving, "lower its count"),
        (exercises.check_write, copy_always, "without a copy"),
    ],
)
def test_a_typical_mistake_is_named(check, mistake, hint, capsys):
    assert check(mistake) is False
    assert hint in capsys.readouterr().out


class Numbering(Observer):
    """Counts generated tokens from 0, or sees nothing at all."""

    def __init__(self, seen, first):
        self.seen, self.first, self.found = seen, first, []

    def after(self, forward):
        for ran, lease in zip(forward.runs, forward.leases, strict=True):
            if self.seen and any(lease.foreign()):
                self.found.append((ran.request.id, len(ran.steps) - 1 + self.first))


def test_the_watching_observer_is_told_what_it_missed(capsys):
    assert exercises.check_watch(lambda: Numbering(True, 1))
    assert not exercises.check_watch(lambda: Numbering(True, 0))
    assert "from 1" in capsys.readouterr().out
    assert not exercises.check_watch(lambda: Numbering(False, 1))
    assert "ask its lease" in capsys.readouterr().out


def test_a_mystery_says_what_was_missed(capsys):
    assert exercises.check_mystery(2, None) is False
    assert exercises.check_mystery(2, "fate") is False
    assert exercises.check_mystery(2, "layout") is False
    assert exercises.check_mystery(2, "key") is True
    told = capsys.readouterr().out
    assert "still open" in told
    assert "is no class" in told
    assert "You missed: near misses" in told


@pytest.mark.parametrize(
    ("orders", "told"),
    [
        (lambda n, m: math.factorial(n + m), "among themselves"),
        (lambda n, m: 2 ** (n + m), "exactly its own number"),
        (lambda n, m: 251, "252"),
        (math.comb, "252"),
        (lambda n, m: math.comb(n + m, n), "right"),
    ],
)
def test_number_of_orders_is_told_apart_from_its_usual_mistakes(orders, told, capsys):
    exercises.check_orders(orders)
    assert told in capsys.readouterr().out


def test_a_pool_that_fails_hears_which_case(capsys):
    class OneCache(PrivatePool):
        def admit(self, request):
            self.lease = getattr(self, "lease", None) or super().admit(request)
            return self.lease

    assert exercises.check_pool(OneCache) is False
    assert "fails" in capsys.readouterr().out
    assert exercises.check_pool(PrivatePool) is True


def test_intruders_are_told_apart_from_neighbours(capsys):
    assert exercises.check_conflict(lambda events: []) is False
    assert exercises.check_conflict(lambda events: {e.request for e in events}) is False
    told = capsys.readouterr().out
    assert "nothing was found" in told
    assert "you accuse" in told


def test_known_mistakes_with_contexts_and_probes_are_named(capsys):
    assert not exercises.check_fewest(lambda alpha: 3)
    assert not exercises.check_context(lambda tenant, user, secret: (("tenant", tenant),))
    assert "a colleague" in capsys.readouterr().out
    assert not exercises.check_context(lambda t, u, s: (("salt", t + u + s.decode()),))
    assert "tag or separate" in capsys.readouterr().out
    assert not exercises.check_context(lambda t, u, s: (("tenant", t), ("user", u)))
    assert "make up the salt" in capsys.readouterr().out
    assert not exercises.check_context(lambda t, u, s: None)
    assert "nobody hits" in capsys.readouterr().out
