"""model.py -- builds a graph from a Spec: units of ops with parameters, backward by the op table.

A kind of unit (embedding, each entry of blocks, head) becomes up to four functions, lists of kernel
calls over named operands: fwd, bwd, and for the head train (forward, loss and backward in one) and
eval. Values of the ops in `train.recompute` are not saved: bwd recomputes them by forward's calls.
This module does not know of ranks, shards or memory.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..facts import ops
from ..facts.kernels import ADD, EXCHANGES, KERNELS, NULL, ROUND, value
from ..facts.rope import Rotation, frequencies
from ..plan.operand import Index, Layers
from ..read import context
from ..read.schema import Row, Weight
from ..read.spec import Op as SpecOp
from ..read.spec import Spec, Unit
from . import chunks, mlps, moves, quantize, rewrite
from .graph import (
    Body,
    Call,
    Forward,
    Graph,
    OpNode,
    Table,
    Tensor,
    UnitKind,
    Value,
    Word,
)

STD = 0.02  # standard deviation of initial weights
NORMS = ("layernorm", "rmsnorm", "qknorm", "qknorm_whole")
ONE_PLUS = ("rmsnorm1", "qknorm1")  # norms whose factors are 1 + w


@dataclass
class _Builder:
    """Collects the nodes of one unit."""

    spec: Spec
    prefix: str
    dims: dict[str, int]
    tables: list[Table]
    nodes: list[OpNode] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    values: dict[str, Value] = field(default_factory=dict)
    branches: int = 1
    count: int = 1
    begin: int = 0  # index of its first layer in its entry of blocks
    below: bool = False  # something below the unit is trainable
    # layers whose parameter groups differ from the layer before
    cuts: set[int] = field(default_factory=set)
    # first place of its random numbers; places are numbered through the model
    first: int = 0

    @property
    def places(self) -> list[OpNode]:
        """The ops that draw random numbers."""
        return [node for node in self.nodes if "place" in node.op.fwd.split()]

    def place(self, node: OpNode) -> Index:
        """Return the place of a node among all such ops of the model."""
        here = self.places
        return Index(len(here), 0, self.first + here.index(node))

    @property
    def moving(self) -> set[str]:
        return {t.name for t in self.tensors if not t.group[2]}

    def alive(self, *more: str) -> set[str]:
        """Return the names that have a gradient. more: trainable tensors of other units."""
        x = {"in"} if self.below or self.count > 1 and self.moving else set()
        return moves.live(self.nodes, self.moving | x | {*more})

    def tensor(self, weight: Weight, mean: float, std: float) -> str:
        """Append a tensor and return its full name."""
        full = f"{self.prefix}{weight.name}"
        parts = tuple((f"{self.prefix}{name}", rows) for name, rows in weight.parts)
        groups = [
            moves.group(self.spec, full, parts, weight.shape, l)
            for l in range(self.count)
        ]
        self.cuts |= {l for l in range(1, self.count) if groups[l] != groups[l - 1]}
        made = Tensor(full, parts, weight.shape, mean, std, groups[0])
        self.tensors.append(replace(made, heads=weight.heads))
        return full

    def row(self, row: Row, x: str, std: float = STD) -> str:
        """Append a row of the op table with its tensors and adapters. Return the name of its
        output."""
        low: list[str] = []
        y, into = "", x
        for one in row.order:
            if one is row:
                y = self.one(row, (x,), std)
            elif one.name == "softcap":
                y = self.one(one, (y,), 0.0)
            elif one.name == "lora_dropout":
                into = self.one(one, (x,), 0.0)
            elif one.name == "linear":
                low.append(self.one(one, (into,), -1 / math.sqrt(one.dims["K"])))
            else:
                y = self.one(one, (y, low.pop()), 0.0)
        return y

    def one(self, row: Row, xs: tuple[str, ...], std: float) -> str:
        params = {"w": row.tied} if row.tied else {}
        for word, weight in row.weights.items():
            first = _first(row.name, word, std)
            params[word] = self.tensor(weight, *first)
        words = ops.OPS[row.name].ins
        ins = dict(zip(words, xs, strict=False))
        dims = {word: self.mine(n) for word, n in row.dims.items()}
        if row.name.startswith("attention"):  # of whole samples
            B, T = self.dims["B"], self.spec.train.sequence
            dims |= {"T": T, "M": B * T}
        if "rope" in dims:
            dims["table"] = self.table(row.dims["rope"])
            second = row.dims.get("rope2")
            dims["table2"] = self.table(second) if second else NULL
        return self.node(row.name, ins, params, dims)

    def mine(self, n: Any) -> Any:
        """Return this unit's share of a number that differs between layers."""
        if not isinstance(n, tuple):
            return n
        each = n[self.begin : self.begin + self.count]
        return Layers(each) if len({*each}) > 1 else each[0]

    def table(self, turn: Rotation) -> str:
        """Return the name of a rotary table."""
        table = Table(turn.head, frequencies(turn.head, turn.theta, turn.scaling))
        if table not in self.tables:
            self.tables.append(table)
        return f"table.{self.tables.index(table)}"

    def node(
        self,
        name: str,
        ins: Mapping[str, str],
        params: Mapping[str, str],
        dims: Mapping[str, Any],
    ) -> str:
        """Append an op. Return the name of its first output."""
        op = ops.OPS[name]
        full = {**self.dims, **dims}
        if ins:  # an op that works element by element
            full.setdefault("n", self.values[next(iter(ins.values()))].elems)
        bind = {**ins, **params}
        for out in op.outs:
            bind[out.name] = f"{out.name}{len(self.nodes)}"
            made = Value(bind[out.name], out.type, value(out.elems, full))
            self.values[made.name] = made
        self.nodes.append(OpNode(op, full, bind))
        return bind[op.outs[0].name]


