"""check_update.py -- plays what happens once: the first filling of parameters, norms and updates.

Norms come before their sum over ranks, that before the factor, that before any update, and each
shard is measured and updated once. Also what must hold at the end of a section.
"""
from __future__ import annotations

from typing import Iterable

from .check_host import SUMS
from .check_near import Near
from .check_order import Spans
from .check_steps import Key
from .plan import Flat, Ref, Step


class Program(Near):
    """All steps of a plan."""

    # ---- update

    def sum_of(self, s: Step) -> Key:
        """The flat whose sum the step reads."""
        key = self.flat_of(s)
        if s.ins[0] != Ref(f"sum.{key[0]}", key[1]) or self.ints["l"] != key[1]:
            self.fail("reads another sum")
        self.summed(key)
        self.whole(s.ins[0], False)
        return key

    def do_norm(self, s: Step) -> None:
        key = self.sum_of(s)
        self.fixed(s)
        if key in self.normed or self.stage not in ("asked" if self.p.below else "clear", "norms"):
            self.fail("measured twice or too late")
        self.stage = "norms"
        self.normed.add(key)

    def do_allreduce(self, s: Step) -> None:
        if (*s.ins, *s.outs) != (Ref("sums", 0), Ref("sums", 1)) or self.ints["count"] != SUMS or \
                self.normed != self.moving or self.p.below and self.stage != "back":
            self.fail("norms are not complete")
        self.common(s.ins[0])
        self.whole(s.ins[0], False)
        self.whole(s.outs[0], True)
        self.stage = "reduced"

    def do_factor(self, s: Step) -> None:
        if self.stage != "reduced" or s.ins != (Ref("sums", 1),) or s.outs != (Ref("ctl", 0),):
            self.fail("the sums over ranks are not known")
        self.whole(s.ins[0], False)
        self.whole(s.outs[0], True)
        self.stage = "factor"

    def do_update(self, s: Step) -> None:
        if self.p.offload:
            self.hosted(s)
            return
        key = self.sum_of(s)
        flat = self.flats[key[0]]
        if self.stage != "factor" or key in self.updated or key in self.stepped:
            self.fail("updated twice or before the factor is known")
        away, states = self.away(flat), tuple(Ref(f"{n}.{key[0]}", key[1]) for n in flat.states)
        if s.outs != (*self.copy_of(s, flat, key), *states):
            self.fail("updates another shard")
        if flat.state == "whole" and self.W > 1:
            if not self.is_spread(key, "sum", 4):
                self.fail("the sum is not on every rank")
            self.slots[s.ins[0].cls, s.ins[0].index].held.clear()
        self.fixed(s)
        for r in s.outs[away and self.real == 2:]:
            self.whole(r, True).held.clear()
        if away:
            self.sinks(s, key)
            return
        self.updated.add(key)
        self.version[key] += 1

    def copy_of(self, s: Step, flat: Flat, key: Key) -> tuple[Ref, ...]:
        """Where a step on the device leaves a shard's real copy: in its place, or, if that is in
        the host arena, in bf16 in a slot on its way down."""
        if not self.away(flat):
            return (Ref(f"real.{key[0]}", key[1]),)
        if s.outs[0].at or not s.outs[0].cls.startswith("stage.") and self.real == 2:
            self.fail(f"{s.outs[0]} is on no way down")
        return s.outs[:self.real == 2]

    def sinks(self, s: Step, key: Key) -> None:
        """A shard's parameters are made; they are new when they are down."""
        n = self.flats[key[0]].shard
        self.stepped.setdefault(key, Spans()).add(0, n)
        if self.real == 2:
            self.descend(s.outs[0], key, n)

    def do_init(self, s: Step) -> None:
        key = self.flat_of(s)
        master = "master" if "master" in self.flats[key[0]].states else "real"
        if self.filed(master, key):
            tile = self.tile(key, self.ints["at"], self.ints["n"])
            if self.ints["l"] != key[1] or tile in self.books(f"{master}.{key[0]}", key[1])[0]:
                self.fail("fills another shard, or twice")
            self.change(s.outs[0], master, key, tile, True)
            return
        near, n = self.flats[key[0]].near, self.flats[key[0]].shard
        there = Ref(f"{master}.{key[0]}", key[1], (near - self.origin(master, key)) * self.real)
        if s.outs != (there,) or self.ints["l"] != key[1] or key in self.drawn:
            self.fail("fills another shard, or twice")
        self.touch(there.cls, there.index, there.at, self.classes[there.cls].stride, True)
        self.drawn.add(key)
        if master == "real":
            self.new(key, near, n - near)

    def do_cast(self, s: Step) -> None:
        key = self.flat_of(s)
        if self.p.offload and self.filed("master", key):
            (_, _, at, n, _), = self.slot(s.ins[0].cls, s.ins[0].index).held
            self.has(s.ins[0], "master", key, (at, n))
            if self.stage or n != self.ints["n"]:
                self.fail("rounds another tile")
            self.rounded(s, s.outs, key, at, n)
            return
        if self.p.offload:
            self.named(s, s.ins[0], "master")
            at, n = self.tile(key, s.ins[0].at // 4 + self.flats[key[0]].near, self.ints["n"])
            if key not in self.drawn or self.stage:
                self.fail("rounds another shard")
            self.part(s.ins[0], at - self.flats[key[0]].near, n, False)
            self.rounded(s, s.outs, key, at, n)
            return
        flat = self.flats[key[0]]
        if s.ins != (Ref(f"master.{key[0]}", key[1]),) or key in self.version or \
                s.outs != self.copy_of(s, flat, key) or key not in self.drawn:
            self.fail("rounds another shard, or twice")
        self.whole(s.ins[0], False)
        if self.away(flat):
            self.sinks(s, key)
            return
        self.whole(s.outs[0], True)
        self.version[key] = 1

    def do_next(self, s: Step) -> None:
        if s.outs != (Ref("ctl", 0), Ref("sums", 0)) or self.stage:
            self.fail("clears something else")
        for r in s.outs:
            self.whole(r, True)
        self.stage = "clear"

    def do_count(self, s: Step) -> None:
        ctl = Ref("hctl" if self.p.pushes else "ctl", 0)
        if s.ins or s.outs != (ctl,) or self.section != "grain" or \
                self.counted != self.due():
            self.fail("counts something else, or twice")
        self.operand(f"{ctl.cls}+0", True)
        self.counted += 1

    def do_turn(self, s: Step) -> None:
        if s.outs != (Ref(f"table.{s.op.partition('.')[2]}", 0),):
            self.fail("fills another table")
        self.whole(s.outs[0], True).held["turned",] = 1

    # ---- at the end of a section

    def ran(self, want: list[tuple[str, int]]) -> None:
        """The functions of each grain ran in this order."""
        self.step = Step("main", "", "")
        grains = range(self.grain, self.grain + (self.together if self.section == "grain" else 1))
        for g in grains:
            if [(body, at) for body, at, of in self.played if of == g] != want:
                self.fail("functions ran in another order, or not all")
        if self.left or len(self.played) != len(want) * len(grains):
            self.fail(f"{len(self.played)} functions ran instead of {len(want) * len(grains)}")
        self.played = []

    def empty(self, prefixes: Iterable[str]) -> None:
        """Nothing of a grain outlives it."""
        self.step = Step("main", "", "")
        if self.pending:
            self.fail("an all-to-all is not done")
        self.saved()
        for (cls, index), slot in self.slots.items():
            if cls.split(".")[0] in prefixes and slot.held:
                self.fail(f"{cls}[{index}] still holds {sorted(slot.held)[:1]}")

    def published(self) -> None:
        """Every instance of every flat can be read: filled, and whole copies are everybody's."""
        self.step = Step("main", "", "")
        self.saved()
        for key in self.writers:
            flat = self.flats[key[0]]
            if self.version.get(key) is None:
                self.fail(f"{key[0]}[{key[1]}] was never filled")
            spread = flat.real == "shard" or flat.state == "whole"
            if not spread and not self.is_spread(key, "real", self.real):
                self.fail(f"{key[0]}[{key[1]}] is not up to date on every rank")
