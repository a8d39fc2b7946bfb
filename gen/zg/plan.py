"""plan.py -- the Plan: all that a training program will do, as frozen records (text: text.py).

Invariants
 1. Flat: a line is a step. Only grains repeat: section `grain` runs `repeat` times in a step, and
    an operand `lo` grows by its `per` from one grain to the next. Or all grains of a step go
    through each unit together: the section runs once.
 2. The same for every rank; what differs by rank is written `r*BYTES`.
Offsets and sizes are bytes unless a field says elements. Imports nothing of ours.
"""
from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Head:
    """What the plan is of."""
    spec: str
    ranks: int
    zero: int
    prefetch: int               # units gathered ahead
    overlap: int                # 1: collectives have queues of their own
    real: str                   # f32 | bf16 | f16
    grains: int                 # of a rank in a step (accumulation)
    order: str                  # ranks | local: which leaves are summed first
    block: int                  # leaves of a tree; trees are added in order
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
class Phase:
    """A piece of a schedule: up to the step before `until` (0: for ever) a value goes from `begin`
    to `end` as x = (step - origin) / span does from 0 to 1, along a curve (line | cosine | log |
    inverse: begin / (1 + end * x)), in so many stairs. In text, its fields between colons."""
    until: int
    origin: int
    span: int
    curve: str
    stairs: int
    begin: float
    end: float

    def __str__(self) -> str:
        return (f"{self.until}:{self.origin}:{self.span}:{self.curve}:{self.stairs}:"
                f"{self.begin!r}:{self.end!r}")

    @classmethod
    def read(cls, text: str) -> "Phase":
        until, origin, span, curve, stairs, begin, end = text.split(":")
        return cls(int(until), int(origin), int(span), curve, int(stairs), float(begin), float(end))


@dataclass(frozen=True)
class Scaler:
    """zk_scaler's fields. In text, between colons."""
    first: float
    least: float
    window: int
    hysteresis: int
    consecutive: int

    def __str__(self) -> str:
        return (f"{self.first!r}:{self.least!r}:{self.window}:{self.hysteresis}:"
                f"{self.consecutive}")

    @classmethod
    def read(cls, text: str) -> "Scaler":
        first, least, *whole = text.split(":")
        return cls(float(first), float(least), *map(int, whole))


@dataclass(frozen=True)
class Recipe:
    """The optimizer, by its name in the op table, and zk_recipe's fields. moments: f32 | bf16, how
    they are stored; momentum: of beta1; scaler: of gradients, one or none. skips: after so many
    skipped steps in a row, but for those that lower a scale, a run ends."""
    optimizer: str
    moments: str
    rate: tuple[Phase, ...]
    momentum: tuple[Phase, ...]
    beta2: float
    eps: float
    clip: float
    scaler: tuple[Scaler, ...]
    skips: int


@dataclass(frozen=True)
class Group:
    """The ranks of a collective."""
    name: str
    ranks: int


@dataclass(frozen=True)
class Flat:
    """A flat buffer of parameters, `count` instances of `elems` elements, padded to ranks * shard.
    real, state, sum: what a rank keeps of it, whole or its shard; of which nothing moves has a sum
    of none. states: the classes that hold its state. nodes: pending sums, one for each bit of mask;
    in class `pend` where there is one. near: of a shard's elements, the first so many have their
    states on the device (classes `near_`) though the others' are offloaded."""
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
    near: int = 0

    @property
    def moves(self) -> bool:
        return self.sum != "none"


@dataclass(frozen=True)
class Tensor:
    """Where a tensor lies: instance i at element offset + i*offset_step of flat's i*flat_step. With
    a flat_step above 1 it is in so many slices of rows, each of which fills an instance of the
    flat.
    parts: name=rows in the weights' file, {l} stands for i, {l+N} for N + i; what `shape` has
    beyond these is zero and no part of the model. key: of its random numbers. rate: its factor
    of lr; decay: its weight decay; frozen: it never moves, and has no part in the norm."""
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
    rate: float
    decay: float
    frozen: int

    @property
    def elems(self) -> int:                 # of the model
        return math.prod(self.shape[1:]) * sum(int(p.rpartition("=")[2]) for p in self.parts)


@dataclass(frozen=True)
class Class:
    """One kind of buffer: slot i at `at` + i*stride in the arena. kind: shared (peers read it) |
    private | scratch | gpu (only in a GPU's arena) | hosted (in the host arena) | host (in the
    host arena of a GPU's rank alone) | filed (in the file arena), in this order."""
    name: str
    kind: str
    slots: int
    stride: int
    at: int


@dataclass(frozen=True)
class File:
    """Where the file arena lies: a directory, which a run may say otherwise; what moves to and from
    it goes in blocks of so many bytes, at most `depth` of them under way on a queue."""
    path: str
    block: int
    depth: int


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
    """A kernel call. args: `formal+bytes`, `class+bytes`, `...+r*bytes`, a number, null, sources.
    Neighbours of the same `rounds` above 1 are a loop; c, also in `...+c*bytes`, is its round."""
    kernel: str
    launch: str
    args: tuple[str, ...]
    rounds: int = 1


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
    files: tuple[File, ...] = ()        # one where there is a file arena

    def flat(self, name: str) -> Flat:
        return next(f for f in self.flats if f.name == name)

    def cls(self, name: str) -> Class:
        return next(c for c in self.classes if c.name == name)

    def section(self, name: str) -> Section:
        return next(s for s in self.sections if s.name == name)

    @property
    def step(self) -> tuple[Section, ...]:      # of a training step
        return tuple(s for s in self.sections if s.name in ("begin", "grain", "update"))

    @cached_property
    def together(self) -> int:          # grains that go through a unit before the next one's turn
        return self.head.grains // self.section("grain").repeat

    @cached_property
    def apart(self) -> bool:            # own grains are summed in class `pend`, then over ranks
        return self.head.order == "local" and self.head.ranks > 1 and \
            any(f.sum == "shard" for f in self.flats)

    @property
    def pushes(self) -> bool:           # the host sums leaves, and not what ranks have summed
        return self.below and not self.apart

    @cached_property
    def offload(self) -> bool:          # the optimizer's states lie in the host arena
        return any(c.name == "hctl" for c in self.classes)

    @cached_property
    def below(self) -> bool:            # sums of gradients do, too
        return any(c.kind == "hosted" for c in self.classes if c.name.startswith("sum."))

    def masters(self, f: Flat, near: str = "") -> tuple[Class, bool]:
        """The class of a flat's masters, or of those that stay on the device (near_), and whether
        every rank has all of them."""
        apart = f"{near}master" in self.states(f, near)
        what, kept = (f"{near}master", f.state) if apart else ("real", f.real)
        return self.cls(f"{what}.{f.name}"), kept == "whole"

    def states(self, f: Flat, near: str) -> tuple[str, ...]:
        """The classes that hold a flat's state, or what of it stays on the device."""
        names = {c.name for c in self.classes} if near else ()
        kept = tuple(f"near_{s}" for s in ("master", "m", "v") if f"near_{s}.{f.name}" in names)
        return kept if near else f.states

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
    def filed(self) -> int:             # bytes of a rank's file arena
        return self.end("filed")

    @property
    def host(self) -> int:              # bytes of the pinned host arena of a GPU's rank
        return self.end("hosted", "host")
