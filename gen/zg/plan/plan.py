"""plan.py -- the Plan: all that a training program will do, as frozen records (text: text.py).

Invariants
 1. Flat: a line is a step. Only micro-batches repeat: section `micro_batch` runs `repeat` times in
    a step, and an operand `lo` grows by its `per` from one micro-batch to the next. Or all
    micro-batches of a step go through each unit together: the section runs once.
 2. The same for every rank; what differs by rank is written `r*BYTES`, or `GROUP*BYTES` by the
    rank's place in a group.
 3. A slot of a class that passes holds something until its last use, which is marked (`x[3]!`): it
    is dead behind that step, on that queue. At an evaluation's end all such slots are.
Offsets and sizes are bytes unless a field says elements.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property

from .operand import ALL as ALL
from .operand import Arg, Ints, Layers, Names, by_place
from .recipe import Phase as Phase
from .recipe import Recipe, Stated
from .recipe import Scaler as Scaler

STEP = "step"  # as a level of a sum: a rank's own micro-batches


@dataclass(frozen=True)
class Order:
    """The levels of a gradient's sum, innermost first: groups over whose ranks it is summed, and
    STEP, a rank's own micro-batches. In text `ranks`: all ranks, then micro-batches; `local`: the
    other way; else the levels."""

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
        return tuple(level for level in self.levels if level != STEP)


@dataclass(frozen=True)
class Head:
    """What the plan is of."""

    spec: str
    ranks: int
    zero: int
    prefetch: int  # units gathered ahead
    overlap: int  # 1: collectives have queues of their own
    real: str  # f32 | bf16 | f16
    micro_batches: int  # of a rank in a step (accumulation)
    order: Order
    block: int  # leaves of a tree; trees are added in order
    reduction: str  # over ranks: exact | fast (NCCL's own sums)
    batch: int
    sequence: int
    width: int
    vocab: int
    ignore: int
    seed: int
    params: int
    live: int  # most elements gathered at once
    bound: int  # that they may not exceed
    targets: Names  # cpu, sm_90 ...: columns of the launch table
    margin: int = 0  # SMs of a GPU that GEMMs leave to NCCL; 0: none
    shuffle: int = 0  # 1: the seed draws the order of an epoch's samples
    end: int = -1  # the token behind which positions begin anew; -1: none
    keyed: int = 0  # 1: each sample has a key of random numbers
    local: int = 0  # ranks of a host, each host's in a row; 0: all
    products: str = (
        "auto"  # how a CPU sums those of bf16: auto | pairs | tiles
    )

    @property
    def bytes(self) -> int:  # of a real
        return 4 if self.real == "f32" else 2

    @property
    def rows(self) -> int:  # tokens of a micro-batch
        return self.batch * self.sequence

    @property
    def value(self) -> int:  # bytes of what a unit hands on
        return self.rows * self.width * self.bytes


@dataclass(frozen=True)
class Axis:
    """An axis of the grid of all ranks: `size` places, `stride` ranks from each to the next. A rank
    is the sum of its places times their strides."""

    name: str
    size: int
    stride: int


@dataclass(frozen=True)
class Group:
    """The ranks of a collective: those that differ along these axes alone. A rank's place in the
    group counts fastest along the last axis; without axes it is the rank."""

    name: str
    ranks: int
    axes: Names = ()


@dataclass(frozen=True)
class Flat:
    """A flat buffer of parameters, `count` instances of `elems` elements, padded to ranks * shard.
    nodes: pending sums of gradients, one for each bit of mask; in class `pending` where there is
    one. owners: the group whose place is the number of a rank's shard."""

    name: str
    count: int
    elems: int
    shard: int
    nodes: int
    mask: int
    owners: str = ALL

    def first_part(self, s: Store) -> bool:
        """A store of a shard's first elements alone: they stay near, where the others go away."""
        return s.n < self.shard and not s.first


