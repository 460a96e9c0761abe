"""Our pools behind a server on loopback: faults are flagged, right pools are not, bad servers are
named."""

import functools
import sys
import time
from pathlib import Path

import pytest
import torch

from kvlab.audit import Ask, Audit, Writer
from kvlab.audit.__main__ import main
from kvlab.audit.http import OpenAIEngine
from kvlab.audit.local import PoolEngine, Speaker
from kvlab.faults import CATALOGUE, make_pool
from kvlab.models import LoadedModel, tiny_model
from kvlab.pools import SimpleCachePool, TieredCachePool

sys.path.insert(0, str(Path(__file__).parent))
from serving import encode, serving

MODEL = tiny_model()
LOADED = LoadedModel("tiny", MODEL, None)
recompute = functools.cache(Speaker(LOADED).recompute)


class Untimed(Audit):
    """Without the arm that measures times, which has a test of its own."""

    def timing(self):
        pass


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    before, interval = torch.get_num_threads(), sys.getswitchinterval()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
    sys.setswitchinterval(interval)


def pool(kind):
    tiered = issubclass(kind, TieredCachePool)
    sizes = {"num_blocks": 400} if tiered else {"max_seq_len": 256}
    return make_pool(kind, MODEL.config, **sizes)


def reference(kind):
    """Pools of 8-bit codes round: their reference is the request alone in a fresh pool."""
    if not getattr(kind, "rounds", False):
        return recompute
    return lambda prompt, n: PoolEngine("p", LOADED, pool(kind)).complete([Ask(prompt, n)])[0]


def audit(engine, seed=0, kind=Untimed, of=TieredCachePool):
    return kind(
        engine, Writer(encode, seed), 3, max_tokens=4, sentences=3, recompute=reference(of)
    ).run()


def served(kind, seed=0):
    with serving(pool(kind)) as url:
        engine = OpenAIEngine(url, "tiny", 3, encode)
        result = audit(engine, seed, of=kind)
        engine.close()
        return result


@functools.cache
def in_process(kind):
    return audit(PoolEngine("pool", LOADED, pool(kind)), of=kind).verdict


def test_many_faults_change_tokens_in_some_arm():
    changing = [n for n, kind in CATALOGUE.items() if in_process(kind) == "contaminated"]
    assert len(changing) > len(CATALOGUE) / 2


@pytest.mark.parametrize("name", CATALOGUE)
def test_a_served_fault_that_changes_tokens_is_flagged(name):
    kind = CATALOGUE[name]
    if in_process(kind) == "contaminated":  # else it changes no token in any arm
        # Over a network requests arrive in an order of their own; a race gets more than one audit.
        assert any(served(kind, seed).verdict == "contaminated" for seed in range(5))


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("kind", [SimpleCachePool, TieredCachePool])
def test_a_served_right_pool_is_never_flagged(kind, seed):
    result = served(kind, seed)
    assert result.verdict == "isolated", result.explanation


def test_the_salt_is_found_to_work_and_closes_the_side_channel():
    with serving(pool(TieredCachePool)) as url:
        engine = OpenAIEngine(url, "tiny", 3, encode)
        result = audit(engine, kind=Audit)
        engine.close()
    assert result.tenant_knob == "cache_salt"
    assert result.timing["as it is"]["leaks by count"]
    assert not result.timing["cache_salt"]["leaks by count"]
    assert result.reuse == "seen"


def test_a_server_that_ignores_the_salt_gets_another_reference():
    with serving(pool(TieredCachePool), salted=False) as url:
        engine = OpenAIEngine(url, "tiny", 3, encode)
        result = Untimed(engine, Writer(encode), 3, max_tokens=4, sentences=3).run()
        engine.close()
    assert (result.verdict, result.reference) == ("isolated", "unique beginning")
    assert result.tenant_knob is None


def run(url, *more, model="tiny"):
    return main(["--base-url", url, "--model", model, "--concurrency", "2", "--timeout", "1",
                 "--max-tokens", "4", "--sentences", "2", *more])  # fmt: skip


