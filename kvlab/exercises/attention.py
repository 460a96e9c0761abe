"""Checks for notebooks 04 and 05."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from kvlab.attention import use_kvlab_attention
from kvlab.exercises.checking import check
from kvlab.fingerprints import total_variation
from kvlab.forward import Observer
from kvlab.pools import Owner, SimpleCachePool
from kvlab.request import Request
from kvlab.schedule import run


def check_foreign(
    foreign: Callable[[Sequence[Owner | None], str, int], list[bool]], number: str = "4.1"
) -> bool:
    """Which rows are not the reader's: `foreign(owners, request, generation)`."""

    def attempt() -> str | None:
        mine, theirs = Owner("A", 3, 0, 7), Owner("B", 4, 1, 7)
        earlier, nobody = Owner("A", 1, 2, 7), None
        got = list(foreign([mine, theirs, earlier, nobody], "A", 3))
        if got == [False, True, True, True]:
            return None
        if got[:2] != [False, True]:
            return "a row is foreign if its last writer is another request, and only then."
        if not got[2]:
            return "A of an earlier life is somebody else: compare the generation too."
        return "a row that nobody has written is not the reader's either."

    return check(number, attempt)


def check_watch(watch: Callable[[], Observer], number: str = "4.2") -> bool:
    """An observer that notes who reads foreign rows: `found` lists `(request, token)`."""

    def attempt() -> str | None:
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=50,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
        )
        model = LlamaForCausalLM(config).eval()
        use_kvlab_attention(model)
        pair = [Request("A", (5, 6, 7), 4), Request("B", (8, 9), 4)]
        found = []
        for colliding in (False, True):
            observer = watch()
            pool = SimpleCachePool.for_model(config, 2, 16)
            if colliding:
                pool.collide("B", "A", "append")
            run(model, pair, pool, "round_robin", observers=[observer])
            found.append([tuple(x) for x in observer.found])  # type: ignore[attr-defined]
        clean, colliding_found = found
        if clean:
            return f"with a slot each nobody reads foreign rows, you found {clean}."
        if colliding_found == [("B", i) for i in (1, 2, 3, 4)]:
            return None
        if colliding_found == [("B", i) for i in (0, 1, 2, 3)]:
            return "generated tokens are counted from 1."
        if not colliding_found:
            return "B is appended behind the rows of A and reads them: ask its lease."
        return f"B reads rows of A at each of its 4 tokens, you found {colliding_found}."

    return check(number, attempt)


def check_distance(
    distance: Callable[[Float[Tensor, " T"], Float[Tensor, " U"]], float], number: str = "5.1"
) -> bool:
    """Total variation of two attention rows, the newest tokens laid on each other."""

    def attempt() -> str | None:
        one, other = torch.tensor([0.5, 0.5, 0.0]), torch.tensor([0.1, 0.4, 0.5])
        want = total_variation(one[None], other[None])
        got = float(distance(one, other))
        if abs(got - 2 * want) < 1e-6:
            return "half of the summed difference, so that 1 means nothing in common."
        if abs(got - want) > 1e-6:
            return f"for {one.tolist()} and {other.tolist()} you say {got:.3g}, not {want:.3g}."
        longer = torch.tensor([0.0, *one.tolist()])
        got = float(distance(longer, other))
        if abs(got - want) > 1e-6:
            return "one row may be longer: lay the newest tokens on each other, not the oldest."
        return None

    return check(number, attempt)


def check_threshold(
    threshold: Callable[[Sequence[float], float], float], number: str = "5.2"
) -> bool:
    """The lowest threshold that at most a given share of clean runs exceeds."""

    def attempt() -> str | None:
        clean = [float(x) for x in np.random.default_rng(0).permutation(200)]
        got = threshold(clean, 0.01)
        over = float(np.mean(np.array(clean) > got))
        if over > 0.01:
            return f"{over:.1%} of the clean runs lie above it, 1% are allowed."
        if got > 197.0:
            return "it is higher than it needs to be: that costs alarms which are not false."
        return None if threshold(clean, 0.5) < got else "it does not follow the share."

    return check(number, attempt)
