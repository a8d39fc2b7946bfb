"""grid.py -- pass 1, its first part: the grid of ranks.

Axes run from the nearest ranks to the farthest. `cluster.local` cuts them where a host ends,
`zero.shard_size` where a set of ranks ends that has all parameters once. Depth d: the ranks along
the nearest d axes share a state; 0: each rank has all of it; all axes: each has a shard of its own.

Shards are numbered so that the nearest axis counts slowest: what a rank has at any depth is a run
of shards, and a gather from one depth to a lesser one brings runs side by side.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from ..plan.operand import Names
from ..plan.plan import ALL, Axis, Group
from ..read.spec import Spec

OWNERS = "owners"  # all ranks, in order of their shards


@dataclass(frozen=True)
class Level:
    """Ranks along axes [lo, hi), which meet in one collective."""

    group: str
    ranks: int
    lo: int
    hi: int


@dataclass(frozen=True)
class Grid:
    """axes: the nearest first; none: one of all ranks. host, shared: how many of them lie within a
    host, and within a set of ranks that share parameters at stage 3."""

    ranks: int
    axes: tuple[Axis, ...]
    host: int
    shared: int

    @property
    def depth(self) -> int:
        return max(1, len(self.axes))

    def size(self, lo: int, hi: int) -> int:
        """Ranks along axes [lo, hi)."""
        if not self.axes:
            return self.ranks if lo < hi else 1
        return math.prod(a.size for a in self.axes[lo:hi])

    def parts(self, depth: int) -> int:
        """Shards that a rank has of what is shared at a depth."""
        return self.size(depth, self.depth)

    def group(self, lo: int, hi: int) -> str:
        """The name of the ranks along axes [lo, hi); '' where there are none."""
        if lo >= hi:
            return ""
        if hi - lo == self.depth:
            return OWNERS if self.axes else ALL
        # Where a host shares parameters, its group is `shard`.
        known = {(0, self.host): "local", (0, self.shared): "shard"}
        return known.get((lo, hi)) or "_".join(
            a.name for a in self.axes[lo:hi]
        )

    def over(self, depth: int) -> str:
        """The group that shares what lies at a depth; '': every rank has all."""
        return self.group(0, depth)

    @property
    def owners(self) -> str:
        return self.group(0, self.depth)

    def groups(self) -> tuple[Group, ...]:
        """All that a plan may name."""
        every = Group(ALL, self.ranks)
        names = [a.name for a in self.axes]
        out = [
            Group(self.group(lo, hi), self.size(lo, hi), tuple(names[lo:hi]))
            for lo in range(len(names))
            for hi in range(lo + 1, len(names) + 1)
        ]
        return every, *out

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Ranks of each group."""
        return {g.name: g.ranks for g in self.groups()}

    def level(self, lo: int, hi: int) -> Level:
        return Level(self.group(lo, hi), self.size(lo, hi), lo, hi)

    def levels(self, lo: int, hi: int, *cuts: int) -> list[Level]:
        """From depth lo to depth hi, cut at these depths."""
        ends = sorted({lo, hi, *(c for c in cuts if lo < c < hi)})
        return [self.level(a, b) for a, b in zip(ends, ends[1:], strict=False)]

    def gathers(self, lo: int, hi: int) -> list[Level]:
        """From depth hi down to depth lo: between hosts once, then inside."""
        return self.levels(lo, hi, self.host)[::-1]


def _shared(spec: Spec) -> int:
    """Ranks that share parameters, or states where parameters are whole; 0: all."""
    return 0 if idle(spec) else spec.zero.shared


def idle(spec: Spec) -> bool:
    """Whether `shard_size` has no effect: all ranks share states, and none shares parameters."""
    z = spec.zero
    return z.shared > 0 and z.stage < 3 and not z.replicates


def grid(spec: Spec) -> Grid:
    W = spec.cluster.ranks
    local = min(spec.cluster.local or W, W)
    shared = min(_shared(spec) or W, W)
    ends = sorted({1, local, shared, W})
    if len(ends) <= 2:
        return Grid(W, (), 1, 1)
    axes, names = [], _names(local, shared, W)
    for name, lo, hi in zip(names, ends, ends[1:], strict=False):
        axes.append(Axis(name, hi // lo, lo))
    return Grid(
        W,
        tuple(axes),
        ends.index(local) if 1 < local else 0,
        ends.index(shared),
    )


def _names(local: int, shared: int, ranks: int) -> Names:
    """Of the axes, from the nearest on."""
    if local in (1, shared, ranks):
        return "shard", "replica"
    if shared == ranks:
        return "local", "hosts"
    if shared < local:
        return "shard", "replica", "hosts"
    return "local", "hosts", "replica"
