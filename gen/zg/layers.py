"""layers.py -- the steps of a use where all of a rank's grains go through a unit before the next
one's turn (`train.accumulate: layers`): it is gathered once for all, and reduced once.

    main    the function on a grain                    -> grad[s]    waits for done[s]
    reduce  its leaf on the sums, a count of grains    -> done[s]
    reduce  after the last: the count back to none; one reduction of the sums that were made in
            class `pend`, where own grains are summed first
Leaves that several units write wait for the last of these, in a slot for each grain; so does that
of `keep`, which comes beside another.
"""
from __future__ import annotations

from typing import TYPE_CHECKING, Sequence

from . import offload
from .graph import Graph
from .plan import Event, Ref
from .rings import Leaf, Use
from .spec import Spec

if TYPE_CHECKING:
    from .sched import _Maker


TURNS = 8192                    # units x grains: each is some lines of the plan


def few(spec: Spec, graph: Graph) -> None:
    """Refuses a plan of too many lines."""
    units, grains = sum(k.count for k in graph.kinds), spec.together
    if grains > 1 and units * grains > TURNS:
        raise spec.wrong("train.accumulate", f"layers takes {grains} micro-batches through each of "
                         f"{units} units; a plan holds {TURNS} such turns",
                         f"grains, or up to {TURNS // units} micro-batches a rank")


def use(m: _Maker, u: Use, waits: tuple[Event, ...], begun: Sequence[Leaf],
        whole: Sequence[Leaf]) -> None:
    """begun, whole: the leaves that u writes first, and last."""
    now = [x for x in whole if x in begun and x[0] != "keep"]       # `pend` is for one at a time
    if waits:
        m.add("main", "mark", u.unit, waits=waits)
    for g in range(m.together):
        m.one(u, g, (), begun, whole)
        m.dead(u, g)
        _push(m, u, now, g)
    m.release(u)
    _end(m, u, now)
    for x in whole:
        if x not in now:
            for g in range(m.together):
                _push(m, u, [x], g)
            _end(m, u, [x])


def _push(m: _Maker, u: Use, leaves: Sequence[Leaf], g: int) -> None:
    for x in leaves:
        m.leaf_done(u, x, g)
    if leaves:
        m.add("reduce", "count", outs=(Ref("ctl", 0),))


def _end(m: _Maker, u: Use, leaves: Sequence[Leaf]) -> None:
    if leaves:
        m.add("reduce", "recount", outs=(Ref("ctl", 0),))
    for f, l, _ in leaves if m.shards.apart else ():
        if m.shards.below:
            offload.land(m, m.flats[f], l)
        else:
            m.reduce("join", f"{f}[{l}]", m.flats[f], Ref("pend", 0), Ref(f"sum.{f}", l), 4, ())
