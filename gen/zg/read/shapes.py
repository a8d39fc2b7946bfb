"""shapes.py -- turns the ops of a model into rows of the op table, and checks shapes and names.

No other module computes shapes: the graph is built from these rows. Letters are those of
facts/ops.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from types import MappingProxyType
from typing import Any, NamedTuple

from ..facts import ops
from ..facts.families import FAMILIES
from ..facts.rope import Rotation, grown, stretched
from ..facts.rope import fields as numbers_of
from .keyplace import KeyPlace, fail, typed
from .keytypes import ALL_LINEAR, DIM, ELEMS, Windows
from .node import Ints, Mistakes, Path, dotted
from .schema import (
    Attention,
    Bare,
    Embedding,
    LayerNorm,
    Linear,
    LocalRope,
    Lora,
    ModelKeys,
    Op,
    OpKeys,
    RmsNorm,
    Rope,
    Row,
    Weight,
)

TENSORS = 2**20  # most tensors of a model: a weights' file lists them all
OPS = tuple(OpKeys.model_fields)
Turning = Mapping[
    str, Any
]  # rotary positions of heads: the keys of a Rope or a LocalRope
# Keys of a scaling, each below the other.
RISING = (("low_freq_factor", "high_freq_factor"), ("beta_slow", "beta_fast"))


class Heads(NamedTuple):
    """Heads of an attention: H query heads, G key and G value heads, each D wide."""

    H: int
    G: int
    D: int

    @property
    def widths(self) -> tuple[int, int, int]:
        """Widths of all q, all k and all v heads."""
        return self.H * self.D, self.G * self.D, self.G * self.D

    def dims(self, a: Attention, factor: float) -> Mapping[str, Any]:
        """Return the dims of attention rows. factor: scale of queries and of keys from their rotary
        positions."""
        H, G, D = self
        return {
            "H": H,
            "G": G,
            "D": D,
            "E": sum(self.widths),
            "J": H + G,
            "Q": H * D,
            "scale": factor * factor * a.scale
            if a.scale
            else factor * factor / math.sqrt(D),
            "eps": a.eps,
        }


class Made(NamedTuple):
    """Result of an op: its output width, its keys with defaults, and its rows or inner ops."""

    width: int
    args: Mapping[str, object]
    rows: tuple[Row, ...] = ()
    ops: tuple[Op, ...] = ()


@dataclass
class Walk:
    """Walks through the units once and counts elements and tensors."""

    model: ModelKeys
    sequence: int
    packed: bool  # documents end, and positions start anew
    lora: Lora | None = None
    dropout: float = 0.0
    attention_dropout: float = 0.0
    blocks: int = 1  # of a sample
    prefix: str = ""  # prefix of the unit's tensors
    repeat: int = 1
    last: Path = ()  # path of the op that computes the logits
    elems: int = 0
    made: int = 0  # elements of all values per row of the batch
    tensors: dict[str, None] = field(default_factory=dict)
    # linears that may have adapters, and whether they are others than that of the logits
    linears: dict[str, bool] = field(default_factory=dict)
    adapted: set[str] = field(default_factory=set)  # linears with adapters

    def __post_init__(self) -> None:
        self.family = FAMILIES[self.model.names]
        said = self.lora and self.lora.match
        self.match = said or self.family.lora

    def width(self, at: KeyPlace, n: int) -> int:
        """Return n, the width of a value, after checking and counting it."""
        if n > DIM:
            raise at.fail(f"is {n} wide", f"widths up to {DIM}")
        self.made += n * self.repeat
        return n

    # ---- tensors

    def tensor(
        self,
        at: KeyPlace,
        names: Sequence[str],
        what: str,
        rows: Sequence[int],
        shape: Ints,
    ) -> Weight:
        """Return the tensors NAME.WHAT, one after the other, in every layer of the unit."""
        row = math.prod(shape[1:])
        self.elems += sum(rows) * row * self.repeat
        count = len(self.tensors) + len(names) * self.repeat
        if self.elems > ELEMS or count > TENSORS:
            raise at.fail(
                f"the model has more than {ELEMS} elements or {TENSORS} tensors",
                "a smaller model",
            )
        parts = [f"{name}.{what}" for name in names]
        for part in parts:
            self.claim(at, part)
        joined = "+".join(names)
        return Weight(f"{joined}.{what}", tuple(zip(parts, rows, strict=True)), shape)

    def claim(self, at: KeyPlace, name: str) -> None:
        """Refuse a second tensor of the same name."""
        for layer in range(self.repeat):
            full = (self.prefix + name).replace("{l}", str(layer))
            if full in self.tensors:
                raise at.fail(f"there is already a tensor {full}", "each name once")
            self.tensors[full] = None

    def vector(self, at: KeyPlace, name: str, what: str, width: int) -> Weight:
        return self.tensor(at, [name], what, [width], (width,))

    def by_token(self, at: KeyPlace, name: str, what: str, *row: int) -> Weight:
        """Return a weight with a row per token, padded when stored."""
        V = self.model.vocab
        stored = ops.up(V, ops.VOCAB)
        return self.tensor(at, [name], what, [V], (stored, *row))

    def dense(
        self,
        at: KeyPlace,
        names: Sequence[str],
        x: int,
        outs: Sequence[int],
        bias: bool,
    ) -> Row:
        """Return the row of a linear, or of several side by side."""
        out = sum(outs)
        if self.family.out_in:
            w = self.tensor(at, names, "weight", outs, (out, x))
        else:
            w = self.tensor(at, names, "weight", [x], (x, out))
        weights = {"w": w}
        if bias:
            weights["b"] = self.tensor(at, names, "bias", outs, (out,))
        row = _linear(out, x, self.family.out_in, weights)
        return replace(row, adapters=tuple(self.adapters(at, names, x, outs)))

    def adapters(
        self,
        at: KeyPlace,
        names: Sequence[str],
        x: int,
        outs: Sequence[int],
        pad: int = 1,
        inner: bool = True,
    ) -> Iterator[tuple[Row, ...]]:
        """Yield the adapters of the linears that train.lora names. inner: they do not compute the
        logits."""
        wide, begin = ops.up(sum(outs), pad), 0
        for name, n in zip(names, outs, strict=True):
            self.linears[self.prefix + name] = inner
            every = inner and ALL_LINEAR in self.match
            if self.lora and (every or ends(name, self.match)):
                self.adapted.add(name)
                up = {"N": wide, "at": begin, "n": n}
                yield self.adapter(at, self.lora, name, x, up)
            begin += n

    def adapter(
        self, at: KeyPlace, lora: Lora, name: str, x: int, up: Mapping[str, int]
    ) -> tuple[Row, ...]:
        """Return the rows of y += scale * B (A dropout(x)), on this linear's columns of y."""
        group = group_of(lora, name)
        path: Path = ("train", "lora")
        if group is not None and lora.groups[group].rank:
            path = (*path, "groups", group)
        lora = sized(lora, group)
        r, n = lora.rank, up["n"]
        if r > min(x, n):
            raise fail(
                at.root,
                (*path, "rank"),
                f"{r} is too large for {name}, which has {x} inputs and {n} outputs",
                f"up to {min(x, n)}",
            )
        self.width(at, r)
        down = self.tensor(at, [f"{name}.lora_A"], "weight", [r], (r, x))
        back = self.tensor(at, [f"{name}.lora_B"], "weight", [n], (n, r))
        scaled = {**up, "K": r, "scale": lora.scale}
        return (
            *self.dropped(at, x, lora.dropout, "lora_dropout"),
            _linear(r, x, True, {"w": down}),
            Row("lora", scaled, {"w": back}),
        )

    # ---- ops

    def ops(
        self, at: KeyPlace, keys: Sequence[OpKeys], x: int
    ) -> tuple[int, tuple[Op, ...]]:
        """Return the output width and the ops with their defaults. The width stays known after a
        residual that is wrong; after any other op the walk ends."""
        made, wrong = [], Mistakes()
        for i, op in enumerate(keys):
            done = wrong.of(self.op, at / i, op, x)
            if done:
                x = done[0]
                made.append(done[1])
            elif op.residual is None:
                break
        wrong.end()
        return x, tuple(made)

    def op(self, at: KeyPlace, keys: OpKeys, x: int) -> tuple[int, Op]:
        """Return the output width of an op, and the op with its defaults and rows."""
        kinds = sorted(keys.model_fields_set)
        if len(kinds) != 1:
            raise at.fail(f"has {len(kinds)} ops", "one of " + ", ".join(OPS))
        kind = kinds[0]
        value = getattr(keys, kind)
        walk = _OPS.get(kind)
        made = walk(self, at / kind, value, x) if walk else self.bare(kind, x)
        width = self.width(at / kind, made.width)
        return width, Op(kind, _frozen(made.args), made.ops, made.rows)

    def residual(self, at: KeyPlace, keys: Sequence[OpKeys], x: int) -> Made:
        y, inner = self.ops(at, keys, x)
        if y != x:
            raise at.fail(
                f"the branch's input is {x} wide and its output {y}",
                "a branch whose output is as wide as its input",
            )
        return Made(x, {}, self.dropped(at, x, self.dropout), inner)

    def parallel(self, at: KeyPlace, keys: Sequence[Sequence[OpKeys]], x: int) -> Made:
        made, wrong = [], Mistakes()
        for i, branch in enumerate(keys):
            made += [wrong.of(self.ops, at / i, branch, x)]
        wrong.end()
        widths = [done[0] for done in made if done]
        for i, width in enumerate(widths):
            if width != widths[0]:
                raise (at / i).fail(
                    f"the branch's output is {width} wide, and that of the first "
                    f"{widths[0]}",
                    "branches with outputs of one width, which are added",
                )
        branches = [Op("branch", {}, done[1]) for done in made if done]
        return Made(widths[0], {}, (), tuple(branches))

    def dropped(
        self, at: KeyPlace, x: int, p: float, name: str = "dropout"
    ) -> tuple[Row, ...]:
        """Return the row of a dropout of a value with probability p, if that is not 0."""
        if not p:
            return ()
        tokens = self.sequence // self.blocks
        return (Row(name, {"n": tokens * self.width(at, x), "p": p}),)

    def layernorm(self, at: KeyPlace, a: LayerNorm, x: int) -> Made:
        words = {"w": "weight"} if a.weight else {}
        words |= {"b": "bias"} if a.bias else {}
        weights = {
            w: self.vector(at / "name", a.name, what, x) for w, what in words.items()
        }
        return _made(x, a, Row("layernorm", {"C": x, "eps": a.eps}, weights))

    def rmsnorm(self, at: KeyPlace, a: RmsNorm, x: int) -> Made:
        weight = self.vector(at / "name", a.name, "weight", x)
        name = "rmsnorm1" if a.one_plus else "rmsnorm"
        return _made(x, a, Row(name, {"C": x, "eps": a.eps}, {"w": weight}))

    def gelu(self, at: KeyPlace, kind: str, x: int) -> Made:
        row = Row("gelu", {"F": x, "kind": ops.KINDS[kind]})
        return Made(x, {"kind": kind}, (row,))

    def scale(self, at: KeyPlace, factor: float, x: int) -> Made:
        return Made(x, {"factor": factor}, (_scale(factor),))

    def bare(self, kind: str, x: int) -> Made:
        """Return an op without settings and tensors that keeps the width."""
        return Made(x, {}, (Row(kind, {"F": x}),))

    def swiglu(self, at: KeyPlace, a: Bare, x: int) -> Made:
        return self.gated("swiglu", at, x)

    def geglu(self, at: KeyPlace, a: Bare, x: int) -> Made:
        return self.gated("geglu", at, x)

    def gated(self, kind: str, at: KeyPlace, x: int) -> Made:
        if x % 2:
            raise at.fail(
                f"its input is {x} wide",
                "an even width (gate and up side by side)",
            )
        half = x // 2
        return Made(half, {}, (Row(kind, {"F": half}),))

    # ---- attention

    def attention(self, at: KeyPlace, a: Attention, x: int) -> Made:
        """Return the rows of attention: q k v linear, norms and rotation of q and k, attention,
        output linear."""
        heads = self.heads(at, a)
        self.width(at, sum(heads.widths))
        C, name = self.model.width, at / "name"
        ropes = self.ropes(at, a, heads.D)
        window = self.window(at / "window", a.window)
        each = self.by_layer(at, a, ropes, window)
        plain = {*map(id, each)} == {id(ropes[0])} and _plain(ropes[0], heads.D)
        dims = heads.dims(a, _factor(ropes[0]) if plain else 1.0)
        bias = a.bias if a.out_bias is None else a.out_bias
        rows = [self.into(name, a, x, heads)]
        if a.qk_norm:
            rows.append(self.normed(at, a, heads, dims))
        if a.rope and any(each):
            rows.append(self.turn(a.rope, dims, each, plain))
        rows.append(self.seen(at / "softcap", window, a.softcap, dims))
        out = f"{a.name}.{self.family.out}"
        rows.append(self.dense(name, [out], dims["Q"], [C], bias))
        said = {
            "kv_heads": heads.G,
            "head_dim": heads.D,
            "out_bias": bias,
            "rope": ropes[0],
            "local_rope": ropes[1],
            "window": window,
        }
        return Made(C, {**a.model_dump(), **said}, tuple(rows))

    def ropes(
        self, at: KeyPlace, a: Attention, D: int
    ) -> tuple[Turning | None, Turning | None]:
        """Return the rotary positions of an attention, and those of layers with a window."""
        if not a.rope:
            for key in ("local_rope", "rope_layers"):
                if getattr(a, key) is not None:
                    raise (at / key).fail("is given without rope", "with rope")
            return None, None
        W = D if a.rope.width is None else a.rope.width
        if W > D:
            raise (at / "rope" / "width").fail(
                f"{W} is above head_dim {D}", f"up to {D}"
            )
        if a.rope_layers is not None and len(a.rope_layers) != self.repeat:
            raise (at / "rope_layers").fail(
                f"has {len(a.rope_layers)} flags for {self.repeat} layers",
                "true or false for each layer",
            )
        first = _turned(at / "rope", a.rope, W)
        if not a.local_rope:
            return first, None
        if a.window is None:
            raise (at / "local_rope").fail("is given without window", "with a window")
        return first, _turned(at / "local_rope", a.local_rope, W)

    def by_layer(
        self,
        at: KeyPlace,
        a: Attention,
        ropes: tuple[Turning | None, Turning | None],
        window: int | Windows | None,
    ) -> list[Turning | None]:
        """Return the rotary positions of each layer."""
        rope, local = ropes
        windows = window if isinstance(window, tuple) else (window,) * self.repeat
        flags = a.rope_layers or (True,) * self.repeat
        mine = [local if n and local else rope for n in windows]
        return [one if on else None for one, on in zip(mine, flags, strict=True)]

    def turn(
        self,
        rope: Rope,
        dims: Mapping[str, Any],
        each: Sequence[Turning | None],
        plain: bool,
    ) -> Row:
        """Return the row of a rotation. each: the positions of each layer, one or two of them;
        plain: all layers rotate whole heads alike, in halves."""
        made = {id(one): one for one in each if one}
        used = list(made.values())
        W = rope.width or dims["D"]
        turns = [
            Rotation(W, one["theta"], numbers_of(one["scaling"], self.sequence))
            for one in used
        ]
        if plain:
            name = "rope_packed" if self.packed or self.blocks > 1 else "rope"
            return Row(name, {**dims, "rope": turns[0]})
        places = [*made]
        which = tuple(places.index(id(one)) + 1 if one else 0 for one in each)
        second = len(used) > 1
        own = {
            "W": W,
            "pairs": int(rope.interleaved),
            "which": which if len({*which}) > 1 else which[0],
            "rope": turns[0],
            "rope2": turns[1] if second else None,
            "factor": _factor(used[0]),
            "factor2": _factor(used[1]) if second else 1.0,
        }
        return Row("rope_part", {**dims, **own})

    def into(self, at: KeyPlace, a: Attention, x: int, heads: Heads) -> Row:
        """Return the linear of q, k and v, or all three side by side."""
        names = [f"{a.name}.{part}" for part in self.family.qkv]
        widths = heads.widths if len(names) > 1 else [sum(heads.widths)]
        row = self.dense(at, names, x, widths, a.bias)
        return _by_head(row, heads.H) if self.family.by_head else row

    def normed(
        self, at: KeyPlace, a: Attention, heads: Heads, dims: Mapping[str, Any]
    ) -> Row:
        """Return the norm of q and k heads: of each head, or of all q heads as one and all k heads
        as one."""
        q, k = [f"{a.name}.{norm}" for norm in self.family.norms]
        whole = a.qk_norm == "whole"
        wide = heads.widths if whole else (heads.D, heads.D)
        weights = {
            "wq": self.vector(at / "name", q, "weight", wide[0]),
            "wk": self.vector(at / "name", k, "weight", wide[1]),
        }
        if whole and a.one_plus:
            wrong = "is not supported with `qk_norm: whole`"
            raise (at / "one_plus").fail(wrong, "false")
        name = "qknorm_whole" if whole else "qknorm1" if a.one_plus else "qknorm"
        return Row(name, dims, weights)

    def window(self, at: KeyPlace, said: int | Windows | None) -> int | Windows | None:
        """Return the window, as a tuple by layer if layers differ."""
        if not isinstance(said, tuple):
            return said
        if len(said) != self.repeat:
            raise at.fail(
                f"has {len(said)} windows for {self.repeat} layers",
                "a window, or null, for each layer",
            )
        return said if len({*said}) > 1 else said[0]

    def seen(
        self,
        at: KeyPlace,
        said: int | Windows | None,
        cap: float | None,
        dims: Mapping[str, Any],
    ) -> Row:
        """Return the row of attention: capped, with dropout, or local if a window or documents
        limit it. at: the key of the cap."""
        T, p = self.sequence, self.attention_dropout
        some = said if isinstance(said, tuple) else (said,)
        each = tuple(min(n or T, T) for n in some)
        if {*each} == {T} and not self.packed and not cap and not p:
            return Row("attention", dims)
        local = {**dims, "window": each if len({*each}) > 1 else each[0]}
        if cap and p:
            raise KeyPlace(at.root, ("train", "attention_dropout")).fail(
                f"{p:g} drops probabilities of scores that {dotted(at.path)} caps",
                "0, or attention without softcap",
            )
        if cap:
            return Row("attention_capped", {**local, "cap": cap})
        if p:
            return Row("attention_dropped", {**local, "p": p})
        return Row("attention_local", local)

    def heads(self, at: KeyPlace, a: Attention) -> Heads:
        """Return the heads of an attention, with the defaults of missing keys."""
        C, H = self.model.width, a.heads
        G = H if a.kv_heads is None else a.kv_heads
        if H % G:
            raise (at / "kv_heads").fail(
                f"{G} does not divide heads {H}", "a divisor of heads"
            )
        if self.family.by_head and G != H:
            raise (at / "kv_heads").fail(
                f"{G} differs from heads {H}, but files of {self.model.names} have a q, a k and "
                "a v in each head",
                f"{H}, or other `names`",
            )
        if a.head_dim is None and C % H:
            raise (at / "heads").fail(
                f"{H} does not divide width {C}",
                "a divisor of width, or head_dim",
            )
        D = C // H if a.head_dim is None else a.head_dim
        if D > 1024:
            raise (at / "head_dim").fail(f"{D} is too large", "up to 1024")
        return Heads(H, G, D)

    # ---- linears

    def linear(self, at: KeyPlace, a: Linear, x: int) -> Made:
        if a.tied is not None:
            return self.tied(at, a, x)
        for key in ("name", "out"):
            if not getattr(a, key):
                raise (at / key).fail(
                    "is missing",
                    "name and out, or in the head only `tied: EMBEDDING`",
                )
        if len(a.name) != len(a.out):
            raise (at / "out").fail(
                f"has {len(a.out)} widths for {len(a.name)} names",
                "one width for each name",
            )
        if len(a.name) > 1 and not self.family.out_in:
            good = " or ".join(n for n, family in FAMILIES.items() if family.out_in)
            raise (at / "name").fail(
                "several linears in one product need weights stored as [out,in]",
                f"one name with `names: {self.model.names}`, or `names: {good}`",
            )
        if at.path[:-1] == self.last and a.out == (self.model.vocab,):
            return _made(a.out[0], a, self.logits(at / "name", a, x))
        if a.softcap is not None:
            allowed = "on the head's last linear, whose out is model.vocab"
            raise (at / "softcap").fail("is not of the logits", allowed)
        return _made(sum(a.out), a, self.dense(at / "name", a.name, x, a.out, a.bias))

    def logits(self, at: KeyPlace, a: Linear, x: int) -> Row:
        (name,), V = a.name, self.model.vocab
        weights = {"w": self.by_token(at, name, "weight", x)}
        if a.bias:
            weights["b"] = self.by_token(at, name, "bias")
        row = _linear(ops.up(V, ops.VOCAB), x, True, weights)
        made = self.adapters(at, a.name, x, [V], ops.VOCAB, inner=False)
        return replace(row, adapters=tuple(made), logits=True, cap=a.softcap or 0.0)

    def tied(self, at: KeyPlace, a: Linear, x: int) -> Made:
        """Return the head's linear with the token embedding [V,C] as its weight."""
        C, V = self.model.width, self.model.vocab
        embedding = self.model.embedding.tokens
        others = sorted(a.model_fields_set - {"tied", "softcap"})
        if others:
            raise (at / others[0]).fail("is set by `tied`", "only `tied` and softcap")
        here = at / "tied"
        if a.tied != embedding:
            raise here.fail(f"there is no embedding '{a.tied}'", embedding)
        if at.path[:-1] != self.last:
            inside = at.path[-3] == "head"
            raise here.fail(
                "is not the last op of the head" if inside else "is not in the head",
                "the last op of the head",
            )
        if x != C:
            raise here.fail(
                f"its input is {x} wide", f"the width of the embedding, {C}"
            )
        row = _linear(ops.up(V, ops.VOCAB), x, True, {}, f"{a.tied}.weight")
        row = replace(row, logits=True, cap=a.softcap or 0.0)
        return Made(V, {**a.model_dump(), "out": (V,)}, (row,))

    def embedding(self, at: KeyPlace, e: Embedding) -> Op:
        C = self.model.width
        weights = {"wte": self.by_token(at / "tokens", e.tokens, "weight", C)}
        if (e.positions is None) != (e.context is None):
            alone = "positions" if e.context is None else "context"
            raise (at / alone).fail(
                "is given without the other", "both positions and context, or neither"
            )
        if e.positions is not None and e.context is not None:
            weights["wpe"] = self.tensor(
                at / "positions",
                [e.positions],
                "weight",
                [e.context],
                (e.context, C),
            )
        packed = (self.packed or self.blocks > 1) and "wpe" in weights
        name = "embed_packed" if packed else "embed"
        row = Row(name, {"P": e.context}, weights)
        scaled = (_scale(e.scale),) if e.scale else ()
        rows = (row, *scaled, *self.dropped(at, C, self.dropout))
        return Op("embedding", _frozen(e.model_dump()), rows=rows)


