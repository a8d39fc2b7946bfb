"""letters.py -- dimensions as letters (B, T, M, C ...), which are constants of train.c, and numbers
and shapes written with them.

A letter is a constant if it stands for one number in the whole model; other numbers are written in
terms of these.
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
from ..plan.quantized import NUMBERS
from .words import number

# If samples are cut into blocks.
OF_BLOCKS = {"M": "tokens of a block of B sequences"}
MEANS = {
    "B": "sequences of a micro-batch",
    "T": "tokens of a sequence",
    "M": "B * T: tokens of a micro-batch",
    "C": "the model's width",
    "V": "size of the vocabulary, in tokens",
    "R": "V rounded up: rows of the embedding, columns of logits",
    "P": "positions",
    "H": "heads",
    "G": "key-value heads",
    "D": "elements of a head",
    "E": "(H + 2 * G) * D: queries, keys and values",
    "F": "width of a gated feed-forward (SwiGLU)",
}
OF_CALLS = "HGDFP"  # letters that are read from calls
WIDTHS = tuple("CFRVEP")  # letters for a width, in order of preference
# letters that may count the rows of a number of elements
ROWS = tuple("MRVPCT")
MOST = 8  # largest factor of a width
# Numbers that stand for constants of kernels/zk.h.
NAMED = {
    "layout": ("ZK_IN_OUT", "ZK_OUT_IN"),
    "kind": ("ZK_GELU_TANH", "ZK_GELU_ERF"),
    "format": ("", *(f"ZK_{name.upper()}" for name in NUMBERS)),
}
# first words of the names of units' functions
UNITS = ("fwd", "bwd", "train", "eval")


def wide(text: str, value: int) -> str:
    """Return a product of ints, computed in 64 bits if its value needs them."""
    return text if " * " not in text or value < 2**31 else f"INT64_C(1) * {text}"


def of_unit(fn: plan.Fn) -> bool:
    """Return whether a function belongs to a unit of the model; the others are the plan's own."""
    return fn.name.partition(".")[0] in UNITS


@dataclass(frozen=True)
class Letters:
    """The letters that are constants, with their values. blocks: of a sample."""

    at: Mapping[str, int]
    blocks: int = 1

    def rows(self) -> list[tuple[str, str]]:
        """Return the enumerators and their meanings."""
        said = MEANS | (OF_BLOCKS if self.blocks > 1 else {})
        return [(f"{n} = {v}", said[n]) for n, v in self.at.items()]

    def width(self, n: int) -> str:
        """Return a width as a letter or a small multiple of one, or '' if it is neither."""
        for name in WIDTHS:
            if self.at.get(name) == n:
                return name
        if n == 2 * self.at.get("F", 0):  # both projections, gate and up
            return "2 * F"
        for name in ("C", "F"):
            times, rest = divmod(n, self.at.get(name, n + 1))
            if times in range(2, MOST + 1) and not rest:
                return f"{times} * {name}"
        heads = self.at.get("H", 0) * self.at.get("D", 0)
        return "H * D" if n == heads else ""

    def factors(self, n: int) -> list[str]:
        """Return a number of elements as factors: rows and a width if possible, else the number."""
        for name in ROWS:
            each, rest = divmod(n, self.at.get(name, n + 1))
            if each and not rest and self.width(each):
                return [name, self.width(each)]
        return [self.width(n) or number(n)]

    def elements(self, n: int) -> str:
        return wide(" * ".join(self.factors(n)), n)

    def said(self, letter: str, n: int, rounds: int = 1) -> str:
        """Return a number that a kernel's row calls `letter`, written with letters. rounds: in how
        many rounds a call goes through the rows; 0: all rows are meant."""
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
        """Return an operand's shape by its kernel's row, such as `(M, 3 * C)`; '' if the row has
        none."""
        if not formal.elems:
            return ""
        given = zip(row.formals, call.args, strict=False)
        numbers = {f.name: a for f, a in given if f.number and isinstance(a, int)}
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

    def factor(self, text: str, numbers: Mapping[str, int | float], rounds: int) -> str:
        if text in numbers:
            return self.said(text, kernels.value(text, numbers), rounds)
        if text.startswith("("):
            inner = re.sub(r"([+*])", r" \1 ", text[1:-1])
            return re.sub(r"\w+", lambda m: self.factor(m[0], numbers, rounds), inner)
        return text


def _called(p: Plan) -> Iterator[tuple[str, int]]:
    """Yield each letter that calls of the model's units use, with its number."""
    calls = (c for fn in p.fns if of_unit(fn) for c in fn.calls)
    for call in calls:
        for formal, arg in of_call(call):
            if formal.name in OF_CALLS and isinstance(arg, int):
                yield formal.name, arg


def letters(p: Plan) -> Letters:
    """Return the letters of a plan."""
    h = p.head
    at = {
        "B": h.batch,
        "T": h.sequence,
        "M": h.rows,
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
    return Letters({name: at[name] for name in MEANS if name in at}, p.head.blocks)


def of_call(call: plan.Call) -> Sequence[tuple[Formal, Arg]]:
    """Return a call's operands, each with its formal in the kernel's row."""
    formals = kernels.kernel(call.kernel).formals
    return list(zip(formals, call.args, strict=False))
