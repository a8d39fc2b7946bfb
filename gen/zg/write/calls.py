"""calls.py -- prints the functions of kernel calls: operands by name, with shapes beside them.

Byte offsets from a pointer are enumerators. Those of a unit's saved values and parameters stand
before the unit's functions, those of a function's temporary values inside the function.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

from ..facts.kernels import Formal, kernel
from ..plan import plan
from ..plan.operand import Index, Layers, Operand, bases, elements
from ..plan.plan import Plan
from . import arrays
from .letters import NAMED, Letters, of_call, of_unit
from .tables import DOES, comment, launch_name, place, wrap
from .words import group_name, in_c, lower, number, upper

WORDS = {"null": "NULL", "recipe": "&recipe", "c": "c"}
TEMPORARY = "tmp"
# Pieces that a reduction delivered: they are no place in the arena.
SOURCES = "const void *const *sources = zr_sources(z, i[{0}]);"


@dataclass
class Space:
    """Names of the offsets from a pointer, each with a comment."""

    names: dict[int, str] = field(default_factory=dict)
    comments: dict[int, str] = field(default_factory=dict)

    def add(self, at: int, name: str, comment: str) -> None:
        self.names.setdefault(at, name)
        old = self.comments.get(at, "")
        if not old or "(rows" in old and comment:
            self.comments[at] = comment


@dataclass(frozen=True)
class Function:
    """Lines of a function of train.c. unit: the unit that it belongs to."""

    unit: str
    lines: tuple[str, ...]


def unit_of(fn: plan.Fn) -> str:
    """Return the unit of a unit's function, or the flat of one of the plan's own functions."""
    return fn.name.partition(".")[2]


Rows = list[tuple[str, str]]  # an enumerator with its value, and its comment


def enum(rows: Iterable[tuple[str, str]], indent: int = 0) -> list[str]:
    """Return the lines of an enum, with a comment beside each enumerator."""
    made, pad = list(rows), " " * indent
    wide_ = max(len(row) for row, _ in made) + 2
    body = []
    for row, text in made:
        beside = f"/* {text} */" if text else ""
        line = f"{row + ',':<{wide_}}{beside}"
        body.append(f"{pad}    {line.rstrip()}")
    return [f"{pad}enum {{", *body, f"{pad}}};"]


# Names that headers define, and first words of other names in train.c.
HEADERS = r"(ZR|ZK|U?INT|SIZE|PTRDIFF|INTPTR|UINTPTR|SIG|WCHAR|WINT)_?.*"
OF_FLATS = ("FLAT", "SHARD", "NEAR", "FAR", "GATHER", "REDUCE", "TILE")


def reserved(p: Plan) -> set[str]:
    """Return names that train.c uses at file scope for other things."""
    flats = {upper(f.name) for f in p.flats}
    parts = {upper(c.name.partition(".")[2] or c.name) for c in p.classes}
    return {
        "NULL",
        "UNUSED",
        "RANK",
        "SIZE",
        "COLUMNS",
        *(group_name(g.name) for g in p.groups),
        *(upper(t) for t in p.head.targets),
        *(f"{word}_{flat}" for word in OF_FLATS for flat in flats),
        *(f"{part}_{flat}" for part in parts for flat in flats),
    }


def tries(unit: str, name: str) -> Iterator[str]:
    """Yield candidates for an enumerator, the best first: the plain name, with the unit's name
    before it, with a number."""
    plain = upper(name)
    if re.fullmatch(r"[A-Z]\w*", plain) and not re.fullmatch(HEADERS, plain):
        yield plain
    yield f"{upper(unit)}_{plain}"
    for n in itertools.count(2):
        yield f"{upper(unit)}_{plain}_{n}"


class Calls:
    """Prints the functions of a plan."""

    def __init__(self, p: Plan, letters: Letters) -> None:
        self.p, self.letters = p, letters
        self.classes = {c.name for c in p.classes}
        self.flats = {f.name: f for f in p.flats}
        self.taken = dict.fromkeys([*letters.at, *reserved(p)], -1)
        self.spaces: dict[tuple[str, str], Space] = {}
        self.said: set[str] = set()  # enumerators printed so far
        self.layers = self.of_layers()
        for fn in p.fns:
            if of_unit(fn):
                self.collect(fn)
        order = sorted(self.spaces, key=lambda key: (key[1] == "s", key[1] == "p"))
        self.names = {key: self.named(key) for key in order}

    def of_layers(self) -> dict[tuple[str, Layers], str]:
        """Return the names of arrays for numbers that differ between the layers of a unit."""
        names: dict[tuple[str, Layers], str] = {}
        for fn in self.p.fns:
            for formal, arg in (x for c in fn.calls for x in of_call(c)):
                if not isinstance(arg, Layers):
                    continue
                unit = unit_of(fn)
                n = sum(other == unit for other, _ in names) + 1
                name = lower(f"{unit}_{formal.name}") + f"_{n}" * (n > 1)
                names.setdefault((unit, arg), name)
        return names

    # ---- names of places

    def group(self, fn: plan.Fn, operand: Operand) -> tuple[str, str]:
        """Return the space that an operand points into. A gradient has the layout of its
        parameter."""
        of_gradient = operand.base.startswith("d") and operand.base in fn.outs
        return unit_of(fn), operand.base.removeprefix(
            "d"
        ) if of_gradient else operand.base

    def beside(self, formal: Formal, call: plan.Call) -> str:
        kind = f" {formal.type}" if formal.type in ("f32", "i32", "i64") else ""
        return self.letters.shape(kernel(call.kernel), formal, call) + kind

    def collect(self, fn: plan.Fn) -> None:
        """Collect the places that a unit's function names, except temporary ones."""
        for call in fn.calls:
            for formal, arg in of_call(call):
                if isinstance(arg, Operand) and arg.name and arg.base != TEMPORARY:
                    space = self.spaces.setdefault(self.group(fn, arg), Space())
                    space.add(arg.at, arg.name, self.beside(formal, call))

    def named(self, key: tuple[str, str]) -> dict[int, str]:
        """Return the enumerators of a space. None is used twice, unless two units share the
        offset."""
        out = {}
        for at, name in self.spaces[key].names.items():
            out[at] = next(
                text for text in tries(key[0], name) if self.taken.get(text, at) == at
            )
            self.taken[out[at]] = at
        return out

    def local(self, fn: plan.Fn, name: str, used: Collection[str]) -> str:
        """Return an enumerator for a function's own value that hides no other. used: those that the
        function has already."""
        free = (
            text
            for text in tries(unit_of(fn), name)
            if text not in self.taken and text not in used
        )
        return next(free)

    def temporary(self, fn: plan.Fn) -> tuple[dict[tuple[int, str], str], Rows]:
        """Return names and enumerators of a function's temporary values. A value that reuses
        another's place is defined by that one's name."""
        names: dict[tuple[int, str], str] = {}
        first: dict[int, str] = {}
        rows = []
        for call in fn.calls:
            for formal, arg in of_call(call):
                if not isinstance(arg, Operand) or arg.base != TEMPORARY:
                    continue
                if (arg.at, arg.name) in names:
                    continue
                name = self.local(fn, arg.name, names.values())
                names[arg.at, arg.name] = name
                value = first.setdefault(arg.at, name)
                text = number(arg.at) if value == name else value
                whole = replace(call, rounds=0) if arg.by_round else call
                rows.append((f"{name} = {text}", self.beside(formal, whole)))
        return names, rows

    def rounds(
        self, fn: plan.Fn, used: Collection[str]
    ) -> tuple[dict[tuple[str, int], str], Rows]:
        """Return names and enumerators of strides: bytes by which operands advance per round."""
        names: dict[tuple[str, int], str] = {}
        first: dict[int, str] = {}
        rows = []
        for call in fn.calls:
            for formal, arg in of_call(call):
                if not isinstance(arg, Operand) or not arg.by_round:
                    continue
                by = arg.by_round
                key = arg.name or arg.base, by
                if key not in names:
                    name = self.local(fn, f"{key[0]}_stride", [*used, *names.values()])
                    names[key] = name
                    value = first.setdefault(by, name)
                    text = number(by) if value == name else value
                    rows.append((f"{name} = {text}", self.beside(formal, call)))
        return names, rows

    # ---- operands

    def place(self, fn: plan.Fn, arg: Operand, own: _Own) -> str:
        terms = [lower(arg.base)]
        key = self.group(fn, arg)
        if arg.base == TEMPORARY:
            terms.append(own.places[arg.at, arg.name])
        elif arg.name and key in self.names:
            terms.append(self.names[key][arg.at])
        elif arg.at:
            terms.append(number(arg.at))
        if arg.by_rank:
            terms.append(f"{place(arg.group)} * {in_c(arg.by_rank)}")
        if arg.by_round:
            terms.append(f"c * {own.rounds[arg.name or arg.base, arg.by_round]}")
        return " + ".join(terms)

    def count(self, fn: plan.Fn, formal: Formal, n: int, rounds: int) -> str:
        """Return a whole number by name, if it has one."""
        if formal.name in NAMED:
            return NAMED[formal.name][n]
        if of_unit(fn):
            return self.letters.said(formal.name, n, rounds)
        if formal.name in ("n", "stride"):
            return in_c(n)
        return self.letters.said(formal.name, n)

    def operand(self, fn: plan.Fn, call: plan.Call, at: int, own: _Own) -> str:
        formal, arg = of_call(call)[at]
        if isinstance(arg, Operand):
            return self.place(fn, arg, own)
        if isinstance(arg, Index):
            return index(arg)
        if isinstance(arg, Layers):
            return f"{self.layers[unit_of(fn), arg]}[l]"
        if isinstance(arg, int):
            said = self.count(fn, formal, arg, call.rounds)
            beside = f" /* {formal.name} */" * said.lstrip("-").isdigit()
            return f"{said}{beside}"
        if not isinstance(arg, str):
            return f"(float){arg!r} /* {formal.name} */"
        if names := elements(arg):
            return arrays.expression(self.p, fn, names)
        if arg.startswith("spans."):
            return f"{lower(arg)}, LEN({lower(arg)})"
        return WORDS.get(arg) or lower(arg)

    # ---- functions

    def shape(self, fn: plan.Fn, name: str) -> str:
        """Return the shape of a unit function's operand if it is a single value, else ''."""
        for call in fn.calls:
            for formal, arg in of_call(call):
                one = isinstance(arg, Operand) and not arg.name and arg.base == name
                if one and formal.elems:
                    return f" {self.beside(formal, call)}"
        return ""

    def elements(self, fn: plan.Fn) -> str:
        """Return the number of elements that one of the plan's own functions works on, as text."""
        for call in fn.calls:
            row = kernel(call.kernel)
            if "n" in row.at and not of_unit(fn):
                n = call.args[row.at["n"]]
                text = in_c(n) if isinstance(n, int) else n
                return f"; {text} elements"
        return ""

    def head(self, fn: plan.Fn) -> list[str]:
        """Return the comment of a function: its purpose, inputs with shapes, and outputs."""
        does = DOES[fn.body.removeprefix("near_")][0].format(unit_of(fn))
        if fn.body.startswith("near_"):
            does += ", the part on the device"
        for names, sign in ((fn.ins, ": "), (fn.outs, " -> ")):
            said = ", ".join(self.shaped(fn, name) for name in names)
            does += sign + said if said else ""
        return comment(does + self.elements(fn))

    def shaped(self, fn: plan.Fn, name: str) -> str:
        shape = self.shape(fn, name) if of_unit(fn) else ""
        return lower(name) + shape

    def variables(self, fn: plan.Fn) -> list[str]:
        """Return declarations for the operands and classes that the calls name."""
        args = [a for call in fn.calls for a in call.args]
        numbers = [a for a in args if isinstance(a, Index)]
        used = {b for a in args for b in bases(a)} | {a.more for a in numbers}
        if numbers or any(isinstance(a, Layers) for a in args):
            used.add("l")
        names = [*fn.ins, *fn.outs, *fn.ints]
        at = {n: names.index(n) for n in names if n in used}
        places, ints = [], []
        for name, n in at.items():
            if name == "out":
                places.append(f"*out = HOST({n})")
            elif name in fn.ints:
                ints.append(f"{name} = i[{n}]")
            elif name != "sources":
                places.append(f"*{lower(name)} = AT({n})")
        for name in sorted(self.classes & used):
            if name not in at:
                places.append(f"*{lower(name)} = a + {upper(name)}(0)")
        lines = []
        if places:
            lines.append(f"void {', '.join(places)};")
        if "sources" in at:
            lines.append(SOURCES.format(at["sources"]))
        if ints:
            lines.append(f"int64_t {', '.join(ints)};")
        return lines

    def function(self, fn: plan.Fn) -> Function:
        places, rows = self.temporary(fn)
        rounds, more = self.rounds(fn, places.values())
        own = _Own(places, rounds)
        rows += more
        lines = enum(rows, 4) if rows else []
        for text in self.variables(fn):
            lines += wrap(text, 4)
        for times, calls in groupby(fn.calls, key=lambda c: c.rounds):
            one = times == 1
            body = []
            for call in calls:
                body += wrap(self.call(fn, call, own), 4 if one else 8)
            loop = f"    for (int64_t c = 0; c < {times}; c++) {{"
            lines += body if one else [loop, *body, "    }"]
        head = [*self.head(fn), f"FN({lower(fn.name)})", "{"]
        unit = unit_of(fn) if of_unit(fn) else ""
        return Function(unit, (*head, *lines, "}"))

    def call(self, fn: plan.Fn, call: plan.Call, own: _Own) -> str:
        args = [self.operand(fn, call, n, own) for n in range(len(call.args))]
        return f"{call.kernel}(k, {launch_name(call.launch)}, {', '.join(args)});"

    def unit(self, name: str) -> list[str]:
        """Return the lines before a unit's functions: names of the parameters and saved values."""
        lines = [f"/* ---- {name} */"]
        for (unit, group), names in self.names.items():
            space, new = self.spaces[unit, group], []
            for at in sorted(names):
                if unit == name and names[at] not in self.said:
                    self.said.add(names[at])
                    new.append((f"{names[at]} = {number(at)}", space.comments[at]))
            if new:
                lines += [self.about(unit, group), *enum(new)]
        for (unit, each), array in self.layers.items():
            if unit == name:
                held = ", ".join(map(number, each.values))
                lines += wrap(f"static const int64_t {array}[] = {{{held}}};", 0)
        return lines if len(lines) > 1 else []

    def about(self, unit: str, group: str) -> str:
        """Return a comment on the offsets from a pointer of a unit's functions."""
        if group == "s":
            return "/* byte offsets from s (saved for backward) */"
        if group == "ctl":
            return "/* byte offsets from ctl (a step's constants) */"
        here = (fn for fn in self.p.fns if unit_of(fn) == unit)
        trained = any(f"d{group}" in fn.outs for fn in here)
        name = lower(group)
        gradients = f" and d{name} (gradients)" if trained else ""
        return f"/* byte offsets from {name} (parameters){gradients} */"

    def blocks(self) -> list[Sequence[str]]:
        """Return all functions, those of a unit after its names."""
        made = [self.function(fn) for fn in self.p.fns]
        out: list[Sequence[str]] = []
        for name in dict.fromkeys(f.unit for f in made):
            head = self.unit(name) if name else []
            if head:
                out.append(head)
            out += [f.lines for f in made if f.unit == name]
        return out


def index(i: Index) -> str:
    """Return the index of an element of a flat, in C."""
    terms = []
    if i.by_layer:
        terms.append(f"l * {in_c(i.by_layer)}" if i.by_layer != 1 else "l")
    if i.by_rank:
        terms.append(f"{place(i.group)} * {in_c(i.by_rank)}")
    if i.at:
        terms.append(in_c(i.at))
    if i.more:
        terms.append(i.more)
    return " + ".join(terms) or "0"


@dataclass(frozen=True)
class _Own:
    """A function's own names: of temporary places, and of strides per round."""

    places: dict[tuple[int, str], str]
    rounds: dict[tuple[str, int], str]
