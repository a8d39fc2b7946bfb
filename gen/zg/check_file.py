"""check_file.py -- plays what lies in the file arena: tiles of states and parameters come to slots
of the host arena, are changed there and go back.

Every change of a tile has a number. A slot's `held` says which tile it has, and as of which change;
the books say the newest change of every tile, and the one that the file has: nothing is read from
the file that is not the newest, and no slot takes another tile while it has what the file lacks.
"""
from __future__ import annotations

from . import ops
from .check_fns import Facts
from .check_order import Slot, cover
from .check_steps import Key, Player, unit_of
from .plan import Plan, Ref, Step

Tile = tuple[int, int]          # of a shard: offset, elements


class Filed(Player):
    def __init__(self, p: Plan, facts: Facts) -> None:
        self.changes = 0
        self.known: dict[tuple[str, int], tuple[dict[Tile, int], dict[Tile, int]]] = {}
        super().__init__(p, facts)

    def filed(self, what: str, key: Key) -> bool:
        return self.classes[f"{what}.{key[0]}"].kind == "filed"

    def origin(self, what: str, key: Key) -> int:
        """The first element of a shard that a class has: states begin behind what stays."""
        return 0 if what == "real" else self.flats[key[0]].near

    def books(self, cls: str, index: int) -> tuple[dict[Tile, int], dict[Tile, int]]:
        """The newest change of each tile of an instance; the one that the file has."""
        return self.known.setdefault((cls, index), ({}, {}))

    def tile(self, key: Key, at: int, n: int, width: int = 1) -> Tile:
        """From at and n of so many bytes each: blocks of 1024 elements of the shard."""
        if n <= 0 or at < 0 or at + n > self.flats[key[0]].shard * width or \
                at % (1024 * width) or n % (1024 * width):
            self.fail("a tile outside the shard")
        return at // width, n // width

    def moved(self, what: str, key: Key, at: int, size: int) -> Tile:
        """The tile that lies at a class's bytes."""
        width = self.bytes(what)
        return self.tile(key, at + self.origin(what, key) * width, size, width)

    def named(self, s: Step, ref: Ref, what: str) -> Key:
        name, index = unit_of(s.unit)
        if (ref.cls, ref.index) != (f"{what}.{name}", index):
            self.fail(f"{ref} is of another flat")
        return name, index

    def bytes(self, what: str) -> int:
        return self.real if what == "real" else ops.width(what, self.p.recipe.moments)

    def clean(self, slot: Slot) -> None:
        """The slot can take another tile."""
        for cls, index, *tile, number in (t for t in slot.held if len(t) == 5):
            if self.books(cls, index)[1].get(tuple(tile), 0) < number:
                self.fail(f"the slot has what the file lacks of {cls}[{index}]")

    def alone(self, tiles: dict[Tile, int], tile: Tile) -> None:
        """Tiles are always the same: one that is known lies apart from the others."""
        at, n = tile
        if tile not in tiles and any(a < at + n and at < a + m for a, m in tiles):
            self.fail("tiles are cut in two ways")

    # ---- steps

    def load(self, s: Step, src: Ref, dst: Ref, size: int) -> None:
        what = src.cls.partition(".")[0]
        key = self.named(s, src, what)
        tile = self.moved(what, key, src.at, size)
        newest, there = self.books(src.cls, src.index)
        self.alone(newest, tile)
        number = newest.get(tile, 0 if what in ("m", "v") else -1)
        if dst != Ref(f"tile.{what}", dst.index) or there.get(tile, 0) != number:
            self.fail(f"{src} is not in the file, or goes to another class")
        self.touch(src.cls, src.index, src.at, src.at + size, False)
        slot = self.touch(dst.cls, dst.index, 0, size, True)
        self.clean(slot)
        slot.held = {(src.cls, src.index, *tile, number): 1}

    def store(self, s: Step, src: Ref, dst: Ref, size: int) -> None:
        what = dst.cls.partition(".")[0]
        key = self.named(s, dst, what)
        tile = self.moved(what, key, dst.at, size)
        self.has(src, what, key, tile)
        self.touch(dst.cls, dst.index, dst.at, dst.at + size, True)
        newest, there = self.books(dst.cls, dst.index)
        if there.get(tile, 0) == newest[tile]:
            self.fail("the file has it")
        there[tile] = newest[tile]
        if what == "real":
            self.new(key, *tile)

    def shelve(self, s: Step, src: Ref, dst: Ref, size: int) -> None:
        """A shard of a unit's parameters, on its way up."""
        key = self.brings(s, src, size)
        newest, there = self.books(src.cls, src.index)
        if not dst.cls.startswith("shelf.") or dst.at or newest != there or \
                not cover(list(there), self.flats[key[0]].shard):
            self.fail(f"{src} is not whole in the file")
        self.touch(src.cls, src.index, 0, size, False)
        slot = self.touch(dst.cls, dst.index, 0, size, True)
        self.clean(slot)
        slot.held = {(*key, self.version[key]): 1}

    def lay(self, ref: Ref, key: Key, tile: Tile) -> None:
        """The device's new parameters of a shard come to a slot of the host, on their way to the
        file."""
        slot = self.touch(ref.cls, ref.index, 0, tile[1] * self.real, True)
        if not ref.cls.startswith("shelf.") or ref.at:
            self.fail(f"{ref} is on no way to the file")
        self.clean(slot)
        self.changed(slot, "real", key, tile)

    def brings(self, s: Step, src: Ref, size: int) -> Key:
        """All of the shard of the parameters that the unit needs."""
        key = self.needed(s.unit)
        if src != Ref(f"real.{key[0]}", key[1]) or \
                size != self.flats[key[0]].shard * self.real or key not in self.version:
            self.fail(f"brings {src} for {s.unit}")
        return key

    # ---- the host's part

    def has(self, ref: Ref, what: str, key: Key, tile: Tile) -> Slot:
        """A read of a slot, which has the newest of this tile."""
        slot = self.touch(ref.cls, ref.index, 0, self.bytes(what) * tile[1], False)
        cls = f"{what}.{key[0]}"
        number = self.books(cls, key[1])[0].get(tile, 0)
        laid = what == "real" and ref.cls.startswith("shelf.") and self.step.queue == "store"
        if not laid and ref.cls != f"tile.{what}" or ref.at or \
                slot.held != {(cls, key[1], *tile, number): 1}:
            self.fail(f"{ref} does not hold the newest of {cls}[{key[1]}]")
        return slot

    def change(self, ref: Ref, what: str, key: Key, tile: Tile, fresh: bool) -> None:
        """The host changes a tile in its slot; fresh: it does not read it before."""
        if not fresh:
            self.has(ref, what, key, tile)
        slot = self.touch(ref.cls, ref.index, 0, self.bytes(what) * tile[1], True)
        self.clean(slot)
        if ref != Ref(f"tile.{what}", ref.index):
            self.fail(f"{ref} is of another class")
        self.changed(slot, what, key, tile)

    def changed(self, slot: Slot, what: str, key: Key, tile: Tile) -> None:
        """The slot has the newest of a tile."""
        newest, _ = self.books(f"{what}.{key[0]}", key[1])
        self.alone(newest, tile)
        self.changes += 1
        newest[tile] = self.changes
        slot.held = {(f"{what}.{key[0]}", key[1], *tile, self.changes): 1}

    def forget(self) -> None:
        """Between the first values and `publish` a run may put others into the file."""
        for (cls, _), slot in self.slots.items():
            if cls.startswith("tile."):
                self.clean(slot)
                slot.held.clear()

    def saved(self) -> None:
        """The file has all that was changed."""
        for (cls, index), (newest, there) in self.known.items():
            if newest != there:
                self.fail(f"the file lacks a change of {cls}[{index}]")
