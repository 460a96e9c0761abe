"""TieredCachePool: a read-only prefix tier, private blocks, and scratch; the first write copies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import Cache, PretrainedConfig

from kvlab.pools.arena import Arena, Rows, kv_shape
from kvlab.pools.batch import TieredBatch
from kvlab.pools.blocks import BlockManager, BlockTable, Effects, are_neighbours
from kvlab.pools.contract import PoolFull
from kvlab.pools.events import EventKind, EventLog
from kvlab.pools.lease import ArenaLease
from kvlab.pools.prefix import Node, PrefixTree
from kvlab.request import Request


class TieredLease(ArenaLease):
    """One request's rows: a shared prefix that it may read, and private rows that it writes.

    Attributes:
        table: The blocks that it holds.
        intact: How many of the request's tokens lie where they should, as far as is known. Rows
            that were taken back may be written again with something else; these are not published.
    """

    def __init__(self, pool: TieredCachePool, request: Request, table: BlockTable) -> None:
        super().__init__(pool.arena, request, pool.admissions, table.hit)
        self.pool, self.table = pool, table
        self.num_cached_tokens = table.hit
        self.intact = len(request.tokens)
        self.granted = self.owners()

    @property
    def room(self) -> int:
        return len(self.table.blocks) * self.arena.block_size

    def rows(self, start: int, end: int) -> list[int]:
        size, blocks = self.arena.block_size, self.table.blocks
        return [blocks[r // size] * size + r % size for r in range(start, end)]

    def where(self, start: int, end: int) -> Rows:
        size, blocks = self.arena.block_size, self.blocks(start, end)
        if start == end:
            return slice(0, 0)
        if are_neighbours(blocks):
            first = blocks[0] * size + start % size
            return slice(first, first + end - start)
        return torch.tensor(self.rows(start, end), device=self.arena.key.device)

    def blocks(self, start: int, end: int) -> list[int]:
        """The blocks of this request's rows `start` to `end - 1`."""
        size = self.arena.block_size
        return self.table.blocks[start // size : -(-end // size)]

    def make_writable(self, start: int, end: int) -> None:
        self.pool.blocks.make_private(self.table, start, end)

    def signed(self, start: int, end: int, tokens: list[int]) -> None:
        for row, (said, token) in enumerate(
            zip(self.request.tokens[start:end], tokens, strict=False), start
        ):
            if token not in (-1, said):
                self.intact = min(self.intact, row)
        self.pool.log("write", self.request, self.blocks(start, end), start, end - start, tokens)
        self.pool.log("read", self.request, self.blocks(0, end), 0, end)

    def advance(self, layer: int, count: int) -> None:
        """A layer has written. The last one may complete the prompt, which is then published."""
        before = self.counter[layer]
        super().advance(layer, count)
        if layer == len(self.counter) - 1 and before < len(self.request.tokens) <= before + count:
            self.pool.publish(self, whole=False)

    @property
    def prompt_is_written(self) -> bool:
        """Whether every layer holds the whole prompt."""
        return min(self.counter) >= len(self.request.tokens)


class TieredCachePool(Effects):
    """Blocks for many requests in three tiers.

    - *Prefix tier*: finished prompts in a tree, read-only, matched token by token within one
      context (`Request.context`). An unknown context (`None`, or a field whose value is `None`)
      neither finds nor leaves anything.
    - *Private tier*: blocks with a reference count. Whoever writes into a block that others hold
      copies it first.
    - *Scratch*: one layer's gathered rows, where they do not lie side by side.

    Args:
        num_blocks: Blocks of all tiers together.
        block_size: Rows in a block.
        share: Whether finished prompts are kept and found. Without, only forks share.
        nan_fill: Debug mode: rows of nobody hold NaN.

    Attributes:
        blocks: Who holds which block; it decides, and this class carries out.
        arena: The rows.
        leases: Who is here, parked ones included, by request id.
        events: A log of every operation, if you give it one; else `None`.
    """

    arena_type: type[Arena] = Arena
    manager_type, tree_type = BlockManager, PrefixTree
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
        tree = self.tree_type(block_size)
        self.blocks = self.manager_type(num_blocks, block_size, share, self, tree)
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
        self._check_new(request)
        try:
            table = self.blocks.admit(request.context, request.tokens[:-1], request.rows_needed)
        except PoolFull as full:
            raise PoolFull(f"no room for request {request.id!r}: {full}") from None
        return self._take_in(request, table, "hit")

    def _check_new(self, request: Request) -> None:
        size, most = self.arena.block_size, self.arena.num_blocks
        total = -(-request.rows_needed // size)
        if total > most:
            raise ValueError(
                f"request {request.id!r} needs {total} blocks of {size} rows, the pool has {most}"
            )
        if request.id in self.leases:
            raise ValueError(f"request id {request.id!r} is already admitted; ids must be unique")

    def _take_in(self, request: Request, table: BlockTable, kind: EventKind) -> TieredLease:
        self.admissions += 1
        lease = self.leases[request.id] = self.lease_type(self, request, table)
        shared = lease.blocks(0, table.hit)
        if shared:
            self.log(kind, request, shared, 0, table.hit, request.tokens[: table.hit])
        # A block set aside for a copy comes first, where the copy will lie.
        own = [*table.spare, *table.blocks[len(shared) :]]
        self.log("admit", request, own, lease.length, 0)
        return lease

    def fork(self, lease: TieredLease, request: Request) -> TieredLease:
        """See `Forks`: the rows are shared, and the first write into a block copies it."""
        hit = lease.check_fork(request)
        self._check_new(request)
        table = self.blocks.fork(lease.table, hit, request.rows_needed)
        taken = self._take_in(request, table, "fork")
        owners = enumerate(lease.owners())
        unknown = (i for i, o in owners if i >= lease.intact and (o is None or o.token < 0))
        taken.intact = next(unknown, taken.intact)
        return taken

    def truncate(self, lease: TieredLease, length: int) -> None:
        """See `Truncates`."""
        lease.shorten(length)
        lease.intact = min(lease.intact, length)
        size = self.arena.block_size
        for index in range(length // size, len(lease.table.blocks)):
            block = lease.table.blocks[index]
            if not self.blocks.is_shared(block):
                kept = max(0, length - index * size)
                self.arena.forget(block * size + kept, (block + 1) * size)
        self.log("truncate", lease.request, lease.table.blocks, length, 0)

    def park(self, lease: TieredLease) -> None:
        """See `Parks`: all rows move, also those of a prefix, which may be evicted meanwhile."""
        lease.check_usable()
        lease.parked = self.arena.take_out(lease.rows(0, lease.length))
        self.log("park", lease.request, [*lease.table.blocks, *lease.table.spare], 0, lease.length)
        self.blocks.give_back(lease.table)
        lease.table = BlockTable()

    def resume(self, lease: TieredLease) -> None:
        """See `Parks`: into blocks of its own."""
        parked = lease.check_parked()
        lease.table = self.blocks.admit(None, (), lease.request.rows_needed)
        self.arena.put_back(lease.rows(0, lease.length), *parked)
        lease.parked = None
        self.log("resume", lease.request, lease.table.blocks, 0, lease.length)

    def publish(self, lease: TieredLease, whole: bool) -> None:
        """Put a completely written prompt into the prefix tier.

        While the request lives these are its full blocks; the last one, which it still writes, is
        added at its release, when nobody is left who could write it.
        """
        if lease.prompt_is_written and lease.parked is None:
            tokens, size = lease.request.tokens[: lease.intact], self.arena.block_size
            end = len(tokens) if whole else len(tokens) // size * size
            self.blocks.publish(lease.request.context, tokens[:end], lease.table)

    def release(self, lease: Any) -> None:
        """Give every block back once, at the end of a request or at its abort, at any step.

        Raises:
            KeyError: It is not held (released twice, or of another pool).
        """
        if not any(x is lease for x in self.leases.values()):
            raise KeyError("this lease is not held here: released twice, or of another pool")
        self.publish(lease, whole=True)
        del self.leases[lease.request.id]
        held = [*lease.table.blocks, *lease.table.spare]
        self.log("release", lease.request, held, 0, lease.length)
        if lease.parked is None:
            self.blocks.give_back(lease.table)
        lease.closed = True

    def batch(
        self, leases: Sequence[TieredLease], counts: Sequence[int], shared: bool = True
    ) -> Cache | None:
        """The leases as one cache; `None` where a lone lease is its own best cache.

        Args:
            shared: Read a common prefix once for all its readers. Otherwise every request's rows
                are gathered, as if they were private.
        """
        if len(leases) == 1 and not (shared and leases[0].num_cached_tokens):
            return None
        return self.batch_type(self.arena, leases, counts, shared)

    def copied(self, table: BlockTable, index: int, target: int, rows: int) -> None:
        """Copy a block before it is written."""
        source, size = table.blocks[index], self.arena.block_size
        self.arena.copy(source, target, rows)
        self.log("copy", self._holder(table).request, [source, target], index * size, rows)

    def returned(self, table: BlockTable, block: int) -> None:
        """Somebody has one block less."""
        holder = self._holder(table)
        self.log("spare", holder.request, [block], holder.length, 0)

    def _holder(self, table: BlockTable) -> TieredLease:
        return next(lease for lease in self.leases.values() if lease.table is table)

    def freed(self, block: int) -> None:
        """Nobody's rows hold nobody's signature."""
        size = self.arena.block_size
        self.arena.forget(block * size, (block + 1) * size)

    def evicted(self, node: Node) -> None:
        """A stored block is forgotten."""
        self.log("evict", None, [node.block], 0, len(node.tokens))

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
        """Assert what must always hold.

        Raises:
            AssertionError: See `BlockManager.check`; or two requests could write one block.
        """
        self.blocks.check()
        size, writable = self.arena.block_size, set[int]()
        for lease in self.leases.values():
            ahead = [*lease.table.blocks[lease.length // size :], *lease.table.spare]
            own = {block for block in ahead if not self.blocks.is_shared(block)}
            assert not own & writable, "a block is writable by two"
            writable |= own
