"""explain.py -- a plan for people: memory, bytes on the wire beside the papers', steps by queue."""
from __future__ import annotations

from typing import Sequence

from . import cost, ops, reserve
from .plan import Plan


def size(n: int) -> str:
    """Bytes, exact, and a rounded form."""
    for unit, scale in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if n >= scale:
            return f"{n:,} ({n / scale:.2f} {unit})"
    return f"{n:,}"


def memory_line(p: Plan) -> str:
    """One line for --version: exact, but for what is said to lie beside an arena."""
    arenas = ", ".join(f"{t} {p.arena(t)}" for t in p.head.targets)
    parts = ", ".join(f"{title} {n}" for title, n in cost.memory(p))
    beside = max(reserve.bytes_of(t, p.head.ranks) for t in p.head.targets)
    gpu = f"; beside it on a GPU about {beside}" if beside else ""
    return f"arena of a rank, bytes: {arenas}{gpu}; parts: {parts}"


def _targets(p: Plan) -> list[str]:
    """What each takes of a rank's device."""
    lines = [f"{p.head.spec}: device memory of each of {p.head.ranks} ranks", "",
             f"{'target':<8}{'arena':>34}{'beside it, about':>28}{'together':>28}"]
    for t in p.head.targets:
        beside = reserve.bytes_of(t, p.head.ranks)
        more = (size(beside), size(p.arena(t) + beside)) if beside else ("", "")
        lines.append(f"{t:<8}{size(p.arena(t)):>34}{more[0]:>28}{more[1]:>28}".rstrip())
    return lines


def _rule(p: Plan) -> str:
    """Of summation, as the spec may name it."""
    if p.head.block >= p.head.grains * p.head.ranks:
        return "tree"
    return "fold" if p.head.block == 1 else f"{{block: {p.head.block}}}"


def _sums(p: Plan, others: Sequence[tuple[str, Plan]]) -> list[str]:
    """What sums of gradients take by this rule, and by others."""
    lines = ["", f"{'sums of gradients':<28}{'their bytes':>30}{'received in a step':>28}"]
    for text, made in ((f"as planned, {_rule(p)}", p), *others):
        held = sum(c.slots * c.stride for c in made.classes
                   if c.name.startswith("sum.") or c.name == "pend")
        lines.append(f"{text:<28}{size(held):>30}{cost.training_wire(made).bytes:>28,}")
    return [*lines, "another rule is another recipe: its weights have other bits"]


def memory(p: Plan, others: Sequence[tuple[str, Plan]] = ()) -> str:
    """The map, class by class. others: the same plan by other rules of summation."""
    arenas = {"the arena": ("shared", "private", "scratch")}
    arenas |= {"the host arena": ("hosted",)} if p.end("hosted") else {}
    arenas |= {"the file arena": ("filed",)} if p.filed else {}
    rest = cost.memory(p)
    if set(p.head.targets) - {"cpu"}:
        arenas |= {"on a GPU besides": ("gpu",), "in a GPU's host arena": ("host",)}
        rest += [("arena on a GPU", p.end("gpu")), ("its host arena", p.host)]
    lines = _targets(p)
    for title, kinds in arenas.items():
        lines += ["", f"{title:<23}{'slots':>7}{'bytes a slot':>18}{'bytes':>20}{'at':>20}"]
        lines += [f"{c.name:<23}{c.slots:>7}{c.stride:>18,}{c.slots * c.stride:>20,}{c.at:>20,}"
                  for c in p.classes if c.kind in kinds]
    lines += ["", *(f"{title:<18}{size(n):>40}" for title, n in rest), *_sums(p, others), "",
              "Arenas are exact. What else a rank holds is not in them:"]
    if "cpu" in p.head.targets:
        lines += ["on a CPU its kernels' packing space, its threads' stacks, the program and its "
                  "libraries:", "at most 16 MiB with one thread;"]
    if set(p.head.targets) - {"cpu"}:
        lines += ["on a GPU its context, libraries and NCCL's buffers: an allowance, not measured "
                  "(gen/zg/reserve.py)."]
    return "\n".join(lines) + "\n"


def rule(p: Plan) -> str:
    """How leaves are summed."""
    every = p.head.block >= p.head.grains * p.head.ranks
    return "tree" if every else "fold" if p.head.block == 1 else f"trees of {p.head.block}, folded"


def explain(p: Plan) -> str:
    """What happens in a step, and what it moves."""
    h, W = p.head, p.head.ranks
    w = cost.training_wire(p)
    width = ops.BYTES[h.real]
    share = (W - 1) / W
    order = {"ranks": "over ranks first, grain by grain",
             "local": "on each rank first, once over ranks"}[h.order]
    added = rule(p) + ("; over ranks by NCCL, fast" if h.reduction == "fast" and W > 1 else "")
    many = f"; all {p.together} grains go through a unit while it is gathered"
    lines = [f"{h.spec}: {h.params:,} parameters, ZeRO {h.zero}, {W} ranks, {h.grains} micro-"
             f"batches (grains) a rank and step of {h.batch} x {h.sequence} tokens, {h.real}",
             f"leaves are summed {order} ({added}); prefetch {h.prefetch} units; at most "
             f"{h.live:,} elements gathered at once (bound {h.bound:,})",
             f"{cost.staying(p)} units of a grain stay gathered from one use to the next"
             f"{many if p.together > 1 else ''}", "",
             f"{'flat':<10}{'instances':>10}{'elements':>16}{'shard':>14}  "
             "kept: parameters, state, sums"]
    for f in p.flats:
        lines.append(f"{f.name:<10}{f.count:>10}{f.elems:>16,}{f.shard:>14,}  "
                     f"{f.real}, {f.state} ({' '.join(f.states) or 'none'}), {f.sum}")
    if p.filed:
        read, written = cost.moved(p)
        lines += ["", f"the file of each rank: {size(p.filed)} bytes; in a training step "
                  f"{read:,} are read and {written:,} written"]
    lines += ["", "on the wire, received by each rank in a training step"]
    for s in p.step:
        for op in ("gather", "alltoall", "reducescatter", "allreduce"):
            got = [cost.wire_of(x, W) for x in s.steps if x.op == op]
            if got:
                moved = sum(x.bytes for x in got) * s.repeat
                lines.append(f"  {s.name:<8}{op:<13}{len(got) * s.repeat:>8} collectives"
                             f"{moved:>20,} bytes")
    paper = {0: 2, 1: 2, 2: 2, 3: 3}[h.zero]
    ideal = paper * h.params * width * share            # of a micro-batch
    lines += [f"  {'total':<21}{w.messages:>8} collectives{w.bytes:>20,} bytes",
              f"  the papers' {paper}P (W-1)/W of one micro-batch: {ideal:,.0f} bytes; here, a "
              f"micro-batch, {w.bytes / ideal / h.grains:.3f} of it" if ideal else
              "  one rank: nothing", "",
              f"flops in a global step: {cost.flops(p):.4g} (6 a parameter and token, "
              "and causal attention)",
              f"flops that backward spends on making values again: {cost.again(p):.4g}", "",
              "steps by queue"]
    queues = ("main", "gather", "reduce", *(("down", "host", "up") if p.end("hosted") else ()),
              *(("load", "store", "fetch") if p.filed else ()))
    for s in p.sections:
        by = {q: sum(x.queue == q for x in s.steps) for q in queues}
        lines.append(f"  {s.name:<9}x{s.repeat:<6}" + "".join(f"{q} {n:<8}" for q, n in by.items()))
    return "\n".join(lines) + "\n"
