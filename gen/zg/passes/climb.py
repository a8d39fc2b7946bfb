"""climb.py -- adds the steps that reduce gradients to their owners' sums: after each micro-batch,
after a unit, or once at the end of a step, as levels.py decides.

    a level        reduce -> inbox, sum -> class `intra` for the next level
    the last       reduce -> inbox, sum -> the sum
    to the host    reduce -> inbox, sum -> part, down -> down, host: push to the host's sum
    ... once       reduce -> inbox, sum -> part, down -> the host's sum
    of one rank    down -> down, host: push to the host's sum
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..plan.plan import Events, Int, Ref
from ..plan.size import Size, plus
from .hops import Hop, Ring, free, full, plain_hop
from .levels import Addition
from .pieces import Span
from .rings import Gradient, Use
from .shard import Flat
from .steps import Steps


@dataclass(frozen=True)
class SumBuffer:
    """A buffer with elements of `width` bytes, and the events that its use waits for and
    records."""

    ref: Ref
    width: int = 4
    waits: Events = ()
    recs: Events = ()

    def piece(self, o: Size, first: bool, last: bool) -> SumBuffer:
        """Return the piece from element `o` on. The first piece waits, the last one records."""
        return SumBuffer(
            replace(self.ref, at=o.bytes(self.width)),
            self.width,
            self.waits if first else (),
            self.recs if last else (),
        )


def to_fill(slot: Ref) -> SumBuffer:
    """Return a slot of f32 elements as a target."""
    return SumBuffer(slot, 4, (free(slot),), (full(slot),))


def to_take(slot: Ref, width: int = 4) -> SumBuffer:
    """Return a slot as a source."""
    return SumBuffer(slot, width, (full(slot),), (free(slot),))


def gradient_done(m: Steps, u: Use, x: Gradient, g: int) -> None:
    """Reduce a finished gradient of a micro-batch, unless it already is the sum. If blocks are
    added first, g is the last block of a sample. All their slots are full with the last one, and
    free with the first."""
    f, l, _ = x
    if m.sums.phases:
        reduction = _Reduction(m, m.flats[f], l, u.transfer_unit(f, l))
        slots = [m.grad_slot(x, i) for i in range(g + 1 - m.sums.blocks, g + 1)]
        gradients = [
            SumBuffer(
                slot,
                m.real,
                (full(slot),) if slot == slots[-1] else (),
                (free(slot),) if slot == slots[0] else (),
            )
            for slot in slots
        ]
        reduction.reduce(m.sums.per_micro_batch, *gradients)


def unit_done(m: Steps, f: Flat, l: int) -> None:
    """Reduce a unit's sums over own micro-batches, which are in class `pending`."""
    if m.sums.pending:
        _Reduction(m, f, l).reduce(m.sums.per_step, SumBuffer(Ref("pending", 0)))


def step_done(m: Steps) -> None:
    """Reduce the sums that are reduced once per step, and all-gather sums for ranks that update
    more than their own shard."""
    phases = () if m.sums.pending else m.sums.per_step
    if phases:
        m.follow("reduce", "sum")
    for f, l in m.trainable_instances() if phases else ():
        _Reduction(m, f, l).reduce(phases, SumBuffer(Ref(f"sum.{f.name}", l)))
    if m.gathers_sums:
        m.follow("reduce", "sum")
    for f, l in m.trainable_instances() if m.gathers_sums else ():
        ref = Ref(f"sum.{f.name}", l)
        hop = plain_hop("reduce", ref, ref)
        m.all_gather(hop, f"{f.name}[{l}]", f, 4, m.sums.result_depth, m.sums.depth)


def host_pieces(m: Steps, f: Flat) -> list[Span]:
    """Return (offset, elements) of the pieces in which a shard goes to the host's sum."""
    level, spans = m.sums.phases[-1].level, [(Size.none(f.name), f.shard)]
    if level:
        spans = m.cut(f.shard, "reduce_bucket_size", level)
    return [
        (plus(o, at), n)
        for o, size in spans
        for at, n in m.cut(size, "sub_group_size", name="part")
    ]


def largest_piece(m: Steps) -> int:
    """Return the elements of the largest such piece."""
    return max(n for f in m.shards.flats if f.trainable for _, n in host_pieces(m, f))


