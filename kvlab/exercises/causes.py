"""Mystery pools and checks for notebook 06."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from transformers import PretrainedConfig

from kvlab.diagnose import diagnose
from kvlab.exercises.checking import check
from kvlab.faults.catalogue import make_pool
from kvlab.models import tiny_model
from kvlab.observe import Event, parse_log
from kvlab.pools import CachePool, SimpleCachePool, TieredCachePool
from kvlab.pools.arena import Arena
from kvlab.pools.contract import PoolFactory
from kvlab.pools.prefix import PrefixTree
from kvlab.pools.slots import Slot


class _First(SimpleCachePool):
    def reset(self, slot: Slot) -> None:
        if slot.generation % 2 == 0:
            super().reset(slot)


class _SecondTree(PrefixTree):
    def labels(self, tokens: Sequence[int]) -> Sequence[int]:
        return [token // 2 for token in tokens]


class _Second(TieredCachePool):
    tree_type = _SecondTree


class _ThirdArena(Arena):
    def gather(self, *args):  # type: ignore[no-untyped-def]
        key, value = super().gather(*args)
        return key.flip(0), value.flip(0)


class _Third(TieredCachePool):
    arena_type = _ThirdArena


_MYSTERIES = {1: _First, 2: _Second, 3: _Third}
_EXCLUDES = {
    "stale state": "without a hit, used places are as right as fresh ones",
    "key": "no hit is longer than what is equal",
    "lifetime": "a lock around every operation does not help, and no place has two owners",
    "position": "every row that is read stands where it should",
    "layout": "every row that is read has the heads that were written",
    "scale": "no row comes back times a factor",
}


def mystery(number: int) -> PoolFactory:
    """A factory of faulty pools that is not in the catalogue; look at what it does, not inside.

    Args:
        number: 1, 2 or 3.
    """
    if number not in _MYSTERIES:
        raise ValueError(f"there are mysteries 1, 2 and 3, not {number}")
    hidden = _MYSTERIES[number]

    def factory(config: PretrainedConfig) -> CachePool:
        return make_pool(hidden, config)

    return factory


def check_mystery(number: int, kind: str | None) -> bool:
    """Say which class mystery `number` has; a wrong answer hears what was missed."""

    def attempt() -> str | None:
        if kind is None:
            raise NotImplementedError
        if kind not in _EXCLUDES:
            return f"{kind!r} is no class; use one of {', '.join(_EXCLUDES)}."
        found = diagnose(mystery(number), tiny_model())
        if kind == found.kind:
            return None
        return f"not {kind}: {_EXCLUDES[kind]}. You missed: {found.evidence}"

    return check(f"6.{number}", attempt)


def check_conflict(finder: Callable[[Sequence[Event]], Iterable[str]], number: str = "6.4") -> bool:
    """`finder(events)` returns the requests that write into a place which another one holds."""

    def attempt() -> str | None:
        def line(kind: str, request: str, place: int, start: int, length: int, time: int) -> dict:
            return {
                "kind": kind,
                "request": request,
                "places": [place],
                "start": start,
                "length": length,
                "size": 8,
                "time": time,
            }

        clean = [
            line("admit", "a", 0, 0, 0, 0),
            line("write", "a", 0, 0, 3, 1),
            line("release", "a", 0, 0, 3, 2),
            line("admit", "b", 0, 0, 0, 3),
            line("write", "b", 0, 0, 2, 4),
        ]
        dirty = [*clean, line("admit", "c", 0, 0, 0, 5), line("write", "c", 0, 0, 2, 6)]
        got = set(finder(parse_log(clean).events))
        if got:
            return f"nobody holds place 0 any more when 'b' writes: you accuse {sorted(got)}."
        got = set(finder(parse_log(dirty).events))
        if not got:
            return "'b' still holds place 0 when 'c' writes into it: nothing was found."
        return None if got == {"c"} else f"only 'c' writes into a held place, not {sorted(got)}."

    return check(number, attempt)
