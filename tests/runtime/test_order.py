"""test_order.py -- tests the order of samples: a random permutation in each epoch, and sources in
turn, as close to their weights as promised."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.lib.files import build, run
from tests.runtime.test_long_data import bytes_read


@pytest.fixture(scope="session")
def order() -> Path:
    return build("runtime/order.c")


def permutations(
    order: Path, low: int, high: int, *, seed: int = 1, last: int = 0
) -> list[np.ndarray]:
    done = run(order, "permute", seed, 0, 0, last, low, high)
    return [np.array(line.split(), int) for line in done.stdout.splitlines()]


def epochs(order: Path, n: int, count: int) -> np.ndarray:
    """Return int [count, n]: the place of each sample in each epoch."""
    return np.array(permutations(order, n, n, last=count - 1))


# ---- shuffled


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2**64 - 1])
def test_every_sample_comes_once_whatever_their_number(order: Path, seed: int) -> None:
    for n, found in enumerate(permutations(order, 1, 600, seed=seed), 1):
        assert sorted(found) == list(range(n))


@pytest.mark.slow
@pytest.mark.parametrize("n", [2**16 - 1, 2**16, 2**16 + 1])
def test_so_it_is_of_many(order: Path, n: int) -> None:
    assert (np.sort(permutations(order, n, n)[0]) == np.arange(n)).all()


def test_every_order_of_three_comes(order: Path) -> None:
    """Every order of three samples occurs in 120 epochs; a fair draw of 6 orders misses one once in
    10^8 times."""
    assert len({tuple(p) for p in epochs(order, 3, 120)}) == 6


def test_no_order_shows(order: Path) -> None:
    """Orders of 40 epochs of 1000 samples show no pattern.

    The correlation of a random permutation with the order of the file has the variance 1/(n-1), and
    so has that of one with the next. The correlation of one with itself, a sample later, also has a
    mean of -1/(n-1). Means of 40 lie within 5 of their deviations except once in a million times.
    Neighbours stay neighbours once per epoch, as rare events do: their sum has the variance 40.
    """
    n, count = 1000, 40
    found = epochs(order, n, count)
    bound = 5 / np.sqrt(count * (n - 1))

    def correlation(a: np.ndarray, b: np.ndarray) -> float:
        pairs = zip(a, b, strict=True)
        return float(np.mean([np.corrcoef(x, y)[0, 1] for x, y in pairs]))

    file = np.tile(np.arange(n), (count, 1))
    assert abs(correlation(file, found)) < bound
    assert abs(correlation(found[1:], found[:-1])) < bound * 1.02
    assert abs(correlation(found[:, 1:], found[:, :-1])) < bound + 1 / n
    kept = (np.diff(found, axis=1) == 1).sum()
    assert abs(kept - count) < 5 * np.sqrt(count)


def test_a_sample_comes_anywhere(order: Path) -> None:
    """A sample comes anywhere: over 640 epochs of 96 samples the first and the last are counted in
    each of 16 parts. The sum of squares has 15 degrees of freedom, so a mean of 15 and a deviation
    of sqrt(30)."""
    count, parts = 640, 16
    found = epochs(order, 96, count)
    for sample in (0, 95):
        seen = np.bincount(found[:, sample] // 6, minlength=parts)
        square = ((seen - count / parts) ** 2 / (count / parts)).sum()
        assert square < 15 + 5 * np.sqrt(30)


def test_seed_source_and_epoch_each_make_another_order(order: Path) -> None:
    rows = [(1, 0, 0), (2, 0, 0), (1, 1, 0), (1, 0, 1), (0, 1, 1), (1, 1, 1)]
    said = {run(order, "permute", *row, row[2], 50, 50).stdout for row in rows}
    assert len(said) == len(rows)


# ---- by weights


@pytest.fixture(scope="session")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "two"
    path.write_bytes(bytes(4))
    return path


def turns(order: Path, file: Path, m: int, weights: list[int]) -> np.ndarray:
    words = [f"{file}:{weight}" for weight in weights]
    return np.array(run(order, "turns", m, *words).stdout.split(), int)


WEIGHTS = [
    [1, 1],
    [7, 3],
    [10000, 1],
    [1, 10000],
    [5, 5, 5],
    [1, 2, 3, 4, 5],
    [1, 1, 2, 3, 5, 8, 13, 21],
    [1000, *[1] * 20],
    [1, 10, 100, 1000],
    [3, *[7] * 10, 64, 1],
    [1] * 64,
]


@pytest.mark.parametrize("weights", WEIGHTS, ids=str)
def test_every_prefix_is_near_to_the_weights(
    order: Path, file: Path, weights: list[int]
) -> None:
    """Every prefix is within two samples of the weights, within half a sample with two sources, and
    exact after as many samples as the weights sum up to."""
    whole = sum(weights) // np.gcd.reduce(weights)
    m = max(2000, 2 * whole)
    found = turns(order, file, m, weights)
    counts = np.cumsum(found[:, None] == np.arange(len(weights)), axis=0)
    wanted = np.arange(1, m + 1)[:, None] * weights / sum(weights)
    off = np.abs(counts - wanted).max()
    assert off <= 0.5 + 1e-9 if len(weights) == 2 else off < 2
    assert np.allclose(counts[whole - 1], wanted[whole - 1], atol=1e-9)


def test_only_the_ratio_of_weights_counts(order: Path, file: Path) -> None:
    a, b = (turns(order, file, 500, [7 * k, 3 * k]) for k in (1, 10000))
    assert (a == b).all()


def test_one_source_has_all(order: Path, file: Path) -> None:
    assert not turns(order, file, 10, [5]).any()


# ---- samples that a start checks


def test_a_start_looks_at_what_each_source_gives(order: Path, tmp_path: Path) -> None:
    """A start checks the samples that each source contributes. Shuffled, it checks all of every
    used file, because any sample may come."""
    first, second = tmp_path / "first", tmp_path / "second"
    first.write_bytes(bytes(202))
    for at in (0, 4, 5, 9, 100):
        tokens = np.zeros(101, "<u2")
        tokens[at] = 256
        second.write_bytes(tokens.tobytes())
        for m in (5, 15, 17, 300, -1, -2):
            words = [f"{first}:3", f"{second}:1"]
            done = run(order, "check", m, *words)
            own = (2 * abs(m) + 4) // 8  # a quarter of the first m, rounded
            used = own and (m < 0 or own >= 100 or at <= own)
            assert (done.returncode == 2) == bool(used), (at, m)
            assert not used or f"{second}: token {at} is 256" in done.stderr


@pytest.mark.parametrize("sources", [1, 4, 64])
def test_a_start_reads_no_more_of_several(
    order: Path, tmp_path: Path, sources: int
) -> None:
    """A start reads no more of several files than of one: 64 MiB, a sample, and a MiB for the looks
    at their starts, not counting the program and its pipes."""
    with (tmp_path / "long").open("wb") as file:
        file.truncate(1 << 28)
    before = bytes_read()
    words = [f"{tmp_path / 'long'}:1"] * sources
    assert run(order, "check", 10**12, *words).returncode == 0
    bound = (65 << 20) + 256 * 32768
    read = bytes_read() - before
    assert bound <= read < bound + (1 << 20)
