"""test_elementwise.py -- tests activations, addition, rounding, embedding and loss: against
float64, and by bits.

A bound counts roundings in units of u = 2**-24 and scales with the data; storing in bf16 adds one
rounding of 2**-8. Sums of an embedding are f32 additions in a fixed order, so they are compared bit
for bit.
"""

from __future__ import annotations

import hashlib
import itertools
import math

import numpy as np
import pytest
from zg.facts import ops

from tests.lib import chance, zk

U, U16 = 2.0**-24, 2.0**-8
# A sigmoid below 2**-126 may become 0; times |x| and slopes below 2**10
TINY = 2.0**-116
Array = np.ndarray


@pytest.fixture(params=zk.REALS.values(), ids=zk.REALS)
def dtype(request: pytest.FixtureRequest) -> int:
    return request.param


def drawn(
    seed: int, dtype: int, *shape: int, scale: float = 1.0
) -> tuple[Array, Array]:
    """Return normal numbers as stored, and the same values in float64."""
    x = zk.store(np.random.default_rng(seed).standard_normal(shape) * scale, dtype)
    return x, zk.load(x)


def close(found: Array, want: Array, bound: Array) -> None:
    """Assert that stored results are within the bound plus the one rounding of storing."""
    slack = bound + TINY + zk.rounding(np.abs(want) + bound, zk.kind(found))
    error = np.abs(zk.load(found) - want)
    assert np.all(error <= slack), f"{np.max(error / slack):.3g} of the bound"


def wide(dtype: int) -> tuple[Array, Array]:
    """Return numbers of the whole real line: dense near 0, both tails, signed zeros."""
    far = np.geomspace(1e-30, 1e4, 500)
    x = np.concatenate([np.linspace(-20, 20, 4001), far, -far, [0, -0.0]])
    stored = zk.store(x, dtype)
    return stored, zk.load(stored)


# ---- GELU and SwiGLU


def sigmoid(x: Array) -> Array:
    e = np.exp(-np.abs(x))
    return np.where(x < 0, e, 1) / (1 + e)


ERF = np.vectorize(math.erf, otypes=[float])
ROOT = 2 * math.sqrt(2 / math.pi)


def gelu(x: Array, kind: int) -> tuple[Array, Array]:
    """Return the value and the slope."""
    if kind == zk.GELU_ERF:
        share = (1 + ERF(x / math.sqrt(2))) / 2
        return x * share, share + x * np.exp(-x * x / 2) / math.sqrt(2 * math.pi)
    s = sigmoid(ROOT * (x + 0.044715 * x**3))
    inner = ROOT * (1 + 3 * 0.044715 * x * x)
    return x * s, s + x * s * sigmoid(-ROOT * (x + 0.044715 * x**3)) * inner


def sigmoid_steps(target: str, argument: int, others: int) -> tuple[int, int]:
    """Return the roundings of a sigmoid's argument, which matter by (1 - s) times the argument, and
    the others of a formula. A GPU's exponential takes a rounded product with a rounded log2(e). It
    is good to 2^-22 and its quotient to 2^-23, instead of 2 ulp and 1/2."""
    return (argument + 2, others + 6) if target == zk.EMULATED else (argument, others)


def gelu_bounds(x: Array, kind: int, target: str) -> tuple[Array, Array]:
    """Return the bounds of the value and the slope.

    erf: its 2 ulp, its argument's two roundings where it is steep (|z| erf'(z) < 1), the sum's;
    times |x|. tanh: the sigmoid's argument has five roundings, which matter by (1 - s) times the
    argument; exp, sum, quotient and product have eight more. Slopes: the same on both terms; 1 - s
    cancels.
    """
    if kind == zk.GELU_ERF:
        pdf = np.exp(-x * x / 2) / math.sqrt(2 * math.pi)
        return 8 * U * np.abs(x), 6 * U + U * np.abs(x) * pdf * (10 + 2 * x * x)
    t = ROOT * (x + 0.044715 * x**3)
    s, rest = sigmoid(t), sigmoid(-t)
    argument, others = sigmoid_steps(target, 5, 8)
    steps = others + argument * np.abs(t) * rest
    slope = np.abs(x) * s * ROOT * (1 + 3 * 0.044715 * x * x)
    slope[np.abs(x) >= 16] = 0  # there s or 1 - s is 0 in f32, and really below 2**-140
    return U * steps * np.abs(x) * s, U * (
        s * steps + slope * (rest * (steps + others) + s * steps)
    )


@pytest.mark.parametrize("kind", [zk.GELU_TANH, zk.GELU_ERF], ids=["tanh", "erf"])
def test_gelu(target: str, dtype: int, kind: int) -> None:
    k = zk.Kernels(target, dtype)
    x, exact = wide(dtype)
    dy, slope_in = drawn(1, dtype, x.size)
    y, dx = np.empty_like(x), np.empty_like(x)
    k.zk_gelu_fwd(y, x, x.size, kind)
    k.zk_gelu_bwd(dx, dy, x, x.size, kind)
    value, slope = gelu(exact, kind)
    bound, slope_bound = gelu_bounds(exact, kind, target)
    close(y, value, bound)
    close(
        dx,
        slope_in * slope,
        np.abs(slope_in) * (slope_bound + U * np.abs(slope)),
    )


