"""micro_batch.py -- the steps of one use on a micro-batch: its function, its leaves."""

from __future__ import annotations

from collections.abc import Sequence

from ..plan.plan import Events, Int
from .hops import free, full
from .rings import Leaf, Use
from .steps import Steps


def one(
    m: Steps,
    u: Use,
    g: int,
    waits: Events,
    begun: Sequence[Leaf],
    whole: Sequence[Leaf],
    recs: Events = (),
) -> None:
    """A function on a micro-batch."""
    started: Events = ()
    ended: Events = ()
    if m.sums.phases:
        started = tuple(free(m.grad_slot(x, g)) for x in begun)
        ended = tuple(full(m.grad_slot(x, g)) for x in whole)
    ins, outs = m.operands(u, g)
    numbers = {"at": u.slice * u.part.rows, "l": u.index}
    ints = tuple(Int(name, numbers[name]) for name in u.part.ints)
    m.add(
        "main",
        u.fn,
        u.unit,
        ins=ins,
        outs=outs,
        ints=ints,
        waits=waits + started,
        recs=recs + ended,
    )


def release(u: Use) -> Events:
    """What says that the last use of a ring's slot is over."""
    return tuple(dict.fromkeys(free(g.ref) for g in u.gathered if not g.stays))
