"""What sharing a prefix costs and saves: requests of given sizes, memory, first tokens, steps.

Used by notebook 07 and by `ci/bench.py`. Times are compared within one run only.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from kvlab.forward import Observer
from kvlab.models import LoadedModel
from kvlab.pools import CachePool, PoolFull, TieredCachePool
from kvlab.pools.tiered import TieredLease
from kvlab.prompts import ZH
from kvlab.request import Request, Run
from kvlab.schedule import run
from kvlab.training.passwords import unseen_passphrase


def requests_of(
    loaded: LoadedModel, n: int, prefix: int, private: int, new_tokens: int
) -> list[Request]:
    """`n` requests that share `prefix` tokens; each has `private` rows, generated ones included.

    The shared text is a system prompt with house rules. Each request has a passphrase of its own
    in its private part and is asked for it at the end.

    Raises:
        ValueError: The private rows are too few for a question and its answer.
    """
    rng = random.Random(0)
    encode = loaded.tokenizer.encode
    begin = tuple(encode(ZH.assistant))
    rules: list[int] = []
    while len(rules) < prefix + private:
        rules += encode(ZH.filler(rng), add_special_tokens=False)
    shared = (*begin, *rules)[:prefix]
    room = private - new_tokens + 1  # the last generated token is never written
    secrets = (unseen_passphrase(rng, "zh", "three") for _ in range(100 * n))
    texts = (ZH.secret.format(p=secret) + ZH.ask_secret for secret in secrets)
    questions = (encode(text, add_special_tokens=False) for text in texts)
    made = []
    for i, question in zip(range(n), (q for q in questions if len(q) <= room), strict=False):
        tail = (*rules[i : i + room - len(question)], *question)
        made.append(Request(f"r{i}", (*shared, *tail), new_tokens))
    if len(made) < n:
        raise ValueError(f"{private} private rows are too few for {new_tokens} new tokens")
    return made


def saved_by_formula(n: int, prefix: int, private: int) -> float:
    """Share of memory that one copy of the prefix saves: (n-1) P / (n (P+U))."""
    return (n - 1) * prefix / (n * (prefix + private))


def blocks_in_use(
    n: int,
    prefix: int,
    private: int,
    share: bool,
    block_size: int = 16,
    num_blocks: int | None = None,
) -> int:
    """Blocks that `n` requests hold together, each admitted when the one before has its prompt.

    No model is needed: one layer with one number a row stands for all.

    Raises:
        PoolFull: `num_blocks` are too few.
    """
    if num_blocks is None:  # enough even where nothing is shared
        num_blocks = n * -(-(prefix + private) // block_size)
    pool = TieredCachePool(num_blocks, 1, 1, 1, block_size, share=share)
    for i in range(n):
        # Half of the private rows belong to the prompt.
        prompt = (*range(prefix), *range(10**6 + i * 10**4, 10**6 + i * 10**4 + private // 2))
        admit_written(pool, Request(f"r{i}", prompt, prefix + private - len(prompt) + 1))
    return num_blocks - len(pool.blocks.free)


def admit_written(pool: TieredCachePool, request: Request) -> TieredLease:
    """Admit a request and write its prompt into a pool of one layer, one head and one number a row.

    For questions about blocks and hits, which need no model.
    """
    lease = pool.admit(request)
    rows = torch.zeros(1, 1, len(request.tokens) - lease.num_cached_tokens, 1)
    lease.cache.layers[0].update(rows, rows)
    return lease


def smallest_pool(n: int, prefix: int, private: int, share: bool, block_size: int = 16) -> int:
    """The fewest blocks that admit all `n` requests; with one block less the last is refused."""
    blocks = blocks_in_use(n, prefix, private, share, block_size)
    blocks_in_use(n, prefix, private, share, block_size, blocks)
    try:
        blocks_in_use(n, prefix, private, share, block_size, blocks - 1)
    except (PoolFull, ValueError):
        return blocks
    raise AssertionError(f"{blocks - 1} blocks would do as well")


@dataclass(frozen=True)
class Served:
    """What one run of a group of requests took.

    Attributes:
        first_tokens: Seconds from the arrival of all to the first token of each.
        step: Median seconds of a decode step of the whole batch.
        scratch: Bytes of the pool's largest gather.
    """

    runs: dict[str, Run]
    first_tokens: list[float]
    step: float
    scratch: int

    @property
    def tokens(self) -> list[list[int]]:
        """The answers, in the order of the requests."""
        return [r.tokens for r in self.runs.values()]


def pool_of(loaded: LoadedModel, requests: Sequence[Request], share: bool) -> TieredCachePool:
    """A tiered pool with room for all; without `share` every block is private."""
    blocks = sum(-(-r.rows_needed // 16) for r in requests)
    return TieredCachePool.for_model(
        loaded.model.config,
        blocks,
        dtype=loaded.model.dtype,
        device=loaded.model.device,
        share=share,
    )


def serve(
    loaded: LoadedModel,
    requests: Sequence[Request],
    pool: CachePool,
    observers: Sequence[Observer] = (),
) -> Served:
    """Serve requests that arrive together: prompts in turn, then decode steps of all at once."""
    began = time.perf_counter()
    runs = run(loaded.model, requests, pool, "round_robin", len(requests), observers)
    first = [r.steps[0].ended - began for r in runs.values()]
    steps = [s.seconds for s in next(iter(runs.values())).steps[1:]]
    arena = getattr(pool, "arena", None)
    return Served(
        runs,
        first,
        statistics.median(steps) if steps else float("nan"),
        arena.scratch_bytes if arena else 0,
    )


def one_by_one(loaded: LoadedModel, requests: Sequence[Request], pool: CachePool) -> list[float]:
    """Seconds to the first token of requests that each arrive when the one before has its own."""
    short = [replace(r, max_new_tokens=1) for r in requests]
    runs = run(loaded.model, short, pool, "serial")
    return [r.time_to_first_token for r in runs.values()]


@torch.inference_mode()
def operations(loaded: LoadedModel, request: Request) -> dict[str, float]:
    """What a look-up, a fork, a truncation and preemption cost, with the prompt of `request`.

    Seconds as shares of the prompt's prefill, each in the worst case: the fork writes its next row
    into a shared block, which it copies. Bytes moved by `park` and `resume` as shares of the bytes
    of the rows.
    """
    length, size = len(request.tokens), 16
    pool = TieredCachePool.for_model(loaded.model.config, 4 * -(-length // size))

    def timed(do: Callable[[], object]) -> float:
        began = time.perf_counter()
        do()
        return time.perf_counter() - began

    def forward(lease: TieredLease, tokens: Sequence[int]) -> None:
        lease.announce(list(tokens))
        loaded.model(torch.tensor([tokens]), cache=lease.cache, use_cache=True, logits_to_keep=1)

    lease = pool.admit(request)
    prefill = timed(lambda: forward(lease, request.tokens))
    tokens = (*request.tokens, 5)
    look_up = statistics.median(
        timed(lambda: pool.blocks.tree.match(request.context, tokens)) for _ in range(9)
    )
    other = Request("fork", tokens, 2, context=request.context)
    fork = timed(lambda: pool.fork(lease, other).make_writable(length - 1, length))
    truncate = timed(lambda: pool.truncate(lease, length - 1))
    rows = pool.arena.nbytes / (pool.arena.num_blocks * size) * lease.length
    pool.park(lease)
    parts, _ = lease.check_parked()
    moved = sum(p.nbytes for p in parts) / rows
    pool.resume(lease)
    return {
        "look_up_over_prefill": look_up / prefill,
        "fork_over_prefill": fork / prefill,
        "truncate_over_prefill": truncate / prefill,
        "bytes_parked_over_bytes_of_rows": moved,
    }


def warm(loaded: LoadedModel, requests: Sequence[Request]) -> None:
    """Run something once, so that the first measurement does not pay for it."""
    few = [replace(r, max_new_tokens=2) for r in requests[:2]]
    serve(loaded, few, pool_of(loaded, few, share=True))
