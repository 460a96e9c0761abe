"""Run every notebook through papermill and compare what it measured with the committed record.

Executed notebooks, figures and the fresh record go to build/; no tracked file changes, except with
--accept, which makes the fresh run the committed one.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import papermill
from papermill.exceptions import PapermillExecutionError

from kvlab.ledger import differences, dump, show

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = ROOT / "notebooks"
BUILD = ROOT / "build"
RECORD = ROOT / "ci" / "record.json"
FIGURES = ROOT / "figures"
START, END = "<!-- results:start -->", "<!-- results:end -->"


@dataclass
class Outcome:
    """What became of one notebook."""

    name: str
    seconds: float
    error: str | None


def execute(path: Path, output: Path, parameters: dict[str, Any]) -> Outcome:
    """Run one notebook with those of `parameters` that it has."""
    known = papermill.inspect_notebook(str(path))
    began = time.monotonic()
    error = None
    try:
        papermill.execute_notebook(
            str(path),
            str(output),
            parameters={k: v for k, v in parameters.items() if k in known},
            cwd=str(output.parent),
            kernel_name="python3",
            progress_bar=False,
            request_save_on_cell_execute=False,
            execution_timeout=1500,
            extra_arguments=["--IPKernelApp.log_level=50"],  # it warns about its own sockets
        )
    except PapermillExecutionError as failure:
        error = f"cell {failure.exec_count} raised {failure.ename}: {failure.evalue}"
    return Outcome(path.stem, time.monotonic() - began, error)


def read_record(folder: Path) -> dict[str, Any]:
    """The parts that the notebooks wrote, by notebook."""
    parts = sorted(folder.glob("*.json"))
    return {p.stem: json.loads(p.read_text(encoding="utf-8")) for p in parts}


def table(record: dict[str, Any]) -> str:
    """The results table of the README, in Markdown."""
    lines = ["| claim | what it says | measured | verdict | notebook |", "|---|---|---|---|---|"]
    for part in record.values():
        for c in part["claims"]:
            measured = "; ".join(f"{k} {show(v)}" for k, v in c["measured"].items())
            link = f"[{c['notebook'][:2]}](notebooks/{c['notebook']}.ipynb)"
            cells = (c["id"], c["statement"], measured, f"{c['verdict']}: {c['note']}", link)
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def strip(path: Path) -> None:
    """Remove execution counts and papermill's timings; outputs and widget state stay."""
    command = [
        sys.executable,
        "-m",
        "nbstripout",
        "--keep-output",
        "--keep-metadata-keys=metadata.widgets",
        "--extra-keys=metadata.papermill cell.metadata.papermill cell.metadata.execution",
        str(path),
    ]
    subprocess.run(command, check=True)


def accept(record: dict[str, Any], executed: dict[Path, Path], figures: Path) -> None:
    """Make the fresh run the committed one: record, notebooks, figures, README table.

    `record` holds all notebooks: those that did not run with what was recorded before.
    """
    readme = ROOT / "README.md"
    text = readme.read_text(encoding="utf-8")
    if START not in text or END not in text:
        raise SystemExit(f"README.md has lost its marks {START} and {END}; nothing was accepted")
    head, rest = text.split(START, 1)
    _, tail = rest.split(END, 1)
    for path, tracked in executed.items():
        shutil.copyfile(path, tracked)
        strip(tracked)
    for picture in figures.glob("*.png"):
        FIGURES.mkdir(exist_ok=True)
        shutil.copyfile(picture, FIGURES / picture.name)
    RECORD.write_text(dump(record), encoding="utf-8")
    readme.write_text(f"{head}{START}\n{table(record)}\n{END}{tail}", encoding="utf-8")


