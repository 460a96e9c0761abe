"""Faults of forks, truncations and parking, and the one that nobody had thought of.

They stand apart from the catalogue: the examinations of notebooks 06 and 08 play none of these
moves, and they are silent on the last one.
"""

from __future__ import annotations

from torch import Tensor

from kvlab.faults.catalogue import Delayed, PoolType, fault
from kvlab.faults.lifetime import Careless
from kvlab.faults.split import SplitManager, WalksOn
from kvlab.pools import QuantisedSlotPool, SimpleCachePool, TieredCachePool
from kvlab.pools.blocks import BlockTable
from kvlab.pools.quantised import QuantisedArena
from kvlab.pools.slots import SlotLease
from kvlab.pools.tiered import TieredLease

EXTRAS: dict[str, PoolType] = {}
"""Faults that need a fork, a truncation or parking to show, and "walks on after a split"."""


class UncountedFork(Careless):
    def fork(self, source: BlockTable, hit: int, rows: int) -> BlockTable:
        table = super().fork(source, hit, rows)
        if hit % self.block_size:
            self.ref_count[source.blocks[hit // self.block_size]] -= 1  # BUG: both will write it
        return table


@fault("fork shares a writable block", "lifetime", ["MinivLLM #70"], EXTRAS)
class UncountedForkPool(TieredCachePool):
    """The block in which a fork ends is handed over without being counted, so nobody copies it.

    Reported as counts that start too low for shared blocks. The user sees one sample's words in
    another sample. Evidence: two owners write one block; rows change under their reader.
    """

    manager_type = UncountedFork


@fault("truncate frees a shared block", "lifetime", ["SGLang PR #38480"], EXTRAS)
class TruncateFrees(TieredCachePool):
    """Taking rows back frees their blocks, whoever else reads them.

    Reported for locks and counts that a shortened entry does not inherit. The user's fork reads
    what somebody else wrote since. Evidence: a place is given while another request holds it.
    """

    manager_type = Careless

    def truncate(self, lease: TieredLease, length: int) -> None:
        super().truncate(lease, length)
        behind = lease.table.blocks[-(-length // self.arena.block_size) :]
        fresh = self.blocks.allocate(len(behind))
        for block in behind:
            self.blocks.ref_count[block] = 0  # BUG: a fork, or the tree, may hold it
        kept = lease.table.blocks[: len(lease.table.blocks) - len(behind)]
        lease.table.blocks = [*kept, *fresh]


@fault("truncate leaves the rows", "stale state", ["mlx-lm PR #1109"], EXTRAS)
class TruncateDoesNothing(SimpleCachePool):
    """A cache that cannot be shortened says nothing, and the rejected rows stay.

    Reported as a trim that is a no-op. The user sees an answer that was continued from tokens that
    were thrown away. Evidence: the next write does not start where the rows should end.
    """

    def truncate(self, lease: SlotLease, length: int) -> None:
        pass  # BUG: nothing is taken back


@fault("truncate keeps the hash", "stale state", (), EXTRAS)
class TruncateKeepsHash(TieredCachePool):
    """Rows are taken back and written anew, and still stand under the tokens that they once had.

    The next user with the old prompt is granted rows of the new one. Evidence: a hit whose rows are
    not those of its tokens.
    """

    def truncate(self, lease: TieredLease, length: int) -> None:
        intact = lease.intact
        super().truncate(lease, length)
        lease.intact = intact  # BUG: what is written from here on may be something else


@fault("resume at the old place", "lifetime", ["vLLM #52360"], EXTRAS)
class ResumesInPlace(SimpleCachePool):
    """A parked request comes back to the slot that it had, whoever is there by now.

    Reported as preemption whose bytes end under another's key. Both users see each other's text.
    Evidence: two owners of one slot in the log, only after somebody was parked.
    """

    def resume(self, lease: SlotLease) -> None:
        old = lease.slot
        super().resume(lease)
        new, lease.slot = lease.slot, old  # BUG: somebody may have it by now
        self.arena.copy(new.id, old.id, lease.length)
        old.lease, old.length = lease, lease.length
        self._assign(lease.request, old)


class CodesTravelAlone(QuantisedArena):
    @property
    def parts(self) -> list[Tensor]:
        return [self.key, self.value]  # BUG: a row is codes and scales


@fault("park loses the scale", "scale", ["SGLang PR #24198"], EXTRAS)
class ParkLosesScale(QuantisedSlotPool):
    """Codes are moved to host memory and back, their scales are not.

    Reported as scales that exist on one path only. The user sees a wrong answer after a preemption.
    Evidence: own rows times a factor, only after somebody was parked.
    """

    arena_type = CodesTravelAlone


@fault("park races with a write", "lifetime", ["vLLM #52360", "vllm-ascend #14055"], EXTRAS)
class ParkRaces(Delayed, SimpleCachePool):
    """The slot is free before its rows have left it; whoever gets it writes under the transfer.

    Reported as preemption that frees blocks an asynchronous store still reads. The parked user
    comes back with another's rows. Evidence: gone when the free waits for the transfer.
    """

    def park(self, lease: SlotLease) -> None:
        rows = lease.rows(0, lease.length)
        super().park(lease)

        def move() -> None:  # BUG: whose rows are these by now?
            if lease.parked is not None:
                lease.parked = (self.arena.take_out(rows)[0], lease.parked[1])

        self.later(3, move)


@fault("walks on after a split", "key", (), EXTRAS)
class WalksOnPool(TieredCachePool):
    """The radix tree that this pool had at first, whole: a walk goes on below a node that was split
    meanwhile, and the tail of one prompt is stored behind another's tokens.

    Nobody reported it: readers found it in this project. The user is granted rows that were
    computed behind a prompt he never sent. Evidence: a hit longer than any equal prefix.
    """

    manager_type, tree_type = SplitManager, WalksOn
