"""What time alone gives away: whether answers to one kind of question come sooner than to another.

The audit of a prefix cache by its timing follows "Auditing Prompt Caching in Language Model APIs"
(ICML 2025): probes that should hit against probes that cannot, and a one-sided two-sample test.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float
from scipy import stats

ALPHA = 0.001


@dataclass(frozen=True)
class Gap:
    """How far the times of two kinds of probes are apart.

    Attributes:
        p: One-sided two-sample Kolmogorov-Smirnov test: how likely hits would look that much
            earlier than misses, were there no difference.
        auc: Chance that a random hit comes before a random miss; 0.5 says nothing, 1 everything.
        low, high: 95% bootstrap interval of `auc`.
        effect: Difference of the medians, in median absolute deviations of the misses.
        alpha: The level at which `leaks` decides.
    """

    p: float
    auc: float
    low: float
    high: float
    effect: float
    alpha: float = ALPHA

    @property
    def leaks(self) -> bool:
        """Whether hits can be told from misses at the level `alpha`."""
        return self.p < self.alpha


def compare_times(
    hits: Sequence[float] | Float[np.ndarray, " n"],
    misses: Sequence[float] | Float[np.ndarray, " m"],
    alpha: float = ALPHA,
) -> Gap:
    """Whether `hits` come sooner than `misses`; any unit, the same for both.

    Introduced in notebook 11.

    Raises:
        ValueError: Too few of either: not even two samples that are entirely apart could reach
            `alpha`, whose smallest p is 1 / (n+m over n). Or a time that is not finite.
    """
    a, b = np.asarray(hits, float), np.asarray(misses, float)
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        raise ValueError("times must be finite; leave failed probes out")
    if min(len(a), len(b)) < 2 or smallest_p(len(a), len(b)) >= alpha:
        raise ValueError(
            f"{len(a)} hits and {len(b)} misses can never reach alpha = {alpha}; take more probes"
        )

    def auc(hits: np.ndarray, misses: np.ndarray, axis: int = -1) -> np.ndarray:
        u = stats.mannwhitneyu(misses, hits, axis=axis, method="asymptotic").statistic
        return u / (hits.shape[axis] * misses.shape[axis])

    interval = stats.bootstrap(
        (a, b), auc, n_resamples=500, batch=100, method="percentile", rng=0
    ).confidence_interval
    spread = stats.median_abs_deviation(b) or np.finfo(float).tiny
    effect = float((np.median(b) - np.median(a)) / spread)
    return Gap(
        ks_p(a, b), float(auc(a, b)), float(interval.low), float(interval.high), effect, alpha
    )


def ks_p(
    hits: Sequence[float] | Float[np.ndarray, " n"],
    misses: Sequence[float] | Float[np.ndarray, " m"],
) -> float:
    """p of the one-sided two-sample Kolmogorov-Smirnov test that hits come sooner."""
    return float(stats.ks_2samp(hits, misses, alternative="greater").pvalue)


def smallest_p(n: int, m: int) -> float:
    """p of the one-sided test where all of `n` hits come before all of `m` misses."""
    return ks_p(range(n), range(n, n + m))


@dataclass(frozen=True)
class Recovered:
    """What a token-by-token attack brought: the tokens it settled for, and the probes it took."""

    tokens: tuple[int, ...]
    probes: int


def recover(
    known: Sequence[int],
    candidates: Sequence[Sequence[int]],
    score: Callable[[tuple[int, ...]], float],
    enough: float | None = None,
) -> Recovered:
    """Guess the tokens behind `known`, one after another, each by its best-scoring candidate.

    The attack of "I Know What You Asked" (NDSS 2025), reduced to its loop: once a token is
    settled, it joins what is known, and a wrong turn is never noticed.

    Args:
        candidates: For each position, the tokens to try, in this order.
        score: How much a guess looks like a hit, for `known` with the guess behind it.
        enough: A score that settles a token at once. Where none reaches it, the attack ends.
    """
    found: list[int] = []
    probes = 0
    for options in candidates:
        best, token = -float("inf"), options[0]
        for option in options:
            probes += 1
            seen = score((*known, *found, option))
            if seen > best:
                best, token = seen, option
            if enough is not None and seen >= enough:
                break
        if enough is not None and best < enough:
            break
        found.append(token)
    return Recovered(tuple(found), probes)
