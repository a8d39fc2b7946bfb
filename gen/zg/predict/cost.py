"""cost.py -- computes the cost of a plan from the plan alone: bytes on the wire, collectives,
flops, memory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..facts import ops
from ..facts.between import BETWEEN
from ..facts.commands import COLLECTIVES, COMMANDS
from ..facts.kernels import kernel, spent
from ..facts.queues import QUEUES
from ..plan.operand import of_layer, whole
from ..plan.plan import Class, Fn, Plan, Ref, Section, Step


@dataclass(frozen=True)
class Wire:
    """Bytes that a rank receives from its peers, and collectives that it takes part in. far: the
    bytes that come from other hosts."""

    bytes: int
    messages: int
    far: int = 0

    def __add__(self, other: Wire) -> Wire:
        return Wire(
            self.bytes + other.bytes,
            self.messages + other.messages,
            self.far + other.far,
        )

    def times(self, n: int) -> Wire:
        return Wire(self.bytes * n, self.messages * n, self.far * n)


def far(p: Plan, group: str) -> int:
    """Return how many ranks of a rank's group are on other hosts."""
    return p.group(group).ranks - p.on_host(group)


def wire_of(p: Plan, step: Step) -> Wire:
    """Return the cost of one step: each peer in the group sends its piece once."""
    if step.op not in COLLECTIVES:
        return Wire(0, 0)
    counted, each = COMMANDS[step.op].wire
    number = next(i.value for i in step.ints if i.name == counted)
    ranks, others = p.group(step.group).ranks, far(p, step.group)
    moved, sent = (ranks - 1) * number * each, others * number * each
    if step.op == "reducescatter" and others:  # a ring leaves each host once
        sent = moved // (ranks - others)
    return Wire(moved, 1, sent)


def wire(p: Plan, section: Section) -> Wire:
    return sum((wire_of(p, s) for s in section.steps), Wire(0, 0)).times(section.repeat)


def training_wire(p: Plan) -> Wire:
    """Return the cost of one training step."""
    return sum((wire(p, s) for s in p.step), Wire(0, 0))


def paper(p: Plan) -> int:
    """Return how many times its parameters a rank receives per micro-batch, according to the ZeRO
    papers."""
    return 3 if p.head.zero == 3 else 2


def stored(p: Plan) -> int:
    """Return the bytes of all parameters as they are stored."""
    return p.head.bytes * sum(t.count * t.elems for t in p.tensors)


def ideal(p: Plan) -> float:
    """Return the bytes of a step with one micro-batch, according to the papers."""
    share = (p.head.ranks - 1) / p.head.ranks
    return paper(p) * stored(p) * share


def sent_by_host(p: Plan) -> int:
    """Return the bytes that a host's ranks send to other hosts in a training step; 0 with one
    host."""
    return training_wire(p).far * p.head.local


def schemes(p: Plan) -> list[tuple[str, float]]:
    """Return other schemes by name and formula, with the bytes that a host would send to others in
    a training step. P parameters of b bytes, A micro-batches, N hosts; collectives are rings."""
    h = p.head
    hosts = h.ranks // h.local
    once = stored(p) * (hosts - 1) / hosts
    return [
        ("ZeRO-3, 3 A P b (N-1)/N", 3 * h.micro_batches * once),
        ("hpZ in a host, 2 A P b (N-1)/N", 2 * h.micro_batches * once),
        ("HSDP and HFSDP in a host, 2 P b (N-1)/N", 2 * once),
    ]


def exchanged(p: Plan) -> int:
    """Return the bytes that a rank receives in a step's exchanges of rows and heads."""
    return sum(
        section.repeat * wire_of(p, s).bytes
        for section in p.step
        for s in section.steps
        if s.op == "exchange"
    )


def sums(p: Plan) -> int:
    """Return the bytes of a rank's sums of gradients."""
    return sum(
        c.bytes for c in p.classes if c.name.startswith("sum.") or c.name == "pending"
    )


def update(p: Plan) -> int:
    """Return the bytes of memory that a rank's update moves. It reads and writes the optimizer
    states of its shards, reads sums, and writes parameters that have masters."""
    moved = 0
    for f in p.flats:
        stores = {s.what: s for s in p.stores if s.flat == f.name}
        once = {"sum", "params"} if "master" in stores else {"sum"}
        if stores.keys() <= {"params", "master"}:  # frozen
            continue
        owned = min(p.parts(s) for s in stores.values())
        for what, s in stores.items():
            times = 1 if what in once else 2
            moved += times * ops.BYTES[s.dtype] * owned * f.shard * f.count
    return moved


def commands(p: Plan) -> int:
    """Return how many commands a rank issues in a training step, counting a wait per event:
    `--profile` notes each."""
    return sum(
        s.repeat * sum((x.op != "mark") + len(x.waits) for x in s.steps) for s in p.step
    )