def summary(outcomes: list[Outcome], record: dict[str, Any]) -> None:
    """One line a notebook: seconds, claims by verdict, or the error."""
    print(f"\n{'notebook':32} {'seconds':>8}  reproduced  qualified  refuted")
    for o in outcomes:
        if o.error:
            print(f"{o.name:32} {o.seconds:8.0f}  FAILED: {o.error}")
            continue
        verdicts = [c["verdict"] for c in record.get(o.name, {"claims": []})["claims"]]
        counts = [verdicts.count(v) for v in ("reproduced", "qualified", "refuted")]
        print(f"{o.name:32} {o.seconds:8.0f}  {counts[0]:10} {counts[1]:10} {counts[2]:8}")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="a folder or hub id instead of the bundled model")
    parser.add_argument("--fast", action="store_true", help="the small form of every notebook")
    parser.add_argument("--accept", action="store_true", help="make this run the committed one")
    parser.add_argument("--only", help="run notebooks whose name starts so")
    options = parser.parse_args(arguments)
    if options.accept and (options.model or options.fast):
        parser.error("--accept needs a full run of the bundled model: no --model, no --fast")
    if options.model and Path(options.model).is_dir():
        options.model = str(Path(options.model).resolve())  # notebooks run in another folder

    paths = sorted(NOTEBOOKS.glob("[0-9][0-9]_*.ipynb"))
    paths = [p for p in paths if p.name.startswith(options.only or "")]
    solutions = sorted((NOTEBOOKS / "solutions").glob("*.ipynb"))
    solutions = [p for p in solutions if p.name.startswith(options.only or "")]
    if not paths:
        print("no such notebook", file=sys.stderr)
        return 2
    parts, figures = BUILD / "record", BUILD / "figures"
    output = BUILD / "notebooks"
    for folder in (parts, figures, output):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    os.environ["KVLAB_RECORD"] = str(parts)
    os.environ["KVLAB_FIGURES"] = str(figures)
    # Only what differs from the defaults, so that a full run leaves no injected cell behind.
    given = {"FAST": options.fast, "MODEL": options.model}
    parameters = {name: value for name, value in given.items() if value}

    outcomes = []
    for path in paths:
        print(f"running {path.name} ...", flush=True)
        outcomes.append(execute(path, output / path.name, parameters))
    solved = [execute(path, output / path.name, {}) for path in solutions]
    record = read_record(parts)
    (BUILD / "record.json").write_text(dump(record), encoding="utf-8")
    summary(outcomes, record)

    problems = [f"{o.name}: {o.error}" for o in (*outcomes, *solved) if o.error]
    for o in outcomes:
        if not o.error and not record.get(o.name, {}).get("claims"):
            problems.append(f"{o.name}: recorded no claim")
    if options.accept and not problems:
        known = options.only and RECORD.exists()
        kept = json.loads(RECORD.read_text(encoding="utf-8")) if known else {}
        whole = dict(sorted((kept | record).items()))
        accept(whole, {output / p.name: p for p in (*paths, *solutions)}, figures)
        print("\nThis run is now the committed one: look at the changes with git diff.")
    elif options.fast or options.model:
        print("\nNothing was compared: the record holds for a full run of the bundled model.")
    elif not options.accept:
        problems += compare(record, options.only)
    for problem in problems:
        print(f"FAILED {problem}", file=sys.stderr)
    print("Executed notebooks: build/notebooks/, what they measured: build/record.json")
    return int(bool(problems))


def compare(record: dict[str, Any], only: str | None) -> list[str]:
    """Print how the fresh record differs from the committed one; returns the failures."""
    if not RECORD.exists():
        return ["there is no committed record; make one with: make accept"]
    committed = json.loads(RECORD.read_text(encoding="utf-8"))
    if only:
        committed = {k: v for k, v in committed.items() if k.startswith(only)}
    found = differences(record, committed)
    for line in found.near_ties:
        print(f"near-tie, not counted: {line}")
    if not found.failures:
        claims = sum(len(part["claims"]) for part in record.values())
        tokens = sum(len(s["tokens"]) for p in record.values() for s in p["sequences"].values())
        print(
            f"\nAll {claims} claims and {tokens} recorded tokens agree with the committed record."
        )
    return found.failures


if __name__ == "__main__":
    raise SystemExit(main())
