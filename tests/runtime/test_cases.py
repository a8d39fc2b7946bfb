"""test_cases.py -- runs commands on the files of tests/cases and compares values that other
programs have computed.

Each file is the smallest that shows its case. Tokens and numbers of parameters are transformers'
(5.24), losses are torch's in float64.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer
from zg import main

from tests.lib import trainer
from tests.lib.patience import LIMIT

CASES = trainer.ROOT / "tests" / "cases"
KEYS = (
    "train.sequence=16",
    "train.global_batch=2",
    "train.micro_batch=1",
    "targets=[cpu]",
)
LOSS = 4.86546637476451  # of cases/plain on cases/uint16.bin
NONE = 65535  # a label that stands for no target


@pytest.fixture(scope="session")
def train() -> Path:
    keys = (word for key in KEYS for word in ("--set", key))
    chosen = main.arguments(["--from", str(CASES / "plain"), *keys])
    return trainer.build(main.text(chosen))


def ran(program: Path, command: str) -> subprocess.CompletedProcess[str]:
    """Run a command whose paths start at tests/cases; `train` is the program."""
    root = trainer.ROOT
    first, *words = command.split()
    programs = {
        "train": [program],
        "data": [sys.executable, root / "tools" / "data.py"],
        "zgen": [root / "gen" / "zgen"],
    }
    return subprocess.run(
        [*programs[first], *words],
        cwd=CASES,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        env={**os.environ, "PYTHONPATH": str(root / "gen")},
    )


def zgen(name: str) -> str:
    return f"zgen --from config_keys/{name} --set train.micro_batch=1 --emit explain"


@pytest.mark.parametrize(
    "command,code,told",
    [
        (zgen("unsloth"), 0, "1,235,814,400 parameters"),
        (zgen("unsloth"), 0, "without effect on training: unsloth_fixed"),
        (zgen("nulls"), 0, "134,515,008 parameters"),
        (zgen("full_dump"), 0, "134,515,008 parameters"),
        (
            "zgen ../../model_specs/gpt-tiny.yaml --zero messages/accelerate.yaml",
            2,
            "an Accelerate config: it has compute_environment, distributed_type, "
            "deepspeed_config; allowed: the ds_config.json ",
        ),
        (
            "data jsonl messages/sharegpt.jsonl --tokenizer chatml -o {out}",
            2,
            "no message of the assistant, so nothing to train on; the roles are: user",
        ),
        (
            "train --load messages/lfs --val uint16.bin --steps 0",
            2,
            "is a Git LFS pointer, not the file itself",
        ),
        (
            "train --load messages/prefix --val uint16.bin --steps 0",
            2,
            'of the 11 names there 11 have "_orig_mod.", which is torch.compile\'s',
        ),
        (
            "train --load plain --data int64.bin --tokens uint32 --steps 1",
            2,
            "looks like int64 (every second 32-bit word is 0)",
        ),
    ],
)
def test_what_is_told(
    train: Path, tmp_path: Path, command: str, code: int, told: str
) -> None:
    done = ran(train, command.format(out=tmp_path / "out"))
    assert done.returncode == code, done.stderr
    assert told in done.stdout + done.stderr


def test_int64_is_not_to_be_read_as_uint32(train: Path) -> None:
    done = ran(train, "train --load plain --data int64.bin --steps 1")
    assert done.returncode == 2 and "int64" in done.stderr
    assert "--tokens" not in done.stderr


@pytest.mark.parametrize("folder", ["plain", "tied_by_head"])
def test_the_loss_of_weights(train: Path, tmp_path: Path, folder: str) -> None:
    """The loss matches up to the last printed digit; the sums of f32 are off by less."""
    log = tmp_path / "log"
    load = f"--load {folder} --val uint16.bin --steps 0 --log {log}"
    done = ran(train, f"train {load}")
    assert f"val loss {LOSS:.6f} over 64 targets" in done.stdout
    _, found, *_ = map(json.loads, log.read_text().splitlines())
    assert abs(found["val_loss"] - LOSS) < 5e-7


def test_a_step_without_a_target_has_no_loss(train: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    done = ran(train, f"train --load plain --data no_target --steps 2 --log {log}")
    assert done.returncode == 0 and "step 2/2  loss none" in done.stderr
    _, first, second, _ = map(json.loads, log.read_text().splitlines())
    assert abs(first["loss"] - 4.910696919) < 5e-7 and first["valid"] == 8
    assert second["loss"] is None and second["valid"] == 0


def made(
    train: Path, tmp_path: Path, file: str, folder: str
) -> tuple[list[int], str, str]:
    """Return the tokens, the text that is learned, and the messages."""
    out = tmp_path / "out"
    done = ran(train, f"data jsonl {file} --tokenizer {folder} -o {out}")
    assert done.returncode == 0, done.stderr
    names = ("train.bin", "train.labels.bin")
    tokens, labels = (np.fromfile(out / name, "<u2") for name in names)
    tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
    learned = tokenizer.decode(labels[labels != NONE], False)
    return tokens.tolist(), learned, done.stdout


def test_tokens_of_a_tokenizers_config(train: Path, tmp_path: Path) -> None:
    """added_tokens_decoder adds tokens 258 and 259, and 257 ends the document."""
    folder = "tokens_in_config"
    tokens, _, _ = made(train, tmp_path, f"{folder}/chat.jsonl", folder)
    wanted = """258 84 82 68 81 198 71 72 259 198 258 64 82 82 72 82 83 64 77 83 198 88 68 82 259
        198 257"""
    assert tokens == [*map(int, wanted.split())]


def test_a_message_of_weight_0_is_not_learned(train: Path, tmp_path: Path) -> None:
    _, learned, _ = made(train, tmp_path, "weight0.jsonl", "chatml")
    assert learned == "RIGHT<|im_end|>\n"


def test_an_answer_without_an_end_is_told(train: Path, tmp_path: Path) -> None:
    folder = "no_end_of_turn"
    _, learned, told = made(train, tmp_path, f"{folder}/chat.jsonl", folder)
    assert learned == "yes" and "(no end of turn)" in told
