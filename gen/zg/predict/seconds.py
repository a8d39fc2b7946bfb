"""seconds.py -- predicts how long each command of a plan takes on a device.

A kernel takes its work at the rate of that kernel for a call of that size, and at least as long as
its operands take from memory at the rate of a copy, which reads and writes. An operand comes from
the cache if the function touched it a moment ago, with fewer bytes in between than the cache holds,
or if the whole arena fits into the cache. A collective takes its latency, the bytes of peers and of
other hosts at the bandwidth of each link, and a copy of the rank's own piece.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from ..facts import ops
from ..facts.commands import COLLECTIVES
from ..facts.kernels import WIDTHS, kernel, letters, spent, value
from ..facts.queues import QUEUES
from ..plan.operand import of_layer, whole
from ..plan.plan import Call, Fn, Plan, Step
from . import cost
from .device import Device, Link, Rates, class_of


@dataclass(frozen=True)
class Operand:
    """Bytes that a call moves through one operand. name: how the function names it."""

    name: str
    bytes: int


def operands(p: Plan, step: Step, call: Call) -> list[Operand]:
    """Return the operands of a call that lie in memory. One that is added to is read and
    written."""
    row = kernel(call.kernel)
    given = {i.name: i.value for i in step.ints}
    pairs = list(zip(row.formals, call.args, strict=True))
    said = ((f.name, given.get(str(a), a)) for f, a in pairs if f.number)
    numbers = {name: n for name, n in said if isinstance(n, int)}
    known = letters(numbers)
    found = []
    for f, a in pairs:
        if f.number or a == "null":
            continue
        width = WIDTHS.get(f.type) or {
            "real": ops.BYTES[p.head.real],
            "moments": ops.BYTES[p.recipe.moments],
        }.get(f.type)
        if width is None and f.type in numbers:  # f32 if the number is not 0
            width = 4 if numbers[f.type] else ops.BYTES[p.head.real]
        if width is None or f.elems == "" and (f.type == "i64" or "n" not in numbers):
            continue  # a table, the step's constants, or its few integer sums
        # one row for each token
        rows = "M" if f.elems.startswith("*") else ""
        elems = value(rows + f.elems if f.elems else "n", known)
        if (
            numbers.get(f.type) and "V" in numbers
        ):  # rows of tokens that occur are added to
            elems = 2 * min(numbers["M"], numbers["V"]) * numbers["C"]
        times = 2 if f.mode == "+" else numbers.get("count", 1) if a == "sources" else 1
        found.append(Operand(str(a), elems * width * times))
    return found


@dataclass(frozen=True)
class Work:
    """Work of a call: FLOPs of products and attention, bytes of other kernels. size: by which its
    rate is looked up, the same work, for attention of one head of a sample; bytes: those that it
    moves."""

    amount: int
    size: float
    bytes: int


def work(p: Plan, step: Step, call: Call, touched: list[Operand] | None = None) -> Work:
    """Return the work of a call in one round. touched: its operands, if they are known."""
    moved = sum(o.bytes for o in touched or operands(p, step, call))
    group = class_of(call.kernel)
    if group == "others":
        return Work(moved, moved, moved)
    flops = whole(of_layer(spent(call.kernel, call.args, 1), step.layer))
    heads = 1
    if group == "attention":
        at = kernel(call.kernel).at
        numbers = [call.args[at[name]] for name in ("B", "H")]
        heads = math.prod(n for n in numbers if isinstance(n, int))
    return Work(flops, flops / heads, moved)


@dataclass
class _Cache:
    """Bytes that a function has touched, and when it last touched each operand. warm: everything
    is in the cache from the start."""

    size: int
    warm: bool
    clock: int = 0
    last: dict[str, int] = field(default_factory=dict)

    def cold(self, touched: list[Operand]) -> float:
        """Return the share of a call's bytes that come from memory, and note the call."""
        missed = 0
        for o in touched:
            since = self.clock - self.last.get(o.name, -self.size)
            missed += o.bytes * (since >= self.size and not self.warm)
        total = sum(o.bytes for o in touched)
        self.clock += total
        self.last |= {o.name: self.clock for o in touched}
        return missed / total if total else 0.0


