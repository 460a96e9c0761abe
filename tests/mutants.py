"""Break the pools by one small change at a time, and see whether the judge notices.

Each one that survives is a hole in the judge, or changes nothing; a person sorts it, by its id, in
tests/mutants.json: {"equivalent": {id: reason}, "harmless": {...}, "missed": {...}}. Exit status 1:
some are not sorted, or the judge refuses the pools as they are, and then no score means anything.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import json
import os
import random
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.machinery import ModuleSpec
from multiprocessing import get_context
from pathlib import Path
from resource import RLIMIT_DATA, setrlimit
from typing import Any, NamedTuple

NAMES = "slots tiered prefix blocks batch lease arena".split()
TIMEOUT, MEMORY = 120, 8 << 30  # seconds of a wall clock and bytes: what a loop without end gets
SWAPS = "<:<=,<=:<,>:>=,>=:>,==:!=,!=:==,+:-,-:+,+=:-=,-=:+=,//:%,and:or,in:not in,not in:in,"
OTHER = dict(swap.split(":") for swap in f"{SWAPS}is:is not,is not:is".split(","))
UNTOUCHED = {"annotation", "returns", "decorator_list", "msg"}  # and f-strings: 3.11 misplaces them
CONTEXT, UNSORTED = get_context("forkserver"), "SURVIVES, unsorted"


def verdict() -> str | None:
    """What the judge finds first. Imported here and not above, so that the hook comes before."""
    from kvlab.check import check
    from kvlab.pools import SimpleCachePool, TieredCachePool

    tiers = [lambda c, n=n: TieredCachePool.for_model(c, 96 // n, block_size=n) for n in (16, 4)]
    pools = [lambda c: SimpleCachePool.for_model(c, 4, 40), *tiers]
    reports = (check(pool, name=False) for pool in pools)
    return next((str(r.trace.anomalies[0]) for r in reports if r.trace is not None), None)


class Mutant(NamedTuple):
    """One change of one file, and the import hook that puts it in the place of the file."""

    id: str  # stays when lines move, since tests/mutants.json names it
    file: str
    line: int
    operator: str
    change: str
    source: str

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        mine = name == self.file.removesuffix(".py").replace("/", ".")
        return ModuleSpec(name, self, origin=self.file) if mine else None

    def create_module(self, spec: ModuleSpec) -> None:
        """A usual one."""

    def exec_module(self, module: Any) -> None:
        exec(compile(self.source, self.file, "exec", dont_inherit=True), module.__dict__)


class Text(str):
    """A source, ASCII, and edits that leave the rest of it as it is."""

    def span(self, node: Any) -> tuple[int, int]:
        """From where to where a node goes."""
        at = [0, 0, *itertools.accumulate(map(len, self.splitlines(keepends=True)))]
        return at[node.lineno] + node.col_offset, at[node.end_lineno] + node.end_col_offset

    def operators(self, node: ast.AST) -> Iterator[tuple[int, int, str, str]]:
        """Another operator between two operands; parentheses around them stay."""
        operands = [self.span(x) for x in ast.iter_child_nodes(node) if isinstance(x, ast.expr)]
        for (_, start), (end, _) in itertools.pairwise(operands):
            if (old := self[start:end].strip("() \n")) in OTHER:
                yield start, end, f"{old} to {OTHER[old]}", self[start:end].replace(old, OTHER[old])

    def edits(self, node: Any) -> Iterator[tuple[int, int, str, str]]:
        """From where, to where, by which operator, and what stands there then."""
        start, end = self.span(node) if hasattr(node, "lineno") else (0, 0)
        if isinstance(node, ast.Compare | ast.BinOp | ast.BoolOp | ast.AugAssign):
            yield from self.operators(node)
        match node:
            case ast.UnaryOp(ast.Not()):
                yield start, end, "drop not", self[start:end].replace("not", "", 1).lstrip()
            case ast.Constant(int(n)) if not isinstance(n, bool):
                yield from ((start, end, f"n{i:+}", str(n + i)) for i in (1, -1)[: n + 1])
            case ast.If(test) | ast.IfExp(test):
                yield from ((*self.span(test), f"if {x}", x) for x in ("True", "False"))
            case ast.Return(ast.AST()):
                yield start, end, "return None", "return None"
            case ast.Break():
                yield start, end, "break to continue", "continue"
            case ast.Call(_, [first, second, *_]):
                (start, a), (b, end) = self.span(first), self.span(second)
                yield start, end, "swap arguments", self[b:end] + self[a:b] + self[start:a]
            case ast.Slice(lower, upper):  # a constant counts up as any other
                bounds = [x for x in (lower, upper) if x and not isinstance(x, ast.Constant)]
                for a, b in map(self.span, bounds):
                    yield a, b, "bound +1", f"({self[a:b]}) + 1"
            case ast.Expr(ast.Call()) | ast.AugAssign() | ast.Delete() | ast.Raise():
                yield start, end, "drop statement", "pass"
            case ast.Assign(value=value) | ast.AnnAssign(value=ast.AST() as value):
                if {".", "["} & {*self[start : self.span(value)[0]].split(":")[0]}:
                    yield start, end, "drop statement", "pass"  # of an attribute or an element


def walk(node: Any, inside: str = "") -> Iterator[tuple[ast.AST, str]]:
    """Every node that may be changed, and the qualified name of its function."""
    yield node, inside
    if isinstance(node, ast.ClassDef | ast.FunctionDef):
        inside = f"{inside}.{node.name}".strip(".")
    for field in () if isinstance(node, ast.Raise) else set(node._fields) - UNTOUCHED:
        value = getattr(node, field)
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not isinstance(child, ast.JoinedStr):
                yield from walk(child, inside)


def mutants(file: str) -> Iterator[Mutant]:
    """All mutants of a file, as they stand in it; what says the same comes once."""
    text, times = Text((Path(__file__).parents[1] / file).read_text("ascii")), Counter[str]()
    seen = {ast.dump(tree := ast.parse(text))}
    for (a, b, operator, new), name in sorted((e, n) for x, n in walk(tree) for e in text.edits(x)):
        source = text[:a] + new + text[b:]
        if (says := ast.dump(ast.parse(source))) not in seen:
            seen.add(says)
            first, last = text.rfind("\n", 0, a) + 1, text.index("\n", b)
            lines = text[first:last], text[first:a] + new + text[b:last]
            change = " -> ".join(" ".join(x.split()) for x in lines)
            times[id := f"{file}::{name}::{operator}::{change}"] += 1
            id += f" #{times[id]}" if times[id] > 1 else ""  # equal lines in one function
            yield Mutant(id, file, text.count("\n", 0, a) + 1, operator, change, source)


def work(mutant: Mutant | None, answer: Any) -> None:
    """What the process of one mutant does; without one it judges the pools as they are."""
    assert "kvlab" not in sys.modules, "the hook comes too late"
    setrlimit(RLIMIT_DATA, (MEMORY, MEMORY))
    sys.meta_path[:0] = [mutant] if mutant else []
    try:
        found = verdict()
    except Exception as error:
        where = "raises" if "kvlab.pools" in sys.modules else "raises at import"
        found = f"{where}: {type(error).__name__}: {error}"
    answer.send(found and found[:300])  # short, since it is read only after the end


def judge(mutant: Mutant | None) -> str | None:
    """By what a mutant is found, in a process of its own."""
    here, there = CONTEXT.Pipe(duplex=False)
    process = CONTEXT.Process(target=work, args=(mutant, there), daemon=True)
    process.start()
    process.join(TIMEOUT)
    end = "time-out" if process.is_alive() else f"ended with status {process.exitcode}"
    process.kill()
    return here.recv() if here.poll() else end


def judged(drawn: list[tuple[int, Mutant]], jobs: int) -> Iterator[dict[str, Any]]:
    """What became of each mutant, printed as it comes."""
    path = Path(__file__).with_suffix(".json")
    groups = json.loads(path.read_text()) if path.exists() else {}
    known = {
        id: (f"SURVIVES, {group}", why) for group in groups for id, why in groups[group].items()
    }
    with ThreadPoolExecutor(jobs) as threads:
        for (n, m), found in zip(drawn, threads.map(judge, [m for _, m in drawn])):
            end, why = ("found", found) if found else known.get(m.id, (UNSORTED, ""))
            print(f"{n} {m.file}:{m.line} [{m.operator}] {m.change} | {end}: {why}", flush=True)
            yield {"number": n, **dict(zip(m._fields, m[:-1])), "end": end, "why": why}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sample", type=int, default=300, help="how many mutants")
    parser.add_argument("--seed", type=int, default=0, help="which of them")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="how many at once")
    parser.add_argument("--only", choices=[f"{n}.py" for n in NAMES], help="of one file")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}  # it forks: no threads
    CONTEXT.set_forkserver_preload(["torch", "transformers.models.llama.modeling_llama"])
    if refused := judge(None):
        sys.exit(f"the judge refuses the pools as they are: {refused}")
    every = enumerate((m for name in NAMES for m in mutants(f"kvlab/pools/{name}.py")), 1)
    drawn = [(n, m) for n, m in every if m.file.endswith(options.only or "")]
    drawn = random.Random(options.seed).sample(drawn, len(drawn))[: options.sample]
    rows = list(judged(drawn, options.jobs))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))
    ends, late = Counter(r["end"] for r in rows), sum(r["why"] == "time-out" for r in rows)
    found, survive, left = ends["found"], len(rows) - ends["found"], ends[UNSORTED]
    print(f"{found} of {len(rows)} found ({late} by time-out), {survive} survive, {left} unsorted")
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
