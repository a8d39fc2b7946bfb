"""test_long_data.py -- tests token files of many GB: how much a start reads, and when a token
beyond the vocabulary is found."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.lib import files, program

T = 65536  # of the program below: 3 million tokens per step
STEP = program.MICRO_BATCHES * program.B * T
WHOLE, PLACES, CHUNK = 32 << 20, 256, 16384  # tokens that a start checks
LONG = (4 << 30) + 1  # tokens: 8 GiB, of which the disk stores the first MiB
PLACE = WHOLE + (LONG - WHOLE) * 200 // PLACES  # the 200th place of the sample
LOOK = 1 << 20  # bytes
BAD = 60000


@pytest.fixture(scope="session")
def trainer() -> Path:
    """Return program.c with long samples: tokens after the first 64 MiB come after a dozen
    steps."""
    return program.built("plain", f"-DSEQUENCE={T}")


@pytest.fixture(scope="session")
def reader() -> Path:
    return files.build("runtime/data.c")


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    """Return a sparse file; its start has all tokens, so it looks like tokens."""
    path = tmp_path / "tokens.bin"
    np.random.default_rng(1).integers(0, program.VOCAB, 1 << 19).astype("<u2").tofile(
        path
    )
    with path.open("r+b") as file:
        file.truncate(2 * LONG)
    return path


def put(path: Path, at: int, token: int = BAD) -> None:
    with path.open("r+b") as file:
        file.seek(2 * at)
        file.write(token.to_bytes(2, "little"))


def bytes_read() -> int:
    """Return the bytes read by this process and all its ended children."""
    return int(Path("/proc/self/io").read_text().split()[1])


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 3, 300])
def test_a_start_reads_64_mib_and_a_sample(
    reader: Path, tokens: Path, ranks: int
) -> None:
    """A start reads 64 MiB and a sample. The ranks share them, and each also looks at the first
    MiB. The last MiB here is for the program and its pipes."""
    read = {}
    for rank in sorted({0, 1, ranks // 2, ranks - 1} & set(range(ranks))):
        before = bytes_read()
        files.run(
            reader,
            tokens,
            T,
            program.VOCAB,
            program.IGNORE,
            0,
            1 << 40,
            rank,
            ranks,
            0,
            0,
        )
        read[rank] = bytes_read() - before
    share = 2 * (WHOLE // ranks + -(-PLACES // ranks) * CHUNK)
    assert all(share // 2 < n - LOOK < share + (1 << 20) for n in read.values()), read


@pytest.mark.slow
@pytest.mark.parametrize(
    "at", [0, WHOLE - 1, WHOLE, WHOLE + CHUNK - 1, PLACE, PLACE + CHUNK - 1]
)
def test_what_is_checked_is_found_before_the_first_step(
    trainer: Path, tokens: Path, at: int
) -> None:
    put(tokens, at)
    found = program.train(trainer, tokens, steps=10**6, RANKS=3)
    assert found.code == 2 and f"{tokens}: token {at} is {BAD}" in found.err
    assert "step 1/" not in found.err


@pytest.mark.slow
def test_the_rest_is_found_when_it_comes(
    trainer: Path, tokens: Path, tmp_path: Path
) -> None:
    """A wrong token after the first place of the sample is found when its step comes, and nothing
    is saved then."""
    at = WHOLE + CHUNK + 5
    put(tokens, at)
    done = program.train(
        trainer, tokens, "--log", tmp_path / "log", steps=at // STEP, RANKS=2
    )
    assert done.code == 0, done.err
    found = program.train(
        trainer,
        tokens,
        "--log",
        tmp_path / "log",
        "--save",
        tmp_path / "out",
        steps=at // STEP + 3,
        RANKS=2,
    )
    assert (
        found.code == 2
        and f"{tokens}: token {at} is {BAD}; the vocabulary has" in found.err
    )
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    ends = [n for n, line in enumerate(lines) if "end" in line]
    assert ends == [at // STEP + 1]  # the second run has none
    assert [line["step"] for line in lines[ends[0] + 2 :]] == list(
        range(1, at // STEP + 1)
    )
    assert not list((tmp_path / "out").iterdir())


def test_so_it_is_in_validation(trainer: Path, tokens: Path) -> None:
    at = WHOLE + CHUNK + 5
    put(tokens, at)
    found = program.run(trainer, "--val", tokens, "--steps", 0, RANKS=2)
    assert (
        found.code == 2
        and f"{tokens}: token {at} is {BAD}; the vocabulary has" in found.err
    )
