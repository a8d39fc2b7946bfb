"""offload.py -- the steps of what lies in the host arena or in the file arena: sums of gradients,
the optimizer's states and parameters.

Routes, each `queue -> slot` a hop (hops.py); slots in brackets are of several classes:

    a leaf's piece       reduce -> inbox, sum -> part, down -> down, host: push on the host's sum
    ... of one rank      down -> down, host: push; nothing is to be summed before
    a unit's own sums    reduce -> inbox, sum -> part, down: to their place on the host
    a sum on the device  down -> down, host: update, a tile at a time
    a tile's update      load -> tile, host -> tile, store: to the file
    ... its parameters   host -> up, up: to the device; in f32 from the masters themselves
    a shard for its use  fetch -> fetched, up -> staging, gather -> ring

Without a file arena a tile is updated where it lies, and a shard comes up from there. The step's
sums of integers go down, the norms are added, and they come back. Then the step's constants go
down, and the shards are updated.

The update goes on beside the next step: what says that a shard is new, or of what every rank keeps
whole that it is spread, is what the forward's use of it waits for, and tiles come in the order of
such uses; queue main waits for the constants, and for the end where a part of the shards goes down
by way of slots that fetched ones use. Before the first step it waits for all.

Pieces and tiles are at most `sub_group_size` elements of a shard, and take turns in slots. Where
the optimizer stays on the device, new parameters go down: device.py. What lies in the file has
queues of its own, so that a tile is read while the one before it is updated and the one before that
is written; a read never stands behind a write that waits for its update, nor a unit's parameters
behind tiles. The first `buffer_count` tiles are read at the step's begin.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from ..plan.operand import Names
from ..plan.plan import Events, Int, Ref, Refs
from ..plan.size import Size
from . import device
from .hops import Hop, Ring, end, free, full, move
from .rings import Gathered
from .shard import Flat
from .steps import CTL, SUMS, Instance, Steps

# The queue by which new parameters come to their arena, where the host makes them and where the
# device does.
BY_HOST = {"device": "up", "host": "host", "file": "store"}
BY_DEVICE = {"host": "down", "file": "store"}


@dataclass(frozen=True)
class Tile:
    """Elements of a shard that are updated at a time, and the number of the slots they take."""

    flat: Flat
    l: int
    at: Size
    n: Size
    number: int

    @property
    def unit(self) -> str:
        return f"{self.flat.name}[{self.l}]"

    @property
    def last(self) -> bool:  # of the shard's
        return self.at + self.n == self.flat.shard

    @property
    def after_near(self) -> bool:  # the first behind what stays on the device
        return 0 < self.at == self.flat.near

    @property
    def ints(self) -> tuple[Int, ...]:
        return Int("l", self.l), Int("at", self.at), Int("n", self.n)

    def slot(self, cls: str) -> Ref:
        return Ref(cls, self.number)

    @property
    def real(self) -> Ref:
        return Ref(f"param.{self.flat.name}", self.l)


@dataclass(frozen=True)
class Work:
    """What the host does with a tile: which states it reads and writes, its operands, what it waits
    for and records beside these; new: what says that parameters in the file are."""

    op: str
    reads: Names = ()
    writes: Names = ()
    ins: Refs = ()
    outs: Refs = ()
    ints: tuple[Int, ...] = ()
    waits: Events = ()
    recs: Events = ()
    new: Events = ()


# ---- pieces and tiles


def tile(m: Steps) -> int:
    """Elements of the largest tile; 0: the host works on none."""
    sizes = [n for f, _ in m.low() for _, n in m.tiles(f)]
    return max(sizes, default=0)


def _buffers(m: Steps) -> int:
    return m.spec.zero.offload_optimizer.buffer_count


def _tiles(m: Steps, shards: Sequence[tuple[Flat, int]]) -> Iterator[Tile]:
    turn = 0
    for f, l in shards:
        for at, n in m.tiles(f):
            yield Tile(f, l, at, n, turn % _buffers(m))
            turn += 1


def _needed(m: Steps) -> list[Instance]:
    """The shards that move, in the order in which a forward first needs them."""
    used = [
        (f, m.instance(f, u))
        for u in m.chain("eval")
        for f in sorted(m.reads(u.part))
    ]
    first = dict.fromkeys(used)
    return [(m.flats[f], l) for f, l in first if m.flats[f].moves]


# ---- parameters for a use


def fresh(m: Steps, f: Flat, l: int) -> Events:
    """What says that an update of a shard is over that may go on beside the next step; of what is
    kept whole and spread that is said."""
    if m.offload and f.moves and f.gathered and not m.spreads(f):
        return (full(Ref(f"param.{f.name}", l)),)
    return ()


def stops(m: Steps, g: Gathered, f: Flat) -> list[tuple[str, Ref]]:
    """The queues that bring a shard up for a use, and the slots to which they do."""
    if not m.away(f):
        return []
    turn, slots = m.fetched.get(g.ring, 0), m.staging[g.ring]
    m.fetched[g.ring] = turn + 1
    up = "up", Ring(f"staging.{g.ring}", slots).slot(turn)
    if m.arena("param", f) == "host":
        return [up]
    return [("fetch", Ring(f"fetched.{g.ring}", slots).slot(turn)), up]


def _by_host(m: Steps) -> set[str]:
    """Of all parameters; without an optimizer there, of the first values of those that are
    frozen."""
    flats = m.shards.flats if m.offload else [f for f, _ in m.low()]
    return {BY_HOST[m.arena("param", f)] for f in flats}


def _by_device(m: Steps) -> set[str]:
    """Of what it updates, all of a shard or its first elements, and what lies elsewhere."""
    own = [f for f in m.shards.flats if (f.near if m.offload else f.moves)]
    return {BY_DEVICE[m.arena("param", f)] for f in own if m.away(f)}


def published(m: Steps) -> list[str]:
    """The queues at whose end all parameters are what the masters say."""
    return sorted(_by_host(m) | _by_device(m))


def updated(m: Steps) -> list[str]:
    """The queues at whose end parameters are new, or each shard of the host's says so itself: that
    has its constants then."""
    constants = {"down"} if m.offload else set()
    return sorted(constants | _by_device(m))


def _ends(m: Steps, queues: Sequence[str]) -> None:
    """What goes up or down says so itself."""
    for queue in queues:
        if queue in ("host", "store"):
            m.add(queue, "mark", recs=(end(queue),))


# ---- gradients


def measure(m: Steps) -> None:
    """The norms, added to the step's sums on the host."""
    here, there = Ref("sums", 0), Ref("hsums", 0)
    size = SUMS.bytes(8)
    m.follow("down", "main")
    m.copy(move("down", here, there), "", size)
    m.follow("host", "down")
    m.norms("host")
    m.follow("up", "host")
    m.copy(move("up", there, here), "", size)
    m.follow("main", "up")


