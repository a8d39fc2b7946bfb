"""check_steps.py -- plays a plan's steps on symbols: what every slot holds, what may be done to it.

A slot's `held` says what is in it: tag -> bytes. Parameters are (flat, instance, update, offset) in
a ring and ("spread", update, offset) in a whole copy; values are ("x" | "s" | "dx", unit, grain); a
leaf holds the (unit, grain) that wrote it.
"""
from __future__ import annotations

from .check_fns import Facts
from .check_order import Clock, Order, Slot, cover
from .plan import Flat, Plan, Ref, Step

UNITS = ("fwd", "bwd", "train", "eval")
Key = tuple[str, int]           # a flat and its instance


def unit_of(text: str) -> tuple[str, int]:
    """`block[3]` -> (block, 3)."""
    name, _, index = text.partition("[")
    return name, int(index[:-1]) if index else 0


class Player(Order):
    def __init__(self, p: Plan, facts: Facts) -> None:
        super().__init__(p)
        self.facts = facts
        self.flats = {f.name: f for f in p.flats}
        self.fns = {f.name: f for f in p.fns}
        self.sources = self.W if p.head.reduction == "exact" else 1     # that an owner sums
        self.order = [s.unit for s in p.section("eval").steps if s.op.split(".")[0] in UNITS]
        self.writers = self._writers()
        self.version: dict[Key, int] = {}                   # updates; 0: never filled
        self.drawn: set[Key] = set()                        # masters that have initial values
        self.live: dict[Key, tuple[str, Clock | None]] = {}     # ring slots: flat, its release
        self.kept = sum(f.shard * self.W for f in p.flats if f.name == "keep")
        self.most = self.kept                               # elements whole at once
        self.pending: tuple[Ref, int, str] | None = None    # all-to-all: from, bytes, summed?
        self.grain, self.local, self.grains, self.applied = 0, 0, 0, 0
        self.played: list[tuple[str, int]] = []
        self.counted = 0                                    # grains in the leaves' count
        self.begin()

    def begin(self) -> None:
        """A training step's own books. grain: so many ever; local: of this step's `grains`."""
        self.pushed: dict[Key, list[tuple[int, int, int]]] = {}     # (leaf, offset, elements)
        self.joined: dict[Key, list[tuple[int, int]]] = {}          # (offset, bytes) over ranks
        self.counted *= self.p.below                        # the host's: until constants come
        self.read: dict[Key, list[tuple[int, int, int]]] = {}       # what went to the host, alike
        self.applied += 1                                   # training steps begun
        self.stepped: dict[Key, list[tuple[int, int]]] = {}         # tiles updated on the host
        self.risen: dict[Key, list[tuple[int, int]]] = {}           # tiles whose parameters are up
        self.normed: set[Key] = set()
        self.updated: set[Key] = set()
        self.stage = ""                                     # clear, norms, reduced, factor

    # ---- what the plan should do, from its flats and functions

    def home(self, kind: str) -> str:
        return kind if kind in self.flats else "embed"

    def instance(self, flat: str, index: int) -> int:
        return index if self.flats[flat].count > 1 else 0

    def _writers(self) -> dict[Key, set[str]]:
        """The units whose backward writes each leaf."""
        out: dict[Key, set[str]] = {(f.name, l): set() for f in self.p.flats
                                    for l in range(f.count)}
        for unit in self.order:
            kind, index = unit_of(unit)
            fn = self.fns.get(f"bwd.{kind}") or self.fns[f"train.{kind}"]
            if "dw" in fn.outs:
                out[self.home(kind), self.instance(self.home(kind), index)].add(unit)
            if "dp" in fn.outs:
                out["keep", 0].add(unit)
        return out

    def flat_in(self, ref: Ref, unit: str) -> str:
        """The flat whose leaf or sum a step of this unit means: units of one size share a class."""
        cls, _, name = ref.cls.partition(".")
        return self.home(unit_of(unit)[0]) if cls == "leaf" and name != "keep" else name

    def flat_of(self, s: Step) -> Key:
        """The flat that a step's function and unit name."""
        name, index = unit_of(s.unit)
        if s.op.partition(".")[2] != name or not 0 <= index < self.flats[name].count:
            self.fail("function of another flat")
        return name, index

    def order_is(self, order: str) -> None:
        if self.p.head.order != order:
            self.fail(f"leaves are summed {self.p.head.order} first")

    def do(self, s: Step) -> None:
        names = {"copy": "from_rank to_rank bytes", "gather": "from_step step bytes",
                 "alltoall": "step bytes", "allreduce": "count",
                 "reducescatter": "step bytes width", "batch": "of_rank grain"}
        kind = s.op.split(".")[0]
        fn = self.fns.get(s.op)
        if fn and (len(fn.ins) != len(s.ins) or len(fn.outs) != len(s.outs)):
            self.fail("has other operands than its function")
        if fn and s.queue in ("gather", "up", "down"):
            self.fail("the queue runs no kernels")
        want = list(fn.ints) if fn else names.get(kind, "").split()
        grow = {i.name for i in s.ints if i.per}
        if [i.name for i in s.ints] != want or not grow <= {"grain"}:
            self.fail("has other numbers than it should")
        self.ints = {i.name: i.value + i.per * self.local for i in s.ints}
        getattr(self, f"do_{kind}", self.other)(s)

    def other(self, s: Step) -> None:
        self.fail("no such step")

    def do_mark(self, s: Step) -> None:
        if s.ins or s.outs or not (s.waits or s.recs):
            self.fail("marks nothing")

    # ---- gathers

    def do_gather(self, s: Step) -> None:
        src, dst, size, step = s.ins[0], s.outs[0], self.ints["bytes"], self.ints["step"]
        what, _, name = src.cls.partition(".")
        flat = self.flats[name if what != "stage" else self.home(unit_of(s.unit)[0])]
        width = 4 if what == "sum" else self.real
        if step != flat.shard * width or src.at != dst.at or size <= 0 or src.at + size > step:
            self.fail("piece lies outside the shard")
        self.common(src)
        if src == dst:
            self.spread(s, what, flat, width)
        else:
            self.fetch(s, what, flat)

    def away(self, flat: Flat) -> bool:
        """Its parameters lie in the host arena."""
        return self.classes[f"real.{flat.name}"].kind == "hosted"

    def spread(self, s: Step, what: str, flat: Flat, width: int) -> None:
        """In place: everybody's part of a whole copy."""
        src, key = s.ins[0], (flat.name, s.ins[0].index)
        if self.ints["from_step"] != self.ints["step"] or unit_of(s.unit) != key:
            self.fail("in place, but not from the rank's own part")
        if {"real": flat.real, "sum": flat.sum}.get(what) != "whole":
            self.fail(f"{src} is no whole copy")
        if what == "sum":
            self.summed(key)
        elif key not in self.version:
            self.fail(f"{src} was never filled")
        slot = self.whole(Ref(src.cls, src.index), True)
        version = self.version[key] if what == "real" else 0
        if any(t[:2] != ("spread", version) for t in slot.held):
            self.fail(f"{src} would mix {sorted(slot.held)[:1]} with update {version}")
        if ("spread", version, src.at) in slot.held:
            self.fail(f"{src} is spread twice")
        slot.held["spread", version, src.at] = self.ints["bytes"]

    def is_spread(self, key: Key, what: str, width: int) -> bool:
        """Every rank's part of a whole copy is there, as of the last update."""
        version = self.version.get(key, 0) if what == "real" else 0
        held = self.slots.setdefault((f"{what}.{key[0]}", key[1]), Slot()).held
        parts = [(t[2], n) for t, n in held.items() if t[:2] == ("spread", version)]
        return cover(parts, self.flats[key[0]].shard * width)

    def fetch(self, s: Step, what: str, flat: Flat) -> None:
        """A piece of a whole unit, for a ring slot."""
        src, dst = s.ins[0], s.outs[0]
        source = "stage" if self.away(flat) else "real"
        if (what, dst.cls.partition(".")[0]) != (source, "ring") or \
                flat.real != "shard" or self.ints["from_step"]:
            self.fail("gathers from or to the wrong class")
        kind, index = unit_of(s.unit)
        instance = self.instance(flat.name, index)
        now = (flat.name, instance, self.version.get((flat.name, instance), 0))
        if s.unit not in self.order or self.home(kind) != flat.name or \
                (src.index != instance if what == "real" else
                 self.slots.setdefault((src.cls, src.index), Slot()).held != {now: 1}):
            self.fail(f"gathers {src} for {s.unit}")
        self.touch(src.cls, src.index, src.at, src.at + self.ints["bytes"], False)
        key = (dst.cls, dst.index)
        slot = self.slots.setdefault(key, Slot())
        if src.at == 0:
            if slot.held:
                self.fail(f"{dst} still holds {next(iter(slot.held))[:2]}")
            self.live[key] = (flat.name, None)
            self.bound()
        tag = (*now, src.at)
        if tag in slot.held or any(t[:3] != tag[:3] for t in slot.held):
            self.fail(f"{dst} would mix {tag[:3]} with what it holds")
        self.strided(dst, self.ints["step"], self.ints["bytes"], True)
        slot.held[tag] = self.ints["bytes"]

    def bound(self) -> None:
        """Elements gathered at once: slots whose release does not come before this gather."""
        total = self.kept
        for key, (name, freed) in list(self.live.items()):
            if freed is not None and freed.get("main", 0) <= self.clock.get("main", 0):
                del self.live[key]
            else:
                total += self.flats[name].shard * self.W
        self.most = max(self.most, total)
        if total > self.p.head.live:
            self.fail(f"{total} elements gathered at once, {self.p.head.live} were promised")

    # ---- sums

    def do_reducescatter(self, s: Step) -> None:
        """NCCL's sum of what all ranks send: numbers of what the source holds."""
        if self.ints["width"] != (4 if s.ins[0].cls.startswith("sum.") else self.real):
            self.fail("sums numbers of another width")
        self.do_alltoall(s)

    def do_alltoall(self, s: Step) -> None:
        src = s.ins[0]
        if (s.op == "alltoall") != (self.sources == self.W):
            self.fail(f"reduces in another way than {self.p.head.reduction}")
        what, name = src.cls.partition(".")[0], self.flat_in(src, s.unit)
        width = 4 if what == "sum" else self.real
        if self.pending is not None:
            self.fail("the last all-to-all is not done")
        if what not in ("leaf", "sum") or self.ints["step"] != self.flats[name].shard * width or \
                self.ints["bytes"] <= 0 or src.at + self.ints["bytes"] > self.ints["step"]:
            self.fail("piece lies outside the shard")
        if s.outs != (Ref("inbox", 0),):
            self.fail("what comes has another place")
        self.common(src)
        self.strided(src, self.ints["step"], self.ints["bytes"], False)
        self.touch("inbox", 0, 0, self.sources * self.ints["bytes"], True)
        if what == "leaf":
            self.complete(s, src)
        self.pending, self.peers = (src, self.ints["bytes"], ""), (src.cls, src.index)

    def brought(self, s: Step) -> tuple[Ref, int]:
        """What the last all-to-all brings, not yet summed."""
        queue = "reduce" if self.p.head.overlap else "main"
        if not self.pending or self.pending[2] or s.queue != queue:
            self.fail("nothing came")
        self.touch("inbox", 0, 0, self.sources * self.pending[1], False)
        return self.pending[:2]

    def complete(self, s: Step, leaf: Ref) -> Key:
        """The leaf holds every writer's part of this grain for the instance the unit stands for."""
        name = self.flat_in(leaf, s.unit)
        held = self.slots.setdefault((leaf.cls, leaf.index), Slot()).held
        instance = self.instance(name, unit_of(s.unit)[1])
        want = {(u, self.grain) for u in self.writers[name, instance]}
        if set(held) != want:
            self.fail(f"{leaf} should hold {sorted(want)}, holds {sorted(held)[:3]}")
        return name, instance

    def leaf(self, s: Step) -> int:
        """The grain of this step whose leaves are pushed: what ctl has counted."""
        self.fixed(s)
        if self.counted != self.local:
            self.fail(f"{self.counted} grains are counted in grain {self.local}")
        return self.counted

    def do_sum(self, s: Step) -> None:
        dst, (src, size) = s.outs[0], self.brought(s)
        n, lo, name = self.ints["n"], self.leaf(s) * self.sources, self.flat_in(src, s.unit)
        into = (s.op, dst.cls, dst.index)
        if not src.cls.startswith("leaf.") or size != n * self.real or \
                src.at * 4 != dst.at * self.real or \
                into != (f"sum.{name}", f"sum.{name}", self.instance(name, unit_of(s.unit)[1])):
            self.fail("sums something else than what came")
        self.order_is("ranks")
        self.part_of_sum(dst, n)
        self.pushed.setdefault((name, dst.index), []).append((lo, dst.at // 4, n))

    def part_of_sum(self, dst: Ref, n: int) -> None:
        """An owner's part of a sum: its own range of a whole buffer or all of a shard, and pending
        nodes."""
        if n <= 0 or dst.at + 4 * n > self.flats[dst.cls.partition(".")[2]].shard * 4:
            self.fail(f"{dst} ends outside the shard")
        self.touch(dst.cls, dst.index, dst.at, dst.at + 4 * n, True).held.clear()
        self.pending = (*self.pending[:2], "summed") if self.pending else None

    def do_join(self, s: Step) -> None:
        dst, (src, size) = s.outs[0], self.brought(s)
        key = self.flat_of(s)
        if src != dst or size != self.ints["n"] * 4 or \
                (dst.cls, dst.index) != (f"sum.{key[0]}", key[1]):
            self.fail("joins something else than what came")
        self.order_is("local")
        self.all_pushed(key, self.flats[key[0]].shard * self.W)
        self.peers = None               # a rank writes its own part alone, which no peer reads
        self.part_of_sum(dst, self.ints["n"])
        self.peers = (dst.cls, dst.index)
        self.joined.setdefault(key, []).append((dst.at, size))

    def do_done(self, s: Step) -> None:
        if not self.pending or self.pending[2] != "summed":
            self.fail("nothing was summed")
        src, size = self.pending[:2]
        width = 4 if src.cls.startswith("sum") else self.real
        self.strided(src, self.flats[self.flat_in(src, s.unit)].shard * width, size, False)
        self.pending = self.peers = None

    def do_own(self, s: Step) -> None:
        leaf, dst = s.ins[0], s.outs[0]
        self.whole(leaf, False)
        key = self.complete(s, leaf)
        into = (s.op, dst.cls, dst.index)
        if into != (f"own.{key[0]}", f"sum.{key[0]}", key[1]):
            self.fail(f"pushes a leaf on {dst}")
        self.order_is("local")
        self.whole(dst, True).held.clear()
        whole = self.flats[key[0]].shard * self.W
        self.pushed.setdefault(key, []).append((self.leaf(s), 0, whole))

    def all_pushed(self, key: Key, want: int) -> None:
        """Every grain's leaf was pushed once, whole."""
        step = self.sources if self.p.head.order == "ranks" and not self.p.below else 1
        by_leaf: dict[int, list[tuple[int, int]]] = {a * step: [] for a in range(self.grains)}
        for lo, at, n in self.pushed.get(key, []):
            by_leaf[lo].append((at, n))
        if not all(cover(parts, want) for parts in by_leaf.values()):
            self.fail(f"not every grain of {key[0]}[{key[1]}] is in the sum")

    def summed(self, key: Key) -> None:
        """An owner has its part of the sum of the step."""
        shard, local = self.flats[key[0]].shard, self.p.head.order == "local"
        self.all_pushed(key, shard * self.W if local else shard)
        if local and self.W > 1 and not cover(self.joined.get(key, []), shard * 4):
            self.fail(f"{key[0]}[{key[1]}] is not joined over ranks")

    # ---- functions of units

    def parameters(self, ref: Ref, kind: str, index: int) -> None:
        """The operand w or p holds the unit's parameters, up to date."""
        where, _, name = ref.cls.partition(".")
        want = "keep" if name == "keep" else self.home(kind)
        flat, instance = self.flats[want], self.instance(want, index)
        key = (want, instance)
        at = index * self.facts.steps.get(kind, 0) * self.real if want == "keep" else 0
        slot = self.whole(Ref(ref.cls, ref.index), False)
        if where != ("ring" if flat.real == "shard" else "real") or ref.at != at or \
                (where == "real" and (name, ref.index) != key):
            self.fail(f"reads {ref} for {kind}[{index}]")
        if key not in self.version:
            self.fail(f"{want}[{instance}] was never filled")
        if where == "ring":
            if {t[:3] for t in slot.held} != {(*key, self.version[key])}:
                self.fail(f"{ref} holds {sorted(slot.held)[:1]}, not {(*key, self.version[key])}")
            if not cover([(t[3], n) for t, n in slot.held.items()], flat.shard * self.real):
                self.fail(f"{ref} is not gathered whole")
        elif flat.state == "shard" and not self.is_spread(key, "real", self.real):
            self.fail(f"{ref} is not up to date on every rank")

    def expect(self, ref: Ref, tag: tuple) -> None:
        slot = self.whole(ref, False)
        if tag not in slot.held:
            self.fail(f"{ref} should hold {tag}, holds {sorted(slot.held)[:2]}")

    def put(self, ref: Ref, tag: tuple, more: bool = False) -> None:
        slot = self.whole(ref, True)
        if slot.held and not more:
            self.fail(f"{ref} is overwritten while it holds {sorted(slot.held)[:2]}")
        if tag in slot.held:
            self.fail(f"{ref} gets {tag} twice")
        slot.held[tag] = 1

    def unit(self, s: Step) -> None:
        kind, index = unit_of(s.unit)
        body, g = s.op.split(".")[0], self.grain
        if s.op != f"{body}.{kind}" or s.unit not in self.order:
            self.fail("function of another unit")
        if body in ("train", "eval") and self.stage == "" and self.section == "grain":
            self.fail("the sums are not cleared")
        self.fixed(s)
        at = self.order.index(s.unit)
        last = self.order[at - 1] if at else ""
        ahead = self.order[at + 1] if at + 1 < len(self.order) else ""
        tags = {"x": ("x", last, g), "y": ("x", s.unit, g), "s": ("s", s.unit, g)}
        for name, ref in zip(self.fns[s.op].ins, s.ins):
            if name in ("w", "p"):
                self.parameters(ref, kind, index)
            else:
                self.expect(ref, {**tags, "dy": ("dx", ahead, g)}[name])
        for name, ref in zip(self.fns[s.op].outs, s.outs):
            if name in ("dw", "dp"):
                self.gradient(name, ref, kind, index)
            else:
                self.put(ref, {**tags, "dx": ("dx", s.unit, g)}[name])
        self.played.append((body, at))

    do_fwd = do_bwd = do_train = do_eval = unit

    def gradient(self, name: str, ref: Ref, kind: str, index: int) -> None:
        """A leaf gets a unit's part."""
        keep = name == "dp"
        at = index * self.facts.steps.get(kind, 0) * self.real if keep else 0
        if not ref.cls.startswith("leaf.") or (ref.cls == "leaf.keep") != keep or ref.at != at:
            self.fail(f"writes {ref}")
        flat = self.flats["keep" if keep else self.home(kind)]
        if self.classes[ref.cls].stride < flat.shard * self.W * self.real:
            self.fail(f"{ref} does not hold a leaf of {flat.name}")
        self.put(Ref(ref.cls, ref.index), (self.step.unit, self.grain), True)

    def fixed(self, s: Step) -> None:
        """Classes that a function names itself: temporary space and the like."""
        fn = self.fns[s.op]
        names = {a.split("+")[0] for c in fn.calls for a in c.args} - {*fn.ins, *fn.outs}
        for name in sorted(names & set(self.classes)):
            read = name in ("tokens", "targets", "ctl", "hctl") or name.startswith("table")
            slot = self.whole(Ref(name, 0), not read)
            if name.startswith("table") and not slot.held:
                self.fail(f"{name} was never filled")
            if name in ("tokens", "targets") and self.section != "eval":
                self.expect(Ref(name, 0), ("batch", self.grain))

    def do_batch(self, s: Step) -> None:
        """The rank's tokens: of grain g*W + r, or r*A + g where own grains are summed first."""
        W, A = self.W, self.p.head.grains
        want = (1, W) if self.p.head.order == "ranks" else (A, 1)
        if (self.ints["of_rank"], s.ints[1].per, s.ints[1].value) != (*want, 0):
            self.fail("reads another grain")
        if s.outs != (Ref("tokens", 0), Ref("targets", 0)):
            self.fail("fills another class")
        for ref in s.outs:
            slot = self.whole(ref, True)
            slot.held.clear()
            slot.held[("batch", self.grain)] = 1

    def do_drop(self, s: Step) -> None:
        ref = s.outs[0]
        slot = self.whole(ref, True)
        if not slot.held:
            self.fail(f"{ref} holds nothing")
        if ref.cls.split(".")[0] not in ("ring", "x", "dx", "save", "leaf"):
            self.fail(f"{ref} outlives a grain")
        self.reduced_before(ref)
        slot.held.clear()
        if ref.cls.startswith("ring"):
            self.live[ref.cls, ref.index] = (self.live[ref.cls, ref.index][0], dict(self.clock))

    def reduced_before(self, ref: Ref) -> None:
        """A leaf dies only when all of it was summed."""
        if not ref.cls.startswith("leaf"):
            return
        name = self.flat_in(ref, self.step.unit)
        key = (name, self.instance(name, unit_of(self.step.unit)[1]))
        self.complete(self.step, ref)
        ranks = self.p.head.order == "ranks"
        lo = self.local * (self.sources if ranks else 1)
        lo, done = (self.local, self.read) if self.p.below else (lo, self.pushed)
        parts = [(at, n) for l, at, n in done.get(key, []) if l == lo]
        if not cover(parts, self.flats[name].shard * (1 if ranks else self.W)):
            self.fail(f"{ref} dies before all of {key[0]}[{key[1]}] is summed once")
