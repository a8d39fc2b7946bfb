"""check_update.py -- plays what happens once: the first filling of parameters, norms and updates.

Norms come before their sum over ranks, that before the factor, that before any update, and each
shard is measured and updated once. Also what must hold at the end of a section.
"""
from __future__ import annotations

from typing import Iterable

from .check_order import Slot, cover
from .check_steps import Key, Player, unit_of
from .plan import Ref, Step

SUMS = 72                       # integers of the exact sums: ZK_SUMS
CTL = 128                       # bytes of a step's constants


class Program(Player):
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
        if key in self.normed or self.stage not in ("clear", "norms"):
            self.fail("measured twice or too late")
        self.stage = "norms"
        self.normed.add(key)

    def do_allreduce(self, s: Step) -> None:
        if (*s.ins, *s.outs) != (Ref("sums", 0), Ref("sums", 1)) or self.ints["count"] != SUMS or \
                self.normed != set(self.writers):
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
        if self.stage != "factor" or key in self.updated:
            self.fail("updated twice or before the factor is known")
        if s.outs != tuple(Ref(f"{n}.{key[0]}", key[1]) for n in ("real", *flat.states)):
            self.fail("updates another shard")
        if flat.state == "whole" and self.W > 1:
            if not self.is_spread(key, "sum", 4):
                self.fail("the sum is not on every rank")
            self.slots[s.ins[0].cls, s.ins[0].index].held.clear()
        self.fixed(s)
        for r in s.outs:
            self.whole(r, True).held.clear()
        self.updated.add(key)
        self.version[key] += 1

    def do_init(self, s: Step) -> None:
        key = self.flat_of(s)
        master = "master" if "master" in self.flats[key[0]].states else "real"
        if s.outs != (Ref(f"{master}.{key[0]}", key[1]),) or self.ints["l"] != key[1] or \
                key in self.drawn:
            self.fail("fills another shard, or twice")
        self.whole(s.outs[0], True)
        self.drawn.add(key)
        if master == "real":
            self.version[key] = 1

    # ---- where the states lie in the host arena: tiles are (offset, elements) of a shard

    def tile(self, key: Key, at: int, n: int, width: int = 1) -> tuple[int, int]:
        """From at and n of so many bytes each: blocks of 1024 elements of the shard."""
        if n <= 0 or at < 0 or at + n > self.flats[key[0]].shard * width or \
                at % (1024 * width) or n % (1024 * width):
            self.fail("a tile outside the shard")
        return at // width, n // width

    def part(self, ref: Ref, at: int, n: int, write: bool) -> None:
        """Four bytes each of a tile's elements of a state."""
        if ref.at != at * 4:
            self.fail(f"{ref} is another tile")
        self.touch(ref.cls, ref.index, ref.at, ref.at + 4 * n, write)

    def do_copy(self, s: Step) -> None:
        src, dst, size = s.ins[0], s.outs[0], self.ints["bytes"]
        if s.queue == "down" and dst.cls == "hctl":
            if self.stage != "factor" or (src, size) != (Ref("ctl", 0), CTL) or any(self.ranks(s)):
                self.fail("the step's constants are not known")
            self.whole(src, False)
            self.whole(dst, True).held = {("ctl", self.applied): 1}
        elif s.queue == "down":
            self.down(s, src, dst, size)
        elif s.queue == "up" and dst.cls.startswith("stage."):
            self.bring(s, src, dst, size)
        elif s.queue == "up":
            self.up(s, src, dst, size)
        else:
            self.fail("no such copy")

    def bring(self, s: Step, src: Ref, dst: Ref, size: int) -> None:
        """A shard of a unit's parameters, for its gather."""
        kind, index = unit_of(s.unit)
        flat = self.flats[self.home(kind)]
        key = (flat.name, self.instance(flat.name, index))
        if s.unit not in self.order or src != Ref(f"real.{key[0]}", key[1]) or dst.at or \
                size != flat.shard * self.real or any(self.ranks(s)) or key not in self.version:
            self.fail(f"brings {src} for {s.unit}")
        self.touch(src.cls, src.index, 0, size, False)
        self.touch(dst.cls, dst.index, 0, size, True).held = {(*key, self.version[key]): 1}

    def ranks(self, s: Step) -> tuple[int, int]:
        return self.ints["from_rank"], self.ints["to_rank"]

    def named(self, s: Step, ref: Ref, what: str) -> Key:
        name, index = unit_of(s.unit)
        if (ref.cls, ref.index) != (f"{what}.{name}", index):
            self.fail(f"{ref} is of another flat")
        return name, index

    def down(self, s: Step, src: Ref, dst: Ref, size: int) -> None:
        """A tile of an owner's sum."""
        key = self.named(s, src, "sum")
        at, n = self.tile(key, src.at, size, 4)
        flat = self.flats[key[0]]
        if self.ranks(s) != (flat.shard * 4 if flat.sum == "whole" else 0, 0) or dst.at or \
                dst.cls != "down":
            self.fail("brings another part of the sum")
        self.summed(key)
        self.touch(src.cls, src.index, src.at, src.at + size, False)
        slot = self.touch(dst.cls, dst.index, 0, size, True)
        if slot.held:
            self.fail(f"{dst} still holds {sorted(slot.held)[:1]}")
        slot.held = {(*key, self.applied, at, n): 1}

    def hosted(self, s: Step) -> None:
        """The update of a tile, from its part of the sum; in bf16 its rounded copy."""
        key = self.flat_of(s)
        at, n = self.tile(key, self.ints["at"], self.ints["n"])
        states = self.flats[key[0]].states
        fresh = s.outs[:len(s.outs) - len(states)]
        copies = self.real == 2 or self.away(self.flats[key[0]])
        if self.stage != "factor" or self.ints["l"] != key[1] or len(fresh) != copies:
            self.fail("before the factor is known, or of another shard")
        if self.slot("hctl", 0).held != {("ctl", self.applied): 1}:
            self.fail("the host does not know the step's constants")
        self.whole(Ref("hctl", 0), False)
        self.touch(s.ins[0].cls, s.ins[0].index, 0, 4 * n, False)
        brought = self.slot(s.ins[0].cls, s.ins[0].index)
        want = {(*key, self.applied, at, n): 1}
        if s.ins[0].cls != "down" or s.ins[0].at or brought.held != want:
            self.fail(f"{s.ins[0]} does not hold the tile of the sum")
        brought.held = {}
        for what, ref in zip(states, s.outs[len(fresh):]):
            self.named(s, ref, what)
            self.part(ref, at, n, True)
        if any(a < at + n and at < a + m for a, m in self.stepped.setdefault(key, [])):
            self.fail("updated twice")
        self.stepped[key].append((at, n))
        self.rounded(s, fresh, key, at, n)

    def rounded(self, s: Step, fresh: tuple[Ref, ...], key: Key, at: int, n: int) -> None:
        """A tile's real copy: in its place in the host arena, or on its way up."""
        for ref in fresh:
            if self.away(self.flats[key[0]]):
                self.named(s, ref, "real")
                if ref.at != at * self.real:
                    self.fail(f"{ref} is another tile")
                self.touch(ref.cls, ref.index, ref.at, ref.at + n * self.real, True)
                self.new(key, at, n)
                continue
            slot = self.touch(ref.cls, ref.index, 0, n * self.real, True)
            if ref.cls != "up" or ref.at or slot.held:
                self.fail(f"{ref} still holds {sorted(slot.held)[:1]}")
            slot.held = {(*key, self.applied, at, n): 1}

    def up(self, s: Step, src: Ref, dst: Ref, size: int) -> None:
        """A tile's new parameters, to the owner's part."""
        key = self.named(s, dst, "real")
        at, n = self.tile(key, dst.at, size, self.real)
        flat = self.flats[key[0]]
        if self.ranks(s) != (0, flat.shard * self.real if flat.real == "whole" else 0):
            self.fail("to another rank's part")
        if self.real == 4:
            self.named(s, src, "master")
            self.part(src, at, n, False)
            known = (at, n) in self.stepped.get(key, []) if self.stage else key in self.drawn
        else:
            held = self.touch(src.cls, src.index, 0, size, False).held
            known = src.cls == "up" and not src.at and held == {(*key, self.applied, at, n): 1}
            self.slot(src.cls, src.index).held = {}
        if not known:
            self.fail(f"{src} does not hold the tile's new parameters")
        slot = self.touch(dst.cls, dst.index, dst.at, dst.at + size, True)
        if flat.real == "whole":
            slot.held.clear()
        self.new(key, at, n)

    def new(self, key: Key, at: int, n: int) -> None:
        """A tile of the parameters that units will read."""
        risen = self.risen.setdefault(key, [])
        risen.append((at, n))
        if cover(risen, self.flats[key[0]].shard):
            self.version[key] = self.version.get(key, 0) + 1
            self.updated.add(key)
            del self.risen[key]

    def slot(self, cls: str, index: int) -> Slot:
        return self.slots.setdefault((cls, index), Slot())

    def do_cast(self, s: Step) -> None:
        key = self.flat_of(s)
        if self.p.offload:
            self.named(s, s.ins[0], "master")
            at, n = self.tile(key, s.ins[0].at // 4, self.ints["n"])
            if key not in self.drawn or self.stage:
                self.fail("rounds another shard")
            self.part(s.ins[0], at, n, False)
            self.rounded(s, s.outs, key, at, n)
            return
        if s.ins != (Ref(f"master.{key[0]}", key[1]),) or key in self.version or \
                s.outs != (Ref(f"real.{key[0]}", key[1]),) or key not in self.drawn:
            self.fail("rounds another shard, or twice")
        self.whole(s.ins[0], False)
        self.whole(s.outs[0], True)
        self.version[key] = 1

    def do_next(self, s: Step) -> None:
        if s.outs != (Ref("ctl", 0), Ref("sums", 0)) or self.stage:
            self.fail("clears something else")
        for r in s.outs:
            self.whole(r, True)
        self.stage = "clear"

    def do_turn(self, s: Step) -> None:
        if s.outs != (Ref(f"table.{s.op.partition('.')[2]}", 0),):
            self.fail("fills another table")
        self.whole(s.outs[0], True).held["turned",] = 1

    # ---- at the end of a section

    def ran(self, want: list[tuple[str, int]]) -> None:
        """The functions of a grain ran in this order."""
        self.step = Step("main", "", "")
        if self.played != want:
            self.fail(f"functions ran in another order, or {len(self.played)} of {len(want)}")
        self.played = []

    def empty(self, prefixes: Iterable[str]) -> None:
        """Nothing of a grain outlives it."""
        self.step = Step("main", "", "")
        if self.pending:
            self.fail("an all-to-all is not done")
        for (cls, index), slot in self.slots.items():
            if cls.split(".")[0] in prefixes and slot.held:
                self.fail(f"{cls}[{index}] still holds {sorted(slot.held)[:1]}")

    def published(self) -> None:
        """Every instance of every flat can be read: filled, and whole copies are everybody's."""
        self.step = Step("main", "", "")
        for key in self.writers:
            flat = self.flats[key[0]]
            if self.version.get(key) is None:
                self.fail(f"{key[0]}[{key[1]}] was never filled")
            spread = flat.real == "shard" or flat.state == "whole"
            if not spread and not self.is_spread(key, "real", self.real):
                self.fail(f"{key[0]}[{key[1]}] is not up to date on every rank")
