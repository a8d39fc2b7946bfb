"""check.py -- the verifier: proves of a Plan what the passes promise, and shares no code with them.

It plays the plan (start, two training steps, an evaluation, a third step) on symbols. What it proves:
 order     any two conflicting accesses are ordered by queue order and wait/record (vector clocks)
 content   every read sees the unit, the grain and the update it expects; nothing dead is read, nothing
           alive is overwritten
 sums      every leaf is complete when it is reduced, and reduced exactly once; every shard is summed,
           measured and updated exactly once a step, after the factor is known
 memory    classes do not overlap; gathered elements stay within the bound
What one rank's plan proves holds across ranks: a gather is complete when every peer has read this
rank's piece, and so is `done`, so a peer's read lies inside this rank's own step.
"""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Iterable

from .plan import Flat, Plan, Ref, Step

Clock = dict[str, int]
UNITS = ("fwd", "bwd", "train", "eval")
GRAINS = 3                      # grains played of a section that repeats more often


class CheckError(Exception):
    """What is wrong, with the section and the step."""


@dataclass
class _Access:
    lo: int
    hi: int
    write: bool
    queue: str
    at: int                     # number of the step on its queue


@dataclass
class _Slot:
    """What is known of a slot: recent accesses, and what it holds: tag -> bytes."""
    accesses: list[_Access] = field(default_factory=list)
    held: dict[tuple, int] = field(default_factory=dict)


def _unit(text: str) -> tuple[str, int]:
    name, _, index = text.partition("[")
    return name, int(index[:-1]) if index else 0


