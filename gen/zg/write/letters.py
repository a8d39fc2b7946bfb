"""letters.py -- dimensions by their letters (B, T, M, C ...) as constants of train.c; numbers and
shapes said with them.

A letter is a constant where it is one number in all of the model; others are said by these.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..facts import kernels, ops
from ..facts.kernels import Formal, Kernel
from ..plan import plan
from ..plan.operand import Arg
from ..plan.plan import Plan
from .words import number

MEANS = {
    "B": "sequences of a micro-batch",
    "T": "tokens of a sequence",
    "M": "B * T: tokens of a micro-batch",
    "C": "the model's width",
    "V": "words of the vocabulary",
    "R": "rows of the embedding, columns of logits: V and zeros",
    "P": "positions",
    "H": "heads",
    "G": "key-value heads",
    "D": "elements of a head",
    "E": "(H + 2 * G) * D: queries, keys and values",
    "F": "a gated branch's width",
}
OF_CALLS = "HGDFP"  # that calls say
WIDTHS = tuple("CFRVEP")  # by which others are said, the first that fits
ROWS = tuple("MRVPCT")  # of which a number of elements may be so many rows
MOST = 8  # times a width
# Numbers with a meaning of their own: kernels/zk.h's names of them.
NAMED = {
    "layout": ("ZK_IN_OUT", "ZK_OUT_IN"),
    "kind": ("ZK_GELU_TANH", "ZK_GELU_ERF"),
}
UNITS = ("fwd", "bwd", "train", "eval")  # bodies of a unit's functions


def wide(text: str, value: int) -> str:
    """A product of ints, in 64 bits where it needs them."""
    return (
        text if " * " not in text or value < 2**31 else f"INT64_C(1) * {text}"
    )


def of_unit(fn: plan.Fn) -> bool:
    """Whether a function is of a unit of the model, and none of the plan's own."""
    return fn.name.partition(".")[0] in UNITS


@dataclass(frozen=True)
class Letters:
    """The constants."""

    at: Mapping[str, int]

    def rows(self) -> list[tuple[str, str]]:
        """Enumerators of C, and what each is."""
        return [(f"{n} = {v}", MEANS[n]) for n, v in self.at.items()]

    def width(self, n: int) -> str:
        """A width as a letter, or as so many times one; '' where it is neither."""
        for name in WIDTHS:
            if self.at.get(name) == n:
                return name
        if n == 2 * self.at.get("F", 0):  # gate and up
            return "2 * F"
        for name in ("C", "F"):
            times, rest = divmod(n, self.at.get(name, n + 1))
            if times in range(2, MOST + 1) and not rest:
                return f"{times} * {name}"
        heads = self.at.get("H", 0) * self.at.get("D", 0)
        return "H * D" if n == heads else ""

    def factors(self, n: int) -> list[str]:
        """A number of elements as rows of a width; else the number."""
        for name in ROWS:
            each, rest = divmod(n, self.at.get(name, n + 1))
            if each and not rest and self.width(each):
                return [name, self.width(each)]
        return [self.width(n) or number(n)]

    def elements(self, n: int) -> str:
        return wide(" * ".join(self.factors(n)), n)

    def said(self, letter: str, n: int, rounds: int = 1) -> str:
        """A number that a kernel's row gives a letter. rounds: in which a call takes a part of the
        rows; 0: all of them are meant."""
        if self.at.get(letter) == n:
            return letter
        if letter == "M" and not rounds:
            return "M"
        if letter == "M" and rounds > 1 and self.at["M"] == n * rounds:
            return f"M / {rounds}"
        if letter in ("M", "rows"):
            return "M" if n == self.at["M"] else number(n)
        if letter in ("N", "K", "E", "F", "R", "V", "P"):
            return self.width(n) or number(n)
        return self.elements(n) if letter == "n" else number(n)

    def shape(self, row: Kernel, formal: Formal, call: plan.Call) -> str:
        """An operand's shape by its kernel's row: `(M, 3 * C)`; '' where the row has none."""
        if not formal.elems:
            return ""
        given = zip(row.formals, call.args, strict=False)
        numbers = {
            f.name: a for f, a in given if f.number and isinstance(a, int)
        }
        all_ = kernels.letters(numbers)
        factors = re.findall(r"\([^)]*\)|[^*]+", formal.elems)
        if formal.elems.startswith("*"):
            factors = ["rows", *factors]
        if factors == ["n"] and "n" in numbers:
            return f"({', '.join(self.factors(numbers['n']))})"
        said = [self.factor(x, all_, call.rounds) for x in factors]
        if formal.mode in "@^" and numbers.get("layout") == 0:
            said.reverse()
        return f"({', '.join(said)})"

    def factor(
        self, text: str, numbers: Mapping[str, int | float], rounds: int
    ) -> str:
        if text in numbers:
            return self.said(text, kernels.value(text, numbers), rounds)
        if text.startswith("("):
            inner = re.sub(r"([+*])", r" \1 ", text[1:-1])
            return re.sub(
                r"\w+", lambda m: self.factor(m[0], numbers, rounds), inner
            )
        return text


def _called(p: Plan) -> Iterator[tuple[str, int]]:
    """Letters that calls of the model's units say, and which numbers they are."""
    calls = (c for fn in p.fns if of_unit(fn) for c in fn.calls)
    for call in calls:
        for formal, arg in of_call(call):
            if formal.name in OF_CALLS and isinstance(arg, int):
                yield formal.name, arg


def letters(p: Plan) -> Letters:
    """Of a plan."""
    h = p.head
    at = {
        "B": h.batch,
        "T": h.sequence,
        "M": h.batch * h.sequence,
        "C": h.width,
        "V": h.vocab,
        "R": ops.up(h.vocab, ops.VOCAB),
    }
    found: dict[str, set[int]] = {}
    for name, n in _called(p):
        found.setdefault(name, set()).add(n)
    for name, (n, *others) in found.items():
        if not others:
            at[name] = n
    grouped = {"H", "G", "D"} <= set(at) and at["G"] < at["H"]
    if grouped:
        at["E"] = kernels.value(kernels.FOLLOWS["E"][1], at)
    return Letters({name: at[name] for name in MEANS if name in at})


def of_call(call: plan.Call) -> Sequence[tuple[Formal, Arg]]:
    """A call's operands, each with its kernel's name for it."""
    formals = kernels.kernel(call.kernel).formals
    return list(zip(formals, call.args, strict=False))
