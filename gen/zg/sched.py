"""sched.py -- pass 2: the flat list of steps: who gathers, computes, reduces and updates when.

A unit's functions run on queue `main`; gathers and reductions have queues of their own unless
overlap_comm is off. Events order the queues:
  full.F[s]   ring slot s of flat F holds a whole unit        free[0]    its last user is done
  grad.F[s]   leaf slot s holds a whole leaf                  done.F[s]  every owner has read it
  whole.F[l]  instance l of a flat kept whole is up to date   reduced[0] all sums are there
  new[0]      an owner has updated its part                   updated[0] all parts are updated
What lies in the host arena has queues and events of its own, and an update there goes on after
updated[0], beside the next step: offload.py.
A gather is issued just before the use that it runs beside, so the newest free[0] is of the use
before that.
"""
from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Mapping

from . import activations, layers, offload, ops, pieces, plan, rings
from .graph import Graph
from .operands import Operands
from .plan import Event, Int, Ref, Step
from .rings import Leaf, Use
from .shard import BLOCK, PAGE, Shards
from .spec import Spec


REDUCES = {"exact": "alltoall", "fast": "reducescatter"}


@dataclass(frozen=True)
class Schedule:
    """Sections, and how many slots the rings and leaves need."""
    sections: tuple[plan.Section, ...]
    ring: dict[str, int]
    leaf: dict[str, int]
    stage: dict[str, int]       # of parameters on their way from the host arena to a ring
    prefetch: int
    live: int
    tile: int                   # elements that an update on the host takes at a time; 0: none
    piece: int                  # of a leaf that go to the host's sum at a time; 0: it has none
    # (kind, body, number of its part) -> ins, outs
    formals: dict[tuple[str, str, int], tuple[tuple[str, ...], tuple[str, ...]]]


