"""hops.py -- hands buffers from queue to queue by two events per slot, `full` and `free`.

A hop copies bytes on a queue. If its source is a slot, it waits until the slot is full and then
frees it. If its target is a slot, it waits until the slot is free and then fills it. A route is a
sequence of hops. `full.param.F[l]` is recorded once all parameters of instance l are updated. Two
events belong to no slot: `end.Q[0]`, recorded after all earlier work on queue Q, and UPDATED. An
event that is recorded and awaited on one queue orders nothing, so `crossing` removes it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ..plan.plan import Event, Events, Ref, Section, Step

# All parameters are updated, except those whose update has an event of its own.
UPDATED = Event("updated", 0)


QueueNames = Mapping[str, set[str]]  # by name of an event


@dataclass(frozen=True)
class Ring:
    """Slots of a class that are used in turn."""

    cls: str
    slots: int

    def slot(self, turn: int) -> Ref:
        """Return the slot for use number `turn`."""
        return Ref(self.cls, turn % self.slots)


@dataclass(frozen=True)
class Hop:
    """A copy on a queue. takes: the source is a slot to free; fills: the target is a slot to fill;
    after, then: further events to wait for and to record."""

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


def plain_hop(
    queue: str,
    src: Ref,
    dst: Ref,
    after: Events = (),
    then: Events = (),
) -> Hop:
    """Return a hop between places that are no slots."""
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
    """Return the event that a slot is full."""
    return Event(f"full.{slot.cls}", slot.index)


def free(slot: Ref) -> Event:
    """Return the event that a slot is free. All rings share one event, because the bound is on all
    gathered elements: a gather waits for the end of the newest use, whatever its slot."""
    if slot.cls.startswith("ring."):
        return Event("free.ring", 0)
    return Event(f"free.{slot.cls}", slot.index)


def end(queue: str) -> Event:
    """Return the event that all earlier work on a queue is done."""
    return Event(f"end.{queue}", 0)


def route(home: Ref, slots: Sequence[tuple[str, Ref]], after: Events) -> list[Hop]:
    """Return the hops from `home` through each slot, on the queue named with it."""
    hops: list[Hop] = []
    for queue, slot in slots:
        if hops:
            hops.append(Hop(queue, hops[-1].dst, slot))
        else:
            hops.append(Hop(queue, home, slot, takes=False, after=after))
    return hops


# ---- events within one queue


def crossing(sections: Sequence[Section]) -> tuple[Section, ...]:
    """Remove waits and records that do not cross queues, and marks that are left without any."""
    waiting, recording = _queues_by_event(sections)
    out = []
    for section in sections:
        steps = [_crossing(s, waiting, recording) for s in section.steps]
        kept = [s for s in steps if s.op != "mark" or s.waits or s.recs]
        out.append(replace(section, steps=tuple(kept)))
    return tuple(out)


def _queues_by_event(
    sections: Sequence[Section],
) -> tuple[QueueNames, QueueNames]:
    """Return, by event name, the queues that wait for it and the queues that record it."""
    waiting: dict[str, set[str]] = defaultdict(set)
    recording: dict[str, set[str]] = defaultdict(set)
    for section in sections:
        for s in section.steps:
            for e in s.waits:
                waiting[e.name].add(s.queue)
            for e in s.recs:
                recording[e.name].add(s.queue)
    return waiting, recording


def _crossing(s: Step, waiting: QueueNames, recording: QueueNames) -> Step:
    """Remove waits for events of the step's own queue and records that no other queue awaits."""
    here = {s.queue}
    waits = tuple([e for e in s.waits if recording[e.name] - here])
    recs = tuple([e for e in s.recs if waiting[e.name] - here])
    same = waits == s.waits and recs == s.recs
    return s if same else replace(s, waits=waits, recs=recs)
