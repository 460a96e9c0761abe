"""The cases: arms, edges, schedules. Each plays on a bench, which judges every answer."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

import hypothesis
from hypothesis import strategies as st
from hypothesis.errors import NoSuchExample

from kvlab.conformance.bench import LIMIT, Bench, NotApplicable
from kvlab.interleave import Move, interleavings, replay
from kvlab.pools.contract import PoolFull
from kvlab.request import Context, Request
from kvlab.schedule import run
from kvlab.workloads import churn, together

CONTEXTS: tuple[Context, ...] = (
    (),
    (("adapter", "a"), ("version", "1")),
    (("adapter", "a"), ("version", "2")),
    (("adapter", "b"), ("version", "1")),
    (("tenant", "a"), ("version", "1")),
    (("tenant", "b"), ("version", "1")),
    *((("image", f"picture {i}"),) for i in range(9)),
    (("image", None),),
    None,
)


def lone(bench: Bench) -> None:
    """One request, cold, of every length around a block, in chunks of every size."""
    size = bench.block
    lengths = sorted({1, 2, size - 1, size, size + 1, 2 * size + 1} - {0})
    for request in bench.fits(*(bench.request(f"lone-{n}", n, n, 3) for n in lengths)):
        bench.serial([request])
    length = min(2 * size + 1, bench.rows - 2)
    for chunk in range(1, length) if bench.full else (1, max(1, size - 1), size):
        request = bench.request("chunked", length, 50, 3)
        bench.orders([request], [Move(("chunked",))] * (length + 5), chunk=chunk)


def serial(bench: Bench) -> None:
    """Every order of four requests on one pool, each of them several times."""
    four = bench.fits(
        bench.request("a", min(12, bench.rows - 3), 1),
        bench.request("b", 3, 2),
        bench.request("c", min(7, bench.rows - 3), 3),
        bench.request("d", 1, 4),
    )
    orders = list(itertools.permutations(four))
    for order in orders if bench.full else orders[::8]:
        pool = bench.pool()
        for _ in range(4 if bench.full else 2):
            bench.serial(order, pool)
    if bench.full:
        lengths = [bench.rows - 4, 2, bench.rows // 2, 5]
        many = [bench.request(f"m{i}", max(1, n), 10 + i) for i, n in enumerate(lengths * 4)]
        bench.serial(bench.fits(*many))


def private(bench: Bench) -> None:
    """The control: the same requests with a cache of their own. Must pass whatever the pool is."""
    requests = _mixed(bench, min(8, bench.room))
    for batch in (1, 8):
        runs = run(bench.model, requests, bench.references.private(), "round_robin", batch)
        for name, one in runs.items():
            bench.judge(name, one)


def shared(bench: Bench) -> None:
    """Concurrent on one pool, one by one and in one batch."""
    requests = _mixed(bench, min(8, bench.room))
    for batched in (False, True):
        bench.orders(requests, together(requests, batched))


def prefix_edges(bench: Bench) -> None:
    """Common prefixes of a block, one less, one more; full hits; hits and misses in one batch."""
    size = bench.block
    for length in sorted({1, size - 1, size, size + 1, 2 * size, 2 * size + 1} - {0}):
        stem = bench.request("", length, 100 + length).tokens
        tails = [bench.request("", 3, 200 + 10 * length + i).tokens for i in range(3)]
        group = [Request(f"p{length}-{i}", stem + t, 4) for i, t in enumerate(tails)]
        group += [replace(group[0], id=f"p{length}-again"), Request(f"p{length}-stem", stem, 4)]
        group += [replace(g, id=f"{g.id}-last") for g in group[:3]]
        if bench.fits(*group) == group:
            bench.serial(group)
    stem = bench.request("", 2 * size, 300).tokens
    if len(stem) + 8 <= bench.rows:
        pool = bench.pool()
        bench.serial([Request("writer", (*stem, 5, 6), 3)], pool)
        mixed = [
            Request("hit-1", (*stem, 7, 8, 9), 4),
            bench.request("miss-1", 2 * size + 3, 301),
            Request("hit-2", (*stem, 5, 6), 4),
            bench.request("miss-2", 3, 302),
        ][: bench.room]
        bench.orders(mixed, together(mixed, batched=True), pool)


def twins(bench: Bench) -> None:
    """Identical requests, one after another and at once; a pool that shares must hit."""
    base = bench.request("twin", min(2 * bench.block + 2, bench.rows - 4), 310)
    pool = bench.pool()
    bench.serial([replace(base, id=f"twin-{i}") for i in range(4)], pool)
    same = [replace(base, id=f"at-once-{i}") for i in range(min(4, bench.room))]
    for batched in (False, True):
        bench.orders(same, together(same, batched), pool)


def one_token_apart(bench: Bench) -> None:
    """Prompts that are equal but for one token, at every position of two blocks."""
    size = bench.block
    base = bench.request("base", min(2 * size + 1, bench.rows - 1), 320, 1)
    pool = bench.pool()
    bench.serial([base], pool)
    at = range(len(base.tokens))
    for position in at if bench.full else [*at][:: max(1, size // 3)]:
        for shift in (1, 256) if bench.full or position % 2 else (256,):
            tokens = list(base.tokens)
            tokens[position] = 3 + (tokens[position] - 3 + shift) % (bench.vocab - 3)
            bench.serial(
                [replace(base, id=f"at-{position}-by-{shift}", tokens=tuple(tokens))], pool
            )
    other = bench.request("other", len(base.tokens), 321, 1)
    for block in range(1, size + 1) if bench.full else {1, size}:
        for start in range(0, len(base.tokens) - block, block):
            tokens = list(other.tokens)
            tokens[start : start + block] = base.tokens[start : start + block]
            name = f"splice-{block}-{start}"
            bench.serial([replace(other, id=name, tokens=tuple(tokens))], pool)


def contexts(bench: Bench) -> None:
    """Equal tokens in other contexts (adapter, tenant, image, unknown): no hit is allowed."""
    base = bench.request("", min(2 * bench.block, bench.rows - 1), 330, 1)
    pool = bench.pool()
    bench.serial([replace(base, id=f"c{i}", context=c) for i, c in enumerate(CONTEXTS)], pool)


def strangers(bench: Bench) -> None:
    """Many short prompts with nothing in common: a short hash meets itself."""
    count = 300 if bench.full else 24
    pool = bench.pool()
    bench.serial([bench.request(f"s{i}", 4, 400 + i, 1) for i in range(count)], pool)


def capacity(bench: Bench) -> None:
    """A request that fills the pool's largest place; one more row is refused and harms nobody."""
    if bench.limit >= LIMIT:
        raise NotApplicable(f"no capacity was found up to {LIMIT} rows")
    if bench.limit <= bench.model.config.get_text_config().max_position_embeddings:
        fill = max(1, bench.limit * 2 // 3)
        bench.serial([bench.request("full", fill, 340, min(12, bench.limit - fill + 1))])
        bench.serial([bench.request("filled", bench.limit - 1, 344, 2)])
    pool = bench.pool()
    neighbour = bench.request("neighbour", max(1, min(4, bench.limit - 3)), 341, 1)
    too_long = bench.request("too-long", bench.limit, 342, 2)
    lease = pool.admit(neighbour)
    try:
        pool.admit(too_long)
        bench.fail("too-long", f"was admitted, with room for {bench.limit} rows")
    except (ValueError, PoolFull):
        pass
    pool.release(lease)
    bench.serial([neighbour, bench.request("next", 3, 343)], pool)


def long_then_short(bench: Bench) -> None:
    """A long request, then a short one on the same place; then a long one again."""
    lengths = (bench.rows - 4, 1, bench.rows // 2, 2)
    requests = [bench.request(f"l{i}", max(1, n), 350 + i) for i, n in enumerate(lengths)]
    pool = bench.pool()
    for turn in range(2):
        bench.serial(bench.fits(*(replace(r, id=f"{r.id}-{turn}") for r in requests)), pool)


def aborts(bench: Bench) -> None:
    """Aborted at every step of its life, also within a prefill; then the place is used again."""
    length = max(1, min(2 * bench.block + 1, bench.rows - 6))
    for chunk in (None, max(1, bench.block // 2)):
        steps = 6 if chunk is None else 2 + -(-length // chunk) + 2
        pool = bench.pool()
        for step in range(1, steps + 1) if bench.full else (1, 2, 3, steps):
            first = bench.request(f"gone-{step}", length, 360 + step, 5)
            neighbour = bench.request(f"stays-{step}", 3, 380 + step, 5)
            after = bench.request(f"after-{step}", max(1, length // 2), 400 + step, 5)
            pair = [first, neighbour][: bench.room]
            order = [Move((r.id,)) for r in pair] * step
            order = [*order[: len(pair) * step], Move((first.id,), kind="abort")]
            others = [r for r in [neighbour, after] if r in pair or r is after]
            order += [Move((r.id,)) for r in others] * 14
            bench.orders([*pair, after], order, pool, chunk)
            bench.serial([replace(first, id=f"back-{step}"), replace(first, id=first.id)], pool)


def every_number(bench: Bench) -> None:
    """Every number of requests at once, from one to the most; and one more than fit."""
    most = bench.room
    for count in range(1, most + 1) if bench.full else sorted({1, 2, min(8, most), most}):
        requests = _mixed(bench, count, seed=500 + 20 * count)
        bench.orders(requests, together(requests, batched=count % 2 == 0))
    bench.all_at_once(_mixed(bench, most + 1, seed=900))


def names_return(bench: Bench) -> None:
    """Names that were here before, with other prompts, beside requests that have their places."""
    for context in ((), None):
        pool = bench.pool()
        first = [bench.request(f"n{i}", 6, 600 + i, context=context) for i in range(3)]
        others = [bench.request(f"o{i}", 6, 610 + i, context=context) for i in range(3)]
        again = [bench.request(f"n{i}", 6, 620 + i, context=context) for i in range(3)]
        bench.serial(bench.fits(*first), pool)
        both = [r for pair in zip(others, again, strict=True) for r in pair][: bench.room]
        bench.orders(both, together(both), pool)


def all_interleavings(bench: Bench) -> None:
    """Two lives of five steps (admit, prefill, two decodes, release) in all of their 252 orders."""
    if bench.room < 2:
        raise NotApplicable("the pool takes one request at a time")
    length = max(1, min(bench.block + 2, bench.rows - 3))
    stem = bench.request("", length, 700).tokens
    pairs = [[bench.request("a", length, 701, 3), bench.request("b", 4, 702, 3)]]
    pairs.append([Request("a", (*stem, 5), 3), Request("b", (*stem, 6), 3)])
    for pair in pairs:
        if bench.fits(*pair) != pair:
            continue
        orders = list(interleavings("a", "b", 5))
        for order in orders if bench.full else orders[::21]:
            bench.orders(pair, order)


def random_orders(bench: Bench) -> None:
    """Families of requests come and go in seeded orders, with aborts, until the pool is full."""
    for seed in range(24 if bench.full else 2):
        requests = _family(bench, seed)
        order = churn(requests, seed, bench.room, batched=seed % 2 == 1)
        bench.orders(requests, order, chunk=None if seed % 3 else 5)


def shortest(bench: Bench) -> None:
    """Any order of three requests with aborts, drawn and then shrunk to the shortest that fails."""
    stem = bench.request("", max(1, min(bench.block + 1, bench.rows - 5)), 800).tokens
    three = bench.fits(*(Request(n, (*stem, 10 + i, 20 + i), 3) for i, n in enumerate("abc")))
    three = three[: bench.room]
    if not three:
        raise NotApplicable("the pool is too small for three requests")
    kinds = st.booleans().map(lambda abort: "abort" if abort else "step")
    step = st.builds(Move, st.tuples(st.sampled_from([r.id for r in three])), kinds)

    def fails(order: Sequence[Move]) -> bool:
        try:
            runs = replay(bench.model, three, bench.pool(), order)
        except Exception:
            return True
        judged = [bench.references.judge(one) for one in runs.values() if one.steps]
        return any(bench.references.far_off(j) for j in judged)

    settings = hypothesis.settings(
        max_examples=150 if bench.full else 12, derandomize=True, database=None, deadline=None
    )
    before = len(bench.failures)
    try:
        order = hypothesis.find(st.lists(step, max_size=24), fails, settings=settings)
    except NoSuchExample:
        return
    del bench.failures[before:]  # what the search met on its way
    bench.orders(three, order)


def _mixed(bench: Bench, count: int, seed: int = 20) -> list[Request]:
    top = max(1, min(14, bench.rows - 4))
    return [bench.request(f"r{i}", 1 + (5 * i) % top, seed + i) for i in range(count)]


def _family(bench: Bench, seed: int) -> list[Request]:
    longest = max(1, min(14, bench.rows - 8))
    stems = [bench.request("", longest, 1000 + s).tokens for s in range(5)]
    requests = []
    for i in range(24):
        stem = stems[(i * 7 + seed) % len(stems)][: 6 + (5 * i) % 9]
        tail = bench.request("", 1 + i % 4, 1100 + 40 * seed + i).tokens
        requests.append(Request(f"f{i}", stem + tail, 4))
    requests.insert(12, bench.request("long", max(1, bench.rows * 2 // 3), 1300 + seed))
    return bench.fits(*requests)


CASES: dict[str, Callable[[Bench], None]] = {
    "lone": lone,
    "contexts": contexts,
    "long then short": long_then_short,
    "serial": serial,
    "twins": twins,
    "prefix edges": prefix_edges,
    "one token apart": one_token_apart,
    "capacity": capacity,
    "aborts": aborts,
    "names return": names_return,
    "private": private,
    "shared": shared,
    "every number": every_number,
    "random orders": random_orders,
    "strangers": strangers,
    "shortest order": shortest,
    "all interleavings": all_interleavings,
}
"""Cheap ones first, so that a broken pool is told soon."""
