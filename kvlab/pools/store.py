"""Rows of keys and values for all slots, and the record of who wrote each row last."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PretrainedConfig

from kvlab.pools.contract import Owner


def kv_shape(config: PretrainedConfig) -> tuple[int, int, int]:
    """Layers, key/value heads and head dim of a model."""
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return config.num_hidden_layers, kv_heads, head_dim


class Store:
    """One tensor of keys and one of values, `(S, L, G, N, D)`.

    S slots, L layers, G key/value heads, N rows for tokens, D head dim. One tensor for all slots
    lets a batch read several slots without a copy; a slot is a view of it.
    """

    def __init__(
        self,
        num_slots: int,
        num_layers: int,
        num_heads: int,
        max_seq_len: int,
        head_dim: int,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
    ) -> None:
        shape = (num_slots, num_layers, num_heads, max_seq_len, head_dim)
        if min(shape) < 1:
            raise ValueError(f"every size of a store must be at least 1, got {shape}")
        self.key: Float[Tensor, "S L G N D"] = torch.zeros(shape, dtype=dtype, device=device)
        self.value: Float[Tensor, "S L G N D"] = torch.zeros(shape, dtype=dtype, device=device)
        self.owners: list[list[Owner | None]] = [[None] * max_seq_len for _ in range(num_slots)]

    @property
    def nbytes(self) -> int:
        """Bytes of all keys and values."""
        return self.key.nbytes + self.value.nbytes
