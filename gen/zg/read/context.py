"""context.py -- checks the keys of samples that are cut into blocks, and of ranks that share them.

Which gradients are added is part of the recipe: `train.sequence_blocks` alone decides it.
`cluster.context_parallel` divides that number, so it changes no bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from .keyplace import KeyPlace
from .node import dotted
from .schema import Row, Spec


def _divisors(n: int, of: int = 0) -> str:
    """Return the divisors of n that also divide `of`, as text."""
    some = [str(d) for d in range(1, n + 1) if n % d == 0 and of % d == 0]
    return ", ".join(some[-8:])


def around(
    at: KeyPlace,
    heads: tuple[int, int, int],
    n: int,
    N: int,
    seen: Callable[[int, int], Row],
) -> list[Row]:
    """Return the rows of attention with the exchanges around it.

    heads: H, G and D; n: blocks of a sample; N: ranks that share these; seen: makes the row of
    attention of some query heads and key-value heads. There are copies of key-value heads if n
    does not divide G and the heads allow it, since sums of gradients may not depend on N.
    """
    H, G, D = heads
    if n == 1:
        return [seen(H, G)]
    whole = math.lcm(G, n)
    copies = 1 if H % whole else whole // G
    if H % N or G * copies % N:
        few = [d for d in range(1, n + 1) if n % d == H % d == G * copies % d == 0]
        raise KeyPlace(at.root, ("cluster", "context_parallel")).fail(
            f"{N} ranks cannot share the {H} heads of {dotted(at.path)}",
            " or ".join(map(str, few)),
        )
    k = {"k": n // N}
    inside = [Row("to_heads", k), seen(H // N, G * copies // N), Row("to_rows", k)]
    if N == copies == 1:
        return inside
    sorting = {
        "H": H,
        "G": G,
        "D": D,
        "E": (H + 2 * G) * D,
        "ranks": N,
        "copies": copies,
    }
    return [Row("cut_heads", sorting), *inside, Row("join_heads", sorting)]


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
    if s.train.loss_mean != "tokens":
        what = "the mean of a micro-batch needs whole samples"
        raise s.wrong(key, what, "1, or train.loss_mean tokens")
    if s.train.reduction != "exact":
        what = "fast reductions do not add the blocks of a sample first"
        raise s.wrong(key, what, "1, or train.reduction exact")
    if s.train.offload_activations and s.own_blocks > 1:
        raise s.wrong(
            "train.offload_activations",
            f"the {s.own_blocks} blocks of a sample on a rank keep their activations on the device",
            f"false, or cluster.context_parallel {s.train.sequence_blocks}",
        )


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
    (features, ("train", "cluster.context_parallel")),
)
