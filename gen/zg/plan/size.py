"""size.py -- integers that know their names: a count of elements of a flat buffer, or of their
bytes, as a sum of train.c's constants. In a plan a Size is an ordinary int; in C it is printed by
name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Constant:
    """A constant of train.c. name: its words joined by dots, as in shard.block. each: it is the
    distance between neighbouring units of a kind."""

    name: str
    size: int
    each: bool = False


NAMELESS = Constant("", 1)
Terms = tuple[tuple[Constant, int], ...]


class Size(int):
    """`width` times a sum of units, each with a factor. flat: the flat buffer whose elements are
    counted, '' for anything else. An operator takes it as the int that it is; `plus`, `minus`,
    `times` and `divided` keep names."""

    terms: Terms
    flat: str
    width: int

    def __new__(cls, terms: Terms, flat: str = "", width: int = 1) -> Size:
        units, kept = 0, []
        for term in terms:  # a plan has thousands of Sizes
            unit, n = term
            units += n * unit.size
            if n or unit.each:
                kept.append(term)
        made = super().__new__(cls, width * units)
        made.terms = tuple(kept)
        made.flat = flat
        made.width = width
        return made

    @classmethod
    def of(cls, name: str, size: int, flat: str = "", each: bool = False) -> Size:
        """Return the Size of one unit, counted in elements."""
        return cls(((Constant(name, size, each), 1),), flat)

    @classmethod
    def none(cls, flat: str) -> Size:
        return cls((), flat)

    def many(self, n: int) -> Size:
        """Return so many times the number."""
        terms = tuple((u, k * n) for u, k in self.terms)
        return Size(terms, self.flat, self.width)

    def bytes(self, width: int) -> Size:
        """Return the bytes of these elements, at `width` bytes each."""
        return Size(self.terms, self.flat, width)


def plus(a: int, b: int, sign: int = 1) -> Size:
    """Return a + sign * b; a plain number among them counts as a nameless unit."""
    a, b = (x if isinstance(x, Size) else Size(((NAMELESS, x),)) for x in (a, b))
    width = a.width if a else b.width
    total: dict[Constant, int] = {}
    for x, by in ((a, 1), (b, sign)):
        for unit, n in x.terms:
            factor, rest = divmod(n * x.width, width)
            if rest:
                return Size(((NAMELESS, int(a) + sign * int(b)),))
            total[unit] = total.get(unit, 0) + by * factor
    return Size((*total.items(),), a.flat or b.flat, width)


def minus(a: int, b: int) -> int:
    """Return a - b, with names if one of them has some."""
    named = isinstance(a, Size) or isinstance(b, Size)
    return plus(a, b, -1) if named else a - b


def times(a: int, n: int) -> int:
    """Return a * n, with the names of a."""
    return a.many(n) if isinstance(a, Size) else a * n


def divided(a: int, n: int) -> int:
    """Return a // n, with the names of a if n is its width or divides each term."""
    if not isinstance(a, Size):
        return a // n
    if n == a.width:
        return a.bytes(1)
    if any(k % n for _, k in a.terms):
        return a // n
    return Size(tuple((u, k // n) for u, k in a.terms), a.flat, a.width)


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
    out = [(one.many(n), one) for n in range(count)]
    if rest:
        (unit, _), *_ = whole.terms
        left = f"{unit.name} % {name}.{whole.flat}"
        out.append((one.many(count), Size.of(left, rest, whole.flat)))
    return out
