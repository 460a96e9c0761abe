import pytest
import torch
from conftest import prompt, tiny_llama
from torch.utils.flop_counter import FlopCounterMode
from transformers import DynamicCache

from kvlab.memory import cache_bytes, multiply_adds


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_the_formula_gives_the_bytes_of_a_real_cache(kv_heads):
    model, request = tiny_llama(kv_heads), prompt("a", 9, 0)
    cache = DynamicCache(config=model.config)
    model(torch.tensor([request.tokens]), cache=cache, use_cache=True)
    real = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert cache_bytes(3, kv_heads, 8, 9, "float32") == real


def test_a_7b_model_with_full_heads_needs_a_gigabyte_for_2048_tokens():
    assert cache_bytes(32, 32, 128, 2048, "float16") == 2**30


@pytest.mark.parametrize("bad", [(0, 1, 1, 1, "float16"), (1, 1, 1, 1, "float8")])
def test_impossible_sizes_and_dtypes_are_refused(bad):
    with pytest.raises(ValueError, match=r"at least 1|unknown dtype"):
        cache_bytes(*bad)


@pytest.mark.parametrize("kv_heads", [2, 4])
def test_counted_projections_are_those_that_torch_counts(kv_heads):
    model = tiny_llama(kv_heads)
    ids = torch.arange(3, 43)[None]
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model.model(ids, use_cache=False)
    flops = counter.get_flop_counts()["Global"]
    linear = sum(n for op, n in flops.items() if op in (torch.ops.aten.mm, torch.ops.aten.addmm))
    assert 2 * multiply_adds(model.config, 40, 40)[0] == linear
