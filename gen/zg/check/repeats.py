"""repeats.py -- extends the sums of the micro-batches that were played to all of a step."""

from __future__ import annotations

from ..plan.mesh import Along, plus
from ..plan.plan import BLOCKS, STEP
from .arrays import EVERY, Control, MicroBatch, Sum, Totals
from .order import Memory, told


def leap(m: Memory, played: int, turns: int) -> None:
    """Extrapolate sums from the repeats that were played to all repeats; each adds the same. A
    pending sum, a count or a loss counts if it covers exactly the micro-batches that were
    played."""
    losses = _first_micro_batches(m, played * m.p.together)
    counts = _counts(m, m.head.own[STEP] * played // turns)

    def after(a: object) -> object:
        if isinstance(a, Totals):
            return a._replace(losses=EVERY) if a.losses == losses else a
        if played == turns:
            return a
        if isinstance(a, Control) and a.leaves in counts:
            return a._replace(leaves=a.leaves * turns // played)
        if not isinstance(a, Sum) or a.whole or a.micro_batch.step != m.now:
            return a
        return a._replace(
            micro_batches=a.micro_batches * turns // played,
            leaves=a.leaves * turns // played,
            whole=True,
        )

    for slot in m.slots.values():
        slot.each(lambda run: run._replace(array=after(run.array)))


def _counts(m: Memory, micro_batches: int) -> set[int]:
    """Return the possible counts of leaves after `micro_batches`, or samples if blocks are added
    first: a rank's own leaves, NCCL's sums or the host's, or one from each rank of the level before
    them."""
    levels = m.head.order.levels
    inner = [m.groups[x] for x in levels[: levels.index(STEP)] if x != BLOCKS]
    ranks = inner[-1].ranks if inner and m.head.reduction == "exact" else 1
    return {micro_batches, micro_batches * ranks}


def counted(m: Memory) -> None:
    """Require that all leaves of a step are counted. The count may be 0, too, as it is if all
    micro-batches go through a unit before the next one."""
    A = m.head.own[STEP]
    turns = m.p.section("micro_batch").repeat
    good = (0, *_counts(m, A)) if turns > 1 or A == 1 else (0,)
    for slot in m.slots.values():
        for _, _, run in slot.held:
            if isinstance(run.array, Control) and run.array.leaves not in good:
                m.ends(f"{slot} holds {told(run)}, of {A} micro-batches")


def _first_micro_batches(m: Memory, n: int) -> frozenset[MicroBatch]:
    """Return the first n micro-batches of each rank, numbered in the order of sums."""
    by: Along = ()
    ranks = {name: g.ranks for name, g in m.groups.items()}
    step = m.head.order.steps({**ranks, **m.head.own})
    for level in m.head.order.groups:
        by = plus(by, m.groups[level].times(step[level]))
    blocks = m.head.own.get(BLOCKS, 1)
    at = (divmod(g, blocks) for g in range(n))
    return frozenset(
        MicroBatch(m.now, sample * step[STEP] + block * step.get(BLOCKS, 0), by)
        for sample, block in at
    )
