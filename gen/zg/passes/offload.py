"""offload.py -- adds the steps that move gradient sums, optimizer states and parameters to the host
or the file, and update them there.

Routes, in hops `queue -> slot` (hops.py):

    a gradient's piece   reduce -> inbox, sum -> part, down -> down, host: push to the host's sum
    ... of one rank      down -> down, host: push, since nothing is reduced before
    a unit's own sums    reduce -> inbox, sum -> part, down -> the host's sum
    a sum on the device  down -> down, host: update, tile by tile
    a tile's update      load -> tile, host -> tile, store -> the file
    ... its parameters   host -> up, up -> the device (in f32 the master weights themselves)
    a shard for its use  fetch -> fetched, up -> staging, gather -> ring

Without a file, tiles are updated in place and shards go up from their place on the host. In
`update` the integer sums go down, the norms are added, and the sums come back. Then the step's
constants go down and the shards are updated.

The update runs beside the next step. The forward of a unit waits for one event: its shard was
updated, or, for replicated parameters, the updated shards were all-gathered. So tiles are updated
in the order in which forward needs them. Queue main waits only for the constants, and for the whole
update if `near_` parameters go down by slots that fetched shards also use. Before the first step it
waits for everything.

Pieces and tiles are at most `sub_group_size` elements of a shard and use slots in turn. If the
optimizer stays on the device, updated parameters go down (device.py). The file has queues of its
own, so one tile is read while the previous one is updated and the one before is written. A read
never waits behind a write that waits for its update, nor a unit's parameters behind tiles. The
first `buffer_count` tiles are read when a step begins.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from ..plan.operand import Names
from ..plan.plan import Events, Int, Ref, Refs
from ..plan.size import Size, plus
from . import device
from .hops import Hop, Ring, end, free, full, plain_hop
from .rings import Gathered
from .shard import Flat
from .steps import CTL, SUMS, Instance, Steps

# The queue that brings updated parameters to their arena, if the host or the device updates them.
BY_HOST = {"device": "up", "host": "host", "file": "store"}
BY_DEVICE = {"host": "down", "file": "store"}


@dataclass(frozen=True)
class Tile:
    """Elements of a shard that are updated at once, and the number of their slots."""

    flat: Flat
    l: int
    at: Size
    n: Size
    number: int

    @property
    def unit(self) -> str:
        return f"{self.flat.name}[{self.l}]"

    @property
    def last(self) -> bool:
        """True for the last tile of a shard."""
        return self.at + self.n == self.flat.shard

    @property
    def after_near(self) -> bool:
        """True for the first tile after the `near_` part."""
        return 0 < self.at == self.flat.near

    @property
    def ints(self) -> tuple[Int, ...]:
        return Int("l", self.l), Int("at", self.at), Int("n", self.n)

    def slot(self, cls: str) -> Ref:
        """Return the tile's slot of a class."""
        return Ref(cls, self.number)

    @property
    def real(self) -> Ref:
        """The instance's parameters."""
        return Ref(f"param.{self.flat.name}", self.l)


@dataclass(frozen=True)
class Work:
    """The host's work on a tile. reads, writes: states; waits, recs: events beside those of the
    tile's slots; updated: events to record once updated parameters are in the file."""

    op: str
    reads: Names = ()
    writes: Names = ()
    ins: Refs = ()
    outs: Refs = ()
    ints: tuple[Int, ...] = ()
    waits: Events = ()
    recs: Events = ()
    updated: Events = ()


# ---- pieces and tiles


def largest_tile(m: Steps) -> int:
    """Return the elements of the largest tile, 0 if the host updates nothing."""
    sizes = [n for f, _ in m.masters_off_device() for _, n in m.tiles(f)]
    return max(sizes, default=0)


def _buffers(m: Steps) -> int:
    """Return the number of slots of each class."""
    return m.spec.zero.offload_optimizer.buffer_count


def _tiles(m: Steps, shards: Sequence[tuple[Flat, int]]) -> Iterator[Tile]:
    """Yield the tiles of shards in order."""
    turn = 0
    for f, l in shards:
        for at, n in m.tiles(f):
            yield Tile(f, l, at, n, turn % _buffers(m))
            turn += 1


