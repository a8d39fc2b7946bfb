"""plan.py -- the Plan: everything a training program will do, as frozen records with one text form.

Invariants
 1. parse(print_plan(p)) == p; the text is dump, golden file, diff and hash input.
 2. Flat: a line is a step. Only grains repeat: section `grain` runs `repeat` times in a step, and
    an operand `lo` grows by its `per` from one grain to the next.
 3. The same for every rank; what differs by rank is written `r*BYTES`.
Offsets and sizes are bytes unless a field says elements. Imports nothing of ours.
"""
from __future__ import annotations

import dataclasses
import hashlib
import math
import re
import typing
from dataclasses import dataclass
from itertools import zip_longest

FORMAT = 1


@dataclass(frozen=True)
class Head:
    """What the plan is of."""
    spec: str
    ranks: int
    zero: int
    prefetch: int               # units gathered ahead
    overlap: int                # 1: collectives have queues of their own
    real: str                   # f32 | bf16
    grains: int                 # of a rank in a step (accumulation)
    order: str                  # ranks | local: which leaves are summed first
    sum: str                    # tree | fold
    reduction: str              # over ranks: exact | fast (NCCL's own sums)
    batch: int
    sequence: int
    width: int
    vocab: int
    ignore: int
    seed: int
    params: int
    live: int                   # most elements gathered at once
    bound: int                  # that they may not exceed
    targets: tuple[str, ...]    # cpu, sm_90 ...: columns of the launch table


@dataclass(frozen=True)
class Recipe:
    """The optimizer, by its name in the op table, and zk_recipe's fields."""
    optimizer: str
    lr: float
    min_lr: float
    beta1: float
    beta2: float
    eps: float
    decay: float
    clip: float
    warmup: int
    steps: int
    schedule: str


@dataclass(frozen=True)
class Group:
    """The ranks of a collective."""
    name: str
    ranks: int


@dataclass(frozen=True)
class Flat:
    """A flat buffer of parameters, `count` instances of `elems` elements, padded to ranks * shard.
    real, state, sum: what a rank keeps of it, whole or its shard. states: the classes that hold its
    state. nodes: pending sums, one for each bit of mask."""
    name: str
    count: int
    elems: int
    shard: int
    real: str
    state: str
    states: tuple[str, ...]
    sum: str
    nodes: int
    mask: int


@dataclass(frozen=True)
class Tensor:
    """Where a tensor lies: instance i at element offset + i*offset_step of flat's i*flat_step.
    parts: name=rows in the weights' file, {l} stands for first + i; what `shape` has beyond these
    is zero and no part of the model. key: of its random numbers."""
    name: str
    flat: str
    offset: int
    offset_step: int
    flat_step: int
    count: int
    shape: tuple[int, ...]
    parts: tuple[str, ...]
    key: int
    key_step: int
    mean: float
    std: float
    decay: int

    @property
    def elems(self) -> int:
        """of the model"""
        rows = sum(int(part.rpartition("=")[2]) for part in self.parts)
        return rows * math.prod(self.shape[1:])


@dataclass(frozen=True)
class Class:
    """One kind of buffer: slot i at `at` + i*stride in the arena. kind: shared (peers read it) |
    private | scratch | gpu (only in a GPU's arena) | hosted (in the host arena) | host (in the
    host arena of a GPU's rank alone), in this order."""
    name: str
    kind: str
    slots: int
    stride: int
    at: int


@dataclass(frozen=True)
class Table:
    """A rotary table's inverse frequencies."""
    name: str
    head: int
    freq: tuple[float, ...]


@dataclass(frozen=True)
class Launch:
    """A (kernel, shape); shape: the whole numbers of its calls."""
    name: str
    kernel: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Grid:
    """A launch on a GPU: blocks in x, y and z, threads of a block, bytes of dynamic shared
    memory. In text XxYxZ:THREADS:BYTES."""
    x: int
    y: int
    z: int
    block: int
    shared: int

    def __str__(self) -> str:
        return f"{self.x}x{self.y}x{self.z}:{self.block}:{self.shared}"

    @classmethod
    def read(cls, text: str) -> "Grid":
        blocks, block, shared = text.split(":")
        x, y, z = blocks.split("x")
        return cls(int(x), int(y), int(z), int(block), int(shared))


@dataclass(frozen=True)
class Run:
    """How a launch runs on targets: the kernel's tile, a GEMM's algorithm slot (0: the library's
    first choice), a GPU's launches in order, and bytes of the class `space` that it needs."""
    launch: str
    targets: tuple[str, ...]
    tile: tuple[int, ...]
    slot: int
    space: int
    grids: tuple[Grid, ...]


@dataclass(frozen=True)
class Call:
    """A kernel call. args: `formal+bytes`, `class+bytes`, `...+r*bytes`, a number, null,
    sources."""
    kernel: str
    launch: str
    args: tuple[str, ...]


