"""The structured start: a two-layer model that can copy before its first training step.

A transformer learns to repeat something from its context only after an "induction head" has
formed (Olsson et al., "In-context Learning and Induction Heads", 2022): heads that look at the
previous token in one layer, heads that look for a matching content in the next. On two cores that
wait is most of the training. So both kinds are written into the weights by hand, as a start; the
training is free to change every one of them. Afterwards `grow` adds layers that begin as
identities.
"""

from __future__ import annotations

import math

import torch
from transformers import LlamaConfig, LlamaForCausalLM

HEADS, HIDDEN, HEAD_DIM = 8, 512, 64
COPYING_HEADS = 6
"""Heads of each layer that are set by hand; the other two start at random."""
EMBEDDING_STD = 0.16


def config(vocab_size: int, layers: int) -> LlamaConfig:
    """The shape of the bundled model (`layers` is 2 at first, 6 in the end)."""
    return LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=HIDDEN,
        intermediate_size=1024,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=2048,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 5e5},
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=3,
    )


@torch.no_grad()
def structured_start(vocab_size: int, seed: int = 0) -> LlamaForCausalLM:
    """A two-layer model with previous-token heads (layer 0) and matching heads (layer 1)."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config(vocab_size, layers=2)).float()
    for name, weight in model.named_parameters():
        if weight.dim() == 2:
            std = 0.5 / math.sqrt(weight.shape[1])
            weight.normal_(0, std * (0.3 if "down_proj" in name or "o_proj" in name else 1))
    embedding = model.model.embed_tokens.weight
    embedding.normal_(0, EMBEDDING_STD)
    # The last dimension is the same for every token: what a head needs to attend by position alone.
    embedding[:, -1] = 8 * EMBEDDING_STD
    model.model.norm.weight.fill_(0.125)

    first, second = (layer.self_attn for layer in model.model.layers)
    frequency = 5e5 ** (-torch.arange(HEAD_DIM // 2) / (HEAD_DIM // 2))
    turn, _ = torch.linalg.qr(torch.randn(HIDDEN, HIDDEN))  # where the previous token is noted
    turn[-1] = 0

    for head in range(COPYING_HEADS):
        rows = slice(head * HEAD_DIM, (head + 1) * HEAD_DIM)
        dims = torch.arange(rows.start, rows.stop)
        # Layer 0. Query and key are constants, turned against each other by one position, so
        # that rotary embeddings put the peak on the token before. High frequencies tell positions
        # apart best, hence the falling amplitude.
        amplitude = 1.25 * 0.9 ** torch.arange(HEAD_DIM // 2)
        q, k = torch.zeros(HEAD_DIM), torch.zeros(HEAD_DIM)
        q[: HEAD_DIM // 2] = amplitude
        k[: HEAD_DIM // 2] = amplitude * torch.cos(frequency)
        k[HEAD_DIM // 2 :] = amplitude * torch.sin(frequency)
        first.q_proj.weight[rows, -1] = q / 1.6
        first.k_proj.weight[rows, -1] = k / 1.6
        first.v_proj.weight[rows] = torch.eye(HIDDEN)[dims]
        first.o_proj.weight[:, rows] = EMBEDDING_STD * turn[:, dims]
        # Layer 1. The query is the content of this token, the key the noted content of the token
        # before: a match is a place where this token was followed by something. Only the slow
        # half of the rotary frequencies is used, so that distance hardly matters.
        slow = torch.cat([torch.arange(16, 32), torch.arange(48, 64)])
        second.q_proj.weight[rows] *= 0.1
        second.k_proj.weight[rows] *= 0.1
        second.q_proj.weight[rows.start + slow] = 3.8 * torch.eye(HIDDEN)[dims[: len(slow)]]
        second.k_proj.weight[rows.start + slow] = 3.8 * turn[:, dims[: len(slow)]].T
        second.v_proj.weight[rows] = torch.eye(HIDDEN)[dims]
        second.o_proj.weight[:, rows] = 1.5 * torch.eye(HIDDEN)[:, dims]
    return model


@torch.no_grad()
def grow(small: LlamaForCausalLM, layers: int = 6, seed: int = 0) -> LlamaForCausalLM:
    """The two trained layers at 0 and 2 of a deeper model; the new layers begin as identities."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config(small.config.vocab_size, layers)).float()
    model.model.embed_tokens.weight.copy_(small.model.embed_tokens.weight)
    model.model.norm.weight.copy_(small.model.norm.weight)
    old = {0: small.model.layers[0], 2: small.model.layers[1]}
    for index, layer in enumerate(model.model.layers):
        if index in old:
            layer.load_state_dict(old[index].state_dict())
            continue
        for name, weight in layer.named_parameters():
            if "o_proj" in name or "down_proj" in name:
                weight.zero_()
            elif weight.dim() == 2:
                weight.normal_(0, 0.7 / math.sqrt(weight.shape[1]))
    return model