class Clock:
    """Times of a plan's commands on a device. threads: of a rank, where the device is a CPU; cores:
    that a rank may use there, a fraction if ranks outnumber cores."""

    def __init__(self, p: Plan, device: Device, threads: int = 0) -> None:
        self.p = p
        self.device = device
        # Ranks share a CPU's cores and cache; a GPU has its own.
        sharers = (p.head.local or p.head.ranks) if device.cores else 1
        self.cores = device.cores / sharers or 1.0
        self.cache = device.cache // sharers
        self.threads = threads or max(1, int(self.cores))
        real = p.head.real
        self.rates: Rates = device.rates_of(real, self.threads)
        self.one: Rates = device.rates_of(real, 1)
        self.fns: dict[str, Fn] = {f.name: f for f in p.fns}
        self.warm = p.arena(device.target) <= self.cache
        self._found: dict[tuple[object, ...], float] = {}

    def seconds(self, step: Step) -> float:
        """Return the seconds that a command takes if nothing else runs."""
        sizes = tuple((i.name, i.value) for i in step.ints if i.name != "l")
        key = (step.queue, step.op, step.group, step.layer, sizes)
        if key not in self._found:
            self._found[key] = max(self._seconds(step), self.device.launch)
        return self._found[key]

    def _seconds(self, step: Step) -> float:
        if step.op in COLLECTIVES:
            return self._collective(step)
        if step.op == "copy":
            return self._copy(step)
        return self._function(step) if step.op in self.fns else 0.0

    # ---- a function

    def _threads(self, queue: str) -> int:
        """Return the threads of a queue's kernels on a CPU, 1 on a GPU."""
        return self.threads if queue in ("main", "host") else 1

    def _function(self, step: Step) -> float:
        there = QUEUES[step.queue].reads == "host" and self.device.target != "cpu"
        threads, total = self._threads(step.queue), 0.0
        rates = self.rates if threads == self.threads else self.one
        memory = 2 * self.device.copy * threads  # bytes per second
        cache = _Cache(self.cache, self.warm)
        for call in self.fns[step.op].calls:
            touched = operands(self.p, step, call)
            todo, cold = work(self.p, step, call, touched), cache.cold(touched)
            if there:
                total += call.rounds * todo.bytes / self.device.update
                continue
            once = rates.seconds(call.kernel, todo.amount, todo.size, cold)
            if class_of(call.kernel) != "others":
                once = max(once, cold * todo.bytes / memory)
            total += call.rounds * max(once, self.device.launch)
        return total

    # ---- bytes

    def _collective(self, step: Step) -> float:
        """Return the seconds of a collective: the slower of its links, since they run beside each
        other, after its latency."""
        cpu, w = self.device.target == "cpu", cost.wire_of(self.p, step)
        hops = self._hops(step)
        ways = [self._own(step) / self.device.copy]
        latency = 0.0
        # A CPU's sums read the pieces of peers on the host where they lie.
        near = 0 if cpu and step.op == "alltoall" else w.bytes - w.far
        far = w.far * self._receivers(step)
        for link, moved in ((self.device.peers, near), (self.device.network, far)):
            if moved:
                ways.append(moved / link.bandwidth)
                latency = max(latency, link.latency + hops * link.hop)
        # A CPU's queue copies its own piece by itself, before or after its peers'.
        return latency + (sum(ways) if cpu else max(ways))

    def _hops(self, step: Step) -> float:
        """Return how many hops a collective's last byte takes after its first one: a ring's for
        each further rank; up and down a tree for the few bytes of an all-reduce; none for an
        all-to-all or an exchange, whose ranks send to each other at once."""
        ranks = self.p.group(step.group).ranks
        trees = {"alltoall": 0.0, "exchange": 0.0, "allreduce": 2 * math.log2(ranks)}
        return trees.get(step.op, ranks - 1)

    def _receivers(self, step: Step) -> int:
        """Return how many times a host receives the bytes that one of its ranks gets from other
        hosts. The ring of an NCCL all-gather enters a host once for each group, where all its ranks
        count the bytes. Pieces of an all-to-all differ by rank, and a reduce-scatter counts a
        rank's part of its ring."""
        local = self.p.head.local or self.p.head.ranks
        once = self.device.target != "cpu" and step.op in ("gather", "allreduce")
        return local // self.p.on_host(step.group) if once else local

    def _own(self, step: Step) -> int:
        """Return the bytes that a rank copies from its own memory to its own."""
        if step.op not in ("gather", "exchange"):
            return 0
        return next(i.value for i in step.ints if i.name == "bytes")

    def _copy(self, step: Step) -> float:
        (size,) = [i.value for i in step.ints if i.name == "bytes"]
        link = self.link(step)
        return (
            size / self.device.copy
            if link is None
            else link.latency + size / link.bandwidth
        )

    def link(self, step: Step) -> Link | None:
        """Return the link that a copy goes over, None within the device's memory."""
        row = QUEUES[step.queue]
        if row.reads == "file":
            return self.device.read
        if row.writes == "file":
            return self.device.write
        return self.device.host if "host" in (row.reads, row.writes) else None

    # ---- beside others

    def takes(self, step: Step) -> float:
        """Return the share of the device's arithmetic that a command of another queue occupies
        while it runs."""
        if step.op not in COLLECTIVES:
            return 0.0
        far = cost.far(self.p, step.group)
        return (self.device.network if far else self.device.peers).takes

    def demand(self, step: Step) -> int:
        """Return the threads that a command uses on a CPU: none while it waits for a disk, past the
        page cache, or for other hosts."""
        row = QUEUES[step.queue]
        apart = step.op in COLLECTIVES and cost.far(self.p, step.group)
        if "file" in (row.reads, row.writes) or apart:
            return 0
        return self._threads(step.queue)