@dataclass
class _Maker(Operands):
    ahead: int = 0
    ring: dict[str, int] = field(default_factory=dict)
    stage: dict[str, int] = field(default_factory=dict)
    fetched: dict[str, int] = field(default_factory=dict)   # so far, to each ring's stage
    loaded: bool = False                                    # anything by queue fetch so far
    steps: list[Step] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.W, self.order = self.spec.cluster.ranks, self.shards.order
        self.offload = self.spec.zero.offload_optimizer.device != "none"
        self.hosts = self.offload or bool(self.shards.away or self.near)
        self.cuts: dict[tuple[int, str, int, int], list[tuple[int, int]]] = {}
        self.turn = 0           # of the slots in which leaves go down

    def away(self, f: plan.Flat) -> bool:
        """Its parameters do not lie on the device."""
        return f.name in self.shards.away

    def arena(self, c: str, f: plan.Flat) -> str:
        return offload.arena(self.spec, self.shards, c, f)

    def tiles(self, f: plan.Flat) -> list[tuple[int, int]]:
        """(offset, elements) of what an update on the host takes at a time; in the file its bytes
        are whole pages, of two bytes each, too."""
        filed = "nvme" in (self.spec.zero.offload_optimizer.device,
                           self.spec.zero.offload_param.device)
        cut = self.cut(f.shard - f.near, "sub_group_size", 1, PAGE // 2 if filed else BLOCK)
        return [(f.near + at, n) for at, n in cut]

    def add(self, queue: str, op: str, unit: str = "", **rest: tuple) -> None:
        self.steps.append(Step(queue, op, unit, **rest))

    def copy(self, queue: str, unit: str, src: Ref, dst: Ref, size: int,
             waits: tuple[Event, ...], recs: tuple[Event, ...], from_rank: int = 0,
             to_rank: int = 0) -> None:
        """Bytes from one arena to another. from_rank, to_rank: from one rank's part to the next
        where one side is whole."""
        ints = (Int("from_rank", from_rank), Int("to_rank", to_rank), Int("bytes", size))
        self.add(queue, "copy", unit, ins=(src,), outs=(dst,), ints=ints, waits=waits, recs=recs)

    def chain(self, head: str) -> list[Use]:
        """The uses of a grain in order: forward to the head (`train` or `eval`), then backward.
        Unit n reads value n-1 and writes value n; of class x the first slot is for the first value
        that backward needs."""
        units = [(kind, l) for kind in self.graph.kinds for l in range(kind.count)]
        parts = lambda n, body: [Use(*units[n], body, n - 1 - self.passing, part, s)
                                 for part in units[n][0].parts(body) for s in range(part.slices)]
        forward = [u for n, (kind, _) in enumerate(units)
                   for u in parts(n, "fwd" if "fwd" in kind.bodies else head)]
        if head == "eval":
            return forward
        return forward + [u for n in reversed(range(self.graph.still, len(units) - 1))
                          for u in parts(n, "bwd")]

    def bind(self, uses: list[Use]) -> list[Use]:
        """What is gathered for each use; what it writes of leaves."""
        leaves: dict[str, list[int]] = {}               # instances in order of their first use
        out = []
        for u in uses:
            flats = [f for f in self.reads(u.part) if self.flats[f].real == "shard"]
            if flats:
                u = replace(u, flat=flats[0], instance=self.instance(flats[0], u),
                            ring=self.ring_of[flats[0]])
            made = []
            for f in sorted(self.writes(u.part)):
                l, seen = self.instance(f, u), leaves.setdefault(f, [])
                seen += [l] * (l not in seen[-1:])
                made.append((f, l, len(seen) - 1))
            out.append(replace(u, leaves=tuple(made)))
        return out

    # ---- collectives, in pieces of at most a bucket

    def cut(self, shard: int, key: str, ranks: int, unit: int = BLOCK) -> list[tuple[int, int]]:
        """(offset, elements) of each piece of a shard."""
        asked = shard, key, ranks, unit
        if asked not in self.cuts:
            self.cuts[asked] = pieces.cut(self.spec, self.shards.flats, *asked)
        return self.cuts[asked]

    def gather(self, unit: str, flat: plan.Flat, src: Ref, dst: Ref, width: int,
               wait: tuple[Event, ...], rec: tuple[Event, ...], queue: str = "gather") -> None:
        """Whole units from shards; in place (src is dst) each rank's shard lies at r*step."""
        cut = self.cut(flat.shard, "allgather_bucket_size", self.W)
        step = flat.shard * width
        for n, (o, size) in enumerate(cut):
            ints = (Int("from_step", step if src == dst else 0), Int("step", step),
                    Int("bytes", size * width))
            self.add(queue, "gather", unit, ins=(replace(src, at=o * width),),
                     outs=(replace(dst, at=o * width),), ints=ints,
                     waits=wait if n == 0 else (), recs=rec if n == len(cut) - 1 else ())

    def reduce(self, fn: str, unit: str, flat: plan.Flat, src: Ref, dst: Ref, width: int,
               wait: tuple[Event, ...]) -> None:
        """All-to-all and a local sum of what came; or NCCL's sum, and what is left to add."""
        for n, (o, size) in enumerate(self.cut(flat.shard, "reduce_bucket_size", self.W)):
            self.bring(unit, flat, replace(src, at=o * width), size, width, wait if n == 0 else ())
            self.add("reduce", f"{fn}.{flat.name}", unit, outs=(replace(dst, at=o * 4),),
                     ints=(Int("n", size),))
            self.add("reduce", "done", unit)

    def bring(self, unit: str, flat: plan.Flat, src: Ref, size: int, width: int,
              wait: tuple[Event, ...]) -> None:
        """A piece of a shard from all ranks."""
        op = REDUCES["exact" if self.shards.sources == self.W else "fast"]
        kind = (Int("width", width),) if op == "reducescatter" else ()
        self.add("reduce", op, unit, ins=(src,), outs=(Ref("inbox", 0),),
                 ints=(Int("step", flat.shard * width), Int("bytes", size * width), *kind),
                 waits=wait)

    # ---- sections

    def batch(self) -> None:
        """The tokens of this rank's grains: g*W + r, or r*A + g where its own are summed first."""
        rank, grain = (1, self.W) if self.order == "ranks" else (self.spec.grains, 1)
        for g in range(self.together):
            number = Int("grain", g * grain, grain if self.together == 1 else 0)
            self.add("main", "batch", outs=(Ref("tokens", g), Ref("targets", g)),
                     ints=(Int("of_rank", rank), number))

    def wholes(self, u: Use) -> tuple[Event, ...]:
        """Events of the whole flats a forward use reads."""
        out = []
        for f in sorted(self.reads(u.part)):
            if (self.flats[f].real, self.flats[f].state) == ("whole", "shard"):
                out.append(Event(f"whole.{f}", u.index if self.flats[f].count > 1 else 0))
        return tuple(out) if u.body != "bwd" else ()

    def run(self, uses: list[Use]) -> None:
        """Grains, or an evaluation: gathers `ahead` uses early, functions, drops, reductions."""
        gathered = [u for u in uses if u.ring]
        turn = {id(u): i for i, u in enumerate(gathered)}
        first, last = self.leaf_span(uses)
        self.fetched.clear()
        self.loaded = False

        def fetch(i: int) -> None:
            u, flat = gathered[i], self.flats[gathered[i].flat]
            wait = ((Event("free", 0), Event("updated", 0)) if i == 0 else
                    (Event("free", 0),) if i > self.ahead else ())
            wait += offload.fresh(self, flat, u.instance) if u.body != "bwd" else ()
            src, rec = Ref(f"real.{flat.name}", u.instance), ()
            if self.away(flat) and not u.held:
                src, wait, rec = offload.fetch(self, u, flat, wait)
            if not u.held:
                self.gather(u.moved(*u.key), flat, src, Ref(f"ring.{u.ring}", u.slot), self.real,
                            wait, (Event(f"full.{u.ring}", u.slot), *rec))

        for i in range(min(self.ahead, len(gathered))):
            fetch(i)
        for n, u in enumerate(uses):
            if u.ring and turn[id(u)] + self.ahead < len(gathered):
                fetch(turn[id(u)] + self.ahead)
            new = u.ring and not u.held
            waits = self.wholes(u) + ((Event(f"full.{u.ring}", u.slot),) if new else ())
            begun = [x for x in u.leaves if first[x[:2]] == n]
            whole = [x for x in u.leaves if last[x[:2]] == n]
            if self.together > 1 and uses[-1].body != "eval":
                layers.use(self, u, waits, begun, whole)
            else:
                more, recs = activations.before(self, u)
                self.one(u, 0, waits + more, begun, whole, recs)
                activations.after(self, u)
                self.release(u)
                self.dead(u, 0)
                for x in whole:
                    self.leaf_done(u, x, 0)
        if uses[-1].body == "eval":
            self.after_eval(uses)

    def one(self, u: Use, g: int, waits: tuple[Event, ...], begun: list[Leaf],
            whole: list[Leaf], recs: tuple[Event, ...] = ()) -> None:
        """A function on a grain."""
        event = lambda what, leaf: Event(f"{what}.{self.leaves[leaf[0]]}",
                                         self.slot(leaf[0], leaf[2], g))
        ins, outs = self.operands(u, g)
        ints = (Int("at", u.slice * u.part.rows),) if u.part.slices > 1 else ()
        self.add("main", u.fn, u.unit, ins=ins, outs=outs, ints=ints,
                 waits=waits + tuple(event("done", x) for x in begun),
                 recs=(*recs, *(event("grad", x) for x in whole)))

    def leaf_span(self, uses: list[Use]) -> tuple[dict, dict]:
        """First and last use that writes each leaf."""
        first: dict[tuple[str, int], int] = {}
        last: dict[tuple[str, int], int] = {}
        for n, u in enumerate(uses):
            for f, l, _ in u.leaves:
                first.setdefault((f, l), n)
                last[f, l] = n
        return first, last

    def release(self, u: Use) -> None:
        if u.ring and not u.stays:
            self.drop_unit(u)

    def dead(self, u: Use, g: int) -> None:
        """What dies after a backward: what was saved, its output and dy; after the last its input
        and dx. And an input that no backward needs."""
        if not u.last:
            return
        ins, outs = self.operands(u, g)
        gone: tuple[Ref, ...] = ()
        if u.body == "bwd":
            saved = (self.saved(u, g),) if u.kind.saved else ()
            sums = [r for r in outs if r.cls == "acc"]
            gone = (*saved, self.value(u.y, g), self.change(u.y, g), *sums)
        last = self.graph.still and u.x == 0 and u.body in ("bwd", "train")
        if last or u.kind.x and u.x < 0:
            gone += (self.value(u.x, g), *[r for r in outs if r.cls == "dx" and last])
        for ref in gone:
            spent = Event(f"spent.{ref.cls[5:]}", ref.index)
            self.add("main", "drop", u.unit, outs=(ref,),
                     recs=(spent,) * ref.cls.startswith("near."))

    def drop_unit(self, u: Use) -> None:
        self.add("main", "drop", u.unit, outs=(Ref(f"ring.{u.ring}", u.slot),),
                 recs=(Event("free", 0),))

    def after_eval(self, uses: list[Use]) -> None:
        """What was saved, every input and what stays gathered die at the end: until the head an
        evaluation is a grain's forward, step by step."""
        used = {u.key for u in uses if u.held}
        for u in uses:
            if u.stays and u.key not in used:
                self.drop_unit(u)
            kept = [(f"save.{u.kind.name}", u.index)] if u.kind.saved else []
            for cls, n in (*kept, *([("x", u.x)] if u.x >= 0 else [])) if u.last else ():
                if not activations.goes(self, cls, n):
                    self.add("main", "drop", u.unit, outs=(self.placed(cls, n, 0),))

    def leaf_done(self, u: Use, x: Leaf, g: int) -> None:
        """A whole leaf: reduce it, or push it on this rank's own sums; then it is dead."""
        f, l, n = x
        s, unit = self.slot(f, n, g), u.moved(f, l)
        leaf, node = Ref(f"leaf.{self.leaves[f]}", s), Ref(f"sum.{f}", l)
        wait, read = (Event(f"grad.{self.leaves[f]}", s),), ()
        if self.shards.pushes:
            read = offload.lower(self, unit, self.flats[f], leaf, node, wait)
        elif self.order == "local":
            node = Ref("pend", 0) if self.shards.apart else node
            self.add("reduce", f"own.{f}", unit, ins=(leaf,), outs=(node,), waits=wait)
        else:
            self.reduce("sum", unit, self.flats[f], leaf, node, self.real, wait)
        self.add("reduce", "drop", unit, outs=(leaf,), waits=read,
                 recs=(Event(f"done.{self.leaves[f]}", s),))

    def each(self) -> list[tuple[plan.Flat, int]]:
        return [(f, l) for f in self.shards.flats for l in range(f.count)]

    def moved(self) -> list[tuple[plan.Flat, int]]:
        return [(f, l) for f, l in self.each() if f.moves]

    def update(self) -> None:
        if self.order == "local" and self.W > 1 and not self.shards.apart:
            for f, l in self.moved():
                ref = Ref(f"sum.{f.name}", l)
                self.reduce("join", f"{f.name}[{l}]", f, ref, ref, 4, ())
        if self.spec.zero.stage == 0 and self.W > 1:
            for f, l in self.moved():
                ref = Ref(f"sum.{f.name}", l)
                self.gather(f"{f.name}[{l}]", f, ref, ref, 4, (), (), "reduce")
        back = offload.measure(self) if self.shards.below else self.measure()
        self.add("main", "allreduce", "", ins=(Ref("sums", 0),), outs=(Ref("sums", 1),),
                 ints=(Int("count", ops.SUMS),), waits=back)
        self.add("main", "factor", "", ins=(Ref("sums", 1),), outs=(Ref("ctl", 0),),
                 recs=(Event("factor", 0),) if self.offload else ())
        if self.offload:
            offload.update(self)
        else:
            self.optimize(self.moved())
        self.add("main", "mark", waits=offload.ends(self, True), recs=(Event("updated", 0),))

    def measure(self) -> tuple[Event, ...]:
        self.add("reduce", "mark", recs=(Event("reduced", 0),))
        self.add("main", "mark", waits=(Event("reduced", 0),))
        self.norms("main")
        return ()

    def norms(self, queue: str) -> None:
        for f, l in self.moved():
            self.add(queue, f"norm.{f.name}", f"{f.name}[{l}]", ins=(Ref(f"sum.{f.name}", l),),
                     ints=(Int("l", l),))

    def optimize(self, what: list[tuple[plan.Flat, int]], near: str = "") -> None:
        """Shards on the device; near_: what of each stays there."""
        for f, l in what:
            op, ins, ints = f"{near}update.{f.name}", (Ref(f"sum.{f.name}", l),), (Int("l", l),)
            states = tuple(Ref(f"{c}.{f.name}", l) for c in self.states(f, near))
            if self.away(f):
                offload.renew(self, f, l, op, ins, states, ints)
                continue
            self.add("main", op, f"{f.name}[{l}]", ins=ins, ints=ints,
                     outs=(Ref(f"real.{f.name}", l), *states),
                     recs=(Event("near.new" if near else "new", 0),))
            if not near:
                self.spread(f, l)

    def states(self, f: plan.Flat, near: str) -> tuple[str, ...]:
        return offload.near_states(self.spec, self.shards, f) if near else f.states

    def spread(self, f: plan.Flat, l: int) -> None:
        """Owners' new parts to everybody, for what is kept whole; whole states need none."""
        if f.real == "whole" and f.state == "shard":
            ref = Ref(f"real.{f.name}", l)
            new = (Event("new", 0), *[Event("near.new", 0)] * (f.near > 0))
            self.gather(f"{f.name}[{l}]", f, ref, ref, self.real, new,
                        (Event(f"whole.{f.name}", l),))

    def init(self, what: list[tuple[plan.Flat, int]], near: str = "") -> None:
        for f, l in what:
            apart = f"{near}master" in self.states(f, near)
            master = f"{near}master" if apart else "real"
            self.add("main", f"{near}init.{f.name}", f"{f.name}[{l}]",
                     outs=(Ref(f"{master}.{f.name}", l),), ints=(Int("l", l),))

    def publish(self) -> None:
        for n in range(len(self.graph.tables)):
            self.add("main", f"turn.{n}", "", outs=(Ref(f"table.{n}", 0),))
        if self.offload:
            offload.publish(self)
        else:
            self.fill(self.each())
            for f, l in self.each():
                self.spread(f, l)
        self.add("main", "mark", waits=offload.ends(self), recs=(Event("updated", 0),))

    def fill(self, what: list[tuple[plan.Flat, int]], near: str = "") -> None:
        """Masters on the device to what is made from them."""
        for f, l in what:
            narrow = self.real < 4 and f"{near}master" in self.states(f, near)
            op, ins = f"{near}cast.{f.name}", (Ref(f"{near}master.{f.name}", l),)
            if self.away(f):
                offload.renew(self, f, l, *((op, ins) if narrow else ("mark", ())), (), ())
            elif narrow:
                self.add("main", op, f"{f.name}[{l}]", ins=ins, outs=(Ref(f"real.{f.name}", l),))
        self.add("main", "mark", recs=(Event("near.new" if near else "new", 0),))

    def section(self, name: str, repeat: int = 1) -> plan.Section:
        steps, self.steps = self.steps, []
        if not self.spec.zero.overlap_comm:
            steps = [self.alone(s) for s in steps]
            steps = [s for s in steps if s.op != "mark" or s.waits or s.recs]
        return plan.Section(name, repeat, tuple(steps))

    def alone(self, s: Step) -> Step:
        """The step where collectives have no queues of their own."""
        kept = lambda events: tuple(e for e in events if self.hosts and
                                    e.name.partition(".")[0] in offload.EVENTS)
        queue = "main" if s.queue in ("gather", "reduce") else s.queue
        return replace(s, queue=queue, waits=kept(s.waits), recs=kept(s.recs))


def schedule(spec: Spec, graph: Graph, shards: Shards, saves: Mapping[str, int]) -> Schedule:
    layers.few(spec, graph)
    m = _Maker(spec, graph, shards, ops.BYTES[spec.train.precision], saves)
    uses = m.bind(m.chain("train"))
    written = Counter(f for u in uses for f, _, _ in u.leaves)
    for f in shards.flats:
        late = written[f.name] > f.count or f.name == "keep"        # after the last use's grains
        m.leaf[f.name] = 2 if spec.zero.overlap_comm and f.count > 1 else \
            m.together if late else 1
    m.ahead, staying, live = rings.choose(spec, shards, uses)
    uses = rings.stay(uses, staying)
    taken = Counter(u.ring for u in uses if not u.held)     # in a grain: no use for more slots
    m.stage = {f: min(m.ahead + 1, taken[m.ring_of[f]]) for f in sorted(shards.away)}
    for f in shards.flats:
        m.ring[f.name] = rings.count(uses, f.name, m.ahead)
        m.leaf[f.name] *= f.moves and m.leaves[f.name] == f.name
    sections = []
    offload.init(m) if m.offload else m.init(m.each())
    sections.append(m.section("init"))
    m.publish()
    sections.append(m.section("publish"))
    m.add("main", "next", "", outs=(Ref("ctl", 0), Ref("sums", 0)))
    if m.offload:
        offload.begin(m)
    sections.append(m.section("begin"))
    m.batch()
    m.run(rings.slots(uses, m.ring))
    if m.together == 1:
        m.add(*(("host", "count") if shards.pushes else ("reduce", "count")),
              outs=(Ref("hctl" if shards.pushes else "ctl", 0),))
    sections.append(m.section("grain", spec.grains // m.together))
    m.update()
    sections.append(m.section("update"))
    m.run(rings.slots(rings.stay(m.bind(m.chain("eval")), staying), m.ring))
    sections.append(m.section("eval"))
    return Schedule(tuple(sections), m.ring, m.leaf, m.stage, m.ahead, live,
                    offload.tile(m) if m.offload else 0, offload.piece(m) if shards.below else 0,
                    m.formals)
