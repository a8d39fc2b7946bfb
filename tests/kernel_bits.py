"""kernel_bits.py -- hashes of the results that kernels must have on a GPU, bit for bit.

    .venv/bin/python tests/kernel_bits.py > tests/golden/kernels.txt    predicts them, by emulation
    ZR_TEST_DEVICE=sm_90 .venv/bin/python tests/kernel_bits.py OUT.json     compares a GPU's

Without ZR_TEST_DEVICE the second compares the emulation's. It exits with 1 if a hash differs. Left
out are products of cuBLASLt. Attention on tensor cores, GELU by tanh and SwiGLU have inputs for
which the PTX manual settles their results: there `ex2.approx` takes 0 and infinities alone, or its
error and that of `rcp.approx` end in the rounding to 16 bits.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "gen")]

from tests.kernels import (
    test_attention,
    test_elementwise,
    test_norm,
    test_optimizer,
    test_sum,
)
from tests.kernels.test_attention import documents, drawn
from tests.lib import zk

TABLE = ROOT / "tests" / "golden" / "kernels.txt"
TARGETS = ("sm_80", "sm_90", "sm_100")
LOG2E = np.float32(1.44269504)  # of kernels/cuda/attention.h


Arrays = list[np.ndarray]
HEADS, GROUPS = 4, 2
KEY = np.array([11], np.int64)


def attention(k: zk.Kernels, D: int, *local: object) -> Arrays:
    """Return all results of attention of 2 heads on 1, forward and backward. local: positions, the
    window, and a cap, or key, place and rate of a dropout."""
    qkv, dy = (drawn(n, k.dtype, 1, 70, n, D)[0] for n in (4, 2))
    return [*test_attention.attention(k, k.dtype, qkv, dy, 1, 0.125, *local)]


def bias(k: zk.Kernels) -> Arrays:
    db, (dy, _) = zk.empty(k.dtype, 300), drawn(1, k.dtype, 700, 300)
    k.zk_linear_bwd_b(db, dy, 700, 300)
    return [db]


def losses(k: zk.Kernels) -> Arrays:
    """Return losses of 40 rows, their gradients and their sum."""
    M, V = 40, 4999
    x, target = drawn(1, k.dtype, M, V + 1)[0], np.arange(M, dtype=np.int32) * 100 - 300
    loss, d = zk.empty(zk.F32, M), zk.empty(k.dtype, M, V + 1)
    sums = np.zeros(zk.SUMS, np.int64)
    k.zk_cross_entropy(loss, d, x, target, None, M, V, M)
    k.zk_loss_sum(sums, loss, target, M)
    return [loss, d, sums]


def means(k: zk.Kernels) -> Arrays:
    """Return the factor of 40 rows, the gradients that it scales, and the mean of their losses."""
    M, V = 40, 4999
    x, target = drawn(1, k.dtype, M, V + 1)[0], np.arange(M, dtype=np.int32) * 100 - 300
    loss, d = zk.empty(zk.F32, M), zk.empty(k.dtype, M, V + 1)
    sums, factor = np.zeros(zk.SUMS, np.int64), np.zeros(1)
    k.zk_loss_factor(factor, target, np.array([0.75]), M)
    k.zk_cross_entropy(loss, d, x, target, factor, M, V, M)
    k.zk_loss_mean(sums, loss, target, target, M, M)
    return [factor, d, sums]


def soft(k: zk.Kernels) -> Arrays:
    """Return the soft loss of 40 rows of capped logits, their gradients, and the logits."""
    M, V, cap = 40, 4999, 5.0
    x, target = drawn(1, k.dtype, M, V + 1)[0], np.arange(M, dtype=np.int32) * 100 - 300
    loss, d = zk.empty(zk.F32, M), zk.empty(k.dtype, M, V + 1)
    k.zk_softcap(x, x, M, V, cap)
    k.zk_soft_cross_entropy(loss, d, x, target, None, M, V, M, 0.1, 0.01, cap)
    return [loss, d, x]


def single(k: zk.Kernels) -> Arrays:
    """Return results of squared ReLU, dropout of three samples, one of which is kept whole,
    rounding and scaling."""
    x, dy = drawn(19, k.dtype, 3, 700)[0], drawn(20, k.dtype, 3, 700)[0]
    key, whole = np.array([5, 0, 7], np.int64), drawn(21, zk.F32, 2100)[0]
    out = [np.empty_like(x) for _ in range(7)]
    k.zk_relu2_fwd(out[0], x, x.size)
    k.zk_relu2_bwd(out[1], dy, x, x.size)
    k.zk_dropout_fwd(out[2], x, key, 3, 700, 4, 0.1)
    k.zk_dropout_bwd(out[3], dy, key, 3, 700, 4, 0.1)
    k.zk_round(out[4], whole, x.size)
    k.zk_scale_fwd(out[5], x, x.size, 0.3)
    k.zk_scale_bwd(out[6], dy, x.size, 0.3)
    return out


def sums(k: zk.Kernels) -> Arrays:
    """Return sums of 13 gradients that come in three batches: one tree, and blocks of 4."""
    leaves, full = (
        [drawn(i, k.dtype, 500)[0] for i in range(13)],
        int(k.dtype == zk.F32),
    )
    return [
        test_sum.push(k, leaves, [5, 8, 13], full, block).copy()
        for block in (test_sum.ALL, 4)
    ]


def gates(k: zk.Kernels) -> Arrays:
    """Return results in 16 bits of GELU by tanh and SwiGLU where the sigmoid is 0, 1/2 or 1."""
    rng = np.random.default_rng(22)

    def chosen(*numbers: float) -> np.ndarray:
        return zk.store(rng.choice(np.array(numbers, np.float32), (40, 64)), k.dtype)

    x, up, dy = chosen(-16, 0, 16), chosen(-3, 1, 2), chosen(-1, 3, 0.5)
    both = np.concatenate([chosen(-(2.0**15), 0, 64), up], 1)
    out = [np.empty_like(array) for array in (x, x, x, both, x, both)]
    k.zk_gelu_fwd(out[0], x, x.size, zk.GELU_TANH)
    k.zk_gelu_bwd(out[1], dy, x, x.size, zk.GELU_TANH)
    k.zk_swiglu_fwd(out[2], both, 40, 64)
    k.zk_swiglu_bwd(out[3], dy, both, 40, 64)
    both[:, :64] = x
    k.zk_geglu_fwd(out[4], both, 40, 64)
    k.zk_geglu_bwd(out[5], dy, both, 40, 64)
    return out


def exact_scale() -> float:
    """Return a scale of scores whose product with LOG2E is 1/8."""
    near = np.float32(0.125) / LOG2E
    around = (
        near,
        np.nextafter(near, np.float32(0)),
        np.nextafter(near, np.float32(1)),
    )
    return float(next(x for x in around if x * LOG2E == np.float32(0.125)))


def tensor_fwd(k: zk.Kernels, D: int, *local: object) -> Arrays:
    """Return forward results on tensor cores. All keys of a head are equal."""
    qkv = drawn(1, k.dtype, 1, 70, HEADS + 2 * GROUPS, D)[0]
    qkv[:, :, HEADS : HEADS + GROUPS] = qkv[:, :1, HEADS : HEADS + GROUPS]
    y, lse = zk.empty(k.dtype, 1, 70, HEADS, D), zk.empty(zk.F32, 1, HEADS, 70)
    sizes = (1, 70, HEADS, GROUPS, D)
    if local:
        position, window = local
        k.zk_attention_local_fwd(y, lse, qkv, position, *sizes, window, exact_scale())
    else:
        k.zk_attention_fwd(y, lse, qkv, *sizes, exact_scale())
    return [y, lse]


def tensor_bwd(k: zk.Kernels, D: int, *local: object) -> Arrays:
    """Return gradients on tensor cores. Queries and keys have no dimension in common and lse is 0,
    so that all probabilities are 1."""
    T, S = 150, HEADS + 2 * GROUPS
    qkv, y, dy = (drawn(n, k.dtype, 1, T, n, D)[0] for n in (S, HEADS, HEADS))
    qkv[:, :, :HEADS, D // 2 :] = 0
    qkv[:, :, HEADS : HEADS + GROUPS, : D // 2] = 0
    dqkv, lse = np.empty_like(qkv), np.zeros((1, HEADS, T), np.float32)
    scratch = zk.empty(zk.F32, HEADS * T + T * S * D)
    given, sizes = (dqkv, dy, y, qkv, lse, scratch), (1, T, HEADS, GROUPS, D)
    if local:
        position, window = local
        k.zk_attention_local_bwd(*given, position, *sizes, window, 0.125)
    else:
        k.zk_attention_bwd(*given, *sizes, 0.125)
    return [dqkv]


def tensor_local(k: zk.Kernels, D: int) -> Arrays:
    """Return both within documents and a window."""
    ways = ((tensor_fwd, 70), (tensor_bwd, 150))
    return [x for way, T in ways for x in way(k, D, documents(1, T, 40), 33)]


def heads(k: zk.Kernels) -> Arrays:
    """Return heads sorted by rank, sums of the gradients of copies, and joined heads."""
    M, H, G, D, ranks, copies = 7, 8, 2, 24, 4, 4
    sizes = (M, H, G, D, ranks, copies)
    x, dy = (drawn(seed, k.dtype, M, n, D)[0] for seed, n in ((1, 12), (2, 24)))
    cut, dx = np.empty_like(dy), np.empty_like(x)
    k.zk_cut_heads_fwd(cut, x, *sizes)
    k.zk_cut_heads_bwd(dx, dy, *sizes)
    parts, whole = (drawn(seed, k.dtype, M, H, D)[0] for seed in (3, 4))
    joined, apart = np.empty_like(parts), np.empty_like(whole)
    k.zk_join_heads(joined, parts, M, H, D, ranks, 1)
    k.zk_join_heads(apart, whole, M, H, D, ranks, -1)
    return [cut, dx, joined, apart]


Sample = Callable[[zk.Kernels], list]
SAMPLES: dict[str, Sample] = {
    "elementwise": lambda k: [test_elementwise.exact(k, k.dtype)],
    "single": single,
    "norm": lambda k: [test_norm.everything(k, k.dtype)],
    "sums": sums,
    "optimizer": test_optimizer.whole_run,
    "attention": partial(attention, D=20),
    "local": lambda k: attention(k, 20, documents(1, 70, 25), 17),
    "capped": lambda k: attention(k, 20, documents(1, 70, 25), 17, 0.75),
    "dropped": lambda k: attention(k, 20, documents(1, 70, 25), 17, KEY, 3, 0, 0.25),
    "bias": bias,
    "losses": losses,
    "heads": heads,
    "soft": soft,
    "means": means,
}
# Samples of 16-bit types.
NARROW: dict[str, Sample] = {"gates": gates} | {
    f"{name}-{D}": partial(sample, D=D)
    for name, sample in (
        ("forward", tensor_fwd),
        ("backward", tensor_bwd),
        ("local", tensor_local),
    )
    for D in (64, 128, 256)
}
ALL = SAMPLES | NARROW


@contextlib.contextmanager
def emulated(target: str) -> Iterator[None]:
    """Let the emulated device be of a target, where no GPU is given."""
    before, zk.TARGET = zk.TARGET, target
    code, old = target.removeprefix("sm_"), os.environ.get("ZR_EMULATE_CC", "")
    os.environ["ZR_EMULATE_CC"] = code
    try:
        yield
    finally:
        zk.TARGET, os.environ["ZR_EMULATE_CC"] = before, old


def hashed(results: list) -> str:
    whole = b"".join(x if isinstance(x, bytes) else x.tobytes() for x in results)
    return hashlib.sha256(whole).hexdigest()[:16]


def line(k: zk.Kernels, name: str, precision: str) -> str:
    """Return the table's line of a sample."""
    return f"{name} {precision} {zk.TARGET} {hashed(ALL[name](k))}"


