"""SimpleCachePool: slots, as naive servers build them; it can be told to collide."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import Cache, PretrainedConfig

from kvlab.pools.contract import Lease, Owner, PoolFull
from kvlab.pools.events import EventKind, EventLog
from kvlab.pools.store import Store, kv_shape
from kvlab.pools.view import SlotLayer
from kvlab.request import Request

Collision = Literal["overwrite", "append"]


class Slot:
    """Preallocated rows for one request at a time.

    Attributes:
        key: `(num_layers, num_heads, max_seq_len, head_dim)`, a view of the pool's store.
        value: The same for values.
        length: Rows written by the request that wrote last: the slot's length pointer.
        generation: How often this slot has been handed out.
        lease: The last hold on it.
    """

    def __init__(self, id: int, store: Store) -> None:
        self.id = id
        self.key: Float[Tensor, "L G N D"] = store.key[id]
        self.value: Float[Tensor, "L G N D"] = store.value[id]
        self.owners = store.owners[id]
        self.length = 0
        self.generation = 0
        self.lease: SlotLease | None = None


class SlotLease:
    """One request's hold on a slot; writes are signed with its name."""

    layer_type = SlotLayer

    def __init__(self, pool: SimpleCachePool, request: Request, slot: Slot) -> None:
        self.pool, self.request, self.slot = pool, request, slot
        self.generation = slot.generation
        slot.lease = self
        self.num_cached_tokens = 0
        # This request's own write pointer, one entry a layer. It starts where the slot's length
        # stands: 0 after a reset, and behind somebody else's rows where the reset was forgotten.
        self.counter = [slot.length] * slot.key.shape[0]
        self.announced: list[int] = []
        self.cache = Cache(
            layers=[
                self.layer_type(slot.key[i], slot.value[i], self.counter, i, self)
                for i in range(len(self.counter))
            ]
        )

    def announce(self, tokens: list[int]) -> None:
        """Say which tokens the next forward pass writes, for the record of owners."""
        self.announced = list(tokens)

    def wrote(self, start: int, count: int) -> None:
        """Sign rows `start` to `start + count - 1` and move the slot's length behind them."""
        tokens = self.announced if len(self.announced) == count else [-1] * count
        for offset, token in enumerate(tokens):
            row = start + offset
            self.slot.owners[row] = Owner(self.request.id, self.generation, row, token)
        self.slot.length = start + count
        self.pool.log("write", self.request, self.slot, start, count, tokens)
        self.pool.log("read", self.request, self.slot, 0, start + count)

    def owners(self) -> list[Owner | None]:
        """Who wrote each row last, up to this lease's own pointer."""
        return self.slot.owners[: self.counter[0]]

    def foreign(self) -> list[bool]:
        """Rows that somebody else wrote last, or this request in an earlier life."""
        mine = (self.request.id, self.generation)
        return [owner is None or owner[:2] != mine for owner in self.owners()]


