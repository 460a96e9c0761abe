"""Lifetime: rows are freed, given, published, read or written at the wrong moment."""

from __future__ import annotations

from collections.abc import Sequence

from kvlab.faults.catalogue import Delayed, fault
from kvlab.pools import Lease, SimpleCachePool, TieredCachePool
from kvlab.pools.blocks import BlockManager, BlockTable
from kvlab.pools.slots import Slot
from kvlab.pools.tiered import TieredLease
from kvlab.request import Context, Request


@fault("check then take", "lifetime", ["LMCache #1858", "TensorRT-LLM PR #15349"])
class CheckThenTake(Delayed, SimpleCachePool):
    """A slot is looked up now and marked as taken a moment later: the concurrent write race.

    Reported wherever an allocator is not atomic. The user sees random jitter: which of two
    requests wins changes from run to run. Evidence: two owners of one slot in the log, gone under
    a lock that covers the whole admission.
    """

    def free_slot(self, request: Request) -> int | None:
        marked: set[str] = self.__dict__.setdefault("marked", set())
        used = {slot for name, slot in self.assignment.items() if name in marked}
        self.later(2, lambda: marked.add(request.id))  # BUG: look and take are two operations
        return next((s.id for s in self.slots if s.id not in used), None)


@fault("lock covers alloc only", "lifetime", ["LMCache #1858"])
class LockCoversAllocOnly(Delayed, SimpleCachePool):
    """The lock is taken to hand a slot out, but not to take it back.

    Reported as: free is reached through another allocator that knows no lock. A free that read the
    table before an admission writes it back after it, and the newcomer's slot counts as free. The
    user sees jitter that "the lock did not help against". Evidence: gone under a lock that covers
    every writer.
    """

    def release(self, lease: Lease) -> None:
        seen = dict(self.assignment)
        super().release(lease)

        def write_back() -> None:  # BUG: overwrites what was assigned in between
            newer = {r: s for r, s in self.assignment.items() if r not in seen}
            self.assignment = {r: s for r, s in self.assignment.items() if r not in newer}

        self.later(3, write_back)


@fault("wrong from eight requests on", "lifetime", ["vLLM #42571"])
class WrongFromEightOn(SimpleCachePool):
    """The allocator is right for seven requests and gives the eighth a slot that is in use.

    The article's own lesson: a suite of two requests passed. Double booking of one place is
    reported often. The user sees another's text under load only. Evidence: two owners of one slot
    in the log, from eight concurrent requests on.
    """

    def free_slot(self, request: Request) -> int | None:
        free = super().free_slot(request)
        return free if free is None else free % 7  # BUG: a table of seven entries


@fault("writer outlives an abort", "lifetime", ["SGLang #24527", "dynamo #826", "Z.ai GLM-5"])
class WriterOutlivesAbort(Delayed, SimpleCachePool):
    """An abort frees the slot while a transfer is still writing into it.

    Reported from production: pages freed on abort, the prefill writer still sending, the next
    owner overwritten. The user sees garbled or foreign text after somebody else's abort. Evidence:
    rows change under their owner; gone when the free waits for the writer.
    """

    def release(self, lease: Lease) -> None:
        super().release(lease)
        held = self.slots_of(lease)
        if held is not None:
            slot, rows = held
            key, value = slot.key[:, :, :rows].clone(), slot.value[:, :, :rows].clone()

            def arrive() -> None:  # BUG: nobody asked whose slot it is by now
                slot.key[:, :, :rows], slot.value[:, :, :rows] = key, value

            self.later(4, arrive)

    def slots_of(self, lease: Lease) -> tuple[Slot, int] | None:
        """Slot and rows of an aborted lease."""
        counter, request = lease.counter, lease.request  # type: ignore[attr-defined]
        aborted = 0 < counter[0] < request.rows_needed
        return (lease.slot, counter[0]) if aborted else None  # type: ignore[attr-defined]


@fault("late clearing", "lifetime", ["llama.cpp #28056", "vllm-ascend #14055"])
class LateClearing(Delayed, SimpleCachePool):
    """A slot is cleared in the background, and the clearing comes after the next owner's write.

    Reported as a host that rewrites a buffer while the step before still uses it. The user sees an
    answer that forgot its prompt. Evidence: rows change under their owner; gone under a full lock.
    """

    def reset(self, slot: Slot) -> None:
        super().reset(slot)
        used = slot.generation > 0

        def clear() -> None:
            slot.key.zero_()
            slot.value.zero_()

        if used:
            self.later(3, clear)  # BUG: the next owner does not wait for it


class ReadersOnly(BlockManager):
    def is_shared(self, block: int) -> bool:
        readers = sum(block in table.blocks for table in self.tables)
        return readers > 1  # BUG: the tree holds it too


@fault("last reader writes", "lifetime", ["MinivLLM #70"])
class LastReaderWrites(TieredCachePool):
    """A prefix block with one reader left counts as private, although the tree still lists it.

    The counting rule as the article states it: "a writer that sees a count above 1 copies". Here
    the pool's own hold is not counted. The user gets a prefix that ends in another's words, much
    later. Evidence: a hit whose rows are not those that were stored.
    """

    manager_type = ReadersOnly