def lines(target: str) -> Iterator[str]:
    """Yield all lines of a target. The first says whether numpy's random numbers are those of the
    table."""
    yield f"inputs f32 {target} {hashed([*drawn(1, zk.F32, 1000)])}"
    with emulated(target):
        for precision, dtype in zk.REALS.items():
            k = zk.Kernels(zk.EMULATED, dtype)
            for name in SAMPLES if dtype == zk.F32 else ALL:
                yield line(k, name, precision)


def judged(target: str) -> Iterator[tuple[str, bool]]:
    """Yield the lines of a target, and whether the table has them."""
    want = [x for x in TABLE.read_text().splitlines() if x.split()[2:3] == [target]]
    for found, expected in zip(lines(target), want, strict=True):
        assert found.split()[:3] == expected.split()[:3], target
        yield found, found == expected


def compared(target: str) -> list[str]:
    """Return the lines that differ from the table's."""
    return [line for line, same in judged(target) if not same]


def main(out: list[str]) -> int:
    if not out:
        print(*(line for target in TARGETS for line in lines(target)), sep="\n")
        return 0
    found: dict[str, list[str]] = {"same": [], "other_bits": []}
    for line, same in judged(zk.TARGET):
        found["same" if same else "other_bits"].append(line)
        print("same" if same else "OTHER BITS", line, flush=True)
        Path(out[0]).write_text(json.dumps(found))
    return int(bool(found["other_bits"]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
