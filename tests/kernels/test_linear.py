"""test_linear.py -- tests linear layers and their gradients: values, bits, edges of memory.

A chain of K fused multiply-adds, in bf16 one to an even number, errs by at most K * u * (|a| . |b|)
to first order, u = 2**-24. The values that bf16 flushes, 2**-126 per term, are below all these
bounds. The bias and the rounding to bf16 add one rounding each of the result. Nothing else is
allowed for, except on a GPU: for some shapes cuBLASLt rounds a product before it adds a bias, so
that the product has a rounding of its own (an H200, version 13.1: all results that differ are those
of two roundings). Under emulation cuBLASLt is a loop, which tests whether it is asked for the right
product.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import mmap
import os
import re

import numpy as np
import pytest

from tests.lib import zk
from tests.lib.trainer import ROOT, alone, sh

Array = np.ndarray

U = 2.0**-24  # half an ulp of f32 next to 1
SHAPES = [
    (1, 1, 1),
    (1, 60, 33),
    (33, 1, 60),
    (33, 60, 1),
    (7, 49, 385),
    (100, 130, 60),
    (385, 33, 1153),
    (33, 1200, 20),
    (9, 96, 800),
    (33, 65, 3105),
]
LAYOUTS = [zk.IN_OUT, zk.OUT_IN]


@pytest.fixture(params=zk.OBJECTS)
def isa(request: pytest.FixtureRequest) -> str:
    zk.need(request.param)
    return request.param


@pytest.fixture(params=[*zk.OBJECTS, zk.EMULATED])
def target(request: pytest.FixtureRequest) -> str:
    zk.need(request.param)
    return request.param


@pytest.fixture(params=zk.REALS.values(), ids=zk.REALS)
def dtype(request: pytest.FixtureRequest) -> int:
    return request.param


def drawn(seed: int, dtype: int, *shape: int) -> Array:
    """Return numbers over six decades, half of that in f16, so that another order shows in the
    bits. They are exact on every machine."""
    r = np.random.default_rng(seed)
    whole = r.integers(-(2**23), 2**23, shape)
    exponent = r.integers(-33, -23 if dtype == zk.F16 else -13, shape)
    return zk.store(np.ldexp(whole, exponent), dtype)


def layers(dtype: int, M: int, N: int, K: int, layout: int) -> tuple[Array, ...]:
    """Return x [M,K], w by layout, b [N], dy [M,N]."""
    shapes = (M, K), (K, N) if layout == zk.IN_OUT else (N, K), (N,), (M, N)
    return tuple(drawn(seed, dtype, *shape) for seed, shape in enumerate(shapes, 1))


def close(
    found: Array, a: Array, b: Array, bias: Array | float = 0.0, twice: bool = False
) -> None:
    """Assert that found [M,N] is a[M,K] . b[K,N] + bias. twice: a GPU may round the product, too."""
    want, size = a @ b + bias, np.abs(a) @ np.abs(b)
    # With the second order
    chain = a.shape[1] * U * (1 + a.shape[1] * U) * size
    bound = chain + (U * (np.abs(want) + chain) if np.any(bias) else 0)
    if zk.ON_DEVICE and twice:
        bound = bound + zk.rounding(np.abs(want - bias) + chain, zk.kind(found))
    bound = bound + zk.rounding(np.abs(want) + bound, zk.kind(found))
    found = zk.load(found)
    assert np.isfinite(found).all()
    assert (np.abs(found - want) <= bound).all()


def products(
    k: zk.Kernels, M: int, N: int, K: int, layout: int, full: int = 0
) -> tuple[Array, ...]:
    """Return y with and without bias, dx, dw, db; all buffers start as NaN."""
    x, w, b, dy = layers(k.dtype, M, N, K, layout)
    y, plain, dx = (
        zk.empty(k.dtype, M, N),
        zk.empty(k.dtype, M, N),
        zk.empty(k.dtype, M, K),
    )
    dw, db = (
        zk.empty(zk.F32 if full else k.dtype, *w.shape),
        zk.empty(k.dtype, N),
    )
    k.zk_linear_fwd(y, x, w, b, M, N, K, layout)
    k.zk_linear_fwd(plain, x, w, None, M, N, K, layout)
    k.zk_linear_bwd_x(dx, dy, w, M, N, K, layout)
    k.zk_linear_bwd_w(dw, dy, x, M, N, K, layout, full, 0)
    k.zk_linear_bwd_b(db, dy, M, N)
    return y, plain, dx, dw, db


def bits(arrays: tuple[Array, ...]) -> str:
    return hashlib.sha256(b"".join(a.tobytes() for a in arrays)).hexdigest()


# ---- values


@pytest.mark.parametrize("full", [0, 1])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("M,N,K", SHAPES)
def test_values(
    target: str, dtype: int, M: int, N: int, K: int, layout: int, full: int
) -> None:
    x, w, b, dy = map(zk.load, layers(dtype, M, N, K, layout))
    inward = w if layout == zk.IN_OUT else w.T  # [K,N]
    for order in zk.orders(dtype, target):
        k = zk.Kernels(target, dtype, order=order)
        y, plain, dx, dw, db = products(k, M, N, K, layout, full)
        close(y, x, inward, b, target == zk.EMULATED)
        close(plain, x, inward)
        close(dx, dy, inward.T)
        close(dw, *((x.T, dy) if layout == zk.IN_OUT else (dy.T, x)))
        close(db[None], np.ones((1, M)), dy)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_vocabulary_of_gpt2(target: str, dtype: int, layout: int) -> None:
    M, N, K = 3, 50257, 40
    x, w, b, dy = map(zk.load, layers(dtype, M, N, K, layout))
    y, _, dx, dw, db = products(zk.Kernels(target, dtype, 2), M, N, K, layout)
    inward = w if layout == zk.IN_OUT else w.T
    close(y, x, inward, b)
    close(dx, dy, inward.T)
    close(dw, *((x.T, dy) if layout == zk.IN_OUT else (dy.T, x)))
    close(db[None], np.ones((1, M)), dy)


def test_not_a_number_stays_in_its_row(target: str, dtype: int) -> None:
    M, N, K = 20, 70, 50
    x, w, b, _ = layers(dtype, M, N, K, zk.IN_OUT)
    y = zk.empty(dtype, M, N)
    x[13, 7] = zk.store(np.array([np.nan]), dtype)[0]
    zk.Kernels(target, dtype).zk_linear_fwd(y, x, w, b, M, N, K, zk.IN_OUT)
    assert (np.isnan(zk.load(y)).all(axis=1) == (np.arange(M) == 13)).all()
    assert not np.isnan(np.delete(zk.load(y), 13, 0)).any()


# ---- bits


def fused(a: float, b: float, c: float) -> float:
    """Return a * b + c of f32 numbers, rounded once to f32. longdouble holds the product exactly. A
    sum that it had to round is made odd, so the second rounding is right."""
    p, q = np.longdouble(a) * np.longdouble(b), np.longdouble(c)
    s = p + q
    back = s - p
    rest = (p - (s - back)) + (q - back)
    if rest != 0:
        mantissa, exponent = np.frexp(s)
        whole = int(np.ldexp(mantissa, 64))
        if whole % 2 == 0:
            s = np.ldexp(np.longdouble(whole) + (1 if rest > 0 else -1), exponent - 64)
    return np.float32(s)


def test_the_chain_ascends(isa: str) -> None:
    """Each element has the bits of one chain of fused multiply-adds over ascending k, with the bias
    added last. A chain over descending k differs, so the test can fail."""
    M, N, K = 3, 5, 400
    x, w, b, dy = layers(zk.F32, M, N, K, zk.IN_OUT)
    y, plain, _, _, db = products(zk.Kernels(isa), M, N, K, zk.IN_OUT)
    differs = 0
    for m, n in np.ndindex(M, N):
        up = down = np.float32(0)
        for k in range(K):
            up = fused(x[m, k], w[k, n], up)
            down = fused(x[m, K - 1 - k], w[K - 1 - k, n], down)
        assert plain[m, n] == up and y[m, n] == up + b[n]
        differs += up != down
    assert differs > M * N // 2
    rows = np.zeros(N, np.float32)
    for row in dy:
        rows = rows + row
    assert rows.tobytes() == db.tobytes()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "M,N,K,tile",
    [
        (60, 100, 47, (0, 0, 0)),
        (896, 41, 64, (0, 0, 0)),
        (896, 41, 64, (32, 64, 32)),
        (8, 3, 5, (0, 0, 0)),
    ],
)
def test_a_gradient_carries_on(
    isa: str, M: int, N: int, K: int, tile: tuple[int, int, int], layout: int
) -> None:
    """A gradient over four parts of the rows is one chain of sums with the bits of all rows at
    once. In bf16 parts of 15 rows cut its pairs, and parts may cut the groups of tiles, so the bits
    differ."""
    kinds = [(d, o) for d in zk.REALS.values() for o in zk.orders(d)]
    for dtype, order in kinds:
        k = zk.Kernels(isa, dtype, 2, tile=tile, order=order)
        x, w, _, dy = layers(dtype, M, N, K, layout)
        whole, parts = zk.empty(zk.F32, *w.shape), zk.empty(zk.F32, *w.shape)
        k.zk_linear_bwd_w(whole, dy, x, M, N, K, layout, 1, 0)
        for i in range(0, M, M // 4):
            k.zk_linear_bwd_w(
                parts,
                dy[i : i + M // 4],
                x[i : i + M // 4],
                M // 4,
                N,
                K,
                layout,
                1,
                i,
            )
        cut = dtype == zk.BF16 and M // 4 % (2, 32)[order]
        assert (parts.tobytes() != whole.tobytes()) == bool(cut)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_gradient_carries_on_under_emulation(layout: int) -> None:
    """A gradient over parts matches float64 on an emulated GPU, with a chain of rows and an
    addition for each part."""
    M, N, K = 60, 20, 47
    k = zk.Kernels(zk.EMULATED, zk.BF16)
    x, w, _, dy = layers(zk.BF16, M, N, K, layout)
    dw = zk.empty(zk.F32, *w.shape)
    for i in range(0, M, 15):
        k.zk_linear_bwd_w(dw, dy[i : i + 15], x[i : i + 15], 15, N, K, layout, 1, i)
    wide_x, wide_dy = zk.load(x), zk.load(dy)
    a, b = (wide_x.T, wide_dy) if layout == zk.IN_OUT else (wide_dy.T, wide_x)
    close(dw, a, b)


def sliced(k: zk.Kernels, M: int, N: int, K: int, slices: int) -> tuple[Array, ...]:
    """Return y with and without bias, dx in f32, dw, computed slice by slice."""
    x, w, b, dy = layers(k.dtype, M, N, K, zk.OUT_IN)
    y, plain, dx = (
        zk.empty(k.dtype, M, N),
        zk.empty(k.dtype, M, N),
        zk.empty(zk.F32, M, K),
    )
    dw, n = zk.empty(k.dtype, N, K), N // slices
    for at in range(0, N, n):
        part, grad = w[at : at + n].copy(), dw[at : at + n]
        k.zk_slice_fwd(y, x, part, b, M, N, K, at, n)
        k.zk_slice_fwd(plain, x, part, None, M, N, K, at, n)
        k.zk_slice_bwd_x(dx, dy, part, M, N, K, at, n)
        k.zk_slice_bwd_w(grad, dy, x, M, N, K, at, n)
    return y, plain, dx, dw


@pytest.mark.parametrize(
    "M,N,K,slices",
    [
        (60, 96, 47, 12),
        (9, 96, 800, 2),
        (100, 1200, 20, 3),
        (33, 400, 385, 5),
        (7, 24, 64, 3),
    ],
)
def test_slices_have_the_wholes_bits(
    isa: str, dtype: int, M: int, N: int, K: int, slices: int
) -> None:
    """Slices have the bits of the whole; dx is summed in f32 and rounded once."""
    k = zk.Kernels(isa, dtype, 2)
    y, plain, dx, dw, _ = products(k, M, N, K, zk.OUT_IN)
    found = sliced(k, M, N, K, slices)
    whole = y, plain, dx, dw
    found = (*found[:2], zk.store(found[2], dtype), found[3])
    for a, b in zip(found, whole, strict=True):
        assert a.tobytes() == b.tobytes()


def test_slices_under_emulation(dtype: int) -> None:
    M, N, K = 30, 96, 40
    x, w, b, dy = map(zk.load, layers(dtype, M, N, K, zk.OUT_IN))
    y, plain, dx, dw = sliced(zk.Kernels(zk.EMULATED, dtype), M, N, K, 4)
    close(y, x, w.T, b)
    close(plain, x, w.T)
    close(dx, dy, w)
    close(dw, dy.T, x)


def adapted(
    k: zk.Kernels, M: int, N: int, K: int, at: int, n: int, inside: bool
) -> tuple[Array, ...]:
    """Return y, dx, dw of an adapter. inside: y is in the place of base."""
    x, w, _, dy = layers(k.dtype, M, N, K, zk.OUT_IN)
    base, part = drawn(5, k.dtype, M, N), w[at : at + n].copy()
    y = base if inside else zk.empty(k.dtype, M, N)
    dx, dw = zk.empty(k.dtype, M, K), zk.empty(k.dtype, n, K)
    k.zk_lora_fwd(y, base, x, part, M, N, K, at, n, SCALE)
    k.zk_lora_bwd_x(dx, dy, part, M, N, K, at, n, SCALE)
    k.zk_lora_bwd_w(dw, dy, x, M, N, K, at, n, SCALE, 0, 0)
    return y, dx, dw


SCALE = 1.5  # exact in f32, no power of two


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize(
    "M,N,K,at,n",
    [(60, 96, 8, 64, 32), (9, 1300, 3, 0, 1300), (100, 50, 400, 7, 13)],
)
def test_adapters(
    target: str,
    dtype: int,
    M: int,
    N: int,
    K: int,
    at: int,
    n: int,
    inside: bool,
) -> None:
    """An adapter changes columns [at, at + n) alone; the scale and the addition are a rounding
    each."""
    x, w, _, dy = map(zk.load, layers(dtype, M, N, K, zk.OUT_IN))
    base, w, dy = (
        zk.load(drawn(5, dtype, M, N)),
        w[at : at + n],
        dy[:, at : at + n],
    )
    y, dx, dw = adapted(zk.Kernels(target, dtype), M, N, K, at, n, inside)
    close(
        y[:, at : at + n],
        SCALE * x,
        w.T,
        base[:, at : at + n],
        target == zk.EMULATED,
    )
    close(dx, SCALE * dy, w, np.zeros_like(x) + 1e-300)
    close(dw, SCALE * dy.T, x, np.zeros_like(w) + 1e-300)
    rest = np.delete(zk.load(y), np.s_[at : at + n], axis=1)
    assert (rest == np.delete(base, np.s_[at : at + n], axis=1)).all()


@pytest.mark.parametrize("threads", [1, 3])
def test_adapters_have_the_same_bits(isa: str, dtype: int, threads: int) -> None:
    """Adapters have the same bits in place or not, in any tiles, and from every object in f32;
    16-bit results are the f32 ones rounded once."""
    shape = 100, 400, 385, 70, 300
    for order in zk.orders(dtype):
        first = adapted(zk.Kernels("avx2", dtype, order=order), *shape, False)
        k = zk.Kernels(isa, dtype, threads, order=order)
        for inside in (False, True):
            assert bits(adapted(k, *shape, inside)) == bits(first)


def carried(k: zk.Kernels, M: int, N: int, K: int, n: int) -> Array:
    """Return an adapter's dw in f32 over two chunks of rows."""
    x, _, _, dy = layers(k.dtype, M, N, K, zk.OUT_IN)
    dw, cut = zk.empty(zk.F32, n, K), M // 2
    for carry, rows in enumerate((slice(0, cut), slice(cut, M))):
        some = dy[rows].copy(), x[rows].copy()
        k.zk_lora_bwd_w(dw, *some, cut, N, K, 0, n, SCALE, 1, carry)
    return dw


