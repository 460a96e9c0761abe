"""Layout: heads, keys and values, or strides, read as something else than was written."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from kvlab.faults.catalogue import OwnView, fault
from kvlab.pools import BatchView, SimpleCachePool, TieredCachePool
from kvlab.pools.arena import Arena
from kvlab.pools.batch import KeysValues
from kvlab.pools.lease import LeaseLayer
from kvlab.pools.slots import SlotLease


class MisalignedLayer(LeaseLayer):
    wrong_heads = 1

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> KeysValues:
        key, value = super().update(key_states, value_states)
        heads = key.shape[1]
        wrong = min(self.wrong_heads, heads)
        # BUG: the first heads read what the next head wrote
        order = [(h + 1) % heads if h < wrong else h for h in range(heads)]
        return key[:, order], value[:, order]


class MisalignedLease(SlotLease):
    layer_type = MisalignedLayer


@fault("misaligned heads", "layout", ["vLLM #46204", "vLLM #37703"])
class MisalignedHeads(SimpleCachePool):
    """Some heads read the keys and values of the next head.

    Reported where writer and reader disagree on the order of heads. The user sees an answer that
    is wrong in some respect only. Evidence: wrong for one lone request; the rows are its own, of
    another head.
    """

    lease_type = MisalignedLease


def misaligned(wrong_heads: int) -> type[SimpleCachePool]:
    """The same with any number of wrong heads (claim B3 counts them from 1 to all)."""
    layer = type("Layer", (MisalignedLayer,), {"wrong_heads": wrong_heads})
    lease = type("Lease", (MisalignedLease,), {"layer_type": layer})
    return type("Misaligned", (SimpleCachePool,), {"lease_type": lease})


class KeysTwice(BatchView):
    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> KeysValues:
        key, _ = super().update(key_states, value_states, layer_idx)
        return key, key  # BUG: the second is filled from the first


@fault("keys in place of values", "layout", ["transformers #34232"])
class KeysTwicePool(OwnView):
    """A helper for batches fills the values from the keys.

    Reported as exactly that. The user sees nonsense, in batches only. Evidence: right alone, wrong
    in a batch; the rows are keys where values should be.
    """

    view_type = KeysTwice


class TokensAsHeads(Arena):
    def gather(
        self, layer: int, rows: Tensor
    ) -> tuple[Float[Tensor, "G T D"], Float[Tensor, "G T D"]]:
        key, value = super().gather(layer, rows)
        heads, tokens, dim = key.shape
        # BUG: the second reader takes the first axis for tokens
        shape = (tokens, heads, dim)
        return key.reshape(shape).transpose(0, 1), value.reshape(shape).transpose(0, 1)


@fault("heads and tokens swapped", "layout", ["vLLM #46204", "LMCache #4463"])
class TokensAsHeadsPool(TieredCachePool):
    """The gathering reader takes the head axis for the token axis.

    Reported for connectors between two layouts. Right as long as rows are read in place, wrong as
    soon as they are gathered. Evidence: own rows of other heads and positions.
    """

    arena_type = TokensAsHeads


class CopySwaps(Arena):
    def copy(self, source: int, target: int, rows: int) -> None:
        super().copy(source, target, rows)
        where = slice(target * self.block_size, target * self.block_size + rows)
        keys = self.key[:, :, where].clone()
        self.key[:, :, where] = self.value[:, :, where]  # BUG: the halves are in the other order
        self.value[:, :, where] = keys


@fault("copy swaps keys and values", "layout", ["kvcached PR #391", "LMCache #4247"])
class CopySwapsPool(TieredCachePool):
    """A raw copy of a block trusts a shape in which keys and values lie the other way round.

    Reported for transfers by raw offsets. The user sees wrong answers where a prefix ends inside
    of a block. Evidence: wrong after a hit on an equal prompt; keys where values should be.
    """

    arena_type = CopySwaps


class ReversedTail(Arena):
    def copy(self, source: int, target: int, rows: int) -> None:
        super().copy(source, target, rows)
        where = slice(target * self.block_size, target * self.block_size + rows)
        self.key[:, :, where] = torch.flip(self.key[:, :, where], [-1])  # BUG: another stride


@fault("copy with another stride", "layout", ["vLLM PR #52516"])
class ReversedTailPool(TieredCachePool):
    """The copy of a block walks the head dimension in another order than its writer did.

    Reported as strides taken from a padded size. Evidence: as above; the numbers of a row are all
    there, in another order.
    """

    arena_type = ReversedTail
