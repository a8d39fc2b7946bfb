"""trained.py -- what the commands share that run a trained model: its folder, its tokenizer, the
program."""

from __future__ import annotations

import argparse
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
    """Returns the hashes of plan and layout that a program wrote into the folder's weights."""
    for path in sorted(folder.glob("model*.safetensors")):
        head = int.from_bytes(part(path, 0, 8), "little")
        if 0 < head < HEADER_MAX:
            found = parsed(part(path, 8, head), f"{path}: header")
            about = found.get("__metadata__")
            if isinstance(about, dict):
                return [
                    x for x in map(about.get, ("plan", "layout")) if is_text(x)
                ]
    return []


def program(folder: Path) -> Path:
    """Returns the newest program with the plan that the folder's weights name, else one with their
    layout, else out/train; tells which, where there are several."""
    usual = ROOT / "out" / "train"
    there = sorted(
        filter(Path.exists, (usual, *ROOT.glob("build/*/train"))),
        key=lambda path: path.stat().st_mtime,
        reverse=True,
    )
    if len(there) < 2:
        return there[0] if there else usual
    told = {}
    for path in there:
        done = subprocess.run(
            [path, "--version"], capture_output=True, text=True
        )
        told[path] = done.stdout.split()
    for wanted in saved_by(folder):
        for path in there:
            if wanted in told[path]:
                say(f"program: {path}")
                return path
    say(f"program: {usual}")
    return usual


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
