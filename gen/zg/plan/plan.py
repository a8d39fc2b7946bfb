"""plan.py -- the Plan: all that a training program will do, as frozen records (text: text.py).

Invariants
 1. Flat: a line is a step. Only micro-batches repeat: section `micro_batch` runs `repeat` times per
    training step, and an operand `lo` grows by its `per` from one micro-batch to the next. The
    blocks of a sample on a rank go through each unit together. So do all micro-batches with
    `train.accumulate: layers`; then the section runs once.
 2. Ranks share one plan. Numbers that differ by rank are written `r*BYTES`, or `GROUP*BYTES` by the
    rank's place in a group.
 3. A slot of a temporary class holds its content up to its last use, which is marked (`x[3]!`).
    After that step, in the order of that queue, the slot is dead. At the end of an evaluation all
    such slots are dead.
Offsets and sizes are bytes unless a field says elements.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property

from .operand import ALL as ALL
from .operand import Arg, Ints, Layers, Names, by_place
from .quantized import Quantized
from .recipe import Phase as Phase
from .recipe import Recipe, Stated
from .recipe import Scaler as Scaler
from .size import minus, plus

# Levels of a sum: a rank's own micro-batches of a step, and its own blocks of a sample. Beside
# BLOCKS, STEP has the rank's samples.
STEP = "step"
BLOCKS = "blocks"


@dataclass(frozen=True)
class Order:
    """The levels of a gradient's sum, innermost first. A level is a group whose ranks are summed,
    or STEP or BLOCKS for a rank's own gradients. In text `ranks`: all ranks, then micro-batches;
    `local`: the other way round; else the list of levels."""

    levels: Names

    WORDS = {"ranks": (ALL, STEP), "local": (STEP, ALL)}

    def __str__(self) -> str:
        for word, levels in self.WORDS.items():
            if levels == self.levels:
                return word
        return ",".join(self.levels)

    @classmethod
    def read(cls, text: str) -> Order:
        return cls(cls.WORDS.get(text) or tuple(text.split(",")))

    @property
    def groups(self) -> Names:
        return tuple(level for level in self.levels if level not in (STEP, BLOCKS))

    def steps(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """Return how far apart neighbours at each level are among all gradients. sizes: of all
        levels."""
        out, each = {}, 1
        for level in self.levels:
            out[level] = each
            each *= sizes[level]
        return out


@dataclass(frozen=True)
class Head:
    """Global numbers of a plan: model, batch, ranks and ZeRO settings."""

    spec: str
    ranks: int
    zero: int
    prefetch: int  # how many units are all-gathered ahead
    overlap: int  # 1: collectives run on queues of their own
    real: str  # f32 | bf16 | f16
    micro_batches: int  # per rank and step (gradient accumulation)
    order: Order
    block: int  # gradients per tree of a sum; trees are added in order
    # of gradients over ranks: exact | fast (NCCL's reduce-scatter)
    reduction: str
    batch: int
    sequence: int
    width: int
    vocab: int
    ignore: int
    seed: int
    params: int
    live: int  # the most elements gathered at once
    bound: int  # upper bound of `live`
    targets: Names  # cpu, sm_90 ...: columns of the launch table
    margin: int = 0  # SMs of a GPU that GEMMs leave to NCCL; 0: none
    shuffle: int = 0  # 1: the seed draws the order of samples in each epoch
    end: int = -1  # token after which positions restart; -1: none
    keyed: int = 0  # 1: each sample has a key for its random numbers
    local: int = 0  # ranks per host, numbered consecutively; 0: all
    # Order of products of bf16 on a CPU: auto | pairs | tiles.
    products: str = "auto"
    # Mean of a step's loss: over tokens | over each micro_batch, then over micro-batches.
    loss_mean: str = "tokens"
    blocks: int = 1  # equal parts of a sample, each of which has a gradient
    context: int = 1  # ranks that share the blocks of a sample

    @property
    def bytes(self) -> int:
        """Return the bytes of an element of the stored type."""
        return 4 if self.real == "f32" else 2

    @property
    def rows(self) -> int:
        """Return the tokens of a micro-batch, or of a block of it."""
        return self.batch * self.sequence // self.blocks

    @property
    def own_blocks(self) -> int:
        """Return the blocks of a sample on one rank."""
        return self.blocks // self.context

    @property
    def own(self) -> dict[str, int]:
        """Return the sizes of the levels of a rank's own gradients."""
        if BLOCKS not in self.order.levels:
            return {STEP: self.micro_batches}
        return {BLOCKS: self.own_blocks, STEP: self.micro_batches // self.own_blocks}

    @property
    def shape(self) -> str:
        """Return the tokens of a micro-batch, or of a block of it, in words."""
        block = f", a block of {self.blocks}" if self.blocks > 1 else ""
        return f"{self.batch} x {self.sequence // self.blocks} tokens{block}"

    @property
    def value(self) -> int:
        """Return the bytes of a unit's output for one micro-batch."""
        return self.rows * self.width * self.bytes


@dataclass(frozen=True)
class Axis:
    """An axis of the grid of all ranks: `size` places, `stride` ranks from one to the next. A rank
    is the sum of its places times the strides."""

    name: str
    size: int
    stride: int


@dataclass(frozen=True)
class Group:
    """The ranks that meet in a collective: they differ only along these axes. A rank's place in the
    group counts fastest along the last axis. Without axes the place is the rank."""

    name: str
    ranks: int
    axes: Names = ()


@dataclass(frozen=True)
class Flat:
    """A flat buffer of parameters, `count` instances of `elems` elements, padded to ranks * shard.

    nodes: pending sums of gradients, one per bit of mask; they lie in class `pending` if there is
    one. owners: the group in whose order ranks own shards.
    """

    name: str
    count: int
    elems: int
    shard: int
    nodes: int
    mask: int
    owners: str = ALL

    def first_part(self, s: Store) -> bool:
        """Return whether a store holds only the first elements of a shard: they stay on the device
        while the rest is offloaded."""
        return s.n < self.shard and not s.first


@dataclass(frozen=True)
class Store:
    """Location of one state of a flat: instance i is in slot i of class `cls`.

    It holds elements [first, first + n) of each shard that a rank has. The ranks of group `over`
    have equally many shards, in order of their places; '': every rank has all shards. what: params
    (the parameters that functions read), master, m, v, sum (of gradients). Parameters without a
    stored master are the masters themselves. Frozen parameters have no other state.
    """

    what: str
    flat: str
    dtype: str
    first: int
    n: int
    cls: str
    over: str = ""

    @property
    def whole(self) -> bool:
        return not self.over


@dataclass(frozen=True)
class Tensor:
    """Location of a tensor: instance i starts at element offset + i * offset_step of flat instance
    i * flat_step.

    A flat_step above 1 is the number of slices of rows that the tensor is cut into; each fills one
    instance of the flat. parts: name=rows in the weights' file, {l} stands for i, {l+N} for N + i;
    elements of `shape` beyond these rows are zero padding. key: key of its random numbers. rate:
    factor of the learning rate. decay: weight decay. frozen: it is never updated and not counted in
    the gradient's norm. quantized: its format; `shape` and `parts` then count stored elements.
    heads: the file has a q, a k and a v for each of so many heads, where the rows here are the q of
    all heads, the k and the v; 0: the file has the rows' order.
    """

    name: str
    flat: str
    offset: int
    offset_step: int
    flat_step: int
    count: int
    shape: Ints
    parts: Names
    key: int
    key_step: int
    mean: float
    std: float
    rate: float
    decay: float
    frozen: int
    quantized: Quantized = Quantized()
    heads: int = 0

    @property
    def elems(self) -> int:
        """Return the tensor's stored elements without padding."""
        return math.prod(self.shape[1:]) * sum(
            int(p.rpartition("=")[2]) for p in self.parts
        )

    @property
    def params(self) -> int:
        """Return the model's parameters in the tensor."""
        return self.quantized.elems or self.elems


# Targets that allocate a class: all; `unshared` (no access to peers' memory); `gpu`. Each includes
# the ones before it.
TARGETS = ("all", "unshared", "gpu")


def having(target: str) -> Names:
    """Return the entries of TARGETS that hold for a column of the launch table."""
    return TARGETS[:1] if target == "cpu" else TARGETS


@dataclass(frozen=True)
class Class:
    """One kind of buffer: slot i starts at `at` + i*stride of an arena (device | host | file).

    readers: own (its rank alone) | peers; targets: one of TARGETS. The classes of an arena are
    sorted by TARGETS, and those that peers read come first.
    """

    name: str
    arena: str
    readers: str
    targets: str
    slots: int
    stride: int
    at: int

    @property
    def bytes(self) -> int:
        return self.slots * self.stride


@dataclass(frozen=True)
class File:
    """Location of the file arena: a folder, which a run may override. Transfers go in blocks of
    `block` bytes, at most `depth` of them in flight per queue."""

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
    """A pair of kernel and shape. shape: the whole numbers of its calls."""

    name: str
    kernel: str
    shape: Ints


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
    def read(cls, text: str) -> Grid:
        blocks, block, shared = text.split(":")
        x, y, z = blocks.split("x")
        return cls(int(x), int(y), int(z), int(block), int(shared))


@dataclass(frozen=True)
class Run:
    """Settings of a launch on some targets: the kernel's tile, a GPU's grids in order, bytes needed
    of class `workspace`, and SMs that a GEMM leaves free."""

    launch: str
    targets: Names
    tile: Ints
    workspace: int
    grids: tuple[Grid, ...]
    margin: int = 0


@dataclass(frozen=True)
class Call:
    """A kernel call with its operands in the order of kernels/zk.h. Consecutive calls with the same
    `rounds` above 1 form a loop."""

    kernel: str
    launch: str
    args: tuple[Arg, ...]
    rounds: int = 1


@dataclass(frozen=True)
class Fn:
    """A function of train.c: its inputs, outputs, numbers, and kernel calls in order. flats: the
    flat of each formal that is a flat's parameters; dF is the gradient of formal F. In text such a
    formal is FORMAL:FLAT. then: the exchanges that follow the function, without a launch."""

    name: str
    ins: Names
    outs: Names
    ints: Names
    flops: int | Layers  # of one call of the function
    calls: tuple[Call, ...]
    flats: tuple[tuple[str, str], ...] = ()
    then: tuple[Call, ...] = ()

    def flat(self, formal: str) -> str:
        """Return the flat of a formal of parameters or of a gradient; '' for any other."""
        of = dict(self.flats)
        return of.get(formal) or of.get(formal.removeprefix("d"), "")

    @property
    def body(self) -> str:
        """Return the first word of the name: fwd.block -> fwd."""
        return self.name.partition(".")[0]


@dataclass(frozen=True)
class Ref:
    """Bytes from `at` on in slot `index` of a class, plus by_rank for each place in a group. last:
    the slot's content is used for the last time."""

    cls: str
    index: int
    at: int = 0
    last: bool = False
    by_rank: int = 0
    group: str = ALL

    def __str__(self) -> str:
        at, mark = f"+{self.at}" if self.at else "", "!" if self.last else ""
        rank = by_place(self.group, self.by_rank)
        return f"{self.cls}[{self.index}]{at}{rank}{mark}"


@dataclass(frozen=True)
class Event:
    name: str
    index: int

    def __str__(self) -> str:
        return f"{self.name}[{self.index}]"


Refs = tuple[Ref, ...]
Events = tuple[Event, ...]


@dataclass(frozen=True)
class Int:
    """A number of a step: value + per * the micro-batch's index."""

    name: str
    value: int
    per: int = 0

    def __str__(self) -> str:
        return f"{self.name}={self.value}" + (f"+g*{self.per}" if self.per else "")


@dataclass(frozen=True)
class Step:
    """One line of a plan: on `queue`, after `waits`, do `op` for `unit`, then record `recs`. group:
    the ranks that meet in it; '' if the step is local to a rank."""

    queue: str
    op: str
    unit: str
    ins: Refs = ()
    outs: Refs = ()
    ints: tuple[Int, ...] = ()
    waits: Events = ()
    recs: Events = ()
    group: str = ""

    @property
    def refs(self) -> Refs:
        return *self.ins, *self.outs

    @property
    def layer(self) -> int:
        """Return the index of the unit that a function is called for, or 0."""
        return next((i.value for i in self.ints if i.name == "l"), 0)

    @property
    def events(self) -> Events:
        return *self.waits, *self.recs

    @property
    def kind(self) -> str:
        """Return the first word of the op: fwd.block -> fwd."""
        return self.op.partition(".")[0]


@cache
def unit_of(text: str) -> tuple[str, int]:
    """Kind and index of a unit: `block[3]` -> (block, 3)."""
    name, _, index = text.partition("[")
    return name, int(index[:-1]) if index else 0


@dataclass(frozen=True)
class Section:
    """Steps in order of issue, run `repeat` times in a row."""

    name: str
    repeat: int
    steps: tuple[Step, ...]


@dataclass(frozen=True)
class Plan:
    head: Head
    recipe: Recipe
    stated: tuple[Stated, ...]
    groups: tuple[Group, ...]
    flats: tuple[Flat, ...]
    stores: tuple[Store, ...]
    tensors: tuple[Tensor, ...]
    classes: tuple[Class, ...]
    tables: tuple[Table, ...]
    launches: tuple[Launch, ...]
    runs: tuple[Run, ...]
    fns: tuple[Fn, ...]
    events: Events  # each event's name and count
    sections: tuple[Section, ...]
    files: tuple[File, ...] = ()  # one if there is a file arena
    axes: tuple[Axis, ...] = ()  # of the grid of ranks; none: one axis of all

    def flat(self, name: str) -> Flat:
        return next(f for f in self.flats if f.name == name)

    def group(self, name: str) -> Group:
        return next(g for g in self.groups if g.name == name)

    def cls(self, name: str) -> Class:
        return next(c for c in self.classes if c.name == name)

    def parts(self, s: Store) -> int:
        """Return how many shards a rank has of a stored state, one after the other."""
        return self.head.ranks // (self.group(s.over).ranks if s.over else 1)

    def begin(self, s: Store) -> int:
        """Return how many elements of a slot lie before a stored state. The class of parameters
        holds whole shards, of which masters may be a part; other classes have their state alone."""
        (params,) = self.stored("params", s.flat)
        return s.first if s.cls == params.cls else 0

    def section(self, name: str) -> Section:
        return next(s for s in self.sections if s.name == name)

    @property
    def step(self) -> tuple[Section, ...]:
        """Return the sections of a training step."""
        return tuple(
            s for s in self.sections if s.name in ("begin", "micro_batch", "update")
        )

    @cached_property
    def together(self) -> int:
        """Return how many micro-batches go through a unit before the next unit's turn."""
        return self.head.micro_batches // self.section("micro_batch").repeat

    @property
    def several(self) -> str:
        """Return the micro-batches that go through a unit together, in words."""
        if self.section("micro_batch").repeat == 1:
            return f"all {self.together} micro-batches of a step"
        return f"the {self.together} blocks of a sample on a rank"

    def on_host(self, group: str) -> int:
        """Return how many ranks of a rank's group are on its own host."""
        g, local = self.group(group), self.head.local or self.head.ranks
        if not self.axes:
            return min(local, g.ranks)
        inside = (
            a.size
            for a in self.axes
            if a.stride < local and (not g.axes or a.name in g.axes)
        )
        return math.prod(inside)

    @cached_property
    def meetings(self) -> Mapping[tuple[str, str], frozenset[str]]:
        """Return the commands in which a group's ranks meet on a queue, by queue and group."""
        found: dict[tuple[str, str], set[str]] = {}
        for x in (x for s in self.sections for x in s.steps if x.group):
            found.setdefault((x.queue, x.group), set()).add(x.op)
        return {pair: frozenset(ops) for pair, ops in found.items()}

    def stored(self, what: str, flat: str) -> tuple[Store, ...]:
        """Return the stores of a flat's state, in order of their elements."""
        return tuple(
            sorted(
                (s for s in self.stores if (s.what, s.flat) == (what, flat)),
                key=lambda s: s.first,
            )
        )

    @cached_property
    def sharing(self) -> str:
        """Return the group of neighbouring ranks that share samples, '' if each has whole ones or
        there is no such group."""
        N = self.head.context
        if N == 1:
            return ""
        axes = {a.name: a for a in self.axes}
        for g in self.groups:
            inner = all(axes[a].stride * axes[a].size <= N for a in g.axes)
            if g.ranks == N and (inner if g.axes else N == self.head.ranks):
                return g.name
        return ""

    def moves(self, f: Flat) -> bool:
        """Return whether any part of a flat is trainable."""
        return bool(self.stored("sum", f.name))

    def near(self, f: Flat) -> int:
        """Return how many elements at the start of a shard keep their states on the device while
        the rest is offloaded."""
        return next(
            (s.n for s in self.stores if s.flat == f.name and f.first_part(s)),
            0,
        )

    def masters(self, f: Flat) -> tuple[Store, ...]:
        """Return the stores of the masters, in order of their elements: initial values and loaded
        weights go there."""
        (params,) = self.stored("params", f.name)
        out: list[Store] = []
        end = 0
        for s in (
            *self.stored("master", f.name),
            replace(params, first=f.shard, n=0),
        ):
            if s.first > end:  # these parameters are the masters
                out.append(
                    replace(params, what="master", first=end, n=minus(s.first, end))
                )
            out += [s] * (s.n > 0)
            end = plus(s.first, s.n)
        return tuple(out)

    def copies(self, f: Flat) -> tuple[Store, ...]:
        """Return the stores of parameters that several ranks have beside separate masters."""
        (params,) = self.stored("params", f.name)
        several = params.whole or self.parts(params) > 1
        return tuple(
            replace(params, first=s.first, n=s.n)
            for s in self.stored("master", f.name)
            if several
        )

    def kept(self, f: Flat) -> tuple[Store, ...]:
        """Return the stores that a run keeps of a flat from step to step. Sums live for one step,
        and parameters with masters are made from these."""
        moments = (
            s
            for s in self.stores
            if s.flat == f.name and s.what not in ("params", "master", "sum")
        )
        return (
            *self.masters(f),
            *sorted(moments, key=lambda s: (s.what, s.first)),
        )

    @cached_property
    def offload(self) -> bool:
        """Return whether the optimizer states lie in the host arena."""
        return any(c.name == "hctl" for c in self.classes)

    @cached_property
    def passing(self) -> tuple[Class, ...]:
        """Return the classes whose slots die at a last use."""
        used = (r for s in self.sections for x in s.steps for r in x.refs)
        dying = {r.cls for r in used if r.last}
        return tuple(c for c in self.classes if c.name in dying)

    def end(
        self,
        arena: str,
        readers: Names = ("peers", "own"),
        targets: Names = TARGETS,
    ) -> int:
        """Return the end of the last class that matches."""
        return max(
            (
                c.at + c.bytes
                for c in self.classes
                if c.arena == arena and c.readers in readers and c.targets in targets
            ),
            default=0,
        )

    @property
    def shared(self) -> int:
        """Return the bytes at the start of the arena that peers read."""
        return self.end("device", readers=("peers",))

    def arena(self, target: str) -> int:
        """Return the bytes of a rank's device arena on a target."""
        return self.end("device", targets=having(target))

    @property
    def hosted(self) -> int:
        """Return the bytes of the host arena that every target has."""
        return self.end("host", targets=having("cpu"))

    @property
    def host(self) -> int:
        """Return the bytes of the pinned host arena of a GPU's rank."""
        return self.end("host")

    @property
    def filed(self) -> int:
        """Return the bytes of a rank's file arena."""
        return self.end("file")
