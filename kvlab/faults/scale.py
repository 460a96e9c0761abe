"""Scale: codes of 8 bits are read with a scale that is not theirs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvlab.faults.catalogue import fault
from kvlab.pools.blocks import BlockArena
from kvlab.pools.quantised import (
    HEADROOM,
    QuantisedArena,
    QuantisedSlot,
    QuantisedSlotLease,
    QuantisedSlotPool,
    QuantisedTieredLayer,
    QuantisedTieredLease,
    QuantisedTieredPool,
    row_scales,
)
from kvlab.pools.store import Store


class CalibratedSlot(QuantisedSlot):
    """A slot that remembers a scale for each layer, for keys and for values."""

    def __init__(self, id: int, store: Store) -> None:
        super().__init__(id, store)
        self.calibrated: dict[tuple[int, int], Tensor] = {}


class FrozenScale(QuantisedSlotLease):
    slot: CalibratedSlot

    def scale(self, layer: int, part: int, rows: Tensor, start: int) -> Tensor:
        calibrated = self.slot.calibrated
        if (layer, part) not in calibrated:  # BUG: once in the life of the slot, not of the request
            calibrated[layer, part] = HEADROOM * row_scales(rows)[:, :1]
        return calibrated[layer, part].expand(-1, rows.shape[1], -1)


@fault("scale frozen by the first request", "scale", ["Avarok/atlas PR #1008"])
class FrozenScalePool(QuantisedSlotPool):
    """One scale a slot, taken from the first request ever and used for all later ones.

    Reported as: a global scale frozen on the tokens of the warm-up. The first answer is right;
    later requests with larger rows are cut off, those with smaller ones lose their digits.
    Evidence: right alone on a fresh slot, wrong on a used one, whoever used it.
    """

    lease_type, slot_type = FrozenScale, CalibratedSlot


class DroppedOnHit(QuantisedTieredLayer):
    def read_scales(self, rows: Tensor) -> Tensor:
        scales = super().read_scales(rows).clone()
        scales[:, :, : self.lease.num_cached_tokens] = 1 / 127  # BUG: a hit brings codes only
        return scales


class DroppedOnHitLease(QuantisedTieredLease):
    layer_type = DroppedOnHit


@fault("scale missing on a hit", "scale", ["SGLang PR #24198", "SGLang #18818"])
class DroppedOnHitPool(QuantisedTieredPool):
    """The hit path reads codes without their scales.

    Reported as: scales passed only where nothing was cached. The first answer is right, a later one
    with the same beginning is wrong. Evidence: right when cold, wrong after a hit.
    """

    lease_type = DroppedOnHitLease


class CodesOnly(QuantisedArena):
    def copy(self, source: int, target: int, rows: int) -> None:
        BlockArena.copy(self, source, target, rows)  # BUG: the scales stay behind


@fault("copy leaves the scale behind", "scale")
class CodesOnlyPool(QuantisedTieredPool):
    """Copy-on-write copies the codes of a block and not its scales.

    The copy is read with the scales of whoever had the block before. The user sees a wrong answer
    where a prefix ends inside of a block. Evidence: wrong only after a partial hit; the rows are
    the right ones times a factor.
    """

    arena_type = CodesOnly


class BatchScale(QuantisedSlotLease):
    def scale(self, layer: int, part: int, rows: Tensor, start: int) -> Tensor:
        own = row_scales(rows)
        seen = self.pool.largest  # type: ignore[attr-defined]
        # BUG: the largest row of everybody who is being served, and not of this request
        largest = torch.maximum(seen.get((layer, part), own.amax(1, keepdim=True)),
                                own.amax(1, keepdim=True))  # fmt: skip
        seen[layer, part] = largest
        return largest.expand(-1, rows.shape[1], -1)


@fault("one scale for everybody", "scale")
class BatchScalePool(QuantisedSlotPool):
    """A dynamic scale is taken over all requests that are there, as a running maximum.

    A neighbour with large rows takes the digits of everybody else's. The answer depends on who else
    is in the batch. Evidence: right alone, wrong beside a request with larger rows; no row is
    foreign.
    """

    lease_type = BatchScale

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.largest: dict[tuple[int, int], Tensor] = {}

    def release(self, lease: Any) -> None:
        super().release(lease)
        if not self.assignment:
            self.largest = {}
