"""last.py -- marks the last use of each slot's content. The checker treats a slot as dead after its
mark."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..facts.between import BETWEEN, PASSED, SAVED
from ..plan.plan import Ref, Section, Step

# Classes whose content outlives no micro-batch.
DIES = ("ring", "grad", "x", *(BETWEEN[n].cls for n in SAVED), "near", "dx", "acc")
# Classes whose content outlives no unit.
PASSES = tuple(BETWEEN[n].cls for n in PASSED)
Slot = tuple[str, int]


def _slot(ref: Ref) -> Slot:
    return ref.cls, ref.index


def marked(steps: Sequence[Step]) -> tuple[Step, ...]:
    """Mark the last uses: a read before the slot's next write, and a write that no use follows. A
    write after a write adds to the content, and so does a step that reads the slot, too, or that
    moves bytes to a part of it."""
    out: list[Step] = []
    # Slots that a later step uses, and whether the next use reads them.
    read: dict[Slot, bool] = {}
    unit: dict[Slot, str] = {}  # of the next use

    def use(s: Step, ref: Ref, last: bool, reads: bool) -> Ref:
        slot = _slot(ref)
        name = ref.cls.partition(".")[0]
        dies = last and name in DIES
        if name in PASSES:
            dies = unit.get(slot) != s.unit
        read[slot], unit[slot] = reads, s.unit
        return replace(ref, last=True) if dies else ref

    for s in reversed(steps):
        changed = {*map(_slot, s.ins)} & {*map(_slot, s.outs)}
        parts = s.queue == "main" and s.op in ("exchange", "copy")
        later = {*read}  # slots that a later step uses
        outs = [
            r if _slot(r) in changed else use(s, r, _slot(r) not in later, parts)
            for r in s.outs
        ]
        ins = [
            use(
                s,
                r,
                not (_slot(r) in later if _slot(r) in changed else read.get(_slot(r))),
                True,
            )
            for r in s.ins
        ]
        same = ins == [*s.ins] and outs == [*s.outs]
        out.append(s if same else replace(s, ins=tuple(ins), outs=tuple(outs)))
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
