"""last.py -- marks the last use of each slot's content. The checker treats a slot as dead after its
mark."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..plan.plan import Ref, Section, Step

# Classes whose content outlives no micro-batch.
DIES = ("ring", "grad", "x", "save", "near", "dx", "acc")


def marked(steps: Sequence[Step]) -> tuple[Step, ...]:
    """Mark the last uses: a read before the slot's next write, and a write that no use follows. A
    write after a write adds to the content."""
    out: list[Step] = []
    # Slots that a later step uses, and whether the next use reads them.
    read: dict[tuple[str, int], bool] = {}

    def use(ref: Ref, last: bool, reads: bool) -> Ref:
        read[ref.cls, ref.index] = reads
        dies = last and ref.cls.partition(".")[0] in DIES
        return replace(ref, last=True) if dies else ref

    # No step reads and writes the same slot of these classes.
    for s in reversed(steps):
        outs = tuple([use(r, (r.cls, r.index) not in read, False) for r in s.outs])
        ins = tuple([use(r, not read.get((r.cls, r.index)), True) for r in s.ins])
        same = ins == s.ins and outs == s.outs
        out.append(s if same else replace(s, ins=ins, outs=outs))
    return tuple(reversed(out))


def sections(made: Sequence[Section]) -> tuple[Section, ...]:
    """Mark the micro-batch and evaluation sections. Evaluation shares the steps of the
    micro-batch's forward, so it keeps their marks."""
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
