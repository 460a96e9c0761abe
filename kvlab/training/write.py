"""Writing the finished model: float16 weights, tokenizer, and the record of the training."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

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
