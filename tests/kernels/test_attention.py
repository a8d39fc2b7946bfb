"""test_attention.py -- tests blocked causal attention, forward and backward: against float64, and
by bits.

The float64 formulas are themselves tested against finite differences. Bounds follow the roundings
of the kernel: every sum of n products errs by at most n unit roundoffs of the same sum of absolute
values. On tensor cores (emulated: bf16, heads of a multiple of 8) p and ds are rounded to bf16,
too, before they meet v, k, q and dy, and sums err more (CUT). In the order of tiles a CPU rounds
them as well.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import resource
import subprocess
import sys

import numpy as np
import pytest

from tests.lib import chance, zk
from tests.lib.covering import covering
from tests.lib.patience import LIMIT

# Unit roundoffs: the largest relative error of one rounding.
F32, BF16, F16 = (
    2.0**-24,
    2.0**-8,
    2.0**-11,
)
# On tensor cores a sum of n products errs by at most CUT * n unit roundoffs. For each 8 products
# those of sm_80 cut 9 terms to less than a unit roundoff of the largest, and the sum, toward zero,
# to less than two; later ones, for each 16, 17 terms to half of that, and the sum to two.
CUT = 11 / 8
# P below 2^-149 is 0, next to factors whose product is below 2^29
TINY = 2.0**-120
DTYPES = list(zk.REALS.values())
UNIT = {zk.F32: F32, zk.BF16: BF16, zk.F16: F16}
# B, T, H, G, D: one token, a short block, odd heads, groups, ends of blocks and of regions
SHAPES = [
    (1, 1, 1, 1, 8),
    (2, 33, 3, 3, 20),
    (1, 64, 2, 2, 64),
    (1, 65, 2, 1, 64),
    (2, 130, 4, 2, 24),
    (1, 70, 4, 1, 128),
    (1, 300, 2, 1, 36),
    (1, 521, 2, 2, 16),
]
# The same on a GPU, for each of its tiles: 64, 128 and 256 wide, plain of 64 and of 128 columns.
TILES = [
    (1, 1, 1, 1, 8),
    (2, 33, 3, 3, 20),
    (1, 65, 2, 1, 64),
    (1, 70, 4, 1, 128),
    (2, 135, 2, 1, 24),
    (1, 140, 2, 2, 64),
    (1, 300, 2, 1, 128),
    (1, 90, 1, 1, 256),
    (1, 66, 2, 1, 136),
    (1, 20, 1, 1, 300),
]
# The best object of this processor; the GPU's, on a CPU.
OBJECTS = [
    None,
    zk.EMULATED,
]
BY_TILES = "by tiles"  # AMX, emulated where it is not, in an order that only bf16 has
ON = [
    *((None, dtype, *shape) for shape in SHAPES for dtype in DTYPES),
    *((zk.EMULATED, dtype, *shape) for shape in TILES for dtype in DTYPES),
    *((BY_TILES, zk.BF16, *shape) for shape in SHAPES),
]

EACH = [*itertools.product(OBJECTS, DTYPES), (BY_TILES, zk.BF16)]


def kernels(isa: str | None, dtype: int) -> zk.Kernels:
    """Return the kernels of an object, or of BY_TILES."""
    if isa == BY_TILES:
        return zk.Kernels(
            zk.isas((*zk.ISAS, "tiles", "amx"))[-1], dtype, order=zk.TILED
        )
    return zk.Kernels(isa, dtype)


Array = np.ndarray


def drawn(seed: int, dtype: int, *shape: int, size: float = 1.0) -> tuple[Array, Array]:
    """Return normal numbers as stored, and the same values in float64."""
    x = zk.store(np.random.default_rng(seed).standard_normal(shape) * size, dtype)
    return x, zk.load(x)


def close(found: Array, expected: Array, bound: Array, dtype: int) -> None:
    """Assert that stored results are within the bound plus the one rounding of storing."""
    slack = TINY + bound + zk.rounding(np.abs(expected) + bound, dtype)
    error = np.abs(zk.load(found) - expected)
    assert np.all(np.isfinite(zk.load(found)))
    assert np.all(error <= slack), f"{np.max(error / slack):.3g} of the bound"


@dataclasses.dataclass(frozen=True)
class Exact:
    """Attention in float64, with the largest error allowed for an f32 kernel."""

    y: Array  # [B, T, H, D]
    lse: Array  # [B, H, T]
    dqkv: Array  # [B, T, H + 2 G, D]
    y_off: Array
    lse_off: Array
    dqkv_off: Array


def head(
    q: Array,
    k: Array,
    v: Array,
    dy: Array,
    scale: float,
    stored: float,
    unit: float,
    inner: float,
    seen: Array,
    cap: float = 0,
    factor: Array | float = 1.0,
    cut: float = 1.0,
) -> tuple[tuple[Array, Array], ...]:
    """Return (value, bound) of y, lse, dq, dk, dv for one head; q, k, v, dy are [T, D].

    y is stored with unit roundoff `stored`, scores are computed with unit roundoff `unit`, p and ds
    enter products with `inner`. seen [T, T]: the keys that a query sees; cap: of scores, 0 for
    none; factor [T, T]: of probabilities, after the softmax; cut: roundings of a term of a sum.
    """
    T, D = q.shape
    x = scale * q @ k.T
    slope = 1 - np.tanh(x / cap) ** 2 if cap else np.ones_like(x)
    x = np.where(seen, cap * np.tanh(x / cap) if cap else x, -np.inf)
    lse = np.logaddexp.reduce(x, axis=1)
    p = np.exp(x - lse[:, None])
    y = (p * factor) @ v
    dp = factor * (dy @ v.T)
    dot = (dy * y).sum(1)
    ds = scale * p * (dp - dot[:, None]) * slope
    # A score errs by D + 1 roundings of its sum of absolute products, and so does every later
    # maximum, which cancels. exp is within two ulps, its argument within one rounding of the
    # largest score.
    raw_off = np.where(seen, cut * (D + 1) * unit * scale * np.abs(q) @ np.abs(k.T), 0)
    top = np.where(seen, np.abs(x), 0).max(1)
    # A cap shrinks errors, and adds those of a quotient, a tanh within 4 ulp and a product.
    x_off = raw_off.max(1) + (10 * F32 * top if cap else 0)
    # relative, of every p of a row
    p_off = 2 * (x_off + 2 * F32 * top) + ((1 + cut) * T + 16) * F32
    lse_off = p_off + F32 * np.abs(lse)
    # with a factor, one rounding more of p and of dp
    P, V, K, Q, DY = p * factor, np.abs(v), np.abs(k), np.abs(q), np.abs(dy)
    y_off = (p_off[:, None] + inner) * (P @ V)
    # backward recomputes p from the rounded lse
    again = (lse_off + x_off + F32 * (top + np.abs(lse)) + 8 * F32)[:, None]
    dot_off = (DY * (y_off + stored * np.abs(y))).sum(1) + (D + 1) * F32 * (
        DY * np.abs(y)
    ).sum(1)
    dp_off = factor * (cut * (D + 2) * F32 * DY @ V.T)
    both = np.abs(dp) + np.abs(dot)[:, None]
    ds_off = scale * p * (dp_off + dot_off[:, None] + (again + 4 * F32) * both) * slope
    if cap:  # 1 - t^2 errs by twice the error of t
        bent_off = 2 * (raw_off / cap * slope + 9 * F32) + 2 * F32
        ds_off += bent_off * scale * p * both
    dS = np.abs(ds) + ds_off
    return (
        (y, y_off),
        (lse, lse_off),
        (ds @ k, ds_off @ K + (cut * (T + 1) * F32 + inner) * dS @ K),
        (ds.T @ q, ds_off.T @ Q + (cut * (T + 1) * F32 + inner) * dS.T @ Q),
        (
            (p * factor).T @ dy,
            (again * P).T @ DY + (cut * (T + 1) * F32 + inner) * P.T @ DY,
        ),
    )


def exact(
    qkv: Array,
    dy: Array,
    H: int,
    G: int,
    scale: float,
    stored: float,
    unit: float = F32,
    inner: float = 0,
    seen: Array | None = None,
    cap: float = 0,
    factor: Array | None = None,
    cut: float = 1.0,
) -> Exact:
    """Return attention of qkv [B, T, H + 2 G, D] and dy [B, T, H, D]. seen [B, T, T]: visible keys;
    None: all keys up to a query; factor [B, H, T, T]: of probabilities."""
    B, T = qkv.shape[:2]
    sight = np.broadcast_to(np.tri(T, dtype=bool), (B, T, T))
    sight = sight if seen is None else sight & seen
    e = Exact(
        *(np.zeros(s) for _ in range(2) for s in (dy.shape, (B, H, T), qkv.shape))
    )
    for b, h in np.ndindex(B, H):
        at = h, H + h // (H // G), H + G + h // (H // G)
        y, lse, *grads = head(
            *(qkv[b, :, i] for i in at),
            dy[b, :, h],
            scale,
            stored,
            unit,
            inner,
            sight[b],
            cap,
            1.0 if factor is None else factor[b, h],
            cut,
        )
        e.y[b, :, h], e.y_off[b, :, h] = y
        e.lse[b, h], e.lse_off[b, h] = lse
        for i, (g, off) in zip(at, grads, strict=True):
            e.dqkv[b, :, i] += g
            # a group's heads are added one after the other
            e.dqkv_off[b, :, i] += off + H // G * F32 * np.abs(g)
    return e


def attention(
    k: zk.Kernels,
    dtype: int,
    qkv: Array,
    dy: Array,
    G: int,
    scale: float,
    *local: object,
) -> tuple[Array, ...]:
    """Return y, lse, dqkv of the kernels; all buffers start as NaN. local: positions (or None), the
    window, and the cap if there is one, or of a dropout key, place, first head and rate."""
    (B, T, S, D), H = qkv.shape, dy.shape[2]
    y, dqkv = zk.empty(dtype, *dy.shape), zk.empty(dtype, *qkv.shape)
    lse = zk.empty(zk.F32, B, H, T)
    scratch = zk.empty(zk.F32, B * H * T + B * T * S * D)
    if local:
        position, window, *more = local
        name = ("local", "capped", "", "", "dropped")[len(more)]
        key, place, last = more[:-3], more[-3:-1], more[-1:]
        sizes = position, *key, B, T, H, G, D, window, *place, scale, *last
        getattr(k, f"zk_attention_{name}_fwd")(y, lse, qkv, *sizes)
        backward = getattr(k, f"zk_attention_{name}_bwd")
        backward(dqkv, dy, y, qkv, lse, scratch, *sizes)
        return y, lse, dqkv
    k.zk_attention_fwd(y, lse, qkv, B, T, H, G, D, scale)
    k.zk_attention_bwd(dqkv, dy, y, qkv, lse, scratch, B, T, H, G, D, scale)
    return y, lse, dqkv


def compare(found: tuple[Array, ...], e: Exact, dtype: int) -> None:
    y, lse, dqkv = found
    close(y, e.y, e.y_off, dtype)
    close(lse, e.lse, e.lse_off, zk.F32)
    close(dqkv, e.dqkv, e.dqkv_off, dtype)


@pytest.mark.parametrize("cap,dropped", [(0, False), (0.7, False), (0, True)])
def test_formulas_against_finite_differences(cap: float, dropped: bool) -> None:
    r = np.random.default_rng(0)
    H, G, scale = 4, 2, 0.7
    qkv, dy = (
        r.standard_normal((1, 4, H + 2 * G, 3)),
        r.standard_normal((1, 4, H, 3)),
    )
    factor = 1.5 * (r.random((1, H, 4, 4)) < 0.7) if dropped else None
    more = {"cap": cap, "factor": factor}
    found = exact(qkv, dy, H, G, scale, 0, **more).dqkv
    for i in np.ndindex(qkv.shape):
        step = np.zeros_like(qkv)
        step[i] = 1e-6  # truncation about 1e-12, rounding about 1e-9
        up, down = (exact(qkv + s, dy, H, G, scale, 0, **more).y for s in (step, -step))
        assert abs((dy * (up - down)).sum() / 2e-6 - found[i]) < 1e-7


def roundings(isa: str | None, dtype: int, D: int) -> dict[str, float]:
    """Return the unit roundoff of p and ds on tensor cores and in the order of tiles, and the cut
    of tensor cores."""
    if isa == zk.EMULATED and dtype != zk.F32 and D % 8 == 0 and D <= 256:
        return {"inner": UNIT[dtype], "cut": CUT}
    return {"inner": UNIT[dtype] if isa == BY_TILES else 0}


@pytest.mark.parametrize("isa,dtype,B,T,H,G,D", ON)
def test_attention(
    isa: str | None, dtype: int, B: int, T: int, H: int, G: int, D: int
) -> None:
    (qkv, QKV), (dy, DY) = (
        drawn(1, dtype, B, T, H + 2 * G, D),
        drawn(2, dtype, B, T, H, D),
    )
    scale = float(np.float32(D**-0.5))
    found = attention(kernels(isa, dtype), dtype, qkv, dy, G, scale)
    compare(
        found,
        exact(QKV, DY, H, G, scale, UNIT[dtype], **roundings(isa, dtype, D)),
        dtype,
    )


def test_tiles_of_a_smaller_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A smaller GPU, whose shared memory holds tiles of 32 keys beside another block's, is
    accurate, too."""
    monkeypatch.setattr(zk, "TARGET", "sm_80")
    monkeypatch.setenv("ZR_EMULATE_CC", "80")
    test_attention(zk.EMULATED, zk.BF16, 1, 140, 2, 1, 128)


