"""words.py -- writes names and numbers of a plan as C."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..plan.size import NAMELESS, Constant, Size, width_of
from ..plan.size import Terms as SizeTerms

# constants that belong to no flat
CONSTANTS = {"sums": "ZK_SUMS", "ctl": "CTL_BYTES"}
Terms = Sequence[tuple[str, int]]  # variables, each with its factor


def upper(name: str) -> str:
    return name.replace(".", "_").upper()


def group_name(name: str) -> str:
    """Return train.c's name of a group of ranks."""
    return f"GROUP_{upper(name)}"


def word(name: str) -> str:
    """Return the first word of a name: ring.block -> ring."""
    return name.partition(".")[0]


def lower(name: str) -> str:
    return name.replace(".", "_")


def call(name: str, *args: str) -> str:
    return f"{name}({', '.join(args)})"


# ---- numbers


def number(n: int) -> str:
    kind = "INT64_C" if n < 2**63 else "UINT64_C"
    return str(n) if abs(n) < 2**31 else f"{kind}({n})"


def linear(value: int, terms: Iterable[tuple[str, int]]) -> str:
    """Return value + a sum of variables, each times a number."""
    text = number(value) if value else ""
    for name, by in terms:
        if not by:
            continue
        sign = "-" if by < 0 else "+" if text else ""
        times = abs(by)
        term = name if times == 1 else f"{number(times)} * {name}"
        text = f"{text} {sign} {term}" if text else f"{sign}{term}"
    return text or "0"


def product(times: str, width: int, name: str, value: int) -> str:
    """Return width * times * name, computed in 64 bits if `value` needs them."""
    times = f"({times})" if " " in times else times
    factors = [str(width)] * (width > 1) + [times] * (times not in ("", "1"))
    if factors and value >= 2**31 and factors[0].isdigit():
        factors[0] = f"INT64_C({factors[0]})"
    return " * ".join([*factors, name])


def constant(u: Constant) -> str:
    """Return train.c's name of a unit."""
    if u.name.startswith("slot."):
        return f"SIZE({upper(u.name.removeprefix('slot.'))})"
    return CONSTANTS.get(u.name) or " % ".join(map(upper, u.name.split(" % ")))


def in_c(n: int, terms: Terms = ()) -> str:
    """Return the number n + factor * variable + ..., by name if it has one. terms: each a loop's
    variable or l, with its factor."""
    terms = [(name, by) for name, by in terms if by]
    numbers = [n, *(by for _, by in terms)]
    units = dict.fromkeys(u for x in numbers for u, k in _units(x) if k)
    if not any(u != NAMELESS for u in units):
        return linear(n, terms)
    width = _width(numbers)
    found = []
    for u in units:
        first, *grown = (_times(x, u) // width for x in numbers)
        names = (name for name, _ in terms)
        found.append((linear(first, zip(names, grown, strict=True)), u))
    if len(found) == 1:
        ((times, u),) = found
        return product(times, width, _closed(u, width), n)
    text = " + ".join(_term(times, u, n) for times, u in found)
    return product("", width, f"({text})" if width > 1 else text, n)


def _term(times: str, u: Constant, value: int) -> str:
    """Return one of the terms of a number."""
    return times if u == NAMELESS else product(times, 1, constant(u), value)


def _closed(u: Constant, width: int) -> str:
    text = constant(u)
    return f"({text})" if " " in text and width > 1 else text


def _units(n: int) -> SizeTerms:
    return n.terms if isinstance(n, Size) else ((NAMELESS, int(n)),)


def _times(n: int, unit: Constant) -> int:
    """Return how often a number contains a unit, in elements of width 1."""
    width = n.width if isinstance(n, Size) else 1
    return width * dict(_units(n)).get(unit, 0)


def _width(numbers: Sequence[int]) -> int:
    """Return the width of their Sizes if it divides every term of each number, else 1."""
    width = width_of(numbers)
    all_ = (_times(x, u) for x in numbers for u, _ in _units(x))
    return 1 if any(n % width for n in all_) else width
