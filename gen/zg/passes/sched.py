"""sched.py -- pass 2: schedules the steps of all queues: all-gathers, functions, reductions,
updates.

Functions of units run on queue `main`. Collectives have queues of their own if overlap_comm is on:
`gather` prefetches parameters, `reduce` brings a piece of gradients to a slot of class `inbox`
while `sum` adds the previous one. Queues hand slots over by events (hops.py). Offloaded buffers
have queues of their own, and an update on the host runs beside the next step (offload.py).

The all-gather for a later use is issued just before a unit runs, so the newest slot that it may
take is the one that the previous unit released.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from ..facts import ops
from ..facts.commands import of_group
from ..facts.queues import QUEUES
from ..graph.graph import Graph
from ..plan import plan
from ..plan.plan import ALL, BLOCKS, STEP, Events, Int, Ref, Step
from ..read.spec import Spec
from . import climb, device, last, offload, rings
from . import uses as uses_
from .flats import persists
from .hops import UPDATED, crossing, end, free, full, route
from .operands import Formals
from .place import Bodies
from .rings import Gathered, Key, Use
from .shard import Shards
from .steps import SUMS, Steps
from .stores import Kept


@dataclass(frozen=True)
class Schedule:
    """The sections, and the numbers of slots that the steps use. prefetch: the distance in uses;
    live: most gathered elements."""

    sections: tuple[plan.Section, ...]
    ring: dict[str, int]
    grad: dict[str, int]
    # slots for offloaded shards on their way to a ring
    staging: dict[str, int]
    prefetch: int
    live: int
    tile: int  # elements of the host's largest tile, 0 if it updates nothing
    piece: int  # elements of the largest gradient piece to the host's sum, 0 if none
    # by (kind, body, number of its part)
    formals: dict[tuple[str, str, int], Formals]


@dataclass
class _SectionBuilder(Steps):
    """Builds the sections of a plan."""

    def batch(self) -> None:
        """Fetch this rank's micro-batches. They are numbered in the order of the sum's levels, so
        that all layouts sum the same tree."""
        order, blocks = self.sums.order, self.sums.blocks
        own = {BLOCKS: blocks, STEP: self.sums.turns}
        step = order.steps({**self.shards.grid.sizes, **own})
        ranks = [Int(of_group(level), step[level]) for level in order.groups]
        at_once = self.spec.micro_batches == self.together > 1
        section = 0 if at_once else step[STEP] * (self.together // blocks)
        for g in range(self.together):
            sample, block = divmod(g, blocks)
            at = sample * step[STEP] + block * step.get(BLOCKS, 0)
            number = Int("micro_batch", at, section)
            self.add(
                "main",
                "batch",
                outs=tuple(Ref(name, g) for name in self.spec.batch),
                ints=(*ranks, number),
            )

    def param_events(self, u: Use) -> Events:
        """Return the events that parameters of a forward use are updated and all-gathered, for
        flats that every rank keeps whole."""
        out = []
        for f in sorted(self.reads(u.part)):
            if self.gathers_updates(self.flats[f]) and not self.flats[f].gathered:
                l = u.index if self.flats[f].count > 1 else 0
                out.append(full(Ref(f"param.{f}", l)))
        return tuple(out) if u.body != "bwd" else ()

    def gather_use(self, u: Use, n: int) -> None:
        """Gather all flats of a use that are not reused. n: its number among the uses that gather.
        If one of its flats is offloaded, all are, so they come by the same queues."""
        for i, g in enumerate(g for g in u.gathered if not g.reused):
            opening = n == 0 and i == 0  # waits for the last update
            # An earlier gather already waited for `free.ring`.
            slot_is_free = 0 < n <= self.ahead or i > 0
            self.gather_one(u, g, opening, slot_is_free)

    def gather_one(
        self, u: Use, g: Gathered, opening: bool, slot_is_free: bool
    ) -> None:
        """Gather a flat instance to its ring slot, by way of the host or the file if it is
        offloaded."""
        flat = self.flats[g.flat]
        unit = u.transfer_unit(*g.key)
        if self.arena("param", flat) == "file" and not self.fetch_started:
            # The first gather on queue `fetch`: earlier ones were from elsewhere.
            self.fetch_started = opening = True
        new = offload.updated_event(self, flat, g.instance) if u.body != "bwd" else ()
        hops_up = offload.hops_up(self, g, flat)
        hops_up.append(("gather", g.ref))
        home = Ref(f"param.{flat.name}", g.instance)
        after = (UPDATED, *new) if opening else new
        *hops, gathers = route(home, hops_up, after)
        if slot_is_free:
            then = (full(gathers.dst),)
            gathers = replace(gathers, fills=False, then=then)
        for hop in hops:
            self.copy(hop, unit, flat.shard.bytes(self.real))
        self.all_gather(gathers, unit, flat, self.real, flat.depth, 0)

    def run(self, uses: list[Use]) -> None:
        """Add the steps of a micro-batch or an evaluation. All-gathers are issued `ahead` uses
        early."""
        gathered = [u for u in uses if u.gathered]
        turn = {id(u): i for i, u in enumerate(gathered)}
        first, last = self.gradient_writers(uses)
        micro_batches = self.together
        if uses[-1].body == "eval":
            micro_batches = self.spec.own_blocks
        self.staging_turn.clear()
        self.fetch_started = False
        for i in range(min(self.ahead, len(gathered))):
            self.gather_use(gathered[i], i)
        for n, u in enumerate(uses):
            if u.gathered and turn[id(u)] + self.ahead < len(gathered):
                i = turn[id(u)] + self.ahead
                self.gather_use(gathered[i], i)
            come = [full(g.ref) for g in u.gathered if not g.reused]
            waits = (*self.param_events(u), *come)
            first_writes = [x for x in u.gradients if first[x[:2]] == n]
            complete = [x for x in u.gradients if last[x[:2]] == n]
            uses_.use(self, u, micro_batches, waits, first_writes, complete)
        left = [g.ref for u in uses for g in u.gathered if g.retained]
        if uses[-1].body == "eval" and left:
            self.add("main", "mark", recs=(free(left[0]),))

    def gradient_writers(
        self, uses: list[Use]
    ) -> tuple[dict[Key, int], dict[Key, int]]:
        """Return the indices of the first and the last use that writes each gradient."""
        first: dict[Key, int] = {}
        last: dict[Key, int] = {}
        for n, u in enumerate(uses):
            for f, l, _ in u.gradients:
                first.setdefault((f, l), n)
                last[f, l] = n
        return first, last

    def update(self) -> None:
        """Add the steps of an update: remaining reductions, norm, clipping factor, optimizer."""
        climb.step_done(self)
        if self.sums.host:
            offload.norms_on_host(self)
        else:
            if self.sums.phases:
                self.follow("main", "reduce" if self.gathers_sums else "sum")
            self.norms("main")
        self.add(
            "main",
            "allreduce",
            "",
            ins=(Ref("sums", 0),),
            outs=(Ref("sums", 1),),
            ints=(Int("count", SUMS),),
            group=ALL,
        )
        self.add("main", "factor", "", ins=(Ref("sums", 1),), outs=(Ref("ctl", 0),))
        if self.offload:
            offload.update(self)
        else:
            device.update(self, self.trainable_instances())
        self.updated(offload.update_queues(self))

    def updated(self, queues: list[str]) -> None:
        """Record UPDATED once the given queues are done."""
        self.add("main", "mark", waits=tuple(map(end, queues)), recs=(UPDATED,))

    def publish(self) -> None:
        """Add the steps that compute rotary tables, and parameters from master weights."""
        for n in range(len(self.graph.tables)):
            self.add("main", f"turn.{n}", "", outs=(Ref(f"table.{n}", 0),))
        here = self.masters_off_device(False)
        if here:
            device.publish(self, here)
        for f, l in here:
            self.gather_updated(f, l, end("main"))
        offload.publish(self)
        self.updated(offload.publish_queues(self))

    def section(self, name: str, repeat: int = 1) -> plan.Section:
        """Return the steps so far as a section and start a new one."""
        steps, self.steps, self.inbox_turn = self.steps, [], 0
        if not self.spec.zero.overlap_comm:
            steps = [self.without_overlap(s) for s in steps]
        return plan.Section(name, repeat, tuple(steps))

    def without_overlap(self, s: Step) -> Step:
        """Move a step of a collective's queue to `main`."""
        return replace(s, queue="main") if QUEUES[s.queue].beside else s


