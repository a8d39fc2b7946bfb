"""quantized.py -- quantizes weights by the published formulas, for comparison with the program."""

import numpy as np

# QLoRA (Dettmers and others, 2023), appendix E.
NF4 = np.float32(
    [
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634),
        *(0.33791524171829224, 0.44070982933044434, 0.5626170039176941),
        *(0.7229568362236023, 1.0),
    ]
)
BLOCK, CHUNK, INT8 = 64, 16384, 256


def dynamic() -> np.ndarray:
    """Return the values of the dynamic 8-bit type (8-bit Optimizers via Block-wise Quantization,
    2022): 10^(i - 6) times the middles of 2^i equal parts of [0.1, 1], and 0 and 1."""
    some = [0.0, 1.0]
    for i in range(7):
        ends = np.linspace(0.1, 1, 2**i + 1)
        middles = (ends[:-1] + ends[1:]) / 2 * 10.0 ** (i - 6)
        some += [*middles, *-middles]
    return np.sort(np.float32(some))


def nearest(x: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return the index of the nearest value, the lower one of two."""
    middles = (values[:-1] + values[1:]) / np.float32(2)
    return np.searchsorted(middles, x, side="left")


def _scaled(x: np.ndarray, most: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore"):
        return x * np.where(most > 0, np.float32(1) / most, np.float32(0))


def _nf4(x: np.ndarray) -> np.ndarray:
    """Return what a chunk becomes."""
    blocks = np.zeros(-(-x.size // BLOCK) * BLOCK, np.float32)
    blocks[: x.size] = x
    blocks = blocks.reshape(-1, BLOCK)
    most = np.abs(blocks).max(1)
    levels = NF4[nearest(_scaled(blocks, most[:, None]), NF4)]
    mean = np.float32(most.astype(np.float64).mean())
    rest = most - mean
    scale = np.abs(rest).max()
    values = dynamic()
    factors = values[nearest(_scaled(rest, scale), values)] * scale + mean
    return (levels * factors[:, None]).ravel()[: x.size]


def _int8(x: np.ndarray) -> np.ndarray:
    scale = np.abs(x).max() / np.float32(127)
    return np.rint(_scaled(x, scale)) * scale


def weights(x: np.ndarray, format_: str) -> np.ndarray:
    """Return the f32 weights that an f32 tensor becomes."""
    each, one = {"nf4": (CHUNK, _nf4), "int8": (INT8, _int8)}[format_]
    flat = x.ravel()
    chunks = [one(flat[i : i + each]) for i in range(0, flat.size, each)]
    return np.concatenate(chunks).reshape(x.shape)
