"""compare.py -- compares two logs of out/train: their recipes, and the first step that differs.

compare.py LOG LOG

All numbers except times are compared, digit by digit. If a step was repeated because a run resumed
from a checkpoint, its last line counts.

Exit codes: 0 equal in all steps that both have; 1 not; 2 an argument is wrong, or a log cannot be
read, or no step is in both.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from checkpoint import Bad, code_of, command, say
from zg.commandline import Parser
from zg.output import naming

TIMES = {
    "seconds",
    "tokens_per_second",
    "share_of_peak",
    "checkpoint",
    "pause",
    "verification",
}
STEP = "[0-9]{1,18}"
MOST = 6  # most differences between recipes that are shown
Record = dict[str, Any]  # numbers as they are written


def record(line: bytes) -> Record | None:
    """Return a line's record, or None if it has none."""
    try:
        found = json.loads(line.decode(), parse_float=str, parse_int=str)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def records(log: Path) -> Iterator[Record]:
    """Yield the records of a log. An unfinished line is skipped if a run record follows it."""
    unfinished = 0
    with naming(log), open(log, "rb") as file:
        for number, line in enumerate(file, 1):
            found = record(line)
            if unfinished and (found is None or "run" not in found):
                break
            if found is None:
                unfinished = number
            else:
                unfinished = 0
                yield found
        else:
            if not unfinished or not line.endswith(b"\n"):
                return
    raise Bad(f"{log}:{unfinished}: no record of JSON")


def steps(log: Path) -> tuple[dict[int, Record], list[str]]:
    """Return the numbers of each step, and the lines of the last run's recipe."""
    found: dict[int, Record] = {}
    recipe: list[str] = []
    for line in records(log):
        given = line.get("recipe")
        if "run" in line and isinstance(given, list):
            recipe = [x for x in given if isinstance(x, str)]
        if "step" not in line:
            continue
        number = line.pop("step")
        if not isinstance(number, str) or not re.fullmatch(STEP, number):
            raise Bad(f"{log}: a record's step is not a number")
        numbers = {
            key: "null" if x is None else x
            for key, x in line.items()
            if key not in TIMES and (x is None or isinstance(x, str))
        }
        found.setdefault(int(number), {}).update(numbers)
    return found, recipe


def changes(a: Sequence[str], b: Sequence[str]) -> list[str]:
    """Return the keys in which two recipes differ, each with both values."""
    one, other = (
        dict(line.split(": ", 1) for line in lines if ": " in line) for lines in (a, b)
    )
    return [
        f"{key}: {one.get(key, 'not there')} -> {other.get(key, 'not there')}"
        for key in one | other
        if one.get(key) != other.get(key)
    ]


def differences(a: Record, b: Record) -> list[str]:
    return [
        f"{key} {x} -> {b[key]}" for key, x in a.items() if key in b and b[key] != x
    ]


def compare(one: Path, other: Path) -> int:
    (a, recipe), (b, its) = steps(one), steps(other)
    if recipe and its and (found := changes(recipe, its)):
        more = f", and {len(found) - MOST} more" if len(found) > MOST else ""
        say(f"two recipes: {'; '.join(found[:MOST])}{more}")
    both = sorted(a.keys() & b.keys())
    if not both:
        raise Bad(f"{one} and {other} have no step in common")
    among = f"of {len(both)} steps that both have"
    wrong = [step for step in both if differences(a[step], b[step])]
    if not wrong:
        say(f"equal: all {among}, the last is {both[-1]}")
        return 0
    first = wrong[0]
    told = ", ".join(differences(a[first], b[first]))
    say(f"step {first}: {told}")
    say(f"{len(wrong)} {among} differ")
    return 1


def main(words: Sequence[str]) -> int:
    parser = Parser(
        prog="run compare",
        description=__doc__.partition("LOG LOG\n\n")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("log", nargs=2, type=Path, metavar="LOG")
    return code_of("run compare", compare, *parser.parse_args(words).log)


if __name__ == "__main__":
    command(main)
