"""check_steps.py -- plays a plan's steps on symbols: what every slot holds, what may be done to it.

A slot's `held` says what is in it: tag -> bytes. Parameters are (flat, instance, update, offset) in
a ring and ("spread", update, offset) in a whole copy; values are ("x" | "s" | "dx", unit, grain); a
leaf holds the (unit, grain) that wrote it.
"""
from __future__ import annotations

from .check_fns import Facts
from .check_order import Clock, Spans, cover
from .check_sums import UNITS, Key, Sums, unit_of
from .plan import Flat, Plan, Ref, Step

__all__ = ["Key", "Player", "UNITS", "unit_of"]

BATCH = ("tokens", "targets")
# What steps are told that call no function.
NUMBERS = {"copy": ("from_rank", "to_rank", "bytes"), "gather": ("from_step", "step", "bytes"),
           "alltoall": ("step", "bytes"), "reducescatter": ("step", "bytes", "width"),
           "allreduce": ("count",), "batch": ("of_rank", "grain")}


class Player(Sums):
    def __init__(self, p: Plan, facts: Facts) -> None:
        super().__init__(p)
        self.facts = facts
        self.flats = {f.name: f for f in p.flats}
        self.fns = {f.name: f for f in p.fns}
        words = {f.name: {a.split("+")[0]: a for c in f.calls for a in c.args} for f in p.fns}
        self.direct = {                     # classes that a function names itself, and how
            f.name: sorted((name, arg) for name, arg in words[f.name].items()
                           if name in self.classes and name not in (*f.ins, *f.outs))
            for f in p.fns}
        self.sources = self.W if p.head.reduction == "exact" else 1     # that an owner sums
        self.order = list(dict.fromkeys(s.unit for s in p.section("eval").steps
                                        if s.op.split(".")[0] in UNITS))
        self.place = {unit: n for n, unit in enumerate(self.order)}
        self.writers = self._writers()
        still = {f.name for f in p.flats} - {t.flat for t in p.tensors if not t.frozen}
        self.moving = {key for key in self.writers if key[0] not in still}  # of which some moves
        self.version: dict[Key, int] = {}                   # updates; 0: never filled
        self.drawn: set[Key] = set()                        # masters that have initial values
        self.begun: set[Key] = set()                        # and those that stay on the device
        self.live: dict[Key, tuple[str, Clock | None]] = {}     # ring slots: flat, its release
        self.kept = sum(f.shard * self.W for f in p.flats if f.name == "keep")
        self.most = self.kept                               # elements whole at once
        self.pending: tuple[Ref, int, str] | None = None    # all-to-all: from, bytes, summed?
        self.together = p.together
        self.grain, self.local, self.grains, self.applied = 0, 0, 0, 0
        self.played: list[tuple[str, int, int]] = []
        self.left: list[tuple[str, str, int, int]] = []     # of a body's functions, those to come
        self.now: tuple[str, str, int] = ("", "", 0)        # the body that they are of
        self.outs: set[str] = set()                         # what its functions have written
        self.counted = 0                                    # grains in the leaves' count
        self.begin()

    def begin(self) -> None:
        """A training step's own books. grain: so many ever, the first of those together; local: of
        this step's `grains`."""
        self.pushed: dict[Key, list[tuple[int, int, int]]] = {}     # (leaf, offset, elements)
        self.joined: dict[Key, list[tuple[int, int]]] = {}          # (offset, bytes) over ranks
        self.whole_sums: dict[Key, tuple[int, ...]] = {}            # what was there of each book
        self.counted *= self.p.pushes                       # the host's: until constants come
        self.landed: dict[Key, list[tuple[int, int]]] = {}  # of the host's sums, as of all ranks
        self.read: dict[Key, list[tuple[int, int, int]]] = {}       # what went to the host, alike
        self.applied += 1                                   # training steps begun
        self.stepped: dict[Key, Spans] = {}                         # tiles updated on the host
        self.risen: dict[Key, list[tuple[int, int]]] = {}           # tiles whose parameters are up
        self.raised: dict[Key, int] = {}                            # and their elements
        self.normed: set[Key] = set()
        self.updated: set[Key] = set()
        self.stage = ""                                     # clear, norms, reduced, factor

    def do(self, s: Step) -> None:
        kind = s.op.split(".")[0]
        fn = self.fns.get(s.op)
        if fn and (len(fn.ins) != len(s.ins) or len(fn.outs) != len(s.outs)):
            self.fail("has other operands than its function")
        if fn and s.queue in ("gather", "up", "down", "load", "store", "fetch"):
            self.fail("the queue runs no kernels")
        want = fn.ints if fn else NUMBERS.get(kind, ())
        if tuple(i.name for i in s.ints) != want or \
                any(i.per and i.name != "grain" for i in s.ints):
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
        """Its parameters do not lie on the device."""
        return self.classes[f"real.{flat.name}"].kind in ("hosted", "filed")

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
        held = self.slot(f"{what}.{key[0]}", key[1]).held
        parts = [(t[2], n) for t, n in held.items() if t[:2] == ("spread", version)]
        return cover(parts, self.flats[key[0]].shard * width)

    def fetch(self, s: Step, what: str, flat: Flat) -> None:
        """A piece of a whole unit, for a ring slot."""
        src, dst = s.ins[0], s.outs[0]
        source = "stage" if self.away(flat) else "real"
        if (what, dst.cls.partition(".")[0]) != (source, "ring") or \
                flat.real != "shard" or self.ints["from_step"]:
            self.fail("gathers from or to the wrong class")
        key = self.needed(s.unit)
        now = (*key, self.version.get(key, 0))
        if key[0] != flat.name or \
                (src.index != key[1] if what == "real" else
                 self.slot(src.cls, src.index).held != {now: 1}):
            self.fail(f"gathers {src} for {s.unit}")
        self.touch(src.cls, src.index, src.at, src.at + self.ints["bytes"], False)
        slot = self.slot(dst.cls, dst.index)
        if src.at == 0:
            if slot.held:
                self.fail(f"{dst} still holds {next(iter(slot.held))[:2]}")
            self.live[dst.cls, dst.index] = (flat.name, None)
            self.bound()
        tag = (*now, src.at)
        if tag in slot.held or any(t[:3] != tag[:3] for t in slot.held):
            self.fail(f"{dst} would mix {tag[:3]} with what it holds")
        self.strided(dst, self.ints["step"], self.ints["bytes"], True)
        slot.held[tag] = self.ints["bytes"]

    def needed(self, unit: str) -> Key:
        """What is gathered for a unit; of one that is cut, for what is named itself."""
        kind, index = unit_of(unit)
        flat = self.home(kind)
        if unit not in self.place and not (kind == flat and 0 <= index < self.flats[flat].count):
            self.fail("is for no unit")
        return flat, self.instance(flat, index)

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

    # ---- functions of units

    def turn(self, s: Step, body: str, kind: str, g: int) -> tuple[str, int, str]:
        """A body's functions follow each other with nothing between them. The flat that this one
        touches, which slice of a unit's weight, and what its part of a leaf is called."""
        if not self.left:
            self.now, self.outs = (s.unit, body, g), set()
            self.left = [(op, flat, n, at) for op, flat, rows in self.facts.parts[body, kind]
                         for n, at in enumerate(rows)]
        op, flat, n, at = self.left.pop(0)
        if (s.op, self.ints.get("at", 0), s.unit, body, g) != (op, at, *self.now):
            self.fail("is out of turn")
        return flat, n, self.writer(s.unit, op, n)

    def parameters(self, ref: Ref, want: str, instance: int, kind: str, index: int) -> None:
        """The operand w or p holds the parameters of a flat's instance, up to date."""
        where, _, name = ref.cls.partition(".")
        flat, key = self.flats[want], (want, instance)
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

    def value_of(self, name: str, ref: Ref, tag: tuple) -> None:
        """A value, all of it or what is a part's."""
        if name in self.outs:
            self.expect(ref, tag)
            self.whole(ref, True)
        else:
            self.put(ref, tag)
        self.outs.add(name)

    def put(self, ref: Ref, tag: tuple, more: bool = False) -> None:
        slot = self.whole(ref, True)
        if slot.held and not more:
            self.fail(f"{ref} is overwritten while it holds {sorted(slot.held)[:2]}")
        if tag in slot.held:
            self.fail(f"{ref} gets {tag} twice")
        slot.held[tag] = 1

    def unit(self, s: Step) -> None:
        kind, index = unit_of(s.unit)
        body, fn = s.op.split(".")[0], self.fns[s.op]
        g = self.grain if body == "eval" or self.section == "eval" else self.its_grain(s)
        if s.op.split(".")[1] != kind or s.unit not in self.place:
            self.fail("function of another unit")
        if body in ("train", "eval") and self.stage == "" and self.section == "grain":
            self.fail("the sums are not cleared")
        self.fixed(s)
        flat, n, writer = self.turn(s, body, kind, g)
        own = self.of_unit(flat, kind, index, n) if flat else 0
        at = self.place[s.unit]
        last = self.order[at - 1] if at else ""
        ahead = self.order[at + 1] if at + 1 < len(self.order) else ""
        tags = {"x": ("x", last, g), "y": ("x", s.unit, g), "s": ("s", s.unit, g)}
        for name, ref in zip(fn.ins, s.ins):
            if name[0] in "wp":
                self.parameters(ref, *((flat, own) if name != "p" else ("keep", 0)), kind, index)
            elif name in BATCH:
                self.batch(name, ref, g)
            else:
                self.expect(ref, {**tags, "dy": ("dx", ahead, g)}[name])
        for name, ref in zip(fn.outs, s.outs):
            if name[:2] in ("dw", "dp"):
                self.gradient(ref, flat if name != "dp" else "keep", kind, index, (writer, g))
            elif name == "acc" and body == "bwd":       # adds to what the head left there
                self.expect(ref, ("acc", g))
                self.whole(ref, True)
            else:
                self.value_of(name, ref, {**tags, "dx": ("dx", s.unit, g), "acc": ("acc", g)}[name])
        self.played += [(body, at, g)] * (not self.left)

    do_fwd = do_bwd = do_train = do_eval = unit

    def its_grain(self, s: Step) -> int:
        """The grain that a function works on: that of the first value it reads."""
        if self.together == 1:
            return self.grain
        for name, ref in zip(self.fns[s.op].ins, s.ins):
            held = self.slot(ref.cls, ref.index).held
            if name[0] not in "wp" and held:
                return next(iter(held))[-1]
        self.fail("is of no grain")

    def gradient(self, ref: Ref, name: str, kind: str, index: int, tag: tuple[str, int]) -> None:
        """A leaf gets a function's part."""
        keep = name == "keep"
        at = index * self.facts.steps.get(kind, 0) * self.real if keep else 0
        if not ref.cls.startswith("leaf.") or (ref.cls == "leaf.keep") != keep or ref.at != at:
            self.fail(f"writes {ref}")
        flat = self.flats[name]
        if self.classes[ref.cls].stride < flat.shard * self.W * self.real:
            self.fail(f"{ref} does not hold a leaf of {flat.name}")
        self.put(Ref(ref.cls, ref.index), tag, True)

    def fixed(self, s: Step) -> None:
        """Classes that a function names itself: temporary space and the like."""
        for name, arg in self.direct[s.op]:
            read = name in (*BATCH, "ctl", "hctl") or name.startswith("table")
            if self.classes[name].slots > 1 and name != "sums":
                self.fail(f"names no slot of {name}")
            slot = self.operand(arg, not read)
            if name.startswith("table") and not slot.held:
                self.fail(f"{name} was never filled")
            if name in BATCH:
                self.batch(name, Ref(name, 0), self.grain)

    def batch(self, name: str, ref: Ref, grain: int) -> None:
        """A grain's tokens; those of an evaluation are put in the first slot."""
        if self.section != "eval":
            self.expect(ref, ("batch", grain))
        elif self.whole(ref, False) is not self.slots[name, 0]:
            self.fail(f"{ref} is not where an evaluation's tokens are")

    def do_drop(self, s: Step) -> None:
        ref = s.outs[0]
        slot = self.whole(ref, True)
        if not slot.held:
            self.fail(f"{ref} holds nothing")
        if ref.cls.split(".")[0] not in ("ring", "x", "dx", "save", "leaf", "acc", "near"):
            self.fail(f"{ref} outlives a grain")
        self.reduced_before(ref)
        slot.held.clear()
        if ref.cls.startswith("ring"):
            self.live[ref.cls, ref.index] = (self.live[ref.cls, ref.index][0], dict(self.clock))