@pytest.mark.parametrize("isa", OBJECTS)
def test_large_scores(isa: str | None) -> None:
    """Scores are integers up to some ten thousands, exact in f32. A kernel that takes exp of one
    overflows, and one that takes the maximum of masked scores loses everything."""
    r = np.random.default_rng(3)
    B, T, H, G, D = 1, 150, 2, 1, 32
    qkv = r.integers(-40, 41, (B, T, H + 2 * G, D)).astype(np.float32)
    dy = r.standard_normal((B, T, H, D)).astype(np.float32)
    e = exact(qkv.astype(np.float64), dy.astype(np.float64), H, G, 1.0, F32, 0.0)
    y, lse, dqkv = attention(zk.Kernels(isa), zk.F32, qkv, dy, G, 1.0)
    assert np.abs(e.lse).max() > 1e4
    assert np.all(np.isfinite(dqkv))
    # scores are exact: only exp, sums, and the stored maximum in lse are rounded
    close(
        y,
        e.y,
        (2 * T + 16) * F32 * np.abs(qkv).max() * np.ones_like(e.y),
        zk.F32,
    )
    close(lse, e.lse, 2 * F32 * np.abs(e.lse) + T * F32, zk.F32)
    close(dqkv, e.dqkv, e.dqkv_off, zk.F32)


