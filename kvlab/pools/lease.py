"""What all leases of an arena have in common: rows, counters, owners, and the model's way in."""

from __future__ import annotations

from typing import Any

from jaxtyping import Float
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from kvlab.pools.arena import Arena, Rows
from kvlab.pools.contract import Owner
from kvlab.request import Request


class LeaseLayer(CacheLayerMixin):
    """One layer of one lease, as transformers wants to see it."""

    def __init__(self, lease: ArenaLease, layer: int) -> None:
        super().__init__()
        self.lease, self.layer = lease, layer
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the rows were allocated with the pool."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Float[Tensor, "1 G T D"], Float[Tensor, "1 G T D"]]:
        """Write the new rows behind the counter; return all rows up to and including them."""
        lease, arena, count = self.lease, self.lease.arena, key_states.shape[2]
        arena.check(key_states)
        if key_states.shape[0] != 1:
            raise ValueError(f"a lease holds rows of one request, got {key_states.shape[0]}")
        if self.layer == 0:
            lease.prepare(count)
        start = lease.counter[self.layer]
        end = start + count
        arena.write(self.layer, lease.where(start, end), key_states[0], value_states[0])
        lease.advance(self.layer, count)
        key, value = arena.read(self.layer, lease.where(0, end))
        return key[None], value[None]

    def get_seq_length(self) -> int:
        return self.lease.counter[self.layer]

    def get_max_length(self) -> int:
        return self.lease.room

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.lease.counter[self.layer] + query_length, 0


class ArenaLease:
    """One request's rows. Where they lie (`rows`, `where`, `room`) is for the pool to say.

    Attributes:
        generation: The number of this admission; with the request's id it signs every row.
        counter: Rows that each layer holds. Each layer advances its own entry, so that all layers
            of one forward pass start at the same row.
        granted: Owners of the first rows, where a prefix or a fork gave them: these rows are the
            reader's only as long as nobody writes them again.
        parked: Rows and owners in host memory, while it is parked.
        closed: It was given back.
    """

    layer_type = LeaseLayer

    def __init__(self, arena: Arena, request: Request, generation: int, start: int) -> None:
        self.arena, self.request, self.generation = arena, request, generation
        self.counter = [start] * arena.key.shape[0]
        self.num_cached_tokens = 0
        self.granted: list[Owner | None] = []
        self.announced: list[int] = []
        self.parked: tuple[list[Tensor], list[Owner | None]] | None = None
        self.closed = False
        self.cache = Cache(layers=[self.layer_type(self, i) for i in range(len(self.counter))])

    @property
    def length(self) -> int:
        """Rows that the first layer holds; the others follow in the same forward pass."""
        return self.counter[0]

    @property
    def room(self) -> int:
        """Rows that it may hold at most."""
        raise NotImplementedError

    def rows(self, start: int, end: int) -> list[int]:
        """Arena rows of this request's rows `start` to `end - 1`."""
        raise NotImplementedError

    def where(self, start: int, end: int) -> Rows:
        """The same, as it is fastest to read."""
        raise NotImplementedError

    def announce(self, tokens: list[int]) -> None:
        """Say which tokens the next forward pass writes, for the record of owners."""
        self.announced = list(tokens)

    def check_usable(self) -> None:
        """Raises ValueError where it was given back or is parked."""
        if self.closed:
            raise ValueError(f"the lease of {self.request.id!r} was given back; admit it again")
        if self.parked is not None:
            raise ValueError(f"the lease of {self.request.id!r} is parked; resume it first")

    def prepare(self, count: int) -> None:
        """Sign the next `count` rows; called before the first layer writes.

        Raises:
            ValueError: The lease was given back or is parked, or has no room for these rows.
        """
        self.check_usable()
        start, end = self.length, self.length + count
        if end > self.room:
            raise ValueError(
                f"request {self.request.id!r} has {self.room} rows and would write row {end - 1}; "
                "ask for more with max_new_tokens"
            )
        self.make_writable(start, end)
        tokens = self.announced if len(self.announced) == count else [-1] * count
        self.announced = []
        for row, token, place in zip(range(start, end), tokens, self.rows(start, end), strict=True):
            self.arena.owners[place] = Owner(self.request.id, self.generation, row, token)
        self.signed(start, end, tokens)

    def make_writable(self, start: int, end: int) -> None:
        """These rows are about to be written."""

    def signed(self, start: int, end: int, tokens: list[int]) -> None:
        """These rows have a new owner."""

    def advance(self, layer: int, count: int) -> None:
        """A layer has written."""
        self.counter[layer] += count

    def owners(self) -> list[Owner | None]:
        """Who wrote each row last."""
        if self.parked is not None:
            return list(self.parked[1])
        return [self.arena.owners[r] for r in self.rows(0, self.length)]

    def foreign(self) -> list[bool]:
        """Rows that are neither this request's own nor granted."""
        mine = (self.request.id, self.generation)
        granted = [*self.granted, *[None] * (self.length - len(self.granted))]
        return [
            owner is None or (owner[:2] != mine and owner != allowed)
            for owner, allowed in zip(self.owners(), granted, strict=False)
        ]

    def shorten(self, length: int) -> None:
        """Keep the first `length` rows of this view.

        Raises:
            ValueError: See `Truncates.truncate`.
        """
        self.check_usable()
        if not 0 <= length <= self.length:
            raise ValueError(
                f"request {self.request.id!r} holds {self.length} rows and cannot keep {length}"
            )
        self.counter[:] = [length] * len(self.counter)

    def check_parked(self) -> tuple[list[Tensor], list[Owner | None]]:
        """What is parked; raises ValueError where nothing is."""
        if self.closed or self.parked is None:
            raise ValueError(f"the lease of {self.request.id!r} is not parked")
        return self.parked

    def check_fork(self, request: Request) -> int:
        """Refuse a fork to `request` that would not continue these rows; how many it takes over.

        Raises:
            ValueError: See `Forks.fork`.
        """
        self.check_usable()
        if request.context != self.request.context:
            raise ValueError(
                f"request {request.id!r} has another context than {self.request.id!r}, whose rows "
                "depend on it"
            )
        written = [-1 if owner is None else owner.token for owner in self.owners()]
        if len(request.tokens) < len(written):
            raise ValueError(
                f"request {request.id!r} has {len(request.tokens)} tokens, {self.request.id!r} has "
                f"written {len(written)}; truncate it first"
            )
        for i, (token, theirs) in enumerate(zip(request.tokens, written, strict=False)):
            if theirs not in (-1, token):
                raise ValueError(
                    f"token {i} of {request.id!r} is {token}, {self.request.id!r} wrote {theirs}; "
                    "a fork continues what was written"
                )
        return min(len(written), len(request.tokens) - 1)
