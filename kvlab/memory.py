"""The arithmetic of the cache: bytes it takes, multiply-adds it saves."""

from __future__ import annotations

from transformers import PretrainedConfig

BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1}


def cache_bytes(layers: int, kv_heads: int, head_dim: int, length: int, dtype: str) -> int:
    """Bytes of the keys and values of one request.

    layers x key/value heads x head dim x length x 2 (a key and a value) x bytes of a number.
    Introduced in notebook 02.

    Raises:
        ValueError: A size below 1 or an unknown dtype.
    """
    if dtype not in BYTES:
        raise ValueError(f"unknown dtype {dtype!r}; use one of {', '.join(BYTES)}")
    if min(layers, kv_heads, head_dim, length) < 1:
        raise ValueError("every size must be at least 1")
    return layers * kv_heads * head_dim * length * 2 * BYTES[dtype]


def multiply_adds(config: PretrainedConfig, new: int, total: int) -> tuple[int, int]:
    """Multiply-adds of one forward pass over `new` tokens that look at `total` tokens.

    Returns:
        Those of the projections (query, key, value, output, MLP), which grow with `new`, and those
        of attention (scores and weighted sum), which grow with `new` times `total`. The
        vocabulary projection is left out: it is computed for one token only.
        Introduced in notebook 01.
    """
    hidden, heads = config.hidden_size, config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or hidden // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    query = hidden * heads * head_dim
    key_value = hidden * kv_heads * head_dim
    mlp = 3 * hidden * config.intermediate_size
    layer = 2 * query + 2 * key_value + mlp
    attention = 2 * heads * head_dim * new * total
    return config.num_hidden_layers * layer * new, config.num_hidden_layers * attention