@pytest.mark.parametrize("isa", OBJECTS)
def test_scores_beyond_exp(isa: str | None) -> None:
    """Scores far below or far above the range of exp let one value win."""
    T, D = 80, 16
    qkv = np.zeros((1, T, 3, D), np.float32)
    qkv[0, :, 0, 0] = 1e18
    # Scores -1e35 (key 5), -1e36
    qkv[0, :, 1, 0] = np.where(np.arange(T) == 5, -1e17, -1e18)
    qkv[0, :, 2] = np.arange(T)[:, None]
    dy = np.ones((1, T, 1, D), np.float32)
    y, lse, dqkv = attention(zk.Kernels(isa), zk.F32, qkv, dy, 1, 1.0)
    assert np.array_equal(y[0, 5:, 0], np.full((T - 5, D), 5.0))
    # equal scores: a mean; 1/n is rounded, and so is each of n products and sums
    assert np.allclose(y[0, :5, 0], (np.arange(5) / 2)[:, None], rtol=8 * F32)
    assert np.all(np.isfinite(lse)) and not np.any(np.isnan(dqkv))


@pytest.mark.parametrize(
    "isa,dtype",
    [(None, zk.F32), (BY_TILES, zk.BF16), *((zk.EMULATED, d) for d in DTYPES)],
)
def test_not_a_number_shows(isa: str | None, dtype: int) -> None:
    """NaN in a key reaches every later query and no earlier one."""
    T, D = 150, 16
    qkv, _ = drawn(1, dtype, 1, T, 3, D)
    dy, _ = drawn(2, dtype, 1, T, 1, D)
    qkv[0, 70, 1, 3] = zk.empty(dtype, 1)[0]
    y, lse, _ = attention(kernels(isa, dtype), dtype, qkv, dy, 1, 0.25)
    y = zk.load(y)
    assert np.all(np.isnan(y[0, 70:])) and np.all(np.isnan(lse[0, 0, 70:]))
    assert np.all(np.isfinite(y[0, :70])) and np.all(np.isfinite(lse[0, 0, :70]))