@pytest.mark.parametrize("kind", [zk.GELU_TANH, zk.GELU_ERF], ids=["tanh", "erf"])
def test_the_slope_is_a_finite_difference(kind: int) -> None:
    """The slope above matches central differences, which err by h**2 f''' / 6 and by rounding,
    1e-16 / h."""
    x, h = np.linspace(-6, 6, 301), 1e-5
    difference = (gelu(x + h, kind)[0] - gelu(x - h, kind)[0]) / (2 * h)
    assert np.max(np.abs(difference - gelu(x, kind)[1])) < 1e-9


def test_relu2(target: str, dtype: int) -> None:
    """Each product is rounded to f32 once, and the stored result once more, bit for bit."""
    k = zk.Kernels(target, dtype)
    x, _ = wide(dtype)
    x[-3:] = zk.store([np.nan, np.inf, -np.inf], dtype)
    dy, _ = drawn(4, dtype, x.size)
    y, dx = np.empty_like(x), np.empty_like(x)
    k.zk_relu2_fwd(y, x, x.size)
    k.zk_relu2_bwd(dx, dy, x, x.size)
    at, up = (zk.load(a).astype(np.float32) for a in (x, dy))
    above = np.where(0 > at, np.float32(0), at)
    with np.errstate(over="ignore"):
        want, slope = above * above, up * (2 * above)
    np.testing.assert_array_equal(zk.load(y), zk.load(zk.store(want, dtype)))
    np.testing.assert_array_equal(zk.load(dx), zk.load(zk.store(slope, dtype)))


def test_scale(target: str, dtype: int) -> None:
    """A product is rounded to f32 once, and the stored result once more, bit for bit, also in
    place."""
    k = zk.Kernels(target, dtype)
    x, _ = wide(dtype)
    x[-3:] = zk.store([np.nan, np.inf, -np.inf], dtype)
    want = zk.load(x).astype(np.float32) * np.float32(0.3)
    for function in (k.zk_scale_fwd, k.zk_scale_bwd):
        y, inside = np.empty_like(x), x.copy()
        function(y, x, x.size, 0.3)
        function(inside, inside, x.size, 0.3)
        for found in (y, inside):
            np.testing.assert_array_equal(
                zk.load(found), zk.load(zk.store(want, dtype))
            )


@pytest.mark.parametrize("M,F", [(1, 1), (3, 16), (5, 37), (40, 176)])
def test_swiglu(target: str, dtype: int, M: int, F: int) -> None:
    k = zk.Kernels(target, dtype)
    x, exact = drawn(2, dtype, M, 2 * F, scale=4)
    dy, grad = drawn(3, dtype, M, F)
    y, dx = zk.store(np.zeros((M, F)), dtype), np.empty_like(x)
    k.zk_swiglu_fwd(y, x, M, F)
    k.zk_swiglu_bwd(dx, dy, x, M, F)
    gate, up = np.split(exact, 2, axis=1)
    s, rest = sigmoid(gate), sigmoid(-gate)
    # exp: 2 ulp; sum, quotient, products
    argument, others = sigmoid_steps(target, 1, 10)
    steps = others + argument * np.abs(gate) * rest
    close(y, gate * s * up, U * steps * np.abs(gate * s * up))
    d_gate = (
        U
        * np.abs(grad * up)
        * s
        * (steps + np.abs(gate) * (rest * (steps + others - 6) + s * steps))
    )
    want = np.concatenate([grad * up * s * (1 + gate * rest), grad * gate * s], axis=1)
    close(
        dx,
        want,
        np.concatenate([d_gate, U * steps * np.abs(grad * gate * s)], axis=1),
    )


@pytest.mark.parametrize("M,F", [(1, 1), (3, 16), (5, 37), (40, 176)])
def test_geglu(target: str, dtype: int, M: int, F: int) -> None:
    """The gate is GELU's by tanh, with one more rounding for each further product."""
    k = zk.Kernels(target, dtype)
    x, exact = drawn(2, dtype, M, 2 * F, scale=4)
    dy, grad = drawn(3, dtype, M, F)
    y, dx = zk.store(np.zeros((M, F)), dtype), np.empty_like(x)
    k.zk_geglu_fwd(y, x, M, F)
    k.zk_geglu_bwd(dx, dy, x, M, F)
    gate, up = np.split(exact, 2, axis=1)
    value, slope = gelu(gate, zk.GELU_TANH)
    bound, slope_bound = gelu_bounds(gate, zk.GELU_TANH, target)
    close(y, value * up, (bound + U * np.abs(value)) * np.abs(up))
    want = np.concatenate([grad * up * slope, grad * value], axis=1)
    off = [
        np.abs(grad * up) * (slope_bound + 2 * U * np.abs(slope)),
        np.abs(grad) * (bound + U * np.abs(value)),
    ]
    close(dx, want, np.concatenate(off, axis=1))