CHUNKS = 64, 56, 9, 51  # M, N, K, n


def test_an_adapter_carries_on(target: str, dtype: int) -> None:
    """Each chunk of an adapter's gradient is scaled, then added."""
    M, N, K, n = CHUNKS
    x, _, _, dy = map(zk.load, layers(dtype, M, N, K, zk.OUT_IN))
    found = carried(zk.Kernels(target, dtype), *CHUNKS)
    close(found, SCALE * dy[:, :n].T, x, np.zeros((n, K)) + 1e-300)


def test_an_adapter_that_carries_on_has_the_same_bits(isa: str, dtype: int) -> None:
    for order in zk.orders(dtype):
        first = carried(zk.Kernels("avx2", dtype, order=order), *CHUNKS)
        found = carried(zk.Kernels(isa, dtype, 3, order=order), *CHUNKS)
        assert found.tobytes() == first.tobytes()


def test_f16_is_f32_rounded_once(isa: str) -> None:
    M, N, K, dtype = 40, 100, 1000, zk.F16
    halves = layers(dtype, M, N, K, zk.IN_OUT)
    found = products(zk.Kernels(isa, dtype), M, N, K, zk.IN_OUT)
    wide = zk.Kernels(isa)
    x, w, b, dy = (zk.load(x).astype(np.float32) for x in halves)
    y, dx, dw = (
        zk.empty(zk.F32, M, N),
        zk.empty(zk.F32, M, K),
        zk.empty(zk.F32, K, N),
    )
    wide.zk_linear_fwd(y, x, w, b, M, N, K, zk.IN_OUT)
    wide.zk_linear_bwd_x(dx, dy, w, M, N, K, zk.IN_OUT)
    wide.zk_linear_bwd_w(dw, dy, x, M, N, K, zk.IN_OUT, 1, 0)
    for narrow, exact in zip((found[0], found[2], found[3]), (y, dx, dw), strict=True):
        assert narrow.tobytes() == zk.store(exact, dtype).tobytes()
    full = zk.empty(zk.F32, K, N)
    zk.Kernels(isa, dtype).zk_linear_bwd_w(
        full, halves[3], halves[0], M, N, K, zk.IN_OUT, 1, 0
    )
    assert full.tobytes() == dw.tobytes()


