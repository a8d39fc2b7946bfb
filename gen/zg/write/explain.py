"""explain.py -- describes a plan for people: memory, bytes on the wire compared with the papers',
steps by queue."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..facts import ops, reserve
from ..facts.commands import COLLECTIVES
from ..facts.queues import QUEUES
from ..plan.plan import Flat, Plan, Store, having
from ..predict import cost
from .view import levels


def size(n: int) -> str:
    """Return bytes as an exact number and a rounded one."""
    for unit, scale in (
        ("TiB", 2**40),
        ("GiB", 2**30),
        ("MiB", 2**20),
        ("KiB", 2**10),
    ):
        if n >= scale:
            return f"{n:,} ({n / scale:.2f} {unit})"
    return f"{n:,}"


def counted(n: int, noun: str, end: str = "s") -> str:
    """Return a number of things, which are several unless it is 1."""
    return f"{n:,} {noun}{end * (n != 1)}"


def memory_line(p: Plan) -> str:
    """Return a line for --version: exact bytes of arenas, and an allowance for memory beside
    them."""
    arenas = ", ".join(f"{t} {p.arena(t)}" for t in p.head.targets)
    parts = ", ".join(f"{title} {n}" for title, n in cost.memory(p))
    beside = max(reserve.device(p, t) - p.arena(t) for t in p.head.targets)
    gpu = f"; beside it on a GPU about {beside}" if beside else ""
    return f"arena of a rank, bytes: {arenas}{gpu}; parts: {parts}"


def _targets(p: Plan) -> list[str]:
    """Return a table of the device memory that each target takes per rank."""

    def row(*texts: str) -> str:
        return "{:<8}{:>34}{:>28}{:>28}".format(*texts).rstrip()

    title = f"{p.head.spec}: device memory of each of {counted(p.head.ranks, 'rank')}"
    lines = [title, "", row("target", "arena", "beside it, about", "together")]
    for t in p.head.targets:
        arena, all_ = p.arena(t), reserve.device(p, t)
        more = (size(all_ - arena), size(all_)) if all_ > arena else ("", "")
        lines.append(row(t, size(arena), *more))
    return lines


def typed(p: Plan) -> str:
    """Return the rule of summation as a spec may write it."""
    if p.head.block >= p.head.micro_batches * p.head.ranks:
        return "tree"
    return "fold" if p.head.block == 1 else f"{{block: {p.head.block}}}"


def _sums(p: Plan, others: Sequence[tuple[str, Plan]]) -> list[str]:
    """Return a table of the memory and wire bytes of sums by this rule and by others."""
    lines = [
        "",
        f"{'sums of gradients':<28}{'their bytes':>30}{'received in a step':>28}",
    ]
    for text, made in ((f"as planned, {typed(p)}", p), *others):
        lines.append(
            f"{text:<28}{size(cost.sums(made)):>30}"
            f"{cost.training_wire(made).bytes:>28,}"
        )
    return [
        *lines,
        "another rule is another recipe: its weights have other bits",
    ]


def _tokens(p: Plan) -> list[str]:
    """Return a table of the bytes that a token takes in each class of activations."""
    rows, T, N = cost.by_token(p), p.head.sequence, p.head.context
    here = counted(cost.samples(p), "sample")
    shared = f", which {N} ranks share" if N > 1 else ""
    return [
        "",
        f"{cost.ACTIVATIONS:<30}{'bytes':>38}{'a token':>20}",
        *(f"{c.name:<30}{c.bytes:>38,}{each:>20,.1f}" for c, each in rows),
        f"a token: one of the {T:,} of {here}{shared}; slots are multiples of 4,096 bytes",
    ]


# Titles of parts of arenas, by arena and targets.
TITLES = {
    ("device", "all"): "the arena",
    ("host", "all"): "the host arena",
    ("file", "all"): "the file arena",
    ("device", "unshared"): "without shared memory",
    ("device", "gpu"): "on a GPU besides",
    ("host", "gpu"): "in a GPU's host arena",
}


def _part(p: Plan, kind: tuple[str, str], title: str) -> list[str]:
    """Return a table of the classes of a part of an arena, or nothing if no target has any."""
    classes = [c for c in p.classes if (c.arena, c.targets) == kind]
    if not classes or not any(kind[1] in having(t) for t in p.head.targets):
        return []
    rows = [
        f"{c.name:<23}{c.slots:>7}{c.stride:>18,}{c.bytes:>20,}{c.at:>20,}"
        for c in classes
    ]
    return [
        "",
        f"{title:<23}{'slots':>7}{'bytes a slot':>18}{'bytes':>20}{'at':>20}",
        *rows,
    ]


def memory(p: Plan, others: Sequence[tuple[str, Plan]] = ()) -> str:
    """Return the map of memory. others: the same plan with other rules of summation."""
    rest = cost.memory(p)
    if "cpu" in p.head.targets and p.head.ranks > 1:
        mpi = p.end("device", targets=("all", "unshared"))
        rest += [("arena of train-mpi", mpi)]
    if set(p.head.targets) - {"cpu"}:
        rest += [
            ("arena on a GPU", p.end("device")),
            ("its host arena", p.host),
            ("pinned for copies", reserve.BOUNCE),
        ]
    lines = _targets(p)
    for kind, title in TITLES.items():
        lines += _part(p, kind, title)
    lines += [
        "",
        *(f"{title:<18}{size(n):>40}" for title, n in rest),
        *_tokens(p),
        *_sums(p, others),
        "",
        "Arenas are exact. What else a rank holds is not in them:",
    ]
    if "cpu" in p.head.targets:
        lines += [
            "on a CPU its kernels' packing space, its threads' stacks, the program and its "
            "libraries:",
            "at most 16 MiB with one thread;",
        ]
    if set(p.head.targets) - {"cpu"}:
        lines += [
            "on a GPU its context, libraries and NCCL's buffers: an allowance, not measured "
            "(gen/zg/facts/reserve.py)."
        ]
    return "\n".join(lines) + "\n"


def rule(p: Plan) -> str:
    """Return the rule by which gradients are summed."""
    every = p.head.block >= p.head.micro_batches * p.head.ranks
    return (
        "tree"
        if every
        else "fold"
        if p.head.block == 1
        else f"trees of {p.head.block}, folded"
    )


def kept(p: Plan, f: Flat) -> str:
    """Return where a flat's parameters, states and sums are: whole, sharded, or shared within a
    group. For a shard in two places it names the states of the offloaded part."""

    def share(s: Store) -> str:
        if s.whole or p.parts(s) == 1:
            return "whole" if s.whole else "shard"
        return f"1/{p.group(s.over).ranks}"

    (params,) = p.stored("params", f.name)
    states = [
        s.what
        for s in p.stores
        if s.flat == f.name and s.what in ops.STATES and s.first + s.n == f.shard
    ]
    sums = next(map(share, p.stored("sum", f.name)), "none")
    kept = (s for s in p.stores if s.flat == f.name and s.what in states)
    owned = "whole" if p.head.zero == 0 else next(map(share, kept), "shard")
    return f"{share(params)}, {owned} ({' '.join(states) or 'none'}), {sums}"


LEGEND = (
    "unit: the embedding, a block or the head; leaf: the gradient of one micro-batch; shard: what "
    "one rank owns of a flat",
    "flat: the parameters of a unit in one buffer, an instance for each unit of the kind; "
    "persistent: what stage 3 keeps whole; W: ranks",
)


def _hosts(p: Plan) -> list[str]:
    """Return a table of the bytes sent between hosts, beside the formulas of other schemes."""
    h = p.head
    if h.local in (0, h.ranks):
        return []
    wide = max(len(name) for name, _ in cost.schemes(p))
    lines = [
        "",
        f"sent by each host of {h.local} rank{'s'[: h.local > 1]} to others in a training step "
        f"({h.ranks // h.local} hosts)",
        f"  {'here':<{wide}}{cost.sent_by_host(p):>20,} bytes",
    ]
    return lines + [f"  {name:<{wide}}{n:>20,.0f} bytes" for name, n in cost.schemes(p)]


def _received(w: cost.Wire) -> str:
    what = "collective " if w.messages == 1 else "collectives"
    return f"{w.messages:>8} {what}{w.bytes:>20,} bytes"


def _each(p: Plan) -> str:
    """Return the bytes that a token takes on a rank, and the classes that take most of them."""
    found = sorted(cost.by_token(p), key=lambda pair: -pair[1])
    most = ", ".join(f"{c.name} {each:,.0f}" for c, each in found[:4] if each >= 1)
    return f"{sum(each for _, each in found):,.0f} ({most})"


def collectives(p: Plan) -> Iterator[tuple[str, str, cost.Wire]]:
    """Yield each section and command with its collectives and their bytes."""
    for s in p.step:
        for op in COLLECTIVES:
            got = [cost.wire_of(p, x) for x in s.steps if x.op == op]
            if got:
                yield s.name, op, sum(got, cost.Wire(0, 0)).times(s.repeat)


def explain(p: Plan) -> str:
    """Return a description of a training step: layout, wire, flops and commands."""
    h, W = p.head, p.head.ranks
    w = cost.training_wire(p)
    order = {
        "ranks": "over the ranks, one micro-batch after the other",
        "local": "on each rank first, then once over the ranks",
    }.get(str(h.order)) or levels(p)
    added = rule(p) + (
        "; over ranks by NCCL, fast" if h.reduction == "fast" and W > 1 else ""
    )
    wide = max(10, *(len(f.name) + 1 for f in p.flats))
    many = f"; {p.several} go through a unit while it is gathered"
    lines = [
        f"{h.spec}: {h.params:,} parameters, ZeRO {h.zero}, {h.real}; ranks: {W}; micro-batches of "
        f"a rank and step: {h.micro_batches}, each of {h.shape}",
        f"leaves are summed {order} ({added}); units gathered ahead: {h.prefetch}; elements "
        f"gathered at once: at most {h.live:,} (bound {h.bound:,})",
        "units that stay gathered in a micro-batch from one use to the next: "
        f"{cost.staying(p)}{many if p.together > 1 else ''}",
        *LEGEND,
        "",
        f"{'flat':<{wide}}{'instances':>10}{'elements':>16}{'shard':>14}  "
        "kept: parameters, optimizer state, sums of gradients",
    ]
    for f in p.flats:
        lines.append(
            f"{f.name:<{wide}}{f.count:>10}{f.elems:>16,}{f.shard:>14,}  {kept(p, f)}"
        )
    if h.margin:
        each = reserve.blocks(reserve.kept(h))
        where = "on each of two queues" if p.axes else "to each of two communicators"
        whom = f"to NCCL, {each} {where}" if each else "unused"
        lines += ["", f"on a GPU GEMMs leave {h.margin} SMs {whom}"]
    if p.filed:
        read, written = cost.moved(p)
        lines += [
            "",
            f"the file of each rank: {size(p.filed)} bytes; in a training step "
            f"{read:,} are read and {written:,} written",
        ]
    lines += ["", "on the wire, received by each rank in a training step"]
    for name, op, got in collectives(p):
        lines.append(f"  {name:<12} {op:<13}{_received(got)}")
    paper, ideal = cost.paper(p), cost.ideal(p)
    others = cost.exchanged(p)
    here = (w.bytes - others) / ideal / h.micro_batches if ideal else 0.0
    lines += [
        f"  {'total':<26}{_received(w)}",
        f"  the ZeRO papers' {paper}P (W-1)/W for a micro-batch, P the bytes of the parameters: "
        f"{ideal:,.0f} bytes; here {here:.3f} times that"
        f"{', without exchanges' * bool(others)}"
        if ideal
        else "  one rank: nothing",
        *_hosts(p),
        "",
        f"flops of a step of all ranks: {cost.flops(p):.4g} (6 for each parameter and token, and "
        "causal attention)",
        f"flops of recomputation: {cost.again(p):.4g}",
        f"bytes of memory that a rank's update reads and writes: {cost.update(p):,}",
        f"bytes of activations on a rank for each token of a sample: {_each(p)}",
        "",
        "commands of each section by queue (xN: the section is run N times in a step)",
    ]
    arenas = {c.arena for c in p.classes if c.targets == "all"}
    queues = [q.name for q in QUEUES.values() if {q.reads, q.writes} <= arenas]
    for s in p.sections:
        by = {q: sum(x.queue == q for x in s.steps) for q in queues}
        lines.append(
            f"  {s.name:<12} x{s.repeat:<6}"
            + "".join(f"{q} {n:<8}" for q, n in by.items())
        )
    return "\n".join(lines) + "\n"
