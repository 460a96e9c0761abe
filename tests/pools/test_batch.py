import pytest
import torch
from conftest import prompt, tiny_llama
from transformers import DynamicCache

from kvlab import decode
from kvlab.pools import PrivatePool, SimpleCachePool
from kvlab.schedule import run


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_a_slot_is_bitwise_equal_to_a_dynamic_cache_for_one_request(kv_heads):
    model = tiny_llama(kv_heads)
    request = prompt("a", 11, 3)
    pool = SimpleCachePool.for_model(model.config, 1, 32)
    ours, theirs = run(model, [request], pool)["a"], decode.cached(model, request)
    for a, b in zip(ours.steps, theirs.steps, strict=True):
        assert torch.equal(a.logits, b.logits)


def test_a_lease_works_with_transformers_generate(tiny):
    request = prompt("a", 6, 5)
    lease = SimpleCachePool.for_model(tiny.config, 1, 32).admit(request)
    ids = torch.tensor([request.tokens])
    out = tiny.generate(
        ids, cache=lease.cache, max_new_tokens=8, do_sample=False, pad_token_id=0, eos_token_id=None
    )
    assert out[0, 6:].tolist() == decode.recompute(tiny, request).tokens


@pytest.mark.parametrize("batch_size", [2, 3, 4])
@pytest.mark.parametrize("make", [PrivatePool, lambda c: SimpleCachePool.for_model(c, 4, 32)])
def test_requests_of_different_lengths_in_one_batch_give_the_tokens_of_the_recompute(
    tiny, requests, batch_size, make
):
    runs = run(tiny, requests, make(tiny.config), "round_robin", batch_size)
    for request in requests:
        assert runs[request.id].tokens == decode.recompute(tiny, request).tokens


def test_writing_past_the_capacity_fails_before_anything_is_written(tiny):
    lease = SimpleCachePool.for_model(tiny.config, 1, 8).admit(prompt("a", 3, 0, max_new_tokens=6))
    before = lease.slot.key.clone()
    with pytest.raises(ValueError, match="has 8 rows and would write row 8"):
        tiny(torch.arange(3, 12)[None], cache=lease.cache, use_cache=True)
    assert torch.equal(lease.slot.key, before)
    assert lease.slot.length == 0
    assert all(o is None for o in lease.slot.owners)


@pytest.mark.parametrize(("heads", "dim"), [(3, 8), (2, 9)])
def test_wrong_heads_or_head_dim_fail_before_anything_is_written(heads, dim):
    pool = SimpleCachePool(1, 2, num_heads=2, head_dim=8, max_seq_len=16)
    lease = pool.admit(prompt("a", 3, 0))
    wrong = torch.ones(1, heads, 3, dim)
    with pytest.raises(ValueError, match="2 key/value heads of dimension 8"):
        lease.cache.update(wrong, wrong, 0)
    assert pool.arena.key.abs().sum() == 0


def test_the_later_one_of_a_batch_wins_a_colliding_row(tiny):
    a, b = prompt("a", 5, 0), prompt("b", 5, 1)
    pool = SimpleCachePool.for_model(tiny.config, 2, 32)
    pool.collide("b", "a", "overwrite")
    run(tiny, [a, b], pool, "round_robin", batch_size=2)
    assert {o.request for o in pool.slots[0].owners if o} == {"b"}


def test_the_cache_sizes_that_transformers_asks_for_are_those_of_a_dynamic_cache(tiny):
    request = prompt("a", 6, 5)
    lease = SimpleCachePool.for_model(tiny.config, 1, 32).admit(request)
    other = DynamicCache(config=tiny.config)
    for cache in (lease.cache, other):
        tiny(torch.tensor([request.tokens]), cache=cache, use_cache=True)
    assert lease.cache.get_seq_length() == other.get_seq_length() == 6
    assert lease.cache.get_mask_sizes(1, 0) == other.get_mask_sizes(1, 0)
    assert lease.cache.get_max_length() == 32
