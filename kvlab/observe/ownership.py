"""The ownership guard: whose row is it that a request is about to read?"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from kvlab.forward import ForwardPass, Observer
from kvlab.pools.contract import OwnedLease, Owner


class ForeignRead(RuntimeError):
    """A request reads a row that is not its own.

    Attributes:
        reader: Id of the reading request.
        row: The first such row, in the order in which the request reads.
        owner: Who wrote it last; `None` if nobody has, or if the pool does not say.
        layer: The layer that reads, counted from 0.
        step: The generated token that the read is for, counted from 1.
    """

    def __init__(self, reader: str, row: int, owner: Owner | None, layer: int, step: int) -> None:
        self.reader, self.row, self.owner, self.layer, self.step = reader, row, owner, layer, step
        who = "of nobody"
        if owner:
            what = f"generation {owner.generation}, position {owner.position}, token {owner.token}"
            who = f"last written by {owner.request!r} ({what})"
        super().__init__(
            f"request {reader!r} reads row {row}, {who}, in layer {layer} for its token {step}"
        )


class OwnershipGuard(Observer):
    """Checks every row that attention reads: its owner where the pool records owners, and NaN.

    NaN is what a pool in its debug mode (`nan_fill`) keeps in rows that belong to nobody. A mask
    does not protect from it, since 0 x NaN is NaN, and an answer of NaN looks like token 0.

    Args:
        stop: Raise `ForeignRead` at the first foreign read. Otherwise the reads go on and are
            collected, one entry for each request and step.

    Attributes:
        found: The foreign reads.
        cannot_see: Requests whose pool does not record owners: only NaN was looked for.
    """

    sees = "reads"

    def __init__(self, stop: bool = True) -> None:
        self.stop = stop
        self.found: list[ForeignRead] = []
        self.cannot_see: set[str] = set()

    def reads(
        self,
        forward: ForwardPass,
        layer: int,
        key: Float[Tensor, "B G T D"],
        value: Float[Tensor, "B G T D"],
    ) -> None:
        broken: Bool[Tensor, "B T"] = (key.isnan() | value.isnan()).any(-1).any(1)
        for b, (run, lease) in enumerate(zip(forward.runs, forward.leases, strict=True)):
            bad = broken[b, : forward.ends[b]]
            owners: list[Owner | None] = [None] * len(bad)
            if isinstance(lease, OwnedLease):
                owners = lease.owners()
                bad = bad | torch.tensor(lease.foreign(), device=bad.device)
            else:
                self.cannot_see.add(run.request.id)
            if bad.any():
                row = int(bad.nonzero()[0])
                self._report(
                    ForeignRead(run.request.id, row, owners[row], layer, len(run.steps) + 1)
                )

    def _report(self, read: ForeignRead) -> None:
        known = {(f.reader, f.step) for f in self.found}
        if (read.reader, read.step) not in known:
            self.found.append(read)
        if self.stop:
            raise read

    @property
    def verdict(self) -> str:
        """ "foreign read", "cannot see" (owners are not recorded), or "clean"."""
        if self.found:
            return "foreign read"
        return "cannot see" if self.cannot_see else "clean"
