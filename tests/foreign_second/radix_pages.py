"""A token trie over single rows, in the style of SGLang's radix cache with page size 1.

A prompt enters the tree once all layers hold it; nodes are locked from the root down while a lease
uses them, and unlocked leaves are evicted, least recently used first. Rows of a whole life are set
aside at admission. A prompt computed twice stays private for the later one. No extras.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import Cache, LlamaConfig
from transformers.cache_utils import CacheLayerMixin

from kvlab.pools.contract import PoolFull
from kvlab.request import Context, Request, known

ROWS = 104
Pair = tuple[Tensor, Tensor]
FAULTS: dict[str, tuple[tuple[str, ...], str]] = {
    "split_unlocked": (
        ("lifetime",),
        "a split leaves its upper half without locks; rows are evicted under a reader; FIELD 29",
    ),
    "bare_values": (
        ("key",),
        "the tree of a context is named by the values alone, without their tags; FIELD 24",
    ),
    "twin_rows_lost": (
        ("leak of memory",),
        "rows that the tree had already when they were computed never come back; FIELD 40 reversed",
    ),
}


class _Node:  # a run of tokens and the rows that hold them
    def __init__(self, tokens: tuple[int, ...], rows: list[int], parent: _Node | None) -> None:
        self.tokens, self.rows, self.parent = tokens, rows, parent
        self.children: dict[int, _Node] = {}
        self.lock, self.used = 0, 0

    def below(self) -> list[_Node]:
        return [node for child in self.children.values() for node in (child, *child.below())]


class _Layer(CacheLayerMixin):
    def __init__(self, lease: RadixLease, index: int) -> None:
        super().__init__()
        self.lease, self.index = lease, index

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        pass

    def update(self, key_states: Tensor, value_states: Tensor, *_: object, **__: object) -> Pair:
        return self.lease.pool.write(self.lease, self.index, key_states, value_states)

    def get_seq_length(self) -> int:
        return self.lease.lengths[self.index]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1


class RadixLease:
    def __init__(
        self, pool: RadixPool, request: Request, found: list[int], own: list[int], node: _Node
    ) -> None:
        self.pool, self.request, self.node = pool, request, node
        self.table = found + own
        self.own = own  # what goes back to the free rows at the end
        self.num_cached_tokens = len(found)
        self.lengths = [len(found)] * pool.layers
        self.inserted = known(request.context) is None  # an unknown context never is
        self.cache = Cache(layers=[_Layer(self, i) for i in range(pool.layers)])


class RadixPool:  # one array of rows, and a tree for each context
    def __init__(self, config: LlamaConfig, fault: str | None) -> None:
        self.fault, self.layers, self.clock = fault, config.num_hidden_layers, 0
        width = config.head_dim or config.hidden_size // config.num_attention_heads
        self.keys = torch.zeros(self.layers, ROWS, config.num_key_value_heads, width)
        self.values = torch.zeros_like(self.keys)
        self.free = list(range(ROWS))[::-1]
        self.roots: dict[object, _Node] = {}
        self.living: dict[str, RadixLease] = {}

    def admit(self, request: Request) -> RadixLease:
        if request.id in self.living or request.rows_needed > ROWS:
            raise ValueError(f"{request.id!r} is here already, or longer than {ROWS} rows")
        root = self.roots.get(self._name(request.context)) or _Node((), [], None)
        path, inside = self._match(root, request.tokens[:-1])
        found = [row for node in path[:-1] for row in node.rows] + path[-1].rows[:inside]
        lying = sum(len(n.rows) for r in self.roots.values() for n in r.below() if n.lock <= 0)
        lying -= sum(len(n.rows) for n in path[:-1] if n.lock <= 0)
        lying -= inside if path[-1].lock <= 0 else 0
        need = request.rows_needed - len(found)
        if len(self.free) + lying < need:
            raise PoolFull(f"{need} rows are needed for {request.id!r}")
        node = self._split(path[-1], inside)
        self._lock(node)
        while len(self.free) < need:
            self._evict()
        own = [self.free.pop() for _ in range(need)]
        self.living[request.id] = lease = RadixLease(self, request, found, own, node)
        return lease

    def release(self, lease: RadixLease) -> None:
        if self.living.get(lease.request.id) is lease:
            del self.living[lease.request.id]
            self._unlock(lease.node)
            self.free.extend(lease.own)

    def write(self, lease: RadixLease, layer: int, keys: Tensor, values: Tensor) -> Pair:
        start = lease.lengths[layer]
        end = start + keys.shape[2]
        if self.living.get(lease.request.id) is not lease or end > len(lease.table):
            raise ValueError(f"{lease.request.id!r} has no rows {start} to {end}")
        rows, seen = lease.table[start:end], lease.table[:end]
        self.keys[layer, rows] = keys[0].transpose(0, 1)
        self.values[layer, rows] = values[0].transpose(0, 1)
        lease.lengths[layer] = end
        if not lease.inserted and min(lease.lengths) >= len(lease.request.tokens):
            lease.inserted = True
            self._insert(lease)
        return tuple(s[layer, seen].transpose(0, 1)[None] for s in (self.keys, self.values))

    def _name(self, context: Context) -> object:
        names = known(context)
        if self.fault == "bare_values" and names is not None:
            return "/".join(value for _, value in names)
        return names

    def _match(self, root: _Node, tokens: tuple[int, ...]) -> tuple[list[_Node], int]:
        """Nodes from the root to the last one that agrees, and how far that one does."""
        path, inside, at = [root], 0, 0
        while inside == len(path[-1].tokens) and at < len(tokens):
            child = path[-1].children.get(tokens[at])
            if child is None:
                break
            inside, most = 1, min(len(child.tokens), len(tokens) - at)
            while inside < most and child.tokens[inside] == tokens[at + inside]:
                inside += 1
            path.append(child)
            at += inside
        return path, inside

    def _split(self, node: _Node, inside: int) -> _Node:
        """The node that ends after `inside` tokens of `node`; the old object keeps the rest."""
        if inside == len(node.tokens):
            return node
        upper = _Node(node.tokens[:inside], node.rows[:inside], node.parent)
        upper.lock, upper.used = node.lock, node.used
        if self.fault == "split_unlocked":
            upper.lock = 0
        node.parent.children[node.tokens[0]] = upper
        node.tokens, node.rows, node.parent = node.tokens[inside:], node.rows[inside:], upper
        upper.children[node.tokens[0]] = node
        return upper

    def _insert(self, lease: RadixLease) -> None:
        """Hand those rows of the prompt to the tree that it does not have yet."""
        tokens = lease.request.tokens
        root = self.roots.setdefault(self._name(lease.request.context), _Node((), [], None))
        path, inside = self._match(root, tokens)
        there = sum(len(n.tokens) for n in path[:-1]) + inside
        if self.fault == "twin_rows_lost":
            lease.own = lease.table[len(tokens) :]
        if there < len(tokens):
            rows, upper = lease.table[there : len(tokens)], self._split(path[-1], inside)
            tail = upper.children[tokens[there]] = _Node(tokens[there:], rows, upper)
            lease.own = [row for row in lease.own if row not in rows]
            self._lock(tail)
            self._unlock(lease.node)
            lease.node = tail

    def _lock(self, node: _Node | None) -> None:
        self.clock += 1
        while node is not None:
            node.lock, node.used, node = node.lock + 1, self.clock, node.parent

    def _unlock(self, node: _Node | None) -> None:
        while node is not None:
            node.lock, node = node.lock - 1, node.parent

    def _evict(self) -> None:
        nodes = [n for r in self.roots.values() for n in r.below()]
        leaf = min((n for n in nodes if n.lock <= 0 and not n.children), key=lambda n: n.used)
        del leaf.parent.children[leaf.tokens[0]]
        self.free.extend(leaf.rows)


def build(config: LlamaConfig, fault: str | None = None) -> RadixPool:
    """A fresh pool; `fault` is a name from FAULTS, or None for the right one."""
    if fault is not None and fault not in FAULTS:
        raise ValueError(f"unknown fault {fault!r}; use one of {', '.join(FAULTS)}")
    return RadixPool(config, fault)
