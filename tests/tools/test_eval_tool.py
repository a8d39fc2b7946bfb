"""test_eval_tool.py -- tests the command ./run eval: multiple choice questions in llm.c's format,
and out/train's result on them."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import encoding
import numpy as np
import pytest
from encoding import Encoder

from tests.lib import choices, law, trainer
from tests.lib.choices import Example


def run(*words: object, **options) -> subprocess.CompletedProcess[str]:
    return trainer.tool("eval.py", *words, **options)


def questions(folder: Path, *lines: object) -> Path:
    path = folder / "questions.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def question(context: str, choices: list[str], label: int) -> dict:
    return {"context": context, "choices": choices, "label": label}


def keeper(folder: Path, code: int = 0) -> Path:
    """Return a program that keeps its input file and prints a result."""
    path = folder / "program"
    path.write_text(
        "#!/bin/sh\necho start\n"
        f'echo "$1 $2 $3 $4 $5" >{folder}/words\ncp "$6" {folder}/kept\n'
        f'echo "eval $6: 1 of 2 (0.5000)"\necho told >&2\nexit {code}\n'
    )
    path.chmod(0o755)
    return path


@pytest.mark.slow
def test_what_a_model_has_learnt(tmp_path: Path) -> None:
    """A model that has learnt to count by three in bytes, as its config.json says, answers
    right."""
    binary = trainer.build(
        trainer.generate(
            law.path("gpt"),
            "train.optimizer.lr=0.01",
            "train.global_batch=12",
        )
    )
    trainer.write_tokens(tmp_path / "tokens", np.arange(60000) * 3 % 256)
    weights = tmp_path / "weights"
    options = ("--data", tmp_path / "tokens", "--steps", 60)
    trainer.sh(binary, *options, "--save", weights)
    path = questions(
        tmp_path,
        question("147", [":@CF", "=@CF", "=@CA"], 1),
        question("147:=@", ["Z", "CFI"], 1),
        question("ADG", ["X", "JMPS"], 0),
    )
    done = run(weights, path, "--program", binary)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"eval {path}: 2 of 3 (0.6667)\n"
    longest = question("1" * 40, ["11"], 0)
    done = run(weights, questions(tmp_path, longest), "--program", binary)
    assert done.returncode == 2 and done.stdout == ""
    assert ": --eval questions.jsonl: example 0: a context of 40" in done.stderr


def test_the_file_is_llm_cs(tmp_path: Path) -> None:
    """The file is llm.c's: a tokenizer's tokens, with its leading tokens before the context
    alone."""
    recipe = encoding.trained(iter(["some text of another kind"]), 300)
    assert recipe.file
    made = json.loads(recipe.file)
    made["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": encoding.END, "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [
            {"Sequence": {"id": "A", "type_id": 0}},
            {"Sequence": {"id": "B", "type_id": 0}},
        ],
        "special_tokens": {
            encoding.END: {
                "id": encoding.END,
                "ids": [0],
                "tokens": [encoding.END],
            }
        },
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(made))
    ids = Encoder(recipe).ids
    asked = [
        ("some text", [" of", " of another", " né"], 2),
        ("kind 🙂", [" x"], 0),
    ]
    path = questions(tmp_path, *(question(*x) for x in asked))
    done = run(tmp_path, path, "--program", keeper(tmp_path))
    assert (done.returncode, done.stdout) == (
        0,
        f"eval {path}: 1 of 2 (0.5000)\n",
    ), done.stderr
    assert done.stderr == "told\n"
    words = (tmp_path / "words").read_text()
    assert words == f"--load {tmp_path} --steps 0 --eval\n"
    found = choices.parsed((tmp_path / "kept").read_bytes())
    assert found == [
        Example((0, *ids(context)), [tuple(ids(x)) for x in each], label)
        for context, each, label in asked
    ]


@pytest.mark.parametrize(
    "line,told",
    [
        ([], "not an object"),
        ({"choices": ["a"], "label": 0}, "context: must be a string"),
        (question("", ["a"], 0), "context: must have at least one token"),
        (question("a", [], 0), "choices: must be a list of strings"),
        (question("a", ["b", ""], 0), "choices: must have at least one token"),
        (question("a", ["b", 1], 0), "choices: must be a string"),
        (question("a", ["b"], 1), "label: must be from 0 to 0"),
        (question("a", ["b"], True), "label: must be from 0 to 0"),
        (question("a", ["\ud800"], 0), "half a UTF-16 surrogate pair is not text"),
        (question("a" * 40000, ["b"], 0), "the format allows at most 65535"),
    ],
)
def test_lines_that_are_no_questions(tmp_path: Path, line: object, told: str) -> None:
    path = questions(tmp_path, question("a", ["b", "c"], 1), line)
    options = ("--tokenizer", "bytes", "--program", keeper(tmp_path))
    done = run(tmp_path, path, *options)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"run eval: {path}:2: " in done.stderr and told in done.stderr
    assert not (tmp_path / "kept").exists()


def test_tokens_that_the_format_cannot_hold(tmp_path: Path) -> None:
    """Tokens above 65535 are refused, because the format cannot hold them."""
    made = {
        "model": {
            "type": "WordLevel",
            "vocab": {"a": 65535, "b": 65536},
            "unk_token": "a",
        },
        "pre_tokenizer": {"type": "Whitespace"},
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(made))
    program = keeper(tmp_path)
    path = questions(tmp_path, question("a a", ["a"], 0))
    assert run(tmp_path, path, "--program", program).returncode == 0
    path = questions(tmp_path, question("a", ["a b"], 0))
    done = run(tmp_path, path, "--program", program)
    assert done.returncode == 2 and "token 65536 is above 65535" in done.stderr


def test_what_the_program_says_is_told(tmp_path: Path) -> None:
    path = questions(tmp_path, question("a", ["b"], 0))
    options = ("--tokenizer", "bytes", "--program")
    done = run(tmp_path, path, *options, keeper(tmp_path, code=3))
    assert (done.returncode, done.stderr) == (3, "told\n")
    done = run(tmp_path, path, *options, tmp_path / "none")
    assert done.returncode == 2 and "none: does not exist" in done.stderr
    done = run(tmp_path, tmp_path / "no", *options, keeper(tmp_path))
    assert done.returncode == 2 and "no: No such file" in done.stderr
    path.write_text("")
    done = run(tmp_path, path, *options, keeper(tmp_path))
    assert done.returncode == 2 and f"{path}: empty" in done.stderr


def test_the_program_is_named_from_where_one_stands(tmp_path: Path) -> None:
    keeper(tmp_path)
    path = questions(tmp_path, question("a", ["b"], 0))
    options = ("--tokenizer", "bytes", "--program", "./program")
    done = run(tmp_path, path, *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"eval {path}: 1 of 2 (0.5000)\n"