_OPS: Mapping[str, Callable[..., Made]] = {
    "residual": Walk.residual,
    "parallel": Walk.parallel,
    "layernorm": Walk.layernorm,
    "rmsnorm": Walk.rmsnorm,
    "attention": Walk.attention,
    "linear": Walk.linear,
    "gelu": Walk.gelu,
    "scale": Walk.scale,
    "swiglu": Walk.swiglu,
    "geglu": Walk.geglu,
}


def ends(name: str, words: Sequence[str]) -> bool:
    """Return whether a module's name is one of these or ends in one, like PEFT's target_modules."""
    return any(name == w or name.endswith(f".{w}") for w in words)


def group_of(lora: Lora, name: str) -> int | None:
    """Return the first group of adapters that matches a linear, None if none does."""
    found = (i for i, group in enumerate(lora.groups) if ends(name, group.match))
    return next(found, None)


def sized(lora: Lora, group: int | None) -> Lora:
    """Return the settings of the adapters of a group, with its rank and alpha."""
    if group is None:
        return lora
    own = lora.groups[group]
    return replace(lora, rank=own.rank or lora.rank, alpha=own.alpha or lora.alpha)


def _plain(rope: Turning | None, D: int) -> bool:
    """Return whether positions rotate whole heads, in halves."""
    return rope is not None and rope["width"] in (None, D) and not rope["interleaved"]


