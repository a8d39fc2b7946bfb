"""buffers.py -- lists the buffer classes of a plan: arena, slots and bytes of a slot."""

from __future__ import annotations

from collections.abc import Sequence

from ..facts import ops
from ..facts.between import BETWEEN, PASSED, SAVED
from ..graph.graph import Graph
from ..plan import plan
from ..read.spec import Spec
from . import operands, place, sched, steps
from .place import Wanted
from .shard import Flat, Shards
from .stores import Located


def wanted(
    spec: Spec,
    graph: Graph,
    shards: Shards,
    bodies: place.Bodies,
    schedule: sched.Schedule,
    kept: Sequence[Located],
    runs: tuple[plan.Run, ...],
) -> list[Wanted]:
    """Return every class. kept: all states. `work` comes last among the classes of all targets, so
    plans that differ in its size agree in their other offsets."""
    slot_counts = _slot_counts(schedule)
    tiles = _tiles(shards, kept, schedule.tile)
    return [
        *_control(spec, graph),
        *(
            c
            for f in shards.flats
            for c in _of_flat(spec, shards, f, kept, schedule, slot_counts)
        ),
        *_sums(spec, shards),
        *_level_slots(shards, schedule, slot_counts),
        *_values(spec, graph, bodies, slot_counts),
        *_host(spec, shards, schedule, slot_counts, tiles),
        Wanted("work", 1, max(bodies.work, 64)),
        *_inbox(shards, schedule, slot_counts),
        *_gpu(spec, graph, runs),
    ]


def _common(spec: Spec) -> str:
    """Return the readers of buffers that a collective transfers: peers, or own with one rank."""
    return "peers" if spec.cluster.ranks > 1 else "own"


def _control(spec: Spec, graph: Graph) -> list[Wanted]:
    """Return the classes of a step's constants, its integer sums, the batch and rotary tables."""
    tokens, real = _tokens(spec, graph), ops.BYTES[spec.train.precision]
    tables = [
        Wanted(f"table.{n}", 1, spec.train.sequence * t.head * 4)
        for n, t in enumerate(graph.tables)
    ]
    return [
        Wanted("ctl", 1, ops.CTL),
        Wanted("sums", 2, 8 * ops.SUMS, readers=_common(spec)),
        *(Wanted(name, spec.together, tokens) for name in spec.batch),
        *[Wanted(ops.PICKED, 1, graph.dims["C"] * real)] * (spec.own_blocks > 1),
        *tables,
    ]


def _tokens(spec: Spec, graph: Graph) -> int:
    """Return the bytes of one array of a micro-batch: tokens, targets, positions or keys."""
    whole = {"documents", "sample_targets"} & {*spec.batch}
    rows = graph.dims["M"] * (spec.train.sequence_blocks if whole else 1)
    return max(4 * rows, 8 * graph.dims["B"] * spec.keyed)


def _of_store(spec: Spec, shards: Shards, f: Flat, s: Located) -> Wanted:
    """Return the class of a state of a flat. Peers read parameters and sums that are
    all-gathered."""
    sums = shards.sums
    depth, gathered, pending = shards.states, False, 1
    if s.what == "params":
        depth, gathered = f.depth, shards.states > 0
    elif s.what == "sum":
        depth, gathered = sums.depth, sums.depth < sums.result_depth
        pending = 1 if sums.pending else f.nodes
    elements = s.n * shards.grid.parts(depth) * pending
    peers = gathered and s.arena == "device"
    readers = _common(spec) if peers else "own"
    return Wanted(s.cls, f.count, elements * s.width, s.arena, readers)


def _of_flat(
    spec: Spec,
    shards: Shards,
    f: Flat,
    kept: Sequence[Located],
    schedule: sched.Schedule,
    slot_counts: dict[str, int],
) -> list[Wanted]:
    """Return the classes of a flat: its states, ring, staging buffers and gradients."""
    real, common = ops.BYTES[spec.train.precision], _common(spec)
    whole = f.shard * spec.cluster.ranks
    out = [_of_store(spec, shards, f, s) for s in kept if s.flat == f.name]
    ring = schedule.ring[f.name]
    if ring:
        out.append(Wanted(f"ring.{f.name}", ring, whole * real))
    if ring and f.name in schedule.staging:
        slots = schedule.staging[f.name]
        out.append(Wanted(f"staging.{f.name}", slots, f.shard * real, readers=common))
        if f"fetched.{f.name}" in slot_counts:
            out.append(Wanted(f"fetched.{f.name}", slots, f.shard * real, "host"))
    grads = schedule.grad[f.name]
    if grads:
        out.append(
            Wanted(
                f"grad.{f.name}",
                grads,
                whole * real,
                readers="own" if shards.sums.own_first else common,
            )
        )
    return out


def _sums(spec: Spec, shards: Shards) -> list[Wanted]:
    """Return the class in which a rank sums its own micro-batches before the ranks reduce."""
    if not shards.sums.pending:
        return []
    most = max(f.nodes * f.shard for f in shards.flats) * spec.cluster.ranks
    return [Wanted("pending", 1, most * 4, readers=_common(spec))]


def _level_slots(
    shards: Shards, schedule: sched.Schedule, slot_counts: dict[str, int]
) -> list[Wanted]:
    """Return the classes between two levels: `intra` for sums of a host on their way to other
    hosts, `inter` for data from other hosts."""
    most: dict[str, int] = {}
    whole = {f"own.{f.name}": shards.share(f, 0) for f in shards.flats}
    for step in (x for s in schedule.sections for x in s.steps):
        numbers = {"n": whole.get(step.op, 0)}
        numbers |= {i.name: i.value for i in step.ints}
        for r in (r for r in step.outs if r.cls in ("intra", "inter")):
            size = (
                r.at + 4 * numbers["n"]
                if r.cls == "intra"
                else numbers["step"] * shards.grid.sizes[step.group]
            )
            most[r.cls] = max(most.get(r.cls, 0), size)
    return [
        Wanted(name, slot_counts[name], most[name], readers="peers")
        for name in ("intra", "inter")
        if name in most
    ]


