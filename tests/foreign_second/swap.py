"""Blocks of 4 rows with full-block prefix sharing and preemption to host memory.

In the style of vLLM with swap space. Extras: park and resume. A block that all layers have filled
with prompt tokens is published under all tokens up to its end; without readers it stays until its
place is needed, oldest first. A resumed lease has all its blocks for itself.
"""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor
from transformers import Cache, LlamaConfig
from transformers.cache_utils import CacheLayerMixin

from kvlab.pools.contract import PoolFull
from kvlab.request import Request, known

BLOCKS, SIZE = 26, 4
Pair = tuple[Tensor, Tensor]
Key = tuple[tuple[tuple[str, str], ...], int, tuple[int, ...]]

FAULTS: dict[str, tuple[tuple[str, ...], str]] = {
    "own_tokens": (
        ("key",),
        "a block is known by its own tokens and index, whatever came before it; FIELD 12",
    ),
    "still_listed": (
        ("lifetime", "stale state"),
        "a resume takes a published block and leaves it in the table of prefixes; FIELD 30",
    ),
    "sorted_blocks": (
        ("position",),
        "parking saves the blocks by number, resuming restores them in table order; FIELD 48",
    ),
}


class _Layer(CacheLayerMixin):
    def __init__(self, lease: SwapLease, index: int) -> None:
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


class SwapLease:
    """A block table, or the rows on the host while parked."""

    def __init__(self, pool: SwapPool, request: Request, table: list[int], hits: int) -> None:
        self.pool, self.request, self.table = pool, request, table
        self.host: Tensor | None = None
        self.published = hits  # blocks whose publication is settled
        self.num_cached_tokens = hits * SIZE
        self.lengths = [hits * SIZE] * pool.layers
        self.cache = Cache(layers=[_Layer(self, i) for i in range(pool.layers)])


class SwapPool:
    """Counted blocks, and the table of those that hold a known prefix."""

    def __init__(self, config: LlamaConfig, fault: str | None) -> None:
        self.fault, self.layers = fault, config.num_hidden_layers
        width = config.head_dim or config.hidden_size // config.num_attention_heads
        heads = config.num_key_value_heads
        self.rows = torch.zeros(2, self.layers, BLOCKS, SIZE, heads, width)
        self.readers = [0] * BLOCKS
        self.free = list(range(BLOCKS))[::-1]
        self.kept: OrderedDict[int, None] = OrderedDict()  # published, without readers
        self.block_of: dict[Key, int] = {}
        self.key_of: dict[int, Key] = {}
        self.living: dict[str, SwapLease] = {}

    def admit(self, request: Request) -> SwapLease:
        need = -(-request.rows_needed // SIZE)
        if request.id in self.living or need > BLOCKS:
            raise ValueError(f"{request.id!r} is here already, or longer than {BLOCKS} blocks")
        hits: list[int] = []
        for key in self._keys(request, len(request.tokens) - 1):
            if key not in self.block_of:
                break
            hits.append(self.block_of[key])
        self._check_room(need - len(hits), [b for b in hits if b in self.kept])
        for block in hits:
            self.kept.pop(block, None)
            self.readers[block] += 1
        table = hits + [self._take() for _ in range(need - len(hits))]
        lease = self.living[request.id] = SwapLease(self, request, table, len(hits))
        return lease

    def release(self, lease: SwapLease) -> None:
        if self.living.get(lease.request.id) is lease:
            del self.living[lease.request.id]
            self._leave(lease)

    def park(self, lease: SwapLease) -> None:
        self._check_living(lease)
        order = sorted(lease.table) if self.fault == "sorted_blocks" else lease.table
        lease.host = self.rows[:, :, order].clone()
        self._leave(lease)

    def resume(self, lease: SwapLease) -> None:
        if self.living.get(lease.request.id) is not lease or lease.host is None:
            raise ValueError(f"{lease.request.id!r} is not parked")
        need = lease.host.shape[2]
        self._check_room(need, [])
        lease.table = [self._take(unlist=self.fault != "still_listed") for _ in range(need)]
        self.rows[:, :, lease.table] = lease.host
        lease.host = None

    def write(self, lease: SwapLease, layer: int, keys: Tensor, values: Tensor) -> Pair:
        self._check_living(lease)
        start = lease.lengths[layer]
        end = start + keys.shape[2]
        if end > len(lease.table) * SIZE:
            raise ValueError(f"{lease.request.id!r} asked for {lease.request.rows_needed} rows")
        places = [divmod(row, SIZE) for row in range(start, end)]
        blocks, offsets = [lease.table[i] for i, _ in places], [offset for _, offset in places]
        for side, new in zip(self.rows, (keys, values), strict=True):
            side[layer, blocks, offsets] = new[0].transpose(0, 1)
        lease.lengths[layer] = end
        self._publish(lease)
        seen = self.rows[:, layer, lease.table].flatten(1, 2)[:, :end].transpose(1, 2)
        return seen[0][None].clone(), seen[1][None].clone()

    def _keys(self, request: Request, limit: int) -> list[Key]:
        """One key for each full block among the first `limit` prompt tokens."""
        context, tokens = known(request.context), request.tokens
        if context is None:
            return []
        alone = self.fault == "own_tokens"
        ends = range(SIZE, limit + 1, SIZE)
        return [(context, end, tokens[end - SIZE if alone else 0 : end]) for end in ends]

    def _publish(self, lease: SwapLease) -> None:
        """List the blocks that have become full in all layers, unless others hold the same."""
        full = min(*lease.lengths, len(lease.request.tokens)) // SIZE
        for i, key in enumerate(self._keys(lease.request, full * SIZE)):
            if i >= lease.published and key not in self.block_of:
                self.block_of[key], self.key_of[lease.table[i]] = lease.table[i], key
        lease.published = max(lease.published, full)

    def _take(self, unlist: bool = True) -> int:
        block = self.free.pop() if self.free else self.kept.popitem(last=False)[0]
        if unlist and block in self.key_of:
            del self.block_of[self.key_of.pop(block)]
        self.readers[block] = 1
        return block

    def _leave(self, lease: SwapLease) -> None:
        """Give the blocks back, the last one first: a prefix is of use without what follows it."""
        for block in reversed(lease.table):
            self.readers[block] -= 1
            if self.readers[block] == 0 and block in self.key_of:
                self.kept[block] = None
            elif self.readers[block] == 0:
                self.free.append(block)
        lease.table = []

    def _check_room(self, need: int, except_for: list[int]) -> None:
        if len(self.free) + len(self.kept) - len(except_for) < need:
            raise PoolFull(f"{need} blocks are needed")

    def _check_living(self, lease: SwapLease) -> None:
        if self.living.get(lease.request.id) is not lease or lease.host is not None:
            raise ValueError(f"{lease.request.id!r} was given back, or is parked")


def build(config: LlamaConfig, fault: str | None = None) -> SwapPool:
    """A fresh pool; `fault` is a name from FAULTS, or None for the right one."""
    if fault is not None and fault not in FAULTS:
        raise ValueError(f"unknown fault {fault!r}; use one of {', '.join(FAULTS)}")
    return SwapPool(config, fault)
