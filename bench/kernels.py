"""kernels.py -- times some of the CPU's kernels beside other code that does the same work.

A time is the least CPU time of a thread over many alternating calls, so that other load hardly
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
from functools import partial

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "gen")]

from tests.lib import zk  # noqa: E402

Array = np.ndarray
CALLS = 200


def least(*calls: Callable[[], object], times: int = CALLS) -> list[float]:
    """Return the least milliseconds of each call."""
    found = [float("inf")] * len(calls)
    for _ in range(times):
        for i, call in enumerate(calls):
            begun = time.thread_time_ns()
            call()
            found[i] = min(found[i], 1e-6 * (time.thread_time_ns() - begun))
    return found


def squares(isa: str, compiler: str) -> list[float]:
    """Return the times of a sum of squares of 2^18 floats, and of numpy's."""
    k, n = zk.Kernels(isa, compiler=compiler), 1 << 18
    g = np.random.default_rng(1).normal(size=n).astype(np.float32)
    sums, spans = (
        np.zeros(zk.SUMS, np.int64),
        zk.spans([dict(at=0, elems=n, count=1)]),
    )
    return least(lambda: k.zk_square_sum(sums, g, spans, 1, 0, n, 1), lambda: g.sum())


def weights(isa: str, compiler: str, half: int) -> list[float]:
    """Return the times of a small weight gradient, packed from transposed matrices, in half
    precision and in f32."""
    M, N, K = 64, 768, 64
    calls = []
    for dtype in half, zk.F32:
        k = zk.Kernels(isa, dtype, compiler=compiler)
        dw, dy, x = (
            zk.store(np.ones(shape), dtype) for shape in ((N, K), (M, N), (M, K))
        )
        calls.append(
            lambda k=k, dw=dw, dy=dy, x=x: k.zk_linear_bwd_w(
                dw, dy, x, M, N, K, zk.OUT_IN, 0, 0
            )
        )
    return least(*calls)


def ordered(isa: str, compiler: str, order: int) -> list[float]:
    """Return the times of the first linear of GPT-2's MLP for 256 tokens, in bf16 and in f32."""
    M, N, K = 256, 3072, 768
    r = np.random.default_rng(1)
    calls = []
    for dtype in zk.BF16, zk.F32:
        k = zk.Kernels(isa, dtype, compiler=compiler, order=order)
        y, x, w = (
            zk.store(r.normal(size=shape), dtype) for shape in ((M, N), (M, K), (N, K))
        )
        calls.append(
            lambda k=k, y=y, x=x, w=w: k.zk_linear_fwd(
                y, x, w, None, M, N, K, zk.OUT_IN
            )
        )
    return least(*calls)


def attention(isa: str, compiler: str, B: int, T: int) -> list[float]:
    """Return the times of GPT-2's attention, forward and backward, in bf16 by tiles and in f32."""
    H, D = 12, 64
    r = np.random.default_rng(1)
    lse = zk.empty(zk.F32, B, H, T)
    scratch = zk.empty(zk.F32, B * H * T + B * T * 3 * H * D)
    calls = []
    for dtype in zk.BF16, zk.F32:
        k = zk.Kernels(isa, dtype, compiler=compiler, order=zk.TILED)
        qkv, dy = (zk.store(r.normal(size=(B, T, n * H, D)), dtype) for n in (3, 1))
        y, dqkv = zk.empty(dtype, *dy.shape), zk.empty(dtype, *qkv.shape)

        def both(k=k, qkv=qkv, dy=dy, y=y, dqkv=dqkv) -> None:
            sizes = B, T, H, H, D, D**-0.5
            k.zk_attention_fwd(y, lse, qkv, *sizes)
            k.zk_attention_bwd(dqkv, dy, y, qkv, lse, scratch, *sizes)

        calls.append(both)
    return least(*calls, times=CALLS // 10)


def beside_linear(
    isa: str, compiler: str, work: Callable[[zk.Kernels, Array, Array], object]
) -> list[float]:
    """Return the times of work that an epilogue could do, and of the first linear of GPT-2's MLP
    for 256 tokens in bf16."""
    M, N, K = 256, 3072, 768
    k = zk.Kernels(isa, zk.BF16, compiler=compiler)
    r = np.random.default_rng(1)
    to, y, x, w = (
        zk.store(r.normal(size=shape), zk.BF16)
        for shape in ((M, N), (M, N), (M, K), (N, K))
    )
    return least(
        lambda: work(k, to, y),
        lambda: k.zk_linear_fwd(y, x, w, None, M, N, K, zk.OUT_IN),
    )


AFTER = {
    "GELU beside its linear": lambda k, to, y: k.zk_gelu_fwd(
        to, y, y.size, zk.GELU_TANH
    ),
    "bias gradient beside it": lambda k, to, y: k.zk_linear_bwd_b(to[0], y, *y.shape),
    "a copy beside it": lambda _, to, y: np.copyto(to, y),
}
ROWS = {
    **{name: partial(beside_linear, work=work) for name, work in AFTER.items()},
    "squares beside a sum": squares,
    "pairs in bf16 beside f32": partial(ordered, order=zk.PAIRS),
    "tiles in bf16 beside f32": partial(ordered, order=zk.TILED),
    "attention by tiles, T 256": partial(attention, B=4, T=256),
    "attention by tiles, 1024": partial(attention, B=1, T=1024),
    "bwd_w in bf16 beside f32": lambda isa, compiler: weights(isa, compiler, zk.BF16),
    "bwd_w in f16 beside f32": lambda isa, compiler: weights(isa, compiler, zk.F16),
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
        for isa in zk.isas((*zk.ISAS, zk.BEST, "amx")):
            for name, row in ROWS.items():
                work, beside = row(isa, compiler)
                print(
                    f"{compiler:6} {isa:10} {name:25} {work:8.4f} ms {beside:8.4f} ms "
                    f"{work / beside:6.2f}"
                )


if __name__ == "__main__":
    main()
