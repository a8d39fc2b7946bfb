"""chunk.py -- checks the chunks of tokens in which the head and MLPs are computed."""

from __future__ import annotations

from collections.abc import Callable

from ..facts import ops
from .keyplace import fail
from .node import Node
from .schema import Model, SpecKeys

CHUNKS = 1024  # most chunks of a micro-batch's tokens


def near(n: int, of: Callable[[int], bool]) -> list[int]:
    """Return the nearest numbers at or below n and above n, within 2^20, for which `of` is true."""
    below = next((k for k in range(n, max(0, n - 2**20), -1) if of(k)), None)
    above = next((k for k in range(n + 1, n + 2**20) if of(k)), None)
    return [k for k in (below, above) if k]


def _divides(root: Node, key: str, m: int | None, rows: int, precision: str) -> None:
    """Require at most CHUNKS chunks of m tokens in `rows`, each of whole terms of a sum."""
    path, terms = ("train", key), ops.TERMS[precision]

    def fits(m: int) -> bool:
        return rows % m == 0 and (m == rows or m % terms == 0)

    if m and not fits(m):
        found = near(min(m, rows), fits)
        raise fail(
            root,
            path,
            f"{m} does not divide the {rows} tokens of a micro-batch"
            if rows % m
            else f"{m} is not a multiple of {terms}, the number of terms that "
            f"{precision} sums at once",
            f"auto, {' or '.join(str(n) for n in found if n <= rows)}",
        )
    if m and rows // m > CHUNKS:
        n = next(n for n in range(CHUNKS, 0, -1) if rows % n == 0 and fits(rows // n))
        raise fail(
            root,
            path,
            f"{m} cuts the {rows} tokens of a micro-batch into "
            f"{rows // m} chunks, more than {CHUNKS}",
            f"auto, or at least {rows // n}",
        )


def divides(keys: SpecKeys, root: Node, model: Model | None) -> None:
    """Require that chunks divide a micro-batch and allow the head's gradients to be summed."""
    t = keys.train
    rows = t.micro_batch * t.sequence // t.sequence_blocks
    m = t.head_chunk
    for key, chunk in (("head_chunk", m), ("mlp_chunk", t.mlp_chunk)):
        _divides(root, key, chunk, rows, t.precision)
    if model and m and m < rows and model.units[-1].ops[-1].args["bias"]:
        raise fail(
            root,
            ("train", "head_chunk"),
            "the head's linear has a bias, and its gradient cannot be summed in chunks",
            f"auto, {rows}, or a head without bias",
        )
