"""model.py -- Spec to graph: units of ops with parameters; backward by the op table's rules.

A unit kind (embedding, each blocks entry, head) becomes up to four functions, lists of kernel calls
over named operands: fwd, bwd, and for the head train (forward, loss, backward in one) and eval.
What `train.recompute` names is not saved: bwd makes it again, by forward's own calls.
Nothing here knows of ranks, shards or memory.
"""
from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Iterable, Mapping

from . import chunks, moves, ops, rewrite
from .graph import Body, Call, Graph, Kind, Tensor, Value
from .rope import Table, frequencies
from .spec import Op as SpecOp
from .spec import Spec, Unit


@dataclass
class _Node:
    op: ops.Op
    dims: dict[str, object]
    bind: dict[str, str]             # the op's names -> values and parameters
    scale: float = 1.0


@dataclass
class _Builder:
    """Collects the nodes of one unit."""
    spec: Spec
    prefix: str
    dims: dict[str, int]
    tables: list[Table]
    nodes: list[_Node] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    values: dict[str, Value] = field(default_factory=dict)
    width: dict[str, int] = field(default_factory=dict)
    branches: int = 1
    count: int = 1
    below: bool = False              # something below the unit moves
    cuts: set[int] = field(default_factory=set)     # layers that have other groups than the last

    @property
    def moving(self) -> set[str]:
        return {t.name for t in self.tensors if not t.group[2]}

    def alive(self, *more: str) -> set[str]:
        """What has a gradient; more: of other units' tensors, what moves."""
        x = {"in"} if self.below or self.count > 1 and self.moving else set()
        return moves.live(self.nodes, self.moving | x | {*more})

    def tensor(self, local: str, shape: tuple[int, ...], mean: float, std: float,
               parts: Iterable[tuple[str, int]] = ()) -> str:
        full = f"{self.prefix}{local}"
        named = tuple((f"{self.prefix}{n}", r) for n, r in parts) or ((full, shape[0]),)
        groups = [moves.group(self.spec, full, named, shape, l) for l in range(self.count)]
        self.cuts |= {l for l in range(1, self.count) if groups[l] != groups[l - 1]}
        self.tensors.append(Tensor(full, named, shape, mean, std, groups[0]))
        return full

    def node(self, name: str, ins: dict[str, str], params: dict[str, str],
             dims: dict[str, object]) -> str:
        """Appends an op; returns the name of its first output."""
        op = ops.OPS[name]
        full = {**self.dims, **dims}
        bind = {**ins, **params}
        for out in op.outs:
            bind[out.name] = f"{out.name}{len(self.nodes)}"
            made = Value(bind[out.name], out.dtype, ops.product(full, out.dims))
            self.values[made.name] = made
        self.nodes.append(_Node(op, full, bind))
        first = bind[op.outs[0].name]
        self.width[first] = self.values[first].elems // self.dims["M"]
        return first

    def linear(self, x: str, names: tuple[str, ...], outs: tuple[int, ...], bias: bool,
               std: float) -> str:
        """A linear over one or several named weights (rows one after the other)."""
        k, n = self.width[x], sum(outs)
        layout = ops.LAYOUT[self.spec.model.names]
        shape = (n, k) if layout else (k, n)
        parts = [(f"{m}.weight", o if layout else k) for m, o in zip(names, outs)]
        params = {"w": self.tensor("+".join(names) + ".weight", shape, 0.0, std, parts)}
        if bias:
            parts = [(f"{m}.bias", o) for m, o in zip(names, outs)]
            params["b"] = self.tensor("+".join(names) + ".bias", (n,), 0.0, 0.0, parts)
        return self.node("linear", {"x": x}, params, {"N": n, "K": k, "layout": layout})

    def logits(self, x: str, args: Mapping[str, object]) -> str:
        """The head's linear: [V, C] in every family, as an embedding and Hugging Face's lm_head."""
        k, n = self.width[x], self.dims["R"]
        params = {"w": f"{args['tied']}.weight"}
        for name in args["name"]:                                   # type: ignore[attr-defined]
            params["w"] = self.by_token(f"{name}.weight", (k,), STD)
            if args["bias"]:
                params["b"] = self.by_token(f"{name}.bias", (), 0.0)
        return self.node("linear", {"x": x}, params, {"N": n, "K": k, "layout": 1})

    def by_token(self, name: str, row: tuple[int, ...], std: float) -> str:
        return self.tensor(name, (self.dims["R"], *row), 0.0, std, [(name, self.dims["V"])])


