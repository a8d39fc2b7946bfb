"""operands.py -- the operands that a call of the plan's own functions passes to a kernel."""

from __future__ import annotations

from typing import NamedTuple

from ..plan.mesh import Along
from ..plan.operand import ALL
from .arrays import State
from .memory import Extent
from .order import Memory, Place

BLOCK = 1024  # elements of a block of the optimizer's kernels


class Number(NamedTuple):
    """Number of a call, by_rank more for each place in a group."""

    n: int
    by_rank: int = 0
    group: str = ALL


class Range(NamedTuple):
    """Range of elements of a flat's instance."""

    flat: str
    l: int
    first: int
    by_rank: Along
    n: int

    def run(self, what: str, step: int, width: int) -> Extent:
        """Return its elements of a state after `step`."""
        state = State(what, self.flat, self.l, step)
        return Extent(state, self.first, width, self.by_rank)


class Sources(NamedTuple):
    """Slot with the pieces that a reduction delivered."""

    inbox: Place


class Array(NamedTuple):
    """Places that a function takes as an array of pointers."""

    places: tuple[Place, ...]


Operand = Place | Number | Sources | Array | str


def width_of(m: Memory, full: Number) -> int:
    """Return the bytes of an element: of an f32, or of the stored type if `full` is 0."""
    if full.n not in (0, 1) or not full.n and m.real == 4:
        m.fail(f"full is {full.n}")
    return 4 if full.n else m.real


def part_of(m: Memory, spans: str, first: Number, n: Number) -> Range:
    """Return the elements that a kernel works on: n elements of a flat from `first` on."""
    kind, _, name = spans.partition(".")
    if kind != "spans":
        m.fail(f"works on {spans}")
    flat = m.flats[name]
    whole = flat.shard * m.W
    l, at = divmod(first.n, whole)
    elems = n.n
    even = elems > 0 and elems % BLOCK == 0
    there = l < flat.count
    if not even or not there or n.by_rank:
        m.fail(f"works on {elems} elements of {name}[{l}]")
    group = m.groups[first.group]
    return Range(name, l, at, group.times(first.by_rank), elems)
