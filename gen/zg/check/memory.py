"""memory.py -- tracks the content of slots as runs of elements of named arrays.

All ranks run the same steps, and every difference between ranks is linear in the rank. So one
record describes a slot on all ranks: a run names the first element of rank 0 and the distance from
each rank to the next. A buffer may be cut into one part per rank. A rank then changes its own part,
or an all-gather changes all parts at once. The own part and the other parts are tracked separately
until they form one run again.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import NamedTuple

from ..plan.mesh import Along, Members, plain, plus


class Extent(NamedTuple):
    """Consecutive elements of an array, `width` bytes each.

    by_rank: distance of the first element along the axes of the grid; by_part: distance from one
    part of a buffer to the next.
    """

    array: Hashable
    first: int = 0
    width: int = 1
    by_rank: Along = ()
    by_part: int = 0

    def after(self, size: int) -> Extent | None:
        """Return the run that starts `size` bytes later, or None if that cuts an element."""
        array, first, width, by_rank, by_part = self
        more, cut = divmod(size, width)
        return None if cut else Extent(array, first + more, width, by_rank, by_part)

    def leads(self, size: int, to: Extent) -> bool:
        """Return whether `to` continues this run after `size` bytes."""
        return self.first + size // self.width == to.first and self.after(size) == to


Piece = tuple[int, int, Extent]  # bytes [lo, hi) and their content
PAGES = 64  # pages of parts that are tracked: a slot has one for each sum


def joined(pieces: list[Piece]) -> list[Piece]:
    """Merge neighbours that continue each other's array."""
    out: list[Piece] = []
    for a, b, run in sorted(pieces):
        if out:
            first, end, held = out[-1]
            if end == a and held.after(a - first) == run:
                out[-1] = (first, b, held)
                continue
        out.append((a, b, run))
    return out


def _put(pieces: list[Piece], lo: int, hi: int, run: Extent) -> list[Piece]:
    """Return the pieces with [lo, hi) overwritten; an element that is cut is dropped. Pieces are
    sorted and merged, before and after."""
    before: list[Piece] = []
    after: list[Piece] = []
    for piece in pieces:
        a, b, was = piece
        if b <= lo:
            before.append(piece)
        elif hi <= a:
            after.append(piece)
        else:
            if a < lo:
                before.append((a, lo, was))
            if hi < b and (rest := was.after(hi - a)):
                after.append((hi, b, rest))
    if before and before[-1][1] == lo and before[-1][2].leads(lo - before[-1][0], run):
        lo, _, run = before.pop()
    if after and after[0][0] == hi and run.leads(hi - lo, after[0][2]):
        hi = after.pop(0)[1]
    before.append((lo, hi, run))
    return before + after


def _find(pieces: list[Piece], lo: int, hi: int) -> Extent | None:
    """Return the one run that fills [lo, hi), or None."""
    for a, b, run in pieces:
        if a <= lo and hi <= b:
            return run.after(lo - a) if a < lo else run
    return None


