"""pieces.py -- in what pieces a shard moves or is updated: each is some steps of the plan."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..plan.size import Size, pieces
from ..read.spec import Spec, Zero
from .shard import Flat

SHARD = 1024  # pieces of a shard at most
ALL = 12 * SHARD  # of all shards of a rank

Span = tuple[Size, Size]  # an offset, and elements
Sizes = tuple[int, int]  # many instances of a flat, and elements of each


@dataclass(frozen=True)
class Transfer:
    """Shards that move: `parts` of them side by side, by pieces of `ranks` ranks at once."""

    ranks: int = 1
    parts: int = 1


def cut(
    spec: Spec,
    flats: Sequence[Flat],
    shard: Size,
    key: str,
    of: Transfer,
    unit: int,
    name: str,
    others: Iterable[Transfer],
) -> list[Span]:
    """(offset, elements) of each piece of a shard, a multiple of `unit`; name: of its constant. The
    key of `zero` counts the elements that all ranks move at once. Refuses a value that makes too
    many pieces, and names the least one that every transfer by this key allows."""
    asked = getattr(spec.zero, key) or getattr(Zero, key)
    most = max(unit, asked // of.ranks // unit * unit)
    wrong = _too_many(shard, most, _sizes(flats, key, of))
    if not wrong:
        return pieces(shard, most, name)
    enough = []
    for x in (of, *others):
        enough.append(x.ranks * _least(_sizes(flats, key, x), unit))
    raise spec.wrong(f"zero.{key}", f"cuts {wrong}", f"at least {max(enough)}")


def _sizes(flats: Sequence[Flat], key: str, of: Transfer) -> list[Sizes]:
    """Instances of each flat, and elements of each. What stays on the device is not cut for the
    host."""
    near = key == "sub_group_size"
    return [(f.count, (f.shard - f.near * near) * of.parts) for f in flats]


def _too_many(shard: int, most: int, sizes: list[Sizes]) -> str:
    """What has too many pieces of so many elements; '': nothing."""
    if shard > SHARD * most:
        pieces = -(-shard // most)
        return f"a shard of {shard} elements into {pieces} pieces, more than {SHARD}"
    count = _count(sizes, most)
    if count > ALL:
        return f"the shards of all units into {count} pieces, more than {ALL}"
    return ""


def _count(sizes: list[Sizes], most: int) -> int:
    return sum(count * -(-n // most) for count, n in sizes)


def _least(sizes: list[Sizes], unit: int) -> int:
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
