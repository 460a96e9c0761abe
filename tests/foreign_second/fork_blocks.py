"""Blocks of 4 rows with copy-on-write, for beams and speculative tokens; no prefix is shared.

In the style of vLLM's old block manager. Extras: fork, truncate, and announce (so that a fork can
compare answer tokens too). A lease has the blocks of its whole life promised to it at admission, be
they shared or not, so a copy always finds one. Truncation leaves the blocks with the lease.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import Cache, LlamaConfig
from transformers.cache_utils import CacheLayerMixin

from kvlab.pools.contract import PoolFull
from kvlab.request import Request, known

BLOCKS, SIZE = 30, 4
Pair = tuple[Tensor, Tensor]

FAULTS: dict[str, tuple[tuple[str, ...], str]] = {
    "two_at_most": (
        ("lifetime",),
        "a fork sets the count of a block to two, and a third reader is forgotten; FIELD 41",
    ),
    "peak_outlives": (
        ("stale state",),
        "a fork takes over also the rows that a truncation of its source took back; FIELD 4",
    ),
    "count_then_refuse": (
        ("refusal changed something", "leak of memory"),
        "a fork that finds no room has counted itself as a reader already; FIELD 41 reversed",
    ),
}


class _Layer(CacheLayerMixin):
    def __init__(self, lease: ForkLease, index: int) -> None:
        super().__init__()
        self.lease, self.index = lease, index

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        pass

    def update(self, key_states: Tensor, value_states: Tensor, *_: object, **__: object) -> Pair:
        return self.lease.pool.write(self.lease, self.index, key_states, value_states)

    def get_seq_length(self) -> int:
        return self.lease.lengths[self.index]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1


class ForkLease:
    """The blocks of one request, in the order of its rows."""

    def __init__(self, pool: ForkPool, request: Request, table: list[int], cached: int) -> None:
        self.pool, self.request, self.table = pool, request, table
        self.promised = -(-request.rows_needed // SIZE)
        self.num_cached_tokens = cached
        self.lengths = [cached] * pool.layers
        self.peak = cached  # most rows there ever were
        self.said = list(request.tokens)  # what each row holds or will hold, -1 where unknown
        self.cache = Cache(layers=[_Layer(self, i) for i in range(pool.layers)])

    def announce(self, tokens: list[int]) -> None:
        self.said[min(self.lengths) :] = list(tokens)


class ForkPool:
    """Counted blocks."""

    def __init__(self, config: LlamaConfig, fault: str | None) -> None:
        self.fault, self.layers = fault, config.num_hidden_layers
        width = config.head_dim or config.hidden_size // config.num_attention_heads
        heads = config.num_key_value_heads
        self.rows = torch.zeros(2, self.layers, BLOCKS, SIZE, heads, width)
        self.free = list(range(BLOCKS))
        self.readers = [0] * BLOCKS
        self.living: dict[str, ForkLease] = {}

    def admit(self, request: Request) -> ForkLease:
        self._check_room(request)
        lease = self.living[request.id] = ForkLease(self, request, [], 0)
        return lease

    def fork(self, lease: ForkLease, request: Request) -> ForkLease:
        self._check_living(lease)
        rows = lease.peak if self.fault == "peak_outlives" else min(lease.lengths)
        theirs, ours = lease.request.context, request.context
        if known(theirs) != known(ours) or (known(ours) is None and theirs != ours):
            raise ValueError(f"{request.id!r} has another context than {lease.request.id!r}")
        said = zip(lease.said[: min(lease.lengths)], request.tokens, strict=False)
        if len(request.tokens) < min(lease.lengths) or any(a not in (-1, b) for a, b in said):
            raise ValueError(f"{request.id!r} has other tokens than {lease.request.id!r}")
        cached = min(rows, len(request.tokens) - 1)
        table = lease.table[: -(-cached // SIZE)]
        if self.fault != "count_then_refuse":
            self._check_room(request)
        for block in table:
            self.readers[block] = 2 if self.fault == "two_at_most" else self.readers[block] + 1
        if self.fault == "count_then_refuse":
            self._check_room(request)
        other = self.living[request.id] = ForkLease(self, request, table, cached)
        return other

    def truncate(self, lease: ForkLease, length: int) -> None:
        self._check_living(lease)
        if not 0 <= length <= min(lease.lengths):
            raise ValueError(f"{lease.request.id!r} has {min(lease.lengths)} rows, not {length}")
        lease.lengths = [length] * self.layers
        del lease.said[length:]

    def release(self, lease: ForkLease) -> None:
        if self.living.get(lease.request.id) is lease:
            del self.living[lease.request.id]
            for block in lease.table:
                self._leave(block)

    def write(self, lease: ForkLease, layer: int, keys: Tensor, values: Tensor) -> Pair:
        self._check_living(lease)
        start = lease.lengths[layer]
        end = start + keys.shape[2]
        if end > lease.promised * SIZE:
            raise ValueError(f"{lease.request.id!r} asked for {lease.request.rows_needed} rows")
        self._own(lease, start, end)
        self._fill(lease.table, layer, start, (keys, values))
        lease.lengths[layer] = end
        lease.peak = max(lease.peak, min(lease.lengths))
        lease.said += [-1] * (min(lease.lengths) - len(lease.said))
        seen = self.rows[:, layer, lease.table].flatten(1, 2)[:, :end].transpose(1, 2)
        return seen[0][None].clone(), seen[1][None].clone()

    def _own(self, lease: ForkLease, start: int, end: int) -> None:
        """Make the blocks of these rows the lease's own: new ones, and copies of shared ones."""
        while len(lease.table) * SIZE < end:
            lease.table.append(self._take())
        for i in range(start // SIZE, -(-end // SIZE)):
            old = lease.table[i]
            if self.readers[old] > 1:
                new = lease.table[i] = self._take()
                self.rows[:, :, new] = self.rows[:, :, old]
                self._leave(old)

    def _fill(self, table: list[int], layer: int, start: int, sides: Pair) -> None:
        count = sides[0].shape[2]
        places = [divmod(r, SIZE) for r in range(start, start + count)]
        blocks, offsets = [table[i] for i, _ in places], [offset for _, offset in places]
        for side, new in zip(self.rows, sides, strict=True):
            side[layer, blocks, offsets] = new[0].transpose(0, 1)

    def _take(self) -> int:
        if not self.free:
            raise PoolFull("no block is free")
        block = self.free.pop(0)
        self.readers[block] = 1
        return block

    def _leave(self, block: int) -> None:
        self.readers[block] -= 1
        if self.readers[block] == 0:
            self.free.append(block)

    def _check_room(self, request: Request) -> None:
        """Blocks that are free or in use by the living, less what the living were promised."""
        need = -(-request.rows_needed // SIZE)
        if request.id in self.living or need > BLOCKS:
            raise ValueError(f"{request.id!r} is here already, or longer than {BLOCKS} blocks")
        used = {block for lease in self.living.values() for block in lease.table}
        promised = sum(lease.promised for lease in self.living.values())
        if len(self.free) + len(used) - promised < need:
            raise PoolFull(f"{need} blocks are needed for {request.id!r}")

    def _check_living(self, lease: ForkLease) -> None:
        if self.living.get(lease.request.id) is not lease:
            raise ValueError(f"{lease.request.id!r} was given back")


def build(config: LlamaConfig, fault: str | None = None) -> ForkPool:
    """A fresh pool; `fault` is a name from FAULTS, or None for the right one."""
    if fault is not None and fault not in FAULTS:
        raise ValueError(f"unknown fault {fault!r}; use one of {', '.join(FAULTS)}")
    return ForkPool(config, fault)
