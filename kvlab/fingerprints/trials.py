"""Seeded collisions, each with a clean twin, and what can be measured at every step."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from kvlab.models import LoadedModel
from kvlab.observe import AttentionProbe, AttentionStep, first_foreign_read
from kvlab.pools import SimpleCachePool
from kvlab.pools.slots import Collision
from kvlab.prompts import LANGUAGES
from kvlab.request import Request, Run
from kvlab.schedule import run
from kvlab.training.passwords import PATTERNS, unseen_passphrase
from kvlab.verdict import first_divergence


@dataclass(frozen=True)
class Trial:
    """Two requests that will share a slot.

    Attributes:
        kind: How they collide.
        first, second: In order of arrival; names end in "/1" and "/2".
    """

    seed: int
    kind: Collision
    first: Request
    second: Request

    @property
    def pair(self) -> tuple[Request, Request]:
        return self.first, self.second


def draw_trial(loaded: LoadedModel, seed: int, new_tokens: int = 26) -> Trial:
    """A random pair: sums or passphrases never seen in training, behind 0 to 5 filler sentences."""
    rng = random.Random(seed)
    language = LANGUAGES[rng.choice(("zh", "en"))]

    def text() -> str:
        system = rng.choice((language.assistant, language.translator))
        system += "".join(language.filler(rng) for _ in range(rng.randrange(6)))
        if rng.random() < 0.5:
            return language.sum_prompt(rng.randrange(10), rng.randrange(1, 10), system)
        # Only the assistant tells passphrases; the translator would be asked in vain.
        system = system.replace(language.translator, language.assistant)
        passphrase = unseen_passphrase(rng, language.name, rng.choice(PATTERNS[:2]))
        return language.secret_prompt(passphrase, system)

    first, second = (loaded.request(f"{seed}/{i}", text(), new_tokens) for i in (1, 2))
    return Trial(seed, "overwrite" if seed % 2 else "append", first, second)


@dataclass(frozen=True)
class Trace:
    """One request in one run beside its reference, step by step.

    Attributes:
        kind: "clean", "overwrite" or "append".
        role: "first" or "second".
        shared_rows: Rows that the two prompts claim: those that the second one overwrites, or those
            that stand in front of it when it is appended.
        parting: First token at which the two right answers differ, counted from 1.
        moment: First generated token at which this request reads foreign rows when the two
            collide, counted from 1; a clean run is looked at at the same token.
        divergence: First generated token that differs from the reference, counted from 1.
        numbers: One array for each statistic: `(S,)`, or `(S, L*H)` where each head has its own.
    """

    seed: int
    kind: Literal["clean", "overwrite", "append"]
    role: Literal["first", "second"]
    shared_rows: int
    parting: int | None
    moment: int | None
    divergence: int | None
    numbers: dict[str, Float[np.ndarray, "S ..."]]

    @property
    def exposed(self) -> bool:
        """Whether this run read foreign rows."""
        return self.kind != "clean" and self.moment is not None


def total_variation(weights: Float[Tensor, "H T"], reference: Float[Tensor, "H U"]) -> float:
    """Half the summed difference of two attention distributions; the largest of all heads.

    The newest rows are laid on each other: rows that only one of them has come first.
    """
    width = max(weights.shape[-1], reference.shape[-1])
    one, other = (F.pad(w, (width - w.shape[-1], 0)) for w in (weights, reference))
    return (one - other).abs().sum(-1).amax().item() / 2


def _trace(
    trial: Trial,
    kind: Literal["clean", "overwrite", "append"],
    request: Request,
    ran: Run,
    steps: list[AttentionStep],
    reference: Run,
    reference_steps: list[AttentionStep],
    parting: int | None,
    moment: int | None,
) -> Trace:
    both = list(zip(steps, reference_steps, strict=False))
    numbers = {
        "attention distance": [
            max(total_variation(a.rows[i], b.rows[i]) for i in a.rows) for a, b in both
        ],
        "logit drift": [
            (a.logits - b.logits).abs().max().item()  # type: ignore[operator]
            for a, b in zip(ran.steps, reference.steps, strict=False)
        ],
        "foreign mass": [s.foreign_mass.max().item() for s in steps if s.foreign_mass is not None],
        "foreign among top three": [
            torch.tensor(s.foreign)[s.top].float().mean().item() for s in steps
        ],
        "entropy": [s.entropy.flatten().tolist() for s in steps],
        "maximum": [s.maximum.flatten().tolist() for s in steps],
    }
    first = request is trial.first
    lengths = len(trial.first.tokens), len(trial.second.tokens)
    return Trace(
        trial.seed,
        kind,
        "first" if first else "second",
        lengths[0] if trial.kind == "append" else min(lengths),
        parting,
        moment,
        first_divergence(ran.tokens, reference.tokens),
        {name: np.array(values) for name, values in numbers.items()},
    )


def _serve(
    loaded: LoadedModel, trials: Sequence[Trial], colliding: bool
) -> tuple[dict[str, Run], AttentionProbe]:
    """All pairs in one batch, each pair on a slot or on two."""
    requests = [r for trial in trials for r in trial.pair]
    rows = 2 * max(r.rows_needed for r in requests) + 2
    pool = SimpleCachePool.for_model(
        loaded.model.config, len(requests), rows, loaded.model.dtype, loaded.model.device
    )
    if colliding:
        for trial in trials:
            pool.collide(trial.second.id, trial.first.id, trial.kind)
    probe = AttentionProbe(keep="all")
    runs = run(loaded.model, requests, pool, "round_robin", len(requests), [probe])
    return runs, probe


def measure(loaded: LoadedModel, trials: Sequence[Trial], pairs: int = 12) -> list[Trace]:
    """Run every trial with and without its collision; one trace for each request and run.

    Each group of pairs is served three times: clean, as the reference; clean in other company, so
    that the batch has another shape, to see what rounding does; and colliding.
    """
    traces = []
    halves = pairs // 2
    for at in range(0, len(trials), pairs):
        group = trials[at : at + pairs]
        references, reference_probe = _serve(loaded, group, colliding=False)
        clean_runs: dict[str, Run] = {}
        clean_steps: dict[str, list[AttentionStep]] = {}
        for part in (group[:halves], group[halves:]):
            if part:
                runs, probe = _serve(loaded, part, colliding=False)
                clean_runs |= runs
                clean_steps |= probe.steps
        colliding, probe = _serve(loaded, group, colliding=True)
        for trial in group:
            answers = [references[r.id].tokens for r in trial.pair]
            parting = first_divergence(*answers)
            for request in trial.pair:
                known = references[request.id], reference_probe.steps[request.id]
                clean = clean_runs[request.id], clean_steps[request.id]
                hit = colliding[request.id], probe.steps[request.id]
                moment = first_foreign_read(hit[1])
                traces.append(_trace(trial, "clean", request, *clean, *known, parting, moment))
                traces.append(_trace(trial, trial.kind, request, *hit, *known, parting, moment))
    return traces
