"""reductions.py -- plays reductions over ranks: pieces of gradients are sent to their owners."""

from __future__ import annotations

from dataclasses import dataclass, field

from .arrays import Came, Leaf, over_ranks
from .memory import Extent
from .order import Memory, Place, told
from .sums import WholeSums


@dataclass
class Reduction:
    """A reduction under way: the pieces that ranks send each other, until all owners have summed
    theirs. came: the array that rank r receives from each rank."""

    source: Place
    size: int
    inbox: Place
    came: Extent
    number: int
    leaf: bool  # gradients as they are, not f32 sums
    group: str
    sources: int  # pieces that an owner receives: one per rank of the group, or NCCL's one sum
    step: int  # bytes between the pieces of neighbouring ranks
    summed: bool = False


@dataclass
class Reductions:
    """Plays reductions. open: those under way; reduced: how many have begun."""

    m: Memory
    sums: WholeSums
    open: list[Reduction] = field(default_factory=list)
    reduced: int = 0

    def reducescatter(
        self, source: Place, to: Place, step: int, size: int, width: int
    ) -> None:
        """NCCL's reduce-scatter. width: bytes of a number of the source."""
        run = self.sent(source, step, size, False)
        if run.width != width:
            self.m.fail("sums numbers of another width")
        one = self.sums.one(run)
        added = over_ranks(one, self.m.group)
        if not added:
            self.m.fail("sums what does not follow each other over ranks")
        # NCCL's sum is one leaf of the tree.
        sum_ = run._replace(array=added._replace(leaves=one.leaves))
        self.brings(source, to, size, step, sum_, run.array)

    def alltoall(self, source: Place, to: Place, step: int, size: int) -> None:
        run = self.sent(source, step, size, True)
        self.brings(source, to, size, step, run, run.array)

    def sent(self, source: Place, step: int, size: int, each: bool) -> Extent:
        """Return the array that each rank sends to rank r, from a piece of every part, the own one
        included. each: pieces arrive one by one, not as a sum."""
        m = self.m
        exact = m.head.reduction == "exact" or m.W == 1
        if each != exact:
            m.fail(f"reduces in another way than {m.head.reduction}")
        slot = source.buffer
        at = source.at
        whole = step * (m.group.ranks - 1) + at + size
        room = step - at
        if not 0 < size <= room or whole > slot.stride:
            m.fail("piece lies outside the shard")
        m.common(slot)
        slot.cut(step, m.group)
        m.touch(slot, at, at + size, False)
        run = slot.read_parts(at, step, size, m.group)
        if not run or m.group.within(run.by_rank) or size % run.width:
            m.fail(f"{source} holds {told(run)}, which is nothing to sum")
        return run

    def brings(
        self,
        source: Place,
        inbox: Place,
        size: int,
        step: int,
        run: Extent,
        of: object,
    ) -> None:
        """Start a reduction: its pieces are on their way to the inbox."""
        m = self.m
        if inbox.at or any(r.inbox == inbox for r in self.open):
            m.fail(f"{inbox} is not free: what came there is not done")
        self.reduced += 1
        sources = m.group.ranks if m.step.op == "alltoall" else 1
        m.writes(inbox, sources * size, Extent(Came(self.reduced)))
        came = inbox.buffer.own(run, m.group)
        new = Reduction(
            source,
            size,
            inbox,
            came,
            self.reduced,
            isinstance(of, Leaf),
            m.step.group,
            sources,
            step,
        )
        self.open.append(new)
        m.peers = (*m.peers, source.buffer)

    def brought(self, inbox: Place) -> Reduction:
        """Return the reduction whose pieces lie in this slot, and mark it as summed."""
        r = self.under_way(inbox)
        if r.summed:
            self.m.fail("what came is summed")
        run = self.m.reads(r.inbox, r.sources * r.size)
        if not run or run.array != Came(r.number):
            self.m.fail(f"{r.inbox} does not hold what came any more")
        r.summed = True
        return r

    def under_way(self, inbox: Place) -> Reduction:
        """Return the reduction that sends to this slot."""
        for r in self.open:
            if r.inbox == inbox:
                return r
        self.m.fail(f"nothing is under way to {inbox}")

    def done(self, inbox: Place, source: Place) -> None:
        """Wait until every owner has summed its part; then the source may be overwritten."""
        m = self.m
        r = self.under_way(inbox)
        if not r.summed or r.group != m.step.group:
            m.fail(f"group {r.group} has not summed what came")
        if source != r.source:
            m.fail(f"what was sent lies in {r.source}")
        end = source.at + r.size
        came = r.sources * r.size
        source.buffer.cut(r.step, m.group)
        m.touch(source.buffer, source.at, end, False)
        m.access(inbox, came, True)
        self.open.remove(r)
        m.peers = tuple(x.source.buffer for x in self.open)
