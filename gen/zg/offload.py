"""offload.py -- the steps of what lies in the host arena or in the file arena: sums of gradients,
the optimizer's states and parameters.

A grain's leaf goes to the host's sum in pieces:

    reduce the sum of what ranks brought, to slot s of class `part`   -> summed[s], after taken[s]
    down   the piece, to slot s of class `down`   -> here[s], taken[s], after summed[s], used[s]
    host   push                                                       -> used[s], after here[s]

One rank alone has nothing to sum before: pieces of the leaf itself go down. Where ranks sum their
own grains of a unit first, what they have summed goes down to its place, and no push follows. The
step's sums of integers go down (sent[0], asked[0]), the norms are added, and they come back
(normed[0], back[0]). Then shards are updated, tile by tile:

    main   factor                                     -> factor[0]
    down   the step's constants                       -> known[0]
    host   the update of a tile                       -> made[s]
    up     the tile's new parameters                  -> gone[s], after a shard's last tile new[0],
                                                         fresh.F[l]

The update goes on beside the next step: a shard's event fresh.F[l], of what every rank keeps whole
whole.F[l], is what the forward's use of it waits for, and tiles come in the order of such uses;
queue main waits for known[0], and for the end where a part of the shards goes down by way of slots
that fetched ones use. Before the first step it waits for all.

Where sums stay on the device, a tile of the sum goes down before its update, as a piece does above.
Pieces and tiles are at most `sub_group_size` elements of a shard, and take turns in slots s. In
bf16 a tile's copy goes up from class `up`; in f32 the masters themselves do. Parameters that lie in
the host arena do not go up: host -> fresh.F[l], at the first filling stepped[0] after the last
tile. They are fetched for a use:

    up     a shard, to slot s of class `stage`        -> staged[s]   waits for read[s]
    gather from there                                 -> read[s]     waits for staged[s]

and where the optimizer stays on the device, new ones go down, in bf16 from such a slot:

    main   the update of a shard                      -> made[s]     waits for gone[s]
    down   its new parameters                         -> gone[s], stepped[0]

to the file by way of a slot of class `shelf`, which is described below:

    down   its new parameters, to the slot            -> gone[s], laid[s]   waits for sunk[s]
    store  to the file                                -> sunk[s], kept[0]   waits for laid[s]

What lies in the file arena comes to slots of the host arena and goes back from there, on queues of
their own, so that a tile is read while the one before it is updated and the one before that is
written; a read never stands behind a write that waits for its update, nor a unit's parameters
behind tiles:

    load   a tile of what the update reads, to slot s of the classes `tile`
                                                      -> loaded[s]   waits for stored[s]
    host   the update of the tile, there              -> changed[s]  waits for loaded[s]
    store  what it has written, to the file           -> stored[s]   waits for changed[s]

The first `buffer_count` tiles are read at the step's begin. After a shard's last tile of parameters
store -> fresh.F[l], at the first filling kept[0] after all of them. For a use of theirs:

    fetch  a shard, to slot s of class `shelf`        -> shelved[s]  waits for lifted[s]
    up     from there, as above                       -> lifted[s]   waits for shelved[s]
"""
from __future__ import annotations

from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Iterator, Sequence

from . import activations, ops, plan
from .plan import Event, Int, Ref
from .rings import Use

if TYPE_CHECKING:
    from .sched import _Maker
    from .shard import Shards
    from .spec import Spec

# Events between these queues and the others: they stay where collectives have no queues.
EVENTS = ("summed", "taken", "here", "used", "sent", "asked", "normed", "back", "factor", "known",
          "made", "gone", "new", "fresh", "stepped", "updated", "staged", "read", "loaded",
          "changed", "stored", "kept", "shelved", "lifted", "laid", "sunk", "near",
          *activations.EVENTS)
ARENAS = {"none": "", "cpu": "hosted", "nvme": "filed"}     # of a device: the kind of its classes


def arena(spec: Spec, shards: Shards, c: str, f: plan.Flat) -> str:
    """hosted or filed: where a state or the parameters (real) of a flat lie; '': on the device."""
    if c == "real":
        return "" if f.name not in shards.away else "hosted" if f.name in shards.held else "filed"
    return ARENAS[spec.zero.offload_optimizer.device]


