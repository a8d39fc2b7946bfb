"""climb.py -- the steps of a gradient on its way to the sum that its owner has (levels.py): after
each micro-batch, after a unit, and once at the end of a step.

    a level        reduce -> inbox, sum -> class `intra`, for the level that follows
    the last       reduce -> inbox, sum -> the sum
    to the host    reduce -> inbox, sum -> part, down -> down, host: push on the host's sum
    ... finished   reduce -> inbox, sum -> part, down: to its place on the host
    of one rank    down -> down, host: push; nothing is to be summed before
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..plan.plan import Events, Int, Ref
from ..plan.size import Size
from .hops import Hop, Ring, free, full, move
from .levels import Phase
from .pieces import Span
from .rings import Leaf, Use
from .shard import Flat
from .steps import Steps


@dataclass(frozen=True)
class Place:
    """Bytes on their way, `width` of an element; what a step there waits for, and records."""

    ref: Ref
    width: int = 4
    waits: Events = ()
    recs: Events = ()

    def piece(self, o: Size, first: bool, last: bool) -> Place:
        """From element o on: the first piece waits, the last records."""
        return Place(
            replace(self.ref, at=o.bytes(self.width)),
            self.width,
            self.waits if first else (),
            self.recs if last else (),
        )


def filled(slot: Ref) -> Place:
    return Place(slot, 4, (free(slot),), (full(slot),))


def taken(slot: Ref, width: int = 4) -> Place:
    return Place(slot, width, (full(slot),), (free(slot),))


def leaf_done(m: Steps, u: Use, x: Leaf, g: int) -> None:
    """A whole leaf of a micro-batch goes up; a step's only leaf is its sum."""
    f, l, _ = x
    if m.sums.phases:
        way = _Way(m, m.flats[f], l, u.moved(f, l))
        way.up(m.sums.each, taken(m.grad_slot(x, g), m.real))


def unit_done(m: Steps, f: Flat, l: int) -> None:
    """Reduces a unit's sums of own micro-batches where they lie in class `pending`."""
    if m.sums.pending:
        _Way(m, f, l).up(m.sums.once, Place(Ref("pending", 0)))


def step_done(m: Steps) -> None:
    """Reduces the sums that meet once a step, and gathers them for ranks that update more than
    their own shard."""
    once = () if m.sums.pending else m.sums.once
    if once:
        m.follow("reduce", "sum")
    for f, l in m.moved() if once else ():
        _Way(m, f, l).up(once, Place(Ref(f"sum.{f.name}", l)))
    if m.sums_spread:
        m.follow("reduce", "sum")
    for f, l in m.moved() if m.sums_spread else ():
        ref = Ref(f"sum.{f.name}", l)
        hop = move("reduce", ref, ref)
        m.descend(hop, f"{f.name}[{l}]", f, 4, m.sums.ends, m.sums.depth)


def pieces(m: Steps, f: Flat) -> list[Span]:
    """(offset, elements) of a shard's pieces on their way to the host's sum."""
    level, moved = m.sums.phases[-1].level, [(Size.none(f.name), f.shard)]
    if level:
        moved = m.cut(f.shard, "reduce_bucket_size", level)
    return [
        (o + at, n)
        for o, size in moved
        for at, n in m.cut(size, "sub_group_size", name="part")
    ]


def piece(m: Steps) -> int:
    """Elements of the largest."""
    return max(n for f in m.shards.flats if f.moves for _, n in pieces(m, f))


@dataclass(frozen=True)
class _Way:
    """Of an instance of a flat; unit: what its steps are named after."""

    m: Steps
    f: Flat
    l: int
    name: str = ""

    @property
    def unit(self) -> str:
        return self.name or f"{self.f.name}[{self.l}]"

    def up(self, phases: Sequence[Phase], source: Place) -> None:
        """Through all phases, by way of class `intra` to all but the last."""
        m, (*inner, last) = self.m, phases
        for x in inner:
            there = m.intra.slot(m.level)
            m.level += 1
            self.phase(x, source, filled(there))
            source = taken(there)
        pending = m.sums.pending and last.counted
        home = Ref(f"sum.{self.f.name}", self.l)
        if m.sums.host and not pending:
            self.down(last, source, home)
        else:
            self.phase(
                last, source, Place(Ref("pending", 0) if pending else home)
            )

    def phase(self, x: Phase, source: Place, target: Place) -> None:
        m = self.m
        if not x.level:
            m.add(
                "sum",
                f"{x.fn}.{self.f.name}",
                self.unit,
                ins=(source.ref,),
                outs=(target.ref,),
                waits=(*source.waits, *target.waits),
                recs=(*target.recs, *source.recs),
            )
            return
        share = m.shards.share(self.f, x.depth)
        cut = m.cut(share, "reduce_bucket_size", x.level)
        for n, (o, size) in enumerate(cut):
            ends = n == 0, n == len(cut) - 1
            self.piece(x, source.piece(o, *ends), target.piece(o, *ends), size)

    def piece(
        self, x: Phase, source: Place, target: Place, size: Size
    ) -> None:
        """All-to-all and a local sum of what came; or NCCL's sum, and what is left to add. It comes
        by way of a slot of `inbox`."""
        m, width = self.m, source.width
        group = x.level.group if x.level else ""
        there = m.inbox.slot(m.came)
        m.came += 1
        step = m.shards.share(self.f, x.depth).bytes(width)
        ints = [Int("step", step), Int("bytes", size.bytes(width))]
        ints += [Int("width", width)] * (m.reduces == "reducescatter")
        m.add(
            "reduce",
            m.reduces,
            self.unit,
            ins=(source.ref,),
            outs=(there,),
            ints=tuple(ints),
            waits=(*source.waits, free(there)),
            recs=(full(there),),
            group=group,
        )
        m.add(
            "sum",
            f"{x.fn}.{self.f.name}",
            self.unit,
            ins=(there,),
            outs=(target.ref,),
            ints=(Int("n", size),),
            waits=(full(there), *target.waits),
            recs=target.recs,
        )
        m.add(
            "sum",
            "done",
            self.unit,
            ins=(there, source.ref),
            recs=(free(there), *source.recs),
            group=group,
        )

    def down(self, x: Phase, source: Place, home: Ref) -> None:
        """The last phase, piece by piece, to the host: where it adds, to its sum of
        micro-batches."""
        m = self.m
        for o, n in pieces(m, self.f):
            turn, slots = m.turn, m.spec.zero.offload_optimizer.buffer_count
            m.turn += 1
            part, there = (Ring(c, slots).slot(turn) for c in ("part", "down"))
            some = source.piece(o, o == 0, o + n == self.f.shard)
            to = replace(home, at=o.bytes(4))
            if x.level:
                self.piece(x, some, filled(part), n)
                some = taken(part)
            if not m.sums.on_host:
                m.copy(
                    Hop("down", part, to, fills=False), self.unit, n.bytes(4)
                )
                continue
            hop = Hop(
                queue="down",
                src=some.ref,
                dst=there,
                takes=False,
                fills=True,
                after=some.waits,
                then=some.recs,
            )
            m.copy(hop, self.unit, n.bytes(some.width))
            push = Hop("host", there, to, fills=False)
            m.add(
                "host",
                f"push.{self.f.name}",
                self.unit,
                ins=(push.src,),
                outs=(push.dst,),
                ints=(Int("n", n),),
                waits=push.waits,
                recs=push.recs,
            )
