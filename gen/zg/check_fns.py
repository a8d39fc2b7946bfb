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
 leaves     every tensor's gradient is written once by the function that comes first in backward,
            and added to by the others that read the tensor
"""
from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import NoReturn

from . import check_grads, check_own, ops
from .check_order import CheckError
from .plan import Call, Fn, Plan, Tensor

# A kernel's operands, stated again from kernels/zk.h. `>` writes, `<` reads, `=` may be where
# another operand is, `@` parameter, `^` gradient of one, `$` scratch, `?` may be null, a bare word
# is a number. Then the type (r real, f float, F a float that must be used, or the class itself)
# and the elements.
_KERNELS = {
    "zk_embed_fwd": ">r:B*T*C <tokens:B*T @r:*C @?r:*C B T C",
    "zk_embed_bwd": "^add:V*C <r:M*C <tokens:M $:4*(V+1+M) M V C add",
    "zk_position_bwd": "^r:P*C <r:B*T*C B T C P",
    "zk_layernorm_fwd": ">r:M*C >f:M*2 >?r:M*C <r:M*C <?r:M*C @r:C @?r:C M C eps",
    "zk_layernorm_bwd": ">r:M*C ^r:C ^?r:C <r:M*C <?r:M*C <r:M*C <f:M*2 @r:C $:8*C M C",
    "zk_rmsnorm_fwd": ">r:M*C >f:M >?r:M*C <r:M*C <?r:M*C @r:C M C eps",
    "zk_rmsnorm_bwd": ">r:M*C ^r:C <r:M*C <?r:M*C <r:M*C <f:M @r:C $:8*C M C",
    "zk_qknorm_fwd": ">r:M*E >f:M*(H+G) <r:M*E @r:D @r:D M H G D eps",
    "zk_qknorm_bwd": ">r:M*E ^r:D ^r:D <r:M*E <r:M*E <f:M*(H+G) @r:D @r:D $:8*D*(1+M) M H G D",
    "zk_linear_fwd": ">r:M*N <r:M*K @r:N*K @?r:N M N K layout",
    "zk_linear_bwd_x": ">r:M*K <r:M*N @r:N*K M N K layout",
    "zk_linear_bwd_w": "^full:N*K <r:M*N <r:M*K M N K layout full",
    "zk_linear_bwd_b": "^r:N <r:M*N M N",
    "zk_rope": ">=r:M*E <r:M*E <table:T*D B T H G D sign",
    "zk_attention_fwd": ">r:M*H*D >f:M*H <r:M*E B T H G D scale",
    "zk_attention_bwd": ">r:M*E <r:M*H*D <r:M*H*D <r:M*E <f:M*H $:4*(M*H+M*E) B T H G D scale",
    "zk_gelu_fwd": ">r:n <r:n n kind",
    "zk_gelu_bwd": ">=r:n <r:n <r:n n kind",
    "zk_swiglu_fwd": ">r:M*F <r:M*2*F M F",
    "zk_swiglu_bwd": ">r:M*2*F <r:M*F <r:M*2*F M F",
    "zk_add": ">=r:n <r:n <r:n n",
    "zk_round": "^r:n <f:n n",
    "zk_cross_entropy": ">F:M >=?r:M*R <r:M*R <targets:M M V",
    "zk_loss_sum": ">sums:72 <F:M <targets:M M",
}
_CLASSES = ("tokens", "targets", "table", "sums")
# A kernel forward, and those that must run backward for it on the same numbers: of their operands,
# in order, which are operands of the one forward (. for none).
_BACK = {
    "zk_layernorm_fwd": {"zk_layernorm_bwd": ".....315"},
    "zk_rmsnorm_fwd": {"zk_rmsnorm_bwd": "....315"},
    "zk_qknorm_fwd": {"zk_qknorm_bwd": "....2134"},
    "zk_linear_fwd": {"zk_linear_bwd_x": "..2", "zk_linear_bwd_w": "..1"},
    "zk_rope": {"zk_rope": "..2"},
    "zk_attention_fwd": {"zk_attention_bwd": "..021"},
    "zk_gelu_fwd": {"zk_gelu_bwd": "..1"},
    "zk_swiglu_fwd": {"zk_swiglu_bwd": "..1"},
}
# Where a norm has what it adds: forward the sum of two operands, backward one more for the result.
_ADDS = {"zk_layernorm_fwd": (2, 3, 4), "zk_rmsnorm_fwd": (2, 3, 4),
         "zk_layernorm_bwd": (0, 0, 4), "zk_rmsnorm_bwd": (0, 0, 3)}
_ASIDE = ("eps", "full", "add", "sign")                 # numbers that need not agree


@dataclass(frozen=True)
class Facts:
    """What steps need to know of functions: elements of `keep` from one instance of a kind to the
    next."""
    steps: dict[str, int]


@dataclass
class _Value:
    """Bytes [lo, hi) of a base, of one type. made: what it is, by the call that made it."""
    lo: int
    hi: int
    type: str
    made: tuple = ()
    used: bool = False


@dataclass
class _Body:
    """A function as its calls run."""
    p: Plan
    fn: Fn
    held: dict[str, list[_Value]] = field(default_factory=dict)         # base -> what lies there
    known: dict[tuple, int] = field(default_factory=dict)       # a call on its operands -> number
    reads: set[str] = field(default_factory=set)                        # tensors
    grads: list[tuple[str, bool]] = field(default_factory=list)         # (tensor or acc, added to)
    ran: list[tuple[Call, int, list]] = field(default_factory=list)     # number, operands
    again: frozenset[int] = frozenset()     # calls of forward: of such one result must be read
    of: set[object] = field(default_factory=set)            # calls whose results in tmp are read

    def __post_init__(self) -> None:
        self.kind = self.fn.name.partition(".")[2]
        self.real = 4 if self.p.head.real == "f32" else 2
        self.home = self.kind if any(f.name == self.kind for f in self.p.flats) else "embed"
        self.limits = {c.name: c.stride for c in self.p.classes}
        self.width = self.p.head.batch * self.p.head.sequence * self.p.head.width * self.real
        self.limits.update({name: self.width for name in ("x", "y", "dx", "dy")})
        self.limits["s"] = self.limits.get(f"save.{self.kind}", 0)

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
        if call.kernel == "zk_cross_entropy":
            if out["V"] != self.p.head.vocab:
                self.fail(call, f"V is {out['V']}")
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
        return base, int(at)

    def tensor(self, call: Call, arg: str, elems: int, width: int,
               formals: tuple[str, str]) -> Tensor:
        """The tensor that a parameter's or a gradient's operand begins."""
        formal, _, at = arg.partition("+")
        if formal not in formals or formal not in (*self.fn.ins, *self.fn.outs):
            self.fail(call, f"{arg} is not among the function's parameters")
        flat = "keep" if formal in ("p", "dp") else self.home
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

    def done(self, v: _Value) -> bool:
        """Whether a value may go: read, or a by-product."""
        return v.used or v.type == "f" or v.made[0] in self.again

    def write(self, call: Call, arg: str, size: int, kind: str, made: tuple) -> None:
        base, at = self.place(call, arg, size)
        if base != "tmp" and (base not in ("s", "y", "dx") or base not in self.fn.outs):
            self.fail(call, f"{arg} is not the function's to write")
        values = self.held.setdefault(base, [])
        for v in [v for v in values if v.lo < at + size and at < v.hi]:
            if not self.done(v):
                self.fail(call, f"{arg} overwrites what nobody has read")
            values.remove(v)
        values.append(_Value(at, at + size, kind, made))

    def gradient(self, call: Call, arg: str, mode: str, dims: dict[str, object],
                 elems: int) -> None:
        """A tensor's gradient, or the f32 sum of a tied one."""
        if arg.startswith("acc"):
            self.place(call, arg, elems * 4)
            if arg != "acc+0" or mode not in ("add", "full") or not dims[mode]:
                self.fail(call, f"{arg} is not written in f32")
            self.grads.append(("acc", mode == "add"))
            return
        t = self.tensor(call, arg, elems, 0, ("dw", "dp"))
        if self.real != 4 and mode in ("add", "full") and dims[mode]:
            self.fail(call, f"{arg} is no f32")
        self.grads.append((t.name, mode == "add" and bool(dims["add"])))

    # ---- calls

    def call(self, call: Call) -> None:
        words = _KERNELS[call.kernel].split()
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
            elif kind in _CLASSES:
                if arg.partition(".")[0].partition("+")[0] != kind or not arg.endswith("+0"):
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
        for n, size, kind in writes:
            is_[n] = number, n
            self.write(call, call.args[n], size, kind, is_[n])
        self.ran.append((call, number, is_))

    def apart(self, call: Call) -> None:
        """Outputs, which come first, overlap nothing, or are exactly where another operand is."""
        words = _KERNELS[call.kernel].split()
        dims = self.dims(call, words)
        spans: list[tuple[str, int, int, bool]] = []    # base, lo, hi, may be where another is
        outs = 0
        for word, arg in zip(words, call.args):
            head, _, expression = word.partition(":")
            kind = head.lstrip("><=?")
            if head[0] not in "<>" or arg == "null" or kind in _CLASSES:
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
        return [r for r in self.ran if r[0].kernel in _BACK and
                (r[0].kernel, r[0].args[-1]) != ("zk_rope", "-1")]

    def wanted(self) -> Counter:
        """What must run backward for what ran forward: kernel, numbers, forward's operands."""
        out = []
        for c, _, is_ in self.forward():
            for kernel, like in _BACK[c.kernel].items():
                out.append((kernel, _dims(c), tuple(is_[int(n)] for n in like if n != ".")))
            if c.kernel == "zk_linear_fwd" and c.args[3] != "null":
                out.append(("zk_linear_bwd_b", _dims(c)[:2], ()))
        return Counter(out)

    def backward(self) -> Counter:
        """What does run backward."""
        likes = _likes()
        return Counter((c.kernel, _dims(c), tuple(x for x, n in zip(is_, likes[c.kernel])
                                                  if n != "."))
                       for c, _, is_ in self.ran if c.kernel in likes and
                       (c.kernel, c.args[-1]) != ("zk_rope", "1"))

    def run(self) -> None:
        for c in self.fn.calls:
            launch = next((l for l in self.p.launches if l.name == c.launch), None)
            shape = tuple(int(a) for a in c.args if a.lstrip("-").isdigit())
            if not launch or launch.kernel != c.kernel or launch.shape != shape:
                self.fail(c, f"launch {c.launch} is of another shape")
            eval_ = self.fn.name.startswith("eval.")
            if c.kernel == "zk_cross_entropy" and (c.args[1] == "null") != eval_:
                self.fail(c, "training needs the gradient, evaluation does not")
            self.apart(c)
            for part in _parts(c):
                self.call(part)

    def end(self, *outs: str) -> None:
        """Outputs are whole, everything was used."""
        for name in outs:
            there = [(v.lo, v.hi, v.type) for v in self.held.get(name, [])]
            if name in self.fn.outs and there != [(0, self.width, "r")]:
                self.fail(None, f"{name} is not written whole")
        for base, values in self.held.items():
            for v in values:
                if base == "tmp" and not self.done(v):
                    self.fail(None, f"{base}+{v.lo} is written and not read")
        for c, number, _ in self.ran:
            if number in self.again - self.of:
                self.fail(c, "is made again and not read")