def _forward_order(m: Steps) -> list[Instance]:
    """Return the trainable instances in the order in which a forward first needs them."""
    used = [
        (f, m.instance(f, u)) for u in m.uses("eval") for f in sorted(m.reads(u.part))
    ]
    first = dict.fromkeys(used)
    return [(m.flats[f], l) for f, l in first if m.flats[f].trainable]


# ---- parameters for a use


def updated_event(m: Steps, f: Flat, l: int) -> Events:
    """Return the event that an instance is updated, if its update may run beside the next step.
    Replicated parameters have the event of their all-gather instead."""
    if m.offload and f.trainable and f.gathered and not m.gathers_updates(f):
        return (full(Ref(f"param.{f.name}", l)),)
    return ()


def hops_up(m: Steps, g: Gathered, f: Flat) -> list[tuple[str, Ref]]:
    """Return the queues and slots by which an offloaded shard goes up for a use; [] if it is on the
    device."""
    if not m.offloads_params(f):
        return []
    turn, slots = m.staging_turn.get(g.ring, 0), m.staging[g.ring]
    m.staging_turn[g.ring] = turn + 1
    up = "up", Ring(f"staging.{g.ring}", slots).slot(turn)
    if m.arena("param", f) == "host":
        return [up]
    return [("fetch", Ring(f"fetched.{g.ring}", slots).slot(turn)), up]


def _host_queues(m: Steps) -> set[str]:
    """Return the queues that publish parameters from the host: of all flats, or without an
    offloaded optimizer of frozen ones with their initial values."""
    flats = m.shards.flats if m.offload else [f for f, _ in m.masters_off_device()]
    return {BY_HOST[m.arena("param", f)] for f in flats}


def _device_queues(m: Steps) -> set[str]:
    """Return the queues by which parameters that the device updates go down."""
    own = [f for f in m.shards.flats if (f.near if m.offload else f.trainable)]
    return {BY_DEVICE[m.arena("param", f)] for f in own if m.offloads_params(f)}


def publish_queues(m: Steps) -> list[str]:
    """Return the queues at whose end all parameters equal the master weights."""
    return sorted(_host_queues(m) | _device_queues(m))


def update_queues(m: Steps) -> list[str]:
    """Return the queues whose ends complete an update: those that write parameters, and `down`,
    which brings the constants to the host."""
    constants = {"down"} if m.offload else set()
    return sorted(constants | _device_queues(m))


def _mark_ends(m: Steps, queues: Sequence[str]) -> None:
    """Record the end events of the queues of the host and the file. Copies up and down record
    theirs."""
    for queue in queues:
        if queue in ("host", "store"):
            m.add(queue, "mark", recs=(end(queue),))


# ---- gradients


def norms_on_host(m: Steps) -> None:
    """Add the gradient norms to the step's integer sums on the host."""
    here, there = Ref("sums", 0), Ref("hsums", 0)
    size = SUMS.bytes(8)
    m.follow("down", "main")
    m.copy(plain_hop("down", here, there), "", size)
    m.follow("host", "down")
    m.norms("host")
    m.follow("up", "host")
    m.copy(plain_hop("up", there, here), "", size)
    m.follow("main", "up")


# ---- where a tile is


def _stored_at(m: Steps, c: str, t: Tile) -> Ref:
    """Return the place where a tile of a state is stored."""
    s = m.kept.of(c, t.flat)
    return Ref(s.cls, t.l, plus(t.at, s.first, -1).bytes(s.width))


def _found_at(m: Steps, c: str, t: Tile) -> Ref:
    """Return the place where the host works on a tile of a state: its slot if the state is in the
    file."""
    return t.slot(f"tile.{c}") if m.arena(c, t.flat) == "file" else _stored_at(m, c, t)


def _rounded(m: Steps, t: Tile) -> Refs:
    """Return the place of a tile's parameters in the stored type: offloaded ones in place, others
    in a slot on the way up. In f32 the master weights of these go up themselves."""
    if m.offloads_params(t.flat):
        return (_found_at(m, "param", t),)
    return (t.slot("up"),) if m.real == 2 else ()