def _first(op: str, word: str, std: float) -> tuple[float, float]:
    """Return the mean and standard deviation of a tensor's initial values."""
    if word == "b":
        return 0.0, 0.0
    if op in NORMS:
        return 1.0, 0.0
    if op in ONE_PLUS:
        return 0.0, 0.0
    return 0.0, std / 2 if word == "wpe" else std


def _run(b: _Builder, x: str, op: SpecOp, std: float = STD) -> str:
    """Append the nodes of one op of the spec. Return the name of its output. std: of its last
    linear."""
    if op.kind == "residual":
        y = x
        for child in op.ops[:-1]:
            y = _run(b, y, child)
        # Residual branches are scaled as in GPT-2, section 2.3.
        y = _run(b, y, op.ops[-1], STD / math.sqrt(b.branches))
        for row in context.rows(b.spec, op):
            y = b.row(row, y)
        return b.node("add", {"a": x, "b": y}, {}, {})
    if op.kind == "parallel":
        first, *others = [_branch(b, x, branch, std) for branch in op.ops]
        for y in others:
            first = b.node("add", {"a": first, "b": y}, {}, {})
        return first
    rows = context.rows(b.spec, op)
    for row in rows[:-1]:
        x = b.row(row, x)
    return b.row(rows[-1], x, std)


def _branch(b: _Builder, x: str, branch: SpecOp, std: float) -> str:
    for op in branch.ops[:-1]:
        x = _run(b, x, op)
    return _run(b, x, branch.ops[-1], std)


