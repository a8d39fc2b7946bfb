"""body.py -- runs the calls of a function one by one and tracks the values in its buffers. fns.py
has the proofs."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, NoReturn

from ..facts.between import BETWEEN
from ..facts.kernels import (
    BACK,
    BY_LAYER,
    DEQUANTIZE,
    EXCHANGES,
    KERNELS,
    LOSSES,
    NULL,
    ROUND,
    WIDTHS,
    Back,
    Formal,
    Kernel,
    Numbers,
    letters,
    value,
)
from ..facts.ops import OF_SAMPLES, PICKED, SCALE, TERMS
from ..plan.operand import Arg, Index, Layers, Operand, base
from ..plan.plan import Call, Fn, Plan, Tensor
from ..plan.quantized import NUMBERS
from .kernels import CLASSES, UNITS, kept
from .order import CheckError

HEADS = ("zk_cut_heads_fwd", "zk_cut_heads_bwd", "zk_join_heads")
FORMALS = ("x", "y", "dx", "dy", *BETWEEN)
# Identity of a value: (number of the call that made it, index of the operand there), the name of an
# input of the function, a part of such a value, all parts of a value, or the f32 sum of a gradient
# ("total", launch, number).
Made = tuple[Any, ...]
# A call, its number, and the identities of its operands: a value, a tensor's name, or the literal
# argument.
Ran = tuple[Call, int, list[Any]]


@dataclass
class Written:
    """Bytes [lo, hi) of a base, of one type. made: the value's identity; spare: a by-product that
    may stay unread."""

    lo: int
    hi: int
    type: str
    made: Made = ()
    used: bool = False
    spare: bool = False


class Spot(NamedTuple):
    """Bytes [lo, hi) of a formal, and the identity of the value there. heads: it is of a whole
    sample, for the rank's heads."""

    formal: str
    lo: int
    hi: int
    made: Made
    heads: bool


class Exchanged(NamedTuple):
    """An exchange and the identity of its source."""

    call: Call
    source: Made


def joined(made: Any) -> bool:
    """Return whether a value was made by calls in rounds, a part by each: its identity is those of
    its parts."""
    return isinstance(made, tuple) and all(isinstance(x, tuple) for x in made)


def part_of(made: Made, n: int, rounds: int) -> Made:
    """Return the identity of the n-th part of a value that calls in rounds go through."""
    if joined(made) and len(made) == rounds:
        return tuple(made[n])
    return (*made, "part", n, rounds)


def makers(made: Made) -> set[object]:
    """Return the numbers of the calls that made a value, or the name of an input."""
    return {x for part in made for x in makers(part)} if joined(made) else {made[0]}


def met(values: list[Written], lo: int, hi: int) -> slice:
    """Return the slice of `values` that overlaps bytes [lo, hi). Values are sorted and disjoint."""
    return slice(
        bisect_right(values, lo, key=lambda v: v.hi),
        bisect_left(values, hi, key=lambda v: v.lo),
    )


@dataclass
class Slices:
    """State of calls on slices of a weight.

    open: whole call -> the row of the next slice and the operands of the slices before; sums: f32
    sums of dx that are complete but not yet rounded.
    """

    open: dict[Call, tuple[int, list[Any]]] = field(default_factory=dict)
    sums: set[Made] = field(default_factory=set)


