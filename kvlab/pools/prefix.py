"""The prefix tier: a tree of finished prompts whose node is one block, a root for each context.

It knows tokens and numbers of blocks, neither rows nor counts.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from kvlab.request import Context, known

BY_TOKENS = attrgetter("tokens")


@dataclass(eq=False)
class Node:
    """A block of a finished prompt. Only a full one has children, sorted by their tokens."""

    tokens: tuple[int, ...]
    block: int
    parent: Node | None
    last_used: int = 0
    children: list[Node] = field(default_factory=list)

    def nearest(self, wanted: tuple[int, ...]) -> tuple[Node | None, int]:
        """The child that begins with most of `wanted`, and with how many of its tokens.

        Among sorted sequences the longest common prefix stands next to where `wanted` would.
        """
        best, most = None, 0
        at = bisect_left(self.children, wanted, key=BY_TOKENS)
        for child in self.children[max(at - 1, 0) : at + 1]:
            common = common_prefix(child.tokens, wanted)
            if common > most:
                best, most = child, common
        return best, most


class PrefixTree:
    """Finished prefixes. A match is the longest run of equal tokens from the root, never a hash.

    A prompt whose last block is not full ends in a leaf that is not full. The next prompt that goes
    on from there has a copy of that block, and its node stands beside the shorter one, which grows
    old and goes first.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.roots: dict[tuple[tuple[str, str], ...], Node] = {}
        self.of_block: dict[tuple[Node | None, int], Node] = {}  # by parent and block
        self._clock = 0

    def root_key(self, context: Context) -> tuple[tuple[str, str], ...] | None:
        """Under which root a context's prefixes stand; `None`: nowhere."""
        return known(context)

    def labels(self, tokens: Sequence[int]) -> Sequence[int]:
        """What a match compares: the tokens themselves, all of them."""
        return tokens

    def match(self, context: Context, tokens: Sequence[int]) -> tuple[int, list[int]]:
        """The longest stored prefix of `tokens`, and the blocks that hold its rows."""
        key, labels, size = self.root_key(context), tuple(self.labels(tokens)), self.block_size
        node = None if key is None else self.roots.get(key)
        self._clock += 1
        length, blocks = 0, []
        while node is not None:
            child, common = node.nearest(labels[length : length + size])
            if child is None:
                break
            child.last_used = self._clock
            blocks.append(child.block)
            length += common
            node = child if common == size else None
        return length, blocks

    def insert(self, context: Context, tokens: Sequence[int], table: Sequence[int]) -> list[int]:
        """Store `tokens`, whose rows lie in the blocks of `table`; what is known already stays.

        Returns:
            The blocks that the tree has taken and must hold from now on.
        """
        key, labels, size = self.root_key(context), tuple(self.labels(tokens)), self.block_size
        if key is None:
            return []
        node, taken = self.roots.setdefault(key, Node((), -1, None)), []
        for start, block in zip(range(0, len(labels), size), table, strict=False):
            wanted = labels[start : start + size]
            child, common = node.nearest(wanted)
            if child is None or common < len(wanted):
                child = self.of_block.get((node, block))
                if child is not None and child.tokens == wanted[: len(child.tokens)]:
                    node.children.remove(child)  # it was stored as far as it was written then
                    child.tokens = wanted
                else:
                    child = self.of_block[node, block] = Node(wanted, block, node, self._clock)
                    taken.append(block)
                insort(node.children, child, key=BY_TOKENS)
            node = child
        return taken

    def nodes(self) -> list[Node]:
        """All nodes but the roots, parents before children."""
        found: list[Node] = []
        for node in self.roots.values():
            found += node.children
        for node in found:  # grows meanwhile
            found += node.children
        return found

    def evictable(self, unread: Callable[[int], bool]) -> int:
        """How many nodes could go one after another, leaves first, whose blocks nobody reads."""
        going: set[Node] = set()
        for node in reversed(self.nodes()):
            if unread(node.block) and going.issuperset(node.children):
                going.add(node)
        return len(going)

    def evict(self, count: int, unread: Callable[[int], bool]) -> list[Node]:
        """Drop up to `count` leaves whose blocks nobody reads, the least recently used first."""
        dropped: list[Node] = []
        ready = [
            (node.last_used, i, node)
            for i, node in enumerate(self.nodes())
            if not node.children and unread(node.block)
        ]
        heapq.heapify(ready)
        while ready and len(dropped) < count:
            _, i, leaf = heapq.heappop(ready)
            parent = leaf.parent
            assert parent is not None
            parent.children.remove(leaf)
            self.of_block.pop((parent, leaf.block), None)
            dropped.append(leaf)
            if parent.parent is not None and not parent.children and unread(parent.block):
                heapq.heappush(ready, (parent.last_used, i, parent))
        return dropped

    def lines(self, text: Callable[[Sequence[int]], str]) -> list[str]:
        """The tree as indented lines: text and block of every node."""

        def below(node: Node, depth: int) -> list[str]:
            own = f"{'    ' * depth}{text(node.tokens)}  [{node.block}]"
            return [own, *(x for c in node.children for x in below(c, depth + 1))]

        return [
            line
            for context, root in self.roots.items()
            for line in [
                str(dict(context)) if context else "(no context)",
                *(x for c in root.children for x in below(c, 1)),
            ]
        ]


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    if a == b:
        return len(a)
    unequal = (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
    return next(unequal, min(len(a), len(b)))
