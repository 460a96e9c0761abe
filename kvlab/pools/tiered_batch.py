"""Several leases of a tiered pool as one cache: gathered, or with a prefix that is read once."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import Cache

from kvlab.attention import PrefixGroup
from kvlab.pools.blocks import BlockArena, Scratch, are_neighbours

if TYPE_CHECKING:
    from kvlab.pools.tiered_lease import TieredLease


def check_heads(arena: BlockArena, key: Float[Tensor, "B G Q D"]) -> None:
    """Refuse rows of another shape, which an assignment might spread over all heads.

    Raises:
        ValueError: Other heads, or another head dim, than the pool holds.
    """
    heads, _, dim = arena.key.shape[1:]
    if key.shape[1] != heads or key.shape[3] != dim:
        raise ValueError(
            f"the pool holds {heads} key/value heads of dimension {dim}, got {key.shape[1]} of "
            f"dimension {key.shape[3]}"
        )


def write_rows(
    arena: BlockArena,
    layer: int,
    rows: Int[Tensor, " N"],
    key: Float[Tensor, "B G Q D"],
    value: Float[Tensor, "B G Q D"],
) -> None:
    """Write `B * Q` new rows of a layer to their places."""
    check_heads(arena, key)
    heads, _, dim = arena.key.shape[1:]
    rows = rows.to(arena.key.device)
    for memory, new in ((arena.key, key), (arena.value, value)):
        new = new.detach()  # rows outlive the pass, so they must not hold its graph
        memory[layer].index_copy_(1, rows, new.transpose(0, 1).reshape(heads, -1, dim))


class TieredBatch(Cache):
    """Row `b` of the batch brings `counts[b]` new tokens, the same number for all.

    With `shared`, leases that begin with the same blocks form a group: attention reads those blocks
    once for all of them (`groups`), and `update` returns the rows behind. They are read in place
    where they lie at regular distances, and gathered into scratch otherwise.
    """

    def __init__(
        self,
        arena: BlockArena,
        scratch: Scratch,
        leases: Sequence[TieredLease],
        counts: Sequence[int],
        shared: bool,
    ) -> None:
        super().__init__(layers=[])
        if len(set(counts)) != 1:
            raise ValueError(f"all leases of a batch bring the same number of tokens, got {counts}")
        self.arena, self.scratch, self.leases, self.count = arena, scratch, leases, counts[0]
        for lease in leases:
            lease.prepare(self.count)
        size = arena.block_size
        self.starts = [lease.length for lease in leases]
        ends = [s + self.count for s in self.starts]
        common = self._common_blocks() if shared else [0] * len(leases)
        self.base = [c * size for c in common]  # rows of each lease that its group reads
        self.width = max(e - b for e, b in zip(ends, self.base, strict=True))
        self._new = torch.tensor(
            [r for x, s, e in zip(leases, self.starts, ends, strict=True) for r in x.rows(s, e)]
        )
        self._places = self._regular(ends) if shared and not arena.nan_fill else None
        if self._places is None:
            # Padding repeats the first row: it is masked, and it is a number.
            rows = [x.rows(b, e) for x, b, e in zip(leases, self.base, ends, strict=True)]
            self._rows = torch.tensor(
                [[*r, *r[:1] * (self.width - len(r))] for r in rows]
            ).flatten()
        members: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for b, (lease, c) in enumerate(zip(leases, common, strict=True)):
            if c:
                members[tuple(lease.table[:c])].append(b)
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
            groups[lease.table[0]].append(b)
        common = [0] * len(self.leases)
        for members in groups.values():
            tables = [self.leases[b].table for b in members]
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
            blocks = lease.table[base // size : -(-end // size)]
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
    ) -> tuple[Float[Tensor, "B G T D"], Float[Tensor, "B G T D"]]:
        """Write the new rows of a layer; return each lease's own rows, and set `groups`."""
        arena, batch = self.arena, len(self.leases)
        write_rows(arena, layer_idx, self._new, key_states, value_states)
        for lease in self.leases:
            lease.advance(layer_idx, self.count)
        keys, values = arena.key[layer_idx], arena.value[layer_idx]
        self.groups = [PrefixGroup(b, keys[:, r], values[:, r]) for r, b in self._groups]
        heads, rows, dim = keys.shape
        if self._places is not None:
            first, step = self._places
            shape, strides = (batch, heads, self.width, dim), (step * dim, rows * dim, dim, 1)
            return (
                keys.as_strided(shape, strides, keys.storage_offset() + first * dim),
                values.as_strided(shape, strides, values.storage_offset() + first * dim),
            )
        key, value = self.scratch.gather(arena, layer_idx, self._rows)
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
