"""activations.py -- keeps activations on the host between forward and backward
(`train.offload_activations`): unit inputs and saved values.

A class C is `x`, `save.KIND` or `save_heads.KIND`. Its value i uses slot i % k of class `near.C` on
the device:

    main   the last forward function that reads value i fills the slot
    down   the slot goes to a place of class `far.C`
    main   the function that makes value i + k reuses the slot
    up     value i comes back beside the backward before the one that reads it
    main   backward reads it

The last k values of a class stay on the device, because nothing takes their slots. An input that no
backward reads stays too: forward is done with it before its slot is written again. For x, k is 3:
backward holds the unit's output and input while the next input arrives. For saved values k is 2.

If a rank has several blocks of a sample, each has values of its own, in k slots, which come and go
with its functions. Values of whole samples (`save_heads`) come with the first block and go with the
last.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ..facts.between import BETWEEN, SAVED
from ..plan.plan import Event, Events, Ref
from ..plan.size import Size
from .hops import Hop, free, full
from .operands import by_sample
from .rings import Use
from .steps import Steps

Value = tuple[str, int]  # class, number of the value


def _backward_values(m: Steps, u: Use) -> list[Value]:
    """Return the values of offloaded classes that a unit's backward needs of its forward."""
    values = [("x", u.x)] * (u.x >= 0)
    values += [(f"{BETWEEN[n].cls}.{u.kind.name}", u.index) for n in SAVED]
    return [(c, i) for c, i in values if c in m.offloaded]


def _offloaded_values(m: Steps, u: Use) -> list[Value]:
    """Return the values of a unit's backward that go to the host."""
    return [(c, i) for c, i in _backward_values(m, u) if is_offloaded(m, c, i)]


def is_offloaded(m: Steps, cls: str, i: int) -> bool:
    """Return whether value i is on the host between forward and backward."""
    return i in m.host_places.get(cls, ())


@dataclass(frozen=True)
class _Slots:
    """Places of values that go with one function, on block g of those that go through a unit
    together."""

    m: Steps
    g: int
    first: bool  # it is the unit's first function on the block, else the last

    def numbers(self, cls: str) -> list[int]:
        """Return the numbers of a class's slots for one value that go with the function."""
        if not by_sample(cls):
            return [self.g]
        blocks = self.m.spec.own_blocks
        sample, block = divmod(self.g, blocks)
        return [sample] if block == (0 if self.first else blocks - 1) else []

    def here(self, values: Iterable[Value]) -> list[Ref]:
        """Return the slots of values on the device."""
        return [self.m.value_slot(c, i, n) for c, i in values for n in self.numbers(c)]

    def copies(self, values: Iterable[Value]) -> Iterator[tuple[Ref, Ref, Size]]:
        """Yield the slots of values on the device, their places on the host, and their bytes."""
        m = self.m
        for c, i in values:
            for n in self.numbers(c):
                yield m.value_slot(c, i, n), m.host_place(c, i, n), m.offloaded[c][2]


def _forward_values(m: Steps, u: Use) -> list[Value]:
    """Return the values that a unit's forward makes and that only its own backward reads last."""
    saved = [(c, i) for c, i in _backward_values(m, u) if c != "x"]
    return [("x", u.y), *saved] if "x" in m.offloaded else saved


def before(m: Steps, u: Use, g: int) -> tuple[Events, Events]:
    """Return the events that a use on block g waits for and records. A unit's backward first
    prefetches the values of the backward after it."""
    waits: list[Event] = []
    recs: list[Event] = []
    first, last = _Slots(m, g, True), _Slots(m, g, False)
    if u.body == "fwd" and u.first:  # the slots' former values must have been copied
        new = _forward_values(m, u)
        taken = [(c, i) for c, i in new if is_offloaded(m, c, i - m.offloaded[c][0])]
        waits = [free(slot) for slot in first.here(taken)]
    if u.body == "fwd" and u.last:
        recs = [full(slot) for slot in last.here(_offloaded_values(m, u))]
    if u.body == "bwd" and u.first:
        _prefetch(m, u, first)
        waits = [full(slot) for slot in first.here(_offloaded_values(m, u))]
    if u.body == "bwd" and u.last:
        recs = [free(slot) for slot in last.here(_forward_values(m, u))]
    return tuple(waits), tuple(recs)


def _prefetch(m: Steps, u: Use, slots: _Slots) -> None:
    """Copy to the device the values that come before those of the unit."""
    older = [(c, i - 1) for c, i in _backward_values(m, u) if i]
    some = [(c, i) for c, i in older if is_offloaded(m, c, i)]
    for here, there, size in slots.copies(some):
        m.copy(Hop("up", there, here, takes=False), u.unit, size)


def after(m: Steps, u: Use, g: int) -> None:
    """Copy the values to the host that forward is done with."""
    if u.body != "fwd" or not u.last:
        return
    for here, there, size in _Slots(m, g, False).copies(_offloaded_values(m, u)):
        m.copy(Hop("down", here, there, fills=False), u.unit, size)
