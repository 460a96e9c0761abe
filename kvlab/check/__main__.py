"""Check a pool, replay a history, or read the event log of any server.

python -m kvlab.check package.module:factory       does this pool keep its requests apart?
python -m kvlab.check --log FILE                   what in this event log contradicts isolation?

The pool runs in a process of its own; one that makes no move for --hang seconds is ended, which is
a finding. Exit status: 0 isolated, 1 not, 2 could not run, 3 not enough exercised.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from kvlab.check import BUDGETS, Report, check, replay
from kvlab.check.history import History
from kvlab.check.run import PoolFactory
from kvlab.observe.conflicts import conflicts
from kvlab.observe.events import read_log


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m kvlab.check",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "factory", nargs="?", help="module:name; called with the model's configuration"
    )
    what.add_argument("--log", metavar="FILE", help="an event log, one JSON object a line")
    parser.add_argument("--budget", default="quick", help="quick (60), full (600), or a number")
    parser.add_argument("--seed", type=int, default=0, help="of the first history (0)")
    parser.add_argument("--replay", metavar="FILE", help="play the history of a report again")
    parser.add_argument("--json", metavar="FILE", help="write the report to this file")
    parser.add_argument("--junit", metavar="FILE", help="the same as a test report")
    parser.add_argument("--hang", type=float, default=60, help="seconds without a move (60)")
    parser.add_argument("--here", metavar="FOLDER", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.log:
        return check_log(options.log)
    if options.budget not in BUDGETS and not (options.budget.isdecimal() and int(options.budget)):
        parser.error(f"--budget is quick, full or a number from 1 on, not {options.budget!r}")
    try:
        if options.here:
            return _child(options)
        found = _watched(options, sys.argv[1:] if arguments is None else arguments)
    except (OSError, ValueError, ImportError) as error:
        print(f"could not run: {error}", file=sys.stderr)
        return 2
    if found.code == 2:
        return 2
    print(found.text)
    if options.json:
        Path(options.json).write_text(json.dumps(found.report, indent=1), encoding="utf-8")
    if options.junit:
        _write_junit(options.junit, options.factory, found)
    return found.code


@dataclass(frozen=True)
class Found:
    """What the other process said, or what its end says."""

    code: int
    text: str
    report: dict[str, object]


def _child(options: argparse.Namespace) -> int:
    """The check itself; what the pool prints goes to standard error."""
    folder = Path(options.here)
    with contextlib.redirect_stdout(sys.stderr), _journal(folder / "moves") as journal:
        try:
            factory = load_factory(options.factory)
            factory_probe(factory)
        except Exception as error:
            (folder / "error").write_text(f"{type(error).__name__}: {error}", encoding="utf-8")
            return 2
        if options.replay:
            saved = json.loads(Path(options.replay).read_text(encoding="utf-8"))
            history = History.from_json(json.dumps(saved.get("history", saved)))
            trace = replay(factory, history)
            report = Report(1, exercised=trace.exercised, trace=trace if trace.anomalies else None)
        else:
            budget = options.budget if options.budget in BUDGETS else int(options.budget)
            report = check(factory, budget=budget, seed=options.seed, journal=journal)
    (folder / "report.json").write_text(report.to_json(), encoding="utf-8")
    (folder / "report.txt").write_text(str(report), encoding="utf-8")
    return report.exit_code


@contextlib.contextmanager
def _journal(path: Path) -> Iterator[Callable[[str], None]]:
    """Writes each move before it is made, so that whoever looks on knows how far it came."""
    with open(path, "w", encoding="utf-8", buffering=1) as file:
        yield lambda text: print(text, file=file)


def _watched(options: argparse.Namespace, arguments: list[str]) -> Found:
    """Run the check in another process, and end it where it hangs."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = [sys.executable, "-m", "kvlab.check", *arguments, "--here", name]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        moves = folder / "moves"
        try:
            while process.poll() is None:
                time.sleep(0.05)
                # Until it exists, our own modules are being loaded.
                if moves.exists() and time.time() - moves.stat().st_mtime > options.hang:
                    process.kill()
                    process.wait()
                    return _ended(moves, f"the pool hangs: no move for {options.hang:g} s")
        finally:
            if process.poll() is None:
                process.kill()
        if (folder / "report.json").exists():
            report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
            text = (folder / "report.txt").read_text(encoding="utf-8")
            return Found(process.returncode, text, report)
        if (folder / "error").exists():
            raise ValueError((folder / "error").read_text(encoding="utf-8"))
        return _ended(moves, f"the pool ended its process (exit status {process.returncode})")


def _ended(moves: Path, why: str) -> Found:
    lines = moves.read_text(encoding="utf-8").splitlines() if moves.exists() else []
    start = max((i for i, line in enumerate(lines) if line.startswith("seed ")), default=0)
    history = " ".join(lines[start + 1 :])
    seed = lines[start] if lines else "before the first history"
    text = f"contaminated\nwhat: {why}\nhistory ({seed}): {history}"
    return Found(1, text, {"verdict": "contaminated", "anomalies": [why], "moves": history})


def factory_probe(factory: PoolFactory) -> None:
    """One pool, so that a factory that cannot make any is told from a pool that fails."""
    from kvlab.check import default_config
    from kvlab.check.run import fresh

    fresh(factory, default_config())


def _write_junit(path: str, name: str, found: Found) -> None:
    wrong = found.code != 0
    suite = ElementTree.Element(
        "testsuite", name="kvlab.check", tests="1", failures=str(int(wrong))
    )
    case = ElementTree.SubElement(suite, "testcase", classname="kvlab.check", name=name)
    if wrong:
        first = found.text.splitlines()[0]
        ElementTree.SubElement(case, "failure", message=first).text = found.text
    ElementTree.ElementTree(suite).write(path, encoding="utf-8", xml_declaration=True)


def check_log(path: str) -> int:
    """Print every conflict of a log, and every line that could not be read."""
    try:
        log = read_log(path)
    except (OSError, UnicodeDecodeError) as error:
        print(f"cannot read {path}: {error}", file=sys.stderr)
        return 2
    for line in log.errors:
        print(line, file=sys.stderr)
    if not log.events:
        print(f"{path} holds no record that can be read", file=sys.stderr)
        return 2
    found = conflicts(log.events)
    for conflict in found:
        print(conflict)
    unread = f", {len(log.errors)} lines could not be read" if log.errors else ""
    print(f"{len(log.events)} records, {len(found)} conflicts{unread}")
    return 1 if found else 0


def load_factory(name: str) -> PoolFactory:
    """The object behind `package.module:name`; modules of the current folder count.

    Raises:
        ValueError: There is no such thing, or it cannot be called; the message says which.
    """
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise ValueError(f"{name!r} is not of the form package.module:factory")
    sys.path.insert(0, os.getcwd())
    try:
        found = getattr(importlib.import_module(module), attribute)
    except ImportError as error:
        raise ValueError(f"cannot import {module!r}: {error}") from error
    except AttributeError as error:
        raise ValueError(f"{module!r} has no {attribute!r}") from error
    finally:
        sys.path.pop(0)
    if not callable(found):
        raise ValueError(f"{name!r} cannot be called; give a function that returns a pool")
    return found


if __name__ == "__main__":
    sys.exit(main())
