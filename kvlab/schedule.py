"""Who moves when: requests, orders, and the executor that runs them on one pool.

Concurrency is an order of small steps. An order is chosen by name or by seed, so every run can be
repeated to the step.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from kvlab.attention import sharing_prefixes, watched_by
from kvlab.decode import next_step
from kvlab.forward import ForwardPass, Observer
from kvlab.pools.batch import BatchView
from kvlab.pools.contract import (
    AnnouncedLease,
    Batches,
    CachePool,
    Forks,
    Lease,
    Parks,
    PoolFull,
    Settles,
    Truncates,
)
from kvlab.request import Request, Run

TOKENS_TOGETHER = 512
"""Prompt tokens that may share a forward pass: more would only keep the first answer waiting."""

Order = Literal["serial", "round_robin"] | int
"""A name, or a seed: then a seeded draw decides who moves next."""


def run(
    model: PreTrainedModel,
    requests: Sequence[Request],
    pool: CachePool,
    order: Order = "serial",
    batch_size: int = 1,
    observers: Sequence[Observer] = (),
    lock: bool = False,
) -> dict[str, Run]:
    """Serve all requests on one pool and return their runs by id.

    Args:
        order: "serial": one request from admission to release, then the next one. "round_robin":
            each admitted request moves one step in turn. An integer: the seed of the draw.
        batch_size: How many requests move in one turn. Prompts are computed one after another, in
            the order of the turn, before the others decode together in one forward pass. Within
            that pass the writes of a layer land in the order of the batch, all of them before the
            layer reads.
        observers: Who looks on: attention, ownership, checksums (see `kvlab.observe`).
        lock: A global lock around every operation: whatever a pool leaves to be done later
            (`settle`) is done before the next operation begins. The serial order waits for it at
            the end of each request in any case.

    A request is admitted when its first turn comes; if the pool is full then, it waits for a
    release.

    Raises:
        ValueError: Two requests with one id, a wrong order or batch size; nothing was admitted.
        PoolFull: A request does not fit although nobody else is there.
    """
    ids = [r.id for r in requests]
    if len(set(ids)) < len(ids):
        raise ValueError(f"request ids must be unique, got {ids}")
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    if order not in ("serial", "round_robin") and not isinstance(order, int):
        raise ValueError(f"unknown order {order!r}; use 'serial', 'round_robin' or a seed")
    executor = Executor(model, pool, observers, lock)
    runs = {r.id: Run(r) for r in requests}
    draw = random.Random(order if isinstance(order, int) else 0)
    waiting = list(runs.values())  # in turn order
    try:
        while waiting:
            if isinstance(order, int):
                turn = draw.sample(waiting, min(batch_size, len(waiting)))
            else:
                turn = waiting[:batch_size]
            if order == "round_robin":
                waiting = waiting[batch_size:] + turn
            moved = executor.step(turn)
            if not moved and not executor.leases:
                raise PoolFull(f"no room for request {turn[0].request.id!r} in an empty pool")
            left = [r for r in waiting if not r.finished]
            if order == "serial" and len(left) < len(waiting):
                executor.settle()
            waiting = left
    finally:
        executor.release_all()
    return runs


class Executor:
    """Admits, steps and releases; knows nothing about who should come next.

    Args:
        lock: Settle the pool after every operation.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        pool: CachePool,
        observers: Sequence[Observer] = (),
        lock: bool = False,
    ) -> None:
        self.model, self.pool, self.lock = model, pool, lock
        self.leases: dict[str, Lease] = {}
        self.announced: dict[str, AnnouncedLease] = {}
        self.observers = observers
        self.tick = 0

    def settle(self) -> None:
        """Have the pool finish what it left for later, if it is one that does."""
        if isinstance(self.pool, Settles):
            self.pool.settle()

    def _after_operation(self) -> None:
        if self.lock:
            self.settle()

    def admit(self, run: Run) -> bool:
        """Whether the pool has room for this request; if so, it is in now."""
        began = time.perf_counter()
        try:
            lease = self.pool.admit(run.request)
        except PoolFull:
            return False
        run.admission_seconds = time.perf_counter() - began
        self._take_in(run, lease)
        return True

    def _take_in(self, run: Run, lease: Lease) -> None:
        if not 0 <= lease.num_cached_tokens < len(run.request.tokens):
            self.pool.release(lease)
            raise ValueError(
                f"the pool says that {lease.num_cached_tokens} of {len(run.request.tokens)} prompt "
                f"tokens of {run.request.id!r} are cached; the last one must be left to compute"
            )
        self.leases[run.request.id] = lease
        if isinstance(lease, AnnouncedLease):  # asked once, since asking takes its time
            self.announced[run.request.id] = lease
        run.num_cached_tokens = lease.num_cached_tokens
        self._after_operation()

    def fork(self, source: Run, run: Run) -> bool:
        """Whether the pool has room for `run` as a continuation of `source`; see `Forks`."""
        pool = self._able(Forks, "fork")
        try:
            lease = pool.fork(self.leases[source.request.id], run.request)
        except PoolFull:
            return False
        self._take_in(run, lease)
        return True

    def truncate(self, run: Run, length: int) -> None:
        """Take back the rows behind the first `length`, and the tokens that came of them."""
        self._able(Truncates, "truncate").truncate(self.leases[run.request.id], length)
        # The row of a generated token is written one step later than the token is known.
        del run.steps[max(0, length + 1 - len(run.request.tokens)) :]
        self._after_operation()

    def park(self, run: Run) -> None:
        """Move the rows of a request out."""
        self._able(Parks, "park").park(self.leases[run.request.id])
        self._after_operation()

    def resume(self, run: Run) -> bool:
        """Whether the pool has room for the rows of a parked request; if so, they are back."""
        try:
            self._able(Parks, "park").resume(self.leases[run.request.id])
        except PoolFull:
            return False
        self._after_operation()
        return True

    def _able(self, extra: Any, what: str) -> Any:
        if not isinstance(self.pool, extra):
            raise ValueError(f"{type(self.pool).__name__} cannot {what}; see kvlab.pools.contract")
        return self.pool

    def release(self, run: Run) -> None:
        """Give back the rows of a request, at its end or at its abort."""
        self.announced.pop(run.request.id, None)
        self.pool.release(self.leases.pop(run.request.id))
        self._after_operation()

    def step(self, runs: Sequence[Run]) -> bool:
        """Move each of `runs` by one token if it can be admitted; whether any of them moved.

        Newcomers are admitted and prefilled one after another, so that each of them meets the pool
        as the one before has left it. Those that found a prefix there have little left to compute:
        they wait for each other, and short remainders of one length share a forward pass. Then the
        others decode in one forward pass.
        """
        decoding = [r for r in runs if r.steps]
        moved = bool(decoding)
        remainders: dict[int, list[Run]] = {}
        for run in runs:
            if not run.steps and self.admit(run):
                left = len(run.request.tokens) - run.num_cached_tokens
                if run.num_cached_tokens:
                    remainders.setdefault(left, []).append(run)
                else:
                    self.forward([run], [list(run.request.tokens)])
                moved = True
        for left, together in remainders.items():
            size = max(1, TOKENS_TOGETHER // left)
            for at in range(0, len(together), size):
                part = together[at : at + size]
                self.forward(part, [list(r.request.tokens[-left:]) for r in part])
        if decoding:
            self.forward(decoding, [r.tokens[-1:] for r in decoding])
        for run in runs:
            if run.finished:
                self.release(run)
        self.tick += 1
        return moved

    @torch.inference_mode()
    def forward(
        self, runs: Sequence[Run], news: Sequence[list[int]], complete: bool = True
    ) -> None:
        """One forward pass over the new tokens of `runs`; appends a step to each.

        Args:
            complete: Whether these tokens reach the end of what is known. A chunk of a prompt does
                not: it fills the cache and generates nothing.
        """
        leases = [self.leases[r.request.id] for r in runs]
        counts = [len(n) for n in news]
        starts = [int(lease.cache.get_seq_length()) for lease in leases]
        for run, new in zip(runs, news, strict=True):
            if run.request.id in self.announced:
                self.announced[run.request.id].announce(new)
        forward = ForwardPass(runs, leases, starts, counts, self.tick, self.observers)
        for observer in self.observers:
            observer.before(forward)
        began = time.perf_counter()
        with watched_by(forward if forward.watches_attention else None):
            logits = self._logits(leases, news, counts, forward.watches_attention)
        ended = time.perf_counter()
        forward.check_observed(self.model.config.get_text_config().num_hidden_layers)
        self._after_operation()
        if not complete:
            return
        for b, run in enumerate(runs):
            run.steps.append(
                next_step(logits[b], run.next_kind, self.tick, starts[b], counts[b], ended - began)
            )
            run.steps[-1].ended = ended
        for observer in self.observers:
            observer.after(forward)

    def _view(self, leases: Sequence[Lease], counts: Sequence[int], watched: bool) -> Any:
        """The leases as one cache: the pool's own view where it has one, else the generic one.

        An observer must see all rows that are read, so a prefix is then not read apart.
        """
        if isinstance(self.pool, Batches):
            return self.pool.batch(leases, counts, shared=not watched)
        return BatchView(leases, counts) if len(leases) > 1 else None

    def _logits(
        self,
        leases: Sequence[Lease],
        news: Sequence[list[int]],
        counts: Sequence[int],
        watched: bool,
    ) -> list[Float[Tensor, " V"]]:
        device = self.model.device
        view = self._view(leases, counts, watched)
        if view is None:  # the model's own path: a lone lease is an ordinary cache
            ids = torch.tensor([news[0]], device=device)
            out = self.model(ids, cache=leases[0].cache, use_cache=True, logits_to_keep=1)
            return [out.logits[0, -1]]
        longest = max(counts)
        with sharing_prefixes(view if hasattr(view, "groups") else None):
            out = self.model(
                torch.tensor([n + n[-1:] * (longest - len(n)) for n in news], device=device),
                cache=view,
                use_cache=True,
                position_ids=view.positions(longest).to(device),
                attention_mask=view.mask(longest).to(device),
                logits_to_keep=longest - min(counts) + 1,  # the last ones: no padding, one each
            )
        skipped = min(counts) - 1
        return [out.logits[b, count - 1 - skipped] for b, count in enumerate(counts)]

    def release_all(self) -> None:
        """Give back what an error left behind."""
        for lease in self.leases.values():
            self.pool.release(lease)
        self.leases.clear()
        self.announced.clear()
        self._after_operation()
