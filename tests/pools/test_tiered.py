"""The tiered pool isolates: the tokens of the cold recompute, whatever shares or aborts."""

from dataclasses import replace

import pytest
import torch
from conftest import prompt, tiny_llama
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvlab.attention import use_kvlab_attention
from kvlab.decode import recompute
from kvlab.forward import Observer
from kvlab.observe import AttentionProbe, Checksums, OwnershipGuard
from kvlab.pools import PoolFull, PrivatePool, TieredCachePool
from kvlab.request import Request
from kvlab.schedule import run

PREFIX = prompt("p", 21, 9).tokens


def sharing(id: str, tail: int, seed: int, new: int = 6, context=()) -> Request:
    return Request(id, (*PREFIX, *prompt(id, tail, seed).tokens), new, context=context)


GROUP = [sharing(f"s{i}", 2 + i % 3, i) for i in range(5)]
MIXED = [*GROUP, prompt("alone", 9, 77, 6), Request("twin", GROUP[0].tokens, 6)]


def pool_for(model, blocks=60, **options):
    return TieredCachePool.for_model(model.config, blocks, block_size=8, **options)


@pytest.fixture(scope="module")
def references(tiny):
    return {r.id: recompute(tiny, r).tokens for r in MIXED}


def tokens(runs):
    return {k: r.tokens for k, r in runs.items()}


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("order", ["serial", "round_robin", 1, 2])
@pytest.mark.parametrize("batch", [1, 3, 8])
def test_every_order_and_batch_gives_the_tokens_of_the_recompute(
    tiny, references, order, batch, share
):
    pool = pool_for(tiny, share=share)
    runs = run(tiny, MIXED, pool, order, batch)
    assert tokens(runs) == references
    hits = [runs[r.id].num_cached_tokens for r in MIXED]
    assert (max(hits) >= 16) == share  # full blocks at least
    pool.check()


@pytest.mark.parametrize("order", ["serial", "round_robin", 3])
@pytest.mark.parametrize("batch", [1, 8])
def test_owners_nan_and_checksums_stay_silent(tiny, references, order, batch):
    guard, probe = OwnershipGuard(), AttentionProbe()
    pool = pool_for(tiny, nan_fill=True)
    runs = run(tiny, MIXED, pool, order, batch, [guard, Checksums(block_size=4), probe])
    assert tokens(runs) == references
    assert guard.verdict == "clean"
    assert max(r.num_cached_tokens for r in runs.values()) > 0
    for steps in probe.steps.values():
        assert all(s.foreign_mass.max() == 0 for s in steps)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_shared_prefix_attention_differs_from_gathered_by_rounding_only(kv_heads):
    model = tiny_llama(kv_heads)

    class Watching(Observer):
        sees = "reads"  # makes the pool gather

    together = run(model, MIXED, pool_for(model), "round_robin", 8)
    gathered = run(model, MIXED, pool_for(model), "round_robin", 8, [Watching()])
    assert tokens(together) == tokens(gathered)
    for name in together:
        for a, b in zip(together[name].steps, gathered[name].steps, strict=True):
            torch.testing.assert_close(a.logits, b.logits, atol=1e-4, rtol=0)


def test_gathered_rows_give_the_bits_of_private_caches_of_the_same_shapes(tiny):
    """The prefix is computed once, by whoever came first; then every decode step is the same."""
    first = [Request("first", PREFIX, 1)]
    pool = pool_for(tiny)
    run(tiny, first, pool)
    lease = pool.admit(GROUP[1])
    private = PrivatePool(tiny.config).admit(GROUP[1])
    rest = list(GROUP[1].tokens[lease.num_cached_tokens :])
    with torch.inference_mode():
        tiny(torch.tensor([GROUP[1].tokens[: lease.num_cached_tokens]]), cache=private.cache)
        ours = tiny(torch.tensor([rest]), cache=lease.cache).logits
        theirs = tiny(torch.tensor([rest]), cache=private.cache).logits
        assert ours.equal(theirs)
        for token in (5, 6, 7):
            ours = tiny(torch.tensor([[token]]), cache=lease.cache).logits
            theirs = tiny(torch.tensor([[token]]), cache=private.cache).logits
            assert ours.equal(theirs)


def test_a_shared_block_is_copied_by_its_first_writer_and_the_count_falls(tiny):
    pool = pool_for(tiny)
    run(tiny, [Request("first", PREFIX, 1)], pool)
    lease = pool.admit(GROUP[0])
    assert lease.num_cached_tokens == 21  # two blocks of 8 and five rows of a third
    block = lease.table.blocks[2]
    assert pool.blocks.ref_count[block] == 2
    before = pool.arena.key[:, :, block * 8 : block * 8 + 5].clone()
    tiny(torch.tensor([GROUP[0].tokens[21:]]), cache=lease.cache)
    assert lease.table.blocks[2] != block
    assert pool.blocks.ref_count[block] == 1
    copy = lease.table.blocks[2]
    assert pool.arena.key[:, :, copy * 8 : copy * 8 + 5].equal(before)
    assert pool.arena.key[:, :, block * 8 : block * 8 + 5].equal(before)
    pool.check()


