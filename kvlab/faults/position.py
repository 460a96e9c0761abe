"""Position: a wrong offset, position number, ring index, or block table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from kvlab.faults.catalogue import OwnView, fault
from kvlab.pools import BatchView, Lease, SimpleCachePool, TieredCachePool
from kvlab.pools.arena import Rows
from kvlab.pools.batch import KeysValues, TieredBatch
from kvlab.pools.lease import LeaseLayer
from kvlab.pools.slots import SlotLease
from kvlab.pools.tiered import TieredLease


class RestartsAtZero(TieredBatch):
    def positions(self, queries: int) -> Int[Tensor, "B Q"]:
        hits = torch.tensor([lease.num_cached_tokens for lease in self.leases])
        return super().positions(queries) - hits[:, None]  # BUG: forgets the hit


@fault("positions restart after a hit", "position", ["MinivLLM PR #98"])
class RestartsAtZeroPool(TieredCachePool):
    """The cached prefix is skipped, and the rest is counted from position 0.

    Reported for a teaching engine. The user sees nonsense, but only when the prefix was cached.
    Evidence: right when cold, wrong after a hit on an equal prompt; the rows are right, their
    positions are not.
    """

    batch_type = RestartsAtZero


class SideBySide(TieredLease):
    def where(self, start: int, end: int) -> Rows:
        first = self.table.blocks[0] * self.arena.block_size
        if first + end > len(self.arena.owners):
            return super().where(start, end)
        return slice(first + start, first + end)  # BUG: the table says otherwise


@fault("table ignored", "position", ["TGI PR #2711", "ssd #23"])
class SideBySidePool(TieredCachePool):
    """Blocks are taken to lie side by side; the table is not asked.

    Reported for prefix hits and for speculative steps. Right as long as memory is fresh, wrong
    when it is in pieces. Evidence: rows are not where the log says that they were written.
    """

    lease_type = SideBySide


class PaddedView(BatchView):
    """Fills a batch up to a multiple of four, as recorded graphs ask for; pads go to slot -1."""

    pool: SimpleCachePool

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> KeysValues:
        if len(self.leases) % 4:
            slot = self.pool.slots[-1]  # BUG: -1 is a slot
            slot.key[layer_idx, :, 0] = key_states[-1, :, 0]
            slot.value[layer_idx, :, 0] = value_states[-1, :, 0]
        return super().update(key_states, value_states, layer_idx)


@fault("padding lands in slot -1", "position", ["vLLM #43810"])
class PaddedViewPool(OwnView):
    """Padding of a batch is written to slot -1, which is the last slot.

    Reported as exactly that. The user in the last slot sees a wrong start of the prompt, whenever
    the size of the batch is odd. Evidence: right one by one, wrong in a batch.
    """

    view_type = PaddedView


class OnePosition(BatchView):
    def positions(self, queries: int) -> Int[Tensor, "B Q"]:
        return super().positions(queries)[:1].expand(len(self.leases), -1)  # BUG: of the first row


@fault("one position for all", "position", ["unsloth #3699"])
class OnePositionPool(OwnView):
    """One vector of positions serves all rows of a batch, whatever their lengths.

    Reported for left padding. The user sees worse answers in mixed batches. Evidence: right alone,
    wrong beside a request of another length; the rows are right, their positions are not.
    """

    view_type = OnePosition


@fault("rows permuted, slots not", "position", ["DeepSpeed #2506"])
class PermutedPool(OwnView):
    """The batch is in one order, the slots in another.

    Reported for beam search: the requests are reordered, the cache is not. The user sees the
    answer of the request beside. Evidence: right alone, foreign rows in a batch.
    """

    def batch(self, leases: Sequence[Lease], counts: Sequence[int], shared: bool) -> Any:
        order = sorted(leases, key=lambda x: -x.slot.id)  # type: ignore[attr-defined]
        return super().batch(order, counts, shared)  # BUG: the queries are in the turn's order


class HalfRing(LeaseLayer):
    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> KeysValues:
        start, half = self.get_seq_length(), self.lease.room // 2
        key, value = super().update(key_states, value_states)
        rows = torch.arange(start, key.shape[2])
        if rows[-1] >= half:  # BUG: wraps at half of the ring
            at = torch.tensor(self.lease.rows(0, half))[rows % half]
            self.lease.arena.write(self.layer, at, key_states[0], value_states[0])
        return key, value


class HalfRingLease(SlotLease):
    layer_type = HalfRing


@fault("ring wraps too early", "position", ["transformers PR #47708", "mlx-vlm #1715"])
class HalfRingPool(SimpleCachePool):
    """The head of the ring wraps before the ring is full; the oldest rows are overwritten.

    Reported for sliding windows whose start is taken modulo the wrong length. The user sees long
    chats forget their beginning. Evidence: right for short requests, wrong for long ones, even for
    one that is alone.
    """

    lease_type = HalfRingLease
