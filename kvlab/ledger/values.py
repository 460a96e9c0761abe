"""Measured values: each kind knows how to agree with a recorded one, and how to print."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Self


@dataclass(frozen=True)
class Value:
    """Something measured. Each kind knows when a fresh value agrees with a recorded one.

    Attributes:
        decides: Whether a value that does not agree fails the comparison. What a clock has told
            never does.
    """

    value: Any
    decides: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for name, number in vars(self).items():
            if hasattr(number, "item"):  # of numpy or torch
                object.__setattr__(self, name, number.item())
        if isinstance(self.value, float) and not math.isfinite(self.value):
            raise ValueError(f"{self.value} is not a number that can be recorded")

    def agrees(self, recorded: Self) -> bool:
        """Whether this fresh value is the recorded one, by the rule that the record carries."""
        raise NotImplementedError

    def as_dict(self) -> dict[str, Any]:
        return {"kind": type(self).__name__, **asdict(self)}


@dataclass(frozen=True)
class Count(Value):
    """A number, a word or a list of them; the same on every machine."""

    def agrees(self, recorded: Self) -> bool:
        if isinstance(self.value, float) and isinstance(recorded.value, float):
            return math.isclose(self.value, recorded.value, rel_tol=1e-6)
        return bool(self.value == recorded.value)

    def __str__(self) -> str:
        if isinstance(self.value, list):
            return ", ".join(str(Count(v)) for v in self.value)
        return f"{self.value:.4g}" if isinstance(self.value, float) else str(self.value)


@dataclass(frozen=True)
class Rate(Value):
    """`value` of `n`; the same on every machine."""

    n: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.value <= self.n or self.n == 0:
            raise ValueError(f"a rate needs 0 <= hits <= n and n > 0, got {self.value} of {self.n}")

    @property
    def share(self) -> float:
        return self.value / self.n

    @property
    def all(self) -> bool:
        return bool(self.value == self.n)

    @property
    def most(self) -> bool:
        return self.share > 0.5

    def agrees(self, recorded: Self) -> bool:
        return self == recorded

    def __str__(self) -> str:
        return f"{self.value} of {self.n}"


@dataclass(frozen=True)
class Rounding(Value):
    """A number at the level of rounding errors; another machine may differ by `factor`."""

    factor: float = 10.0
    FLOOR: ClassVar[float] = 1e-6
    """Below this they are not told apart: one machine's 0 is another one's 1e-7."""

    def agrees(self, recorded: Self) -> bool:
        small, large = sorted(max(abs(v), self.FLOOR) for v in (self.value, recorded.value))
        return bool(large <= recorded.factor * small)

    def __str__(self) -> str:
        return f"{self.value:.3g}"


@dataclass(frozen=True)
class Varying(Value):
    """A number that real threads or a machine may move from `low` to `high`, and no further."""

    low: float = 0.0
    high: float = 0.0

    def agrees(self, recorded: Self) -> bool:
        return bool(recorded.low <= self.value <= recorded.high)

    def __str__(self) -> str:
        return f"{self.value:.3g} ({self.low:g} to {self.high:g})"


@dataclass(frozen=True)
class Time(Varying):
    """What a clock has told, usually from `low` to `high`: an observation beside the verdict.

    Attributes:
        unit: "x" for a ratio, "%" for a share.
    """

    unit: str = "x"
    decides: ClassVar[bool] = False

    def __str__(self) -> str:
        return f"{self.value:.0%}" if self.unit == "%" else f"{self.value:.3g}{self.unit}"


KINDS: dict[str, type[Value]] = {c.__name__: c for c in (Count, Rate, Rounding, Varying, Time)}


def read(value: Mapping[str, Any]) -> Value:
    """A value as `Value.as_dict` wrote it."""
    return KINDS[value["kind"]](**{k: v for k, v in value.items() if k != "kind"})