class _Calls:
    """Turns nodes into calls, forward or backward."""

    def __init__(self, b: _Builder, full: set[str]) -> None:
        self.b, self.full, self.alive = b, full, b.alive(*full)
        self.calls: list[Call] = []
        self.made: list[Forward] = []  # ops of forward
        self.values: dict[str, Value] = dict(b.values)
        self.params = {t.name for t in b.tensors}
        self.grads: dict[str, str] = {}
        # gradients that the inputs of a line had before it
        self.had: dict[str, str | None] = {}
        # rounds of the next calls, and the values that hold the rows of one round
        self.rounds = 1
        self.parts: set[str] = set()
        # weight -> the f32 sum of its gradient over rounds
        self.sums: dict[str, str] = {}
        self.later: list[Call] = []  # calls that follow the rounds

    def operand(self, node: OpNode, word: str) -> Word:
        """Return the operand of a word of the op table."""
        if word in ("token", "target", "sums", "null"):
            return ("fixed", word)
        blocks = self.b.spec.train.sequence_blocks > 1
        if word == "all":
            return ("fixed", "sample_target" if blocks else "target")
        of_sample = blocks and ops.WORDS.get(node.op.name) == "attention"
        if word == "key":
            return ("fixed", "sample_key" if of_sample else word)
        if word == "position":
            if not self.b.spec.data.packed:
                return ("fixed", word if blocks and not of_sample else "null")
            return ("fixed", "document" if of_sample else word)
        if word == "scaler":
            return (
                "fixed",
                word if self.b.spec.train.precision == "f16" else "null",
            )
        if word == "$":
            return ("work", "")
        if word.lstrip("-").isdigit():
            return ("number", int(word))
        if word in ("table", "table2"):
            return ("fixed", node.dims[word])
        if word == "place":
            return ("int", self.b.place(node))
        if word == "head":
            shared = self.b.spec.cluster.context_parallel > 1
            return ("int", Index(0, node.dims["H"] * shared))
        if word == "full":
            weight = node.bind.get("w") or node.bind.get("wte", "")
            return ("number", int(weight in (self.full | self.sums.keys())))
        if word == "carry":
            return ("number", 0) if self.rounds == 1 else ("round", "c")
        if word in node.op.params:
            return (
                ("param", node.bind[word]) if word in node.bind else ("fixed", "null")
            )
        if word.startswith("d") and word[1:] in node.op.params:
            name = node.bind.get(word[1:])
            name = name if name in self.alive else None
            wide = name in self.full and self.b.spec.train.precision != "f32"
            if name in self.sums:
                return ("value", self.sums[name])
            return (
                ("fixed", "acc")
                if wide
                else ("grad", name)
                if name
                else ("fixed", "null")
            )
        if word in node.bind:
            name = node.bind[word]
            return ("fixed" if name == ops.PICKED else "value", name)
        if word.startswith("+"):
            old = self.had[word[1:]]
            return ("value", old) if old else ("fixed", "null")
        if word.startswith("d") and word[1:] in node.bind:
            return ("value", self.grads[node.bind[word[1:]]])
        return ("number", node.dims[word])

    def line(self, node: OpNode, text: str) -> None:
        """Append the call of a line of the op table."""
        words = text.split()
        args = tuple(self.operand(node, w) for w in words[1:])
        grow = tuple(self.growth(*a) for a in args) if self.rounds > 1 else ()
        self.calls.append(Call(words[0], args, self.rounds, grow))

    def growth(self, kind: str, name: object) -> int:
        """Return the bytes of an operand's rows in one round."""
        if kind != "value" or name == "factor" or name in self.parts:
            return 4 * self.b.dims["M"] // self.rounds if name == "target" else 0
        v = self.values[str(name)]
        return v.bytes(ops.BYTES[self.b.spec.train.precision]) // self.rounds

    def forward(self, node: OpNode) -> None:
        first = len(self.calls)
        self.line(node, node.op.fwd)
        outs = {node.bind[out.name] for out in node.op.outs}
        self.made.append(Forward(node.op.name, outs, self.calls[first:]))

    def gradient(self, name: str, node: OpNode) -> None:
        """Start a new value for the gradient of `name`."""
        fresh = f"d{name}" + "'" * sum(v.startswith(f"d{name}") for v in self.values)
        self.values[fresh] = Value(fresh, "real", self.values[name].elems)
        self.grads[name] = fresh
        if name in self.parts:
            self.parts.add(fresh)

    def backward(self, node: OpNode) -> None:
        """Append a node's backward calls that compute needed gradients."""
        for text in node.op.bwd:
            words = text.split()
            if not moves.wanted(node, words, self.alive):
                continue
            if words[0] == "pass":
                to, of = (node.bind[w[1:]] for w in words[1:])
                if to != of:  # otherwise they are the same
                    self.merge(to, self.grads[of], node)
                continue
            made = [w for w in words if w[0] == "d" and w[1:] in node.op.ins]
            self.had = {w: self.grads.get(node.bind[w[1:]]) for w in made}
            for w in made:
                self.gradient(node.bind[w[1:]], node)
            self.line(node, text)
            for w, old in self.had.items():
                of = node.bind[w[1:]]
                if old and f"+{w}" not in words:
                    new = self.grads[of]
                    self.grads[of] = old
                    self.merge(of, new, node)
                if of not in self.alive:  # a kernel computes it anyway
                    del self.grads[of]

    def merge(self, name: str, more: str, node: OpNode) -> None:
        """Add the gradient `more` to that of the value `name`; the first one is taken as it is."""
        old = self.grads.get(name)
        if not old:
            self.grads[name] = more
            return
        self.gradient(name, node)
        n = self.values[more].elems
        calls = self.later if self.rounds > 1 else self.calls
        calls.append(
            Call(
                ADD,
                (
                    ("value", self.grads[name]),
                    ("value", old),
                    ("value", more),
                    ("number", n),
                ),
            )
        )

    def round(self, name: str, total: Word = ("fixed", "acc")) -> None:
        """Round a whole gradient from its f32 sum to the stored type."""
        elems = next(t.elems for t in self.b.tensors if t.name == name)
        self.calls.append(Call(ROUND, (("grad", name), total, ("number", elems))))

    def begin(self, rounds: int) -> None:
        """Set the rounds of the next calls. After the last one append the calls that
        follow the rounds."""
        if rounds == self.rounds:
            return
        self.rounds = rounds
        self.calls += self.later
        self.later = []
        for weight, total in self.sums.items() if rounds == 1 else ():
            self.round(weight, ("value", total))
        self.sums = {}

    def sum_in_f32(self, node: OpNode) -> None:
        """Give a weight whose gradient is summed over rounds a sum in f32, if it is stored in
        another type."""
        weight = node.bind.get("w", "")
        if self.rounds == 1 or weight not in self.alive & self.params:
            return
        if self.b.spec.train.precision != "f32":
            total = mlps.total(weight)
            elems = next(t.elems for t in self.b.tensors if t.name == weight)
            self.values[total] = Value(total, "f32", elems)
            self.sums[weight] = total
            self.parts.add(total)

    def body(self) -> Body:
        calls = rewrite.fused(self.calls)
        used = rewrite.values(calls)
        return Body(tuple(calls), tuple(v for n, v in self.values.items() if n in used))


