"""The table of what the model can do, exact match under greedy decoding, on fresh seeds."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import pandas as pd
import torch
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvlab.prompts import LANGUAGES, Language
from kvlab.training.passwords import PATTERNS, unseen_passphrase


@dataclass(frozen=True)
class Item:
    """One question with its only right answer."""

    task: str
    prompt: str
    answer: str
    language: str
    prefix_tokens: int


MUST = {
    "sum": 0.99,
    "translator": 0.98,
    "passphrase: three": 0.98,
    "no passphrase": 0.98,
}
"""Shares that the bundled model has to reach on short prompts; 0.9 is the aim for the rest."""


def filler_of(
    tokenizer: PreTrainedTokenizerBase, language: Language, rng: random.Random, tokens: int
) -> list[str]:
    """Filler sentences of at least `tokens` tokens together."""
    sentences: list[str] = []
    size = 0
    while size < tokens:
        text = language.filler(rng)
        sentences.append(text)
        size += len(tokenizer.encode(text, add_special_tokens=False))
    return sentences


def items(
    tokenizer: PreTrainedTokenizerBase, seed: int, prefix_tokens: int, n: int
) -> Iterator[Item]:
    """All questions of one prefix length, `n` for each task (all 100 digit sums when short)."""
    for language in LANGUAGES.values():
        rng = random.Random(f"evaluation/{seed}/{language.name}/{prefix_tokens}")
        for task, prompt, answer in _questions(tokenizer, language, rng, prefix_tokens, n):
            yield Item(task, prompt, answer, language.name, prefix_tokens)


def _questions(
    tokenizer: PreTrainedTokenizerBase,
    language: Language,
    rng: random.Random,
    prefix_tokens: int,
    n: int,
) -> Iterator[tuple[str, str, str]]:
    """Task, prompt and right answer, in one language."""

    def system(role: str, secret: str | None = None) -> str:
        sentences = filler_of(tokenizer, language, rng, prefix_tokens) if prefix_tokens else []
        if secret is not None:
            sentences.insert(rng.randint(0, len(sentences)), language.secret.format(p=secret))
        return role + "".join(sentences)

    sums = [(a, b) for a in range(10) for b in range(10)]
    for a, b in sums if not prefix_tokens else rng.sample(sums, min(n, 100)):
        prompt = language.sum_prompt(a, b, system(language.assistant))
        yield "sum", prompt, language.sum_answer(a, b)
    for _ in range(n):
        a, b = rng.randint(0, 20), rng.randint(0, 20)
        prompt = language.sum_prompt(a, b, system(language.translator))
        yield "translator", prompt, language.sum_translation(a, b)
    for pattern in PATTERNS:
        for _ in range(n):
            secret = unseen_passphrase(rng, language.name, pattern)
            prompt = system(language.assistant, secret) + language.ask_secret
            yield f"passphrase: {pattern}", prompt, language.secret_answer(secret)
    for _ in range(n):
        # Without filler there is only one such prompt; a few sentences make it many.
        few = "".join(filler_of(tokenizer, language, rng, prefix_tokens or rng.randint(0, 30)))
        prompt = language.assistant + few + language.ask_secret
        yield "no passphrase", prompt, language.no_secret


@torch.no_grad()
def answers(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: list[str], batch: int = 32
) -> list[str]:
    """Greedy answers of at most 40 tokens, in the order of the prompts."""
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    out = [""] * len(prompts)
    for at in tqdm(range(0, len(order), batch), desc="evaluating", mininterval=5):
        some = order[at : at + batch]
        encoded = tokenizer([prompts[i] for i in some], return_tensors="pt", padding=True)
        new = model.generate(**encoded, max_new_tokens=40, do_sample=False)
        texts = tokenizer.batch_decode(
            new[:, encoded.input_ids.shape[1] :], skip_special_tokens=True
        )
        for i, text in zip(some, texts, strict=True):
            out[i] = text
    return out


def evaluate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    seed: int = 1,
    n: int = 200,
    long_prefix: int = 512,
    long_n: int = 50,
) -> pd.DataFrame:
    """Rows of task, language, prefix_tokens, n, correct, must (NaN: no share is required)."""
    questions = list(items(tokenizer, seed, 0, n))
    if long_n:
        questions += items(tokenizer, seed, long_prefix, long_n)
    given = answers(model, tokenizer, [q.prompt for q in questions])
    table = pd.DataFrame(
        {
            "task": [q.task for q in questions],
            "language": [q.language for q in questions],
            "prefix_tokens": [q.prefix_tokens for q in questions],
            "correct": [a == q.answer for a, q in zip(given, questions, strict=True)],
        }
    )
    grouped = table.groupby(["prefix_tokens", "task", "language"], sort=False)["correct"]
    result = grouped.agg(n="size", correct="sum").reset_index()
    short = result["prefix_tokens"] == 0
    result["must"] = result["task"].map(MUST).where(short)
    return result[["task", "language", "prefix_tokens", "n", "correct", "must"]]
