"""micro_batch.py -- the steps of one use on a micro-batch: its function, its leaves."""

from __future__ import annotations

from collections.abc import Sequence

from ..plan.plan import Events, Int, Ref
from . import offload
from .hops import Hop, free, full
from .rings import Leaf, Use
from .steps import Reduction, Steps


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
    if not m.shards.once:
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


def leaf_done(m: Steps, u: Use, x: Leaf, g: int) -> None:
    """A whole leaf: reduce it, or push it on this rank's own sums; then it is dead. A step's only
    one is its sum."""
    if m.shards.once:
        return
    f, l, _ = x
    flat, unit = m.flats[f], u.moved(f, l)
    leaf, node = m.grad_slot(x, g), Ref(f"sum.{f}", l)
    if m.shards.pushes:
        offload.lower(m, Reduction("sum", unit, flat, m.real), leaf, node)
    elif m.order == "local":
        node = Ref("pending", 0) if m.shards.apart else node
        hop = Hop("sum", leaf, node, fills=False)
        m.add(
            "sum",
            f"own.{f}",
            unit,
            ins=(leaf,),
            outs=(node,),
            waits=hop.waits,
            recs=hop.recs,
        )
    else:
        hop = Hop("sum", leaf, node, fills=False)
        m.reduce(Reduction("sum", unit, flat, m.real), hop)
