"""units.py -- the model's keys to units of ops: defaults filled in, every shape and name checked.

Letters: C the model's width, V vocab, H heads, G key-value heads, D head size.
"""
from __future__ import annotations

import math
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Mapping, Sequence

from .node import Node, SpecError, dotted
from .schema import (DIM, ELEMS, LAYERS, Attention, Linear, Model, ModelKeys, Op, OpKeys, SpecKeys,
                     Unit, UnitKeys)

Path = tuple[str | int, ...]
TENSORS = 2 ** 20               # of a model: a weights' file lists them all
OPS = tuple(OpKeys.model_fields)
KINDS = ("embedding", "blocks", "head")


def fail(root: Node, path: Path, wrong: str, allowed: str) -> SpecError:
    """The error at a key; where it stands is the nearest thing above that is in the file."""
    return SpecError(f"{root.at(path).where}: {dotted(path)}: {wrong}; allowed: {allowed}")


@dataclass
class _Walk:
    """Goes through the units once; counts elements and tensors on the way."""
    root: Node
    model: ModelKeys
    prefix: str = ""            # of the unit's tensors
    repeat: int = 1
    elems: int = 0
    made: int = 0               # elements of all values in a row of the batch
    tensors: dict[str, None] = field(default_factory=dict)

    def fail(self, path: Path, wrong: str, allowed: str) -> SpecError:
        return fail(self.root, path, wrong, allowed)

    def tensor(self, path: Path, name: str, *shape: int) -> None:
        """One tensor, in every layer of the unit."""
        self.elems += math.prod(shape) * self.repeat
        if self.elems > ELEMS or len(self.tensors) + self.repeat > TENSORS:
            raise self.fail(path, f"the model grows beyond {ELEMS} elements or {TENSORS} tensors",
                            "a smaller model")
        for layer in range(self.repeat):
            full = (self.prefix + name).replace("{l}", str(layer))
            if full in self.tensors:
                raise self.fail(path, f"there is a tensor {full} already", "each name once")
            self.tensors[full] = None

    def width(self, path: Path, n: int) -> int:
        """n, the width of a value."""
        if n > DIM:
            raise self.fail(path, f"makes a value {n} wide", f"widths up to {DIM}")
        self.made += n * self.repeat
        return n

    def dense(self, path: Path, name: str, ins: int, out: int, bias: bool) -> None:
        self.tensor(path, f"{name}.weight", ins, out)
        if bias:
            self.tensor(path, f"{name}.bias", out)

    # ---- ops: the width that leaves, and the op with its defaults

    def ops(self, path: Path, keys: Sequence[OpKeys], x: int) -> tuple[int, tuple[Op, ...]]:
        made = []
        for i, op in enumerate(keys):
            x, done = self.op((*path, i), op, x)
            made.append(done)
        return x, tuple(made)

    def op(self, path: Path, keys: OpKeys, x: int) -> tuple[int, Op]:
        kinds = sorted(keys.model_fields_set)
        if len(kinds) != 1:
            raise self.fail(path, f"holds {len(kinds)} ops", "one of " + ", ".join(OPS))
        kind, inner = kinds[0], (*path, kinds[0])
        args: Mapping[str, object] = {}
        ops: tuple[Op, ...] = ()
        value = getattr(keys, kind)
        if kind == "residual":
            y, ops = self.ops(inner, value, x)
            if y != x:
                raise self.fail(inner, f"the branch begins {x} wide and ends {y} wide",
                                "a branch that keeps the width")
        elif kind == "attention":
            y, args = self.attention(inner, value, x)
        elif kind == "linear":
            y, args = self.linear(inner, value, x)
        elif kind == "gelu":
            y, args = x, {"kind": value}
        elif kind == "swiglu":
            if x % 2:
                raise self.fail(inner, f"its input is {x} wide",
                                "an even width: gate and up side by side")
            y = x // 2
        else:
            y, args = x, value.model_dump()
            self.tensor((*inner, "name"), f"{value.name}.weight", x)
            if args.get("bias"):
                self.tensor((*inner, "name"), f"{value.name}.bias", x)
        return self.width(inner, y), Op(kind, MappingProxyType(dict(args)), ops,
                                        self.root.at(inner).where)

    def attention(self, path: Path, a: Attention, x: int) -> tuple[int, Mapping[str, object]]:
        C, H = self.model.width, a.heads
        G = H if a.kv_heads is None else a.kv_heads
        if H % G:
            raise self.fail((*path, "kv_heads"), f"{G} does not divide heads {H}",
                            "a divisor of heads")
        if a.head_dim is None and C % H:
            raise self.fail((*path, "heads"), f"{H} does not divide width {C}",
                            "a divisor of width, or head_dim")
        D = C // H if a.head_dim is None else a.head_dim
        if D > 1024:
            raise self.fail((*path, "head_dim"), f"heads of {D}", "at most 1024 a head")
        if a.rope and D % 2:
            raise self.fail((*path, "rope"), f"turns pairs, and head_dim is {D}",
                            "rope with an even head_dim")
        scaling = a.rope and a.rope.scaling
        if scaling and scaling.low_freq_factor >= scaling.high_freq_factor:
            raise self.fail((*path, "rope", "scaling", "low_freq_factor"),
                            f"{scaling.low_freq_factor:g} is not below high_freq_factor "
                            f"{scaling.high_freq_factor:g}", "low_freq_factor < high_freq_factor")
        out = a.bias if a.out_bias is None else a.out_bias
        self.width(path, (H + 2 * G) * D)
        name = (*path, "name")
        if self.model.names == "gpt2":
            self.dense(name, f"{a.name}.c_attn", x, (H + 2 * G) * D, a.bias)
        else:
            for part, heads in zip("qkv", (H, G, G)):
                self.dense(name, f"{a.name}.{part}_proj", x, heads * D, a.bias)
        for part in "qk" if a.qk_norm else "":
            self.tensor(name, f"{a.name}.{part}_norm.weight", D)
        last = "c_proj" if self.model.names == "gpt2" else "o_proj"
        self.dense(name, f"{a.name}.{last}", H * D, C, out)
        rope = a.rope and a.rope.model_dump()
        if rope and rope["scaling"]:
            rope["scaling"] = MappingProxyType(rope["scaling"])
        return C, {**a.model_dump(), "kv_heads": G, "head_dim": D, "out_bias": out,
                   "rope": rope and MappingProxyType(rope)}

    def linear(self, path: Path, a: Linear, x: int) -> tuple[int, Mapping[str, object]]:
        if a.tied is not None:
            return self.tied(path, a, x)
        for key in ("name", "out"):
            if not getattr(a, key):
                raise self.fail((*path, key), "is missing",
                                "name and out, or in the head `tied: EMBEDDING` alone")
        if len(a.name) != len(a.out):
            raise self.fail((*path, "out"), f"{len(a.out)} widths for {len(a.name)} names",
                            "one width for each name")
        if len(a.name) > 1 and self.model.names == "gpt2":
            raise self.fail((*path, "name"), "several linears side by side need weights [out,in]",
                            "one name with `names: gpt2`, or `names: llama`")
        for name, out in zip(a.name, a.out):
            self.dense((*path, "name"), name, x, out, a.bias)
        return sum(a.out), a.model_dump()

    def tied(self, path: Path, a: Linear, x: int) -> tuple[int, Mapping[str, object]]:
        """The head's linear with the token embedding [V,C] as its weight."""
        others = sorted(a.model_fields_set - {"tied"})
        if others:
            raise self.fail((*path, others[0]), "says again what `tied` says, or against it",
                            "`tied` alone")
        embedding = self.model.units[0].embedding.tokens
        if a.tied != embedding:
            raise self.fail((*path, "tied"), f"there is no embedding '{a.tied}'", embedding)
        if path[-3] != "head":
            raise self.fail((*path, "tied"), "stands outside the head", "the last op of the head")
        if x != self.model.width:
            raise self.fail((*path, "tied"), f"its input is {x} wide",
                            f"the width of the embedding, {self.model.width}")
        return self.model.vocab, {**a.model_dump(), "out": (self.model.vocab,)}

    # ---- units

    def unit(self, path: Path, keys: UnitKeys) -> Unit:
        kind = next(k for k in KINDS if k in keys.model_fields_set)
        C, V = self.model.width, self.model.vocab
        self.prefix, self.repeat = "", 1
        if kind == "embedding":
            return Unit(kind, 1, "", (self.embedding((*path, kind), keys),))
        if kind == "head":
            x, ops = self.ops((*path, kind), keys.head, C)
            last = (*path, kind, len(ops) - 1)
            if ops[-1].kind != "linear" or ops[-1].args["out"] != (V,):
                raise self.fail(last, "the head does not end in a linear to the vocabulary",
                                f"a linear with out: {V}, or tied; the loss follows by itself")
            return Unit(kind, 1, "", ops)
        self.prefix, self.repeat = f"{keys.name}.", keys.blocks
        x, ops = self.ops((*path, "ops"), keys.ops, C)
        if x != C:
            raise self.fail((*path, "ops", len(ops) - 1), f"the block ends {x} wide",
                            f"the model's width, {C}")
        return Unit(kind, keys.blocks, keys.name, ops)

    def embedding(self, path: Path, keys: UnitKeys) -> Op:
        e = keys.embedding
        self.tensor((*path, "tokens"), f"{e.tokens}.weight", self.model.vocab, self.model.width)
        if (e.positions is None) != (e.context is None):
            alone = "positions" if e.context is None else "context"
            raise self.fail((*path, alone), "comes alone", "positions and context, or neither")
        if e.positions is not None:
            self.tensor((*path, "positions"), f"{e.positions}.weight", e.context, self.model.width)
        return Op("embedding", MappingProxyType(e.model_dump()), (), self.root.at(path).where)


