"""grid.py -- pass 1, first part: arranges ranks on a grid.

Axes run from the nearest ranks to the farthest. They are cut at the size of a host
(`cluster.local`) and at the size of a set of ranks that shares parameters (`zero.shard_size`). At
depth d a state is sharded over the ranks along the nearest d axes: at depth 0 every rank has all of
it, at full depth every rank has its own shard.

Shards are numbered so that the nearest axis counts slowest. So the shards that a rank has at any
depth are consecutive, and an all-gather from one depth to a lower one joins consecutive runs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from ..plan.operand import Names
from ..plan.plan import ALL, Axis, Group
from ..read.spec import Spec

OWNERS = "owners"  # group of all ranks in order of their shards


@dataclass(frozen=True)
class Level:
    """The ranks along axes [lo, hi), which take part in one collective."""

    group: str
    ranks: int
    lo: int
    hi: int


@dataclass(frozen=True)
class RankGrid:
    """The grid of ranks. axes: nearest first, () for a single axis of all ranks; host, shared:
    number of axes within a host and within a set of ranks that shares parameters at stage 3;
    context: number of axes within the ranks that share a sample."""

    ranks: int
    axes: tuple[Axis, ...]
    host: int
    shared: int
    context: int = 0

    @property
    def depth(self) -> int:
        """Number of axes."""
        return max(1, len(self.axes))

    def size(self, lo: int, hi: int) -> int:
        """Return the number of ranks along axes [lo, hi)."""
        if not self.axes:
            return self.ranks if lo < hi else 1
        return math.prod(a.size for a in self.axes[lo:hi])

    def parts(self, depth: int) -> int:
        """Return the number of shards that a rank has of a state at a depth."""
        return self.size(depth, self.depth)

    def group(self, lo: int, hi: int) -> str:
        """Return the name of the group of ranks along axes [lo, hi), '' if there are no axes."""
        if lo >= hi:
            return ""
        if hi - lo == self.depth:
            return OWNERS if self.axes else ALL
        # The later entry wins: the group of a host that shares parameters is `shard`.
        known = {(0, self.context): "context"}
        known |= {(0, self.host): "local", (0, self.shared): "shard"}
        return known.get((lo, hi)) or "_".join(a.name for a in self.axes[lo:hi])

    def over(self, depth: int) -> str:
        """Return the group that a state at a depth is sharded over, '' if every rank has all of
        it."""
        return self.group(0, depth)

    @property
    def owners(self) -> str:
        """Group of all ranks in order of their shards."""
        return self.group(0, self.depth)

    @property
    def samples(self) -> str:
        """Group of the ranks that share a sample, '' if each has whole ones."""
        return self.group(0, self.context)

    def groups(self) -> tuple[Group, ...]:
        """Return all groups that a plan may name."""
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
        """Number of ranks by name of a group."""
        return {g.name: g.ranks for g in self.groups()}

    def level(self, lo: int, hi: int) -> Level:
        """Return the level of axes [lo, hi)."""
        return Level(self.group(lo, hi), self.size(lo, hi), lo, hi)

    def levels(self, lo: int, hi: int, *cuts: int) -> list[Level]:
        """Return the levels from depth lo to depth hi, cut at the given depths."""
        ends = sorted({lo, hi, *(c for c in cuts if lo < c < hi)})
        return [self.level(a, b) for a, b in zip(ends, ends[1:], strict=False)]

    def gathers(self, lo: int, hi: int) -> list[Level]:
        """Return the levels of an all-gather from depth hi to depth lo: between hosts first, then
        inside each host."""
        return self.levels(lo, hi, self.host)[::-1]


def _shared(spec: Spec) -> int:
    """Return the number of ranks that share parameters, or states if parameters are whole; 0 means
    all."""
    return 0 if idle(spec) else spec.zero.shared


def idle(spec: Spec) -> bool:
    """Return whether `shard_size` has no effect: all ranks share states, and none shares
    parameters."""
    z = spec.zero
    return z.shared > 0 and z.stage < 3 and not z.replicates


def grid(spec: Spec) -> RankGrid:
    """Return the grid of a spec's ranks."""
    W = spec.cluster.ranks
    local = min(spec.cluster.local or W, W)
    shared = min(_shared(spec) or W, W)
    N = spec.cluster.context_parallel
    ends = sorted({1, N, local, shared, W})
    if len(ends) <= 2:
        return RankGrid(W, (), 1, 1, int(N > 1))
    axes, names = [], _names(local, shared, W)
    if 1 < N < W:
        own = N in (local, shared)
        names = ("context", *["contexts"] * (not own), *names[1:])
    for name, lo, hi in zip(names, ends, ends[1:], strict=False):
        axes.append(Axis(name, hi // lo, lo))
    return RankGrid(
        W,
        tuple(axes),
        ends.index(local) if 1 < local else 0,
        ends.index(shared),
        ends.index(N),
    )


def _names(local: int, shared: int, ranks: int) -> Names:
    """Return the names of the axes, nearest first."""
    if local in (1, shared, ranks):
        return "shard", "replica"
    if shared == ranks:
        return "local", "hosts"
    if shared < local:
        return "shard", "replica", "hosts"
    return "local", "hosts", "replica"