@dataclass(slots=True, eq=False)
class Slot:
    """Content of a slot.

    If step is 0, `held` describes all of it. Otherwise it is cut into parts of `step` bytes: `held`
    is the content of a rank's own part and `others` that of every other part. A page has one part
    for each rank of `group`; pages follow each other, and both lists have the parts of all pages in
    order.
    """

    group: Members | None = None
    held: list[Piece] = field(default_factory=list)
    others: list[Piece] = field(default_factory=list)
    step: int = 0

    def clear(self) -> None:
        self.held, self.others, self.step, self.group = [], [], 0, None

    def each(self, change: Callable[[Extent], Extent]) -> None:
        """Apply `change` to every run."""
        self.held, self.others = (
            joined([(a, b, change(run)) for a, b, run in pieces])
            for pieces in (self.held, self.others)
        )

    def own(self, other: Extent, group: Members) -> Extent:
        """Return the content of a rank's own part, given that of the other parts."""
        by_rank = plus(other.by_rank, group.times(other.by_part))
        return other._replace(by_rank=by_rank, by_part=0)

    # ---- a range, the same on every rank

    def read(self, at: int, size: int) -> Extent | None:
        """Return the run that fills a range on every rank, or None."""
        return None if self.step else _find(self.held, at, at + size)

    def write(self, at: int, size: int, run: Extent) -> None:
        if self.step:
            self.clear()  # no longer one run: a later read of the old content finds none
        self.held = _put(self.held, at, at + size, run)

    # ---- a range within every rank's own part

    def read_own(self, at: int, step: int, size: int, group: Members) -> Extent | None:
        if self.group and step < self.step:
            return self._within(at, step, size, group)
        if self.step:
            lo = self._in_part(at, step, size, group)
            return _find(self.held, lo, lo + size) if lo >= 0 else None
        whole = self.read_parts(at, step, size, group)
        return self.own(whole, group) if whole else None

    def write_own(
        self, at: int, step: int, size: int, run: Extent, group: Members
    ) -> None:
        self._cut(step, group)
        lo = self._in_part(at, step, size, group)
        self.held = _put(self.held, lo, lo + size, run)
        self._settle()

    # ---- the same range of every part

    def read_parts(
        self, at: int, step: int, size: int, group: Members
    ) -> Extent | None:
        """Return the run that own parts and others hold alike, apart from the part's number."""
        if not self.step:
            whole = _find(self.held, at, at + step * (group.ranks - 1) + size)
            if not whole or step % whole.width:
                return None
            return whole._replace(by_part=step // whole.width)
        lo = self._in_part(at, step, size, group)
        mine = _find(self.held, lo, lo + size)
        other = _find(self.others, lo, lo + size)
        if lo < 0 or not mine or not other:
            return None
        return other if self.own(other, group) == mine else None

    def write_parts(
        self, at: int, step: int, size: int, run: Extent, group: Members
    ) -> None:
        self._cut(step, group)
        lo = self._in_part(at, step, size, group)
        mine = self.own(run, group)
        self.held = _put(self.held, lo, lo + size, mine)
        self.others = _put(self.others, lo, lo + size, run)
        self._settle()

    # ---- parts

    def _within(self, at: int, step: int, size: int, group: Members) -> Extent | None:
        """Return a rank's part of `step` bytes within its own part, which must be one run. Places
        of `group` are consecutive within each place of the slot's group."""
        if not self.group or step * group.ranks > self.step * self.group.ranks:
            return None
        outer = self.group.times(self.step)
        inner = tuple(a - b for a, b in zip(group.times(step), outer, strict=True))
        whole = _find(self.held, 0, self.step)
        if not whole or min(inner) < 0 or at + size > step:
            return None
        run = whole.after(at)
        if not run or any(n % run.width for n in inner):
            return None
        more = plain(tuple(n // run.width for n in inner))
        return run._replace(by_rank=plus(run.by_rank, more))

    def _in_part(self, at: int, step: int, size: int, group: Members) -> int:
        """Return the offset of a range among the parts, or -1 if it lies in no part of this
        size."""
        page, within = divmod(at, step * group.ranks)
        if (step, group) != (self.step, self.group) or within + size > step:
            return -1
        return page * step + within

    def _cut(self, step: int, group: Members) -> None:
        """Cut one run into parts."""
        if (self.step, self.group) == (step, group):
            return
        whole = [] if self.step else self.held
        page = step * group.ranks
        self.clear()
        self.step = step
        self.group = group
        for lo, hi, run in whole:
            for n in range(-(-lo // page), hi // page)[:PAGES]:
                begin = run.after(n * page - lo)
                if not begin or step % run.width:
                    continue
                there = (n * step, n * step + step)
                more = step // run.width
                other = begin._replace(by_part=more)
                self.held.append((*there, self.own(other, group)))
                self.others.append((*there, other))

    def _settle(self) -> None:
        """Merge the parts if they form one run again."""
        step = self.step
        group = self.group
        out = []
        assert group
        if len(self.held) != len(self.others):
            return
        for (lo, hi, mine), (a, b, other) in zip(self.held, self.others, strict=True):
            seen = self.own(other, group)
            if (
                (lo, hi) != (a, b)
                or lo % step
                or hi - lo != step
                or seen != mine
                or other.by_part * other.width != step
            ):
                return
            out.append((lo * group.ranks, hi * group.ranks, other._replace(by_part=0)))
        self.clear()
        self.held = joined(out)