def _order(walk: _Walk, units: Sequence[UnitKeys]) -> None:
    """embedding, blocks ..., head; and no unit with the keys of another."""
    path: Path = ("model", "units")
    kinds = []
    for i, unit in enumerate(units):
        found = unit.model_fields_set
        kind = [k for k in KINDS if k in found]
        if len(kind) != 1:
            raise walk.fail((*path, i), f"holds {len(kind)} kinds of unit",
                            "one of embedding, blocks, head")
        want = {"blocks", "name", "ops"} if kind == ["blocks"] else set(kind)
        for key in sorted(found ^ want):
            if key in found:
                raise walk.fail((*path, i, key), f"does not belong to {kind[0]}",
                                "name and ops beside blocks")
            raise walk.fail((*path, i, key), "is missing", "blocks: LAYERS, name and ops")
        kinds += kind
    want = ["embedding", *["blocks"] * max(1, len(kinds) - 2), "head"]
    if kinds != want:
        bad = next(i for i, w in enumerate(want) if i >= len(kinds) or kinds[i] != w)
        there = kinds[bad] if bad < len(kinds) else "nothing"
        raise walk.fail((*path, bad), f"{there} stands where {want[bad]} should",
                        "one embedding, then one or more blocks, then one head")


def _matched(walk: _Walk, path: tuple[str | int, ...], pattern: str) -> set[str]:
    """The tensors that a pattern names."""
    found = {name for name in walk.tensors if fnmatchcase(name, pattern)}
    if not found:
        near = next((f" ({name} is one)" for name in walk.tensors if pattern in name), "")
        raise walk.fail(path, f"'{pattern}' matches no tensor{near}",
                        "a pattern of tensors' names, like '*.bias'")
    return found