def forward(fn: Fn, layer: int) -> tuple[int, int]:
    """Return the forward flops of a function: of products with parameters, and of other products
    (attention)."""
    linear = attention = 0
    for c in fn.calls:
        row = kernel(c.kernel)
        each = whole(of_layer(spent(c.kernel, c.args, c.rounds), layer))
        if not row.of and row.params:
            linear += each
        elif not row.of:
            attention += each
    return linear, attention


def flops(p: Plan) -> int:
    """Return the model's flops of a global step: 6 per parameter and token, and causal attention
    (forward once, backward twice). Backward products that frozen tensors make needless are
    subtracted; recomputation is not counted."""
    tokens = p.head.rows * p.head.micro_batches * p.head.ranks
    fns, more = {f.name: f for f in p.fns}, 0
    for s in p.section("micro_batch").steps:
        if s.op.partition(".")[0] in ("fwd", "bwd", "train"):
            linear, attention = forward(fns[s.op], s.layer)
            every = whole(of_layer(fns[s.op].flops, s.layer))
            backward = every - linear - attention
            more += (
                backward
                if s.op.startswith("bwd.")
                else backward + attention - 2 * linear
            )
    return (
        6 * p.head.params * tokens
        + more * p.section("micro_batch").repeat * p.head.ranks
    )


def again(p: Plan) -> int:
    """Return the flops of a global step that backward spends on recomputing forward."""
    fns = {f.name: f for f in p.fns}
    more = sum(
        sum(forward(fns[s.op], s.layer))
        for s in p.section("micro_batch").steps
        if s.op.startswith("bwd.")
    )
    return more * p.section("micro_batch").repeat * p.head.ranks


def staying(p: Plan) -> int:
    """Return how many units stay gathered from one use to the next within a micro-batch: uses of
    ring slots that need no all-gather of their own."""
    steps = p.section("micro_batch").steps

    def rings(refs: Iterable[Ref]) -> int:
        return sum(r.cls.startswith("ring") and r.at == 0 for r in refs)

    used = sum(rings(s.ins) for s in steps if s.op.startswith(("fwd", "bwd", "train")))
    return used // p.together - sum(rings(s.outs) for s in steps if s.op == "gather")


def moved(p: Plan) -> tuple[int, int]:
    """Return the bytes that a rank reads from its file and writes to it in a training step."""
    read = written = 0
    for s in p.step:
        for x in s.steps:
            size = s.repeat * sum(i.value for i in x.ints if i.name == "bytes")
            read += size * (QUEUES[x.queue].reads == "file")
            written += size * (QUEUES[x.queue].writes == "file")
    return read, written


def summary(p: Plan) -> dict[str, object]:
    """Return the numbers that train.c states."""
    w, (loads, stores) = training_wire(p), moved(p)
    return {
        "wire": w.bytes,
        "messages": w.messages,
        "far": w.far,
        "loads": loads,
        "stores": stores,
        "commands": commands(p),
        "flops": f"{float(flops(p))!r}",
        "sums": ops.SUMS,
        "ctl": ops.CTL,
        "vocab": ops.VOCAB,
        "scale": ops.SCALE,
        "leaves": ops.LEAVES,
    }


ACTIVATIONS = "activations"
GROUPS = (
    ("parameters", ("param", "staging", "inter", "ring")),
    ("optimizer state", (*ops.STATES, *(f"near_{s}" for s in ops.STATES))),
    ("gradients", ("grad", "sum", "pending", "intra", "part", "acc")),
    (
        ACTIVATIONS,
        (
            *("x", "near", "dx", "tmp", *(b.cls for b in BETWEEN.values())),
            *ops.batch(True, True, True, True),
        ),
    ),
)


REST = "the rest"
PURPOSES = {name: title for title, names in GROUPS for name in names}


def purpose(c: Class) -> str:
    """Return the purpose of a class of buffers."""
    return PURPOSES.get(c.name.partition(".")[0], REST)


def samples(p: Plan) -> int:
    """Return the number of samples whose activations are in a rank's memory at once, or its share
    of them."""
    return p.head.batch * p.together // p.head.own_blocks


def by_token(p: Plan) -> list[tuple[Class, float]]:
    """Return the classes of activations, offloaded ones too, each with the bytes that a rank has of
    it for each token of these samples."""
    tokens = samples(p) * p.head.sequence
    found = [c for c in p.classes if c.targets == "all"]
    return [
        (c, c.bytes / tokens)
        for c in found
        if purpose(c) == ACTIVATIONS or c.name.startswith("far.")
    ]


def memory(p: Plan) -> list[tuple[str, int]]:
    """Return the bytes of a rank's arena by purpose, then those of its host and file arenas if
    any."""
    out = dict.fromkeys([*(title for title, _ in GROUPS), REST], 0)
    for c in p.classes:
        if (c.arena, c.targets) == ("device", "all"):
            out[purpose(c)] += c.bytes
    if p.hosted:
        out["the host arena"] = p.hosted
    if p.filed:
        out["the file arena"] = p.filed
    return [*out.items()]
