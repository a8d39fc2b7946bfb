"""known.py -- shares initial weights, tokens and digests between make.py and the tests. All come
from Philox bits (numpy keeps the raw stream of a bit generator stable), so none is stored."""

import zlib

import numpy as np

# Of the token stream: 20 steps of 8 samples wrap in the middle of a batch
SAMPLES = 100
STEPS = 20
HOLE = 10  # the case `ignored` replaces this token by a hole: input 0, no target
# Models of means.npz with their label smoothing, the steps there, and samples of a micro-batch
MEANS = {"gpt": 0.0, "llama": 0.1}
MEANS_STEPS, MEANS_BATCH = 5, 2
# Largest number of elements of a tensor that a digest keeps whole
WHOLE = 2048
# Digest of larger ones: so many elements, and dot products with random signs
PICKED, DOTS = (
    256,
    8,
)


def bits(what: str, n: int) -> np.ndarray:
    """Return n words of 64 random bits that belong to the name `what`."""
    return np.random.Philox(key=zlib.crc32(what.encode())).random_raw(n)


def weight(name: str, shape: tuple[int, ...], norm: bool) -> np.ndarray:
    """Return initial values that are exact in float32 and float64: multiples of 2^-17. A norm's
    weight is 1 +- 1/4; matrices are within +-1/4 (a gain of about 1 at width 60), and so are
    biases."""
    n = int(np.prod(shape))
    centred = (bits(name, n) >> np.uint64(48)).astype(
        np.int64
    ) - 32768  # [-32768, 32767]
    return (centred / 131072.0 + (1.0 if norm else 0.0)).reshape(shape)


def is_norm_weight(name: str) -> bool:
    """Return whether a Hugging Face name is a norm's weight: ln_1.weight, model.norm.weight,
    q_norm.weight."""
    last = name.split(".")[-2]
    return name.endswith(".weight") and (
        last.startswith("ln_") or last.endswith("norm")
    )


def of_model(model: str, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return initial values of a tensor of a model of hf/. Gemma's norms multiply by 1 + weight."""
    norm = is_norm_weight(name) and not model.startswith("gemma")
    return weight(name, shape, norm)


def stream(name: str, sequence: int, vocab: int) -> np.ndarray:
    """Return int64 tokens that a model can partly predict: t' = 5 t + 17 + r with r in 0..7. The 7
    tokens after the last whole sample are never read."""
    n = SAMPLES * sequence + 1 + 7
    noise = (bits(name + " tokens", n) >> np.uint64(61)).astype(np.int64)
    tokens = np.zeros(n, np.int64)
    for i in range(1, n):
        tokens[i] = (5 * tokens[i - 1] + 17 + noise[i]) % vocab
    return tokens


def batch(
    tokens: np.ndarray, sequence: int, first: int, count: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return inputs and targets [count, T] of samples first .. first+count-1, modulo their
    number."""
    samples = (len(tokens) - 1) // sequence
    at = (np.arange(first, first + count) % samples * sequence)[:, None] + np.arange(
        sequence
    )
    return tokens[at], tokens[at + 1]


def prompts(tokens: np.ndarray, sequence: int) -> np.ndarray:
    """Return the stream with a prompt of another length in each sample, as HOLE. Samples 4 and 5 of
    each 8 have no other target."""
    found = tokens.copy()
    for i in range((len(tokens) - 1) // sequence):
        length = sequence if i % 8 in (4, 5) else 7 * i % sequence
        found[i * sequence + 1 : i * sequence + 1 + length] = HOLE
    return found


def digest(name: str, x: np.ndarray) -> np.ndarray:
    """Return a tensor as a short float64 vector: itself if it is small, else some elements and its
    dot products with random signs over sqrt(n). An error of rms e in x is an error of about e
    there."""
    x = np.asarray(x, np.float64).ravel()
    if x.size <= WHOLE:
        return x
    at = bits(name + " picked", PICKED) % np.uint64(x.size)
    sign = (bits(name + " signs", x.size) & np.uint64((1 << DOTS) - 1)).astype(np.int64)
    dots = [
        np.dot(1.0 - 2.0 * (sign >> b & 1), x) / np.sqrt(x.size) for b in range(DOTS)
    ]
    return np.concatenate([x[at], dots])


# Elements of weights that are quantized: 256 blocks of 64, and fewer with a rest
NF4 = (16384, 5000)


def tailed(n: int) -> np.ndarray:
    """Return float32 numbers with a heavy tail, whose size differs from block to block; one block
    is zero."""
    x, block = weight(f"tailed.{n}", (n,), False) * 4, np.arange(n) // 64
    x = x * np.abs(x) * 2.0 ** -(block % 7) * (1 + block * 37 % 64 / 64)
    x[128:192] = 0
    return np.float32(x)
