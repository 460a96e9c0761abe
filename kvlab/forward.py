"""One forward pass over one or more requests, and who may look on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from kvlab.pools.contract import Lease
from kvlab.request import Run


class Observer:
    """What a run can carry. Every hook does nothing; an observer overrides those that it needs.

    Attributes:
        sees: "steps" calls `before` and `after` only; "reads" also shows each layer's keys and
            values as attention reads them; "weights" shows the attention weights too, which then
            have to be computed openly.
    """

    sees: Literal["steps", "reads", "weights"] = "steps"

    def before(self, forward: ForwardPass) -> None:
        """The leases are known, nothing has been computed."""

    def reads(
        self,
        forward: ForwardPass,
        layer: int,
        key: Float[Tensor, "B G T D"],
        value: Float[Tensor, "B G T D"],
    ) -> None:
        """A layer has written its new rows and is about to read all of these."""

    def attends(self, forward: ForwardPass, layer: int, weights: Float[Tensor, "B H Q T"]) -> None:
        """A layer has computed its attention weights."""

    def after(self, forward: ForwardPass) -> None:
        """Each of the runs has got its new step."""


@dataclass
class ForwardPass:
    """One forward pass: row `b` of its batch brings `counts[b]` new tokens of `runs[b]`.

    `starts[b]` is the number of rows that its lease held before. The attention function reports
    here, layer after layer; the pass hands on what the observers want to see.
    """

    runs: Sequence[Run]
    leases: Sequence[Lease]
    starts: Sequence[int]
    counts: Sequence[int]
    tick: int
    observers: Sequence[Observer] = ()

    def __post_init__(self) -> None:
        self.layers_read = 0

    @property
    def ends(self) -> list[int]:
        """Rows that each lease holds when the pass is over."""
        return [s + c for s, c in zip(self.starts, self.counts, strict=True)]

    @property
    def watches_attention(self) -> bool:
        """Whether the attention function has to report."""
        return any(o.sees != "steps" for o in self.observers)

    @property
    def wants_weights(self) -> bool:
        return any(o.sees == "weights" for o in self.observers)

    def reads(self, key: Float[Tensor, "B G T D"], value: Float[Tensor, "B G T D"]) -> None:
        for observer in self.observers:
            if observer.sees != "steps":
                observer.reads(self, self.layers_read, key, value)
        self.layers_read += 1

    def attends(self, weights: Float[Tensor, "B H Q T"]) -> None:
        for observer in self.observers:
            if observer.sees == "weights":
                observer.attends(self, self.layers_read - 1, weights)

    def newest(self, weights: Float[Tensor, "B H Q T"]) -> Float[Tensor, "B H T"]:
        """The weights of each run's newest token; padding may follow it in a batch."""
        if weights.shape[2] == 1:
            return weights[:, :, 0]
        return torch.stack([weights[b, :, c - 1] for b, c in enumerate(self.counts)])

    def check_observed(self, layers: int) -> None:
        """Refuse to call unobserved what could not be observed.

        Raises:
            RuntimeError: Fewer layers reported than the model has.
        """
        if self.watches_attention and self.layers_read != layers:
            raise RuntimeError(
                f"{self.layers_read} of {layers} layers called the attention function, so this "
                "model cannot be observed: its family does not use transformers' attention "
                "interface in every layer"
            )