def _parts(c: Call) -> list[Call]:
    """A call as those that have the same bits together: a norm and an addition, or itself."""
    out, x, more = _ADDS.get(c.kernel, (0, 0, 0))
    args = list(c.args)
    if not more or args[more] == "null" and (not out or args[out] == "null"):
        return [c]
    M, C = (int(a) for a in _dims(c))
    add = Call("zk_add", "", (args[out], args[x], args[more], str(M * C)))
    args[more] = "null"
    if out:                                                     # forward: before it
        args[out], args[x] = "null", args[out]
    norm = replace(c, args=tuple(args))
    return [add, norm] if out else [norm, add]


def _likes() -> dict[str, str]:
    """Of kernels backward, which operands are forward's."""
    return {k: like for row in _BACK.values() for k, like in row.items()} | {"zk_linear_bwd_b": ""}


def _dims(c: Call) -> tuple[str, ...]:
    """A call's numbers that must agree forward and backward."""
    return tuple(a for w, a in zip(_KERNELS[c.kernel].split(), c.args)
                 if w.isidentifier() and w not in _ASIDE)


def _adds_back(fwd: _Body, bwd: _Body) -> bool:
    """Backward adds as often as forward, beside what it makes again."""
    first, then = ([n for c, n, _ in b.ran if c.kernel == "zk_add"] for b in (fwd, bwd))
    return len([n for n in then if n not in first]) == len(first)