@functools.cache
def model() -> ctypes.CDLL:
    """Return tests/kernels/pairs.c, compiled with the instruction if the processor has it."""
    has = zk.runs("avx512bf16")
    out = ROOT / "out/test" / "pairs.so"
    with alone("pairs"):
        sh(
            *("gcc", "-O2", "-ffp-contract=off", "-shared", "-fPIC"),
            *(["-mavx512f", "-mavx512bf16"] if has else []),
            *("-o", out, "tests/kernels/pairs.c", "-lm"),
        )
    return ctypes.CDLL(str(out))


def tiny(x: Array, seed: int) -> Array:
    """Return bf16 numbers near the smallest, every eighth of them below it."""
    r = np.random.default_rng(seed)
    small = np.where(r.integers(0, 8, x.shape) > 0, r.integers(50, 70), 0)
    return (x & 0x807F | small.astype(np.uint16) << 7).astype(np.uint16)


def by_pairs(a: Array, b: Array, odd_first: int = 1) -> Array:
    """Return f32 [M,N]: a [M,K] . b [K,N] of bf16, one term after the other."""
    return modelled("pairs", a, b, odd_first)


def by_groups(a: Array, b: Array) -> Array:
    """Return the same in groups of 32."""
    return modelled("groups", a, b)


def modelled(name: str, a: Array, b: Array, *rest: int) -> Array:
    (M, K), N = a.shape, b.shape[1]
    a, b, y = a.copy(), b.copy(), np.empty((M, N), np.float32)
    pointers = [ctypes.c_void_p(x.ctypes.data) for x in (y, a, b)]
    sizes = [ctypes.c_int64(n) for n in (M, N, K)]
    getattr(model(), name)(*pointers, *sizes, *rest)
    return y