@dataclass(frozen=True)
class Fn:
    """A function of train.c: what it reads, what it writes, its numbers, its calls in order."""
    name: str
    ins: tuple[str, ...]
    outs: tuple[str, ...]
    ints: tuple[str, ...]
    flops: int
    calls: tuple[Call, ...]


@dataclass(frozen=True)
class Ref:
    """Bytes from `at` on in slot `index` of a class."""
    cls: str
    index: int
    at: int = 0

    def __str__(self) -> str:
        return f"{self.cls}[{self.index}]" + (f"+{self.at}" if self.at else "")


@dataclass(frozen=True)
class Event:
    name: str
    index: int

    def __str__(self) -> str:
        return f"{self.name}[{self.index}]"


@dataclass(frozen=True)
class Int:
    """A number of a step: value + grain * per."""
    name: str
    value: int
    per: int = 0

    def __str__(self) -> str:
        return f"{self.name}={self.value}" + (f"+g*{self.per}" if self.per else "")


@dataclass(frozen=True)
class Step:
    """One line: on `queue`, after `waits`, do `op` for `unit`, then record `recs`."""
    queue: str
    op: str
    unit: str
    ins: tuple[Ref, ...] = ()
    outs: tuple[Ref, ...] = ()
    ints: tuple[Int, ...] = ()
    waits: tuple[Event, ...] = ()
    recs: tuple[Event, ...] = ()


@dataclass(frozen=True)
class Section:
    """Steps in order of issue; `repeat` times in a row."""
    name: str
    repeat: int
    steps: tuple[Step, ...]


@dataclass(frozen=True)
class Plan:
    head: Head
    recipe: Recipe
    groups: tuple[Group, ...]
    flats: tuple[Flat, ...]
    tensors: tuple[Tensor, ...]
    classes: tuple[Class, ...]
    tables: tuple[Table, ...]
    launches: tuple[Launch, ...]
    runs: tuple[Run, ...]
    fns: tuple[Fn, ...]
    events: tuple[Event, ...]           # name and how many
    sections: tuple[Section, ...]

    def flat(self, name: str) -> Flat:
        return next(f for f in self.flats if f.name == name)

    def cls(self, name: str) -> Class:
        return next(c for c in self.classes if c.name == name)

    def section(self, name: str) -> Section:
        return next(s for s in self.sections if s.name == name)

    @property
    def offload(self) -> bool:          # the optimizer's states lie in the host arena
        return self.end("hosted") > 0

    def masters(self, f: Flat) -> tuple[Class, bool]:
        """The class of a flat's f32 masters, and whether every rank has all of them."""
        what, kept = ("master", f.state) if "master" in f.states else ("real", f.real)
        return self.cls(f"{what}.{f.name}"), kept == "whole"

    @property
    def shared(self) -> int:            # bytes at the arena's start that peers read
        return self.end("shared")

    def end(self, *kinds: str) -> int:
        """Where the last class of these kinds ends."""
        return max((c.at + c.slots * c.stride for c in self.classes if c.kind in kinds), default=0)

    def arena(self, target: str) -> int:
        """Bytes of a rank's arena."""
        return self.end("shared", "private", "scratch", *(["gpu"] if target != "cpu" else []))

    @property
    def host(self) -> int:              # bytes of the pinned host arena of a GPU's rank
        return self.end("hosted", "host")


_WORD = {Head: "head", Recipe: "recipe", Group: "group", Flat: "flat", Tensor: "tensor",
         Class: "class", Table: "table", Launch: "launch", Run: "run"}


def _show(v: object) -> str:
    if isinstance(v, tuple):
        return ",".join(_show(x) for x in v) or "-"
    return repr(v) if isinstance(v, float) else str(v)


def _record(r: object) -> str:
    """`word name field value ...`"""
    names = [f.name for f in dataclasses.fields(r)]  # type: ignore[arg-type]
    first = _show(getattr(r, names[0]))
    return " ".join([_WORD[type(r)], first, *(f"{n} {_show(getattr(r, n))}" for n in names[1:])])


def _step(s: Step) -> str:
    parts = ["step", s.queue, s.op, s.unit or "-", *map(str, s.ins)]
    for word, items in ((">", s.outs), ("with", s.ints), ("wait", s.waits), ("rec", s.recs)):
        if items:
            parts += [word, *map(str, items)]
    return " ".join(parts)


