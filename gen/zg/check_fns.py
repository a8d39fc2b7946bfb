"""check_fns.py -- proves of a plan's functions that their calls fit together, call by call.

What it proves:
 operands   every operand lies inside what it points into; a parameter is a tensor's beginning and
            has its size
 values     every read finds a whole value of its size and type, written before in this function or
            saved by the forward one, and not overwritten since; every value is used
 backward   runs for what ran forward, on the same numbers, with the very values that forward read
            and made; so does evaluation
 again      what backward does not find it makes by forward's own calls, on the same operands
 additions  a value that was added to what it came from has two gradients: backward adds as often
            as forward. A norm that adds is seen as the two calls whose bits it has
 rounds     calls in rounds go through the parts of whole values, each once and in order
 a draw     an evaluation ends with the logits of one row, made as the loss' are
 leaves     every tensor's gradient is written once by the function that comes first in backward,
            and added to by the others that read the tensor
 frozen     nothing runs backward for what comes from no tensor that moves
"""
from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import NoReturn

from . import check_grads, check_own, check_slices, ops
from .check_kernels import (BACK, CLASSES, DY, INPUT, KERNELS, NEEDS, SCALE, SLICES, backs, numbers,
                            parts)
from .check_leaves import leaves
from .check_order import CheckError, refusing
from .check_rounds import Rounds, Value
from .plan import Call, Fn, Plan, Tensor

FORMALS = ("x", "y", "dx", "dy", "s")


@dataclass(frozen=True)
class Facts:
    """What steps need to know of functions: elements of `keep` from one instance of a kind to the
    next; the kinds that run backward; of (body, kind), the functions in order, the flat beside
    `keep` that each touches, and from which rows of its weight on it is called."""
    steps: dict[str, int]
    alive: frozenset[str]
    parts: dict[tuple[str, str], list[tuple[str, str, list[int]]]]


