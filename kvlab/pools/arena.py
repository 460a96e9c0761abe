"""Rows of keys and values, and the record of who wrote each of them last. No policy."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PretrainedConfig

from kvlab.pools.contract import Owner

Rows = slice | Int[Tensor, " T"]
"""Numbers of arena rows: a slice where they lie side by side, else one by one."""


def kv_shape(config: PretrainedConfig) -> tuple[int, int, int]:
    """Layers, key/value heads and head dim of a model."""
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return config.num_hidden_layers, kv_heads, head_dim


class Arena:
    """Keys and values of all places (slots or blocks), `(L, G, N, D)` each.

    L layers, G key/value heads, N rows (`num_blocks * block_size`), D head dim. Rows of one head
    lie together, so that neighbouring places can be read as one view, without a copy.

    Args:
        nan_fill: Debug mode. Rows of nobody hold NaN, so that reading one cannot go unnoticed.

    Attributes:
        owners: Who wrote each row last.
    """

    rounds = False

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
        self.num_blocks, self.block_size, self.nan_fill = num_blocks, block_size, nan_fill
        shape = (num_layers, num_heads, num_blocks * block_size, head_dim)
        filling = torch.nan if nan_fill else 0.0
        self.key: Float[Tensor, "L G N D"] = torch.full(shape, filling, dtype=dtype, device=device)
        self.value: Float[Tensor, "L G N D"] = self.key.clone()
        self.owners: list[Owner | None] = [None] * shape[2]
        self._scratch: Tensor | None = None

    @property
    def parts(self) -> list[Float[Tensor, "L G N _"]]:
        """Whatever a row consists of; a copy that leaves one out makes another row of it."""
        return [self.key, self.value]

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return sum(part.nbytes for part in self.parts)

    @property
    def scratch_bytes(self) -> int:
        """Bytes of the largest gather so far."""
        return 0 if self._scratch is None else self._scratch.nbytes

    def check(self, key: Float[Tensor, "B G n D"]) -> None:
        """Refuse rows of another shape, which an assignment might spread over all heads.

        Raises:
            ValueError: Other heads, or another head dim, than the arena holds.
        """
        _, heads, _, dim = self.key.shape
        if (key.shape[1], key.shape[3]) != (heads, dim):
            raise ValueError(
                f"the pool holds {heads} key/value heads of dimension {dim}, got {key.shape[1]} of "
                f"dimension {key.shape[3]}"
            )

    def write(
        self, layer: int, rows: Rows, key: Float[Tensor, "G n D"], value: Float[Tensor, "G n D"]
    ) -> None:
        """Write new rows of one layer."""
        for memory, new in ((self.key[layer], key), (self.value[layer], value)):
            if isinstance(rows, slice):
                memory[:, rows] = new.detach()
            else:  # detached: rows outlive the pass, so they must not hold its graph
                memory.index_copy_(1, rows, new.detach())

    def read(self, layer: int, rows: Rows) -> tuple[Float[Tensor, "G T D"], Float[Tensor, "G T D"]]:
        """Rows of one layer: in place, or gathered into scratch and valid until the next gather."""
        if isinstance(rows, slice):
            return self.key[layer, :, rows], self.value[layer, :, rows]
        return self.gather(layer, rows)

    def gather(
        self, layer: int, rows: Int[Tensor, " T"]
    ) -> tuple[Float[Tensor, "G T D"], Float[Tensor, "G T D"]]:
        """Copies of some rows; the next layer uses the same memory again."""
        _, heads, _, dim = self.key.shape
        size = 2 * heads * len(rows) * dim
        if self._scratch is None or len(self._scratch) < size:
            self._scratch = torch.empty(size, dtype=self.key.dtype, device=self.key.device)
        both = self._scratch[:size].view(2, heads, len(rows), dim)
        torch.index_select(self.key[layer], 1, rows, out=both[0])
        torch.index_select(self.value[layer], 1, rows, out=both[1])
        return both[0], both[1]

    def copy(self, source: int, target: int, rows: int) -> None:
        """Copy the first `rows` rows of a place, in all layers, with their owners."""
        a, b = source * self.block_size, target * self.block_size
        for part in self.parts:
            part[:, :, b : b + rows] = part[:, :, a : a + rows]
        self.owners[b : b + rows] = self.owners[a : a + rows]

    def forget(self, start: int, end: int) -> None:
        """Rows `start` to `end - 1` belong to nobody any more."""
        self.owners[start:end] = [None] * (end - start)
        if self.nan_fill:
            self.key[:, :, start:end] = torch.nan
            self.value[:, :, start:end] = torch.nan

    def take_out(self, rows: list[int]) -> tuple[list[Tensor], list[Owner | None]]:
        """Rows and owners in host memory; each byte is moved once."""
        return [p[:, :, rows].cpu() for p in self.parts], [self.owners[r] for r in rows]

    def put_back(self, rows: list[int], parts: list[Tensor], owners: list[Owner | None]) -> None:
        """What `take_out` has taken, to these rows."""
        for part, moved in zip(self.parts, parts, strict=True):
            part[:, :, rows] = moved.to(part.device)
        for row, owner in zip(rows, owners, strict=True):
            self.owners[row] = owner
