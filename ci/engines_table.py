"""Write the README's table of audited engines from the committed results."""

from __future__ import annotations

from pathlib import Path

from kvlab.audit.results import results, row

README = Path(__file__).resolve().parents[1] / "README.md"
START, END = "<!-- engines:start -->", "<!-- engines:end -->"


def table() -> str:
    """One line an engine; one that was not run says so."""
    lines: list[str] = []
    for name, result in results().items():
        if result is None:
            lines.append(f"| {name} | not run |" + " |" * 5)
            continue
        told = row(result)
        if not any(line.startswith("| engine") for line in lines):
            lines[:0] = [f"| {' | '.join(told)} |", "|---" * len(told) + "|"]
        lines.append(f"| {' | '.join(told.values())} |")
    return "\n".join(lines)


def main() -> None:
    text = README.read_text(encoding="utf-8")
    head, rest = text.split(START, 1)
    _, tail = rest.split(END, 1)
    README.write_text(f"{head}{START}\n{table()}\n{END}{tail}", encoding="utf-8")


if __name__ == "__main__":
    main()
