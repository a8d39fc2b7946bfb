"""stores.py -- pass 1, last part: decides where each state of each flat is stored, for later
passes, memory reports, saving and checking.

The class of a state is named after the state and its flat, as in `master.block`. Class `param`
holds parameters. A class with prefix `near_` holds the part of a shard whose states stay on the
device when `ratio` < 1 offloads the rest.
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

# Arena by the `device` of zero.offload_optimizer.
ARENAS = {"none": "device", "cpu": "host", "nvme": "file"}
NEAR = "near_"


@dataclass(frozen=True)
class Located(Store):
    """A store and its arena."""

    arena: str = "device"

    @property
    def plain(self) -> Store:
        """The store without its arena."""
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
    def width(self) -> int:
        """Bytes of an element."""
        return ops.BYTES[self.dtype]


@dataclass(frozen=True)
class Kept:
    """All states of all flats."""

    states: tuple[Located, ...]

    @cached_property
    def _by_class(self) -> dict[str, Located]:
        return {s.cls: s for s in self.states}

    def of(self, c: str, f: Flat) -> Located:
        """Return the state of class `c` of a flat."""
        return self._by_class[f"{c}.{f.name}"]

    def updated(self, f: Flat, near: str = "") -> Names:
        """Return the states that an update changes beside parameters and sums, with the prefix of
        their classes."""
        own = (
            s
            for s in self.states
            if s.flat == f.name and s.what not in ("params", "sum")
        )
        return tuple(
            s.cls.partition(".")[0] for s in own if f.first_part(s) == bool(near)
        )

    def masters(self, f: Flat, near: str = "") -> str:
        """Return the class of a flat's master weights: `param` if none are stored."""
        name = f"{near}master"
        return name if f"{name}.{f.name}" in self._by_class else "param"

    def masters_off_device(self, f: Flat) -> bool:
        """Return whether a flat's master weights are offloaded."""
        return self.of(self.masters(f), f).arena != "device"


def _type(spec: Spec, state: str) -> str:
    """Return the stored type of a state."""
    return "f32" if state == "master" else spec.train.optimizer.moments


def _of_flat(spec: Spec, shards: Shards, f: Flat) -> list[Located]:
    """Return the states of a flat."""
    over = shards.grid.over
    where = "device"
    if f.name in shards.offloaded:
        where = "host" if f.name in shards.offloaded_to_host else "file"
    out = [
        Located(
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
            Located(
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
        shard.update_states(spec, f.name in shards.offloaded, False) if f.near else ()
    ):
        out.append(
            Located(
                what=state,
                flat=f.name,
                dtype=_type(spec, state),
                first=0,
                n=f.near,
                cls=f"{NEAR}{state}.{f.name}",
                over=over(shards.states),
            )
        )
    if f.trainable:
        out.append(
            Located(
                what="sum",
                flat=f.name,
                dtype=shards.sums.dtype,
                first=0,
                n=f.shard,
                cls=f"sum.{f.name}",
                over=over(shards.sums.depth),
                arena="host" if shards.sums.host else "device",
            )
        )
    return out


def plan(spec: Spec, shards: Shards) -> Kept:
    """Return the states of all flats."""
    return Kept(
        tuple(store for f in shards.flats for store in _of_flat(spec, shards, f))
    )
