"""spec.py -- a spec's file to a frozen Spec; every mistake of the user ends here as a SpecError.

    load("model.yaml", ["zero.stage=3", "cluster.ranks=4"], zero="ds_config.json")

YAML is composed, never constructed: no tag makes an object. Scalars are read as YAML 1.2 does, so
that 1e-3 is a number and `no` is a word. Only this file knows yaml.
"""
from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from typing import Callable, Iterator, Sequence, get_args, get_type_hints

import yaml
from pydantic import ValidationError

from . import dsconfig, dsjson, kinds
from .node import (DEPTH, NODES, Node, SpecError, dotted, meant, number, printable, several, shown)
from .schema import (TOKEN, TYPES, Aio, Cluster, Data, LossScale, Model, Op, Optimizer, Schedule,
                     Spec, SpecKeys, Train, Unit, Zero)
from .units import build, fail

__all__ = ["Cluster", "Data", "Model", "Op", "Optimizer", "Schedule", "Spec", "SpecError", "Train",
           "Unit", "Zero", "load"]

BYTES = 128 * 1024              # of a file; a spec of twenty kinds of block has 20 KiB
CHUNKS = 1024                   # of a micro-batch's tokens
_WORDS = {"": None, "~": None, "null": None, "Null": None, "NULL": None,
          "true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_TAGS = {f"tag:yaml.org,2002:{kind}" for kind in (
    "str", "int", "float", "bool", "null", "timestamp", "merge", "value", "seq", "map")}
_KEY = re.compile(r"[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)*")


# ---- text to nodes

def _text(path: str) -> str:
    """The contents of a user's file."""
    try:
        with open(path, "rb") as f:
            raw = f.read(BYTES + 1)
    except (OSError, ValueError) as e:
        why = (getattr(e, "strerror", None) or str(e)).lower()
        raise SpecError(f"{printable(path)}: cannot be read: {why}; "
                        "allowed: a file of text") from None
    if len(raw) > BYTES:
        raise SpecError(f"{printable(path)}: is too long for a spec; allowed: up to {BYTES} bytes")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as e:
        line = raw.count(b"\n", 0, e.start) + 1
        raise SpecError(f"{printable(path)}:{line}: byte 0x{raw[e.start]:02x} is no UTF-8; "
                        "allowed: UTF-8 text") from None


@dataclass
class _Reader:
    """Composed YAML to Nodes. place(line) is what an error says of where it is, lines from 0."""
    place: Callable[[int], str]
    count: int = 0

    def fail(self, line: int, wrong: str, allowed: str) -> SpecError:
        return SpecError(f"{self.place(line)}: {wrong}; allowed: {allowed}")

    def document(self, text: str) -> Node:
        try:
            root = yaml.compose(text, Loader=yaml.SafeLoader)
        except yaml.reader.ReaderError as e:
            line = text.count("\n", 0, e.position)
            raise self.fail(line, f"the character {ascii(chr(e.character))}",
                            "printable text") from None
        except yaml.MarkedYAMLError as e:
            mark = e.problem_mark or e.context_mark
            said = " ".join(f"{e.context or ''} {e.problem or ''}".split())
            raise self.fail(mark.line if mark else 0, f"broken syntax: {said}", "YAML") from None
        except RecursionError:
            raise self.fail(0, "is nested too deep", f"{DEPTH} levels") from None
        except (ValueError, OverflowError) as e:        # PyYAML on a broken %YAML line or \U escape
            raise self.fail(0, f"broken syntax: {ascii(str(e))}", "YAML") from None
        if root is None:
            raise self.fail(0, "is empty", "a spec: model, train, ...")
        return self.node(root, root.start_mark.line, 0)

    def node(self, n: yaml.Node, line: int, depth: int) -> Node:
        self.count += 1
        if self.count > NODES or depth > DEPTH:
            raise self.fail(line, "holds too much (aliases count each time)",
                            f"{NODES} values, {DEPTH} levels")
        if n.tag not in _TAGS:
            raise self.fail(n.start_mark.line, f"the tag {shown(n.tag)}", "plain YAML without tags")
        if isinstance(n, yaml.MappingNode):
            return Node(self.mapping(n, depth), self.place(line))
        if isinstance(n, yaml.SequenceNode):
            items = [self.node(item, item.start_mark.line, depth + 1) for item in n.value]
            return Node(items, self.place(line))
        return Node(n.value if n.style else _scalar(n.value), self.place(line))

    def mapping(self, n: yaml.MappingNode, depth: int) -> dict[str, Node]:
        found: dict[str, Node] = {}
        merged: dict[str, Node] = {}
        for key, value in n.value:
            line = key.start_mark.line
            if not isinstance(key, yaml.ScalarNode):
                raise self.fail(line, "a key that is no word", "keys that are words")
            if key.tag.endswith(":merge"):
                for source in value.value if isinstance(value, yaml.SequenceNode) else [value]:
                    if not isinstance(source, yaml.MappingNode):
                        raise self.fail(line, "<< of something that is no mapping",
                                        "<<: *ANCHOR of a mapping")
                    merged = {**self.node(source, line, depth + 1).value, **merged}
                continue
            if key.value in found:
                raise self.fail(line, f"{shown(key.value)} stands here twice", "each key once")
            found[key.value] = self.node(value, line, depth + 1)
        return {**merged, **found}


