"""launch.py -- pass 3: the functions of train.c, call by call, and the kernels' launch table.

A call's shape, by which it finds its launch, is its whole numbers; for the plan's own functions the
most elements of any such call.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import zip_longest

from ..facts import grids, ops
from ..facts.kernels import KERNELS, NULL, PRODUCTS, total
from ..graph.graph import Graph, Kind, Part
from ..plan import plan
from ..plan.operand import Arg, Index, Ints, Names, Operand, whole
from ..read.spec import Spec
from . import names
from .levels import Phase
from .operands import Formals, formal
from .place import Bodies
from .sched import Schedule
from .shard import Flat, Shards
from .stores import Kept

FIXED: dict[str, Operand | str] = {
    "token": Operand("tokens"),
    "target": Operand("targets"),
    "position": Operand("positions"),
    "key": Operand("keys"),
    "null": NULL,
    "scaler": Operand("ctl", ops.SCALE, name="scale"),
}
CTL = Operand("ctl")
Own = tuple[Arg, ...]  # a kernel and what it takes


def task(kernel: str) -> int:
    """What a CPU's thread takes at a time; never changes a bit. Of a twin on the host 16, also
    where its row says more."""
    return KERNELS[kernel].task if kernel in KERNELS else 16


@dataclass
class _Table:
    """Launches by (kernel, shape), in order of first use."""

    rows: dict[tuple[str, Ints], plan.Launch] = field(default_factory=dict)

    def name(self, kernel: str, shape: Ints) -> str:
        if (kernel, shape) not in self.rows:
            short = kernel.removeprefix("zk_")
            n = sum(k == kernel for k, _ in self.rows)
            self.rows[kernel, shape] = plan.Launch(
                f"{short}.{n}", kernel, shape
            )
        return self.rows[kernel, shape].name

    def runs(
        self, targets: Names, real: int, margin: int
    ) -> Iterator[plan.Run]:
        """How each launch runs on each target; targets on which it runs alike share a row."""
        for row in self.rows.values():
            same: dict[grids.How, list[str]] = {}
            for t in targets:
                host = t == "cpu" or row.kernel.startswith("zk_host_")
                how = (
                    grids.How((), (task(row.kernel), 0, 0))
                    if host
                    else grids.how(row.kernel, t, real, row.shape)
                )
                same.setdefault(how, []).append(t)
            for how, alike in same.items():
                left = (
                    margin
                    if "cpu" not in alike and row.kernel in PRODUCTS
                    else 0
                )
                yield plan.Run(
                    launch=row.name,
                    targets=tuple(alike),
                    tile=how.tile,
                    workspace=how.workspace,
                    grids=how.grids,
                    margin=left,
                )


@dataclass
class _Maker:
    spec: Spec
    graph: Graph
    shards: Shards
    kept: Kept
    bodies: Bodies
    formals: dict[tuple[str, str, int], Formals]
    tile: int  # elements that the host works on at a time; 0: it does not
    piece: int  # that go to the host's sum at a time
    table: _Table = field(default_factory=_Table)
    fns: list[plan.Fn] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.real = ops.BYTES[self.spec.train.precision]
        self.W = self.spec.cluster.ranks
        self.grid = self.shards.grid
        self.flats = {f.name: f for f in self.shards.flats}
        kinds = self.graph.kinds
        self.tensors = {kind.name: names.tensors(kind) for kind in kinds}
        self.values = {kind.name: names.values(kind) for kind in kinds}

    # ---- functions of the graph

    def operand(
        self, kind: Kind, body: str, what: str, value: Arg, grow: int
    ) -> Arg:
        """grow: bytes from round to round."""
        if what in ("number", "round", "int"):
            return value
        place = self.place(kind, body, what, str(value))
        if grow and isinstance(place, Operand):
            return replace(place, by_round=grow)
        return place

    def place(
        self, kind: Kind, body: str, what: str, name: str
    ) -> Operand | str:
        if what == "work":
            return Operand("work")
        if what == "fixed":
            return FIXED.get(name, Operand(name))
        if what in ("param", "grad"):
            flat, at = self.shards.place[name]
            base = (
                formal(kind, flat)
                if what == "param"
                else f"d{formal(kind, flat)}"
            )
            called = self.tensors[kind.name][name]
            return Operand(base, at * self.real, name=called)
        if name in ("x", "y", "dx", "dy"):
            return Operand(name)
        called = self.values[kind.name][name]
        saved = self.bodies.save[kind.name].at
        if name in saved:
            return Operand("s", saved[name], name=called)
        at = self.bodies.tmp[kind.name, body].at[name]
        return Operand("tmp", at, name=called)

    def body(self, kind: Kind, name: str, part: Part) -> None:
        calls = []
        for c in part.calls:
            args = [
                self.operand(kind, name, what, value, grow or 0)
                for (what, value), grow in zip_longest(c.args, c.grow)
            ]
            calls.append(
                plan.Call(
                    c.kernel,
                    self.table.name(c.kernel, c.shape),
                    tuple(args),
                    c.rounds,
                )
            )
        ins, outs, flats = self.formals[kind.name, name, part.number]
        number = f".{part.number}" if part.number >= 0 else ""
        self.fns.append(
            plan.Fn(
                name=f"{name}.{kind.name}{number}",
                ins=ins,
                outs=outs,
                ints=part.ints,
                flats=flats,
                flops=total([c.flops for c in part.calls]),
                calls=tuple(calls),
            )
        )

    # ---- functions of the plan's own

    def own(
        self,
        name: str,
        ins: Names,
        outs: Names,
        ints: Names,
        *calls: Own,
        shape: Ints = (),
    ) -> None:
        made = []
        for word, *args in calls:
            kernel = str(word)
            launch = self.table.name(kernel, shape)
            made.append(plan.Call(kernel, launch, tuple(args)))
        self.fns.append(
            plan.Fn(
                name=name,
                ins=ins,
                outs=outs,
                ints=ints,
                flops=0,
                calls=tuple(made),
            )
        )

    def shard(self, f: Flat, at: int = 0, more: str = "") -> Index:
        """The number of an element of a rank's shard."""
        return self.share(f, self.grid.depth, at, more)

    def share(self, f: Flat, depth: int, at: int = 0, more: str = "") -> Index:
        """The number of an element of what a rank has at a depth."""
        whole, group = self.shards.share(f, 0), self.grid.over(depth)
        if not group:
            return Index(whole, 0, at, more)
        share = self.shards.share(f, depth)
        return Index(whole, share, at, more, group)

    def part(
        self, name: str, f: Flat, kept: int, depth: int, width: int
    ) -> Operand:
        """The operand of a rank's part at a depth, within what it keeps at a lesser depth."""
        group = self.grid.group(kept, depth)
        if not group:
            return Operand(name)
        step = self.shards.share(f, depth).bytes(width)
        return Operand(name, 0, step, group=group)

    def sums(self, f: Flat) -> None:
        """Leaves to sums, and their norm."""
        for x in self.shards.sums.phases:
            self.phase(f, x)
        if self.shards.sums.on_host:
            self.pushed(f)
        host = self.shards.sums.host
        kernel = "zk_host_square_sum" if host else "zk_square_sum"
        sums = Operand("hsums" if host else "sums")
        part = f"spans.{f.name}", self.shard(f), f.shard
        self.own(
            f"norm.{f.name}",
            ("g",),
            (),
            ("l",),
            (kernel, sums, self.mine("g", f, self.grid.depth), *part),
            shape=(f.shard,),
        )

    def mine(self, name: str, f: Flat, depth: int) -> Operand:
        """The part of a sum that is a rank's at a depth."""
        return self.part(name, f, self.shards.sums.depth, depth, 4)

    def phase(self, f: Flat, x: Phase) -> None:
        """The function of a phase. It counts no leaves where the host adds micro-batches."""
        sums, A = self.shards.sums, self.spec.micro_batches
        if sums.on_host and not x.level:
            return
        counted = x.counted and not sums.on_host
        last = x == sums.phases[-1]
        share = self.shards.share(f, x.depth)
        node, stride = Operand("node"), 0
        if counted or last and not sums.host:
            node = self.mine("node", f, x.depth)
        if counted:
            kept = 0 if sums.pending else sums.depth
            stride = self.shards.share(f, kept)
            node = self.part("node", f, kept, x.depth, 4)
        total = x.sources * (A if counted else 1)
        tree = (
            CTL if counted else NULL,
            total,
            f.mask if counted else 0,
            self.spec.block // x.inner,
        )
        came: tuple[Arg, ...]
        if x.level:
            came = "sources", x.sources, int(not x.leaves), "n"
        else:
            came = "&leaf", 1, 0, share
        piece = self.piece if last and sums.on_host else share
        self.own(
            f"{x.fn}.{f.name}",
            ("sources" if x.level else "leaf",),
            ("node",),
            ("n",) if x.level else (),
            ("zk_push", node, stride, *came, *tree),
            shape=(piece,),
        )

    def pushed(self, f: Flat) -> None:
        """A micro-batch's node to the host's sum."""
        sums = self.shards.sums
        self.own(
            f"push.{f.name}",
            ("leaf",),
            ("node",),
            ("n",),
            (
                "zk_host_push",
                Operand("node"),
                f.shard,
                "&leaf",
                1,
                int(self.W > 1),
                "n",
                Operand("hctl"),
                self.spec.micro_batches,
                f.mask,
                sums.block,
            ),
            shape=(self.piece,),
        )

    def hosted(self, f: Flat) -> None:
        """The same of a tile, n elements from `at` of the shard on, in the host arena."""
        far, spans, p, w = (
            f.far,
            f"spans.{f.name}",
            Operand("p"),
            Operand("w"),
        )
        shape, narrow = (min(self.tile, far),), self.real < 4
        kept = tuple(s for s in f.states if s != "master")
        rest = [Operand(s) if s in kept else NULL for s in ("m", "v")]
        filed = (
            self.kept.of(self.kept.masters(f), f).arena == "file"
        )  # by tiles, too
        tile: tuple[Arg, ...] = (self.shard(f, more="at"), "n")
        part = tile if filed else (self.shard(f, f.near), far)
        most = shape if filed else (far,)
        ints = ("at", "n") if filed else ()
        full = int(
            not narrow or f.moves
        )  # what is frozen has no masters of its own
        self.own(
            f"init.{f.name}",
            (),
            ("p",),
            ("l", *ints),
            ("zk_host_init", p, spans, *part, self.spec.train.seed, full),
            shape=most,
        )
        # of the whole tile, for all of it goes up: between tensors too
        copy = [("zk_host_round", w, p, "n")] * narrow
        fresh = ("w",) * narrow
        if f.moves:
            update = (
                "zk_host_update",
                Operand("hctl"),
                "recipe",
                NULL,
                p,
                *rest,
                Operand("g"),
                spans,
                *tile,
            )
            self.own(
                f"update.{f.name}",
                ("g",),
                (*fresh, "p", *kept),
                ("l", "at", "n"),
                update,
                *copy,
                shape=shape,
            )
            if narrow:
                self.own(
                    f"cast.{f.name}", ("p",), fresh, ("n",), *copy, shape=shape
                )
        self.own(
            f"hash.{f.name}",
            ("p",),
            (),
            ("l", "out", *ints),
            ("zk_host_hash", "out", p, spans, *part, full),
            shape=most,
        )

    def optimizer(self, f: Flat, near: str = "") -> None:
        """An owner's update, or of what stays on the device (near_); without masters of their own,
        the real copies are that."""
        size, spans = f.near if near else f.shard, f"spans.{f.name}"
        depth = self.shards.states
        states = [s.removeprefix(near) for s in self.kept.updated(f, near)]
        first, n = self.share(f, depth), self.shards.share(f, depth)
        if near:
            n = f.near
        kept = tuple(s for s in ("m", "v") if s in states)
        rest = (
            *(Operand(s) if s in kept else NULL for s in ("m", "v")),
            self.mine("g", f, depth),
            spans,
            first,
            n,
        )
        apart = "master" in states
        width, held = (4, depth) if apart else (self.real, f.depth)  # masters'
        p, full, copied = (
            self.part("p", f, held, depth, width),
            int(width == 4),
            apart and self.real < 4,
        )
        w = self.part("w", f, f.depth, depth, self.real) if copied else NULL
        fresh = ("w",) * copied
        # of the whole shard where it goes down, after a skipped step and between tensors too
        copy = [("zk_round", w, Operand("p"), n)] * (
            copied and f.name in self.shards.away
        )
        given = (NULL if copy else w, p) if full else (p, NULL)
        if f.moves:
            self.own(
                f"{near}update.{f.name}",
                ("g",),
                (*fresh, "p", *kept),
                ("l",),
                (ops.UPDATE, CTL, "recipe", *given, *rest),
                *copy,
                shape=(n,),
            )
        self.own(
            f"{near}init.{f.name}",
            (),
            ("p",),
            ("l",),
            ("zk_init", p, spans, first, n, self.spec.train.seed, full),
            shape=(n,),
        )
        if copied:
            self.own(
                f"{near}cast.{f.name}",
                ("p",),
                fresh,
                (),
                ("zk_round", w, Operand("p"), n),
                shape=(n,),
            )
        mine = self.part("p", f, held, self.grid.depth, width)
        self.own(
            f"{near}hash.{f.name}",
            ("p",),
            (),
            ("l", "out"),
            ("zk_hash", "out", mine, spans, self.shard(f), size, full),
            shape=(size,),
        )