class SimpleCachePool:
    """A fixed number of slots, each for one request.

    Two requests get one slot only where `collide` (or `assign` with `sharing`) asks for it. Naive
    servers make this mistake in two ways:

    - "overwrite": the slot's length is reset for a newcomer although the first request still reads
      it. Both write the same rows from row 0 on, the later one wins.
    - "append": the slot's length is not reset. The newcomer starts behind the rows that are there
      and reads them as its own past. If the first request goes on, its next tokens land on the
      rows where the newcomer has put its prompt.

    Args:
        num_slots: How many requests fit.
        num_layers: Layers of the model.
        num_heads: Key/value heads of the model (fewer than query heads in grouped-query models).
        head_dim: Dimension of a head.
        max_seq_len: Rows of a slot: prompt and generated tokens.
        nan_fill: Debug mode. Rows that belong to nobody, never written or released, hold NaN, so
            that reading one cannot go unnoticed.

    Attributes:
        events: A log of every operation, if you give it one; else `None`.
    """

    lease_type = SlotLease
    slot_type = Slot

    def __init__(
        self,
        num_slots: int,
        num_layers: int,
        num_heads: int,
        head_dim: int,
        max_seq_len: int,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
        nan_fill: bool = False,
    ) -> None:
        self.store = Store(num_slots, num_layers, num_heads, max_seq_len, head_dim, dtype, device)
        self.slots = [self.slot_type(i, self.store) for i in range(num_slots)]
        self.assignment: dict[str, int] = {}
        self._leases: dict[str, SlotLease] = {}
        self._collisions: dict[str, tuple[str, Collision]] = {}
        self._last_slot: dict[str, int] = {}  # also of requests that have left
        self.events: EventLog | None = None
        self.nan_fill = nan_fill
        if nan_fill:
            self.store.key.fill_(torch.nan)
            self.store.value.fill_(torch.nan)

    @classmethod
    def for_model(
        cls,
        config: PretrainedConfig,
        num_slots: int,
        max_seq_len: int,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
        nan_fill: bool = False,
    ) -> SimpleCachePool:
        """A pool with the shape that a model's configuration asks for."""
        return cls(num_slots, *kv_shape(config), max_seq_len, dtype, device, nan_fill)

    @property
    def max_seq_len(self) -> int:
        return self.store.key.shape[3]

    def collide(self, newcomer: str, victim: str, how: Collision) -> None:
        """Switch the defect on: when `newcomer` is admitted it gets the slot of `victim`.

        It does so while the victim is served and after it has left; if the victim was never here,
        the newcomer gets a free slot like everybody else.

        Raises:
            ValueError: Unknown kind of collision, or a request that would collide with itself.
        """
        if how not in ("overwrite", "append"):
            raise ValueError(f"unknown collision {how!r}; use 'overwrite' or 'append'")
        if newcomer == victim:
            raise ValueError(f"request {newcomer!r} cannot collide with itself")
        self._collisions[newcomer] = (victim, how)

    def assign(self, request_id: str, slot_id: int, sharing: Collision | None = None) -> Slot:
        """Map a request to a slot; its length is reset unless `sharing` is "append".

        Raises:
            KeyError: No such slot.
            ValueError: The slot is in use and `sharing` does not ask for it, or the request has a
                slot already.
        """
        if not 0 <= slot_id < len(self.slots):
            raise KeyError(f"no slot {slot_id}; this pool has slots 0 to {len(self.slots) - 1}")
        if request_id in self.assignment:
            raise ValueError(
                f"request {request_id!r} already has slot {self.assignment[request_id]}"
            )
        holders = [r for r, s in self.assignment.items() if s == slot_id]
        if holders and sharing is None:
            raise ValueError(
                f"slot {slot_id} is in use by {', '.join(holders)}; release it first, or ask for "
                "the defect with sharing='overwrite' or sharing='append'"
            )
        return self._take(request_id, self.slots[slot_id], sharing != "append")

    def _take(self, request_id: str, slot: Slot, reset: bool = True) -> Slot:
        if reset:
            self.reset(slot)
        slot.generation += 1
        self.assignment[request_id] = self._last_slot[request_id] = slot.id
        return slot

    def reset(self, slot: Slot) -> None:
        """Set the length pointer of a slot back, so that its next owner begins at row 0."""
        self.log("reset", None, slot, 0, slot.length)
        slot.length = 0

    def free_slot(self, request: Request) -> int | None:
        """The slot that `request` gets: the first that nobody has, `None` if all are in use."""
        used = set(self.assignment.values())
        return next((s.id for s in self.slots if s.id not in used), None)

    def get(self, request_id: str) -> Slot:
        """The slot of a request.

        Raises:
            KeyError: The request has none.
        """
        if request_id not in self.assignment:
            raise KeyError(f"request {request_id!r} has no slot; admit or assign it first")
        return self.slots[self.assignment[request_id]]

    def admit(self, request: Request) -> SlotLease:
        """Give `request` a free slot, or the victim's where a collision was asked for.

        Raises:
            PoolFull: No slot is free.
            ValueError: The request does not fit into a slot, or its id is taken.
        """
        victim, how = self._collisions.get(request.id, (None, None))
        shared = self._last_slot.get(victim) if victim else None
        start = self.slots[shared].length if shared is not None and how == "append" else 0
        if start + request.rows_needed > self.max_seq_len:
            raise ValueError(
                f"request {request.id!r} needs {request.rows_needed} rows from row {start} on, "
                f"a slot has {self.max_seq_len}"
            )
        if request.id in self.assignment:
            raise ValueError(f"request id {request.id!r} is already admitted; ids must be unique")
        if shared is not None:
            slot = self.assign(request.id, shared, sharing=how)
        else:
            free = self.free_slot(request)
            if free is None:
                raise PoolFull(f"all {len(self.slots)} slots are in use; release a request first")
            slot = self._take(request.id, self.slots[free])
        lease = self.lease_type(self, request, slot)
        self._leases[request.id] = lease
        self.log("admit", request, slot, slot.length, 0)
        return lease

    def release(self, lease: Lease | str) -> None:
        """Take the slot back; its rows stay as they are until the next owner writes them.

        Args:
            lease: A lease, or the id of a request that was assigned without one.

        Raises:
            KeyError: It is not held (released twice, or of another pool).
        """
        if isinstance(lease, str):
            request_id = lease if lease in self.assignment else None
        else:
            request_id = next((r for r, held in self._leases.items() if held is lease), None)
        if request_id is None:
            raise KeyError("this lease is not held here: released twice, or of another pool")
        held = self._leases.pop(request_id, None)
        slot = held.slot if held is not None else self.get(request_id)
        self.assignment.pop(request_id, None)
        if held is not None:
            self.log("release", held.request, slot, 0, held.counter[0])
        if self.nan_fill and slot.id not in self.assignment.values():
            slot.key.fill_(torch.nan)
            slot.value.fill_(torch.nan)

    def log(
        self,
        kind: EventKind,
        request: Request | None,
        slot: Slot,
        start: int,
        length: int,
        tokens: Sequence[int] | None = None,
    ) -> None:
        """Record an operation, where somebody has given this pool a log."""
        if self.events is not None:
            name, context = (request.id, request.context) if request else ("", ())
            size = self.max_seq_len
            self.events.record(kind, name, [slot.id], start, length, size, tokens, context)
