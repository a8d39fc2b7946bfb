"""stores.py -- pass 1, behind shard.py: where each state of each flat lies, which all else asks:
later passes, memory, saving and checking.

A state's class is named after it and its flat; `param` are parameters, `near_` is what stays on the
device of a shard of which the rest goes away.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ..facts import ops
from ..plan.operand import Names
from ..plan.plan import Store
from ..read.spec import Spec
from . import shard
from .shard import Flat, Shards

ARENAS = {
    "none": "device",
    "cpu": "host",
    "nvme": "file",
}  # of what is offloaded there
NEAR = "near_"


@dataclass(frozen=True)
class State(Store):
    """A store, and the arena that it lies in."""

    arena: str = "device"

    @property
    def plain(self) -> Store:
        return Store(
            what=self.what,
            flat=self.flat,
            dtype=self.dtype,
            first=self.first,
            n=self.n,
            cls=self.cls,
            over=self.over,
        )

    @property
    def width(self) -> int:  # bytes of an element
        return ops.BYTES[self.dtype]


@dataclass(frozen=True)
class Kept:
    """Every state of every flat."""

    states: tuple[State, ...]

    @cached_property
    def _by_class(self) -> dict[str, State]:
        return {s.cls: s for s in self.states}

    def of(self, c: str, f: Flat) -> State:
        return self._by_class[f"{c}.{f.name}"]

    def updated(self, f: Flat, near: str = "") -> Names:
        """What an update keeps beside parameters and sums: first parts of classes' names."""
        own = (
            s
            for s in self.states
            if s.flat == f.name and s.what not in ("params", "sum")
        )
        return tuple(
            s.cls.partition(".")[0]
            for s in own
            if f.first_part(s) == bool(near)
        )

    def masters(self, f: Flat, near: str = "") -> str:
        """The class of its masters, which parameters may be."""
        name = f"{near}master"
        return name if f"{name}.{f.name}" in self._by_class else "param"

    def low(self, f: Flat) -> bool:
        """Its masters do not lie on the device."""
        return self.of(self.masters(f), f).arena != "device"


def _type(spec: Spec, state: str) -> str:
    """How a state is stored."""
    return "f32" if state == "master" else spec.train.optimizer.moments


def _of_flat(spec: Spec, shards: Shards, f: Flat) -> list[State]:
    over = shards.grid.over
    where = "device"  # parameters
    if f.name in shards.away:
        where = "host" if f.name in shards.held else "file"
    out = [
        State(
            what="params",
            flat=f.name,
            dtype=spec.train.precision,
            first=0,
            n=f.shard,
            cls=f"param.{f.name}",
            over=over(f.depth),
            arena=where,
        )
    ]
    updated = ARENAS[spec.zero.offload_optimizer.device]
    for state in f.states:
        out.append(
            State(
                what=state,
                flat=f.name,
                dtype=_type(spec, state),
                first=f.near,
                n=f.far,
                cls=f"{state}.{f.name}",
                over=over(shards.states),
                arena=updated,
            )
        )
    for state in (
        shard.states_of(spec, f.name in shards.away, False) if f.near else ()
    ):
        out.append(
            State(
                what=state,
                flat=f.name,
                dtype=_type(spec, state),
                first=0,
                n=f.near,
                cls=f"{NEAR}{state}.{f.name}",
                over=over(shards.states),
            )
        )
    if f.moves:
        out.append(
            State(
                what="sum",
                flat=f.name,
                dtype="f32",
                first=0,
                n=f.shard,
                cls=f"sum.{f.name}",
                over=over(shards.sums.depth),
                arena="host" if shards.sums.host else "device",
            )
        )
    return out


def plan(spec: Spec, shards: Shards) -> Kept:
    return Kept(
        tuple(
            store for f in shards.flats for store in _of_flat(spec, shards, f)
        )
    )