class NeverCopies(BlockManager):
    def make_private(self, table: BlockTable, start: int, end: int) -> None:
        pass  # BUG: nothing is copied


@fault("write without a copy", "lifetime", ["SGLang PR #38480"])
class WriteWithoutCopy(TieredCachePool):
    """The first write into a shared block goes into the block itself.

    The user sees the first words of another's question behind the shared prefix. Evidence: two
    owners write one block; rows change under a reader.
    """

    manager_type = NeverCopies


class Careless(BlockManager):
    """Blocks as in a server that runs without assertions."""

    def retain(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self.ref_count[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self.ref_count[block] = max(0, self.ref_count[block] - 1)


class FreeIgnoresCount(Careless):
    def release(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self.ref_count[block] = 0  # BUG: others may hold it


@fault("free ignores the count", "lifetime", ["LMCache PR #3130"])
class FreeIgnoresCountPool(TieredCachePool):
    """Giving a block back frees it, although readers are left.

    Reported for batched eviction. The user's shared prefix turns into somebody else's text.
    Evidence: a place is given twice; rows change under a reader.
    """

    manager_type = FreeIgnoresCount


@fault("freed twice", "lifetime", ["vLLM #42571", "TensorRT-LLM PR #14937"])
class FreedTwice(Delayed, TieredCachePool):
    """A release is carried out a second time, when the blocks have new owners.

    Reported as: one block listed twice, two later owners. The user sees foreign text under load.
    Evidence: a place is given twice in the log; gone when the second free comes before anybody
    else does.
    """

    manager_type = Careless

    def release(self, lease: TieredLease) -> None:
        super().release(lease)
        blocks = list(lease.table.blocks)
        self.later(3, lambda: self.blocks.release(blocks))  # BUG: given back already


class HoldsNothing(Careless):
    def publish(self, context: Context, tokens: Sequence[int], table: BlockTable) -> None:
        if self.share:
            self.tree.insert(context, tokens, table.blocks)  # BUG: listed, and not held


@fault("tree without a hold", "lifetime", ["SGLang PR #38480", "MinivLLM #70"])
class HoldsNothingPool(TieredCachePool):
    """The prefix tree lists blocks that it does not keep alive.

    Reported as: a count that starts at 0, or that a split node does not inherit. The user's hit
    brings rows that belong to another by now. Evidence: a hit whose rows are not those stored.
    """

    manager_type = HoldsNothing


class EvictsUnderReaders(Careless):
    def unread(self, block: int) -> bool:
        return True  # BUG: it may have readers

    def evict(self, count: int) -> None:
        for node in self.tree.evict(count, self.unread):
            self.effects.evicted(node)
            self.ref_count[node.block] = 0


@fault("evicted under a reader", "lifetime", ["SGLang PR #27631", "vLLM #52360"])
class EvictsUnderReadersPool(TieredCachePool):
    """Under memory pressure the oldest prefix goes, whether somebody reads it or not.

    Reported as nested eviction and as preemption during a store. The user sees foreign text when
    the pool is full. Evidence: freed under a reader in the log; right in a large pool.
    """

    manager_type = EvictsUnderReaders


@fault("read before the load ends", "lifetime", ["LMCache #207", "Z.ai GLM-5"])
class ReadBeforeLoad(Delayed, TieredCachePool):
    """A stored prefix is moved to another tier, and can be found before its rows are back.

    Reported as: retrieved while the same entry is still being written; no synchronisation between
    load and compute. The user gets an answer to a prompt with holes, under load only. Evidence: a
    hit on rows of nobody; right when requests come one after another, or under a full lock.
    """

    def publish(self, lease: TieredLease, whole: bool) -> None:
        super().publish(lease, whole)
        size = self.arena.block_size
        known = {node.block for node in self.blocks.tree.nodes()}
        stored = [b for b in lease.table.blocks if b in known]
        rows = [b * size + i for b in stored for i in range(size)]
        if whole and rows and lease.prompt_is_written:
            key, value = self.arena.key[:, :, rows].clone(), self.arena.value[:, :, rows].clone()
            self.arena.key[:, :, rows] = self.arena.value[:, :, rows] = 0.0

            def load() -> None:  # BUG: visible already
                self.arena.key[:, :, rows], self.arena.value[:, :, rows] = key, value

            self.later(3, load)


@fault("abort publishes", "lifetime", ["LMCache #207", "vLLM #52360"])
class AbortPublishes(TieredCachePool):
    """A prompt that was aborted half-way is stored as if it were complete.

    The user asks again and gets a hit on rows that were never computed. Evidence: a hit on rows
    that nobody has written, after an abort in the middle of a prefill.
    """

    def publish(self, lease: TieredLease, whole: bool) -> None:
        tokens, size = lease.request.tokens, self.arena.block_size
        end = len(tokens) if whole else len(tokens) // size * size
        # BUG: is the prompt written?
        self.blocks.publish(lease.request.context, tokens[:end], lease.table)