@pytest.mark.parametrize("isa,dtype", EACH)
def test_later_tokens_do_not_matter(isa: str | None, dtype: int) -> None:
    """The result of a query has the same bits whatever tokens come after it."""
    T, D = 150, 24
    (qkv, _), (dy, _) = (
        drawn(1, dtype, 1, T, 4, D),
        drawn(2, dtype, 1, T, 2, D),
    )
    k = kernels(isa, dtype)
    y, lse, _ = attention(k, dtype, qkv, dy, 1, 0.2)
    for t in (1, 40, 64, 100):
        other, other_lse, _ = attention(
            k, dtype, qkv[:, :t].copy(), dy[:, :t].copy(), 1, 0.2
        )
        assert other.tobytes() == y[:, :t].tobytes()
        assert other_lse.tobytes() == lse[:, :, :t].tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("B,T,H,G,D", [(2, 33, 3, 3, 20), (1, 331, 4, 2, 40)])
def test_bits(B: int, T: int, H: int, G: int, D: int, dtype: int) -> None:
    """The bits are the same for every kernel object, compiler and number of threads."""
    (qkv, _), (dy, _) = (
        drawn(1, dtype, B, T, H + 2 * G, D),
        drawn(2, dtype, B, T, H, D),
    )
    one_result(dtype, zk.PAIRS, qkv, dy, G, 0.2)


