"""The audit: arms that try to make one request's context turn up in another's answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from kvlab.audit.engine import Answer, Ask, Engine, Prompt
from kvlab.audit.judge import NEAR_TIE, VERDICTS, Finding, drift, first_difference, judge, verdict
from kvlab.audit.prompts import Tenant, Writer
from kvlab.timing import compare_times

CANNOT_RULE_OUT = {
    "recompute": "differences of weights or arithmetic between the engine and the local checkpoint",
    "cache off": "state that outlives a request although its cache is off",
    "salt": "state that outlives a request, and a salt that some part of the engine ignores",
    "unique beginning": "a fault that harms a prompt's first run and all later ones alike",
}
"""For each kind of reference, what could be wrong and stay unseen."""

PAIRS = 8
"""Probes of each kind in the timing arm; seven is the fewest that can prove anything."""


SAYS = {
    True: "tells right guesses from wrong ones",
    False: "tells nothing",
    None: "cannot be seen: neither times nor cached tokens are told",
}
"""What the timing arm says, by whether it leaks."""


class OutOfBudget(Exception):
    """The next requests would be more than the audit may send."""


@dataclass
class Arm:
    """One way to run requests: how many answers were compared, and what came out."""

    name: str
    counts: dict[str, int] = field(default_factory=dict)
    note: str = ""


@dataclass
class Result:
    """What an audit found; `to_dict` is the JSON report."""

    engine: str
    reference: str = ""
    cannot_rule_out: str = ""
    tenant_knob: str | None = None
    verdict: str = "cannot tell"
    explanation: str = "it did not come to an end"
    requests: int = 0
    noise: dict[str, Any] = field(default_factory=dict)
    reuse: str = "not told"
    arms: list[Arm] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    timing: dict[str, dict[str, Any]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        """0 isolated, 1 leak or contamination, 3 cannot tell."""
        return VERDICTS[self.verdict]

    def to_dict(self) -> dict[str, Any]:
        """Everything, as plain lists and numbers."""
        return asdict(self) | {"exit_code": self.exit_code}


class Audit:
    """Runs the arms against one engine.

    Args:
        engine: Whom to audit.
        writer: What it is asked, in text or in ids.
        concurrency: The largest number of requests at once; the overload arm sends three times it.
        max_requests: The audit sends no more than this. Arms that would are left out.
        max_tokens: Tokens of an answer.
        sentences: Length of a shared beginning, about eight tokens each.
        recompute: The reference from a local copy of the weights, without any cache.
        stop: Tokens that end an answer: engines tell them or not, so they are not compared.
        progress: Called with a line for each arm.
    """

    def __init__(
        self,
        engine: Engine,
        writer: Writer,
        concurrency: int = 4,
        max_requests: int = 400,
        max_tokens: int = 16,
        sentences: int = 8,
        recompute: Callable[[Prompt, int], Answer] | None = None,
        stop: Sequence[int] = (),
        progress: Callable[[str], None] = lambda line: None,
    ) -> None:
        if concurrency < 2:
            raise ValueError("concurrency must be at least 2: one request alone mixes nothing up")
        self.engine, self.writer, self.recompute = engine, writer, recompute
        self.concurrency, self.max_requests = concurrency, max_requests
        self.max_tokens, self.sentences, self.progress = max_tokens, sentences, progress
        self.stop = stop
        self.cold: str | None = None  # found out in `run`, once the engine has been looked at
        self.tolerance = NEAR_TIE
        self.apart = 0.0  # largest difference of a log-probability between equal answers
        self.noisy = ""
        self.passphrases: set[str] = set()
        self.references: dict[Prompt, Answer] = {}
        self.failures_in_a_row = 0
        self.result = Result(engine.name)

    def run(self) -> Result:
        """All arms, as far as the budget and patience reach; can be interrupted.

        Raises:
            EngineError: The engine cannot be audited at all.
        """
        self.engine.check()
        self.cold = "recompute" if self.recompute else self.engine.cold
        result, missing = self.result, ""
        result.engine, result.tenant_knob = self.engine.name, self.engine.tenant_knob
        arms = (
            self.noise, self.serial, self.disjoint, self.shared, self.one_token, self.long_short,
            self.abort, self.overload, self.again, self.timing,
        )  # fmt: skip
        try:
            for arm in arms:
                try:
                    arm()
                except OutOfBudget:
                    left_out = arm.__name__.replace("_", " ")
                    missing = f"{left_out!r} and what follows did not fit into the request budget"
                    break
        except KeyboardInterrupt:
            missing = "it was interrupted"
        except StuckEngine as stuck:
            missing = str(stuck)
        if missing:
            result.notes.append(missing)
        result.requests = self.engine.sent
        result.noise["largest difference from the reference"] = self.apart
        result.reference = self.cold or "unique beginning"
        result.cannot_rule_out = CANNOT_RULE_OUT[result.reference]
        result.verdict, result.explanation = verdict(result.findings, self.noisy, missing)
        return result

    # How requests are sent and compared.

    def ask(self, asks: Sequence[Ask]) -> list[Answer]:
        """Send some at once, within the budget."""
        if self.engine.sent + len(asks) > self.max_requests:
            raise OutOfBudget
        answers = self.engine.complete(asks)
        failed = all(a.error for a in answers)
        self.failures_in_a_row = self.failures_in_a_row + len(answers) if failed else 0
        if self.failures_in_a_row >= 5:
            raise StuckEngine(f"five requests in a row failed, the last with: {answers[-1].error}")
        return answers

    def alone(self, prompt: Prompt, cold: bool = False, tokens: int | None = None) -> Answer:
        """One request, and nobody else."""
        return self.ask([Ask(prompt, tokens or self.max_tokens, cold=cold)])[0]

    def reference(self, prompt: Prompt, tokens: int | None = None) -> Answer:
        """What the request answers where nothing can come across, as far as the engine allows.

        Args:
            tokens: Length of the answer at the first call; later calls get the same answer.
        """
        if prompt not in self.references:
            if self.recompute:
                self.references[prompt] = self.recompute(prompt, tokens or self.max_tokens)
            else:
                self.references[prompt] = self.alone(prompt, self.cold is not None, tokens)
        return self.references[prompt]

    def tenants(self, count: int, beginning: Sequence[str] | None = None) -> list[Tenant]:
        """New tenants of some lengths, behind one beginning, or each behind its own."""
        return [
            self.new(
                self.writer.tenant(beginning or self.writer.beginning(self.sentences), extra=i % 3)
            )
            for i in range(count)
        ]

    def new(self, tenant: Tenant) -> Tenant:
        """Remember a tenant's passphrase, which nobody else may say."""
        self.passphrases.add(tenant.passphrase)
        return tenant

    def arm(
        self,
        name: str,
        rounds: Sequence[Sequence[Tenant]],
        refusals: bool = False,
        tokens: int | None = None,
    ) -> None:
        """Run rounds of concurrent requests, and compare each answer with its reference.

        Without a cold reference half of the tenants are asked alone before, the other half after:
        what is known already would only be found again, and never be mixed up.

        Args:
            refusals: Whether the engine may refuse: then failures are counted, not held against it.
            tokens: Length of the answers, if another one than usual.
        """
        everybody = list(dict.fromkeys(t for r in rounds for t in r))
        before = everybody if self.cold else everybody[::2]
        for tenant in before:
            self.reference(tenant.prompt, tokens)
        answered = [
            (tenant, answer)
            for together in rounds
            for tenant, answer in zip(
                together,
                self.ask([Ask(t.prompt, tokens or self.max_tokens) for t in together]),
                strict=True,
            )
        ]
        arm = Arm(name)
        for tenant, answer in answered:
            self.reference(tenant.prompt, tokens)
            self._judge(arm, tenant, answer, refusals)
        self._finish(arm)

    def _judge(self, arm: Arm, tenant: Tenant, answer: Answer, refusals: bool = False) -> None:
        reference = self.reference(tenant.prompt)
        others = self.passphrases - {tenant.passphrase}
        found = judge(arm.name, tenant, answer, reference, others, self.tolerance, self.stop)
        if found.kind == "equal":
            self.apart = max(self.apart, drift([answer, reference]))
        arm.counts[found.kind] = arm.counts.get(found.kind, 0) + 1
        if found.kind != "equal" and not (refusals and found.kind == "failed"):
            self.result.findings.append(found)

    def _finish(self, arm: Arm) -> None:
        self.result.arms.append(arm)
        counts = ", ".join(f"{n} {kind}" for kind, n in arm.counts.items())
        self.progress(f"{arm.name}: {counts or 'nothing'} {arm.note}".strip())

    # The arms.

    def noise(self) -> None:
        """The same request alone, repeated: what the engine does on its own; and does it reuse?"""
        arm, drifts = Arm("the same request alone, repeated"), []
        for tenant in self.tenants(2):
            first = self.alone(tenant.prompt, cold=bool(self.engine.cold))
            repeats = [self.alone(tenant.prompt) for _ in range(3)]
            cold = [first] + [self.alone(tenant.prompt, cold=True) for _ in range(2)]
            cold = cold if self.engine.cold else repeats
            if self.engine.cold and any(a.cached for a in cold):
                self.result.notes.append(
                    f"the engine's {self.engine.cold} does not keep requests cold: it reports "
                    "cached tokens"
                )
                self.cold = "recompute" if self.recompute else None
            for answer in repeats:
                if answer.cached is not None:
                    self.result.reuse = "seen" if answer.cached else "not seen"
            self.references[tenant.prompt] = first
            if self.recompute:
                self.references[tenant.prompt] = self.recompute(tenant.prompt, self.max_tokens)
            told = [a for a in cold if not a.error]
            drifts.append(drift(told))
            self.tolerance = max(self.tolerance, 10 * drifts[-1])
            parted = next(
                (
                    at
                    for a in told
                    if (at := first_difference(a.pieces, told[0].pieces)) is not None
                ),
                None,
            )
            if parted is not None and not _near(told, parted, self.tolerance):
                self.noisy = (
                    "the same request alone gives different answers: temperature 0 is ignored, or "
                    "the engine's noise is larger than what the audit looks for"
                )
            for answer in (first, *repeats):
                self._judge(arm, tenant, answer)
        self.result.noise = {
            "largest drift of a lone request": max(drifts),
            "near-tie up to a margin of": self.tolerance,
            "log-probabilities told": first.logprobs is not None,
        }
        self._finish(arm)

    def serial(self) -> None:
        """One after another, four times, in changing orders, behind a shared beginning."""
        tenants = self.tenants(self.concurrency, self.writer.beginning(self.sentences))
        orders = [tenants, tenants[::-1], tenants[1:] + tenants[:1], tenants]
        self.arm("one after another, four orders", [[t] for order in orders for t in order])

    def disjoint(self) -> None:
        """At once, with nothing in common."""
        rounds = [self.tenants(n) for n in range(2, self.concurrency + 1)]
        self.arm("at once, nothing in common", rounds)

    def shared(self) -> None:
        """At once behind a shared beginning, 1, 2, 3 ... requests, twice each."""
        rounds = []
        for n in range(1, self.concurrency + 1):
            tenants = self.tenants(n, self.writer.beginning(self.sentences))
            rounds += [tenants, tenants]
        self.arm("at once, shared beginning", rounds)

    def one_token(self) -> None:
        """Two tenants whose prompts differ in one word only, early or late."""
        rounds: list[list[Tenant]] = []
        for early in (True, False):
            a, b, c = (self.new(t) for t in self.writer.twins(self.sentences, early))
            rounds += [[a], [c], [b], [a], [a, b], [b, a]]
        (model,) = self.tenants(1)
        if other := self.writer.same_low_byte(model):
            rounds += [[model], [other], [model, other]]
        self.arm("one word different", rounds)

    def long_short(self) -> None:
        """A long request, then a short one in the same place; and both at once."""
        rounds: list[list[Tenant]] = []
        for _ in range(2):
            long = self.new(self.writer.tenant(self.writer.beginning(3 * self.sentences)))
            short = self.new(self.writer.tenant(self.writer.beginning(0)))
            rounds += [[long], [short], [long, short]]
        self.arm("a long one, then a short one", rounds)

    def abort(self) -> None:
        """Hang up in the middle of an answer; then others use what became free."""
        for _ in range(2):
            beginning = self.writer.beginning(self.sentences)
            leaver, *others = self.tenants(self.concurrency, beginning)
            for tenant in others if self.cold else others[::2]:
                self.reference(tenant.prompt)
            if self.engine.sent + 1 > self.max_requests:
                raise OutOfBudget
            self.engine.abort(Ask(leaver.prompt, 16 * self.max_tokens))
            self.arm("after an abort in mid-answer", [others, [leaver]])

    def overload(self) -> None:
        """More requests at once than the engine may admit, with answers long enough to overlap."""
        tenants = self.tenants(3 * self.concurrency, self.writer.beginning(self.sentences))
        self.arm("more than it admits", [tenants], refusals=True, tokens=4 * self.max_tokens)

    def again(self) -> None:
        """The first references once more: did they hold?"""
        arm = Arm("the first references, again")
        for prompt in list(self.references)[2 : 2 + self.concurrency]:
            tenant = Tenant("an early one", "", prompt)
            answer = self.alone(prompt, cold=self.cold not in (None, "recompute"))
            self._judge(arm, tenant, answer)
        self._finish(arm)

    def timing(self) -> None:
        """Whether cached tokens or first-token times tell what another tenant has asked."""
        plain = self._probe(None, None)
        self.result.timing["as it is"] = plain
        if self.engine.tenant_knob and plain.get("leaks"):
            self.result.timing[self.engine.tenant_knob] = self._probe("victim", "stranger")

    def _probe(self, victim: str | None, stranger: str | None) -> dict[str, Any]:
        hits, misses = [], []
        for _ in range(PAIRS):
            beginning = self.writer.beginning(2 * self.sentences)
            first, second, third = (
                *self.tenants(2, beginning),
                *self.tenants(1, self.writer.beginning(2 * self.sentences)),
            )
            self.ask([Ask(first.prompt, 1, victim)])
            hits += self.ask([Ask(second.prompt, 1, stranger)])
            misses += self.ask([Ask(third.prompt, 1, stranger)])
        told: dict[str, Any] = {"probes": PAIRS}
        if all(a.cached is not None for a in (*hits, *misses)):
            told["cached tokens, right guess"] = [a.cached for a in hits]
            told["cached tokens, wrong guess"] = [a.cached for a in misses]
            told["leaks by count"] = min(a.cached or 0 for a in hits) > max(
                a.cached or 0 for a in misses
            )
        times = [[a.first_token for a in answers] for answers in (hits, misses)]
        if all(t is not None for kind in times for t in kind):
            gap = compare_times(*times)  # type: ignore[arg-type]
            told |= {"AUC": gap.auc, "p": gap.p, "effect": gap.effect, "leaks by time": gap.leaks}
            told["first token, right guess"], told["first token, wrong guess"] = times
        signs = [told[k] for k in ("leaks by count", "leaks by time") if k in told]
        told["leaks"] = any(signs) if signs else None
        counts = Arm("a stranger's guess at a beginning", {"probes": 2 * PAIRS})
        counts.note = SAYS[told["leaks"]]
        counts.note += f", with the knob {self.engine.tenant_knob}" if victim else ""
        self._finish(counts)
        return told


class StuckEngine(Exception):
    """Nothing comes back any more."""


def _near(answers: Sequence[Answer], at: int, tolerance: float) -> bool:
    margins = [a.margins[at] for a in answers if a.margins is not None and at < len(a.margins)]
    return bool(margins) and min(margins) <= tolerance