def _scalar(text: str) -> object:
    """An unquoted scalar."""
    if text in _WORDS:
        return _WORDS[text]
    if text.lower() in (".inf", "+.inf", "-.inf", ".nan"):
        return float(text.replace(".", ""))
    found = number(text)
    return text if found is None else found


def _place(path: str) -> Callable[[int], str]:
    return lambda line: f"{printable(path)}:{line + 1}"


def _document(path: str) -> Node:
    root = _Reader(_place(path)).document(_text(path))
    if not isinstance(root.value, dict):
        raise SpecError(f"{root.where}: the file holds {shown(root.value)}; "
                        f"allowed: a mapping with the keys {', '.join(SpecKeys.model_fields)}")
    return root


# ---- changes from the command line and from a ds_config.json

def _put(root: Node, key: str, value: Node | None) -> None:
    """Sets a dotted key, making the mappings on the way; None takes it out."""
    *above, last = key.split(".")
    at = root
    for n, step in enumerate(above):
        at = at.value.setdefault(step, Node({}, value.where if value else ""))
        if not isinstance(at.value, dict):
            holder = ".".join(above[:n + 1])
            raise SpecError(f"{value.where if value else at.where}: {key}: {holder} holds "
                            f"{shown(at.value)}; allowed: a key inside a mapping")
    if value is None:
        at.value.pop(last, None)
    else:
        at.value[last] = value


def _set(root: Node, text: str) -> None:
    """One --set KEY=VALUE."""
    key, equals, value = text.partition("=")
    if not equals or not _KEY.fullmatch(key):
        raise SpecError(f"--set: {shown(text)} is no KEY=VALUE; allowed: one like zero.stage=3")
    if not value.strip():
        raise SpecError(f"--set: {key}: has no value; allowed: {key}=VALUE")
    made = _Reader(lambda line: f"--set: {key}").document(value)
    for _, node in _all(made):
        node.where = "--set"
    _put(root, key, made)


def _all(node: Node, path: tuple[str | int, ...] = ()) -> list[tuple[tuple[str | int, ...], Node]]:
    """A node and all below it, each with its path."""
    value = node.value
    pairs = value.items() if isinstance(value, dict) else \
        enumerate(value) if isinstance(value, list) else ()
    return [(path, node), *(found for key, b in pairs for found in _all(b, (*path, key)))]


# ---- what pydantic found wrong, in our words

def _record(kind: object) -> type | None:
    """The record inside a type: Annotated[tuple[OpKeys, ...], ...] -> OpKeys."""
    if hasattr(kind, "model_fields") or hasattr(kind, "__dataclass_fields__"):
        return kind
    return next((r for r in map(_record, get_args(kind)) if r), None)


def _keys(path: tuple[str | int, ...]) -> list[str]:
    """The keys that the mapping at a path may have."""
    kind: type = SpecKeys
    for step in path:
        if isinstance(step, str):
            kind = _record(get_type_hints(kind, include_extras=True)[step]) or kind
    return list(kind.model_fields if hasattr(kind, "model_fields") else kind.__dataclass_fields__)