def one_result(dtype: int, order: int, *given: object) -> bytes:
    """Return the bits of attention, which all objects, compilers and numbers of threads share."""
    found = {}
    for isa, compiler, threads in zk.variants((*zk.ISAS, *zk.TILES)):
        k = zk.Kernels(isa, dtype, threads, compiler, order=order)
        bits = b"".join(x.tobytes() for x in attention(k, dtype, *given))
        found.setdefault(bits, (isa, compiler, threads))
    assert len(found) == 1, found.values()
    return next(iter(found))


# Sizes of q, k, v and of dy: common ones; products that are denormals or 0; ds around the smallest
# normal number; scores so far apart that p is.
SIZES = [(1.0, 1.0), (2.0**-66, 2.0**-66), (1.0, 2.0**-118), (4.0, 1.0), (8.0, 1.0)]


@pytest.mark.parametrize("size,size_dy", SIZES)
@pytest.mark.parametrize(
    "B,T,H,G,D",
    [
        (2, 33, 3, 3, 20),
        (1, 331, 4, 2, 40),
        (1, 156, 1, 1, 96),
        (1, 184, 1, 1, 128),
        (1, 70, 1, 1, 1024),
    ],
)
def test_bits_by_tiles(
    B: int, T: int, H: int, G: int, D: int, size: float, size_dy: float
) -> None:
    """AMX, its emulation and FMAs have the same bits. The other order has others, so the test can
    fail."""
    qkv, _ = drawn(1, zk.BF16, B, T, H + 2 * G, D, size=size)
    dy, _ = drawn(2, zk.BF16, B, T, H, D, size=size_dy)
    tiled = one_result(zk.BF16, zk.TILED, qkv, dy, G, 0.2)
    other = attention(zk.Kernels(dtype=zk.BF16), zk.BF16, qkv, dy, G, 0.2)
    assert tiled != b"".join(x.tobytes() for x in other)


def test_a_probability_below_the_normal_numbers_is_none() -> None:
    """A probability between the largest denormal of bf16 and 2^-126 is 0 in every object, though it
    is nearer to 2^-126."""
    qkv, dy = np.zeros((1, 2, 3, 8)), np.zeros((1, 2, 1, 8))
    qkv[0, 1, 0, :2] = 1
    qkv[0, 0, 1, :2] = -87, -173 / 512
    qkv[0, 0, 2], dy[0, 1, 0] = 1, 2
    given = (*(zk.store(x, zk.BF16) for x in (qkv, dy)), 1, 1.0)
    one_result(zk.BF16, zk.TILED, *given)
    y, _, dqkv = attention(kernels(BY_TILES, zk.BF16), zk.BF16, *given)
    assert not zk.load(y)[0, 1].any() and not zk.load(dqkv)[0, 0, 2].any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("T,H,G,D", [(33, 3, 3, 20), (70, 2, 1, 64)])
