import pytest
import torch
from conftest import prompt, tiny_llama

from kvlab import decode
from kvlab.attention import AttentionRecorder
from kvlab.pools import PrivatePool
from kvlab.schedule import run


@pytest.mark.parametrize("kv_heads", [2, 4])
def test_recorded_attention_is_that_of_the_eager_implementation(kv_heads):
    model = tiny_llama(kv_heads)
    request = prompt("a", 7, 1)
    ours = decode.cached(model, request, record_attention=True)
    tokens = torch.tensor([[*request.tokens, *ours.tokens[:3]]])
    model.set_attn_implementation("eager")
    theirs = model(tokens, output_attentions=True, use_cache=False).attentions
    for layer, weights in enumerate(theirs):
        torch.testing.assert_close(ours.steps[3].attention[layer], weights[0, :, -1])


def test_recording_changes_no_token(tiny, requests):
    for request in requests:
        plain = decode.cached(tiny, request)
        watched = decode.cached(tiny, request, record_attention=True)
        assert watched.tokens == plain.tokens


def test_every_recorded_row_is_a_distribution_over_the_rows_so_far(tiny, requests):
    pool = PrivatePool(tiny.config)
    runs = run(tiny, requests, pool, "round_robin", batch_size=4, record_attention=True)
    for ran in runs.values():
        for step in ran.steps:
            assert step.attention.shape == (3, 4, step.start + step.wrote)
            torch.testing.assert_close(step.attention.sum(-1), torch.ones(3, 4))


def test_a_model_that_never_calls_the_function_is_refused_and_not_silently_unobserved():
    with pytest.raises(RuntimeError, match="cannot be observed"):
        AttentionRecorder(newest=[0]).take()
