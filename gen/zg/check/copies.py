"""copies.py -- plays the steps that move bytes: copies, gathers, reductions over ranks; what they
touch, in order.py's terms, and what the places then hold, in memory.py's.
"""

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
NONE = Command("", (), -1, -1)  # what is no step
REDUCTIONS = (
    "alltoall",
    "reducescatter",
)  # what these bring is sent to who reads no peers


class Place(NamedTuple):
    """Bytes of a slot from `at` on, by_rank further for each place in a group."""

    buffer: Buffer
    at: int
    by_rank: int
    group: Members

    def __str__(self) -> str:
        rank = by_place(self.group.name, self.by_rank)
        return f"{self.buffer}+{self.at}{rank}"


@dataclass
class Reduction:
    """What ranks send each other, until all have summed it. came: what there is for rank r of
    every rank, whose number stands for the rank in the array's name."""

    source: Place
    size: int
    inbox: Place
    came: Run
    number: int
    leaf: bool  # of gradients as they are, not of sums in f32
    group: str
    sources: int  # that come to an owner: its group's ranks, or NCCL's sum
    step: int  # bytes from one rank's piece to the next
    summed: bool = False


def told(run: Run | None) -> str:
    """What a place holds, in an error."""
    if run is None:
        return "no one array"
    if run.width == 1 and not run.first:
        return str(run.array)
    rank = f" + {run.by_rank} along the axes" if run.by_rank else ""
    return f"{run.array}, from element {run.first}{rank} on"


class Moves(Order):
    """A run of a plan: every slot's bytes."""

    def __init__(self, p: Plan) -> None:
        super().__init__(p)
        self.flats = {f.name: f for f in p.flats}
        self.fns = {f.name: f for f in p.fns}
        self.batch = ops.batch(p.head.end >= 0, p.head.keyed == 1)
        self.parted = self._parted()
        # Classes of what does not stay; and of what does, or is marked where it ends.
        self.passing = {c.name for c in p.passing}
        self.lasting = {*self.passing, *(s.cls for s in p.stores)}
        self.reductions: list[Reduction] = []
        self.reduced = 0
        self.now = 0  # training steps begun
        # Elements that are gathered: a slot's, and which of main's steps knew of its release.
        self.live: dict[Buffer, tuple[int, int | None]] = {}
        whole = {s.flat for s in p.stores if s.what == "params" and s.whole}
        gathers = p.head.zero == 3  # what is not whole
        self.kept = gathers * sum(
            f.shard * self.W for f in p.flats if f.name in whole
        )
        self.most = self.kept

    def _parted(self) -> frozenset[str]:
        """Classes of which a step goes to or from parts by rank."""
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
        """The group whose place is the number of a rank's shard."""
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
        """Of a step's operands only some may be the last use of what their slots hold, of classes
        that all ranks have."""
        for ref in s.refs:
            if ref.last and (
                ref not in may or self.classes[ref.cls].targets != "all"
            ):
                self.fail(f"{ref} cannot end here")

    def meeting(self, s: Step, meets: bool) -> None:
        """A step in which ranks meet names their group; others are each rank's own."""
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
        """That the step names."""
        return self.groups[self.step.group]

    def dies(self, buffer: Buffer) -> None:
        """All that a slot holds, behind the step; of an evaluation, at its end."""
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
        """An access to bytes of a place, or to those of every rank's part: of such a buffer all
        pieces have one step, so their places within a part tell whether they meet; what is no
        part of it meets them all."""
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
            peers, self.peers = self.peers, ()  # which read no rank's own part
            self.touch(buffer, at, at + size, write)
            self.peers = peers
        elif buffer.parted and at + size <= buffer.stride:
            self.touch(buffer, 0, buffer.stride, write)
        else:
            self.touch(buffer, at, at + size, write)
        return buffer

    def reads(self, where: Place, size: int) -> Run | None:
        self.access(where, size, False)
        return self.look(where, size)

    def look(self, where: Place, size: int) -> Run | None:
        """What fills a place."""
        buffer, at, by_rank, group = where
        return (
            buffer.read_own(at, by_rank, size, group)
            if by_rank
            else buffer.read(at, size)
        )

    def writes(self, where: Place, size: int, run: Run) -> None:
        self.access(where, size, True)
        self.put(where, size, run)

    def put(self, where: Place, size: int, run: Run) -> None:
        buffer, at, by_rank, group = where
        if by_rank:
            buffer.write_own(at, by_rank, size, run, group)
        else:
            buffer.write(at, size, run)

    def makes(self, where: Place, size: int, run: Run) -> None:
        """Writes what was not there before."""
        if self.look(where, size) == run:
            self.fail(f"{where} holds {told(run)} already")
        self.writes(where, size, run)

    def place(self, ref: Ref) -> Place:
        group = self.groups[ref.group]
        return Place(self.slot(ref), ref.at, ref.by_rank, group)

    def first_slot(self, cls: str) -> Place:
        return Place(self.bytes(cls, 0), 0, 0, self.every)

    def rank_part(self, where: Place, by_rank: int) -> Place:
        """The part of a place that belongs to this rank in the group of the step."""
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
        """The group in which something is n further from place to place."""
        for group in self.groups.values():
            if group.times(n) == by:
                return group
        return None

    def all_of(self, buffer: Buffer, write: bool) -> Buffer:
        """An access to all of a slot."""
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
        """The rank's tokens and targets of a micro-batch, and what else comes with them, which come
        before all else of it: the run fetches them itself."""
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
        """Every rank's piece, to the same place of its part."""
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
        """Elements gathered at once: slots whose release does not come before this gather."""
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
        """NCCL's sum of what all ranks send: numbers of what the source holds."""
        run = self.sent(source, step, size, False)
        if run.width != width:
            self.fail("sums numbers of another width")
        added = over_ranks(self.one_sum(run), self.group)
        if not added:
            self.fail("sums what does not follow each other over ranks")
        one = self.one_sum(run).leaves  # of the tree
        sum_ = run._replace(array=added._replace(leaves=one))
        self.brings(source, to, size, step, sum_, run.array)

    def do_alltoall(
        self, source: Place, to: Place, step: int, size: int
    ) -> None:
        run = self.sent(source, step, size, True)
        self.brings(source, to, size, step, run, run.array)

    def sent(self, source: Place, step: int, size: int, each: bool) -> Run:
        """Of a piece of every part, the own one and others alike: what each rank has for r.
        each: every rank's comes as it is."""
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
        """What came to a slot, and is to be summed."""
        r = self.under_way(inbox)
        if r.summed:
            self.fail("what came is summed")
        run = self.reads(r.inbox, r.sources * r.size)
        if not run or run.array != Came(r.number):
            self.fail(f"{r.inbox} does not hold what came any more")
        r.summed = True
        return r

    def under_way(self, inbox: Place) -> Reduction:
        """The reduction to a slot."""
        for r in self.reductions:
            if r.inbox == inbox:
                return r
        self.fail(f"nothing is under way to {inbox}")

    def do_done(self, inbox: Place, source: Place) -> None:
        """Every owner has summed its part of what was sent."""
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
        """A leaf that is complete, or a sum."""
        array = run.array
        if isinstance(array, Sum) and array.whole:
            return array
        if isinstance(array, Leaf) and self.complete(array):
            return Sum(array.flat, array.l, array.micro_batch, 1, 1, True)
        self.fail(f"sums {told(run)}")

    def complete(self, leaf: Leaf) -> bool:
        """All that write a leaf have; which do, units know."""
        self.fail("no such leaf")