@dataclass(frozen=True)
class Store:
    """A state of a flat, and where it lies: instance i in slot i of class `cls`, elements
    [first, first + n) of each shard that a rank has. The ranks of group `over` have as many shards
    each, in order of their places; '': no group, every rank has all shards. what: params (what
    functions read), master, m, v, sum (of gradients). Where no master is stored, parameters are
    the masters; what is frozen has no other state."""

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
    shape: Ints
    parts: Names
    key: int
    key_step: int
    mean: float
    std: float
    rate: float
    decay: float
    frozen: int

    @property
    def elems(self) -> int:  # of the model
        return math.prod(self.shape[1:]) * sum(
            int(p.rpartition("=")[2]) for p in self.parts
        )


# Whose ranks have a class: all; those that cannot read peers' memory, to which pieces are sent
# (unshared); GPUs'. Who has one of these has those before it, too.
TARGETS = ("all", "unshared", "gpu")


def having(target: str) -> Names:  # of a column of the launch table
    return TARGETS[:1] if target == "cpu" else TARGETS


@dataclass(frozen=True)
class Class:
    """One kind of buffer: slot i at `at` + i*stride of an arena (device | host | file). readers:
    own (its rank alone) | peers; targets: one of TARGETS. In an arena classes are in the order of
    TARGETS, and what peers read is first."""

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
    """How a launch runs on targets: the kernel's tile, a GPU's launches in order, bytes of the
    class `workspace` that it needs, and SMs that a GEMM leaves alone."""

    launch: str
    targets: Names
    tile: Ints
    workspace: int
    grids: tuple[Grid, ...]
    margin: int = 0


@dataclass(frozen=True)
class Call:
    """A kernel call, its operands in the order of kernels/zk.h. Neighbours of the same `rounds`
    above 1 are a loop."""

    kernel: str
    launch: str
    args: tuple[Arg, ...]
    rounds: int = 1


@dataclass(frozen=True)
class Fn:
    """A function of train.c: what it reads, what it writes, its numbers, its calls in order."""

    name: str
    ins: Names
    outs: Names
    ints: Names
    flops: int | Layers  # of a call
    calls: tuple[Call, ...]

    @property
    def body(self) -> str:  # fwd.block -> fwd
        return self.name.partition(".")[0]


@dataclass(frozen=True)
class Ref:
    """Bytes from `at` on in slot `index` of a class, by_rank further for each place in a group;
    last: the last use of all that it holds."""

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
    """A number of a step: value + micro_batch * per."""

    name: str
    value: int
    per: int = 0

    def __str__(self) -> str:
        return f"{self.name}={self.value}" + (
            f"+g*{self.per}" if self.per else ""
        )


@dataclass(frozen=True)
class Step:
    """One line: on `queue`, after `waits`, do `op` for `unit`, then record `recs`. group: whose
    ranks meet in it; '': none, it is the rank's own."""

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
    def layer(
        self,
    ) -> int:  # which unit of its kind a function is called as, where it asks
        return next((i.value for i in self.ints if i.name == "l"), 0)

    @property
    def events(self) -> Events:
        return *self.waits, *self.recs

    @property
    def kind(self) -> str:  # of function or command: fwd.block -> fwd
        return self.op.partition(".")[0]


