"""device.py -- adds the steps of master weights and optimizer states on the device.

`near_` is the part of a shard whose optimizer states stay on the device when `ratio` < 1 offloads
the rest. If parameters are offloaded, updated ones go down: in bf16 by a slot of class `staging`,
to the file by a further slot of class `fetched`.

    main -> staging -> down -> param        main -> staging -> down -> fetched -> store -> param
"""

from __future__ import annotations

from typing import Any

from ..plan.plan import Int, Ref, Refs
from .hops import Hop, Ring, end, free, full
from .shard import Flat
from .steps import Instance, Steps


def update(m: Steps, shards: list[Instance], near: str = "") -> None:
    """Update shards on the device, or only their `near_` parts."""
    for f, l in shards:
        op, ins, ints = (
            f"{near}update.{f.name}",
            (Ref(f"sum.{f.name}", l),),
            (Int("l", l),),
        )
        states = tuple(Ref(f"{c}.{f.name}", l) for c in m.kept.updated(f, near))
        if m.offloads_params(f):
            _update_offloaded(m, f, l, op, states, ins=ins, ints=ints)
            continue
        m.add(
            "main",
            op,
            f"{f.name}[{l}]",
            ins=ins,
            ints=ints,
            outs=(Ref(f"param.{f.name}", l), *states),
            recs=(end("main"),),
        )
        if not near:
            m.gather_updated(f, l, end("main"))


def init(m: Steps, shards: list[Instance], near: str = "") -> None:
    """Set initial master weights on the device."""
    for f, l in shards:
        master = m.kept.masters(f, near)
        m.add(
            "main",
            f"{near}init.{f.name}",
            f"{f.name}[{l}]",
            outs=(Ref(f"{master}.{f.name}", l),),
            ints=(Int("l", l),),
        )


def publish(m: Steps, shards: list[Instance], near: str = "") -> None:
    """Compute parameters from master weights on the device."""
    for f, l in shards:
        narrow = m.real < 4 and m.kept.masters(f, near) != "param"
        op, ins = f"{near}cast.{f.name}", (Ref(f"{near}master.{f.name}", l),)
        if m.offloads_params(f) and narrow:
            _update_offloaded(m, f, l, op, (), ins=ins)
        elif m.offloads_params(f):
            _update_offloaded(m, f, l, "mark", ())
        elif narrow:
            m.add(
                "main",
                op,
                f"{f.name}[{l}]",
                ins=ins,
                outs=(Ref(f"param.{f.name}", l),),
            )
    m.add("main", "mark", recs=(end("main"),))


def _update_offloaded(
    m: Steps,
    f: Flat,
    l: int,
    op: str,
    states: Refs,
    **rest: Any,
) -> None:
    """Add a step that makes updated parameters and the copies to their arena. In f32 the master
    weights themselves are copied."""
    ring, turn, unit = m.ring_of[f.name], m.down_turn, f"{f.name}[{l}]"
    m.down_turn += 1
    slots = m.staging[ring]
    if m.real == 2:
        updated = Ring(f"staging.{ring}", slots).slot(turn)
        m.add(
            "main",
            op,
            unit,
            outs=(updated, *states),
            waits=(free(updated),),
            recs=(full(updated),),
            **rest,
        )
    else:
        updated = Ref(f"near_master.{f.name}" if f.near else f"master.{f.name}", l)
        m.add("main", op, unit, outs=states, recs=(full(updated),), **rest)
    home = Ref(f"param.{f.name}", l)
    size = (f.near or f.shard).bytes(m.real)
    if m.arena("param", f) == "host":
        m.copy(
            Hop("down", updated, home, fills=False, then=(end("down"),)),
            unit,
            size,
        )
        return
    fetched = Ring(f"fetched.{ring}", slots).slot(turn)
    m.copy(Hop("down", updated, fetched), unit, size)
    # With `near`, tiles of the same shard follow on this queue.
    kept = () if f.near else (end("store"),)
    m.copy(Hop("store", fetched, home, fills=False, then=kept), unit, size)
