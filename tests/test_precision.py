import torch

from kvlab.models import LoadedModel, load_model, tiny_model
from kvlab.passphrase import Experiment
from kvlab.pools import QuantisedSlotPool
from kvlab.precision import Int8CacheExperiment, bytes_of_cache, fake_int8, int8_weights
from kvlab.prompts import ZH


def test_what_8_bits_leave_is_within_half_a_step():
    x = torch.linspace(-1, 1, 50)
    scale = torch.tensor(1 / 127)
    assert (fake_int8(x, scale) - x).abs().max() <= scale / 2 + 1e-7


def test_int8_weights_round_a_copy_and_leave_the_model_alone():
    model = tiny_model()
    before = model.model.layers[0].mlp.up_proj.weight.clone()
    rounded = int8_weights(LoadedModel("tiny", model, None)).model
    assert torch.equal(model.model.layers[0].mlp.up_proj.weight, before)
    weight = rounded.model.layers[0].mlp.up_proj.weight
    assert not torch.equal(weight, before)
    assert all(len(row.unique()) <= 255 for row in weight)


def test_an_8_bit_cache_isolates_and_still_leaks_on_a_shared_slot():
    experiment = Int8CacheExperiment(load_model(), ZH)
    for arm in ("private", "shared"):
        assert {r["verdict"] for r in experiment.rows(arm, "D", "E")} == {"isolated"}
    rows = experiment.rows("overwrite", "D", "E")
    assert any(r["verdict"] == "contaminated" for r in rows)
    assert isinstance(experiment, Experiment)


def test_codes_and_scales_are_counted():
    codes, scales = bytes_of_cache(QuantisedSlotPool.for_model(tiny_model().config, 2, 16))
    config = tiny_model().config
    rows = 2 * config.num_hidden_layers * 2 * config.num_key_value_heads * 16
    head_dim = config.hidden_size // config.num_attention_heads
    assert (codes, scales) == (rows * head_dim, rows * 4)
