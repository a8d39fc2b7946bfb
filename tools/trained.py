"""trained.py -- what the commands share that run a trained model: its folder, its tokenizer, the
program."""

from __future__ import annotations

import argparse
from pathlib import Path

import encoding
from checkpoint import Bad
from encoding import Recipe
from pretrained import config
from zg.commandline import Parser


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
        "--program", type=Path, default=Path("out/train"), metavar="FILE"
    )
    return found


def usual(folder: Path) -> str:
    """The folder's tokenizer; where it has none and tokens are bytes, these."""
    known = folder / "config.json"
    if not (folder / "tokenizer.json").exists() and known.exists():
        if config(known).get("vocab_size") == 256:
            return "bytes"
    return str(folder)


def recipe(chosen: argparse.Namespace) -> Recipe:
    """How its text becomes tokens; the program must be there."""
    if not chosen.program.exists():
        raise Bad(
            f"{chosen.program}: there is none; gen/zgen SPEC -o out/train.c, ninja out/train"
        )
    return encoding.read(chosen.tokenizer or usual(chosen.dir))


def code(returned: int) -> int:
    """A program's exit code; 128 + N where signal N has ended it."""
    return returned if returned >= 0 else 128 - returned