def test_a_good_server_ends_in_0_and_its_key_is_in_no_report(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    seen = []

    def behave(handler, body):
        seen.append(handler.headers["Authorization"])
        return False

    with serving(pool(SimpleCachePool), behave) as url:
        assert run(url, "--report", str(tmp_path)) == 0
    assert set(seen) == {"Bearer sk-secret"}
    for path in tmp_path.iterdir():
        assert "sk-secret" not in path.read_text(encoding="utf-8")
    assert "sk-secret" not in capsys.readouterr().out


def test_nobody_listens(capsys):
    assert run("http://127.0.0.1:9/v1") == 2
    assert "nobody listens" in capsys.readouterr().err


def test_a_wrong_model_name_is_told_with_the_right_ones(capsys):
    with serving(pool(SimpleCachePool)) as url:
        assert run(url, model="other") == 2
    assert "no model 'other'" in capsys.readouterr().err


def test_a_refused_key(capsys):
    def behave(handler, body):
        handler.reply(401, {"error": {"message": "bad key"}})
        return True

    with serving(pool(SimpleCachePool), behave) as url:
        assert run(url) == 2
    assert "OPENAI_API_KEY" in capsys.readouterr().err


def test_a_stream_of_garbage(capsys):
    def behave(handler, body):
        handler.begin()
        handler.wfile.write(b"data: {]\n\n<html>")
        return True

    with serving(pool(SimpleCachePool), behave) as url:
        assert run(url) == 2
    assert "not this protocol" in capsys.readouterr().err


def test_every_third_request_fails(capsys):
    def behave(handler, body):
        if handler.count % 3:
            return False
        handler.reply(500, {"error": {"message": "out of luck"}})
        return True

    with serving(pool(SimpleCachePool), behave) as url:
        assert run(url) == 3
    assert "out of luck" in capsys.readouterr().out


def test_an_ignored_temperature(capsys):
    def behave(handler, body):
        handler.begin()
        handler.event({"choices": [{"text": f" word{handler.count}", "finish_reason": "stop"}]})
        handler.wfile.write(b"data: [DONE]\n\n")
        return True

    with serving(pool(SimpleCachePool), behave) as url:
        assert run(url) == 3
    assert "temperature 0 is ignored" in capsys.readouterr().out


def test_a_server_that_hangs(capsys):
    def behave(handler, body):
        time.sleep(3)
        return True

    with serving(pool(SimpleCachePool), behave) as url:
        assert run(url) == 2
    assert "kept silent" in capsys.readouterr().err


def test_a_server_without_completions_is_asked_by_chat():
    def behave(handler, body):
        if "messages" not in body:
            handler.reply(404, {"error": {"message": "no completions here"}})
            return True
        handler.begin()
        words = body["messages"][0]["content"].split()[-12:]
        handler.event({"choices": [{"delta": {"content": " ".join(words)}}]})
        handler.event({"choices": [{"delta": {}, "finish_reason": "stop"}]})
        handler.wfile.write(b"data: [DONE]\n\n")
        return True

    with serving(pool(SimpleCachePool), behave) as url:
        assert run(url) == 0


def test_a_report_that_cannot_be_written_is_told_before_anything_is_sent(tmp_path, capsys):
    (tmp_path / "file").write_text("here", encoding="utf-8")
    with pytest.raises(SystemExit):
        run("http://127.0.0.1:9/v1", "--report", str(tmp_path / "file" / "folder"))
    assert "cannot be written" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        run("http://127.0.0.1:9/v1", "--max-requests", "3")


def test_a_server_that_refuses_unknown_fields_is_asked_without_them():
    seen = []

    def behave(handler, body):
        if "return_token_ids" not in body:
            seen.append(set(body))
            return False
        handler.reply(400, {"error": {"message": "unrecognized argument"}})
        return True

    with serving(pool(SimpleCachePool), behave) as url:
        assert run(url) == 0
    assert {"logprobs", "stream_options"} <= set.intersection(*seen)


def test_missing_arguments_are_asked_for(capsys):
    for arguments in ([], ["--engine", "openai"], ["--base-url", "http://x/v1"]):
        with pytest.raises(SystemExit):
            main(arguments)
    assert "--model NAME" in capsys.readouterr().err
    assert main(["--engine", "transformers", "--model", "/no/such"]) == 2
    assert "no checkpoint" in capsys.readouterr().err
    assert main(["--engine", "pool", "--fault", "no such"]) == 2