def _rename(body: Body, names: dict[str, str]) -> Body:
    calls = []
    for c in body.calls:
        args = [
            (kind, names.get(str(a), a) if kind == "value" else a) for kind, a in c.args
        ]
        calls.append(replace(c, args=tuple(args)))
    values = [replace(v, name=names.get(v.name, v.name)) for v in body.values]
    return Body(tuple(calls), tuple(values))


def _middle(
    b: _Builder, name: str, count: int, x: str, y: str, full: set[str]
) -> UnitKind:
    """Build an embedding or a block: fwd and, if its output has a gradient, bwd from dy to dx."""
    wide = mlps.cut(b.spec, b.nodes, b.values, b.moving) if x else {}
    fwd, bwd = _Calls(b, full), _Calls(b, full)
    fwd.parts |= mlps.parts(wide)
    bwd.parts |= mlps.parts(wide)
    for n, node in enumerate(b.nodes):
        fwd.begin(wide[n].rounds if n in wide else 1)
        fwd.forward(node)
    names = {x: "x", y: "y"}
    names.pop("", None)
    if y not in bwd.alive:
        return UnitKind(
            name=name,
            count=count,
            tensors=tuple(b.tensors),
            bodies={"fwd": _rename(fwd.body(), names)},
            saved=(),
            x="x" if x else "",
            y="y",
        )
    bwd.values["dy"] = Value("dy", "real", b.values[y].elems)
    bwd.grads[y] = "dy"
    for n, node in reversed([*enumerate(b.nodes)]):
        bwd.begin(wide[n].rounds if n in wide else 1)
        bwd.sum_in_f32(node)
        bwd.backward(node)
    bwd.begin(1)
    if not x and full and b.spec.train.precision != "f32":
        # The gradient of a tied weight is rounded once, when it is complete.
        for weight in full:
            bwd.round(weight)
    kept = (rewrite.values(fwd.calls) & _read(fwd, bwd)) - _dropped(b, fwd, y) | {x, y}
    kept -= mlps.parts(wide)
    # An op that is recomputed runs as a whole, so none of its values is saved.
    kept -= rewrite.again(fwd.made, bwd.calls, kept)[1]
    calls, repeated = rewrite.again(fwd.made, bwd.calls, kept)
    if calls and calls[0].kernel in EXCHANGES:
        # A function comes before each exchange, so the rows of attention are saved, too.
        rows = {v for made in fwd.made if made.op == "to_rows" for v in made.values}
        kept |= rows & repeated
        calls, _ = rewrite.again(fwd.made, bwd.calls, kept)
    bwd.calls = calls
    forward = _rename(fwd.body(), names)
    back = _rename(bwd.body(), {**names, bwd.grads.get(x, ""): "dx"})
    saved = tuple(v for v in forward.values if v.name in kept - {x, y})
    return UnitKind(
        name=name,
        count=count,
        tensors=tuple(b.tensors),
        bodies={"fwd": forward, "bwd": back},
        saved=saved,
        x="x" if x else "",
        y="y",
    )


