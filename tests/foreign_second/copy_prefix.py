"""Private contiguous caches, and a bounded store of the chunks of finished prompts.

In the style of mlx-lm's prompt cache with LMCache's chunks: a prompt that all layers hold leaves
its full chunks of 4 tokens in the store, row by row (tokens before heads); an admission copies the
longest chain of stored chunks into its own buffer. The oldest chunks are dropped. No extras.
"""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor
from transformers import Cache, LlamaConfig
from transformers.cache_utils import CacheLayerMixin

from kvlab.pools.contract import PoolFull
from kvlab.request import Request, known

BUFFERS, ROWS, CHUNK, STORED = 4, 48, 4, 20
Pair = tuple[Tensor, Tensor]
Key = tuple[tuple[tuple[str, str], ...], tuple[int, ...]]

FAULTS: dict[str, tuple[tuple[str, ...], str]] = {
    "short_ids": (
        ("key",),
        "token ids are cut to 8 bits in the key of a chunk, so that 65 and 321 are equal; FIELD 13",
    ),
    "lent_buffer": (
        ("lifetime",),
        "the store keeps views of a buffer, which its next owner overwrites; FIELD 2",
    ),
    "heads_first": (
        ("layout",),
        "a stored chunk has tokens before heads and is copied in as if heads came first; FIELD 55",
    ),
}


class _Layer(CacheLayerMixin):
    """One layer of a private cache: a window into the buffer."""

    def __init__(self, lease: CopyLease, index: int) -> None:
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


class CopyLease:
    """One buffer, and how much of it each layer has filled."""

    def __init__(self, pool: CopyPool, request: Request, buffer: int, cached: int) -> None:
        self.pool, self.request, self.buffer = pool, request, buffer
        self.num_cached_tokens = cached
        self.lengths = [cached] * pool.layers
        self.stored = False
        self.cache = Cache(layers=[_Layer(self, i) for i in range(pool.layers)])


class CopyPool:
    """A few buffers of `ROWS` rows, and the store."""

    def __init__(self, config: LlamaConfig, fault: str | None) -> None:
        self.fault, self.layers = fault, config.num_hidden_layers
        self.heads = config.num_key_value_heads
        self.width = config.head_dim or config.hidden_size // config.num_attention_heads
        self.keys = torch.zeros(self.layers, BUFFERS, self.heads, ROWS, self.width)
        self.values = torch.zeros_like(self.keys)
        self.free = list(range(BUFFERS))
        self.living: dict[str, CopyLease] = {}
        self.store: OrderedDict[Key, Pair] = OrderedDict()

    def admit(self, request: Request) -> CopyLease:
        if request.id in self.living:
            raise ValueError(f"{request.id!r} is here already")
        if request.rows_needed > ROWS:
            raise ValueError(f"{request.rows_needed} rows never fit into a buffer of {ROWS}")
        if not self.free:
            raise PoolFull(f"no buffer for {request.id!r}")
        buffer = self.free.pop()
        cached = 0
        for key in self._keys(request, len(request.tokens) - 1):
            if key not in self.store:
                break
            self.store.move_to_end(key)
            self._copy_in(self.store[key], buffer, cached)
            cached += CHUNK
        lease = self.living[request.id] = CopyLease(self, request, buffer, cached)
        return lease

    def release(self, lease: CopyLease) -> None:
        if self.living.get(lease.request.id) is lease:
            del self.living[lease.request.id]
            self.free.append(lease.buffer)

    def write(self, lease: CopyLease, layer: int, keys: Tensor, values: Tensor) -> Pair:
        start, buffer = lease.lengths[layer], lease.buffer
        end = start + keys.shape[2]
        if self.living.get(lease.request.id) is not lease:
            raise ValueError(f"{lease.request.id!r} was given back")
        if end > ROWS:
            raise ValueError(f"{end} rows do not fit into a buffer of {ROWS}")
        self.keys[layer, buffer, :, start:end] = keys[0]
        self.values[layer, buffer, :, start:end] = values[0]
        lease.lengths[layer] = end
        if not lease.stored and min(lease.lengths) >= len(lease.request.tokens):
            lease.stored = True
            self._keep(lease)
        return (
            self.keys[layer, buffer, :, :end][None].clone(),
            self.values[layer, buffer, :, :end][None].clone(),
        )

    def _keys(self, request: Request, limit: int) -> list[Key]:
        """One key for each full chunk among the first `limit` tokens: all tokens up to its end."""
        context, tokens = known(request.context), request.tokens
        if context is None:
            return []
        if self.fault == "short_ids":
            tokens = tuple(t & 0xFF for t in tokens)
        return [(context, tokens[:end]) for end in range(CHUNK, limit + 1, CHUNK)]

    def _keep(self, lease: CopyLease) -> None:
        """Store the chunks of a prompt that are not there yet."""
        for i, key in enumerate(self._keys(lease.request, len(lease.request.tokens))):
            if key not in self.store:
                rows = slice(i * CHUNK, (i + 1) * CHUNK)
                chunk = [s[:, lease.buffer, :, rows].transpose(1, 2) for s in self._sides()]
                if self.fault != "lent_buffer":
                    chunk = [side.contiguous().clone() for side in chunk]
                self.store[key] = (chunk[0], chunk[1])
            self.store.move_to_end(key)
        while len(self.store) > STORED:
            self.store.popitem(last=False)

    def _copy_in(self, chunk: Pair, buffer: int, start: int) -> None:
        for side, rows in zip(self._sides(), chunk, strict=True):
            if self.fault == "heads_first":
                turned = rows.reshape(self.layers, self.heads, CHUNK, self.width)
            else:
                turned = rows.transpose(1, 2)
            side[:, buffer, :, start : start + CHUNK] = turned

    def _sides(self) -> Pair:
        return self.keys, self.values


def build(config: LlamaConfig, fault: str | None = None) -> CopyPool:
    """A fresh pool; `fault` is a name from FAULTS, or None for the right one."""
    if fault is not None and fault not in FAULTS:
        raise ValueError(f"unknown fault {fault!r}; use one of {', '.join(FAULTS)}")
    return CopyPool(config, fault)
