"""The training run: two layers first, then six, in steps that can be stopped and resumed."""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from tqdm import tqdm
from transformers import LlamaForCausalLM

from kvlab.training.corpus import IGNORE, Corpus, Mix, Tree, collate
from kvlab.training.start import grow, structured_start
from kvlab.training.tokenizer import build_tokenizer


@dataclass(frozen=True)
class Plan:
    """How long each part takes and how fast it learns; steps are batches of about 1,400 tokens."""

    seed: int = 0
    small_steps: int = 800
    large_steps: int = 3000
    small_rate: float = 7e-4
    large_rate: float = 4e-4
    hold: float = 0.35  # share of the large steps before the learning rate falls
    query_key: float = 0.4  # queries and keys learn slower: they carry the structured start
    save_every: int = 50

    @property
    def steps(self) -> int:
        return self.small_steps + self.large_steps

    def rate(self, step: int) -> float:
        """Learning rate at `step`: a warm-up and a mild fall for two layers, then hold and fall."""
        if step < self.small_steps:
            warm = min(1.0, (step + 1) / 40)
            return self.small_rate * warm * (1 - 0.5 * step / self.small_steps)
        done = (step - self.small_steps) / self.large_steps
        warm = min(1.0, (step - self.small_steps + 1) / 40)
        return self.large_rate * warm * min(1.0, (1 - done) / (1 - self.hold))

    def mix(self, step: int) -> Mix:
        """Copying first, sums and long prefixes later."""
        if step < self.small_steps:
            return Mix(copying=0.12, long=0.05, drill=0.1)
        done = (step - self.small_steps) / self.large_steps
        if done < self.hold:
            return Mix(copying=0.05, long=0.12, drill=0.15)
        if done < 0.48:
            return Mix(long=0.25)
        # Sums and translations are settled by now; copying a passphrase is what is left to sharpen.
        return Mix(copying=0.12, long=0.22, translating=0.18, shortest_copy=12)


def loss_on_answers(model: LlamaForCausalLM, trees: list[Tree], pad: int) -> torch.Tensor:
    """Focal cross-entropy (gamma 1) of the answer tokens: what is known already counts less."""
    tokens, positions, mask, labels = collate(trees, pad)
    hidden = model.model(
        input_ids=tokens, position_ids=positions, attention_mask=mask, use_cache=False
    ).last_hidden_state
    # A label belongs to the position before it. In a tree the token before the first token of an
    # answer is the last one of its own question, so that a plain shift by one is right.
    wanted = labels[:, 1:] != IGNORE
    logits = model.lm_head(hidden[:, :-1][wanted])
    surprise = F.cross_entropy(logits, labels[:, 1:][wanted], reduction="none")
    return (surprise * (1 - (-surprise.detach()).exp())).mean()


def optimizer_for(model: LlamaForCausalLM, plan: Plan) -> torch.optim.AdamW:
    """AdamW with a slower group for queries and keys and no decay for norms and embedding."""
    groups: dict[str, list[torch.nn.Parameter]] = {"query_key": [], "matrix": [], "other": []}
    for name, weight in model.named_parameters():
        slow = "q_proj" in name or "k_proj" in name
        plain = weight.dim() < 2 or "embed" in name
        groups["query_key" if slow else "other" if plain else "matrix"].append(weight)
    return torch.optim.AdamW(
        [
            {"params": groups["query_key"], "scale": plan.query_key},
            {"params": groups["matrix"], "scale": 1.0},
            {"params": groups["other"], "scale": 1.0, "weight_decay": 0.0},
        ],
        betas=(0.9, 0.98),
        weight_decay=0.01,
        fused=True,
    )


def _save(path: Path, state: dict) -> None:
    partial = path.with_suffix(".partial")
    torch.save(state, partial)
    os.replace(partial, path)  # a run that is killed here keeps the previous state


def train(work: Path, plan: Plan, stop_after: int | None = None) -> LlamaForCausalLM:
    """Train from the state in `work`, or from nothing; returns the model when all steps are done.

    Args:
        work: Folder of the run: `state.pt` (weights and optimizer), `log.jsonl` (one record for
            every 10 steps). A second call goes on where the first one was stopped.
        plan: Steps, rates, seed. A state made with another plan is refused.
        stop_after: Do at most this many steps now (for tests).

    Raises:
        ValueError: The state in `work` was made with another plan.
    """
    work.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tokenizer()
    corpus = Corpus(tokenizer, plan.seed)
    state_file = work / "state.pt"
    step, seconds = 0, 0.0
    model = structured_start(len(tokenizer), plan.seed)
    optimizer = optimizer_for(model, plan)
    if state_file.exists():
        state = torch.load(state_file, weights_only=True)
        if state["plan"] != asdict(plan):
            raise ValueError(f"{state_file} was made with another plan; remove it to start anew")
        step, seconds = state["step"], state["seconds"]
        if step > plan.small_steps:
            model = grow(model, seed=plan.seed)
            optimizer = optimizer_for(model, plan)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    last = plan.steps if stop_after is None else min(plan.steps, step + stop_after)
    bar = tqdm(total=plan.steps, initial=step, desc="training", unit="step", mininterval=5)
    started = time.monotonic() - seconds
    losses: list[float] = []
    while step < last:
        if step == plan.small_steps:
            model = grow(model, seed=plan.seed)
            optimizer = optimizer_for(model, plan)
        for group in optimizer.param_groups:
            group["lr"] = plan.rate(step) * group["scale"]
        loss = loss_on_answers(model, corpus.batch(step, plan.mix(step)), tokenizer.pad_token_id)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        step += 1
        bar.update()
        if step % 10 == 0:
            mean = sum(losses[-10:]) / len(losses[-10:])
            bar.set_postfix(loss=f"{mean:.4f}", layers=model.config.num_hidden_layers)
            record = {"step": step, "loss": round(mean, 5), "rate": plan.rate(step - 1)}
            with (work / "log.jsonl").open("a") as log:
                log.write(json.dumps(record) + "\n")
        if step % plan.save_every == 0 or step == last:
            _save(
                state_file,
                {
                    "plan": asdict(plan),
                    "step": step,
                    "seconds": time.monotonic() - started,
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                },
            )
    bar.close()
    return model
