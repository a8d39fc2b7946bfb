"""pieces.py -- cuts shards into the pieces that one step transfers or updates."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..plan.size import Size, pieces
from ..read.spec import Spec, Zero
from .shard import Flat

SHARD = 1024  # most pieces of a shard
ALL = 12 * SHARD  # most pieces of all shards of a rank

Span = tuple[Size, Size]  # offset and length, in elements
Sizes = tuple[int, int]  # instances of a flat, elements of each


@dataclass(frozen=True)
class Transfer:
    """A transfer of shards. A piece is cut from the `parts` consecutive shards of each of `ranks`
    ranks."""

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
    """Return (offset, elements) of each piece of a shard, in multiples of `unit`.

    key: the key of `zero` that limits the elements of a piece over all ranks; of: the transfer;
    name: the name of the piece's size in C. Raises SpecError if there are too many pieces; the
    message names the least value that works for this transfer and the others by this key.
    """
    asked = getattr(spec.zero, key) or getattr(Zero, key)
    most = max(unit, asked // of.ranks // unit * unit)
    wrong = _too_many(shard, most, _sizes(flats, key, of))
    if not wrong:
        return pieces(shard, most, name)
    enough = []
    for x in (of, *others):
        enough.append(x.ranks * _least(_sizes(flats, key, x), unit))
    raise spec.wrong(f"zero.{key}", f"splits {wrong}", f"at least {max(enough)}")


def _sizes(flats: Sequence[Flat], key: str, of: Transfer) -> list[Sizes]:
    """Return (instances, elements of each) for every flat. Elements whose states stay on the device
    are not in the host's tiles."""
    near = key == "sub_group_size"
    return [(f.count, (f.shard - f.near * near) * of.parts) for f in flats]


def _too_many(shard: int, most: int, sizes: list[Sizes]) -> str:
    """Return a message if pieces of `most` elements are too many, else ''."""
    if shard > SHARD * most:
        pieces = -(-shard // most)
        return f"a shard of {shard} elements into {pieces} pieces, more than {SHARD}"
    count = _count(sizes, most)
    if count > ALL:
        return f"the shards of all units into {count} pieces, more than {ALL}"
    return ""


def _count(sizes: list[Sizes], most: int) -> int:
    """Return the number of pieces of at most `most` elements."""
    return sum(count * -(-n // most) for count, n in sizes)


def _least(sizes: list[Sizes], unit: int) -> int:
    """Return the fewest elements of a piece with which no limit is exceeded."""
    largest = max(n for _, n in sizes)
    tried = range(unit, largest + unit, unit)
    good = bisect_left(
        tried,
        True,
        0,
        len(tried) - 1,
        key=lambda most: largest <= SHARD * most and _count(sizes, most) <= ALL,
    )
    return tried[good]
