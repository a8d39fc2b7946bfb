"""test_jobs.py -- what docs/training.md does by several commands, in short: from a book to text; two
sources, stopped and resumed elsewhere."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
import trainer

KJV = trainer.ROOT / "tests" / "data" / "kjv.txt"
VOCAB = 300


def tool(name: str, *words: object) -> str:
    done = trainer.tool(name, *words)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
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


def two_sources(folder: Path) -> tuple[Path, Path]:
    """A text, and a document for each verse of another, of one tokenizer."""
    text, verses = folder / "text.txt", folder / "verses.jsonl"
    told = KJV.read_text()[:40000]
    text.write_text(told[:20000])
    rows = [json.dumps({"text": verse}) for verse in told[20000:].split("\n")]
    verses.write_text("\n".join(rows) + "\n")
    made = folder / "text", folder / "verses"
    tool("data.py", "text", text, "--train-bpe", VOCAB, "-o", made[0])
    tool("data.py", "jsonl", verses, "--tokenizer", made[0], "-o", made[1])
    return made


@pytest.mark.slow
def test_two_sources_stopped_and_resumed_elsewhere(tmp_path: Path) -> None:
    """Weighted, shuffled and packed: on twice the ranks under another stage the bits of a run that
    was never stopped."""
    text, verses = two_sources(tmp_path)
    end = json.loads((verses / "meta.json").read_text())["end"]
    recipe = (
        f"model.vocab={VOCAB}",
        "train.global_batch=8",
        "train.micro_batch=1",
        "data.shuffle=true",
        "data.documents=mask",
        f"data.end={end}",
    )

    def run(stage: int, ranks: int, steps: int, *options: object) -> str:
        spec = trainer.ROOT / "model_specs" / "gpt-tiny.yaml"
        way = f"zero.stage={stage}", f"cluster.ranks={ranks}"
        program = trainer.build(trainer.generate(spec, *recipe, *way))
        said = trainer.sh(
            program,
            *("--data", f"{text}:3", "--data", f"{verses}:1"),
            *("--steps", steps, "--hash", *options),
        )
        return re.search("^weights .*$", said, re.M)[0]

    kept = ("--checkpoints", tmp_path / "checkpoints")
    half = run(2, 2, 5, *kept)
    whole = run(3, 4, 10, *kept)
    assert half != whole == run(0, 1, 10)
