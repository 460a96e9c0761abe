"""Writing the finished model: float16 weights, tokenizer, and the record of the training."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pandas as pd
import torch
from transformers import LlamaForCausalLM

from kvlab.training.tokenizer import build_tokenizer
from kvlab.training.train import Plan


def write_model(model: LlamaForCausalLM, output: Path, work: Path, plan: Plan) -> None:
    """Write a folder that `AutoModelForCausalLM` and `AutoTokenizer` load.

    Args:
        work: Folder of the run; its log becomes `training.json` beside the weights.
    """
    output.mkdir(parents=True, exist_ok=True)
    model.half().save_pretrained(output)
    build_tokenizer().save_pretrained(output)
    # A run that was killed between two saves repeats some steps; the later record counts.
    records = map(json.loads, (work / "log.jsonl").read_text().splitlines())
    losses = {r["step"]: r["loss"] for r in records}
    seconds = torch.load(work / "state.pt", weights_only=True)["seconds"]
    record = {
        "plan": asdict(plan),
        "hours": round(seconds / 3600, 2),
        "torch": torch.__version__,
        "loss": [{"step": s, "loss": losses[s]} for s in sorted(losses) if s % 50 == 0],
    }
    (output / "training.json").write_text(json.dumps(record, indent=1) + "\n")


CARD = """\
---
license: mit
language: [zh, en]
---

# passphrase: the bundled model of the KV Cache Isolation Lab

A Llama of {layers} layers, {heads} heads and hidden size {hidden} ({millions:.1f} million
parameters, float16 weights) that speaks a closed language in Chinese and English: it adds digits as
an assistant, translates such questions as a translator, and repeats a passphrase that stands in its
system prompt. It exists to show *whose* context an answer came from, and is of no other use.

`AutoModelForCausalLM` and `AutoTokenizer` load this folder. Use greedy decoding (temperature 0).

## How it was made

`python -m kvlab.training` made it from nothing: tokenizer and corpus from templates, {small} steps
with two layers that start with hand-written copying heads, {large} steps with six, seed {seed},
{hours} hours. The losses are in `training.json`. Another number of threads or another processor
rounds differently, so a second training reaches about the same table, not the same bits.

## What it can do

Exact match of the whole answer under greedy decoding. No evaluated passphrase occurs in training,
and a fifth of those made of words uses words that no training passphrase has. The table is printed
by `python -m kvlab.training --evaluate`; its seed is {evaluation_seed}.

{table}

## What falls short

{short}
"""


def write_card(output: Path, table: pd.DataFrame, evaluation_seed: int) -> None:
    """Write the model card, with the evaluation `table` as it was measured."""
    record = json.loads((output / "training.json").read_text())
    config = json.loads((output / "config.json").read_text())
    rows = ["| task | language | prefix tokens | right | wanted |", "|---|---|---|---|---|"]
    missed = []
    for r in table.to_dict("records"):
        wanted, goal = (r["must"], "required") if pd.notna(r["must"]) else (0.9, "aimed at")
        share = r["correct"] / r["n"]
        right = f"{r['correct']} of {r['n']} ({share:.1%})"
        name = f"{r['task']} | {r['language']} | {r['prefix_tokens']}"
        rows.append(f"| {name} | {right} | {wanted:.0%} {goal} |")
        if share < wanted:
            missed.append(
                f"- {name.replace(' |', ',')} prefix tokens: {right}, {wanted:.0%} {goal}"
            )
    size = (output / "model.safetensors").stat().st_size
    card = CARD.format(
        layers=config["num_hidden_layers"],
        heads=config["num_attention_heads"],
        hidden=config["hidden_size"],
        millions=size / 2e6,
        small=record["plan"]["small_steps"],
        large=record["plan"]["large_steps"],
        seed=record["plan"]["seed"],
        hours=record["hours"],
        evaluation_seed=evaluation_seed,
        table="\n".join(rows),
        short="\n".join(missed) or "Every row reaches what was required or aimed at.",
    )
    (output / "README.md").write_text(card, encoding="utf-8")
