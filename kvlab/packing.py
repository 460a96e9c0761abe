"""Linear layers that keep their weights in the order in which oneDNN's kernels read them.

A decode step multiplies a handful of rows with every weight of the model. PyTorch's own product is
handed the weights row by row, and on many CPUs is slow with so few rows. Engines for CPUs bring the
weights into the kernels' order once, and so does `torch.compile` when it freezes a model. What
the cache costs shows only beside products like these (notebook 07 measures both).
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

ROWS = 16
"""The layout is chosen for products of this many rows, a decode step of a batch."""


class PackedLinear(nn.Linear):
    """A linear layer with a packed copy of its weight, which inference in float32 uses.

    The weight itself stays, for whoever reads, changes or saves the model. Gradients, other dtypes
    and other devices take PyTorch's way.
    """

    _packed: Tensor
    _packed_from: tuple[int, int] | None = None

    def forward(self, input: Float[Tensor, "*B I"]) -> Float[Tensor, "*B O"]:
        weight = self.weight
        plain = not (input.dtype == weight.dtype == torch.float32 and input.is_cpu)
        learns = torch.is_grad_enabled() and (input.requires_grad or weight.requires_grad)
        if plain or learns:
            return super().forward(input)
        state = (weight.data_ptr(), weight._version)
        if self._packed_from != state:  # the first time, and after a change of the weight
            self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), ROWS)
            self._packed_from = state
        product: Tensor = torch.ops.mkldnn._linear_pointwise.default(
            input, self._packed, self.bias, "none", [], ""
        )
        return product

    def __getstate__(self) -> dict[str, object]:
        """Copies and pickles pack anew: nobody else can read oneDNN's layout."""
        return {k: v for k, v in self.__dict__.items() if not k.startswith("_packed")}


def pack_linear_layers(model: nn.Module) -> None:
    """Let all linear layers of `model` use packed weights, where PyTorch was built with oneDNN.

    The model is for inference from then on: its parameters ask for no gradients any more. Packed
    weights take as much memory again as the weights.
    """
    model.requires_grad_(False)
    if not torch.backends.mkldnn.is_available():
        return
    for layer in model.modules():
        if type(layer) is nn.Linear:
            layer.__class__ = PackedLinear
