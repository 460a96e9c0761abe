"""Checks for notebooks 01 and 02."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from kvlab.exercises.checking import check


def check_rows(rows: Callable[[int, int], int], number: str = "1.1") -> bool:
    """How many cache rows are filled when `generated` tokens have been chosen after a prompt."""

    def attempt() -> str | None:
        got = rows(10, 5)
        known = {
            14: None,
            15: "15 counts the last token, which is chosen but not yet fed back.",
            5: "the rows of the prompt are missing.",
            4: "the rows of the prompt are missing.",
        }
        if got in known:
            return known[got] if rows(21, 1) == 21 or got != 14 else "wrong for one token only."
        return f"for 10 prompt and 5 generated tokens you say {got}; count what was fed."

    return check(number, attempt)


def check_step(step: Callable[..., Any], number: str = "1.2") -> bool:
    """One cached attention step of one head: `step(q, k, v, keys, values)`."""

    def attempt() -> str | None:
        generator = torch.Generator().manual_seed(0)
        keys, values = torch.randn(2, 6, 8, generator=generator)
        q, k, v = torch.randn(3, 1, 8, generator=generator)
        out, new_keys, new_values = step(q, k, v, keys, values)
        all_keys, all_values = torch.cat([keys, k]), torch.cat([values, v])

        def attend(a: Float[Tensor, "T D"], b: Float[Tensor, "T D"], scale: float) -> Tensor:
            return (q @ a.T * scale).softmax(-1) @ b

        if new_keys.shape != all_keys.shape or new_values.shape != all_values.shape:
            return "the new key and value must be appended: 7 rows, not 6."
        if torch.allclose(out, attend(all_keys, all_values, 8**-0.5), atol=1e-5):
            return None
        if torch.allclose(out, attend(all_keys, all_values, 1.0), atol=1e-5):
            return "the scores must be divided by the square root of the head dim."
        if torch.allclose(out, attend(keys, values, 8**-0.5), atol=1e-5):
            return "the new token must see itself: append before you attend."
        return "the output is not softmax(q K^T / sqrt(d)) V; look at the axis of the softmax."

    return check(number, attempt)


def check_megabytes(megabytes: Callable[..., float], number: str = "2.1") -> bool:
    """Megabytes (of a million bytes) of one request's cache."""

    def attempt() -> str | None:
        got = megabytes(layers=32, kv_heads=8, head_dim=128, tokens=2048, number_bytes=2)
        right = 32 * 8 * 128 * 2048 * 2 * 2 / 1e6
        if abs(got - right) < 0.5:
            return None
        if abs(got - right / 2) < 0.5:
            return "half of it is missing: a key and a value are stored for every token."
        if abs(got - right * 1e6 / 2**20) < 0.5:
            return "these are mebibytes (1,048,576 bytes); megabytes were asked for."
        return f"you say {got:.1f}, the formula of the text gives another number."

    return check(number, attempt)


def check_shared(
    shared: Callable[[Sequence[int], Sequence[int]], int], number: str = "2.2"
) -> bool:
    """How many tokens of two prompts may be shared."""

    def attempt() -> str | None:
        if shared([1, 2, 3, 4], [1, 2, 9, 4]) == 3:
            return "a token that is equal behind a difference has another history: not shareable."
        if shared([1, 2, 3, 4], [1, 2, 9, 4]) != 2:
            return "[1, 2, 3, 4] and [1, 2, 9, 4] share two tokens."
        if shared([1, 2], [1, 2]) == 2:
            return (
                "two equal prompts: if all tokens are reused, nothing is left to compute the first "
                "logits from. Leave one."
            )
        if shared([1, 2], [1, 2, 3]) != 2 or shared([1, 2, 3], [1, 2]) != 1:
            return "only the prompt that comes second, b, has to keep a token to compute."
        return None if shared([5], [6]) == 0 else "[5] and [6] share nothing."

    return check(number, attempt)
