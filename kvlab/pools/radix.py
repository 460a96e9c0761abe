"""The read-only prefix tier: a radix tree over token ids, one root for each context."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from kvlab.pools.blocks import BlockArena
from kvlab.request import Context


@dataclass(eq=False)
class Node:
    """A run of tokens behind its parent's, and the blocks whose rows hold them.

    `blocks` are those of rows `start` to `start + len(tokens) - 1`. The first of them may also hold
    the parent's last rows: a split need not fall on the border of a block.
    """

    start: int
    tokens: tuple[int, ...]
    blocks: list[int]
    parent: Node | None
    children: dict[int, Node] = field(default_factory=dict)
    last_used: int = 0

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


class PrefixTree:
    """Finished prefixes. A match is the longest run of equal tokens from the root, never a hash.

    Every node holds a count on its blocks, so that the last reader of a prefix is never alone with
    the pool's own block and free to write into it.
    """

    def __init__(self, arena: BlockArena) -> None:
        self.arena = arena
        self.roots: dict[tuple[tuple[str, str], ...], Node] = {}
        self.held = [0] * arena.num_blocks  # counts on each block that belong to nodes
        self._clock = 0

    def root_key(self, context: Context) -> tuple[tuple[str, str], ...] | None:
        """Under which root a context's prefixes stand; `None`: nowhere."""
        return known(context)

    def labels(self, tokens: Sequence[int]) -> Sequence[int]:
        """What a match compares: the tokens themselves, all of them."""
        return tokens

    def match(self, context: Context, tokens: Sequence[int]) -> tuple[int, list[int]]:
        """The longest stored prefix of `tokens`, and the blocks that hold its rows."""
        tokens = self.labels(tokens)
        length, path = 0, []
        table: list[int] = []
        for node, common in self._walk(context, tokens):
            path.append(node)
            length = node.start + common
            # A node's blocks lie over those of its ancestors: a fork may have copied one.
            table[node.start // self.arena.block_size :] = node.blocks
        self._clock += 1
        for node in path:
            node.last_used = self._clock
        return length, table[: -(-length // self.arena.block_size)]

    def _walk(self, context: Context, tokens: Sequence[int]) -> Iterator[tuple[Node, int]]:
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
            # Decided before the caller looks at the child: `insert` may split it, and the rest that
            # is then left of it is the wrong branch as soon as it is no longer than `common`.
            through = common == len(child.tokens)
            yield child, common
            if not through:
                return
            node = child

    def insert(self, context: Context, tokens: Sequence[int], table: Sequence[int]) -> None:
        """Store `tokens`, whose rows lie in the blocks of `table`; what is known already stays."""
        key, tokens = self.root_key(context), self.labels(tokens)
        if key is None:
            return
        root = self.roots.setdefault(key, Node(0, (), [], None))
        node, size = root, self.arena.block_size
        for child, common in self._walk(context, tokens):
            node = child
            if common < len(child.tokens):
                if child.start + common < len(tokens):  # two continuations: a fork
                    node = self._split(child, common)
                else:  # nothing new: `tokens` ends inside of this node
                    return
        if node.end == len(tokens):
            return
        blocks = list(table[node.end // size : -(-len(tokens) // size)])
        leaf = Node(node.end, tuple(tokens[node.end :]), blocks, node, last_used=self._clock)
        self._hold(blocks)
        node.children[leaf.tokens[0]] = leaf

    def _split(self, node: Node, at: int) -> Node:
        """Cut a node behind its first `at` tokens; returns the upper part."""
        size = self.arena.block_size
        middle = node.start + at
        first = node.start // size
        upper = Node(
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
        self.arena.retain(blocks)
        for block in blocks:
            self.held[block] += 1

    def readers(self, block: int) -> int:
        """Leases that hold a block."""
        return self.arena.ref_count[block] - self.held[block]

    def nodes(self) -> list[Node]:
        """All nodes but the roots, parents before children."""
        found: list[Node] = []
        queue = list(self.roots.values())
        while queue:
            node = queue.pop()
            found += node.children.values()
            queue += node.children.values()
        return found

    def lines(self, text: Callable[[Sequence[int]], str]) -> list[str]:
        """The tree as indented lines: text and blocks of every node."""

        def below(node: Node, depth: int) -> list[str]:
            own = f"{'    ' * depth}{text(node.tokens)}  {node.blocks}"
            return [own, *(x for c in node.children.values() for x in below(c, depth + 1))]

        return [
            line
            for context, root in self.roots.items()
            for line in [
                str(dict(context)) if context else "(no context)",
                *(x for c in root.children.values() for x in below(c, 1)),
            ]
        ]

    @property
    def evictable(self) -> int:
        """Blocks that would be free if all prefixes without readers were evicted."""
        return sum(1 for b, n in enumerate(self.held) if n and not self.readers(b))

    def evict(self, count: int) -> list[Node]:
        """Drop the least recently used leaves without readers until `count` blocks are free."""
        dropped = []
        while len(self.arena.free) < count:
            leaves = [
                n
                for n in self.nodes()
                if not n.children and not any(self.readers(b) for b in n.blocks)
            ]
            if not leaves:
                break
            leaf = min(leaves, key=lambda n: n.last_used)
            assert leaf.parent is not None
            del leaf.parent.children[leaf.tokens[0]]
            for block in leaf.blocks:
                self.held[block] -= 1
            self.arena.release(leaf.blocks)
            dropped.append(leaf)
        return dropped


def known(context: Context) -> tuple[tuple[str, str], ...] | None:
    """The context as a key of tagged fields, or `None` where part of it is unknown: no reuse.

    The order of the fields does not matter; their tags do, so that an adapter named X is not a
    tenant named X.
    """
    if context is None or any(value is None for _, value in context):
        return None
    return tuple(sorted((tag, value) for tag, value in context if value is not None))
