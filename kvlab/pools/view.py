"""The transformers `Cache` through which a model reads and writes: one lease, or a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from kvlab.pools.contract import Lease

Rows = tuple[Float[Tensor, "B G T D"], Float[Tensor, "B G T D"]]


class Writer(Protocol):
    """Where a slot layer reports what it wrote; the pool records the owner of each row."""

    def wrote(self, start: int, count: int) -> None: ...


class SlotLayer(CacheLayerMixin):
    """One layer of one slot.

    `counter[layer]` is the number of rows that this layer holds. Each layer advances its own
    entry, so that all layers of one forward pass start at the same row.
    """

    def __init__(
        self,
        key: Float[Tensor, "G N D"],
        value: Float[Tensor, "G N D"],
        counter: list[int],
        layer: int,
        writer: Writer,
    ) -> None:
        super().__init__()
        self.keys, self.values = key[None], value[None]
        self.counter, self.layer, self.writer = counter, layer, writer
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the rows were allocated with the pool."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Rows:
        """Write the new rows behind the counter; return all rows up to and including them."""
        _, heads, room, dim = self.keys.shape
        batch, new_heads, count, new_dim = key_states.shape
        if (batch, new_heads, new_dim) != (1, heads, dim):
            raise ValueError(
                f"the slot holds {heads} key/value heads of dimension {dim} for one request, "
                f"got {new_heads} heads of dimension {new_dim} for {batch}"
            )
        start = self.counter[self.layer]
        end = start + count
        if end > room:
            raise ValueError(f"rows {start} to {end - 1} do not fit into a slot of {room} rows")
        if self.layer == 0:
            self.writer.wrote(start, count)
        self.keys[:, :, start:end] = key_states.detach()
        self.values[:, :, start:end] = value_states.detach()
        self.counter[self.layer] = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def get_seq_length(self) -> int:
        return self.counter[self.layer]

    def get_max_length(self) -> int:
        return self.keys.shape[2]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.counter[self.layer] + query_length, 0


class BatchView(Cache):
    """Several leases, of any pool, as the cache of one forward pass.

    Row `b` of the batch brings `counts[b]` new tokens and padding behind them; the padding is never
    written. Where two leases write the same row (a colliding slot), the later one of the batch
    wins, and in each layer every read comes after all writes.

    Attributes:
        pool: The pool that made this view, where one did.
    """

    pool: Any = None

    def __init__(self, leases: Sequence[Lease], counts: Sequence[int]) -> None:
        super().__init__(layers=[])
        self.leases, self.counts = leases, counts
        if any(getattr(layer, "is_sliding", False) for x in leases for layer in x.cache.layers):
            raise ValueError("models with sliding windows cannot be batched here; use batch_size=1")
        self.starts = [int(lease.cache.get_seq_length()) for lease in leases]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> Rows:
        read = [
            lease.cache.update(
                key_states[b : b + 1, :, :count], value_states[b : b + 1, :, :count], layer_idx
            )
            for b, (lease, count) in enumerate(zip(self.leases, self.counts, strict=True))
        ]
        # A cache of fixed size hands out rows behind those that are written: nobody reads them.
        ends = [s + c for s, c in zip(self.starts, self.counts, strict=True)]
        read = [(k[:, :, :end], v[:, :, :end]) for (k, v), end in zip(read, ends, strict=True)]
        longest = max(k.shape[2] for k, _ in read)

        def padded(rows: list[Tensor]) -> Tensor:
            return torch.cat([F.pad(r, (0, 0, 0, longest - r.shape[2])) for r in rows])

        return padded([k for k, _ in read]), padded([v for _, v in read])

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return max(lease.cache.get_seq_length() for lease in self.leases)

    def positions(self, queries: int) -> Int[Tensor, "B Q"]:
        """Position of every new token; padding repeats the last one."""
        step = torch.arange(queries)[None].minimum(torch.tensor(self.counts)[:, None] - 1)
        return torch.tensor(self.starts)[:, None] + step

    def mask(self, queries: int) -> Bool[Tensor, "B 1 Q T"]:
        """Which rows each new token may read: those up to its own."""
        longest = max(s + c for s, c in zip(self.starts, self.counts, strict=True))
        return (torch.arange(longest) <= self.positions(queries)[:, :, None])[:, None]
