"""Checks for notebook 08."""

from __future__ import annotations

import math
from collections.abc import Callable

from kvlab.conformance import check as run_suite
from kvlab.exercises.checking import check
from kvlab.pools.contract import PoolFactory


def check_orders(orders: Callable[[int, int], int], number: str = "8.1") -> bool:
    """In how many orders two lives of n and m small steps can be interleaved."""

    def attempt() -> str | None:
        got = orders(5, 5)
        if got == math.factorial(10):
            return "the steps of one request cannot change places among themselves."
        if got == 2**10:
            return "every request has exactly its own number of steps; not every string will do."
        if got != math.comb(10, 5):
            return f"for five steps each there are {math.comb(10, 5)} orders, you say {got}."
        if orders(5, 1) != 6:
            return "one step can stand before, between or behind the five of the other."
        return None

    return check(number, attempt)


def check_pool(pool_factory: PoolFactory, number: str = "8.2") -> bool:
    """A pool of the reader's own: the quick profile says what is wrong with it."""

    def attempt() -> str | None:
        try:
            pool_factory(None)
        except NotImplementedError:
            raise
        except Exception:
            pass  # it wants a real configuration, which the suite gives it
        report = run_suite(pool_factory, stop_at_first=True)
        if report.ok:
            return None
        first = report.failures[0]
        if "NotImplementedError" in first.why:
            raise NotImplementedError
        return f"case {first.case!r} fails: {first.request!r} {first.why}."

    return check(number, attempt)
