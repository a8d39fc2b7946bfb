"""test_jobs.py -- what docs/training.md does by several commands, in short: from a book to text."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from pathlib import Path

import trainer
from patience import LIMIT

KJV = trainer.ROOT / "tests" / "data" / "kjv.txt"
VOCAB = 300


def tool(name: str, *words: object) -> str:
    done = subprocess.run(
        [sys.executable, str(trainer.ROOT / "tools" / name), *map(str, words)],
        capture_output=True,
        text=True,
        timeout=LIMIT,
        env={"PYTHONPATH": str(trainer.ROOT / "gen")},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_book_becomes_a_model(tmp_path: Path) -> None:
    """Its tokens are learnt better than chance has them, and what it draws is text again."""
    book, weights = tmp_path / "book", tmp_path / "weights"
    tool(
        "data.py", "text", KJV, "--train-bpe", VOCAB, "--val", "5%", "-o", book
    )
    spec = trainer.ROOT / "model_specs" / "gpt-tiny.yaml"
    keys = (f"model.vocab={VOCAB}", "train.optimizer.lr=0.01")
    program = trainer.build(trainer.generate(spec, *keys))
    said = trainer.sh(
        program,
        *("--data", book, "--val", book, "--steps", 60, "--save", weights),
    )
    loss = float(re.search(r"^val loss (.*)$", said, re.M)[1])
    assert loss < math.log(VOCAB) - 1
    text = tool(
        "sample.py",
        *(weights, "--tokenizer", book, "--program", program),
        *("--prompt", "And God said", "--tokens", 20),
    )
    assert re.search("[a-z]{2}", text)