@dataclass(frozen=True)
class _Reduction:
    """The reduction of one instance of a flat. name: the unit of its steps, '' for the instance."""

    m: Steps
    f: Flat
    l: int
    name: str = ""

    @property
    def unit(self) -> str:
        """The unit that its steps are printed with."""
        return self.name or f"{self.f.name}[{self.l}]"

    def reduce(self, phases: Sequence[Addition], *sources: SumBuffer) -> None:
        """Go through all phases. Each but the last leaves its result in a slot of class `intra`."""
        m, (*inner, last) = self.m, phases
        for x in inner:
            slot = m.intra.slot(m.intra_turn)
            m.intra_turn += 1
            self.phase(x, sources, to_fill(slot))
            sources = (to_take(slot),)
        pending = m.sums.pending and last.counted
        home = Ref(f"sum.{self.f.name}", self.l)
        if m.sums.host and not pending:
            self.reduce_to_host(last, sources[0], home)
        else:
            self.phase(last, sources, SumBuffer(Ref("pending", 0) if pending else home))

    def phase(
        self, x: Addition, sources: Sequence[SumBuffer], target: SumBuffer
    ) -> None:
        """Add the steps of one phase from `sources` to `target`."""
        m, source = self.m, sources[0]
        if not x.level:
            m.add(
                "sum",
                f"{x.fn}.{self.f.name}",
                self.unit,
                ins=tuple(s.ref for s in sources),
                outs=(target.ref,),
                waits=(*[e for s in sources for e in s.waits], *target.waits),
                recs=(*target.recs, *[e for s in sources for e in s.recs]),
            )
            return
        share = m.shards.share(self.f, x.depth)
        cut = m.cut(share, "reduce_bucket_size", x.level)
        for n, (o, size) in enumerate(cut):
            ends = n == 0, n == len(cut) - 1
            self.piece(x, source.piece(o, *ends), target.piece(o, *ends), size)

    def piece(
        self, x: Addition, source: SumBuffer, target: SumBuffer, size: Size
    ) -> None:
        """Transfer a piece to a slot of `inbox` and add it up. With fast reductions NCCL adds, and
        only micro-batches remain to be added."""
        m, width = self.m, source.width
        group = x.level.group if x.level else ""
        slot = m.inbox.slot(m.inbox_turn)
        m.inbox_turn += 1
        step = m.shards.share(self.f, x.depth).bytes(width)
        ints = [Int("step", step), Int("bytes", size.bytes(width))]
        ints += [Int("width", width)] * (m.reduces == "reducescatter")
        m.add(
            "reduce",
            m.reduces,
            self.unit,
            ins=(source.ref,),
            outs=(slot,),
            ints=tuple(ints),
            waits=(*source.waits, free(slot)),
            recs=(full(slot),),
            group=group,
        )
        m.add(
            "sum",
            f"{x.fn}.{self.f.name}",
            self.unit,
            ins=(slot,),
            outs=(target.ref,),
            ints=(Int("n", size),),
            waits=(full(slot), *target.waits),
            recs=target.recs,
        )
        m.add(
            "sum",
            "done",
            self.unit,
            ins=(slot, source.ref),
            recs=(free(slot), *source.recs),
            group=group,
        )

    def reduce_to_host(self, x: Addition, source: SumBuffer, home: Ref) -> None:
        """Add the steps of the last phase and copy its pieces to the host, which pushes them to its
        sum or has them written in place."""
        m = self.m
        for o, n in host_pieces(m, self.f):
            turn, slots = (
                m.down_turn,
                m.spec.zero.offload_optimizer.buffer_count,
            )
            m.down_turn += 1
            part, slot = (Ring(c, slots).slot(turn) for c in ("part", "down"))
            some = source.piece(o, o == 0, o + n == self.f.shard)
            to = replace(home, at=o.bytes(4))
            if x.level:
                self.piece(x, some, to_fill(part), n)
                some = to_take(part)
            if not m.sums.on_host:
                m.copy(Hop("down", part, to, fills=False), self.unit, n.bytes(4))
                continue
            hop = Hop(
                queue="down",
                src=some.ref,
                dst=slot,
                takes=False,
                fills=True,
                after=some.waits,
                then=some.recs,
            )
            m.copy(hop, self.unit, n.bytes(some.width))
            push = Hop("host", slot, to, fills=False)
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
