"""Write a small Llama checkpoint as GGUF: python to_gguf.py FOLDER FILE [--f16]

Runs in an engine's environment; needs numpy, safetensors and gguf. The tokenizer goes along so that
answers have a text; its merges are not, so ask in token ids.
"""

import argparse
import json
from pathlib import Path

import gguf
import numpy as np
from safetensors.numpy import load_file

LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp rotates neighbouring rows of a head together, transformers its two halves."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, weight.shape[1])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def in_bytes(word: str) -> str:
    """A token as GPT-2's vocabulary writes it: a printable letter for each byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in plain]
    letters = {b: chr(b) for b in plain} | {b: chr(256 + i) for i, b in enumerate(rest)}
    return "".join(letters[b] for b in word.replace("▁", " ").encode())


def name_of(name: str) -> str:
    """The tensor's name in GGUF."""
    plain = name.removeprefix("model.").removesuffix(".weight")
    if plain.startswith("layers."):
        _, layer, part = plain.split(".", 2)
        return f"blk.{layer}.{LAYER[part]}.weight"
    return {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}[
        plain
    ] + ".weight"


def main() -> None:
    parse = argparse.ArgumentParser(description=__doc__)
    parse.add_argument("folder", type=Path)
    parse.add_argument("file", type=Path)
    parse.add_argument("--f16", action="store_true", help="half precision; default: float32")
    parse.add_argument("--gpt2", action="store_true", help="the only kind that OpenVINO reads")
    options = parse.parse_args()
    config = json.loads((options.folder / "config.json").read_text(encoding="utf-8"))
    tokenizer = json.loads((options.folder / "tokenizer.json").read_text(encoding="utf-8"))
    writer = gguf.GGUFWriter(options.file, "llama")
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer.add_name("kvlab")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    kind = gguf.LlamaFileType.MOSTLY_F16 if options.f16 else gguf.LlamaFileType.ALL_F32
    writer.add_file_type(kind)

    words = tokenizer["model"]["vocab"]
    special = {t["id"] for t in tokenizer["added_tokens"]}
    kinds = [
        gguf.TokenType.UNKNOWN if i == 0
        else gguf.TokenType.CONTROL if i in special
        else gguf.TokenType.BYTE if word.startswith("<0x")
        else gguf.TokenType.NORMAL
        for i, (word, _) in enumerate(words)
    ]  # fmt: skip
    if options.gpt2:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("smollm")
        writer.add_token_list([in_bytes(word) for word, _ in words])
        writer.add_token_merges(["Ġ t"])
    else:
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_token_list([word for word, _ in words])
        writer.add_token_scores([score for _, score in words])
    writer.add_token_types(kinds)
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_pad_token_id(config["pad_token_id"])
    writer.add_add_bos_token(True)
    writer.add_add_space_prefix(False)

    for name, weight in load_file(options.folder / "model.safetensors").items():
        if "q_proj" in name or "k_proj" in name:
            weight = interleaved(weight, heads if "q_proj" in name else kv_heads)
        half = options.f16 and weight.ndim > 1
        writer.add_tensor(name_of(name), weight.astype(np.float16 if half else np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