def _values(
    spec: Spec, graph: Graph, bodies: place.Bodies, slot_counts: dict[str, int]
) -> list[Wanted]:
    """Return the classes of activations, their gradients and saved values."""
    value = graph.dims["M"] * graph.dims["C"] * ops.BYTES[spec.train.precision]
    units = sum(k.count for k in graph.kinds) - max(1, graph.still)
    samples = spec.together // spec.own_blocks
    passed = [(BETWEEN[n], bodies.size(n)) for n in PASSED]
    out = [
        Wanted(
            b.cls, samples if b.heads else spec.together, size, readers=_common(spec)
        )
        for b, size in passed
        if size
    ]
    if graph.acc:
        out.append(Wanted("acc", spec.together if graph.tied else 1, 4 * graph.acc))
    out += _kept(spec, "x", units, value, slot_counts)
    out.append(Wanted("dx", spec.together + 1, value))
    for k in graph.kinds:
        for name in SAVED:
            if size := bodies.size(name, k.name):
                cls = f"{BETWEEN[name].cls}.{k.name}"
                out += _kept(spec, cls, k.count, size, slot_counts)
    exchanged = spec.cluster.context_parallel > 1 and spec.together == 1
    readers = _common(spec) if exchanged else "own"
    tmp = max(p.size for p in bodies.tmp.values())
    out.append(Wanted("tmp", 1, tmp, readers=readers))
    return out


def _kept(
    spec: Spec, name: str, count: int, size: int, slot_counts: dict[str, int]
) -> list[Wanted]:
    """Return the device and host classes of `count` values that backward needs."""
    here = operands.near_slots(spec, name, count)
    slots = here * operands.slots_of_value(spec, name)
    readers = _common(spec) if operands.by_sample(name) else "own"
    if here == count:
        return [Wanted(name, slots, size, readers=readers)]
    host_slots = slot_counts.get(f"far.{name}", 0)
    return [
        Wanted(f"near.{name}", slots, size, readers=readers),
        *([Wanted(f"far.{name}", host_slots, size, "host")] if host_slots else ()),
    ]


def _tiles(shards: Shards, kept: Sequence[Located], tile: int) -> dict[str, int]:
    """Return the bytes of a tile of each state in the file."""
    flats = {f.name: f for f in shards.flats}
    out: dict[str, int] = {}
    for s in kept:
        f, name = flats[s.flat], s.cls.partition(".")[0]
        if s.arena == "file":
            size = min(tile, f.shard - f.near) * s.width
            out[name] = max(out.get(name, 0), size)
    return out


def _host(
    spec: Spec,
    shards: Shards,
    schedule: sched.Schedule,
    slot_counts: dict[str, int],
    tiles: dict[str, int],
) -> list[Wanted]:
    """Return the classes that an update on the host needs."""
    if not schedule.tile:
        return []
    real = ops.BYTES[spec.train.precision]
    tile = {f.name: min(schedule.tile, f.shard - f.near) for f in shards.flats}
    if shards.sums.host:
        down = schedule.piece * (4 if spec.cluster.ranks > 1 else real)
    else:
        down = max(tile[f.name] for f in shards.flats if f.trainable) * 4
    up = max(
        (
            tile[f.name]
            for f in shards.flats
            if f.trainable and f.name not in schedule.staging
        ),
        default=0,
    )
    sizes = {
        "hctl": (ops.CTL, "host"),
        "down": (down, "host"),
        "hsums": (8 * ops.SUMS, "host"),
        "part": (down, "device"),
        "up": (up * real, "host"),
        **{f"tile.{s}": (size, "host") for s, size in tiles.items()},
    }
    return [
        Wanted(name, slot_counts[name], size, arena)
        for name, (size, arena) in sizes.items()
        if name in slot_counts
    ]


def _inbox(
    shards: Shards, schedule: sched.Schedule, slot_counts: dict[str, int]
) -> list[Wanted]:
    """Return the class that receives pieces of peers' gradients where memory is not shared."""
    received = [
        i.value * (shards.grid.sizes[step.group] if step.op == "alltoall" else 1)
        for s in schedule.sections
        for step in s.steps
        if step.op in steps.REDUCES.values()
        for i in step.ints
        if i.name == "bytes"
    ]
    if not received:
        return []
    return [Wanted("inbox", slot_counts["inbox"], max(received), targets="unshared")]


def _gpu(spec: Spec, graph: Graph, runs: tuple[plan.Run, ...]) -> list[Wanted]:
    """Return the classes that only GPUs have: workspace of kernels, pinned batches and kernel
    outputs."""
    batch = _tokens(spec, graph) * len(spec.batch)
    logits = 4 * graph.dims["V"]
    return [
        Wanted(
            "workspace",
            1,
            max([1, *(r.workspace for r in runs)]),
            targets="gpu",
        ),
        Wanted("pinned_batch", ops.PINNED_BATCHES, batch, "host", targets="gpu"),
        Wanted(
            "pinned_scratch",
            1,
            max(ops.PINNED_SCRATCH, logits),
            "host",
            targets="gpu",
        ),
    ]


def _slot_counts(schedule: sched.Schedule) -> dict[str, int]:
    """Return the number of slots that the steps use of each class."""
    most: dict[str, int] = {}
    for r in (r for s in schedule.sections for x in s.steps for r in x.refs):
        most[r.cls] = max(most.get(r.cls, 0), r.index + 1)
    return most