def _line(root: Node, error: dict) -> str:
    """One line for one of pydantic's errors."""
    path, kind = error["loc"], error["type"]
    where, key = root.at(path).where, dotted(path)
    if kind == "zg":
        return f"{where}: {key}: {error['msg']}"
    if kind == "missing":
        return f"{where}: {key}: is missing; it must be given"
    if kind in ("extra_forbidden", "unexpected_keyword_argument"):
        keys = _keys(path[:-1])
        hint = meant(str(path[-1]), keys)
        return f"{where}: {key}: is no key here; {hint}allowed: {', '.join(keys) or 'no key'}"
    if kind in ("tuple_type", "list_type"):
        return f"{where}: {key}: is {shown(error['input'])}; allowed: a list"
    keys = ", ".join(_keys(path))
    return (f"{where}: {key}: is {shown(error['input'])}; "
            f"allowed: {f'a mapping with the keys {keys}' if keys else '{}'}")


def _validate(root: Node) -> SpecKeys:
    try:
        return SpecKeys.model_validate(root.plain())
    except ValidationError as e:
        errors = sorted(e.errors(include_url=False), key=lambda error: error["type"] == "missing")
        raise several(_line(root, error) for error in errors) from None


# ---- checks between sections

def _near(n: int, of: Callable[[int], bool]) -> list[int]:
    """The nearest numbers below and above n, at most 2^20 away, that suit."""
    below = next((k for k in range(n, max(0, n - 2 ** 20), -1) if of(k)), None)
    above = next((k for k in range(n + 1, n + 2 ** 20) if of(k)), None)
    return [k for k in (below, above) if k]