def functions(
    spec: Spec,
    graph: Graph,
    shards: Shards,
    kept: Kept,
    bodies: Bodies,
    schedule: Schedule,
) -> tuple[tuple[plan.Fn, ...], tuple[plan.Launch, ...], tuple[plan.Run, ...]]:
    """Every function, the launches, and how each runs on the spec's targets."""
    m = _Maker(
        spec=spec,
        graph=graph,
        shards=shards,
        kept=kept,
        bodies=bodies,
        formals=dict(schedule.formals),
        tile=schedule.tile,
        piece=schedule.piece,
    )
    for kind in graph.kinds:
        for name in kind.bodies:
            for part in kind.parts(name):
                m.body(kind, name, part)
    for f in shards.flats:
        if f.moves:
            m.sums(f)
        m.hosted(f) if kept.low(f) else m.optimizer(f)
        if f.near:
            m.optimizer(f, "near_")
    m.own(
        "next",
        (),
        ("ctl", "sums"),
        (),
        ("zk_begin", CTL, Operand("sums"), "recipe"),
    )
    phases = shards.sums.phases
    leaves = next((x.sources for x in phases if x.counted), 1)
    count = (
        ("zk_host_count", CTL, 1)
        if shards.sums.on_host
        else ("zk_count", CTL, leaves)
    )
    if phases:
        m.own("count", (), ("ctl",), (), count)
    if spec.together > 1:
        m.own(
            "recount",
            (),
            ("ctl",),
            (),
            ("zk_count", CTL, -leaves * spec.together),
        )
    m.own(
        "factor",
        ("total",),
        ("ctl",),
        (),
        ("zk_factor", CTL, Operand("total"), "recipe"),
    )
    for n, table in enumerate(graph.tables):
        shape = spec.train.sequence, table.head
        m.own(
            f"turn.{n}",
            (),
            ("table",),
            (),
            ("zk_rope_table", Operand("table"), f"freq.{n}", *shape),
            shape=shape,
        )
    runs = tuple(m.table.runs(spec.targets, m.real, spec.train.sm_margin))
    _launched(spec, runs)
    _pushed(
        spec, [c for fn in m.fns for c in fn.calls if c.kernel == "zk_push"]
    )
    return tuple(m.fns), tuple(m.table.rows.values()), runs