def test_a_prefix_is_invisible_until_it_is_completely_written(tiny):
    pool = pool_for(tiny)
    one = pool.admit(GROUP[0])
    tiny(torch.tensor([GROUP[0].tokens[:16]]), cache=one.cache)  # a chunk of the prefill
    assert pool.admit(GROUP[1]).num_cached_tokens == 0
    tiny(torch.tensor([GROUP[0].tokens[16:]]), cache=one.cache)
    assert (
        pool.admit(GROUP[2]).num_cached_tokens == 16
    )  # full blocks; the last one is still written
    pool.release(one)
    assert pool.admit(GROUP[3]).num_cached_tokens >= 21
    pool.check()


@pytest.mark.parametrize("at", range(0, 27, 3))
def test_an_abort_at_any_step_returns_every_block_once(tiny, references, at):
    pool = pool_for(tiny, nan_fill=True)
    lease = pool.admit(GROUP[0])
    for token in GROUP[0].tokens[:at]:
        tiny(torch.tensor([[token]]), cache=lease.cache)
    pool.release(lease)
    pool.check()
    with pytest.raises(KeyError, match="released twice"):
        pool.release(lease)
    with pytest.raises(ValueError, match="given back"):
        tiny(torch.tensor([[5]]), cache=lease.cache)
    assert tokens(run(tiny, MIXED, pool, "round_robin", 4)) == references
    pool.check()


def test_a_full_pool_refuses_before_anything_is_written_and_goes_on_after_a_release(tiny):
    pool = pool_for(tiny, blocks=8, share=False)
    one = pool.admit(GROUP[0])
    counts, key = list(pool.blocks.ref_count), pool.arena.key.clone()
    with pytest.raises(PoolFull, match=r"7 blocks are needed, 4 are free"):
        pool.admit(prompt("big", 50, 1, 6))
    assert pool.blocks.ref_count == counts
    assert pool.arena.key.equal(key)
    pool.release(one)
    pool.admit(prompt("big", 50, 1, 6))


def test_a_request_that_can_never_fit_is_told_so(tiny):
    with pytest.raises(ValueError, match="needs 13 blocks of 8 rows, the pool has 8"):
        pool_for(tiny, blocks=8).admit(prompt("big", 96, 1, 6))


def test_requests_wait_for_room_and_old_prefixes_make_way(tiny):
    pool = pool_for(tiny, blocks=8)
    many = [prompt(f"m{i}", 20, i, 6) for i in range(6)]
    runs = run(tiny, many, pool, "round_robin", 4)
    assert tokens(runs) == {r.id: recompute(tiny, r).tokens for r in many}
    pool.check()


def test_other_tenants_find_nothing(tiny):
    pool = pool_for(tiny)
    tenants = [sharing(t, 3, 1, context=(("tenant", t),)) for t in "ab"]
    unknown = [sharing(t, 3, 1, context=(("image", None),)) for t in "cd"]
    runs = run(tiny, [*tenants, *unknown], pool)
    assert [r.num_cached_tokens for r in runs.values()] == [0, 0, 0, 0]
    again = run(tiny, [sharing("e", 3, 1, context=(("tenant", "a"),))], pool)
    assert again["e"].num_cached_tokens > 20


def test_memory_is_that_of_one_prefix_and_the_private_rows(tiny):
    group = [Request(f"r{i}", (*PREFIX[:16], *prompt("x", 3, i).tokens), 6) for i in range(4)]
    blocks = 2 + 4 * 1  # 16 shared rows, 8 private rows each, generated ones included
    pool = pool_for(tiny, blocks=blocks)
    leases = []
    for request in group:
        lease = pool.admit(request)
        tiny(torch.tensor([request.tokens[lease.num_cached_tokens :]]), cache=lease.cache)
        leases.append(lease)
    with pytest.raises(PoolFull):
        pool.admit(sharing("one more", 3, 50))
    pool.check()


def test_half_precision_works_too():
    model = tiny_llama().to(torch.float16)
    use_kvlab_attention(model)
    pool = pool_for(model, dtype=torch.float16)
    runs = run(model, GROUP, pool, "round_robin", 4)
    assert max(r.num_cached_tokens for r in runs.values()) > 0
    for request in GROUP:
        plain = run(model, [request], PrivatePool(model.config))[request.id]
        same = [a == b for a, b in zip(plain.tokens, runs[request.id].tokens, strict=True)]
        assert same[0]


def test_rows_of_another_shape_are_refused_before_they_are_written():
    pool = TieredCachePool(4, 1, 2, 3)
    lease = pool.admit(Request("a", (1, 2), 1))
    for heads, dim in ((1, 3), (2, 1)):
        with pytest.raises(ValueError, match="2 key/value heads of dimension 3"):
            lease.cache.update(*[torch.ones(1, heads, 2, dim)] * 2, 0)
    assert lease.length == 0
    assert not pool.arena.key.any()


