"""launch.py -- pass 3: builds the functions of train.c, call by call, and the launch table of
kernels.

Calls with the same integer arguments share one launch. Optimizer functions use their largest call.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import zip_longest

from ..facts import grids, ops
from ..facts.kernels import NULL, PRODUCTS, total
from ..facts.kernels import kernel as kernel_row
from ..graph.graph import BodyPart, Call, Graph, UnitKind
from ..plan import plan
from ..plan.operand import Arg, Index, Ints, Names, Operand, array, pointers, whole
from ..read.spec import Spec
from . import names
from .levels import Addition
from .operands import Formals, formal
from .place import Bodies
from .sched import Schedule
from .shard import Flat, Shards
from .stores import Kept

FIXED: dict[str, Operand | str] = {
    "token": Operand("tokens"),
    "target": Operand("targets"),
    "position": Operand("positions"),
    "document": Operand("documents"),
    "key": Operand("keys"),
    "sample_key": Operand("sample_keys"),
    "sample_target": Operand("sample_targets"),
    "null": NULL,
    "scaler": Operand("ctl", ops.SCALE, name="scale"),
}
CTL = Operand("ctl")
KernelCall = tuple[Arg, ...]  # a kernel and its operands


def task(kernel: str) -> int:
    """Return the elements, rows or blocks that a CPU thread takes at a time, which never changes
    bits. A host twin takes as many as its kernel: threads that take few elements at a time spend
    their time on the counter of tasks."""
    return kernel_row(kernel).task


@dataclass
class _Table:
    """Launches by (kernel, shape), in order of first use."""

    rows: dict[tuple[str, Ints], plan.Launch] = field(default_factory=dict)

    def name(self, kernel: str, shape: Ints) -> str:
        """Return the name of a launch, and add it if it is new."""
        if (kernel, shape) not in self.rows:
            short = kernel.removeprefix("zk_")
            n = sum(k == kernel for k, _ in self.rows)
            self.rows[kernel, shape] = plan.Launch(f"{short}.{n}", kernel, shape)
        return self.rows[kernel, shape].name

    def runs(self, targets: Names, real: int, margin: int) -> Iterator[plan.Run]:
        """Yield a run for each launch and each set of targets on which it runs alike."""
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
                reserved = (
                    margin if "cpu" not in alike and row.kernel in PRODUCTS else 0
                )
                yield plan.Run(
                    launch=row.name,
                    targets=tuple(alike),
                    tile=how.tile,
                    workspace=how.workspace,
                    grids=how.grids,
                    margin=reserved,
                )


@dataclass
class _FnBuilder:
    """Builds functions and launches."""

    spec: Spec
    graph: Graph
    shards: Shards
    kept: Kept
    bodies: Bodies
    formals: dict[tuple[str, str, int], Formals]
    tile: int  # elements of the host's largest tile, 0 if it updates nothing
    piece: int  # elements of the largest gradient piece to the host's sum
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
        self, kind: UnitKind, body: str, what: str, value: Arg, grow: int
    ) -> Arg:
        """Return an operand of a call. grow: bytes that it advances per round of a loop."""
        if isinstance(value, Index) and value.by_rank:
            return replace(value, group=self.grid.samples)
        if what in ("number", "round", "int"):
            return value
        place = self.place(kind, body, what, str(value))
        if grow and isinstance(place, Operand):
            return replace(place, by_round=grow)
        return place

    def place(self, kind: UnitKind, body: str, what: str, name: str) -> Operand | str:
        """Return the place of a parameter, value or other operand."""
        if what == "work":
            return Operand("work")
        if what == "fixed":
            return FIXED.get(name, Operand(name))
        if what in ("param", "grad"):
            flat, at = self.shards.place[name]
            base = formal(kind, flat) if what == "param" else f"d{formal(kind, flat)}"
            called = self.tensors[kind.name][name]
            return Operand(base, at * self.real, name=called)
        if name in ("x", "y", "dx", "dy"):
            return Operand(name)
        called = self.values[kind.name][name]
        for base, packed in self.bodies.operands(kind.name, body).items():
            if name in packed.at:
                return Operand(base, packed.at[name], name=called)
        raise AssertionError(name)

    def body(self, kind: UnitKind, name: str, part: BodyPart) -> None:
        """Add the function of a part of a body."""
        calls = []
        for c in part.calls:
            launch, args = self.table.name(c.kernel, c.shape), self.args(kind, name, c)
            calls.append(plan.Call(c.kernel, launch, args, c.rounds))
        then = tuple(
            plan.Call(c.kernel, "", self.args(kind, name, c)) for c in part.then
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
                then=then,
            )
        )

    def args(self, kind: UnitKind, body: str, c: Call) -> tuple[Arg, ...]:
        """Return the operands of a call of the graph."""
        return tuple(
            self.operand(kind, body, what, value, grow or 0)
            for (what, value), grow in zip_longest(c.args, c.grow)
        )

    # ---- other functions

    def add_fn(
        self,
        name: str,
        ins: Names,
        outs: Names,
        ints: Names,
        *calls: KernelCall,
        shape: Ints = (),
    ) -> None:
        """Add a function that the graph does not have."""
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
        """Return the index of an element of a rank's shard."""
        return self.share(f, self.grid.depth, at, more)

    def share(self, f: Flat, depth: int, at: int = 0, more: str = "") -> Index:
        """Return the index of an element of the share that a rank has at a depth."""
        whole, group = self.shards.share(f, 0), self.grid.over(depth)
        if not group:
            return Index(whole, 0, at, more)
        share = self.shards.share(f, depth)
        return Index(whole, share, at, more, group)

    def part(self, name: str, f: Flat, kept: int, depth: int, width: int) -> Operand:
        """Return the operand of a rank's part at `depth`, within the share that it keeps at depth
        `kept`."""
        group = self.grid.group(kept, depth)
        if not group:
            return Operand(name)
        step = self.shards.share(f, depth).bytes(width)
        return Operand(name, 0, step, group=group)

    def sums(self, f: Flat) -> None:
        """Add a flat's functions that sum gradients and compute their norm."""
        for x in self.shards.sums.phases:
            self.phase(f, x)
        if self.shards.sums.on_host:
            self.host_push(f)
        host = self.shards.sums.host
        kernel = "zk_host_square_sum" if host else "zk_square_sum"
        sums = Operand("hsums" if host else "sums")
        part = f"spans.{f.name}", self.shard(f), f.shard
        self.add_fn(
            f"norm.{f.name}",
            ("g",),
            (),
            ("l",),
            (kernel, sums, self.own_sum("g", f, self.grid.depth), *part, self.full_sum),
            shape=(f.shard,),
        )

    def own_sum(self, name: str, f: Flat, depth: int) -> Operand:
        """Return the operand of a rank's own part at `depth` within its gradient sum."""
        width = ops.BYTES[self.shards.sums.dtype]
        return self.part(name, f, self.shards.sums.depth, depth, width)

    @property
    def full_sum(self) -> int:
        """1 if gradient sums are f32, 0 if they have the stored type."""
        return int(self.shards.sums.dtype == "f32")

    def phase(self, f: Flat, x: Addition) -> None:
        """Add the function of a phase. It counts no leaves if the host adds micro-batches."""
        sums = self.shards.sums
        if sums.on_host and x.counted and not x.level:
            return
        counted = x.counted and not sums.on_host
        last = x == sums.phases[-1]
        share = self.shards.share(f, x.depth)
        node, stride = Operand("node"), 0
        if counted or last and not sums.host:
            node = self.own_sum("node", f, x.depth)
        if counted:
            kept = 0 if sums.pending else sums.depth
            stride = self.shards.share(f, kept)
            node = self.part("node", f, kept, x.depth, 4)
        total = x.sources * (sums.turns if counted else 1)
        tree = (
            CTL if counted else NULL,
            total,
            f.mask if counted else 0,
            self.spec.block // x.inner,
        )
        pieces: tuple[Arg, ...]
        ins = ("sources",) if x.level else pointers("leaf", x.sources)
        if x.level:
            pieces = "sources", x.sources, int(not x.adds_gradients), "n"
        else:
            pieces = array(ins), x.sources, 0, share
        piece = self.piece if last and sums.on_host else share
        self.add_fn(
            f"{x.fn}.{f.name}",
            ins,
            ("node",),
            ("n",) if x.level else (),
            ("zk_push", node, stride, *pieces, *tree),
            shape=(piece,),
        )

    def host_push(self, f: Flat) -> None:
        """Add the function that pushes a micro-batch's gradients to the host's sum."""
        sums = self.shards.sums
        self.add_fn(
            f"push.{f.name}",
            ("leaf",),
            ("node",),
            ("n",),
            (
                "zk_host_push",
                Operand("node"),
                f.shard,
                array(("leaf",)),
                1,
                int(self.W > 1),
                "n",
                Operand("hctl"),
                sums.turns,
                f.mask,
                sums.block,
            ),
            shape=(self.piece,),
        )

    def host_optimizer(self, f: Flat) -> None:
        """Add the host's optimizer functions of a flat, on a tile: n elements from element `at` of
        the shard."""
        far, spans, p, w = (
            f.far,
            f"spans.{f.name}",
            Operand("p"),
            Operand("w"),
        )
        shape, narrow = (min(self.tile, far),), self.real < 4
        kept = tuple(s for s in f.states if s != "master")
        rest = [Operand(s) if s in kept else NULL for s in ("m", "v")]
        # In the file, init and hash work tile by tile, too.
        filed = self.kept.of(self.kept.masters(f), f).arena == "file"
        tile: tuple[Arg, ...] = (self.shard(f, more="at"), "n")
        part = tile if filed else (self.shard(f, f.near), far)
        most = shape if filed else (far,)
        ints = ("at", "n") if filed else ()
        # Frozen parameters have no f32 master weights.
        full = int(not narrow or f.trainable)
        self.add_fn(
            f"init.{f.name}",
            (),
            ("p",),
            ("l", *ints),
            ("zk_host_init", p, spans, *part, self.spec.train.seed, full),
            shape=most,
        )
        # Round the whole tile, also between tensors, because all of it goes up.
        copy = [("zk_host_round", w, p, "n")] * narrow
        rounded = ("w",) * narrow
        if f.trainable:
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
                self.full_sum,
            )
            self.add_fn(
                f"update.{f.name}",
                ("g",),
                (*rounded, "p", *kept),
                ("l", "at", "n"),
                update,
                *copy,
                shape=shape,
            )
            if narrow:
                self.add_fn(
                    f"cast.{f.name}",
                    ("p",),
                    rounded,
                    ("n",),
                    *copy,
                    shape=shape,
                )
        self.add_fn(
            f"hash.{f.name}",
            ("p",),
            (),
            ("l", "out", *ints),
            ("zk_host_hash", "out", p, spans, *part, full),
            shape=most,
        )

    def optimizer(self, f: Flat, near: str = "") -> None:
        """Add the device's optimizer functions of a flat, or with `near` those of the part that
        stays there. Without master weights the parameters are updated themselves."""
        size, spans = f.near if near else f.shard, f"spans.{f.name}"
        depth = self.shards.states
        states = [s.removeprefix(near) for s in self.kept.updated(f, near)]
        first, n = self.share(f, depth), self.shards.share(f, depth)
        if near:
            n = f.near
        kept = tuple(s for s in ("m", "v") if s in states)
        rest = (
            *(Operand(s) if s in kept else NULL for s in ("m", "v")),
            self.own_sum("g", f, depth),
            spans,
            first,
            n,
            self.full_sum,
        )
        has_master = "master" in states
        width, master_depth = (4, depth) if has_master else (self.real, f.depth)
        p, full, copied = (
            self.part("p", f, master_depth, depth, width),
            int(width == 4),
            has_master and self.real < 4,
        )
        w = self.part("w", f, f.depth, depth, self.real) if copied else NULL
        rounded = ("w",) * copied
        # A shard that goes down is rounded whole: between tensors and after a skipped step, too.
        copy = [("zk_round", w, Operand("p"), n)] * (
            copied and f.name in self.shards.offloaded
        )
        params = (NULL if copy else w, p) if full else (p, NULL)
        if f.trainable:
            self.add_fn(
                f"{near}update.{f.name}",
                ("g",),
                (*rounded, "p", *kept),
                ("l",),
                (ops.UPDATE, CTL, "recipe", *params, *rest),
                *copy,
                shape=(n,),
            )
        self.add_fn(
            f"{near}init.{f.name}",
            (),
            ("p",),
            ("l",),
            ("zk_init", p, spans, first, n, self.spec.train.seed, full),
            shape=(n,),
        )
        if copied:
            self.add_fn(
                f"{near}cast.{f.name}",
                ("p",),
                rounded,
                (),
                ("zk_round", w, Operand("p"), n),
                shape=(n,),
            )
        own_shard = self.part("p", f, master_depth, self.grid.depth, width)
        self.add_fn(
            f"{near}hash.{f.name}",
            ("p",),
            (),
            ("l", "out"),
            ("zk_hash", "out", own_shard, spans, self.shard(f), size, full),
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
    """Return all functions, launches and runs on the spec's targets. Raises SpecError if a launch
    or a tree does not fit a GPU."""
    m = _FnBuilder(
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
        if f.trainable:
            m.sums(f)
        m.host_optimizer(f) if kept.masters_off_device(f) else m.optimizer(f)
        if f.near:
            m.optimizer(f, "near_")
    m.add_fn(
        "next",
        (),
        ("ctl", "sums"),
        (),
        ("zk_begin", CTL, Operand("sums"), "recipe"),
    )
    phases = shards.sums.phases
    leaves = next((x.sources for x in phases if x.counted), 1)
    count = (
        ("zk_host_count", CTL, 1) if shards.sums.on_host else ("zk_count", CTL, leaves)
    )
    if phases:
        m.add_fn("count", (), ("ctl",), (), count)
    turns = spec.together // shards.sums.blocks
    several = {
        "recount": -leaves if turns > 1 else 0,
        "counted": leaves if shards.sums.turns > turns > 1 else 0,
    }
    for name, each in several.items():
        if each:
            call = "zk_count", CTL, each * turns
            m.add_fn(name, (), ("ctl",), (), call)
    m.add_fn(
        "factor",
        ("total",),
        ("ctl",),
        (),
        ("zk_factor", CTL, Operand("total"), "recipe"),
    )
    for n, table in enumerate(graph.tables):
        shape = spec.train.sequence, table.head
        m.add_fn(
            f"turn.{n}",
            (),
            ("table",),
            (),
            ("zk_rope_table", Operand("table"), f"freq.{n}", *shape),
            shape=shape,
        )
    runs = tuple(m.table.runs(spec.targets, m.real, spec.train.sm_margin))
    _check_grids(spec, runs)
    _check_trees(spec, [c for fn in m.fns for c in fn.calls if c.kernel == "zk_push"])
    return tuple(m.fns), tuple(m.table.rows.values()), runs


def _check_trees(spec: Spec, pushes: list[plan.Call]) -> None:
    """Raise SpecError if a tree has more leaves than a GPU's kernel holds."""
    on = [t for t in spec.targets if t != "cpu"]
    for count, block in ((whole(c.args[3]), whole(c.args[9])) for c in pushes):
        if on and min(count, 2 * block - 1) > grids.LEAVES:
            raise spec.wrong(
                "train.sum",
                f"the gradients of {count} ranks are too many for one tree on {on[0]}",
                f"{{block: {grids.LEAVES // 2}}} or a smaller block, fold, or targets: [cpu]",
            )


def _check_grids(spec: Spec, runs: tuple[plan.Run, ...]) -> None:
    """Raise SpecError if a launch is too large for a GPU's grid or shared memory."""
    most = grids.SIDE_MOST
    for r in runs:
        for g in r.grids:
            if g.z > most:
                raise spec.wrong(
                    "train.micro_batch",
                    f"is too large: the CUDA grid of {r.launch} has {g.z} blocks in z on "
                    f"{r.targets[0]}",
                    f"up to {most}, or targets: [cpu]",
                )
            shared = min(grids.SHARED[t] for t in r.targets)
            if g.y > most or g.shared > shared:
                needs = f"{g.y} blocks in y, of at most {most}"
                if g.shared > shared:
                    needs = f"{g.shared} bytes of shared memory per block, of at most {shared}"
                raise spec.wrong(
                    "targets",
                    f"the model is too large for {r.targets[0]}: {r.launch} needs {needs}",
                    "only cpu, or fewer heads or a smaller vocab",
                )
