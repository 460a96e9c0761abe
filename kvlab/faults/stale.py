"""Stale state: something of a request outlives it and meets the next one."""

from __future__ import annotations

from kvlab.faults.catalogue import fault
from kvlab.faults.lifetime import Careless
from kvlab.pools import SimpleCachePool, TieredCachePool
from kvlab.pools.slots import Slot
from kvlab.pools.tiered import TieredLease
from kvlab.request import Request


@fault("stale length", "stale state", ["DeepSpeed PR #2669", "litgpt PR #1596"])
class StaleLength(SimpleCachePool):
    """The length pointer of a slot is not set back for its next owner.

    Reported as: the second generation of a session is odd, the first never. The user sees an
    answer that goes on from somebody else's text. Evidence: the length log jumps at admission, the
    first write does not start at 0, rows below it are foreign.
    """

    def reset(self, slot: Slot) -> None:
        pass  # BUG: slot.length = 0 is missing


@fault("abort skips the reset", "stale state", ["litgpt PR #1596", "mlx-lm PR #1109"])
class AbortSkipsReset(SimpleCachePool):
    """The length is set back on the path of a complete answer only.

    Reported as: cleared incompletely, and back again after the first mend. The user sees a foreign
    answer now and then, always after somebody pressed stop. Evidence: as for a stale length, but
    only behind an abort.
    """

    def reset(self, slot: Slot) -> None:
        last = slot.lease
        if last is None or last.counter[0] >= last.request.rows_needed:  # BUG: not after an abort
            super().reset(slot)


@fault("recycled pointer", "stale state", ["vllm-mlx #380", "mlx-lm #1423"])
class RecycledPointer(TieredCachePool):
    """Lease objects are recycled, and the offset in the last block stays in them.

    Reported as: an offset that was lowered or kept while the arrays were not. The user sees an
    answer on another topic, or a wrong one. Evidence: the first write does not start behind the
    hit, and the rows before it were never written by this request.
    """

    last: TieredLease | None = None

    def admit(self, request: Request) -> TieredLease:
        lease = super().admit(request)
        if self.last is not None and self.last.closed:
            size = self.arena.block_size
            room = lease.room - request.rows_needed
            lease.counter[:] = [lease.length + min(self.last.length % size, room)] * len(
                lease.counter
            )  # BUG: counts on from the recycled lease
        self.last = lease
        return lease


@fault("table by name", "stale state", ["deepsparse PR #1224"])
class TableByName(TieredCachePool):
    """Block tables are kept by request name; who comes back gets the old table.

    Reported as: two parties hold the same cache object after a hand-over, and resetting one no
    longer empties the other. The user sees another's text after a retry. Evidence: use after free
    in the event log, and only for a name that was here before.
    """

    manager_type = Careless

    def admit(self, request: Request) -> TieredLease:
        lease = super().admit(request)
        tables: dict[str, list[int]] = self.__dict__.setdefault("tables", {})
        table = lease.table
        old = tables.setdefault(request.id, table.blocks)
        if old is not table.blocks and len(old) >= len(table.blocks):
            self.blocks.release([*table.blocks, *table.spare])
            table.blocks, table.spare = list(old), []  # BUG: these blocks were given back
            for block in old:
                self.blocks.ref_count[block] = max(1, self.blocks.ref_count[block])
        return lease
