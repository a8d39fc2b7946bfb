"""trees.py -- plays the kernel that sums leaves: it pushes them onto trees."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ..plan.plan import STEP
from .arrays import Leaf, MicroBatch, Pending, Sum, over_ranks
from .constants import leaf_count
from .memory import Extent
from .operands import BLOCK, Array, Number, Operand, Sources
from .order import Memory, Place, told
from .reductions import Reductions
from .sums import WholeSums


class Pushed(NamedTuple):
    """Pieces that one call pushes. came: the first; one: it as a sum; leaf: they are gradients, not
    sums of them; pieces: their number; all_: their sum, None if they do not follow each other."""

    came: Extent
    one: Sum
    leaf: bool
    pieces: int
    all_: Sum | None


@dataclass
class Trees:
    """Plays pushes of leaves, which lie in a place or come from a reduction."""

    m: Memory
    sums: WholeSums
    reductions: Reductions

    def push(
        self,
        node: Place,
        stride: Number,
        source: Operand,
        count: Number,
        full: Number,
        n: Number,
        ctl: Operand,
        total: Number,
        mask: Number,
        block: Number,
    ) -> None:
        """Push the next leaves, or sums of leaves, onto the tree whose pending nodes are at
        `node`."""
        m = self.m
        size = n.n
        distance = stride.n
        width = 4 if full.n else m.real
        came, one, leaf, pieces, new = self.pushed(source, size, width)
        if not new or (count.n, full.n) != (pieces, int(not leaf)):
            m.fail(f"pushes {count.n} of {told(came)}")
        counted = False
        before = 0
        if isinstance(ctl, Place):
            counted = True
            before = leaf_count(m, ctl, False).leaves
        self.tree(counted, total.n, mask.n, block.n, one, pieces)
        self.nodes(node, distance, size, mask.n, counted)
        nodes = mask.n.bit_count()
        if counted and nodes > 1:
            self.others(node, 4 * distance, nodes, one, before > 0)
        if before:
            new = self.carried(node, size, came, new, before * one.leaves)
        done = new._replace(whole=before + pieces == total.n)
        run = Extent(done, came.first, 4, came.by_rank)
        m.makes(node, 4 * size, run)

    def pushed(self, source: Operand, n: int, width: int) -> Pushed:
        """Return the pieces that are pushed: from each rank of a group, or of an array."""
        m = self.m
        if isinstance(source, Sources):
            r = self.reductions.brought(source.inbox)
            if (r.size, r.came.width) != (n * width, width):
                m.fail(f"sums {n} elements of {r.size} bytes that came")
            one = self.sums.one(r.came)
            all_ = over_ranks(one, m.groups[r.group]) if r.sources > 1 else one
            return Pushed(r.came, one, r.leaf, r.sources, all_)
        if not isinstance(source, Array):
            m.fail(f"pushes {source}")
        runs = [self.run(place, n, width) for place in source.places]
        ones = [self.sums.one(run) for run in runs]
        first, one = runs[0], ones[0]
        all_ = one
        for run, after in zip(runs[1:], ones[1:], strict=True):
            alike = after.micro_batches, after.leaves, *run[1:]
            if alike != (one.micro_batches, one.leaves, *first[1:]):
                m.fail(f"adds {told(run)} to {told(first)}")
            if not follows(all_, after):
                m.fail(f"{told(run)} does not follow {told(first)}")
            all_ = joined(all_, after)
        return Pushed(first, one, isinstance(first.array, Leaf), len(runs), all_)

    def run(self, place: Place, n: int, width: int) -> Extent:
        """Return the elements that a place holds."""
        found = self.m.reads(place, n * width)
        if not found or found.width != width:
            self.m.fail(
                f"{place} holds {told(found)}, not {n} elements of {width} bytes"
            )
        return found

    def nodes(self, node: Place, stride: int, n: int, mask: int, counted: bool) -> None:
        """Require that pending nodes are disjoint and inside their slot."""
        ranks = node.group.ranks
        end = (node.at + node.by_rank * (ranks - 1)) // 4 + n
        room = node.buffer.stride // 4
        most = room // max(1, mask.bit_count())
        if counted and (stride % BLOCK or not end <= stride <= most):
            self.m.fail(
                f"{node}: nodes at a distance of {stride} elements, of {end} in {room}"
            )
        if not counted and stride:
            self.m.fail(f"{node}: a distance of nodes, of which there is one")

    def others(self, node: Place, step: int, nodes: int, one: Sum, begun: bool) -> None:
        """Access a tree's nodes after the first, `step` bytes apart. Nothing else may write them
        while the tree is incomplete."""
        place = node._replace(at=step, by_rank=0)
        size = step * (nodes - 1)
        mine = Extent(Pending(one.flat, one.l))
        self.m.access(place, size, True)
        if node.by_rank:  # the content behind a rank's part is not tracked
            return
        there = place.look(size)
        if begun and there != mine:
            self.m.fail(f"{place} holds {told(there)}, not {told(mine)}")
        if not begun:
            place.put(size, mine)

    def tree(
        self,
        counted: bool,
        total: int,
        mask: int,
        block: int,
        one: Sum,
        count: int,
    ) -> None:
        """Require that the step's leaves form trees of the plan's size, one after the other.
        Without a counter all leaves must come at once."""
        m = self.m
        head = m.p.head
        times = head.own[STEP] if counted else 1
        if total != times * count:
            m.fail(f"a tree of {total}, of {count} at a time")
        if total > 1 and block * one.leaves != head.block:
            m.fail(f"trees of {block} times {one.leaves} leaves")
        want = planned = 0
        if counted:
            want = pending(total, count, block)
            planned = m.flats[one.flat].mask
        if mask != want or planned != want:
            m.fail(f"pending sums at {mask:#b}, not {want:#b}")

    def carried(self, node: Place, n: int, came: Extent, new: Sum, before: int) -> Sum:
        """Return the pending sum extended by the leaves that follow it."""
        old = self.m.reads(node, 4 * n)
        was = old.array if old else None
        if (
            not old
            or not isinstance(was, Sum)
            or was.whole
            or was.leaves != before
            or not follows(was, new)
            or old[1:4] != (came.first, 4, came.by_rank)
        ):
            self.m.fail(f"{node} holds {told(old)}, which {told(came)} does not follow")
        return joined(was, new)


def follows(old: Sum, new: Sum) -> bool:
    """Return whether a sum's gradients come next after those of an older one."""
    step, at, by_rank = old.micro_batch
    of = MicroBatch(step, at + old.micro_batches, by_rank)
    return (old.flat, old.l, of) == (new.flat, new.l, new.micro_batch)


def joined(old: Sum, new: Sum) -> Sum:
    """Return a sum with the gradients that follow it."""
    return old._replace(
        micro_batches=old.micro_batches + new.micro_batches,
        leaves=old.leaves + new.leaves,
    )


def pending(total: int, count: int, block: int) -> int:
    """Return the mask of all levels at which sums are ever pending, if `total` leaves come `count`
    at a time. All whole blocks together count as one level."""
    last = total // count - 1
    mask = 0
    # Bit b of n * count repeats after 2^(b+1) values of n.
    for b in range((block - 1).bit_length()):
        first = -(-(2**b) // count)
        tried = range(first, min(last + 1, 2 ** (b + 1)))
        mask |= any(n * count >> b & 1 for n in tried) << b
    return mask | block * (last * count >= block)
