"""order.py -- the checker's base: queues, events, slots, and the order of accesses.

Steps are taken in order of issue. A queue's clock is a vector: the number of steps of each queue
that have finished before its next step. A record copies the clock, a wait takes the maximum of
both. Two accesses to the same bytes, one of them a write, must be ordered by these clocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import wraps
from typing import NoReturn, ParamSpec, TypeVar

from ..facts.queues import QUEUES
from ..plan.mesh import Members, members
from ..plan.operand import Operand
from ..plan.plan import Plan, Ref, Step
from .kernels import CTL
from .memory import Run, Slot

INDEX = {name: n for n, name in enumerate(QUEUES)}
# Sections during which a checkpoint may be written
BESIDE = ("begin", "micro_batch", "eval")


class CheckError(Exception):
    """A broken promise, with its section and step."""


# Exceptions of a look-up of a name or number that the plan lacks. Any other exception is a fault of
# the checker and propagates.
LACKS = (LookupError, ValueError, ArithmeticError, StopIteration)


Proof = ParamSpec("Proof")
Found = TypeVar("Found")


def refusing(part: Callable[Proof, Found]) -> Callable[Proof, Found]:
    """Wrap a part of the check: a failed look-up in the plan becomes a CheckError."""

    @wraps(part)
    def proved(*args: Proof.args, **named: Proof.kwargs) -> Found:
        try:
            return part(*args, **named)
        except LACKS as e:
            raise CheckError(
                f"{part.__name__.strip('_')}: the plan lacks what it names, or names "
                f"what cannot be: {type(e).__name__}: {e}"
            ) from e

    return proved


# Number of finished steps of each queue.
Clock = list[int]
# Bytes [lo, hi), whether it writes, the queue, and the number of the step there.
Access = tuple[int, int, bool, int, int]
# Queue, number of the step there, and the clock after that step.
Record = tuple[int, int, Clock]
FIRST: Record = (0, 0, [])


@dataclass(slots=True, eq=False)
class Buffer(Slot):
    """A slot of a class: its content and its latest accesses."""

    cls: str = ""
    index: int = 0
    stride: int = 0
    room: int = 0  # stride, or 0 if the class has no such slot
    arena: str = ""
    parted: bool = False  # whether some step addresses parts by rank
    # parts that the accesses lie in
    parts: tuple[int, Members | None] = 0, None
    accesses: list[Access] = field(default_factory=list)

    def cut(self, size: int, group: Members) -> None:
        """Announce accesses within parts of `size` bytes, one per rank of a group. Earlier accesses
        within other parts count as accesses to the whole slot from now on."""
        parts = size, group
        if self.parts not in ((0, None), parts):
            self.accesses = [(0, self.stride, *a[2:]) for a in self.accesses]
        self.parts = parts

    def __str__(self) -> str:
        return f"{self.cls}[{self.index}]"

    def all(self) -> Run | None:
        """Return the run that fills the slot, or None."""
        return self.read(0, self.stride)


# A method and its arguments.
Action = tuple[Callable[..., None], Sequence[object]]


@dataclass(slots=True)
class Line:
    """A step with its names looked up, so that it can be played again. act, operands: a method and
    its arguments."""

    queue: int
    arenas: tuple[str, str]
    waits: list[tuple[str, int]]
    recs: list[tuple[str, int]]
    act: Callable[..., None]
    operands: Sequence[object]
    dead: list[Buffer]  # slots that are dead after the step


class Order:
    """Plays steps in order of issue. Subclasses define the effect of a step (`action`)."""

    def __init__(self, p: Plan) -> None:
        self.p = p
        self.W = p.head.ranks
        self.groups = members(p)
        self.every = self.groups["all"]
        self.real = p.head.bytes
        self.classes = {c.name: c for c in p.classes}
        self.limits = {e.name: e.index for e in p.events}
        self.memory: dict[tuple[str, int], Buffer] = {}
        # classes that are addressed by rank
        self.parted: frozenset[str] = frozenset()
        self.saved = {s.cls for f in p.flats for s in p.kept(f)}
        self.clocks: list[Clock] = [[0] * len(QUEUES) for _ in QUEUES]
        self.events: dict[tuple[str, int], Record] = {}
        # slots that peers may read until `done`
        self.peers: tuple[Buffer, ...] = ()
        # the plan's steps, by identity
        self.lines: dict[int, Line] = {}
        self.local = 0  # index of the current micro-batch in its step
        # The current step: its section and number there, its queue, clock and arenas.
        self.section = ""
        self.number = 0
        self.step = Step("main", "", "")
        self.queue = 0
        self.clock = self.clocks[0]
        self.arenas = ("device", "device")

    def fail(self, what: str) -> NoReturn:
        s = self.step
        where = f"section {self.section}, step {self.number}"
        raise CheckError(f"{where}: {s.queue} {s.op} {s.unit}: {what}")

    def action(self, s: Step) -> Action:
        """Return a step's method and its arguments."""
        self.fail("no such step")

    def dies(self, buffer: Buffer) -> None:
        self.fail("nothing dies")

    def play(self, s: Step) -> None:
        """Play one step: wait for events, act, release dead slots, record events."""
        self.step = s
        try:
            line = self.lines.get(id(s)) or self.read(s)
            self.queue, self.arenas = line.queue, line.arenas
            self.clock = clock = self.clocks[line.queue]
            for event in line.waits:
                queue, at, known = self.events.get(event, FIRST)
                # Otherwise all that it knew is already known here.
                if clock[queue] < at:
                    clock[:] = [
                        a if a > b else b
                        for a, b in zip(clock, known, strict=True)
                    ]
            clock[line.queue] += 1
            line.act(self, *line.operands)
            for buffer in line.dead:
                self.dies(buffer)
        except LACKS as e:
            self.fail(f"names what the plan does not have: {e}")
        for event in line.recs:
            self.events[event] = line.queue, clock[line.queue], clock[:]

    def read(self, s: Step) -> Line:
        """Look up a step's names. A step that is the same in all micro-batches is looked up
        once."""
        queue = QUEUES.get(s.queue) or self.fail("no such queue")
        if self.p.head.overlap == 0 and queue.beside:
            self.fail("a queue of its own, but collectives do not overlap")
        line = Line(
            INDEX[s.queue],
            (queue.reads, queue.writes),
            [(e.name, e.index) for e in s.waits],
            [(e.name, e.index) for e in s.recs],
            *self.action(s),
            [self.bytes(r.cls, r.index) for r in s.refs if r.last],
        )
        if not any([i.per for i in s.ints]):
            self.lines[id(s)] = line
        return line

    def slot(self, ref: Ref) -> Buffer:
        return self.bytes(ref.cls, ref.index)

    def bytes(self, cls: str, index: int) -> Buffer:
        found = self.memory.get((cls, index))
        if found is None:
            c = self.classes.get(cls) or self.fail(f"no class {cls}")
            room = c.stride if 0 <= index < c.slots else 0
            found = Buffer(
                cls=cls,
                index=index,
                stride=c.stride,
                room=room,
                arena=c.arena,
                parted=cls in self.parted,
            )
            self.memory[cls, index] = found
        return found

    def touch(
        self, buffer: Buffer, lo: int, hi: int, write: bool, dies: bool = False
    ) -> None:
        """Record an access to bytes [lo, hi). It must be ordered after every conflicting one. dies:
        the access is the release of the slot."""
        if not 0 <= lo < hi <= buffer.room:
            slots = self.classes[buffer.cls].slots
            self.fail(
                f"{buffer} bytes {lo}..{hi} are outside {slots} slots of {buffer.stride}"
            )
        arena = "device" if dies else self.arenas[write]
        if arena != buffer.arena:
            self.fail(f"{buffer} is not in the {arena} arena")
        if write and buffer in self.peers:
            self.fail(f"{buffer} is written while peers may read it")
        if write and buffer.cls in self.saved and self.section in BESIDE:
            self.fail(f"{buffer} is written while a checkpoint may read it")
        mine, clock = self.queue, self.clock
        # Consecutive pieces merge into one access, as late as its last. In the file arena they do
        # not.
        joins = buffer.arena != "file"
        new, kept = True, []
        for access in buffer.accesses:
            low, high, wrote, queue, at = access
            if (
                (wrote or write)
                and at > clock[queue]
                and low < hi
                and lo < high
            ):
                what = "write" if wrote else "read"
                self.fail(
                    f"{buffer}: not ordered after a {what} on queue {list(QUEUES)[queue]}"
                )
            own = queue == mine and wrote == write
            if lo <= low and high <= hi and (write or own):
                continue
            if own and high == lo and joins and new:
                access, new = (low, hi, write, mine, clock[mine]), False
            kept.append(access)
        if new:
            kept.append((lo, hi, write, mine, clock[mine]))
        buffer.accesses = kept

    def operand(self, arg: Operand, write: bool) -> None:
        """Access the class that an operand names: a kernel's part of ctl, or all of another
        class."""
        whole = 0, self.classes[arg.base].stride
        self.touch(self.bytes(arg.base, 0), *CTL.get(arg, whole), write)

    def common(self, buffer: Buffer) -> None:
        """Require that peers can read the buffer."""
        if self.W > 1 and self.classes[buffer.cls].readers != "peers":
            self.fail(f"peers cannot read {buffer}")