def _unit_bodies(p: Plan, kind: str, fns: dict[str, Fn]) -> list[_Body]:
    """The functions of a kind, run forward, then backward on what was saved."""
    width = p.head.batch * p.head.sequence * p.head.width * (4 if p.head.real == "f32" else 2)
    known: dict[tuple, int] = {}
    value = lambda name: [_Value(0, width, "r", (name,), True)]
    if f"fwd.{kind}" not in fns:
        out = []
        for body in ("train", "eval"):
            b = _Body(p, fns[f"{body}.{kind}"], {"x": value("x")}, known)
            b.run()
            b.end("dx")
            out.append(b)
        if not out[0].wanted() == out[0].backward() == out[1].wanted() or out[1].backward() or \
                out[0].reads != out[1].reads or not _adds_back(out[1], out[0]):
            out[0].fail(None, "forward, backward and evaluation do not agree")
        return out
    fwd = _Body(p, fns[f"fwd.{kind}"], {"x": value("x")}, known)
    fwd.run()
    fwd.end("y")
    saved, y = fwd.held.get("s", []), [replace(v, used=True) for v in fwd.held["y"]]
    bwd = _Body(p, fns[f"bwd.{kind}"], {"x": value("x"), "y": y, "dy": value("dy"), "s": saved},
                known, again=frozenset(n for _, n, _ in fwd.ran))
    for name in ("x", "y", "dy", "s"):
        if name not in bwd.fn.ins:
            bwd.held.pop(name)
    bwd.run()
    bwd.end("dx")
    if fwd.wanted() != bwd.backward() or fwd.backward() or not _adds_back(fwd, bwd):
        bwd.fail(None, "does not run backward what ran forward")
    dx = bwd.held["dx"][0].made if "dx" in bwd.fn.outs else ()
    check_grads.prove(fwd.ran, bwd.ran, y[0].made, dx, _likes(), bwd.fail)
    for c, number, _ in bwd.forward():
        if number not in {n for _, n, _ in fwd.ran}:
            bwd.fail(c, "is not what ran forward")
    for v in saved:
        if not v.used:
            bwd.fail(None, f"s+{v.lo} is saved and not read")
    return [fwd, bwd]


