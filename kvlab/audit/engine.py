"""What an engine is for the audit: something that completes prompts, several at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

Prompt = str | tuple[int, ...]
"""Text, or token ids where the engine takes them."""


class EngineError(RuntimeError):
    """The engine cannot be audited; the message says in one line why, and what to do."""


@dataclass(frozen=True)
class Ask:
    """One prompt for a greedy completion.

    Attributes:
        tenant: For whom: goes into the engine's tenant knob (a salt, a slot), where it has one.
            `None` leaves the knob alone.
        cold: Whether nothing that others left behind may be used; only where the engine offers it.
    """

    prompt: Prompt
    max_tokens: int = 16
    tenant: str | None = None
    cold: bool = False


@dataclass(frozen=True)
class Answer:
    """What came back.

    Attributes:
        pieces: The generated tokens: ids, or texts of tokens, or one text. Of one kind per engine.
        text: The answer as text, empty where the engine has none.
        margins: Distance between the two best log-probabilities at each token; `None`: not told.
        logprobs: Log-probability of each generated token; `None`: not told.
        cached: Prompt tokens that the engine says it had already; `None`: not told.
        first_token: Seconds to the first token; `None`: not measured.
        error: Why there is no answer, else `None`.
    """

    pieces: tuple[int | str, ...] = ()
    text: str = ""
    margins: tuple[float, ...] | None = None
    logprobs: tuple[float, ...] | None = None
    cached: int | None = None
    first_token: float | None = None
    error: str | None = None


class Engine(Protocol):
    """Whatever completes prompts greedily.

    Attributes:
        name: Engine and version, for the report.
        cold: How `Ask.cold` is honoured ("recompute", "cache off", "salt"), or `None` where it is
            not; then the audit makes do with prompts that begin as none before.
        tenant_knob: What `Ask.tenant` sets, for the report; `None`: nothing.
        sent: Requests sent so far, those of `check` included.
    """

    name: str
    cold: str | None
    tenant_knob: str | None
    sent: int

    def complete(self, asks: Sequence[Ask]) -> list[Answer]:
        """All of `asks` at once, one answer each, in their order. Failures are answers too."""

    def abort(self, ask: Ask) -> None:
        """Begin `ask`, and hang up in the middle of the answer."""

    def check(self) -> None:
        """Whether it can be audited at all.

        Raises:
            EngineError: It cannot.
        """

    def close(self) -> None:
        """Give back whatever it holds."""