@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("order", zk.ORDERS)
@pytest.mark.parametrize("M,N,K", [(1, 1, 1), (9, 50, 1037), (70, 61, 40)])
def test_bf16_has_two_orders(
    isa: str, M: int, N: int, K: int, order: int, layout: int, small: bool
) -> None:
    """Every object has the bits of AVX512_BF16's model and of AMX's, with denormals flushed.
    Another order differs, so the test can fail."""
    model, other = by_pairs, functools.partial(by_pairs, odd_first=0)
    if order == zk.TILED:
        model, other = by_groups, by_pairs
    k = zk.Kernels(isa, zk.BF16, order=order)
    x, w, _, dy = layers(zk.BF16, M, N, K, layout)
    if small:
        x, w, dy = (tiny(a, i) for i, a in enumerate((x, w, dy)))
    y, dx = zk.empty(zk.BF16, M, N), zk.empty(zk.BF16, M, K)
    dw = zk.empty(zk.F32, *w.shape)
    k.zk_linear_fwd(y, x, w, None, M, N, K, layout)
    k.zk_linear_bwd_x(dx, dy, w, M, N, K, layout)
    k.zk_linear_bwd_w(dw, dy, x, M, N, K, layout, 1, 0)
    inward = w if layout == zk.IN_OUT else w.T
    assert y.tobytes() == zk.to_bf16(model(x, inward)).tobytes()
    assert dx.tobytes() == zk.to_bf16(model(dy, inward.T)).tobytes()
    a, b = (x.T, dy) if layout == zk.IN_OUT else (dy.T, x)
    assert dw.tobytes() == model(a, b).tobytes()
    if M > 1:
        assert dw.tobytes() != other(a, b).tobytes()