STD = 0.02


def _attention(b: _Builder, x: str, args: dict, std: float) -> str:
    """q k v linear, norms and turns of q and k, attention, output linear."""
    H, G, D = int(args["heads"]), int(args["kv_heads"]), int(args["head_dim"])
    name, gpt = str(args["name"]), b.spec.model.names == "gpt2"
    dims: dict[str, object] = {"H": H, "G": G, "D": D, "E": (H + 2 * G) * D, "J": H + G, "Q": H * D,
                               "scale": 1.0 / math.sqrt(D), "eps": args["eps"]}
    if gpt:
        y = b.linear(x, (f"{name}.c_attn",), ((H + 2 * G) * D,), bool(args["bias"]), STD)
    else:
        names = tuple(f"{name}.{p}_proj" for p in "qkv")
        y = b.linear(x, names, (H * D, G * D, G * D), bool(args["bias"]), STD)
    if args["qk_norm"]:
        both = {f"w{p}": b.tensor(f"{name}.{p}_norm.weight", (D,), 1.0, 0.0) for p in "qk"}
        y = b.node("qknorm", {"x": y}, both, dims)
    if args["rope"]:
        rope = dict(args["rope"])
        scaling = tuple(dict(rope["scaling"] or {}).items())
        table = Table(D, frequencies(rope["theta"], scaling, D))
        if table not in b.tables:
            b.tables.append(table)
        y = b.node("rope", {"x": y}, {}, {**dims, "table": f"table.{b.tables.index(table)}"})
    y = b.node("attention", {"x": y}, {}, dims)
    out = f"{name}.c_proj" if gpt else f"{name}.o_proj"
    return b.linear(y, (out,), (b.dims["C"],), bool(args["out_bias"]), std)


