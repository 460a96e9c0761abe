"""The passphrase experiment in 8 bits: weights through torchao, rows through our own pools.

transformers' quantised caches belong to one request each and keep its newest rows in full
precision, so nothing can be shared in them; hence the pools of `kvlab.pools.quantised`.
"""

from __future__ import annotations

import copy
import logging
from dataclasses import dataclass

import torch

from kvlab.models import LoadedModel
from kvlab.passphrase import Arm, Experiment
from kvlab.pools import CachePool, PoolForEach, QuantisedSlotPool
from kvlab.pools.quantised import Granularity
from kvlab.request import Request, Run
from kvlab.schedule import run
from kvlab.verdict import drift


def int8_weights(loaded: LoadedModel) -> LoadedModel:
    """A copy of a model with the linear weights that torchao's 8 bits leave, a scale an output.

    The codes are turned back into numbers once: torchao's 8-bit product in float32 on a CPU takes
    some hundred times as long, and gives the same up to the order of its sums.
    """
    logging.disable(logging.WARNING)  # importing torchao warns of GPU libraries that are not there
    try:
        from torchao.quantization import Int8WeightOnlyConfig, quantize_

        model = copy.deepcopy(loaded.model)
        quantize_(model, Int8WeightOnlyConfig())
        for layer in model.modules():
            if isinstance(layer, torch.nn.Linear) and hasattr(layer.weight, "dequantize"):
                layer.weight = torch.nn.Parameter(layer.weight.dequantize(), requires_grad=False)
    finally:
        logging.disable(logging.NOTSET)
    return LoadedModel(f"{loaded.name}, int8 weights", model, loaded.tokenizer)


@dataclass
class Int8CacheExperiment(Experiment):
    """The experiment on pools of 8-bit codes.

    Codes round, so the reference is the request alone in a fresh pool, and the tolerance is how far
    correct pools of this kind move it in batches of different sizes.
    """

    granularity: Granularity = "token"

    def _slots(self, size: int) -> QuantisedSlotPool:
        rows = 2 * max(r.rows_needed for r in self.requests.values()) + 2
        return QuantisedSlotPool.for_model(
            self.loaded.model.config,
            size,
            rows,
            device=self.loaded.model.device,
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


def bytes_of_cache(pool: QuantisedSlotPool) -> tuple[int, int]:
    """Bytes of the codes and of the scales of a pool."""
    scales = sum(slot.scales.nbytes for slot in pool.slots)  # type: ignore[attr-defined]
    return pool.store.nbytes, scales


def fake_int8(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """What is left of numbers in 8 bits: rounded to codes at `scale`, and back."""
    return (x / scale).round().clamp(-127, 127) * scale
