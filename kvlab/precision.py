"""The passphrase experiment in 8 bits: of the weights, and of the rows of the cache.

transformers' quantised caches belong to one request each and keep its newest rows in full
precision, so nothing can be shared in them; hence the pools of `kvlab.pools.quantised`.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor

from kvlab.models import LoadedModel
from kvlab.passphrase import Arm, Experiment
from kvlab.pools import CachePool, PoolForEach, QuantisedSlotPool, SimpleCachePool
from kvlab.pools.quantised import Granularity, row_scales
from kvlab.request import Request, Run
from kvlab.schedule import run
from kvlab.verdict import drift


def fake_int8(x: Tensor, scale: Tensor) -> Tensor:
    """What is left of numbers in 8 bits: rounded to codes at `scale`, and back."""
    return (x / scale).round().clamp(-127, 127) * scale


def int8_weights(loaded: LoadedModel) -> LoadedModel:
    """A copy of a model whose linear layers keep what 8 bits leave of their weights.

    One scale for each output. The products stay in float32: kernels for 8-bit weights change the
    speed, not the question who may change whose answer.
    """
    model = copy.deepcopy(loaded.model)
    for layer in model.modules():
        if isinstance(layer, torch.nn.Linear):
            weight = layer.weight.detach()
            layer.weight.data = fake_int8(weight, row_scales(weight))
    return LoadedModel(f"{loaded.name}, int8 weights", model, loaded.tokenizer)


@dataclass
class Int8CacheExperiment(Experiment):
    """The experiment on pools of 8-bit codes.

    Codes round, so the reference is the request alone in a fresh pool, and the tolerance is how far
    correct pools of this kind move it in batches of different sizes.
    """

    granularity: Granularity = "token"

    def _slots(self, size: int) -> SimpleCachePool:
        rows = 2 * max(r.rows_needed for r in self.requests.values()) + 2
        return QuantisedSlotPool.for_model(
            self.loaded.model.config,
            size,
            rows,
            self.loaded.model.dtype,
            self.loaded.model.device,
            granularity=self.granularity,
        )

    def _alone(self) -> CachePool:
        return PoolForEach(lambda: self._slots(1))

    def reference(self, name: str) -> Run:
        """The request alone in a fresh pool."""
        if name not in self.references:
            request = self.requests[name]
            self.references[name] = run(self.loaded.model, [request], self._alone())[name]
        return self.references[name]

    def measured_tolerance(self) -> float:
        """Largest logit difference between a lone request and the same one in private batches."""
        if self.tolerance is None:
            requests = list(self.requests.values())
            together = [
                self._together(requests[at : at + size])
                for size in (2, 4, len(requests))
                for at in range(0, len(requests), size)
            ]
            self.tolerance = max(
                drift(one, self.reference(name)) for runs in together for name, one in runs.items()
            )
        return self.tolerance

    def _together(self, requests: list[Request]) -> dict[str, Run]:
        return run(self.loaded.model, requests, self._alone(), "round_robin", len(requests))

    def pool(self, arm: Arm, first: str, second: str, size: int) -> CachePool:
        """The memory of an arm, for `size` requests."""
        if arm == "private":
            return self._alone()
        pool = self._slots(1 if arm == "serial" else size)
        if arm in ("overwrite", "append"):
            pool.collide(second, first, arm)
        return pool


def bytes_of_cache(pool: SimpleCachePool) -> tuple[int, int]:
    """Bytes of the codes and of the scales of a pool."""
    codes = pool.arena.key.nbytes + pool.arena.value.nbytes
    return codes, pool.arena.nbytes - codes