def _run(b: _Builder, x: str, op: SpecOp, std: float) -> str:
    """Appends what one op of the spec stands for; returns its output."""
    args = dict(op.args)
    if op.kind == "residual":
        y = x
        for i, child in enumerate(op.ops):
            last = i == len(op.ops) - 1     # it starts smaller: GPT-2, section 2.3
            y = _run(b, y, child, STD / math.sqrt(b.branches) if last else STD)
        return b.node("add", {"a": x, "b": y}, {}, {"n": b.dims["M"] * b.dims["C"]})
    if op.kind in ("layernorm", "rmsnorm"):
        params = {"w": b.tensor(f"{args['name']}.weight", (b.width[x],), 1.0, 0.0)}
        if op.kind == "layernorm" and args["bias"]:
            params["b"] = b.tensor(f"{args['name']}.bias", (b.width[x],), 0.0, 0.0)
        return b.node(op.kind, {"x": x}, params, {"C": b.width[x], "eps": args["eps"]})
    if op.kind == "attention":
        return _attention(b, x, args, std)
    if op.kind == "linear":
        return b.linear(x, args["name"], args["out"], bool(args["bias"]), std)
    if op.kind == "gelu":
        return b.node("gelu", {"x": x}, {}, {"F": b.width[x], "n": b.dims["M"] * b.width[x],
                                             "kind": ops.KINDS[str(args["kind"])]})
    return b.node("swiglu", {"x": x}, {}, {"F": b.width[x] // 2})


class _Calls:
    """Turns nodes into calls, forward or backward."""

    def __init__(self, b: _Builder, full: set[str]) -> None:
        self.b, self.full, self.alive = b, full, b.alive(*full)
        self.calls: list[Call] = []
        self.made: list[tuple[str, set[str], list[Call]]] = []      # forward: op, values, calls
        self.values: dict[str, Value] = dict(b.values)
        self.params = {t.name for t in b.tensors}
        self.grads: dict[str, str] = {}
        self.had: dict[str, str | None] = {}     # a line's gradients, before it
        self.rounds, self.part = 1, ""          # of the calls to come; what holds a round's rows

    def operand(self, node: _Node, word: str) -> tuple[str, object]:
        if word in ("token", "target", "sums", "null"):
            return ("fixed", word)
        if word == "scaler":
            return ("fixed", word if self.b.spec.train.precision == "f16" else "null")
        if word.startswith("$"):
            return ("work", ops.value(node.op.work[word], node.dims))
        if word.lstrip("-").isdigit():
            return ("number", int(word))
        if word == "table":
            return ("fixed", node.dims["table"])
        if word == "full":
            weight = node.bind.get("w") or node.bind.get("wte", "")
            return ("number", int(weight in self.full))
        if word == "carry":
            return ("number", 0) if self.rounds == 1 else ("round", "c")
        if word in node.op.params:
            return ("param", node.bind[word]) if word in node.bind else ("fixed", "null")
        if word.startswith("d") and word[1:] in node.op.params:
            name = node.bind.get(word[1:])
            name = name if name in self.alive else None
            wide = name in self.full and self.b.spec.train.precision != "f32"
            return ("fixed", "acc") if wide else ("grad", name) if name else ("fixed", "null")
        if word in node.bind:
            return ("value", node.bind[word])
        if word.startswith("+"):
            old = self.had[word[1:]]
            return ("value", old) if old else ("fixed", "null")
        if word.startswith("d") and word[1:] in node.bind:
            return ("value", self.grads[node.bind[word[1:]]])
        return ("number", node.dims[word])

    def line(self, node: _Node, text: str, flops: int = 0) -> None:
        words = text.split()
        if words[0].startswith("?"):
            if words[0][1:] not in node.bind:
                return
            words = words[1:]
        args = tuple(self.operand(node, w) for w in words[1:])
        grow = tuple(self.growth(*a) for a in args) if self.rounds > 1 else ()
        self.calls.append(Call(words[0], args, flops, self.rounds, grow))

    def growth(self, kind: str, name: object) -> int:
        """Bytes of a round's rows of an operand."""
        if kind != "value" or name == self.part:
            return 4 * self.b.dims["M"] // self.rounds if name == "target" else 0
        v = self.values[str(name)]
        width = ops.BYTES[self.b.spec.train.precision] if v.dtype == "real" else 4
        return width * v.elems // self.rounds

    def forward(self, node: _Node) -> None:
        first = len(self.calls)
        for text in node.op.fwd:
            self.line(node, text, ops.value(node.op.flops, node.dims))
        outs = {node.bind[out.name] for out in node.op.outs}
        self.made.append((node.op.name, outs, self.calls[first:]))

    def gradient(self, name: str, node: _Node) -> None:
        """A fresh value for the gradient of `name`, or a sum with what is there already."""
        fresh = f"d{name}" + "'" * sum(v.startswith(f"d{name}") for v in self.values)
        self.values[fresh] = Value(fresh, "real", self.values[name].elems)
        self.grads[name] = fresh

    def backward(self, node: _Node) -> None:
        flops = ops.value(node.op.flops, node.dims)
        for text in node.op.bwd:
            words = text.split()
            if not moves.wanted(node, words, self.alive):
                continue
            if words[0] == "pass":
                self.merge(node.bind[words[1][1:]], self.grads[node.bind[words[2][1:]]], node)
                continue
            made = [w for w in words if w[0] == "d" and w[1:] in node.op.ins]
            self.had = {w: self.grads.get(node.bind[w[1:]]) for w in made}
            for w in made:
                self.gradient(node.bind[w[1:]], node)
            # a bias' gradient is no product; a linear's two are a line each
            products = 0 if words[0][0] == "?" else 1 if words[0].startswith("zk_linear") else 2
            self.line(node, text, products * flops)
            for w, old in self.had.items():
                if old and f"+{w}" not in words:
                    new = self.grads[node.bind[w[1:]]]
                    self.grads[node.bind[w[1:]]] = old
                    self.merge(node.bind[w[1:]], new, node)
                if node.bind[w[1:]] not in self.alive:      # a kernel makes it all the same
                    del self.grads[node.bind[w[1:]]]

    def merge(self, name: str, more: str, node: _Node) -> None:
        """Adds the gradient `more` to that of the value `name` (the first use: takes it as it
        is)."""
        old = self.grads.get(name)
        if not old:
            self.grads[name] = more
            return
        self.gradient(name, node)
        n = self.values[more].elems
        self.calls.append(Call("zk_add", (("value", self.grads[name]), ("value", old),
                                          ("value", more), ("number", n))))

    def round(self, name: str) -> None:
        """A whole gradient, from the f32 sum to its leaf."""
        elems = next(t.elems for t in self.b.tensors if t.name == name)
        self.calls.append(Call("zk_round", (("grad", name), ("fixed", "acc"), ("number", elems))))

    def body(self) -> Body:
        calls = rewrite.fused(self.calls)
        used = rewrite.values(calls)
        return Body(tuple(calls), tuple(v for n, v in self.values.items() if n in used))


def _rename(body: Body, names: dict[str, str]) -> Body:
    swap = lambda a: (a[0], names.get(a[1], a[1])) if a[0] == "value" else a
    calls = tuple(replace(c, args=tuple(swap(a) for a in c.args)) for c in body.calls)
    return Body(calls, tuple(replace(v, name=names.get(v.name, v.name)) for v in body.values))


def _middle(b: _Builder, name: str, count: int, x: str, y: str, full: set[str]) -> Kind:
    """An embedding or a block: fwd and, where something moves up to its output, bwd, dy to dx."""
    fwd, bwd = _Calls(b, full), _Calls(b, full)
    for node in b.nodes:
        fwd.forward(node)
    names = {x: "x", y: "y"}
    names.pop("", None)
    if y not in bwd.alive:
        return Kind(name, count, tuple(b.tensors), {"fwd": _rename(fwd.body(), names)}, (),
                    "x" if x else "", "y")
    bwd.values["dy"] = Value("dy", "real", b.values[y].elems)
    bwd.grads[y] = "dy"
    for node in reversed(b.nodes):
        bwd.backward(node)
    if not x and full and b.spec.train.precision != "f32":   # a tied leaf is whole: round it once
        bwd.round(*full)
    kept = (rewrite.values(fwd.calls) & rewrite.values(bwd.calls)) - _dropped(b, fwd) | {x, y}
    kept -= rewrite.again(fwd, bwd.calls, kept)[1]  # an op runs again whole and keeps no value
    bwd.calls, _ = rewrite.again(fwd, bwd.calls, kept)
    forward = _rename(fwd.body(), names)
    back = _rename(bwd.body(), {**names, bwd.grads.get(x, ""): "dx"})
    saved = tuple(v for v in forward.values if v.name in kept - {x, y})
    return Kind(name, count, tuple(b.tensors), {"fwd": forward, "bwd": back}, saved,
                "x" if x else "", "y")


def _dropped(b: _Builder, fwd: _Calls) -> set[str]:
    """The values of the ops that train.recompute names."""
    return {v for op, made, _ in fwd.made for v in made if ops.WORDS.get(op) in
            b.spec.train.recompute}


def _head(b: _Builder, x: str, logits: str, tied: str, rounds: int, full: set[str]) -> Kind:
    """The head: train is forward, loss and backward in one, eval forward and loss, in rounds."""
    *before, linear, loss = b.nodes
    weight = linear.bind["w"]
    linear.dims["M"] = loss.dims["M"] = m = b.dims["M"] // rounds
    b.values[logits] = Value(logits, "real", m * b.dims["R"])
    train, plain = _Calls(b, full), _Calls(b, full)
    for calls in (train, plain):
        for node in before:
            calls.forward(node)
        calls.rounds, calls.part = rounds, logits
        calls.forward(linear)
    train.line(loss, ops.TRAIN_LOSS)
    plain.forward(loss)
    train.grads[logits] = logits
    train.backward(linear)
    train.rounds = plain.rounds = 1
    train.line(loss, ops.LOSS_SUM)
    plain.line(loss, ops.LOSS_SUM)
    if weight in full and not tied and b.spec.train.precision != "f32":
        train.round(weight)
    for node in reversed(before):
        train.backward(node)
    _draw(plain, linear)
    names = {x: "x", train.grads.get(x, ""): "dx"}
    bodies = {"train": _rename(train.body(), names), "eval": _rename(plain.body(), names)}
    return Kind("head", 1, tuple(b.tensors), bodies, (), "x", "", tied)


def _draw(calls: _Calls, linear: _Node) -> None:
    """The logits of one row, from which a token is drawn: in every plan by the same calls."""
    for name, size in (("row", linear.dims["K"]), ("drawn", calls.b.dims["R"])):
        calls.values[name] = Value(name, "real", int(str(size)))
    calls.line(replace(linear, bind={**linear.bind, "row": "row"}), ops.PICK)
    calls.forward(replace(linear, dims={**linear.dims, "M": 1},
                          bind={**linear.bind, "x": "row", "y": "drawn"}))


def _branches(units: tuple[Unit, ...]) -> int:
    return sum(u.repeat * sum(op.kind == "residual" for op in u.ops) for u in units)


def _begun(spec: Spec, unit: Unit, dims: dict[str, int], tables: list[Table],
           below: bool) -> _Builder:
    prefix = f"{unit.name}." if unit.kind == "blocks" else ""
    b = _Builder(spec, prefix, dims, tables, branches=max(1, _branches(spec.model.units)),
                 count=unit.repeat, below=below)
    b.values["in"] = Value("in", "real", dims["M"] * dims["C"])
    b.width["in"] = dims["C"]
    return b


def _layers(b: _Builder, unit: Unit) -> list[Unit]:
    """An entry of blocks, cut where the next layer has other groups."""
    y = "in"
    for op in unit.ops:
        y = _run(b, y, op, STD)
    ends = [*sorted(b.cuts), unit.repeat]
    return [replace(unit, repeat=end - first, name=unit.name.replace("{l}", f"{{l+{first}}}")
                    if first else unit.name) for first, end in zip([0, *ends], ends)]


def build(spec: Spec) -> Graph:
    """The graph of a spec. Shapes were checked where the spec was read."""
    m, t = spec.model, spec.train
    dims = {"B": t.micro_batch, "T": t.sequence, "M": t.micro_batch * t.sequence, "C": m.width,
            "rows": t.micro_batch * t.sequence, "V": m.vocab, "R": ops.up(m.vocab, ops.VOCAB)}
    tables: list[Table] = []
    kinds: list[Kind] = []
    tied = next((f"{op.args['tied']}.weight" for u in m.units for op in u.ops
                 if op.kind == "linear" and op.args["tied"]), "")
    full: set[str] = set()              # tensors whose gradient is summed in f32
    acc = 0
    blocks, words = 0, set()
    for unit in [x for u in m.units for x in (
            _layers(_begun(spec, u, dims, tables, False), u) if u.kind == "blocks" else [u])]:
        b = _begun(spec, unit, dims, tables, any("bwd" in k.bodies for k in kinds))
        if unit.kind == "embedding":
            args = unit.ops[0].args
            params = {"wte": b.by_token(f"{args['tokens']}.weight", (m.width,), STD)}
            if args["positions"]:
                params["wpe"] = b.tensor(f"{args['positions']}.weight",
                                         (int(args["context"]), m.width), 0.0, STD / 2)
            y = b.node("embed", {}, params, {"P": args["context"]})
            full = {tied} & b.moving
            kinds.append(_middle(b, "embed", 1, "", y, full))
            continue
        y = "in"
        for op in unit.ops[:-1] if unit.kind == "head" else unit.ops:
            y = _run(b, y, op, STD)
        if unit.kind == "head":
            rounds = chunks.rounds(spec, dims, bool(tied), bool(unit.ops[-1].args["bias"]))
            width, y = b.width[y], b.logits(y, unit.ops[-1].args)
            full |= {b.nodes[-1].bind["w"]} & b.moving if rounds > 1 else set()
            acc = dims["R"] * width if full and t.precision != "f32" else 0
            b.node("loss", {"x": y}, {}, {})
            kinds.append(_head(b, "in", y, tied, rounds, full))
        else:
            name = "block" if blocks == 0 else f"block{blocks + 1}"
            kinds.append(_middle(b, name, unit.repeat, "in", y, full))
            words |= {ops.WORDS[n.op.name] for n in b.nodes}
            blocks += 1
    return Graph(tuple(kinds), tuple(tables), dims, acc, tied, frozenset(words))
