"""memory.py -- what the bytes of a slot hold: runs of elements of named arrays, on every rank.

All ranks run the same steps; where one goes to another place or has another element than the next,
it is by the same distance from each rank to the next. So a slot is written down once for all of
them: a run says which element rank 0 has first, and how many further each next rank's is. Of a
buffer that is cut in parts, one for each rank, a rank may change its own part alone, or all parts
at once by a gather: until they are one run again, its own part and the others are kept apart.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import NamedTuple

from ..plan.mesh import Along, Members, plain, plus


class Run(NamedTuple):
    """Elements of an array, `width` bytes each, one after the other. by_rank: how much further the
    first is along the axes of the grid; by_part: in each next part of a buffer."""

    array: Hashable
    first: int = 0
    width: int = 1
    by_rank: Along = ()
    by_part: int = 0

    def after(self, size: int) -> Run | None:
        """What comes so many bytes further on."""
        array, first, width, by_rank, by_part = self
        more, cut = divmod(size, width)
        return (
            None if cut else Run(array, first + more, width, by_rank, by_part)
        )

    def leads(self, size: int, to: Run) -> bool:
        """Whether that is the other."""
        return (
            self.first + size // self.width == to.first
            and self.after(size) == to
        )


Piece = tuple[int, int, Run]  # bytes [lo, hi), and what is there
PAGES = 64  # of parts, that are looked at: a slot has one for each sum


def joined(pieces: list[Piece]) -> list[Piece]:
    """Neighbours that go on with each other's array are one piece."""
    out: list[Piece] = []
    for a, b, run in sorted(pieces):
        if out:
            first, end, held = out[-1]
            if end == a and held.after(a - first) == run:
                out[-1] = (first, b, held)
                continue
        out.append((a, b, run))
    return out


def _put(pieces: list[Piece], lo: int, hi: int, run: Run) -> list[Piece]:
    """With [lo, hi) written over: an element that is cut is gone. Pieces are in order and joined,
    and are so again."""
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
    if (
        before
        and before[-1][1] == lo
        and before[-1][2].leads(lo - before[-1][0], run)
    ):
        lo, _, run = before.pop()
    if after and after[0][0] == hi and run.leads(hi - lo, after[0][2]):
        hi = after.pop(0)[1]
    before.append((lo, hi, run))
    return before + after


def _find(pieces: list[Piece], lo: int, hi: int) -> Run | None:
    """The one run that fills [lo, hi)."""
    for a, b, run in pieces:
        if a <= lo and hi <= b:
            return run.after(lo - a) if a < lo else run
    return None


