"""The one attention function of the lab, registered with transformers under the name "kvlab".

Without a recorder it is PyTorch's scaled dot product attention, untouched. With one, it computes
the weights openly and keeps, for each row of the batch, what its newest token looks at.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

NAME = "kvlab"


@dataclass
class AttentionRecorder:
    """Collects the attention of the newest token of every batch row, layer after layer.

    `newest[b]` is the index of that token in the step (padding may follow it); it is set before
    each forward pass, and `take` empties what the pass has left behind.
    """

    newest: list[int] = field(default_factory=list)
    layers: list[Float[Tensor, "B H T"]] = field(default_factory=list)

    def add(self, weights: Float[Tensor, "B H Q T"]) -> None:
        """Keep the rows of the newest tokens of one layer."""
        rows = [weights[b, :, q] for b, q in enumerate(self.newest)]
        self.layers.append(torch.stack(rows).float())

    def take(self) -> Float[Tensor, "B L H T"]:
        """All layers of the last forward pass.

        Raises:
            RuntimeError: The model never called the attention function.
        """
        if not self.layers:
            raise RuntimeError(
                "no attention was recorded: this model family does not use transformers' attention "
                "interface, so it cannot be observed"
            )
        taken, self.layers = torch.stack(self.layers, 1), []
        return taken


_recorder: ContextVar[AttentionRecorder | None] = ContextVar("recorder", default=None)


@contextmanager
def recording(recorder: AttentionRecorder | None) -> Iterator[None]:
    """Hand `recorder` to every attention call inside the block; `None` records nothing."""
    token = _recorder.set(recorder)
    try:
        yield
    finally:
        _recorder.reset(token)


def attention(
    module: nn.Module,
    query: Float[Tensor, "B H Q D"],
    key: Float[Tensor, "B G T D"],
    value: Float[Tensor, "B G T D"],
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: object,
) -> tuple[Float[Tensor, "B Q H D"], Float[Tensor, "B H Q T"] | None]:
    """Scaled dot product attention, softmax(Q K^T / sqrt(D)) V (Vaswani et al., 2017, eq. 1).

    H are the query heads, G the key/value heads, Q the new tokens, T all tokens.
    """
    recorder = _recorder.get()
    if recorder is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    groups = query.shape[1] // key.shape[1]
    k, v = repeat_kv(key, groups), repeat_kv(value, groups)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = query @ k.transpose(-1, -2) * scale
    q_len, k_len = scores.shape[-2:]
    if attention_mask is None and q_len > 1:
        # transformers leaves the mask out where a plain causal one is meant.
        attention_mask = torch.ones(q_len, k_len, dtype=torch.bool, device=k.device).tril(
            k_len - q_len
        )
    if attention_mask is not None:
        if attention_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attention_mask, torch.finfo(scores.dtype).min)
        else:
            scores = scores + attention_mask
    weights = scores.softmax(-1, dtype=torch.float32).to(query.dtype)
    recorder.add(weights)
    return (weights @ v).transpose(1, 2).contiguous(), weights


AttentionInterface.register(NAME, attention)
# A name without a mask of its own gets no mask at all, which is wrong from the second step on.
AttentionMaskInterface.register(NAME, sdpa_mask)


def use_kvlab_attention(model: PreTrainedModel) -> None:
    """Route the attention of `model` through this module (for all threads, once)."""
    model.set_attn_implementation(NAME)
