"""Any operations in any order, on both pools: what a lease reads is what was written into it.

The model is one plain list of tokens for each lease. A row's numbers stand for its whole history,
so that a row from behind another prefix is as wrong as one of another token.
"""

from __future__ import annotations

import sys
import zlib
from collections import Counter
from dataclasses import dataclass
from math import ceil
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvlab.pools import PoolFull, SimpleCachePool, TieredCachePool
from kvlab.request import Request, known

LAYERS, SLOT_ROWS, IDS = 2, 24, "abcdefgh"
TRUNK = (1, 2, 3, 1, 1, 2, 2, 3, 3, 1, 3, 2, 1, 2)
SALT = 7919 * torch.arange(2 * LAYERS * 2).reshape(2, LAYERS, 1, 1, 2)
SEEN: Counter[str] = Counter()

tokens = st.sampled_from((1, 2, 3))
prompts = st.builds(
    lambda cut, tail: (*TRUNK[:cut], *tail),
    st.integers(0, len(TRUNK)),
    st.lists(tokens, min_size=1, max_size=5),
)
contexts = st.sampled_from(((), (), (), (("tenant", "x"),), None, (("tenant", None),)))
counts = st.sampled_from((20, 20, 20, 3, 1, 0))
which = st.integers(0, len(IDS) - 1)


def content(seed: object, written: list[int], dim: int) -> torch.Tensor:
    """Keys and values of rows behind one another: `(2, layers, 1, rows, dim)`, whole numbers."""
    codes, code = [], zlib.crc32(repr(seed).encode())
    for token in written:
        code = zlib.crc32(bytes([token]), code)
        codes.append(code)
    return ((torch.tensor(codes).reshape(1, 1, 1, -1, 1) + SALT[..., :dim]) % 2**24).float()


