"""once.py -- plays the kernels that work on a step's constants, norms and losses."""

from __future__ import annotations

from dataclasses import dataclass

from ..facts import ops
from ..plan.mesh import plus
from .arrays import EVERY, Control, Key, Totals
from .constants import (
    SUMS,
    constants,
    leaf_count,
    set_control,
    set_totals,
    totals,
)
from .operands import Number, part_of, width_of
from .order import Memory, Place
from .sums import WholeSums


@dataclass
class Once:
    """Plays a step's begin, its norms, and its factor."""

    m: Memory
    sums: WholeSums

    def begin(self, ctl: Place, sums: Place, recipe: str) -> None:
        """Start a step: reset its constants and sums."""
        m = self.m
        last = constants(m, ctl, True)
        m.access(sums, 8 * SUMS, True)
        step = last.step + 1
        if step != m.now or recipe != "recipe":
            m.fail(f"{ctl} has begun step {step}, not {m.now}")
        set_control(ctl, Control(step, 0, False))
        set_totals(sums, Totals(step))

    def count(self, ctl: Place, leaves: Number) -> None:
        now = leaf_count(self.m, ctl, True)
        set_control(ctl, now._replace(leaves=now.leaves + leaves.n))

    def square_sum(
        self,
        sums: Place,
        g: Place,
        spans: str,
        first: Number,
        n: Number,
        full: Number,
    ) -> None:
        """Add a part's squared norm to the step's sums."""
        m = self.m
        part = part_of(m, spans, first, n)
        now = totals(m, sums, True)
        width = width_of(m, full)
        self.sums.holds(g, part, width)
        (store,) = m.p.stored("sum", part.flat)
        if ops.BYTES[store.dtype] != width:
            m.fail(f"the sum of {part.flat} is {store.dtype}, not of {width} bytes")
        over = m.groups.get(store.over)
        group = g.group
        each = m.flats[part.flat].shard * m.p.parts(store)
        begin = over.times(each) if over else ()
        own = plus(begin, group.times(g.by_rank // width))
        if g.buffer.cls != store.cls or m.W > 1 and own != part.by_rank:
            m.fail(f"the sum of {part.flat} lies in {store.cls}, over {store.over}")
        norms = now.norms
        if part in norms or now.everywhere:
            m.fail(f"{part.flat}[{part.l}] is measured twice, or too late")
        set_totals(sums, now._replace(norms=norms | {part}))

    def allreduce(self, source: Place, to: Place, count: int) -> None:
        """Sum the step's sums over all ranks."""
        m = self.m
        if count != SUMS or source.buffer is to.buffer:
            m.fail("reduces something else than the step's sums")
        if m.group != m.every:
            m.fail(f"reduces over {m.group.name}, not all ranks")
        m.common(source.buffer)
        now = totals(m, source, False)
        m.access(to, 8 * SUMS, True)
        set_totals(to, now._replace(everywhere=True))

    def factor(self, ctl: Place, total: Place, recipe: str) -> None:
        """Compute the clipping factor, which needs all norms and losses of all ranks."""
        m = self.m
        sums = totals(m, total, False)
        now = constants(m, ctl, True)
        lacks = self.unmeasured(sums)
        if not sums.everywhere or lacks:
            m.fail(f"norms are not complete: {lacks or 'a rank has its own'}")
        if sums.losses != EVERY:
            m.fail(f"the losses are of {len(sums.losses)} micro-batches of each rank")
        if now.step != m.now or now.known or recipe != "recipe":
            m.fail(f"the factor of step {now.step}, or twice")
        set_control(ctl, now._replace(known=True))

    def unmeasured(self, sums: Totals) -> list[Key]:
        """Return the trainable instances whose norm is missing or not measured exactly once by all
        ranks together."""
        m = self.m
        parts: dict[Key, list[tuple[int, int]]] = {key: [] for key in m.moving}
        for flat, l, first, by_rank, n in sums.norms:
            shard = m.flats[flat].shard
            own = by_rank == m.owners(flat).times(shard)
            parts[flat, l].append((first if own else -1, n))
        return sorted(
            key
            for key, measured in parts.items()
            if not covers(measured, m.flats[key[0]].shard)
        )


def covers(parts: list[tuple[int, int]], want: int) -> bool:
    """Return whether the (first, elements) ranges are consecutive from 0 on and add up to
    `want`."""
    end = 0
    for at, n in sorted(parts):
        if at != end:
            return False
        end += n
    return end == want
