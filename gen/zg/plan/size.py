"""size.py -- integers that know their names: a count of elements of a flat buffer, or of their
bytes, as a sum of train.c's constants. In a plan a Size is an ordinary int; in C it is printed by
name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Unit:
    """A constant of train.c. name: its words joined by dots, as in shard.block. each: it is the
    distance between neighbouring units of a kind."""

    name: str
    size: int
    each: bool = False


NAMELESS = Unit("", 1)
Terms = tuple[tuple[Unit, int], ...]


class Size(int):
    """`width` times a sum of units, each with a factor. flat: the flat buffer whose elements are
    counted, '' for anything else. Sums, differences and multiples of Sizes are Sizes; a plain
    number among them counts as a nameless unit, and a fraction makes a plain number."""

    terms: Terms
    flat: str
    width: int

    def __new__(cls, terms: Terms, flat: str = "", width: int = 1) -> Size:
        made = super().__new__(cls, width * sum(n * u.size for u, n in terms))
        made.terms = tuple((u, n) for u, n in terms if n or u.each)
        made.flat = flat
        made.width = width
        return made

    @classmethod
    def of(
        cls, name: str, size: int, flat: str = "", each: bool = False
    ) -> Size:
        """Return the Size of one unit, counted in elements."""
        return cls(((Unit(name, size, each), 1),), flat)

    @classmethod
    def none(cls, flat: str) -> Size:
        return cls((), flat)

    def bytes(self, width: int) -> Size:
        """Return the bytes of these elements, at `width` bytes each."""
        return Size(self.terms, self.flat, width)

    def over(self, width: int) -> int:
        """Return the number divided by `width`: a count of elements if it counts bytes of that
        width."""
        if width == self.width:
            return self.bytes(1)
        return self // width

    def _plus(self, other: int, sign: int) -> Size:
        if not isinstance(other, Size):
            other = Size(((NAMELESS, other),))
        total = dict(self.terms)
        for unit, n in other.terms:
            times, rest = divmod(n * other.width, self.width)
            if rest:
                return Size(((NAMELESS, int(self) + sign * int(other)),))
            total[unit] = total.get(unit, 0) + sign * times
        return Size((*total.items(),), self.flat or other.flat, self.width)

    def __add__(self, other: int) -> Size:
        return self._plus(other, 1) if _whole(other) else NotImplemented

    __radd__ = __add__

    def __sub__(self, other: int) -> Size:
        return self._plus(other, -1) if _whole(other) else NotImplemented

    def __mul__(self, n: int) -> Size:
        if not _whole(n):
            return NotImplemented
        terms = tuple((u, k * int(n)) for u, k in self.terms)
        return Size(terms, self.flat, self.width)

    __rmul__ = __mul__

    def __neg__(self) -> Size:
        return self * -1

    def __floordiv__(self, n: int) -> int:
        if not _whole(n):
            return NotImplemented
        if any(k % n for _, k in self.terms):
            return int(self) // n
        terms = tuple((u, k // n) for u, k in self.terms)
        return Size(terms, self.flat, self.width)


def _whole(n: object) -> bool:
    """Return whether an operand is a whole number, a Size or an int."""
    return isinstance(n, int)


def flat_of(numbers: Sequence[int]) -> str:
    """Return the flat buffer that the first named Size counts, or ''."""
    sizes = (n for n in numbers if isinstance(n, Size))
    return next((n.flat for n in sizes if n.flat), "")


def width_of(numbers: Sequence[int]) -> int:
    """Return the element width of the first Size among these numbers; 0 if there is none."""
    return next((n.width for n in numbers if isinstance(n, Size)), 0)


def pieces(whole: Size, most: int, name: str) -> list[tuple[Size, Size]]:
    """Return (offset, elements) of each piece of at most `most` elements. name: name of the piece's
    constant."""
    if most >= whole:
        return [(Size.none(whole.flat), whole)]
    one = Size.of(f"{name}.{whole.flat}", most, whole.flat)
    count, rest = divmod(int(whole), most)
    out = [(one * n, one) for n in range(count)]
    if rest:
        (unit, _), *_ = whole.terms
        left = f"{unit.name} % {name}.{whole.flat}"
        out.append((one * count, Size.of(left, rest, whole.flat)))
    return out