@dataclass
class Frame:
    """State of one function, or of several that run in a row, while their calls run."""

    p: Plan
    fns: list[Fn]
    # base -> values there, in order
    held: dict[str, list[Written]] = field(default_factory=dict)
    # (kernel, operands) of a call -> its number
    known: dict[Made, int] = field(default_factory=dict)
    # False: equal calls compute one value, as the head's do when it recomputes
    apart: bool = True
    # calls of each key of `known`, here and in forward
    times: Counter[Made] = field(default_factory=Counter)
    twins: Counter[Made] = field(default_factory=Counter)
    # tensors read, in order
    reads: dict[str, None] = field(default_factory=dict)
    # (tensor or acc, whether it is added to)
    grads: list[tuple[str, bool]] = field(default_factory=list)
    totals: int = 0  # f32 sums of gradients that were begun
    # tensor -> the launch of the call that began its gradient
    goes: dict[str, str] = field(default_factory=dict)
    acc: set[int] = field(default_factory=set)  # element counts of the f32 sum
    ran: list[Ran] = field(default_factory=list)  # calls that ran
    # forward calls; recomputing one is allowed only if its result is read
    again: frozenset[int] = frozenset()
    # calls whose results in tmp are read
    of: set[object] = field(default_factory=set)
    # values that depend on a trainable tensor
    alive: set[Made] = field(default_factory=set)
    idle: set[Made] = field(default_factory=set)  # gradients that nobody needs
    round: int = 0
    slices: Slices = field(default_factory=Slices)
    # dequantized value -> its tensor
    plain: dict[Made, str] = field(default_factory=dict)
    # function -> formal -> flat
    flats: dict[str, dict[str, str]] = field(default_factory=dict)
    # function -> values of BETWEEN that it reads from before it, and those that it leaves there
    took: dict[str, dict[Spot, None]] = field(default_factory=dict)
    # bytes of BETWEEN that the current function has written
    wrote: list[tuple[str, int, int]] = field(default_factory=list)
    # values of a block that are sorted by the ranks of a context group, and values of samples
    sorted: set[Made] = field(default_factory=set)
    heads: set[Made] = field(default_factory=set)
    # results of exchanges
    exchanged: dict[Made, Exchanged] = field(default_factory=dict)
    gave: dict[str, list[Spot]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.fn = self.fns[0]
        self.kind = self.fn.name.split(".")[1]
        self.head = self.p.head
        self.real = self.head.bytes
        self.moving = {t.name for t in self.p.tensors if not t.frozen}
        self.limits = {c.name: c.stride for c in self.p.classes}
        self.width = self.head.value
        self.limits.update(dict.fromkeys(("x", "y", "dx", "dy"), self.width))
        for name, b in BETWEEN.items():
            cls = f"{b.cls}.{self.kind}" if b.saved else b.cls
            some = (self.limits.get(f"{near}{cls}", 0) for near in ("", "near."))
            self.limits[name] = max(some)
        # Where functions leave values to later ones. If one block at a time goes through a unit, it
        # has temporary space to itself.
        self.shared = {*BETWEEN, *["tmp"] * (self.p.together == 1)}
        # whether exchanges cut a body of the kind
        self.cut = any(
            f.then for f in self.p.fns if f.name.split(".")[1:2] == [self.kind]
        )

    def calls_of(self) -> list[Call]:
        """Return the calls of all its functions, in order."""
        return [c for fn in self.fns for c in fn.calls]

    def fail(self, call: Call | None, what: str) -> NoReturn:
        raise CheckError(
            f"function {self.fn.name}: {call.kernel if call else 'end'}: {what}"
        )

    # ---- operands

    def dims(self, call: Call, row: Kernel) -> Numbers:
        """Return a call's integer arguments by name, with the numbers derived from them. Refuse the
        call if they contradict its row or the plan's head."""
        if len(row.formals) != len(call.args):
            self.fail(
                call,
                f"{len(call.args)} operands instead of {len(row.formals)}",
            )
        out: Numbers = {}
        for f, arg in zip(row.formals, call.args, strict=True):
            if f.name in ("place", "head") and isinstance(arg, Index):
                continue
            if isinstance(arg, Layers) and f.name in BY_LAYER:
                if "l" not in self.fn.ints:
                    self.fail(call, "does not know which unit it is of")
                continue
            if f.number:
                if not isinstance(arg, int) and (
                    f.mode != "." or not isinstance(arg, float)
                ):
                    self.fail(call, f"{f.name} is {arg}, which is no such number")
                if not f.name.islower() and arg <= 0:
                    self.fail(call, f"{f.name} is {arg}")
                out[f.name] = arg
        across = row.samples
        for name, stated in (
            ("B", self.head.batch),
            ("T", self.head.sequence // (1 if across else self.head.blocks)),
            ("k", self.head.own_blocks),
        ):
            if out.get(name, stated) != stated:
                self.fail(call, f"{name} is {out[name]}, not {stated}")
        if row.name in HEADS and (out["ranks"], out["M"]) != (
            self.head.context,
            self.head.rows,
        ):
            self.fail(call, f"sorts {out['M']} rows for {out['ranks']} ranks")
        if "head" in row.at:
            self.first_head(call, call.args[row.at["head"]], int(out["H"]))
        if "at" in out and out["at"] + out["n"] > out["N"]:
            self.fail(call, f"{out['n']} columns from {out['at']} on of {out['N']}")
        if out.get("carry", self.round) != self.round:
            self.fail(call, f"carries on in round {self.round}")
        if out.get("carry"):
            self.goes_on(call, int(out["M"]))
        all_rows = self.head.rows * self.head.blocks
        if out.get("A", all_rows) != all_rows:
            self.fail(call, f"counts {out['A']} of {all_rows} rows")
        if call.kernel in (*LOSSES, "zk_softcap"):
            rows = out.get("rows", self.head.rows)
            if (out["V"], rows) != (self.head.vocab, self.head.rows):
                self.fail(call, f"V is {out['V']} of {rows} rows")
        return letters(out)

    def first_head(self, call: Call, arg: Arg, heads: int) -> None:
        """Refuse a number of a rank's first head, if it has `heads` of a sample, unless ranks have
        those of their place in the group that shares samples."""
        want = Index(0)
        if self.head.context > 1:
            want = Index(0, heads, group=self.p.sharing)
        if arg != want:
            self.fail(call, f"begins with head {arg}, not {want}")

    def goes_on(self, call: Call, terms: int) -> None:
        """Refuse to continue a sum of products after `terms` terms, unless that is a multiple of
        TERMS."""
        if terms % TERMS[self.head.real]:
            self.fail(
                call,
                f"goes on with a sum behind {terms} terms in {self.head.real}",
            )

    def bytes_of(self, type_: str) -> int:
        """Return the bytes of an element of this type."""
        return self.real if type_ == "real" else WIDTHS[type_]

    def place(self, call: Call, arg: Arg, size: int) -> tuple[str, int]:
        """Return the base and offset of an operand of `size` bytes, which must lie inside its
        base."""
        if (
            not isinstance(arg, Operand)
            or arg.by_rank
            or arg.by_round
            or arg.at < 0
            or self.real == 4
            and arg.at % 4
        ):
            self.fail(call, f"{arg} is no operand")
        if arg.base not in self.limits or arg.at + size > self.limits[arg.base]:
            self.fail(
                call,
                f"{arg} and {size} bytes from there lie outside {arg.base}",
            )
        if (
            arg.base in FORMALS
            and arg.base not in (*self.fn.ins, *self.fn.outs)
            and call.kernel not in EXCHANGES
        ):
            self.fail(call, f"{arg.base} is not the function's")
        return arg.base, arg.at

    def tensor(
        self,
        call: Call,
        arg: Arg,
        elems: int,
        width: int,
        gradient: bool,
    ) -> Tensor:
        """Return the tensor that starts at the operand of a parameter or a gradient."""
        formal = base(arg)
        flat = self.fn.flat(formal)
        among = self.fn.outs if gradient else self.fn.ins
        if not flat or formal not in among:
            self.fail(call, f"{arg} is not among the function's parameters")
        self.flats.setdefault(self.fn.name, {})[formal.removeprefix("d")] = flat
        for t in self.p.tensors:
            if arg == Operand(formal, t.offset * self.real) and t.flat == flat:
                size = math.prod(t.shape)
                if size != elems if elems else t.shape[-1] != width:
                    self.fail(call, f"{arg}: {t.name} has {size} elements")
                if bool(t.quantized.format) != (call.kernel == DEQUANTIZE):
                    self.fail(
                        call, f"{arg}: {t.name} is {t.quantized.format or 'plain'}"
                    )
                return t
        self.fail(call, f"{arg} is no tensor's beginning")

    def read(self, call: Call, arg: Arg, size: int, kind: str) -> Made:
        """Return the identity of the value in an operand, and mark it as used."""
        where, at = self.place(call, arg, size)
        values = self.held.get(where, [])
        for v in values[met(values, at, at + size)]:
            if (v.lo, v.hi, v.type) != (at, at + size, kind):
                continue
            v.used = True
            if where == "tmp" or self.cut and where in self.shared:
                self.of |= makers(v.made)
            if call.kernel not in EXCHANGES:
                self.takes(where, v)
            return v.made
        self.fail(call, f"{arg}: no value of {size} bytes of {kind} is there")

    def takes(self, where: str, v: Written) -> None:
        """Record that the current function reads a value that was there before it."""
        if not self.cut or where not in self.shared or self.own(where, v):
            return
        took = self.took[self.fn.name]
        # in rounds, a part of a value that was recorded whole
        if not any(s.formal == where and s.lo <= v.lo < v.hi <= s.hi for s in took):
            took[Spot(where, v.lo, v.hi, v.made, v.made in self.heads)] = None

    def own(self, where: str, v: Written) -> bool:
        """Return whether the current function has written a value."""
        return any(w == where and lo < v.hi and v.lo < hi for w, lo, hi in self.wrote)

    def left(self) -> list[Spot]:
        """Return all bytes that the current function has written, without an identity, and then the
        values that it leaves there to later ones."""
        spoilt = [Spot(*place, (), False) for place in dict.fromkeys(self.wrote)]
        return spoilt + [
            Spot(where, v.lo, v.hi, v.made, v.made in self.heads)
            for where in sorted(self.shared)
            for v in self.held.get(where, [])
            if self.own(where, v)
        ]

    def weight(self, call: Call, arg: Arg, elems: int, dims: Numbers) -> str:
        """Return the name of the tensor that a call multiplies by: a parameter, or a value that was
        dequantized from one."""
        if base(arg) == "tmp":
            made = self.read(call, arg, elems * self.real, "real")
            if made not in self.plain:
                self.fail(call, f"{arg} is no weight")
            return self.plain[made]
        t = self.tensor(call, arg, elems, 0 if elems else int(dims["C"]), False)
        few = t.quantized
        if call.kernel == DEQUANTIZE:
            if (dims["n"], dims["format"]) != (few.elems, NUMBERS[few.format]):
                self.fail(call, f"{arg}: {t.name} is {few}")
        self.reads[t.name] = None
        return t.name

    def done(self, v: Written) -> bool:
        """Return whether a value may be overwritten: it was read or is a by-product."""
        return v.used or v.spare or makers(v.made) <= self.again or v.made in self.idle

    def moves(self, what: object) -> bool:
        """Return whether an operand is a trainable tensor, or a value or part of one that depends
        on it."""
        if isinstance(what, tuple) and what[-3:-2] == ("part",):
            what = what[:-3]
        if isinstance(what, tuple) and joined(what):
            return any(map(self.moves, what))
        return what in self.moving or what in self.alive

    def write(
        self,
        call: Call,
        arg: Arg,
        size: int,
        kind: str,
        made: Made,
        spare: bool = False,
    ) -> None:
        """Put a value into an operand. The values it overwrites must have been used."""
        where, at = self.place(call, arg, size)
        end = at + size
        outs = {*BETWEEN, "y", "dx"} & set(self.fn.outs)
        crosses = call.kernel in EXCHANGES
        if crosses:
            outs = {*BETWEEN}
        own = {"tmp", *outs}
        if call.kernel == "zk_pick" and self.head.own_blocks > 1:
            # The heads of the rank's other blocks leave the row as it is.
            own = {PICKED} if self.fn.name.startswith("eval.") and not at else set()
        if where not in own:
            self.fail(call, f"{arg} is not the function's to write")
        values = self.held.setdefault(where, [])
        gone = met(values, at, end)
        if not all(map(self.done, values[gone])):
            self.fail(call, f"{arg} overwrites what nobody has read")
        values[gone] = [Written(at, end, kind, made, spare=spare)]
        if self.cut and where in self.shared and not crosses:
            self.wrote.append((where, at, end))

    def split(self, where: str, at: int, by: int, rounds: int) -> Written | None:
        """Split a value into the parts that calls in rounds go through, and return it. None if no
        value is there yet."""
        values = self.held.setdefault(where, [])
        there = met(values, at, at + by * rounds)
        for v in values[there]:
            if (v.lo, v.hi) == (at, at + by * rounds):
                self.takes(where, v)
                values[there] = [
                    replace(
                        v,
                        lo=at + r * by,
                        hi=at + r * by + by,
                        made=part_of(v.made, r, rounds),
                    )
                    for r in range(rounds)
                ]
                return v
        return None

    def join(
        self, where: str, at: int, by: int, rounds: int, old: Written | None
    ) -> None:
        """Join the parts again, to the value that was there before or to a new one."""
        values = self.held[where]
        end = at + by * rounds
        there = met(values, at, end)
        mine = values[there]
        types = {v.type for v in mine}
        parts = [(at + r * by, at + r * by + by) for r in range(rounds)]
        if [(v.lo, v.hi) for v in mine] != parts or len(types) > 1:
            self.fail(None, f"{where}+{at} is not whole after {rounds} rounds")
        made = tuple(v.made for v in mine)
        if old:
            of_old = [part_of(old.made, r, rounds) for r in range(rounds)]
            if made == tuple(of_old):
                made = old.made
        values[there] = [
            Written(
                at,
                end,
                mine[0].type,
                made,
                all(v.used for v in mine),
                mine[0].spare,
            )
        ]

    def gradient(
        self,
        call: Call,
        arg: Arg,
        mode: str,
        dims: Numbers,
        elems: int,
    ) -> None:
        """Record a write to a tensor's gradient or to the f32 sum of a tied one."""
        if dims.get(mode, 0) not in (0, 1):
            self.fail(call, f"{mode} is {dims[mode]}")
        if base(arg).startswith("acc"):
            self.place(call, arg, elems * 4)
            self.acc.add(elems)
            if arg != Operand("acc") or mode not in ("add", "full") or not dims[mode]:
                self.fail(call, f"{arg} is not written in f32")
            name = "acc"
            added = mode == "add"
        else:
            name = self.tensor(call, arg, elems, 0, True).name
            added = mode == "add" and bool(dims["add"])
            if (
                self.real != 4
                and mode in ("add", "full")
                and (dims[mode] or dims.get("carry"))
            ):
                self.fail(call, f"{arg} is no f32")
        if not dims.get("carry"):
            self.grads.append((name, added))
            self.goes[name] = call.launch
        elif self.goes.get(name) != call.launch:
            self.fail(call, f"{arg} carries on what is another gradient")

    def total(self, call: Call, arg: Arg, dims: Numbers, elems: int) -> Made:
        """Begin or continue the f32 sum of a gradient over rounds. Return its identity."""
        where, at = self.place(call, arg, elems * 4)
        if self.real == 4 or dims.get("full") != 1:
            self.fail(call, f"{arg} is not written in f32")
        end = at + elems * 4
        if not dims["carry"]:
            self.totals += 1
            made = "total", call.launch, self.totals
            self.write(call, arg, elems * 4, "f32", made)
            return made
        mine = at, end, "total", call.launch
        for v in self.held[where][met(self.held[where], at, end)]:
            if not v.used and (v.lo, v.hi, *v.made[:2]) == mine:
                return v.made
        self.fail(call, f"{arg} carries on what is another sum")

    # ---- calls

    def packed(self, call: Call, row: Kernel) -> None:
        """Refuse a call by rows of samples without positions if documents end, or with positions if
        not."""
        ends = self.head.end >= 0
        if not row.samples:
            ends |= self.head.blocks > 1
        args = dict(zip(row.at, call.args, strict=True))
        if "position" in args:
            if (args["position"] != NULL) != ends:
                self.fail(call, f"takes {args['position']} for positions")
        elif ends and "T" in args and args.get("p") != NULL:
            self.fail(call, "goes by samples, and documents end")

    def call(self, call: Call) -> None:
        """Check one call's operands, and record its results."""
        row = UNITS[call.kernel]
        dims = self.dims(call, row)
        self.packed(call, row)
        writes: list[tuple[int, int, Formal]] = []
        is_: list[Any] = list(call.args)  # identity of each operand
        for n, (f, arg) in enumerate(zip(row.formals, call.args, strict=True)):
            if f.number:
                continue
            if arg == NULL:
                if not f.optional:
                    self.fail(call, "a null operand")
                continue
            elems = 0 if f.elems.startswith("*") else value(f.elems, dims)
            if f.mode == "$":
                self.place(call, arg, elems * self.bytes_of(f.type))
                if arg != Operand("work"):
                    self.fail(call, f"{arg} is no scratch")
            elif f.mode == "@":
                is_[n] = self.weight(call, arg, elems, dims)
            elif f.mode == "^" and base(arg) == "tmp":
                is_[n] = self.total(call, arg, dims, elems)
            elif f.mode == "^":
                self.gradient(call, arg, f.type, dims, elems)
            elif kept(f, arg):
                self.kept(call, arg, f, elems)
            else:
                size = elems * self.bytes_of(f.type)
                where, _ = self.place(call, arg, size)
                if f.mode == "<" and (call.kernel != ROUND or where != "acc"):
                    is_[n] = self.read(call, arg, size, f.type)
                if f.mode == ">":
                    writes.append((n, size, f))
                    is_[n] = None
        self.sorts(call, row, is_)
        number = self.number((call.kernel, *is_))
        if any(map(self.moves, is_)):
            self.alive |= {(number, n) for n, _, _ in writes}
        if call.kernel in BACK and self.needless(BACK[call.kernel], is_):
            self.idle.add((number, 0))
        for n, size, f in writes:
            is_[n] = number, n
            if call.kernel == DEQUANTIZE:
                self.plain[is_[n]] = is_[1]
            self.write(call, call.args[n], size, f.type, is_[n], f.spare)
            if self.sorting(call):
                self.sorted.add(is_[n])
            if EXCHANGES.get(call.kernel) or row.samples:
                self.heads.add(is_[n])
        if call.kernel in EXCHANGES:
            self.exchanged[is_[0]] = Exchanged(call, is_[1])
        self.ran.append((call, number, is_))

    def sorting(self, call: Call) -> bool:
        """Return whether a call's result is sorted by the ranks of a context group."""
        if call.kernel in EXCHANGES:
            return not EXCHANGES[call.kernel]
        back = call.kernel == "zk_join_heads" and call.args[-1] == -1
        return call.kernel == "zk_cut_heads_fwd" or back

    def sorts(self, call: Call, row: Kernel, is_: list[Any]) -> None:
        """Refuse an exchange of rows that are not sorted by rank, and any other use of those that
        are. Attention alone works on the heads of whole samples."""
        if self.head.blocks == 1:
            return
        name = call.kernel
        of_heads = row.samples or EXCHANGES.get(name) is False
        unsorts = name in HEADS and not self.sorting(call)
        takes = unsorts or EXCHANGES.get(name, False)
        for f, what in zip(row.formals, is_, strict=True):
            if f.mode != "<" or not isinstance(what, tuple):
                continue
            if (what in self.heads) != of_heads:
                unit = "a block" if of_heads else "a sample"
                self.fail(call, f"{f.name} is of {unit}")
            # One rank has all heads, in order.
            if self.head.context > 1 and (what in self.sorted) != takes:
                state = "not sorted" if takes else "sorted"
                self.fail(call, f"{f.name} is {state} by rank")

    def number(self, key: Made) -> int:
        """Return the number of a call. Two equal calls of forward compute two values, whose
        gradients are apart; backward recomputes the last one first."""
        n = self.times[key] if self.apart else 0
        self.times[key] += 1
        if self.again:
            n = max(self.twins[key] - 1 - n, 0)
        return self.known.setdefault((*key, "again", n) if n else key, len(self.known))

    def kept(self, call: Call, arg: Arg, f: Formal, elems: int) -> None:
        """Check an operand that lies in a class of its own."""
        cls = CLASSES[f.name]
        if self.head.blocks > 1 and (KERNELS[call.kernel].samples or f.name == "all"):
            cls = OF_SAMPLES.get(cls, cls)
        size = elems * self.bytes_of(f.type)
        from_ = {"targets": self.round * size, "ctl": SCALE}.get(cls, 0)
        name = base(arg)
        if name.partition(".")[0] != cls or arg != Operand(name, from_):
            self.fail(call, f"{arg} is not {cls}")
        self.place(call, arg, size)

    def needless(self, back: Back, is_: list[Any]) -> bool:
        """Return whether nobody needs the activation gradient that a backward call makes."""
        inputs = [n for n, forward in back.same if forward == back.x]
        return bool(inputs) and not any(self.moves(is_[n]) for n in inputs)
