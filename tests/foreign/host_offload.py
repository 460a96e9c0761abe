"""Device slots with a host store behind them, in the style of LMCache or a KV offload connector.

A finished prompt is copied to the host (bounded, least recently used goes first) a few operations
later; until then a released slot waits, unless its room is needed: then the copy is made at once.
An admission copies the longest stored prefix into a fresh slot. Extras of the contract: `settle`.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from itertools import takewhile

import torch
from torch import Tensor
from transformers import Cache, LlamaConfig
from transformers.cache_utils import CacheLayerMixin

from kvlab.pools.contract import PoolFull
from kvlab.request import Request, known

SLOTS = 4
ROWS = 40
HOST_ROWS = 96
DELAY = 4  # operations until a copy to the host is made
HostKey = tuple[tuple[object, ...], tuple[int, ...]]  # context and prompt

FAULTS: dict[str, tuple[tuple[str, ...], str]] = {
    "slot_free_before_copy": (
        ("lifetime",),
        "a released slot is free at once although its copy to the host is still to come, so the "
        "next owner's rows may be stored under the old key; FIELD 32",
    ),
    "flat_prefix": (
        ("layout",),
        "part of a stored prompt is cut from its flat bytes as if these were that short from the "
        "start, though they lie head by head; FIELD 58",
    ),
    "untagged_context": (("key",), "the key leaves out the tags of the context; FIELD 24"),
}


class DeviceLayer(CacheLayerMixin):
    """One layer of a device slot."""

    def __init__(self, lease: DeviceLease, index: int) -> None:
        super().__init__()
        self.lease, self.index = lease, index

    def lazy_initialization(self, *args: object) -> None:
        """Nothing to do: the device memory is there."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        return self.lease.pool.write(self.lease, self.index, key_states, value_states)

    def get_seq_length(self) -> int:
        return self.lease.lengths[self.index]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1


class DeviceLease:
    """A slot, and how far each layer has come."""

    def __init__(self, pool: OffloadPool, request: Request, slot: int, cached: int) -> None:
        self.pool, self.request, self.slot, self.num_cached_tokens = pool, request, slot, cached
        self.lengths = [cached] * pool.num_layers
        self.stored = False
        self.cache = Cache(layers=[DeviceLayer(self, i) for i in range(pool.num_layers)])


class OffloadPool:
    """Device slots, the queue of copies, and the host store."""

    def __init__(self, config: LlamaConfig, fault: str | None) -> None:
        self.fault = fault
        self.num_layers, self.heads = config.num_hidden_layers, config.num_key_value_heads
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.device = torch.zeros(SLOTS, self.num_layers, 2, self.heads, ROWS, dim)
        self.free = set(range(SLOTS))
        self.leaving: set[int] = set()  # released, but a copy is still to be made
        self.live: dict[str, DeviceLease] = {}
        self.queue: deque[tuple[int, int, HostKey]] = deque()  # due, slot, key
        self.host: OrderedDict[HostKey, Tensor] = OrderedDict()  # flat: layer, K/V, head, row, dim
        self.clock = 0

    def admit(self, request: Request) -> DeviceLease:
        if request.id in self.live:
            raise ValueError(f"request {request.id!r} is admitted already")
        if request.rows_needed > ROWS:
            raise ValueError(f"{request.id!r} needs {request.rows_needed} rows; a slot has {ROWS}")
        if not self.free and not self.leaving:
            raise PoolFull(f"all {SLOTS} slots are in use")
        self._tick()
        if not self.free:
            self.settle()
        slot = min(self.free)
        self.free.remove(slot)
        lease = DeviceLease(self, request, slot, self._load(request, slot))
        self.live[request.id] = lease
        return lease

    def release(self, lease: DeviceLease) -> None:
        if self.live.get(lease.request.id) is not lease:
            raise ValueError(f"the lease of {lease.request.id!r} was given back already")
        del self.live[lease.request.id]
        waiting = any(slot == lease.slot for _, slot, _ in self.queue)
        if waiting and self.fault != "slot_free_before_copy":
            self.leaving.add(lease.slot)
        else:
            self.free.add(lease.slot)
        self._tick()

    def settle(self) -> None:
        """Make all the copies now."""
        while self.queue:
            self._store()

    def write(
        self, lease: DeviceLease, layer: int, keys: Tensor, values: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Put new rows behind those of one layer and return all of its rows."""
        if self.live.get(lease.request.id) is not lease:
            raise ValueError(f"the lease of {lease.request.id!r} was given back")
        start = lease.lengths[layer]
        end = start + keys.shape[-2]
        if end > ROWS:
            raise ValueError(f"a slot has {ROWS} rows, {lease.request.id!r} wants {end}")
        rows = self.device[lease.slot, layer]
        rows[0, :, start:end] = keys[0].detach()
        rows[1, :, start:end] = values[0].detach()
        lease.lengths[layer] = end
        if layer == self.num_layers - 1:
            self._tick()
        if min(lease.lengths) >= len(lease.request.tokens) and not lease.stored:
            lease.stored, key = True, self._key(lease.request)
            if key is not None and key in self.host:
                self.host.move_to_end(key)
            elif key is not None and all(queued != key for _, _, queued in self.queue):
                self.queue.append((self.clock + DELAY, lease.slot, key))
        return rows[:1, :, :end].clone(), rows[1:, :, :end].clone()

    def _key(self, request: Request) -> HostKey | None:
        context = known(request.context)
        if context is None:
            return None
        if self.fault == "untagged_context":
            return tuple(sorted(value for _, value in context)), request.tokens
        return context, request.tokens

    def _tick(self) -> None:
        self.clock += 1
        while self.queue and self.queue[0][0] <= self.clock:
            self._store()

    def _store(self) -> None:
        """Copy the first prompt of the queue to the host; the oldest there go to make room."""
        _, slot, key = self.queue.popleft()
        length = len(key[1])
        while sum(len(tokens) for _, tokens in self.host) + length > HOST_ROWS:
            self.host.popitem(last=False)
        self.host[key] = self.device[slot, :, :, :, :length].flatten().clone()
        if slot in self.leaving:
            self.leaving.remove(slot)
            self.free.add(slot)

    def _load(self, request: Request, slot: int) -> int:
        """Copy the longest stored prefix into a slot; how many rows that is."""
        wanted = self._key(request)
        fitting: dict[HostKey, int] = {}
        for key in self.host:
            if wanted is not None and key[0] == wanted[0]:
                pairs = zip(key[1], request.tokens[:-1])  # the last one is left to compute
                fitting[key] = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        best = max(fitting.values(), default=0)
        if best == 0:
            return 0
        found = max(fitting, key=fitting.__getitem__)
        self.host.move_to_end(found)
        length = len(found[1])
        flat = self.host[found].view(self.num_layers, 2, -1)
        if self.fault == "flat_prefix":
            flat, length = flat[..., : flat.shape[-1] // length * best], best
        rows = flat.unflatten(-1, (self.heads, length, -1))
        self.device[slot, :, :, :, :best] = rows[..., :best, :]
        return best


def build(config: LlamaConfig, fault: str | None = None) -> OffloadPool:
    """A fresh pool, with one fault or none."""
    if fault is not None and fault not in FAULTS:
        raise ValueError(f"unknown fault {fault!r}; choose from {', '.join(FAULTS)}")
    return OffloadPool(config, fault)
