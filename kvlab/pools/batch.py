"""Several leases as the cache of one forward pass: of any pool, or of a tiered one."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import Cache

from kvlab.attention import PrefixGroup
from kvlab.pools.arena import Arena
from kvlab.pools.blocks import BlockTable, are_neighbours
from kvlab.pools.contract import Lease

KeysValues = tuple[Float[Tensor, "B G T D"], Float[Tensor, "B G T D"]]


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
    ) -> KeysValues:
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


class BlockLease(Protocol):
    """What a batch needs of a lease on blocks."""

    table: BlockTable
    num_cached_tokens: int

    @property
    def length(self) -> int: ...

    def rows(self, start: int, end: int) -> list[int]: ...

    def prepare(self, count: int) -> None: ...

    def advance(self, layer: int, count: int) -> None: ...


class TieredBatch(Cache):
    """Row `b` of the batch brings `counts[b]` new tokens, the same number for all.

    With `shared`, leases that begin with the same blocks form a group: attention reads those blocks
    once for all of them (`groups`), and `update` returns the rows behind. They are read in place
    where they lie at regular distances, and gathered into scratch otherwise.
    """

    def __init__(
        self,
        arena: Arena,
        leases: Sequence[BlockLease],
        counts: Sequence[int],
        shared: bool,
    ) -> None:
        super().__init__(layers=[])
        if len(set(counts)) != 1:
            raise ValueError(f"all leases of a batch bring the same number of tokens, got {counts}")
        self.arena, self.leases, self.count = arena, leases, counts[0]
        for lease in leases:
            lease.prepare(self.count)
        size = arena.block_size
        self.starts = [lease.length for lease in leases]
        ends = [s + self.count for s in self.starts]
        common = self._common_blocks() if shared else [0] * len(leases)
        self.base = [c * size for c in common]  # rows of each lease that its group reads
        self.width = max(e - b for e, b in zip(ends, self.base, strict=True))
        new = [r for x, s, e in zip(leases, self.starts, ends, strict=True) for r in x.rows(s, e)]
        self._new = torch.tensor(new, device=arena.key.device)
        self._places = self._regular(ends) if shared and not arena.nan_fill else None
        if self._places is None:
            # Padding repeats the first row: it is masked, and it is a number.
            rows = [x.rows(b, e) for x, b, e in zip(leases, self.base, ends, strict=True)]
            padded = [r for x in rows for r in (*x, *x[:1] * (self.width - len(x)))]
            self._rows = torch.tensor(padded, device=arena.key.device)
        members: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for b, (lease, c) in enumerate(zip(leases, common, strict=True)):
            if c:
                members[tuple(lease.table.blocks[:c])].append(b)
        self._groups = [
            (self._rows_of(blocks), rows if len(rows) < len(leases) else range(len(leases)))
            for blocks, rows in members.items()
        ]
        self.groups: list[PrefixGroup] = []
        # Not left to whoever calls: without it a short request would read behind its own rows.
        may, memory = self.mask(self.count), arena.key
        self.bias: Float[Tensor, "B 1 Q T"] | None = None
        if not may.all():
            bias = torch.zeros(may.shape, dtype=memory.dtype).masked_fill_(~may, -torch.inf)
            self.bias = bias.to(memory.device)

    def _common_blocks(self) -> list[int]:
        """For each lease, how many leading blocks it reads together with its group."""
        size = self.arena.block_size
        groups: dict[int, list[int]] = defaultdict(list)
        for b, lease in enumerate(self.leases):
            groups[lease.table.blocks[0]].append(b)
        common = [0] * len(self.leases)
        for members in groups.values():
            tables = [self.leases[b].table.blocks for b in members]
            full = min(self.starts[b] // size for b in members)  # all of them written before
            if len(members) == 1:
                count = min(full, self.leases[members[0]].num_cached_tokens // size)
            else:
                columns = zip(*(t[:full] for t in tables), strict=True)
                count = next((i for i, c in enumerate(columns) if len(set(c)) > 1), full)
            for b in members:
                common[b] = count
        return common

    def _regular(self, ends: Sequence[int]) -> tuple[int, int] | None:
        """First row and distance of the leases' own rows, if they lie at regular distances."""
        size, firsts = self.arena.block_size, []
        for lease, base, end in zip(self.leases, self.base, ends, strict=True):
            blocks = lease.table.blocks[base // size : -(-end // size)]
            if not are_neighbours(blocks):
                return None
            firsts.append(blocks[0] * size)
        steps = {b - a for a, b in itertools.pairwise(firsts)} or {size}
        step = steps.pop()
        if steps or step <= 0 or firsts[-1] + self.width > self.arena.key.shape[2]:
            return None
        return firsts[0], step

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> KeysValues:
        """Write the new rows of a layer; return each lease's own rows, and set `groups`."""
        arena, batch = self.arena, len(self.leases)
        arena.check(key_states)
        heads, rows, dim = arena.key.shape[1:]
        new = [x.transpose(0, 1).flatten(1, 2) for x in (key_states, value_states)]
        arena.write(layer_idx, self._new, *new)
        for lease in self.leases:
            lease.advance(layer_idx, self.count)
        keys, values = arena.key[layer_idx], arena.value[layer_idx]
        self.groups = [PrefixGroup(b, keys[:, r], values[:, r]) for r, b in self._groups]
        if self._places is not None:
            first, step = self._places
            shape, strides = (batch, heads, self.width, dim), (step * dim, rows * dim, dim, 1)
            return (
                keys.as_strided(shape, strides, keys.storage_offset() + first * dim),
                values.as_strided(shape, strides, values.storage_offset() + first * dim),
            )
        key, value = arena.gather(layer_idx, self._rows)
        shape = (heads, batch, self.width, dim)
        return key.view(shape).transpose(0, 1), value.view(shape).transpose(0, 1)

    def _rows_of(self, blocks: Sequence[int]) -> slice | Tensor:
        """Arena rows of a group's prefix: a slice, read in place, where blocks are neighbours."""
        size = self.arena.block_size
        if are_neighbours(blocks):
            return slice(blocks[0] * size, (blocks[-1] + 1) * size)
        rows = [b * size + i for b in blocks for i in range(size)]
        return torch.tensor(rows, device=self.arena.key.device)

    def positions(self, queries: int) -> Int[Tensor, "B Q"]:
        """Position of every new token."""
        return torch.tensor(self.starts)[:, None] + torch.arange(queries)[None]

    def mask(self, queries: int) -> Bool[Tensor, "B 1 Q T"]:
        """Which of the returned rows each new token may read: those up to its own."""
        rows = torch.tensor(self.base)[:, None] + torch.arange(self.width)[None]
        return (rows[:, None] <= self.positions(queries)[:, :, None])[:, None]
