"""check_host.py -- plays what lies in the host arena: sums of gradients, the optimizer's states and
parameters, and all that goes down and up between the arenas.

Tiles and pieces are (offset, elements) of a shard. A slot on a piece's way holds ("leaf", flat,
instance, grain, offset, elements); that of a tile (flat, instance, step, offset, elements).
"""
from __future__ import annotations

from . import ops
from .check_file import Filed
from .check_order import Spans, cover
from .check_steps import Key, unit_of
from .plan import Ref, Step

SUMS = 72                       # integers of the exact sums: ZK_SUMS
CTL = 128                       # bytes of a step's constants


class Host(Filed):
    """Steps of the queues down, host and up."""

    # ---- sums: of what all ranks brought in a grain, a piece at a time

    def do_sum(self, s: Step) -> None:
        if not self.p.pushes:
            super().do_sum(s)
            return
        dst, (src, size) = s.outs[0], self.brought(s)
        name = self.flat_in(src, s.unit)
        key = (name, self.instance(name, unit_of(s.unit)[1]))
        at, n = self.tile(key, src.at, size, self.real)
        if not src.cls.startswith("leaf.") or s.op != f"sum.{name}" or n != self.ints["n"]:
            self.fail("sums something else than what came")
        if dst.cls != "part":
            self.fail(f"sums into {dst}")
        self.holds(dst, key, at, n, 4)
        self.pending = (*self.pending[:2], "summed") if self.pending else None

    def holds(self, ref: Ref, key: Key, at: int, n: int, width: int) -> None:
        """A piece of this grain's leaf comes to a slot; the leaf was read."""
        self.arrives(ref, ("leaf", *key, self.grain, at, n), n * width)
        self.read.setdefault(key, []).append((self.local, at, n))

    def arrives(self, ref: Ref, tag: tuple, size: int) -> None:
        slot = self.touch(ref.cls, ref.index, 0, size, True)
        if ref.at or slot.held:
            self.fail(f"{ref} still holds {sorted(slot.held)[:1]}")
        slot.held = {tag: 1}

    def leaves(self, ref: Ref, width: int) -> tuple:
        """What a slot held: a piece, all of which is read."""
        held = self.slot(ref.cls, ref.index).held
        tag = next(iter(held), ())
        if tag[:1] != ("leaf",) or tag[3] != self.grain or ref.at:
            self.fail(f"{ref} holds no piece of the grain's leaf")
        self.touch(ref.cls, ref.index, 0, tag[5] * width, False)
        held.clear()
        return tag

    def lower(self, s: Step, src: Ref, dst: Ref, size: int) -> None:
        """A piece goes down: what was summed over ranks, or of the leaf of one rank alone."""
        if dst.cls != "down" or any(self.ranks(s)):
            self.fail(f"brings {src} to {dst}")
        if self.W > 1:
            tag = self.leaves(src, 4) if src.cls == "part" else self.fail(f"brings {src}")
            if size != tag[5] * 4:
                self.fail("brings another part of the leaf")
            self.arrives(dst, tag, size)
            return
        key = self.complete(s, src) if src.cls.startswith("leaf.") else self.fail(f"brings {src}")
        at, n = self.tile(key, src.at, size, self.real)
        self.touch(src.cls, src.index, src.at, src.at + size, False)
        self.holds(dst, key, at, n, self.real)

    def into(self, s: Step, key: Key, at: int, n: int) -> None:
        """What ranks have summed: on its way down, or in its place."""
        if not self.p.below:
            super().into(s, key, at, n)
            return
        at, n = self.tile(key, at, n * 4, 4)
        if s.outs[0].cls != "part":
            self.fail(f"joins into {s.outs[0]}")
        self.arrives(s.outs[0], ("joined", *key, self.applied, at, n), n * 4)
        self.pending = (*self.pending[:2], "summed") if self.pending else None

    def land(self, s: Step, src: Ref, dst: Ref, size: int) -> None:
        """It comes to its place in the host's sum."""
        held = self.slot(src.cls, src.index).held
        what, name, instance, step, at, n = next(iter(held), ("",) * 6)
        if (what, step, size) != ("joined", self.applied, 4 * n) or src.at or \
                any(self.ranks(s)) or dst != Ref(f"sum.{name}", instance, 4 * at):
            self.fail(f"brings {src} to {dst}")
        self.touch(src.cls, src.index, 0, size, False)
        self.touch(dst.cls, dst.index, dst.at, dst.at + size, True)
        held.clear()
        self.landed.setdefault((name, instance), []).append((at, n))

    def do_push(self, s: Step) -> None:
        """A piece, on the host's tree, as the leaf that is counted."""
        src, dst, n = s.ins[0], s.outs[0], self.ints["n"]
        _, name, instance, _, at, size = self.leaves(src, 4 if self.W > 1 else self.real)
        want = (f"push.{name}", "down", f"sum.{name}", instance, 4 * at, n)
        if (s.op, src.cls, dst.cls, dst.index, dst.at, size) != want:
            self.fail(f"pushes {name}[{instance}] on {dst}")
        self.touch(dst.cls, dst.index, dst.at, dst.at + 4 * n, True)
        self.pushed.setdefault((name, instance), []).append((self.leaf(s), at, n))

    def integers(self, s: Step, src: Ref, dst: Ref, size: int) -> None:
        """The step's sums go down when all grains are in them, and back with all norms."""
        here, there = Ref("sums", 0), Ref("hsums", 0)
        down = s.queue == "down"
        good = self.stage == "clear" and self.section == "update" if down else \
            self.stage == "norms" and self.normed == self.moving
        if not good or (src, dst) != ((here, there) if down else (there, here)) or \
                size != 8 * SUMS or any(self.ranks(s)) or not self.p.below:
            self.fail("the step's sums are not complete")
        self.whole(src, False)
        self.whole(dst, True)
        self.stage = "asked" if down else "back"

    # ---- tiles

    def part(self, ref: Ref, at: int, n: int, write: bool, width: int = 4) -> None:
        """So many bytes each of a tile's elements of a state, from its class's element `at` on."""
        if ref.at != at * width:
            self.fail(f"{ref} is another tile")
        self.touch(ref.cls, ref.index, ref.at, ref.at + width * n, write)

    def do_copy(self, s: Step) -> None:
        src, dst, size = s.ins[0], s.outs[0], self.ints["bytes"]
        if s.queue == "down" and dst.cls == "hctl":
            if self.stage != "factor" or (src, size) != (Ref("ctl", 0), CTL) or any(self.ranks(s)):
                self.fail("the step's constants are not known")
            self.whole(src, False)
            self.whole(dst, True).held = {("ctl", self.applied): 1}
            self.counted *= not self.p.pushes
        elif "hsums" in (src.cls, dst.cls):
            self.integers(s, src, dst, size)
        elif "far." in (src.cls[:4], dst.cls[:4]):
            self.value(src, dst, size)
        elif s.queue == "down" and dst.cls.startswith(("real.", "shelf.")):
            self.sink(s, src, dst, size)
        elif s.queue == "down":
            way = self.lower if self.p.pushes else self.land if self.p.below else self.down
            way(s, src, dst, size)
        elif s.queue == "up" and dst.cls.startswith("stage."):
            self.bring(s, src, dst, size)
        elif s.queue == "up":
            self.up(s, src, dst, size)
        else:
            moves = {"load": self.load, "store": self.store, "fetch": self.shelve}
            if s.queue not in moves or any(self.ranks(s)):
                self.fail("no such copy")
            moves[s.queue](s, src, dst, size)

    def bring(self, s: Step, src: Ref, dst: Ref, size: int) -> None:
        """A shard of a unit's parameters, for its gather."""
        shelved = src.cls.startswith("shelf.") and not src.at
        flat, index = self.home(unit_of(s.unit)[0]), unit_of(s.unit)[1]
        instance = self.instance(flat, index)
        key = self.brings(s, Ref(f"real.{flat}", instance) if shelved else src, size)
        held = self.touch(src.cls, src.index, 0, size, False).held
        if dst.at or any(self.ranks(s)) or shelved and held != {(*key, self.version[key]): 1}:
            self.fail(f"brings {src} for {s.unit}")
        self.touch(dst.cls, dst.index, 0, size, True).held = {(*key, self.version[key]): 1}

    def sink(self, s: Step, src: Ref, dst: Ref, size: int) -> None:
        """A shard's new parameters, made on the device: in f32 the masters themselves."""
        key = unit_of(s.unit) if self.filed("real", unit_of(s.unit)) else \
            self.named(s, dst, "real")
        near = self.flats[key[0]].near
        n, part = near or self.flats[key[0]].shard, "near_" if near else ""
        if self.p.offload and not near or dst.at or size != n * self.real or any(self.ranks(s)):
            self.fail(f"brings {src} to {dst}")
        slot = self.touch(src.cls, src.index, src.at, src.at + size, False)
        if self.real == 2:
            if src.at or slot.held != {(*key, self.applied, 0, n): 1}:
                self.fail(f"{src} does not hold the shard's new parameters")
            slot.held = {}
        elif src != Ref(f"{part}master.{key[0]}", key[1]) or \
                ((0, n) not in self.stepped.get(key, ()) if self.stage else
                 key not in (self.begun if near else self.drawn)):
            self.fail(f"{src} does not hold the shard's new parameters")
        if self.filed("real", key):
            self.lay(dst, key, (0, n))
            return
        self.touch(dst.cls, dst.index, 0, size, True)
        self.new(key, 0, n)

    def descend(self, ref: Ref, key: Key, n: int) -> None:
        """A shard's rounded copy comes to a slot on its way down."""
        if not ref.cls.startswith("stage."):
            self.fail(f"{ref} is on no way down")
        slot = self.slot(ref.cls, ref.index)
        slot.held = {t: n for t, n in slot.held.items() if len(t) != 3}     # that was gathered
        self.arrives(ref, (*key, self.applied, 0, n), n * self.real)

    def value(self, src: Ref, dst: Ref, size: int) -> None:
        """All that a slot holds of a grain's values, for backward; the grain before is done with
        what lay in the host arena."""
        near, far = (src, dst) if self.step.queue == "down" else (dst, src)
        if near.cls != f"near.{far.cls[4:]}" or any(self.ranks(self.step)) or \
                size != self.classes[src.cls].stride or size != self.classes[dst.cls].stride:
            self.fail(f"brings {src} to {dst}")
        held = self.whole(src, False).held
        if not held:
            self.fail(f"{src} holds nothing")
        slot = self.whole(dst, True)
        if slot.held and dst is near:
            self.fail(f"{dst} still holds {sorted(slot.held)[:1]}")
        slot.held = dict(held)

    def ranks(self, s: Step) -> tuple[int, int]:
        return self.ints["from_rank"], self.ints["to_rank"]

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
        if self.stage != "factor" or self.ints["l"] != key[1] or len(fresh) != copies or \
                at < self.flats[key[0]].near:
            self.fail("before the factor is known, or of another shard")
        if self.slot("hctl", 0).held != {("ctl", self.applied): 1}:
            self.fail("the host does not know the step's constants")
        self.whole(Ref("hctl", 0), False)
        self.tile_of_sum(s, s.ins[0], key, at, n)
        for what, ref in zip(states, s.outs[len(fresh):]):
            if self.filed(what, key):
                self.change(ref, what, key, (at, n), False)
                continue
            self.named(s, ref, what)
            self.part(ref, at - self.origin(what, key), n, True,
                      ops.width(what, self.p.recipe.moments))
        if self.stepped.setdefault(key, Spans()).meets(at, n):
            self.fail("updated twice")
        self.stepped[key].add(at, n)
        self.rounded(s, fresh, key, at, n)

    def tile_of_sum(self, s: Step, ref: Ref, key: Key, at: int, n: int) -> None:
        """Where it lies, or where it came down to."""
        if self.p.below:
            self.named(s, ref, "sum")
            self.summed(key)
            self.part(ref, at, n, False)
            return
        brought = self.touch(ref.cls, ref.index, 0, 4 * n, False)
        if ref.cls != "down" or ref.at or brought.held != {(*key, self.applied, at, n): 1}:
            self.fail(f"{ref} does not hold the tile of the sum")
        brought.held = {}

    def rounded(self, s: Step, fresh: tuple[Ref, ...], key: Key, at: int, n: int) -> None:
        """A tile's real copy: in its place in the host arena, on its way up or to the file."""
        for ref in fresh:
            if self.filed("real", key):
                self.change(ref, "real", key, (at, n), self.real == 2)
                continue
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
        if self.real == 4 and self.filed("master", key):
            self.has(src, "master", key, (at, n))
            known = not self.stage or (at, n) in self.stepped.get(key, ())
        elif self.real == 4:
            self.named(s, src, "master")
            self.part(src, at - flat.near, n, False)
            known = (at, n) in self.stepped.get(key, ()) if self.stage else key in self.drawn
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
        risen, shard = self.risen.setdefault(key, []), self.flats[key[0]].shard
        risen.append((at, n))
        self.raised[key] = self.raised.get(key, 0) + n
        if self.raised[key] == shard and cover(risen, shard):
            self.version[key] = self.version.get(key, 0) + 1
            self.updated.add(key)
            del self.risen[key], self.raised[key]