def test_swiglu_bwd_is_a_finite_difference(target: str) -> None:
    """Backward matches differences of forward, which is good to 12 u: those of step h = 2**-6 err
    by 24 u / h and h**2 f''' / 6."""
    k, (M, F), h = zk.Kernels(target), (2, 5), 2.0**-6
    x, _ = drawn(4, zk.F32, M, 2 * F)
    dx, y = np.empty_like(x), np.zeros((2, M, F), np.float32)
    k.zk_swiglu_bwd(dx, np.ones((M, F), np.float32), x, M, F)
    for i in range(x.size):
        for side, step in enumerate((h, -h)):
            moved = x.copy()
            moved.flat[i] += step
            k.zk_swiglu_fwd(y[side], moved, M, F)
        slope = (y[0].sum(dtype=float) - y[1].sum(dtype=float)) / (2 * h)
        assert abs(slope - dx.flat[i]) < 1e-3


@pytest.mark.parametrize("name", ["gelu_tanh", "gelu_erf", "swiglu"])
def test_bad_numbers_stay_visible(target: str, name: str) -> None:
    k = zk.Kernels(target)
    x = np.full(32, np.nan, np.float32)
    y, dx = np.zeros(32, np.float32), np.zeros(32, np.float32)
    if name == "swiglu":
        k.zk_swiglu_fwd(y[:16], x, 1, 16)
        k.zk_swiglu_bwd(dx, np.ones(16, np.float32), x, 1, 16)
        y = y[:16]
    else:
        kind = zk.GELU_ERF if name == "gelu_erf" else zk.GELU_TANH
        k.zk_gelu_fwd(y, x, 32, kind)
        k.zk_gelu_bwd(dx, np.ones(32, np.float32), x, 32, kind)
    assert np.isnan(y).all() and np.isnan(dx).all()


@pytest.mark.parametrize("kind", [zk.GELU_TANH, zk.GELU_ERF])
def test_gelu_backward_may_be_in_place(target: str, dtype: int, kind: int) -> None:
    k = zk.Kernels(target, dtype)
    for n in (1, 15, 33, 40000):
        (x, _), (dy, _) = drawn(n, dtype, n), drawn(n + 1, dtype, n)
        want = np.empty_like(x)
        k.zk_gelu_bwd(want, dy, x, n, kind)
        k.zk_gelu_bwd(dy, dy, x, n, kind)
        assert dy.tobytes() == want.tobytes()


# ---- dropout


@pytest.mark.parametrize("n", [1, 63, 320, 8195, 20000])
def test_dropout(target: str, dtype: int, n: int) -> None:
    """Kept elements and their factor are right to the bit, in place, too. A sample without a key is
    unchanged."""
    k, p, place = zk.Kernels(target, dtype), 0.3, 5
    given = [0x0123456789ABCDEF, 0, 7]
    key = np.array(given, np.int64)
    stored, x = drawn(n, dtype, 3, n)
    kept = chance.kept(given, place, n, p)
    scale = np.float32(1 / (1 - float(np.float32(p))))
    scaled = (x.astype(np.float32) * scale).astype(np.float64)
    want = zk.store(np.where(kept, scaled, 0), dtype)
    want[1] = stored[1]
    out, own = np.empty_like(stored), stored.copy()
    k.zk_dropout_fwd(out, stored, key, 3, n, place, p)
    k.zk_dropout_bwd(own, own, key, 3, n, place, p)
    for got in (out, own):
        assert got.tobytes() == want.tobytes()


def test_what_dropout_keeps(target: str) -> None:
    """The number of kept elements is n (1 - p) within five deviations of a binomial, and that of
    pairs at any two places is as of independent draws. The mean of ones stays 1."""
    k, n, p = zk.Kernels(target, zk.F32), 1 << 16, 0.1
    x, key = np.ones((2, n), np.float32), np.array([11, 12], np.int64)
    found = []
    for place in range(3):
        y = np.empty_like(x)
        k.zk_dropout_fwd(y, x, key, 2, n, place, p)
        found += [*(y > 0)]
        assert abs(y.mean() - 1) <= 5 * math.sqrt(p / (1 - p) / y.size)
    for a, b in itertools.combinations(found, 2):
        both = (1 - p) ** 2
        off = 5 * math.sqrt(both * (1 - both) / n)
        assert abs((a & b).mean() - both) <= off
        assert abs(a.mean() - (1 - p)) <= 5 * math.sqrt(p * (1 - p) / n)


# ---- addition and rounding


def test_add_may_be_in_place(target: str, dtype: int) -> None:
    k = zk.Kernels(target, dtype)
    for n in (1, 15, 16, 33, 1000, 40000):
        a, x = drawn(n, dtype, n)
        b, y = drawn(n + 1, dtype, n, scale=100)
        want = zk.store(
            (x.astype(np.float32) + y.astype(np.float32)).astype(np.float64),
            dtype,
        )
        out, left, right = np.empty_like(a), a.copy(), b.copy()
        k.zk_add(out, a, b, n)
        k.zk_add(left, left, b, n)
        k.zk_add(right, a, right, n)
        for got in (out, left, right):
            assert got.tobytes() == want.tobytes()


def test_round_to_nearest_even(target: str) -> None:
    k = zk.Kernels(target, zk.BF16)
    bits = np.random.default_rng(5).integers(0, 1 << 32, 100003, dtype=np.uint32)
    bits[:6] = [
        0x3F808000,
        0x3F818000,
        0x3F808001,
        0x7F7FFFFF,
        0x00000001,
        0x80008000,
    ]
    x, got = bits.view(np.float32), np.empty(bits.size, np.uint16)
    k.zk_round(got, x, bits.size)
    want = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    nan = np.isnan(x)
    assert np.array_equal(got[~nan], want[~nan].astype(np.uint16))
    assert np.isnan(zk.load(got[nan])).all()
    assert list(got[:6]) == [0x3F80, 0x3F82, 0x3F81, 0x7F80, 0x0000, 0x8000]


