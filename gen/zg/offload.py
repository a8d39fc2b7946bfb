"""offload.py -- the steps of what lies in the host arena: the optimizer's states, tile by tile, and
parameters.

    main   factor                                     -> factor[0]
    down   the step's constants; a tile of the sum    -> here[s]     waits for used[s]
    host   the update of the tile                     -> used[s], made[s]
    up     the tile's new parameters                  -> gone[s], after a flat's last tile new[0]

Tiles take turns in the slots s of classes `down` and, in bf16, `up`; in f32 the masters
themselves go up. A tile is at most `sub_group_size` elements of a shard. Parameters that lie in the
host arena do not go up: host -> stepped[0] after the last tile. They are fetched for a use:

    up     a shard, to slot s of class `stage`        -> staged[s]   waits for read[s]
    gather from there                                 -> read[s]     waits for staged[s]
"""
from __future__ import annotations

from typing import TYPE_CHECKING, Iterator

from . import ops, plan
from .plan import Event, Int, Ref
from .rings import Use

if TYPE_CHECKING:
    from .sched import _Maker

# Events between these queues and the others: they stay where collectives have no queues.
EVENTS = ("factor", "here", "used", "made", "gone", "new", "stepped", "updated", "staged", "read")


def tile(m: _Maker) -> int:
    """Elements of a tile: the largest."""
    return max(b for f in m.shards.flats for _, b in m.cut(f.shard, "sub_group_size", 1))


def _tiles(m: _Maker) -> Iterator[tuple[plan.Flat, int, int, int, int, bool]]:
    """(flat, instance, offset, elements, slot, the shard's last): elements of a shard."""
    turn = 0
    for f, l in m.each():
        for at, n in m.cut(f.shard, "sub_group_size", 1):
            slot = turn % m.spec.zero.offload_optimizer.buffer_count
            yield f, l, at, n, slot, at + n == f.shard
            turn += 1


def _copy(m: _Maker, queue: str, unit: str, src: Ref, dst: Ref, size: int,
          waits: tuple[Event, ...], recs: tuple[Event, ...], from_rank: int = 0, to_rank: int = 0,
          ) -> None:
    """from_rank, to_rank: bytes from one rank's part to the next where one side is whole."""
    ints = (Int("from_rank", from_rank), Int("to_rank", to_rank), Int("bytes", size))
    m.add(queue, "copy", unit, ins=(src,), outs=(dst,), ints=ints, waits=waits, recs=recs)


def ends(m: _Maker) -> tuple[Event, ...]:
    """What says that all parameters are new: on the device, in the host arena."""
    away = {m.away(f) for f in m.shards.flats}
    return tuple(Event("stepped" if a else "new", 0) for a in sorted(away))


def fetch(m: _Maker, u: Use, f: plan.Flat, wait: tuple[Event, ...],
          ) -> tuple[Ref, tuple[Event, ...], tuple[Event, ...]]:
    """Brings a use's shard up: where a gather finds it, what the gather waits for and records."""
    slot = m.fetched.get(u.ring, 0) % m.stage[u.ring]
    m.fetched[u.ring] = m.fetched.get(u.ring, 0) + 1
    there, staged, read = Ref(f"stage.{u.ring}", slot), Event(f"staged.{u.ring}", slot), \
        Event(f"read.{u.ring}", slot)
    _copy(m, "up", u.unit, Ref(f"real.{f.name}", u.instance), there, f.shard * m.real,
          (*(e for e in wait if e.name == "updated"), read), (staged,))
    return there, (*wait, staged), (read,)


def _up(m: _Maker, f: plan.Flat, l: int, at: int, n: int, slot: int, last: bool) -> None:
    src = Ref(f"master.{f.name}", l, at * 4) if m.real == 4 else Ref("up", slot)
    _copy(m, "up", f"{f.name}[{l}]", src, Ref(f"real.{f.name}", l, at * m.real), n * m.real,
          (Event("made", slot),), (Event("gone", slot), *[Event("new", 0)] * last),
          to_rank=f.shard * m.real if f.real == "whole" else 0)


def update(m: _Maker) -> None:
    """After the step's factor is known: every tile down, updated, up; then to all ranks."""
    _copy(m, "down", "", Ref("ctl", 0), Ref("hctl", 0), ops.CTL, (Event("factor", 0),), ())
    for f, l, at, n, slot, last in _tiles(m):
        unit = f"{f.name}[{l}]"
        _copy(m, "down", unit, Ref(f"sum.{f.name}", l, at * 4), Ref("down", slot), n * 4,
              (Event("used", slot),), (Event("here", slot),),
              from_rank=f.shard * 4 if f.sum == "whole" else 0)
        made = _made(m, f, l, at, slot)
        states = tuple(Ref(f"{c}.{f.name}", l, at * 4) for c in f.states)
        m.add("host", f"update.{f.name}", unit, ins=(Ref("down", slot),), outs=(*made, *states),
              ints=(Int("l", l), Int("at", at), Int("n", n)),
              waits=(Event("here", slot), *_turn(m, f, "gone", slot)),
              recs=(Event("used", slot), *_turn(m, f, "made", slot)))
        _after(m, f, l, at, n, slot, last)
    _end(m)


def publish(m: _Maker) -> None:
    """Masters to everything made from them."""
    for f, l, at, n, slot, last in _tiles(m):
        waits, recs = _turn(m, f, "gone", slot), _turn(m, f, "made", slot)
        if m.real == 2:
            m.add("host", f"cast.{f.name}", f"{f.name}[{l}]",
                  ins=(Ref(f"master.{f.name}", l, at * 4),), outs=_made(m, f, l, at, slot),
                  ints=(Int("n", n),), waits=waits, recs=recs)
        elif recs:
            m.add("host", "mark", waits=waits, recs=recs)
        _after(m, f, l, at, n, slot, last)
    _end(m)


def _turn(m: _Maker, f: plan.Flat, event: str, slot: int) -> tuple[Event, ...]:
    """What orders a tile and its way up."""
    return () if m.away(f) else (Event(event, slot),)


def _end(m: _Maker) -> None:
    if Event("stepped", 0) in ends(m):
        m.add("host", "mark", recs=(Event("stepped", 0),))


def _made(m: _Maker, f: plan.Flat, l: int, at: int, slot: int) -> tuple[Ref, ...]:
    """Where a tile's real copies are made, unless they are the states themselves: in their place in
    the host arena, or on their way up."""
    if m.away(f):
        return (Ref(f"real.{f.name}", l, at * m.real),)
    return (Ref("up", slot),) if m.real == 2 else ()


def _after(m: _Maker, f: plan.Flat, l: int, at: int, n: int, slot: int, last: bool) -> None:
    if m.away(f):
        return
    _up(m, f, l, at, n, slot, last)
    if last:
        m.spread(f, l)