@dataclass(slots=True, eq=False)
class Slot:
    """step 0: `held` is all of it. Else it is cut in parts of `step` bytes, and `held` is what a
    rank's own part holds, `others` what every other part does: pages of a part for each rank of
    `group` follow each other, and in both lists so do the parts of one page and of the next."""

    group: Members | None = None
    held: list[Piece] = field(default_factory=list)
    others: list[Piece] = field(default_factory=list)
    step: int = 0

    def clear(self) -> None:
        self.held, self.others, self.step, self.group = [], [], 0, None

    def own(self, other: Run, group: Members) -> Run:
        """What a rank's own part holds, where others hold that."""
        by_rank = plus(other.by_rank, group.times(other.by_part))
        return other._replace(by_rank=by_rank, by_part=0)

    # ---- a range, the same on every rank

    def read(self, at: int, size: int) -> Run | None:
        return None if self.step else _find(self.held, at, at + size)

    def write(self, at: int, size: int, run: Run) -> None:
        if self.step:
            self.clear()  # not one run: whoever needs what was there finds nothing
        self.held = _put(self.held, at, at + size, run)

    # ---- a range of every rank's own part

    def read_own(
        self, at: int, step: int, size: int, group: Members
    ) -> Run | None:
        if self.group and step < self.step:
            return self._within(at, step, size, group)
        if self.step:
            lo = self._in_part(at, step, size, group)
            return _find(self.held, lo, lo + size) if lo >= 0 else None
        whole = _find(self.held, at, at + step * (group.ranks - 1) + size)
        if not whole or step % whole.width:
            return None
        return self.own(whole._replace(by_part=step // whole.width), group)

    def write_own(
        self, at: int, step: int, size: int, run: Run, group: Members
    ) -> None:
        self._cut(step, group)
        lo = self._in_part(at, step, size, group)
        self.held = _put(self.held, lo, lo + size, run)
        self._settle()

    # ---- the same range of every part

    def read_parts(
        self, at: int, step: int, size: int, group: Members
    ) -> Run | None:
        """Where own parts and others hold the same, but for the part's number."""
        if not self.step:
            whole = _find(self.held, at, at + step * (group.ranks - 1) + size)
            if not whole or step % whole.width:
                return None
            return whole._replace(by_part=step // whole.width)
        lo = self._in_part(at, step, size, group)
        mine, other = (
            _find(self.held, lo, lo + size),
            _find(self.others, lo, lo + size),
        )
        if lo < 0 or not mine or not other:
            return None
        return other if self.own(other, group) == mine else None

    def write_parts(
        self, at: int, step: int, size: int, run: Run, group: Members
    ) -> None:
        self._cut(step, group)
        lo = self._in_part(at, step, size, group)
        mine = self.own(run, group)
        self.held = _put(self.held, lo, lo + size, mine)
        self.others = _put(self.others, lo, lo + size, run)
        self._settle()

    # ---- parts

    def _within(
        self, at: int, step: int, size: int, group: Members
    ) -> Run | None:
        """A rank's part of `step` bytes within its own part, which is one run. Places of `group`
        follow each other within each place of the slot's group."""
        if not self.group or step * group.ranks > self.step * self.group.ranks:
            return None
        outer = self.group.times(self.step)
        inner = tuple(
            a - b for a, b in zip(group.times(step), outer, strict=True)
        )
        whole = _find(self.held, 0, self.step)
        if not whole or min(inner) < 0 or at + size > step:
            return None
        run = whole.after(at)
        if not run or any(n % run.width for n in inner):
            return None
        more = plain(tuple(n // run.width for n in inner))
        return run._replace(by_rank=plus(run.by_rank, more))

    def _in_part(self, at: int, step: int, size: int, group: Members) -> int:
        """Where a range of a part is among parts; -1: it is in no part of this size."""
        page, within = divmod(at, step * group.ranks)
        if (step, group) != (self.step, self.group) or within + size > step:
            return -1
        return page * step + within

    def _cut(self, step: int, group: Members) -> None:
        """From one run to parts of it."""
        if (self.step, self.group) == (step, group):
            return
        whole, page = [] if self.step else self.held, step * group.ranks
        self.clear()
        self.step, self.group = step, group
        for lo, hi, run in whole:
            for n in range(-(-lo // page), hi // page)[:PAGES]:
                begin = run.after(n * page - lo)
                if not begin or step % run.width:
                    continue
                there, more = (n * step, n * step + step), step // run.width
                other = begin._replace(by_part=more)
                self.held.append((*there, self.own(other, group)))
                self.others.append((*there, other))

    def _settle(self) -> None:
        """From parts to one run, where all of them are parts of one."""
        step, group, out = self.step, self.group, []
        assert group
        if len(self.held) != len(self.others):
            return
        for (lo, hi, mine), (a, b, other) in zip(
            self.held, self.others, strict=True
        ):
            seen = self.own(other, group)
            if (
                (lo, hi) != (a, b)
                or lo % step
                or hi - lo != step
                or seen != mine
                or other.by_part * other.width != step
            ):
                return
            out.append(
                (lo * group.ranks, hi * group.ranks, other._replace(by_part=0))
            )
        self.held, self.others, self.step = joined(out), [], 0
        self.group = None
