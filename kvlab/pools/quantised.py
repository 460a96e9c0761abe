"""Pools that keep keys and values in 8 bits: a code for each number, and scales beside the codes.

A row is read as code times scale. Whatever sets the scale must belong to the same request as the
rows, or to the same finished prefix; then int8 rounds, and isolates as float32 does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from jaxtyping import Float, Int, Int8
from torch import Tensor

from kvlab.pools.arena import Arena, Rows
from kvlab.pools.batch import BatchView
from kvlab.pools.contract import Lease
from kvlab.pools.slots import SimpleCachePool
from kvlab.pools.tiered import TieredCachePool

Granularity = Literal["token", "block", "slot"]
"""What has one scale: a row, 16 rows, or all rows of a slot; always for each head."""

GROUP: dict[Granularity, int] = {"token": 1, "block": 16, "slot": 10**9}
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


class QuantisedArena(Arena):
    """Rows of 8-bit codes, with a scale `(L, G, N, 1)` beside each row of keys and of values.

    Attributes:
        granularity: What shares a scale.
        rounds: Says to whoever compares that answers are right as far as rounding goes: the
            reference is the request alone in a fresh pool.
    """

    rounds = True
    granularity: Granularity = "token"

    def __init__(
        self, num_blocks: int, block_size: int, layers: int, heads: int, dim: int,
        dtype: Any = torch.float32, device: Any = "cpu", nan_fill: bool = False,
    ) -> None:  # fmt: skip
        if nan_fill:
            raise ValueError("codes of 8 bits cannot hold NaN: leave nan_fill off")
        super().__init__(num_blocks, block_size, layers, heads, dim, torch.int8, device)
        self.dtype = dtype
        self.scales = [torch.ones(*self.key.shape[:3], 1, device=device) for _ in range(2)]

    @property
    def parts(self) -> list[Tensor]:
        """Codes and scales: one without the other means something else."""
        return [self.key, self.value, *self.scales]

    def write(
        self, layer: int, rows: Rows, key: Float[Tensor, "G n D"], value: Float[Tensor, "G n D"]
    ) -> None:
        """Round the new rows; write their codes and their scales."""
        at, codes = self._numbers(rows), []
        for part, new in enumerate((key.detach(), value.detach())):
            scale = self.scale(layer, part, new, at)
            self.scales[part][layer].index_copy_(1, at, scale.float())
            codes.append(to_codes(new, scale))
        super().write(layer, rows, *codes)

    def read(self, layer: int, rows: Rows) -> tuple[Float[Tensor, "G T D"], Float[Tensor, "G T D"]]:
        """Rows of one layer as numbers again."""
        codes = super().read(layer, rows)
        key, value = (
            c * s[layer, :, rows].to(self.dtype) for c, s in zip(codes, self.scales, strict=True)
        )
        return key, value

    def _numbers(self, rows: Rows) -> Int[Tensor, " n"]:
        if isinstance(rows, slice):
            return torch.arange(rows.start, rows.stop, device=self.key.device)
        return rows

    def scale(
        self, layer: int, part: int, new: Float[Tensor, "G n D"], at: Int[Tensor, " n"]
    ) -> Float[Tensor, "G n 1"]:
        """The scale of each new row: its own, or that of the first row of its group.

        The first row, and not all that arrive together, so that chunks of a prompt do not matter.
        """
        own, size = row_scales(new), GROUP[self.granularity]
        if size == 1:
            return own
        first = at - at % self.block_size % size  # the row that sets the scale
        index = torch.searchsorted(at, first)
        here = at[index] == first
        fresh = HEADROOM * own[:, index]
        return torch.where(here[None, :, None], fresh, self.scales[part][layer][:, first])


def _arena(granularity: Granularity) -> type[QuantisedArena]:
    return type("QuantisedArena", (QuantisedArena,), {"granularity": granularity})


class QuantisedSlotPool(SimpleCachePool):
    """Slots of 8-bit codes.

    Args:
        granularity: What shares a scale.
    """

    arena_type: type[Arena] = QuantisedArena
    rounds = True

    def __init__(self, *sizes: Any, granularity: Granularity = "token", **options: Any) -> None:
        if granularity != "token":
            self.arena_type = _arena(granularity)
        super().__init__(*sizes, **options)


class QuantisedTieredPool(TieredCachePool):
    """The three tiers in 8-bit codes, one scale a row."""

    arena_type: type[Arena] = QuantisedArena
    rounds = True

    def batch(self, leases: Sequence[Lease], counts: Sequence[int], shared: bool = True) -> Any:
        """The leases as one cache; `None` for a lone lease, which is a cache itself."""
        return BatchView(leases, counts) if len(leases) > 1 else None
