"""pieces.py -- in what pieces a shard moves or is updated: each is some steps of the plan."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from ..read.spec import Spec, Zero
from .shard import Flat

SHARD = 1024  # pieces of a shard at most
ALL = 12 * SHARD  # of all shards of a rank

Span = tuple[int, int]  # an offset or how many, and elements


def cut(
    spec: Spec,
    flats: Sequence[Flat],
    shard: int,
    key: str,
    ranks: int,
    unit: int,
) -> list[Span]:
    """(offset, elements) of each piece of a shard; the key of `zero` counts what `ranks` ranks move
    at once, and a piece is a multiple of `unit`."""
    asked = getattr(spec.zero, key) or getattr(Zero, key)
    most = max(unit, asked // ranks // unit * unit)
    near = key == "sub_group_size"  # what stays on the device is not cut
    sizes = [(f.count, f.shard - f.near * near) for f in flats]
    if shard > SHARD * most:
        what = f"a shard of {shard} elements into {-(-shard // most)} pieces, more than {SHARD}"
    elif _count(sizes, most) > ALL:
        what = f"the shards of all units into {_count(sizes, most)} pieces, more than {ALL}"
    else:
        return [(o, min(most, shard - o)) for o in range(0, shard, most)]
    raise spec.wrong(
        f"zero.{key}",
        f"cuts {what}",
        f"at least {_least(sizes, unit) * ranks}",
    )


def _count(sizes: list[Span], most: int) -> int:
    return sum(count * -(-n // most) for count, n in sizes)


def _least(sizes: list[Span], unit: int) -> int:
    """Elements of a piece with which no shard has too many."""
    largest = max(n for _, n in sizes)
    tried = range(unit, largest + unit, unit)
    good = bisect_left(
        tried,
        True,
        0,
        len(tried) - 1,
        key=lambda most: (
            largest <= SHARD * most and _count(sizes, most) <= ALL
        ),
    )
    return tried[good]
