"""logs.py -- reads a log of out/train as it grows: docs/running.md, The log.

A run's training steps replace the log's older records from its first step on. So a run that resumes
from a checkpoint keeps the steps before it, and a new one keeps none.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checkpoint import is_lines, is_text, size_of
from zg.output import naming
from zg.read.node import shown

Record = dict[str, Any]
Steps = dict[int, Record]

LAST = 10**18  # bound of a step
DIGITS = 18  # most digits of an integer; a longer one is read as a float


class Unread(ValueError):
    """Reason why a line is no record."""


def whole(text: str) -> int | float | None:
    return int(text) if len(text) <= DIGITS else finite(text)


def finite(text: str) -> float | None:
    """Return a number, or None if it is not finite: out/train writes null for it, too."""
    x = float(text)
    return x if math.isfinite(x) else None


def is_step(x: object) -> bool:
    return type(x) is int and 0 <= x < LAST


def is_number(x: object) -> bool:
    return isinstance(x, (int, float)) and not isinstance(x, bool)


def is_number_or_null(x: object) -> bool:
    """Return whether x is a number or None: the loss of a step without targets, or a number that is
    not finite."""
    return x is None or is_number(x)


Rule = tuple[Callable[[Any], bool], str]
NUMBER: Rule = (is_number_or_null, "a number or null")
FIELDS: dict[str, Rule] = {
    "run": (is_text, "a name"),
    "arguments": (is_lines, "a list of words"),
    "step": (is_step, "a whole number from 0 to below 10^18"),
    "loss": NUMBER,
    "val_loss": NUMBER,
    "seconds": NUMBER,
    "tokens_per_second": NUMBER,
}
KINDS = ("run", "step", "end")


def record(line: bytes) -> Record:
    """Return the record of a line. Raises Unread if there is none."""
    try:
        text = line.decode()
        found = json.loads(
            text, parse_int=whole, parse_float=finite, parse_constant=finite
        )
        if "\\u" in text:
            json.dumps(found, ensure_ascii=False).encode()
    except UnicodeError:
        raise Unread("not UTF-8") from None
    except (ValueError, RecursionError):
        raise Unread("not JSON, or cut off") from None
    if not isinstance(found, dict):
        raise Unread(f"{shown(found)} is not a JSON object")
    if not any(key in found for key in KINDS):
        raise Unread("a record must have one of `run`, `step` and `end`")
    for key, (right, what) in FIELDS.items():
        if key in found and not right(found[key]):
            raise Unread(f"{key}: {shown(found[key])} is not {what}")
    return found


def before(steps: Steps, end: int) -> Steps:
    return {n: record for n, record in steps.items() if n < end}


def named(paths: Sequence[Path]) -> list[str]:
    """Return the name of each log: its file's stem if these are unique, else its path from the
    common folder, with a number where a path comes again."""
    stems = [p.stem if p.stem.strip(".") else p.name for p in paths]
    if len(set(stems)) == len(stems):
        return stems
    whole = [Path(os.path.abspath(path)) for path in paths]
    above = os.path.commonpath([path.parent for path in whole])
    names = [str(path.relative_to(above)) for path in whole]
    again = [names[:n].count(name) for n, name in enumerate(names)]
    return [
        f"{name} ({n + 1})" if n else name for name, n in zip(names, again, strict=True)
    ]


@dataclass(frozen=True)
class Start:
    """A run's first training step. repeated: steps of earlier runs that it makes again; run: its
    record."""

    step: int
    repeated: int
    run: Record


class Log:
    """Content of a log. run: the last run's record; steps: the numbers of each step; starts: those
    of the runs that made them; unread: a message for each line that is no record."""

    run: Record
    steps: Steps

    def __init__(self, path: Path) -> None:
        self.path = path
        self.unread: list[str] = []
        self.clear()

    def clear(self) -> None:
        self.run, self.steps = {}, {}
        self.starts: list[Start] = []
        self.ended = False
        self.begins = False  # the last run has no training step yet
        self.at = 0  # bytes that are read
        self.line = 0

    def read(self, all_of_it: bool = False) -> Steps:
        """Return new numbers by step. An incomplete last line is left for later, unless all_of_it
        is set.

        Raises Bad or OSError if the log cannot be read.
        """
        if size_of(self.path) < self.at:
            self.clear()
        with naming(self.path), open(self.path, "rb") as file:
            file.seek(self.at)
            text = file.read()
        if not all_of_it:
            text = text[: text.rfind(b"\n") + 1]
        self.at += len(text)
        new: Steps = {}
        for line in text.removesuffix(b"\n").split(b"\n") if text else ():
            self.line += 1
            try:
                new = self.take(record(line), new) if line.strip() else new
            except Unread as e:
                self.unread.append(f"{self.path}:{self.line}: {e}")
        return dict(sorted(new.items()))

    def take(self, found: Record, new: Steps) -> Steps:
        if "run" in found:
            self.run = found
            self.ended, self.begins = False, True
        self.ended |= "end" in found
        if "step" not in found:
            return new
        step = found["step"]
        if self.begins and "loss" in found:
            self.begins = False
            kept = before(self.steps, step)
            start = Start(step, len(self.steps) - len(kept), self.run)
            self.starts = [*(self.starts if kept else ()), start]
            self.steps, new = kept, before(new, step)
        for steps in (self.steps, new):
            steps.setdefault(step, {}).update(found)
        return new

    def points(self, key: str) -> list[tuple[int, float]]:
        """Return (step, number) for each step with this key."""
        return [
            (n, found[key])
            for n, found in sorted(self.steps.items())
            if is_number(found.get(key))
        ]
