"""The prefix tree as it was until it leaked: kept whole, as a fault."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from kvlab.pools.blocks import BlockManager
from kvlab.pools.prefix import Node, PrefixTree
from kvlab.request import Context


@dataclass(eq=False)
class Run:
    """A run of tokens behind its parent's, and the blocks whose rows hold them.

    `blocks` are those of rows `start` to `start + len(tokens) - 1`. The first of them may also hold
    the parent's last rows: a split need not fall on the border of a block.
    """

    start: int
    tokens: tuple[int, ...]
    blocks: list[int]
    parent: Run | None
    children: dict[int, Run] = field(default_factory=dict)
    last_used: int = 0

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


class WalksOn(PrefixTree):
    """Finished prefixes as runs of tokens that are cut where two prompts part."""

    roots: dict[tuple[tuple[str, str], ...], Run]  # type: ignore[assignment]

    def __init__(self, block_size: int) -> None:
        super().__init__(block_size)
        self.held: Counter[int] = Counter()  # a cut inside of a block leaves it in two runs
        self._taken: list[int] = []

    def match(self, context: Context, tokens: Sequence[int]) -> tuple[int, list[int]]:
        """The longest stored prefix of `tokens`, and the blocks that hold its rows."""
        length, path = 0, []
        table: list[int] = []
        for node, common in self._walk(context, tokens):
            path.append(node)
            length = node.start + common
            # A node's blocks lie over those of its ancestors: a fork may have copied one.
            table[node.start // self.block_size :] = node.blocks
        self._clock += 1
        for node in path:
            node.last_used = self._clock
        return length, table[: -(-length // self.block_size)]

    def _walk(self, context: Context, tokens: Sequence[int]) -> Iterator[tuple[Run, int]]:
        """The nodes along `tokens` from the root down, each with its number of equal tokens."""
        key = self.root_key(context)
        node = self.roots.get(key) if key is not None else None
        while node is not None:
            child = node.children.get(tokens[node.end]) if node.end < len(tokens) else None
            if child is None:
                return
            rest = tokens[child.start :]
            pairs = zip(child.tokens, rest, strict=False)
            common = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
            if common is None:
                common = min(len(child.tokens), len(rest))
            yield child, common  # BUG: the caller may cut this child
            if common < len(child.tokens):
                return
            node = child

    def insert(self, context: Context, tokens: Sequence[int], table: Sequence[int]) -> list[int]:
        """Store `tokens`, whose rows lie in the blocks of `table`; what is known already stays."""
        key, self._taken = self.root_key(context), []
        if key is None:
            return []
        root = self.roots.setdefault(key, Run(0, (), [], None))
        node, size = root, self.block_size
        for child, common in self._walk(context, tokens):
            node = child
            if common < len(child.tokens):
                if child.start + common < len(tokens):  # two continuations: a fork
                    node = self._split(child, common)
                else:  # nothing new: `tokens` ends inside of this node
                    return self._taken
        if node.end == len(tokens):
            return self._taken
        blocks = list(table[node.end // size : -(-len(tokens) // size)])
        leaf = Run(node.end, tuple(tokens[node.end :]), blocks, node, last_used=self._clock)
        self._hold(blocks)
        node.children[leaf.tokens[0]] = leaf
        return self._taken

    def _split(self, node: Run, at: int) -> Run:
        """Cut a node behind its first `at` tokens; returns the upper part."""
        size = self.block_size
        middle = node.start + at
        first = node.start // size
        upper = Run(
            node.start,
            node.tokens[:at],
            node.blocks[: -(-middle // size) - first],
            node.parent,
            last_used=node.last_used,
        )
        lower_blocks = node.blocks[middle // size - first :]
        if middle % size:  # both parts have rows in this block
            self._hold(lower_blocks[:1])
        assert node.parent is not None
        node.parent.children[upper.tokens[0]] = upper
        node.start, node.tokens, node.blocks, node.parent = (
            middle,
            node.tokens[at:],
            lower_blocks,
            upper,
        )
        upper.children[node.tokens[0]] = node
        return upper

    def _hold(self, blocks: Sequence[int]) -> None:
        self._taken += blocks
        self.held.update(blocks)

    def runs(self) -> list[Run]:
        """All nodes but the roots, parents before children."""
        found: list[Run] = []
        queue = list(self.roots.values())
        while queue:
            node = queue.pop()
            found += node.children.values()
            queue += node.children.values()
        return found

    def nodes(self) -> list[Node]:
        """The runs, a node for each of their blocks."""
        return [Node(run.tokens, b, None, run.last_used) for run in self.runs() for b in run.blocks]

    def evictable(self, unread: Callable[[int], bool]) -> int:
        return sum(1 for block, count in self.held.items() if count and unread(block))

    def evict(self, count: int, unread: Callable[[int], bool]) -> list[Node]:
        dropped: list[Node] = []
        while len(dropped) < count:
            leaves = [r for r in self.runs() if not r.children and all(map(unread, r.blocks))]
            if not leaves:
                break
            leaf = min(leaves, key=lambda r: r.last_used)
            assert leaf.parent is not None
            del leaf.parent.children[leaf.tokens[0]]
            self.held.subtract(leaf.blocks)
            dropped += [Node(leaf.tokens, block, None) for block in leaf.blocks]
        return dropped


class SplitManager(BlockManager):
    """Counts beside a tree that may hold a block twice."""

    tree: WalksOn

    def unread(self, block: int) -> bool:
        return self.ref_count[block] == self.tree.held[block] > 0
