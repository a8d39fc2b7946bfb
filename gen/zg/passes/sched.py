"""sched.py -- pass 2: the flat list of steps: who gathers, computes, reduces and updates when.

A unit's functions run on queue `main`; gathers and reductions have queues of their own unless
overlap_comm is off: `reduce` brings a piece of leaves to a slot of class `inbox`, by turns, while
`sum` adds the one before. Slots of rings, leaves and inboxes are handed over from queue to queue by
their events: hops.py. What lies in the host arena has queues of its own, and an update there goes
on beside the next step: offload.py.
A gather is issued just before the use that it runs beside, so the newest free slot is of the use
before that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from ..facts import ops
from ..facts.commands import of_group
from ..facts.queues import QUEUES
from ..graph.graph import Graph
from ..plan import plan
from ..plan.plan import ALL, STEP, Events, Int, Ref, Step
from ..read.spec import Spec
from . import climb, device, last, offload, rings
from . import uses as uses_
from .flats import persists
from .hops import UPDATED, crossing, end, free, full, route
from .operands import Formals
from .rings import Gathered, Key, Use
from .shard import Shards
from .steps import SUMS, Steps
from .stores import Kept


@dataclass(frozen=True)
class Schedule:
    """Sections, and how many slots the rings and gradients need."""

    sections: tuple[plan.Section, ...]
    ring: dict[str, int]
    grad: dict[str, int]
    # of parameters on their way from the host arena to a ring
    staging: dict[str, int]
    prefetch: int
    live: int
    tile: int  # elements that the host works on at a time; 0: it does not
    piece: int  # of a leaf that go to the host's sum at a time; 0: it has none
    # (kind, body, number of its part) -> ins, outs
    formals: dict[tuple[str, str, int], Formals]


@dataclass
class _Maker(Steps):
    """The sections of a plan."""

    def batch(self) -> None:
        """The tokens of this rank's micro-batches, which are numbered as leaves are summed: what a
        level adds follows each other, as do the levels."""
        ranks, more = [], 1
        for level in self.sums.order.levels:
            if level == STEP:
                micro_batch = more
                more *= self.spec.micro_batches
            else:
                ranks.append(Int(of_group(level), more))
                more *= self.shards.grid.sizes[level]
        for g in range(self.together):
            number = Int(
                "micro_batch",
                g * micro_batch,
                micro_batch if self.together == 1 else 0,
            )
            self.add(
                "main",
                "batch",
                outs=tuple(Ref(name, g) for name in self.spec.batch),
                ints=(*ranks, number),
            )

    def wholes(self, u: Use) -> Events:
        """Events of the whole flats a forward use reads."""
        out = []
        for f in sorted(self.reads(u.part)):
            if self.spreads(self.flats[f]) and not self.flats[f].gathered:
                l = u.index if self.flats[f].count > 1 else 0
                out.append(full(Ref(f"param.{f}", l)))
        return tuple(out) if u.body != "bwd" else ()

    def fetch(self, u: Use, n: int) -> None:
        """All that is gathered for a use; n: its number among those for which anything is. Where
        parameters of one lie off the device, all do, so they come by the same queues."""
        for i, g in enumerate(g for g in u.gathered if not g.held):
            opens = n == 0 and i == 0  # the step before is over
            behind = (
                0 < n <= self.ahead or i > 0
            )  # the gather before waited for a slot
            self.bring(u, g, opens, behind)

    def bring(self, u: Use, g: Gathered, opens: bool, behind: bool) -> None:
        """Parameters to a slot of a ring, from where they lie."""
        flat = self.flats[g.flat]
        unit = u.moved(*g.key)
        if self.arena("param", flat) == "file" and not self.loaded:
            self.loaded = opens = True  # what came before was not here
        new = offload.fresh(self, flat, g.instance) if u.body != "bwd" else ()
        stops = offload.stops(self, g, flat)
        stops.append(("gather", g.ref))
        home = Ref(f"param.{flat.name}", g.instance)
        after = (UPDATED, *new) if opens else new
        *hops, gathers = route(home, stops, after)
        if behind:
            then = (full(gathers.dst),)
            gathers = replace(gathers, fills=False, then=then)
        for hop in hops:
            self.copy(hop, unit, flat.shard.bytes(self.real))
        self.descend(gathers, unit, flat, self.real, flat.depth, 0)

    def run(self, uses: list[Use]) -> None:
        """Micro-batches, or an evaluation: gathers `ahead` uses early, functions, reductions."""
        gathered = [u for u in uses if u.gathered]
        turn = {id(u): i for i, u in enumerate(gathered)}
        first, last = self.leaf_span(uses)
        turns = 1 if uses[-1].body == "eval" else self.together
        self.fetched.clear()
        self.loaded = False
        for i in range(min(self.ahead, len(gathered))):
            self.fetch(gathered[i], i)
        for n, u in enumerate(uses):
            if u.gathered and turn[id(u)] + self.ahead < len(gathered):
                i = turn[id(u)] + self.ahead
                self.fetch(gathered[i], i)
            come = [full(g.ref) for g in u.gathered if not g.held]
            waits = (*self.wholes(u), *come)
            begun = [x for x in u.leaves if first[x[:2]] == n]
            whole = [x for x in u.leaves if last[x[:2]] == n]
            uses_.use(self, u, turns, waits, begun, whole)
        left = [g.ref for u in uses for g in u.gathered if g.stays]
        if uses[-1].body == "eval" and left:
            self.add("main", "mark", recs=(free(left[0]),))

    def leaf_span(
        self, uses: list[Use]
    ) -> tuple[dict[Key, int], dict[Key, int]]:
        """First and last use that writes each leaf."""
        first: dict[Key, int] = {}
        last: dict[Key, int] = {}
        for n, u in enumerate(uses):
            for f, l, _ in u.leaves:
                first.setdefault((f, l), n)
                last[f, l] = n
        return first, last

    def update(self) -> None:
        climb.step_done(self)
        if self.sums.host:
            offload.measure(self)
        else:
            if self.sums.phases:
                self.follow("main", "reduce" if self.sums_spread else "sum")
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
        self.add(
            "main", "factor", "", ins=(Ref("sums", 1),), outs=(Ref("ctl", 0),)
        )
        if self.offload:
            offload.update(self)
        else:
            device.optimize(self, self.moved())
        self.updated(offload.updated(self))

    def updated(self, queues: list[str]) -> None:
        self.add(
            "main", "mark", waits=tuple(map(end, queues)), recs=(UPDATED,)
        )

    def publish(self) -> None:
        for n in range(len(self.graph.tables)):
            self.add("main", f"turn.{n}", "", outs=(Ref(f"table.{n}", 0),))
        here = self.low(False)
        if here:
            device.fill(self, here)
        for f, l in here:
            self.spread(f, l, end("main"))
        offload.publish(self)
        self.updated(offload.published(self))

    def section(self, name: str, repeat: int = 1) -> plan.Section:
        steps, self.steps, self.came = self.steps, [], 0
        if not self.spec.zero.overlap_comm:
            steps = [self.alone(s) for s in steps]
        return plan.Section(name, repeat, tuple(steps))

    def alone(self, s: Step) -> Step:
        """The step where collectives have no queues of their own."""
        return replace(s, queue="main") if QUEUES[s.queue].beside else s


def schedule(
    spec: Spec,
    graph: Graph,
    shards: Shards,
    kept: Kept,
    saves: Mapping[str, int],
) -> Schedule:
    uses_.few(spec, graph)
    m = _Maker(
        spec=spec,
        graph=graph,
        shards=shards,
        kept=kept,
        real=ops.BYTES[spec.train.precision],
        saves=saves,
    )
    uses = m.bind(m.chain("train"))
    written = Counter(f for u in uses for f, _, _ in u.leaves)
    for f in shards.flats:
        late = written[f.name] > f.count or persists(
            f.name
        )  # after the last use's micro-batches
        m.grad[f.name] = (
            2
            if spec.zero.overlap_comm and f.count > 1
            else m.together
            if late
            else 1
        )
    m.ahead, staying, live = rings.choose(spec, shards, uses)
    uses = rings.stay(uses, staying)
    taken = Counter(g.ring for u in uses for g in u.gathered if not g.held)
    # in a micro-batch there is no use for more slots
    m.staging = {
        f: min(m.ahead + 1, taken[m.ring_of[f]]) for f in sorted(shards.away)
    }
    for f in shards.flats:
        m.ring[f.name] = rings.count(uses, f.name, m.ahead)
        own = f.moves and m.leaves[f.name] == f.name
        m.grad[f.name] *= own and bool(m.sums.phases)
    sections = []
    device.init(m, m.low(False))
    offload.init(m)
    sections.append(m.section("init"))
    m.publish()
    sections.append(m.section("publish"))
    m.add("main", "next", "", outs=(Ref("ctl", 0), Ref("sums", 0)))
    if m.offload:
        offload.begin(m)
    sections.append(m.section("begin"))
    m.batch()
    m.run(rings.slots(uses, m.ring))
    if m.together == 1 and m.sums.phases:
        queue = "host" if m.sums.on_host else "sum"
        ctl = "hctl" if m.sums.on_host else "ctl"
        m.add(queue, "count", outs=(Ref(ctl, 0),))
    sections.append(m.section("micro_batch", spec.micro_batches // m.together))
    m.update()
    sections.append(m.section("update"))
    m.run(rings.slots(rings.stay(m.bind(m.chain("eval")), staying), m.ring))
    sections.append(m.section("eval"))
    return Schedule(
        sections=crossing(last.sections(sections)),
        ring=m.ring,
        grad=m.grad,
        staging=m.staging,
        prefetch=m.ahead,
        live=live,
        tile=offload.tile(m),
        piece=climb.piece(m) if m.sums.host else 0,
        formals=m.formals,
    )