def near_states(spec: Spec, shards: Shards, f: plan.Flat) -> tuple[str, ...]:
    """Of what stays on the device of a shard: as they would be if all of it did."""
    apart = spec.train.precision != "f32" or f.name in shards.away
    return (*["near_master"] * apart, *(f"near_{s}" for s in f.states if s != "master"))


def tile(m: _Maker) -> int:
    """Elements of a tile: the largest."""
    return max(b for f in m.shards.flats for _, b in m.tiles(f))


def _pieces(m: _Maker, f: plan.Flat) -> list[tuple[int, int]]:
    """(offset, elements) of a shard's pieces on their way to the host's sum."""
    moved = m.cut(f.shard, "reduce_bucket_size", m.W) if m.W > 1 else [(0, f.shard)]
    return [(o + at, n) for o, size in moved for at, n in m.cut(size, "sub_group_size", 1)]


def piece(m: _Maker) -> int:
    """Elements of the largest."""
    return max(n for f in m.shards.flats if f.moves for _, n in _pieces(m, f))


def _tiles(m: _Maker, shards: Sequence[tuple[plan.Flat, int]],
           ) -> Iterator[tuple[plan.Flat, int, int, int, int, bool]]:
    """(flat, instance, offset, elements, slot, the shard's last): elements of a shard."""
    turn = 0
    for f, l in shards:
        for at, n in m.tiles(f):
            slot = turn % m.spec.zero.offload_optimizer.buffer_count
            yield f, l, at, n, slot, at + n == f.shard
            turn += 1


def ends(m: _Maker, known: bool = False) -> tuple[Event, ...]:
    """What says that all parameters are new: on the device, in the host arena; known: or that they
    will be, each shard's own event says when."""
    names = {"": "new", "hosted": "stepped", "filed": "kept"}
    there = {m.arena("real", f) for f in m.shards.flats if m.offload or m.away(f)}
    near = {m.arena("real", f) for f in m.shards.flats if f.near}       # by way of slots of others
    new = tuple(Event(names[a], 0) for a in sorted(there))
    if known and m.offload:
        new = (Event("known", 0), *[Event("kept", 0)] * ("filed" in near))
    return (*new, *[Event("near.stepped", 0)] * ("hosted" in near))


def fresh(m: _Maker, f: plan.Flat, l: int) -> tuple[Event, ...]:
    """What says that an update of a shard is over that may go on beside the next step; of what is
    kept whole and spread that is said."""
    return (Event(f"fresh.{f.name}", l),) * (m.offload and f.moves and f.real == "shard")


def fetch(m: _Maker, u: Use, f: plan.Flat, wait: tuple[Event, ...],
          ) -> tuple[Ref, tuple[Event, ...], tuple[Event, ...]]:
    """Brings a use's shard up: where a gather finds it, what the gather waits for and records."""
    unit, slot = u.moved(*u.key), m.fetched.get(u.ring, 0) % m.stage[u.ring]
    m.fetched[u.ring] = m.fetched.get(u.ring, 0) + 1
    there, staged, read = Ref(f"stage.{u.ring}", slot), Event(f"staged.{u.ring}", slot), \
        Event(f"read.{u.ring}", slot)
    src, ready, risen = Ref(f"real.{f.name}", u.instance), \
        tuple(e for e in wait if e.name != "free"), ()
    if m.arena("real", f) == "filed":
        shelf, shelved, lifted = Ref(f"shelf.{u.ring}", slot), Event(f"shelved.{u.ring}", slot), \
            Event(f"lifted.{u.ring}", slot)
        first, m.loaded = not m.loaded and Event("updated", 0) not in ready, True
        ready += (Event("updated", 0),) * first                 # what came before was not here
        m.copy("fetch", unit, src, shelf, f.shard * m.real, (*ready, lifted), (shelved,))
        src, ready, risen = shelf, (shelved,), (lifted,)
    m.copy("up", unit, src, there, f.shard * m.real, (*ready, read), (staged, *risen))
    return there, (*(e for e in wait if e not in ready), staged), (read,)


