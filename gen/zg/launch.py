"""launch.py -- pass 3: the functions of train.c, call by call, and the kernels' launch table.

A call's operands become text that train.c, the checker and a reader share:
  w+4096      bytes into a formal operand of the function
  tmp+64      bytes into a class with one slot
  sum+r*8192  r is the rank, l the instance, c the round      512, c   a number
  null, sources (what a reduction brought), &leaf (an array of one pointer), spans.F, recipe,
  moved.F: the spans of a flat that has frozen tensors, without these
A call's shape, by which it finds its launch, is its whole numbers; for the plan's own functions the
most elements of any such call.
"""
from __future__ import annotations

from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Iterator

from . import grids, offload, ops, plan
from .graph import Graph, Kind, Part
from .operands import formal
from .place import Bodies
from .sched import Schedule
from .shard import Shards, host_block
from .spec import Spec

FIXED = {"token": "tokens+0", "target": "targets+0", "sums": "sums+0", "null": "null",
         "acc": "acc+0", "scaler": f"ctl+{ops.SCALE}"}

# CPU tiles. Linears: rows, columns, depth of an output block, 0 for the kernel's choice by shape
# and threads. Elsewhere what a task takes: elements, or rows (of blocks of 1024 in the optimizer
# and sums).
LINEAR = tuple(call[0] for row in ops.SLICED for call in row)
ELEMENTS = ("zk_add", "zk_gelu_fwd", "zk_gelu_bwd", "zk_round")


def tile(kernel: str) -> tuple[int, int, int]:
    """How much of its output a task of a kernel makes; never changes a bit."""
    return (0, 0, 0) if kernel in LINEAR else (8192, 0, 0) if kernel in ELEMENTS else (16, 0, 0)


@dataclass
class _Table:
    """Launches by (kernel, shape), in order of first use."""
    rows: dict[tuple[str, tuple[int, ...]], plan.Launch] = field(default_factory=dict)

    def name(self, kernel: str, shape: tuple[int, ...]) -> str:
        if (kernel, shape) not in self.rows:
            short = kernel.removeprefix("zk_")
            n = sum(k == kernel for k, _ in self.rows)
            self.rows[kernel, shape] = plan.Launch(f"{short}.{n}", kernel, shape)
        return self.rows[kernel, shape].name

    def runs(self, targets: tuple[str, ...], real: int) -> Iterator[plan.Run]:
        """How each launch runs on each target; targets on which it runs alike share a row."""
        for row in self.rows.values():
            same: dict[grids.How, list[str]] = {}
            for t in targets:
                host = t == "cpu" or row.kernel.startswith("zk_host_")
                how = grids.How((), tile(row.kernel)) if host else \
                    grids.how(row.kernel, t, real, row.shape)
                same.setdefault(how, []).append(t)
            for how, names in same.items():
                yield plan.Run(row.name, tuple(names), how.tile, how.slot, how.space, how.grids)


