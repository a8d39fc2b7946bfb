"""chance.py -- computes the kernels' random numbers in numpy: words of Philox 4x32-10, and the
elements and probabilities that dropout keeps."""

import numpy as np

LOW = np.uint64(0xFFFFFFFF)
STEP, PLACE = 0xD1342543DE82EF95, 1 << 62  # zr_memory.h, drop.h


def philox(counter: np.ndarray, key: np.ndarray, seed: int) -> np.ndarray:
    """Return words [len(counter), 4]."""
    c = [
        counter & LOW,
        counter >> np.uint64(32),
        key & LOW,
        key >> np.uint64(32),
    ]
    x, y = seed & 0xFFFFFFFF, seed >> 32
    for _ in range(10):
        p, q = np.uint64(0xD2511F53) * c[0], np.uint64(0xCD9E8D57) * c[2]
        c = [
            q >> np.uint64(32) ^ c[1] ^ np.uint64(x),
            q & LOW,
            p >> np.uint64(32) ^ c[3] ^ np.uint64(y),
            p & LOW,
        ]
        x, y = x + 0x9E3779B9 & 0xFFFFFFFF, y + 0xBB67AE85 & 0xFFFFFFFF
    return np.stack(c, axis=1)


def keys(seed: int, first: int, count: int) -> list[int]:
    """Return the keys of the samples first .. first + count - 1 of a run."""
    return [(2 * (seed + n * STEP) + 1) % 2**64 for n in range(first, first + count)]


def kept(keys: list[int], place: int, n: int, p: float) -> np.ndarray:
    """Return bool [len(keys), n]: the elements of each sample that dropout keeps at a place of the
    model."""
    elem = np.arange(n, dtype=np.uint64)
    counter = np.arange((n + 3) // 4, dtype=np.uint64)
    at = np.full(len(counter), place | PLACE, np.uint64)
    least = int(float(np.float32(p)) * 2**32)
    drawn = [philox(counter, at, key).reshape(-1)[elem] for key in keys]
    return np.stack(drawn) >= least


def seen(
    keys: list[int], place: int, heads: int, T: int, p: float, first: int = 0
) -> np.ndarray:
    """Return bool [len(keys), heads, T, T]: the probabilities of attention, by query and key, that
    dropout keeps at a place of the model (drop.h). first: number of the first head."""
    h, q, k = np.meshgrid(*map(np.arange, (heads, T, T)), indexing="ij")
    h += first
    counter = ((h * T + (q & ~8)) * T + (k & ~8)).reshape(-1).astype(np.uint64)
    word = (2 * (q >> 3 & 1) + (k >> 3 & 1)).reshape(-1)
    at = np.full(len(counter), place | PLACE, np.uint64)
    least = int(float(np.float32(p)) * 2**32)
    rows = np.arange(len(counter))
    drawn = [philox(counter, at, key)[rows, word].reshape(h.shape) for key in keys]
    return np.stack(drawn) >= least
