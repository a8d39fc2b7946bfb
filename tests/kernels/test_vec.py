"""test_vec.py -- tests functions of lanes.h, vec.h and part.h: bounds, and equal bits from every
object and compiler."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import math

import numpy as np
import pytest

from tests.lib import zk
from tests.lib.trainer import ROOT, alone, flags, sh

Array = np.ndarray

ULPS = 2.0  # bound that lanes.h promises, except for tanh


@functools.cache
def built(compiler: str, isa: str) -> ctypes.CDLL:
    """Return tests/kernels/vec.c compiled with the flags of programs."""
    out = ROOT / "out/test" / f"vec-{compiler}-{isa}.so"
    with alone("vec"):
        sh(
            compiler,
            *flags("warn", "code", isa),
            "-shared",
            "-o",
            out,
            "tests/kernels/vec.c",
        )
    return ctypes.CDLL(str(out))


def each() -> list[tuple[str, ctypes.CDLL]]:
    return [
        (f"{cc} {isa}", built(cc, isa)) for cc in zk.compilers() for isa in zk.isas()
    ]


def pointers(*arrays: Array) -> list[ctypes.c_void_p]:
    return [ctypes.c_void_p(a.ctypes.data) for a in arrays]


def over(lib: ctypes.CDLL, name: str, x: Array, y_type: type) -> Array:
    y = np.zeros(x.shape, y_type)
    getattr(lib, "over_" + name)(*pointers(y, x), ctypes.c_int64(x.size))
    return y


def agreed(name: str, x: Array, y_type: type) -> Array:
    """Return the result that all objects share, bit for bit."""
    found = {over(lib, name, x, y_type).tobytes() for _, lib in each()}
    assert len(found) == 1
    return np.frombuffer(found.pop(), y_type)


def floats(low: float, high: float) -> Array:
    """Return every 8191st float, special ones, and an even cover of [low, high]."""
    some = np.arange(0, 2**32, 8191, np.uint64).astype(np.uint32).view(np.float32)
    special = np.array(
        [
            0.0,
            -0.0,
            1.0,
            -1.0,
            np.inf,
            -np.inf,
            np.nan,
            1e-45,
            -1e-45,
            1.2e-38,
        ],
        np.float32,
    )
    x = np.concatenate(
        [some, special, np.linspace(low, high, 2**18).astype(np.float32)]
    )
    return np.resize(x, -(-x.size // 16) * 16)


def within(found: Array, exact: Array, ulps: float) -> None:
    """Assert a bound on the error. `exact` has more bits than `found`; if it rounds to no finite
    number, `found` must be that."""
    with np.errstate(over="ignore"):
        rounded = exact.astype(found.dtype)
    finite = np.isfinite(rounded)
    assert np.array_equal(found[~finite], rounded[~finite], equal_nan=True)
    ulp = np.spacing(np.abs(rounded[finite])).astype(exact.dtype)
    assert (
        np.abs(found[finite].astype(exact.dtype) - exact[finite]) <= ulps * ulp
    ).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    "name,low,high",
    [("exp", -104, 89), ("log", 0.5, 2), ("erf", -4, 4), ("tanh", -11, 11)],
)
def test_functions_of_floats(name: str, low: float, high: float) -> None:
    x = floats(low, high)
    reference = np.vectorize(math.erf) if name == "erf" else getattr(np, name)
    with np.errstate(all="ignore"):
        ulps = 2 * ULPS if name == "tanh" else ULPS
        within(agreed(name, x, np.float32), reference(x.astype(np.float64)), ulps)


@pytest.mark.parametrize("name", ["exp", "log", "sqrt"])
def test_sixteen_have_the_bits_of_registers(name: str) -> None:
    x = floats(-4, 4)
    one, all_ = (agreed(n, x, np.float32) for n in (name, name + "16"))
    assert one.tobytes() == all_.tobytes()


@pytest.mark.slow
def test_square_roots_are_ieee() -> None:
    x = floats(0, 4)
    with np.errstate(all="ignore"):
        within(agreed("sqrt", x, np.float32), np.sqrt(x.astype(np.float64)), 0.5)


def doubles(name: str) -> Array:
    r = np.random.default_rng(5)
    edge = [0.0, -0.0, 1.0, np.nan, 5e-324, 1e-310]
    if name == "zk_exp":
        return np.concatenate(
            [
                r.uniform(-750, 711, 20000),
                r.uniform(-1, 1, 20000),
                edge,
                [np.inf, -np.inf],
            ]
        )
    if name == "zk_log":
        spread = np.ldexp(r.uniform(0.5, 1, 20000), r.integers(-1070, 1024, 20000))
        return np.concatenate(
            [
                spread,
                r.uniform(0.5, 2, 20000),
                1 + r.uniform(-1e-6, 1e-6, 1000),
                edge,
                [np.inf, -np.inf, -1.0],
            ]
        )
    # next to multiples of pi/2 all but a few bits cancel
    quarter = np.longdouble("1.57079632679489661923")
    near = (np.arange(1, 6366197, 317).astype(np.longdouble) * quarter).astype(float)
    return np.concatenate(
        [
            r.uniform(-1e7, 1e7, 20000),
            r.uniform(-7, 7, 20000),
            near,
            -near,
            edge,
        ]
    )


@pytest.mark.parametrize("name", ["zk_sin", "zk_cos", "zk_exp", "zk_log"])
def test_functions_of_doubles(name: str) -> None:
    x = doubles(name)
    with np.errstate(all="ignore"):
        within(
            agreed(name, x, np.float64),
            getattr(np, name[3:])(x.astype(np.longdouble)),
            ULPS,
        )


# ---- bf16


@pytest.mark.slow
def test_bf16_rounds_to_nearest_even() -> None:
    x = floats(-1, 1)
    ties = ((np.arange(2**16, dtype=np.uint32) << 16) + 0x8000).view(np.float32)
    x = np.concatenate([x, ties])
    found = agreed("narrow", x, np.uint16)
    assert found.tobytes() == zk.to_bf16(x).tobytes()
    for name in ("scalar", "put_bf16"):
        assert found.tobytes() == agreed(name, x, np.uint16).tobytes()
    assert (np.isnan(zk.from_bf16(found)) == np.isnan(x)).all()


@pytest.mark.slow
def test_bf16_widens_exactly() -> None:
    x = np.arange(2**16).astype(np.uint16)
    for name in ("both", "get_bf16"):
        assert agreed(name, x, np.float32).tobytes() == zk.from_bf16(x).tobytes()


# ---- f16

HALVES = np.arange(2**16).astype(np.uint16)


def test_every_half_widens_exactly() -> None:
    want = HALVES.view(np.float16).astype(np.float32)
    for name in ("widen_f16", "one_f16", "get_f16"):
        found = agreed(name, HALVES, np.float32)
        nan = np.isnan(found)
        assert np.array_equal(nan, np.isnan(want))
        assert found[~nan].tobytes() == want[~nan].tobytes()


def test_floats_round_to_the_nearest_half() -> None:
    """Floats round to the nearest f16 like numpy's: every f16, the midpoints between two, the
    floats next to both, and a cover of all. Ties go to even, from 65520 on to infinity; NaN stays
    NaN."""
    half = HALVES.view(np.float16).astype(np.float32)
    half = half[np.isfinite(half)]
    with np.errstate(over="ignore"):
        above = np.nextafter(half.astype(np.float16), np.float16(np.inf)).astype(
            np.float32
        )
        even = np.concatenate([half, half / 2 + above / 2])
    even = even[np.isfinite(even)]
    near = [
        even,
        np.nextafter(even, np.float32(np.inf)),
        np.nextafter(even, np.float32(-np.inf)),
    ]
    edge = np.array(
        [
            65504,
            65519.996,
            65520,
            65535,
            65536,
            3e38,
            2.0**-24,
            2.0**-25,
            2.0**-25 * 1.0000001,
            2.0**-26,
            2.0**-14,
            1e-45,
        ],
        np.float32,
    )
    x = np.concatenate([*near, edge, -edge, floats(-70000, 70000)])
    x = np.resize(x, -(-x.size // 16) * 16)
    with np.errstate(over="ignore"):
        want = x.astype(np.float16).view(np.uint16)
    found = agreed("narrow_f16", x, np.uint16)
    for name in ("scalar_f16", "put_f16"):
        assert found.tobytes() == agreed(name, x, np.uint16).tobytes()
    nan = np.isnan(x)
    assert (
        np.array_equal(found[~nan], want[~nan])
        and np.isnan(found[nan].view(np.float16)).all()
    )


# ---- lanes


@pytest.mark.parametrize("registers", [0, 1])
@pytest.mark.parametrize("dtype", zk.REALS.values())
def test_parts_touch_n_elements(dtype: int, registers: int) -> None:
    for _, lib in each():
        for n in range(-1, 19):
            x, y = (
                zk.store(np.arange(1, 33), dtype),
                zk.store(np.full(32, -1), dtype),
            )
            size = ctypes.c_int64(n)
            lib.over_part(*pointers(y, x), size, dtype, registers)
            m = min(max(n, 0), 16)
            assert np.array_equal(y[:m], x[:m]) and (zk.load(y[m:]) == -1).all()


@pytest.mark.parametrize("registers", [0, 1])
@pytest.mark.parametrize("dtype", zk.REALS.values())
def test_lanes_past_a_part_are_zero(dtype: int, registers: int) -> None:
    for _, lib in each():
        for n in range(-1, 19):
            x, y = (
                zk.store(np.arange(1, 33), dtype),
                np.full(16, -1, np.float32),
            )
            size = ctypes.c_int64(n)
            lib.over_first(*pointers(y, x), size, dtype, registers)
            assert np.array_equal(
                y, np.where(np.arange(16) < n, np.arange(1, 17), 0)
            ), n


def test_lanes() -> None:
    r = np.random.default_rng(2)
    a, b = r.standard_normal((2, 16)).astype(np.float32)
    a[3], b[3], a[5], b[7] = 1, 1, np.nan, np.nan
    for name, lib in each():
        y = np.zeros(65, np.float32)
        lib.over_lanes(*pointers(y, a, b))
        assert np.array_equal(y[1:17], np.where(a > b, a, b), equal_nan=True), name
        assert np.array_equal(y[17:33], np.where(a < b, a, b), equal_nan=True), name
        # the product is exact in float64; rounding the sum there first shows once in 2**29
        exact = a.astype(np.float64) * b + a
        assert np.array_equal(y[33:49], exact.astype(np.float32), equal_nan=True), name
        assert np.array_equal(y[49:], y[1:17], equal_nan=True), name


def test_sum_folds_eight_four_two_one() -> None:
    r = np.random.default_rng(3)
    for _, lib in each():
        for _ in range(50):
            a = (r.standard_normal(16) * 10.0 ** r.integers(-3, 4, 16)).astype(
                np.float32
            )
            y, want = np.zeros(65, np.float32), a.copy()
            lib.over_lanes(*pointers(y, a, a))
            for half in (8, 4, 2, 1):
                want = want[:half] + want[half : 2 * half]
            assert y[0] == want[0]


# ---- known bits in every version

KNOWN_BITS = "3c7baf4afdb3e4756684efbd6ddb7a4144f14adced7a74303f7bd0fae3c44871"


def test_known_bits() -> None:
    x = floats(-4, 4)
    grid = np.arange(-40000, 40000) * 0.171875
    parts = [agreed(name, x, np.float32) for name in ("exp", "log", "erf")]
    parts += [
        agreed(name, grid, np.float64)
        for name in ("zk_sin", "zk_cos", "zk_exp", "zk_log")
    ]
    numbers = [np.where(np.isnan(part), part.dtype.type(0), part) for part in parts]
    assert (
        hashlib.sha256(b"".join(part.tobytes() for part in numbers)).hexdigest()
        == KNOWN_BITS
    )