@dataclass
class _Maker:
    spec: Spec
    graph: Graph
    shards: Shards
    bodies: Bodies
    formals: dict[tuple[str, str, int], tuple[tuple[str, ...], tuple[str, ...]]]
    tile: int                       # elements that an update on the host takes at a time; 0: none
    piece: int                      # that go to the host's sum at a time
    table: _Table = field(default_factory=_Table)
    fns: list[plan.Fn] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.real = ops.BYTES[self.spec.train.precision]
        self.W = self.spec.cluster.ranks
        self.flats = {f.name: f for f in self.shards.flats}

    # ---- functions of the graph

    def operand(self, kind: Kind, body: str, arg: tuple[str, object]) -> str:
        what, name = arg[0], arg[1]
        if what in ("number", "round", "int"):
            return str(name)
        if what == "work":
            return "work+0"
        if what == "fixed":
            return FIXED.get(str(name), f"{name}+0")
        if what in ("param", "grad"):
            flat, at = self.shards.place[str(name)]
            return f"{'d' * (what == 'grad')}{formal(kind, flat)}+{at * self.real}"
        if name in ("x", "y", "dx", "dy"):
            return f"{name}+0"
        save = self.bodies.save[kind.name].at
        tmp = self.bodies.tmp[kind.name, body].at
        return f"s+{save[str(name)]}" if name in save else f"tmp+{tmp[str(name)]}"

    def body(self, kind: Kind, name: str, part: Part) -> None:
        calls = []
        for c in part.calls:
            shape = tuple(int(str(a)) for k, a in c.args if k == "number" and isinstance(a, int))
            args = [self.operand(kind, name, a) for a in c.args]
            args = [a + (f"+c*{by}" if by else "") for a, by in zip_longest(args, c.grow)]
            calls.append(plan.Call(c.kernel, self.table.name(c.kernel, shape), tuple(args),
                                   c.rounds))
        ins, outs = self.formals[kind.name, name, part.number]
        number = f".{part.number}" if part.number >= 0 else ""
        ints = ("at",) if part.slices > 1 else ()
        self.fns.append(plan.Fn(f"{name}.{kind.name}{number}", ins, outs, ints,
                                sum(c.flops * c.rounds for c in part.calls), tuple(calls)))

    # ---- functions of the plan's own

    def own(self, name: str, ins: str, outs: str, ints: str, *calls: str,
            shape: tuple[int, ...] = ()) -> None:
        made = []
        for text in calls:
            kernel, *args = text.split()
            made.append(plan.Call(kernel, self.table.name(kernel, shape), tuple(args)))
        self.fns.append(plan.Fn(name, tuple(ins.split()), tuple(outs.split()), tuple(ints.split()),
                                0, tuple(made)))

    def moved(self, f: plan.Flat) -> str:
        """The tensors of a flat that are measured and updated."""
        frozen = any(t.frozen for t in self.shards.tensors if t.flat == f.name)
        return f"{'moved' if frozen else 'spans'}.{f.name}"

    def sums(self, f: plan.Flat) -> None:
        """Leaves to sums: over ranks, of this rank alone, and over ranks of such."""
        whole, S = f.shard * self.W, self.shards.sources
        mine = f"+r*{f.shard * 4}" if f.sum == "whole" else ""
        if self.shards.pushes:
            self.pushed(f)
        elif self.shards.order == "local":
            self.own(f"own.{f.name}", "leaf", "node", "",
                     f"zk_push node+0 {whole} &leaf 1 0 {whole} ctl+0 {self.spec.grains} {f.mask} "
                     f"{self.spec.block}", shape=(whole,))
            if self.W > 1:
                self.own(f"join.{f.name}", "", "node", "n",
                         f"zk_push node+0{mine} 0 sources {S} 1 n null {S} 0 "
                         f"{self.spec.block // self.spec.grains}", shape=(f.shard,))
        else:
            stride = whole if f.sum == "whole" else f.shard
            self.own(f"sum.{f.name}", "", "node", "n",
                     f"zk_push node+0{mine} {stride} sources {S} 0 n ctl+0 "
                     f"{S * self.spec.grains} {f.mask} {self.spec.block}",
                     shape=(f.shard,))
        norm = "zk_host_square_sum hsums+0" if self.shards.below else "zk_square_sum sums+0"
        self.own(f"norm.{f.name}", "g", "", "l",
                 f"{norm} g+0{mine} {self.moved(f)} l*{whole}+r*{f.shard} {f.shard}",
                 shape=(f.shard,))

    def pushed(self, f: plan.Flat) -> None:
        """What ranks brought in a grain, to a node; a grain's node to the host's sum."""
        S, block = self.shards.sources, self.spec.block
        if self.W > 1:
            self.own(f"sum.{f.name}", "", "node", "n",
                     f"zk_push node+0 0 sources {S} 0 n null {S} 0 {block}",
                     shape=(self.piece,))
        self.own(f"push.{f.name}", "leaf", "node", "n",
                 f"zk_host_push node+0 {f.shard} &leaf 1 {int(self.W > 1)} n hctl+0 "
                 f"{self.spec.grains} {f.mask} {host_block(block, S)}", shape=(self.piece,))

    def hosted(self, f: plan.Flat) -> None:
        """The same of a tile, n elements from `at` of the shard on, in the host arena."""
        first = f"l*{f.shard * self.W}+r*{f.shard}"
        far = f.shard - f.near
        shape, fresh = (min(self.tile, far),), "" if self.real == 4 else "w"
        kept = [s for s in f.states if s != "master"]
        rest = " ".join(f"{s}+0" if s in kept else "null" for s in ("m", "v"))
        master = "master" if "master" in f.states else "real"
        filed = offload.arena(self.spec, self.shards, master, f) == "filed"    # by tiles, too
        ints, part, most = ("l at n", f"{first}+at n", shape) if filed else \
            ("l", f"{first}{f'+{f.near}' if f.near else ''} {far}", (far,))
        self.own(f"init.{f.name}", "", "p", ints, f"zk_host_init p+0 spans.{f.name} {part} "
                 f"{self.spec.train.seed} 1", shape=most)
        # of the whole tile, for all of it goes up: between tensors too
        copy = ["zk_host_round w+0 p+0 n"] if fresh else []
        if f.moves:
            self.own(f"update.{f.name}", "g", f"{fresh} p {' '.join(kept)}", "l at n",
                     f"zk_host_update hctl+0 recipe null p+0 {rest} g+0 {self.moved(f)} "
                     f"{first}+at n", *copy, shape=shape)
        if fresh:
            self.own(f"cast.{f.name}", "p", "w", "n", *copy, shape=shape)
        self.own(f"hash.{f.name}", "p", "", f"{ints} out", f"zk_host_hash out p+0 spans.{f.name} "
                 f"{part} 1", shape=most)

    def optimizer(self, f: plan.Flat, near: str = "") -> None:
        """An owner's update, or of what stays on the device (near_); without masters of their own,
        the real copies are that."""
        whole, size = f.shard * self.W, f.near if near else f.shard
        every, states = f.state == "whole", f.states
        if near:
            states = tuple(s.removeprefix(near)
                           for s in offload.near_states(self.spec, self.shards, f))
        first, n = (f"l*{whole}", whole) if every else (f"l*{whole}+r*{f.shard}", size)
        part = lambda kept, width: f"+r*{f.shard * width}" if kept == "whole" and not every else ""
        g = f"g+0{part(f.sum, 4)}"
        m, v = (s if s in states else "" for s in ("m", "v"))
        rest = f"{m and 'm+0' or 'null'} {v and 'v+0' or 'null'} {g} {self.moved(f)} {first} {n}"
        apart = "master" in states
        width, kept = (4, f.state) if apart else (self.real, f.real)    # of what is the master
        p, full, copied = f"p+0{part(kept, width)}", int(width == 4), apart and self.real < 4
        w = f"w+0{part(f.real, self.real)}" if copied else "null"
        # of the whole shard where it goes down, after a skipped step and between tensors too
        copy = [f"zk_round w+0 p+0 {n}"] if copied and f.name in self.shards.away else []
        given = f"{'null' if copy else w} {p}" if full else f"{p} null"
        if f.moves:
            self.own(f"{near}update.{f.name}", "g", f"{'w' * copied} p {m} {v}", "l",
                     f"{ops.UPDATE} ctl+0 recipe {given} {rest}", *copy, shape=(n,))
        self.own(f"{near}init.{f.name}", "", "p", "l",
                 f"zk_init {p} spans.{f.name} {first} {n} {self.spec.train.seed} {full}",
                 shape=(n,))
        if copied:
            self.own(f"{near}cast.{f.name}", "p", "w", "", f"zk_round {w} p+0 {n}", shape=(n,))
        at = f"p+0+r*{f.shard * width}" if kept == "whole" else "p+0"
        self.own(f"{near}hash.{f.name}", "p", "", "l out",
                 f"zk_hash out {at} spans.{f.name} l*{whole}+r*{f.shard} {size} {full}",
                 shape=(size,))


