"""TieredCachePool: a read-only prefix tier, private blocks, and scratch; the first write copies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PretrainedConfig

from kvlab.pools.blocks import BlockArena, Scratch
from kvlab.pools.contract import Lease, PoolFull
from kvlab.pools.events import EventKind, EventLog
from kvlab.pools.radix import PrefixTree
from kvlab.pools.store import kv_shape
from kvlab.pools.tiered_batch import TieredBatch
from kvlab.pools.tiered_lease import TieredLease
from kvlab.request import Request


class TieredCachePool:
    """Blocks for many requests in three tiers.

    - *Prefix tier*: finished prompts in a radix tree, read-only, matched token by token within one
      context (`Request.context`). An unknown context (`None`, or a field whose value is `None`)
      neither finds nor leaves anything.
    - *Private tier*: blocks with a reference count. Whoever writes into a block that others hold
      copies it first.
    - *Scratch*: one layer's gathered rows, where they do not lie side by side.

    All rows that a request may ever need are set aside at its admission, so that it never stops
    half-way for want of memory.

    Args:
        num_blocks: Blocks of all tiers together.
        block_size: Rows in a block.
        share: Whether finished prompts are kept and found. Without, every block is private.
        nan_fill: Debug mode: rows of nobody hold NaN.

    Attributes:
        events: A log of every operation, if you give it one; else `None`.
    """

    arena_type: type[BlockArena] = BlockArena
    tree_type, scratch_type = PrefixTree, Scratch
    lease_type, batch_type = TieredLease, TieredBatch

    def __init__(
        self,
        num_blocks: int,
        num_layers: int,
        num_heads: int,
        head_dim: int,
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
        share: bool = True,
        nan_fill: bool = False,
    ) -> None:
        self.arena = self.arena_type(
            num_blocks, block_size, num_layers, num_heads, head_dim, dtype, device, nan_fill
        )
        self.tree = self.tree_type(self.arena)
        self.scratch = self.scratch_type()
        self.share = share
        self.leases: dict[str, TieredLease] = {}
        self.admissions = 0
        self.events: EventLog | None = None

    @classmethod
    def for_model(
        cls, config: PretrainedConfig, num_blocks: int, **options: Any
    ) -> TieredCachePool:
        """A pool with the shape that a model's configuration asks for."""
        return cls(num_blocks, *kv_shape(config), **options)

    def admit(self, request: Request) -> TieredLease:
        """Find the longest known prefix of `request`, and set blocks aside for the rest.

        At least the last token of the prompt is left to compute, since its logits are needed.

        Raises:
            PoolFull: Too few blocks are free or can be evicted.
            ValueError: The request can never fit, or its id is taken.
        """
        arena, size = self.arena, self.arena.block_size
        total = -(-request.rows_needed // size)
        if total > arena.num_blocks:
            raise ValueError(
                f"request {request.id!r} needs {total} blocks of {size} rows, the pool has "
                f"{arena.num_blocks}"
            )
        if request.id in self.leases:
            raise ValueError(f"request id {request.id!r} is already admitted; ids must be unique")
        longest = 0
        found: list[int] = []
        if self.share:
            longest, found = self.tree.match(request.context, request.tokens[:-1])
        # A shared prefix keeps a whole node of the tree from being evicted, and a block that is
        # shared in part costs one more. So a shorter hit, or none, may fit where the longest does
        # not: what fits into an empty pool always does.
        for hit in dict.fromkeys((longest, longest - longest % size, 0)):
            shared = found[: -(-hit // size)]
            needed = total - hit // size
            arena.retain(shared)  # from here on nobody evicts them
            if self._make_room(needed):
                break
            arena.release(shared)
        else:
            raise PoolFull(
                f"request {request.id!r} needs {needed} blocks, {len(arena.free)} are free and "
                f"{self.tree.evictable} can be evicted; release a request first"
            )
        own = arena.allocate(needed)
        # A prefix may end inside of a block. That block is read until the first write, which
        # copies it into the first of the request's own blocks.
        in_part = 1 if hit % size else 0
        self.admissions += 1
        lease = self.lease_type(self, request, [*shared, *own[in_part:]], own[:in_part], hit)
        self.leases[request.id] = lease
        if hit:
            self.log("hit", request, shared, 0, hit, request.tokens[:hit])
        self.log("admit", request, own, lease.length, 0)
        return lease

    def make_private(self, lease: TieredLease, row: int) -> None:
        """Copy the block of `row` if others hold it too: one count less there, one block here."""
        arena, size = self.arena, self.arena.block_size
        index = row // size
        if index >= len(lease.table) or arena.ref_count[lease.table[index]] == 1:
            return
        target = lease.spare.pop() if lease.spare else self._one_more(lease)
        arena.copy(lease.table[index], target, row % size)
        self.log("copy", lease.request, [lease.table[index], target], row - row % size, row % size)
        arena.release([lease.table[index]])
        lease.table[index] = target

    def _one_more(self, lease: TieredLease) -> int:
        self._evict(1)
        if not self.arena.free:
            raise PoolFull(f"no block for a copy of {lease.request.id!r}; release a request first")
        block = self.arena.allocate(1)
        self.log("admit", lease.request, block, lease.length, 0)
        return block[0]

    def _make_room(self, needed: int) -> bool:
        """Whether so many blocks are free now, after evicting prefixes without readers."""
        if needed > len(self.arena.free) + self.tree.evictable:
            return False
        self._evict(needed)
        return needed <= len(self.arena.free)

    def _evict(self, count: int) -> None:
        """Make room for `count` blocks, as far as there are prefixes without readers."""
        for node in self.tree.evict(count):
            self.log("evict", None, node.blocks, node.start, len(node.tokens))

    def publish(self, lease: TieredLease, whole: bool) -> None:
        """Put a completely written prompt into the prefix tier, from where it is only read.

        While the request lives these are its full blocks; the last one, which it still writes, is
        added at its release, when nobody is left who could write it.
        """
        if not self.share or not lease.prompt_is_written:
            return
        tokens, size = lease.request.tokens, self.arena.block_size
        end = len(tokens) if whole else len(tokens) // size * size
        if end:
            self.tree.insert(lease.request.context, tokens[:end], lease.table)

    def release(self, lease: Lease) -> None:
        """Give every block back once, at the end of a request or at its abort, at any step.

        Raises:
            KeyError: It is not held (released twice, or of another pool).
        """
        held = next((x for x in self.leases.values() if x is lease), None)
        if held is None:
            raise KeyError("this lease is not held here: released twice, or of another pool")
        self.publish(held, whole=True)
        del self.leases[held.request.id]
        self.log("release", held.request, [*held.table, *held.spare], 0, held.length)
        self.arena.release([*held.table, *held.spare])
        held.closed = True

    def batch(
        self, leases: Sequence[TieredLease], counts: Sequence[int], shared: bool = True
    ) -> TieredBatch | None:
        """The leases as one cache; `None` where a lone lease is its own best cache.

        Args:
            shared: Read a common prefix once for all its readers. Otherwise every request's rows
                are gathered, as if they were private.
        """
        if len(leases) == 1 and not (shared and leases[0].num_cached_tokens):
            return None
        return self.batch_type(self.arena, self.scratch, leases, counts, shared)

    def log(
        self,
        kind: EventKind,
        request: Request | None,
        blocks: Sequence[int],
        start: int,
        length: int,
        tokens: Sequence[int] | None = None,
    ) -> None:
        """Record an operation, where somebody has given this pool a log."""
        if self.events is not None:
            name, context = (request.id, request.context) if request else ("", ())
            size = self.arena.block_size
            self.events.record(kind, name, blocks, start, length, size, tokens, context)

    def check(self) -> None:
        """Assert what must always hold; for tests and for the curious.

        Raises:
            AssertionError: A count is wrong, a block is lost, or two could write one block.
        """
        arena = self.arena
        by_leases = Counter(b for x in self.leases.values() for b in (*x.table, *x.spare))
        by_nodes = Counter(b for n in self.tree.nodes() for b in n.blocks)
        for block, count in enumerate(arena.ref_count):
            assert count == by_leases[block] + by_nodes[block], f"block {block}: wrong count"
            assert self.tree.held[block] == by_nodes[block], f"block {block}: wrong tree count"
        writable = Counter(
            block
            for x in self.leases.values()
            for block in (*x.table[x.length // arena.block_size :], *x.spare)
            if arena.ref_count[block] == 1
        )
        assert not writable or max(writable.values()) == 1, "a block is writable by two"
        for node in self.tree.nodes():
            assert node.tokens, "a node without tokens"
            rows = range(node.start // arena.block_size, -(-node.end // arena.block_size))
            assert len(node.blocks) == len(rows), "a node with too many or too few blocks"
