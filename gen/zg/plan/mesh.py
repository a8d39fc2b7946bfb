"""mesh.py -- the grid of all ranks: its axes, and the place of a rank in a group.

A number that differs between ranks is a sum over axes: the place along an axis times a fixed step.
`Along` lists these steps, one per axis. It is () if all ranks have the same number.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from .plan import Axis, Group, Plan

Along = tuple[int, ...]


def plain(by: Along) -> Along:
    return by if any(by) else ()


def plus(a: Along, b: Along) -> Along:
    if not a or not b:
        return a or b
    return plain(tuple(x + y for x, y in zip(a, b, strict=True)))


@dataclass(frozen=True)
class Members:
    """A group of a plan. steps: the growth of a rank's place in the group along each axis; 0 if all
    ranks of the group have the same place on that axis."""

    name: str
    ranks: int
    steps: Along

    def times(self, n: int) -> Along:
        """Return the steps of a number that is n times the place in the group."""
        return plain(tuple(n * s for s in self.steps))

    def _those(self, by: Along, own: bool) -> Along:
        """Return a number's steps along the group's own axes, or along all others."""
        if not by:
            return ()
        pairs = zip(by, self.steps, strict=True)
        return plain(tuple(n * (bool(s) == own) for n, s in pairs))

    def within(self, by: Along) -> Along:
        """Return the part of a number that differs within the group."""
        return self._those(by, True)

    def without(self, by: Along) -> Along:
        """Return the part of a number that is the same for all ranks of the group."""
        return self._those(by, False)

    def each(self, by: Along) -> int:
        """Return n if the number differs within the group by times(n), else -1."""
        mine = self.within(by)
        pairs = zip(mine, self.steps, strict=True) if mine else ()
        n = next((a // s for a, s in pairs if s), 0)
        return n if self.times(n) == mine else -1


def _axes(p: Plan) -> tuple[Axis, ...]:
    """Return the plan's axes, the slowest first. A plan that names none has one axis of all
    ranks."""
    told = p.axes or (Axis("all", p.head.ranks, 1),)
    return tuple(sorted(told, key=lambda a: -a.stride))


def _is_grid(axes: tuple[Axis, ...], ranks: int) -> bool:
    """Return whether every rank has its own place on these axes."""
    stride = 1
    for axis in reversed(axes):
        if axis.stride != stride or axis.size < 1:
            return False
        stride *= axis.size
    return stride == ranks


def _member(g: Group, axes: tuple[Axis, ...]) -> Members:
    own = g.axes or tuple(a.name for a in axes)
    sizes = {a.name: a.size for a in axes}
    steps = dict.fromkeys(sizes, 0)
    n = 1
    for name in reversed(own):
        steps[name] = n
        n *= sizes[name]
    if n != g.ranks or len(set(own)) < len(own):
        raise ValueError(f"group {g.name} has {g.ranks} ranks, its axes {n}")
    return Members(g.name, n, tuple(steps.values()))


def members(p: Plan) -> dict[str, Members]:
    """Return the groups of a plan by name. Raises ValueError if the axes do not form a grid of all
    ranks."""
    axes = _axes(p)
    if not _is_grid(axes, p.head.ranks):
        sizes = math.prod(a.size for a in axes)
        raise ValueError(f"axes of {sizes} ranks are no grid of {p.head.ranks}")
    return {g.name: _member(g, axes) for g in p.groups}
