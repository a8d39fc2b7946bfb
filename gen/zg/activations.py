"""activations.py -- the steps of values that backward needs, where they lie in the host arena until
then (`train.offload_activations`): units' inputs, and what blocks save.

    main   the function that reads value i last       -> past.C[s]
    down   the value, to slot i of class `far.C`       -> shed.C[s]    waits for past.C[s]
    main   drops it, before it makes value i + k       waits for shed.C[s]
    up     the value, beside the backward of the unit behind   -> raised.C[s], after spent.C[s]
    main   the backward that reads it, after raised.C[s]; its drop -> spent.C[s]

C is `x`, or `save.KIND`; s = i % k is one of k slots of class `near.C`. The last k values of a
class stay: nothing takes their slots. Of x, backward has its unit's output and input and gets the
next input, so k is 3; of what is saved it is 2.
"""
from __future__ import annotations

from typing import TYPE_CHECKING

from .plan import Event, Ref
from .rings import Use
from .spec import Spec

if TYPE_CHECKING:
    from .sched import _Maker

EVENTS = ("past", "shed", "raised", "spent")


def slots(spec: Spec, cls: str, count: int) -> int:
    """Of a class with so many values, on the device."""
    return min(count, 3 if cls == "x" else 2) if spec.train.offload_activations else count


def _kept(m: _Maker, u: Use) -> list[tuple[str, int]]:
    """What a unit's backward needs of its forward, of classes that move: (class, value)."""
    both = [("x", u.x)] * (u.x >= 0) + [(f"save.{u.kind.name}", u.index)] * bool(u.kind.saved)
    return [(c, i) for c, i in both if c in m.near]


def goes(m: _Maker, cls: str, i: int) -> bool:
    """Is value i in the host arena between forward and backward?"""
    near, count, _ = m.near.get(cls, (0, 0, 0))
    return i < count - near


def _event(m: _Maker, what: str, cls: str, i: int) -> Event:
    return Event(f"{what}.{cls}", i % m.near[cls][0])


def _near(m: _Maker, cls: str, i: int) -> Ref:
    return Ref(f"near.{cls}", i % m.near[cls][0])


def before(m: _Maker, u: Use) -> tuple[tuple[Event, ...], tuple[Event, ...]]:
    """Makes room for what a use makes, or brings what the next needs; what u waits for, and
    records."""
    kept = _kept(m, u)
    past = tuple(_event(m, "past", cls, i) for cls, i in kept if goes(m, cls, i))
    recs = past if u.body == "fwd" and u.last else ()
    if not u.first:
        return (), recs
    if u.body == "bwd":
        for cls, i in kept:
            if i and goes(m, cls, i - 1):
                m.copy("up", u.unit, Ref(f"far.{cls}", i - 1), _near(m, cls, i - 1),
                       m.near[cls][2], (_event(m, "spent", cls, i - 1),),
                       (_event(m, "raised", cls, i - 1),))
        return tuple(_event(m, "raised", cls, i) for cls, i in kept if goes(m, cls, i)), ()
    if u.body == "fwd":
        made = [("x", u.y)] * ("x" in m.near) + [x for x in kept if x[0] != "x"]
        for cls, i in made:
            if i >= m.near[cls][0]:
                m.add("main", "drop", u.unit, outs=(_near(m, cls, i),),
                      waits=(_event(m, "shed", cls, i),))
    return (), recs


def after(m: _Maker, u: Use) -> None:
    """What nothing of forward reads any more goes down."""
    for cls, i in _kept(m, u) if u.body == "fwd" and u.last else ():
        if goes(m, cls, i):
            m.copy("down", u.unit, _near(m, cls, i), Ref(f"far.{cls}", i), m.near[cls][2],
                   (_event(m, "past", cls, i),), (_event(m, "shed", cls, i),))
