"""hops.py -- how queues hand bytes on: an event says that a slot is full, another that it is free.

A hop moves bytes on a queue. Where it takes a slot it waits until that is full, and then it is
free; where it fills one it waits until that is free, and then it is full. A route is hops one after
the other. `full` of an instance of parameters says that all of it is new.

What is no slot: end.Q[0], queue Q is done with all that came before; and `UPDATED`.
An event whose two sides lie on one queue orders nothing, and no plan has it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ..plan.plan import Event, Events, Ref, Section, Step

UPDATED = Event(
    "updated", 0
)  # a step's parameters are new, or each says itself when


Who = Mapping[
    str, set[str]
]  # of an event, the queues that wait for it or record it


@dataclass(frozen=True)
class Ring:
    """Slots of a class that are used in turn."""

    cls: str
    slots: int

    def slot(self, turn: int) -> Ref:
        return Ref(self.cls, turn % self.slots)


@dataclass(frozen=True)
class Hop:
    """From one place to the next; takes, fills: the source, the target is a slot to hand over."""

    queue: str
    src: Ref
    dst: Ref
    takes: bool = True
    fills: bool = True
    after: Events = ()
    then: Events = ()

    @property
    def waits(self) -> Events:
        source = (full(self.src),) if self.takes else ()
        target = (free(self.dst),) if self.fills else ()
        return (*self.after, *source, *target)

    @property
    def recs(self) -> Events:
        target = (full(self.dst),) if self.fills else ()
        source = (free(self.src),) if self.takes else ()
        return (*target, *source, *self.then)


def move(
    queue: str,
    src: Ref,
    dst: Ref,
    after: Events = (),
    then: Events = (),
) -> Hop:
    """Between places that are no slots."""
    return Hop(
        queue=queue,
        src=src,
        dst=dst,
        takes=False,
        fills=False,
        after=after,
        then=then,
    )


def full(slot: Ref) -> Event:
    return Event(f"full.{slot.cls}", slot.index)


def free(slot: Ref) -> Event:
    """Of rings that units are gathered to there is one for all: the bound is on what is gathered at
    once, whatever the slots, so a gather waits for the end of the newest use."""
    if slot.cls.startswith("ring."):
        return Event("free.ring", 0)
    return Event(f"free.{slot.cls}", slot.index)


def end(queue: str) -> Event:
    return Event(f"end.{queue}", 0)


def route(
    home: Ref, stops: Sequence[tuple[str, Ref]], after: Events
) -> list[Hop]:
    """From home to each stop, a slot of a ring, on its queue."""
    hops: list[Hop] = []
    for queue, stop in stops:
        if hops:
            hops.append(Hop(queue, hops[-1].dst, stop))
        else:
            hops.append(Hop(queue, home, stop, takes=False, after=after))
    return hops


# ---- what orders nothing


def crossing(sections: Sequence[Section]) -> tuple[Section, ...]:
    """The sections with those events alone that go from one queue to another."""
    waiting, recording = _sides(sections)
    out = []
    for section in sections:
        steps = [_crossing(s, waiting, recording) for s in section.steps]
        kept = [s for s in steps if s.op != "mark" or s.waits or s.recs]
        out.append(replace(section, steps=tuple(kept)))
    return tuple(out)


def _sides(
    sections: Sequence[Section],
) -> tuple[Who, Who]:
    """The queues that wait for events of a name, and those that record them."""
    waiting: dict[str, set[str]] = defaultdict(set)
    recording: dict[str, set[str]] = defaultdict(set)
    for section in sections:
        for s in section.steps:
            for e in s.waits:
                waiting[e.name].add(s.queue)
            for e in s.recs:
                recording[e.name].add(s.queue)
    return waiting, recording


def _crossing(s: Step, waiting: Who, recording: Who) -> Step:
    """A step without waits for its own queue, and records for nobody else."""
    here = {s.queue}
    waits = tuple([e for e in s.waits if recording[e.name] - here])
    recs = tuple([e for e in s.recs if waiting[e.name] - here])
    same = waits == s.waits and recs == s.recs
    return s if same else replace(s, waits=waits, recs=recs)
