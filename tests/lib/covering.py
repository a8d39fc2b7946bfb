"""covering.py -- the rows of a product of choices, and those of them that a shorter run takes.

`./run test all` runs each row. `./run test` runs as many as a test's budget allows, chosen so that
each choice occurs as often as any other of its kind, and pairs of choices as evenly as they can.
`./run test quick` runs the first (conftest.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from itertools import combinations, product

import pytest

Row = tuple[Hashable, ...]


def spread(axes: Sequence[Sequence[Hashable]]) -> list[Row]:
    """Return all rows of a product, each the one whose choices, then pairs of choices, occurred
    least before it."""
    used: Counter[Hashable] = Counter()

    def met(row: tuple[int, ...], size: int) -> list[Hashable]:
        return [*combinations(enumerate(row), size)]

    def before(row: tuple[int, ...]) -> tuple[int, ...]:
        sizes = range(1, min(3, len(axes) + 1))
        return tuple(sum(used[x] for x in met(row, n)) for n in sizes)

    left = [*product(*(range(len(axis)) for axis in axes))]
    rows = []
    while left:
        row = min(left, key=before)
        left.remove(row)
        used.update(met(row, 1) + met(row, 2))
        rows.append(tuple(axis[i] for axis, i in zip(axes, row, strict=True)))
    return rows


def covering(*axes: Sequence[Hashable], budget: int = 0) -> list:
    """Return the rows for parametrize. budget: the number of rows that `./run test` takes; 0: the
    fewest in which each choice occurs."""
    few = budget or max(map(len, axes))
    return [
        pytest.param(*row, marks=[] if n < few else pytest.mark.exhaustive)
        for n, row in enumerate(spread(axes))
    ]
