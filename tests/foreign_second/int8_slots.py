"""Slots of 8-bit codes with one scale for each row and head (absmax / 127); reads dequantise.

In the style of llama.cpp's slots with a q8_0 cache: a slot remembers the whole prompt that it
holds, and an equal prompt of the same context goes on with its rows but the last: in place if the
slot is idle, else in a copy. Reads are right to half a code. No extras.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import Cache, LlamaConfig
from transformers.cache_utils import CacheLayerMixin

from kvlab.pools.contract import PoolFull
from kvlab.request import Request, known

SLOTS, ROWS = 4, 40
Pair = tuple[Tensor, Tensor]
Held = tuple[tuple[tuple[str, str], ...], tuple[int, ...]]

FAULTS: dict[str, tuple[tuple[str, ...], str]] = {
    "codes_alone": (
        ("scale",),
        "a copy of a busy slot takes the codes but not their scales; FIELD 60",
    ),
    "first_scale": (
        ("scale", "stale state"),
        "a row keeps the scale of its first owner, and later ones are clipped by it; FIELD 63",
    ),
    "old_label": (
        ("stale state",),
        "a slot forgets its prompt only when the next one is through, not when it begins; FIELD 3",
    ),
}


class _Layer(CacheLayerMixin):
    def __init__(self, lease: SlotLease, index: int) -> None:
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


class SlotLease:
    """One slot, and how many of its rows each layer has."""

    def __init__(self, pool: SlotPool, request: Request, slot: int, cached: int) -> None:
        self.pool, self.request, self.slot = pool, request, slot
        self.num_cached_tokens = cached
        self.lengths = [cached] * pool.layers
        self.cache = Cache(layers=[_Layer(self, i) for i in range(pool.layers)])


class SlotPool:
    """Codes and scales of a few slots, keys first, then values."""

    def __init__(self, config: LlamaConfig, fault: str | None) -> None:
        self.fault, self.layers = fault, config.num_hidden_layers
        width = config.head_dim or config.hidden_size // config.num_attention_heads
        shape = (2, self.layers, SLOTS, config.num_key_value_heads, ROWS)
        self.codes = torch.zeros(*shape, width, dtype=torch.int8)
        self.scales = torch.zeros(shape)
        self.idle = list(range(SLOTS))  # longest idle first
        self.held: list[Held | None] = [None] * SLOTS  # finished prompts
        self.living: dict[str, SlotLease] = {}

    def admit(self, request: Request) -> SlotLease:
        if request.id in self.living:
            raise ValueError(f"{request.id!r} is here already")
        if request.rows_needed > ROWS:
            raise ValueError(f"{request.rows_needed} rows never fit into a slot of {ROWS}")
        if not self.idle:
            raise PoolFull(f"no slot for {request.id!r}")
        wanted, cached = self._label(request), 0
        equal = [s for s in range(SLOTS) if wanted is not None and self.held[s] == wanted]
        slot = next((s for s in equal if s in self.idle), None)
        if slot is None:
            slot = next((s for s in self.idle if self.held[s] is None), self.idle[0])
            if self.fault != "old_label":
                self.held[slot] = None
        if equal:
            cached = len(request.tokens) - 1
            self._copy(slot if slot in equal else equal[0], slot, cached)
        self.idle.remove(slot)
        lease = self.living[request.id] = SlotLease(self, request, slot, cached)
        return lease

    def release(self, lease: SlotLease) -> None:
        if self.living.get(lease.request.id) is lease:
            del self.living[lease.request.id]
            self.idle.append(lease.slot)

    def write(self, lease: SlotLease, layer: int, keys: Tensor, values: Tensor) -> Pair:
        start = lease.lengths[layer]
        end = start + keys.shape[2]
        if self.living.get(lease.request.id) is not lease:
            raise ValueError(f"{lease.request.id!r} was given back")
        if end > ROWS:
            raise ValueError(f"{end} rows do not fit into a slot of {ROWS}")
        self._encode(layer, lease.slot, slice(start, end), torch.stack((keys[0], values[0])))
        lease.lengths[layer] = end
        if min(lease.lengths) >= len(lease.request.tokens):
            label = self._label(lease.request)
            if label is not None:
                self.held[lease.slot] = label
        codes = self.codes[:, layer, lease.slot, :, :end].to(keys.dtype)
        rows = codes * self.scales[:, layer, lease.slot, :, :end, None]
        return rows[0][None], rows[1][None]

    def _label(self, request: Request) -> Held | None:
        """What a slot with this finished prompt is known by; `None` where nobody may know."""
        context = known(request.context)
        return None if context is None else (context, request.tokens)

    def _encode(self, layer: int, slot: int, rows: slice, new: Tensor) -> None:
        scales = new.abs().amax(-1) / 127
        if self.fault == "first_scale":
            before = self.scales[:, layer, slot, :, rows]
            scales = torch.where(before > 0, before, scales)
        steps = new / scales.clamp(min=torch.finfo(torch.float32).tiny)[..., None]
        self.scales[:, layer, slot, :, rows] = scales
        self.codes[:, layer, slot, :, rows] = steps.round().clamp(-127, 127).to(torch.int8)

    def _copy(self, source: int, slot: int, count: int) -> None:
        """The first rows of another slot; nothing to do where they are in place."""
        if source == slot:
            return
        self.codes[:, :, slot, :, :count] = self.codes[:, :, source, :, :count]
        if self.fault != "codes_alone":
            self.scales[:, :, slot, :, :count] = self.scales[:, :, source, :, :count]


def build(config: LlamaConfig, fault: str | None = None) -> SlotPool:
    """A fresh pool; `fault` is a name from FAULTS, or None for the right one."""
    if fault is not None and fault not in FAULTS:
        raise ValueError(f"unknown fault {fault!r}; use one of {', '.join(FAULTS)}")
    return SlotPool(config, fault)
