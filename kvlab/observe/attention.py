"""The attention probe: what the newest token of every step looks at, and whose rows those are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import pandas as pd
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from kvlab.forward import ForwardPass, Observer
from kvlab.models import LoadedModel
from kvlab.pools.contract import OwnedLease, Owner

TOP = 3


@dataclass(frozen=True)
class AttentionStep:
    """Attention of one generated token, for L layers and H heads over T cache rows.

    Attributes:
        maximum: Largest weight.
        entropy: -sum(w ln w) in nats; 0 is one row only, ln T is all rows alike.
        top: Indices of the three most attended rows, the strongest first.
        top_share: Their weights.
        foreign_mass: Share on rows that somebody else wrote last and no lease grants; `None` where
            the pool does not record owners: then it cannot be seen.
        owners: Last writer of each row; `None` where the pool does not record owners.
        foreign: Which of the rows are foreign.
        rows: All weights of the layers that were asked for, `(H, T)` each.
    """

    maximum: Float[Tensor, "L H"]
    entropy: Float[Tensor, "L H"]
    top: Int[Tensor, "L H 3"]
    top_share: Float[Tensor, "L H 3"]
    foreign_mass: Float[Tensor, "L H"] | None
    owners: list[Owner | None] | None
    foreign: list[bool] | None
    rows: dict[int, Float[Tensor, "H T"]]

    def top_rows(self, layer: int, head: int, loaded: LoadedModel) -> pd.DataFrame:
        """The three most attended rows of one head: share, position, token, text, owner."""
        table = []
        for row, share in zip(
            self.top[layer, head].tolist(), self.top_share[layer, head].tolist(), strict=True
        ):
            owner = self.owners[row] if self.owners and row < len(self.owners) else None
            token = owner.token if owner and owner.token >= 0 else None
            table.append(
                {
                    "row": row,
                    "share": share,
                    "position": owner.position if owner else None,
                    "token": token,
                    "text": loaded.pieces([token])[0] if token is not None else None,
                    "owner": owner.request if owner else None,
                    "foreign": self.foreign[row] if owner and self.foreign else None,
                }
            )
        return pd.DataFrame(table)


def first_foreign_read(steps: Sequence[AttentionStep]) -> int | None:
    """The first generated token whose attention falls on foreign rows, counted from 1."""
    for i, step in enumerate(steps, start=1):
        if step.foreign_mass is not None and step.foreign_mass.max() > 0:
            return i
    return None


class AttentionProbe(Observer):
    """Keeps statistics of every generated step, layer and head, and full rows on request.

    Args:
        keep: Layers whose full rows are kept, or "all".

    Attributes:
        steps: The records of each request, one for every generated token.
    """

    sees = "weights"

    def __init__(self, keep: Sequence[int] | Literal["all"] = ()) -> None:
        self.keep = keep
        self.steps: dict[str, list[AttentionStep]] = {}
        self._layers: list[Float[Tensor, "B H T"]] = []

    def before(self, forward: ForwardPass) -> None:
        self._layers = []
        for run in forward.runs:
            if not run.steps:  # a new life under an old name starts anew
                self.steps[run.request.id] = []

    def attends(self, forward: ForwardPass, layer: int, weights: Float[Tensor, "B H Q T"]) -> None:
        # Keep now, compute once after the pass: a few large operations instead of many small ones.
        self._layers.append(forward.newest(weights))

    def after(self, forward: ForwardPass) -> None:
        """Compute the statistics of all layers at once."""
        longest = max(forward.ends)
        # A layer with a sliding window shows its last rows only; they keep their numbers.
        padded = [F.pad(w, (longest - w.shape[-1], 0)) for w in self._layers]
        weights = torch.stack(padded, 1).float()  # (B, L, H, T)
        maximum = weights.amax(-1)
        entropy = torch.special.entr(weights).sum(-1)
        kept = range(len(padded)) if self.keep == "all" else self.keep
        for b, (run, lease, end) in enumerate(
            zip(forward.runs, forward.leases, forward.ends, strict=True)
        ):
            own_rows = weights[b, :, :, :end]  # without the padding of the batch
            top = own_rows.topk(min(TOP, end), -1)
            owners = foreign = mass = None
            if isinstance(lease, OwnedLease):
                owners, foreign = lease.owners(), lease.foreign()
                mask = torch.tensor(foreign, dtype=weights.dtype, device=weights.device)
                mass = own_rows @ mask
            self.steps[run.request.id].append(
                AttentionStep(
                    maximum[b],
                    entropy[b],
                    top.indices,
                    top.values,
                    mass,
                    owners,
                    foreign,
                    {int(i): own_rows[i].clone() for i in kept},
                )
            )

    def peaks(
        self, request_id: str, layer: int | None = None, head: int | None = None
    ) -> Float[Tensor, "S T"]:
        """Weights of all steps as one picture, NaN where a row did not exist yet.

        Without `layer` (or `head`) it is the largest weight over all kept layers (or heads).
        """
        steps = self.steps[request_id]
        picture = torch.full((len(steps), len(self._rows(steps[-1], None, None))), torch.nan)
        for i, step in enumerate(steps):
            row = self._rows(step, layer, head)
            picture[i, : len(row)] = row
        return picture

    def _rows(
        self, step: AttentionStep, layer: int | None, head: int | None
    ) -> Float[Tensor, " T"]:
        layers = step.rows if layer is None else [layer]
        missing = [i for i in layers if i not in step.rows]
        if missing or not step.rows:
            raise ValueError(
                f"the rows of layer {layer} were not kept; ask for them with AttentionProbe(keep=)"
            )
        weights = torch.stack([step.rows[i] for i in layers])  # (L, H, T)
        return weights.amax((0, 1)) if head is None else weights[:, head].amax(0)