def _read(fwd: _Calls, bwd: _Calls) -> set[str]:
    """Return the values that backward reads, with the inputs of those that it always
    recomputes."""
    read = rewrite.values(bwd.calls)
    again = [f for f in fwd.made if f.op in ops.AGAIN and f.values & read]
    return read | {v for made in again for v in rewrite.values(made.calls)}


def _dropped(b: _Builder, fwd: _Calls, y: str) -> set[str]:
    """Return the values of the ops in train.recompute, and of those that are never saved. The op
    that makes the output y is not recomputed, since that would write y again."""
    return {
        v
        for made in fwd.made
        for v in made.values
        if y not in made.values
        if made.op in ops.AGAIN or ops.WORDS.get(made.op) in b.spec.train.recompute
    }


def _head(
    b: _Builder, x: str, row: Row, tied: str, rounds: int, full: set[str]
) -> UnitKind:
    """Build the head: train is forward, loss and backward in one, eval is forward and loss, in
    rounds.

    row: of the logits. An adapter's A runs before the rounds; its B adds to the logits in place.
    """
    *nodes, loss = b.nodes
    first = len(nodes) - 1 - len(row.adapters) - (row.cap > 0)
    before, wide = nodes[:first], nodes[first:]
    low = before[first - sum(len(adapter) - 1 for adapter in row.adapters) :]
    logits, m = loss.bind["x"], b.dims["M"] // rounds
    for node in wide:
        made = KERNELS[node.op.fwd.split()[0]].formals[0]
        node.bind |= dict.fromkeys((made.name, *made.alias), logits)
    for node in (*wide, loss):
        node.dims["M"] = m
    b.values[logits] = Value(logits, "real", m * b.dims["R"])
    mean = b.spec.train.loss_mean
    loss.bind["factor"] = "factor"
    b.values["factor"] = Value("factor", "f64", 1)
    train, plain = _Calls(b, full), _Calls(b, full)
    for calls in (train, plain):
        for node in before:
            calls.forward(node)
        if calls is train and mean == "micro_batch":
            calls.line(loss, ops.LOSS_FACTOR)
        calls.rounds, calls.parts = rounds, {logits}
        for node in wide:
            calls.forward(node)
    train.line(loss, ops.TRAIN_LOSS[mean][loss.op.name])
    plain.forward(loss)
    train.grads[logits] = logits
    for node in reversed(wide):
        train.backward(node)
    train.rounds = plain.rounds = 1
    train.line(loss, ops.LOSS_SUM[mean])
    plain.line(loss, ops.LOSS_SUM["tokens"])
    if not tied and b.spec.train.precision != "f32":
        for weight in sorted(full):
            train.round(weight)
    for node in reversed(before):
        train.backward(node)
    _draw(plain, low, wide)
    names = {x: "x", train.grads.get(x, ""): "dx"}
    bodies = {
        "train": _rename(train.body(), names),
        "eval": _rename(plain.body(), names),
    }
    return UnitKind(
        name="head",
        count=1,
        tensors=tuple(b.tensors),
        bodies=bodies,
        saved=(),
        x="x",
        y="",
        tied=tied,
    )


def _draw(calls: _Calls, low: Sequence[OpNode], wide: Sequence[OpNode]) -> None:
    """Append the calls for the logits of one row, from which a token is drawn. They are the same in
    every plan. Nothing is dropped."""
    linear = wide[0]
    row = ops.PICKED if calls.b.spec.own_blocks > 1 else "row"
    of = {linear.bind["x"]: row, linear.bind["y"]: "drawn"}
    drops = [node for node in low if node.op.name == "lora_dropout"]
    of |= {node.bind["y"]: row for node in drops}
    low = [node for node in low if node not in drops]
    of |= {node.bind["y"]: "low" for node in low}
    sizes = {row: linear.dims["K"]}
    sizes |= {of[n.bind["y"]]: n.dims["N"] for n in (*low, linear)}
    for name, size in sizes.items():
        calls.values[name] = Value(name, "real", size)
    calls.line(replace(linear, bind={**linear.bind, "row": row}), ops.PICK)
    for node in (*low, *wide):
        bind = {word: of.get(name, name) for word, name in node.bind.items()}
        calls.forward(replace(node, dims={**node.dims, "M": 1}, bind=bind))


