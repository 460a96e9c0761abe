"""Checks for notebook 09."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kvlab.exercises.checking import check


def check_scales(scales_of: Callable[[Tensor], Tensor], number: str = "9.1") -> bool:
    """One scale for each token: `(tokens, numbers)` to `(tokens, 1)`."""

    def attempt() -> str | None:
        rows = torch.tensor([[1.0, -254.0, 3.0], [0.5, 0.25, -0.5], [0.0, 0.0, 0.0]])
        got = scales_of(rows.clone())
        if tuple(got.shape) != (3, 1):
            return f"one scale for each of the 3 tokens: shape (3, 1), yours is {tuple(got.shape)}."
        alone = torch.cat([scales_of(rows[i : i + 1]) for i in range(3)])
        if not torch.equal(alone, got):
            return "a token's scale changes with its neighbours: take the largest of its own row."
        if got[2, 0] == 0 or not got[2, 0].isfinite():
            return "a row of zeros would be divided by zero; any other scale will do."
        codes = (rows / got).round()
        if codes.abs().max() > 127:
            return "some codes lie above 127: the largest number of a row must fit."
        if codes[0].abs().max() != 127 or codes[1].abs().max() != 127:
            return "the largest number of each row should become 127, or digits are lost."
        return None

    return check(number, attempt)


def check_noise(
    verdict: Callable[[bool, float, float | None, float], str], number: str = "9.2"
) -> bool:
    """Noise, near-tie or contaminated."""

    def attempt() -> str | None:
        cases = (
            (True, 0.01, None, 0.02, "noise", "equal tokens and a drift within the tolerance"),
            (True, 3.0, None, 0.02, "contaminated", "equal tokens, and logits far off"),
            (False, 0.01, 0.005, 0.02, "near-tie", "another token at a margin below the noise"),
            (False, 0.01, 2.0, 0.02, "contaminated", "another token at a wide margin"),
            (
                False,
                3.0,
                0.005,
                0.02,
                "contaminated",
                "a near-tie, but the logits moved far before",
            ),
            (False, 0.01, None, 0.02, "contaminated", "another token, and no margin to excuse it"),
        )
        for same, drift, margin, tolerance, wanted, why in cases:
            got = verdict(same, drift, margin, tolerance)
            if got != wanted:
                return f"{why}: that is {wanted!r}, you say {got!r}."
        return None

    return check(number, attempt)
