"""cost.py -- what a plan costs: bytes on the wire, collectives, flops, memory.

Read off the plan alone.
"""
from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Sequence

from . import ops
from .plan import Call, Plan, Section, Step


@dataclass(frozen=True)
class Wire:
    """Bytes a rank receives from its peers and collectives it takes part in."""
    bytes: int
    messages: int

    def __add__(self, other: "Wire") -> "Wire":
        return Wire(self.bytes + other.bytes, self.messages + other.messages)

    def times(self, n: int) -> "Wire":
        return Wire(self.bytes * n, self.messages * n)


def wire_of(step: Step, ranks: int) -> Wire:
    """Of one step: each peer's piece arrives once."""
    ints = {i.name: i.value for i in step.ints}
    if step.op in ("gather", "alltoall", "reducescatter"):
        return Wire((ranks - 1) * ints["bytes"], 1)
    if step.op == "allreduce":
        return Wire((ranks - 1) * ints["count"] * 8, 1)
    return Wire(0, 0)


def wire(section: Section, ranks: int) -> Wire:
    return sum((wire_of(s, ranks) for s in section.steps), Wire(0, 0)).times(section.repeat)


def training_wire(p: Plan) -> Wire:
    """Of one training step."""
    return sum((wire(s, p.head.ranks) for s in p.step), Wire(0, 0))


def commands(p: Plan) -> int:
    """What a rank issues in a training step, a wait for an event each: `--profile` notes them."""
    return sum(s.repeat * sum((x.op not in ("mark", "drop")) + len(x.waits) for x in s.steps)
               for s in p.step)


def _forward(calls: Sequence[Call]) -> tuple[int, int]:
    """Flops of products that run forward: of linears, of attention, which is causal."""
    linear = attention = 0
    for c in calls:
        if c.kernel == "zk_linear_fwd":
            linear += c.rounds * 2 * math.prod(map(int, c.args[4:7]))
        if c.kernel == "zk_slice_fwd":
            linear += 2 * math.prod(int(c.args[n]) for n in (4, 6, 8))
        if c.kernel == "zk_attention_fwd":
            B, T, H, _, D = (int(a) for a in c.args[3:8])
            attention += 2 * B * T * T * H * D
    return linear, attention


def flops(p: Plan) -> int:
    """Of a global step: 6 per parameter and token, and causal attention (forward once, backward
    twice), less the products backward that nothing asks for where tensors are frozen. What is
    computed again does not count: these are the model's."""
    tokens = p.head.batch * p.head.sequence * p.head.grains * p.head.ranks
    fns, more = {f.name: f for f in p.fns}, 0
    for s in p.section("grain").steps:
        if s.op.partition(".")[0] in ("fwd", "bwd", "train"):
            linear, attention = _forward(fns[s.op].calls)
            spent = fns[s.op].flops - linear - attention        # backward
            more += spent if s.op.startswith("bwd.") else spent + attention - 2 * linear
    return 6 * p.head.params * tokens + more * p.section("grain").repeat * p.head.ranks


def again(p: Plan) -> int:
    """Flops of a global step that backward spends on forward's calls."""
    fns = {f.name: f for f in p.fns}
    more = sum(sum(_forward(fns[s.op].calls)) for s in p.section("grain").steps
               if s.op.startswith("bwd."))
    return more * p.section("grain").repeat * p.head.ranks


def staying(p: Plan) -> int:
    """Units of a grain that stay gathered from one use to the next: uses of ring slots without a
    gather of their own."""
    steps = p.section("grain").steps
    rings = lambda refs: sum(r.cls.startswith("ring") and r.at == 0 for r in refs)
    used = sum(rings(s.ins) for s in steps if s.op.startswith(("fwd", "bwd", "train")))
    return used // p.together - sum(rings(s.outs) for s in steps if s.op == "gather")


def moved(p: Plan) -> tuple[int, int]:
    """Bytes that a rank reads from its file and writes to it in a training step."""
    return tuple(sum(i.value * s.repeat for s in p.step for x in s.steps if x.queue in queues
                     for i in x.ints if i.name == "bytes")
                 for queues in (("load", "fetch"), ("store",)))


def summary(p: Plan) -> dict[str, object]:
    """The numbers that train.c states."""
    w, (loads, stores) = training_wire(p), moved(p)
    return {"wire": w.bytes, "messages": w.messages, "loads": loads, "stores": stores,
            "commands": commands(p), "flops": f"{float(flops(p))!r}", "sums": ops.SUMS,
            "ctl": ops.CTL, "vocab": ops.VOCAB, "scale": ops.SCALE}


GROUPS = (("parameters", ("real", "stage", "ring")),
          ("optimizer state", (*ops.STATES, *(f"near_{s}" for s in ops.STATES))),
          ("gradients", ("leaf", "sum", "pend", "part", "acc")),
          ("activations", ("x", "near", "dx", "save", "tmp", "tokens", "targets")),
          ("the rest", ("ctl", "sums", "table", "work")))


def memory(p: Plan) -> list[tuple[str, int]]:
    """Bytes of a rank's arena by what they are for; of its host arena, where it has one."""
    out = []
    for title, names in GROUPS:
        mine = [c for c in p.classes if c.name.split(".")[0] in names
                and c.kind not in ("hosted", "filed")]
        out.append((title, sum(c.slots * c.stride for c in mine)))
    return out + [(title, n) for title, n in (("the host arena", p.end("hosted")),
                                              ("the file arena", p.filed)) if n]
