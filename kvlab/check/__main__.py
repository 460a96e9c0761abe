"""Check a pool, replay a history, or read the event log of any server.

python -m kvlab.check package.module:factory       does this pool keep its requests apart?
python -m kvlab.check --log FILE                   what in this event log contradicts isolation?

The pool runs in a process of its own; one that makes no move for --hang seconds is ended, which is
a finding. Exit status: 0 isolated, 1 not, 2 could not run, 3 not enough exercised.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from kvlab.check import BUDGETS, Report, check, replay
from kvlab.check.history import History
from kvlab.models import tiny_config
from kvlab.observe.conflicts import conflicts
from kvlab.observe.events import read_log
from kvlab.pools.contract import PoolFactory, fresh


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
    options = parser.parse_args(arguments)
    if options.log:
        return check_log(options.log)
    if options.budget not in BUDGETS and not (options.budget.isdecimal() and int(options.budget)):
        parser.error(f"--budget is quick, full or a number from 1 on, not {options.budget!r}")
    try:
        options.history = _history(options.replay)
        found = _watched(options)
    except (OSError, ValueError) as error:
        print(f"could not run: {error}", file=sys.stderr)
        return 2
    print(found.text)
    if options.json:
        Path(options.json).write_text(json.dumps(found.report, indent=1), encoding="utf-8")
    if options.junit:
        _write_junit(options.junit, options.factory, found)
    return found.code


def _history(path: str | None) -> History | None:
    """The history of a saved report, or a saved history itself."""
    if path is None:
        return None
    text = Path(path).read_text(encoding="utf-8")
    saved = json.loads(text)
    within = isinstance(saved, dict) and "history" in saved
    return History.from_json(json.dumps(saved["history"]) if within else text)


@dataclass(frozen=True)
class Found:
    """What the other process said, or what its end says."""

    code: int
    text: str
    report: dict[str, object]


def _child(options: argparse.Namespace, folder: Path) -> None:
    """The check itself; what the pool prints goes to standard error."""
    os.dup2(2, 1)
    with open(folder / "moves", "w", encoding="utf-8", buffering=1) as moves:

        def journal(text: str) -> None:
            print(text, file=moves)

        try:
            factory = load_factory(options.factory)
            fresh(factory, tiny_config())  # told from a pool that fails
        except Exception as error:
            (folder / "error").write_text(f"{type(error).__name__}: {error}", encoding="utf-8")
            return
        if options.history:
            trace = replay(factory, options.history)
            report = Report(1, exercised=trace.exercised, trace=trace if trace.anomalies else None)
            code = int(bool(trace.anomalies))
        else:
            budget = options.budget if options.budget in BUDGETS else int(options.budget)
            report = check(factory, budget=budget, seed=options.seed, journal=journal)
            code = report.exit_code
    found = {"code": code, "text": str(report), "report": json.loads(report.to_json())}
    (folder / "found.json").write_text(json.dumps(found), encoding="utf-8")


def _watched(options: argparse.Namespace) -> Found:
    """Run the check in another process, and end it where it hangs."""
    ways = multiprocessing.get_all_start_methods()
    context: Any = multiprocessing.get_context("fork" if "fork" in ways else "spawn")
    with tempfile.TemporaryDirectory() as name:
        folder, moves = Path(name), Path(name) / "moves"
        process = context.Process(target=_child, args=(options, folder), daemon=True)
        process.start()
        try:
            while process.is_alive():
                process.join(0.05)
                # Until it exists, our own modules are being loaded.
                if moves.exists() and time.time() - moves.stat().st_mtime > options.hang:
                    return _ended(moves, f"the pool hangs: no move for {options.hang:g} s")
        finally:
            process.kill()
        if (folder / "found.json").exists():
            return Found(**json.loads((folder / "found.json").read_text(encoding="utf-8")))
        if (folder / "error").exists():
            raise ValueError((folder / "error").read_text(encoding="utf-8"))
        return _ended(moves, f"the pool ended its process (exit status {process.exitcode})")


def _ended(moves: Path, why: str) -> Found:
    lines = moves.read_text(encoding="utf-8").splitlines() if moves.exists() else []
    start = max((i for i, line in enumerate(lines) if line.startswith("seed ")), default=0)
    history = " ".join(lines[start + 1 :])
    seed = lines[start] if lines else "before the first history"
    text = f"contaminated\nwhat: {why}\nhistory ({seed}): {history}"
    return Found(1, text, {"verdict": "contaminated", "anomalies": [why], "moves": history})


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
