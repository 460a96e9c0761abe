"""The one attention function of the lab, registered with transformers under the name "kvlab".

Unwatched it is PyTorch's scaled dot product attention, untouched. A watcher is shown the keys and
values that a layer reads and, if it wants them, the weights, which are then computed openly.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

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


@contextmanager
def _handed(variable: ContextVar[Any], value: object) -> Iterator[None]:
    """Set a context variable inside the block: not every model family hands keywords down here."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


_watcher: ContextVar[Watcher | None] = ContextVar("watcher", default=None)


def watched_by(watcher: Watcher | None) -> AbstractContextManager[None]:
    """Report every attention call inside the block to `watcher`; `None` watches nothing."""
    return _handed(_watcher, watcher)


@dataclass(frozen=True)
class PrefixGroup:
    """Batch rows that read the same prefix of P rows; those of a range are read in place."""

    rows: Sequence[int]
    key: Float[Tensor, "G P D"]
    value: Float[Tensor, "G P D"]


class PrefixPlan(Protocol):
    """The cache of a batch whose prefixes are read apart from its rows.

    `groups` are those of the layer whose `update` came last. The keys and values that attention is
    handed are then only the rows behind the prefixes, and `bias` is added to their scores: minus
    infinity where a request has no such row, `None` where each of them may read all.
    """

    groups: Sequence[PrefixGroup]
    bias: Float[Tensor, "B 1 Q T"] | None


_plan: ContextVar[PrefixPlan | None] = ContextVar("plan", default=None)


def sharing_prefixes(plan: PrefixPlan | None) -> AbstractContextManager[None]:
    """Let attention read the prefixes of `plan` once for all their readers."""
    return _handed(_plan, plan)


def shared_prefix_attention(
    query: Float[Tensor, "B H Q D"],
    key: Float[Tensor, "B G T D"],
    value: Float[Tensor, "B G T D"],
    bias: Float[Tensor, "B 1 Q T"] | None,
    scale: float,
    groups: Sequence[PrefixGroup],
) -> Float[Tensor, "B Q H D"]:
    """Attention over [prefix, own rows], every prefix read once for all its readers.

    The same function as attention over the gathered rows, computed in another order: on a CPU the
    two parts apart, merged by their log-sum-exp (Hydragen, arXiv 2402.05099); on other devices,
    whose kernels keep that number to themselves, under one softmax over both parts.
    """
    batch, heads, queries, dim = query.shape
    kv_heads = key.shape[1]
    q = query.reshape(batch, kv_heads, heads // kv_heads * queries, dim)
    if bias is not None:
        bias = bias.repeat(1, 1, heads // kv_heads, 1)
    attend = _merged if query.device.type == "cpu" else _one_softmax
    return attend(q, key, value, bias, scale, groups).view(query.shape).transpose(1, 2)


def _index(rows: Sequence[int]) -> slice | list[int]:
    """Batch rows as an index, without a copy where it can be."""
    if isinstance(rows, range):
        return slice(rows.start, rows.stop, rows.step)
    return list(rows)


def _together(rows: Float[Tensor, "n G R D"]) -> Float[Tensor, "G nR D"]:
    """The query rows of several requests side by side."""
    return rows.transpose(0, 1).reshape(rows.shape[1], -1, rows.shape[3])


def _one_softmax(
    q: Float[Tensor, "B G R D"],
    key: Float[Tensor, "B G T D"],
    value: Float[Tensor, "B G T D"],
    bias: Float[Tensor, "B 1 R T"] | None,
    scale: float,
    groups: Sequence[PrefixGroup],
) -> Float[Tensor, "B G R D"]:
    batch, kv_heads, lines, dim = q.shape
    q = q * scale
    # K q^T and not q K^T: these keys are a strided view, and matmul copies it row by row this way.
    own = (key @ q.transpose(-1, -2)).transpose(-1, -2)
    own = own if bias is None else own + bias
    out = torch.empty_like(q)
    alone = torch.ones(batch, dtype=torch.bool)
    for group in groups:
        rows, prefix = _index(group.rows), group.key.shape[1]
        alone[rows] = False
        scores = _together(q[rows]) @ group.key.transpose(-1, -2)
        scores = scores.view(kv_heads, -1, lines, prefix).transpose(0, 1)
        weights = torch.cat([scores, own[rows]], -1).softmax(-1)
        shared = _together(weights[..., :prefix]) @ group.value
        shared = shared.view(kv_heads, -1, lines, dim).transpose(0, 1)
        out[rows] = shared + weights[..., prefix:] @ value[rows]
    if alone.any():
        rest = alone.nonzero().flatten().tolist()
        out[rest] = own[rest].softmax(-1) @ value[rest]
    return out


def _merged(
    q: Float[Tensor, "B G R D"],
    key: Float[Tensor, "B G T D"],
    value: Float[Tensor, "B G T D"],
    bias: Float[Tensor, "B 1 R T"] | None,
    scale: float,
    groups: Sequence[PrefixGroup],
) -> Float[Tensor, "B G R D"]:
    # No table of scores is made, and the keys are read in place, strided as they are.
    _, kv_heads, lines, dim = q.shape
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, own = flash(q, key, value, 0.0, False, attn_mask=bias, scale=scale)
    for group in groups:
        rows = _index(group.rows)
        shared, theirs = flash(
            _together(q[rows])[None], group.key[None], group.value[None], 0.0, False, scale=scale
        )
        shared = shared.view(kv_heads, -1, lines, dim).transpose(0, 1)
        share = theirs.view(kv_heads, -1, lines).transpose(0, 1)
        weight = (share - own[rows]).sigmoid()[..., None].to(q.dtype)
        out[rows] = torch.lerp(out[rows], shared, weight)
    return out


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
    plan = _plan.get()
    if plan is not None and plan.groups:
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        return shared_prefix_attention(query, key, value, plan.bias, scale, plan.groups), None
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
