"""test_tensor.py -- tests the emulated tensor cores' sums (tests/emulation/tensor.cpp) against the
same model in fractions, bit for bit."""

from __future__ import annotations

import ctypes
import math
import struct
from fractions import Fraction

import numpy as np
import pytest

from tests.lib import zk

# Bits of the fraction, bits of the exponent
FORMATS = {"bf16": (7, 8), "f16": (10, 5), "f32": (23, 8)}
# Bits below the greatest exponent, products that are added at once
CORES = {8: (24, 8), 9: (25, 16), 10: (25, 16)}
K, LOWEST, NAN, INFINITE, SIGN = 16, -126, 0x7FFFFFFF, 0x7F800000, 1 << 31

Vector = tuple[list[int], list[int], int]  # a, b, c


def number(bits: int, name: str) -> Fraction | float:
    """Return the value of a number in a format; infinities and NaN as floats."""
    fraction, exponent = FORMATS[name]
    sign = -1 if bits >> (fraction + exponent) else 1
    top = (1 << exponent) - 1
    e, low = bits >> fraction & top, bits & ((1 << fraction) - 1)
    if e == top:
        return math.nan if low else sign * math.inf
    low, e = (low + (1 << fraction), e) if e else (low, 1)
    return sign * low * Fraction(2) ** (e - (top >> 1) - fraction)


def floor_of_log(x: Fraction) -> int:
    """Return e with 2^e <= x < 2^(e+1)."""
    e = x.numerator.bit_length() - x.denominator.bit_length()
    return e if x >= Fraction(2) ** e else e - 1


def exponent(x: Fraction, name: str) -> int:
    """Return the exponent that a format gives to a number."""
    lowest = 2 - (1 << (FORMATS[name][1] - 1))
    return max(floor_of_log(abs(x)), lowest) if x else LOWEST


def cut(x: Fraction, unit: int) -> Fraction:
    """Return x, cut toward zero to a multiple of 2^unit."""
    return int(x / Fraction(2) ** unit) * Fraction(2) ** unit


def added(a: list[int], b: list[int], c: int, name: str, fraction: int) -> int:
    """Return the bits of c + a . b where all products are added at once."""
    x, y = ([number(bits, name) for bits in side] for side in (a, b))
    own = number(c, "f32")
    if any(isinstance(term, float) for term in (*x, *y, own)):
        total = float(own) + sum(float(p) * float(q) for p, q in zip(x, y, strict=True))
        return NAN if math.isnan(total) else INFINITE | SIGN * (total < 0)
    terms = [(own, exponent(own, "f32"))] + [
        (p * q, exponent(p, name) + exponent(q, name))
        for p, q in zip(x, y, strict=True)
    ]
    last = max(e for _, e in terms) - fraction
    total = sum(cut(term, last) for term, _ in terms)
    total = cut(total, exponent(total, "f32") - 23)
    if abs(total) >= 2**128:
        return INFINITE | SIGN * (total < 0)
    return struct.unpack("<I", struct.pack("<f", float(total)))[0]


def model(vector: Vector, name: str, major: int) -> int:
    (a, b, c), (fraction, terms) = vector, CORES[major]
    for at in range(0, K, terms):
        c = added(a[at : at + terms], b[at : at + terms], c, name, fraction)
    return c


def emulated(vector: Vector, name: str, major: int) -> int:
    """Return the same by the emulation."""
    library = zk.library("emulated")
    call = getattr(library, f"tensor_{name}")
    call.argtypes = [ctypes.c_uint16 * K, ctypes.c_uint16 * K, ctypes.c_uint32]
    call.restype = ctypes.c_uint32
    library.tensor_choose(major)
    a, b, c = vector
    return call((ctypes.c_uint16 * K)(*a), (ctypes.c_uint16 * K)(*b), c)


# ---- vectors of each kind


def near(r: np.random.Generator, name: str, n: int, around: int, by: int) -> list[int]:
    """Return finite numbers whose exponents are at most `by` from 2^around."""
    fraction, width = FORMATS[name]
    bias = (1 << (width - 1)) - 1
    e = np.clip(r.integers(around - by, around + by + 1, n) + bias, 0, 2 * bias)
    low = r.integers(0, 1 << fraction, n)
    return (r.integers(0, 2, n) << (fraction + width) | e << fraction | low).tolist()


def like_ones(r: np.random.Generator, name: str) -> Vector:
    return near(r, name, K, 0, 4), near(r, name, K, 0, 4), near(r, "f32", 1, 0, 4)[0]


def cancelling(r: np.random.Generator, name: str) -> Vector:
    """Each product comes with its negative, in another place."""
    a, b, c = like_ones(r, name)
    negative = 1 << sum(FORMATS[name])
    a[8:], b[8:] = [x ^ negative for x in a[:8]], b[:8]
    a[3], c = near(r, name, 1, 0, 1)[0], near(r, "f32", 1, -20, 8)[0]
    order = r.permutation(K)
    return [a[i] for i in order], [b[i] for i in order], c


def far_apart(r: np.random.Generator, name: str) -> Vector:
    """Exponents are any with which a sum is finite."""
    return (
        near(r, name, K, 0, 60),
        near(r, name, K, 0, 60),
        near(r, "f32", 1, 0, 120)[0],
    )


def subnormal(r: np.random.Generator, name: str) -> Vector:
    """Factors and c, and in bf16 results, too, are subnormal or nearly so."""
    lowest = 2 - (1 << (FORMATS[name][1] - 1))
    a, b = near(r, name, K, lowest, 3), near(r, name, K, 4 if name == "bf16" else 0, 5)
    return a, b, near(r, "f32", 1, LOWEST if name == "bf16" else -24, 3)[0]


