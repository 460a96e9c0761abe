"""What is right for a prompt, computed once and used to judge any number of pools."""

from __future__ import annotations

import random

from transformers import PreTrainedModel

from kvlab.decode import recompute
from kvlab.observe import AttentionProbe, AttentionStep
from kvlab.pools import PrivatePool
from kvlab.request import Request, Run
from kvlab.schedule import run
from kvlab.verdict import Comparison, compare, measure_tolerance

FAR = 10
"""A logit is far off if it moved this many tolerances; a tolerance is the largest of a sample."""


class References:
    """The cold recompute of every prompt, and attention over a private cache.

    Args:
        tolerance: How far rounding moves a logit; measured on random prompts by default.
    """

    def __init__(self, model: PreTrainedModel, tolerance: float | None = None) -> None:
        self.model = model
        self._runs: dict[tuple[tuple[int, ...], int], Run] = {}
        self._attention: dict[tuple[tuple[int, ...], int], list[AttentionStep]] = {}
        self.tolerance = self._measured() if tolerance is None else tolerance

    def _measured(self) -> float:
        vocab = int(self.model.config.get_text_config().vocab_size)
        draw = random.Random(0)
        requests = [
            Request(f"r{i}", tuple(draw.randrange(3, vocab) for _ in range(2 + 7 * i % 31)), 6)
            for i in range(48)
        ]
        return measure_tolerance(self.model, requests, {r.id: self.run(r) for r in requests})

    def run(self, request: Request) -> Run:
        """The cold recompute."""
        key = (request.tokens, request.max_new_tokens)
        if key not in self._runs:
            self._runs[key] = recompute(self.model, request)
        return self._runs[key]

    def judge(self, run: Run) -> Comparison:
        """A run beside its cold recompute; one that was aborted as far as it came."""
        reference = self.run(run.request)
        return compare(
            run, Run(reference.request, reference.steps[: len(run.steps)]), self.tolerance
        )

    def far_off(self, seen: Comparison) -> bool:
        """Whether a run is wrong beyond any rounding, in its tokens or in its logits."""
        return seen.verdict == "contaminated" or seen.drift > FAR * self.tolerance

    def attention(self, request: Request) -> list[AttentionStep]:
        """Attention of a run with a private cache."""
        key = (request.tokens, request.max_new_tokens)
        if key not in self._attention:
            probe = AttentionProbe()
            run(self.model, [request], PrivatePool(self.model.config), observers=[probe])
            self._attention[key] = probe.steps[request.id]
        return self._attention[key]
