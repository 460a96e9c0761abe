"""What goes into a run and what comes out of it: a request, and the record of its life."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from jaxtyping import Float
from torch import Tensor

StepKind = Literal["prefill", "decode"]

Context = tuple[tuple[str, str | None], ...] | None
"""Tagged fields, such as `(("adapter", "x"), ("tenant", "y"))`. `None`, or a field whose value is
`None`, says that something is not known; then nothing may be reused."""


def known(context: Context) -> tuple[tuple[str, str], ...] | None:
    """The context as a key of tagged fields, or `None` where part of it is unknown: no reuse.

    The order of the fields does not matter; their tags do, so that an adapter named X is not a
    tenant named X.
    """
    if context is None or any(value is None for _, value in context):
        return None
    return tuple(sorted((tag, value) for tag, value in context if value is not None))


@dataclass(frozen=True)
class Request:
    """One prompt on its way to an answer.

    Args:
        id: Name of the request, unique within a pool while it is admitted.
        tokens: Prompt as token ids, at least one.
        max_new_tokens: How many tokens to generate at most.
        stop_tokens: Token ids that end the answer (the stop token itself is kept). Empty: never
            stop before `max_new_tokens`, as the article's 32-token runs do.
        context: Whatever else the keys and values depend on (adapter, tenant, image); requests of
            different contexts must never share.
    """

    id: str
    tokens: tuple[int, ...]
    max_new_tokens: int = 32
    stop_tokens: tuple[int, ...] = ()
    context: Context = ()

    def __post_init__(self) -> None:
        if not self.tokens:
            raise ValueError(f"request {self.id!r} has an empty prompt; give at least one token")
        if self.max_new_tokens < 1:
            raise ValueError(f"request {self.id!r}: max_new_tokens must be at least 1")

    @property
    def rows_needed(self) -> int:
        """Cache rows of a whole life: the last generated token is never written."""
        return len(self.tokens) + self.max_new_tokens - 1


@dataclass
class Step:
    """One forward pass of one request.

    `start` is the first cache row that it wrote, `wrote` the number of rows, `margin` the distance
    between the two best logits: a small one means that rounding alone could change the token.
    `ended` is the clock (`time.perf_counter`) when its forward pass was over.
    """

    kind: StepKind
    tick: int
    start: int
    wrote: int
    token: int
    margin: float
    seconds: float
    logits: Float[Tensor, " V"] | None = None
    ended: float = 0.0


@dataclass
class Run:
    """The life of one request: one step for every generated token."""

    request: Request
    steps: list[Step] = field(default_factory=list)
    num_cached_tokens: int = 0
    admission_seconds: float = 0.0

    @property
    def tokens(self) -> list[int]:
        """The generated tokens."""
        return [step.token for step in self.steps]

    @property
    def margins(self) -> list[float]:
        """Top-1 minus top-2 logit of every generated token."""
        return [step.margin for step in self.steps]

    @property
    def time_to_first_token(self) -> float:
        """Seconds of the admission and of the first forward pass; compare ratios only."""
        return self.admission_seconds + self.steps[0].seconds

    @property
    def next_kind(self) -> StepKind:
        """The kind of the step to come."""
        return "decode" if self.steps else "prefill"

    @property
    def finished(self) -> bool:
        """Whether the answer is complete: a stop token came, or all tokens were generated."""
        if not self.steps:
            return False
        done = len(self.steps) >= self.request.max_new_tokens
        return done or self.steps[-1].token in self.request.stop_tokens
