"""hf.py -- reads config.json of a Hugging Face folder into the model of a spec.

Every key is honoured, known to have no effect on training, or refused by name. A row of hfmodels.py
describes a family; other keys are in the tables of hfkeys.py.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from itertools import repeat
from types import NoneType
from typing import Any

from ..facts.families import FAMILIES as NAMES
from ..facts.kinds import SCALINGS
from ..facts.rope import grown
from . import dsjson, hfpacked, usertext, yamltext
from .hfkeys import CAPS, DROPOUTS, FIXED, FREE, NULLS, REFUSED, TOLD
from .hfmodels import FAMILIES
from .hfrows import (
    EACH,
    FIRST,
    FULL,
    IMPLIED,
    NOPE,
    ORIGINAL,
    PARTIAL,
    SLIDING,
    SWITCH,
    SYNONYMS,
    THETA,
    ConfigKey,
    Derived,
    HfFamily,
    Number,
    scaling_keys,
)
from .keytypes import LAYERS
from .node import Mistakes, Names, Node, SpecError, near, printable, shown
from .schema import VALUES, Op

WINDOWS = ("layer_types", FIRST, "sliding_window", SWITCH)
ROPE = ("rope_parameters", "rope_scaling", THETA)
MSCALES = ("mscale", "mscale_all_dim")
LISTS = ("short_factor", "long_factor")  # keys with a number for each pair
# transformers' words -> ours, for keys whose values are words
WORDS = {**SYNONYMS} | {
    theirs: ours
    for family in FAMILIES
    for table in family.words.values()
    for ours, theirs in table.items()
}


@dataclass(frozen=True)
class Found:
    """Content of a folder. model: the model of a spec; context: number of positions; end: the token
    that ends a text; packed: quantization_config and the format that it gives the linears."""

    folder: str
    model: Node
    context: int
    end: Node
    packed: tuple[Node, str] | None
    notes: Names


# Description of a value of config.json, by the type of transformers' default.
KINDS: Mapping[type, str] = {
    bool: "true or false",
    float: "a number with a decimal point or an exponent, such as 1.0e-05",
    Number: "a number",
    int: "an integer, without quotes or a decimal point",
    str: "a string in quotes",
}


def _shown(value: object) -> str:
    return "null" if value is None else shown(value)


def _told(key: str) -> bool:
    return any(fnmatchcase(key, pattern) for pattern in TOLD)


def _no_text(key: str, node: Node) -> Node:
    """Refuse a number in quotes: a spec takes "1e-5", transformers does not."""
    if isinstance(node.value, (str, dict, list)):
        wrong = f"{node.where}: {key}: is {shown(node.value)}"
        raise SpecError(f"{wrong}; allowed: a number")
    return node


def _above_0(key: str, node: Node, more: str = "") -> None:
    if type(node.value) not in (int, float) or not node.value >= 1e-9:
        wrong = f"{node.where}: {key}: is {shown(node.value)}"
        raise SpecError(f"{wrong}; allowed: a number above 0{more}")


class _Config:
    def __init__(self, root: Node) -> None:
        self.root = root
        self.given: dict[str, Node] = root.value
        self.family = self.row()
        self.growth: dict[str, Node] = {}  # keys of a model with new rows
        usual = self.family.usual
        self.usual = {
            key: Node(float(x) if isinstance(x, Number) else x, root.where)
            for key, x in usual.items()
        }
        rope = "rope" in _keys_of(self.family.block)
        self.ropes = (*ROPE[:2], self.family.rotary[0]) if rope else ()
        more = (NOPE,) if EACH in usual else ()
        self.keys = (*usual, *self.ropes, *more)
        self.allowed = {*self.keys, *WINDOWS, *DROPOUTS, *FREE, *FIXED}

    def fail(self, key: str, wrong: str, allowed: str) -> SpecError:
        where = self.given.get(key, self.root).where
        return SpecError(f"{where}: {key}: {wrong}; allowed: {allowed}")

    def row(self) -> HfFamily:
        known = {f.type: [g for g in FAMILIES if g.type == f.type] for f in FAMILIES}
        allowed = ", ".join(known)
        if "model_type" not in self.given:
            raise self.fail("model_type", "is missing", allowed)
        said = self.given["model_type"].value
        if not isinstance(said, str) or said not in known:
            raise self.fail(
                "model_type", f"{shown(said)} is not a supported model family", allowed
            )
        fits = [f for f in known[said] if all(map(self.chosen, repeat(f), f.when))]
        return (fits or known[said])[0]

    def chosen(self, f: HfFamily, key: str) -> bool:
        """Return whether a key has the value that a row is for."""
        node = self.given.get(key)
        value = f.usual[key] if node is None or node.value is None else node.value
        return value is f.when[key]

    def get(self, key: str) -> Node:
        """Return the value of a key, or its default if config.json leaves it out."""
        none = Node(None, self.root.where)
        node = self.given.get(key, none)
        left_out = key not in self.given or node.value is None and key not in NULLS
        return self.usual.get(key, none) if left_out else node

    def number(self, key: str, most: float = math.inf) -> int:
        found = self.get(key).value
        if type(found) is not int or not 1 <= found <= most:
            top = f" to {most}" if most < math.inf else ""
            allowed = f"a whole number from 1{top}"
            raise self.fail(key, f"is {shown(found)}", allowed)
        return found

    # ---- checks of keys

    def check(self) -> Names:
        """Refuse everything that is wrong. Return notes about values that are not taken as they
        are."""
        wrong = Mistakes()
        for key, node in self.given.items():
            wrong.at((key,), self.known, key, node)
        parts: list[tuple[Names, Callable[[], object]]] = [
            (
                (self.family.context,),
                partial(self.number, self.family.context),
            ),
            ((self.family.sizes[0], *WINDOWS), self.window),
            *(
                ((key,), partial(self.value, ConfigKey(key)))
                for key in self.family.words
            ),
        ]
        if ROPE[0] in self.keys:
            f = self.family
            widths = (*f.sizes, f.heads, "head_dim", f.rotary[1])
            reads = (
                f.context,
                *(widths if f.rotary[1] in f.usual else ()),
                *self.ropes,
            )
            parts.append((reads, self.rope))
        for keys, part in parts:
            if wrong.knows(*keys):
                wrong.of(part)
        wrong.end()
        return self.notes()

    def known(self, key: str, node: Node) -> None:
        """Refuse a key that is unknown, or has an unknown value."""
        said = node.plain()
        usual = (THETA, PARTIAL)
        if key in usual and key not in self.family.rotary and said is not None:
            wrong = f"is not a key of {self.family.type}"
            raise self.fail(key, wrong, self.family.rotary[usual.index(key)])
        if key in self.usual:
            self.kind(key, said)
        elif key == hfpacked.KEY and said is not None:
            self.packed()
        elif key in REFUSED and said is not None and not self.adopted(key):
            raise self.fail(key, *REFUSED[key])
        elif key in FIXED and said not in (FIXED[key], None):
            raise self.fail(key, f"is {_shown(said)}", _shown(FIXED[key]))
        elif key in DROPOUTS and type(said) not in (int, float, NoneType):
            raise self.fail(key, f"is {_shown(said)}", "a number, or null")
        free = said is None or _told(key) or self.adopted(key) or key in REFUSED
        if key not in self.allowed and not free:
            known = near(key, [*self.allowed])
            good = "leave it out if it has no effect"
            wrong = f"is not a known key of {self.family.type}"
            raise self.fail(key, wrong, f"{known}, or {good}" if known else good)

    def packed(self) -> tuple[Node, str] | None:
        """Return quantization_config and the format that it gives the linears."""
        node = self.given.get(hfpacked.KEY)
        if node is None or node.value is None:
            return None
        return node, hfpacked.format_of(node, NAMES[self.family.names].out_in)

    def adopted(self, key: str) -> bool:
        """Return whether a key names code that transformers has adopted."""
        return key == "auto_map" and self.family.adopted

    def kind(self, key: str, said: object) -> None:
        """Refuse values that transformers refuses: "32" and 32.0 for 32, null where it has no
        meaning."""
        usual = self.family.usual[key]
        null = key in NULLS or not usual
        want = int if usual is None else type(usual)
        if want is Number and type(said) in (int, float):
            return
        if type(said) is want or said is None and null or want not in KINDS:
            return
        good = KINDS[want] + (", or null" if key in NULLS else "")
        left = "" if said is not None else f", or leave it out: then {shown(usual)}"
        raise self.fail(key, f"is {_shown(said)}", good + left)

    def notes(self) -> Names:
        idle = [
            f"{key}: null" if node.value is None else key
            for key, node in self.given.items()
            if _told(key)
            or self.adopted(key)
            or node.value is None
            and not self.nullable(key)
        ]
        file = self.root.where.rpartition(":")[0]
        named = ", ".join(map(printable, idle))
        told = [f"{file}: without effect on training: {named}"] if idle else []
        for key in DROPOUTS:
            node = self.get(key)
            own = "attention_dropout" if "att" in key else "dropout"
            if node.value:
                said = f"{shown(node.value)} is ignored: train.{own} sets it"
                told.append(f"{node.where}: {key}: {said}")
        return tuple(told)

    def nullable(self, key: str) -> bool:
        """Return whether null is a value of the key, or usual in published files."""
        return key in NULLS or key in FREE or key in DROPOUTS

    # ---- values

    def value(self, key: ConfigKey) -> Node:
        """Return the value of a key as in a spec; a value of None is left out."""
        node = self.get(key)
        if key == "rope":
            return self.rope()
        if key == "local_rope":
            return self.local()
        if key == NOPE:
            return self.flags()
        if isinstance(key, Derived):
            _above_0(key, node)
            return Node(key.of(node.value), node.where)
        if key in CAPS and node.value is not None:
            _above_0(key, node, ", or null")
        if key in self.family.words:
            return self.word(key, node)
        if key in self.family.times and node.value is None:
            of, times = self.family.times[key]
            return Node(times * self.number(of), node.where)
        return node

    def word(self, key: str, node: Node) -> Node:
        if not isinstance(node.value, str) or node.value not in WORDS:
            raise self.fail(key, f"is {_shown(node.value)}", ", ".join(WORDS))
        return Node(WORDS[node.value], node.where)

    def rope(self, layers: str = FULL) -> Node:
        """Return the rotary positions of either spelling: rope_parameters, or rope_theta with
        rope_scaling. layers: those without a window, or with one."""
        key = "rope_parameters" if self.given_(ROPE[0]) else "rope_scaling"
        node = self.get(key)
        if key != "rope_scaling" and self.given_("rope_scaling"):
            raise self.fail(
                key, "is given together with rope_scaling", "only one of them"
            )
        held = self.held(key, node)
        if self.family.local and held.keys() & {FULL, SLIDING}:
            key, node = f"{key}.{layers}", held.get(layers, Node(None, node.where))
            held = self.held(key, node)
        elif self.family.local and key != "rope_scaling" and held:
            both = f"{FULL} and {SLIDING}"
            raise self.fail(key, f"does not say which layers it is of: {both}", both)
        elif layers == SLIDING:
            held = {}
        said = {name: x for name, x in held.items() if x.value is not None}
        outside, share = self.family.rotary
        name = THETA if THETA in said else outside
        found = {"theta": _no_text(name, said.pop(THETA, self.theta(layers)))}
        if share in self.family.usual:
            name = PARTIAL if PARTIAL in said else share
            found |= self.width(name, said.pop(PARTIAL, self.get(share)))
        if self.family.interleaved:
            found["interleaved"] = Node(True, node.where)
        types = [said.pop(k).value for k in ("rope_type", "type") if k in said]
        if len(types) == 2 and types[0] != types[1]:
            both = f"rope_type {shown(types[0])} contradicts type {shown(types[1])}"
            raise self.fail(key, both, "only one of them, or equal values")
        type_ = types[0] if types else "default"
        if type_ != "default" or said:
            scaling = self.scaling(key, type_, said)
            found["scaling"] = Node(scaling, node.where)
        return Node(found, node.where)

    def held(self, key: str, node: Node) -> dict[str, Node]:
        held = {} if node.value is None else node.value
        if not isinstance(held, dict):
            raise self.fail(key, f"is {shown(held)}", "an object, or null")
        return held

    def theta(self, layers: str) -> Node:
        """Return theta as it is outside rope_parameters."""
        f = self.family
        key, usual = f.rotary[0], f.theta
        if layers == SLIDING and f.local:
            key, usual = f.local
        node = self.get(key)
        if f.local and not f.local[0] and node.value not in (None, f.theta):
            raise self.fail(
                key,
                f"is {shown(node.value)}, which versions of transformers apply to other layers",
                f"{f.theta:g}, or rope_parameters with {FULL} and {SLIDING}",
            )
        return node if node.value is not None else Node(usual, node.where)

    def width(self, key: str, share: Node) -> dict[str, Node]:
        """Return the rotated width of a head, if it is not the whole head."""
        said = share.value
        if type(said) not in (int, float) or not 0 < said <= 1:
            wrong = f"{share.where}: {key}: is {shown(said)}"
            raise SpecError(f"{wrong}; allowed: a number above 0 and at most 1")
        head = self.get("head_dim").value
        if head is None:
            head = self.number(self.family.sizes[1]) // self.number(self.family.heads)
        width = int(head * said)
        return {} if width == head else {"width": Node(width, share.where)}

    def local(self) -> Node:
        """Return the rotary positions of layers with a window; a value of None if they are those of
        the others, or if there are no such layers."""
        mine, other = self.rope(SLIDING), self.rope()
        same = mine.plain() == other.plain() or not any(self.sliding())
        return Node(None if same else mine.value, mine.where)

    def flags(self) -> Node:
        """Return whether each layer has rotary positions; a value of None means that all have
        them."""
        node, layers = self.get(NOPE), self.number(self.family.sizes[0], LAYERS)
        flags: Any = node.plain()
        if flags is None:
            every = self.number(EACH)
            flags = [int((n + 1) % every != 0) for n in range(layers)]
        if (
            not isinstance(flags, list)
            or len(flags) < layers
            or any(flag not in (0, 1) for flag in flags)
        ):
            said = f"a list of 0 and 1 for each of {layers} layers, or null"
            raise self.fail(NOPE, f"is {shown(flags)}", said)
        on = [bool(flag) for flag in flags[:layers]]
        some = [Node(flag, node.where) for flag in on]
        return Node(None if all(on) else some, node.where)

    def scaling(
        self, key: str, type_: object, said: dict[str, Node]
    ) -> dict[str, Node]:
        """Return the scaling of a spec. key: its name in config.json; said: its keys except the
        type."""
        family, usual = self.family, self.family.usual
        known = ("default", *(family.scalings or SCALINGS))
        if not isinstance(type_, str) or type_ not in known:
            raise self.fail(
                key, f"scaling {shown(type_)} is not supported", ", ".join(known)
            )
        type_ = family.scalings.get(type_, type_)
        names = scaling_keys(type_)
        own = [*names, *MSCALES] if type_ == "yarn" else [*names]
        own = [k for k in own if k != ORIGINAL or type_ not in IMPLIED]
        for name, value in said.items():
            if name not in own:
                share = [PARTIAL] if family.rotary[1] in usual else []
                allowed = ", ".join(own) or "only " + ", ".join([THETA, *share])
                raise SpecError(
                    f"{value.where}: {key}.{name}: is not a key of {type_}; "
                    f"allowed: {allowed}"
                )
            if name not in LISTS or not isinstance(value.value, list):
                _no_text(f"{key}.{name}", value)
            if name in MSCALES:
                _above_0(f"{key}.{name}", value)
        if ORIGINAL in names and ORIGINAL in usual:
            said[ORIGINAL] = self.get(ORIGINAL)
        elif ORIGINAL in names:
            said.setdefault(ORIGINAL, self.get(family.context))
        if type_ == "longrope" and "factor" not in said:
            said["factor"] = self.stretched(said[ORIGINAL])
        scaling = {names[k]: x for k, x in said.items() if k in names}
        grown = [said[k] for k in MSCALES if k in said]
        if len(grown) == 2 and "attention_factor" not in said:
            scaling["attention_factor"] = self.grown(key, said)
        scaling["type"] = Node(type_, self.get(key).where)
        return scaling

    def stretched(self, original: Node) -> Node:
        """Return longrope's factor, by which the context grew."""
        _above_0(ORIGINAL, original)
        longer = self.number(self.family.context) / original.value
        return Node(max(1.0, longer), original.where)

    def grown(self, key: str, said: dict[str, Node]) -> Node:
        """Return YaRN's attention_factor, computed from its two mscales."""
        missing = Node(None, self.get(key).where)
        _above_0(f"{key}.factor", said.get("factor", missing))
        factor = max(said["factor"].value, 1.0)
        of_all, of_some = (said[name] for name in MSCALES)
        top = grown(factor, of_all.value)
        bottom = grown(factor, of_some.value)
        return Node(top / bottom, of_all.where)

    def given_(self, key: str) -> bool:
        return key in self.given and self.given[key].value is not None

    def sliding(self) -> list[bool]:
        """Return whether each layer has a window."""
        layers = self.number(self.family.sizes[0], LAYERS)
        node = self.get("sliding_window")
        usual, by_layer = self.family.usual, self.by_layer(layers)
        off = SWITCH in usual and not self.switched(SWITCH)
        if node.value is None or off:
            return [False] * layers
        if "sliding_window" not in usual:
            said = (
                f"is {shown(node.value)}, but {self.family.type} has no sliding window"
            )
            raise self.fail("sliding_window", said, "null")
        if type(node.value) is not int or node.value < 1:
            said = f"is {shown(node.value)}"
            raise self.fail("sliding_window", said, "a whole number from 1, or null")
        if not self.family.mixed and not all(by_layer):
            key = "layer_types" if self.given_("layer_types") else FIRST
            said = (
                f"has layers without a window, but {self.family.type} has a window in all "
                "layers or none"
            )
            raise self.fail(key, said, "null")
        return by_layer

    def switched(self, key: str) -> bool:
        node = self.get(key)
        if node.value not in (True, False, None):
            said = f"is {shown(node.value)}"
            raise self.fail(key, said, "true, false or null")
        return bool(node.value)

    def by_layer(self, layers: int) -> list[bool]:
        """Return whether each layer's window may be on, by layer_types, by the family's pattern, in
        layers without rotary positions, or from max_window_layers on."""
        types, pattern = self.get("layer_types").plain(), self.family.pattern
        if types is None and pattern:
            every = self.number(pattern) if isinstance(pattern, str) else pattern
            return [(n + 1) % every != 0 for n in range(layers)]
        if types is None and EACH in self.family.usual:
            flags: Any = self.flags().plain()
            return [not on for on in flags or [True] * layers]
        if types is None:
            node = self.get(FIRST)
            first = node.value or 0
            if type(first) is not int or first < 0:
                said = f"is {shown(node.value)}"
                raise self.fail(FIRST, said, "a whole number from 0, or null")
            return [n >= first for n in range(layers)]
        if (
            not isinstance(types, list)
            or len(types) != layers
            or any(word not in (FULL, SLIDING) for word in types)
        ):
            allowed = f"{layers} of {FULL}, {SLIDING}"
            raise self.fail("layer_types", f"is {shown(types)}", allowed)
        return [word == SLIDING for word in types]

    def window(self) -> Node:
        """Return the window of all layers or a list by layer; a value of None is left out."""
        node, sliding = self.get("sliding_window"), self.sliding()
        none = Node(None, node.where)
        if len({*sliding}) == 1:
            return node if sliding[0] else none
        return Node([node if on else none for on in sliding], node.where)

    # ---- the model

    def fill(self, value: object) -> Node:
        if isinstance(value, ConfigKey):
            return self.value(value)
        if isinstance(value, tuple):
            parts = [self.fill(part) for part in value]
            if len(parts) == 1:
                return parts[0]
            return Node(parts, self.root.where)
        return Node(value, self.root.where)

    def op(self, op: Op) -> Node:
        """Return an op of a spec: {kind: its keys}."""
        where = self.root.where
        if op.kind == "residual":
            inner: Node = self.ops(op.ops)
        elif op.kind == "parallel":
            inner = Node([self.ops(branch.ops) for branch in op.ops], where)
        else:
            keys = {
                key: self.fill(value)
                for key, value in op.args.items()
                if key != "window"
            }
            if op.kind == "attention":
                keys["window"] = self.window()
            held = {k: x for k, x in keys.items() if x.value is not None}
            if op.kind == "attention":
                held.setdefault("out_bias", Node(False, self.root.where))
            inner = held[VALUES[op.kind]] if op.kind in VALUES else Node(held, where)
        return Node({op.kind: inner}, self.root.where)

    def ops(self, ops: tuple[Op, ...]) -> Node:
        return Node([self.op(op) for op in ops], self.root.where)

    def head(self) -> Node:
        f, where = self.family, self.root.where
        key = "tie_word_embeddings"
        tied, last = self.get(key), self.op(f.head)
        if tied.value and f.head.args["bias"]:
            wrong = f"is true, but the logits of {f.type} have a bias"
            raise self.fail(key, wrong, "false")
        if tied.value:
            logits = {"tied": Node(f.embedding.args["tokens"], tied.where)}
            cap = self.fill(f.head.args.get("softcap"))
            logits |= {"softcap": cap} if cap.value is not None else {}
            last = Node({"linear": Node(logits, where)}, where)
        return Node([*map(self.op, f.last), last], where)

    def grow(self, rows: int) -> None:
        """Give the model this many rows by token."""
        key, where = self.family.sizes[2], "--vocab"
        had = self.number(key)
        if rows < had:
            raise SpecError(
                f"{where}: {rows} is below the {had} rows of the model (config.json's {key}); "
                f"allowed: {had} or more"
            )
        if rows > had:
            self.growth = {"vocab_from": Node(had, where)}
            self.given[key] = Node(rows, where)

    def model(self) -> Node:
        f, where = self.family, self.root.where
        layers, width, vocab = (self.get(key) for key in f.sizes)
        block = {
            "blocks": layers,
            "name": Node(f.layers, where),
            "ops": self.ops(f.block),
        }
        units = [
            self.op(f.embedding),
            Node(block, where),
            Node({"head": self.head()}, where),
        ]
        held = {
            "vocab": vocab,
            **self.growth,
            "width": width,
            "names": Node(f.names, where),
            "units": Node(units, where),
        }
        return Node(held, where)