class _Player:
    def __init__(self, p: Plan) -> None:
        self.p, self.W = p, p.head.ranks
        self.real = 4 if p.head.real == "f32" else 2
        self.flats = {f.name: f for f in p.flats}
        self.classes = {c.name: c for c in p.classes}
        self.fns = {f.name: f for f in p.fns}
        self.slots: dict[tuple[str, int], _Slot] = {}
        self.clock: dict[str, Clock] = {"main": {}, "gather": {}, "reduce": {}}
        self.count: dict[str, int] = {}
        self.events: dict[tuple[str, int], Clock] = {}
        self.version: dict[tuple[str, int], int] = {}
        self.pushed: dict[tuple[str, int], list[tuple[int, int, int]]] = {}
        self.joined: dict[tuple[str, int], int] = {}
        self.live: dict[tuple[str, int], tuple[str, Clock | None]] = {}
        self.pending: tuple[Ref, int, str] | None = None
        self.stage = ""                             # of the update: norms, reduced, factor
        self.normed: set[tuple[str, int]] = set()
        self.updated: set[tuple[str, int]] = set()
        self.grains_played = 0
        self.order = [s.unit for s in p.section("eval").steps if s.op.split(".")[0] in UNITS]
        self.grain, self.local, self.section, self.step = 0, 0, "", Step("main", "", "")
        self.played: list[tuple[str, int]] = []
        self.writers = self._writers()

    def fail(self, what: str) -> None:
        s = self.step
        raise CheckError(f"section {self.section}: {s.queue} {s.op} {s.unit}: {what}")

    # ---- what the plan should do, from its flats and functions

    def home(self, kind: str) -> str:
        return kind if kind in self.flats else "embed"

    def instance(self, flat: str, index: int) -> int:
        return index if self.flats[flat].count > 1 else 0

    def _writers(self) -> dict[tuple[str, int], set[str]]:
        """The units whose backward writes each leaf."""
        out: dict[tuple[str, int], set[str]] = {(f.name, l): set() for f in self.p.flats for l in range(f.count)}
        for unit in self.order:
            kind, index = _unit(unit)
            fn = self.fns.get(f"bwd.{kind}") or self.fns[f"train.{kind}"]
            if "dw" in fn.outs:
                out[self.home(kind), self.instance(self.home(kind), index)].add(unit)
            if "dp" in fn.outs:
                out["keep", 0].add(unit)
        return out

    # ---- order

    def before(self, a: _Access, clock: Clock) -> bool:
        return a.at <= clock.get(a.queue, 0)

    def touch(self, cls: str, index: int, lo: int, hi: int, write: bool, clock: Clock) -> _Slot:
        c = self.classes.get(cls) or self.fail(f"no class {cls}")
        if not (0 <= index < c.slots and 0 <= lo < hi <= c.stride):
            self.fail(f"{cls}[{index}] bytes {lo}..{hi} lie outside its {c.slots} slots of {c.stride}")
        slot = self.slots.setdefault((cls, index), _Slot())
        for a in slot.accesses:
            if a.lo < hi and lo < a.hi and (a.write or write) and not self.before(a, clock):
                self.fail(f"{cls}[{index}]: not ordered after a {'write' if a.write else 'read'} on queue {a.queue}")
        q = self.step.queue
        if write and lo == 0 and hi == c.stride:
            slot.accesses.clear()
        slot.accesses = [a for a in slot.accesses if not (a.queue == q and a.write == write and a.lo == lo and a.hi == hi)]
        slot.accesses.append(_Access(lo, hi, write, q, self.count[q]))
        return slot

    def strided(self, ref: Ref, step: int, size: int, write: bool, clock: Clock) -> None:
        """A piece of every rank's part. All of a slot's pieces have one step, so their places within a
        part tell whether they meet."""
        if ref.at + size > step or step * self.W > self.classes[ref.cls].stride:
            self.fail(f"{ref}: parts of {step} bytes do not hold the piece")
        self.touch(ref.cls, ref.index, ref.at, ref.at + size, write, clock)

    def whole(self, ref: Ref, write: bool, clock: Clock) -> _Slot:
        return self.touch(ref.cls, ref.index, 0, self.classes[ref.cls].stride, write, clock)

    def play(self, s: Step) -> None:
        self.step = s
        q = s.queue
        clock = self.clock[q]
        for e in s.waits:
            for other, n in self.events.get((e.name, e.index), {}).items():
                clock[other] = max(clock.get(other, 0), n)
        self.count[q] = self.count.get(q, 0) + 1
        clock[q] = self.count[q]
        kind = s.op.split(".")[0]
        getattr(self, f"do_{kind}", self.other)(s, clock)
        for e in s.recs:
            self.events[e.name, e.index] = dict(clock)

    # ---- collectives

    def pieces(self, slot: _Slot, what: str) -> int:
        if len(slot.held) == 0:
            self.fail(f"{what} is dead or was never written")
        return sum(slot.held.values())

    def do_gather(self, s: Step, clock: Clock) -> None:
        ints = {i.name: i.value for i in s.ints}
        src, dst = s.ins[0], s.outs[0]
        name = src.cls.split(".")[1]
        flat, size = self.flats[name], ints["bytes"]
        width = 4 if src.cls.startswith("sum") else self.real
        if ints["step"] != flat.shard * width or src.at != dst.at or src.at + size > flat.shard * width:
            self.fail("piece lies outside the shard")
        if src == dst:
            if ints["from_step"] != ints["step"]:
                self.fail("in place, but not from the rank's own part")
            slot = self.whole(src, True, clock)
            mine = ("own", name, src.index, self.version.get((name, src.index), 0), src.at) if width == self.real and \
                src.cls.startswith("real") else None
            slot.held.setdefault(("spread", mine and mine[3] or 0, src.at), size)
            return
        if src.cls != f"real.{name}" or not dst.cls.startswith("ring.") or flat.real != "shard" or ints["from_step"]:
            self.fail("gathers from or to the wrong class")
        kind, index = _unit(s.unit)
        if self.home(kind) != name or self.instance(name, index) != src.index:
            self.fail(f"gathers {src} for {s.unit}")
        self.touch(src.cls, src.index, src.at, src.at + size, False, clock)
        key = (dst.cls, dst.index)
        slot = self.slots.setdefault(key, _Slot())
        if src.at == 0:
            if slot.held:
                self.fail(f"{dst} still holds {next(iter(slot.held))[:2]}")
            self.live[key] = (name, None)
            self.bound(clock)
        tag = (name, src.index, self.version.get((name, src.index), 0), src.at)
        if tag in slot.held or any(t[:3] != tag[:3] for t in slot.held):
            self.fail(f"{dst} would mix {tag[:3]} with what it holds")
        self.strided(dst, ints["step"], size, True, clock)
        slot.held[tag] = size

    def bound(self, clock: Clock) -> None:
        """Elements gathered at once: slots whose release does not come before this gather."""
        total = sum(f.shard * self.W for f in self.p.flats if f.name == "keep")
        for key, (name, freed) in list(self.live.items()):
            if freed is not None and freed.get("main", 0) <= clock.get("main", 0):
                del self.live[key]
            else:
                total += self.flats[name].shard * self.W
        if total > self.p.head.bound:
            self.fail(f"{total} elements gathered at once, the bound is {self.p.head.bound}")

    def flat_in(self, ref: Ref, unit: str) -> str:
        """The flat whose leaf or sum a step of this unit means: units of one size share a class."""
        cls, _, name = ref.cls.partition(".")
        return self.home(_unit(unit)[0]) if cls == "leaf" and name != "keep" else name

    def do_alltoall(self, s: Step, clock: Clock) -> None:
        ints = {i.name: i.value for i in s.ints}
        src = s.ins[0]
        name = self.flat_in(src, s.unit)
        width = 4 if src.cls.startswith("sum") else self.real
        flat = self.flats[name]
        if self.pending is not None:
            self.fail("the last all-to-all is not done")
        if ints["step"] != flat.shard * width or src.at + ints["bytes"] > flat.shard * width:
            self.fail("piece lies outside the shard")
        self.strided(src, ints["step"], ints["bytes"], False, clock)
        if src.cls.startswith("leaf"):
            self.complete(s, src)
        self.pending = (src, ints["bytes"], "")

    def complete(self, s: Step, leaf: Ref) -> tuple[str, int]:
        """The leaf holds every writer's part of this grain for the instance the unit stands for."""
        name = self.flat_in(leaf, s.unit)
        held = self.slots.setdefault((leaf.cls, leaf.index), _Slot()).held
        instance = self.instance(name, _unit(s.unit)[1])
        want = {(u, self.grain) for u in self.writers[name, instance]}
        if set(held) != want:
            self.fail(f"{leaf} should hold {sorted(u for u, _ in want)} of grain {self.grain}, holds {sorted(held)[:3]}")
        return name, instance

    def do_sum(self, s: Step, clock: Clock) -> None:
        ints = {i.name: i.value + i.per * self.local for i in s.ints}
        dst = s.outs[0]
        name = dst.cls.split(".")[1]
        flat = self.flats[name]
        src = self.pending and self.pending[0]
        if not src or self.flat_in(src, s.unit) != name or self.pending[1] != ints["n"] * self.real or \
                src.at * 4 != dst.at * self.real or dst.index != self.instance(name, _unit(s.unit)[1]):
            self.fail("sums something else than what came")
        if ints["lo"] != self.local * self.W or self.p.head.order != "ranks":
            self.fail(f"leaves {ints['lo']}.. in grain {self.local}")
        self.slot_sum(dst, flat, ints["n"], clock)
        self.pending = (src, self.pending[1], "summed")
        self.pushed.setdefault((name, dst.index), []).append((ints["lo"], dst.at, ints["n"]))

    def slot_sum(self, dst: Ref, flat: Flat, n: int, clock: Clock) -> None:
        """An owner's part of a sum: its own range of a whole buffer or all of a shard, and pending nodes."""
        if dst.at + 4 * n > flat.shard * 4:
            self.fail(f"{dst} ends outside the shard")
        self.touch(dst.cls, dst.index, dst.at, dst.at + 4 * n, True, clock)

    def do_join(self, s: Step, clock: Clock) -> None:
        ints = {i.name: i.value for i in s.ints}
        dst = s.outs[0]
        src = self.pending and self.pending[0]
        name = dst.cls.split(".")[1]
        if not src or src != dst or self.pending[1] != ints["n"] * 4 or self.p.head.order != "local":
            self.fail("joins something else than what came")
        if sum(n for _, _, n in self.pushed.get((name, dst.index), [])) != self.grains_played * self.flats[name].shard * self.W:
            self.fail("joins before all grains are pushed")
        self.slot_sum(dst, self.flats[name], ints["n"], clock)
        self.pending = (src, self.pending[1], "summed")
        self.joined[name, dst.index] = self.joined.get((name, dst.index), 0) + ints["n"]

    def do_done(self, s: Step, clock: Clock) -> None:
        if not self.pending or self.pending[2] != "summed":
            self.fail("nothing was summed")
        src, size = self.pending[:2]
        step = self.flats[self.flat_in(src, s.unit)].shard * (4 if src.cls.startswith("sum") else self.real)
        self.strided(src, step, size, False, clock)
        self.pending = None

    def do_own(self, s: Step, clock: Clock) -> None:
        leaf, dst = s.ins[0], s.outs[0]
        self.whole(leaf, False, clock)
        name, instance = self.complete(s, leaf)
        lo = s.ints[0].value + s.ints[0].per * self.local
        if lo != self.local or dst.cls != f"sum.{name}" or dst.index != instance or self.p.head.order != "local":
            self.fail(f"pushes leaf {lo} in grain {self.local} on {dst}")
        self.whole(dst, True, clock)
        self.pushed.setdefault((name, instance), []).append((lo, 0, self.flats[name].shard * self.W))

    # ---- functions of units

    def parameters(self, ref: Ref, kind: str, index: int, clock: Clock) -> None:
        """The operand w or p holds the unit's parameters, up to date."""
        where, name = ref.cls.split(".")
        slot = self.whole(ref, False, clock)
        want = "keep" if name == "keep" else self.home(kind)
        instance = self.instance(want, index) if name != "keep" else 0
        version = self.version.get((want, instance), 0)
        if where not in ("ring", "real") or (where == "real" and (name != want or ref.index != instance)):
            self.fail(f"reads {ref} for {kind}[{index}]")
        if where == "ring":
            if {t[:3] for t in slot.held} != {(want, instance, version)}:
                self.fail(f"{ref} holds {sorted(slot.held)[:1]}, not {(want, instance, version)}")
            if sum(slot.held.values()) != self.flats[want].shard * self.real:
                self.fail(f"{ref} is not gathered whole")
        elif self.flats[want].state == "shard":
            got = sum(n for t, n in slot.held.items() if t[0] == "spread" and t[1] == version)
            if got != self.flats[want].shard * self.real:
                self.fail(f"{ref} is not up to date on every rank")

    def expect(self, ref: Ref, tag: tuple, clock: Clock) -> None:
        slot = self.whole(ref, False, clock)
        if tag not in slot.held:
            self.fail(f"{ref} should hold {tag}, holds {sorted(slot.held)[:2]}")

    def put(self, ref: Ref, tag: tuple, clock: Clock, more: bool = False) -> None:
        slot = self.whole(ref, True, clock)
        if slot.held and not more:
            self.fail(f"{ref} is overwritten while it holds {sorted(slot.held)[:2]}")
        if tag in slot.held:
            self.fail(f"{ref} gets {tag} twice")
        slot.held[tag] = 1

    def unit(self, s: Step, clock: Clock) -> None:
        kind, index = _unit(s.unit)
        body = s.op.split(".")[0]
        if s.op != f"{body}.{kind}":
            self.fail("function of another kind")
        self.fixed(s, clock)
        at = self.order.index(s.unit)
        last = self.order[at - 1] if at else ""
        ahead = self.order[at + 1] if at + 1 < len(self.order) else ""
        fn = self.fns[s.op]
        g = self.grain
        for name, ref in zip(fn.ins, s.ins):
            if name in ("w", "p"):
                self.parameters(ref, kind, index, clock)
            else:
                self.expect(ref, {"x": ("x", last, g), "y": ("x", s.unit, g), "s": ("s", s.unit, g),
                                  "dy": ("dx", ahead, g)}[name], clock)
        for name, ref in zip(fn.outs, s.outs):
            if name == "dw":
                if not ref.cls.startswith("leaf.") or ref.cls == "leaf.keep":
                    self.fail(f"writes {ref}")
                self.put(ref, (s.unit, g), clock, True)
            elif name == "dp":
                self.put(Ref(ref.cls, ref.index), (s.unit, g), clock, True)
            else:
                self.put(ref, {"y": ("x", s.unit, g), "s": ("s", s.unit, g), "dx": ("dx", s.unit, g)}[name], clock)
        self.played.append((body, at))

    do_fwd = do_bwd = do_train = do_eval = unit

    def fixed(self, s: Step, clock: Clock) -> None:
        """Classes that a function names itself: temporary space and the like."""
        fn = self.fns[s.op]
        names = {a.split("+")[0] for c in fn.calls for a in c.args}
        for name in sorted(names & set(self.classes)):
            read = name in ("tokens", "targets", "ctl") or name.startswith("table")
            self.whole(Ref(name, 0), not read, clock)

    def do_drop(self, s: Step, clock: Clock) -> None:
        ref = s.outs[0]
        slot = self.whole(ref, True, clock)
        if not slot.held:
            self.fail(f"{ref} holds nothing")
        self.reduced_before(ref, slot)
        slot.held.clear()
        if ref.cls.startswith("ring"):
            self.live[ref.cls, ref.index] = (self.live[ref.cls, ref.index][0], dict(clock))

    def reduced_before(self, ref: Ref, slot: _Slot) -> None:
        """A leaf dies only when all of it was summed."""
        if not ref.cls.startswith("leaf"):
            return
        name = self.flat_in(ref, self.step.unit)
        instance = self.instance(name, _unit(self.step.unit)[1])
        lo = self.local * (self.W if self.p.head.order == "ranks" else 1)
        parts = sorted((at, n) for l, at, n in self.pushed.get((name, instance), []) if l == lo)
        end = 0
        for at, n in parts:
            if at != 4 * end:
                break
            end += n
        want = self.flats[name].shard * (1 if self.p.head.order == "ranks" else self.W)
        if end != want or len({p[0] for p in parts}) != len(parts):
            self.fail(f"{ref} dies with {end} of {want} elements of {name}[{instance}] summed")

    # ---- update

    def flat_of(self, s: Step) -> tuple[str, int]:
        name, index = _unit(s.unit)
        if s.op.split(".")[1] != name:
            self.fail("function of another flat")
        return name, index

    def do_norm(self, s: Step, clock: Clock) -> None:
        key = self.flat_of(s)
        flat = self.flats[key[0]]
        if s.ins[0] != Ref(f"sum.{key[0]}", key[1]) or s.ints[0].value != key[1]:
            self.fail("measures another sum")
        self.whole(s.ins[0], False, clock)
        self.fixed(s, clock)
        if key in self.normed or self.stage not in ("", "norms"):
            self.fail("measured twice or too late")
        if self.p.head.order == "local" and self.W > 1 and self.joined.get(key, 0) != flat.shard:
            self.fail(f"{self.joined.get(key, 0)} of {flat.shard} elements joined over ranks")
        if len({p[0] for p in self.pushed.get(key, [])}) != self.grains_played:
            self.fail("a grain is missing in the sum")
        self.stage = "norms"
        self.normed.add(key)

    def do_allreduce(self, s: Step, clock: Clock) -> None:
        if s.ins[0] != Ref("sums", 0) or s.outs[0] != Ref("sums", 1) or len(self.normed) != len(self.writers):
            self.fail("norms are not complete")
        self.whole(s.ins[0], False, clock)
        self.whole(s.outs[0], True, clock)
        self.stage = "reduced"

    def do_factor(self, s: Step, clock: Clock) -> None:
        if self.stage != "reduced" or s.ins[0] != Ref("sums", 1):
            self.fail("the sums over ranks are not known")
        self.whole(s.ins[0], False, clock)
        self.whole(Ref("ctl", 0), True, clock)
        self.stage = "factor"

    def do_adamw(self, s: Step, clock: Clock) -> None:
        key = self.flat_of(s)
        flat = self.flats[key[0]]
        if self.stage != "factor" or key in self.updated:
            self.fail("updated twice or before the factor is known")
        if s.ins[0] != Ref(f"sum.{key[0]}", key[1]) or s.ints[0].value != key[1] or \
                any(r.cls.split(".")[1] != key[0] or r.index != key[1] for r in s.outs):
            self.fail("updates another shard")
        if flat.state == "whole" and self.W > 1:
            held = self.slots[s.ins[0].cls, s.ins[0].index].held
            if sum(n for t, n in held.items() if t[0] == "spread") != flat.shard * 4:
                self.fail("the sum is not on every rank")
            held.clear()
        self.whole(s.ins[0], False, clock)
        for r in s.outs:
            self.whole(r, True, clock).held.clear()
        self.updated.add(key)
        self.version[key] = self.version.get(key, 0) + 1

    def do_init(self, s: Step, clock: Clock) -> None:
        key = self.flat_of(s)
        if s.outs[0].index != key[1] or s.ints[0].value != key[1]:
            self.fail("fills another shard")
        self.whole(s.outs[0], True, clock).held[("init",)] = 1
        if self.p.head.real == "f32":
            self.version[key] = 1

    def do_cast(self, s: Step, clock: Clock) -> None:
        key = self.flat_of(s)
        if s.ins[0].index != key[1] or s.outs[0].index != key[1]:
            self.fail("rounds another shard")
        self.expect(s.ins[0], ("init",), clock)
        self.whole(s.outs[0], True, clock)
        self.version[key] = 1

    def do_next(self, s: Step, clock: Clock) -> None:
        for r in s.outs:
            self.whole(r, True, clock)
        self.played.append(("next", 0))

    def do_turn(self, s: Step, clock: Clock) -> None:
        self.whole(s.outs[0], True, clock)

    def do_mark(self, s: Step, clock: Clock) -> None:
        if s.ins or s.outs or not (s.waits or s.recs):
            self.fail("marks nothing")

    def other(self, s: Step, clock: Clock) -> None:
        self.fail("no such step")

    # ---- sections

    def run(self, name: str) -> None:
        self.section = name
        for s in self.p.section(name).steps:
            self.play(s)

    def ran(self, want: list[tuple[str, int]]) -> None:
        """The functions of a grain ran in this order."""
        self.step = Step("main", "", "")
        if self.played != want:
            self.fail(f"functions ran in another order, or not all: {len(self.played)} of {len(want)}")
        self.played = []

    def train(self) -> None:
        last = len(self.order) - 1
        self.pushed, self.joined, self.normed, self.updated, self.stage = {}, {}, set(), set(), ""
        self.run("begin")
        self.ran([("next", 0)])
        self.grains_played = min(self.p.head.grains, GRAINS)
        for self.local in range(self.grains_played):
            self.grain += 1
            self.run("grain")
            self.ran([("fwd", n) for n in range(last)] + [("train", last)] + [("bwd", n) for n in reversed(range(last))])
            self.empty(("ring", "x", "dx", "save", "leaf"))
        self.run("update")
        if self.updated != set(self.writers):
            self.fail(f"{len(self.updated)} of {len(self.writers)} shards updated")

    def empty(self, prefixes: Iterable[str]) -> None:
        """Nothing of a grain outlives it."""
        for (cls, index), slot in self.slots.items():
            if cls.split(".")[0] in prefixes and slot.held:
                self.fail(f"{cls}[{index}] still holds {sorted(slot.held)[:1]} after the grain")

    def evaluate(self) -> None:
        self.grain += 1
        self.run("eval")
        last = len(self.order) - 1
        self.ran([("fwd", n) for n in range(last)] + [("eval", last)])
        self.empty(("ring", "x", "save"))