# Exponents of operands and of the sum before: common ones, all, products next to the smallest
# normal number, next to the largest, operands next to 0, products that round a sum across the
# smallest normal number.
EXPONENTS = [
    ((117, 137), (117, 137), (117, 137)),
    ((0, 256), (0, 256), (0, 256)),
    ((60, 68), (60, 68), (0, 4)),
    ((188, 194), (188, 194), (250, 255)),
    ((0, 3), (120, 123), (0, 4)),
    ((44, 54), (55, 59), (1, 2)),
]


@pytest.mark.parametrize("exponents", EXPONENTS)
def test_the_instruction_is_its_model(
    exponents: tuple[tuple[int, int], ...],
) -> None:
    """vdpbf16ps of this processor equals fused multiply-adds; NaN is NaN."""
    zk.need("avx512bf16")
    r, n = np.random.default_rng(1), 1 << 18

    def drawn(low: int, high: int, shift: int, type_: type) -> Array:
        bits = r.integers(0, 2 ** (shift + 9), n, np.uint64)
        rest = bits & np.uint64(2**shift - 1 | 1 << (shift + 8))
        exponent = r.integers(low, high, n, np.uint64) << np.uint64(shift)
        return (rest | exponent).astype(type_)

    a, b = (
        np.stack([drawn(*e, 7, np.uint16) for _ in "12"], 1).copy()
        for e in exponents[:2]
    )
    sums = drawn(*exponents[2], 23, np.uint32).view(np.float32)
    want, found = sums.copy(), sums.copy()
    for name, to in (("modelled", want), ("executed", found)):
        pointers = [ctypes.c_void_p(x.ctypes.data) for x in (to, a, b)]
        getattr(model(), name)(*pointers, ctypes.c_int64(n))
    same = want.view(np.uint32) == found.view(np.uint32)
    assert (same | np.isnan(want) & np.isnan(found)).all()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("M,N,K", [(130, 300, 400), (33, 60, 1)])
