"""budget.py -- chooses recomputation and offloading if `train.memory_budget` bounds the device's
memory: of all choices that fit every target, the cheapest.

A choice is a set of ops to recompute and a set of knobs that offload something; keys that the spec
gives stay as they are. Its memory is exact: each set of knobs is planned, and recomputation changes
only saved values and temporary space. Its cost is an estimate of a step, good enough to sort
choices. A call takes its flops at the peak rate or its bytes at the memory's, whichever takes
longer. Copies to and from the host add the memory's time, and more if the link or the host's memory
is slower than all of that.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations

from .. import build
from ..facts import ops, reserve
from ..facts.peaks import PEAKS
from ..graph.graph import Graph
from ..passes import operands, place, slices
from ..plan import plan
from ..plan.operand import Layers, Names
from ..read.keytypes import RECOMPUTE
from ..read.spec import Spec, SpecError
from . import fits, knobs


@dataclass(frozen=True)
class Choice:
    """A choice that the budget may take.

    spec: the spec with it; moved: its knobs, which offload something; target: the one that needs
    the most memory; device: bytes there, including `beside`, the bytes outside the arena; host:
    bytes of the host arena; file: bytes of a rank's file; cost: time that it adds to a step of the
    spec as it is, as a fraction, on the target where that is largest.
    """

    spec: Spec
    moved: tuple[knobs.Setting, ...]
    target: str
    beside: int
    device: int
    host: int
    file: int
    cost: float

    @property
    def words(self) -> Names:
        return self.spec.train.recompute

    @property
    def name(self) -> str:
        return (
            "full"
            if set(self.words) == set(RECOMPUTE)
            else ", ".join(self.words) or "none"
        )

    @property
    def away(self) -> str:
        return ", ".join(move.moves for move in self.moved) or "none"

    @property
    def keys(self) -> Names:
        """The choice as the keys that a user would type."""
        words = self.name if self.name in ("full", "none") else f"[{self.name}]"
        return (
            f"train.recompute={words}",
            *(move.text for move in self.moved),
        )


@dataclass(frozen=True)
class Again:
    """A set of ops to recompute.

    once: target -> seconds of a micro-batch; tmp: bytes of temporary space; saved: for each kind of
    unit, the number of units and the bytes that each saves.
    """

    words: Names
    once: dict[str, float]
    tmp: int
    saved: tuple[tuple[int, int], ...]


def _seconds(spec: Spec, graph: Graph, target: str) -> float:
    """Return the estimated seconds of all functions of a micro-batch."""
    real, peaks = ops.BYTES[spec.train.precision], PEAKS[target]
    total = 0.0
    for kind, body in (
        (k, b) for k in graph.kinds for n, b in k.bodies.items() if n != "eval"
    ):
        size = {
            v.name: v.elems * (real if v.dtype == "real" else 4) for v in body.values
        }
        size |= {t.name: t.elems * real for t in kind.tensors}
        for c in body.calls:
            moved = sum(
                size.get(str(a), 0)
                for k, a in c.args
                if k in ("value", "param", "grad")
            )
            some = c.flops
            each = some.values if isinstance(some, Layers) else (some,)
            took = sum(peaks.seconds(n, moved, real) for n in each)
            total += kind.count // len(each) * took
    return total


def recomputed(spec: Spec, words: Names) -> Again:
    """Return a set of ops to recompute, with its times and bytes."""
    graph = slices.graph(replace(spec, train=replace(spec.train, recompute=words)))
    bodies = place.bodies(graph, ops.BYTES[spec.train.precision])
    return Again(
        words,
        {t: _seconds(spec, graph, t) for t in spec.targets},
        ops.up(max(p.size for p in bodies.tmp.values()), place.PAGE),
        tuple((k.count, bodies.save[k.name].size) for k in graph.kinds),
    )


def _sets(spec: Spec) -> Iterator[Again]:
    """Yield every set of ops that includes those the spec names, these alone first."""
    named = spec.train.recompute
    free = [w for w in RECOMPUTE if w in slices.graph(spec).ops and w not in named]
    for n in range(len(free) + 1):
        for more in combinations(free, n):
            words = (
                RECOMPUTE
                if n == len(free)
                else tuple(w for w in RECOMPUTE if w in named or w in more)
            )
            yield recomputed(spec, words if more else named)


def near(spec: Spec, again: Again) -> int:
    """Return the bytes of the device arena that depend on the set of ops."""
    return again.tmp + spec.together * sum(
        operands.near_slots(spec, "save", count) * ops.up(size, place.PAGE)
        for count, size in again.saved
    )


def _far(spec: Spec, again: Again, page: int) -> int:
    """Return the bytes of saved values on the host, each rounded up to whole pages."""
    return sum(
        (count - operands.near_slots(spec, "save", count)) * ops.up(size, page)
        for count, size in again.saved
    )


@dataclass(frozen=True)
class HostTraffic:
    """Bytes that a section copies down and up, and elements that the host adds to its sums."""

    down: int
    up: int
    pushed: int


def _way(section: plan.Section) -> HostTraffic:
    moved = {"down": 0, "up": 0}
    pushed = 0
    for s in section.steps:
        ints = {i.name: i.value for i in s.ints}
        if s.queue in moved:
            moved[s.queue] += ints.get("bytes", 0)
        elif s.queue == "host" and s.op.startswith("push"):
            pushed += ints.get("n", 0)
    return HostTraffic(moved["down"], moved["up"], pushed)


def _updated(p: plan.Plan) -> tuple[int, int]:
    """Return the bytes that an update reads and writes of a rank's shards, on the device and on the
    host."""
    here = there = 0
    for f in (f for f in p.flats if p.moves(f)):
        states = [s for s in p.stores if s.flat == f.name and s.what in ops.STATES]
        size = f.count * (
            4 + 2 * sum(ops.BYTES[s.dtype] for s in states if s.first + s.n == f.shard)
        )
        near = p.near(f) if p.offload else f.shard
        here += size * near
        there += size * (f.shard - near)
    return here, there


def _step(
    spec: Spec,
    p: plan.Plan,
    of: dict[str, HostTraffic],
    target: str,
    once: float,
    more: int,
) -> float:
    """Return the estimated seconds of a step.

    p: the spec's plan; of: its sections; once: seconds of a micro-batch's functions; more: bytes
    that go to the host and back in a micro-batch beyond those of the plan. An update counts in
    full, though the next forward may hide some of it.
    """
    peaks, total = PEAKS[target], 0.0
    here, there = _updated(p)
    for name, busy in (
        ("micro_batch", once * spec.together),
        ("update", here / peaks.memory),
    ):
        ways = [
            n + more * (name == "micro_batch") for n in (of[name].down, of[name].up)
        ]
        work = there if name == "update" else 12 * of[name].pushed
        total += p.section(name).repeat * max(
            busy + sum(ways) / peaks.memory,
            max(ways) / peaks.link,
            work / peaks.host,
        )
    return total


def choices(spec: Spec) -> tuple[Choice, ...]:
    """Return the choices on the Pareto front: each needs less device memory than every cheaper one,
    and fits the host and the file.

    Raises SpecError if no set of knobs can be planned or none fits.
    """
    every: list[Again] = []
    ways = [knobs.Way(spec), *knobs.ways(spec, knobs.moving(spec))]
    found: list[Choice] = []
    wrong: list[SpecError] = []
    now: dict[str, float] = {}
    for way, built in knobs.planned(ways, build.build, wrong):
        made, p = way.spec, built.plan
        every, needs = every or list(_sets(built.spec)), fits.needs(p)
        device = needs["device"] - near(made, every[0])
        host = needs["host"] - _far(made, every[0], place.PAGE)
        of = {s.name: _way(s) for s in p.step}
        target = reserve.neediest(p)
        beside = needs["device"] - p.arena(target)
        for again in every:
            more = _far(made, again, 1) - _far(made, every[0], 1)
            took = {t: _step(made, p, of, t, again.once[t], more) for t in spec.targets}
            now = now or took
            chosen = replace(made, train=replace(made.train, recompute=again.words))
            found.append(
                Choice(
                    spec=chosen,
                    moved=way.picked,
                    target=target,
                    beside=beside,
                    device=device + near(made, again),
                    host=host + _far(made, again, place.PAGE),
                    file=needs["file"],
                    cost=max(took[t] / now[t] - 1 for t in spec.targets),
                )
            )
    if not found:  # the spec itself is at fault, and no offloading helps
        raise wrong[0]
    for memory in ("host", "file"):
        found = _held(spec, memory, found)
    out: list[Choice] = []
    for c in sorted(found, key=lambda c: (c.cost, c.device, len(c.words))):
        if not out or c.device < out[-1].device:
            out.append(c)
    return tuple(out)


def _held(spec: Spec, memory: str, found: list[Choice]) -> list[Choice]:
    """Return the choices that fit one memory of the cluster ("host" or "file").

    Raises SpecError if none does.
    """
    limit = getattr(spec.cluster.memory, memory)
    needs = [getattr(c, memory) for c in found]
    held = [
        c
        for c, need in zip(found, needs, strict=True)
        if limit is None or need <= limit
    ]
    if not held:
        raise spec.wrong(
            f"cluster.memory.{memory}",
            f"no plan's {memory} arena fits in {fits.size(limit)}",
            fits.least(min(needs)),
            fits.unit(limit),
        )
    return held


def choose(spec: Spec, limit: int, found: tuple[Choice, ...]) -> Choice:
    """Return the cheapest choice that fits the budget `limit` and the cluster's device. If none
    fits the device, return the smallest one if it is within the budget.

    Raises SpecError if none is within the budget.
    """
    there = spec.cluster.memory.device
    most = limit if there is None else min(limit, there)
    for c in found:
        if c.device <= most:
            return c
    if found[-1].device <= limit:
        return found[-1]
    least = found[-1]
    more = fits.other_bits(spec, lambda s: choices(s)[-1].device <= limit)
    beside = (
        f", about {fits.size(least.beside)} of it outside the arena"
        if least.beside
        else ""
    )
    raise spec.wrong(
        "train.memory_budget",
        f"no plan fits in {fits.size(limit)}{needy(spec, least)}; the smallest one, "
        "with the other keys of the spec unchanged, has "
        f"{' '.join(least.keys)}",
        f"{fits.least(least.device)}{beside}{more}",
        fits.unit(limit),
    )


def needy(spec: Spec, c: Choice) -> str:
    """Return a phrase that names the target of a choice's bytes, "" if there is only one target."""
    several = len(spec.targets) > 1
    return f" on target {c.target}, which needs the most" if several else ""


def table(spec: Spec, found: tuple[Choice, ...], chosen: Choice) -> str:
    """Format the choices as a table for people."""
    lines = [
        f"train.memory_budget {spec.train.memory_budget:,}: estimated extra time, device memory"
        f"{needy(spec, chosen)}, host memory, what is offloaded, what is recomputed",
        f"  {'time':>8}{'device memory':>22}{'host arena':>22}  offloaded; train.recompute",
    ]
    for c in found:
        mark = "*" if c == chosen else " "
        lines.append(
            f"{mark} {100 * c.cost:>7.2f}%{c.device:>22,}{c.host:>22,}  {c.away}; "
            f"{c.name}"
        )
    return "\n".join(lines) + "\n"