def lower(m: _Maker, unit: str, f: plan.Flat, leaf: Ref, node: Ref, wait: tuple[Event, ...],
          ) -> tuple[Event, ...]:
    """A whole leaf to the host's sum; what says that the leaf was read."""
    if m.W == 1:
        m.add("reduce", "mark", unit, waits=wait, recs=(Event("summed", 0),))
    pieces = _pieces(m, f)
    for i, (o, n) in enumerate(pieces):
        s = m.turn % m.spec.zero.offload_optimizer.buffer_count
        m.turn += 1
        src, width = Ref("part", s), 4
        if m.W > 1:
            m.bring(unit, f, replace(leaf, at=o * m.real), n, m.real, wait if i == 0 else ())
            m.add("reduce", f"sum.{f.name}", unit, outs=(src,), ints=(Int("n", n),),
                  waits=(Event("taken", s),), recs=(Event("summed", s),))
            m.add("reduce", "done", unit)
            waits, recs = (Event("summed", s),), (Event("taken", s),)
        else:
            src, width = replace(leaf, at=o * m.real), m.real
            waits = (Event("summed", 0),) * (i == 0)
            recs = (Event("taken", 0),) * (n + o == f.shard)
        m.copy("down", unit, src, Ref("down", s), n * width, (*waits, Event("used", s)),
               (Event("here", s), *recs))
        m.add("host", f"push.{f.name}", unit, ins=(Ref("down", s),),
              outs=(replace(node, at=o * 4),), ints=(Int("n", n),), waits=(Event("here", s),),
              recs=(Event("used", s),))
    return (Event("taken", 0),) if m.W == 1 else ()


def land(m: _Maker, f: plan.Flat, l: int) -> None:
    """A unit's own sums, over ranks and to the host's: nothing is left to add there."""
    for o, n in _pieces(m, f):
        s = m.turn % m.spec.zero.offload_optimizer.buffer_count
        m.turn += 1
        unit, there = f"{f.name}[{l}]", Ref("part", s)
        m.bring(unit, f, Ref("pend", 0, o * 4), n, 4, ())
        m.add("reduce", f"join.{f.name}", unit, outs=(there,), ints=(Int("n", n),),
              waits=(Event("taken", s),), recs=(Event("summed", s),))
        m.add("reduce", "done", unit)
        m.copy("down", unit, there, Ref(f"sum.{f.name}", l, o * 4), n * 4,
               (Event("summed", s),), (Event("taken", s),))


def measure(m: _Maker) -> tuple[Event, ...]:
    """The norms, added to the step's sums on the host; what says that these are back."""
    m.add("main", "mark", recs=(Event("sent", 0),))
    m.copy("down", "", Ref("sums", 0), Ref("hsums", 0), 8 * ops.SUMS, (Event("sent", 0),),
           (Event("asked", 0),))
    m.add("host", "mark", waits=(Event("asked", 0),))
    m.norms("host")
    m.add("host", "mark", recs=(Event("normed", 0),))
    m.copy("up", "", Ref("hsums", 0), Ref("sums", 0), 8 * ops.SUMS, (Event("normed", 0),),
           (Event("back", 0),))
    return (Event("back", 0),)


def renew(m: _Maker, f: plan.Flat, l: int, op: str, ins: tuple[Ref, ...], states: tuple[Ref, ...],
          ints: tuple[Int, ...]) -> None:
    """What the device makes of a shard's masters, or of those that stay there, and the parameters'
    way down."""
    turn = m.turn % m.stage[m.ring_of[f.name]]
    m.turn += 1
    unit, copies = f"{f.name}[{l}]", m.real == 2
    c, n, prefix = ("near_master", f.near, "near.") if f.near else ("master", f.shard, "")
    made, gone, stepped = (Event(f"{prefix}{name}", i) for name, i in (
        ("made", turn), ("gone", turn), ("stepped", 0)))
    there = Ref(f"stage.{m.ring_of[f.name]}", turn) if copies else Ref(f"{c}.{f.name}", l)
    m.add("main", op, unit, ins=ins, outs=((there,) * copies + states), ints=ints,
          waits=(gone,) * copies, recs=(made,))
    home = Ref(f"real.{f.name}", l)
    if m.arena("real", f) == "hosted":
        m.copy("down", unit, there, home, n * m.real, (made,), (gone, stepped))
        return
    shelf = Ref(f"shelf.{m.ring_of[f.name]}", turn)
    laid, sunk = (Event(f"{prefix}{name}", turn) for name in ("laid", "sunk"))
    m.copy("down", unit, there, shelf, n * m.real, (made, sunk), (gone, laid))
    kept = () if prefix else (Event("kept", 0),)        # else behind the tiles that follow
    m.copy("store", unit, shelf, home, n * m.real, (laid,), (sunk, *kept))


