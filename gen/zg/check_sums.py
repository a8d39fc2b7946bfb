"""check_sums.py -- plays what becomes of leaves: which grain's, pushed on which sums, once each;
reductions over ranks.

A leaf holds the (unit, grain) that wrote it; class `pend` the grains of one flat's instance. The
grains of a step are a section each, or all of them go through a unit before the next one's turn.
"""
from __future__ import annotations

from functools import cache

from .check_order import Order, cover
from .plan import Ref, Step

UNITS = ("fwd", "bwd", "train", "eval")
Key = tuple[str, int]           # a flat and its instance


@cache
def unit_of(text: str) -> tuple[str, int]:
    """`block[3]` -> (block, 3)."""
    name, _, index = text.partition("[")
    return name, int(index[:-1]) if index else 0


class Sums(Order):
    """Books are the player's: check_steps."""

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
            body = "bwd" if ("bwd", kind) in self.facts.parts else "train"
            for op, flat, rows in self.facts.parts.get((body, kind), ()):
                for n in range(len(rows)):
                    if any(name.startswith("dw") for name in self.fns[op].outs):
                        out[flat, self.of_unit(flat, kind, index, n)].add(self.writer(unit, op, n))
                    if "dp" in self.fns[op].outs:
                        out["keep", 0].add(self.writer(unit, op, n))
        return out

    def of_unit(self, flat: str, kind: str, index: int, n: int) -> int:
        """The instance of a flat that holds slice n of a unit's parameters."""
        slices = {len(rows) for (_, name), parts in self.facts.parts.items() if name == kind
                  for _, of, rows in parts if of == flat}
        if len(slices) > 1:
            self.fail(f"{flat} is in {sorted(slices)} slices")
        return self.instance(flat, index * slices.pop() + n)

    def writer(self, unit: str, op: str, n: int) -> str:
        """Who writes a part of a leaf."""
        number = op.split(".")[2:]
        return f"{unit}.{number[0]}.{n}" if number else unit

    def flat_in(self, ref: Ref, unit: str) -> str:
        """The flat whose leaf or sum a step of this unit means: units of one size share a class."""
        cls, _, name = ref.cls.partition(".")
        return name if cls == "sum" or name == "keep" else self.home(unit_of(unit)[0])

    def width(self, ref: Ref) -> int:
        """Of an element of a leaf or of sums."""
        return self.real if ref.cls.startswith("leaf.") else 4

    def flat_of(self, s: Step) -> Key:
        """The flat that a step's function and unit name."""
        name, index = unit_of(s.unit)
        if s.op.partition(".")[2] != name or not 0 <= index < self.flats[name].count:
            self.fail("function of another flat")
        return name, index

    def order_is(self, order: str) -> None:
        if self.p.head.order != order:
            self.fail(f"leaves are summed {self.p.head.order} first")

    # ---- sums

    def do_reducescatter(self, s: Step) -> None:
        """NCCL's sum of what all ranks send: numbers of what the source holds."""
        if self.ints["width"] != self.width(s.ins[0]):
            self.fail("sums numbers of another width")
        self.do_alltoall(s)

    def do_alltoall(self, s: Step) -> None:
        src = s.ins[0]
        if (s.op == "alltoall") != (self.sources == self.W):
            self.fail(f"reduces in another way than {self.p.head.reduction}")
        what, name = src.cls.partition(".")[0], self.flat_in(src, s.unit)
        width = self.width(src)
        if self.pending is not None:
            self.fail("the last all-to-all is not done")
        if what not in ("leaf", "sum", "pend") or \
                self.ints["step"] != self.flats[name].shard * width or \
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
        held = self.slot(leaf.cls, leaf.index).held
        instance = self.instance(name, unit_of(s.unit)[1])
        want = {(u, self.grain + self.counted * (self.together > 1))
                for u in self.writers[name, instance]}
        if set(held) != want:
            self.fail(f"{leaf} should hold {sorted(want)}, holds {sorted(held)[:3]}")
        return name, instance

    def leaf(self, s: Step) -> int:
        """The grain of this step whose leaves are pushed: what ctl has counted."""
        self.fixed(s)
        if self.counted != self.due():
            self.fail(f"{self.counted} grains are counted in grain {self.due()}")
        return self.counted

    def due(self) -> int:
        """How many grains should be counted: of those together as many as there are pushed."""
        return self.local if self.together == 1 else min(self.counted, self.together - 1)

    def do_recount(self, s: Step) -> None:
        """The leaves of all grains are on a unit's sums: the count goes back, for the next's."""
        if s.ins or s.outs != (Ref("ctl", 0),) or self.counted != self.together:
            self.fail("counts back what was not counted")
        self.operand("ctl+0", True)
        self.counted = 0

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
        mine = (f"sum.{key[0]}", key[1], src.at)
        if src != (Ref("pend", 0, src.at) if self.p.apart else Ref(*mine)) or \
                size != self.ints["n"] * 4 or not self.p.below and dst != Ref(*mine):
            self.fail("joins something else than what came")
        self.order_is("local")
        self.all_pushed(key, self.flats[key[0]].shard * self.W)
        if self.p.apart and self.slot("pend", 0).held != {(*key, self.together - 1): 1}:
            self.fail(f"pend holds {sorted(self.slot('pend', 0).held)}")
        self.peers = None               # a rank writes its own part alone, which no peer reads
        self.into(s, key, src.at, self.ints["n"])
        self.peers = (src.cls, src.index)
        self.joined.setdefault(key, []).append((src.at, size))

    def into(self, s: Step, key: Key, at: int, n: int) -> None:
        """Where a piece that was joined goes."""
        self.part_of_sum(s.outs[0], n)

    def do_done(self, s: Step) -> None:
        if not self.pending or self.pending[2] != "summed":
            self.fail("nothing was summed")
        src, size = self.pending[:2]
        name = self.flat_in(src, s.unit)
        shard = self.flats[name].shard
        self.strided(src, shard * self.width(src), size, False)
        self.pending = self.peers = None
        if src.cls == "pend" and cover(self.joined.get((name, unit_of(s.unit)[1]), []), shard * 4):
            self.slot("pend", 0).held.clear()

    def do_own(self, s: Step) -> None:
        leaf, dst = s.ins[0], s.outs[0]
        self.whole(leaf, False)
        key = self.complete(s, leaf)
        into = (s.op, dst.cls, dst.index)
        there = ("pend", 0) if self.p.apart else (f"sum.{key[0]}", key[1])
        if into != (f"own.{key[0]}", *there):
            self.fail(f"pushes a leaf on {dst}")
        self.order_is("local")
        slot, whole = self.whole(dst, True), self.flats[key[0]].shard * self.W
        if self.p.apart and slot.held != ({(*key, self.counted - 1): 1} if self.counted else {}):
            self.fail(f"pushes a leaf of {key[0]}[{key[1]}] on {sorted(slot.held)}")
        slot.held = {(*key, self.counted): 1} if self.p.apart else {}
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
        books = (self.pushed, self.joined, self.landed)
        seen = tuple(len(book.get(key, ())) for book in books)
        if self.whole_sums.get(key) == seen:            # as it was when it was looked at last
            return
        self.whole_sums[key] = seen
        shard, local = self.flats[key[0]].shard, self.p.head.order == "local"
        self.all_pushed(key, shard * self.W if local else shard)
        if local and self.W > 1 and not cover(self.joined.get(key, []), shard * 4):
            self.fail(f"{key[0]}[{key[1]}] is not joined over ranks")
        if self.p.below and self.p.apart and not cover(self.landed.get(key, []), shard):
            self.fail(f"not all of {key[0]}[{key[1]}] has come down")

    def do_batch(self, s: Step) -> None:
        """The rank's tokens: of grain g*W + r, or r*A + g where own grains are summed first."""
        W, A = self.W, self.p.head.grains
        rank, grain = (1, W) if self.p.head.order == "ranks" else (A, 1)
        slot = s.outs[0].index
        want = (0, grain) if self.together == 1 else (slot * grain, 0)
        if self.ints["of_rank"] != rank or (s.ints[1].value, s.ints[1].per) != want:
            self.fail("reads another grain")
        if s.outs != (Ref("tokens", slot), Ref("targets", slot)):
            self.fail("fills another class")
        for ref in s.outs:
            self.whole(ref, True).held = {("batch", self.grain + slot): 1}

    def reduced_before(self, ref: Ref) -> None:
        """A leaf dies only when all of it was summed."""
        if not ref.cls.startswith("leaf"):
            return
        name = self.flat_in(ref, self.step.unit)
        key = (name, self.instance(name, unit_of(self.step.unit)[1]))
        self.complete(self.step, ref)
        ranks = self.p.head.order == "ranks"
        lo = self.due() * (self.sources if ranks else 1)
        lo, done = (self.local, self.read) if self.p.pushes else (lo, self.pushed)
        parts = [(at, n) for l, at, n in done.get(key, []) if l == lo]
        if not cover(parts, self.flats[name].shard * (1 if ranks else self.W)):
            self.fail(f"{ref} dies before all of {key[0]}[{key[1]}] is summed once")
