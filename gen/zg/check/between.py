"""between.py -- plays the values between the functions of a body that is cut at exchanges.

Functions before and after attention work on blocks of a sample, attention's on the heads of all its
tokens. A value is one array: of a block, or of a sample with the heads of all ranks of a context
group, of which each rank has its part. The n blocks of a sample are consecutive micro-batches. Each
rank of the group has n / N of them in a row.

An exchange may consist of several steps. A function that reads its result requires that each piece
is in its place.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..facts.between import BETWEEN
from ..plan.mesh import Members, plus
from ..plan.plan import Fn, Ref, unit_of
from .arrays import Computed, MicroBatch
from .body import Exchanged, Spot
from .fns import Facts
from .memory import Extent
from .order import Buffer, Memory, Place, told

Piece = tuple[int, int, Extent]  # offset, bytes, content


class Between:
    """Requires and records the values between functions."""

    def __init__(self, m: Memory, facts: Facts) -> None:
        self.m, self.fail, self.facts = m, m.fail, facts
        self.blocks, self.ranks = m.head.blocks, m.head.context
        self.own_blocks = m.head.own_blocks
        self.group = context(m)
        # functions that have run, each with its unit and micro-batch
        self.ran: set[tuple[str, str, MicroBatch]] = set()

    def cut(self, fn: Fn) -> bool:
        """Return whether a function belongs to a body that is cut."""
        return fn.name in self.facts.took

    def of_samples(self, fn: Fn) -> bool:
        """Return whether a function works on whole samples."""
        return fn.name in self.facts.samples

    def sample(self, micro_batch: MicroBatch) -> MicroBatch:
        """Return the first block of the sample that a block belongs to, as a micro-batch of all
        ranks of the context group."""
        step, at, by = micro_batch
        rest = self.group.without(by) if self.group else by
        own = self.group.each(by) if self.group else self.own_blocks
        if own != self.own_blocks or any(n % self.blocks for n in rest):
            self.fail(f"{micro_batch} is no block of a sample")
        return MicroBatch(step, at - at % self.blocks, rest)

    def first(self, micro_batch: MicroBatch) -> MicroBatch:
        """Return the first block of the sample of a block, or of a sample, by which the functions
        of a body know each other."""
        step, at, by = micro_batch
        rest = self.group.without(by) if self.group else by
        return MicroBatch(step, at - at % self.blocks, rest)

    # ---- functions

    def read(
        self, fn: Fn, unit: str, refs: list[tuple[str, Ref]], now: MicroBatch | None
    ) -> MicroBatch:
        """Require the values that a function takes. Return its micro-batch, or its sample."""
        slots = {n: self.slot(ref, False) for n, ref in refs if n in BETWEEN}
        slots["tmp"] = self.m.bytes("tmp", 0)
        some = self.facts.took[fn.name]
        if not now:
            if not some:
                self.fail("is of no micro-batch")
            now = self.origin(unit, some[0], slots)
        for spot in some:
            for at, size, want in self.pieces(unit, spot, now):
                there = slots[spot.formal].read(spot.lo + at, size)
                where = f"{slots[spot.formal]}+{spot.lo + at}"
                self.m.holds(where, there, want)
        if (fn.name, unit, now) in self.ran:
            self.fail(f"has run for {now} already")
        self.ran.add((fn.name, unit, now))
        return now

    def slot(self, ref: Ref, write: bool) -> Buffer:
        """Access a whole slot."""
        if ref.at or ref.by_rank:
            self.fail(f"{ref} is not a slot's beginning")
        return self.m.all_of(ref, write)

    def origin(self, unit: str, spot: Spot, slots: dict[str, Buffer]) -> MicroBatch:
        """Return the micro-batch or sample that a value is of, by its first piece."""
        slot = slots[spot.formal]
        run = next((run for lo, hi, run in slot.held if lo <= spot.lo < hi), None)
        array = run.array if run else None
        if not isinstance(array, Computed):
            self.fail(f"{slot}+{spot.lo} holds {told(run)}")
        moved = self.facts.exchanged.get((unit_of(unit)[0], spot.made))
        if not moved:
            return array.micro_batch
        step, at, by = array.micro_batch
        if at % self.blocks or any(n % self.blocks for n in by):
            self.fail(f"{slot}+{spot.lo} begins with {array.micro_batch}")
        if spot.heads:
            return array.micro_batch
        piece = (spot.hi - spot.lo) // (self.m.head.batch * self.ranks)
        assert run
        own = self.group.times(self.own_blocks) if self.group else ()
        block = run.first // piece % self.blocks
        return MicroBatch(step, at + block, plus(by, own))

    def write(
        self, fn: Fn, unit: str, refs: list[tuple[str, Ref]], now: MicroBatch
    ) -> None:
        """Record the values that a function leaves."""
        slots = {n: self.slot(ref, True) for n, ref in refs if n in BETWEEN}
        slots["tmp"] = self.m.bytes("tmp", 0)
        for spot in self.facts.gave[fn.name]:
            slot, size = slots[spot.formal], spot.hi - spot.lo
            slot.write(
                spot.lo, size, self.value(unit, spot.made, size, now, spot.heads)
            )

    # ---- values

    def value(
        self, unit: str, made: object, size: int, now: MicroBatch, heads: bool
    ) -> Extent:
        """Return a value of a block, or a rank's part of a value of a sample."""
        by = self.group.times(size) if heads and self.group else ()
        return Extent(Computed(f"value {made}", unit, now), 0, 1, by)

    def pieces(self, unit: str, spot: Spot, now: MicroBatch) -> Iterator[Piece]:
        """Yield the pieces of a value that a function takes."""
        size, heads = spot.hi - spot.lo, spot.heads
        moved = self.facts.exchanged.get((unit_of(unit)[0], spot.made))
        if not moved:
            yield 0, size, self.value(unit, spot.made, size, now, heads)
        elif heads:
            yield from self.heads(unit, moved, size, now)
        else:
            yield from self.rows(unit, moved, size, now)

    def heads(
        self, unit: str, moved: Exchanged, size: int, sample: MicroBatch
    ) -> Iterator[Piece]:
        """Yield the pieces of a sample's value: by sample of the micro-batch and block, the rows of
        this rank's heads."""
        step, at, by = sample
        B = self.m.head.batch
        piece = size // (B * self.blocks)
        own = self.group.times(B * piece) if self.group else ()
        for b in range(B):
            for n in range(self.blocks):
                of = MicroBatch(step, at + n, by)
                array = Computed(f"value {moved.source}", unit, of)
                yield (
                    (b * self.blocks + n) * piece,
                    piece,
                    Extent(array, b * piece, 1, own),
                )

    def rows(
        self, unit: str, moved: Exchanged, size: int, block: MicroBatch
    ) -> Iterator[Piece]:
        """Yield the pieces of a block's value: by rank and sample of the micro-batch, the block's
        rows of that rank's heads."""
        B, N = self.m.head.batch, self.ranks
        piece = size // (B * N)
        of_rank = size * self.own_blocks
        array = Computed(f"value {moved.source}", unit, self.sample(block))
        own = self.group.times(self.own_blocks * piece) if self.group else ()
        for rank in range(N):
            for b in range(B):
                first = (
                    rank * of_rank + (b * self.blocks + block.at % self.blocks) * piece
                )
                yield (rank * B + b) * piece, piece, Extent(array, first, 1, own)

    # ---- exchanges

    def exchange(
        self, source: Place, to: Place, from_step: int, step: int, size: int
    ) -> None:
        """Copy each rank's piece for this rank to its place."""
        m, group = self.m, self.m.group
        if group != self.group:
            self.fail(f"group {group.name} does not share samples")
        last = group.ranks - 1
        m.common(source.buffer)
        m.touch(source.buffer, source.at, source.at + last * from_step + size, False)
        m.touch(to.buffer, to.at, to.at + last * step + size, True)
        if source.by_rank or to.by_rank or min(from_step, step) < size:
            self.fail("pieces overlap, or lie elsewhere on each rank")
        for rank in range(group.ranks):
            run = source.buffer.read(source.at, last * from_step + size)
            array = run.array if run else None
            if not run or run.width != 1 or not isinstance(array, Computed):
                self.fail(f"{source} holds {told(run)}, which is nothing to exchange")
            step_, at, by = array.micro_batch
            each, own = group.each(by), group.each(run.by_rank)
            if each < 0 or own < 0:
                self.fail(f"{source} holds {told(run)}, which differs by rank")
            there = MicroBatch(step_, at + rank * each, group.without(by))
            piece = Extent(
                array._replace(micro_batch=there),
                run.first + rank * own,
                1,
                group.times(from_step),
            )
            to.buffer.write(to.at + rank * step, size, piece)


def context(m: Memory) -> Members | None:
    """Return the group of neighbouring ranks that share samples, None if each rank has whole
    ones."""
    if m.head.context == 1:
        return None
    name = m.p.sharing
    return (
        m.groups[name] if name else m.ends(f"no {m.head.context} ranks share samples")
    )
