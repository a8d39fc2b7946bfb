"""between.py -- values that functions of a unit leave to later ones: forward to backward, and in a
body that is cut at exchanges each function to the next."""

from __future__ import annotations

from typing import NamedTuple


class Between(NamedTuple):
    """Class of such values. heads: they are a rank's heads of all tokens, with a slot for each
    sample, else rows, with a slot for each block; saved: backward reads them, so each kind of unit
    has a class with slots for each unit."""

    cls: str
    heads: bool
    saved: bool


# By the name of the operand.
BETWEEN = {
    "s": Between("save", heads=False, saved=True),
    "sh": Between("save_heads", heads=True, saved=True),
    "r": Between("rows", heads=False, saved=False),
    "h": Between("heads", heads=True, saved=False),
}
SAVED = tuple(name for name, b in BETWEEN.items() if b.saved)
PASSED = tuple(name for name in BETWEEN if name not in SAVED)


def is_between(cls: str) -> bool:
    """Return whether a class, or its slots beside offloaded values, holds such values."""
    stem = cls.removeprefix("near.").partition(".")[0]
    return stem in {b.cls for b in BETWEEN.values()}


def operand_of(heads: bool, saved: bool) -> str:
    """Return the name of the operand of such a value."""
    return next(n for n, b in BETWEEN.items() if (b.heads, b.saved) == (heads, saved))
