"""tokens.py -- writes byte-token files from a text, and prints the loss of a bigram model on them.

tokens.py TEXT TRAIN VAL SEQUENCE [MOST]: the first nine tenths of TEXT become TRAIN, the rest VAL,
of at most MOST targets.
Prints the bigram's validation loss in nats per token.

Invariants
 1. VAL has whole samples of SEQUENCE targets, so a trainer's validation loss and the bigram's are
    over the same tokens.
 2. TRAIN is its part of TEXT in pieces of 16 samples, in a random order that is always the same. A
    trainer takes samples in file order, and one that sees only half of them should see all kinds.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from zg.output import why

VOCABULARY = 256
SMOOTHING = 0.1
PIECE = 16


def split(
    tokens: np.ndarray, sequence: int, most: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return train and val: [n] -> [n*9/10], [samples*sequence + 1]."""
    cut = len(tokens) * 9 // 10
    targets = min(len(tokens) - cut - 1, most)
    return tokens[:cut], tokens[cut : cut + targets // sequence * sequence + 1]


def stir(train: np.ndarray, sequence: int) -> np.ndarray:
    """Shuffle pieces: [n] -> [n]. The last piece, which may be short, stays last."""
    piece = PIECE * sequence
    n = len(train) // piece
    whole = train[: n * piece].reshape(n, piece)
    stream = np.random.RandomState(1)  # a stream that numpy promises to keep
    order = stream.permutation(n)
    return np.concatenate([whole[order].ravel(), train[whole.size :]])


def bigram_loss(train: np.ndarray, val: np.ndarray) -> float:
    """Return the mean of -log p(next | this) over val [n+1], with p counted on train [m] and
    add-0.1 smoothing."""
    pairs = train[:-1].astype(np.int64) * VOCABULARY + train[1:]
    count = (
        np.bincount(pairs, minlength=VOCABULARY**2).reshape(VOCABULARY, VOCABULARY)
        + SMOOTHING
    )
    logp = np.log(count / count.sum(axis=1, keepdims=True))
    return float(-logp[val[:-1], val[1:]].mean())


def main(
    text: str,
    train_path: str,
    val_path: str,
    sequence: str,
    most: str = f"{sys.maxsize}",
) -> int:
    T = int(sequence)
    try:
        tokens = np.fromfile(text, dtype=np.uint8).astype("<u2")
    except OSError as e:
        print(f"{text}: {why(e)}", file=sys.stderr)
        return 2
    least = 20 * (T + 1)  # for at least two validation samples
    if len(tokens) < least:
        print(
            f"{text}: {len(tokens)} bytes; at least {least} are needed",
            file=sys.stderr,
        )
        return 2
    train, val = split(tokens, T, int(most))
    for path, part in ((train_path, stir(train, T)), (val_path, val)):
        try:
            Path(path).write_bytes(part.tobytes())
        except OSError as e:
            print(f"{path}: {why(e)}", file=sys.stderr)
            return 3
    print(f"{bigram_loss(train, val):.4f}")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
