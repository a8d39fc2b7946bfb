"""operand.py -- operands of kernel calls: places, numbers and words."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

Names = tuple[str, ...]
Ints = tuple[int, ...]

ALL = "all"  # the group of every rank, in order of rank


def by_place(group: str, n: int) -> str:
    """Return the text of a number that is n times a rank's place in a group. r: the rank itself."""
    return f"+{'r' if group == ALL else group}*{n}" if n else ""


@dataclass(frozen=True)
class Operand:
    """Bytes of a parameter of the function or of a class with one slot.

    They start at `at`, plus by_rank for each place in the group and by_round for each round of a
    loop. name: the tensor or value there, for readers only; it takes no part in comparisons. In
    text BASE+AT+r*BYTES+c*BYTES:NAME.
    """

    base: str
    at: int = 0
    by_rank: int = 0
    by_round: int = 0
    name: str = field(default="", compare=False)
    group: str = ALL

    def __str__(self) -> str:
        rank = by_place(self.group, self.by_rank)
        round_ = f"+c*{self.by_round}" if self.by_round else ""
        name = f":{self.name}" if self.name else ""
        return f"{self.base}+{self.at}{rank}{round_}{name}"


@dataclass(frozen=True)
class Index:
    """The index of an element of a flat: `at`, plus a step for each instance, a step for each place
    in a group, and the function's number `more`. In text l*ELEMENTS+r*ELEMENTS+AT+MORE."""

    by_layer: int
    by_rank: int = 0
    at: int = 0
    more: str = ""
    group: str = ALL

    def __str__(self) -> str:
        rank = by_place(self.group, self.by_rank)
        at = f"+{self.at}" if self.at else ""
        return f"l*{self.by_layer}{rank}{at}" + (f"+{self.more}" if self.more else "")


@dataclass(frozen=True)
class Layers:
    """A whole number that differs between the units of a kind, one value per unit. In text
    l:NUMBER,NUMBER,..."""

    values: Ints

    def __str__(self) -> str:
        return f"l:{','.join(map(str, self.values))}"

    @classmethod
    def read(cls, text: str) -> Layers:
        return cls(tuple(map(int, text.removeprefix("l:").split(","))))


# A word is one of: null, recipe, sources (the pieces that a reduction brought), &leaf or
# &leaf&leaf1 (an array of pointers), freq.N, spans.F, or a number that the function takes. c is the
# round of a loop.
Arg = Operand | Index | Layers | int | float | str


def of_layer(arg: Arg, l: int) -> Arg:
    """Return the operand's value in unit l of its kind."""
    return arg.values[l] if isinstance(arg, Layers) else arg


def by_layer(
    args: Sequence[Arg], number: Callable[[Sequence[Arg]], int]
) -> int | Layers:
    """Return a number that is computed from others, one for each unit if any of those differs
    between units."""
    count = max((len(a.values) for a in args if isinstance(a, Layers)), default=0)
    if not count:
        return number(args)
    each = [[of_layer(a, l) for a in args] for l in range(count)]
    return Layers(tuple(map(number, each)))


def whole(arg: Arg) -> int:
    """Return an operand as a whole number. Raises ValueError if it is none."""
    if not isinstance(arg, int):
        raise ValueError(f"{arg} is no whole number")
    return arg


def pointers(name: str, count: int) -> Names:
    """Return the names of several operands of a function that form an array."""
    return tuple(f"{name}{n or ''}" for n in range(count))


def array(names: Names) -> str:
    """Return the word for an array of pointers."""
    return "".join(f"&{name}" for name in names)


def elements(word: str) -> Names:
    """Return the names of an array's pointers, () if a word is none."""
    first, *names = word.split("&")
    return () if first else tuple(names)


def bases(arg: Arg) -> Names:
    """Return the names of the places that an operand points into, or the word that it is."""
    if isinstance(arg, Operand):
        return (arg.base,)
    return elements(str(arg)) or (str(arg),)


def base(arg: Arg) -> str:
    """Return the name of the place that an operand points into, the first of an array's."""
    return bases(arg)[0]
