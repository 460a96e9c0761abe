"""How a check runs and what it prints."""

from __future__ import annotations

from collections.abc import Callable


def check(number: str, attempt: Callable[[], str | None]) -> bool:
    """Run `attempt`, which returns a complaint or `None`, and print the outcome."""
    try:
        complaint = attempt()
    except NotImplementedError:
        print(f"Exercise {number}: still open.")
        return False
    print(f"Exercise {number}: {complaint or 'right!'}")
    return complaint is None
