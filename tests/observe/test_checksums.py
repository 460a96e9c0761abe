"""Changed bytes under a reader are found, in keys and in values."""

import pytest
from conftest import prompt

from kvlab.forward import Observer
from kvlab.observe import AttentionProbe, ChangedBytes, Checksums, OwnershipGuard
from kvlab.pools import PrivatePool, SimpleCachePool
from kvlab.schedule import run

PAIR = [prompt("a", 20, 1), prompt("b", 5, 2)]


class Change(Observer):
    """Changes one number of one row before a request's fourth token."""

    def __init__(self, layer: int, part: str, row: int) -> None:
        self.layer, self.part, self.row = layer, part, row

    def before(self, forward):
        if len(forward.runs[0].steps) == 3:
            lease = forward.leases[0]
            if hasattr(lease, "slot"):
                rows = getattr(lease.slot, self.part.removesuffix("s"))[self.layer]
            else:
                rows = getattr(lease.cache.layers[self.layer], self.part)[0]
            rows[0, self.row, 0] += 1


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("order", ["serial", "round_robin", 5])
def test_a_correct_pool_raises_no_alarm(tiny, requests, order, batch):
    sums = Checksums(block_size=4)
    run(tiny, requests, SimpleCachePool.for_model(tiny.config, 3, 64), order, batch, [sums])
    run(tiny, requests, PrivatePool(tiny.config), order, batch, [sums])
    assert not sums.found


@pytest.mark.parametrize("part", ["keys", "values"])
@pytest.mark.parametrize("pool", [PrivatePool, lambda c: SimpleCachePool.for_model(c, 1, 64)])
def test_one_changed_number_is_found_with_block_layer_and_part(tiny, part, pool):
    observers = [Change(1, part, 17), Checksums(block_size=8)]
    with pytest.raises(ChangedBytes) as caught:
        run(tiny, PAIR[:1], pool(tiny.config), observers=observers)
    change = caught.value
    assert (change.reader, change.layer, change.part, change.step) == ("a", 1, part, 4)
    assert change.rows == (16, 21)


def test_overwritten_rows_are_changed_bytes_for_the_reader(tiny):
    pool = SimpleCachePool.for_model(tiny.config, 2, 64)
    pool.collide("b", "a", "overwrite")
    with pytest.raises(ChangedBytes, match="'a'"):
        run(tiny, PAIR, pool, "round_robin", batch_size=2, observers=[Checksums()])


def test_rows_that_change_within_a_batched_pass_are_found_before_they_are_read(tiny):
    # A decodes into the rows of B's prompt, and both are in the same forward pass.
    pool, sums = SimpleCachePool.for_model(tiny.config, 2, 64), Checksums(stop=False)
    pool.collide("b", "a", "append")
    run(tiny, PAIR, pool, "round_robin", batch_size=2, observers=[sums])
    assert {(c.reader, c.step) for c in sums.found} >= {("b", 2), ("b", 3)}


def test_a_changed_value_leaves_the_weights_of_its_layer_alone_but_not_the_checksum(tiny):
    """Attention is blind to a value until the next layer."""
    probes = []
    for change in ([], [Change(1, "values", 3)]):
        probe, sums = AttentionProbe(keep="all"), Checksums(stop=False)
        pool = SimpleCachePool.for_model(tiny.config, 1, 64)
        guard = OwnershipGuard()
        run(tiny, PAIR[:1], pool, observers=[*change, probe, sums, guard])
        probes.append(probe.steps["a"][3])
    clean, hit = probes
    assert clean.rows[0].equal(hit.rows[0])
    assert clean.rows[1].equal(hit.rows[1])
    assert not clean.rows[2].equal(hit.rows[2])
    assert hit.foreign_mass.max() == 0
    assert guard.verdict == "clean"
    assert {(c.layer, c.part) for c in sums.found} == {(1, "values")}


def test_a_block_needs_a_row():
    with pytest.raises(ValueError, match="block_size"):
        Checksums(block_size=0)
