"""What audits of real engines found, as `make engines` wrote it: one JSON file each."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

ENGINES = ("transformers-dynamic", "transformers-static", "transformers-continuous", "llama_cpp",
           "vllm", "openvino")  # fmt: skip


def results() -> dict[str, dict[str, Any] | None]:
    """The committed result of each engine, as `Result.to_dict` gives it; `None`: it was not run."""
    folder = Path(__file__).parent
    found: dict[str, dict[str, Any] | None] = {}
    for name in ENGINES:
        path = folder / f"{name}.json"
        found[name] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
    return found


def row(result: dict[str, Any]) -> dict[str, str]:
    """One line of the comparison, in words."""
    arms = [a for a in result["arms"] if not a["name"].startswith("a stranger")]
    compared = sum(sum(a["counts"].values()) for a in arms)
    timing = list(result["timing"].items())
    said = {True: "leaks", False: "tells nothing", None: "not told"}
    plain = said[timing[0][1]["leaks"]] if timing else "not run"
    knob = f"{timing[1][0]}: {said[timing[1][1]['leaks']]}" if len(timing) > 1 else "none found"
    cached = timing[0][1].get("cached tokens, right guess") if timing else None
    times = [
        timing[0][1].get(f"first token, {k} guess") if timing else None for k in ("right", "wrong")
    ]
    sooner = "not told"
    if times[0] and times[1]:
        sooner = f"{statistics.median(times[0]) / statistics.median(times[1]):.2f}x"
    return {
        "engine": result["engine"],
        "verdict": result["verdict"],
        "answers compared": f"{compared} in {len({a['name'] for a in arms})} arms",
        "log-probabilities apart": f"{result['noise']['largest difference from the reference']:.1g}"
        if result["noise"].get("log-probabilities told")
        else "not told",
        "cached, right guess": "not told" if cached is None else str(max(cached)),
        "first token, right / wrong guess": sooner,
        "timing": plain,
        "with the tenant knob": knob,
    }
