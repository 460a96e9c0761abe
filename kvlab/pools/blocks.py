"""Blocks of rows with reference counts: the memory under the tiered pool."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from kvlab.pools.contract import Owner


def are_neighbours(blocks: Sequence[int]) -> bool:
    """Whether blocks lie side by side in this order, so that their rows are one view."""
    return list(blocks) == list(range(blocks[0], blocks[0] + len(blocks)))


class BlockArena:
    """Keys and values of all blocks, `(L, G, N, D)` each, and how many holders a block has.

    L layers, G key/value heads, N rows (`num_blocks * block_size`), D head dim. Rows of one head
    lie together, so that neighbouring blocks can be read as one view, without a copy.

    Attributes:
        ref_count: Holders of each block: leases, and nodes of the prefix tree.
        owners: Who wrote each row last.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        num_layers: int,
        num_heads: int,
        head_dim: int,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
        nan_fill: bool = False,
    ) -> None:
        sizes = (num_blocks, block_size, num_layers, num_heads, head_dim)
        if min(sizes) < 1:
            raise ValueError(f"every size of an arena must be at least 1, got {sizes}")
        self.num_blocks, self.block_size = num_blocks, block_size
        rows = num_blocks * block_size
        shape = (num_layers, num_heads, rows, head_dim)
        filling = torch.nan if nan_fill else 0.0
        self.key: Float[Tensor, "L G N D"] = torch.full(shape, filling, dtype=dtype, device=device)
        self.value: Float[Tensor, "L G N D"] = self.key.clone()
        self.owners: list[Owner | None] = [None] * rows
        self.ref_count = [0] * num_blocks
        self.nan_fill = nan_fill

    @property
    def nbytes(self) -> int:
        """Bytes of all keys and values."""
        return self.key.nbytes + self.value.nbytes

    @property
    def free(self) -> list[int]:
        """Blocks that nobody holds."""
        return [b for b, count in enumerate(self.ref_count) if count == 0]

    def allocate(self, count: int) -> list[int]:
        """Take `count` free blocks, neighbours where there is such a run.

        Raises:
            ValueError: Fewer are free; the caller has to know.
        """
        free = self.free
        if len(free) < count:
            raise ValueError(f"{count} blocks asked for, {len(free)} are free")
        taken = free[:count]
        for i in range(len(free) - count + 1):
            if count and free[i + count - 1] - free[i] == count - 1:
                taken = free[i : i + count]
                break
        for block in taken:
            self.ref_count[block] = 1
        return taken

    def retain(self, blocks: Sequence[int]) -> None:
        """One more holder for each block."""
        for block in blocks:
            assert self.ref_count[block] > 0, f"block {block} is free and cannot be shared"
            self.ref_count[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """One holder less; a block without holders is free."""
        for block in blocks:
            assert self.ref_count[block] > 0, f"block {block} was given back twice"
            self.ref_count[block] -= 1
            if self.ref_count[block] == 0:
                self._clear(block)

    def _clear(self, block: int) -> None:
        rows = slice(block * self.block_size, (block + 1) * self.block_size)
        self.owners[rows] = [None] * self.block_size
        if self.nan_fill:
            self.key[:, :, rows] = torch.nan
            self.value[:, :, rows] = torch.nan

    def copy(self, source: int, target: int, rows: int) -> None:
        """Copy the first `rows` rows of a block, in all layers, with their owners."""
        a, b = source * self.block_size, target * self.block_size
        self.key[:, :, b : b + rows] = self.key[:, :, a : a + rows]
        self.value[:, :, b : b + rows] = self.value[:, :, a : a + rows]
        self.owners[b : b + rows] = self.owners[a : a + rows]


class Scratch:
    """One layer's gathered keys and values; the next layer uses the same memory again."""

    def __init__(self) -> None:
        self._buffer: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes held now: the largest gather so far."""
        return 0 if self._buffer is None else self._buffer.nbytes

    def gather(
        self, arena: BlockArena, layer: int, rows: Tensor
    ) -> tuple[Float[Tensor, "G T D"], Float[Tensor, "G T D"]]:
        """Copies of some rows of a layer, valid until the next gather."""
        heads, _, dim = arena.key[layer].shape
        size = 2 * heads * len(rows) * dim
        if self._buffer is None or len(self._buffer) < size:
            self._buffer = torch.empty(size, dtype=arena.key.dtype, device=arena.key.device)
        both = self._buffer[:size].view(2, heads, len(rows), dim)
        rows = rows.to(arena.key.device)
        torch.index_select(arena.key[layer], 1, rows, out=both[0])
        torch.index_select(arena.value[layer], 1, rows, out=both[1])
        return both[0], both[1]