def build(keys: SpecKeys, root: Node) -> tuple[Model, tuple[str, ...]]:
    """The model of a spec whose keys are right one by one, and notes of groups of its tensors;
    SpecError where they do not fit."""
    m, train = keys.model, keys.train
    walk = _Walk(root, m)
    _order(walk, m.units)
    layers = sum(u.blocks or 0 for u in m.units)
    if layers > LAYERS:
        at = max(range(len(m.units)), key=lambda i: m.units[i].blocks or 0)
        raise fail(root, ("model", "units", at, "blocks"), f"{layers} layers in all",
                   f"up to {LAYERS}")
    units = tuple(walk.unit(("model", "units", i), u) for i, u in enumerate(m.units))
    embedding = m.units[0].embedding
    if embedding.context is not None and embedding.context < train.sequence:
        raise fail(root, ("model", "units", 0, "embedding", "context"),
                   f"{embedding.context} positions for a sequence of {train.sequence}",
                   "context >= train.sequence")
    rows = train.micro_batch * train.sequence
    if rows > DIM or rows * walk.made > ELEMS:
        raise fail(root, ("train", "micro_batch"),
                   f"{rows} rows (micro_batch x sequence) of {walk.made} elements are too many",
                   f"up to {DIM} rows and {ELEMS} elements")
    for i, pattern in enumerate(keys.zero.replicate):
        _matched(walk, ("zero", "replicate", i), pattern)
    notes, taken = [], set()
    for i, group in enumerate(train.optimizer.groups):
        path, mine = ("train", "optimizer", "groups", i, "match"), set()
        for j, pattern in enumerate(group.match):
            mine |= _matched(walk, (*path, j), pattern)
        if mine <= taken:
            notes.append(f"{root.at(path).where}: {dotted(path)}: has no effect: earlier groups "
                         "have every tensor that it matches")
        taken |= mine
    return Model(m.vocab, m.width, m.names, units), tuple(notes)
