"""test_checksum.py -- tests checksums of tensors: they are equal with and without AVX-512, and in
the tool for checkpoints."""

from __future__ import annotations

from pathlib import Path

import checkpoint
import numpy as np
import pytest

from tests.lib.files import build, run


@pytest.fixture(scope="module")
def sums() -> Path:
    return build("runtime/sum.c")


def wanted(x: np.ndarray, first: int) -> str:
    return f"{checkpoint.mixture(x, first) % 2**64:016x}"


@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("n", [0, 1, 7, 8, 1000, 4099])
def test_sums_are_those_of_the_tool(
    sums: Path, tmp_path: Path, width: int, n: int
) -> None:
    bits = np.dtype(f"<u{width}")
    x = np.random.default_rng(n).integers(0, 1 << 8 * width, n, bits)
    file, first = tmp_path / "x", (1 << 33) + 5
    x.tofile(file)
    said = run(sums, file, width, first).stdout.split()
    assert said and set(said) == {wanted(x, first)}
    if n > 1:
        x[[0, 1]] = x[[1, 0]]
        assert wanted(x, first) not in said
