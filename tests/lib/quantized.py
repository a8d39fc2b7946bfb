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


def _ends(n: int) -> np.ndarray:
    """Return n numbers from 0.1 to 1 at equal distances, as torch.linspace rounds them: once, from
    the nearer end."""
    low, high = np.float32(0.1), np.float32(1)
    step, k = np.float64((high - low) / np.float32(n - 1)), np.arange(n)
    return np.float32(np.where(k < n // 2, low + k * step, high - step * (n - 1 - k)))


def dynamic() -> np.ndarray:
    """Return the values of the dynamic 8-bit type (8-bit Optimizers via Block-wise Quantization,
    2022): 10^(i - 6) times the middles of 2^i equal parts of [0.1, 1], and 0 and 1."""
    some = [np.float32([0, 1])]
    for i in range(7):
        ends = _ends(2**i + 1)
        middles = (ends[:-1] + ends[1:]) / np.float32(2) * np.float32(10.0 ** (i - 6))
        some += [middles, -middles]
    return np.sort(np.concatenate(some))


def nearest(x: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return the index of the nearest value, the lower one of two."""
    middles = (values[:-1] + values[1:]) / np.float32(2)
    return np.searchsorted(middles, x, side="left")


def _scaled(x: np.ndarray, most: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore"):
        return x * np.where(most > 0, np.float32(1) / most, np.float32(0))


def mean(x: np.ndarray) -> np.float32:
    """Return the mean of the largest magnitudes of a chunk's blocks."""
    return np.float32(_most(x)[1].astype(np.float64).mean())


def _most(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the blocks of a chunk, and the largest magnitude in each."""
    blocks = np.zeros(-(-x.size // BLOCK) * BLOCK, np.float32)
    blocks[: x.size] = x
    blocks = blocks.reshape(-1, BLOCK)
    return blocks, np.abs(blocks).max(1)


def nf4(x: np.ndarray, of_blocks: np.float32) -> np.ndarray:
    """Return the weights of a chunk, with this mean of its blocks."""
    blocks, most = _most(x)
    levels = NF4[nearest(_scaled(blocks, most[:, None]), NF4)]
    rest = most - of_blocks
    scale = np.abs(rest).max()
    values = dynamic()
    factors = values[nearest(_scaled(rest, scale), values)] * scale + of_blocks
    return (levels * factors[:, None]).ravel()[: x.size]


def _nf4(x: np.ndarray) -> np.ndarray:
    return nf4(x, mean(x))


def _int8(x: np.ndarray) -> np.ndarray:
    scale = np.abs(x).max() / np.float32(127)
    return np.rint(_scaled(x, scale)) * scale


def weights(x: np.ndarray, format_: str) -> np.ndarray:
    """Return the f32 weights that an f32 tensor becomes."""
    each, one = {"nf4": (CHUNK, _nf4), "int8": (INT8, _int8)}[format_]
    flat = x.ravel()
    chunks = [one(flat[i : i + each]) for i in range(0, flat.size, each)]
    return np.concatenate(chunks).reshape(x.shape)


# ---- bytes, as kernels/quantized.h has them

FORMATS = {"int8": 1, "nf4": 2}


def drawn(seed: int, format_: str, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Return random bytes of n quantized weights, and the f32 weights."""
    rng, made, out = np.random.default_rng(seed), [], []
    each = {"nf4": CHUNK, "int8": INT8}[format_]
    for first in range(0, n, each):
        some = min(each, n - first)
        if format_ == "int8":
            q, scale = rng.integers(-127, 128, INT8), np.float32(rng.random())
            made += [q.astype(np.int8).tobytes(), scale.tobytes()]
            out.append((np.float32(q) * scale)[:some])
            continue
        blocks = -(-some // BLOCK)
        q = rng.integers(0, 256, BLOCK // 2 * blocks, np.uint8)
        a = rng.integers(0, 256, blocks, np.uint8)
        scale, mean = np.float32(rng.random(2))
        made += [q.tobytes(), a.tobytes(), bytes(-blocks % 4)]
        made += [scale.tobytes(), mean.tobytes()]
        levels = NF4[np.stack([q >> 4, q & 15], 1).reshape(blocks, BLOCK)]
        out.append((levels * (dynamic()[a] * scale + mean)[:, None]).ravel()[:some])
    return np.frombuffer(b"".join(made), np.uint8).copy(), np.concatenate(out)
