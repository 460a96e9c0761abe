"""Run every notebook through papermill and compare what it measured with the committed record.

Executed notebooks, figures and the fresh record go to build/; no tracked file changes, except with
--accept, which makes the fresh run the committed one.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import papermill
from compare import differences
from nbclient.exceptions import CellTimeoutError, DeadKernelError
from papermill.exceptions import PapermillExecutionError

from kvlab.ledger import dump
from kvlab.ledger.claims import CLAIMS
from kvlab.ledger.values import read

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


class Watch(threading.Thread):
    """Times one small product over and over, which tells how busy the machine was meanwhile."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.over = threading.Event()
        self.seconds: list[float] = []

    def run(self) -> None:
        rows = np.ones((64, 64))  # too small for a second thread
        while not self.over.wait(1):
            began = time.perf_counter()
            for _ in range(500):
                rows @ rows
            self.seconds.append(time.perf_counter() - began)

    def __str__(self) -> str:
        if len(self.seconds) < 10:
            return "too short a run to say how busy the machine was"
        median, high = np.quantile(self.seconds, [0.5, 0.9]) / min(self.seconds)
        return (
            f"how busy the machine was, ours included: a fixed product took {median:.1f} times its "
            f"fastest in the median, {high:.1f} times and more in a tenth of the run"
        )


@dataclass(frozen=True)
class Job:
    """One notebook to run: where it stands, where the executed one goes, what it is given."""

    path: Path
    output: Path
    parameters: dict[str, Any]
    line: int
    """On which line of a terminal its progress is shown."""

    @property
    def timed(self) -> bool:
        """Whether it measures times, and so must have the machine for itself."""
        return "Time(" in self.path.read_text(encoding="utf-8")


def execute(job: Job) -> Outcome:
    """Run one notebook with those of its parameters that it has."""
    known = papermill.inspect_notebook(str(job.path))
    began = time.monotonic()
    error = None
    try:
        papermill.execute_notebook(
            str(job.path),
            str(job.output),
            parameters={k: v for k, v in job.parameters.items() if k in known},
            cwd=str(job.output.parent),
            kernel_name="python3",
            progress_bar={"desc": f"{job.path.stem:32}", "position": job.line, "disable": None},
            request_save_on_cell_execute=False,
            execution_timeout=1500,
            extra_arguments=["--IPKernelApp.log_level=50"],  # it warns about its own sockets
        )
    except PapermillExecutionError as failure:
        error = f"cell {failure.exec_count} raised {failure.ename}: {failure.evalue}"
    except (DeadKernelError, CellTimeoutError) as failure:
        error = f"{type(failure).__name__}: {failure}"
    return Outcome(job.path.stem, time.monotonic() - began, error)


def run_all(jobs: Sequence[Job], fast: bool) -> Iterator[Outcome]:
    """Run notebooks side by side, one thread each; those that measure times alone, with all cores.

    A short run compares nothing, so there all run side by side. What became of a notebook is told
    as soon as it is known.
    """
    alone = [job for job in jobs if job.timed and not fast]
    together = [job for job in jobs if job not in alone]
    # A step of a small model gains nothing from a second thread.
    for group, at_once, threads in ((together, os.cpu_count() or 1, "1"), (alone, 1, None)):
        with environment(OMP_NUM_THREADS=threads), workers(at_once) as executor:
            for done in as_completed([executor.submit(execute, job) for job in group]):
                yield done.result()


@contextmanager
def environment(**variables: str | None) -> Iterator[None]:
    """Variables that processes started meanwhile find, unless the caller has set them himself."""
    ours = {k: v for k, v in variables.items() if v is not None and k not in os.environ}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name in ours:
            del os.environ[name]


@contextmanager
def workers(count: int) -> Iterator[ProcessPoolExecutor]:
    """Fresh processes; what waits is dropped when an error or Ctrl-C comes through."""
    executor = ProcessPoolExecutor(count, mp_context=multiprocessing.get_context("spawn"))
    try:
        yield executor
    finally:
        executor.shutdown(cancel_futures=True)


def read_record(folder: Path) -> dict[str, Any]:
    """The parts that the notebooks wrote, by notebook."""
    parts = sorted(folder.glob("*.json"))
    return {p.stem: json.loads(p.read_text(encoding="utf-8")) for p in parts}


def table(record: dict[str, Any]) -> str:
    """The results table of the README, in Markdown."""
    lines = ["| claim | what it says | measured | verdict | notebook |", "|---|---|---|---|---|"]
    for notebook, part in record.items():
        for c in part["claims"]:
            says = CLAIMS[c["id"]]
            measured = "; ".join(f"{k} {read(v)}" for k, v in c["measured"].items())
            link = f"[{notebook[:2]}](notebooks/{notebook}.ipynb)"
            cells = (c["id"], says.text, measured, f"{c['verdict']}: {says.note}", link)
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
    parser.add_argument("--only", help="run notebooks whose name starts so: 03, or 03,07")
    options = parser.parse_args(arguments)
    if options.accept and (options.model or options.fast):
        parser.error("--accept needs a full run of the bundled model: no --model, no --fast")
    if options.model and Path(options.model).is_dir():
        options.model = str(Path(options.model).resolve())  # notebooks run in another folder

    only = tuple((options.only or "").split(","))
    paths, solutions = (
        [p for p in sorted(folder.glob("[0-9][0-9]_*.ipynb")) if p.name.startswith(only)]
        for folder in (NOTEBOOKS, NOTEBOOKS / "solutions")
    )
    if options.fast:
        solutions = []  # they have no short form: the unit tests run them
    if not paths:
        print(f"no notebook begins with {options.only}", file=sys.stderr)
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
    given = {name: value for name, value in given.items() if value}
    jobs = [Job(p, output / p.name, given, i) for i, p in enumerate([*paths, *solutions])]

    began, outcomes, watch = time.monotonic(), [], Watch()
    watch.start()
    try:
        for outcome in run_all(jobs, options.fast):
            outcomes.append(outcome)
            print(f"{outcome.name} took {outcome.seconds:.0f} s", flush=True)
    except KeyboardInterrupt:
        left = {p.stem for p in paths} - {o.name for o in outcomes}
        numbers = ",".join(sorted(name[:2] for name in left))
        print(f"\nStopped. What is left: make reproduce ONLY={numbers}", file=sys.stderr)
        return 130
    finally:
        watch.over.set()
    outcomes.sort(key=lambda o: o.name)
    record = read_record(parts)
    (BUILD / "record.json").write_text(dump(record), encoding="utf-8")
    named = {p.stem for p in paths}
    summary([o for o in outcomes if o.name in named], record)
    print(f"all of it: {time.monotonic() - began:.0f} s; {watch}")

    problems = [f"{o.name}: {o.error}" for o in outcomes if o.error]
    for o in outcomes:
        if o.name in named and not o.error and not record.get(o.name, {}).get("claims"):
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
        committed = {k: v for k, v in committed.items() if k.startswith(tuple(only.split(",")))}
    found = differences(record, committed)
    for line in found.near_ties:
        print(f"near-tie, not counted: {line}")
    for line in found.times:
        print(f"slower or busier than the record, no failure: {line}")
    if not found.failures:
        claims = sum(len(part["claims"]) for part in record.values())
        tokens = sum(len(s["tokens"]) for p in record.values() for s in p["sequences"].values())
        print(
            f"\nAll {claims} claims and {tokens} recorded tokens agree with the committed record."
        )
    return found.failures


if __name__ == "__main__":
    raise SystemExit(main())