def test_round_in_f32_is_a_copy(target: str) -> None:
    k, x = (
        zk.Kernels(target),
        np.random.default_rng(6).standard_normal(333).astype(np.float32),
    )
    y = np.empty_like(x)
    k.zk_round(y, x, x.size)
    assert y.tobytes() == x.tobytes()


# ---- embedding: every result is a chain of f32 additions


def rows(M: int, C: int, dtype: int) -> tuple[Array, Array]:
    scale = 10.0 ** (np.arange(M)[:, None] % 5)
    dy = zk.store(np.random.default_rng(M).standard_normal((M, C)) * scale, dtype)
    return dy, zk.load(dy).astype(np.float32)


@pytest.mark.parametrize("C", [1, 16, 60])
@pytest.mark.parametrize("positions", [False, True])
def test_embed_fwd(target: str, dtype: int, C: int, positions: bool) -> None:
    k, (B, T, V) = zk.Kernels(target, dtype), (3, 7, 11)
    token = np.random.default_rng(7).integers(0, V, B * T).astype(np.int32)
    w, wide_w = drawn(8, dtype, V, C)
    p, wide_p = drawn(9, dtype, T, C)
    y = zk.store(np.zeros((B * T, C)), dtype)
    k.zk_embed_fwd(y, token, w, p if positions else None, B, T, C)
    want = wide_w[token].astype(np.float32)
    if positions:
        want = want + np.tile(wide_p.astype(np.float32), (B, 1))
    assert y.tobytes() == zk.store(want.astype(np.float64), dtype).tobytes()
    position = np.random.default_rng(3).integers(0, T, B * T).astype(np.int32)
    k.zk_embed_packed_fwd(y, token, position, w, p, B * T, C)
    want = wide_w[token].astype(np.float32) + wide_p[position].astype("f4")
    assert y.tobytes() == zk.store(want.astype(np.float64), dtype).tobytes()


@pytest.mark.parametrize(
    "M,V,C",
    [(1, 1, 1), (24, 5, 20), (40, 300, 33), (65, 64, 64), (2100, 150, 24)],
)
@pytest.mark.parametrize("add", [0, 1])
def test_embed_bwd(target: str, dtype: int, M: int, V: int, C: int, add: int) -> None:
    k = zk.Kernels(target, dtype)
    token = np.random.default_rng(10).integers(0, V, M).astype(np.int32)
    dy, wide_dy = rows(M, C, dtype)
    start = np.random.default_rng(11).standard_normal((V, C)).astype(np.float32)
    dw = start.copy() if add else zk.store(np.full((V, C), np.nan), dtype)
    k.zk_embed_bwd(dw, dy, token, np.empty(V + 1 + M, np.int32), M, V, C, add)
    want = start.copy() if add else np.zeros((V, C), np.float32)
    for m in range(M):
        want[token[m]] = want[token[m]] + wide_dy[m]
    assert (
        dw.tobytes()
        == (want if add else zk.store(want.astype(np.float64), dtype)).tobytes()
    )


@pytest.mark.parametrize("B,T,C,P", [(1, 1, 1, 1), (4, 5, 20, 9), (3, 33, 60, 64)])
def test_position_bwd(target: str, dtype: int, B: int, T: int, C: int, P: int) -> None:
    k = zk.Kernels(target, dtype)
    dy, wide_dy = rows(B * T, C, dtype)
    dp = zk.store(np.full((P, C), np.nan), dtype)
    k.zk_position_bwd(dp, dy, B, T, C, P)
    want = np.zeros((P, C), np.float32)
    for b in range(B):
        want[:T] = want[:T] + wide_dy.reshape(B, T, C)[b]
    assert dp.tobytes() == zk.store(want.astype(np.float64), dtype).tobytes()
    position = np.random.default_rng(3).integers(0, P, B * T).astype(np.int32)
    index = np.empty(P + 1 + B * T, np.int32)
    k.zk_position_packed_bwd(dp, dy, position, index, B * T, C, P)
    want[:] = 0
    for m in range(B * T):
        want[position[m]] = want[position[m]] + wide_dy[m]
    assert dp.tobytes() == zk.store(want.astype(np.float64), dtype).tobytes()


# ---- cross-entropy


def depth(V: int, target: str) -> float:
    """Return the roundings of a summand in a row's sum of exponentials, including two ulp of its
    own.

    CPU: a lane's chain and four folds. GPU: a thread's chain, two elements by eight of 4096; ten
    folds; an exponential and a product for each increase of the thread's own maximum, one for each
    pack.
    """
    return (
        V / 16 + 12
        if target != zk.EMULATED
        else 8 + V / 512 + 10 + 4 + 5 * (1 + V / 2048)
    )


