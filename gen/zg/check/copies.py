"""copies.py -- plays the steps that move bytes as they are: copies, batches and all-gathers."""

from __future__ import annotations

from typing import Any

from ..facts.between import is_between
from ..plan.mesh import Along, plus
from .arrays import Computed, MicroBatch
from .memory import Extent
from .order import MAIN, Buffer, Memory, Place, told


class Copies:
    """Plays copies and all-gathers, and counts the elements that are gathered at once."""

    def __init__(self, m: Memory) -> None:
        self.m, self.fail = m, m.fail
        p = m.p
        # Classes whose content dies, and those of states.
        self.lasting = {*m.passing, *(s.cls for s in p.stores)}
        # Gathered elements of each slot, and main's clock when it was released (None: not yet).
        self.live: dict[Buffer, tuple[int, int | None]] = {}
        whole = {s.flat for s in p.stores if s.what == "params" and s.whole}
        gathers = p.head.zero == 3  # else every rank has whole parameters
        self.kept = gathers * sum(f.shard * m.W for f in p.flats if f.name in whole)
        self.most = self.kept

    def dies(self, buffer: Buffer) -> None:
        """Release a slot: all of its content is dead after this step."""
        self.m.touch(buffer, 0, buffer.stride, True, True)
        if not buffer.held:
            self.fail(f"{buffer} holds nothing")
        buffer.clear()
        if buffer in self.live:
            self.live[buffer] = self.live[buffer][0], self.m.clock[MAIN]

    def mark(self) -> None:
        if not (self.m.step.waits or self.m.step.recs):
            self.fail("marks nothing")

    def copy(
        self, source: Place, to: Place, from_rank: int, to_rank: int, size: int
    ) -> None:
        if from_rank:
            source = source._replace(by_rank=from_rank)
        if to_rank:
            to = to._replace(by_rank=to_rank)
        run = self.m.reads(source, size)
        if not run and self.m.head.blocks > 1 and not source.by_rank:
            self.several(source, to, size)
            return
        if not run or size % run.width:
            self.fail(f"{source}: {size} bytes hold {told(run)}")
        passing = to.buffer.cls in self.m.passing
        if to.buffer.held and passing and not is_between(to.buffer.cls):
            self.fail(f"{to} still holds {to.buffer.told()}")
        self.m.writes(to, size, run)

    def several(self, source: Place, to: Place, size: int) -> None:
        """Copy the values between functions that a slot holds."""
        end = source.at + size
        held = source.buffer.held
        if to.buffer.held and to.buffer.cls in self.m.passing:
            self.fail(f"{to} still holds {to.buffer.told()}")
        inside = [source.at <= lo and hi <= end for lo, hi, _ in held]
        if not inside or not all(inside):
            self.fail(f"{source}: {size} bytes cut {source.buffer.told()}")
        self.m.access(to, size, True)
        for lo, hi, run in held:
            to.buffer.write(to.at + lo - source.at, hi - lo, run)

    def batch(self, *operands: Any) -> None:
        """Fetch a rank's tokens and targets of a micro-batch, and the arrays that come with them.
        The runtime fetches them itself, so these steps come first in a micro-batch."""
        m = self.m
        places = operands[: len(m.batch)]
        *ranks, micro_batch = operands[len(m.batch) :]
        by: Along = ()
        for name, n in zip(m.head.order.groups, ranks, strict=True):
            by = plus(by, m.groups[name].times(n))
        before = m.p.section(m.section).steps[: m.number]
        if m.section != "micro_batch" or any(s.op != "batch" for s in before):
            self.fail("tokens come at a micro-batch's begin")
        if m.queue != MAIN or m.step.waits or m.step.recs:
            self.fail("the queue fetches no tokens")
        if len({where.buffer.index for where in places}) > 1:
            self.fail("a micro-batch has slots of two numbers")
        for where, what in zip(places, m.batch, strict=True):
            if where.at:
                self.fail(f"fills {where}")
            array = Computed(what, "", MicroBatch(m.now, micro_batch, by))
            slot = where.buffer
            m.touch(slot, 0, slot.stride, True)
            slot.write(0, slot.stride, Extent(array))

    def gather(self, source: Place, to: Place, own: int, step: int, size: int) -> None:
        """All-gather: copy every rank's piece to the same offset of its part."""
        m = self.m
        group = m.group
        whole = step * (group.ranks - 1) + to.at + size
        if (
            not 0 < size <= step - to.at
            or whole > to.buffer.stride
            or own not in (0, step)
        ):
            self.fail("piece lies outside the shard")
        m.common(source.buffer)
        run = m.reads(self.rank_part(source, own), size)
        micro_batch = getattr(run.array, "micro_batch", None) if run else None
        by_rank = getattr(micro_batch, "by_rank", ())
        if (
            not run
            or group.within(by_rank)
            or group.each(run.by_rank) < 0
            or size % run.width
        ):
            self.fail(f"{source} holds {told(run)}, which is nothing to gather")
        to.buffer.cut(step, group)
        m.touch(to.buffer, to.at, to.at + size, True)
        fresh = not own and to.buffer.cls in m.passing
        if fresh:
            self.gathered(to.buffer, step * group.ranks // run.width)
        rest = group.without(run.by_rank)
        part = group.each(run.by_rank)
        slot = to.buffer
        all_ = run._replace(by_rank=rest, by_part=part)
        again = slot.read_parts(to.at, step, size, group) == all_
        if (fresh and slot.held and not slot.step) or (
            again and to.buffer.cls in self.lasting
        ):
            self.fail(f"{to} still holds {slot.told()}")
        slot.write_parts(to.at, step, size, all_, group)

    def gathered(self, to: Buffer, elements: int) -> None:
        """Count the elements that are gathered at once. A slot counts until a release that is
        ordered before this gather."""
        _, freed = self.live.get(to, (0, 0))
        if freed is None:
            return
        self.live[to] = elements, None
        for key, (_, freed) in list(self.live.items()):
            if freed is not None and freed <= self.m.clock[MAIN]:
                del self.live[key]
        total = self.kept + sum(n for n, _ in self.live.values())
        self.most = max(self.most, total)
        if total > self.m.head.live:
            self.fail(
                f"{total} elements gathered at once, {self.m.head.live} were promised"
            )

    def rank_part(self, where: Place, by_rank: int) -> Place:
        """Return this rank's part of a place, in the group of the step."""
        if not where.by_rank:
            return where._replace(by_rank=by_rank, group=self.m.group)
        if not by_rank:
            return where
        by = plus(where.group.times(where.by_rank), self.m.group.times(by_rank))
        among = self.m.among(by, by_rank) or self.fail(
            f"{where}: no group has such parts"
        )
        return where._replace(by_rank=by_rank, group=among)
