"""last.py -- which use of what a slot holds is its last: the mark of a step's operand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..plan.plan import Ref, Section, Step

DIES = (
    "ring",
    "grad",
    "x",
    "save",
    "near",
    "dx",
    "acc",
)  # classes of what outlives no micro-batch


def marked(steps: Sequence[Step]) -> tuple[Step, ...]:
    """Steps with marks: on a read that no other follows before the slot is written anew, and on a
    write that nothing follows. A write behind a write adds to what is there."""
    out: list[Step] = []
    read: dict[
        tuple[str, int], bool
    ] = {}  # slots that are used further on: are they read?

    def use(ref: Ref, last: bool, reads: bool) -> Ref:
        read[ref.cls, ref.index] = reads
        dies = last and ref.cls.partition(".")[0] in DIES
        return replace(ref, last=True) if dies else ref

    for s in reversed(steps):  # none reads and writes one slot of what dies
        outs = tuple(
            [use(r, (r.cls, r.index) not in read, False) for r in s.outs]
        )
        ins = tuple(
            [use(r, not read.get((r.cls, r.index)), True) for r in s.ins]
        )
        same = ins == s.ins and outs == s.outs
        out.append(s if same else replace(s, ins=ins, outs=outs))
    return tuple(reversed(out))


def sections(made: Sequence[Section]) -> tuple[Section, ...]:
    """A micro-batch and an evaluation, which as far as it is a micro-batch's forward has that one's
    marks."""
    (micro_batch,) = (s.steps for s in made if s.name == "micro_batch")
    ends = [s for s in marked(micro_batch) if s.op != "batch"]
    plain = [s for s in micro_batch if s.op != "batch"]

    def evaluation(steps: tuple[Step, ...]) -> tuple[Step, ...]:
        same = 0
        for a, b in zip(plain, steps, strict=False):
            if a != b:
                break
            same += 1
        return (*ends[:same], *marked(steps[same:]))

    how = {"micro_batch": marked, "eval": evaluation}
    out = list(made)
    for n, s in enumerate(made):
        if s.name in how:
            out[n] = replace(s, steps=how[s.name](s.steps))
    return tuple(out)
