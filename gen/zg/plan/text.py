"""text.py -- prints, parses and hashes a plan's text.

parse(print_plan(p)) == p. The text is the dump, the golden file, the diff and the input of the
hash.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import re
import typing
from collections.abc import Callable
from itertools import zip_longest
from typing import Any

from .operand import Arg, Index, Layers, Names, Operand
from .plan import (
    ALL,
    Axis,
    Call,
    Class,
    Event,
    Events,
    File,
    Flat,
    Fn,
    Group,
    Head,
    Int,
    Launch,
    Plan,
    Ref,
    Run,
    Section,
    Step,
    Store,
    Table,
    Tensor,
)
from .recipe import Recipe, Stated, Turn

FORMAT = 4
_WORD = {
    Head: "head",
    Recipe: "recipe",
    Stated: "stated",
    Axis: "axis",
    Group: "group",
    Flat: "flat",
    Store: "store",
    Tensor: "tensor",
    Class: "class",
    Table: "table",
    Launch: "launch",
    Run: "run",
    File: "file",
}


def _show(v: object) -> str:
    if isinstance(v, tuple):
        return ",".join(_show(x) for x in v) or "-"
    return repr(v) if isinstance(v, float) else str(v)


def _record(r: object) -> str:
    """Return `word name field value ...`. A field equal to its default is left out."""
    names = [
        f.name
        for f in dataclasses.fields(r)  # type: ignore[arg-type]
        if getattr(r, f.name) != f.default
    ]
    first = _show(getattr(r, names[0]))
    return " ".join(
        [
            _WORD[type(r)],
            first,
            *(f"{n} {_show(getattr(r, n))}" for n in names[1:]),
        ]
    )


def _formals(fn: Fn, names: Names) -> str:
    said = ((name, fn.flat(name)) for name in names)
    return _show(tuple(f"{name}:{flat}" if flat else name for name, flat in said))


def _step(s: Step) -> str:
    parts = ["step", s.queue, s.op, s.unit or "-", *map(str, s.ins)]
    group = (s.group,) if s.group else ()
    for word, items in (
        (">", s.outs),
        ("over", group),
        ("with", s.ints),
        ("wait", s.waits),
        ("rec", s.recs),
    ):
        if items:
            parts += [word, *map(str, items)]
    return " ".join(parts)


def print_plan(p: Plan) -> str:
    lines = [f"plan {FORMAT}", _record(p.head), _record(p.recipe)]
    for part in (
        p.stated,
        p.axes,
        p.groups,
        p.flats,
        p.stores,
        p.tensors,
        p.classes,
        p.files,
        p.tables,
        p.launches,
        p.runs,
    ):
        lines += [_record(r) for r in part]
    for fn in p.fns:
        lines.append(
            f"fn {fn.name} flops {fn.flops} ins {_formals(fn, fn.ins)} "
            f"outs {_formals(fn, fn.outs)} ints {_show(fn.ints)}"
        )
        lines += [
            " ".join(
                [
                    f"call*{c.rounds}" if c.rounds > 1 else "call",
                    c.kernel,
                    c.launch,
                    *map(str, c.args),
                ]
            )
            for c in fn.calls
        ]
        lines += [" ".join(["then", c.kernel, *map(str, c.args)]) for c in fn.then]
    lines.append(" ".join(["events", *map(str, p.events)]))
    for section in p.sections:
        lines.append(f"section {section.name} repeat {section.repeat}")
        lines += [_step(s) for s in section.steps]
    return "\n".join(lines) + "\n"


def digest(p: Plan) -> str:
    """Return the SHA-256 of the text, 64 hex digits."""
    return hashlib.sha256(print_plan(p).encode()).hexdigest()


def layout_digest(p: Plan) -> str:
    """Return the SHA-256 of the location and owner of every parameter."""
    lines = [_record(g) for g in p.groups]
    states = "whole" if p.head.zero == 0 else "shard"
    lines += [_record(a) for a in p.axes]
    for f in p.flats:
        (params,) = p.stored("params", f.name)
        kept = "whole" if params.whole else "shard"
        if params.over not in ("", ALL):
            kept = params.over
        lines.append(_show((f.name, f.count, f.elems, f.shard, kept, states)))
    lines += [
        _show(
            (
                t.name,
                t.flat,
                t.offset,
                t.offset_step,
                t.flat_step,
                t.count,
                *t.shape,
            )
        )
        for t in p.tensors
    ]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


class PlanError(Exception):
    """Raised for a text that is no plan; names the line."""


def _number(text: str) -> int | float:
    try:
        return int(text)
    except ValueError:
        return float(text)


def _stated(text: str) -> int | float | Turn:
    return Turn.read(text) if ":" in text else _number(text)


_READ: dict[object, Callable[[str], object]] = {int | float | Turn: _stated}


def _value(text: str, kind: object) -> object:
    if typing.get_origin(kind) is tuple:
        inner = typing.get_args(kind)[0]
        return () if text == "-" else tuple(_value(t, inner) for t in text.split(","))
    read: Any = _READ.get(kind) or getattr(kind, "read", kind)
    return read(text)


def _names(text: str) -> Names:
    return () if text == "-" else tuple(text.split(","))


# Types of a record's fields, looked up once per record type.
_hints = functools.cache(typing.get_type_hints)


def _read(words: list[str], cls: type) -> object:
    hints = _hints(cls)
    first = dataclasses.fields(cls)[0].name
    pairs = {
        first: words[1],
        **dict(zip(words[2::2], words[3::2], strict=False)),
    }
    return cls(**{n: _value(text, hints[n]) for n, text in pairs.items()})


_REF = re.compile(r"^([\w.]+)\[(\d+)\](?:\+(\d+))?(?:\+([a-z_]+)\*(\d+))?(!?)$")
_INT = re.compile(r"^(\w+)=(-?\d+)(?:\+g\*(\d+))?$")


_OPERAND = re.compile(
    r"^([A-Za-z_][\w.]*)\+(\d+)(?:\+(?!c\*)([a-z_]+)\*(\d+))?(?:\+c\*(\d+))?(?::(\w+))?$"
)
_INDEX = re.compile(r"^l\*(\d+)(?:\+([a-z_]+)\*(\d+))?(?:\+(\d+))?(?:\+([a-z]+))?$")
_LAYERS = re.compile(r"^l:\d+(?:,\d+)*$")


def _group(text: str | None) -> str:
    return ALL if text in (None, "r") else text


def arg(text: str) -> Arg:
    """Parse an operand of a call."""
    if m := _OPERAND.match(text):
        by_rank, by_round = int(m[4] or 0), int(m[5] or 0)
        group = _group(m[3])
        return Operand(
            base=m[1],
            at=int(m[2]),
            by_rank=by_rank,
            by_round=by_round,
            name=m[6] or "",
            group=group,
        )
    if m := _INDEX.match(text):
        group = _group(m[2])
        by_rank, at = int(m[3] or 0), int(m[4] or 0)
        return Index(int(m[1]), by_rank, at, m[5] or "", group)
    if _LAYERS.match(text):
        return Layers.read(text)
    try:
        return _number(text)
    except ValueError:
        return text


def _flops(text: str) -> int | Layers:
    return Layers.read(text) if _LAYERS.match(text) else int(text)


def _ref(text: str) -> Ref:
    m = _REF.match(text)
    if not m:
        raise ValueError(text)
    slot, at, by_rank = int(m[2]), int(m[3] or 0), int(m[5] or 0)
    return Ref(
        cls=m[1],
        index=slot,
        at=at,
        last=bool(m[6]),
        by_rank=by_rank,
        group=_group(m[4]),
    )


def _event(text: str) -> Event:
    ref = _ref(text)
    return Event(ref.cls, ref.index)


def _int(text: str) -> Int:
    m = _INT.match(text)
    if not m:
        raise ValueError(text)
    return Int(m[1], int(m[2]), int(m[3] or 0))


def _parse_step(words: list[str]) -> Step:
    lists: dict[str, list[str]] = {
        "ins": [],
        ">": [],
        "over": [],
        "with": [],
        "wait": [],
        "rec": [],
    }
    where = "ins"
    for word in words[4:]:
        if word in lists:
            where = word
        else:
            lists[where].append(word)
    unit = "" if words[3] == "-" else words[3]
    return Step(
        queue=words[1],
        op=words[2],
        unit=unit,
        ins=tuple(map(_ref, lists["ins"])),
        outs=tuple(map(_ref, lists[">"])),
        ints=tuple(map(_int, lists["with"])),
        waits=tuple(map(_event, lists["wait"])),
        recs=tuple(map(_event, lists["rec"])),
        group="".join(lists["over"]),
    )


Formal = tuple[str, str]  # its name, and its flat or ''


def _formal(text: str) -> Formal:
    name, _, flat = text.partition(":")
    return name, flat


def _flats(ins: list[Formal], outs: list[Formal]) -> tuple[Formal, ...]:
    """Return the Fn.flats of formals. A gradient among the outputs is named d and its parameters'
    formal."""
    of = [(name, flat) for name, flat in ins if flat]
    of += [(name.removeprefix("d"), flat) for name, flat in outs if flat]
    return tuple(sorted(set(of)))


def parse(text: str) -> Plan:
    """Parse a plan's text. Raises PlanError, which names the first line that is malformed or would
    print differently."""
    lists: dict[type, list[Any]] = {cls: [] for cls in _WORD}
    by_word = {word: cls for cls, word in _WORD.items()}
    fns: list[Fn] = []
    sections: list[tuple[str, int, list[Step]]] = []
    events: Events = ()
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        try:
            if number == 1:
                if words != ["plan", str(FORMAT)]:
                    raise ValueError(line)
            elif words[0] in by_word:
                lists[by_word[words[0]]].append(_read(words, by_word[words[0]]))
            elif words[0] == "fn":
                formals = (map(_formal, _names(words[n])) for n in (5, 7))
                ins, outs = ([*x] for x in formals)
                fns.append(
                    Fn(
                        name=words[1],
                        ins=tuple(name for name, _ in ins),
                        outs=tuple(name for name, _ in outs),
                        ints=_names(words[9]),
                        flops=_flops(words[3]),
                        calls=(),
                        flats=_flats(ins, outs),
                    )
                )
            elif words[0].startswith("call"):
                args = tuple(map(arg, words[3:]))
                call = Call(words[1], words[2], args, int(words[0][5:] or 1))
                fns[-1] = dataclasses.replace(fns[-1], calls=fns[-1].calls + (call,))
            elif words[0] == "then":
                call = Call(words[1], "", tuple(map(arg, words[2:])))
                fns[-1] = dataclasses.replace(fns[-1], then=(*fns[-1].then, call))
            elif words[0] == "events":
                events = tuple(map(_event, words[1:]))
            elif words[0] == "section":
                sections.append((words[1], int(words[3]), []))
            elif words[0] == "step":
                sections[-1][2].append(_parse_step(words))
            else:
                raise ValueError(line)
        except (ValueError, KeyError, IndexError, TypeError) as e:
            raise PlanError(f"line {number}: not a line of a plan: {line[:80]}") from e
    if not lists[Head] or not lists[Recipe]:
        raise PlanError("no head or no recipe")
    p = Plan(
        head=lists[Head][0],
        recipe=lists[Recipe][0],
        stated=tuple(lists[Stated]),
        groups=tuple(lists[Group]),
        flats=tuple(lists[Flat]),
        stores=tuple(lists[Store]),
        tensors=tuple(lists[Tensor]),
        classes=tuple(lists[Class]),
        tables=tuple(lists[Table]),
        launches=tuple(lists[Launch]),
        runs=tuple(lists[Run]),
        fns=tuple(fns),
        events=events,
        sections=tuple(Section(n, r, tuple(s)) for n, r, s in sections),
        files=tuple(lists[File]),
        axes=tuple(lists[Axis]),
    )
    printed = print_plan(p)
    for number, (a, b) in enumerate(
        zip_longest(text.split("\n"), printed.split("\n")), 1
    ):
        if a != b:
            raise PlanError(
                f"line {number}: not as a plan is printed: {(a or 'the end')[:80]}"
            )
    return p
