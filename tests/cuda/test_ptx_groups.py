"""test_ptx_groups.py -- tests the emulation of Hopper's products of warpgroups (wgmma): their sums are
those of the tensor cores that are emulated, and mistakes in their use are found."""

from __future__ import annotations

import ctypes
import hashlib
import pathlib
import re
import subprocess
from typing import NamedTuple

import numpy as np
import pytest

from tests.cuda.test_ptx import MISTAKE, PARTS, SMALL, launch, linked, python
from tests.lib import zk


class Product(NamedTuple):
    """D = A B by two warpgroups, of 64 rows each. In shared memory A's rows of one group, and B's
    columns, are swizzled rows of K numbers (K-major), or K swizzled rows of each 64 (turned)."""

    precision: str = "bf16"
    columns: int = 128
    a: str = "shared"  # or turned, or registers
    turned: bool = False  # B

    K = 64
    ROWS = 128
    THREADS = 256

    @property
    def shared(self) -> int:
        """Return the bytes of A and of B."""
        return 2 * self.K * (self.ROWS + self.columns)


def swizzled(x: np.ndarray) -> np.ndarray:
    """Return rows of 64 halves with the chunks of 8 halves of row r where c ^ r % 8 says."""
    r, c = np.ogrid[: x.size // 64, :8]
    return x.reshape(-1, 8, 8)[r, c ^ r % 8].reshape(-1)


def image(x: np.ndarray, turned: bool) -> np.ndarray:
    """Return shared memory's image of rows of K numbers."""
    if not turned:
        return swizzled(x)
    panels = (np.ascontiguousarray(x[i : i + 64].T) for i in range(0, len(x), 64))
    return np.concatenate([*map(swizzled, panels)])


def fragments(threads: int, registers: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the row and the column of each register of a thread in rows of 16 a warp, where
    registers 2 and 3 are 8 rows below registers 0 and 1, and the next four 8 columns on."""
    t, i = np.ogrid[:threads, :registers]
    rows = t // 32 * 16 + t % 32 // 4 + i // 2 % 2 * 8
    return rows, i // 4 * 8 + t % 4 * 2 + i % 2 + 0 * rows


# A kernel whose parameter is A and B as they are in shared memory, A by threads in registers, and
# D by threads
PRODUCT = """
mul.wide.u32 %rd2, %r1, 16;
add.s64 %rd2, %rd1, %rd2;
mov.u32 %r2, zk_shared;
shl.b32 %r3, %r1, 4;
add.s32 %r3, %r2, %r3;
{copies}
mul.wide.u32 %rd3, %r1, 64;
add.s64 %rd3, %rd1, %rd3;
{loads}
cp.async.wait_all;
fence.proxy.async.shared::cta;
bar.sync 0;
shr.u32 %r4, %r1, 7;
shl.b32 %r4, %r4, 13;
add.s32 %r4, %r2, %r4;
shr.u32 %r4, %r4, 4;
cvt.u64.u32 %rd4, %r4;
or.b64 %rd4, %rd4, {descriptor};
add.s32 %r5, %r2, {first_of_b};
shr.u32 %r5, %r5, 4;
cvt.u64.u32 %rd5, %r5;
or.b64 %rd5, %rd5, {descriptor};
wgmma.fence.sync.aligned;
{steps}
wgmma.commit_group.sync.aligned;
wgmma.wait_group.sync.aligned 0;
mul.wide.u32 %rd3, %r1, {bytes_of_d};
add.s64 %rd3, %rd1, %rd3;
{stores}"""
STEP = """{{
.reg .pred p;
setp.ne.b32 p, {add}, 0;
wgmma.mma_async.sync.aligned.{kind} {{{d}}},
  {a}, %rd5, p, 1, 1, {turned};
}}
add.s64 %rd4, %rd4, {next_a};
add.s64 %rd5, %rd5, {next_b};"""


def product_ptx(p: Product) -> str:
    """Return the PTX of a product."""
    held = [", ".join(f"%r{8 + 4 * k + i}" for i in range(4)) for k in range(p.K // 16)]
    turned = ([] if p.a == "registers" else [p.a == "turned"]) + [p.turned]
    places = range(0, p.shared, 16 * p.THREADS)
    steps = (
        STEP.format(
            add=int(k > 0),
            kind=f"m64n{p.columns}k16.f32.{p.precision}.{p.precision}",
            d=", ".join(f"%f{i}" for i in range(p.columns // 2)),
            a=f"{{{of}}}" if p.a == "registers" else "%rd4",
            turned=", ".join(str(int(x)) for x in turned),
            next_a=128 if p.a == "turned" else 2,
            next_b=128 if p.turned else 2,
        )
        for k, of in enumerate(held)
    )
    body = PRODUCT.format(
        copies="\n".join(
            f"cp.async.cg.shared.global [%r3+{x}], [%rd2+{x}], 16, 16;" for x in places
        ),
        loads="\n".join(
            f"ld.global.v4.u32 {{{of}}}, [%rd3+{p.shared + 16 * k}];"
            for k, of in enumerate(held)
        ),
        descriptor=1 << 62 | 1024 >> 4 << 32 | p.K * 128 >> 4 << 16,
        first_of_b=2 * p.K * p.ROWS,
        steps="\n".join(steps),
        bytes_of_d=2 * p.columns,
        stores="\n".join(
            f"st.global.f32 [%rd3+{p.shared + 64 * p.THREADS + 4 * i}], %f{i};"
            for i in range(p.columns // 2)
        ),
    )
    return SMALL.format(body)


def factors(p: Product) -> tuple[np.ndarray, np.ndarray]:
    """Return bits of A and B, rows of K each, of sizes that the sums of tensor cores round."""
    rng = np.random.default_rng(p.columns)
    shape = p.ROWS + p.columns, p.K
    x = rng.standard_normal(shape) * 2.0 ** rng.integers(-6, 6, shape)
    bits = zk.store(x.astype(np.float32), zk.REALS[p.precision]).view(np.uint16)
    return bits[: p.ROWS], bits[p.ROWS :]


def multiplied(path: str, p: Product) -> np.ndarray:
    """Return the bits of D by a library."""
    a, b = factors(p)
    rows, columns = fragments(p.THREADS, 8)
    steps = [a[rows, columns + 16 * k] for k in range(p.K // 16)]
    parts = [
        *(image(a[i : i + 64], p.a == "turned") for i in range(0, p.ROWS, 64)),
        image(b, p.turned),
        np.stack(steps, axis=1),
        np.full(2 * p.ROWS * p.columns, 0xFFFF, np.uint16),
    ]
    data = np.concatenate([x.reshape(-1) for x in parts])
    launch(path, data, p.THREADS, p.shared)
    found = data.view(np.uint32)[-p.ROWS * p.columns :].reshape(p.THREADS, -1)
    d = np.empty((p.ROWS, p.columns), np.uint32)
    d[fragments(p.THREADS, p.columns // 2)] = found
    return d


def expected(folder: pathlib.Path, p: Product) -> str:
    """Return a run's output, D by sums of 16 terms of a library's tensor cores."""
    add = ctypes.CDLL(str(folder / "of_ptx.so")).__getattr__(f"tensor_{p.precision}")
    add.restype = ctypes.c_uint32
    a, b = factors(p)
    d = np.zeros((p.ROWS, p.columns), np.uint32)
    for i, j in np.ndindex(*d.shape):
        for k in range(0, p.K, 16):
            terms = (x.ctypes.data_as(ctypes.c_void_p) for x in (a[i, k:], b[j, k:]))
            d[i, j] = add(*terms, ctypes.c_uint32(d[i, j]))
    return hashlib.sha256(d.tobytes()).hexdigest() + "\n"


OTHER = "other bits"
MULTIPLY = """
import hashlib, sys
from tests.cuda import test_ptx_groups
p = test_ptx_groups.Product({})
d = test_ptx_groups.multiplied(sys.argv[1], p)
print(hashlib.sha256(d.tobytes()).hexdigest())
"""
PRODUCTS = [
    Product(),
    Product("f16", 128, "registers", turned=True),
    Product("bf16", 64, "turned", turned=True),
    Product("f16", 256, "turned"),
    Product("f16", 32),
    Product("bf16", 128, "registers"),
]


def product_run(
    folder: pathlib.Path, p: Product, text: str, order: str = "eager"
) -> subprocess.CompletedProcess:
    words = ", ".join(map(repr, p))
    library = linked(folder, text, PARTS)
    return python(MULTIPLY.format(words), library, ZR_EMULATE=order)


@pytest.mark.parametrize("i", range(len(PRODUCTS)))
def test_products_of_warpgroups(tmp_path: pathlib.Path, i: int) -> None:
    """Products of warpgroups have the bits of the emulated tensor cores' sums."""
    p = PRODUCTS[i]
    done = product_run(tmp_path, p, product_ptx(p), ("eager", "late")[i % 2])
    assert done.returncode == 0, done.stderr
    assert done.stdout == expected(tmp_path, p)


SHARED, HELD = Product("bf16", 32), Product("f16", 64, "registers", turned=True)
_WAIT, _WAIT_1 = (f"wgmma.wait_group.sync.aligned {n};" for n in (0, 1))
_COMMIT = "wgmma.commit_group.sync.aligned;"
# threads that leave before the products
_TO_END = r"(wgmma\.fence[\s\S]*)(?=ret;)"
_LEAVE = r"{{.reg .pred q; setp.{} q, %r1, {}; @q bra $L__end;}}\n\1$L__end:\n"
# the first step again, into %f64 and those after it
_OTHER = "add.s64 %rd4, %rd4, -8;\nadd.s64 %rd5, %rd5, -8;\n" + STEP.format(
    add=0,
    kind="m64n32k16.f32.bf16.bf16",
    d=", ".join(f"%f{64 + i}" for i in range(16)),
    a="%rd4",
    turned="0, 0",
    next_a=0,
    next_b=0,
)


@pytest.mark.parametrize(
    "old,new",
    [
        # a group for each step, the last but one waited for
        (
            "(add.s64 %rd5, %rd5, 2;)",
            rf"\1\n{_COMMIT}\n{_WAIT_1}\nwgmma.fence.sync.aligned;",
        ),
        # another product in flight while this one is stored
        (
            rf"{_WAIT}([\s\S]*)ret;",
            rf"{_OTHER}\n{_COMMIT}\n{_WAIT_1}\1{_WAIT}\nret;",
        ),
        # asm of one line
        (r"\{\n(\.reg .*)\n(.*)\n(.*)\n(.*)\n\}", r"{\1 \2 \3 \4}"),
    ],
)
def test_groups_of_products(tmp_path: pathlib.Path, old: str, new: str) -> None:
    text = product_ptx(SHARED)
    changed = re.sub(old, new, text)
    assert changed != text
    done = product_run(tmp_path, SHARED, changed)
    assert done.returncode == 0, done.stderr
    assert done.stdout == expected(tmp_path, SHARED)


NOT_WAITED = "a product that is not waited for"
NOT_FENCED = "a product with no wgmma.fence before it"
NO_PROXY = r"reads memory that thread \d+ wrote, with no fence.proxy.async since"
WRITTEN = "memory that a product reads is written before the product's wait"
DESCRIPTOR = "a matrix descriptor that is not of 128-byte swizzle alone"
PARTED = r"warps of a warpgroup part: thread \d+ is at wgmma.fence\S+ \(line \d+\), "
_STRIDES, _OR = r"or.b64 %rd(\d), %rd\d, \d+;", r"or.b64 %rd\1, %rd\1, "
_COPY = "cp.async.cg.shared.global [%r3+16384], [%rd2], 16, 16;"
# Products with a mistake: text of the PTX and the text in its place, and the driver's message
MISUSES = {
    "no wait": (SHARED, _WAIT, "", NOT_WAITED),
    "a wait for too few": (SHARED, r"(wait_group.*) 0;", r"\1 1;", NOT_WAITED),
    "no commit": (HELD, _COMMIT, "", NOT_WAITED),
    "no fence": (HELD, r"wgmma\.fence.*", "", NOT_FENCED),
    "no fence after a wait": (
        SHARED,
        _COMMIT,
        f"{_COMMIT}\n{_WAIT}\n{_OTHER}\n{_COMMIT}",
        NOT_FENCED,
    ),
    "no fence of proxies": (SHARED, r"fence\.proxy.*", "", NO_PROXY),
    "a fence before copies": (HELD, r"(cp.*all;\n)(fence.*)", r"\2\n\1", NO_PROXY),
    "no wait for copies": (SHARED, r"cp.*all;", "", "a copy that has not arrived"),
    "no barrier": (SHARED, r"bar\.sync 0;", "", "hazard at byte"),
    "a store before the wait": (
        SHARED,
        _WAIT,
        f"bar.sync 0;\nst.shared.u32 [%r3], %r1;\n{_WAIT}",
        WRITTEN,
    ),
    "a copy before the wait": (HELD, _WAIT, f"bar.sync 0;\n{_COPY}\n{_WAIT}", WRITTEN),
    "a copy and no barrier": (HELD, _WAIT, f"{_WAIT}\n{_COPY}", "hazard at byte"),
    "D read too soon": (SHARED, rf"({_WAIT}\n)([\s\S]*)(ret;)", r"\2\1\3", OTHER),
    "D written too soon": (
        HELD,
        _WAIT,
        f"mov.f32 %f5, 0f00000000;\n{_WAIT}",
        "a register of a product's D changed before its wait",
    ),
    "A written too soon": (
        HELD,
        _WAIT,
        f"mov.b32 %r15, 0;\n{_WAIT}",
        "a register of a product's A changed before the product's wait",
    ),
    "A written after the fence": (
        HELD,
        r"wgmma\.fence.*",
        r"\g<0>\nadd.s32 %r9, %r9, 1;",
        "a product with a register that changed after its wgmma.fence",
    ),
    "D written after the fence": (
        HELD,
        r"(wgmma\.fence.*\n)([\s\S]*?)setp\.ne\.b32 p, 0, 0;",
        r"\1mov.f32 %f5, 0f3F800000;\n\2setp.ne.b32 p, 1, 0;",
        "a product with a register that changed after its wgmma.fence",
    ),
    "half of another D": (
        SHARED,
        _COMMIT,
        f"{_OTHER.replace('%f7', '%f1')}\n{_COMMIT}",
        "a product whose D has registers of another D in flight",
    ),
    "half a stride": (SHARED, _STRIDES, f"{_OR}{2**62 + 2**37};", OTHER),
    "one step of B alone": (SHARED, r"%rd5, %rd5, 2;", "%rd5, %rd5, 0;", OTHER),
    "half a step of A": (SHARED, r"%rd4, %rd4, 2;", "%rd4, %rd4, 1;", OTHER),
    "B not turned": (HELD, r"1, 1, 1;", "1, 1, 0;", "0x6400: outside of the block's"),
    "D not added": (SHARED, r"p, 1, 0;", "p, 0, 0;", OTHER),
    "halves of another kind": (HELD, r"f16\.f16", "bf16.bf16", OTHER),
    "no swizzle": (SHARED, _STRIDES, f"{_OR}{2**38};", DESCRIPTOR),
    "a base offset": (SHARED, _STRIDES, rf"\g<0>{_OR}{2**49};", DESCRIPTOR),
    "a descriptor of each warp": (
        SHARED,
        r"shr\.u32 %r4, %r1, 7;",
        "shr.u32 %r4, %r1, 5;",
        "a product whose threads have different descriptors or scales",
    ),
    "a warp ends": (
        SHARED,
        _TO_END,
        _LEAVE.format("lt.u32", 32),
        PARTED + "thread 0 at its",
    ),
    "a warp at a barrier": (
        HELD,
        _TO_END,
        _LEAVE.format("gt.u32", 223) + "bar.sync 0;\n",
        PARTED + "thread 224 at bar.sync",
    ),
    "a lane ends": (SHARED, _TO_END, _LEAVE.format("eq.s32", 5), "lanes part"),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.exhaustive] * (i % 3 > 0))
        for i, name in enumerate(MISUSES)
    ],
)
def test_misuses_of_products(tmp_path: pathlib.Path, name: str) -> None:
    """A mistake in a product is named, or shows in its bits."""
    p, old, new, said = MISUSES[name]
    text = product_ptx(p)
    mutant = re.sub(old, new, text)
    assert mutant != text
    done = product_run(tmp_path, p, mutant, "late" if len(name) % 2 else "eager")
    if said == OTHER:
        assert done.returncode == 0, done.stderr
        assert done.stdout != expected(tmp_path, p)
    else:
        assert done.returncode == MISTAKE, done.stdout + done.stderr
        assert re.search(said, done.stderr), done.stderr