# ---- the host's work on a tile


def _in_file(m: Steps, t: Tile, names: Names) -> list[str]:
    """Return the states that are in the file."""
    return [c for c in names if m.arena(c, t.flat) == "file"]


def _work(m: Steps, t: Tile, w: Work) -> None:
    """Add the host's work on a tile and the copies of written states to the file."""
    slot = t.slot("tile")
    reads, writes = _in_file(m, t, w.reads), _in_file(m, t, w.writes)
    waits, recs = w.waits, w.recs
    if reads or writes:  # otherwise it works in place
        waits += (full(slot) if reads else free(slot),)
        recs += (full(slot) if writes else free(slot),)
    unit = "" if w.op == "mark" else t.unit
    m.add(
        "host",
        w.op,
        unit,
        ins=w.ins,
        outs=w.outs,
        ints=w.ints,
        waits=waits,
        recs=recs,
    )
    hops = [plain_hop("store", _found_at(m, c, t), _stored_at(m, c, t)) for c in writes]
    _copies(m, t, writes, hops, (full(slot),), (free(slot), *w.updated))


def _load(m: Steps, t: Tile, reads: Names) -> None:
    """Read a tile's states from the file once its slot is free."""
    slot, names = t.slot("tile"), _in_file(m, t, reads)
    ready: Events = (free(slot),)
    # In f32 parameters go up from the tile's slot itself.
    if m.real == 4 and not m.offloads_params(t.flat):
        ready += (free(t.slot("up")),)
    hops = [plain_hop("load", _stored_at(m, c, t), _found_at(m, c, t)) for c in names]
    _copies(m, t, names, hops, ready, (full(slot),))


def _copies(
    m: Steps,
    t: Tile,
    names: list[str],
    hops: list[Hop],
    after: Events,
    then: Events,
) -> None:
    """Add the copies of a tile's states between the file and the slot. The first one waits, the
    last one records."""
    for n, (c, hop) in enumerate(zip(names, hops, strict=True)):
        if n == 0:
            hop = replace(hop, after=after)
        if n == len(hops) - 1:
            hop = replace(hop, then=then)
        width = m.kept.of(c, t.flat).width
        m.copy(hop, t.unit, t.n.bytes(width))


def _update_reads(m: Steps, f: Flat) -> Names:
    """Return the states that an update reads."""
    return ("param", *f.states) if m.offloads_params(f) and m.real == 4 else f.states


def _upload(m: Steps, t: Tile) -> None:
    """Copy a tile's updated parameters to the device. After the last tile, all-gather replicated
    ones."""
    f, slot = t.flat, t.slot("up")
    if m.offloads_params(f):
        return
    real = m.real
    src = _found_at(m, "master", t) if real == 4 else slot
    dst = replace(t.real, at=t.at.bytes(real))
    then: Events = (free(slot),)
    if t.last:
        then += (end("up"), *updated_event(m, f, t.l))
    dst, own = m.own_shard(f, dst, f.depth, real)
    hop = plain_hop("up", src, dst, (full(slot),), then)
    m.copy(hop, t.unit, t.n.bytes(real), to_rank=own)
    if t.last:
        near = (end("main"),) if f.near else ()
        m.gather_updated(f, t.l, end("up"), *near)


# ---- sections


def prefetch_tiles(m: Steps) -> None:
    """Read the first tiles beside forward and backward."""
    for t in islice(_tiles(m, _forward_order(m)), _buffers(m)):
        _load(m, t, _update_reads(m, t.flat))


def init(m: Steps) -> None:
    """Set initial master weights: a whole shard in place, or tile by tile on the way to the
    file."""
    device.init(m, [(f, l) for f, l in m.instances() if f.near], "near_")
    for t in _tiles(m, m.masters_off_device()):
        f, op = t.flat, f"init.{t.flat.name}"
        c = m.kept.masters(f)
        if m.arena(c, f) == "file":
            _work(
                m,
                t,
                Work(op, writes=(c,), outs=(_found_at(m, c, t),), ints=t.ints),
            )
        elif t.last:
            home = _stored_at(m, c, replace(t, at=f.near))
            m.add("host", op, t.unit, outs=(home,), ints=(Int("l", t.l),))


