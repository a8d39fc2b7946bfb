"""activations.py -- keeps activations on the host between forward and backward
(`train.offload_activations`): unit inputs and saved values.

A class C is `x` or `save.KIND`. Its value i uses slot i % k of class `near.C` on the device:

    main   the last forward function that reads value i fills the slot
    down   the slot goes to a place of class `far.C`
    main   the function that makes value i + k reuses the slot
    up     value i comes back beside the backward before the one that reads it
    main   backward reads it

The last k values of a class stay on the device, because nothing takes their slots. An input that no
backward reads stays too: forward is done with it before its slot is written again. For x, k is 3:
backward holds the unit's output and input while the next input arrives. For saved values k is 2.
"""

from __future__ import annotations

from ..plan.plan import Event, Events, Ref
from .hops import Hop, free, full
from .rings import Use
from .steps import Steps


def _backward_values(m: Steps, u: Use) -> list[tuple[str, int]]:
    """Return the (class, value) pairs of offloaded classes that a unit's backward needs of its
    forward."""
    values = []
    if u.x >= 0:
        values.append(("x", u.x))
    if u.kind.saved:
        values.append((f"save.{u.kind.name}", u.index))
    return [(c, i) for c, i in values if c in m.offloaded]


def _offloaded_values(m: Steps, u: Use) -> list[tuple[str, int]]:
    """Return the (class, value) pairs of a unit's backward that go to the host."""
    return [(c, i) for c, i in _backward_values(m, u) if is_offloaded(m, c, i)]


def is_offloaded(m: Steps, cls: str, i: int) -> bool:
    """Return whether value i is on the host between forward and backward."""
    return i in m.host_places.get(cls, ())


def _host_place(m: Steps, cls: str, i: int) -> Ref:
    return Ref(f"far.{cls}", m.host_places[cls][i])


def _slot(m: Steps, cls: str, i: int) -> Ref:
    return m.value_slot(cls, i, 0)


def _forward_values(m: Steps, u: Use) -> list[tuple[str, int]]:
    """Return the (class, value) pairs that a unit's forward makes and that only its own backward
    reads last."""
    saved = [(c, i) for c, i in _backward_values(m, u) if c != "x"]
    return [("x", u.y), *saved] if "x" in m.offloaded else saved


def before(m: Steps, u: Use) -> tuple[Events, Events]:
    """Return the events that a use waits for and records. A unit's backward first prefetches the
    values of the backward after it."""
    waits: list[Event] = []
    recs: list[Event] = []
    full_events = [full(_slot(m, c, i)) for c, i in _offloaded_values(m, u)]
    if u.body == "fwd":
        if u.first:  # the slots' former values must have been copied
            for c, i in _forward_values(m, u):
                if is_offloaded(m, c, i - m.offloaded[c][0]):
                    waits.append(free(_slot(m, c, i)))
        if u.last:
            recs = full_events
    if u.body == "bwd":
        if u.first:
            _prefetch(m, u)
            waits = full_events
        if u.last:
            recs = [free(_slot(m, c, i)) for c, i in _forward_values(m, u)]
    return tuple(waits), tuple(recs)


def _prefetch(m: Steps, u: Use) -> None:
    """Copy to the device the values that come before those of the unit."""
    for c, i in _backward_values(m, u):
        if i and is_offloaded(m, c, i - 1):
            hop = Hop("up", _host_place(m, c, i - 1), _slot(m, c, i - 1), takes=False)
            m.copy(hop, u.unit, m.offloaded[c][2])


def after(m: Steps, u: Use) -> None:
    """Copy the values to the host that forward is done with."""
    if u.body != "fwd" or not u.last:
        return
    for c, i in _offloaded_values(m, u):
        hop = Hop("down", _slot(m, c, i), _host_place(m, c, i), fills=False)
        m.copy(hop, u.unit, m.offloaded[c][2])
