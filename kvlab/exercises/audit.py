"""Checks for notebook 12, and an engine without a model to audit in them."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from kvlab.audit.audit import Audit, Result
from kvlab.audit.engine import Answer, Ask, Engine
from kvlab.audit.prompts import Writer
from kvlab.exercises.checking import check


class EchoEngine:
    """Answers with the passphrase that stands in the prompt; nothing can come across.

    Subclasses override `complete`, to be wrong in some way.
    """

    name, cold, tenant_knob, sent = "echo", None, None, 0

    def complete(self, asks: Sequence[Ask]) -> list[Answer]:
        """One answer for each of `asks`, in their order."""
        self.sent += len(asks)
        return [self.answer(a) for a in asks]

    def answer(self, ask: Ask) -> Answer:
        """The right answer to one request."""
        told = re.search(r"The passphrase is ([a-z ]+)\.", str(ask.prompt))
        text = f" The passphrase is {told[1] if told else 'unknown'}."
        words = tuple(text.split())
        return Answer(words, text, margins=(5.0,) * len(words), logprobs=(-0.1,) * len(words))

    def abort(self, ask: Ask) -> None:
        """Nothing is left behind."""
        self.sent += 1

    def check(self) -> None:
        """It is always there."""

    def close(self) -> None:
        """It holds nothing."""


def audited(engine: Engine, concurrency: int = 4) -> Result:
    """What the audit says about an engine that is asked in text."""
    return Audit(engine, Writer(), concurrency, max_requests=1000).run()


def check_trust(trust: Callable[[Result], str], number: str = "12.1") -> bool:
    """What a result allows to say: "proven leak", "probably clean" or "nothing"."""

    def attempt() -> str | None:
        clean = Result("e", verdict="isolated", reuse="seen")
        cases = [
            (Result("e", verdict="leak"), "proven leak", "a foreign passphrase is a proof"),
            (clean, "probably clean", "isolated, and the engine does reuse prefixes"),
            (
                Result("e", verdict="isolated", reuse="not seen"),
                "nothing",
                "an engine that never reuses anything had nothing to mix up: is its cache on?",
            ),
            (
                Result("e", verdict="cannot tell", reuse="seen"),
                "nothing",
                "'cannot tell' is no acquittal",
            ),
        ]
        for result, wanted, why in cases:
            if (got := trust(result)) != wanted:
                told = f"verdict {result.verdict!r}, reuse {result.reuse!r}"
                return f"for {told} you say {got!r}: {why}."
        return None

    return check(number, attempt)


def check_leaky(engine: Callable[[], Engine], number: str = "12.2") -> bool:
    """An engine that is right alone, and leaks when two or more ask at once."""

    def attempt() -> str | None:
        made = engine()
        asks = [Ask("The passphrase is red fox one. What?"), Ask("The passphrase is big owl two.")]
        alone = [made.complete([a])[0].text for a in asks]
        if alone != [EchoEngine().complete([a])[0].text for a in asks]:
            return "alone, each request must get its own passphrase."
        result = audited(engine())
        if result.verdict != "leak":
            return f"the audit says {result.verdict!r}: {result.explanation}."
        wrong = {f.arm for f in result.findings}
        if any("one after another" in arm for arm in wrong):
            return "it leaks one after another too: only requests at once may be mixed up."
        return None

    return check(number, attempt)
