"""pieces.py -- in what pieces a shard moves or is updated: each is some steps of the plan."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..read.spec import Spec, Zero
from .shard import Flat

SHARD = 1024  # pieces of a shard at most
ALL = 12 * SHARD  # of all shards of a rank

Span = tuple[int, int]  # an offset or how many, and elements


@dataclass(frozen=True)
class Moved:
    """Shards that move: `parts` of them side by side, by pieces of `ranks` ranks at once."""

    ranks: int = 1
    parts: int = 1


def cut(
    spec: Spec,
    flats: Sequence[Flat],
    shard: int,
    key: str,
    of: Moved,
    unit: int,
    others: Iterable[Moved],
) -> list[Span]:
    """(offset, elements) of each piece of what moves; a piece is a multiple of `unit`. The key of
    `zero` counts what all ranks move at once. Refuses it where it makes too many, and names what is
    enough for all that moves by it."""
    asked = getattr(spec.zero, key) or getattr(Zero, key)
    most = max(unit, asked // of.ranks // unit * unit)
    near = key == "sub_group_size"  # what stays on the device is not cut

    def sizes(x: Moved) -> list[Span]:
        return [(f.count, (f.shard - f.near * near) * x.parts) for f in flats]

    count = _count(sizes(of), most)
    if shard > SHARD * most:
        what = f"a shard of {shard} elements into {-(-shard // most)} pieces, more than {SHARD}"
    elif count > ALL:
        what = f"the shards of all units into {count} pieces, more than {ALL}"
    else:
        return [(o, min(most, shard - o)) for o in range(0, shard, most)]
    least = max(_least(sizes(x), unit) * x.ranks for x in (of, *others))
    raise spec.wrong(f"zero.{key}", f"cuts {what}", f"at least {least}")


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
