"""logs.py -- what a log of out/train has, as it grows: docs/reference.md, The log.

The first training step of a run, and those behind it, take the place of what the log had of them:
a run that goes on from a checkpoint keeps the steps before, another one keeps none.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Record = dict[str, Any]
Steps = dict[int, Record]


def before(steps: Steps, end: int) -> Steps:
    return {n: record for n, record in steps.items() if n < end}


class Log:
    """run: the last run's record; steps: what the log has of each."""

    run: Record
    steps: Steps

    def __init__(self, path: Path) -> None:
        self.path = path
        self.clear()

    def clear(self) -> None:
        self.run, self.steps = {}, {}
        self.ended = False
        self.begins = False  # no training step of the last run was there yet
        self.at = 0  # bytes that are read

    def read(self) -> Steps:
        """What is new, by step. A line without its end waits. OSError: it cannot be read."""
        if self.path.stat().st_size < self.at:
            self.clear()
        with open(self.path, "rb") as file:
            file.seek(self.at)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self.at += len(whole)
        new: Steps = {}
        for line in whole.splitlines():
            new = self.take(line, new)
        return dict(sorted(new.items()))

    def take(self, line: bytes, new: Steps) -> Steps:
        """A line that a run has left unfinished is none."""
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            return new
        if not isinstance(record, dict):
            return new
        if "run" in record:
            self.run = record
            self.ended, self.begins = False, True
        self.ended |= "end" in record
        step = record.get("step")
        if type(step) is not int:
            return new
        if self.begins and "loss" in record:
            self.begins = False
            self.steps, new = before(self.steps, step), before(new, step)
        for steps in (self.steps, new):
            steps.setdefault(step, {}).update(record)
        return new

    def points(self, key: str) -> list[tuple[int, float]]:
        """Where the log has this number."""
        found = ((n, record.get(key)) for n, record in self.steps.items())
        return [(n, x) for n, x in found if isinstance(x, (int, float))]
