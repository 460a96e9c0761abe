"""Checks for notebook 03."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvlab.exercises.checking import check
from kvlab.verdict import first_divergence


def check_first_difference(
    find: Callable[[Sequence[int], Sequence[int]], int | None], number: str = "3.1"
) -> bool:
    """The first generated token that differs, counted from 1, or `None`."""

    def attempt() -> str | None:
        cases: list[tuple[list[int], list[int]]] = [
            ([7, 8, 9], [7, 5, 9]),
            ([7, 8], [7, 8]),
            ([7, 8], [7, 8, 9]),
        ]
        got = [find(*c) for c in cases]
        want = [first_divergence(*c) for c in cases]
        if got == want:
            return None
        if got[0] == 1:
            return "tokens are counted from 1 here."
        if got[:2] == want[:2]:
            return "an answer that stops early differs where the other one goes on."
        return f"for {cases} you say {got}."

    return check(number, attempt)


def check_judge(judge: Callable[..., str], number: str = "3.2") -> bool:
    """The rule of the verdicts: `judge(same_tokens, margin, drift, tolerance)`."""

    def attempt() -> str | None:
        t = 1e-4
        if judge(True, None, 0.0, t) != "isolated":
            return "the same tokens and no drift are 'isolated'."
        if judge(True, None, 1.0, t) != "disturbed":
            return "the same tokens with a drift that rounding cannot explain are 'disturbed'."
        if judge(False, 5.0, 1e-5, t) != "contaminated":
            return "another token at a wide margin is 'contaminated'."
        if judge(False, 1e-5, 1e-5, t) != "near-tie":
            return "another token at a margin below twice the tolerance is a 'near-tie'."
        if judge(False, 1e-5, 1.0, t) != "contaminated":
            return "a small margin is no excuse when the drift is large: 'contaminated'."
        return None

    return check(number, attempt)
