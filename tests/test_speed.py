"""test_speed.py -- kernels that lost time for nothing, held to what does the same work beside them.

A time is the least that the thread had a processor for, over many calls: what else runs hardly
shows, and a bound is a ratio of two such times.
"""
from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest

import zk

pytestmark = pytest.mark.alone
COMPILERS = [name for name in ("gcc", "clang") if name in zk.compilers()]


def ratio(work: Callable[[], object], beside: Callable[[], object]) -> float:
    """least time of `work` over that of `beside`, called by turns"""
    least = [float("inf")] * 2
    for _ in range(500):
        for i, call in enumerate((work, beside)):
            begun = time.thread_time_ns()
            call()
            least[i] = min(least[i], time.thread_time_ns() - begun)
    return least[0] / least[1]


@pytest.mark.parametrize("compiler", COMPILERS)
def test_squares_take_what_reading_does(isa: str, compiler: str) -> None:
    """Beside numpy's sum of the same floats, at most twice as long. 16 floats at a time through
    memory took three to eight times as long."""
    k, n = zk.Kernels(isa, compiler=compiler), 1 << 18
    g = np.random.default_rng(1).normal(size=n).astype(np.float32)
    sums, spans = np.zeros(zk.SUMS, np.int64), zk.spans([dict(at=0, elems=n, count=1)])
    assert ratio(lambda: k.zk_square_sum(sums, g, spans, 1, 0, n), lambda: g.sum()) < 2


@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("half", [zk.BF16, zk.F16])
def test_a_product_of_halves_takes_little_longer(isa: str, half: int, compiler: str) -> None:
    """A gradient of weights is packed from turned matrices and stored as halves: at most 1.35
    times as long as with floats. Half by half, packed and stored, it took 1.4 to 2.2 times as long."""
    M, N, K = 64, 768, 64
    calls = []
    for dtype in half, zk.F32:
        k = zk.Kernels(isa, dtype, compiler=compiler)
        dw, dy, x = (zk.store(np.ones(shape), dtype) for shape in ((N, K), (M, N), (M, K)))
        calls.append(lambda k=k, dw=dw, dy=dy, x=x:
                     k.zk_linear_bwd_w(dw, dy, x, M, N, K, zk.OUT_IN, 0, 0))
    assert ratio(*calls) < 1.35
