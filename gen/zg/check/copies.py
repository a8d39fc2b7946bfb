"""copies.py -- plays the steps that move bytes: copies, all-gathers and reductions. It records
their accesses (order.py) and the content of their destinations (memory.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..facts import ops
from ..facts.commands import BATCH, COMMANDS, Command, batch_numbers
from ..facts.queues import QUEUES
from ..plan.mesh import Along, Members, plus
from ..plan.operand import by_place
from ..plan.plan import Fn, Plan, Ref, Step
from .arrays import Came, Leaf, MicroBatch, Sum, Value, over_ranks
from .memory import Run
from .order import INDEX, Action, Buffer, Order

MAIN = INDEX["main"]
NONE = Command("", (), -1, -1)  # stands for an unknown step
# These send pieces to receive buffers where peers' memory cannot be read.
REDUCTIONS = (
    "alltoall",
    "reducescatter",
)


class Place(NamedTuple):
    """Bytes of a slot from `at` on, by_rank bytes further for each place in a group."""

    buffer: Buffer
    at: int
    by_rank: int
    group: Members

    def __str__(self) -> str:
        rank = by_place(self.group.name, self.by_rank)
        return f"{self.buffer}+{self.at}{rank}"


@dataclass
class Reduction:
    """A reduction under way: the pieces that ranks send each other, until all owners have summed
    theirs. came: the array that rank r receives from each rank."""

    source: Place
    size: int
    inbox: Place
    came: Run
    number: int
    leaf: bool  # gradients as they are, not f32 sums
    group: str
    sources: int  # pieces that an owner receives: one per rank of the group, or NCCL's one sum
    step: int  # bytes between the pieces of neighbouring ranks
    summed: bool = False


def told(run: Run | None) -> str:
    """Describe the content of a place for an error."""
    if run is None:
        return "no one array"
    if run.width == 1 and not run.first:
        return str(run.array)
    rank = f" + {run.by_rank} along the axes" if run.by_rank else ""
    return f"{run.array}, from element {run.first}{rank} on"


class Moves(Order):
    """Plays the steps that move bytes, and tracks the content of every slot."""

    def __init__(self, p: Plan) -> None:
        super().__init__(p)
        self.flats = {f.name: f for f in p.flats}
        self.fns = {f.name: f for f in p.fns}
        self.batch = ops.batch(p.head.end >= 0, p.head.keyed == 1)
        self.parted = self._parted()
        # Classes whose content dies at a marked last use; and these with the classes of states.
        self.passing = {c.name for c in p.passing}
        self.lasting = {*self.passing, *(s.cls for s in p.stores)}
        self.reductions: list[Reduction] = []
        self.reduced = 0
        self.now = 0  # training steps begun
        # Gathered elements of each slot, and main's clock when it was released (None: not yet).
        self.live: dict[Buffer, tuple[int, int | None]] = {}
        whole = {s.flat for s in p.stores if s.what == "params" and s.whole}
        gathers = p.head.zero == 3  # else every rank has whole parameters
        self.kept = gathers * sum(
            f.shard * self.W for f in p.flats if f.name in whole
        )
        self.most = self.kept

    def _parted(self) -> frozenset[str]:
        """Return the classes that some step addresses by rank."""
        if self.W == 1:
            return frozenset()
        out = set()
        for s in (s for section in self.p.sections for s in section.steps):
            numbers = {i.name: i.value for i in s.ints}
            out |= {r.cls for r in s.refs if r.by_rank}
            if s.op == "gather":
                own = s.ins if numbers.get("from_step") else ()
                out |= {r.cls for r in (*own, *s.outs)}
            elif s.op in ("alltoall", "reducescatter"):
                out |= {r.cls for r in s.ins}
            elif s.op == "copy":
                sides = (
                    (s.ins, numbers.get("from_rank")),
                    (s.outs, numbers.get("to_rank")),
                )
                out |= {r.cls for refs, by in sides if by for r in refs}
        return frozenset(out)

    def owners(self, flat: str) -> Members:
        """Return the group in which a rank's place is the number of its shard."""
        return self.groups[self.flats[flat].owners]

    # ---- a step

    def action(self, s: Step) -> Action:
        fn = self.fns.get(s.op)
        command = COMMANDS.get(s.kind, NONE)
        queue = QUEUES[s.queue]
        if fn:
            ins, outs, names = len(fn.ins), len(fn.outs), fn.ints
        else:
            ins, outs, names = command.ins, command.outs, command.numbers
        if outs == BATCH:
            outs, names = len(self.batch), batch_numbers(self.p.head.order)
        if (len(s.ins), len(s.outs)) != (ins, outs):
            self.fail("has other operands than it should")
        if fn and not queue.kernels:
            self.fail("the queue runs no kernels")
        if command.moves and not queue.wire:
            self.fail("the queue has no collectives")
        by_micro_batch = [i.name for i in s.ints if i.per]
        if tuple([i.name for i in s.ints]) != names or set(by_micro_batch) - {
            "micro_batch"
        }:
            self.fail("has other numbers than it should")
        refs = s.refs
        mortal = {"copy": s.ins, "done": s.ins[1:]}
        self.dying(s, refs if fn else mortal.get(s.kind, ()))
        self.meeting(s, command.meets)
        numbers = {i.name: i.value + i.per * self.local for i in s.ints}
        if fn:
            return self.calling(fn, s, numbers)
        places = [self.place(ref) for ref in refs]
        do = getattr(type(self), f"do_{s.kind}")
        return do, (*places, *numbers.values())

    def dying(self, s: Step, may: Sequence[Ref]) -> None:
        """Refuse a last use (`!`) of an operand outside `may`, or of a class that only some targets
        have."""
        for ref in s.refs:
            if ref.last and (
                ref not in may or self.classes[ref.cls].targets != "all"
            ):
                self.fail(f"{ref} cannot end here")

    def meeting(self, s: Step, meets: bool) -> None:
        """Require that a step with a meeting of ranks names an existing group, and that others name
        none."""
        if meets != bool(s.group):
            self.fail(
                "ranks meet, of no group"
                if meets
                else f"is no meeting of group {s.group}"
            )
        if meets and s.group not in self.groups:
            self.fail(f"there is no group {s.group}")

    @property
    def group(self) -> Members:
        """The group that the current step names."""
        return self.groups[self.step.group]

    def dies(self, buffer: Buffer) -> None:
        """Release a slot: all of its content is dead after this step."""
        self.touch(buffer, 0, buffer.stride, True, True)
        if not buffer.held:
            self.fail(f"{buffer} holds nothing")
        buffer.clear()
        if buffer in self.live:
            self.live[buffer] = self.live[buffer][0], self.clock[MAIN]

    def calling(
        self,
        fn: Fn,
        s: Step,
        numbers: dict[str, int],
    ) -> Action:
        self.fail("no such step")

    def do_mark(self) -> None:
        if not (self.step.waits or self.step.recs):
            self.fail("marks nothing")

    # ---- accesses

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

    def reads(self, where: Place, size: int) -> Run | None:
        """Access a place and return its content, as `look` does."""
        self.access(where, size, False)
        return self.look(where, size)

    def look(self, where: Place, size: int) -> Run | None:
        """Return the content of a place, or None if no one run of an array fills it."""
        buffer, at, by_rank, group = where
        return (
            buffer.read_own(at, by_rank, size, group)
            if by_rank
            else buffer.read(at, size)
        )

    def writes(self, where: Place, size: int, run: Run) -> None:
        """Access a place and replace its content."""
        self.access(where, size, True)
        self.put(where, size, run)

    def put(self, where: Place, size: int, run: Run) -> None:
        buffer, at, by_rank, group = where
        if by_rank:
            buffer.write_own(at, by_rank, size, run, group)
        else:
            buffer.write(at, size, run)

    def makes(self, where: Place, size: int, run: Run) -> None:
        """Write new content. Refuse content that is already there."""
        if self.look(where, size) == run:
            self.fail(f"{where} holds {told(run)} already")
        self.writes(where, size, run)

    def place(self, ref: Ref) -> Place:
        group = self.groups[ref.group]
        return Place(self.slot(ref), ref.at, ref.by_rank, group)

    def first_slot(self, cls: str) -> Place:
        return Place(self.bytes(cls, 0), 0, 0, self.every)

    def rank_part(self, where: Place, by_rank: int) -> Place:
        """Return this rank's part of a place, in the group of the step."""
        if not where.by_rank:
            return where._replace(by_rank=by_rank, group=self.group)
        if not by_rank:
            return where
        by = plus(where.group.times(where.by_rank), self.group.times(by_rank))
        among = self.among(by, by_rank) or self.fail(
            f"{where}: no group has such parts"
        )
        return where._replace(by_rank=by_rank, group=among)

    def among(self, by: Along, n: int) -> Members | None:
        """Return the group in which neighbouring places are `n` apart, as `by` says."""
        for group in self.groups.values():
            if group.times(n) == by:
                return group
        return None

    def all_of(self, buffer: Buffer, write: bool) -> Buffer:
        """Access the whole slot."""
        self.touch(buffer, 0, buffer.stride, write)
        return buffer

    # ---- moves

    def do_copy(
        self, source: Place, to: Place, from_rank: int, to_rank: int, size: int
    ) -> None:
        if from_rank:
            source = source._replace(by_rank=from_rank)
        if to_rank:
            to = to._replace(by_rank=to_rank)
        run = self.reads(source, size)
        if not run or size % run.width:
            self.fail(f"{source}: {size} bytes hold {told(run)}")
        there = to.buffer.held
        if there and to.buffer.cls in self.passing:
            self.fail(f"{to} still holds {told(there[0][2])}")
        self.writes(to, size, run)

    def do_batch(self, *operands: Any) -> None:
        """Fetch a rank's tokens and targets of a micro-batch, and the arrays that come with them.
        The runtime fetches them itself, so these steps come first in a micro-batch."""
        places, numbers = (
            operands[: len(self.batch)],
            operands[len(self.batch) :],
        )
        *ranks, micro_batch = numbers
        by: Along = ()
        for name, n in zip(self.p.head.order.groups, ranks, strict=True):
            by = plus(by, self.groups[name].times(n))
        before = self.p.section(self.section).steps[: self.number]
        if self.section != "micro_batch" or any(
            s.op != "batch" for s in before
        ):
            self.fail("tokens come at a micro-batch's begin")
        if self.queue != MAIN or self.step.waits or self.step.recs:
            self.fail("the queue fetches no tokens")
        if len({where.buffer.index for where in places}) > 1:
            self.fail("a micro-batch has slots of two numbers")
        for where, what in zip(places, self.batch, strict=True):
            slot = (
                self.all_of(where.buffer, True)
                if not where.at
                else self.fail(f"fills {where}")
            )
            slot.write(
                0,
                slot.stride,
                Run(Value(what, "", MicroBatch(self.now, micro_batch, by))),
            )

    def do_gather(
        self, source: Place, to: Place, own: int, step: int, size: int
    ) -> None:
        """All-gather: copy every rank's piece to the same offset of its part."""
        group = self.group
        whole = step * (group.ranks - 1) + to.at + size
        if (
            not 0 < size <= step - to.at
            or whole > to.buffer.stride
            or own not in (0, step)
        ):
            self.fail("piece lies outside the shard")
        self.common(source.buffer)
        run = self.reads(self.rank_part(source, own), size)
        micro_batch = getattr(run.array, "micro_batch", None) if run else None
        by_rank = getattr(micro_batch, "by_rank", ())
        if (
            not run
            or group.within(by_rank)
            or group.each(run.by_rank) < 0
            or size % run.width
        ):
            self.fail(
                f"{source} holds {told(run)}, which is nothing to gather"
            )
        to.buffer.cut(step, group)
        self.touch(to.buffer, to.at, to.at + size, True)
        if not own and to.buffer.cls in self.passing:
            self.gathered(to.buffer, step * group.ranks // run.width)
        rest, part = group.without(run.by_rank), group.each(run.by_rank)
        slot, all_ = to.buffer, run._replace(by_rank=rest, by_part=part)
        fresh = not own and to.buffer.cls in self.passing
        again = slot.read_parts(to.at, step, size, group) == all_
        if (fresh and slot.held and not slot.step) or (
            again and to.buffer.cls in self.lasting
        ):
            self.fail(f"{to} still holds {told(slot.held[0][2])}")
        slot.write_parts(to.at, step, size, all_, group)

    def gathered(self, to: Buffer, elements: int) -> None:
        """Count the elements that are gathered at once. A slot counts until a release that is
        ordered before this gather."""
        _, freed = self.live.get(to, (0, 0))
        if freed is None:
            return
        self.live[to] = elements, None
        for key, (_, freed) in list(self.live.items()):
            if freed is not None and freed <= self.clock[MAIN]:
                del self.live[key]
        total = self.kept + sum(n for n, _ in self.live.values())
        self.most = max(self.most, total)
        if total > self.p.head.live:
            self.fail(
                f"{total} elements gathered at once, {self.p.head.live} were promised"
            )

    # ---- reductions

    def do_reducescatter(
        self, source: Place, to: Place, step: int, size: int, width: int
    ) -> None:
        """NCCL's reduce-scatter. width: bytes of a number of the source."""
        run = self.sent(source, step, size, False)
        if run.width != width:
            self.fail("sums numbers of another width")
        added = over_ranks(self.one_sum(run), self.group)
        if not added:
            self.fail("sums what does not follow each other over ranks")
        one = self.one_sum(run).leaves  # leaf of the tree
        sum_ = run._replace(array=added._replace(leaves=one))
        self.brings(source, to, size, step, sum_, run.array)

    def do_alltoall(
        self, source: Place, to: Place, step: int, size: int
    ) -> None:
        run = self.sent(source, step, size, True)
        self.brings(source, to, size, step, run, run.array)

    def sent(self, source: Place, step: int, size: int, each: bool) -> Run:
        """Return the array that each rank sends to rank r, from a piece of every part, the own one
        included. each: pieces arrive one by one, not as a sum."""
        exact = self.p.head.reduction == "exact" or self.W == 1
        if each != exact:
            self.fail(f"reduces in another way than {self.p.head.reduction}")
        slot, at = source.buffer, source.at
        whole = step * (self.group.ranks - 1) + at + size
        room = step - at
        if not 0 < size <= room or whole > slot.stride:
            self.fail("piece lies outside the shard")
        self.common(slot)
        slot.cut(step, self.group)
        self.touch(slot, at, at + size, False)
        run = slot.read_parts(at, step, size, self.group)
        if not run or self.group.within(run.by_rank) or size % run.width:
            self.fail(f"{source} holds {told(run)}, which is nothing to sum")
        return run

    def brings(
        self,
        source: Place,
        inbox: Place,
        size: int,
        step: int,
        run: Run,
        of: object,
    ) -> None:
        """Start a reduction: its pieces are on their way to the inbox."""
        if inbox.at or any(r.inbox == inbox for r in self.reductions):
            self.fail(f"{inbox} is not free: what came there is not done")
        self.reduced += 1
        sources = self.group.ranks if self.step.op == "alltoall" else 1
        self.writes(inbox, sources * size, Run(Came(self.reduced)))
        came = inbox.buffer.own(run, self.group)
        new = Reduction(
            source,
            size,
            inbox,
            came,
            self.reduced,
            isinstance(of, Leaf),
            self.step.group,
            sources,
            step,
        )
        self.reductions.append(new)
        self.peers = (*self.peers, source.buffer)

    def brought(self, inbox: Place) -> Reduction:
        """Return the reduction whose pieces lie in this slot, and mark it as summed."""
        r = self.under_way(inbox)
        if r.summed:
            self.fail("what came is summed")
        run = self.reads(r.inbox, r.sources * r.size)
        if not run or run.array != Came(r.number):
            self.fail(f"{r.inbox} does not hold what came any more")
        r.summed = True
        return r

    def under_way(self, inbox: Place) -> Reduction:
        """Return the reduction that sends to this slot."""
        for r in self.reductions:
            if r.inbox == inbox:
                return r
        self.fail(f"nothing is under way to {inbox}")

    def do_done(self, inbox: Place, source: Place) -> None:
        """Wait until every owner has summed its part; then the source may be overwritten."""
        r = self.under_way(inbox)
        if not r.summed or r.group != self.step.group:
            self.fail(f"group {r.group} has not summed what came")
        if source != r.source:
            self.fail(f"what was sent lies in {r.source}")
        end = source.at + r.size
        came = r.sources * r.size
        source.buffer.cut(r.step, self.group)
        self.touch(source.buffer, source.at, end, False)
        self.access(inbox, came, True)
        self.reductions.remove(r)
        self.peers = tuple(x.source.buffer for x in self.reductions)

    def one_sum(self, run: Run) -> Sum:
        """Return a complete gradient or a whole sum as a Sum. Refuse any other array."""
        array = run.array
        if isinstance(array, Sum) and array.whole:
            return array
        if isinstance(array, Leaf) and self.complete(array):
            return Sum(array.flat, array.l, array.micro_batch, 1, 1, True)
        self.fail(f"sums {told(run)}")

    def complete(self, leaf: Leaf) -> bool:
        """Return whether all functions that write a gradient have written it. Units overrides
        this."""
        self.fail("no such leaf")
