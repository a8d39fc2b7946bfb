"""check_order.py -- the checker's ground: queues, events and slots; whether accesses are ordered.

Steps are taken in order of issue. A queue's clock says how many steps of every queue have finished
before its next one; a record is a copy of it, a wait takes the larger of both. Two accesses to the
same bytes, one of them a write, must be ordered by these clocks.
"""
from __future__ import annotations

from bisect import bisect
from dataclasses import dataclass, field
from functools import wraps
from typing import Callable, NoReturn

from .check_kernels import CTL
from .plan import Plan, Ref, Step

Clock = dict[str, int]
QUEUES = ("main", "gather", "reduce", "host", "up", "down", "load", "store", "fetch")
# What a queue reads and writes: the arena, the host arena, the file arena.
ARENAS = {"host": ("host", "host"), "up": ("host", "device"), "down": ("device", "host"),
          "load": ("file", "host"), "fetch": ("file", "host"), "store": ("host", "file")}


IN = {"hosted": "host", "host": "host", "filed": "file"}    # where classes of a kind lie, if not
# on the device


class CheckError(Exception):
    """What is wrong, with the section and the step."""


# What a look-up raises of a name or a number that the plan should have.
LACKS = (LookupError, ValueError, TypeError, AttributeError, ArithmeticError, StopIteration,
         RuntimeError)


def refusing(part: Callable) -> Callable:
    """A part of the check that refuses a plan, too, which lacks what the part looks up."""
    @wraps(part)
    def proved(p: Plan, *rest: object) -> object:
        try:
            return part(p, *rest)
        except LACKS as e:
            raise CheckError(f"{part.__name__.strip('_')}: the plan lacks what it names, or names "
                             f"what cannot be: {type(e).__name__}: {e}") from e
    return proved


@dataclass(slots=True)
class Access:
    lo: int
    hi: int
    write: bool
    queue: str
    at: int                     # number of the step on its queue


@dataclass
class Slot:
    """What is known of a slot: recent accesses, and what it holds: tag -> bytes."""
    accesses: list[Access] = field(default_factory=list)
    held: dict[tuple, int] = field(default_factory=dict)


def cover(parts: list[tuple[int, int]], want: int) -> bool:
    """(start, size) parts lie one after the other and fill `want`."""
    end = 0
    for at, n in sorted(parts):
        if at != end or n <= 0:
            return False
        end += n
    return end == want


class Spans:
    """Parts (start, size) that lie apart from each other."""

    def __init__(self) -> None:
        self.parts: list[tuple[int, int]] = []          # in order

    def meets(self, at: int, n: int) -> bool:
        """Whether a part has something of [at, at + n)."""
        i = bisect(self.parts, (at, n))
        return any(a < at + n and at < a + m for a, m in self.parts[max(0, i - 1):i + 1])

    def add(self, at: int, n: int) -> None:
        self.parts.insert(bisect(self.parts, (at, n)), (at, n))

    def __contains__(self, part: tuple[int, int]) -> bool:
        i = bisect(self.parts, part)
        return i > 0 and self.parts[i - 1] == part


