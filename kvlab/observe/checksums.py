"""A checksum for each block of rows: did the bytes change between two reads?"""

from __future__ import annotations

import zlib

import torch
from jaxtyping import Float
from torch import Tensor

from kvlab.forward import ForwardPass, Observer


class ChangedBytes(RuntimeError):
    """Rows of a request changed after it had read them.

    Attributes:
        reader: Id of the reading request.
        rows: First and last changed row of the block, as far as the checksum can tell.
        layer: The layer, counted from 0.
        part: "keys" or "values".
        step: The generated token that the read is for, counted from 1.
    """

    def __init__(
        self, reader: str, rows: tuple[int, int], layer: int, part: str, step: int
    ) -> None:
        self.reader, self.rows, self.layer, self.part, self.step = reader, rows, layer, part, step
        super().__init__(
            f"the {part} in rows {rows[0]} to {rows[1]} of layer {layer} changed before request "
            f"{reader!r} read them for its token {step}"
        )


class Checksums(Observer):
    """Remembers a CRC-32 of every block that a request has read, and looks again at the next read.

    Written rows of a cache never change while their request lives, so any change is damage, in
    keys and in values alike. It needs nothing from the pool.

    Args:
        block_size: Rows in a block.
        stop: Raise `ChangedBytes` at the first change. Otherwise changes are collected in `found`.
    """

    sees = "reads"

    def __init__(self, block_size: int = 16, stop: bool = True) -> None:
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1, got {block_size}")
        self.block_size, self.stop = block_size, stop
        self.found: list[ChangedBytes] = []
        self._known: dict[tuple[str, int, str], dict[tuple[int, int], int]] = {}

    def before(self, forward: ForwardPass) -> None:
        new = {run.request.id for run in forward.runs if not run.steps}
        self._known = {k: v for k, v in self._known.items() if k[0] not in new}

    def reads(
        self,
        forward: ForwardPass,
        layer: int,
        key: Float[Tensor, "B G T D"],
        value: Float[Tensor, "B G T D"],
    ) -> None:
        for b, (run, end) in enumerate(zip(forward.runs, forward.ends, strict=True)):
            if key.shape[2] < end:
                raise ValueError(
                    f"layer {layer} shows {key.shape[2]} of {end} rows: checksums need caches "
                    "without a sliding window"
                )
            for part, rows in (("keys", key[b]), ("values", value[b])):
                place = (run.request.id, layer, part)
                spans = [(s, min(s + self.block_size, end)) for s in range(0, end, self.block_size)]
                sums = {(s, e): checksum(rows[:, s:e]) for s, e in spans}
                for (s, e), known in self._known.get(place, {}).items():
                    # The last block of the read before may have been shorter than it is now.
                    now = sums[s, e] if (s, e) in sums else checksum(rows[:, s:e])
                    if now != known:
                        step = len(run.steps) + 1
                        self._report(ChangedBytes(run.request.id, (s, e - 1), layer, part, step))
                self._known[place] = sums

    def _report(self, change: ChangedBytes) -> None:
        self.found.append(change)
        if self.stop:
            raise change


def checksum(rows: Float[Tensor, "G T D"]) -> int:
    """CRC-32 of the bytes of some rows."""
    return zlib.crc32(rows.contiguous().view(torch.uint8).cpu().numpy().tobytes())
