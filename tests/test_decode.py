import pytest
import torch
from conftest import prompt, tiny_llama

from kvlab import decode


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_the_cached_loop_gives_the_tokens_of_the_recompute(kv_heads):
    model = tiny_llama(kv_heads)
    for seed in range(4):
        request = prompt("a", 6 + seed, seed)
        golden, fast = decode.recompute(model, request), decode.cached(model, request)
        assert fast.tokens == golden.tokens
        assert [s.wrote for s in golden.steps] == [6 + seed + i for i in range(8)]
        assert [s.wrote for s in fast.steps] == [6 + seed] + [1] * 7


def test_the_recompute_hands_no_cache_to_the_model(tiny, monkeypatch):
    seen = []
    forward = type(tiny).forward

    def spy(self, *args, **kwargs):
        seen.append(kwargs)
        out = forward(self, *args, **kwargs)
        assert out.past_key_values is None
        return out

    monkeypatch.setattr(type(tiny), "forward", spy)
    decode.recompute(tiny, prompt("a", 5, 0))
    assert all(k["use_cache"] is False and "cache" not in k for k in seen)


def test_the_margin_is_the_distance_of_the_two_best_logits(tiny):
    step = decode.recompute(tiny, prompt("a", 5, 0)).steps[0]
    best = step.logits.sort(descending=True).values
    assert step.margin == pytest.approx((best[0] - best[1]).item())


def test_logits_that_are_not_numbers_are_an_error_and_not_token_zero():
    with pytest.raises(FloatingPointError, match="not numbers"):
        decode.next_step(torch.full((5,), torch.nan), "prefill", 0, 0, 1, 0.0)
