"""Hits against brute force: never longer than what was written, never shorter than what is held.

Each row carries a number that stands for its whole history, so that memory itself says what a block
holds. Nothing here asks the tree.
"""

from __future__ import annotations

import random
import zlib
from collections import Counter
from itertools import takewhile

import pytest
import torch

from kvlab.pools import PoolFull, TieredCachePool
from kvlab.request import Request


def histories(tokens) -> list[int]:
    """One number for each row: a hash of all tokens up to it (24 bits, exact in float32)."""
    chain, found = 0, []
    for token in tokens:
        chain = zlib.crc32(f"{chain} {token}".encode()) & 0xFFFFFF
        found.append(chain)
    return found


def common(a, b) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b)))


class Player:
    """Admits, writes and releases on a pool of one number a row, and remembers what was written."""

    def __init__(self, pool: TieredCachePool) -> None:
        self.pool = pool
        self.live = {}
        self.written: list[tuple[int, ...]] = []
        self.prompts: dict[str, tuple[int, ...]] = {}
        self.hits: Counter[str] = Counter()

    def admit(self, tokens, new=1):
        request = Request(f"r{len(self.prompts)}", tuple(tokens), new)
        least, free = self.held(request), len(self.pool.blocks.free)
        self.prompts[request.id] = request.tokens
        lease = self.pool.admit(request)
        self.live[request.id] = lease
        hit = lease.num_cached_tokens
        longest = max((common(request.tokens, t) for t in self.written), default=0)
        assert hit <= min(longest, len(tokens) - 1), "longer than any written prompt in common"
        # A pool that is nearly full may leave out a part of a hit, so that the request fits.
        if free >= -(-request.rows_needed // self.pool.arena.block_size):
            assert hit >= min(least, len(tokens) - 1), "shorter than what is held and equal"
        self.hits["none" if not hit else "whole" if hit == least else "part"] += 1
        return request.id

    def write(self, name, count=None):
        """Write `count` more prompt tokens, or all; the rows that come back must be right."""
        lease = self.live[name]
        start = lease.length
        numbers = histories(self.prompts[name])
        end = len(numbers) if count is None else min(len(numbers), start + count)
        if start < end:
            rows = torch.tensor(numbers[start:end]).float()[None, None, :, None]
            key, _ = lease.cache.layers[0].update(rows, rows)
            assert key.flatten().tolist() == numbers[:end], "rows of somebody else"
            if end == len(numbers):
                self.written.append(self.prompts[name])

    def release(self, name):
        self.pool.release(self.live.pop(name))

    def held(self, request: Request) -> int:
        """Rows of the longest run of held blocks that hold `request`, and of the next in part."""
        pool, size = self.pool, self.pool.arena.block_size
        leased = Counter(b for x in pool.leases.values() for b in (*x.table.blocks, *x.table.spare))
        kept = [b for b, n in enumerate(pool.blocks.ref_count) if n > leased[b]]
        wanted = histories(request.tokens)
        memory = pool.arena.key[0, 0, :, 0].tolist()
        found = 0
        for start in range(0, len(wanted), size):
            best = 0
            for block in kept:
                rows = range(block * size, block * size + size)
                owners = [pool.arena.owners[r] for r in rows]
                prompt = [  # rows of a prompt; answers behind it are nobody's prefix
                    o is not None and o.position < len(self.prompts[o.request]) for o in owners
                ]
                mine = [memory[r] if p else None for r, p in zip(rows, prompt)]
                best = max(best, common(mine, wanted[start : start + size]))
            found += best
            if best < size:
                break
        return found


def small_pool(blocks: int, size: int) -> TieredCachePool:
    return TieredCachePool(blocks, 1, 1, 1, size)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8, 16])
def test_the_tail_of_a_prompt_is_not_stored_behind_a_twin(size):
    """Four prompts, one after another; the last was once granted rows of the third, by a walk that
    went on down the wrong branch after a split."""
    tokens = iter(range(1000))
    prefix, ask, tell, tail = ([next(tokens) for _ in range(n)] for n in (40, 3, 3, 17))
    twin = [*prefix[:37], next(tokens), *prefix[38:]]
    player = Player(small_pool(400, size))
    for prompt in (prefix + ask, prefix + tell, twin + ask + tail, prefix + ask + tail + [999]):
        name = player.admit(prompt)
        player.write(name)
        player.release(name)
    assert player.pool.leases == {}
    again = player.admit(prefix + ask + tail + [999, 998])
    assert player.live[again].num_cached_tokens == len(prefix + ask + tail) + 1


def family(rng: random.Random) -> list[int]:
    """A prompt of a small alphabet, so that prompts fork, extend and nearly equal each other."""
    return [rng.randint(0, 1) for _ in range(rng.randint(1, 24))]


def relative(rng: random.Random, prompts: list[list[int]]) -> list[int]:
    """A new prompt: fresh, again, longer, shorter, forked, or different in one place."""
    if not prompts or rng.random() < 0.2:
        return family(rng)
    old = list(rng.choice(prompts))
    match rng.randint(0, 4):
        case 0:
            return old
        case 1:
            return old + family(rng)[:8]
        case 2:
            return old[: rng.randint(1, len(old))]
        case 3:
            return old[: rng.randint(1, len(old))] + family(rng)[:8]
        case _:
            at = rng.randrange(len(old))
            return [*old[:at], 2, *old[at + 1 :]]


@pytest.mark.parametrize("blocks", [400, 24])
def test_hits_of_random_families_are_those_of_brute_force(blocks):
    """With 24 blocks prefixes are evicted; with 400 none is."""
    hits: Counter[str] = Counter()
    refused = 0
    for seed in range(1000):
        rng = random.Random(seed)
        size = rng.choice((1, 2, 3, 4, 8))
        pool = small_pool(blocks if blocks == 400 else max(blocks // size, 4), size)
        player, prompts = Player(pool), []
        for _ in range(rng.randint(4, 14)):
            if player.live and rng.random() < 0.45:
                name = rng.choice(list(player.live))
                if rng.random() < 0.5:
                    player.write(name, rng.randint(1, 9))
                player.release(name)
                continue
            tokens = relative(rng, prompts)
            try:
                name = player.admit(tokens, rng.randint(1, 3))
            except (PoolFull, ValueError):
                refused += 1
                continue
            prompts.append(tokens)
            if rng.random() < 0.8:
                player.write(name)
        pool.check()
        hits += player.hits
    assert min(hits.values()) > 100  # the families do share, wholly and in part
    assert (refused > 50) == (blocks == 24)
