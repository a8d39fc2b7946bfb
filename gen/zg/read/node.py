"""node.py -- values of a user's file with their locations, and the wording of errors about them."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

# Most values of a file with aliases expanded: they grow exponentially.
NODES = 20_000
DEPTH = 40
LINES = 20  # most errors shown


Names = tuple[str, ...]
Ints = tuple[int, ...]
Path = tuple[str | int, ...]  # path to a key
Made = TypeVar("Made")


class SpecError(Exception):
    """Mistakes of the user. Each line of str() is `file:line: key: mistake; allowed: values`.

    lines: all of them; str() may have only the first ones.
    """

    def __init__(self, text: str, lines: Names = ()) -> None:
        super().__init__(text)
        self.lines = lines or (text,)


@dataclass
class Node:
    """A value of a user's file and its location. value: dict or list of Node, or a scalar."""

    value: Any
    where: str

    def plain(self) -> object:
        """Return the value without locations."""
        if isinstance(self.value, dict):
            return {key: node.plain() for key, node in self.value.items()}
        if isinstance(self.value, list):
            return [node.plain() for node in self.value]
        return self.value

    def at(self, path: Path) -> Node:
        """Return the node at a path, or its nearest parent that exists."""
        node = self
        for step in path:
            below = node.value
            if isinstance(below, dict) and step in below:
                node = below[step]
            elif (
                isinstance(below, list) and isinstance(step, int) and step < len(below)
            ):
                node = below[step]
            else:
                break
        return node


def dotted(path: Path) -> str:
    """Return a path as text: model.units[1].ops."""
    words = (f"[{p}]" if isinstance(p, int) else f".{p}" for p in path)
    return printable("".join(words).removeprefix("."))


def printable(text: str) -> str:
    """Return a user's word for an error: on one line, at most 200 characters."""
    text = text if text and text.isprintable() else ascii(text)
    return text if len(text) <= 200 else text[:196] + " ..."


def shown(value: object) -> str:
    """Return a value for an error: short, on one line, printable."""
    if isinstance(value, (dict, list, tuple)):
        return "a mapping" if isinstance(value, dict) else "a list"
    if value is None or isinstance(value, bool):
        return {None: "empty", True: "true", False: "false"}[value]
    text = ascii(value)
    return text if len(text) <= 40 else text[:36] + " ..."


def near(word: str, keys: Sequence[str], close: float = 0.6) -> str:
    """Return the key that is most similar to a word, '' if none reaches `close` (at most 1)."""
    found = difflib.get_close_matches(word, keys, n=1, cutoff=close)
    return found[0] if found else ""


def meant(word: str, keys: Sequence[str], close: float = 0.6) -> str:
    """Return a hint that names the most similar key, '' if there is none."""
    found = near(word, keys, close)
    return f"did you mean {found}? " if found else ""


def several(lines: Iterable[str]) -> SpecError:
    """Return several mistakes as one error, without duplicates."""
    found = tuple(dict.fromkeys(lines))
    rest = len(found) - LINES + 1
    told = found if rest < 2 else (*found[: LINES - 1], f"and {rest} more")
    return SpecError("\n".join(told), found)


def meet(a: Path, b: Path) -> bool:
    """Return whether two keys are equal, or one contains the other."""
    n = min(len(a), len(b))
    return a[:n] == b[:n]


@dataclass
class Mistakes:
    """Collects errors to report them together. bad: keys of the spec whose values are unknown
    because of an error, so that no check reads them."""

    lines: list[str] = field(default_factory=list)
    bad: set[Path] = field(default_factory=set)

    def knows(self, *keys: str) -> bool:
        """Return whether none of these dotted keys is bad, nor any above or below them."""
        paths = [tuple(key.split(".")) for key in keys]
        return not any(meet(a, b) for a in paths for b in self.bad)

    def add(self, error: SpecError) -> None:
        self.lines += error.lines

    def of(self, part: Callable[..., Made], *args: Any) -> Made | None:
        """Return the result of part(*args), None if it raises SpecError."""
        try:
            return part(*args)
        except SpecError as error:
            self.add(error)
            return None

    def check(self, reads: Names, part: Callable[..., Made], *args: Any) -> Made | None:
        """Return the result as `of` does, or None if a key in `reads` is bad."""
        return self.of(part, *args) if self.knows(*reads) else None

    def at(self, path: Path, part: Callable[..., object], *args: Any) -> None:
        """Run part(*args). If it is refused, the key at `path` becomes bad."""
        before = len(self.lines)
        self.of(part, *args)
        if len(self.lines) > before:
            self.bad.add(path)

    def end(self) -> None:
        """Raise SpecError if there is any error."""
        if self.lines:
            raise several(self.lines)


# ---- numbers

_NUMBER = re.compile(r"[-+]?((0|[1-9]\d*)(\.\d*)?|\.\d+)([eE][-+]?\d+)?", re.ASCII)
_INTEGER = re.compile(r"[-+]?(0|[1-9]\d{0,39})", re.ASCII)


def number(text: str) -> int | float | None:
    """Return the number in a text: 12, 5e8, 1.0e-3; a float beyond 40 digits. 010 is none: readers
    disagree on whether it is ten or eight."""
    if _INTEGER.fullmatch(text):
        return int(text)
    return float(text) if _NUMBER.fullmatch(text) else None