def _leaves(p: Plan, bodies: dict[str, list[_Body]], counts: dict[str, int]) -> dict[str, int]:
    """Every tensor's gradient is written once and added to by its other readers. Facts.steps."""
    kinds = list(reversed(counts))                              # in backward order
    tensors = {t.name: t for t in p.tensors}
    readers: dict[str, set[str]] = {n: set() for n in tensors}
    givers: dict[str, list[tuple[str, bool]]] = {n: [] for n in tensors}
    acc: list[tuple[str, bool]] = []
    for kind in kinds:
        for b in bodies[kind]:
            for n in b.reads:
                readers[n].add(kind)
            for n, added in b.grads:
                if n == "acc":
                    acc.append((kind, added))
                else:
                    givers[n] += acc if acc and n in _rounded(b) else [(kind, added)]
    steps: dict[str, int] = {}
    for name, t in tensors.items():
        got = givers[name]
        want = [(k, True) for k in kinds if k in readers[name]]
        if not got or got != [(want[0][0], False), *want[1:]]:
            raise CheckError(f"tensor {name}: read by {want}, its gradient comes from {got}")
        if t.count != counts[got[-1][0]]:
            raise CheckError(f"tensor {name}: {t.count} instances for {counts[got[-1][0]]} units")
        for kind in readers[name]:
            if t.flat == "keep" and steps.setdefault(kind, t.offset_step) != t.offset_step:
                raise CheckError(f"tensor {name}: another distance than its unit's others")
    return steps


def _rounded(b: _Body) -> set[str]:
    """The tensors whose gradient is rounded from the f32 sum."""
    out = set()
    for c in b.fn.calls:
        if c.kernel == "zk_round":
            if c.args[1] != "acc+0":
                b.fail(c, "rounds something else than the sum")
            out.add(b.tensor(c, c.args[0], int(c.args[2]), 0, ("dw", "dp")).name)
    return out


def functions(p: Plan, counts: dict[str, int]) -> Facts:
    """Proves all of the above; counts: units of each kind, in order of forward."""
    fns = {f.name: f for f in p.fns}
    try:
        bodies = {kind: _unit_bodies(p, kind, fns) for kind in counts}
        check_own.functions(p)
        return Facts(_leaves(p, bodies, counts))
    except (KeyError, ValueError, IndexError) as e:
        raise CheckError(f"functions name what the plan does not have: {e}") from e
