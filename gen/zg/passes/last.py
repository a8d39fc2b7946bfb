"""last.py -- which use of what a slot holds is its last: the mark of a step's operand."""
from __future__ import annotations

from dataclasses import replace
from typing import Sequence

from ..plan.plan import Ref, Section, Step

DIES = ("ring", "leaf", "x", "save", "near", "dx", "acc")       # classes of what outlives no grain


def marked(steps: Sequence[Step]) -> tuple[Step, ...]:
    """Steps with marks: on a read that no other follows before the slot is written anew, and on a
    write that nothing follows. A write behind a write adds to what is there."""
    out: list[Step] = []
    read: dict[tuple[str, int], bool] = {}      # slots that are used further on: are they read?

    def use(ref: Ref, last: bool, reads: bool) -> Ref:
        read[ref.cls, ref.index] = reads
        dies = last and ref.cls.partition(".")[0] in DIES
        return replace(ref, last=True) if dies else ref

    for s in reversed(steps):           # none reads and writes one slot of what dies
        outs = tuple([use(r, (r.cls, r.index) not in read, False) for r in s.outs])
        ins = tuple([use(r, not read.get((r.cls, r.index)), True) for r in s.ins])
        same = ins == s.ins and outs == s.outs
        out.append(s if same else replace(s, ins=ins, outs=outs))
    return tuple(reversed(out))


def sections(made: Sequence[Section]) -> tuple[Section, ...]:
    """A grain and an evaluation, which as far as it is a grain's forward has that one's marks."""
    grain, = (s.steps for s in made if s.name == "grain")
    ends = [s for s in marked(grain) if s.op != "batch"]
    plain = [s for s in grain if s.op != "batch"]

    def evaluation(steps: tuple[Step, ...]) -> tuple[Step, ...]:
        both = list(zip(plain, steps))
        same = next((n for n, (a, b) in enumerate(both) if a != b), len(both))
        return (*ends[:same], *marked(steps[same:]))

    how = {"grain": marked, "eval": evaluation}
    return tuple(replace(s, steps=how[s.name](s.steps)) if s.name in how else s for s in made)
