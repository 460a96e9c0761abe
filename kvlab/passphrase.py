"""The passphrase experiment: who runs beside whom, in which way, and what came of it.

Five requests in each language. A and B share their system prefix and ask for different sums. C
asks A's question behind another prefix. D and E carry two different passphrases.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

import pandas as pd
import torch
from tqdm import tqdm

from kvlab.decode import recompute
from kvlab.forward import Observer
from kvlab.models import LoadedModel
from kvlab.pools import CachePool, PrivatePool, SimpleCachePool
from kvlab.prompts import LANGUAGES, Language
from kvlab.request import Request, Run
from kvlab.schedule import Order, run
from kvlab.verdict import compare, foreign_spans, measure_tolerance

Arm = Literal["serial", "private", "shared", "overwrite", "append"]
ARMS: tuple[Arm, ...] = get_args(Arm)
"""serial: one after another on a single slot, in both orders, repeated; private: concurrent, a
cache each; shared: concurrent on one pool, a slot each; overwrite, append: concurrent on one pool,
and the second request is put on the slot of the first."""
ISOLATED_ARMS: tuple[Arm, ...] = ("serial", "private", "shared")

Form = Literal["short", "long"]
"""short: a plain prompt, until the end token; long: 128 prompt tokens and exactly 32 new ones."""

SECRETS = {"zh": ("红狐三组", "蓝鲸七号"), "en": ("quiet river nine", "amber falcon seven")}
PAIRS = (("A", "B"), ("A", "C"), ("D", "E"), ("D", "C"))
"""First and second request; A and D each with a partner of the same and of another prefix."""
LONG_PROMPT, LONG_ANSWER = 128, 32


def prompt_parts(language: Language) -> dict[str, tuple[str, str]]:
    """System prefix and rest of the five requests and of six bystanders.

    All of them are chosen so that no margin of their references comes near rounding, also where
    the long form goes on behind the end token: another token is then a finding, never a near-tie.
    """
    assistant, translator = language.assistant, language.translator

    def ask(a: int, b: int) -> str:
        return language.ask_sum.format(a=a, b=b)

    def secret(passphrase: str) -> str:
        return language.secret.format(p=passphrase) + language.ask_secret

    first, second = SECRETS[language.name]
    return {
        "A": (assistant, ask(1, 1)),
        "B": (assistant, ask(2, 2)),
        "C": (translator, ask(1, 1)),
        "D": (assistant, secret(first)),
        "E": (assistant, secret(second)),
        "bystander 1": (assistant, ask(3, 5)),
        "bystander 2": (assistant, ask(9, 4)),
        "bystander 3": (translator, ask(6, 7)),
        "bystander 4": (assistant, language.ask_secret),
        "bystander 5": (translator, ask(2, 9)),
        "bystander 6": (assistant, ask(7, 5)),
    }


def padding(loaded: LoadedModel, language: Language, tokens: int) -> str:
    """Filler sentences that together are exactly `tokens` tokens, or just below where none fit.

    A table of reachable lengths, each with the first choice of sentences that reaches it.
    """
    spell = loaded.tokenizer.encode
    reachable: dict[int, list[str]] = {0: []}
    for filler in language.fillers:
        sentence = filler.format(n=language.numbers[3])
        size = len(spell(sentence, add_special_tokens=False))
        for length, chosen in list(reachable.items()):
            if length + size <= tokens:
                reachable.setdefault(length + size, [*chosen, sentence])
    return "".join(reachable[max(reachable)])


def build_requests(loaded: LoadedModel, language: Language, form: Form) -> dict[str, Request]:
    """The five requests and six bystanders as token ids, by name."""
    requests = {}
    for name, (system, rest) in prompt_parts(language).items():
        if form == "short":
            requests[name] = loaded.request(name, system + rest)
            continue
        room = LONG_PROMPT - len(loaded.tokenizer.encode(system + rest))
        text = system + padding(loaded, language, room) + rest
        requests[name] = loaded.request(name, text, LONG_ANSWER, stop=False)
    return requests


def mean_confidence(ran: Run) -> float:
    """Mean probability that the model gave to the tokens of its own answer."""
    logits = torch.stack([s.logits for s in ran.steps if s.logits is not None])
    return logits.softmax(-1).amax(-1).mean().item()


@dataclass
class Experiment:
    """The requests of one language and form on one model, with their golden references.

    The references are cold recomputes, made once and used for every arm.
    """

    loaded: LoadedModel
    language: Language
    form: Form = "short"
    tolerance: float | None = None
    requests: dict[str, Request] = field(init=False)
    references: dict[str, Run] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.requests = build_requests(self.loaded, self.language, self.form)

    def reference(self, name: str) -> Run:
        """The cold recompute of a request."""
        if name not in self.references:
            self.references[name] = recompute(self.loaded.model, self.requests[name])
        return self.references[name]

    def measured_tolerance(self) -> float:
        """The tolerance of this model and dtype, measured on correct caches at first use."""
        if self.tolerance is None:
            references = {name: self.reference(name) for name in self.requests}
            requests = list(self.requests.values())
            self.tolerance = measure_tolerance(self.loaded.model, requests, references)
        return self.tolerance

    def pool(self, arm: Arm, first: str, second: str, size: int) -> CachePool:
        """The memory of an arm, for `size` requests."""
        config = self.loaded.model.config
        if arm == "private":
            return PrivatePool(config)
        # Room for two lives: an appended request starts behind its victim.
        rows = 2 * max(r.rows_needed for r in self.requests.values()) + 2
        slots = 1 if arm == "serial" else size
        pool = SimpleCachePool.for_model(
            config, slots, rows, self.loaded.model.dtype, self.loaded.model.device
        )
        if arm in ("overwrite", "append"):
            pool.collide(second, first, arm)
        return pool

    def run(
        self,
        arm: Arm,
        first: str,
        second: str,
        batch: int = 1,
        observers: Sequence[Observer] = (),
    ) -> dict[str, Run]:
        """Run a pair in one arm; with `batch` 8, beside six bystanders in one forward pass."""
        if arm not in ARMS:
            raise ValueError(f"unknown arm {arm!r}; use one of {', '.join(ARMS)}")
        names = [first, second]
        if batch > 1:
            names += [n for n in self.requests if n.startswith("bystander")][: batch - 2]
        requests = [self.requests[n] for n in names]
        order: Order = "serial" if arm == "serial" else "round_robin"
        pool = self.pool(arm, first, second, len(names))
        return run(self.loaded.model, requests, pool, order, batch, observers)

    def run_serially(self, first: str, second: str, repeats: int) -> list[dict[str, Run]]:
        """The serial arm: one single-slot pool, both orders in turn, `repeats` times."""
        pool = self.pool("serial", first, second, 1)
        pair = [self.requests[first], self.requests[second]]
        orders = [pair if i % 2 == 0 else pair[::-1] for i in range(repeats)]
        return [run(self.loaded.model, o, pool, "serial") for o in orders]

    def row(self, name: str, partner: str, ran: Run) -> dict[str, object]:
        """What the table says about one run: the comparison with its reference, and the words."""
        reference = self.reference(name)
        result = compare(ran, reference, self.measured_tolerance())
        own = [*self.requests[name].tokens, *reference.tokens]
        other = [*self.requests[partner].tokens, *self.reference(partner).tokens]
        spans = foreign_spans(ran.tokens, own, other)
        words = [self.loaded.text(ran.tokens[a:b]) for a, b in spans]
        words = [w.strip() for w in words if w.strip()]
        bad = result.verdict in ("contaminated", "disturbed")
        return {
            "request": name,
            "partner": partner,
            "text": self.loaded.text(ran.tokens),
            "edit_distance": result.edit_distance,
            "first_divergence": result.first_divergence,
            "margin": result.margin,
            "drift": result.drift,
            "bitwise": result.bitwise,
            "same_tokens": result.same_tokens,
            "within_tolerance": result.within_tolerance,
            "verdict": result.verdict,
            "victim": bad,
            "foreign_words": words,
            "kind": None if not bad else "partner's words" if words else "damage without words",
            "tokens": ran.tokens,
            "margins": ran.margins,
            "confidence": mean_confidence(ran),
        }

    def rows(
        self, arm: Arm, first: str, second: str, batch: int = 1, repeats: int = 4
    ) -> list[dict[str, object]]:
        """The table rows of one pair in one arm: first, second, then the bystanders.

        Of the repeats of the serial arm the worst one is reported.
        """
        runs = (
            self.run_serially(first, second, repeats)
            if arm == "serial"
            else [self.run(arm, first, second, batch)]
        )
        rows = []
        for name in runs[0]:
            partner = second if name == first else first
            candidates = [self.row(name, partner, r[name]) for r in runs]
            worst = max(candidates, key=lambda r: (r["edit_distance"], r["drift"]))
            role = "first" if name == first else "second" if name == second else "bystander"
            fixed = {
                "language": self.language.name,
                "form": self.form,
                "dtype": str(self.loaded.model.dtype).removeprefix("torch."),
                "batch": batch,
                "arm": arm,
                "pair": f"{first}/{second}",
                "role": role,
                "runs": len(runs),
            }
            rows.append(fixed | worst)
        return rows


def share_tolerance(experiments: Sequence[Experiment]) -> None:
    """One tolerance for all experiments of a model: the largest that any of them shows.

    Rounding depends on the processor and on the shapes; one experiment alone sees too few of them.
    """
    largest = max(e.measured_tolerance() for e in experiments)
    for experiment in experiments:
        experiment.tolerance = largest


def matrix(
    models: Sequence[LoadedModel],
    languages: Sequence[str] = ("zh", "en"),
    forms: Sequence[Form] = ("short", "long"),
    batches: Sequence[int] = (1, 8),
    arms: Sequence[Arm] = ARMS,
    pairs: Sequence[tuple[str, str]] = PAIRS,
    repeats: int = 4,
    progress: bool = False,
) -> pd.DataFrame:
    """The whole experiment as one tidy table, one row for each request of each run.

    Columns: language, form, dtype, batch, arm, pair, role, request, partner, tokens, text,
    edit_distance, first_divergence, margin, drift, bitwise, same_tokens, within_tolerance,
    verdict, victim, kind, foreign_words, runs, margins, confidence, tolerance.

    The serial arm serves one request at a time, so it has no batch of 8.
    """
    experiments = [
        Experiment(m, LANGUAGES[language], form)
        for m in models
        for language in languages
        for form in forms
    ]
    for model in models:
        share_tolerance([e for e in experiments if e.loaded is model])
    work = [
        (e, batch, arm, pair)
        for e in experiments
        for batch in batches
        for arm in arms
        for pair in pairs
        if not (arm == "serial" and batch > 1)
    ]
    rows: list[dict[str, object]] = []
    for experiment, batch, arm, pair in tqdm(work, disable=not progress, mininterval=5):
        made = experiment.rows(arm, *pair, batch=batch, repeats=repeats)
        rows += [r | {"tolerance": experiment.tolerance} for r in made]
    return pd.DataFrame(rows)
