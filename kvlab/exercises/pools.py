"""Checks for notebook 07."""

from __future__ import annotations

from collections.abc import Callable

from kvlab.bench import saved_by_formula
from kvlab.exercises.checking import check


def check_saved(saved: Callable[[int, int, int], float], number: str = "7.1") -> bool:
    """Share of memory saved by one prefix of P tokens for n requests with U private rows each."""

    def attempt() -> str | None:
        got, want = saved(16, 512, 64), saved_by_formula(16, 512, 64)
        if abs(got - want) < 1e-9:
            return None if saved(1, 512, 64) == 0 else "one request alone saves nothing."
        if abs(got - 512 / 576) < 1e-9:
            return "one copy of the prefix remains: n - 1 copies are saved, not n."
        if abs(got - 15 / 16) < 1e-9:
            return "the private rows are not saved: they belong to the whole."
        if abs(got - want / (1 - want)) < 1e-9:
            return "divide by what the private pool needs, n (P + U)."
        return f"for n=16, P=512, U=64 you say {got:.3g}."

    return check(number, attempt)


def check_write(
    write: Callable[[list[int], dict[int, int], int, list[int]], None], number: str = "7.2"
) -> bool:
    """Copy-on-write: `write(table, ref_count, index, free)` makes `table[index]` writable."""

    def attempt() -> str | None:
        table, count, free = [4, 5], {4: 3, 5: 2}, [9]
        write(table, count, 1, free)
        if table == [4, 5]:
            return "block 5 has two holders, and you would write into it: copy first."
        if count.get(5) == 2:
            return "one holder has left block 5: lower its count."
        if count.get(9) != 1:
            return "the copy has one holder, its writer."
        if table != [4, 9] or free or count.get(5) != 1:
            return f"after the write: table {table}, counts {count}, free {free}."
        write(table, count, 1, free)
        if table != [4, 9] or count[9] != 1:
            return "a block with one holder is written in place, without a copy."
        return None if count[4] == 3 else "only the block that is written changes its count."

    return check(number, attempt)
