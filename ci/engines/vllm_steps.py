"""First tokens and decode steps of vLLM for given prompts; runs in vLLM's own environment.

Reads `{"model", "prompts", "new_tokens", "rounds"}` from standard input, where the prompts are
lists of token ids, and prints a list with one `{"first_tokens", "step", "tokens"}` a round as its
last line, times in seconds. Prefixes are shared within a round, and forgotten after it.
"""

from __future__ import annotations

import json
import shutil
import statistics
import sys
import time
from typing import Any

from vllm import LLM, SamplingParams


def serve(engine: Any, prompts: list[list[int]], new_tokens: int) -> dict[str, Any]:
    """All prompts arrive together; every engine step is timed."""
    sampling = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
    first: dict[str, float] = {}
    tokens: dict[str, list[int]] = {}
    steps = []
    began = time.perf_counter()
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), {"prompt_token_ids": prompt}, sampling)
    while engine.has_unfinished_requests():
        decoding = len(first) == len(prompts)
        at = time.perf_counter()
        outputs = engine.step()
        now = time.perf_counter()
        if decoding:
            steps.append(now - at)
        for out in outputs:
            first.setdefault(out.request_id, now - began)
            tokens[out.request_id] = list(out.outputs[0].token_ids)
    return {
        "first_tokens": list(first.values()),
        "step": statistics.median(steps),
        "tokens": [tokens[str(i)] for i in range(len(prompts))],
    }


def main() -> None:
    asked = json.load(sys.stdin)
    longest = max(map(len, asked["prompts"])) + asked["new_tokens"]
    engine = LLM(
        model=asked["model"],
        dtype="float32",
        max_model_len=longest,
        max_num_seqs=len(asked["prompts"]),
        enable_prefix_caching=True,
        block_size=32,
        enforce_eager=shutil.which("g++") is None,  # it compiles where it can
        seed=0,
    ).llm_engine
    rounds = []
    for _ in range(1 + asked["rounds"]):  # the first warms up
        engine.reset_prefix_cache()
        rounds.append(serve(engine, asked["prompts"], asked["new_tokens"]))
    print(json.dumps(rounds[1:]))


if __name__ == "__main__":
    main()