# ---- where a tile is


def _home(m: Steps, c: str, t: Tile) -> Ref:
    """Where a tile of a class lies."""
    s = m.kept.of(c, t.flat)
    return Ref(s.cls, t.l, (t.at - s.first).bytes(s.width))


def _place(m: Steps, c: str, t: Tile) -> Ref:
    """Where the host finds a tile of a class: there, or in the slot that it comes to."""
    return (
        t.slot(f"tile.{c}") if m.arena(c, t.flat) == "file" else _home(m, c, t)
    )


def _made(m: Steps, t: Tile) -> Refs:
    """Where a tile's real copies are made, unless they are the states themselves: in their place,
    or on their way up."""
    if m.away(t.flat):
        return (_place(m, "param", t),)
    return (t.slot("up"),) if m.real == 2 else ()


# ---- the host's work on a tile


def _filed(m: Steps, t: Tile, names: Names) -> list[str]:
    return [c for c in names if m.arena(c, t.flat) == "file"]


def _work(m: Steps, t: Tile, w: Work) -> None:
    """What it reads has come from the file before it, and what it writes goes there after it."""
    slot = t.slot("tile")
    reads, writes = _filed(m, t, w.reads), _filed(m, t, w.writes)
    waits, recs = w.waits, w.recs
    if reads or writes:  # else it works where the tile lies
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
    hops = [move("store", _place(m, c, t), _home(m, c, t)) for c in writes]
    _copies(m, t, writes, hops, (full(slot),), (free(slot), *w.new))


def _load(m: Steps, t: Tile, reads: Names) -> None:
    """What the host's work on a tile reads, when its slot is free."""
    slot, names = t.slot("tile"), _filed(m, t, reads)
    ready: Events = (free(slot),)
    if m.real == 4 and not m.away(
        t.flat
    ):  # parameters go up from the slot itself
        ready += (free(t.slot("up")),)
    hops = [move("load", _home(m, c, t), _place(m, c, t)) for c in names]
    _copies(m, t, names, hops, ready, (full(slot),))


def _copies(
    m: Steps,
    t: Tile,
    names: list[str],
    hops: list[Hop],
    after: Events,
    then: Events,
) -> None:
    """A tile of these classes, from the file to its slot or back."""
    for n, (c, hop) in enumerate(zip(names, hops, strict=True)):
        if n == 0:
            hop = replace(hop, after=after)
        if n == len(hops) - 1:
            hop = replace(hop, then=then)
        width = m.kept.of(c, t.flat).width
        m.copy(hop, t.unit, t.n.bytes(width))


def _read(m: Steps, f: Flat) -> Names:
    """What an update reads of a tile."""
    return ("param", *f.states) if m.away(f) and m.real == 4 else f.states


