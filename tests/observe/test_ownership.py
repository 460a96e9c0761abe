"""Foreign reads are loud, and name who read what."""

import pytest
import torch
from conftest import prompt

from kvlab.observe import ForeignRead, OwnershipGuard
from kvlab.pools import PrivatePool, SimpleCachePool
from kvlab.schedule import run


def pool_for(model, slots=2, **options):
    return SimpleCachePool.for_model(model.config, slots, 64, nan_fill=True, **options)


PAIR = [prompt("a", 9, 1), prompt("b", 5, 2)]


@pytest.mark.parametrize("order", ["serial", "round_robin", 1, 2, 3])
@pytest.mark.parametrize("batch", [1, 4])
def test_a_correct_pool_is_clean_in_every_order_and_answers_as_without_nan(
    tiny, requests, order, batch
):
    guard = OwnershipGuard()
    runs = run(tiny, requests, pool_for(tiny, 3), order, batch, [guard])
    plain = run(tiny, requests, SimpleCachePool.for_model(tiny.config, 3, 64), order, batch)
    assert {k: r.tokens for k, r in runs.items()} == {k: r.tokens for k, r in plain.items()}
    assert guard.verdict == "clean"


def test_an_overwritten_row_names_reader_row_owner_layer_and_step(tiny):
    pool = pool_for(tiny)
    pool.collide("b", "a", "overwrite")
    with pytest.raises(ForeignRead, match="request 'a' reads row 0, last written by 'b'") as caught:
        run(tiny, PAIR, pool, "round_robin", observers=[OwnershipGuard()])
    read = caught.value
    assert (read.reader, read.row, read.layer, read.step) == ("a", 0, 0, 2)
    assert read.owner == ("b", 2, 0, PAIR[1].tokens[0])
    assert not pool.assignment  # nobody is left behind


def test_an_appended_request_is_stopped_at_its_first_token(tiny):
    pool = pool_for(tiny)
    pool.collide("b", "a", "append")
    with pytest.raises(ForeignRead) as caught:
        run(tiny, PAIR, pool, "round_robin", observers=[OwnershipGuard()])
    assert (caught.value.reader, caught.value.step, caught.value.owner.request) == ("b", 1, "a")


def test_a_stale_pointer_into_released_rows_is_loud_although_nobody_is_there(tiny):
    pool = pool_for(tiny, slots=1)
    pool.collide("b", "a", "append")
    with pytest.raises(ForeignRead) as caught:
        run(tiny, PAIR, pool, "serial", observers=[OwnershipGuard()])
    assert (caught.value.reader, caught.value.row) == ("b", 0)


def test_without_stopping_each_foreign_step_is_collected_once(tiny):
    pool, guard = SimpleCachePool.for_model(tiny.config, 2, 64), OwnershipGuard(stop=False)
    pool.collide("b", "a", "overwrite")
    run(tiny, PAIR, pool, "round_robin", observers=[guard])
    assert [r.step for r in guard.found if r.reader == "a"] == list(range(2, 9))
    assert guard.verdict == "foreign read"


def test_nan_in_one_layer_is_found_there(tiny):
    class Poison(OwnershipGuard):
        def before(self, forward):
            if len(forward.runs[0].steps) == 3:
                forward.leases[0].slot.value[1, :, 2] = torch.nan

    with pytest.raises(ForeignRead) as caught:
        run(tiny, PAIR[:1], pool_for(tiny), observers=[Poison()])
    assert (caught.value.row, caught.value.layer, caught.value.step) == (2, 1, 4)


def test_a_pool_that_records_no_owners_is_never_called_clean(tiny):
    guard = OwnershipGuard()
    run(tiny, PAIR, PrivatePool(tiny.config), observers=[guard])
    assert guard.verdict == "cannot see"
    assert guard.cannot_see == {"a", "b"}


def test_debug_mode_fills_rows_of_nobody_with_nan(tiny):
    pool = pool_for(tiny, slots=1)
    slot = pool.slots[0]
    assert slot.key.isnan().all()
    lease = pool.admit(PAIR[0])
    tiny(torch.tensor([PAIR[0].tokens]), cache=lease.cache, use_cache=True)
    assert not slot.key[:, :, :9].isnan().any()
    assert slot.value[:, :, 9:].isnan().all()
    pool.release(lease)
    assert slot.key.isnan().all()
    assert slot.value.isnan().all()