def _branches(units: tuple[Unit, ...]) -> int:
    return sum(u.repeat * sum(op.kind == "residual" for op in u.ops) for u in units)


def _begun(
    spec: Spec,
    unit: Unit,
    dims: dict[str, int],
    tables: list[Table],
    below: bool,
    first: int = 0,
    begin: int = 0,
) -> _Builder:
    prefix = f"{unit.name}." if unit.kind == "blocks" else ""
    b = _Builder(
        spec,
        prefix,
        dims,
        tables,
        branches=max(1, _branches(spec.model.units)),
        count=unit.repeat,
        begin=begin,
        below=below,
        first=first,
    )
    b.values["in"] = Value("in", "real", dims["M"] * dims["C"])
    return b


def _layers(b: _Builder, unit: Unit) -> list[tuple[int, Unit]]:
    """Split an entry of blocks where the next layer has other parameter groups. Return the parts,
    each with its first layer."""
    y = "in"
    for op in unit.ops:
        y = _run(b, y, op)
    ends = [*sorted(b.cuts), unit.repeat]
    return [
        (
            first,
            replace(
                unit,
                repeat=end - first,
                name=unit.name.replace("{l}", f"{{l+{first}}}") if first else unit.name,
            ),
        )
        for first, end in itertools.pairwise([0, *ends])
    ]


def build(spec: Spec) -> Graph:
    """Return the graph of a spec, whose shapes were checked when it was read.

    Raises SpecError if a parameter group matches a tensor in part.
    """
    m, t = spec.model, spec.train
    dims = {
        "B": t.micro_batch,
        "T": t.sequence // t.sequence_blocks,
        "M": spec.rows,
        "C": m.width,
        "rows": spec.rows,
        "all_rows": spec.rows * t.sequence_blocks,
        "V": m.vocab,
        "R": ops.up(m.vocab, ops.VOCAB),
    }
    tables: list[Table] = []
    kinds: list[UnitKind] = []
    logits = m.units[-1].ops[-1].rows[-1]
    tied = logits.tied
    full: set[str] = set()  # tensors whose gradient is summed in f32
    acc = 0
    blocks, words, places = 0, set(), 0
    for begin, unit in [
        x
        for u in m.units
        for x in (
            _layers(_begun(spec, u, dims, tables, False), u)
            if u.kind == "blocks"
            else [(0, u)]
        )
    ]:
        below = any("bwd" in k.bodies for k in kinds)
        b = _begun(spec, unit, dims, tables, below, places, begin)
        if unit.kind == "embedding":
            y = _run(b, "", unit.ops[0])
            places = len(b.places)
            full = {tied} & b.moving
            kinds.append(_middle(b, "embed", 1, "", y, full))
            continue
        y = "in"
        for op in unit.ops[:-1] if unit.kind == "head" else unit.ops:
            y = _run(b, y, op)
        if unit.kind == "head":
            *_, last = logits, *(adapter[-1] for adapter in logits.adapters)
            elems = last.dims.get("n", dims["R"]) * last.dims["K"]
            rounds = chunks.rounds(
                spec, dims, 0 if tied else elems, "b" in logits.weights
            )
            y = b.row(logits, y)
            weight = [n.bind["w"] for n in b.nodes if "w" in n.bind][-1]
            full |= {weight} & b.moving if rounds > 1 else set()
            acc = elems if full and t.precision != "f32" else 0
            b.node(spec.loss.name, {"x": y}, {}, spec.loss.dims)
            kinds.append(_head(b, "in", logits, tied, rounds, full))
        else:
            name = "block" if blocks == 0 else f"block{blocks + 1}"
            made = _middle(b, name, unit.repeat, "in", y, full)
            kinds.append(quantize.kind(spec, made))
            words |= {ops.WORDS[n.op.name] for n in b.nodes}
            places += unit.repeat * len(b.places)
            blocks += 1
    return Graph(
        kinds=tuple(kinds),
        tables=tuple(tables),
        dims=dims,
        acc=acc,
        tied=tied,
        ops=frozenset(words),
    )