def with_zeros(r: np.random.Generator, name: str) -> Vector:
    """Most factors are 0 of either sign, beside others of any size."""
    a, b, c = far_apart(r, name)
    zero = 1 << sum(FORMATS[name])
    a = [x if r.random() < 0.2 else x & zero for x in a]
    return a, b, c if r.random() < 0.7 else c & SIGN


def special(r: np.random.Generator, name: str) -> Vector:
    """A few terms are infinite, NaN or 0."""
    a, b, c = like_ones(r, name)
    fraction, width = FORMATS[name]
    infinite = (1 << width) - 1 << fraction
    for side in (a, b):
        for at in r.integers(0, K, r.integers(0, 3)):
            sign = int(r.integers(0, 2)) << (fraction + width)
            side[at] = sign | (infinite, infinite, infinite | 1, 0)[r.integers(0, 4)]
    return a, b, c if r.random() < 0.8 else INFINITE | SIGN * int(r.integers(0, 2))


KINDS = [like_ones, cancelling, far_apart, subnormal, with_zeros, special]


@pytest.mark.parametrize("major", CORES)
@pytest.mark.parametrize("name", ["bf16", "f16"])
def test_sums(name: str, major: int) -> None:
    """Sums have the model's bits. Finite vectors of each kind tell Ampere's from later ones."""
    r = np.random.default_rng(1)
    for kind in KINDS:
        vectors = [kind(r, name) for _ in range(200)]
        found = [emulated(x, name, major) for x in vectors]
        for x, got in zip(vectors, found, strict=True):
            assert got == model(x, name, major), f"{kind.__name__}: {x}"
        other = 9 if major == 8 else 8
        assert kind == special or found != [emulated(x, name, other) for x in vectors]


# c, products in order, the sum in tensor cores of major 8, of 9 and 10
ROWS = [
    # 2^-25 beside 1 is below the last bit that major 8 keeps
    (1.0, [(2.0**-13, 2.0**-12)] * 16, 1.0, 1 + 2.0**-21),
    # the sum is cut, not rounded
    (1 + 2.0**-23, [(2.0**-12, 2.0**-12)], 1 + 2.0**-23, 1 + 2.0**-23),
    (-1 - 2.0**-23, [(-(2.0**-12), 2.0**-12)], -1 - 2.0**-23, -1 - 2.0**-23),
    # 1.5 * 1.5 counts as a product of exponent 0
    (0.0, [(1.5, 1.5)] + [(2.0**-12, 2.0**-12)] * 4, 2.25 + 2.0**-22, 2.25 + 2.0**-22),
    (0.0, [(1.5, 1.5)] + [(2.0**-13, 2.0**-12)] * 8, 2.25, 2.25 + 2.0**-22),
    # major 8 adds the last 8 products to the sum of the first
    (
        0.0,
        [(1, 1), (-1, 1)] + [(0, 0)] * 6 + [(2.0**-10, 2.0**-14)],
        2.0**-24,
        2.0**-24,
    ),
    (0.0, [(4, 1), (-4, 1)] + [(0, 0)] * 6 + [(2.0**-10, 2.0**-14)], 2.0**-24, 0.0),
    # zeros
    (-0.0, [(-0.0, 1.0)] * 16, 0.0, 0.0),
    (-1.0, [(1.0, 1.0)], 0.0, 0.0),
    # infinities
    (-math.inf, [(1, 1)], -math.inf, -math.inf),
    (0.0, [(math.inf, 0)], math.nan, math.nan),
    (-math.inf, [(math.inf, 1)], math.nan, math.nan),
    (math.nan, [(1, 1)], math.nan, math.nan),
]
# The same of numbers that f16 does not have
LARGE = [
    (0.0, [(2.0**100, 2.0**28)], math.inf, math.inf),
    (0.0, [(2.0**100, -(2.0**28))], -math.inf, -math.inf),
    (
        0.0,
        [(2.0**100, 2.0**28)] + [(0, 0)] * 7 + [(2.0**100, -(2.0**28))],
        math.inf,
        0.0,
    ),
    # 0 * 2^127 counts as a product of exponent 1
    (2.0**-23 + 2.0**-25, [(0, 2.0**127)], 2.0**-23, 2.0**-23),
    (0.0, [(2.0**100, 1.5 * 2.0**28)], math.inf, math.inf),
    # below all subnormal numbers
    (0.0, [(-(2.0**-100), 2.0**-50)], 0.0, 0.0),
    (2.0**-149, [(0, 1)], 2.0**-149, 2.0**-149),
]


def stored(x: float, name: str) -> int:
    """Return the bits of a number that the format has."""
    if name == "f16":
        return struct.unpack("<H", struct.pack("<e", x))[0]
    bits = struct.unpack("<I", struct.pack("<f", x))[0]
    return bits >> 16 if name == "bf16" else bits


@pytest.mark.parametrize("major", CORES)
@pytest.mark.parametrize(
    "name,row",
    [(name, row) for name in ("bf16", "f16") for row in ROWS]
    + [("bf16", row) for row in LARGE],
)
def test_sums_by_hand(name: str, row: tuple, major: int) -> None:
    c, products, *sums = row
    sides = ([stored(x, name) for x in side] for side in zip(*products, strict=True))
    a, b = (side + [0] * (K - len(side)) for side in sides)
    want = sums[major > 8]
    bits = NAN if math.isnan(want) else stored(want, "f32")
    assert emulated((a, b, stored(c, "f32")), name, major) == bits
