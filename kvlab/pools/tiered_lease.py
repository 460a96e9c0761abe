"""One request's hold on the tiered pool, and the layers through which a model uses it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from kvlab.pools.blocks import are_neighbours
from kvlab.pools.contract import Owner
from kvlab.pools.tiered_batch import check_heads, write_rows
from kvlab.request import Request

if TYPE_CHECKING:
    from kvlab.pools.tiered import TieredCachePool

Rows = tuple[Float[Tensor, "1 G T D"], Float[Tensor, "1 G T D"]]


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


class TieredLease:
    """One request's rows: a shared prefix that it may read, and private rows that it writes.

    Attributes:
        table: The block of every `block_size` rows, in the order in which the request reads.
        spare: A block set aside for the copy of a block that is shared in part.
        num_cached_tokens: Prompt tokens that the prefix tier held at admission.
        counter: Rows that each layer holds.
    """

    layer_type = TieredLayer

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
        self.cache = Cache(layers=[self.layer_type(self, i) for i in range(len(self.counter))])

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
        return blocks[0] * size if are_neighbours(blocks) else None

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
        self.pool.log("write", self.request, self.blocks(start, end), start, count, tokens)
        self.pool.log("read", self.request, self.blocks(0, end), 0, end)

    def blocks(self, start: int, end: int) -> list[int]:
        """The blocks of this request's rows `start` to `end - 1`."""
        size = self.pool.arena.block_size
        return self.table[start // size : -(-end // size)]

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
