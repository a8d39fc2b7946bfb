"""test_quantized.py -- tests weights from their quantized form, bit for bit: kernels against
numpy, numpy against bitsandbytes."""

import ctypes

import numpy as np
import pytest

from tests.lib import quantized, zk
from tests.reference import known


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
    quantize = k.library.zk_host_quantize
    size = k.library.zk_quantized
    quantize.restype = size.restype = ctypes.c_int64
    quantize.argtypes = [ctypes.c_void_p] * 2 + [ctypes.c_int64, ctypes.c_int]
    size.argtypes = [ctypes.c_int, ctypes.c_int64]
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
