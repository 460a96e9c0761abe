"""Checks for notebook 11."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvlab.bench import admit_written
from kvlab.exercises.checking import check
from kvlab.pools import TieredCachePool
from kvlab.request import Context, Request
from kvlab.timing import smallest_p


def check_fewest(fewest: Callable[[float], int], number: str = "11.1") -> bool:
    """The fewest hits, and as many misses, with which the test can reach `alpha` at all."""

    def attempt() -> str | None:
        for alpha in (0.05, 0.001, 1e-6):
            got, want = fewest(alpha), 1
            while smallest_p(want, want) >= alpha:
                want += 1
            if got == want:
                continue
            if got == want - 1:
                return f"with {got} each the smallest p is {smallest_p(got, got):.2g}: not below."
            if got > want:
                return f"for alpha={alpha} fewer than {got} do: one order of 2n over n is the best."
            return f"for alpha={alpha} you say {got}; {got} each give {smallest_p(got, got):.2g}."
        return None

    return check(number, attempt)


def check_context(context: Callable[[str, str, bytes], Context], number: str = "11.2") -> bool:
    """The context that a gateway gives a request: `context(tenant, user, secret)`.

    Only the same user of the same tenant may hit, nobody can make up the salt without the secret.
    """

    def hit(first: Context, second: Context) -> bool:
        pool = TieredCachePool(8, 1, 1, 1, block_size=4)
        prompt = tuple(range(9))
        pool.release(admit_written(pool, Request("a", prompt, 1, context=first)))
        return pool.admit(Request("b", prompt, 1, context=second)).num_cached_tokens > 0

    def attempt() -> str | None:
        mine = context("acme", "ann", b"secret")
        others: Sequence[tuple[str, Context]] = (
            ("a colleague of the same tenant hits", context("acme", "bob", b"secret")),
            ("a namesake at another tenant hits", context("corp", "ann", b"secret")),
            (
                "acm + eann is taken for acme + ann: tag or separate the fields",
                context("acm", "eann", b"secret"),
            ),
            (
                "who knows both names can make up the salt: put the secret in",
                context("acme", "ann", b"another"),
            ),
        )
        for complaint, other in others:
            if hit(mine, other):
                return f"{complaint}."
        if not hit(mine, context("acme", "ann", b"secret")):
            return "nobody hits, not even the user's own next request: the price without the gain."
        return None

    return check(number, attempt)
