"""order.py -- the slots of a plan, and the order of accesses to them.

A queue's clock is a vector: the number of steps of each queue that have finished before its next
step. Two accesses to the same bytes, one of them a write, must be ordered by these clocks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import wraps
from typing import NamedTuple, NoReturn, ParamSpec, TypeVar

from ..facts import ops
from ..facts.queues import QUEUES
from ..plan.mesh import Along, Members, members
from ..plan.operand import Names, Operand, by_place
from ..plan.plan import Plan, Ref, Step
from .kernels import CTL
from .memory import Extent, Slot

MAIN = list(QUEUES).index("main")
# These send pieces to receive buffers where peers' memory cannot be read.
REDUCTIONS = ("alltoall", "reducescatter")
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

    def told(self) -> str:
        """Describe the first piece of the content for an error."""
        return told(self.held[0][2])

    def all(self) -> Extent | None:
        """Return the run that fills the slot, or None."""
        return self.read(0, self.stride)


class Place(NamedTuple):
    """Bytes of a slot from `at` on, by_rank bytes further for each place in a group."""

    buffer: Buffer
    at: int
    by_rank: int
    group: Members

    def __str__(self) -> str:
        rank = by_place(self.group.name, self.by_rank)
        return f"{self.buffer}+{self.at}{rank}"

    def look(self, size: int) -> Extent | None:
        """Return the content, or None if no one run of an array fills it."""
        buffer, at, by_rank, group = self
        if by_rank:
            return buffer.read_own(at, by_rank, size, group)
        return buffer.read(at, size)

    def put(self, size: int, run: Extent) -> None:
        """Replace the content."""
        buffer, at, by_rank, group = self
        if by_rank:
            buffer.write_own(at, by_rank, size, run, group)
        else:
            buffer.write(at, size, run)


def told(run: Extent | None) -> str:
    """Describe the content of a place for an error."""
    if run is None:
        return "no one array"
    if run.width == 1 and not run.first:
        return str(run.array)
    rank = f" + {run.by_rank} along the axes" if run.by_rank else ""
    return f"{run.array}, from element {run.first}{rank} on"


def arrays(p: Plan) -> Names:
    """Return the classes that hold a micro-batch."""
    h = p.head
    means = h.loss_mean == "micro_batch"
    return ops.batch(h.end >= 0, h.keyed == 1, means, h.blocks > 1)


def _parted(p: Plan) -> frozenset[str]:
    """Return the classes that some step addresses by rank."""
    if p.head.ranks == 1:
        return frozenset()
    out = set()
    for s in (s for section in p.sections for s in section.steps):
        if s.op == "exchange":  # takes whole values
            continue
        by = {i.name for i in s.ints if i.value}
        ins = s.op in REDUCTIONS or by & {"from_step", "from_rank"}
        outs = s.op == "gather" or "to_rank" in by
        parts = (s.ins if ins else ()) + (s.outs if outs else ())
        out |= {r.cls for r in s.refs if r.by_rank or r in parts}
    return frozenset(out)


class Memory:
    """Holds all that the parts of the play share: the plan's records by name, the slots, and the
    step that is played. It refuses accesses to slots that are out of order."""

    def __init__(self, p: Plan) -> None:
        self.p = p
        self.head = p.head
        self.W = p.head.ranks
        self.real = p.head.bytes
        self.groups = members(p)
        self.every = self.groups["all"]
        self.classes = {c.name: c for c in p.classes}
        self.flats = {f.name: f for f in p.flats}
        self.fns = {f.name: f for f in p.fns}
        self.batch = arrays(p)
        # Flats' instances that train
        self.moving = {
            (f.name, l) for f in p.flats if p.moves(f) for l in range(f.count)
        }
        # Classes that are addressed by rank, those whose content dies at a marked last use, and
        # those of states that a run keeps.
        self.parted = _parted(p)
        self.passing = {c.name for c in p.passing}
        self.saved = {s.cls for f in p.flats for s in p.kept(f)}
        self.slots: dict[tuple[str, int], Buffer] = {}
        # slots that peers may read until `done`
        self.peers: tuple[Buffer, ...] = ()
        # training steps begun, those that are over, and the micro-batch's index in its step
        self.now = self.made = self.local = 0
        # The current step: its section and number there, its queue, clock and arenas.
        self.section = ""
        self.number = 0
        self.step = Step("main", "", "")
        self.queue = MAIN
        self.clock: Clock = []
        self.arenas = ("device", "device")

    def fail(self, what: str) -> NoReturn:
        s = self.step
        where = f"section {self.section}, step {self.number}"
        raise CheckError(f"{where}: {s.queue} {s.op} {s.unit}: {what}")

    def ends(self, what: str) -> NoReturn:
        raise CheckError(f"at the end of section {self.section}: {what}")

    # ---- names

    def slot(self, ref: Ref) -> Buffer:
        return self.bytes(ref.cls, ref.index)

    def bytes(self, cls: str, index: int) -> Buffer:
        found = self.slots.get((cls, index))
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
            self.slots[cls, index] = found
        return found

    def place(self, ref: Ref) -> Place:
        group = self.groups[ref.group]
        return Place(self.slot(ref), ref.at, ref.by_rank, group)

    def first_slot(self, cls: str) -> Place:
        return Place(self.bytes(cls, 0), 0, 0, self.every)

    @property
    def group(self) -> Members:
        """The group that the current step names."""
        return self.groups[self.step.group]

    def owners(self, flat: str) -> Members:
        """Return the group in which a rank's place is the number of its shard."""
        return self.groups[self.flats[flat].owners]

    def among(self, by: Along, n: int) -> Members | None:
        """Return the group in which neighbouring places are `n` apart, as `by` says."""
        for group in self.groups.values():
            if group.times(n) == by:
                return group
        return None

    # ---- accesses to a slot

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
        mine = self.queue
        clock = self.clock
        # Consecutive pieces merge into one access, as late as its last. In the file arena they do
        # not.
        joins = buffer.arena != "file"
        new, kept = True, []
        for access in buffer.accesses:
            low, high, wrote, queue, at = access
            if (wrote or write) and at > clock[queue] and low < hi and lo < high:
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

    def all_of(self, ref: Ref, write: bool) -> Buffer:
        """Access a whole slot and return it."""
        buffer = self.slot(ref)
        self.touch(buffer, 0, buffer.stride, write)
        return buffer

    def operand(self, arg: Operand, write: bool) -> None:
        """Access the class that an operand names: a kernel's part of ctl, or all of another
        class."""
        whole = 0, self.classes[arg.base].stride
        self.touch(self.bytes(arg.base, 0), *CTL.get(arg, whole), write)

    def common(self, buffer: Buffer) -> None:
        """Require that peers can read the buffer."""
        if self.W > 1 and self.classes[buffer.cls].readers != "peers":
            self.fail(f"peers cannot read {buffer}")

    # ---- accesses to a place

    def access(self, where: Place, size: int, write: bool) -> Buffer:
        """Record an access to bytes of a place, or to the same bytes of every rank's part.

        All pieces of a buffer that is cut by rank are equally far apart, so the offset within a
        part decides whether two accesses conflict. An access to the buffer as a whole conflicts
        with all.
        """
        buffer, at, by_rank, group = where
        if by_rank:
            buffer.cut(by_rank, group)
            within = at % (by_rank * group.ranks)
            if self.W > 1 and not buffer.parted:
                self.fail(f"{where}: no step takes {buffer.cls} in parts")
            if (
                within + size > by_rank
                or at + by_rank * (group.ranks - 1) + size > buffer.stride
            ):
                self.fail(f"{where}: {size} bytes are no rank's part")
            # Peers never read a rank's own part.
            peers, self.peers = self.peers, ()
            self.touch(buffer, at, at + size, write)
            self.peers = peers
        elif buffer.parted and at + size <= buffer.stride:
            self.touch(buffer, 0, buffer.stride, write)
        else:
            self.touch(buffer, at, at + size, write)
        return buffer

    def reads(self, where: Place, size: int) -> Extent | None:
        """Access a place and return its content."""
        self.access(where, size, False)
        return where.look(size)

    def writes(self, where: Place, size: int, run: Extent) -> None:
        """Access a place and replace its content."""
        self.access(where, size, True)
        where.put(size, run)

    def holds(self, where: object, run: Extent | None, want: Extent) -> None:
        """Refuse the content of a place if it is not the wanted one."""
        if run != want:
            self.fail(f"{where} holds {told(run)}, not {told(want)}")

    def makes(self, where: Place, size: int, run: Extent) -> None:
        """Write new content. Refuse content that is already there."""
        if where.look(size) == run:
            self.fail(f"{where} holds {told(run)} already")
        self.writes(where, size, run)
