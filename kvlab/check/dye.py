"""Dyed rows: keys and values that say what they are.

A real row of a cache depends on everything before it, and nobody can tell by looking whose it is.
A dyed row is drawn from a hash of exactly that: context, all tokens up to the row, layer, head, key
or value. Whatever a pool hands back can then be told apart from what it should have handed back,
row by row, and named.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PretrainedConfig

from kvlab.pools.arena import kv_shape

What = Literal["foreign", "nobody", "position", "layout", "scale", "unknown"]
"""foreign: another request's row. nobody: zeros or NaN. position: an own row of another place.
layout: an own row of another layer, head or kind, or its numbers in another order. scale: an own
row times a factor. unknown: nothing that was ever written."""


class Label(NamedTuple):
    """What a dyed row is."""

    chain: int  # hash of the context and of all tokens up to this row
    layer: int
    value: int  # 0 key, 1 value
    head: int


def chain_of(start: object, tokens: Iterable[int]) -> list[int]:
    """For each token a hash of `start` and of all tokens up to it."""
    chain, chains = zlib.crc32(repr(start).encode()), []
    for token in tokens:
        chain = zlib.crc32(b"%d %d" % (chain, token))
        chains.append(chain)
    return chains


class Dye:
    """Draws rows, and names a row that came back. One for all histories of a check."""

    def __init__(self, config: PretrainedConfig) -> None:
        self.layers, self.heads, self.dim = kv_shape(config)
        self.vocab = int(config.get_text_config().vocab_size)
        self.dtype = getattr(config, "dtype", None) or torch.float32
        self._rows: dict[tuple[int, int], Float[Tensor, "L 2 G D"]] = {}

    def row(self, chain: int, first: int) -> Float[Tensor, "L 2 G D"]:
        """The keys and values of one row. Requests differ in size, as real ones do, so that a scale
        that is another's shows; rows of one request (of one `first` hash) do not, so that it may
        have a scale of its own."""
        key = (chain, first)
        if key not in self._rows:
            draw = np.random.default_rng(chain)
            shape = (self.layers, 2, self.heads, self.dim)
            row = torch.from_numpy(draw.uniform(-1, 1, shape).astype("float32"))
            self._rows[key] = (row * 2.0 ** (first % 6)).to(self.dtype)
        return self._rows[key]

    def near(
        self, seen: Float[Tensor, "G T D"], wanted: Float[Tensor, "G T D"]
    ) -> Float[Tensor, "G T"]:
        """Which rows are right: exactly, or within the rounding of an 8-bit code of their own."""
        step = wanted.abs().amax(-1, keepdim=True) / 10
        return ((seen - wanted).abs() <= step).all(-1)

    def name(
        self,
        got: Float[Tensor, " D"],
        wanted: Label,
        own: dict[int, int],
        written: dict[int, int],
    ) -> tuple[What, int | None]:
        """What a wrong row is, and the chain of the foreign row that it is.

        Args:
            own: Chains of the reader's rows, each with the first one of its request.
            written: The same of everything that was written on this pool.
        """
        if not got.isfinite().all() or not got.any():
            return "nobody", None
        label, exact = self._find(got, written)
        mine = self.row(wanted.chain, own[wanted.chain])[wanted.layer, wanted.value, wanted.head]
        # Cut off at a scale that is far too small, little more than the signs of a row are left.
        if not exact and torch.cosine_similarity(mine.float(), got, dim=-1) > 0.8:
            label = wanted
        if label is None:
            return "unknown", None
        foreign = None if label.chain in own else label.chain
        if label[1:] != wanted[1:]:
            return "layout", foreign
        if foreign is not None:
            return "foreign", foreign
        if label.chain != wanted.chain:
            return "position", None
        return ("layout" if exact else "scale"), None

    def _find(self, got: Float[Tensor, " D"], written: dict[int, int]) -> tuple[Label | None, bool]:
        """The dyed row that a vector is (exactly), or comes from: permuted, scaled, rounded."""
        chains = list(written)
        rows = torch.stack([self.row(c, f) for c, f in written.items()]).float()
        flat = rows.flatten(0, 3)
        alike = torch.cosine_similarity(flat, got[None], dim=-1)
        in_order = (flat == got).all(-1)
        permuted = (flat.sort(-1).values == got.sort().values).all(-1)
        # A permutation may also mix the heads of one row: then most of its numbers are there.
        mixed = torch.isin(flat, got).sum(-1) > max(1, self.dim // 4)
        for which, exact in (
            (in_order, True),
            (permuted, True),
            (alike > 0.9, False),
            (mixed, True),
        ):
            if which.any():
                best = int((which * (1 + alike)).argmax())
                at = np.unravel_index(best, rows.shape[:4])
                return Label(chains[at[0]], *map(int, at[1:])), exact
        return None, False