def schedule(
    spec: Spec,
    graph: Graph,
    shards: Shards,
    kept: Kept,
    bodies: Bodies,
) -> Schedule:
    """Return the schedule of a spec. Raises SpecError if the plan would have too many lines or
    pieces."""
    uses_.few(spec, graph)
    m = _SectionBuilder(
        spec=spec,
        graph=graph,
        shards=shards,
        kept=kept,
        real=ops.BYTES[spec.train.precision],
        places=bodies,
    )
    uses = m.bind(m.uses("train"))
    written = Counter(f for u in uses for f, _, _ in u.gradients)
    for f in shards.flats:
        # These gradients are reduced after all micro-batches of the last use.
        deferred = written[f.name] > f.count or persists(f.name)
        # Two, so that one can be sent. The sum of blocks has two slots of its own.
        slots = (
            2 if m.sums.blocks == 1 and spec.zero.overlap_comm and f.count > 1 else 1
        )
        if not deferred:
            slots *= m.sums.blocks
        elif slots == 1 or spec.train.sequence_blocks > 1:
            slots *= m.together
        cls = m.grad_class[f.name]
        m.grad[cls] = max(slots, m.grad.get(cls, 0))
    m.ahead, retained, live = rings.choose(spec, shards, uses)
    uses = rings.retain(uses, retained)
    taken = Counter(g.ring for u in uses for g in u.gathered if not g.reused)
    # More slots than gathers of a micro-batch would stay unused.
    m.staging = {
        f: min(m.ahead + 1, taken[m.ring_of[f]]) for f in sorted(shards.offloaded)
    }
    for f in shards.flats:
        m.ring[f.name] = rings.slot_count(uses, f.name, m.ahead)
        own = f.trainable and m.grad_class[f.name] == f.name
        m.grad[f.name] = m.grad[f.name] if own and m.sums.phases else 0
    sections = []
    device.init(m, m.masters_off_device(False))
    offload.init(m)
    sections.append(m.section("init"))
    m.publish()
    sections.append(m.section("publish"))
    m.add("main", "next", "", outs=(Ref("ctl", 0), Ref("sums", 0)))
    if m.offload:
        offload.prefetch_tiles(m)
    sections.append(m.section("begin"))
    m.batch()
    m.run(rings.assign_slots(uses, m.ring))
    if m.together == m.sums.blocks and m.sums.phases:
        queue = "host" if m.sums.on_host else "sum"
        ctl = "hctl" if m.sums.on_host else "ctl"
        m.add(queue, "count", outs=(Ref(ctl, 0),))
    elif m.sums.phases and spec.micro_batches > m.together:
        m.add("sum", "counted", outs=(Ref("ctl", 0),))
    sections.append(m.section("micro_batch", spec.micro_batches // m.together))
    m.update()
    sections.append(m.section("update"))
    m.run(rings.assign_slots(rings.retain(m.bind(m.uses("eval")), retained), m.ring))
    sections.append(m.section("eval"))
    return Schedule(
        sections=crossing(last.sections(sections)),
        ring=m.ring,
        grad=m.grad,
        staging=m.staging,
        prefetch=m.ahead,
        live=live,
        tile=offload.largest_tile(m),
        piece=climb.largest_piece(m) if m.sums.host else 0,
        formals=m.formals,
    )