def _static(p: Plan) -> None:
    """Classes lie apart and in order; shards cover their flats; tensors lie apart."""
    end = 0
    for c in p.classes:
        if c.at < end or c.stride <= 0 or c.slots <= 0 or c.at % 4096:
            raise CheckError(f"class {c.name} overlaps the one before it or is empty")
        end = c.at + c.slots * c.stride
    flats = {f.name: f for f in p.flats}
    used: dict[str, list[tuple[int, int]]] = {f: [] for f in flats}
    for t in p.tensors:
        elems = 1
        for n in t.shape:
            elems *= n
        for i in range(1 if t.flat_step else t.count):
            used[t.flat].append((t.offset + i * t.offset_step, elems))
    for name, spans in used.items():
        end = 0
        for at, n in sorted(spans):
            if at < end or at % 1024:
                raise CheckError(f"flat {name}: tensors overlap at element {at}")
            end = at + n
        if end > flats[name].elems or flats[name].elems > flats[name].shard * p.head.ranks or flats[name].shard % 1024:
            raise CheckError(f"flat {name}: {end} elements do not fit its shards")
    counter = 0
    for a in range(1, p.head.grains):
        counter |= a * (p.head.ranks if p.head.order == "ranks" else 1)
    for f in p.flats:
        mask = 0 if p.head.sum == "fold" else counter
        if f.mask != mask or f.nodes != max(1, bin(mask).count("1")):
            raise CheckError(f"flat {f.name}: pending sums do not fit {p.head.grains} grains")
    if [s.name for s in p.sections] != ["init", "publish", "begin", "grain", "update", "eval"] or \
            any(s.repeat != (p.head.grains if s.name == "grain" else 1) for s in p.sections):
        raise CheckError("sections are not those of a program")


def check(p: Plan) -> None:
    """CheckError names the first step that breaks a promise."""
    _static(p)
    player = _Player(p)
    player.run("init")
    player.run("publish")
    player.train()
    player.train()
    player.evaluate()
    player.train()