def print_plan(p: Plan) -> str:
    lines = [f"plan {FORMAT}", _record(p.head), _record(p.recipe)]
    for part in (p.groups, p.flats, p.tensors, p.classes, p.tables, p.launches, p.runs):
        lines += [_record(r) for r in part]
    for fn in p.fns:
        lines.append(f"fn {fn.name} flops {fn.flops} ins {_show(fn.ins)} outs {_show(fn.outs)} "
                     f"ints {_show(fn.ints)}")
        lines += [f"call {c.kernel} {c.launch} {' '.join(c.args)}" for c in fn.calls]
    lines.append(" ".join(["events", *map(str, p.events)]))
    for section in p.sections:
        lines.append(f"section {section.name} repeat {section.repeat}")
        lines += [_step(s) for s in section.steps]
    return "\n".join(lines) + "\n"


def digest(p: Plan) -> str:
    """SHA-256 of the text, 64 hex digits."""
    return hashlib.sha256(print_plan(p).encode()).hexdigest()


def layout_digest(p: Plan) -> str:
    """SHA-256 of where every parameter lies and who owns it, nothing else."""
    lines = [_record(g) for g in p.groups]
    lines += [_show((f.name, f.count, f.elems, f.shard, f.real, f.state)) for f in p.flats]
    lines += [_show((t.name, t.flat, t.offset, t.offset_step, t.flat_step, t.count, *t.shape))
              for t in p.tensors]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


class PlanError(Exception):
    """A text that is no plan; names the line."""


def _value(text: str, kind: object) -> object:
    if typing.get_origin(kind) is tuple:
        inner = typing.get_args(kind)[0]
        return () if text == "-" else tuple(_value(t, inner) for t in text.split(","))
    return Grid.read(text) if kind is Grid else kind(text)  # type: ignore[operator]


def _names(text: str) -> tuple[str, ...]:
    return () if text == "-" else tuple(text.split(","))


def _read(words: list[str], cls: type) -> object:
    hints = typing.get_type_hints(cls)
    names = [f.name for f in dataclasses.fields(cls)]
    pairs = {names[0]: words[1], **dict(zip(words[2::2], words[3::2]))}
    return cls(**{n: _value(pairs[n], hints[n]) for n in names})


_REF = re.compile(r"^([\w.]+)\[(\d+)\](?:\+(\d+))?$")
_INT = re.compile(r"^(\w+)=(-?\d+)(?:\+g\*(\d+))?$")


def _ref(text: str) -> Ref:
    m = _REF.match(text)
    if not m:
        raise ValueError(text)
    return Ref(m[1], int(m[2]), int(m[3] or 0))


def _event(text: str) -> Event:
    ref = _ref(text)
    return Event(ref.cls, ref.index)


def _int(text: str) -> Int:
    m = _INT.match(text)
    if not m:
        raise ValueError(text)
    return Int(m[1], int(m[2]), int(m[3] or 0))


def _parse_step(words: list[str]) -> Step:
    lists: dict[str, list[str]] = {"ins": [], ">": [], "with": [], "wait": [], "rec": []}
    where = "ins"
    for word in words[4:]:
        if word in lists:
            where = word
        else:
            lists[where].append(word)
    unit = "" if words[3] == "-" else words[3]
    return Step(words[1], words[2], unit, tuple(map(_ref, lists["ins"])),
                tuple(map(_ref, lists[">"])), tuple(map(_int, lists["with"])),
                tuple(map(_event, lists["wait"])), tuple(map(_event, lists["rec"])))


def parse(text: str) -> Plan:
    """The Plan of a text; PlanError names the first line that is none or would print otherwise."""
    lists: dict[type, list] = {cls: [] for cls in _WORD}
    by_word = {word: cls for cls, word in _WORD.items()}
    fns: list[Fn] = []
    sections: list[tuple[str, int, list[Step]]] = []
    events: tuple[Event, ...] = ()
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        try:
            if number == 1:
                if words != ["plan", str(FORMAT)]:
                    raise ValueError(line)
            elif words[0] in by_word:
                lists[by_word[words[0]]].append(_read(words, by_word[words[0]]))
            elif words[0] == "fn":
                ins, outs, ints = (_names(words[n]) for n in (5, 7, 9))
                fns.append(Fn(words[1], ins, outs, ints, int(words[3]), ()))
            elif words[0] == "call":
                call = Call(words[1], words[2], tuple(words[3:]))
                fns[-1] = dataclasses.replace(fns[-1], calls=fns[-1].calls + (call,))
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
    made = [tuple(lists[cls]) for cls in (Group, Flat, Tensor, Class, Table, Launch, Run)]
    try:
        p = Plan(lists[Head][0], lists[Recipe][0], *made, tuple(fns), events,
                 tuple(Section(n, r, tuple(s)) for n, r, s in sections))
    except IndexError as e:
        raise PlanError("no head or no recipe") from e
    printed = print_plan(p)
    for number, (a, b) in enumerate(zip_longest(text.split("\n"), printed.split("\n")), 1):
        if a != b:
            raise PlanError(f"line {number}: not as a plan is printed: {(a or 'the end')[:80]}")
    return p