def common(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


@dataclass
class Held:
    """A lease, and what it should hold."""

    lease: Any
    request: Request
    seed: object
    written: list[int]
    truncated: bool = False
    parked_at: int | None = None


class Operations(RuleBasedStateMachine):
    """What both pools must do; a subclass makes the pool and knows its places."""

    pool: Any

    def start(self, pool: Any, dim: int) -> None:
        self.pool, self.dim = pool, dim
        self.held: list[Held] = []
        self.gone: list[Held] = []
        # Every prompt that was written to its end, as far as its own tokens stood there then.
        self.prompts: set[tuple[object, tuple[int, ...]]] = set()
        self.admissions = self.evictions = 0

    # For a subclass: how many rows fit at most, whether `rows` more certainly fit now, what a
    # refusal must not change, and what must always hold.
    def most_rows(self) -> int: ...
    def fits(self, rows: int) -> bool: ...
    def drop(self, count: int) -> None: ...
    def places(self) -> Any: ...
    def check_places_unchanged(self, before: Any) -> None: ...
    def check_places(self) -> None: ...

    def state(self) -> list[Any]:
        def of(held: Held) -> list[Any]:
            lease, parked = held.lease, held.parked_at is not None
            lengths = [layer.get_seq_length() for layer in lease.cache.layers]
            rows = None if parked else (lease.rows(0, lease.length), lease.owners())
            return [lengths, lease.num_cached_tokens, parked, rows]

        return [sorted(self.pool.leases), *map(of, self.held)]

    def attempt(self, action: Any, refusal: Any, must: bool = False) -> Any:
        """The result of `action`, or `None` if it was refused: then nothing has changed."""
        before, places = self.state(), self.places()
        try:
            result = action()
        except refusal as error:
            SEEN[f"refused: {type(error).__name__}"] += 1
            assert self.state() == before
            self.check_places_unchanged(places)
            return None  # the rows themselves are compared after the step, in `check`
        assert not must, "was not refused"
        return result

    def take(self, action: Any, request: Request) -> Any:
        """A lease for `request`, or `None` where the pool may refuse it."""
        if request.rows_needed > self.most_rows():
            return self.attempt(action, ValueError, must=True)
        nobody = all(held.parked_at is not None for held in self.held)
        return self.attempt(action, () if nobody or self.fits(request.rows_needed) else PoolFull)

    def write(self, held: Held, new: list[int]) -> None:
        start, lease = len(held.written), held.lease
        places = lease.rows(0, start)
        written = [*held.written, *new]
        expected = content(held.seed, written, self.dim)

        def forward() -> bool:
            lease.announce(new)
            for i, layer in enumerate(lease.cache.layers):
                key, value = layer.update(*(part[i : i + 1, :, start:] for part in expected))
                assert torch.equal(key, expected[0, i : i + 1])
                assert torch.equal(value, expected[1, i : i + 1])
            return True

        if len(written) > lease.room:
            self.attempt(forward, ValueError, must=True)
            return
        may_fail = held.truncated and not self.fits(len(new))
        if self.attempt(forward, PoolFull if may_fail else ()) is None:
            SEEN["no block for a write after a truncation"] += 1
            return
        held.written = written
        SEEN["copy"] += places != lease.rows(0, start)
        key, prompt = known(held.request.context), held.request.tokens
        if key is not None and len(written) >= len(prompt):
            self.prompts.add((key, prompt[: common(prompt, tuple(written))]))

    def new_id(self) -> str:
        return next(name for name in IDS if name not in [held.request.id for held in self.held])

    def there(self, parked: bool = False) -> list[Held]:
        return [held for held in self.held if (held.parked_at is not None) is parked]

    def pick(self, index: int, parked: bool = False) -> Held:
        there = self.there(parked)
        return there[index % len(there)]

    def check_hit(self, hit: int, request: Request) -> None:
        key = known(request.context)
        stored = [common(request.tokens, prompt) for k, prompt in self.prompts if k == key]
        assert 0 <= hit <= max(stored, default=0)
        assert hit < len(request.tokens)

    def admit_now(self, request: Request) -> Held | None:
        lease = self.take(lambda: self.pool.admit(request), request)
        if lease is None:
            return None
        self.admissions += 1
        self.check_hit(lease.num_cached_tokens, request)
        key = known(request.context)
        seed = ("unknown", self.admissions) if key is None else key
        written = list(request.tokens[: lease.num_cached_tokens])
        self.held.append(Held(lease, request, seed, written))
        return self.held[-1]

    @precondition(lambda self: len(self.held) < len(IDS))
    @rule(prompt=prompts, context=contexts, new=st.integers(1, 5), count=counts)
    def admit(self, prompt, context, new, count):
        held = self.admit_now(Request(self.new_id(), prompt, new, context=context))
        if held and count:
            self.write(held, list(prompt[len(held.written) :][:count]))

    @precondition(lambda self: self.there())
    @rule(index=which, count=st.integers(1, 20))
    def prefill(self, index, count):
        held = self.pick(index)
        rest = held.request.tokens[len(held.written) :]
        if rest:
            self.write(held, list(rest[:count]))

    @precondition(lambda self: self.there())
    @rule(index=which, new=st.lists(tokens, min_size=1, max_size=4))
    def decode(self, index, new):
        held = self.pick(index)
        if held.truncated or len(held.written) >= len(held.request.tokens):
            left = held.request.rows_needed - len(held.written)
            self.write(held, new[:left] if left else [1] * (held.lease.room + 1))

    @precondition(lambda self: self.there() and len(self.held) < len(IDS))
    @rule(index=which, tail=st.lists(tokens, max_size=4), new=st.integers(1, 4))
    def fork(self, index, tail, new):
        source = self.pick(index)
        all_tokens = (*source.written, *tail)
        if not all_tokens:
            return
        request = Request(self.new_id(), all_tokens, new, context=source.request.context)
        lease = self.take(lambda: self.pool.fork(source.lease, request), request)
        if lease is not None:
            taken = min(len(source.written), len(all_tokens) - 1)
            assert lease.num_cached_tokens == taken
            self.held.append(Held(lease, request, source.seed, list(all_tokens[:taken])))
            SEEN["fork"] += 1

    @precondition(lambda self: self.there())
    @rule(index=which, length=st.integers(0, 30), new=st.lists(tokens, max_size=9))
    def truncate(self, index, length, new):
        held = self.pick(index)
        length %= len(held.written) + 1
        self.pool.truncate(held.lease, length)
        SEEN["truncation below the prompt"] += length < min(
            len(held.written), len(held.request.tokens)
        )
        held.truncated |= length < len(held.written)
        held.written = held.written[:length]
        if new and held.truncated:
            self.write(held, new[: held.request.rows_needed - length])

    @precondition(lambda self: self.there())
    @rule(index=which, dropped=st.integers(0, 9))
    def park(self, index, dropped):
        held = self.pick(index)
        self.pool.park(held.lease)
        held.parked_at = self.evictions
        self.drop(dropped)

    @precondition(lambda self: self.there(parked=True))
    @rule(index=which)
    def resume(self, index):
        held = self.pick(index, parked=True)
        if self.take(lambda: self.pool.resume(held.lease) or True, held.request):
            SEEN["resume"] += 1
            SEEN["resume after an eviction"] += held.parked_at != self.evictions
            held.parked_at = None

    @precondition(lambda self: self.held)
    @rule(index=which)
    def release(self, index):
        held = self.held.pop(index % len(self.held))
        self.pool.release(held.lease)
        SEEN["abort"] += len(held.written) < len(held.request.tokens)
        self.gone = [held]

    @precondition(lambda self: self.held)
    @rule(index=which)
    def misuse(self, index):
        """Everything that must be refused, one after another."""
        pool, held = self.pool, self.held[index % len(self.held)]
        lease, request, written = held.lease, held.request, held.written

        def fork(old: Held, id: str, *new: int, context: Any = None) -> Any:
            return pool.fork(old.lease, Request(id, new, 1, context=context or old.request.context))

        def unusable(old: Held) -> list[Any]:
            one = torch.zeros(1, 1, 1, self.dim)
            return [
                lambda: old.lease.cache.layers[0].update(one, one),
                lambda: fork(old, "new", *old.written, 1),
                lambda: pool.truncate(old.lease, 0),
                lambda: pool.park(old.lease),
            ]

        calls = [
            lambda: pool.admit(Request(request.id, (1,), 1)),
            lambda: pool.admit(Request("new", (1,) * (self.most_rows() + 1), 1)),
        ]
        for old in self.gone:
            calls += unusable(old)
            calls += [
                lambda old=old: pool.resume(old.lease),
                lambda old=old: pool.release(old.lease),
            ]
        if held.parked_at is not None:
            calls += unusable(held)
        else:
            calls += [
                lambda: pool.resume(lease),
                lambda: pool.truncate(lease, len(written) + 1),
                lambda: pool.truncate(lease, -1),
                lambda: fork(held, request.id, *written, 1),
                lambda: fork(held, "new", *written, 1, context=(("tenant", "other"),)),
            ]
            if written:
                calls += [
                    lambda: fork(held, "new", 9, *written[1:], 1),
                    lambda: fork(held, "new", *written[:-1], 9, 1),
                ]
        for call in calls:
            self.attempt(call, (ValueError, KeyError), must=True)

    @invariant()
    def check(self) -> None:
        assert sorted(self.pool.leases) == sorted(held.request.id for held in self.held)
        for held in self.held:
            if held.parked_at is not None:
                continue
            lease, count = held.lease, len(held.written)
            assert [layer.get_seq_length() for layer in lease.cache.layers] == [count] * LAYERS
            assert lease.length == count
            assert lease.room >= held.request.rows_needed
            expected, rows = content(held.seed, held.written, self.dim), lease.rows(0, count)
            assert torch.equal(self.pool.arena.key[:, :, rows], expected[0])
            assert torch.equal(self.pool.arena.value[:, :, rows], expected[1])
            owners = [(owner.position, owner.token) for owner in lease.owners()]
            assert owners == list(enumerate(held.written))
            assert lease.foreign() == [False] * count
        self.check_places()

    def fill(self) -> None:
        """One request for all rows, which an empty pool cannot refuse."""
        prompt = (*TRUNK, *[1] * self.most_rows())[: self.most_rows()]
        held = self.admit_now(Request("all", prompt, 1))
        self.write(held, list(prompt[len(held.written) :]))
        self.check()
        self.pool.release(self.held.pop().lease)

    def teardown(self) -> None:
        if sys.exc_info()[0] is None and hasattr(self, "held"):
            while self.held:
                self.pool.release(self.held.pop().lease)
                self.check()
            self.fill()


class TieredOperations(Operations):
    @initialize(
        blocks=st.one_of(st.integers(6, 10), st.integers(6, 24)),
        size=st.integers(1, 5),
        dim=st.integers(1, 2),
        share=st.sampled_from((True, True, True, False)),
        nan_fill=st.booleans(),
    )
    def make(self, blocks, size, dim, share, nan_fill):
        pool = TieredCachePool(blocks, LAYERS, 1, dim, size, share=share, nan_fill=nan_fill)
        self.start(pool, dim)
        self.blocks, self.size, self.share, self.nan_fill = pool.blocks, size, share, nan_fill
        self.tree: set[int] = set()

    def most_rows(self):
        return len(self.blocks.ref_count) * self.size

    def can_be_had(self):
        return len(self.blocks.free) + self.blocks.tree.evictable(self.blocks.unread)

    def fits(self, rows):
        return self.can_be_had() > ceil(rows / self.size)  # one more than needed, for a copy

    def places(self):
        tables = [(list(t.blocks), list(t.spare), t.hit) for t in self.blocks.tables]
        tree = [node.block for node in self.blocks.tree.nodes()]
        return list(self.blocks.ref_count), tables, tree, self.can_be_had()

    def check_places_unchanged(self, before):
        (counts, tables, tree, had), now = before, self.places()
        assert now[1] == tables
        assert now[3] == had
        evicted = set(tree) - set(now[2])
        assert all(counts[block] == 1 for block in evicted)
        assert now[0] == [count - (i in evicted) for i, count in enumerate(counts)]

    def check_places(self):
        self.pool.check()
        counts, tables, tree, _ = self.places()
        self.evictions += len(self.tree - set(tree))
        self.tree, holders = set(tree), Counter(tree)
        for blocks, spare, _ in tables:
            holders.update([*blocks, *spare])
        assert counts == [holders[block] for block in range(len(counts))]
        free = self.blocks.free
        assert sorted([*free, *holders]) == list(range(len(counts)))
        if self.nan_fill:
            rows = [block * self.size + i for block in free for i in range(self.size)]
            assert all(part[:, :, rows].isnan().all() for part in self.pool.arena.parts)

    def check_hit(self, hit, request):
        super().check_hit(hit, request)
        assert self.share or not hit
        SEEN["whole hit"] += hit > 0 and not hit % self.size
        SEEN["partial hit"] += hit % self.size > 0

    @rule(count=st.integers(1, 9))
    def evict(self, count):
        self.drop(count)

    def drop(self, count):
        free, unread = len(self.blocks.free), self.blocks.tree.evictable(self.blocks.unread)
        self.blocks.evict(count)
        assert len(self.blocks.free) == free + min(count, unread)

    def teardown(self):
        super().teardown()
        if sys.exc_info()[0] is None and hasattr(self, "held"):
            self.blocks.evict(len(self.blocks.ref_count))
            assert len(self.blocks.free) == len(self.blocks.ref_count)
            self.fill()


class SlotOperations(Operations):
    @initialize(slots=st.integers(2, 4), dim=st.integers(1, 2), nan_fill=st.booleans())
    def make(self, slots, dim, nan_fill):
        self.slots = slots
        pool = SimpleCachePool(slots, LAYERS, 1, dim, SLOT_ROWS, nan_fill=nan_fill)
        self.start(pool, dim)

    def most_rows(self):
        return SLOT_ROWS

    def fits(self, rows):
        return len(self.pool.assignment) < self.slots

    def places(self):
        return dict(self.pool.assignment)

    def check_places_unchanged(self, before):
        assert self.places() == before

    def check_places(self):
        places = self.places()
        assert len(set(places.values())) == len(places)
        assert set(places) == {held.request.id for held in self.held if held.parked_at is None}


BOTH = ["fork", "resume", "truncation below the prompt", "abort", "refused: PoolFull"]
TIERED = ["whole hit", "partial hit", "copy", "resume after an eviction"]
TIERED += ["no block for a write after a truncation"]


@pytest.mark.parametrize(
    ("machine", "exercised"),
    [(TieredOperations, [*BOTH, *TIERED]), (SlotOperations, BOTH)],
)
def test_any_operations_in_any_order(machine, exercised):
    SEEN.clear()
    options = settings(
        max_examples=200,
        stateful_step_count=40,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(machine, settings=options)
    assert {name: SEEN[name] for name in exercised if SEEN[name] < 5} == {}