def test_bits_on_a_gpu(T: int, H: int, G: int, D: int, dtype: int) -> None:
    """The bits on a GPU are the same in a second call, and in any batch with the sequence."""
    B = 2
    (qkv, _), (dy, _) = (
        drawn(1, dtype, B, T, H + 2 * G, D),
        drawn(2, dtype, B, T, H, D),
    )
    k = zk.Kernels(zk.EMULATED, dtype)
    first = attention(k, dtype, qkv, dy, G, 0.2)
    for x, again in zip(first, attention(k, dtype, qkv, dy, G, 0.2), strict=True):
        assert x.tobytes() == again.tobytes()
    for b in range(B):
        alone = attention(k, dtype, qkv[b : b + 1].copy(), dy[b : b + 1].copy(), G, 0.2)
        for x, one in zip(first, alone, strict=True):
            assert x[b].tobytes() == one[0].tobytes()


def test_no_kernel_for_it() -> None:
    """A tile that is not compiled, or a scale that the kernels of tensor cores do not take, is
    refused."""
    call = (
        "from tests.lib import zk; k = zk.Kernels(zk.EMULATED, zk.BF16); "
        "x = zk.empty(zk.BF16, 1, 8, 3, 8); "
        "k.zk_attention_fwd(x, zk.empty(zk.F32, 8), x, 1, 8, 1, 1, 8, -1.0)"
    )
    paths = os.pathsep.join(str(zk.ROOT / folder) for folder in (".", "gen"))
    done = subprocess.run(
        [sys.executable, "-c", call],
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert done.returncode == 3
    assert (
        f"attention: no kernel with tile 64x64x{int(zk.TARGET == 'sm_90')} for heads of 8 elements, "
        "scale -1" in done.stderr
    )


def test_no_square_buffer() -> None:
    """Forward takes no memory of its own; at T = 8192 one head's scores would be 256 MiB."""
    T, D = 8192, 4
    qkv, _ = drawn(1, zk.F32, 1, T, 3, D)
    y, lse = zk.empty(zk.F32, 1, T, 1, D), zk.empty(zk.F32, 1, 1, T)
    k = zk.Kernels()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    k.zk_attention_fwd(y, lse, qkv, 1, T, 1, 1, D, 0.5)
    assert np.all(np.isfinite(y))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 8 << 10  # KiB


# ---- documents and windows


def documents(B: int, T: int, mean: int, seed: int = 5) -> Array:
    """Return positions int32 [B, T] of documents of about `mean` tokens; every sample begins
    one."""
    begins = np.random.default_rng(seed).random((B, T)) < 1 / mean
    begins[:, 0] = True
    t = np.arange(T)
    first = np.maximum.accumulate(np.where(begins, t, 0), axis=1)
    return (t - first).astype(np.int32)


def sight(position: Array | None, B: int, T: int, window: int) -> Array:
    """Return [B, T, T]: keys of a query's document within its last `window` rows."""
    t = np.arange(T)
    document = np.zeros((B, T)) if position is None else t - position
    near = t[:, None] - t[None] < window
    return near & (document[:, :, None] == document[:, None])


# B, T, H, G, D; tokens of a document, 0: one per sample; window, 0: all. Documents of one token,
# within a block, of several blocks, and that end where blocks do. Windows of one row, within a
# block, of blocks, of a region and more, and as long as a sample. Both together.
LOCAL = [
    ((2, 33, 3, 3, 20), 1, 0),
    ((2, 130, 4, 2, 24), 20, 0),
    ((1, 300, 2, 1, 36), 90, 0),
    ((2, 70, 2, 1, 64), 5, 70),
    ((1, 140, 2, 2, 64), 0, 1),
    ((1, 200, 2, 1, 16), 0, 64),
    ((1, 150, 4, 1, 128), 0, 65),
    ((1, 130, 1, 1, 256), 40, 33),
    ((1, 601, 2, 2, 16), 0, 100),
    ((1, 601, 1, 1, 8), 200, 300),
    ((1, 140, 2, 1, 136), 30, 20),
    ((1, 70, 1, 1, 300), 0, 9),
]


def local(shape: tuple[int, ...], mean: int, window: int) -> tuple[object, ...]:
    B, T = shape[:2]
    return (documents(B, T, mean) if mean else None), window or T


# Each shape with each object and one type in turn; the other types in exhaustive tests.
TURNS = [
    *covering(LOCAL, OBJECTS, DTYPES, budget=len(LOCAL) * len(OBJECTS)),
    *((x, BY_TILES, zk.BF16) for x in LOCAL),
]


@pytest.mark.parametrize("local_,isa,dtype", TURNS)
def test_local(
    local_: tuple[tuple[int, ...], int, int], isa: str | None, dtype: int
) -> None:
    """Documents and windows match float64; one key more or less in any row is out of bounds."""
    shape, mean, window = local_
    B, T, H, G, D = shape
    (qkv, QKV), (dy, DY) = (
        drawn(1, dtype, B, T, H + 2 * G, D),
        drawn(2, dtype, B, T, H, D),
    )
    scale = float(np.float32(D**-0.5))
    position, window = local(shape, mean, window)
    found = attention(kernels(isa, dtype), dtype, qkv, dy, G, scale, position, window)

    def expected(seen: Array) -> Exact:
        one = roundings(isa, dtype, D)
        return exact(QKV, DY, H, G, scale, UNIT[dtype], seen=seen, **one)

    seen = sight(position, B, T, window)
    compare(found, expected(seen), dtype)
    b, t = B - 1, T - 1
    first = int(np.argmax(seen[b, t]))
    for other in {first, max(first - 1, 0)} - {t}:
        wrong = seen.copy()
        wrong[b, t, other] ^= True
        with pytest.raises(AssertionError):
            compare(found, expected(wrong), dtype)


@pytest.mark.parametrize("local_,isa,dtype", TURNS)
def test_capped(
    local_: tuple[tuple[int, ...], int, int], isa: str | None, dtype: int
) -> None:
    """Capped scores match float64. Many are beyond their cap, and the bound tells it from one that
    is larger by a twentieth."""
    shape, mean, window = local_
    B, T, H, G, D = shape
    (qkv, QKV), (dy, DY) = (
        drawn(1, dtype, B, T, H + 2 * G, D),
        drawn(2, dtype, B, T, H, D),
    )
    scale, cap = float(np.float32(D**-0.5)), 0.75
    position, window = local(shape, mean, window)
    found = attention(
        kernels(isa, dtype), dtype, qkv, dy, G, scale, position, window, cap
    )
    seen = sight(position, B, T, window)
    given = QKV, DY, H, G, scale, UNIT[dtype]
    ways = {"seen": seen, **roundings(isa, dtype, D)}
    compare(found, exact(*given, **ways, cap=cap), dtype)
    if window > 1 and mean != 1:
        with pytest.raises(AssertionError):
            compare(found, exact(*given, **ways, cap=1.05 * cap), dtype)


@pytest.mark.parametrize("isa", OBJECTS)
def test_a_cap_far_beyond_the_scores(isa: str | None) -> None:
    """A cap of 2^20 changes scores by less than their rounding."""
    (qkv, QKV), (dy, DY) = (
        drawn(1, zk.F32, 1, 70, 4, 24),
        drawn(2, zk.F32, 1, 70, 2, 24),
    )
    cap = 2.0**20
    found = attention(zk.Kernels(isa), zk.F32, qkv, dy, 1, 0.2, None, 70, cap)
    compare(found, exact(QKV, DY, 2, 1, 0.2, F32, cap=cap), zk.F32)


@pytest.mark.parametrize("isa,dtype", EACH)
def test_a_window_of_all_rows(isa: str | None, dtype: int) -> None:
    """A window of all rows, and a sample of one document, have the bits of plain attention."""
    B, T, G, D = 2, 150, 1, 24
    (qkv, _), (dy, _) = (
        drawn(1, dtype, B, T, 4, D),
        drawn(2, dtype, B, T, 2, D),
    )
    k = kernels(isa, dtype)
    plain = [x.tobytes() for x in attention(k, dtype, qkv, dy, G, 0.2)]
    one = documents(B, T, 10**9)
    for given in ((None, T), (one, T), (one, T + 9)):
        found = attention(k, dtype, qkv, dy, G, 0.2, *given)
        assert [x.tobytes() for x in found] == plain


@pytest.mark.parametrize("isa,dtype", EACH)
def test_other_documents_do_not_matter(isa: str | None, dtype: int) -> None:
    """A document's result and gradient have the same bits whatever lies before and after it."""
    T, D = 210, 24
    (qkv, _), (dy, _) = (
        drawn(1, dtype, 1, T, 4, D),
        drawn(2, dtype, 1, T, 2, D),
    )
    others = [drawn(seed, dtype, 1, T, n, D)[0] for seed, n in ((3, 4), (4, 2))]
    position = np.concatenate([np.arange(n) for n in (75, 60, 75)])
    position = position.astype(np.int32)[None]
    k = kernels(isa, dtype)
    first = attention(k, dtype, qkv, dy, 1, 0.2, position, T)
    mine = slice(75, 135)
    for x, other in zip((qkv, dy), others, strict=True):
        other[:, mine] = x[:, mine]
    y, lse, dqkv = attention(k, dtype, *others, 1, 0.2, position, T)
    assert y[:, mine].tobytes() == first[0][:, mine].tobytes()
    assert lse[:, :, mine].tobytes() == first[1][:, :, mine].tobytes()
    assert dqkv[:, mine].tobytes() == first[2][:, mine].tobytes()
    assert y.tobytes() != first[0].tobytes()


@pytest.mark.parametrize("local_,isa,dtype", TURNS)
def test_dropped(
    local_: tuple[tuple[int, ...], int, int], isa: str | None, dtype: int
) -> None:
    """Attention with dropout matches float64 under its mask, and a sample without a key that
    without dropout. With the mask of other heads, another place or another key it is far off."""
    shape, mean, window = local_
    B, T, H, G, D = shape
    (qkv, QKV), (dy, DY) = (
        drawn(1, dtype, B, T, H + 2 * G, D),
        drawn(2, dtype, B, T, H, D),
    )
    scale, p, place, head = float(np.float32(D**-0.5)), 0.3, 6, 5
    position, window = local(shape, mean, window)
    keys = [0x0123456789ABCDEF, *[0, 5][: B - 1]]
    way = np.array(keys, np.int64), place, head, p
    found = attention(
        kernels(isa, dtype), dtype, qkv, dy, G, scale, position, window, *way
    )

    def expected(place: int, head: int, keys: list[int]) -> Exact:
        kept = chance.seen(keys, place, H, T, p, head)
        factor = np.where(kept, 1 / (1 - float(np.float32(p))), 0)
        factor[np.array(keys) == 0] = 1
        return exact(
            *(QKV, DY, H, G, scale, UNIT[dtype]),
            **roundings(isa, dtype, D),
            seen=sight(position, B, T, window),
            factor=factor,
        )

    compare(found, expected(place, head, keys), dtype)
    if T > 8 and window > 1 and mean != 1:
        others = [keys[0] ^ 1, *keys[1:]]
        for other in (place + 1, head, keys), (place, 0, keys), (place, head, others):
            with pytest.raises(AssertionError):
                compare(found, expected(*other), dtype)


WAYS = {
    "plain": (),
    "capped": (0.75,),
    "dropped": (np.array([7], np.int64), 3, 2, 0.1),
}


@pytest.mark.parametrize("cap", WAYS.values(), ids=[*WAYS])
@pytest.mark.parametrize("dtype,order", [(d, o) for d in DTYPES for o in zk.orders(d)])
def test_bits_of_local(dtype: int, order: int, cap: tuple[object, ...]) -> None:
    """The bits are the same for every kernel object, compiler and number of threads."""
    B, T, H, G, D = 1, 601, 2, 1, 40
    (qkv, _), (dy, _) = (
        drawn(1, dtype, B, T, H + 2 * G, D),
        drawn(2, dtype, B, T, H, D),
    )
    one_result(dtype, order, qkv, dy, G, 0.2, documents(B, T, 200), 130, *cap)
