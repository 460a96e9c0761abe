"""Greedy decoding of one request: the golden reference without a cache, and the private cache."""

from __future__ import annotations

import time

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from kvlab.request import Request, Run, Step, StepKind


def next_step(
    logits: Float[Tensor, " V"], kind: StepKind, tick: int, start: int, wrote: int, seconds: float
) -> Step:
    """The greedy choice from `logits`, with the margin to the runner-up."""
    best = logits.float().topk(2)
    if best.values.isnan().any():
        raise FloatingPointError("the logits are not numbers; a masked row may have held NaN")
    margin = (best.values[0] - best.values[1]).item()
    token = int(best.indices[0])
    return Step(kind, tick, start, wrote, token, margin, seconds, logits.float().clone())


@torch.inference_mode()
def recompute(model: PreTrainedModel, request: Request) -> Run:
    """Compute the whole sequence anew for every token, without any cache: slow and certainly right.

    This is the golden reference. No state survives from one step to the next, so nothing can leak.
    """
    run = Run(request)
    while not run.finished:
        tokens = [*request.tokens, *run.tokens]
        began = time.perf_counter()
        ids = torch.tensor([tokens], device=model.device)
        logits = model(ids, use_cache=False, logits_to_keep=1).logits
        seconds = time.perf_counter() - began
        step = next_step(logits[0, -1], run.next_kind, len(run.steps), 0, len(tokens), seconds)
        run.steps.append(step)
    return run


@torch.inference_mode()
def cached(model: PreTrainedModel, request: Request) -> Run:
    """Decode with a cache that belongs to this request alone (transformers' DynamicCache)."""
    run = Run(request)
    cache = DynamicCache(config=model.config)
    new = list(request.tokens)
    while not run.finished:
        start = cache.get_seq_length()
        began = time.perf_counter()
        ids = torch.tensor([new], device=model.device)
        logits = model(ids, cache=cache, use_cache=True, logits_to_keep=1).logits
        seconds = time.perf_counter() - began
        step = next_step(logits[0, -1], run.next_kind, len(run.steps), start, len(new), seconds)
        run.steps.append(step)
        new = [step.token]
    return run