def _raise(m: Steps, t: Tile) -> None:
    """A tile's new parameters go up; after a shard's last, all that is kept whole to everybody."""
    f, slot = t.flat, t.slot("up")
    if m.away(f):
        return
    real = m.real
    src = _place(m, "master", t) if real == 4 else slot
    dst = replace(t.real, at=t.at.bytes(real))
    then: Events = (free(slot),)
    if t.last:
        then += (end("up"), *fresh(m, f, t.l))
    dst, own = m.own_part(f, dst, f.depth, real)
    hop = move("up", src, dst, (full(slot),), then)
    m.copy(hop, t.unit, t.n.bytes(real), to_rank=own)
    if t.last:
        near = (end("main"),) if f.near else ()
        m.spread(f, t.l, end("up"), *near)


# ---- sections


def begin(m: Steps) -> None:
    """The first tiles are read beside forward and backward."""
    for t in islice(_tiles(m, _needed(m)), _buffers(m)):
        _load(m, t, _read(m, t.flat))


def init(m: Steps) -> None:
    """Initial masters: all of a shard where it lies, or tile by tile on the way to the file."""
    device.init(m, [(f, l) for f, l in m.each() if f.near], "near_")
    for t in _tiles(m, m.low()):
        f, op = t.flat, f"init.{t.flat.name}"
        c = m.kept.masters(f)
        if m.arena(c, f) == "file":
            _work(
                m,
                t,
                Work(op, writes=(c,), outs=(_place(m, c, t),), ints=t.ints),
            )
        elif t.last:
            home = _home(m, c, replace(t, at=f.near))
            m.add("host", op, t.unit, outs=(home,), ints=(Int("l", t.l),))


def update(m: Steps) -> None:
    """After the step's factor is known: every tile down, updated, up; then to all ranks."""
    m.follow("down", "main")
    m.copy(
        move("down", Ref("ctl", 0), Ref("hctl", 0), then=(end("down"),)),
        "",
        CTL,
    )
    if m.sums.host:
        m.add("host", "mark", waits=(end("down"),))
    for turn, t in enumerate(_tiles(m, _needed(m))):
        if t.after_near:
            device.optimize(m, [(t.flat, t.l)], "near_")
        if not m.sums.host:
            _sum_down(m, t)
        if turn >= _buffers(m):
            _load(m, t, _read(m, t.flat))
        _work(m, t, _update(m, t))
        _raise(m, t)
    _ends(m, updated(m))


def _sum(t: Tile) -> Ref:
    return Ref(f"sum.{t.flat.name}", t.l, t.at.bytes(4))


def _sum_down(m: Steps, t: Tile) -> None:
    src, own = m.own_part(t.flat, _sum(t), m.sums.depth, 4)
    m.copy(
        Hop("down", src, t.slot("down"), takes=False),
        t.unit,
        t.n.bytes(4),
        from_rank=own,
    )


def _update(m: Steps, t: Tile) -> Work:
    f, up = t.flat, t.slot("up")
    sum_: Ref = _sum(t) if m.sums.host else t.slot("down")
    waits: Events = () if m.sums.host else (full(sum_),)
    recs: Events = () if m.sums.host else (free(sum_),)
    writes = f.states
    new: Events = ()
    if m.away(f):  # new parameters are made where they lie
        writes = ("param", *f.states)
        new = fresh(m, f, t.l) if t.last else ()
    else:
        waits += (free(up),)
        recs += (full(up),)
    filed = m.arena("param", f) == "file"
    recs += () if filed else new
    states = [_place(m, c, t) for c in f.states]
    return Work(
        op=f"update.{f.name}",
        reads=_read(m, f),
        writes=writes,
        ins=(sum_,),
        outs=(*_made(m, t), *states),
        ints=t.ints,
        waits=waits,
        recs=recs,
        new=new if filed else (),
    )


def publish(m: Steps) -> None:
    """Masters to everything made from them; parameters that are masters need nothing."""
    for t in _tiles(m, m.low()):
        f = t.flat
        if t.after_near:
            device.fill(m, [(f, t.l)], "near_")
        narrow = m.real == 2 and f.moves
        if narrow or not m.away(f):
            _load(m, t, ("master",))
            _work(m, t, _cast(m, t))
        _raise(m, t)
    _ends(m, published(m) if m.offload else sorted(_by_host(m)))
    if m.offload and "store" in published(m):
        m.add(
            "load", "mark", waits=(end("store"),)
        )  # an update has the slots in other turns


def _cast(m: Steps, t: Tile) -> Work:
    """In f32 the masters are what goes up, or the parameters themselves."""
    up = t.slot("up")
    waits, recs = ((), ()) if m.away(t.flat) else ((free(up),), (full(up),))
    if m.real == 4:
        return Work("mark", reads=("master",), waits=waits, recs=recs)
    return Work(
        op=f"cast.{t.flat.name}",
        reads=("master",),
        writes=("param",),
        ins=(_place(m, "master", t),),
        outs=_made(m, t),
        ints=(Int("n", t.n),),
        waits=waits,
        recs=recs,
    )
