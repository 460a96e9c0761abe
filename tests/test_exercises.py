import pytest

from kvlab import exercises

CHECKS = [
    exercises.check_rows,
    exercises.check_step,
    exercises.check_megabytes,
    exercises.check_shared,
    exercises.check_first_difference,
    exercises.check_judge,
]


@pytest.mark.parametrize("check", CHECKS)
def test_an_open_exercise_is_called_open(check, capsys):
    def stub(*args, **kwargs):
        raise NotImplementedError

    assert check(stub) is False
    assert "still open" in capsys.readouterr().out


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
    ],
)
def test_a_typical_mistake_is_named(check, mistake, hint, capsys):
    assert check(mistake) is False
    assert hint in capsys.readouterr().out