def test_objects_compilers_threads_and_tiles_change_no_bit(
    dtype: int, M: int, N: int, K: int, layout: int
) -> None:
    def made(*of: object, **more: object) -> set[tuple[int, str]]:
        """Return the orders with their bits; in one layout dw is f32."""
        return {
            (
                order,
                bits(
                    products(
                        *(zk.Kernels(*of, **more, order=order), M, N, K, layout),
                        full=int(layout == zk.OUT_IN),
                    )
                ),
            )
            for order in zk.orders(dtype)
        }

    found = set()
    for isa, compiler, threads in zk.variants(zk.OBJECTS):
        found |= made(isa, dtype, threads, compiler)
    most = 2**30
    tiles = [
        (1, 1, 1),
        (8, 48, 7),
        (50, 100, 64),
        (384, 1152, 384),
        (most, most, most),
        (0, 16, 0),
        (32, 32, 0),
    ]
    for isa in zk.isas(zk.OBJECTS):
        for tile in tiles:
            found |= made(isa, dtype, 2, tile=tile)
    assert len(found) == len(zk.orders(dtype))
    if M > 100:
        assert len(found) == len({each for _, each in found})


@pytest.mark.slow
@pytest.mark.parametrize("object_", zk.TILES)
@pytest.mark.parametrize(
    "M,N,K,tile",
    [
        (1345, 1, 3072, (0, 0, 0)),
        (1, 2689, 3072, (0, 0, 0)),
        (1345, 65, 6144, (0, 0, 0)),
        (131072, 32, 33, (0, 0, 32)),
    ],
)
def test_operands_that_exceed_the_panels_change_no_bit(
    object_: str, M: int, N: int, K: int, tile: tuple[int, int, int]
) -> None:
    """Operands and sums that do not fit into the panels at once are multiplied in slabs."""
    zk.need(object_)
    found = set()
    for isa in ("avx2", object_):
        x, w, b, _ = layers(zk.BF16, M, N, K, zk.OUT_IN)
        y = zk.empty(zk.BF16, M, N)
        k = zk.Kernels(isa, zk.BF16, 2, tile=tile, order=zk.TILED)
        k.zk_linear_fwd(y, x, w, b, M, N, K, zk.OUT_IN)
        found.add(bits((y,)))
    assert len(found) == 1


