"""Sizes, memory and the benchmark's command line, on small numbers."""

import json
import sys
from pathlib import Path

import pytest

from kvlab import bench

sys.path.insert(0, str(Path(__file__).parents[1] / "ci"))


def test_requests_have_the_sizes_that_were_asked_for(bundled):
    made = bench.requests_of(bundled, 3, 40, 32, 9)
    assert {r.rows_needed for r in made} == {72}
    assert len({r.tokens[:40] for r in made}) == 1
    assert len({r.tokens for r in made}) == 3


def test_too_few_private_rows_are_refused(bundled):
    with pytest.raises(ValueError, match="too few"):
        bench.requests_of(bundled, 3, 40, 8, 9)


@pytest.mark.parametrize(("n", "prefix", "private"), [(1, 64, 32), (4, 64, 32), (16, 512, 64)])
def test_the_smallest_pool_saves_what_the_formula_says(n, prefix, private):
    shared = bench.smallest_pool(n, prefix, private, share=True)
    alone = bench.smallest_pool(n, prefix, private, share=False)
    saved = bench.saved_by_formula(n, prefix, private)
    assert 1 - shared / alone == pytest.approx(saved, abs=1e-9)
    assert alone == n * (prefix + private) // 16


@pytest.mark.parametrize(("prefix", "private"), [(37, 20), (100, 30)])
def test_off_the_block_border_a_block_a_request_is_the_price(prefix, private):
    shared = bench.smallest_pool(4, prefix, private, share=True)
    assert shared <= -(-prefix // 16) + 4 * (-(-private // 16) + 1)


def test_shared_and_private_give_the_same_tokens_and_share_only_where_asked(bundled):
    requests = bench.requests_of(bundled, 3, 40, 24, 5)
    pool = bench.pool_of(bundled, requests, True)
    shared = bench.serve(bundled, requests, pool)
    alone = bench.serve(bundled, requests, bench.pool_of(bundled, requests, False))
    assert shared.tokens == alone.tokens
    assert [r.num_cached_tokens for r in shared.runs.values()] == [0, 40, 40]  # to the token
    assert not any(r.num_cached_tokens for r in alone.runs.values())
    assert shared.scratch == 0 or shared.scratch < pool.arena.nbytes
    assert shared.first_tokens == sorted(shared.first_tokens)


def test_parking_moves_each_byte_of_a_request_once(bundled):
    request = bench.requests_of(bundled, 1, 40, 24, 1)[0]
    assert bench.operations(bundled, request)["bytes_parked_over_bytes_of_rows"] == 1.0


SIZES = ["--requests=3", "--prefix=48", "--private=32", "--new-tokens=5", "--rounds=1"]


def engine(folder, script):
    """A program in the place of the python of vLLM's environment."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\ncat >/dev/null\n{script}\n")
    path.chmod(0o755)
    return ["--vllm", str(path)]


def test_the_benchmark_writes_all_figures(tmp_path):
    import bench as command

    path = tmp_path / "figures.json"
    theirs = {"first_tokens": [0.5, 0.5, 0.5], "step": 1000.0, "tokens": []}
    beside = engine(tmp_path, f"echo progress\necho '{json.dumps([theirs])}'")
    assert command.main([*SIZES, *beside, "--json", str(path)]) == 0
    figures = json.loads(path.read_text())
    assert figures["outputs_equal"] is True
    for name in (
        "memory_saved_resident",
        "memory_saved_peak",
        "ttft_mean_saved",
        "decode_speedup_shared_prefix",
        "decode_speedup_vs_private_slots",
        "single_decode_ratio_vs_dynamic",
        "ttft_ratio_vs_continuous_batching",
        "look_up_over_prefill",
        "fork_over_prefill",
        "ttft_ratio_vs_vllm",
        "decode_ratio_vs_vllm",
    ):
        assert isinstance(figures[name], float)
    assert figures["decode_ratio_vs_vllm"] < 0.01
    assert figures["outputs_equal_vllm"] is False
    assert figures["memory_saved_resident"] == pytest.approx(bench.saved_by_formula(3, 48, 32))


def test_bad_sizes_and_a_missing_folder_are_refused_before_anything_runs(tmp_path, capsys):
    import bench as command

    with pytest.raises(SystemExit):
        command.main(["--json", str(tmp_path / "no" / "x.json")])
    assert "there is no folder" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        command.main(["--vllm", str(tmp_path / "python")])
    assert "make engines" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        command.main(["--private=4", "--rounds=1"])
    assert "too few" in capsys.readouterr().err


def test_a_vllm_that_fails_costs_no_other_figure(tmp_path, capsys):
    import bench as command

    assert command.main([*SIZES, *engine(tmp_path, "echo no room >&2\nexit 1")]) == 0
    said = capsys.readouterr()
    assert "no room" in said.err
    assert "decode_speedup_shared_prefix" in said.out
    assert "vllm" not in said.out
