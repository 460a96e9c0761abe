"""Print how long the helper package is: it should stay readable in an afternoon."""

from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "kvlab"
APART = ("training", "audit")


def main() -> None:
    counts = {True: 0, False: 0}
    for path in PACKAGE.rglob("*.py"):
        apart = path.relative_to(PACKAGE).parts[0] in APART
        counts[apart] += len(path.read_text(encoding="utf-8").splitlines())
    print(f"kvlab: {counts[False]} lines, and {counts[True]} in {' and '.join(APART)}")


if __name__ == "__main__":
    main()