def entropy(x: Array, hit: Array, target: str) -> tuple[Array, Array, Array, Array]:
    """Return loss [M], d(sum of losses)/M [M,V], and their bounds."""
    M, V = x.shape
    at = (np.arange(M), np.maximum(hit, 0))
    # Rounded once in the kernel: u |deep| in exp's argument
    deep = x - x.max(1, keepdims=True)
    e = np.exp(deep)
    p = e / e.sum(1, keepdims=True)
    # of the sum: its own roundings, and the arguments' by their weight
    steps = depth(V, target) + (p * np.abs(deep)).sum(1)
    loss = np.log(e.sum(1)) - deep[at]
    hot = np.zeros_like(p)
    hot[at] = 1
    valid = hit >= 0
    d = (p - hot) / M * valid[:, None]
    slack = U * (p * (steps[:, None] + 4 + np.abs(deep)) + 2 * hot) / M
    return (
        loss * valid,
        d,
        U * (steps + 2 * np.abs(deep[at]) + 2 * np.abs(loss)),
        slack,
    )


def padded(x: Array, beyond: float = np.nan) -> Array:
    """Return rows of logits as kernels take them: elements after the V-th are ignored."""
    made = zk.store(
        np.full((len(x), ops.up(x.shape[1], ops.VOCAB)), beyond), zk.kind(x)
    )
    made[:, : x.shape[1]] = x
    return made


@pytest.mark.parametrize(
    "M,V", [(1, 1), (5, 3), (7, 16), (9, 257), (4, 263), (6, 5000)]
)
@pytest.mark.parametrize("scale", [1, 30])
def test_cross_entropy(target: str, dtype: int, M: int, V: int, scale: float) -> None:
    """Loss and gradient match float64, and NaN beyond the vocabulary makes no difference."""
    k = zk.Kernels(target, dtype)
    rows, exact = drawn(12, dtype, M, V, scale=scale)
    x = padded(rows)
    hit = np.random.default_rng(13).integers(-1, V, M).astype(np.int32)
    hit[0] = V - 1
    loss, d = np.full(M, np.nan, np.float32), np.empty_like(x)
    k.zk_cross_entropy(loss, d, x, hit, None, M, V, M)
    want, slope, bound, slack = entropy(exact, hit, target)
    close(loss, want, bound)
    close(np.ascontiguousarray(d[:, :V]), slope, slack)
    assert np.all(loss >= 0) and not loss[hit < 0].any() and not d[hit < 0].any()
    assert not d[:, V:].any()
    alone, inplace = np.empty_like(loss), x.copy()
    k.zk_cross_entropy(alone, None, x, hit, None, M, V, M)
    assert alone.tobytes() == loss.tobytes()
    k.zk_cross_entropy(alone, inplace, inplace, hit, None, M, V, M)
    assert inplace.tobytes() == d.tobytes() and alone.tobytes() == loss.tobytes()
    for m in range(M):  # a part of the rows, as parts of all of them
        k.zk_cross_entropy(loss[m:], d[m:], x[m:], hit[m:], None, 1, V, M)
    assert inplace.tobytes() == d.tobytes() and alone.tobytes() == loss.tobytes()


def soft(
    x: Array, hit: Array, target: str, smoothing: float, penalty: float, cap: float
) -> tuple[Array, Array, Array, Array]:
    """Return `entropy` of the soft loss."""
    M, V = x.shape
    at = (np.arange(M), np.maximum(hit, 0))
    valid = hit >= 0
    plain, d, bound, slack = entropy(x, hit, target)
    lse = np.logaddexp.reduce(x, axis=1)
    far = x - x[at][:, None]
    loss = plain + (penalty * lse**2 - smoothing * far.mean(1)) * valid
    grow = 1 + 2 * penalty * lse
    p = d * M
    p[at] += valid
    one = grow[:, None] * p - smoothing / V * valid[:, None]
    one[at] -= (1 - smoothing) * valid
    bend = np.maximum(1 - (x / cap) ** 2, 0) if cap else np.ones_like(x)
    # lse has the roundings of its sum and two of its own. The mean is a sum of parts: 1024 elements
    # in 16 lanes on a CPU, a thread's V / 512 on a GPU.
    lse_off = U * (depth(V, target) + 2 * np.abs(lse) + 2)
    mean_off = U * (80 + V / 512) * np.abs(far).mean(1)
    bound = bound + 2 * penalty * np.abs(lse) * lse_off + smoothing * mean_off
    # `slack` is p's, of which the factor and three roundings are more; 1 - smoothing is rounded, and
    # so is its difference. The cap's factor cancels where it is small: four roundings of 1.
    off = slack * M * np.abs(grow)[:, None] + 2 * penalty * lse_off[:, None] * p
    off += 3 * U * np.abs(grow)[:, None] * p + 2 * U * smoothing / V
    off[at] += 3 * U
    off = off * np.abs(bend) + 4 * U * np.abs(one)
    return loss, one * bend / M, bound + 6 * U * np.abs(loss), off / M


SOFT = [(0.1, 0.0, 0.0), (0.0, 1e-3, 0.0), (0.0, 0.0, 20.0), (0.3, 1e-2, 50.0)]


