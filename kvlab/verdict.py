"""From two runs to a verdict: what differs, where, by how much, and whose words came in."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from rapidfuzz.distance import Levenshtein
from transformers import PreTrainedModel

from kvlab.decode import cached
from kvlab.pools import PrivatePool
from kvlab.request import Request, Run
from kvlab.schedule import run as run_schedule

Verdict = Literal["isolated", "disturbed", "near-tie", "contaminated"]

RULE = """\
isolated      the same tokens as the reference, and every logit within the tolerance
disturbed     the same tokens, but some logit moved further than rounding moves it
near-tie      another token, where the reference's two best logits were so close (twice the
              tolerance at most) that rounding alone may have changed their order
contaminated  another token, where rounding cannot explain it"""
"""The rule that turns numbers into a verdict; notebooks print it."""


@dataclass(frozen=True)
class Comparison:
    """One run beside its reference.

    Attributes:
        edit_distance: Token insertions, deletions and substitutions between the two answers.
        first_divergence: First generated token that differs, counted from 1; `None` if none does.
        margin: The reference's top-1 minus top-2 logit at that token.
        drift: Largest logit difference as long as both runs had generated the same tokens.
        bitwise: All logits are equal to the bit.
        same_tokens: The answers are equal.
        within_tolerance: `drift` is at most the tolerance of the dtype.
        verdict: See `RULE`.
    """

    edit_distance: int
    first_divergence: int | None
    margin: float | None
    drift: float
    bitwise: bool
    same_tokens: bool
    within_tolerance: bool
    verdict: Verdict


def first_divergence(tokens: Sequence[int], reference: Sequence[int]) -> int | None:
    """The first generated token that differs, counted from 1.

    Introduced in notebook 03.
    """
    for i, (a, b) in enumerate(zip(tokens, reference, strict=False), start=1):
        if a != b:
            return i
    shorter = min(len(tokens), len(reference))
    return None if len(tokens) == len(reference) else shorter + 1


def drift(run: Run, reference: Run) -> float:
    """Largest absolute logit difference over the steps that saw the same generated tokens."""
    largest = 0.0
    for ours, theirs in zip(run.steps, reference.steps, strict=False):
        if ours.logits is None or theirs.logits is None:
            raise ValueError("both runs must have kept their logits")
        largest = max(largest, (ours.logits - theirs.logits).abs().max().item())
        if ours.token != theirs.token:
            break
    return largest


def compare(run: Run, reference: Run, tolerance: float) -> Comparison:
    """Judge a run by `RULE`.

    Args:
        tolerance: Largest logit difference that rounding alone makes, see `measure_tolerance`.
    """
    where = first_divergence(run.tokens, reference.tokens)
    moved = drift(run, reference)
    margin = None
    if where is not None and where <= len(reference.steps):
        margin = reference.margins[where - 1]
    verdict: Verdict
    if where is None:
        verdict = "isolated" if moved <= tolerance else "disturbed"
    elif margin is not None and margin <= 2 * tolerance and moved <= tolerance:
        verdict = "near-tie"
    else:
        verdict = "contaminated"
    return Comparison(
        edit_distance=Levenshtein.distance(run.tokens, reference.tokens),
        first_divergence=where,
        margin=margin,
        drift=moved,
        bitwise=where is None and moved == 0.0,
        same_tokens=where is None,
        within_tolerance=moved <= tolerance,
        verdict=verdict,
    )


def measure_tolerance(
    model: PreTrainedModel, requests: Sequence[Request], references: Mapping[str, Run]
) -> float:
    """How far rounding moves a logit of `model` although nothing is shared.

    Every request is computed without a cache, with a private cache alone, and with private caches
    in batches of different sizes and padded lengths. All of these are correct, so a difference
    between two of them is rounding. Twice the largest one is returned: it is the largest of a few,
    and other processors, threads and neighbours go beyond it.

    Args:
        references: The cold recompute of each request, by id.
    """
    # A neighbour of twice the length pads everybody else's rows.
    longest = max(requests, key=lambda r: len(r.tokens))
    neighbour = replace(longest, id="neighbour", tokens=longest.tokens * 2)
    ways = [dict(references), {r.id: cached(model, r) for r in requests}]
    for size, extra in ((4, []), (len(requests), []), (len(requests), [neighbour])):
        runs: dict[str, Run] = {}
        for at in range(0, len(requests), size):
            group = [*requests[at : at + size], *extra]
            pool = PrivatePool(model.config)
            runs |= run_schedule(model, group, pool, "round_robin", batch_size=len(group))
        ways.append(runs)
    pairs = itertools.combinations(ways, 2)
    return 2 * max(drift(one[r.id], other[r.id]) for one, other in pairs for r in requests)


def foreign_spans(
    answer: Sequence[int], own: Sequence[int], partner: Sequence[int], longest: int = 3
) -> list[tuple[int, int]]:
    """Where an answer says what only the partner's text says.

    A run of up to `longest` tokens is foreign if it stands in `partner` (prompt and right answer of
    the other request) and nowhere in `own` (prompt and right answer of this one). Shorter runs go
    first, so that a foreign word does not drag its innocent neighbours along: a longer run counts
    only where none of its tokens is foreign already. Adjacent runs are merged.
    Introduced in notebook 03.

    Returns:
        Half-open token ranges `(start, end)` of `answer`, in order.
    """

    def grams(tokens: Sequence[int], n: int) -> set[tuple[int, ...]]:
        return {tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)}

    foreign = [False] * len(answer)
    for n in range(1, longest + 1):
        only_partner = grams(partner, n) - grams(own, n)
        shorter = list(foreign)
        for i in range(len(answer) - n + 1):
            if tuple(answer[i : i + n]) in only_partner and not any(shorter[i : i + n]):
                foreign[i : i + n] = [True] * n
    spans, start = [], None
    for i, is_foreign in enumerate([*foreign, False]):
        if is_foreign and start is None:
            start = i
        elif not is_foreign and start is not None:
            spans.append((start, i))
            start = None
    return spans
