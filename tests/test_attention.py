"""The one attention function, watched and unwatched, on many model families."""

import pytest
import torch
from conftest import prompt, tiny_llama
from transformers import AutoConfig, AutoModelForCausalLM

from kvlab import attention
from kvlab.attention import PrefixGroup, shared_prefix_attention, use_kvlab_attention
from kvlab.observe import AttentionProbe
from kvlab.pools import PrivatePool
from kvlab.schedule import run

COMMON = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
}
OLD = {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 256}
OBSERVED = {
    "llama": COMMON,
    "mistral": COMMON | {"sliding_window": 8, "head_dim": 8},
    "qwen2": COMMON,
    "qwen3": COMMON | {"head_dim": 8},
    "gemma2": COMMON | {"head_dim": 8, "sliding_window": 8},
    "gemma3_text": COMMON | {"head_dim": 8},
    "phi3": COMMON,
    "olmo2": COMMON,
    "gpt2": OLD,
    "gptj": OLD | {"rotary_dim": 4},
    "gpt_neox": COMMON,
    "opt": COMMON | {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "stablelm": COMMON,
}
BLIND = {
    "bloom": {"hidden_size": 32, "n_layer": 3, "n_head": 4},
    "falcon": COMMON,
    "mpt": {"d_model": 32, "n_layers": 3, "n_heads": 4},
}


def random_model(family: str, sizes: dict, attention: str = "eager"):
    torch.manual_seed(0)
    sizes = sizes | {"vocab_size": 97, "bos_token_id": 1, "eos_token_id": 2}
    config = AutoConfig.for_model(family, **sizes)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()


@pytest.mark.parametrize("family", OBSERVED)
def test_families_that_use_the_interface_are_observed_and_answer_as_before(family):
    model, request = random_model(family, OBSERVED[family]), prompt("a", 17, 1, 6)
    eager = run(model, [request], PrivatePool(model.config))["a"].tokens
    use_kvlab_attention(model)
    assert run(model, [request], PrivatePool(model.config))["a"].tokens == eager
    probe = AttentionProbe(keep="all")
    watched = run(model, [request], PrivatePool(model.config), observers=[probe])["a"]
    assert watched.tokens == eager
    for i, step in enumerate(probe.steps["a"]):
        assert step.maximum.shape == (3, 4)
        for weights in step.rows.values():
            assert weights.shape == (4, 17 + i)
            torch.testing.assert_close(weights.sum(-1), torch.ones(4))


@pytest.mark.parametrize("family", BLIND)
def test_a_family_that_never_calls_the_function_is_refused_and_not_silently_unobserved(family):
    model = random_model(family, BLIND[family], "eager")
    use_kvlab_attention(model)
    with pytest.raises(RuntimeError, match=r"0 of 3 layers .* cannot be observed"):
        run(model, [prompt("a", 5, 1)], PrivatePool(model.config), observers=[AttentionProbe()])


def test_attention_sinks_are_refused_since_they_change_the_weights():
    sizes = COMMON | {"head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1}
    model = random_model("gpt_oss", sizes)
    use_kvlab_attention(model)
    with pytest.raises(ValueError, match="s_aux"):
        run(model, [prompt("a", 5, 1)], PrivatePool(model.config))


@pytest.mark.parametrize("kv_heads", [2, 4])
def test_recorded_attention_is_that_of_the_eager_implementation(kv_heads):
    model = tiny_llama(kv_heads)
    request, probe = prompt("a", 7, 1), AttentionProbe(keep="all")
    ours = run(model, [request], PrivatePool(model.config), observers=[probe])["a"]
    tokens = torch.tensor([[*request.tokens, *ours.tokens[:3]]])
    model.set_attn_implementation("eager")
    theirs = model(tokens, output_attentions=True, use_cache=False).attentions
    for layer, weights in enumerate(theirs):
        torch.testing.assert_close(probe.steps["a"][3].rows[layer], weights[0, :, -1])


@pytest.mark.parametrize("queries", [1, 5])
@pytest.mark.parametrize("heads", [4, 8])
@pytest.mark.parametrize("layout", ["one group", "two groups and one alone", "reordered"])
@pytest.mark.parametrize("way", ["_merged", "_one_softmax"])
def test_a_prefix_read_once_is_attention_over_all_rows(queries, heads, layout, way, monkeypatch):
    monkeypatch.setattr(attention, "_merged", getattr(attention, way))
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator)

    batch, kv_heads, dim, own = 4, 4, 8, 7
    members = {
        "one group": [range(4)],
        "two groups and one alone": [[0, 2], [3]],
        "reordered": [[3, 1], [0, 2]],
    }[layout]
    groups = [
        PrefixGroup(rows, draw(kv_heads, 6 + i, dim), draw(kv_heads, 6 + i, dim))
        for i, rows in enumerate(members)
    ]
    q, k, v = (
        draw(batch, heads, queries, dim),
        draw(batch, kv_heads, own, dim),
        draw(batch, kv_heads, own, dim),
    )
    mask = torch.ones(batch, 1, queries, own, dtype=torch.bool).tril(own - queries)
    mask[1, :, :, 0] = False
    bias = torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)
    got = shared_prefix_attention(q, k, v, bias, dim**-0.5, groups)
    for b in range(batch):
        group = next((g for g in groups if b in g.rows), None)
        keys = torch.cat([group.key, k[b]], 1) if group else k[b]
        values = torch.cat([group.value, v[b]], 1) if group else v[b]
        ahead = keys.shape[1] - own
        seen = torch.cat([torch.ones(1, queries, ahead, dtype=torch.bool), mask[b]], -1)
        want = torch.nn.functional.scaled_dot_product_attention(
            q[b : b + 1], keys[None], values[None], attn_mask=seen[None], enable_gqa=True
        )
        torch.testing.assert_close(got[b], want[0].transpose(0, 1))