@pytest.mark.parametrize("M,V", [(1, 1), (7, 16), (9, 257), (4, 263), (6, 5000)])
@pytest.mark.parametrize("smoothing,penalty,cap", SOFT)
def test_soft_cross_entropy(
    target: str,
    dtype: int,
    M: int,
    V: int,
    smoothing: float,
    penalty: float,
    cap: float,
) -> None:
    """Loss and gradient match float64; without a gradient the loss is the plain one."""
    k = zk.Kernels(target, dtype)
    rows, exact = drawn(12, dtype, M, V, scale=3)
    x, how = padded(rows), (smoothing, penalty, cap)
    hit = np.random.default_rng(13).integers(-1, V, M).astype(np.int32)
    hit[0] = V - 1
    loss, d = np.full(M, np.nan, np.float32), np.empty_like(x)
    factor = np.array([2.0**10])
    k.zk_soft_cross_entropy(loss, d, x, hit, factor, M, V, M, *how)
    whole = zk.load(d)
    k.zk_soft_cross_entropy(loss, d, x, hit, None, M, V, M, *how)
    small = np.abs(zk.load(d)) < 2.0**-13  # rounded as a subnormal of f16
    assert np.all(small | (whole == 2.0**10 * zk.load(d)))
    want, slope, bound, slack = soft(exact, hit, target, *how)
    close(loss, want, bound)
    close(np.ascontiguousarray(d[:, :V]), slope, slack)
    assert not loss[hit < 0].any() and not d[hit < 0].any() and not d[:, V:].any()
    alone, plain, inplace = np.empty_like(loss), np.empty_like(loss), x.copy()
    k.zk_soft_cross_entropy(alone, inplace, inplace, hit, None, M, V, M, *how)
    assert inplace.tobytes() == d.tobytes() and alone.tobytes() == loss.tobytes()
    k.zk_soft_cross_entropy(alone, None, x, hit, None, M, V, M, *how)
    k.zk_cross_entropy(plain, None, x, hit, None, M, V, M)
    assert alone.tobytes() == plain.tobytes()
    first, d, loss = loss.tobytes(), zk.empty(dtype, *x.shape), zk.empty(zk.F32, M)
    for m in range(M):  # a part of the rows, as parts of all of them
        k.zk_soft_cross_entropy(loss[m:], d[m:], x[m:], hit[m:], None, 1, V, M, *how)
    assert inplace.tobytes() == d.tobytes() and loss.tobytes() == first


def test_a_rounded_logit_may_exceed_its_cap(target: str, dtype: int) -> None:
    """The gradient of a logit that is beyond its cap by rounding is 0 and never changes its
    sign."""
    k, cap = zk.Kernels(target, dtype), 4.99  # 5 in bf16
    x = zk.store(np.array([[1e4, -1e4, 0, 0, 0, 0, 0, 0]]), dtype)
    k.zk_softcap(x, x, 1, 8, cap)
    loss, d, hit = zk.empty(zk.F32, 1), np.empty_like(x), np.array([2], np.int32)
    k.zk_soft_cross_entropy(loss, d, x, hit, None, 1, 8, 1, 0.0, 0.0, cap)
    assert np.all(zk.load(d)[0, [0, 1, 3, 4]] >= 0) and zk.load(d)[0, 2] < 0
    # 1 - u^2 is below twice the rounding of u
    assert zk.load(d)[0, 0] <= (0 if dtype == zk.BF16 else 2.0**-10)


def test_soft_cross_entropy_of_infinities(target: str) -> None:
    """NaN shows, an ignored row is 0, a target of -infinity has loss infinity."""
    k, how = zk.Kernels(target), (0.0, 1e-3, 0.0)
    x = np.full((4, 24), -np.inf, np.float32)
    x[0, 4] = x[1, 4] = 0
    x[2] = x[3] = np.nan
    loss, d = np.empty(4, np.float32), np.empty_like(x)
    hit = np.array([4, 5, -1, 3], np.int32)
    k.zk_soft_cross_entropy(loss, d, x, hit, None, 4, 24, 4, *how)
    assert loss[0] == 0 and not d[0].any() and loss[1] == np.inf
    assert (
        loss[2] == 0 and not d[2].any() and np.isnan(loss[3]) and np.isnan(d[3]).all()
    )
    k.zk_soft_cross_entropy(loss, d, x, hit, None, 4, 24, 4, 0.1, 0.0, 0.0)
    assert loss[0] == np.inf and np.isnan(loss[1])  # the mean of logits is -infinity


def test_the_soft_gradient_is_a_finite_difference() -> None:
    """The gradient above matches central differences of its loss, of which the logits are capped."""
    rng, h, cap = np.random.default_rng(5), 1e-6, 3.0
    raw, hit = rng.standard_normal((3, 7)) * 2, np.array([0, -1, 6])

    def capped(raw: Array) -> Array:
        return cap * np.tanh(raw / cap)

    slope = soft(capped(raw), hit, "", 0.2, 0.05, cap)[1]
    for i in np.ndindex(raw.shape):
        step = np.zeros_like(raw)
        step[i] = h
        up, down = (
            soft(capped(raw + s), hit, "", 0.2, 0.05, cap)[0] for s in (step, -step)
        )
        assert abs((up - down).sum() / (2 * h) / 3 - slope[i]) < 1e-9