@dataclass
class _Body(Rounds):
    """A function as its calls run, or several as they follow each other."""
    p: Plan
    fns: list[Fn]
    held: dict[str, list[Value]] = field(default_factory=dict)         # base -> what lies there
    known: dict[tuple, int] = field(default_factory=dict)       # a call on its operands -> number
    reads: set[str] = field(default_factory=set)                        # tensors
    grads: list[tuple[str, bool]] = field(default_factory=list)         # (tensor or acc, added to)
    ran: list[tuple[Call, int, list]] = field(default_factory=list)     # number, operands
    again: frozenset[int] = frozenset()     # calls of forward: of such one result must be read
    of: set[object] = field(default_factory=set)            # calls whose results in tmp are read
    alive: set[tuple] = field(default_factory=set)          # values that come from what moves
    idle: set[tuple] = field(default_factory=set)           # gradients that nobody needs
    round: int = 0
    slices: check_slices.Slices = field(default_factory=check_slices.Slices)
    flats: dict[str, set[str]] = field(default_factory=dict)    # that functions touch beside keep

    def __post_init__(self) -> None:
        self.fn = self.fns[0]
        self.kind = self.fn.name.split(".")[1]
        self.real = 4 if self.p.head.real == "f32" else 2
        self.home = self.kind if any(f.name == self.kind for f in self.p.flats) else "embed"
        self.moving = {t.name for t in self.p.tensors if not t.frozen}
        self.limits = {c.name: c.stride for c in self.p.classes}
        self.width = self.p.head.batch * self.p.head.sequence * self.p.head.width * self.real
        self.limits.update({name: self.width for name in ("x", "y", "dx", "dy")})
        self.limits["s"] = max(self.limits.get(f"{near}save.{self.kind}", 0)
                               for near in ("", "near."))

    def fail(self, call: Call | None, what: str) -> NoReturn:
        raise CheckError(f"function {self.fn.name}: {call.kernel if call else 'end'}: {what}")

    # ---- operands

    def dims(self, call: Call, words: list[str]) -> dict[str, object]:
        """The numbers of a call by name, and what follows from them."""
        if len(words) != len(call.args):
            self.fail(call, f"{len(call.args)} operands instead of {len(words)}")
        out: dict[str, object] = {}
        for word, arg in zip(words, call.args):
            if word.isidentifier():
                out[word] = float(arg) if word in ("eps", "scale") else int(arg)
                if not word.islower() and int(arg) <= 0:
                    self.fail(call, f"{word} is {arg}")
        if "B" in out:
            out["M"] = out["B"] * out["T"]                      # type: ignore[operator]
        if out.get("carry", self.round) != self.round:
            self.fail(call, f"carries on in round {self.round}")
        if call.kernel == "zk_cross_entropy":
            if (out["V"], out["rows"]) != (self.p.head.vocab,
                                           self.p.head.batch * self.p.head.sequence):
                self.fail(call, f"V is {out['V']} of {out['rows']} rows")
            out["R"] = -(-self.p.head.vocab // 8) * 8           # a row's columns
        if "G" in out:
            out["E"] = (out["H"] + 2 * out["G"]) * out["D"]     # type: ignore[operator]
        return out

    def place(self, call: Call, arg: str, size: int) -> tuple[str, int]:
        """The base and the offset of an operand of `size` bytes."""
        base, _, at = arg.partition("+")
        if not at.isdigit() or int(at) % 4 * (self.real == 4):
            self.fail(call, f"{arg} is no operand")
        if base not in self.limits or int(at) + size > self.limits[base]:
            self.fail(call, f"{arg} and {size} bytes from there lie outside {base}")
        if base in FORMALS and base not in (*self.fn.ins, *self.fn.outs):
            self.fail(call, f"{base} is not the function's")
        return base, int(at)

    def tensor(self, call: Call, arg: str, elems: int, width: int,
               formals: tuple[str, str]) -> Tensor:
        """The tensor that a parameter's or a gradient's operand begins."""
        formal, _, at = arg.partition("+")
        number = formal.lstrip("dwp")
        if formal.removesuffix(number) not in formals or \
                formal not in (*self.fn.ins, *self.fn.outs):
            self.fail(call, f"{arg} is not among the function's parameters")
        flat = "keep" if formal in ("p", "dp") else f"{self.kind}_{number}" if number else self.home
        if flat != "keep":
            self.flats.setdefault(self.fn.name, set()).add(flat)
        for t in self.p.tensors:
            if t.flat == flat and t.offset * self.real == int(at):
                size = math.prod(t.shape)
                if size != elems if elems else t.shape[-1] != width:
                    self.fail(call, f"{arg}: {t.name} has {size} elements")
                return t
        self.fail(call, f"{arg} is no tensor's beginning")

    def read(self, call: Call, arg: str, size: int, kind: str) -> tuple:
        base, at = self.place(call, arg, size)
        for v in self.held.get(base, []):
            if (v.lo, v.hi, v.type) == (at, at + size, kind):
                v.used = True
                self.of |= {v.made[0]} if base == "tmp" else set()
                return v.made
        self.fail(call, f"{arg}: no value of {size} bytes of {kind} is there")

    def done(self, v: Value) -> bool:
        """Whether a value may go: read, or a by-product."""
        return v.used or v.type == "f" or v.made[0] in self.again or v.made in self.idle

    def moves(self, what: object) -> bool:
        """An operand is a tensor that moves, or comes from one, or is a part of what does."""
        if isinstance(what, tuple) and what[-3:-2] == ("part",):
            what = what[:-3]
        return what in self.moving or what in self.alive

    def write(self, call: Call, arg: str, size: int, kind: str, made: tuple) -> None:
        base, at = self.place(call, arg, size)
        if base != "tmp" and (base not in ("s", "y", "dx") or base not in self.fn.outs):
            self.fail(call, f"{arg} is not the function's to write")
        values = self.held.setdefault(base, [])
        for v in [v for v in values if v.lo < at + size and at < v.hi]:
            if not self.done(v):
                self.fail(call, f"{arg} overwrites what nobody has read")
            values.remove(v)
        values.append(Value(at, at + size, kind, made))

    def gradient(self, call: Call, arg: str, mode: str, dims: dict[str, object],
                 elems: int) -> None:
        """A tensor's gradient, or the f32 sum of a tied one."""
        if arg.startswith("acc"):
            self.place(call, arg, elems * 4)
            if arg != "acc+0" or mode not in ("add", "full") or not dims[mode]:
                self.fail(call, f"{arg} is not written in f32")
            name, added = "acc", mode == "add"
        else:
            name = self.tensor(call, arg, elems, 0, ("dw", "dp")).name
            added = mode == "add" and bool(dims["add"])
            if self.real != 4 and mode in ("add", "full") and (dims[mode] or dims.get("carry")):
                self.fail(call, f"{arg} is no f32")
        if not dims.get("carry"):
            self.grads.append((name, added))
        elif self.grads[-1:] != [(name, False)]:
            self.fail(call, f"{arg} carries on what is another gradient")

    # ---- calls

    def call(self, call: Call) -> None:
        words = KERNELS[call.kernel].split()
        dims = self.dims(call, words)
        writes: list[tuple[int, int, str]] = []
        is_: list[object] = list(call.args)             # what each operand is
        for n, (word, arg) in enumerate(zip(words, call.args)):
            if word.isidentifier():
                continue
            head, _, expression = word.partition(":")
            mode, kind = head[0], head.lstrip("><=?@^$")
            if arg == "null":
                if "?" not in head:
                    self.fail(call, "a null operand")
                continue
            elems = ops.value(expression, dims) if not expression.startswith("*") else 0
            if mode == "$":
                self.place(call, arg, elems)
                if arg != "work+0":
                    self.fail(call, f"{arg} is no scratch")
            elif mode == "@":
                width = 0 if elems else int(str(dims["C"]))
                is_[n] = self.tensor(call, arg, elems, width, ("w", "p")).name
                self.reads.add(is_[n])
            elif mode == "^":
                self.gradient(call, arg, kind, dims, elems)
            elif kind in CLASSES:
                base, _, at = arg.partition("+")
                from_ = {"targets": self.round * elems * 4, "ctl": SCALE}.get(kind, 0)
                if base.partition(".")[0] != kind or at != str(from_):
                    self.fail(call, f"{arg} is not {kind}")
                self.place(call, arg, elems * (8 if kind == "sums" else 4))
            else:
                size = elems * (self.real if kind == "r" else 4)
                base, _ = self.place(call, arg, size)
                if mode == "<" and (call.kernel != "zk_round" or base != "acc"):
                    is_[n] = self.read(call, arg, size, kind)
                if mode == ">":
                    writes.append((n, size, kind))
                    is_[n] = None
        number = self.known.setdefault((call.kernel, *is_), len(self.known))
        if any(map(self.moves, is_)):
            self.alive |= {(number, n) for n, _, _ in writes}
        if call.kernel in INPUT and not self.moves(is_[INPUT[call.kernel]]):
            self.idle.add((number, 0))
        for n, size, kind in writes:
            is_[n] = number, n
            self.write(call, call.args[n], size, kind, is_[n])
        self.ran.append((call, number, is_))

    def apart(self, call: Call) -> None:
        """Outputs, which come first, overlap nothing, or are exactly where another operand is."""
        words = KERNELS[call.kernel].split()
        dims = self.dims(call, words)
        spans: list[tuple[str, int, int, bool]] = []    # base, lo, hi, may be where another is
        outs = 0
        for word, arg in zip(words, call.args):
            head, _, expression = word.partition(":")
            kind = head.lstrip("><=?")
            if head[0] not in "<>" or arg == "null" or kind in CLASSES:
                continue
            size = ops.value(expression, dims) * (self.real if kind == "r" else 4)
            base, at = self.place(call, arg, size)
            spans.append((base, at, at + size, "=" in head))
            outs += head[0] == ">"
        for n, (base, lo, hi, free) in enumerate(spans[:outs]):
            for other, low, high, _ in spans[:n] + spans[n + 1:]:
                same = free and (lo, hi) == (low, high)
                if base == other and lo < high and low < hi and not same:
                    self.fail(call, f"{base}+{lo} overlaps another operand")

    def forward(self) -> list[tuple[Call, int, list]]:
        """The calls that forward is made of."""
        return [r for r in self.ran if r[0].kernel in BACK and
                (r[0].kernel, r[0].args[-1]) != ("zk_rope", "-1")]

    def wanted(self) -> Counter:
        """What must run backward for what ran forward: kernel, numbers, forward's operands."""
        out = []
        for c, _, is_ in self.forward():
            for kernel, like in BACK[c.kernel].items():
                if any(map(self.moves, is_[NEEDS[kernel]:][:1] if kernel in NEEDS else is_)):
                    out.append((kernel, numbers(c), tuple(is_[int(n)] for n in like if n != ".")))
            if c.kernel == "zk_linear_fwd" and self.moves(is_[NEEDS["zk_linear_bwd_b"]]):
                out.append(("zk_linear_bwd_b", numbers(c)[:2], ()))
        return Counter(out)

    def backward(self) -> Counter:
        """What does run backward; its gradients are none of what forward calls made."""
        made, out, likes = {number for _, number, _ in self.forward()}, [], backs()
        for c, _, is_ in self.ran:
            if c.kernel in likes and (c.kernel, c.args[-1]) != ("zk_rope", "1"):
                if is_[DY.get(c.kernel, 1)][0] in made:
                    self.fail(c, f"{c.args[DY.get(c.kernel, 1)]} is no gradient")
                out.append((c.kernel, numbers(c), tuple(x for x, n in zip(is_, likes[c.kernel])
                                                      if n != ".")))
        return Counter(out)

    def run(self) -> None:
        for self.fn in self.fns:
            self.launched(list(self.fn.calls))
            for at in check_slices.rounds(self, self.fn):
                self.calls([replace(c, args=tuple(str(at) if a == "at" else a for a in c.args))
                            for c in self.fn.calls])
            if len(self.flats.get(self.fn.name, ())) > 1:
                self.fail(None, f"touches {sorted(self.flats[self.fn.name])}")
        check_slices.end(self)

    def calls(self, calls: list[Call]) -> None:
        for rounds, some in groupby(calls, key=lambda c: c.rounds):
            group = list(some)
            if rounds > 1:
                self.loop(rounds, group)
            elif rounds == 1:
                for c in group:
                    self.one(c)
            else:
                self.fail(group[0], f"is called {rounds} times")

    def one(self, c: Call) -> None:
        if c.kernel == "zk_cross_entropy" and \
                (c.args[1] == "null") != self.fn.name.startswith("eval."):
            self.fail(c, "training needs the gradient, evaluation does not")
        if c.kernel == "zk_cross_entropy" and (c.args[4] == "null") == \
                (c.args[1] != "null" and self.p.head.real == "f16"):
            self.fail(c, "f16 needs a scale to train, nothing else does")
        self.apart(c)
        if c.kernel in SLICES:
            check_slices.call(self, c)
        elif c.kernel == "zk_round" and not c.args[1].startswith("acc"):
            check_slices.rounded(self, c)
        else:
            for part in parts(c):
                self.call(part)

    def launched(self, calls: list[Call]) -> None:
        """Calls are of their launches' shapes."""
        for c in calls:
            launch = next((l for l in self.p.launches if l.name == c.launch), None)
            shape = tuple(int(a) for a in c.args if a.lstrip("-").isdigit())
            if not launch or launch.kernel != c.kernel or launch.shape != shape:
                self.fail(c, f"launch {c.launch} is of another shape")

    def end(self, *outs: str) -> None:
        """Outputs are whole, everything was used."""
        for name in outs:
            there = [(v.lo, v.hi, v.type) for v in self.held.get(name, [])]
            if any(name in f.outs for f in self.fns) and there != [(0, self.width, "r")]:
                self.fail(None, f"{name} is not written whole")
        for base, values in self.held.items():
            for v in values:
                if base == "tmp" and not self.done(v):
                    self.fail(None, f"{base}+{v.lo} is written and not read")
        for c, number, _ in self.ran:
            if number in self.again - self.of:
                self.fail(c, "is made again and not read")


def _drawn(b: _Body) -> None:
    """The last two calls make the logits of one row, from what the loss' logits are made from. They
    are no part of the loss."""
    *rest, (pick, _, of), (one, _, is_) = b.ran
    last, its = [(c, x) for c, _, x in rest if c.kernel == "zk_linear_fwd"][-1]
    like = (one.kernel, is_[1], *is_[2:4], one.args[4:]) == \
        (last.kernel, of[0], *its[2:4], ("1", *last.args[5:]))
    if pick.kernel != "zk_pick" or not like or its[1][:len(of[1])] != of[1] or \
            pick.args[3] != str(b.p.head.batch * b.p.head.sequence):
        b.fail(one, "is not the logits of a row")
    next(v for values in b.held.values() for v in values if v.made == is_[0]).used = True
    b.ran = rest


def _unit_bodies(p: Plan, kind: str, fns: dict[str, Fn], count: int, below: bool) -> list[_Body]:
    """The functions of a kind, run forward, then backward on what was saved. below: what comes into
    its first unit has a gradient."""
    width = p.head.batch * p.head.sequence * p.head.width * (4 if p.head.real == "f32" else 2)
    known: dict[tuple, int] = {}
    value = lambda name: [Value(0, width, "r", (name,), True)]
    x = {("x",)} if below else set()
    forward, backward = (_functions(fns, body, kind) for body in ("fwd", "bwd"))
    if not forward:
        out = []
        for body in ("train", "eval"):
            b = _Body(p, [fns[f"{body}.{kind}"]], {"x": value("x")}, known, alive=x)
            b.run()
            if body == "eval":
                _drawn(b)
            b.end("dx")
            out.append(b)
        if not out[0].wanted() == out[0].backward() == out[1].wanted() or out[1].backward() or \
                out[0].reads != out[1].reads or not check_grads.adds_back(out[1], out[0]):
            out[0].fail(None, "forward, backward and evaluation do not agree")
        return out
    for _ in range(2):
        fwd = _Body(p, forward, {"x": value("x")}, known, alive={*x})
        fwd.run()
        if count > 1 and fwd.reads & fwd.moving:            # into its second, in any case
            x = {("x",)}
    fwd.end("y")
    saved, y = fwd.held.get("s", []), [replace(v, used=True) for v in fwd.held["y"]]
    if fwd.moves(y[0].made) != bool(backward) or not backward and saved:
        fwd.fail(None, "runs backward for what does not move, or not for what does")
    if not backward:
        return [fwd]
    bwd = _Body(p, backward, {"x": value("x"), "y": y, "dy": value("dy"), "s": saved},
                known, again=frozenset(n for _, n, _ in fwd.ran), alive=fwd.alive)
    for name in ("x", "y", "dy", "s"):
        if not any(name in f.ins for f in bwd.fns):
            bwd.held.pop(name)
    bwd.run()
    bwd.end("dx")
    if fwd.wanted() != bwd.backward() or fwd.backward() or not check_grads.adds_back(fwd, bwd):
        bwd.fail(None, "does not run backward what ran forward")
    dx = bwd.held["dx"][0].made if any("dx" in f.outs for f in bwd.fns) else ()
    check_grads.prove(fwd.ran, bwd.ran, y[0].made, dx, backs(), bwd.fail)
    for c, number, _ in bwd.forward():
        if number not in {n for _, n, _ in fwd.ran}:
            bwd.fail(c, "is not what ran forward")
    for v in saved:
        if not v.used:
            bwd.fail(None, f"s+{v.lo} is saved and not read")
    return [fwd, bwd]


def _functions(fns: dict[str, Fn], body: str, kind: str) -> list[Fn]:
    """A body's: one, or its parts in order."""
    name = f"{body}.{kind}"
    if name in fns:
        return [fns[name]]
    many = sum(other.startswith(f"{name}.") for other in fns)
    return [fns[f"{name}.{n}"] for n in range(many)]


@refusing
def functions(p: Plan, counts: dict[str, int]) -> Facts:
    """Proves all of the above; counts: units of each kind, in order of forward."""
    fns = {f.name: f for f in p.fns}
    bodies: dict[str, list[_Body]] = {}
    alive: set[str] = set()
    for kind, count in counts.items():
        bodies[kind] = _unit_bodies(p, kind, fns, count, bool(alive))
        if len(bodies[kind]) > 1:
            alive.add(kind)
    check_own.functions(p)
    made = [b for kind in counts for b in bodies[kind]]
    parts = {(b.fn.name.split(".")[0], b.kind):
             [(f.name, next(iter(b.flats.get(f.name, ())), ""), check_slices.rounds(b, f))
              for f in b.fns] for b in made}
    return Facts(leaves(p, bodies, counts), frozenset(alive), parts)
