"""offload.py -- the optimizer's steps where its states lie in the host arena, tile by tile.

    main   factor                                     -> factor[0]
    down   the step's constants; a tile of the sum    -> here[s]     waits for used[s]
    host   the update of the tile                     -> used[s], made[s]
    up     the tile's new parameters                  -> gone[s], after a flat's last tile new[0]

Tiles take turns in the slots s of classes `down` and, in bf16, `up`; in f32 the masters
themselves go up. A tile is at most `sub_group_size` elements of a shard.
"""
from __future__ import annotations

from typing import TYPE_CHECKING, Iterator

from . import ops, plan
from .plan import Event, Int, Ref

if TYPE_CHECKING:
    from .sched import _Maker

# Events between these queues and the others: they stay where collectives have no queues.
EVENTS = ("factor", "here", "used", "made", "gone", "new")


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


def _copy(m: _Maker, queue: str, unit: str, src: Ref, dst: Ref, size: int, waits: tuple[str, ...],
          recs: tuple[str, ...], slot: int, from_rank: int = 0, to_rank: int = 0) -> None:
    """from_rank, to_rank: bytes from one rank's part to the next where one side is whole."""
    ints = (Int("from_rank", from_rank), Int("to_rank", to_rank), Int("bytes", size))
    event = lambda name: Event(name, 0 if name in ("new", "factor") else slot)
    m.add(queue, "copy", unit, ins=(src,), outs=(dst,), ints=ints,
          waits=tuple(map(event, waits)), recs=tuple(map(event, recs)))


def _up(m: _Maker, f: plan.Flat, l: int, at: int, n: int, slot: int, last: bool) -> None:
    src = Ref(f"master.{f.name}", l, at * 4) if m.real == 4 else Ref("up", slot)
    _copy(m, "up", f"{f.name}[{l}]", src, Ref(f"real.{f.name}", l, at * m.real), n * m.real,
          ("made",), ("gone", "new") if last else ("gone",), slot,
          to_rank=f.shard * m.real if f.real == "whole" else 0)


def update(m: _Maker) -> None:
    """After the step's factor is known: every tile down, updated, up; then to all ranks."""
    _copy(m, "down", "", Ref("ctl", 0), Ref("hctl", 0), ops.CTL, ("factor",), (), 0)
    for f, l, at, n, slot, last in _tiles(m):
        unit = f"{f.name}[{l}]"
        _copy(m, "down", unit, Ref(f"sum.{f.name}", l, at * 4), Ref("down", slot), n * 4,
              ("used",), ("here",), slot, from_rank=f.shard * 4 if f.sum == "whole" else 0)
        states = tuple(Ref(f"{c}.{f.name}", l, at * 4) for c in f.states)
        m.add("host", f"update.{f.name}", unit, ins=(Ref("down", slot),),
              outs=states if m.real == 4 else (Ref("up", slot), *states),
              ints=(Int("l", l), Int("at", at), Int("n", n)),
              waits=tuple(Event(e, slot) for e in ("here", "gone")),
              recs=tuple(Event(e, slot) for e in ("used", "made")))
        _up(m, f, l, at, n, slot, last)
        if last:
            m.spread(f, l)


def publish(m: _Maker) -> None:
    """Masters to everything made from them."""
    for f, l, at, n, slot, last in _tiles(m):
        if m.real == 2:
            m.add("host", f"cast.{f.name}", f"{f.name}[{l}]",
                  ins=(Ref(f"master.{f.name}", l, at * 4),), outs=(Ref("up", slot),),
                  ints=(Int("n", n),), waits=(Event("gone", slot),), recs=(Event("made", slot),))
        else:
            m.add("host", "mark", waits=(Event("gone", slot),), recs=(Event("made", slot),))
        _up(m, f, l, at, n, slot, last)
        if last:
            m.spread(f, l)
