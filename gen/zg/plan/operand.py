"""operand.py -- operands of kernel calls: places, numbers, words."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

Names = tuple[str, ...]
Ints = tuple[int, ...]

ALL = "all"  # the group of every rank, in order of rank


def by_place(group: str, n: int) -> str:
    """The text of a number that is n times a rank's place in a group; r: the rank itself."""
    return f"+{'r' if group == ALL else group}*{n}" if n else ""


@dataclass(frozen=True)
class Operand:
    """Bytes into what a function takes, or into a class that has one slot: from `at` on, by so many
    further for each place in a group, and in each round of a loop. name: of the parameter or value
    that lies there, for readers; two operands are the same wherever they are the same place. In
    text BASE+AT+r*BYTES+c*BYTES:NAME."""

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
    """The number of an element of a flat: from `at` on, by so many further for each instance and
    each place in a group; behind these the number `more` that the function takes. In text
    l*ELEMENTS+r*ELEMENTS+AT+MORE."""

    by_layer: int
    by_rank: int = 0
    at: int = 0
    more: str = ""
    group: str = ALL

    def __str__(self) -> str:
        rank = by_place(self.group, self.by_rank)
        at = f"+{self.at}" if self.at else ""
        return f"l*{self.by_layer}{rank}{at}" + (
            f"+{self.more}" if self.more else ""
        )


@dataclass(frozen=True)
class Layers:
    """A whole number of each unit of a kind, where it is not one of all. In text
    l:NUMBER,NUMBER,..."""

    values: Ints

    def __str__(self) -> str:
        return f"l:{','.join(map(str, self.values))}"

    @classmethod
    def read(cls, text: str) -> Layers:
        return cls(tuple(map(int, text.removeprefix("l:").split(","))))


# A word: null, recipe, sources (what a reduction brought), &leaf (an array of one pointer), freq.N,
# spans.F, or a number that the function takes; c is the round of a loop.
Arg = Operand | Index | Layers | int | float | str


def of_layer(arg: Arg, l: int) -> Arg:
    """What an operand is in unit l of its kind."""
    return arg.values[l] if isinstance(arg, Layers) else arg


def by_layer(
    args: Sequence[Arg], number: Callable[[Sequence[Arg]], int]
) -> int | Layers:
    """A number that follows from others, of each unit where one of those is."""
    count = max(
        (len(a.values) for a in args if isinstance(a, Layers)), default=0
    )
    if not count:
        return number(args)
    each = [[of_layer(a, l) for a in args] for l in range(count)]
    return Layers(tuple(map(number, each)))


def whole(arg: Arg) -> int:
    """An operand that is a whole number."""
    if not isinstance(arg, int):
        raise ValueError(f"{arg} is no whole number")
    return arg


def base(arg: Arg) -> str:
    """What an operand points into, or the word it is."""
    return arg.base if isinstance(arg, Operand) else str(arg).lstrip("&")