@cache
def unit_of(text: str) -> tuple[str, int]:
    """Kind and index of a unit: `block[3]` -> (block, 3)."""
    name, _, index = text.partition("[")
    return name, int(index[:-1]) if index else 0


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
    events: Events  # name and how many
    sections: tuple[Section, ...]
    files: tuple[File, ...] = ()  # one where there is a file arena
    axes: tuple[Axis, ...] = ()  # of the grid of ranks; none: one of all

    def flat(self, name: str) -> Flat:
        return next(f for f in self.flats if f.name == name)

    def group(self, name: str) -> Group:
        return next(g for g in self.groups if g.name == name)

    def cls(self, name: str) -> Class:
        return next(c for c in self.classes if c.name == name)

    def parts(self, s: Store) -> int:
        """Shards that a rank has of what is stored, one after the other."""
        return self.head.ranks // (self.group(s.over).ranks if s.over else 1)

    def begin(self, s: Store) -> int:
        """Elements of a slot before those of what is stored. The class of parameters holds a whole
        shard, of which masters may be a part; any other has its state's elements alone."""
        (params,) = self.stored("params", s.flat)
        return s.first if s.cls == params.cls else 0

    def section(self, name: str) -> Section:
        return next(s for s in self.sections if s.name == name)

    @property
    def step(self) -> tuple[Section, ...]:  # of a training step
        return tuple(
            s
            for s in self.sections
            if s.name in ("begin", "micro_batch", "update")
        )

    @cached_property
    def together(self) -> int:
        """Micro-batches that go through a unit before the next one's turn."""
        return self.head.micro_batches // self.section("micro_batch").repeat

    def on_host(self, group: str) -> int:
        """Ranks of a rank's group that are on its own host."""
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
        """What the ranks of a group do together on a queue, for each such pair."""
        found: dict[tuple[str, str], set[str]] = {}
        for x in (x for s in self.sections for x in s.steps if x.group):
            found.setdefault((x.queue, x.group), set()).add(x.op)
        return {pair: frozenset(ops) for pair, ops in found.items()}

    def stored(self, what: str, flat: str) -> tuple[Store, ...]:
        """Where a state of a flat lies, in order of its elements."""
        return tuple(
            sorted(
                (s for s in self.stores if (s.what, s.flat) == (what, flat)),
                key=lambda s: s.first,
            )
        )

    def moves(self, f: Flat) -> bool:  # something in it trains
        return bool(self.stored("sum", f.name))

    def near(self, f: Flat) -> int:
        """Elements at a shard's begin whose states stay on the device, though the rest's go."""
        return next(
            (s.n for s in self.stores if s.flat == f.name and f.first_part(s)),
            0,
        )

    def masters(self, f: Flat) -> tuple[Store, ...]:
        """What initial values and saved weights go to, in order of its elements."""
        (params,) = self.stored("params", f.name)
        out, end = [], 0
        for s in (
            *self.stored("master", f.name),
            replace(params, first=f.shard, n=0),
        ):
            if s.first > end:  # parameters are what has no master of its own
                out.append(
                    replace(params, what="master", first=end, n=s.first - end)
                )
            out += [s] * (s.n > 0)
            end = s.first + s.n
        return tuple(out)

    def copies(self, f: Flat) -> tuple[Store, ...]:
        """Parameters that several ranks have, beside masters of their own."""
        (params,) = self.stored("params", f.name)
        several = params.whole or self.parts(params) > 1
        return tuple(
            replace(params, first=s.first, n=s.n)
            for s in self.stored("master", f.name)
            if several
        )

    def kept(self, f: Flat) -> tuple[Store, ...]:
        """What a run keeps of a flat from step to step: sums are of one step, and parameters that
        have masters are made from these."""
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
    def offload(self) -> bool:  # the optimizer's states lie in the host arena
        return any(c.name == "hctl" for c in self.classes)

    @cached_property
    def passing(self) -> tuple[Class, ...]:  # what their slots hold dies
        used = (r for s in self.sections for x in s.steps for r in x.refs)
        dying = {r.cls for r in used if r.last}
        return tuple(c for c in self.classes if c.name in dying)

    def end(
        self,
        arena: str,
        readers: Names = ("peers", "own"),
        targets: Names = TARGETS,
    ) -> int:
        """Where the last of these classes ends."""
        return max(
            (
                c.at + c.bytes
                for c in self.classes
                if c.arena == arena
                and c.readers in readers
                and c.targets in targets
            ),
            default=0,
        )

    @property
    def shared(self) -> int:  # bytes at the arena's start that peers read
        return self.end("device", readers=("peers",))

    def arena(self, target: str) -> int:  # bytes of a rank's
        return self.end("device", targets=having(target))

    @property
    def hosted(self) -> int:  # bytes of the host arena on every target
        return self.end("host", targets=having("cpu"))

    @property
    def host(self) -> int:  # bytes of the pinned host arena of a GPU's rank
        return self.end("host")

    @property
    def filed(self) -> int:  # bytes of a rank's file arena
        return self.end("file")
