"""results.py -- tables of benchmarks: as text, and in the files of bench/results/.

A file is one section of docs/performance.md, which report.py makes; its keys are the fields of
Result. A benchmark's `--out FILE` writes FILE. If FILE exists, its title and both texts stay.
"""

from __future__ import annotations

import shlex
import sys
import textwrap
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import yaml

WIDTH = 100  # of a line of text
# Programs that another command starts.
STARTED = {"bench": "./run bench", "peers": "./run bench --peers"}


@dataclass(frozen=True)
class Table:
    """A table of texts."""

    columns: list[str]
    rows: list[list[str]]


Block = Table | str  # a string is one paragraph


@dataclass(frozen=True)
class Result:
    """A section: a run of a command, between texts that are written by hand."""

    title: str
    command: str = ""
    date: str = ""
    load: str = ""  # of the machine by others
    machine: str = ""  # CPU, compiler and flags, if not report.USUAL
    before: str = ""  # Markdown
    found: list[Block] = field(default_factory=list)  # written by the command
    after: str = ""  # Markdown


def table(columns: str, rows: Iterable[str]) -> Table:
    """Return a table of lines whose cells stand between " | "."""
    return Table(columns.split(" | "), [row.split(" | ") for row in rows])


def text(blocks: Iterable[Block]) -> str:
    """Return blocks as Markdown."""
    return "\n\n".join(
        markdown(block)
        if isinstance(block, Table)
        else textwrap.fill(block, WIDTH, break_long_words=False, break_on_hyphens=False)
        for block in blocks
    )


def markdown(made: Table) -> str:
    lines = [
        "|" + "|".join(f" {cell} " if cell else " " for cell in row) + "|"
        for row in [made.columns, *made.rows]
    ]
    lines.insert(1, "|" + "---|" * len(made.columns))
    return "\n".join(lines)


# ---- files


class Dumper(yaml.SafeDumper):
    """Writes all scalars as plain text, rows in one line, and texts of lines as blocks."""

    yaml_implicit_resolvers: dict = {}


def _text(dumper: yaml.SafeDumper, said: str) -> yaml.Node:
    style = "|" if "\n" in said else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", said, style)


Dumper.add_representer(str, _text)


def write(path: Path, result: Result) -> None:
    made: dict[str, Any] = {
        f.name: said for f in fields(result) if (said := getattr(result, f.name))
    }
    if "found" in made:
        made["found"] = [vars(b) if isinstance(b, Table) else b for b in result.found]
    path.write_text(
        yaml.dump(
            made, Dumper=Dumper, sort_keys=False, default_flow_style=None, width=10**6
        )
    )


def read(path: Path) -> Result:
    made = yaml.load(path.read_text(), yaml.BaseLoader)
    made["found"] = [
        Table(**block) if isinstance(block, dict) else block
        for block in made.get("found", [])
    ]
    return Result(**made)


def command() -> str:
    """Return the command line of this program, without --out."""
    name, words = Path(sys.argv[0]).stem, sys.argv[1:]
    if "--out" in words:
        at = words.index("--out")
        del words[at : at + 2]
    words = [word for word in words if not word.startswith("--out=")]
    start = STARTED.get(name, f".venv/bin/python bench/{name}.py")
    return " ".join([start, *map(shlex.quote, words)])


def finish(
    head: list[str], found: list[Block], out: Path | None, load: str = ""
) -> None:
    """Print a run's tables, and write them to a file of results.

    head: lines that tell the machine; load: its load by others.
    """
    print("\n".join([*head, *filter(None, [load])]), text(found), sep="\n\n")
    if not out:
        return
    written = read(out) if out.exists() else Result(title=out.stem)
    date, machine = time.strftime("%Y-%m-%d"), "; ".join(head)
    ran = Result(written.title, command(), date, load, machine, found=found)
    write(out, replace(ran, before=written.before, after=written.after))
