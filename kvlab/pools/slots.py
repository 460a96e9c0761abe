"""SimpleCachePool: slots, as naive servers build them; it can be told to collide."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PretrainedConfig

from kvlab.pools.arena import Arena, kv_shape
from kvlab.pools.contract import Owner, PoolFull
from kvlab.pools.events import EventKind, EventLog
from kvlab.pools.lease import ArenaLease
from kvlab.request import Request

Collision = Literal["overwrite", "append"]


class Slot:
    """Preallocated rows for one request at a time.

    Attributes:
        key: `(num_layers, num_heads, max_seq_len, head_dim)`, a view of the pool's rows.
        value: The same for values.
        length: Rows written by the request that wrote last: the slot's length pointer.
        generation: How often this slot has been handed out.
        lease: The last hold on it.
    """

    def __init__(self, id: int, arena: Arena) -> None:
        self.id, self.arena = id, arena
        self.start, self.end = id * arena.block_size, (id + 1) * arena.block_size
        self.key: Float[Tensor, "L G N D"] = arena.key[:, :, self.start : self.end]
        self.value: Float[Tensor, "L G N D"] = arena.value[:, :, self.start : self.end]
        self.length = 0
        self.generation = 0
        self.lease: SlotLease | None = None

    @property
    def owners(self) -> list[Owner | None]:
        """Who wrote each row last."""
        return self.arena.owners[self.start : self.end]


class SlotLease(ArenaLease):
    """One request's hold on a slot.

    Its write pointer starts where the slot's length stands: at 0 after a reset, and behind somebody
    else's rows where the reset was forgotten.
    """

    def __init__(self, pool: SimpleCachePool, request: Request, slot: Slot) -> None:
        super().__init__(pool.arena, request, slot.generation, slot.length)
        self.pool, self.slot = pool, slot
        slot.lease = self

    @property
    def room(self) -> int:
        return self.arena.block_size

    def rows(self, start: int, end: int) -> list[int]:
        return list(range(self.slot.start + start, self.slot.start + end))

    def where(self, start: int, end: int) -> slice:
        return slice(self.slot.start + start, self.slot.start + end)

    def signed(self, start: int, end: int, tokens: list[int]) -> None:
        self.slot.length = end
        self.pool.log("write", self.request, self.slot, start, end - start, tokens)
        self.pool.log("read", self.request, self.slot, 0, end)


class SimpleCachePool:
    """A fixed number of slots, each for one request.

    Two requests get one slot only where `collide` asks for it. Naive servers make this mistake in
    two ways:

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
        assignment: The slot of each request that has one.
        leases: Who is here, parked ones included, by request id.
        events: A log of every operation, if you give it one; else `None`.
    """

    arena_type: type[Arena] = Arena
    lease_type = SlotLease

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
        self.arena = self.arena_type(
            num_slots, max_seq_len, num_layers, num_heads, head_dim, dtype, device, nan_fill
        )
        self.slots = [Slot(i, self.arena) for i in range(num_slots)]
        self.max_seq_len = max_seq_len
        self.assignment: dict[str, int] = {}
        self.leases: dict[str, SlotLease] = {}
        self._collisions: dict[str, tuple[str, Collision]] = {}
        self._last_slot: dict[str, Slot] = {}  # also of requests that have left
        self.events: EventLog | None = None

    @classmethod
    def for_model(
        cls, config: PretrainedConfig, num_slots: int, max_seq_len: int, *args: Any, **options: Any
    ) -> SimpleCachePool:
        """A pool with the shape that a model's configuration asks for."""
        return cls(num_slots, *kv_shape(config), max_seq_len, *args, **options)

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

    def admit(self, request: Request) -> SlotLease:
        """Give `request` a free slot, or the victim's where a collision was asked for.

        Raises:
            PoolFull: No slot is free.
            ValueError: The request does not fit into a slot, or its id is taken.
        """
        victim, how = self._collisions.get(request.id, ("", "overwrite"))
        shared = self._last_slot.get(victim)
        if shared is None or how == "overwrite":
            slot = self._room_for(request, shared)
            self.reset(slot)
        else:  # what is there stays, and counts as the newcomer's past
            slot = self._room_for(request, shared, shared.length)
        return self._take(request, slot)

    def _room_for(self, request: Request, slot: Slot | None = None, start: int = 0) -> Slot:
        if start + request.rows_needed > self.max_seq_len:
            raise ValueError(
                f"request {request.id!r} needs {request.rows_needed} rows from row {start} on, "
                f"a slot has {self.max_seq_len}"
            )
        if request.id in self.leases:
            raise ValueError(f"request id {request.id!r} is already admitted; ids must be unique")
        return slot or self._free_slot(request)

    def _free_slot(self, request: Request) -> Slot:
        free = self.free_slot(request)
        if free is None:
            raise PoolFull(f"all {len(self.slots)} slots are in use; release a request first")
        return self.slots[free]

    def _take(self, request: Request, slot: Slot) -> SlotLease:
        slot.generation += 1
        self._assign(request, slot)
        lease = self.leases[request.id] = self.lease_type(self, request, slot)
        self.log("admit", request, slot, slot.length, 0)
        return lease

    def _assign(self, request: Request, slot: Slot) -> None:
        self.assignment[request.id] = slot.id
        self._last_slot[request.id] = slot

    def reset(self, slot: Slot) -> None:
        """Set the length pointer of a slot back, so that its next owner begins at row 0."""
        self.log("reset", None, slot, 0, slot.length)
        slot.length = 0

    def free_slot(self, request: Request) -> int | None:
        """The slot that `request` gets: the first that nobody has, `None` if all are in use."""
        used = set(self.assignment.values())
        return next((s.id for s in self.slots if s.id not in used), None)

    def fork(self, lease: SlotLease, request: Request) -> SlotLease:
        """See `Forks`: a slot cannot be shared, so all rows are copied at once."""
        hit = lease.check_fork(request)
        source, target = lease.slot, self._room_for(request)
        self.reset(target)
        self.arena.copy(source.id, target.id, hit)
        target.length = hit
        self.log("fork", request, source, 0, hit, request.tokens[:hit])
        fork = self._take(request, target)
        self.log("copy", request, source, 0, hit, target=target)
        fork.num_cached_tokens, fork.granted = hit, fork.owners()
        return fork

    def truncate(self, lease: SlotLease, length: int) -> None:
        """See `Truncates`."""
        lease.shorten(length)
        if lease.slot.lease is lease:
            lease.slot.length = length
            self.arena.forget(lease.slot.start + length, lease.slot.end)
        self.log("truncate", lease.request, lease.slot, length, 0)

    def park(self, lease: SlotLease) -> None:
        """See `Parks`."""
        lease.check_usable()
        lease.parked = self.arena.take_out(lease.rows(0, lease.length))
        self.log("park", lease.request, lease.slot, 0, lease.length)
        self._leave(lease)

    def resume(self, lease: SlotLease) -> None:
        """See `Parks`: into any free slot."""
        parked = lease.check_parked()
        slot = lease.slot = self._free_slot(lease.request)
        self.reset(slot)
        slot.generation += 1
        slot.lease, slot.length = lease, lease.length
        self._assign(lease.request, slot)
        self.arena.put_back(lease.rows(0, lease.length), *parked)
        lease.parked = None
        self.log("resume", lease.request, slot, 0, lease.length)

    def release(self, lease: Any) -> None:
        """Take the slot back; its rows stay as they are until the next owner writes them.

        Raises:
            KeyError: It is not held (released twice, or of another pool).
        """
        if not any(x is lease for x in self.leases.values()):
            raise KeyError("this lease is not held here: released twice, or of another pool")
        del self.leases[lease.request.id]
        self.log("release", lease.request, lease.slot, 0, lease.length)
        if lease.parked is None:
            self._leave(lease)
        lease.closed = True

    def _leave(self, lease: SlotLease) -> None:
        self.assignment.pop(lease.request.id, None)
        slot = lease.slot
        if self.arena.nan_fill and slot.id not in self.assignment.values():
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
        target: Slot | None = None,
    ) -> None:
        """Record an operation, where somebody has given this pool a log."""
        if self.events is not None:
            name, context = (request.id, request.context) if request else ("", ())
            places = [slot.id] if target is None else [slot.id, target.id]
            size = self.max_seq_len
            self.events.record(kind, name, places, start, length, size, tokens, context)
