"""What every examination of a pool needs: fresh pools, their sizes, random prompts, orders."""

from __future__ import annotations

import random
from collections.abc import Sequence

from transformers import PretrainedConfig

from kvlab.interleave import Move
from kvlab.pools.contract import PoolFactory, PoolFull, fresh
from kvlab.request import Context, Request


def longest_request(factory: PoolFactory, config: PretrainedConfig, at_most: int) -> int:
    """The longest request that a fresh pool admits, in rows, as far as `at_most`."""
    low, high = 1, at_most
    while low < high:
        middle = (low + high + 1) // 2
        try:
            fresh(factory, config).admit(Request("probe", (3,), middle))
            low = middle
        except (ValueError, PoolFull):
            high = middle - 1
    return low


def most_requests(factory: PoolFactory, config: PretrainedConfig, rows: int, at_most: int) -> int:
    """How many requests of `rows` rows a fresh pool admits at once, as far as `at_most`."""
    pool = fresh(factory, config)
    for count in range(at_most):
        try:
            pool.admit(Request(f"probe {count}", (3 + count,), rows))
        except PoolFull:
            return max(1, count)
    return at_most


def random_request(
    id: str, length: int, seed: int, vocab: int, new: int = 4, context: Context = ()
) -> Request:
    """A random prompt of `length` tokens out of `vocab`.

    Its first token follows the seed, so that prompts of neighbouring seeds have nothing in common.
    """
    draw = random.Random(f"{seed} {length}")
    rest = (draw.randrange(3, vocab) for _ in range(length - 1))
    return Request(id, (3 + 7 * seed % (vocab - 3), *rest), new, context=context)


def together(requests: Sequence[Request], batched: bool = False) -> list[Move]:
    """All are admitted, then all prefilled, then they decode in turn or in one batch; none leaves
    before the last has come to its end."""
    names = [r.id for r in requests]
    one_by_one = [Move((n,)) for n in names]
    steps = max((r.max_new_tokens for r in requests), default=1) - 1
    decode = [Move(tuple(names))] if batched and names else one_by_one
    return [*one_by_one, *one_by_one, *(decode * steps)]


def churn(
    requests: Sequence[Request], seed: int, at_once: int, batched: bool = False, aborts: bool = True
) -> list[Move]:
    """Requests come and go in a seeded order, some of them aborted; at most `at_once` are there."""
    draw = random.Random(seed)
    left = {r.id: r.max_new_tokens + 2 for r in requests}
    waiting = [r.id for r in requests]
    inside: list[str] = []
    order: list[Move] = []
    while waiting or inside:
        if waiting and len(inside) < at_once and draw.random() < 0.5:
            inside.append(waiting.pop(0))
        if not inside:
            continue
        name = draw.choice(inside)
        if aborts and draw.random() < 0.08:
            order.append(Move((name,), kind="abort"))
            inside.remove(name)
            continue
        chosen = draw.sample(inside, min(len(inside), draw.randint(2, 5))) if batched else [name]
        order.append(Move(tuple(chosen)))
        for one in chosen:
            left[one] -= 1
            if left[one] <= 0:
                inside.remove(one)
    return order
