"""test_tokens.py -- tests the demo's token files, and its bigram model for comparison."""

import importlib.util
import itertools
import math
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
TEXT = ROOT / "tests" / "data" / "kjv.txt"
T = 128


def load():
    found = importlib.util.spec_from_file_location(
        "demo_tokens", ROOT / "tools" / "tokens.py"
    )
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


tokens = load()


def make(text: Path, folder: Path, *most: str) -> subprocess.CompletedProcess[str]:
    files = [text, folder / "train", folder / "val"]
    return subprocess.run(
        [sys.executable, ROOT / "tools" / "tokens.py", *files, str(T), *most],
        env={**os.environ, "PYTHONPATH": str(ROOT / "gen")},
        capture_output=True,
        text=True,
    )


def test_the_bigram_loss_is_that_of_a_count_by_hand():
    train, val = b"abracadabra", b"abacab"
    pairs, firsts = Counter(itertools.pairwise(train)), Counter(train[:-1])
    wanted = [
        -math.log((pairs[a, b] + 0.1) / (firsts[a] + 25.6))
        for a, b in itertools.pairwise(val)
    ]
    found = tokens.bigram_loss(
        np.frombuffer(train, np.uint8), np.frombuffer(val, np.uint8)
    )
    assert found == pytest.approx(sum(wanted) / len(wanted), rel=1e-12)


def test_the_files_hold_the_text_and_whole_samples(tmp_path):
    assert make(TEXT, tmp_path).returncode == 0
    text = TEXT.read_bytes()
    train, val = (np.fromfile(tmp_path / name, "<u2") for name in ("train", "val"))
    cut = len(text) * 9 // 10
    assert (
        len(val) % T == 1 and bytes(val.astype(np.uint8)) == text[cut : cut + len(val)]
    )
    assert len(text) - cut - len(val) < T
    assert len(train) == cut and Counter(train.tolist()) == Counter(text[:cut])


def test_a_part_to_validate_on(tmp_path):
    """The part for validation has whole samples, and the bigram's loss is over these."""
    done = make(TEXT, tmp_path, str(10 * T + 7))
    train, val = (np.fromfile(tmp_path / name, "<u2") for name in ("train", "val"))
    assert len(val) == 10 * T + 1
    text = TEXT.read_bytes()
    cut = len(text) * 9 // 10
    assert len(train) == cut
    assert bytes(val.astype(np.uint8)) == text[cut : cut + len(val)]
    bigram = tokens.bigram_loss(np.frombuffer(text[:cut], np.uint8), val)
    assert done.stdout == f"{bigram:.4f}\n"


def test_pieces_of_the_text_are_stirred_and_none_is_lost():
    n = tokens.PIECE * T
    train = np.arange(10 * n + 7)
    stirred = tokens.stir(train, T)
    pieces = stirred[: 10 * n].reshape(10, n)
    assert (np.diff(pieces) == 1).all() and sorted(pieces[:, 0]) == list(
        range(0, 10 * n, n)
    )
    assert (stirred[10 * n :] == train[10 * n :]).all()
    assert (stirred != train).any()


@pytest.mark.parametrize("size", [0, 1, 20 * (T + 1) - 1])
def test_a_text_too_short_is_refused_and_nothing_written(tmp_path, size):
    (tmp_path / "text").write_bytes(b"x" * size)
    done = make(tmp_path / "text", tmp_path)
    assert done.returncode == 2 and f"{size} bytes" in done.stderr and not done.stdout
    assert not (tmp_path / "train").exists() and "Traceback" not in done.stderr


def test_a_text_that_is_not_there_is_named(tmp_path):
    done = make(tmp_path / "nothing", tmp_path)
    assert done.returncode == 2 and "nothing: No such file" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_full_disk_is_told_with_its_file(tmp_path: Path) -> None:
    files = [TEXT, "/dev/full", tmp_path / "val"]
    done = subprocess.run(
        [sys.executable, ROOT / "tools" / "tokens.py", *files, str(T)],
        env={**os.environ, "PYTHONPATH": str(ROOT / "gen")},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout, done.stderr) == (
        3,
        "",
        "/dev/full: No space left on device\n",
    )
