"""The one attention function of the lab, registered with transformers under the name "kvlab".

Unwatched it is PyTorch's scaled dot product attention, untouched. A watcher is shown the keys and
values that a layer reads and, if it wants them, the weights, which are then computed openly.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

NAME = "kvlab"


class Watcher(Protocol):
    """Who is told what attention does, once for each layer of a forward pass."""

    @property
    def wants_weights(self) -> bool: ...

    def reads(self, key: Float[Tensor, "B G T D"], value: Float[Tensor, "B G T D"]) -> None: ...

    def attends(self, weights: Float[Tensor, "B H Q T"]) -> None: ...


# A context variable, since not every model family hands extra keywords down to this function.
_watcher: ContextVar[Watcher | None] = ContextVar("watcher", default=None)


@contextmanager
def watched_by(watcher: Watcher | None) -> Iterator[None]:
    """Report every attention call inside the block to `watcher`; `None` watches nothing."""
    token = _watcher.set(watcher)
    try:
        yield
    finally:
        _watcher.reset(token)


def attention(
    module: nn.Module,
    query: Float[Tensor, "B H Q D"],
    key: Float[Tensor, "B G T D"],
    value: Float[Tensor, "B G T D"],
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    **kwargs: object,
) -> tuple[Float[Tensor, "B Q H D"], Float[Tensor, "B H Q T"] | None]:
    """Scaled dot product attention, softmax(Q K^T / sqrt(D)) V (Vaswani et al., 2017, eq. 1).

    H are the query heads, G the key/value heads, Q the new tokens, T all tokens.

    Raises:
        ValueError: The model asks for something that changes the weights and is not built here.
    """
    for name in ("s_aux", "position_bias"):
        if kwargs.get(name) is not None:
            raise ValueError(f"attention with {name!r} is not supported; use another model")
    watcher = _watcher.get()
    if watcher is not None:
        watcher.reads(key, value)
    open_weights = softcap is not None or (watcher is not None and watcher.wants_weights)
    if not open_weights:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    groups = query.shape[1] // key.shape[1]
    k, v = repeat_kv(key, groups), repeat_kv(value, groups)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = query @ k.transpose(-1, -2) * scale
    if softcap is not None:
        scores = (scores / softcap).tanh() * softcap
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
    if watcher is not None and watcher.wants_weights:
        watcher.attends(weights)
    return (weights @ v).transpose(1, 2).contiguous(), weights


AttentionInterface.register(NAME, attention)
# A name without a mask of its own gets no mask at all, which is wrong from the second step on.
AttentionMaskInterface.register(NAME, sdpa_mask)


def use_kvlab_attention(model: PreTrainedModel) -> None:
    """Route the attention of `model` through this module (for all threads, once)."""
    model.set_attn_implementation(NAME)
