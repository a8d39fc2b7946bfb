"""test_quantized.py -- tests weights from their quantized form, bit for bit: kernels against
numpy, numpy against bitsandbytes."""

import ctypes
from collections.abc import Callable

import numpy as np
import pytest

from tests.lib import quantized, zk
from tests.reference import known

INT, LONG, PLACE = ctypes.c_int, ctypes.c_int64, ctypes.c_void_p
TYPES = {  # of the result, and of the arguments
    "zk_quantized": (LONG, [INT, LONG]),
    "zk_host_quantize": (LONG, [PLACE, PLACE, LONG, INT]),
    "zk_host_keep": (LONG, [*[PLACE] * 4, LONG, INT]),
    "zk_host_keeps": (INT, [INT, LONG, LONG]),
}


def typed(name: str) -> Callable[..., int]:
    """Return a function of the host with its types."""
    found = getattr(zk.Kernels().library, name)
    found.restype, found.argtypes = TYPES[name]
    return found


@pytest.mark.parametrize("dtype", zk.REALS.values(), ids=zk.REALS)
@pytest.mark.parametrize("format_", quantized.FORMATS)
def test_dequantize(target: str, dtype: int, format_: str) -> None:
    """Whole chunks and the last one, of any length, give the products that the format states."""
    k = zk.Kernels(target, dtype)
    width = 4 if dtype == zk.F32 else 2
    for n in (1, 63, 64, 257, 4096, 16384, 16385, 40000):
        made, want = quantized.drawn(n, format_, n)
        stored = made.view(np.float32 if width == 4 else np.uint16)
        y = zk.empty(dtype, n)
        k.zk_dequantize(y, stored, n, stored.size, quantized.FORMATS[format_])
        assert y.tobytes() == zk.store(want.astype(np.float64), dtype).tobytes(), n


@pytest.mark.parametrize("format_", quantized.FORMATS)
def test_quantize(format_: str) -> None:
    """Weights that are quantized and dequantized are those of the formulas; whatever comes before
    and after 16384 of them does not matter."""
    k, number = zk.Kernels(), quantized.FORMATS[format_]
    quantize, size = typed("zk_host_quantize"), typed("zk_quantized")
    for n in (1, 65, 5000, 16384, 40000):
        x, y = known.tailed(n), np.empty(n, np.float32)
        made = np.zeros(size(number, n), np.uint8)
        assert quantize(made.ctypes.data, x.ctypes.data, n, number) == made.size
        stored = made.view(np.float32)
        k.zk_dequantize(y, stored, n, stored.size, number)
        assert np.array_equal(y, quantized.weights(x, format_)), n
        first = np.zeros(size(number, min(n, 16384)), np.uint8)
        quantize(first.ctypes.data, x.ctypes.data, min(n, 16384), number)
        assert np.array_equal(first, made[: first.size])


@pytest.mark.parametrize("n", (1, 65, 5001, 16384))
def test_keep_nf4(n: int) -> None:
    """Numbers that are taken out of a chunk and kept give its bytes again, whatever follows the last
    code."""
    number, x, blocks = quantized.FORMATS["nf4"], known.tailed(n), -(-n // 64)
    made = np.zeros(typed("zk_quantized")(number, n), np.uint8)
    typed("zk_host_quantize")(made.ctypes.data, x.ctypes.data, n, number)
    codes = made[: (n + 1) // 2].copy()
    codes[-1] |= 0x0F if n % 2 else 0
    factors = made[32 * blocks :][:blocks].copy()
    found = kept("nf4", codes, factors, made[-8:].view(np.float32), n, made.size)
    assert np.array_equal(found, made)


@pytest.mark.parametrize("n", (256, 1024))
def test_keep_int8(n: int) -> None:
    """Chunks that share a scale each have it behind their codes."""
    codes, scale = np.arange(n).astype(np.uint8), np.float32([0.37])
    found = kept("int8", codes, codes, scale, n, n // 256 * 260).reshape(-1, 260)
    assert np.array_equal(found[:, :256].ravel(), codes)
    assert (found[:, 256:] == scale.view(np.uint8)).all()


def kept(
    format_: str,
    codes: np.ndarray,
    factors: np.ndarray,
    scale: np.ndarray,
    n: int,
    size: int,
) -> np.ndarray:
    """Return the bytes of n weights that keep their numbers."""
    made = np.full(size, 0xAA, np.uint8)
    given = [x.ctypes.data for x in (made, codes, factors, scale)]
    assert typed("zk_host_keep")(*given, n, quantized.FORMATS[format_]) == size
    return made


@pytest.mark.parametrize(
    "format_,block,nested,keeps",
    [
        ("nf4", 64, 256, 1),
        ("nf4", 128, 128, 0),
        ("nf4", 64, 128, 0),
        ("nf4", 64, 0, 0),
        ("int8", 1024, 0, 1),
        ("int8", 1000, 0, 0),
        ("int8", 256, 256, 0),
    ],
)
def test_forms_that_are_kept(format_: str, block: int, nested: int, keeps: int) -> None:
    number = quantized.FORMATS[format_]
    assert typed("zk_host_keeps")(number, block, nested) == keeps


def test_bitsandbytes() -> None:
    """The formulas of the tests give bitsandbytes' weights (tests/reference/quantized.py)."""
    given = np.load(zk.ROOT / "tests" / "reference" / "quantized.npz")
    assert np.array_equal(given["levels"], quantized.NF4)
    assert np.array_equal(given["dynamic"], quantized.dynamic()[127:])
    for n in known.NF4:
        x, mean = known.tailed(n), given[f"mean.{n}"]
        found = quantized.nf4(x, mean)
        assert np.array_equal(found, given[f"nf4.{n}"])
        # a sum of up to 256 f32 numbers, in another order
        assert abs(quantized.mean(x) - mean) <= 8 * 2.0**-24 * mean
        assert len(np.unique(found)) > 500