def _turned(at: KeyPlace, a: LocalRope, W: int) -> Turning:
    """Return the rotary positions of W elements of a head, with the defaults of their scaling."""
    if W % 2:
        if isinstance(a, Rope) and a.width is not None:
            raise (at / "width").fail(f"{W} is odd", "an even number: it rotates pairs")
        raise at.fail(f"rotates pairs, and head_dim {W} is odd", "an even head_dim")
    if not a.scaling:
        return a.model_dump()
    there = at / "scaling"
    found = typed(a.scaling, there)
    if found.type == "yarn" and a.theta == 1.0:
        raise (at / "theta").fail(
            "with 1 all frequencies are equal", "above 1, with yarn"
        )
    if found.type == "dynamic" and W < 4:
        raise there.fail(f"rotates {W} elements of a head", "at least 4, with dynamic")
    held = {k: x for k, x in asdict(found).items() if x is not None}
    for low, high in RISING:
        if low in held and held[low] >= held[high]:
            raise (there / low).fail(
                f"{held[low]:g} is not below {high} {held[high]:g}",
                f"{low} < {high}",
            )
    for key in ("short_factor", "long_factor"):
        if key in held and len(held[key]) != W // 2:
            raise (there / key).fail(
                f"has {len(held[key])} numbers", f"{W // 2}, one for each pair"
            )
    if found.type == "yarn":
        held.setdefault("attention_factor", grown(found.factor))
    if found.type == "longrope":
        context = held["original_context"]
        if context < 2:
            raise (there / "original_context").fail(f"is {context}", "at least 2")
        held.setdefault("attention_factor", stretched(found.factor, context))
    return {**a.model_dump(), "scaling": held}


def _factor(said: Mapping[str, Any] | None) -> float:
    """Return the factor of queries and of keys; scores are scaled by its square."""
    scaling = said and said["scaling"] or {}
    return float(scaling.get("attention_factor", 1.0))


def _by_head(row: Row, H: int) -> Row:
    """Return a linear of q, k and v whose rows in files are by head, also those of adapters."""
    weights = {word: replace(w, heads=H) for word, w in row.weights.items()}
    adapters = tuple((*down, _by_head(up, H)) for *down, up in row.adapters)
    return replace(row, weights=weights, adapters=adapters)


def _scale(factor: float) -> Row:
    return Row("scale", {"scale": factor})


def _linear(
    out: int,
    x: int,
    out_in: bool,
    weights: Mapping[str, Weight],
    tied: str = "",
) -> Row:
    return Row("linear", {"N": out, "K": x, "layout": int(out_in)}, weights, tied)


def _made(width: int, keys: LayerNorm | RmsNorm | Linear, row: Row) -> Made:
    return Made(width, keys.model_dump(), (row,))


def _frozen(args: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a read-only mapping, also at deeper levels."""
    held = dict(args)
    for key, value in args.items():
        if isinstance(value, dict):
            held[key] = _frozen(value)
    return MappingProxyType(held)
