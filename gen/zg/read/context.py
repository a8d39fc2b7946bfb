"""context.py -- samples that are cut into blocks, and ranks that share them: the exchanges around
attention, and checks of the keys.

Which gradients are added is part of the recipe: `train.sequence_blocks` alone decides it.
`cluster.context_parallel` divides that number, so it changes no bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace

from ..facts import ops
from .schema import Op, Row, Spec


def _divisors(n: int, of: int = 0) -> str:
    """Return the divisors of n that also divide `of`, as text."""
    some = [str(d) for d in range(1, n + 1) if n % d == 0 and of % d == 0]
    return ", ".join(some[-8:])


def _copies(row: Row, n: int) -> int:
    """Return the copies of each key-value head. There are some if the n blocks of a sample exceed
    these heads and the query heads allow it, since sums of gradients may not depend on ranks."""
    H, G = row.dims["H"], row.dims["G"]
    whole = math.lcm(G, n)
    return 1 if n == 1 or H % whole else whole // G


def _around(row: Row, n: int, N: int) -> list[Row]:
    """Return attention of the heads of one of N ranks, with the exchanges around it if samples have
    n blocks."""
    if n == 1:
        return [row]
    copies = _copies(row, n)
    H, G, D = (row.dims[key] for key in "HGD")
    h, g = H // N, G * copies // N
    own = {"H": h, "G": g, "E": (h + 2 * g) * D, "J": h + g, "Q": h * D}
    k = {"k": n // N}
    mine = replace(row, dims={**row.dims, **own})
    inside = [Row("to_heads", k), mine, Row("to_rows", k)]
    if N == copies == 1:
        return inside
    whole = {"H": H, "G": G, "D": D, "E": (H + 2 * G) * D}
    sorting = {**whole, "ranks": N, "copies": copies}
    return [Row("cut_heads", sorting), *inside, Row("join_heads", sorting)]


def _attends(row: Row) -> bool:
    return ops.WORDS.get(row.name) == "attention"


def rows(s: Spec, op: Op) -> list[Row]:
    """Return the rows of an op as a rank computes them."""
    shared = s.train.sequence_blocks, s.cluster.context_parallel
    return [
        part
        for row in op.rows
        for part in (_around(row, *shared) if _attends(row) else [row])
    ]


def _attentions(some: Iterable[Op]) -> Iterator[Row]:
    """Yield the rows of attention among some ops."""
    for op in some:
        yield from filter(_attends, op.rows)
        yield from _attentions(op.ops)


def _heads(s: Spec) -> Iterator[tuple[str, int, int, int]]:
    """Yield each attention's unit, query heads, key-value heads and copies of each of these."""
    for unit in s.model.units:
        for row in _attentions(unit.ops):
            copies = _copies(row, s.train.sequence_blocks)
            yield unit.name, row.dims["H"], row.dims["G"], copies


def most(s: Spec) -> int:
    """Return the largest number of ranks that can share a sample. Each has as many blocks, and as
    many heads of every attention. Other numbers that can divide it."""
    found = (math.gcd(H, G * copies) for _, H, G, copies in _heads(s))
    return math.gcd(s.train.sequence_blocks, *found)


def heads(s: Spec) -> None:
    """Refuse ranks that cannot share the heads of every attention."""
    n, N, W = s.train.sequence_blocks, s.cluster.context_parallel, s.cluster.ranks
    if n % N or W % N:
        return
    for unit, H, G, copies in _heads(s):
        if H % N or G * copies % N:
            many = f"{copies} copies of each of " * (copies > 1)
            raise s.wrong(
                "cluster.context_parallel",
                f"{N} ranks cannot share the {H} query heads and {many}{G} key-value heads of "
                f"{unit}",
                _divisors(most(s), W),
            )


def blocks(s: Spec) -> None:
    """Refuse blocks that are no equal parts of a sample, and ranks that cannot share them."""
    n, N, T = s.train.sequence_blocks, s.cluster.context_parallel, s.train.sequence
    W = s.cluster.ranks
    if T % n:
        raise s.wrong(
            "train.sequence_blocks",
            f"{n} does not divide train.sequence {T}",
            f"{_divisors(min(T, 4096), T)}, each another recipe",
        )
    if W % N:
        raise s.wrong(
            "cluster.context_parallel",
            f"{N} does not divide {W} ranks",
            _divisors(W),
        )
    if n % N:
        raise s.wrong(
            "cluster.context_parallel",
            f"{N} ranks do not divide the {n} blocks of a sample",
            f"{_divisors(n, W)}, or train.sequence_blocks: {N}, another recipe",
        )
    whole = {"cluster.local": s.cluster.local, "zero.shard_size": s.zero.shared}
    for key, size in whole.items():
        if size and size < W and size % N:
            raise s.wrong(
                "cluster.context_parallel",
                f"{N} ranks do not divide {key} {size}",
                _divisors(n, size),
            )


def features(s: Spec) -> None:
    """Refuse settings that need whole samples."""
    if s.train.sequence_blocks == 1:
        return
    key = "train.sequence_blocks"
    if s.train.reduction != "exact":
        what = "fast reductions do not add the blocks of a sample first"
        raise s.wrong(key, what, "1, or train.reduction exact")


AGREE = (
    (
        blocks,
        (
            "train.sequence_blocks",
            "train.sequence",
            "cluster.context_parallel",
            "cluster.ranks",
            "cluster.local",
            "zero",
        ),
    ),
    (heads, ("train.sequence_blocks", "cluster.context_parallel", "model")),
    (features, ("train", "cluster.context_parallel")),
)
