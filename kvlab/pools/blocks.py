"""Who holds which block: counts, admission, copy-on-write, the prefix tier. No tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvlab.pools.contract import PoolFull
from kvlab.pools.prefix import Node, PrefixTree
from kvlab.request import Context


def are_neighbours(blocks: Sequence[int]) -> bool:
    """Whether blocks lie side by side in this order, so that their rows are one view."""
    return list(blocks) == list(range(blocks[0], blocks[0] + len(blocks)))


@dataclass(eq=False)
class BlockTable:
    """What one request holds.

    Attributes:
        blocks: The block of every `block_size` rows, in the order in which the request reads.
        spare: A block set aside for the copy of the one that is shared in part.
        hit: Rows that were there already.
        partial: Which of `blocks` that is, where they end inside of it; else -1.
    """

    blocks: list[int] = field(default_factory=list)
    spare: list[int] = field(default_factory=list)
    hit: int = 0
    partial: int = -1


class Effects:
    """What follows from a decision, for whoever keeps the rows. Here: nothing."""

    def copied(self, table: BlockTable, index: int, target: int, rows: int) -> None:
        """The first `rows` rows of `table.blocks[index]` are needed in `target` too."""

    def returned(self, table: BlockTable, block: int) -> None:
        """A block that was set aside for `table` is not needed there."""

    def freed(self, block: int) -> None:
        """Nobody holds it any more."""

    def evicted(self, node: Node) -> None:
        """A stored block is forgotten."""


class BlockManager:
    """Blocks for many requests, and a tree of finished prompts that holds blocks as they do.

    All blocks that a request may ever need are set aside at its admission, so that it never stops
    half-way for want of memory.

    Args:
        share: Whether finished prompts are kept and found.
        effects: Who is told what to do with the rows.

    Attributes:
        ref_count: Holders of each block: requests, and the tree, whose own count keeps the last
            reader of a prefix from taking its block for his own.
        tables: What each request holds.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        share: bool = True,
        effects: Effects | None = None,
        tree: PrefixTree | None = None,
    ) -> None:
        self.num_blocks, self.block_size, self.share = num_blocks, block_size, share
        self.effects = effects or Effects()
        self.ref_count = [0] * num_blocks
        self.tree = tree or PrefixTree(block_size)
        self.tables: list[BlockTable] = []

    @property
    def free(self) -> list[int]:
        """Blocks that nobody holds."""
        return [b for b, count in enumerate(self.ref_count) if count == 0]

    def allocate(self, count: int) -> list[int]:
        """Take `count` free blocks, neighbours where there is such a run."""
        free = self.free
        assert len(free) >= count, f"{count} blocks asked for, {len(free)} are free"
        runs = (free[i : i + count] for i in range(len(free) - count + 1))
        taken = next((r for r in runs if r and r[-1] - r[0] == count - 1), free[:count])
        for block in taken:
            self.ref_count[block] = 1
        return taken

    def retain(self, blocks: Sequence[int]) -> None:
        """One more holder for each block."""
        for block in blocks:
            assert self.ref_count[block] > 0, f"block {block} is free and cannot be shared"
            self.ref_count[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """One holder less; a block without holders is free."""
        for block in blocks:
            assert self.ref_count[block] > 0, f"block {block} was given back twice"
            self.ref_count[block] -= 1
            if self.ref_count[block] == 0:
                self.effects.freed(block)

    def is_shared(self, block: int) -> bool:
        """Whether a writer has to copy it first."""
        return self.ref_count[block] > 1

    def unread(self, block: int) -> bool:
        """Whether the tree alone holds it."""
        return self.ref_count[block] == 1

    def admit(self, context: Context, tokens: Sequence[int], rows: int) -> BlockTable:
        """The longest known prefix of `tokens`, and own blocks for the rest of `rows` rows.

        Raises:
            PoolFull: Too few blocks are free or can be evicted.
        """
        hit, found = self.tree.match(context, tokens) if self.share else (0, [])
        # A block that is shared in part costs one more, and a hit keeps blocks from being evicted.
        # So a shorter hit, or none, may fit where the longest does not: what fits into an empty
        # pool always does.
        return self._grant(found, (hit, hit - hit % self.block_size, 0), rows)

    def fork(self, source: BlockTable, hit: int, rows: int) -> BlockTable:
        """The first `hit` rows of another table, and own blocks for the rest.

        The block in which they end is copied by whoever writes first, so one is set aside for both.
        """
        return self._grant(source.blocks, (hit,), rows)

    def _grant(self, found: Sequence[int], hits: Sequence[int], rows: int) -> BlockTable:
        size = self.block_size
        for hit in dict.fromkeys(hits):
            shared = found[: -(-hit // size)]
            needed = -(-rows // size) - hit // size
            self.retain(shared)  # from here on nobody evicts them
            if self.make_room(needed):
                break
            self.release(shared)
        else:
            raise PoolFull(
                f"{needed} blocks are needed, {len(self.free)} are free and "
                f"{self.tree.evictable(self.unread)} can be evicted; release a request first"
            )
        own, in_part = self.allocate(needed), 1 if hit % size else 0
        partial = hit // size if in_part else -1
        table = BlockTable([*shared, *own[in_part:]], own[:in_part], hit, partial)
        self.tables.append(table)
        return table

    def make_room(self, count: int) -> bool:
        """Whether `count` blocks are free now. Prefixes that nobody reads are evicted for it, but
        only if that is enough."""
        missing = count - len(self.free)
        if missing > 0 and missing <= self.tree.evictable(self.unread):
            self.evict(missing)
        return count <= len(self.free)

    def evict(self, count: int) -> None:
        """Forget up to `count` stored blocks that nobody reads."""
        for node in self.tree.evict(count, self.unread):
            self.effects.evicted(node)
            self.release([node.block])

    def make_private(self, table: BlockTable, start: int, end: int) -> None:
        """Copy what others hold of the blocks in which rows `start` to `end - 1` will be written.

        Raises:
            PoolFull: Too few blocks for the copies, which happens only to a request that has taken
                rows back. Nothing was copied.
        """
        size = self.block_size
        indices = range(start // size, -(-end // size))
        shared = [i for i in indices if self.is_shared(table.blocks[i])]
        donors = {i: self._donor(table, i) for i in shared}
        missing = sum(donor is None for donor in donors.values())
        if missing and not self.make_room(missing):
            raise PoolFull("no block for a copy of a shared one; release a request first")
        for index, donor in donors.items():
            block = table.blocks[index]
            if donor is None:
                target = self.allocate(1)[0]
            else:
                target = donor.spare.pop() if donor is table else self._return(donor)
            self.effects.copied(table, index, target, max(0, start - index * size))
            table.blocks[index] = target
            self.release([block])
        if table.spare and table.partial in indices:  # not needed: the others have copied or left
            self.release([self._return(table)])

    def _donor(self, table: BlockTable, index: int) -> BlockTable | None:
        """Whose spare is there for this copy: its own, or of a fork the other side's.

        With h holders, h - 2 of them may still have to copy once this one has: the last one writes
        in place, or the tree does not write. So many spares must be left.
        """
        if table.spare and index == table.partial:
            return table
        block = table.blocks[index]
        others = [t for t in self.tables if t.spare and t.blocks[t.partial] == block]
        return others[0] if others and len(others) >= self.ref_count[block] - 1 else None

    def _return(self, table: BlockTable) -> int:
        block = table.spare.pop()
        self.effects.returned(table, block)
        return block

    def publish(self, context: Context, tokens: Sequence[int], table: BlockTable) -> None:
        """Put written tokens into the prefix tier, from where they are only read."""
        if self.share:
            self.retain(self.tree.insert(context, tokens, table.blocks))

    def give_back(self, table: BlockTable) -> None:
        """A request leaves its blocks."""
        self.tables.remove(table)
        self.release([*table.blocks, *table.spare])

    def check(self) -> None:
        """Assert what must always hold; for tests and for the curious.

        Raises:
            AssertionError: A count is wrong, a block is lost, or the tree is not in order.
        """
        held = Counter(b for table in self.tables for b in (*table.blocks, *table.spare))
        nodes = self.tree.nodes()
        stored = Counter(node.block for node in nodes)
        for block, count in enumerate(self.ref_count):
            assert count == held[block] + stored[block], f"block {block}: wrong count"
        for node in nodes:
            assert 0 < len(node.tokens) <= self.block_size, "a node of a wrong size"
            assert len(node.tokens) == self.block_size or not node.children, "a fork inside a block"
            keys = [child.tokens for child in node.children]
            assert keys == sorted(set(keys)), "children out of order"
            assert self.tree.of_block.get((node.parent, node.block)) is node, (
                "a block is stored twice"
            )
