"""The command: exit statuses, files, and pools that hang, print, quit or return nonsense."""

import json
import subprocess
import sys
from xml.etree import ElementTree

import pytest

from kvlab.check import check
from kvlab.check.__main__ import load_factory
from kvlab.pools import SimpleCachePool

POOLS = """\
import os, time
from kvlab.pools import SimpleCachePool
from tests.foreign import ring

def right(config): return ring.build(config)
def leaks(config): return ring.build(config, "empty_abort")
def broken(config): raise RuntimeError("no pool today")

class Hangs(SimpleCachePool):
    def release(self, lease): time.sleep(600)
class Dies(SimpleCachePool):
    def release(self, lease): os._exit(7)
class Prints(SimpleCachePool):
    def admit(self, request):
        print("hello")
        return super().admit(request)

def hangs(config): return Hangs.for_model(config, 4, 40)
def dies(config): return Dies.for_model(config, 4, 40)
def prints(config): return Prints.for_model(config, 4, 40)
"""


@pytest.fixture
def run(tmp_path, monkeypatch, request):
    (tmp_path / "bad_pools.py").write_text(POOLS)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{request.config.rootpath}")

    def command(*arguments):
        return subprocess.run(
            [sys.executable, "-m", "kvlab.check", *arguments],
            capture_output=True,
            text=True,
            cwd=tmp_path,
        )

    return command


@pytest.mark.parametrize(
    ("name", "code", "says"),
    [
        ("hangs", 1, "the pool hangs: no move for 5 s"),
        ("dies", 1, "the pool ended its process (exit status 7)"),
        ("prints", 0, "isolated"),
    ],
)
def test_a_pool_gets_its_verdict_whatever_it_does(run, name, code, says):
    done = run(f"bad_pools:{name}", "--budget", "30", "--hang", "5")
    assert (done.returncode, says in done.stdout) == (code, True), done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert "hello" not in done.stdout


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("bad_pools:broken", "RuntimeError: no pool today"),
        ("bad_pools:absent", "has no 'absent'"),
    ],
)
def test_only_what_cannot_be_loaded_could_not_run(run, name, says):
    done = run(name)
    assert done.returncode == 2
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_a_report_can_be_read_by_machines_and_played_again(run, tmp_path):
    run("bad_pools:leaks", "--json", "report.json", "--junit", "report.xml")
    assert json.loads((tmp_path / "report.json").read_text())["class"] == ["leak of memory"]
    assert ElementTree.parse(tmp_path / "report.xml").getroot().get("failures") == "1"
    assert run("bad_pools:leaks", "--replay", "report.json").returncode == 1
    assert run("bad_pools:right", "--replay", "report.json").returncode == 0


class Quits(SimpleCachePool):
    def release(self, lease):
        sys.exit(3)


class Nonsense(SimpleCachePool):
    def admit(self, request):
        return None


@pytest.mark.parametrize(("pool", "error"), [(Quits, "SystemExit"), (Nonsense, "AttributeError")])
def test_a_pool_that_raises_or_returns_nonsense_is_a_finding(pool, error):
    report = check(lambda config: pool.for_model(config, 4, 40))
    assert (report.exit_code, report.trace.anomalies[0].what) == (1, error)


@pytest.mark.parametrize(
    ("name", "says"), [("absent:pool", "cannot import 'absent'"), ("pools", "not of the form")]
)
def test_a_factory_that_is_not_there_is_refused_with_what_is_wrong(name, says):
    with pytest.raises(ValueError, match=says):
        load_factory(name)