def _keys_of(value: Any) -> set[str]:
    """Return all keys of config.json that occur in ops."""
    if isinstance(value, ConfigKey):
        return {str(value)}
    if isinstance(value, Op):
        return _keys_of((*value.args.values(), *value.ops))
    if isinstance(value, tuple):
        return {key for part in value for key in _keys_of(part)}
    return set()


# ---- a spec without a spec file

LONG = (
    ", which usually has a few thousand bytes; lists of quantized tensors or labels make "
    "it longer"
)
CONTEXT = 1024  # most tokens of a sample if no spec gives their number
NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_.+-]")
# Training settings if no spec gives them; `sequence` is added.
USUAL = """
train:
  global_batch: 8
  micro_batch: 1
  optimizer: {type: AdamW, lr: 1.0e-5}
  schedule: {type: constant}
  precision: f32
  seed: 1
zero: {stage: 0}
cluster: {ranks: 1}
"""


def load(folder: str, vocab: int | None = None) -> Found:
    """Read a folder of Hugging Face. vocab: rows by token, more than the folder has.

    Raises SpecError if its config.json cannot be read or has an unknown key.
    """
    path = os.path.join(folder, "config.json")
    if not os.path.lexists(path):
        there, good = os.path.lexists(folder), "a folder with config.json"
        wrong = "has no config.json" if there else "does not exist"
        if not there:
            good = usertext.download(folder) or (
                f"{good}; hf download ORG/NAME --local-dir DIR creates one"
            )
        elif not os.path.isdir(folder):
            wrong = "is a file"
            above, name = os.path.split(folder)
            if name == "config.json":
                good = f"its folder, {printable(above or '.')}"
        raise SpecError(f"--from {printable(folder)}: {wrong}; allowed: {good}")
    said = usertext.text(path, "a model's config.json", LONG)
    config = _Config(dsjson.parse(said, usertext.place(path)))
    notes = config.check()
    if vocab is not None:
        config.grow(vocab)
    context = config.number(config.family.context)
    end = config.get("eos_token_id")
    return Found(folder, config.model(), context, end, config.packed(), notes)