def _up(m: _Maker, f: plan.Flat, l: int, at: int, n: int, slot: int, last: bool) -> None:
    src = _place(m, "master", f, l, at, slot) if m.real == 4 else Ref("up", slot)
    m.copy("up", f"{f.name}[{l}]", src, Ref(f"real.{f.name}", l, at * m.real), n * m.real,
           (Event("made", slot),),
           (Event("gone", slot), *((Event("new", 0), *fresh(m, f, l)) if last else ())),
           to_rank=f.shard * m.real if f.real == "whole" else 0)


def _place(m: _Maker, c: str, f: plan.Flat, l: int, at: int, slot: int) -> Ref:
    """Where the host finds a tile of a class: there, or in the slot that it comes to."""
    return Ref(f"tile.{c}", slot) if m.arena(c, f) == "filed" else _home(m, c, f, l, at)


def _home(m: _Maker, c: str, f: plan.Flat, l: int, at: int) -> Ref:
    """Where a tile of a class lies: of states, behind those that stay on the device."""
    return Ref(f"{c}.{f.name}", l, (at - (f.near if c != "real" else 0)) * _width(m, c))


def _width(m: _Maker, c: str) -> int:
    return m.real if c == "real" else ops.width(c, m.spec.train.optimizer.moments)


def _work(m: _Maker, op: str, f: plan.Flat, l: int, at: int, n: int, slot: int,
          reads: tuple[str, ...], writes: tuple[str, ...], waits: tuple[Event, ...],
          recs: tuple[Event, ...], new: tuple[Event, ...] = (), **rest: tuple) -> None:
    """The host's work on a tile: what it reads has come from the file before it, and what it writes
    goes there after it; then parameters that lie there are `new`."""
    loaded, changed, stored = (Event(name, slot) for name in ("loaded", "changed", "stored"))
    reads, writes = _filed(m, f, reads), _filed(m, f, writes)
    m.add("host", op, "" if op == "mark" else f"{f.name}[{l}]", **rest,
          waits=(*waits, *((loaded,) if reads else (stored,) if writes else ())),
          recs=(*recs, *([changed] if reads or writes else ())))
    _move(m, "store", f, l, at, n, slot, writes, (changed,), (stored, *new))


def _filed(m: _Maker, f: plan.Flat, names: tuple[str, ...]) -> list[str]:
    return [c for c in names if m.arena(c, f) == "filed"]


def _move(m: _Maker, queue: str, f: plan.Flat, l: int, at: int, n: int, slot: int,
          names: list[str], waits: tuple[Event, ...], recs: tuple[Event, ...]) -> None:
    """A tile of these classes, from the file to its slot or back."""
    for c in names:
        there, here = _home(m, c, f, l, at), _place(m, c, f, l, at, slot)
        src, dst = (there, here) if queue == "load" else (here, there)
        m.copy(queue, f"{f.name}[{l}]", src, dst, n * _width(m, c),
               waits if c == names[0] else (), recs if c == names[-1] else ())


def _load(m: _Maker, f: plan.Flat, l: int, at: int, n: int, slot: int,
          reads: tuple[str, ...]) -> None:
    """What the host's work on a tile reads, when its slot is free."""
    free = [Event("changed", slot), Event("stored", slot)]
    if m.real == 4 and not m.away(f):           # parameters go up from the slot itself
        free.append(Event("gone", slot))
    _move(m, "load", f, l, at, n, slot, _filed(m, f, reads), tuple(free),
          (Event("loaded", slot),))


def _read(m: _Maker, f: plan.Flat) -> tuple[str, ...]:
    """What an update reads of a tile."""
    return (*("real",) * (m.away(f) and m.real == 4), *f.states)


def _needed(m: _Maker) -> list[tuple[plan.Flat, int]]:
    """The shards that move, in the order in which a forward first needs them."""
    first = dict.fromkeys((f, m.instance(f, u)) for u in m.chain("eval")
                          for f in sorted(m.reads(u.part)))
    return [(m.flats[f], l) for f, l in first if m.flats[f].moves]


def begin(m: _Maker) -> None:
    """The first tiles are read beside forward and backward."""
    early = m.spec.zero.offload_optimizer.buffer_count
    for f, l, at, n, slot, _ in islice(_tiles(m, _needed(m)), early):
        _load(m, f, l, at, n, slot, _read(m, f))


