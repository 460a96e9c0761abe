"""The event log on paper: JSON Lines out and in. The schema stands in `EVENT_LOG.md` beside it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import pandas as pd

from kvlab.pools.events import Event, EventKind, EventLog

__all__ = ["Event", "EventLog", "LogFile", "lives", "parse_log", "read_log", "write_log"]

KINDS = get_args(EventKind)


@dataclass
class LogFile:
    """What could be read of a log.

    Attributes:
        events: The records, sorted by time and step.
        errors: One sentence for each line that could not be read, with its number from 1.
    """

    events: list[Event] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


def write_log(events: Iterable[Event], path: str | Path) -> None:
    """Write one JSON object a line."""
    lines = [json.dumps(as_record(e), ensure_ascii=False) + "\n" for e in events]
    Path(path).write_text("".join(lines), encoding="utf-8")


def as_record(event: Event) -> dict[str, Any]:
    """An event as plain data; `tokens` is left out where they are not known."""
    record = dict(vars(event)) | {"places": list(event.places)}
    record["tokens"] = None if event.tokens is None else list(event.tokens)
    record["context"] = None if event.context is None else dict(event.context)
    if event.tokens is None:
        del record["tokens"]
    return record


def read_log(path: str | Path) -> LogFile:
    """Read a log file; a malformed line costs that line only.

    Raises:
        OSError: The file cannot be opened.
        UnicodeDecodeError: It is not text.
    """
    with open(path, encoding="utf-8") as file:
        return parse_log(file)


def parse_log(lines: Iterable[str | Mapping[str, Any]]) -> LogFile:
    """Read JSON lines, or records that are decoded already; empty lines are skipped."""
    found = LogFile()
    for number, line in enumerate(lines, start=1):
        if isinstance(line, str) and not line.strip():
            continue
        try:
            record = json.loads(line) if isinstance(line, str) else line
            found.events.append(_event(record, number))
        except ValueError as error:  # JSONDecodeError is one
            found.errors.append(f"line {number}: {error}")
    found.events.sort(key=lambda e: (e.time, e.step))
    return found


def _event(record: Any, number: int) -> Event:
    """One record as an event.

    Raises:
        ValueError: A field is missing or of a wrong kind; the message names it.
    """
    if not isinstance(record, Mapping):
        raise ValueError("not a JSON object")
    kind: Any = record.get("kind")
    if kind not in KINDS:
        raise ValueError(f"kind is {kind!r}; use one of {', '.join(KINDS)}")
    if not isinstance(record.get("request", ""), str):
        raise ValueError("request must be a string")
    if kind != "evict" and kind != "reset" and not record.get("request"):
        raise ValueError(f"a record of kind {kind} needs a request")
    places = _numbers(record, "places")
    if not places or (kind == "copy" and len(places) != 2):
        raise ValueError("places must name one place at least, for a copy its source and target")
    size = _number(record, "size", None)
    if size < 1:
        raise ValueError("size must be 1 at least")
    context = record.get("context", {})
    if context is not None and not isinstance(context, Mapping):
        raise ValueError("context must be an object of tagged fields, or null")
    return Event(
        kind=kind,
        request=record.get("request", ""),
        places=tuple(places),
        start=_number(record, "start", None),
        length=_number(record, "length", None),
        size=size,
        time=_number(record, "time", None),
        step=_number(record, "step", number),
        tokens=None if record.get("tokens") is None else tuple(_numbers(record, "tokens")),
        context=None if context is None else tuple(context.items()),
    )


def _number(record: Mapping[str, Any], name: str, default: int | None) -> int:
    value = record.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{name} must be a whole number from 0 on, got {value!r}")
    return value


def _numbers(record: Mapping[str, Any], name: str) -> list[int]:
    value = record.get(name)
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"{name} must be a list of whole numbers, got {value!r}")
    return [_number({name: v}, name, None) for v in value]


def lives(events: Iterable[Event]) -> pd.DataFrame:
    """Each place's life: one row for every event and place, sorted by place and time."""
    rows = [
        {
            "place": place,
            "step": e.step,
            "kind": e.kind,
            "request": e.request,
            "start": e.start,
            "length": e.length,
        }
        for e in events
        for place in e.places
    ]
    columns = ["place", "step", "kind", "request", "start", "length"]
    table = pd.DataFrame(rows, columns=columns)
    return table.sort_values(["place", "step"], kind="stable").reset_index(drop=True)
