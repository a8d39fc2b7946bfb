"""kernels.py -- some of the CPU's kernels beside what does the same work: both times, their ratio.

A time is the least CPU time of a thread over many calls by turns, so that what else runs hardly
shows.

    .venv/bin/python bench/kernels.py
"""

from __future__ import annotations

import pathlib
import platform
import re
import sys
import time
from collections.abc import Callable

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests/lib"), str(ROOT / "gen")]

import zk  # noqa: E402

CALLS = 500


def least(*calls: Callable[[], object]) -> list[float]:
    """milliseconds of each"""
    found = [float("inf")] * len(calls)
    for _ in range(CALLS):
        for i, call in enumerate(calls):
            begun = time.thread_time_ns()
            call()
            found[i] = min(found[i], 1e-6 * (time.thread_time_ns() - begun))
    return found


def squares(isa: str, compiler: str) -> list[float]:
    """of 2^18 floats, and numpy's sum of them"""
    k, n = zk.Kernels(isa, compiler=compiler), 1 << 18
    g = np.random.default_rng(1).normal(size=n).astype(np.float32)
    sums, spans = (
        np.zeros(zk.SUMS, np.int64),
        zk.spans([dict(at=0, elems=n, count=1)]),
    )
    return least(
        lambda: k.zk_square_sum(sums, g, spans, 1, 0, n), lambda: g.sum()
    )


def weights(isa: str, compiler: str, half: int) -> list[float]:
    """a small gradient of weights, packed from turned matrices, in halves and in floats"""
    M, N, K = 64, 768, 64
    calls = []
    for dtype in half, zk.F32:
        k = zk.Kernels(isa, dtype, compiler=compiler)
        dw, dy, x = (
            zk.store(np.ones(shape), dtype)
            for shape in ((N, K), (M, N), (M, K))
        )
        calls.append(
            lambda k=k, dw=dw, dy=dy, x=x: k.zk_linear_bwd_w(
                dw, dy, x, M, N, K, zk.OUT_IN, 0, 0
            )
        )
    return least(*calls)


ROWS = {
    "squares beside a sum": squares,
    "bwd_w in bf16 beside f32": lambda isa, compiler: weights(
        isa, compiler, zk.BF16
    ),
    "bwd_w in f16 beside f32": lambda isa, compiler: weights(
        isa, compiler, zk.F16
    ),
}


def processor() -> str:
    found = re.search(
        r"^model name\s*: (.*)$",
        pathlib.Path("/proc/cpuinfo").read_text(),
        re.M,
    )
    return found[1] if found else platform.processor()


def main() -> None:
    print(processor())
    for compiler in zk.compilers():
        for isa in zk.isas():
            for name, row in ROWS.items():
                work, beside = row(isa, compiler)
                print(
                    f"{compiler:6} {isa:7} {name:25} {work:8.4f} ms {beside:8.4f} ms "
                    f"{work / beside:6.2f}"
                )


if __name__ == "__main__":
    main()