class Order:
    """Plays steps; what a step does is left to `do`."""

    def __init__(self, p: Plan) -> None:
        self.p, self.W = p, p.head.ranks
        self.real = 4 if p.head.real == "f32" else 2
        self.classes = {c.name: c for c in p.classes}
        self.limits = {e.name: e.index for e in p.events}
        self.slots: dict[tuple[str, int], Slot] = {}
        self.clocks: dict[str, Clock] = {q: {} for q in QUEUES}
        self.clock: Clock = self.clocks["main"]         # of the step that is played
        self.count: dict[str, int] = {}
        self.events: dict[tuple[str, int], Clock] = {}
        self.peers: tuple[str, int] | None = None       # a slot that peers read until `done`
        self.section, self.step = "", Step("main", "", "")

    def fail(self, what: str) -> NoReturn:
        s = self.step
        raise CheckError(f"section {self.section}: {s.queue} {s.op} {s.unit}: {what}")

    def do(self, s: Step) -> None:
        self.fail("no such step")

    def play(self, s: Step) -> None:
        self.step = s
        self.clock = self.clocks[s.queue] if s.queue in self.clocks else self.fail("no such queue")
        if self.p.head.overlap == 0 and s.queue in ("gather", "reduce"):
            self.fail("a queue of its own, but collectives do not overlap")
        clock = self.clock
        for e in s.waits:
            for other, n in self.events.get((e.name, e.index), {}).items():
                if n > clock.get(other, 0):
                    clock[other] = n
        clock[s.queue] = self.count[s.queue] = self.count.get(s.queue, 0) + 1
        try:
            self.do(s)
        except LACKS as e:
            self.fail(f"names what the plan does not have: {e}")
        for e in s.recs:
            self.events[e.name, e.index] = dict(clock)

    def touch(self, cls: str, index: int, lo: int, hi: int, write: bool) -> Slot:
        """An access to bytes [lo, hi) of a slot, ordered after all that conflict with it."""
        c = self.classes.get(cls) or self.fail(f"no class {cls}")
        if not (0 <= index < c.slots and 0 <= lo < hi <= c.stride):
            self.fail(f"{cls}[{index}] bytes {lo}..{hi} are outside {c.slots} slots of {c.stride}")
        q, clock = self.step.queue, self.clock
        arena = ARENAS.get(q, ("device", "device"))[write]
        if arena != IN.get(c.kind, "device"):
            self.fail(f"{cls}[{index}] is not in the {arena} arena")
        if write and (cls, index) == self.peers:
            self.fail(f"{cls}[{index}] is written while peers may read it")
        slot = self.slot(cls, index)
        row = None              # pieces in a row are one access, as late as its last, but in the
        kept = []               # file, where each tile has its turn
        for a in slot.accesses:
            if (a.write or write) and a.lo < hi and lo < a.hi and a.at > clock.get(a.queue, 0):
                what = "write" if a.write else "read"
                self.fail(f"{cls}[{index}]: not ordered after a {what} on queue {a.queue}")
            if lo <= a.lo and a.hi <= hi and (write or (a.queue == q and not a.write)):
                continue
            if not row and a.hi == lo and a.queue == q and a.write == write and c.kind != "filed":
                row = a
                a.hi, a.at = hi, self.count[q]
            kept.append(a)
        if not row:
            kept.append(Access(lo, hi, write, q, self.count[q]))
        slot.accesses = kept
        return slot

    def slot(self, cls: str, index: int) -> Slot:
        found = self.slots.get((cls, index))
        if found is None:
            found = self.slots[cls, index] = Slot()
        return found

    def whole(self, ref: Ref, write: bool) -> Slot:
        """An access to all of a slot."""
        c = self.classes.get(ref.cls) or self.fail(f"no class {ref.cls}")
        return self.touch(ref.cls, ref.index, 0, c.stride, write) if ref.at == 0 else \
            self.fail(f"{ref} does not begin with its slot")

    def operand(self, arg: str, write: bool) -> Slot:
        """An access to the class that an operand names: a kernel's own part of ctl, else all."""
        name = arg.partition("+")[0]
        return self.touch(name, 0, *CTL.get(arg, (0, self.classes[name].stride)), write)

    def strided(self, ref: Ref, step: int, size: int, write: bool) -> Slot:
        """An access to a piece of every rank's part. All of a slot's pieces have one step, so their
        places within a part tell whether they meet."""
        if ref.at + size > step or step * self.W > self.classes[ref.cls].stride:
            self.fail(f"{ref}: parts of {step} bytes do not hold the piece")
        return self.touch(ref.cls, ref.index, ref.at, ref.at + size, write)

    def common(self, ref: Ref) -> None:
        """Peers read it."""
        if self.W > 1 and self.classes[ref.cls].kind != "shared":
            self.fail(f"peers cannot read {ref}")