@pytest.mark.parametrize("cap", [1e-3, 30.0, 1e3])
def test_softcap(target: str, dtype: int, cap: float) -> None:
    """Capped logits match float64: a quotient, a tanh within 4 ulp, and a product. In place too."""
    k = zk.Kernels(target, dtype)
    x, exact = wide(dtype)
    n = x.size // ops.VOCAB * ops.VOCAB
    x, exact = x[:n].reshape(-1, ops.VOCAB), exact[:n].reshape(-1, ops.VOCAB)
    y = np.empty_like(x)
    M, V = x.shape
    k.zk_softcap(y, x, M, V, cap)
    want = float(np.float32(cap)) * np.tanh(exact / float(np.float32(cap)))
    close(y, want, 10 * U * np.abs(want))
    k.zk_softcap(x, x, M, V, cap)
    assert x.tobytes() == y.tobytes()


@pytest.mark.parametrize("M,C", [(1, 3), (7, 40), (700, 33)])
def test_pick(target: str, dtype: int, M: int, C: int) -> None:
    """The picked row is the last with a target. Without any, nothing is written."""
    k = zk.Kernels(target, dtype)
    x, _ = drawn(22, dtype, M, C)
    for row in {0, M // 2, M - 1}:
        for first in (-1, 5):
            hit = np.full(M, -1, np.int32)
            hit[: row + 1], hit[row] = first, 0
            y = np.zeros_like(x[0])
            k.zk_pick(y, x, hit, M, C)
            assert y.tobytes() == x[row].tobytes()
    last = y.copy()
    k.zk_pick(y, x[::-1].copy(), np.full(M, -1, np.int32), M, C)
    assert y.tobytes() == last.tobytes()


def test_cross_entropy_is_stable(target: str) -> None:
    """Only the differences of logits matter, also far from 0, where these are exact."""
    k = zk.Kernels(target)
    base = np.random.default_rng(14).integers(-20, 20, (4, 40)).astype(np.float32)
    hit = np.array([0, 39, 7, -1], np.int32)
    found = []
    for shift in (0, 1e6, -1e6):
        loss, d = np.empty(4, np.float32), np.empty_like(base)
        k.zk_cross_entropy(loss, d, base + np.float32(shift), hit, None, 4, 40, 4)
        found.append(loss.tobytes() + d.tobytes())
    assert found[0] == found[1] == found[2]


def test_cross_entropy_of_infinities(target: str) -> None:
    k = zk.Kernels(target)
    x = np.full((3, 24), -np.inf, np.float32)
    x[0, 4] = x[1, 4] = 0
    x[2] = np.nan
    loss, d = np.empty(3, np.float32), np.empty_like(x)
    k.zk_cross_entropy(loss, d, x, np.array([4, 5, -1], np.int32), None, 3, 24, 3)
    assert (
        loss[0] == 0
        and not d[0].any()
        and loss[1] == np.inf
        and loss[2] == 0
        and not d[2].any()
    )
    k.zk_cross_entropy(loss, d, x, np.array([4, 4, 5], np.int32), None, 3, 24, 3)
    assert loss[1] == 0 and np.isnan(loss[2]) and np.isnan(d[2]).all()


# ---- sampling a token


def test_sample(target: str, dtype: int) -> None:
    k, V = zk.Kernels(target, dtype), 50
    x, exact = drawn(15, dtype, V, scale=3)
    for heat in (0.5, 1.0, 2.0):
        share = np.exp((exact - exact.max()) / heat)
        edge = np.cumsum(share / share.sum())
        for u in np.linspace(0, 1, 401)[:-1]:
            # f64 rounding cannot move an edge past u
            if np.min(np.abs(edge - u)) > 1e-9:
                assert k.zk_sample(x, V, heat, 0, 1.0, u) == int(
                    np.searchsorted(edge, u, side="right")
                )
        assert 0 <= k.zk_sample(x, V, heat, 0, 1.0, 1 - 2.0**-53) < V
    assert k.zk_sample(x, V, 0.0, 0, 1.0, 0.999) == int(np.argmax(exact))


def test_sample_never_draws_the_impossible(target: str) -> None:
    k = zk.Kernels(target)
    x = np.array([-np.inf, 0, 1, -np.inf], np.float32)
    assert {
        k.zk_sample(x, 4, 1.0, 0, 1.0, u) for u in (0.0, 0.2, 0.9, 1 - 2.0**-53)
    } == {1, 2}


@pytest.mark.parametrize(
    "top_k,top_p",
    [(1, 1.0), (7, 1.0), (49, 1.0), (50, 1.0), (0, 0.0), (0, 0.3), (0, 0.9)]
    + [(7, 0.5), (2**31 - 1, 0.999)],
)
def test_sample_of_the_likeliest(
    target: str, dtype: int, top_k: int, top_p: float
) -> None:
    """A draw is from the first k tokens, and of those from the likeliest with the total share p, in
    float64. The middle of a token's share draws it however float64 rounds."""
    k, V, heat = zk.Kernels(target, dtype), 50, 1.3
    # Exact in all types
    exact = np.random.default_rng(16).permutation(V) / 4 - 6
    x = zk.store(exact, dtype)
    order = np.argsort(-exact)
    kept = order[: top_k or V]
    weight = np.exp((exact - exact.max()) / heat)
    share = np.cumsum(weight[kept]) / weight[kept].sum()
    assert np.min(np.abs(share - top_p)) > 1e-9 or top_p == 1
    kept = np.sort(kept[: np.searchsorted(share, top_p) + 1])
    edge = np.cumsum(weight[kept]) / weight[kept].sum()
    middle = edge - weight[kept] / weight[kept].sum() / 2
    found = [k.zk_sample(x, V, heat, top_k, top_p, u) for u in middle]
    assert found == list(kept)


def test_equal_logits_stay_together(target: str) -> None:
    k = zk.Kernels(target)
    x = np.array([1, 2, 0, 2, -0.0, 2], np.float32)
    found = {
        k.zk_sample(x, 6, 1.0, top_k, 1.0, u)
        for top_k in (1, 2, 3)
        for u in np.linspace(0, 1, 50)[:-1]
    }
    assert found == {1, 3, 5}


# ---- bits


def everything(k: zk.Kernels, n: int) -> bytes:
    """Return the results of each kernel of this file for one input."""
    whole = np.random.default_rng(16).integers(-1 << 20, 1 << 20, (n, 74))
    x = np.ldexp(whole, -17).astype(np.float32)
    target = np.random.default_rng(17).integers(-1, 74, n).astype(np.int32)
    out = []
    for kind in (zk.GELU_TANH, zk.GELU_ERF):
        out += [np.empty_like(x), np.empty_like(x)]
        k.zk_gelu_fwd(out[-2], x, x.size, kind)
        k.zk_gelu_bwd(out[-1], x, x, x.size, kind)
    out += [zk.empty(zk.F32, *shape) for shape in ((n, 37), (n, 74), (n,), (n, 80))]
    k.zk_swiglu_fwd(out[-4], x, n, 37)
    k.zk_swiglu_bwd(out[-3], out[-4], x, n, 37)
    k.zk_cross_entropy(out[-2], out[-1], padded(x), target, None, n, 74, n)
    out[-1] = out[-1][:, :74]
    out.append(np.empty((100, 74), np.float32))
    k.zk_embed_bwd(out[-1], x, target + 1, np.empty(101 + n, np.int32), n, 100, 74, 0)
    return b"".join(a.tobytes() for a in out)


# SHA-256 of everything(700): the same with every compiler, on every processor.
KNOWN_BITS = "e5920d830d69647698f65e837aaa5bc0f3eb7b535e4cc9e0c1e6a3992d4a923e"


@pytest.mark.slow
def test_objects_compilers_and_threads_change_no_bit() -> None:
    found = {
        everything(zk.Kernels(isa, zk.F32, n, cc), 700) for isa, cc, n in zk.variants()
    }
    assert len(found) == 1
    assert hashlib.sha256(found.pop()).hexdigest() == KNOWN_BITS


@pytest.mark.parametrize("kind", [zk.GELU_TANH, zk.GELU_ERF])
def test_a_ragged_end_changes_no_bit(target: str, dtype: int, kind: int) -> None:
    k = zk.Kernels(target, dtype)
    x, _ = drawn(18, dtype, 64, scale=3)
    whole = np.empty_like(x)
    k.zk_gelu_fwd(whole, x, 64, kind)
    for n in range(1, 64):
        y = np.zeros_like(x)
        k.zk_gelu_fwd(y, x, n, kind)
        assert y[:n].tobytes() == whole[:n].tobytes() and not y[n:].any()


def exact(k: zk.Kernels, dtype: int) -> bytes:
    """Return the results of kernels that sum nothing, or in a fixed order, and use no sigmoid."""
    x, dy = drawn(19, dtype, 40, 74, scale=4)[0], drawn(20, dtype, 40, 74)[0]
    token = np.random.default_rng(21).integers(0, 9, 40).astype(np.int32)
    out = [zk.empty(dtype, 40, 74) for _ in range(6)]
    k.zk_gelu_fwd(out[0], x, x.size, zk.GELU_ERF)
    k.zk_gelu_bwd(out[1], dy, x, x.size, zk.GELU_ERF)
    k.zk_add(out[2], x, dy, x.size)
    k.zk_embed_fwd(out[3], token, x, dy, 2, 20, 74)
    k.zk_embed_bwd(out[4], dy, token, np.empty(41 + 40, np.int32), 40, 40, 74, 0)
    k.zk_position_bwd(out[5], dy, 2, 20, 74, 40)
    return b"".join(a.tobytes() for a in out)


def test_a_gpu_gives_the_bits_of_a_cpu(dtype: int) -> None:
    assert exact(zk.Kernels(zk.EMULATED, dtype), dtype) == exact(
        zk.Kernels(dtype=dtype), dtype
    )


def test_caps_on_a_gpu_have_the_bits_of_a_cpu(dtype: int) -> None:
    x = wide(dtype)[0][:4960].reshape(-1, 80)
    x[0, :3] = zk.store(np.array([np.inf, -np.inf, 1e-40]), dtype)
    found = [np.empty_like(x) for _ in range(2)]
    for y, target in zip(found, (zk.EMULATED, None), strict=True):
        zk.Kernels(target, dtype).zk_softcap(y, x, len(x), 80, 3.0)
    assert found[0].tobytes() == found[1].tobytes()


def test_tiles_change_no_bit(isa: str) -> None:
    want = everything(zk.Kernels(isa), 50)
    for tile in (1, 48, 1000):
        assert everything(zk.Kernels(isa, zk.F32, 2, tile=(tile, 0, 0)), 50) == want
