"""eval.py -- counts the multiple-choice questions that a trained model answers right.

eval.py DIR FILE.jsonl

DIR has the weights, and the tokenizer (tokenizer.json) unless --tokenizer names another; the
program must have been made for the model. Each line of FILE is a question,

    {"context": "The sun", "choices": [" rises.", " is a cat."], "label": 0}

with one right choice; the first is 0. The model is right if that choice has the smallest mean loss
over its tokens.

Exit codes: 0; 2 an argument or a file is wrong; otherwise the program's.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import trained
from checkpoint import Bad, code_of, tell
from documents import Piece, lines, loaded
from encoding import Encoder, Ids, sound
from zg.output import naming

# llm.c's format: 256 int32, then examples of uint16.
MAGIC, VERSION, HEADER = 20240522, 1, 256
BEGIN = MOST = 65535  # first number of an example; the largest number


def text_of(piece: Piece, name: str, found: Any) -> str:
    if not isinstance(found, str):
        raise Bad(f"{piece.where}: {name}: must be a string")
    return sound(piece, found)


def texts(piece: Piece) -> tuple[str, list[str], int]:
    """Return the context, choices and label of a line."""
    found = loaded(piece.where, piece.record)
    if not isinstance(found, dict):
        raise Bad(f"{piece.where}: not an object {{...}}")
    context = text_of(piece, "context", found.get("context"))
    choices, label = found.get("choices"), found.get("label")
    if not isinstance(choices, list) or not choices:
        raise Bad(f"{piece.where}: choices: must be a list of strings")
    if type(label) is not int or not 0 <= label < len(choices):
        most = len(choices) - 1
        raise Bad(f"{piece.where}: label: must be from 0 to {most}")
    return context, [text_of(piece, "choices", x) for x in choices], label


def listed(piece: Piece, name: str, ids: Ids) -> Ids:
    """Return tokens preceded by their number."""
    if not ids:
        raise Bad(f"{piece.where}: {name}: must have at least one token")
    if max(ids) > MOST:
        raise Bad(
            f"{piece.where}: {name}: token {max(ids)} is above {MOST}, the largest in this format"
        )
    return [len(ids), *ids]


def example(piece: Piece, encoder: Encoder) -> bytes:
    context, choices, label = texts(piece)
    before = encoder.recipe.around[0]
    lists = listed(piece, "context", [*before, *encoder.ids(context)])
    for choice in choices:
        lists += listed(piece, "choices", encoder.ids(choice))
    words = [BEGIN, 0, piece.number, label, len(choices), *lists]
    words[1] = 2 * len(words)
    if words[1] > MOST:
        raise Bad(
            f"{piece.where}: {words[1]} bytes of tokens; the format allows at most {MOST}"
        )
    return np.array(words, "<u2").tobytes()


def write(source: Path, to: Path, encoder: Encoder) -> None:
    longest = count = 0
    with naming(to), open(to, "wb") as file:
        file.seek(4 * HEADER)
        for piece in lines([source]):
            if piece.number == MOST:
                raise Bad(f"{piece.where}: the format allows at most {MOST} examples")
            each = example(piece, encoder)
            longest = max(longest, len(each))
            count += 1
            file.write(each)
        if not count:
            raise Bad(f"{source}: empty")
        head = np.array([MAGIC, VERSION, count, longest], "<i4")
        file.seek(0)
        file.write(head.tobytes())


def scored(words: Sequence[str], folder: str, name: Path) -> int:
    """Run the program in its folder, so that its output names no other one. Its result is shown
    under the name that the user gave. Return the exit code."""
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, text=True, cwd=folder
    ) as running:
        assert running.stdout
        for line in running.stdout:
            told = line.removeprefix(f"eval {name.name}: ")
            if told != line:
                tell(f"eval {name}: {told}", end="")
        return trained.code(running.wait())


def evaluate(chosen: argparse.Namespace) -> int:
    encoder = Encoder(trained.recipe(chosen))
    with tempfile.TemporaryDirectory() as folder:
        write(chosen.file, Path(folder) / chosen.file.name, encoder)
        words = [chosen.program.absolute(), "--load", chosen.load.absolute()]
        if chosen.adapter:
            words += ["--adapter", chosen.adapter.absolute()]
        words += ["--steps", 0, "--eval", chosen.file.name]
        return scored([str(word) for word in words], folder, chosen.file)


def main(words: Sequence[str]) -> int:
    told = __doc__.partition("FILE.jsonl\n\n")[2]
    parser = trained.parser("run eval", told)
    parser.add_argument("file", type=Path, metavar="FILE.jsonl")
    return code_of("run eval", evaluate, parser.parse_args(words))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
