"""activations.py -- the steps of values that backward needs, where they lie in the host arena until
then (`train.offload_activations`): units' inputs, and what blocks save.

    main   the function that reads value i last fills slot i % k of class `near.C`
    down   the value, from the slot to place i of class `far.C`
    main   the function that makes value i + k there
    up     the value, to the slot, beside the backward of the unit behind
    main   the backward that reads it

C is `x`, or `save.KIND`. The last k values of a class stay: nothing takes their slots. So does an
input that no backward reads: forward is done with it before its slot is written again. Of x,
backward has its unit's output and input and gets the next input, so k is 3; of what is saved it
is 2.
"""

from __future__ import annotations

from ..plan.plan import Event, Events, Ref
from .hops import Hop, free, full
from .rings import Use
from .steps import Steps


def _backward_values(m: Steps, u: Use) -> list[tuple[str, int]]:
    """What a unit's backward needs of its forward, of classes that move: (class, value)."""
    values = []
    if u.x >= 0:
        values.append(("x", u.x))
    if u.kind.saved:
        values.append((f"save.{u.kind.name}", u.index))
    return [(c, i) for c, i in values if c in m.offloaded]


def _offloaded_values(m: Steps, u: Use) -> list[tuple[str, int]]:
    """Those that do not stay."""
    return [(c, i) for c, i in _backward_values(m, u) if is_offloaded(m, c, i)]


def is_offloaded(m: Steps, cls: str, i: int) -> bool:
    """Is value i in the host arena between forward and backward?"""
    return i in m.host_places.get(cls, ())


def _host_place(m: Steps, cls: str, i: int) -> Ref:
    return Ref(f"far.{cls}", m.host_places[cls][i])


def _slot(m: Steps, cls: str, i: int) -> Ref:
    return m.placed(cls, i, 0)


def _forward_values(m: Steps, u: Use) -> list[tuple[str, int]]:
    """What a unit's forward makes of them, which its backward is the last to read."""
    saved = [(c, i) for c, i in _backward_values(m, u) if c != "x"]
    return [("x", u.y), *saved] if "x" in m.offloaded else saved


def before(m: Steps, u: Use) -> tuple[Events, Events]:
    """Brings what the backward behind u needs; what u waits for, and records."""
    waits: list[Event] = []
    recs: list[Event] = []
    full_events = [full(_slot(m, c, i)) for c, i in _offloaded_values(m, u)]
    if u.body == "fwd":
        if u.first:  # where values were that are down by now
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
    """The values before those that u needs."""
    for c, i in _backward_values(m, u):
        if i and is_offloaded(m, c, i - 1):
            hop = Hop(
                "up", _host_place(m, c, i - 1), _slot(m, c, i - 1), takes=False
            )
            m.copy(hop, u.unit, m.offloaded[c][2])


def after(m: Steps, u: Use) -> None:
    """What nothing of forward reads any more goes down."""
    if u.body != "fwd" or not u.last:
        return
    for c, i in _offloaded_values(m, u):
        hop = Hop("down", _slot(m, c, i), _host_place(m, c, i), fills=False)
        m.copy(hop, u.unit, m.offloaded[c][2])
