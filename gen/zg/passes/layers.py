"""layers.py -- the steps of a use where all of a rank's micro-batches go through a unit before the
next one's turn (`train.accumulate: layers`): it is gathered once for all, and reduced once.

    main    the function on a micro-batch fills a slot of class `grad`
    sum     takes it: its leaf on the sums, a count of micro-batches
    sum     after the last: the count back to none
    reduce  follows: the sums that were made in class `pending`, where own micro-batches are summed
            first
Leaves that several units write wait for the last of these, in a slot for each micro-batch; so does
that of `persistent`, which comes beside another.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..graph.graph import Graph
from ..plan.plan import Events, Ref
from ..read.spec import Spec
from . import climb, micro_batch
from .rings import Leaf, Use
from .shard import persists
from .steps import Steps

TURNS = 8192  # units x micro-batches: each is some lines of the plan


def few(spec: Spec, graph: Graph) -> None:
    """Refuses a plan of too many lines."""
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
    waits: Events,
    begun: Sequence[Leaf],
    whole: Sequence[Leaf],
) -> None:
    """begun, whole: the leaves that u writes first, and last."""
    now = [
        x for x in whole if x in begun and not persists(x[0])
    ]  # `pending` is for one at a time
    if waits:
        m.add("main", "mark", u.unit, waits=waits)
    for g in range(m.together):
        micro_batch.one(
            m,
            u,
            g,
            (),
            begun,
            whole,
            micro_batch.release(u) if g == m.together - 1 else (),
        )
        _push(m, u, now, g)
    _end(m, u, now)
    for x in whole:
        if x not in now:
            for g in range(m.together):
                _push(m, u, [x], g)
            _end(m, u, [x])


def _push(m: Steps, u: Use, leaves: Sequence[Leaf], g: int) -> None:
    for x in leaves:
        climb.leaf_done(m, u, x, g)
    if leaves:
        m.add("sum", "count", outs=(Ref("ctl", 0),))


def _end(m: Steps, u: Use, leaves: Sequence[Leaf]) -> None:
    if leaves:
        m.add("sum", "recount", outs=(Ref("ctl", 0),))
    if leaves and m.sums.pending:
        m.follow("reduce", "sum")
        for f, l, _ in leaves:
            climb.unit_done(m, m.flats[f], l)
