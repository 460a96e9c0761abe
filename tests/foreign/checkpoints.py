"""Slots that keep what they held, in the style of llama.cpp's server slots.

A released slot remembers the prompt whose rows it holds. A newcomer takes the free slot with the
longest common prefix, cut back to that prefix, else the one that was used least recently. Nothing
is shared between requests that run at once. Extras of the contract: `truncate`.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import Cache, LlamaConfig
from transformers.cache_utils import CacheLayerMixin

from kvlab.pools.contract import PoolFull
from kvlab.request import Request, known

SLOTS = 4
ROWS = 40
Key = tuple[tuple[str, str], ...]

FAULTS: dict[str, tuple[tuple[str, ...], str]] = {
    "full_hit_not_cut": (
        ("stale state", "position"),
        "a prompt that the slot holds as a whole computes its last token anew, but the old row of "
        "it is not cut off first; FIELD 8",
    ),
    "name_is_session": (
        ("key",),
        "a name that comes back is taken for the same conversation: what its slot holds counts as "
        "the beginning of the new prompt, uncompared; FIELD 20",
    ),
    "truncate_keeps_hit": (
        ("stale state", "position"),
        "truncate never goes below the rows that were found at admission, they stay; FIELD 5",
    ),
}


@dataclass
class Slot:
    """Memory for one request, and what the last one has left there."""

    number: int
    keys: list[Tensor]  # one [heads, rows, dim] for each layer
    values: list[Tensor]
    length: list[int]
    held: tuple[int, ...] = ()
    context: Key | None = None
    name: str = ""
    last_used: int = 0
    lease: SlotLease | None = None


@dataclass
class SlotLease:
    """The right to a slot; `trusted` prompt rows at most are those of the prompt."""

    request: Request
    slot: Slot
    num_cached_tokens: int
    trusted: int
    cache: Cache = field(init=False)

    def check(self) -> None:
        if self.slot.lease is not self:
            raise ValueError(f"the lease of {self.request.id!r} was given back")


class SlotLayer(CacheLayerMixin):
    """One layer of a slot."""

    def __init__(self, lease: SlotLease, index: int) -> None:
        super().__init__()
        self.lease, self.index = lease, index
        self.final: int | None = None  # the length at release

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: slots are made with the pool."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        self.lease.check()
        slot, start = self.lease.slot, self.get_seq_length()
        end = start + key_states.shape[-2]
        if end > ROWS:
            raise ValueError(f"a slot has {ROWS} rows, {self.lease.request.id!r} wants {end}")
        keys, values = slot.keys[self.index], slot.values[self.index]
        keys[:, start:end] = key_states[0].detach()
        values[:, start:end] = value_states[0].detach()
        slot.length[self.index] = end
        return keys[None, :, :end].clone(), values[None, :, :end].clone()

    def get_seq_length(self) -> int:
        return self.lease.slot.length[self.index] if self.final is None else self.final

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1


def common_prefix(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    """How many tokens two prompts have in common at their beginning."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b)))


class SlotPool:
    """The slots and the choice among them."""

    def __init__(self, config: LlamaConfig, fault: str | None) -> None:
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.layers, self.fault = config.num_hidden_layers, fault
        self.clock = 0

        def memory() -> list[Tensor]:
            shape = (config.num_key_value_heads, ROWS, dim)
            return [torch.zeros(shape) for _ in range(self.layers)]

        self.slots = [Slot(i, memory(), memory(), [0] * self.layers) for i in range(SLOTS)]

    def admit(self, request: Request) -> SlotLease:
        if any(slot.lease and slot.lease.request.id == request.id for slot in self.slots):
            raise ValueError(f"request {request.id!r} is admitted already")
        if request.rows_needed > ROWS:
            raise ValueError(f"{request.id!r} needs {request.rows_needed} rows; a slot has {ROWS}")
        free = [slot for slot in self.slots if slot.lease is None]
        if not free:
            raise PoolFull(f"all {SLOTS} slots are in use")
        same = {slot.number: self._usable(slot, request) for slot in free}
        slot = max(free, key=lambda s: (same[s.number], -s.last_used))
        cached = keep = min(same[slot.number], len(request.tokens) - 1)
        if self.fault == "full_hit_not_cut":
            keep = same[slot.number]
        slot.length = [keep] * self.layers
        slot.held, slot.context, slot.name = (), None, request.id
        slot.lease = lease = SlotLease(request, slot, cached, len(request.tokens))
        lease.cache = Cache(layers=[SlotLayer(lease, i) for i in range(self.layers)])
        return lease

    def release(self, lease: SlotLease) -> None:
        lease.check()
        slot, context = lease.slot, known(lease.request.context)
        for layer in lease.cache.layers:
            layer.final = layer.get_seq_length()
        if context is not None:  # only what all layers have; generated tokens are not known here
            complete = min(*slot.length, lease.trusted)
            slot.held, slot.context = lease.request.tokens[:complete], context
        self.clock += 1
        slot.last_used, slot.lease = self.clock, None

    def truncate(self, lease: SlotLease, length: int) -> None:
        lease.check()
        if not 0 <= length <= min(lease.slot.length):
            raise ValueError(f"cannot keep {length} of {min(lease.slot.length)} rows")
        if self.fault == "truncate_keeps_hit":
            length = max(length, lease.num_cached_tokens)
        lease.slot.length = [length] * self.layers
        lease.trusted = min(lease.trusted, length)  # whatever is written now may be something else

    def _usable(self, slot: Slot, request: Request) -> int:
        """How many rows of a free slot are the beginning of this prompt."""
        context = known(request.context)
        if context is None or slot.context != context:
            return 0
        if self.fault == "name_is_session" and slot.name == request.id:
            return min(len(slot.held), len(request.tokens))
        return common_prefix(slot.held, request.tokens)


def build(config: LlamaConfig, fault: str | None = None) -> SlotPool:
    """A fresh pool, with one fault or none."""
    if fault is not None and fault not in FAULTS:
        raise ValueError(f"unknown fault {fault!r}; choose from {', '.join(FAULTS)}")
    return SlotPool(config, fault)