class PoolMachine(RuleBasedStateMachine):
    """Admit, extend, branch, abort and evict against lists of tokens: the rows must be theirs.

    A row's key is set to its token and position, so that reading back tells whose it is.
    """

    @initialize(blocks=st.integers(6, 20))
    def start(self, blocks):
        self.pool = TieredCachePool(blocks, 2, 1, 2, block_size=4, nan_fill=True)
        self.leases = {}
        self.count = 0

    def write(self, lease, values):
        start = lease.length
        lease.announce(values)
        for layer in lease.cache.layers:
            rows = torch.tensor([[v, start + i] for i, v in enumerate(values)]).float()[None, None]
            key, value = layer.update(rows, -rows)
            assert key.shape[2] == start + len(values)
            assert not key.isnan().any()
            assert value.equal(-key)

    @rule(
        tokens=st.lists(st.integers(0, 2), min_size=1, max_size=14),
        new=st.integers(1, 5),
        context=st.sampled_from([(), (("tenant", "x"),), None]),
    )
    def admit(self, tokens, new, context):
        self.count += 1
        request = Request(f"r{self.count}", tuple(tokens), new, context=context)
        before = list(self.pool.blocks.ref_count)
        try:
            lease = self.pool.admit(request)
        except (PoolFull, ValueError):
            held = {
                b for x in self.leases.values() for b in (*x[0].table.blocks, *x[0].table.spare)
            }
            assert all(self.pool.blocks.ref_count[b] == before[b] for b in held)
            return
        hit = lease.num_cached_tokens
        assert hit < len(tokens)
        if context is None:
            assert hit == 0
        self.leases[request.id] = (lease, list(tokens))
        assert lease.owners() == lease.granted
        assert [o.token for o in lease.granted] == tokens[:hit]

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), count=st.integers(1, 6))
    def extend(self, data, count):
        name = data.draw(st.sampled_from(sorted(self.leases)))
        lease, expected = self.leases[name]
        left = expected[lease.length :]
        if left:  # a chunk of the prompt
            self.write(lease, left[:count])
        elif lease.length < lease.request.rows_needed:
            token = data.draw(st.integers(0, 2))
            expected.append(token)
            self.write(lease, [token])

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data):
        name = data.draw(st.sampled_from(sorted(self.leases)))
        self.pool.release(self.leases.pop(name)[0])

    @rule(count=st.integers(1, 8))
    def evict(self, count):
        self.pool.blocks.evict(count)

    @invariant()
    def counts_are_right(self):
        if hasattr(self, "pool"):
            self.pool.check()

    @invariant()
    def every_lease_reads_its_own_tokens(self):
        for lease, expected in getattr(self, "leases", {}).values():
            rows = lease.rows(0, lease.length)
            key = self.pool.arena.key[:, 0, rows]
            for layer in key:
                assert layer[:, 0].tolist() == expected[: lease.length]
                assert layer[:, 1].tolist() == list(range(lease.length))
            assert not any(lease.foreign())


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, derandomize=True
)


def test_a_twin_of_a_prompt_that_fills_the_pool_is_served_without_its_prefix(tiny):
    """Found by the conformance suite: a shared block in part costs one block more than there is."""
    pool = TieredCachePool.for_model(tiny.config, 6, block_size=4)
    first = prompt("first", 18, 0, 6)
    twin = replace(first, id="twin")
    runs = run(tiny, [first, twin], pool, "serial")
    assert runs["twin"].tokens == runs["first"].tokens
    pool.check()


@pytest.mark.parametrize("cut", ["source", "fork"])
def test_who_takes_rows_back_cannot_starve_the_other_side_of_a_fork(cut):
    """Found by tests/pools/test_operations.py: one took the block set aside for the other."""
    pool = TieredCachePool(7, 1, 1, 1, block_size=2)
    source = pool.admit(Request("a", (1,) * 5, 3))
    write(source, (1,) * 5)
    fork = pool.fork(source, Request("b", (1,) * 5 + (2,) * 3, 2))
    greedy, other = (source, fork) if cut == "source" else (fork, source)
    pool.truncate(greedy, 1)
    with pytest.raises(PoolFull, match="copy"):
        write(greedy, [3])
    write(other, [2] * (other.request.rows_needed - other.length))
    pool.check()


def test_what_was_written_instead_of_a_prompt_is_not_published():
    pool = TieredCachePool(8, 1, 1, 1, block_size=4)
    write(pool.admit(Request("a", (1, 2, 3, 4, 5), 1)), (1, 2, 9, 9, 9))
    assert pool.admit(Request("b", (1, 2, 3, 4, 5), 1)).num_cached_tokens == 0


def write(lease, tokens):
    lease.announce(list(tokens))
    rows = torch.zeros(1, 1, len(tokens), 1)
    lease.cache.update(rows, rows, 0)
