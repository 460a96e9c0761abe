"""Tiny models made on the spot, and the bundled model where meaning matters."""

from __future__ import annotations

import os

os.environ.pop("KVLAB_RECORD", None)  # tests never write into a record
os.environ["OMP_NUM_THREADS"] = "1"  # of kernels and servers too: other tests run beside this one

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from kvlab.attention import use_kvlab_attention
from kvlab.models import LoadedModel, load_model
from kvlab.request import Request


def tiny_llama(kv_heads: int = 2, seed: int = 0) -> PreTrainedModel:
    """Random weights, wide enough that greedy answers vary."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=97,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=kv_heads,
            max_position_embeddings=256,
            initializer_range=0.4,
        )
    ).eval()
    use_kvlab_attention(model)
    return model


def prompt(id: str, length: int, seed: int, max_new_tokens: int = 8) -> Request:
    """A random prompt of `length` tokens."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, 97, (length,), generator=generator).tolist()
    return Request(id, tuple(tokens), max_new_tokens)


@pytest.fixture(scope="session")
def tiny() -> PreTrainedModel:
    return tiny_llama()


@pytest.fixture(scope="session")
def requests() -> list[Request]:
    return [prompt(name, length, i) for i, (name, length) in enumerate(zip("abcd", (5, 9, 1, 14)))]


@pytest.fixture(scope="session")
def bundled() -> LoadedModel:
    return load_model()
