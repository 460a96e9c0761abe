"""Checks for notebook 10."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from kvlab.exercises.checking import check


def check_reach(reach: Callable[[Tensor], tuple[Tensor, Tensor]], number: str = "10.1") -> bool:
    """Which tokens change behind row attention, and then behind column attention.

    `reach(changed)` takes a mask of pixels (S, S) and returns two such masks.
    """

    def attempt() -> str | None:
        one = torch.zeros(8, 8, dtype=torch.bool)
        one[3, 4] = True
        after_rows, after_columns = reach(one.clone())
        row = torch.zeros(8, 8, dtype=torch.bool)
        row[3] = True
        if torch.equal(after_rows.bool(), row.T):
            return "the first stage goes along the rows: row 3 changes, not column 3."
        if not torch.equal(after_rows.bool(), row):
            return "behind row attention every token of a changed row may change, and no other."
        if not after_columns.all():
            return "the whole row has changed, so every column holds a changed token."
        none = torch.zeros(8, 8, dtype=torch.bool)
        if any(m.any() for m in reach(none)):
            return "nothing changed, so nothing is reached."
        return None

    return check(number, attempt)


def check_line_key(
    key: Callable[[str, int, int, str, int], Hashable], number: str = "10.2"
) -> bool:
    """A key for `(image, version, block, axis, line)`."""

    def attempt() -> str | None:
        base = ("cat", 1, 0, "row", 11)
        if key(*base) != key(*base):
            return "equal fields must give equal keys, or nothing is ever found."
        others = {
            "two images": ("dog", 1, 0, "row", 11),
            "two versions of an image": ("cat", 2, 0, "row", 11),
            "two blocks": ("cat", 1, 1, "row", 11),
            "a row and a column": ("cat", 1, 0, "column", 11),
            "two lines": ("cat", 1, 0, "row", 1),
            "image 'cat1' in version 0 and 'cat' in version 10": ("cat1", 0, 0, "row", 11),
        }
        pairs = {"image 'cat1' in version 0 and 'cat' in version 10": ("cat", 10, 0, "row", 11)}
        for what, other in others.items():
            if key(*other) == key(*pairs.get(what, base)):
                return f"{what} get one key."
        return None

    return check(number, attempt)