def update(m: Steps) -> None:
    """Update all tiles once the clipping factor is known: sums down, parameters up."""
    m.follow("down", "main")
    m.copy(
        plain_hop("down", Ref("ctl", 0), Ref("hctl", 0), then=(end("down"),)),
        "",
        CTL,
    )
    if m.sums.host:
        m.add("host", "mark", waits=(end("down"),))
    for turn, t in enumerate(_tiles(m, _forward_order(m))):
        if t.after_near:
            device.update(m, [(t.flat, t.l)], "near_")
        if not m.sums.host:
            _download_sum(m, t)
        if turn >= _buffers(m):
            _load(m, t, _update_reads(m, t.flat))
        _work(m, t, _update(m, t))
        _upload(m, t)
    _mark_ends(m, update_queues(m))


def _sum(t: Tile) -> Ref:
    """Return the place of a tile's gradient sum."""
    return Ref(f"sum.{t.flat.name}", t.l, t.at.bytes(4))


def _download_sum(m: Steps, t: Tile) -> None:
    """Copy a tile's gradient sum to the host."""
    src, own = m.own_shard(t.flat, _sum(t), m.sums.depth, 4)
    m.copy(
        Hop("down", src, t.slot("down"), takes=False),
        t.unit,
        t.n.bytes(4),
        from_rank=own,
    )


def _update(m: Steps, t: Tile) -> Work:
    """Return the work of a tile's update."""
    f, up = t.flat, t.slot("up")
    sum_: Ref = _sum(t) if m.sums.host else t.slot("down")
    waits: Events = () if m.sums.host else (full(sum_),)
    recs: Events = () if m.sums.host else (free(sum_),)
    writes = f.states
    updated: Events = ()
    if m.offloads_params(f):  # they are updated in place
        writes = ("param", *f.states)
        updated = updated_event(m, f, t.l) if t.last else ()
    else:
        waits += (free(up),)
        recs += (full(up),)
    filed = m.arena("param", f) == "file"
    recs += () if filed else updated
    states = [_found_at(m, c, t) for c in f.states]
    return Work(
        op=f"update.{f.name}",
        reads=_update_reads(m, f),
        writes=writes,
        ins=(sum_,),
        outs=(*_rounded(m, t), *states),
        ints=t.ints,
        waits=waits,
        recs=recs,
        updated=updated if filed else (),
    )


def publish(m: Steps) -> None:
    """Compute all parameters from master weights. Parameters that are master weights need no
    work."""
    for t in _tiles(m, m.masters_off_device()):
        f = t.flat
        if t.after_near:
            device.publish(m, [(f, t.l)], "near_")
        narrow = m.real == 2 and f.trainable
        if narrow or not m.offloads_params(f):
            _load(m, t, ("master",))
            _work(m, t, _cast(m, t))
        _upload(m, t)
    _mark_ends(m, publish_queues(m) if m.offload else sorted(_host_queues(m)))
    # An update uses the tile slots in another order, so its first reads wait here.
    if m.offload and "store" in publish_queues(m):
        m.add("load", "mark", waits=(end("store"),))


def _cast(m: Steps, t: Tile) -> Work:
    """Return the work that computes a tile's parameters. In f32 there is none: the master weights
    go up or are the parameters."""
    up = t.slot("up")
    waits, recs = ((), ()) if m.offloads_params(t.flat) else ((free(up),), (full(up),))
    if m.real == 4:
        return Work("mark", reads=("master",), waits=waits, recs=recs)
    return Work(
        op=f"cast.{t.flat.name}",
        reads=("master",),
        writes=("param",),
        ins=(_found_at(m, "master", t),),
        outs=_rounded(m, t),
        ints=(Int("n", t.n),),
        waits=waits,
        recs=recs,
    )