@pytest.mark.parametrize("object_", zk.TILES)
def test_more_threads_than_ranges_change_no_bit(object_: str) -> None:
    """A product has at most MOST_RANGES ranges of columns (tiles.h), however many threads."""
    zk.need(object_)
    text = (ROOT / "kernels" / "cpu" / "tiles.h").read_text()
    most = int(re.findall(r"MOST_RANGES = (\d+)", text)[0])
    M, N, K = 33, 32 * (most + 6) - 1, 64
    x, w, b, _ = layers(zk.BF16, M, N, K, zk.OUT_IN)
    found = set()
    for threads in (1, 2, most + 6):
        y = zk.empty(zk.BF16, M, N)
        k = zk.Kernels(object_, zk.BF16, threads, order=zk.TILED)
        k.zk_linear_fwd(y, x, w, b, M, N, K, zk.OUT_IN)
        found.add(bits((y,)))
    assert len(found) == 1 and not np.isnan(zk.load(y)).any()


KNOWN_BITS = {
    (
        zk.F32,
        zk.PAIRS,
    ): "7c61d71c3cafb5267f712d28c6a5ceb45f91fd6791b773eaf969b49e00a19880",
    (
        zk.BF16,
        zk.PAIRS,
    ): "79fcc476bbc6ca038b781163b81acd732e1ce17830cea7346e7730a87930cbe2",
    (
        zk.BF16,
        zk.TILED,
    ): "1d6124170874c40cd7cfc30e962e1cc635083632a199df9fce405680eea56f88",
    (
        zk.F16,
        zk.PAIRS,
    ): "c9a31581e2dd0ce6dd43f92abeda3704decb9a802021e366d8884cc4e9cd7822",
}


def test_known_bits(isa: str, dtype: int) -> None:
    """The bits are the known ones, the same on every machine in every version."""
    for order in zk.orders(dtype):
        k = zk.Kernels(isa, dtype, order=order)
        found = bits(products(k, 67, 131, 453, zk.OUT_IN))
        assert found == KNOWN_BITS[dtype, order]


# ---- memory


