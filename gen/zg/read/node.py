"""node.py -- pieces of a user's file with their places, and the words of errors about them."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

NODES = (
    20_000  # of a file, after aliases are followed: they grow exponentially
)
DEPTH = 40
LINES = 20  # of errors shown


Names = tuple[str, ...]
Ints = tuple[int, ...]
Path = tuple[str | int, ...]  # to a key
Made = TypeVar("Made")


class SpecError(Exception):
    """The user's mistakes; each line of str() is `file:line: key: what is wrong; what is allowed`.
    lines: all of them, where str() has the first alone."""

    def __init__(self, text: str, lines: Names = ()) -> None:
        super().__init__(text)
        self.lines = lines or (text,)


@dataclass
class Node:
    """A piece of a user's file and where it stands. value: dict or list of Node, or scalar."""

    value: Any
    where: str

    def plain(self) -> object:
        if isinstance(self.value, dict):
            return {key: node.plain() for key, node in self.value.items()}
        if isinstance(self.value, list):
            return [node.plain() for node in self.value]
        return self.value

    def at(self, path: Path) -> Node:
        """The node at a path, or the nearest one that there is above it."""
        node = self
        for step in path:
            below = node.value
            if isinstance(below, dict) and step in below:
                node = below[step]
            elif (
                isinstance(below, list)
                and isinstance(step, int)
                and step < len(below)
            ):
                node = below[step]
            else:
                break
        return node


def dotted(path: Path) -> str:
    """model.units[1].ops"""
    words = (f"[{p}]" if isinstance(p, int) else f".{p}" for p in path)
    return printable("".join(words).removeprefix("."))


def printable(text: str) -> str:
    """A user's word in an error: on one line and not endless, whatever is in it."""
    text = text if text and text.isprintable() else ascii(text)
    return text if len(text) <= 200 else text[:196] + " ..."


def shown(value: object) -> str:
    """A value in an error: short, one line, printable."""
    if isinstance(value, (dict, list, tuple)):
        return "a mapping" if isinstance(value, dict) else "a list"
    if value is None or isinstance(value, bool):
        return {None: "empty", True: "true", False: "false"}[value]
    text = ascii(value)
    return text if len(text) <= 40 else text[:36] + " ..."


def near(word: str, keys: Sequence[str], close: float = 0.6) -> str:
    """The key that is closest to a word, and at least so close, of 1; else ''."""
    found = difflib.get_close_matches(word, keys, n=1, cutoff=close)
    return found[0] if found else ""


def meant(word: str, keys: Sequence[str], close: float = 0.6) -> str:
    found = near(word, keys, close)
    return f"did you mean {found}? " if found else ""


def several(lines: Iterable[str]) -> SpecError:
    """Several mistakes as one error, each once."""
    found = tuple(dict.fromkeys(lines))
    rest = len(found) - LINES + 1
    told = found if rest < 2 else (*found[: LINES - 1], f"and {rest} more")
    return SpecError("\n".join(told), found)


def meet(a: Path, b: Path) -> bool:
    """Whether keys are the same, or one holds the other."""
    n = min(len(a), len(b))
    return a[:n] == b[:n]


@dataclass
class Mistakes:
    """Gathers errors, to tell them together. bad: keys of the spec whose value is not known for an
    error, so that no check reads them."""

    lines: list[str] = field(default_factory=list)
    bad: set[Path] = field(default_factory=set)

    def knows(self, *keys: str) -> bool:
        """Whether none of these dotted keys is bad, nor any above or below."""
        paths = [tuple(key.split(".")) for key in keys]
        return not any(meet(a, b) for a in paths for b in self.bad)

    def add(self, error: SpecError) -> None:
        self.lines += error.lines

    def of(self, part: Callable[..., Made], *args: Any) -> Made | None:
        """What part(*args) returns; None where it is refused."""
        try:
            return part(*args)
        except SpecError as error:
            self.add(error)
            return None

    def check(
        self, reads: Names, part: Callable[..., Made], *args: Any
    ) -> Made | None:
        """As `of`; None, too, where one of the keys that the part reads is bad."""
        return self.of(part, *args) if self.knows(*reads) else None

    def at(self, path: Path, part: Callable[..., object], *args: Any) -> None:
        """part(*args), after which the key is bad where it is refused."""
        before = len(self.lines)
        self.of(part, *args)
        if len(self.lines) > before:
            self.bad.add(path)

    def end(self) -> None:
        if self.lines:
            raise several(self.lines)


# ---- numbers

_NUMBER = re.compile(
    r"[-+]?((0|[1-9]\d*)(\.\d*)?|\.\d+)([eE][-+]?\d+)?", re.ASCII
)
_INTEGER = re.compile(r"[-+]?(0|[1-9]\d{0,39})", re.ASCII)


def number(text: str) -> int | float | None:
    """The number that a text stands for: 12, 5e8, 1.0e-3; a float where digits exceed 40. 010 is
    none: readers differ on whether it is ten or eight."""
    if _INTEGER.fullmatch(text):
        return int(text)
    return float(text) if _NUMBER.fullmatch(text) else None
