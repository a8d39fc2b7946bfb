"""operand.py -- operands of kernel calls: places, numbers, words."""
from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Operand:
    """Bytes into what a function takes, or into a class that has one slot: from `at` on, of each
    rank by so many further, and in each round of a loop. In text BASE+AT+r*BYTES+c*BYTES."""
    base: str
    at: int = 0
    by_rank: int = 0
    by_round: int = 0

    def __str__(self) -> str:
        rank = f"+r*{self.by_rank}" if self.by_rank else ""
        round_ = f"+c*{self.by_round}" if self.by_round else ""
        return f"{self.base}+{self.at}{rank}{round_}"


@dataclass(frozen=True)
class Index:
    """The number of an element of a flat: from `at` on, of each instance and each rank by so many
    further; behind these the number `more` that the function takes. In text
    l*ELEMENTS+r*ELEMENTS+AT+MORE."""
    by_layer: int
    by_rank: int = 0
    at: int = 0
    more: str = ""

    def __str__(self) -> str:
        rank = f"+r*{self.by_rank}" if self.by_rank else ""
        at = f"+{self.at}" if self.at else ""
        return f"l*{self.by_layer}{rank}{at}" + (f"+{self.more}" if self.more else "")


# A word: null, recipe, sources (what a reduction brought), &leaf (an array of one pointer), freq.N,
# spans.F, or a number that the function takes; c is the round of a loop.
Arg = Operand | Index | int | float | str


def base(arg: Arg) -> str:
    """What an operand points into, or the word it is."""
    return arg.base if isinstance(arg, Operand) else str(arg).lstrip("&")