def functions(spec: Spec, graph: Graph, shards: Shards, bodies: Bodies, schedule: Schedule,
              ) -> tuple[tuple[plan.Fn, ...], tuple[plan.Launch, ...], tuple[plan.Run, ...]]:
    """Every function, the launches, and how each runs on the spec's targets."""
    m = _Maker(spec, graph, shards, bodies, dict(schedule.formals), schedule.tile,
               schedule.piece)
    for kind in graph.kinds:
        for name in kind.bodies:
            for part in kind.parts(name):
                m.body(kind, name, part)
    for f in shards.flats:
        if f.moves:
            m.sums(f)
        m.hosted(f) if m.tile else m.optimizer(f)
        if f.near:
            m.optimizer(f, "near_")
    m.own("next", "", "ctl sums", "", "zk_begin ctl+0 sums+0 recipe")
    leaves = shards.sources if shards.order == "ranks" else 1
    m.own("count", "", "ctl", "", "zk_host_count ctl+0 1" if shards.pushes else
          f"zk_count ctl+0 {leaves}")
    if spec.together > 1:
        m.own("recount", "", "ctl", "", f"zk_count ctl+0 {-leaves * spec.together}")
    m.own("factor", "total", "ctl", "", "zk_factor ctl+0 total+0 recipe")
    for n, table in enumerate(graph.tables):
        m.own(f"turn.{n}", "", "table", "",
              f"zk_rope_table table+0 freq.{n} {spec.train.sequence} {table.head}",
              shape=(spec.train.sequence, table.head))
    runs = tuple(m.table.runs(spec.targets, m.real))
    _launched(spec, runs)
    return tuple(m.fns), tuple(m.table.rows.values()), runs


def _launched(spec: Spec, runs: tuple[plan.Run, ...]) -> None:
    """Refuses what is too large for a GPU's grid."""
    most = grids.SIDE_MOST
    for r, g in ((r, g) for r in runs for g in r.grids):
        if g.z > most:
            raise spec.wrong("train.micro_batch", f"{r.launch} has {g.z} blocks in z on "
                             f"{r.targets[0]}", f"up to {most}, or targets: [cpu]")
        if g.y > most or g.shared > min(grids.SHARED[t] for t in r.targets):
            raise spec.wrong("targets", f"{r.launch} has {g.y} blocks in y of {g.shared} bytes of "
                             f"shared memory on {r.targets[0]}, which does not hold so large a "
                             "model", "cpu alone, or fewer heads or a smaller vocab")
