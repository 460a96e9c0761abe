"""Scale: codes of 8 bits are read with a scale that is not theirs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvlab.faults.catalogue import fault
from kvlab.pools.lease import LeaseLayer
from kvlab.pools.quantised import (
    HEADROOM,
    QuantisedArena,
    QuantisedSlotPool,
    QuantisedTieredPool,
    row_scales,
)
from kvlab.pools.tiered import TieredLease


class FrozenScale(QuantisedArena):
    def __init__(self, *sizes: Any, **options: Any) -> None:
        super().__init__(*sizes, **options)
        self.calibrated: dict[tuple[int, int, int], Tensor] = {}

    def scale(self, layer: int, part: int, new: Tensor, at: Tensor) -> Tensor:
        slot = int(at[0]) // self.block_size, layer, part
        if slot not in self.calibrated:  # BUG: once in the life of the slot, not of the request
            self.calibrated[slot] = HEADROOM * row_scales(new)[:, :1]
        return self.calibrated[slot].expand(-1, new.shape[1], -1)


@fault("scale frozen by the first request", "scale", ["Avarok/atlas PR #1008"])
class FrozenScalePool(QuantisedSlotPool):
    """One scale a slot, taken from the first request ever and used for all later ones.

    Reported as: a global scale frozen on the tokens of the warm-up. The first answer is right;
    later requests with larger rows are cut off, those with smaller ones lose their digits.
    Evidence: right alone on a fresh slot, wrong on a used one, whoever used it.
    """

    arena_type = FrozenScale


class DroppedOnHit(LeaseLayer):
    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        read, hit = super().update(key_states, value_states), self.lease.num_cached_tokens
        if not hit:
            return read
        arena, rows = self.lease.arena, self.lease.where(0, hit)
        assert isinstance(arena, QuantisedArena)
        for numbers, scales in zip(read, arena.scales, strict=True):
            numbers[0, :, :hit] /= 127 * scales[self.layer, :, rows]  # BUG: a hit brings codes only
        return read


class DroppedOnHitLease(TieredLease):
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
        a, b = source * self.block_size, target * self.block_size
        for part in (self.key, self.value):  # BUG: the scales stay behind
            part[:, :, b : b + rows] = part[:, :, a : a + rows]
        self.owners[b : b + rows] = self.owners[a : a + rows]


@fault("copy leaves the scale behind", "scale")
class CodesOnlyPool(QuantisedTieredPool):
    """Copy-on-write copies the codes of a block and not its scales.

    The copy is read with the scales of whoever had the block before. The user sees a wrong answer
    where a prefix ends inside of a block. Evidence: wrong only after a partial hit; the rows are
    the right ones times a factor.
    """

    arena_type = CodesOnly


class BatchScale(QuantisedArena):
    def __init__(self, *sizes: Any, **options: Any) -> None:
        super().__init__(*sizes, **options)
        self.largest: dict[tuple[int, int], Tensor] = {}

    def scale(self, layer: int, part: int, new: Tensor, at: Tensor) -> Tensor:
        own = row_scales(new).amax(1, keepdim=True)
        # BUG: the largest row of everybody who is being served, and not of this request
        largest = torch.maximum(self.largest.get((layer, part), own), own)
        self.largest[layer, part] = largest
        return largest.expand(-1, new.shape[1], -1)


@fault("one scale for everybody", "scale")
class BatchScalePool(QuantisedSlotPool):
    """A dynamic scale is taken over all requests that are there, as a running maximum.

    A neighbour with large rows takes the digits of everybody else's. The answer depends on who else
    is in the batch. Evidence: right alone, wrong beside a request with larger rows; no row is
    foreign.
    """

    arena_type = BatchScale
    arena: BatchScale

    def release(self, lease: Any) -> None:
        super().release(lease)
        if not self.assignment:
            self.arena.largest = {}
