"""What is right for a prompt, computed once and used to judge any number of pools."""

from __future__ import annotations

import random

from transformers import PreTrainedModel

from kvlab.decode import recompute
from kvlab.interleave import Move, replay
from kvlab.observe import AttentionProbe, AttentionStep
from kvlab.pools import CachePool, PoolForEach, PrivatePool
from kvlab.pools.contract import PoolFactory, fresh
from kvlab.request import Request, Run
from kvlab.schedule import run
from kvlab.verdict import Comparison, compare, drift, measure_tolerance

FAR = 10
"""A logit is far off if it moved this many tolerances; a tolerance is the largest of a sample."""


class References:
    """The cold recompute of every prompt, and attention over a private cache.

    Args:
        tolerance: How far rounding moves a logit; measured on random prompts by default.
        alone: Makes a pool that rounds what it keeps (8-bit codes). Then the right answer is that
            of the request alone in a fresh pool, and the tolerance is how far it moves with the
            size of a prompt's chunks: a lone request, so nothing of others can widen it.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tolerance: float | None = None,
        alone: PoolFactory | None = None,
    ) -> None:
        self.model, self.alone = model, alone
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
        if self.alone is None:
            return measure_tolerance(self.model, requests, {r.id: self.run(r) for r in requests})
        return max(drift(self.run(r), self._in_chunks(r, n)) for r in requests[:24] for n in (1, 5))

    def beside(self, factory: PoolFactory) -> References:
        """The references for the pools of a factory: its own where they round (`pool.rounds`)."""
        pool = fresh(factory, self.model.config)
        return References(self.model, alone=factory) if getattr(pool, "rounds", False) else self

    def private(self) -> CachePool:
        """A pool that shares nothing, and rounds as the pools that are judged."""
        alone, config = self.alone, self.model.config
        return PrivatePool(config) if alone is None else PoolForEach(lambda: fresh(alone, config))

    def _in_chunks(self, request: Request, chunk: int) -> Run:
        chunks = -(-len(request.tokens) // chunk)
        order = [Move((request.id,))] * (1 + chunks + request.max_new_tokens)
        return replay(self.model, [request], self.private(), order, chunk=chunk)[request.id]

    def run(self, request: Request) -> Run:
        """The cold recompute; or the request alone in a fresh pool, where that rounds."""
        key = (request.tokens, request.max_new_tokens)
        if key not in self._runs:
            if self.alone is None:
                self._runs[key] = recompute(self.model, request)
            else:
                self._runs[key] = run(self.model, [request], self.private())[request.id]
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
        """Attention of a run alone."""
        key = (request.tokens, request.max_new_tokens)
        if key not in self._attention:
            probe = AttentionProbe()
            run(self.model, [request], self.private(), observers=[probe])
            self._attention[key] = probe.steps[request.id]
        return self._attention[key]