def init(m: _Maker) -> None:
    """Initial masters: all of a shard where it lies, or tile by tile on the way to the file."""
    m.init([(f, l) for f, l in m.each() if f.near], "near_")
    for f, l, at, n, slot, last in _tiles(m, m.each()):
        c = "master" if "master" in f.states else "real"
        if m.arena(c, f) == "filed":
            _work(m, f"init.{f.name}", f, l, at, n, slot, (), (c,), (), (),
                  outs=(_place(m, c, f, l, at, slot),),
                  ints=(Int("l", l), Int("at", at), Int("n", n)))
        elif last:
            m.add("host", f"init.{f.name}", f"{f.name}[{l}]", outs=(_home(m, c, f, l, f.near),),
                  ints=(Int("l", l),))


def update(m: _Maker) -> None:
    """After the step's factor is known: every tile down, updated, up; then to all ranks."""
    below = m.shards.below
    m.copy("down", "", Ref("ctl", 0), Ref("hctl", 0), ops.CTL, (Event("factor", 0),),
           (Event("known", 0),))
    if below:
        m.add("host", "mark", waits=(Event("known", 0),))
    for turn, (f, l, at, n, slot, last) in enumerate(_tiles(m, _needed(m))):
        if 0 < at == f.near:
            m.optimize([(f, l)], "near_")
        g, here, used = Ref(f"sum.{f.name}", l, at * 4), (), ()
        if not below:
            here, used, tile = (Event("here", slot),), (Event("used", slot),), Ref("down", slot)
            m.copy("down", f"{f.name}[{l}]", g, tile, n * 4, used, here,
                   from_rank=f.shard * 4 if f.sum == "whole" else 0)
            g = tile
        made, away = _made(m, f, l, at, slot), ("real",) * m.away(f)
        there, new = m.arena("real", f), fresh(m, f, l) if last else ()
        if turn >= m.spec.zero.offload_optimizer.buffer_count:
            _load(m, f, l, at, n, slot, _read(m, f))
        _work(m, f"update.{f.name}", f, l, at, n, slot, _read(m, f),
              (*away, *f.states), (*here, *_turn(m, f, "gone", slot)),
              (*used, *_turn(m, f, "made", slot), *(new if there == "hosted" else ())),
              new if there == "filed" else (), ins=(g,),
              outs=(*made, *(_place(m, c, f, l, at, slot) for c in f.states)),
              ints=(Int("l", l), Int("at", at), Int("n", n)))
        _after(m, f, l, at, n, slot, last)
    _end(m, True)


def publish(m: _Maker) -> None:
    """Masters to everything made from them."""
    for f, l, at, n, slot, last in _tiles(m, m.each()):
        if 0 < at == f.near:
            m.fill([(f, l)], "near_")
        waits, recs = _turn(m, f, "gone", slot), _turn(m, f, "made", slot)
        if m.real == 2 or recs:
            _load(m, f, l, at, n, slot, ("master",))
        if m.real == 2:
            _work(m, f"cast.{f.name}", f, l, at, n, slot, ("master",), ("real",), waits, recs,
                  ins=(_place(m, "master", f, l, at, slot),), outs=_made(m, f, l, at, slot),
                  ints=(Int("n", n),))
        elif recs:
            _work(m, "mark", f, l, at, n, slot, ("master",), (), waits, recs)
        _after(m, f, l, at, n, slot, last)
    _end(m)


def _turn(m: _Maker, f: plan.Flat, event: str, slot: int) -> tuple[Event, ...]:
    """What orders a tile and its way up."""
    return () if m.away(f) else (Event(event, slot),)


def _end(m: _Maker, known: bool = False) -> None:
    for queue, event in (("host", "stepped"), ("store", "kept")):
        if Event(event, 0) in ends(m, known):
            m.add(queue, "mark", recs=(Event(event, 0),))


def _made(m: _Maker, f: plan.Flat, l: int, at: int, slot: int) -> tuple[Ref, ...]:
    """Where a tile's real copies are made, unless they are the states themselves: in their place,
    or on their way up."""
    if m.away(f):
        return (_place(m, "real", f, l, at, slot),)
    return (Ref("up", slot),) if m.real == 2 else ()


def _after(m: _Maker, f: plan.Flat, l: int, at: int, n: int, slot: int, last: bool) -> None:
    if m.away(f):
        return
    _up(m, f, l, at, n, slot, last)
    if last:
        m.spread(f, l)
