"""uses.py -- adds the steps of a unit's function for each micro-batch that goes through the unit
before the next unit's turn.

The function fills slots of class `grad` on queue main. Once all of a gradient is written, climb.py
reduces it. With `train.accumulate: micro_batches` one micro-batch at a time goes through all units.
With `layers` all of a rank's go through each unit in a row, so a unit is gathered once and its
gradient reduced once: queue `sum` counts micro-batches while it adds them, and `reduce` follows if
a rank's own micro-batches are summed first, in class `pending`.

A gradient that several units write has a slot per micro-batch and waits for the last of these
units. So does the gradient of `persistent`, which is complete at the same time as another one.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..graph.graph import Graph
from ..plan.plan import Events, Int, Ref
from ..read.spec import Spec
from . import activations, climb
from .flats import persists
from .hops import free, full
from .rings import Gradient, Use
from .steps import Steps

TURNS = 8192  # most units x micro-batches, each of which is several lines of the plan


def few(spec: Spec, graph: Graph) -> None:
    """Raise SpecError if the plan would have too many lines."""
    units, micro_batches = sum(k.count for k in graph.kinds), spec.together
    if micro_batches > 1 and units * micro_batches > TURNS:
        raise spec.wrong(
            "train.accumulate",
            f"layers takes {micro_batches} micro-batches through "
            f"{units} units: more than {TURNS} turns in all",
            f"micro_batches, or up to {TURNS // units} micro-batches per rank",
        )


def use(
    m: Steps,
    u: Use,
    micro_batches: int,
    waits: Events,
    first_writes: Sequence[Gradient],
    complete: Sequence[Gradient],
) -> None:
    """Add the steps of a use on a number of micro-batches. first_writes, complete: the gradients
    that it is the first, or the last, to write."""
    several = micro_batches > 1
    counted = micro_batches > m.sums.blocks
    now, deferred = complete, list[Gradient]()
    if several:  # class `pending` holds one gradient at a time
        now = [x for x in complete if x in first_writes and not persists(x[0])]
        deferred = [x for x in complete if x not in now]
    if several and waits:
        m.add("main", "mark", u.unit, waits=waits)
        waits = ()
    turns = micro_batches // (m.spec.own_blocks if u.part.sample else 1)
    for g in range(turns):
        _function(m, u, g, g == turns - 1, waits, first_writes, complete)
        _reduce(m, u, now, g, counted)
    m.exchange(u, micro_batches)
    _finish(m, now, counted)
    for x in deferred:
        for g in range(micro_batches):
            _reduce(m, u, [x], g, counted)
        _finish(m, [x], counted)


def _function(
    m: Steps,
    u: Use,
    g: int,
    last: bool,
    waits: Events,
    first_writes: Sequence[Gradient],
    complete: Sequence[Gradient],
) -> None:
    """Add the function's step on micro-batch g. The last micro-batch frees the ring slots."""
    needed, recs = activations.before(m, u, g)
    started: Events = ()
    ended: Events = ()
    if m.sums.phases and g % m.sums.blocks == 0:
        started = tuple(free(m.grad_slot(x, g)) for x in first_writes)
    if m.sums.phases and (g + 1) % m.sums.blocks == 0:
        ended = tuple(full(m.grad_slot(x, g)) for x in complete)
    if last:
        over = (free(x.ref) for x in u.gathered if not x.retained)
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
    activations.after(m, u, g)


def _reduce(
    m: Steps, u: Use, gradients: Sequence[Gradient], g: int, counted: bool
) -> None:
    """Reduce gradients of micro-batch g, or of all blocks of its sample if it is the last of them.
    counted: queue `sum` counts the micro-batch, or the sample."""
    if (g + 1) % m.sums.blocks:
        return
    for x in gradients:
        climb.gradient_done(m, u, x, g)
    if counted and gradients:
        m.add("sum", "count", outs=(Ref("ctl", 0),))


def _finish(m: Steps, gradients: Sequence[Gradient], counted: bool) -> None:
    """End the sums of gradients: reset the count and reduce the sums over own micro-batches."""
    if not counted or not gradients:
        return
    m.add("sum", "recount", outs=(Ref("ctl", 0),))
    if m.sums.pending:
        m.follow("reduce", "sum")
        for f, l, _ in gradients:
            climb.unit_done(m, m.flats[f], l)