def _batch(keys: SpecKeys, root: Node) -> None:
    """global_batch = accumulation x micro_batch x ranks."""
    G, B, W = keys.train.global_batch, keys.train.micro_batch, keys.cluster.ranks
    if G % (B * W) == 0:
        return
    step = B * W
    near = [g for g in (G // step * step, -(-G // step) * step) if g]
    good = [f"global_batch {' or '.join(map(str, near))}"]
    grains = G // B
    if G % B == 0:
        ranks = [w for w in _near(min(W, grains), lambda w: grains % w == 0) if w <= grains]
        good.append(f"cluster.ranks {' or '.join(map(str, ranks))}")
    paths = (("cluster", "ranks"), ("train", "micro_batch"), ("train", "global_batch"))
    path = next((p for p in paths if root.at(p).where == "--set"), paths[2])
    raise fail(root, path, f"global_batch {G} is no multiple of micro_batch {B} x {W} ranks",
               ", ".join(good))


def _typed(keys: SpecKeys, name: str, root: Node) -> Optimizer | Schedule:
    """A section with the defaults of its type; a key that another type takes is an error."""
    found, path = getattr(keys.train, name), ("train", name)
    rows = TYPES[type(found)]
    defaults = rows[found.type]
    others = {key for row in rows.values() for key in row} - set(defaults)
    given = root.at(("train",)).value.get(name, Node({}, "")).value
    for key, node in given.items():
        if key in others and node.value is not None:
            allowed = [k for k in _keys(path) if k not in others]
            raise fail(root, (*path, key), f"{found.type} takes no {key}", ", ".join(allowed))
    lacking = {key: x for key, x in defaults.items() if getattr(found, key) is None}
    for key in (k for k, x in lacking.items() if x is kinds.NEEDED):
        raise fail(root, (*path, key), f"is missing; {found.type} needs it", "a value for it")
    return replace(found, **lacking)


def _chunk(keys: SpecKeys, root: Node, model: Model) -> None:
    """head_chunk cuts a micro-batch evenly, and a head whose gradients can be summed in parts."""
    m, rows = keys.train.head_chunk, keys.train.micro_batch * keys.train.sequence
    path = ("train", "head_chunk")
    if m and rows % m:
        near = _near(min(m, rows), lambda n: rows % n == 0)
        raise fail(root, path, f"chunks of {m} do not divide the {rows} tokens of a micro-batch",
                   f"auto, {' or '.join(str(n) for n in near if n <= rows)}")
    if m and rows // m > CHUNKS:
        n = next(n for n in range(CHUNKS, 0, -1) if rows % n == 0)
        raise fail(root, path, f"chunks of {m} cut the {rows} tokens of a micro-batch into "
                   f"{rows // m}, more than {CHUNKS}", f"auto, or at least {rows // n}")
    if m and m < rows and model.units[-1].ops[-1].args["bias"]:
        raise fail(root, path, "the head's linear has a bias, whose gradient is summed at once",
                   f"auto, {rows}, or a head without bias")


def _optimizer(keys: SpecKeys, root: Node) -> Optimizer:
    o = _typed(keys, "optimizer", root)
    if o.nesterov and not o.momentum:
        raise fail(root, ("train", "optimizer", "nesterov"), "there is no momentum", "momentum > 0")
    for i, g in enumerate(o.groups):
        if g.frozen and (g.lr_factor, g.weight_decay) != (1.0, None):
            raise fail(root, ("train", "optimizer", "groups", i, "frozen"),
                       "what is frozen has no rate and no decay", "match and frozen alone")
    return o


def _schedule(keys: SpecKeys, root: Node) -> Schedule:
    s, lr = _typed(keys, "schedule", root), keys.train.optimizer.lr
    path = ("train", "schedule")
    if s.type in ("linear", "cosine") and s.steps <= s.warmup:
        raise fail(root, (*path, "steps"),
                   f"a {s.type} schedule of {s.steps} steps after a warmup of {s.warmup}",
                   "steps > warmup")
    if s.type == "wsd" and s.steps < s.warmup + s.decay:
        raise fail(root, (*path, "steps"), f"{s.steps} steps do not hold a warmup of {s.warmup} "
                   f"and a decay of {s.decay}", f"at least {s.warmup + s.decay}")
    if s.type in ("linear", "cosine", "wsd") and s.min_lr > lr:
        raise fail(root, (*path, "min_lr"), f"{s.min_lr:g} is above lr {lr:g} of "
                   f"{root.at(('train', 'optimizer', 'lr')).where}", f"0 to {lr:g}")
    if s.total_num_steps is not None and s.total_num_steps <= max(2, s.warmup_num_steps):
        raise fail(root, (*path, "total_num_steps"), f"{s.total_num_steps} steps end before the "
                   "decay begins", f"more than {max(2, s.warmup_num_steps)}")
    if s.type == "OneCycle" and s.cycle_min_lr > s.cycle_max_lr:
        raise fail(root, (*path, "cycle_min_lr"), f"{s.cycle_min_lr:g} is above cycle_max_lr "
                   f"{s.cycle_max_lr:g}", f"0 to {s.cycle_max_lr:g}")
    if s.cycle_momentum and keys.train.optimizer.type not in kinds.CYCLED and \
            root.at((*path, "cycle_momentum")).value is True:
        raise fail(root, (*path, "cycle_momentum"), f"{keys.train.optimizer.type} has no betas",
                   "false")
    return s


def _held(s: Schedule, root: Node) -> Iterator[str]:
    """Notes of keys that all of our types know, and one has no use for."""
    path = ("train", "schedule")
    for key in ("steps", "min_lr") if s.type == "constant" else ():
        if root.at(path).value.get(key) is not None:
            at = (*path, key)
            yield f"{root.at(at).where}: {dotted(at)}: has no effect: constant stays at lr"


def _filed(keys: SpecKeys, root: Node) -> Iterator[str]:
    """One file a rank, in one directory, where anything lies in a file; notes of keys without
    effect."""
    z, paths = keys.zero, {}
    there = [p for p in ("offload_optimizer", "offload_param") if getattr(z, p).device == "nvme"]
    for part in ("offload_optimizer", "offload_param"):
        path, at = getattr(z, part).nvme_path, ("zero", part, "nvme_path")
        if path is not None and part in there:
            paths.setdefault(path, at)
        elif path is not None:
            yield f"{root.at(at).where}: {dotted(at)}: has no effect while the device is no nvme"
    if z.offload_optimizer.ratio < 1 and z.offload_optimizer.device == "none":
        at = ("zero", "offload_optimizer", "ratio")
        yield f"{root.at(at).where}: {dotted(at)}: has no effect while the device is none"
    if z.offload_param.max_in_cpu and "offload_param" not in there:
        at = ("zero", "offload_param", "max_in_cpu")
        yield f"{root.at(at).where}: {dotted(at)}: has no effect while the device is no nvme"
    if len(paths) > 1:
        first, (_, at) = next(iter(paths)), list(paths.items())[1]
        raise fail(root, at, f"a rank has one file, and the optimizer's path is {first}",
                   "one path, or one of them")
    if there and not paths:
        raise fail(root, ("zero", there[0], "nvme_path"), "is missing; device nvme needs it",
                   "the directory of a disk")
    if not there and z.aio != Aio():
        yield f"{root.at(('zero', 'aio')).where}: zero.aio: has no effect: nothing lies in a file"


def _reduction(keys: SpecKeys, root: Node) -> None:
    if keys.train.reduction == "fast" and "cpu" in keys.targets:
        raise fail(root, ("train", "reduction"), "fast lets NCCL sum, and the target cpu has none",
                   "exact, or `targets` of GPUs alone")


def _loss_scale(keys: SpecKeys, root: Node) -> Iterator[str]:
    """Notes of keys without effect."""
    if keys.train.precision != "f16" and keys.train.loss_scale != LossScale():
        raise fail(root, ("train", "loss_scale"), f"{keys.train.precision} needs none",
                   "train.precision f16 beside it, or the file without it")
    s = keys.train.loss_scale
    if not s.scale and s.min > 2.0 ** s.initial_scale_power:
        raise fail(root, ("train", "loss_scale", "min"),
                   f"{s.min:g} is above the first scale, 2^{s.initial_scale_power}",
                   f"up to {2.0 ** s.initial_scale_power:g}")
    if s.scale:
        for key, node in root.at(("train", "loss_scale")).value.items():
            if key != "scale":
                yield f"{node.where}: train.loss_scale.{key}: has no effect: the scale is fixed"


def _offload(s: Spec) -> None:
    z = s.zero
    optimizer, params = (f"zero.offload_{part}.device" for part in ("optimizer", "param"))
    if z.offload_optimizer.device != "none" and z.stage == 0:
        raise s.wrong(optimizer, "at stage 0 every rank updates all parameters",
                      "zero.stage 1, 2 or 3 beside it, or none")
    if z.offload_param.device != "none" and z.stage < 3:
        raise s.wrong(params, f"at stage {z.stage} every rank has all parameters",
                      "zero.stage 3 beside it, or none")
    if z.offload_optimizer.device != "none" and not z.offload_optimizer.ratio:
        raise s.wrong("zero.offload_optimizer.ratio", "0 leaves the host nothing",
                      "above 0, or zero.offload_optimizer.device none")


def _masters(s: Spec) -> None:
    z, o = s.zero, s.train.optimizer
    where = "train.optimizer.masters"
    why = {"f32": "parameters of f32 are masters themselves", "f16": "parameters of f16 need f32's"}
    if not o.masters and s.train.precision in why:
        raise s.wrong(where, why[s.train.precision], "train.precision bf16 beside it, or true")
    if not o.masters and not z.offload_optimizer.device == z.offload_param.device == "none":
        raise s.wrong(where, "what is offloaded has masters", "true, or "
                      "zero.offload_optimizer.device and zero.offload_param.device none beside it")


def _activations(s: Spec) -> None:
    if s.train.offload_activations and s.train.accumulate == "layers":
        raise s.wrong("train.offload_activations", "accumulate layers keeps those of all grains on "
                      "the device", "false, or train.accumulate grains")


def agree(s: Spec) -> None:
    """Refuses keys that contradict each other, of those that may be changed to fit a memory."""
    _offload(s)
    _masters(s)
    _activations(s)


def load(path: str, sets: Sequence[str] = (), zero: str | None = None) -> Spec:
    """The spec of a file, changed by a DeepSpeed config, then by KEY=VALUE texts: the last wins."""
    root, notes = _document(path), ()
    for text in sets:
        _set(root, text)
    if zero is not None:
        config = dsconfig.read(dsjson.parse(_text(zero), _place(zero)), root)
        for key, node in config.changes:
            _put(root, key, node)
        for text in sets:
            _set(root, text)
        notes = config.notes
    keys = _validate(root)
    model, grouped = build(keys, root)
    _batch(keys, root)
    notes = (*notes, *grouped, *_filed(keys, root), *_held(keys.train.schedule, root),
             *_loss_scale(keys, root))
    _chunk(keys, root, model)
    _reduction(keys, root)
    train = replace(keys.train, optimizer=_optimizer(keys, root), schedule=_schedule(keys, root))
    data = keys.data
    if "ignore" not in root.at(("data",)).value:
        data = replace(data, ignore=TOKEN if model.vocab <= TOKEN else None)
    places = {dotted(key) if key else "": node.where for key, node in _all(root)}
    made = Spec(keys.name, model, keys.zero, train, keys.cluster, keys.targets, data, notes, places)
    agree(made)
    return made
