"""trained.py -- shared parts of the commands that run a trained model: its folder, its tokenizer,
the program."""

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
    """Return a parser with DIR, --tokenizer and --program."""
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
        "--base",
        type=Path,
        metavar="DIR",
        help="the model of adapters (default: the one that they name)",
    )
    found.add_argument(
        "--program",
        type=Path,
        metavar="FILE",
        help="the trainer of the model (default: the one in out/ or build/ that saved DIR, or "
        "out/train)",
    )
    return found


BASE = "base_model_name_or_path"


def places(chosen: argparse.Namespace) -> None:
    """Set the folders of --load and --adapter: DIR, or for adapters the folder of their base."""
    chosen.load, chosen.adapter = chosen.dir, None
    known = chosen.dir / "adapter_config.json"
    if not known.exists() or any(chosen.dir.glob("model*.safetensors")):
        return
    base = str(chosen.base or config(known).get(BASE))
    # ./run's commands work in ROOT, and the adapters name the base as it was typed there
    there = [x for x in (Path(base), ROOT / base) if x.is_dir()]
    if not there:
        raise Bad(
            f"{known}: {BASE}: {base} is not a folder; --base DIR names the model"
        )
    chosen.load, chosen.adapter = there[0], chosen.dir


def usual(folder: Path) -> str:
    """Return the folder's tokenizer, or "bytes" if it has none and tokens are bytes."""
    known = folder / "config.json"
    if not (folder / "tokenizer.json").exists() and known.exists():
        if config(known).get("vocab_size") == 256:
            return "bytes"
    return str(folder)


def saved_by(folder: Path) -> list[str]:
    """Return the hashes of plan and layout that a program wrote into the folder's weights. A
    damaged file is ignored: the program that loads it reports the error."""
    files = sorted(folder.glob("model*.safetensors"))
    for path in files or folder.glob("adapter_model.safetensors"):
        with contextlib.suppress(Bad):
            head = int.from_bytes(part(path, 0, 8), "little")
            if not 0 < head < HEADER_MAX:
                continue
            about = parsed(part(path, 8, head), "").get("__metadata__")
            if isinstance(about, dict):
                return [x for x in map(about.get, ("plan", "layout")) if is_text(x)]
    return []


def version(path: Path) -> str:
    """Return the --version text of a program, "" if it cannot be run."""
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True)
    except (OSError, UnicodeError):
        return ""
    return done.stdout


def program(folder: Path) -> Path:
    """Return the newest program with the plan that the folder's weights name, else one with their
    layout, else out/train. Print which one, and its model."""
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
    """Return the tokenizer's recipe, and set the program.

    Raises Bad if there is no program.
    """
    places(chosen)
    chosen.program = chosen.program or program(chosen.dir)
    if not chosen.program.exists():
        raise Bad(
            f"{chosen.program}: does not exist; make it: gen/zgen SPEC -o out/train.c && "
            f"ninja out/train"
        )
    return encoding.read(chosen.tokenizer or usual(chosen.load))


def code(returned: int) -> int:
    """Return a program's exit code, 128 + N if signal N ended it."""
    return returned if returned >= 0 else 128 - returned
