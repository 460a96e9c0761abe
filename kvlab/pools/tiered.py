"""TieredCachePool: a read-only prefix tier, private blocks, and scratch; the first write copies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import Cache, PretrainedConfig
from transformers.cache_utils import CacheLayerMixin

from kvlab.pools.blocks import BlockArena
from kvlab.pools.contract import Lease, Owner, PoolFull
from kvlab.pools.radix import PrefixTree
from kvlab.pools.store import kv_shape
from kvlab.pools.tiered_batch import TieredBatch, check_heads, write_rows
from kvlab.request import Request

Rows = tuple[Float[Tensor, "1 G T D"], Float[Tensor, "1 G T D"]]


class TieredLease:
    """One request's rows: a shared prefix that it may read, and private rows that it writes.

    Attributes:
        table: The block of every `block_size` rows, in the order in which the request reads.
        spare: A block set aside for the copy of a block that is shared in part.
        num_cached_tokens: Prompt tokens that the prefix tier held at admission.
        counter: Rows that each layer holds.
    """

    def __init__(
        self, pool: TieredCachePool, request: Request, table: list[int], spare: list[int], hit: int
    ) -> None:
        self.pool, self.request, self.table, self.spare = pool, request, table, spare
        self.num_cached_tokens = hit
        self.generation = pool.admissions
        self.counter = [hit] * pool.arena.key.shape[0]
        self.announced: list[int] = []
        self.closed = False
        # Whose rows were granted: they are the reader's only as long as nobody writes them again.
        self.granted = [pool.arena.owners[r] for r in self.rows(0, hit)]
        self.cache = Cache(layers=[TieredLayer(self, i) for i in range(len(self.counter))])

    @property
    def length(self) -> int:
        """Rows that the first layer holds; the others follow in the same forward pass."""
        return self.counter[0]

    def rows(self, start: int, end: int) -> list[int]:
        """Arena rows of this request's rows `start` to `end - 1`."""
        size = self.pool.arena.block_size
        return [self.table[r // size] * size + r % size for r in range(start, end)]

    def first_row(self, end: int) -> int | None:
        """Arena row of row 0, if all rows up to `end` lie side by side."""
        size = self.pool.arena.block_size
        blocks = self.table[: -(-end // size)]
        if blocks != list(range(blocks[0], blocks[0] + len(blocks))):
            return None
        return blocks[0] * size

    def announce(self, tokens: list[int]) -> None:
        """Say which tokens the next forward pass writes, for the record of owners."""
        self.announced = list(tokens)

    def prepare(self, count: int) -> None:
        """Make the next `count` rows private and sign them; called before the first layer writes.

        Raises:
            RuntimeError: The lease was given back.
            ValueError: More rows than were asked for at admission.
        """
        if self.closed:
            raise RuntimeError(f"the lease of {self.request.id!r} was given back; admit it again")
        start, end = self.length, self.length + count
        room = len(self.table) * self.pool.arena.block_size
        if end > room:
            raise ValueError(
                f"request {self.request.id!r} has {room} rows and would write row {end - 1}; ask "
                "for more with max_new_tokens"
            )
        self.pool.make_private(self, start)
        tokens = self.announced if len(self.announced) == count else [-1] * count
        for row, token, place in zip(range(start, end), tokens, self.rows(start, end), strict=True):
            self.pool.arena.owners[place] = Owner(self.request.id, self.generation, row, token)

    def advance(self, layer: int, count: int) -> None:
        """A layer has written. The last one may complete the prompt, which is then published."""
        before = self.counter[layer]
        self.counter[layer] += count
        if layer == len(self.counter) - 1 and before < len(self.request.tokens) <= before + count:
            self.pool.publish(self, whole=False)

    @property
    def prompt_is_written(self) -> bool:
        """Whether every layer holds the whole prompt."""
        return min(self.counter) >= len(self.request.tokens)

    def owners(self) -> list[Owner | None]:
        """Who wrote each row last."""
        return [self.pool.arena.owners[r] for r in self.rows(0, self.length)]

    def foreign(self) -> list[bool]:
        """Rows that are neither this request's own nor granted as a finished prefix."""
        mine = (self.request.id, self.generation)
        granted = [*self.granted, *[None] * (self.length - len(self.granted))]
        return [
            owner is None or (owner[:2] != mine and owner != allowed)
            for owner, allowed in zip(self.owners(), granted, strict=True)
        ]


class TieredLayer(CacheLayerMixin):
    """One layer of one lease."""

    def __init__(self, lease: TieredLease, layer: int) -> None:
        super().__init__()
        self.lease, self.layer = lease, layer
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the blocks were allocated with the pool."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Rows:
        """Write the new rows; return all rows, as a view where the blocks are neighbours."""
        lease, count, arena = self.lease, key_states.shape[2], self.lease.pool.arena
        check_heads(arena, key_states)
        if self.layer == 0:
            lease.prepare(count)
        start = lease.counter[self.layer]
        end = start + count
        first = lease.first_row(end)
        if first is None:
            rows = torch.tensor(lease.rows(0, end))
            write_rows(arena, self.layer, rows[start:], key_states, value_states)
            key, value = lease.pool.scratch.gather(arena, self.layer, rows)
        else:
            key = arena.key[self.layer, :, first : first + end]
            value = arena.value[self.layer, :, first : first + end]
            key[:, start:] = key_states[0].detach()
            value[:, start:] = value_states[0].detach()
        lease.advance(self.layer, count)
        return key[None], value[None]

    def get_seq_length(self) -> int:
        return self.lease.counter[self.layer]

    def get_max_length(self) -> int:
        return len(self.lease.table) * self.lease.pool.arena.block_size

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.lease.counter[self.layer] + query_length, 0


class Scratch:
    """One layer's gathered keys and values; the next layer uses the same memory again."""

    def __init__(self) -> None:
        self._buffer: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes held now: the largest gather so far."""
        return 0 if self._buffer is None else self._buffer.nbytes

    def gather(
        self, arena: BlockArena, layer: int, rows: Tensor
    ) -> tuple[Float[Tensor, "G T D"], Float[Tensor, "G T D"]]:
        """Copies of some rows of a layer, valid until the next gather."""
        heads, _, dim = arena.key[layer].shape
        size = 2 * heads * len(rows) * dim
        if self._buffer is None or len(self._buffer) < size:
            self._buffer = torch.empty(size, dtype=arena.key.dtype, device=arena.key.device)
        both = self._buffer[:size].view(2, heads, len(rows), dim)
        rows = rows.to(arena.key.device)
        torch.index_select(arena.key[layer], 1, rows, out=both[0])
        torch.index_select(arena.value[layer], 1, rows, out=both[1])
        return both[0], both[1]


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
    """

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
        self.arena = BlockArena(
            num_blocks, block_size, num_layers, num_heads, head_dim, dtype, device, nan_fill
        )
        self.tree = PrefixTree(self.arena)
        self.scratch = Scratch()
        self.share = share
        self.leases: dict[str, TieredLease] = {}
        self.admissions = 0

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
        hit = 0
        shared: list[int] = []
        if self.share:
            hit, shared = self.tree.match(request.context, request.tokens[:-1])
        arena.retain(shared)  # from here on nobody evicts them
        needed = total - hit // size
        if needed > len(arena.free) + self.tree.evictable:
            arena.release(shared)
            raise PoolFull(
                f"request {request.id!r} needs {needed} blocks, {len(arena.free)} are free and "
                f"{self.tree.evictable} can be evicted; release a request first"
            )
        self.tree.evict(needed)
        if needed > len(arena.free):
            arena.release(shared)
            raise PoolFull(f"request {request.id!r} needs {needed} blocks; release one first")
        own = arena.allocate(needed)
        # A prefix may end inside of a block. That block is read until the first write, which
        # copies it into the first of the request's own blocks.
        in_part = 1 if hit % size else 0
        self.admissions += 1
        lease = TieredLease(self, request, [*shared, *own[in_part:]], own[:in_part], hit)
        self.leases[request.id] = lease
        return lease

    def make_private(self, lease: TieredLease, row: int) -> None:
        """Copy the block of `row` if others hold it too: one count less there, one block here."""
        arena, size = self.arena, self.arena.block_size
        index = row // size
        if index >= len(lease.table) or arena.ref_count[lease.table[index]] == 1:
            return
        target = lease.spare.pop() if lease.spare else self._one_more(lease)
        arena.copy(lease.table[index], target, row % size)
        arena.release([lease.table[index]])
        lease.table[index] = target

    def _one_more(self, lease: TieredLease) -> int:
        self.tree.evict(1)
        if not self.arena.free:
            raise PoolFull(f"no block for a copy of {lease.request.id!r}; release a request first")
        return self.arena.allocate(1)[0]

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
        return TieredBatch(self.arena, self.scratch, leases, counts, shared)

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
