"""trained.py -- what the commands share that run a trained model: its folder, its tokenizer, the
program."""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
from pathlib import Path

import encoding
from checkpoint import HEADER_MAX, Bad, is_text, parsed, part
from encoding import Recipe
from pretrained import config
from zg.commandline import Parser

ROOT = Path(__file__).resolve().parents[1]


def say(text: str) -> None:
    print(text, file=sys.stderr)


def parser(prog: str, description: str) -> argparse.ArgumentParser:
    """With DIR, --tokenizer and --program"""
    found = Parser(
        prog=prog,
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    found.add_argument("dir", type=Path, metavar="DIR")
    found.add_argument(
        "--tokenizer",
        metavar="FILE",
        help="tokenizer.json, its folder, or `bytes` (default: DIR's)",
    )
    found.add_argument(
        "--program",
        type=Path,
        metavar="FILE",
        help="the model's (default: that of out/ or build/ which saved DIR, or out/train)",
    )
    return found


def usual(folder: Path) -> str:
    """The folder's tokenizer; where it has none and tokens are bytes, these."""
    known = folder / "config.json"
    if not (folder / "tokenizer.json").exists() and known.exists():
        if config(known).get("vocab_size") == 256:
            return "bytes"
    return str(folder)


def saved_by(folder: Path) -> list[str]:
    """Returns the hashes of plan and layout that a program wrote into the folder's weights. The
    program that loads a damaged file tells what is wrong with it."""
    for path in sorted(folder.glob("model*.safetensors")):
        with contextlib.suppress(Bad):
            head = int.from_bytes(part(path, 0, 8), "little")
            if not 0 < head < HEADER_MAX:
                continue
            about = parsed(part(path, 8, head), "").get("__metadata__")
            if isinstance(about, dict):
                return [
                    x for x in map(about.get, ("plan", "layout")) if is_text(x)
                ]
    return []


def version(path: Path) -> str:
    """Returns what a program says of itself; nothing where it cannot be run."""
    try:
        done = subprocess.run(
            [path, "--version"], capture_output=True, text=True
        )
    except (OSError, UnicodeError):
        return ""
    return done.stdout


def program(folder: Path) -> Path:
    """Returns the newest program with the plan that the folder's weights name, else one with their
    layout, else out/train; tells which, and of which model."""
    usual = ROOT / "out" / "train"
    there = sorted(
        (
            path
            for path in (usual, *ROOT.glob("build/*/train"))
            if path.is_file() and os.access(path, os.X_OK)
        ),
        key=lambda path: path.stat().st_mtime,
        reverse=True,
    )
    told = {path: version(path) for path in there}
    fits = [
        path
        for wanted in saved_by(folder)
        for path in there
        if wanted in told[path].split()
    ]
    found = [*fits, usual][0]
    if told.get(found):
        say(f"program: {found}, of model {told[found].partition(',')[0]}")
    return found


def recipe(chosen: argparse.Namespace) -> Recipe:
    """Returns the tokenizer's recipe; sets the program, which must be there."""
    chosen.program = chosen.program or program(chosen.dir)
    if not chosen.program.exists():
        raise Bad(
            f"{chosen.program}: there is none; gen/zgen SPEC -o out/train.c, ninja out/train"
        )
    return encoding.read(chosen.tokenizer or usual(chosen.dir))


def code(returned: int) -> int:
    """A program's exit code; 128 + N where signal N has ended it."""
    return returned if returned >= 0 else 128 - returned