def usually(folder: str) -> str:
    """Return the location for notes about keys that no spec gives."""
    return f"--from {printable(folder)} without a spec"


def usual(folder: str, context: int) -> Node:
    """Return a spec without a model."""
    where = usually(folder)
    root = yamltext.Reader(lambda line: where).document(USUAL)
    root.value["train"].value["sequence"] = Node(min(context, CONTEXT), where)
    return root


def taken(keys: Iterable[tuple[str, Node]], folder: str) -> Names:
    """Return a note about the defaults used because neither a spec nor --set gives them."""
    told = [
        f"{key}: {shown(node.value)}"
        for key, node in keys
        if node.where == usually(folder) and not isinstance(node.value, (dict, list))
    ]
    return (
        (f"no spec is given, so these defaults apply: {', '.join(told)}",)
        if told
        else ()
    )


def adopt(root: Node, found: Found) -> None:
    """Put the model into a spec, and a name if it has none.

    Raises SpecError if the spec has a model already.
    """
    keys = root.value
    if "model" in keys:
        raise SpecError(
            f"{keys['model'].where}: model: is given both in the spec and by --from; "
            "allowed: only one of them"
        )
    keys["model"] = found.model
    base = os.path.basename(os.path.abspath(found.folder))
    name = NOT_IN_NAMES.sub("-", base)[:64] or "model"
    keys.setdefault("name", Node(name, usually(found.folder)))


def ends(root: Node, found: Found) -> None:
    """Set the token that ends a document, if a spec masks documents and does not give it."""
    data = root.value.get("data")
    if not data or not isinstance(data.value, dict) or "end" in data.value:
        return
    said = data.value.get("documents")
    if said and said.value == "mask" and type(found.end.value) is int:
        data.value["end"] = found.end


def unlike(root: Node, found: Found) -> Names:
    """Return notes if the weights are quantized, and if samples have more positions than the model
    was made for."""
    sequence = root.at(("train", "sequence"))
    packed = hfpacked.note(*found.packed, root) if found.packed else ()
    if type(sequence.value) is not int or sequence.value <= found.context:
        return packed
    return (
        *packed,
        f"{sequence.where}: train.sequence: {sequence.value} exceeds the {found.context} "
        "positions in config.json",
    )
