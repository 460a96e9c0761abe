"""Write the README's table of audited engines from the committed results."""

from __future__ import annotations

from pathlib import Path

from kvlab.audit.results import results, row

README = Path(__file__).resolve().parents[1] / "README.md"
START, END = "<!-- engines:start -->", "<!-- engines:end -->"


def table() -> str:
    """One line an engine; one that was not run says so."""
    rows = {name: row(result) if result else None for name, result in results().items()}
    columns = next((list(told) for told in rows.values() if told), ["engine", "verdict"])
    lines = [columns, ["---"] * len(columns)]
    for name, told in rows.items():
        lines.append(list(told.values()) if told else [name, "not run", *[""] * (len(columns) - 2)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    text = README.read_text(encoding="utf-8")
    head, rest = text.split(START, 1)
    _, tail = rest.split(END, 1)
    README.write_text(f"{head}{START}\n{table()}\n{END}{tail}", encoding="utf-8")


if __name__ == "__main__":
    main()