def fenced(x: Array, at_end: bool, keep: list[mmap.mmap]) -> Array:
    """Return a copy of x that ends (or starts) at a page without access."""
    page = mmap.PAGESIZE
    room = -(-x.nbytes // page) * page
    space = mmap.mmap(-1, room + 2 * page)
    keep.append(space)
    start = ctypes.addressof(ctypes.c_char.from_buffer(space))
    libc = ctypes.CDLL(None)
    for fence in (start, start + page + room):
        assert libc.mprotect(ctypes.c_void_p(fence), ctypes.c_size_t(page), 0) == 0
    offset = page + (room - x.nbytes if at_end else 0)
    copy = np.frombuffer(space, x.dtype, x.size, offset).reshape(x.shape)
    copy[...] = x
    return copy


def touch_only_operands(
    k: zk.Kernels, M: int, N: int, K: int, layout: int, at_end: bool
) -> None:
    keep: list[mmap.mmap] = []
    x, w, b, dy = (fenced(a, at_end, keep) for a in layers(k.dtype, M, N, K, layout))
    y, dx, dw, db = (fenced(np.zeros_like(a), at_end, keep) for a in (dy, x, w, b))
    k.zk_linear_fwd(y, x, w, b, M, N, K, layout)
    k.zk_linear_bwd_x(dx, dy, w, M, N, K, layout)
    k.zk_linear_bwd_w(dw, dy, x, M, N, K, layout, 0, 0)
    k.zk_linear_bwd_b(db, dy, M, N)


@pytest.mark.parametrize("at_end", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_nothing_beside_the_matrices_is_touched(
    target: str, dtype: int, layout: int, at_end: bool
) -> None:
    zk.library(zk.EMULATED if target == zk.EMULATED else "gcc")
    child = os.fork()  # a fault ends the child, not the tests
    if child == 0:
        failed = 1
        try:
            for order in zk.orders(dtype, target):
                k = zk.Kernels(target, dtype, order=order)
                for shape in SHAPES:
                    touch_only_operands(k, *shape, layout, at_end)
            failed = 0
        finally:
            os._exit(failed)
    assert os.waitpid(child, 0)[1] == 0


# ---- on a GPU


def shifted(x: Array, elements: int) -> Array:
    """Return a copy of x that starts `elements` elements after a multiple of 16 bytes."""
    room = np.zeros(x.size + 32, x.dtype)
    start = -room.ctypes.data % 16 // x.itemsize + elements
    copy = room[start : start + x.size].reshape(x.shape)
    copy[...] = x
    return copy


@pytest.mark.parametrize("M,N", [(1, 4), (37, 300), (700, 96), (1000, 1)])
def test_no_alignment_changes_the_bits_of_a_bias_gradient(
    dtype: int, M: int, N: int
) -> None:
    """A bias gradient has the same bits by four columns at a time or one, because rows are added in
    the same order."""
    zk.need(zk.EMULATED)
    k, dy, found = zk.Kernels(zk.EMULATED, dtype), drawn(1, dtype, M, N), set()
    for shift in (0, 1, 2, 3):
        db = zk.empty(dtype, N)
        k.zk_linear_bwd_b(db, shifted(dy, shift), M, N)
        close(db[None], np.ones((1, M)), zk.load(dy))
        found.add(db.tobytes())
    assert len(found) == 1


def test_products_of_any_alignment_beside_each_other(dtype: int) -> None:
    """Products of one context and shape that differ only in the alignment of their operands are
    right."""
    zk.need(zk.EMULATED)
    M, N, K = 9, 33, 24
    k, (x, w, b, _) = (
        zk.Kernels(zk.EMULATED, dtype),
        layers(dtype, M, N, K, zk.OUT_IN),
    )
    want, found = zk.empty(dtype, M, N), []
    zk.Kernels(dtype=dtype).zk_linear_fwd(want, x, w, b, M, N, K, zk.OUT_IN)
    for shifts in np.ndindex(2, 2, 2, 2):
        y, *operands = (
            shifted(a, s) for a, s in zip((want * 0, x, w, b), shifts, strict=True)
        )
        k.zk_linear_fwd(y, *operands, M, N, K, zk.OUT_IN)
        found.append(y.copy())
    if zk.ON_DEVICE:  # where the order of a sum is cuBLASLt's
        for y in found:
            close(y, zk.load(x), zk.load(w).T, zk.load(b), twice=True)
    else:
        assert {y.tobytes() for y in found} == {want.tobytes()}