def _pushed(spec: Spec, pushes: list[plan.Call]) -> None:
    """Refuses trees of more leaves than a GPU's kernel holds."""
    on = [t for t in spec.targets if t != "cpu"]
    for count, block in ((whole(c.args[3]), whole(c.args[9])) for c in pushes):
        if on and min(count, 2 * block - 1) > grids.LEAVES:
            raise spec.wrong(
                "train.sum",
                f"a sum of {count} ranks' gradients as one tree on {on[0]}",
                f"{{block: {grids.LEAVES // 2}}} or less, fold, or "
                "targets: [cpu]",
            )


def _launched(spec: Spec, runs: tuple[plan.Run, ...]) -> None:
    """Refuses what is too large for a GPU's grid."""
    most = grids.SIDE_MOST
    for r in runs:
        for g in r.grids:
            if g.z > most:
                raise spec.wrong(
                    "train.micro_batch",
                    f"{r.launch} has {g.z} blocks in z on {r.targets[0]}",
                    f"up to {most}, or targets: [cpu]",
                )
            shared = min(grids.SHARED[t] for t in r.targets)
            if g.y > most or g.shared > shared:
                raise spec.wrong(
                    "targets",
                    f"{r.launch} has {g.y} blocks in y of {g.shared} bytes of "
                    f"shared memory on {r.targets[0]}, which does not hold so "
                    "large a model",
                    "cpu alone, or fewer heads or a smaller vocab",
                )
