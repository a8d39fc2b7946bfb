"""test_norm.py -- tests layer, RMS, query and key norm, and rotary positions: against float64, and
by bits.

The float64 formulas are themselves tested against finite differences. A bound is a count of
roundings times the unit roundoff times the same formula over absolute values, so it scales with the
data.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.lib import zk

# Unit roundoffs: the largest relative error of one rounding.
F32, BF16 = (
    2.0**-24,
    2.0**-8,
)
DTYPES = list(zk.REALS.values())
SHAPES = [
    (1, 1),
    (3, 7),
    (300, 16),
    (33, 20),
    (17, 64),
    (40, 96),
    (19, 133),
    (4, 768),
    (3, 1600),
    (2, 9216),
]
HEADS = [
    (1, 1, 1, 2),
    (5, 3, 3, 20),
    (33, 4, 2, 24),
    (9, 4, 1, 64),
    (3, 2, 2, 128),
    (64, 2, 1, 12),
    (64, 4, 1, 6),
]  # M, H, G, D
EPS = 1e-5

Array = np.ndarray


def drawn(
    seed: int, dtype: int, *shape: int, shift: float = 0.0
) -> tuple[Array, Array]:
    """Return normal numbers around `shift` as stored, and the same values in float64."""
    x = zk.store(np.random.default_rng(seed).standard_normal(shape) + shift, dtype)
    return x, zk.load(x)


def empties(dtype: int, *shapes: tuple[int, ...]) -> list[Array]:
    return [zk.empty(dtype, *shape) for shape in shapes]


def close(found: Array, expected: Array, bound: Array, dtype: int) -> None:
    """Assert that stored results are within the bound plus the one rounding of storing."""
    slack = bound + zk.rounding(np.abs(expected) + bound, dtype)
    error = np.abs(zk.load(found) - expected)
    assert np.all(np.isfinite(zk.load(found)))
    assert np.all(error <= slack), (
        f"{np.max(error / np.maximum(slack, 1e-300)):.3g} of the bound"
    )


def layer(x: Array, w: Array, b: Array | float) -> Array:
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(
        x.var(-1, keepdims=True) + EPS
    ) * w + b


def rms(x: Array, w: Array) -> Array:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS) * w


def row(x: Array) -> Array:
    return x.mean(-1, keepdims=True)


def back(
    hat: Array, r: Array, w: Array, dy: Array, centred: bool
) -> tuple[Array, Array]:
    """Return dx, and dw before the sum over rows."""
    g = dy * w
    mean = g.mean(-1, keepdims=True) if centred else 0
    return r * (g - mean - hat * (g * hat).mean(-1, keepdims=True)), dy * hat


def back_size(hat: Array, r: Array, w: Array, dy: Array) -> Array:
    """Return the dx of `back` with every term made positive."""
    g, hat = np.abs(dy * w), np.abs(hat)
    return r * (g + g.mean(-1, keepdims=True) + hat * (g * hat).mean(-1, keepdims=True))


def chain(C: int, target: str) -> float:
    """Return the additions that a term of a row's sum meets. CPU: C/16 terms per lane, four folds.
    GPU: C/32 terms per thread and a pack of at most eight; five folds in a warp and five of
    warps."""
    return C / 16 + 4 if target != zk.EMULATED else C / 32 + 18


def roundings(C: int, target: str) -> float:
    """Return the roundings of a row: two sums, and a dozen operations per element."""
    return 2 * chain(C, target) + 16


def test_formulas_against_finite_differences() -> None:
    r = np.random.default_rng(0)
    x, w, dy = (
        r.standard_normal((3, 5)) + 0.3,
        r.standard_normal(5),
        r.standard_normal((3, 5)),
    )
    s = 1 / np.sqrt(x.var(-1, keepdims=True) + EPS)
    q = 1 / np.sqrt((x * x).mean(-1, keepdims=True) + EPS)
    hat = (x - x.mean(-1, keepdims=True)) * s
    for f, (dx, dw) in (
        (lambda x, w: layer(x, w, 0.5), back(hat, s, w, dy, True)),
        (rms, back(x * q, q, w, dy, False)),
    ):
        for at, exact in ((0, dx), (1, dw.sum(0))):
            for i in np.ndindex(exact.shape):
                step = [np.zeros_like(x), np.zeros_like(w)]
                step[at][i] = 1e-6  # truncation about 1e-12, rounding about 1e-9
                rise = f(x + step[0], w + step[1]) - f(x - step[0], w - step[1])
                assert abs((dy * rise).sum() / 2e-6 - exact[i]) < 1e-7


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("M,C", SHAPES)
@pytest.mark.parametrize("shift", [0.0, 30.0])
def test_layernorm(target: str, M: int, C: int, dtype: int, shift: float) -> None:
    (x, X), (dy, DY) = (
        drawn(1, dtype, M, C, shift=shift),
        drawn(4, dtype, M, C),
    )
    (w, W), (b, B) = drawn(2, dtype, C), drawn(3, dtype, C)
    y, dx, dw, db = empties(dtype, (M, C), (M, C), (C,), (C,))
    stat, scratch = zk.empty(zk.F32, M, 2), zk.empty(zk.F32, 2, C)
    k = zk.Kernels(target, dtype)
    k.zk_layernorm_fwd(y, stat, None, x, None, w, b, M, C, EPS)
    k.zk_layernorm_bwd(dx, dw, db, dy, None, x, stat, w, scratch, M, C)

    mean, r = row(X), 1 / np.sqrt(X.var(-1, keepdims=True) + EPS)
    hat, lanes = (X - mean) * r, chain(C, target)
    close(stat[:, :1].copy(), mean, (lanes + 1) * F32 * row(np.abs(X)), zk.F32)
    # Of x - mean
    centre = F32 * ((lanes + 1) * row(np.abs(X)) + np.abs(X - mean))
    # Of 1/std, relative
    rel = r * centre.max(-1, keepdims=True) + (lanes + 4) * F32
    off = r * centre + np.abs(hat) * (rel + 2 * F32)  # of hat
    close(
        y,
        layer(X, W, B),
        off * np.abs(W) + F32 * np.abs(layer(X, W, B)),
        dtype,
    )
    DX, DW = back(hat, r, W, DY, True)
    g, dot = np.abs(DY * W), np.abs(row(DY * W * hat))
    dot_off = row(g * off) + (lanes + 3) * F32 * row(g * np.abs(hat))
    sums = off * dot + (np.abs(hat) + off) * dot_off + (lanes + 2) * F32 * row(g)
    last = 2 * F32 * (g + row(g) + np.abs(hat) * dot)
    close(
        dx,
        DX,
        (r * (sums + last)) * (1 + rel) + np.abs(DX) * (rel + 2 * F32),
        dtype,
    )
    close(
        dw,
        DW.sum(0),
        (np.abs(DY) * (off + (M + 2) * F32 * np.abs(hat))).sum(0),
        dtype,
    )
    close(db, DY.sum(0), M * F32 * np.abs(DY).sum(0), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_that_nobody_wants(target: str, dtype: int) -> None:
    """Backward with one or both gradients null gives the others the same bits."""
    M, H, G, C = 5, 2, 1, 36
    (x, _), (dy, _) = drawn(1, dtype, M, C), drawn(4, dtype, M, C)
    (heads, _), (up, _) = (
        drawn(1, dtype, M, H + 2 * G, C),
        drawn(4, dtype, M, H + 2 * G, C),
    )
    (w, _), (more, _) = drawn(2, dtype, C), drawn(3, dtype, C)
    k, scratch = zk.Kernels(target, dtype), zk.empty(zk.F32, 2, C)
    y, stat, runs = (
        zk.empty(dtype, M, H + 2 * G, C),
        zk.empty(zk.F32, M, 2),
        zk.empty(zk.F32, M, 3),
    )
    k.zk_layernorm_fwd(y, stat, None, x, None, w, more, M, C, EPS)
    k.zk_qknorm_fwd(y, runs, heads, w, more, M, H, G, C, EPS)
    found: dict[str, set[bytes]] = {}
    for first in (True, False):
        for second in (True, False):
            for kind in ("layer", "rms", "heads"):
                made = empties(
                    dtype,
                    (M, H + 2 * G, C) if kind == "heads" else (M, C),
                    (C,),
                    (C,),
                )
                dx, dw, db = (
                    made[0],
                    made[1] if first else None,
                    made[2] if second else None,
                )
                if kind == "layer":
                    k.zk_layernorm_bwd(dx, dw, db, dy, None, x, stat, w, scratch, M, C)
                elif kind == "rms":
                    k.zk_rmsnorm_bwd(dx, dw, dy, None, x, stat, w, scratch, M, C)
                else:
                    k.zk_qknorm_bwd(
                        dx,
                        dw,
                        db,
                        up,
                        heads,
                        runs,
                        w,
                        more,
                        scratch,
                        M,
                        H,
                        G,
                        C,
                    )
                for name, a in (
                    ("dx", dx),
                    ("dw", dw),
                    ("db", kind != "rms" and db),
                ):
                    if a is not None and a is not False:
                        found.setdefault(f"{kind} {name}", set()).add(a.tobytes())
    assert len(found) == 8 and all(len(bits) == 1 for bits in found.values())


@pytest.mark.parametrize("dtype", DTYPES)
def test_layernorm_without_bias(target: str, dtype: int) -> None:
    """No bias equals a bias of zeros, bit for bit."""
    M, C = 5, 37
    (x, _), (w, _), (dy, _) = (
        drawn(1, dtype, M, C),
        drawn(2, dtype, C),
        drawn(3, dtype, M, C),
    )
    zero, results = zk.store(np.zeros(C), dtype), []
    for b, db in ((zero, zk.empty(dtype, C)), (None, None)):
        y, dx, dw = empties(dtype, (M, C), (M, C), (C,))
        stat, scratch = zk.empty(zk.F32, M, 2), zk.empty(zk.F32, 2, C)
        zk.Kernels(target, dtype).zk_layernorm_fwd(
            y, stat, None, x, None, w, b, M, C, EPS
        )
        zk.Kernels(target, dtype).zk_layernorm_bwd(
            dx, dw, db, dy, None, x, stat, w, scratch, M, C
        )
        results.append([a.tobytes() for a in (y, stat, dx, dw)])
    assert results[0] == results[1]


@pytest.mark.parametrize("dtype", DTYPES)
def test_layernorm_without_weight(target: str, dtype: int) -> None:
    """No weight equals a weight of ones, bit for bit."""
    M, C = 5, 37
    (x, _), (b, _), (dy, _) = (
        drawn(1, dtype, M, C),
        drawn(2, dtype, C),
        drawn(3, dtype, M, C),
    )
    k, results = zk.Kernels(target, dtype), []
    for w in (zk.store(np.ones(C), dtype), None):
        y, dx, db = empties(dtype, (M, C), (M, C), (C,))
        stat, scratch = zk.empty(zk.F32, M, 2), zk.empty(zk.F32, 2, C)
        k.zk_layernorm_fwd(y, stat, None, x, None, w, b, M, C, EPS)
        k.zk_layernorm_bwd(dx, None, db, dy, None, x, stat, w, scratch, M, C)
        results.append([a.tobytes() for a in (y, stat, dx, db)])
    assert results[0] == results[1]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("M,C", SHAPES)
@pytest.mark.parametrize("plus", [0, 1])
def test_rmsnorm(target: str, M: int, C: int, dtype: int, plus: int) -> None:
    """`plus`: the factor is 1 + w."""
    (x, X), (w, W), (dy, DY) = (
        drawn(1, dtype, M, C),
        drawn(2, dtype, C),
        drawn(3, dtype, M, C),
    )
    y, dx, dw = empties(dtype, (M, C), (M, C), (C,))
    stat, scratch = zk.empty(zk.F32, M), zk.empty(zk.F32, C)
    k = zk.Kernels(target, dtype)
    forward = (k.zk_rmsnorm_fwd, k.zk_rmsnorm1_fwd)[plus]
    backward = (k.zk_rmsnorm_bwd, k.zk_rmsnorm1_bwd)[plus]
    forward(y, stat, None, x, None, w, M, C, EPS)
    backward(dx, dw, dy, None, x, stat, w, scratch, M, C)

    W = W + plus
    r, u = (
        1 / np.sqrt((X * X).mean(-1, keepdims=True) + EPS),
        roundings(C, target) * F32,
    )
    close(stat[:, None].copy(), r, u * r, zk.F32)
    close(y, rms(X, W), u * np.abs(rms(X, W)), dtype)
    DX, DW = back(X * r, r, W, DY, False)
    close(dx, DX, 2 * u * back_size(X * r, r, W, DY), dtype)
    close(dw, DW.sum(0), (M * F32 + u) * np.abs(DW).sum(0), dtype)


def fused_and_apart(
    k: zk.Kernels, kind: str, M: int, C: int, dtype: int
) -> list[list[bytes]]:
    """Return the results of forward of x + more, and of backward with `more` added to dx: by the
    norm alone, and by the norm and zk_add."""
    (x, _), (more, _) = drawn(1, dtype, M, C), drawn(2, dtype, M, C, shift=0.7)
    (dy, _), (w, _), (b, _) = (
        drawn(3, dtype, M, C),
        drawn(4, dtype, C),
        drawn(5, dtype, C),
    )
    bias, gradient, stats = (
        ([b], [zk.empty(dtype, C)], 2 * M) if kind == "layernorm" else ([], [], M)
    )
    forward, backward = (
        getattr(k, f"zk_{kind}_fwd"),
        getattr(k, f"zk_{kind}_bwd"),
    )
    stat, scratch, found = zk.empty(zk.F32, stats), zk.empty(zk.F32, 2 * C), []
    for apart in (0, 1):
        y, total, dx, dw = empties(dtype, (M, C), (M, C), (M, C), (C,))
        if apart:
            k.zk_add(total, x, more, M * C)
            forward(y, stat, None, total, None, w, *bias, M, C, EPS)
            backward(dx, dw, *gradient, dy, None, total, stat, w, scratch, M, C)
            alone = dx.copy()
            k.zk_add(dx, more, alone, M * C)
        else:
            forward(y, stat, total, x, more, w, *bias, M, C, EPS)
            backward(dx, dw, *gradient, dy, more, total, stat, w, scratch, M, C)
        found.append([a.tobytes() for a in (total, y, stat, dx, dw, *gradient)])
    return found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
@pytest.mark.parametrize("M,C", SHAPES)
def test_a_norm_adds_as_zk_add(
    target: str, kind: str, M: int, C: int, dtype: int
) -> None:
    """A norm with an addition, before or after it, has the bits of the norm and zk_add."""
    alone, apart = fused_and_apart(zk.Kernels(target, dtype), kind, M, C, dtype)
    assert alone == apart


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
def test_a_norm_adds_alike_on_every_object(kind: str, dtype: int) -> None:
    first = fused_and_apart(zk.Kernels(dtype=dtype), kind, 50, 133, dtype)
    for isa, compiler, threads in zk.variants():
        k = zk.Kernels(isa, dtype, threads, compiler)
        assert fused_and_apart(k, kind, 50, 133, dtype) == first, (
            isa,
            compiler,
            threads,
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("M,H,G,D", HEADS)
def test_qknorm_whole(target: str, M: int, H: int, G: int, D: int, dtype: int) -> None:
    """A norm over whole queries and keys treats all q heads as one run, and all k heads as
    another."""
    Q, QK, E = H * D, (H + G) * D, (H + 2 * G) * D
    (x, X), (dy, DY) = drawn(1, dtype, M, E), drawn(4, dtype, M, E)
    (wq, WQ), (wk, WK) = drawn(2, dtype, Q), drawn(3, dtype, G * D)
    y, dx, dwq, dwk = empties(dtype, (M, E), (M, E), (Q,), (G * D,))
    stat = zk.empty(zk.F32, M, 2)
    k = zk.Kernels(target, dtype)
    k.zk_qknorm_whole_fwd(y, stat, x, wq, wk, M, H, G, D, EPS)
    k.zk_qknorm_whole_bwd(dx, dwq, dwk, dy, x, stat, wq, wk, M, H, G, D)

    assert y[:, QK:].tobytes() == x[:, QK:].tobytes()
    assert dx[:, QK:].tobytes() == dy[:, QK:].tobytes()
    for part, W, dw in ((slice(0, Q), WQ, dwq), (slice(Q, QK), WK, dwk)):
        u = roundings(W.size, target) * F32
        Z, DZ = X[:, part], DY[:, part]
        r = 1 / np.sqrt((Z * Z).mean(-1, keepdims=True) + EPS)
        close(y[:, part].copy(), rms(Z, W), u * np.abs(rms(Z, W)), dtype)
        DX, DW = back(Z * r, r, W, DZ, False)
        size = back_size(Z * r, r, W, DZ)
        close(dx[:, part].copy(), DX, 2 * u * size, dtype)
        close(dw, DW.sum(0), (M * F32 + u) * np.abs(DW).sum(0), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("M,H,G,D", HEADS)
@pytest.mark.parametrize("plus", [0, 1])
def test_qknorm(
    target: str, M: int, H: int, G: int, D: int, dtype: int, plus: int
) -> None:
    S = H + 2 * G
    (x, X), (dy, DY) = drawn(1, dtype, M, S, D), drawn(4, dtype, M, S, D)
    (wq, WQ), (wk, WK) = drawn(2, dtype, D), drawn(3, dtype, D)
    y, dx, dwq, dwk = empties(dtype, (M, S, D), (M, S, D), (D,), (D,))
    stat, scratch = zk.empty(zk.F32, M, H + G), zk.empty(zk.F32, 2, D)
    k = zk.Kernels(target, dtype)
    forward = (k.zk_qknorm_fwd, k.zk_qknorm1_fwd)[plus]
    backward = (k.zk_qknorm_bwd, k.zk_qknorm1_bwd)[plus]
    forward(y, stat, x, wq, wk, M, H, G, D, EPS)
    backward(dx, dwq, dwk, dy, x, stat, wq, wk, scratch, M, H, G, D)

    assert y[:, H + G :].tobytes() == x[:, H + G :].tobytes()
    assert dx[:, H + G :].tobytes() == dy[:, H + G :].tobytes()
    u = roundings(D, target) * F32
    for part, w, dw in ((slice(0, H), WQ, dwq), (slice(H, H + G), WK, dwk)):
        Z, DZ, W = X[:, part], DY[:, part], w + plus
        r = 1 / np.sqrt((Z * Z).mean(-1, keepdims=True) + EPS)
        close(y[:, part].copy(), rms(Z, W), u * np.abs(rms(Z, W)), dtype)
        DX, DW = back(Z * r, r, W, DZ, False)
        close(dx[:, part].copy(), DX, 2 * u * back_size(Z * r, r, W, DZ), dtype)
        close(
            dw,
            DW.sum((0, 1)),
            (M * Z.shape[1] * F32 + u) * np.abs(DW).sum((0, 1)),
            dtype,
        )


@pytest.mark.parametrize("T,D", [(1, 2), (33, 20), (70, 64), (2000, 128)])
def test_rope_table(target: str, T: int, D: int) -> None:
    freq = 500000.0 ** (-np.arange(0, D, 2) / D)
    table = zk.empty(zk.F32, T, D // 2, 2)
    zk.Kernels(target).zk_rope_table(table, freq, T, D)
    angle = np.arange(T)[:, None] * freq
    exact = np.stack([np.cos(angle), np.sin(angle)], -1)
    # one rounding to f32; the f64 sine may err by some 1e-16, relative and absolute
    assert np.all(np.abs(table - exact) <= F32 * np.abs(exact) + 1e-15)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "B,T,H,G,D",
    [(1, 1, 1, 1, 2), (2, 33, 3, 3, 20), (1, 20, 4, 2, 24), (3, 7, 4, 1, 64)],
)
def test_rope(target: str, B: int, T: int, H: int, G: int, D: int, dtype: int) -> None:
    S, half = H + 2 * G, D // 2
    x, X = drawn(1, dtype, B, T, S, D)
    table = zk.empty(zk.F32, T, half, 2)
    k = zk.Kernels(target, dtype)
    k.zk_rope_table(table, 10000.0 ** (-np.arange(half) / half), T, D)
    c, s = (table[None, :, None, :, i].astype(np.float64) for i in (0, 1))
    for sign in (1, -1):
        y = zk.empty(dtype, B, T, S, D)
        k.zk_rope(y, x, table, B, T, H, G, D, sign)
        x1, x2 = X[..., : H + G, :half], X[..., : H + G, half:]
        exact = np.concatenate([x1 * c - sign * x2 * s, x2 * c + sign * x1 * s], -1)
        size = [
            np.abs(x1 * c) + np.abs(x2 * s),
            np.abs(x2 * c) + np.abs(x1 * s),
        ]
        bound = 2 * F32 * np.concatenate(size, -1)  # a product and a fused sum
        close(y[..., : H + G, :].copy(), exact, bound, dtype)
        assert y[..., H + G :, :].tobytes() == x[..., H + G :, :].tobytes()
        inside = x.copy()
        k.zk_rope(inside, inside, table, B, T, H, G, D, sign)
        assert inside.tobytes() == y.tobytes()
        back = np.tile(np.arange(T, dtype=np.int32)[::-1], B)
        turned = x[:, ::-1].copy()
        k.zk_rope_packed(inside, turned, table, back, B, T, H, G, D, sign)
        assert inside[:, ::-1].tobytes() == y.tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pairs", [zk.HALVES, zk.ADJACENT])
@pytest.mark.parametrize(
    "B,T,H,G,D,W",
    [
        (1, 1, 1, 1, 3, 2),
        (2, 33, 3, 3, 20, 10),
        (1, 20, 4, 2, 24, 24),
        (3, 7, 4, 1, 64, 48),
        (1, 9, 2, 1, 96, 32),
    ],
)
def test_rope_part(
    target: str, B: int, T: int, H: int, G: int, D: int, W: int, pairs: int, dtype: int
) -> None:
    """A part of each head is rotated by one of two tables and scaled up; the rest is copied."""
    S, half = H + 2 * G, W // 2
    x, X = drawn(1, dtype, B, T, S, D)
    k, tables = zk.Kernels(target, dtype), []
    for theta in (10000.0, 50.0):
        tables.append(zk.empty(zk.F32, T, half, 2))
        k.zk_rope_table(tables[-1], theta ** (-np.arange(half) / half), T, W)
    back = np.tile(np.arange(T, dtype=np.int32)[::-1], B)
    numbers, factors = (B, T, H, G, D, W, pairs), (1.25, 0.75)
    near = pairs == zk.ADJACENT
    first = np.s_[..., : H + G, :W:2] if near else np.s_[..., : H + G, :half]
    second = np.s_[..., : H + G, 1:W:2] if near else np.s_[..., : H + G, half:W]
    for which, sign in ((0, 1), (1, 1), (2, 1), (1, -1), (2, -1)):
        y, inside = zk.empty(dtype, B, T, S, D), x.copy()
        how = (*numbers, which, *factors, sign)
        k.zk_rope_part(y, x, *tables, None, *how)
        k.zk_rope_part(inside, inside, *tables, None, *how)
        assert inside.tobytes() == y.tobytes()
        k.zk_rope_part(inside, x[:, ::-1].copy(), *tables, back, *how)
        assert inside[:, ::-1].tobytes() == y.tobytes()
        exact, size = X.copy(), np.zeros_like(X)
        if which:
            table = tables[which - 1].astype(np.float64) * factors[which - 1]
            c, s = (table[None, :, None, :, i] for i in (0, 1))
            x1, x2 = X[first], X[second]
            exact[first] = x1 * c - sign * x2 * s
            exact[second] = x2 * c + sign * x1 * s
            size[first] = np.abs(x1 * c) + np.abs(x2 * s)
            size[second] = np.abs(x2 * c) + np.abs(x1 * s)
        # a factor, a product and a fused sum
        close(y, exact, 3 * F32 * size, dtype)
        copied = [y[..., W:], y[..., H + G :, :], *([y] if not which else [])]
        same = [x[..., W:], x[..., H + G :, :], *([x] if not which else [])]
        for found, wanted in zip(copied, same, strict=True):
            assert found.tobytes() == wanted.tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_part_that_is_the_whole(target: str, dtype: int) -> None:
    """Rotating all elements in halves by a factor of 1 has the bits of zk_rope."""
    B, T, H, G, D = 2, 25, 4, 2, 40
    x, _ = drawn(1, dtype, B, T, H + 2 * G, D)
    k, table = zk.Kernels(target, dtype), zk.empty(zk.F32, T, D)
    k.zk_rope_table(table, 10000.0 ** (-np.arange(D // 2) * 2 / D), T, D)
    for sign in (1, -1):
        y, other = np.empty_like(x), np.empty_like(x)
        k.zk_rope(y, x, table, B, T, H, G, D, sign)
        k.zk_rope_part(
            other, x, table, None, None, B, T, H, G, D, D, 0, 1, 1.0, 1.0, sign
        )
        assert y.tobytes() == other.tobytes()


def everything(k: zk.Kernels, dtype: int) -> bytes:
    """Return all outputs of this file's kernels on ragged shapes."""
    M, C, H, G, D, out = 50, 133, 4, 2, 36, []
    B, T, S = 2, 25, (4 + 2 * 2) * 36
    (x, _), (dy, _) = drawn(1, dtype, M, C, shift=0.5), drawn(2, dtype, M, C)
    (w, _), (b, _) = drawn(3, dtype, C), drawn(4, dtype, C)
    y, dx, dw, db = empties(dtype, (M, C), (M, C), (C,), (C,))
    stat, scratch = zk.empty(zk.F32, M, 2), zk.empty(zk.F32, 2 * C)
    k.zk_layernorm_fwd(y, stat, None, x, None, w, b, M, C, EPS)
    k.zk_layernorm_bwd(dx, dw, db, dy, None, x, stat, w, scratch, M, C)
    out += [a.tobytes() for a in (y, stat, dx, dw, db)]
    k.zk_rmsnorm_fwd(y, stat, None, x, None, w, M, C, EPS)
    k.zk_rmsnorm_bwd(dx, dw, dy, None, x, stat, w, scratch, M, C)
    out += [a.tobytes() for a in (y, stat, dx, dw)]
    (x, _), (dy, _) = drawn(5, dtype, M, S), drawn(6, dtype, M, S)
    (wq, _), (wk, _) = drawn(7, dtype, D), drawn(8, dtype, D)
    y, dx, dwq, dwk = empties(dtype, (M, S), (M, S), (D,), (D,))
    stat, table = zk.empty(zk.F32, M, H + G), zk.empty(zk.F32, T, D // 2, 2)
    k.zk_qknorm_fwd(y, stat, x, wq, wk, M, H, G, D, EPS)
    k.zk_qknorm_bwd(dx, dwq, dwk, dy, x, stat, wq, wk, scratch, M, H, G, D)
    out += [a.tobytes() for a in (y, stat, dx, dwq, dwk)]
    k.zk_rope_table(table, 10000.0 ** (-np.arange(D // 2) * 2 / D), T, D)
    k.zk_rope(y, x, table, B, T, H, G, D, 1)
    out += [table.tobytes(), y.tobytes()]
    for pairs in (zk.HALVES, zk.ADJACENT):
        how = (B, T, H, G, D, 20, pairs, 1, 1.25, 1.0, 1)
        k.zk_rope_part(y, x, table[:, :10].copy(), None, None, *how)
        out.append(y.tobytes())
    k.zk_qknorm1_fwd(y, stat, x, wq, wk, M, H, G, D, EPS)
    k.zk_qknorm1_bwd(dx, dwq, dwk, dy, x, stat, wq, wk, scratch, M, H, G, D)
    return b"".join([*out, *(a.tobytes() for a in (y, stat, dx, dwq, dwk))])


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits(dtype: int) -> None:
    """The bits are the same for every kernel object, compiler, number of threads and of rows per
    task."""
    first = everything(zk.Kernels(dtype=dtype), dtype)
    for isa, compiler, threads in zk.variants():
        found = everything(zk.Kernels(isa, dtype, threads, compiler), dtype)
        assert found == first, (isa, compiler, threads)
    assert (
        everything(zk.Kernels(dtype=dtype, threads=2, tile=(3, 0, 0)), dtype) == first
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gpu_turns_as_a_cpu(dtype: int) -> None:
    """A GPU rotates with the bits of a CPU."""
    B, T, H, G, D, found = 2, 25, 4, 2, 48, []
    x, _ = drawn(5, dtype, B * T, (H + 2 * G) * D)
    for target in (zk.isas()[-1], zk.EMULATED):
        k, table, y = (
            zk.Kernels(target, dtype),
            zk.empty(zk.F32, T, D),
            np.empty_like(x),
        )
        k.zk_rope_table(table, 10000.0 ** (-np.arange(D // 2) * 2 / D), T, D)
        k.zk_rope(y, x, table, B, T, H, G, D, -1)
        made = [table.tobytes(), y.tobytes()]
        for pairs, W in ((zk.HALVES, 32), (zk.ADJACENT, 48), (zk.ADJACENT, 10)):
            how = (B, T, H, G, D, W, pairs, 1, 1.25, 1.0, -1)
            part = table.reshape(T, D // 2, 2)[:, : W // 2].copy()
            k.zk_rope_part(y, x, part, None, None, *how)
            made.append(y.tobytes())
        found.append(b"".join(made))
    assert found[0] == found[1]
