"""Pools that keep keys and values in 8 bits: a code for each number, and scales beside the codes.

A row is read as code times scale. Whatever sets the scale must belong to the same request as the
rows, or to the same finished prefix; then int8 rounds, and isolates as float32 does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from jaxtyping import Float, Int8
from torch import Tensor
from transformers import PretrainedConfig

from kvlab.pools.blocks import BlockArena
from kvlab.pools.contract import Lease
from kvlab.pools.simple import SimpleCachePool, Slot, SlotLease
from kvlab.pools.store import Store
from kvlab.pools.tiered import TieredCachePool
from kvlab.pools.tiered_lease import TieredLayer, TieredLease
from kvlab.pools.view import BatchView, SlotLayer

Granularity = Literal["token", "block", "slot"]
"""What has one scale: a row, 16 rows, or all rows of a request; always for each head."""

BLOCK = 16
HEADROOM = 4.0
"""A scale that later rows share is taken from the first of them, with so much room above it; what
does not fit is cut off."""


def row_scales(rows: Float[Tensor, "G Q D"]) -> Float[Tensor, "G Q 1"]:
    """The scale at which each row just fits into -127 to 127; 1 for a row of zeros."""
    scale = rows.abs().amax(-1, keepdim=True) / 127
    return torch.where(scale > 0, scale, torch.ones_like(scale))


def to_codes(rows: Float[Tensor, "G Q D"], scale: Float[Tensor, "G Q 1"]) -> Int8[Tensor, "G Q D"]:
    """The nearest code of each number."""
    return (rows / scale).round().clamp(-127, 127).to(torch.int8)


class QuantisedSlotLayer(SlotLayer):
    """A slot layer whose keys and values are codes; the lease keeps the scales."""

    writer: QuantisedSlotLease

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Round the new rows, write their codes; return all rows as numbers again."""
        lease, start, count = self.writer, self.counter[self.layer], key_states.shape[2]
        codes = []
        for part, rows in enumerate((key_states[0], value_states[0])):
            scale = lease.scale(self.layer, part, rows, start)
            lease.slot.scales[self.layer, part, :, start : start + count] = scale
            codes.append(to_codes(rows, scale)[None])
        key, value = super().update(*codes)
        scales = lease.slot.scales[self.layer, :, :, : start + count].to(key_states.dtype)
        return key * scales[0][None], value * scales[1][None]


class QuantisedSlot(Slot):
    """A slot with scales `(L, 2, G, N, 1)` beside its codes."""

    def __init__(self, id: int, store: Store) -> None:
        super().__init__(id, store)
        layers, heads, rows, _ = self.key.shape
        self.scales = torch.ones(layers, 2, heads, rows, 1, device=self.key.device)


class QuantisedSlotLease(SlotLease):
    """A hold on a slot of codes."""

    layer_type = QuantisedSlotLayer
    slot: QuantisedSlot
    pool: QuantisedSlotPool

    def scale(
        self, layer: int, part: int, rows: Float[Tensor, "G Q D"], start: int
    ) -> Float[Tensor, "G Q 1"]:
        """The scale of each new row: its own, or that of the first row of its group.

        The first row, and not all that arrive together, so that chunks of a prompt do not matter.
        """
        own = row_scales(rows)
        size = {"token": 1, "block": BLOCK, "slot": 10**9}[self.pool.granularity]
        if size == 1:
            return own
        at = torch.arange(start, start + rows.shape[1])
        first = at // size * size  # the row that sets the scale
        here = first >= start
        known = self.slot.scales[layer, part][:, first.clamp(max=start)]
        fresh = HEADROOM * own[:, (first - start).clamp(min=0)]
        return torch.where(here[None, :, None], fresh, known)


class QuantisedSlotPool(SimpleCachePool):
    """Slots of 8-bit codes.

    Args:
        granularity: What shares a scale.

    Attributes:
        rounds: Says to whoever compares that answers are right as far as rounding goes: the
            reference is the request alone in a fresh pool.
    """

    lease_type, slot_type = QuantisedSlotLease, QuantisedSlot
    granularity: Granularity = "token"
    rounds = True

    def __init__(
        self,
        num_slots: int,
        num_layers: int,
        num_heads: int,
        head_dim: int,
        max_seq_len: int,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
        nan_fill: bool = False,
    ) -> None:
        if nan_fill:
            raise ValueError("codes of 8 bits cannot hold NaN: leave nan_fill off")
        sizes = (num_slots, num_layers, num_heads, head_dim, max_seq_len)
        super().__init__(*sizes, torch.int8, device)

    @classmethod
    def for_model(
        cls,
        config: PretrainedConfig,
        *args: Any,
        granularity: Granularity = "token",
        **options: Any,
    ) -> QuantisedSlotPool:
        """A pool with the shape that a model's configuration asks for."""
        pool = super().for_model(config, *args, **options)
        assert isinstance(pool, QuantisedSlotPool)
        pool.granularity = granularity
        return pool


class QuantisedArena(BlockArena):
    """Blocks of 8-bit codes with a scale for each row and head."""

    def __init__(
        self, num_blocks: int, block_size: int, layers: int, heads: int, dim: int,
        dtype: Any, device: Any, nan_fill: bool = False,
    ) -> None:  # fmt: skip
        if nan_fill:
            raise ValueError("codes of 8 bits cannot hold NaN: leave nan_fill off")
        super().__init__(num_blocks, block_size, layers, heads, dim, torch.int8, device)
        self.scales = torch.ones(layers, 2, heads, num_blocks * block_size, 1, device=device)

    def copy(self, source: int, target: int, rows: int) -> None:
        """Codes and scales: one without the other means something else."""
        super().copy(source, target, rows)
        a, b = source * self.block_size, target * self.block_size
        self.scales[:, :, :, b : b + rows] = self.scales[:, :, :, a : a + rows]


class QuantisedTieredLayer(TieredLayer):
    """One layer of a lease on blocks of codes."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Round the new rows, write their codes; return all rows as numbers again."""
        lease, arena = self.lease, self.lease.pool.arena
        assert isinstance(arena, QuantisedArena)
        start, count = lease.counter[self.layer], key_states.shape[2]
        scales = [row_scales(rows[0]) for rows in (key_states, value_states)]
        codes = [
            to_codes(r[0], s)[None] for r, s in zip((key_states, value_states), scales, strict=True)
        ]
        key, value = super().update(*codes)
        rows = torch.tensor(lease.rows(0, start + count), device=arena.key.device)
        for part, scale in enumerate(scales):
            arena.scales[self.layer, part].index_copy_(1, rows[start:], scale.float())
        known = self.read_scales(rows).to(key_states.dtype)
        return key * known[0][None], value * known[1][None]

    def read_scales(self, rows: Tensor) -> Float[Tensor, "2 G T 1"]:
        """The scales of all rows that the lease reads."""
        arena = self.lease.pool.arena
        assert isinstance(arena, QuantisedArena)
        return arena.scales[self.layer].index_select(2, rows)


class QuantisedTieredLease(TieredLease):
    layer_type = QuantisedTieredLayer


class QuantisedTieredPool(TieredCachePool):
    """The three tiers in 8-bit codes, one scale a row; rows are always gathered."""

    arena_type, lease_type = QuantisedArena, QuantisedTieredLease
    rounds = True

    def batch(self, leases: Sequence[Lease], counts: Sequence[int], shared: bool = True) -> Any:
        """The leases as one cache; `None` for a lone lease, which is a cache itself."""
        return BatchView(leases, counts) if len(leases) > 1 else None
