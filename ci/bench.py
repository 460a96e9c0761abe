"""What the tiered pool saves, beside what a user would pick instead, all measured in one run.

Times are only ever compared within the run. Every figure comes with its smallest and largest value
over the rounds, in which all ways take turns.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, DynamicCache, GenerationConfig, StaticCache

from kvlab import bench, versions
from kvlab.decode import recompute
from kvlab.forward import Observer
from kvlab.models import BUNDLED, LoadedModel, load_model
from kvlab.pools import PrivatePool, TieredCachePool
from kvlab.request import Request
from kvlab.schedule import run

STEPS = 16
"""Decode steps that are timed for the transformers caches."""

VLLM = Path(__file__).parents[1] / "build/engines/vllm/bin/python"
"""Where `make engines ENGINE=vllm` installs it."""


def load(options: argparse.Namespace) -> LoadedModel:
    return load_model(options.model, packed=not options.plain)


class Gathering(Observer):
    """Looks at every row that is read, so that the pool gathers instead of sharing."""

    sees = "reads"


@torch.inference_mode()
def transformers_step(loaded: LoadedModel, requests: list[Request], static: bool) -> float:
    """Median seconds of a decode step of one padded batch on a cache of transformers."""
    model = loaded.model
    ids = torch.tensor([r.tokens for r in requests])
    room = max(r.rows_needed for r in requests)
    cache = (
        StaticCache(config=model.config, max_cache_len=room)
        if static
        else DynamicCache(config=model.config)
    )
    logits = model(ids, cache=cache, use_cache=True, logits_to_keep=1).logits
    seconds = []
    for _ in range(min(STEPS, requests[0].max_new_tokens - 1)):
        token = logits[:, -1].argmax(-1)[:, None]
        began = time.perf_counter()
        logits = model(token, cache=cache, use_cache=True).logits
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


@torch.inference_mode()
def floor_step(loaded: LoadedModel, n: int) -> float:
    """Median seconds of one token for each of `n` requests without any cache."""
    ids = torch.full((n, 1), 5)
    seconds = []
    for _ in range(STEPS):
        began = time.perf_counter()
        loaded.model(ids, use_cache=False)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def continuous_batching(options: argparse.Namespace, requests: list[Request]) -> list[float]:
    """Seconds to each first token with transformers' continuous batching and prefix sharing.

    Its manager lives for this measurement only, since its thread keeps a core busy.
    """
    model = load(options).model
    model.set_attn_implementation("sdpa")  # it refuses attention functions of others
    blocks = sum(-(-r.rows_needed // 16) for r in requests) + len(requests)
    manager = model.init_continuous_batching(
        generation_config=GenerationConfig(
            max_new_tokens=2, do_sample=False, eos_token_id=-1, pad_token_id=0
        ),
        continuous_batching_config=ContinuousBatchingConfig(
            page_size=16,
            num_blocks=blocks,
            max_batch_tokens=512,
            allow_block_sharing=True,
            use_cuda_graph=False,
            auto_switch_to_flash=False,
        ),
    )
    manager.start()
    try:
        first: dict[str, float] = {}
        for life in ("warm", "timed"):
            first.clear()
            began = time.perf_counter()
            for i, r in enumerate(requests):
                # Another first token when it counts, so that nothing is left from warming up.
                tokens = [*r.tokens] if life == "timed" else [10, *r.tokens[1:]]
                manager.add_request(tokens, f"{life} {i}", max_new_tokens=2, record_timestamps=True)
            while len(first) < len(requests):
                result = manager.get_result(timeout=60)
                if result is None or result.error:
                    raise RuntimeError(f"continuous batching gave no answer: {result}")
                if result.is_finished():
                    first[result.request_id] = result.timestamps[0] - began
        return list(first.values())
    finally:
        manager.stop(block=True)


def single_step(loaded: LoadedModel, request: Request, pool: Any) -> float:
    """Median seconds of a decode step of one request alone."""
    ran = run(loaded.model, [request], pool)[request.id]
    return statistics.median(s.seconds for s in ran.steps[1:])


def same_as_recompute(loaded: LoadedModel, requests: list[Request]) -> bool:
    """Whether each request, asked until its end token, gets the tokens of the cold recompute."""
    asked = [replace(r, stop_tokens=loaded.stop_tokens) for r in requests]
    served = bench.serve(loaded, asked, bench.pool_of(loaded, asked, True))
    return all(recompute(loaded.model, r).tokens == served.runs[r.id].tokens for r in asked)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All figures, each a list with one value a round."""
    loaded = load(options)
    n, prefix, private = options.requests, options.prefix, options.private
    requests = bench.requests_of(loaded, n, prefix, private, options.new_tokens)
    whole = bench.requests_of(loaded, 1, prefix, private, 1)[0]  # all its rows are prompt
    bench.warm(loaded, requests)
    seen: dict[str, list[Any]] = defaultdict(list)
    scratch: dict[str, int] = {}
    for _ in range(options.rounds):
        shared = bench.serve(loaded, requests, bench.pool_of(loaded, requests, True))
        dynamic = transformers_step(loaded, requests, static=False)
        seen["decode_speedup_shared_prefix"].append(dynamic / shared.step)
        if options.allocator_only:
            continue
        alone = bench.serve(loaded, requests, bench.pool_of(loaded, requests, False))
        gathered = bench.serve(
            loaded, requests, bench.pool_of(loaded, requests, True), [Gathering()]
        )
        static = transformers_step(loaded, requests, static=True)
        others = continuous_batching(options, requests)
        singles = bench.one_by_one(loaded, requests, bench.pool_of(loaded, requests, True))
        # Without a hit, prompts are computed one by one anyway.
        privately = [r.time_to_first_token for r in alone.runs.values()]
        mean = statistics.mean
        seen["outputs_equal"].append(shared.tokens == alone.tokens == gathered.tokens)
        seen["decode_speedup_vs_private_slots"].append(alone.step / shared.step)
        seen["decode_speedup_vs_gathered"].append(gathered.step / shared.step)
        seen["decode_speedup_vs_static"].append(static / shared.step)
        seen["decode_over_floor"].append(shared.step / floor_step(loaded, n))
        seen["ttft_mean_saved"].append(1 - mean(shared.first_tokens) / mean(alone.first_tokens))
        seen["ttft_mean_saved_one_by_one"].append(1 - mean(singles) / mean(privately))
        seen["ttft_ratio_vs_continuous_batching"].append(mean(shared.first_tokens) / mean(others))
        pool = TieredCachePool.for_model(loaded.model.config, -(-requests[0].rows_needed // 16))
        pooled = single_step(loaded, requests[0], pool)
        single = single_step(loaded, requests[0], PrivatePool(loaded.model.config))
        seen["single_decode_ratio_vs_dynamic"].append(pooled / single)
        for name, share in bench.operations(loaded, whole).items():
            seen[name].append(share)
        scratch["shared"], scratch["gathered"] = shared.scratch, gathered.scratch
    if not options.allocator_only:
        seen |= memory_saved(loaded, requests, prefix, private, scratch)
        seen["outputs_equal"].append(same_as_recompute(loaded, requests))
        seen["decode_speedup_shared_prefix_mmap_raised"] = raised_thresholds(options)
        if options.vllm:
            for theirs in vllm(options, requests):
                ours = bench.serve(loaded, requests, bench.pool_of(loaded, requests, True))
                first = statistics.mean(ours.first_tokens) / statistics.mean(theirs["first_tokens"])
                seen["ttft_ratio_vs_vllm"].append(first)
                seen["decode_ratio_vs_vllm"].append(ours.step / theirs["step"])
                seen["outputs_equal_vllm"].append(ours.tokens == theirs["tokens"])
    return dict(seen)


def memory_saved(
    loaded: LoadedModel,
    requests: list[Request],
    prefix: int,
    private: int,
    scratch: dict[str, int],
) -> dict[str, list[float]]:
    """What the smallest pool with sharing saves of the smallest one without; no time is involved.

    Args:
        scratch: Bytes of the largest gather, "shared" and "gathered".
    """
    arena = bench.pool_of(loaded, requests, True).arena
    block = arena.nbytes / arena.num_blocks
    tiers, slots = (
        bench.smallest_pool(len(requests), prefix, private, share) * block
        for share in (True, False)
    )
    return {
        "memory_saved_resident": [1 - tiers / slots],
        "memory_saved_peak": [1 - (tiers + scratch["shared"]) / slots],
        "memory_saved_peak_gathered": [1 - (tiers + scratch["gathered"]) / slots],
    }


def raised_thresholds(options: argparse.Namespace) -> list[float]:
    """The speedup over DynamicCache where the allocator keeps large blocks instead of unmapping.

    Much of DynamicCache's time is page faults of memory that glibc gives back and takes again.
    """
    huge = str(2**30)
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": huge, "MALLOC_TRIM_THRESHOLD_": huge}
    command = [sys.executable, __file__, "--allocator-only", f"--rounds={options.rounds}"]
    command += ["--plain"] * options.plain
    for name in ("model", "requests", "prefix", "private", "new_tokens"):
        command.append(f"--{name.replace('_', '-')}={getattr(options, name)}")
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return list(json.loads(done.stdout.splitlines()[-1])["decode_speedup_shared_prefix"])


def vllm(options: argparse.Namespace, requests: list[Request]) -> list[dict[str, Any]]:
    """What vLLM takes for the same prompts, with prefix caching, in its own environment.

    One entry a round; none where it fails, which costs no other figure.
    """
    asked = {
        "model": str(BUNDLED if options.model == "bundled" else Path(options.model).resolve()),
        "prompts": [r.tokens for r in requests],
        "new_tokens": options.new_tokens,
        "rounds": options.rounds,
    }
    environment = os.environ | {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "OMP_NUM_THREADS": str(torch.get_num_threads()),
        "HF_HUB_OFFLINE": "1",
    }
    program = Path(__file__).parent / "engines" / "vllm_steps.py"
    done = subprocess.run(
        [options.vllm, program],
        input=json.dumps(asked),
        env=environment,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        print("vLLM gave no figures:", *done.stderr.splitlines()[-3:], sep="\n", file=sys.stderr)
        return []
    rounds: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return rounds


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two rounds, under two minutes")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--model", default="bundled")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--prefix", type=int, default=512, help="shared tokens")
    parser.add_argument("--private", type=int, default=64, help="rows of each request's own")
    parser.add_argument("--new-tokens", type=int, default=49, help="generated, of these rows")
    parser.add_argument("--rounds", type=int)
    parser.add_argument(
        "--plain", action="store_true", help="PyTorch's own products, without packed weights"
    )
    parser.add_argument(
        "--vllm",
        type=Path,
        help="python of an environment with vLLM; default: make engines' own",
    )
    parser.add_argument("--allocator-only", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    options.rounds = options.rounds or (2 if options.quick else 7)
    if options.vllm and not options.vllm.exists():
        parser.error(f"there is no {options.vllm}; make engines ENGINE=vllm installs vLLM")
    options.vllm = options.vllm or (VLLM if VLLM.exists() else None)
    if options.json and not options.json.resolve().parent.is_dir():
        parser.error(f"there is no folder {options.json.resolve().parent} for {options.json.name}")
    try:
        seen = measure(options)
    except ValueError as error:
        parser.error(str(error))
    if options.allocator_only:
        print(json.dumps(seen))
        return 0
    machine = f"{platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads"
    figures = {
        name: all(values) if name.startswith("outputs_equal") else statistics.median(values)
        for name, values in seen.items()
    }
    print(versions())
    print(f"{machine}; {options.requests} requests, {options.prefix} shared tokens, "
          f"{options.private} private rows, {options.rounds} rounds\n")  # fmt: skip
    for name, value in figures.items():
        if name.startswith("outputs_equal"):
            print(f"{name:44} {value}")
        else:
            print(f"{name:44} {value:8.4g}  ({min(seen[name]):.4g} to {max(seen[name]):.4g})")
    if options.json:
        whole = figures | {"machine": machine, "versions": versions(), "rounds": seen}
        options.json.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    return 0 if figures["outputs_equal"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
