"""kernel_bits.py -- hashes of the results that kernels must have on a GPU, bit for bit.

    .venv/bin/python tests/kernel_bits.py > tests/golden/kernels.txt    predicts them, by emulation
    ZR_TEST_DEVICE=sm_90 .venv/bin/python tests/kernel_bits.py OUT.json     compares a GPU's

Without ZR_TEST_DEVICE the second compares the emulation's. It exits with 1 if a hash differs. Left
out are products of cuBLASLt, and results of `ex2.approx` and `rcp.approx` that the PTX manual does
not settle: GELU by tanh, SwiGLU, and most of attention on tensor cores.
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

from tests.kernels import test_attention, test_elementwise, test_norm, test_optimizer
from tests.kernels.test_attention import drawn
from tests.lib import zk

TABLE = ROOT / "tests" / "golden" / "kernels.txt"
TARGETS = ("sm_80", "sm_90", "sm_100")
LOG2E = np.float32(1.44269504)  # of kernels/cuda/attention.h


def attention(k: zk.Kernels, D: int) -> list[np.ndarray]:
    """Return all results of attention of 2 heads on 1, forward and backward."""
    qkv, dy = (drawn(n, k.dtype, 1, 70, n, D)[0] for n in (4, 2))
    return [*test_attention.attention(k, k.dtype, qkv, dy, 1, 0.125)]


def bias(k: zk.Kernels) -> list[np.ndarray]:
    db, (dy, _) = zk.empty(k.dtype, 300), drawn(1, k.dtype, 700, 300)
    k.zk_linear_bwd_b(db, dy, 700, 300)
    return [db]


def losses(k: zk.Kernels) -> list[np.ndarray]:
    """Return losses of 40 rows, their gradients and their sum."""
    M, V = 40, 4999
    x, target = drawn(1, k.dtype, M, V + 1)[0], np.arange(M, dtype=np.int32) * 100 - 300
    loss, d = zk.empty(zk.F32, M), zk.empty(k.dtype, M, V + 1)
    sums = np.zeros(zk.SUMS, np.int64)
    k.zk_cross_entropy(loss, d, x, target, None, M, V, M)
    k.zk_loss_sum(sums, loss, target, M)
    return [loss, d, sums]


def exact_scale() -> np.float32:
    """Return a scale of scores whose product with LOG2E is 1/8."""
    near = np.float32(0.125) / LOG2E
    around = (
        near,
        np.nextafter(near, np.float32(0)),
        np.nextafter(near, np.float32(1)),
    )
    return next(x for x in around if x * LOG2E == np.float32(0.125))


def tensor(k: zk.Kernels, D: int) -> list[np.ndarray]:
    """Return results on tensor cores for which ex2.approx takes 0 and -infinity alone. Forward, all
    keys of a head are equal. Backward, samples have one token, and queries are 0."""
    scale, H, G = float(exact_scale()), 4, 2
    qkv, y = drawn(1, k.dtype, 1, 70, H + 2 * G, D)[0], zk.empty(k.dtype, 1, 70, H, D)
    qkv[:, :, H : H + G] = qkv[:, :1, H : H + G]
    lse = zk.empty(zk.F32, 1, H, 70)
    k.zk_attention_fwd(y, lse, qkv, 1, 70, H, G, D, scale)
    one, dy = (drawn(n, k.dtype, 6, 1, n, D)[0] for n in (H + 2 * G, H))
    one[:, :, :H] = 0
    return [y, lse, *test_attention.attention(k, k.dtype, one, dy, G, scale)]


Sample = Callable[[zk.Kernels], list]
SAMPLES: dict[str, Sample] = {
    "elementwise": lambda k: [test_elementwise.exact(k, k.dtype)],
    "norm": lambda k: [test_norm.everything(k, k.dtype)],
    "optimizer": test_optimizer.whole_run,
    "attention": partial(attention, D=20),
    "bias": bias,
    "losses": losses,
}
TENSOR: dict[str, Sample] = {
    f"tensor-{D}": partial(tensor, D=D) for D in (64, 128, 256)
}


ALL = SAMPLES | TENSOR


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


def compared(target: str) -> list[str]:
    """Return the lines that differ from the table's."""
    want = [x for x in TABLE.read_text().splitlines() if x.split()[2:3] == [target]]
    found = list(lines(target))
    assert [x.split()[:3] for x in found] == [x.split()[:3] for x in want], target
    return [x for x, y in zip(found, want, strict=True) if x != y]


def main(out: list[str]) -> int:
    if not out:
        print(*(line for target in TARGETS for line in lines(target)), sep="\n")
        return 0
    off = compared(zk.TARGET)
    Path(out[0]).write_text(json.dumps({"target": zk.TARGET, "other_bits": off}))
    print(*(f"other bits: {line}" for line in off), f"{len(off)} differ", sep="\n")
    return int(bool(off))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
