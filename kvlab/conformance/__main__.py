"""Check a pool: python -m kvlab.conformance package.module:factory

Exit status: 0 isolated, 1 contaminated, 2 could not run.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from kvlab.conformance import check
from kvlab.diagnose.__main__ import load_factory


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m kvlab.conformance", description=__doc__)
    parser.add_argument("factory", help="module:name; called with the model's configuration")
    parser.add_argument("--profile", choices=("quick", "full"), default="quick")
    parser.add_argument("--block-size", type=int, default=16, help="rows in a block (16)")
    parser.add_argument("--max-requests", type=int, help="requests at once (default: found out)")
    parser.add_argument(
        "--shares-prefixes", action="store_true", help="equal requests must report cached tokens"
    )
    parser.add_argument("--json", type=Path, help="write the report to this file")
    options = parser.parse_args(arguments)
    try:
        report = check(
            load_factory(options.factory),
            profile=options.profile,
            block_size=options.block_size,
            shares_prefixes=options.shares_prefixes or None,
            max_requests=options.max_requests,
        )
    except Exception as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    print(report)
    if options.json:
        options.json.write_text(report.to_json(), encoding="utf-8")
    return 0 if report.ok else 1


if __name__ == "__main__":
    sys.exit(main())
