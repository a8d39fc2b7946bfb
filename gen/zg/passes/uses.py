"""uses.py -- the steps of a use of a unit's function, on each micro-batch that goes through the
unit before the next unit's turn.

    main    the function fills a slot of class `grad`
    sum     takes it when all of the gradient is there

One micro-batch after the other (`train.accumulate: micro_batches`), or all of a rank's in a row
(`layers`): then a unit is gathered once for all of them, and its gradient reduced once:

    sum     counts micro-batches while it adds them, and begins anew for the next gradient
    reduce  follows where own micro-batches are summed first, in class `pending`

A gradient that several units write waits, in a slot for each micro-batch, for the last of them; so
does that of `persistent`, which is whole at the same time as another.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..graph.graph import Graph
from ..plan.plan import Events, Int, Ref
from ..read.spec import Spec
from . import activations, climb
from .flats import persists
from .hops import free, full
from .rings import Leaf, Use
from .steps import Steps

TURNS = 8192  # units x micro-batches: each is some lines of the plan


def few(spec: Spec, graph: Graph) -> None:
    """Refuse a plan of too many lines."""
    units, micro_batches = sum(k.count for k in graph.kinds), spec.together
    if micro_batches > 1 and units * micro_batches > TURNS:
        raise spec.wrong(
            "train.accumulate",
            f"layers takes {micro_batches} micro-batches through each of "
            f"{units} units; a plan holds {TURNS} such turns",
            f"micro-batches, or up to {TURNS // units} micro-batches a rank",
        )


def use(
    m: Steps,
    u: Use,
    turns: int,
    waits: Events,
    begun: Sequence[Leaf],
    whole: Sequence[Leaf],
) -> None:
    """Add the steps of a use on so many micro-batches. begun, whole: the gradients that it is the
    first, and the last, to write."""
    several = turns > 1
    now, late = whole, list[Leaf]()
    if several:  # class `pending` has room for one gradient
        now = [x for x in whole if x in begun and not persists(x[0])]
        late = [x for x in whole if x not in now]
    if several and waits:
        m.add("main", "mark", u.unit, waits=waits)
        waits = ()
    for g in range(turns):
        _function(m, u, g, g == turns - 1, waits, begun, whole)
        _climb(m, u, now, g, several)
    _end(m, now, several)
    for x in late:
        for g in range(turns):
            _climb(m, u, [x], g, several)
        _end(m, [x], several)


def _function(
    m: Steps,
    u: Use,
    g: int,
    last: bool,
    waits: Events,
    begun: Sequence[Leaf],
    whole: Sequence[Leaf],
) -> None:
    """Add a function's step on micro-batch g; behind the last one the gathered slots are free."""
    needed, recs = activations.before(m, u)
    started: Events = ()
    ended: Events = ()
    if m.sums.phases:
        started = tuple(free(m.grad_slot(x, g)) for x in begun)
        ended = tuple(full(m.grad_slot(x, g)) for x in whole)
    if last:
        over = (free(x.ref) for x in u.gathered if not x.stays)
        recs += tuple(dict.fromkeys(over))
    ins, outs = m.operands(u, g)
    numbers = {"at": u.slice * u.part.rows, "l": u.index}
    m.add(
        "main",
        u.fn,
        u.unit,
        ins=ins,
        outs=outs,
        ints=tuple(Int(name, numbers[name]) for name in u.part.ints),
        waits=(*waits, *needed, *started),
        recs=(*recs, *ended),
    )
    activations.after(m, u)


def _climb(
    m: Steps, u: Use, gradients: Sequence[Leaf], g: int, counted: bool
) -> None:
    """Send gradients of micro-batch g up to their sums. counted: it ends a micro-batch of them."""
    for x in gradients:
        climb.leaf_done(m, u, x, g)
    if counted and gradients:
        m.add("sum", "count", outs=(Ref("ctl", 0),))


def _end(m: Steps, gradients: Sequence[Leaf], counted: bool) -> None:
    """End the sums of gradients: the count begins anew, and own micro-batches' sums are reduced."""
    if not counted or not gradients:
        return
    m.add("sum", "recount", outs=(Ref("ctl", 0),))
    if m.sums.pending:
        m.follow("reduce", "sum")
        for f, l, _ in gradients:
            climb.unit_done(m, m.flats[f], l)
