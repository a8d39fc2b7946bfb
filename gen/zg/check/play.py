"""play.py -- plays steps in order of issue.

A record of an event copies the clock of its queue, a wait takes the maximum of both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ..facts.commands import BATCH, COMMANDS, Command, batch_numbers
from ..facts.queues import QUEUES, Queue
from ..plan.plan import Fn, Ref, Step
from .order import LACKS, MAIN, Buffer, Clock, Memory

INDEX = {name: n for n, name in enumerate(QUEUES)}
NONE = Command("", (), -1, -1)  # stands for an unknown step
# Queue, number of the step there, and the clock after that step.
Record = tuple[int, int, Clock]
FIRST: Record = (0, 0, [])
Act = Callable[..., None]
Action = tuple[Act, Sequence[object]]  # a method and its arguments


@dataclass(slots=True)
class Resolved:
    """A step with its names looked up, so that it can be played again. act, operands: a method and
    its arguments."""

    queue: int
    arenas: tuple[str, str]
    waits: list[tuple[str, int]]
    recs: list[tuple[str, int]]
    act: Act
    operands: Sequence[object]
    dead: list[Buffer]  # slots that are dead after the step


@dataclass
class Player:
    """Plays one step after the other: it waits for events, acts, and records events.

    commands: methods for the steps that call no function, by kind; call: returns the method for a
    function with these numbers; dies: releases a slot.
    """

    m: Memory
    commands: Mapping[str, Act]
    call: Callable[[Fn, Step, dict[str, int]], Action]
    dies: Callable[[Buffer], None]
    clocks: list[Clock] = field(
        default_factory=lambda: [[0] * len(QUEUES) for _ in QUEUES]
    )
    events: dict[tuple[str, int], Record] = field(default_factory=dict)
    # the plan's steps, by identity
    lines: dict[int, Resolved] = field(default_factory=dict)

    def play(self, s: Step) -> None:
        """Play one step: wait for events, act, release dead slots, record events."""
        m = self.m
        m.step = s
        try:
            line = self.lines.get(id(s)) or self.read(s)
            m.queue = line.queue
            m.arenas = line.arenas
            m.clock = clock = self.clocks[line.queue]
            for event in line.waits:
                queue, at, known = self.events.get(event, FIRST)
                # Otherwise all that it knew is already known here.
                if clock[queue] < at:
                    clock[:] = [
                        a if a > b else b for a, b in zip(clock, known, strict=True)
                    ]
            clock[line.queue] += 1
            line.act(*line.operands)
            for buffer in line.dead:
                self.dies(buffer)
        except LACKS as e:
            m.fail(f"names what the plan does not have: {e}")
        for event in line.recs:
            self.events[event] = line.queue, clock[line.queue], clock[:]

    def read(self, s: Step) -> Resolved:
        """Look up a step's names. A step that is the same in all micro-batches is looked up
        once."""
        m = self.m
        queue = QUEUES.get(s.queue) or m.fail("no such queue")
        if m.head.overlap == 0 and queue.beside:
            m.fail("a queue of its own, but collectives do not overlap")
        line = Resolved(
            INDEX[s.queue],
            (queue.reads, queue.writes),
            [(e.name, e.index) for e in s.waits],
            [(e.name, e.index) for e in s.recs],
            *self.action(s, queue),
            [m.bytes(r.cls, r.index) for r in s.refs if r.last],
        )
        if not any([i.per for i in s.ints]):
            self.lines[id(s)] = line
        return line

    def action(self, s: Step, queue: Queue) -> Action:
        """Return the method that plays a step, and its arguments."""
        m = self.m
        fn = m.fns.get(s.op)
        command = COMMANDS.get(s.kind, NONE)
        if fn:
            ins, outs, names = len(fn.ins), len(fn.outs), fn.ints
        else:
            ins, outs, names = command.ins, command.outs, command.numbers
        if outs == BATCH:
            outs, names = len(m.batch), batch_numbers(m.head.order)
        if (len(s.ins), len(s.outs)) != (ins, outs):
            m.fail("has other operands than it should")
        if fn and not queue.kernels:
            m.fail("the queue runs no kernels")
        if command.moves and not queue.wire:
            m.fail("the queue has no collectives")
        other = any([i.per and i.name != "micro_batch" for i in s.ints])
        if other or tuple([i.name for i in s.ints]) != names:
            m.fail("has other numbers than it should")
        refs = s.refs
        mortal = {"copy": s.ins, "exchange": s.ins, "done": s.ins[1:]}
        self.dying(s, refs if fn else mortal.get(s.kind, ()))
        self.meeting(s, command.meets)
        numbers = {i.name: i.value + i.per * m.local for i in s.ints}
        if fn:
            return self.call(fn, s, numbers)
        places = map(m.place, refs)
        return self.commands[s.kind], (*places, *numbers.values())

    def dying(self, s: Step, may: Sequence[Ref]) -> None:
        """Refuse a last use (`!`) of an operand outside `may`, or of a class that only some targets
        have."""
        for ref in s.refs:
            if ref.last and (
                ref not in may or self.m.classes[ref.cls].targets != "all"
            ):
                self.m.fail(f"{ref} cannot end here")

    def meeting(self, s: Step, meets: bool) -> None:
        """Require that a step with a meeting of ranks names an existing group, and that others name
        none."""
        if meets != bool(s.group):
            self.m.fail(
                "ranks meet, of no group"
                if meets
                else f"is no meeting of group {s.group}"
            )
        if meets and s.group not in self.m.groups:
            self.m.fail(f"there is no group {s.group}")

    def over(self) -> None:
        """Release everything that an evaluation leaves, after all queues have finished."""
        m = self.m
        m.step = Step("main", "over", "")
        m.queue = MAIN
        m.clock = self.clocks[MAIN]
        for buffer in m.slots.values():
            if buffer.held and buffer.cls in m.passing:
                self.dies(buffer)
