"""Diagnose a pool, or the event log of any server.

python -m kvlab.diagnose package.module:factory   which class of fault has this pool?
python -m kvlab.diagnose --log FILE               what in this event log contradicts isolation?

Exit status: 0 nothing found, 1 a fault or conflicts, 2 could not look.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys

from kvlab.observe.conflicts import conflicts
from kvlab.observe.events import read_log
from kvlab.workloads import PoolFactory


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m kvlab.diagnose",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "factory", nargs="?", help="module:name; called with the model's configuration"
    )
    what.add_argument("--log", metavar="FILE", help="an event log, one JSON object a line")
    options = parser.parse_args(arguments)
    return diagnose_log(options.log) if options.log else diagnose_pool(options.factory)


def diagnose_log(path: str) -> int:
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


def diagnose_pool(name: str) -> int:
    """Print what the experiments say about the pools of a factory."""
    from kvlab.diagnose import diagnose
    from kvlab.models import tiny_model

    try:
        diagnosis = diagnose(load_factory(name), tiny_model())
    except Exception as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    print(diagnosis.table.to_string(index=False))
    print(diagnosis)
    return 0 if diagnosis.confidence == "no fault seen" else 1


if __name__ == "__main__":
    sys.exit(main())
