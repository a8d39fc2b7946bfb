"""sums.py -- tells whole sums of gradients from others."""

from __future__ import annotations

from dataclasses import dataclass

from .arrays import Leaf, MicroBatch, Sum, over_ranks
from .memory import Extent
from .operands import Range
from .order import Memory, Place, told
from .uses import Uses


@dataclass
class WholeSums:
    """Requires whole sums of gradients. uses: tells which functions write a gradient."""

    m: Memory
    uses: Uses

    def one(self, run: Extent) -> Sum:
        """Return a complete gradient or a whole sum as a Sum. Refuse any other array."""
        array = run.array
        if isinstance(array, Sum) and array.whole:
            return array
        if isinstance(array, Leaf) and self.uses.complete(array):
            return Sum(array.flat, array.l, array.micro_batch, 1, 1, True)
        self.m.fail(f"sums {told(run)}")

    def holds(self, where: Place, part: Range, width: int) -> None:
        """Require the sum of this step's gradients over all micro-batches of all ranks, of `width`
        bytes an element."""
        m = self.m
        run = m.reads(where, part.n * width)
        micro_batches = m.head.micro_batches * m.W
        if run and micro_batches == 1 and isinstance(run.array, Leaf):
            if self.uses.complete(run.array):  # the only micro-batch
                run = run._replace(array=self.one(run))
        # With one rank, its sum is the sum over all ranks.
        if run and m.W == 1 and isinstance(run.array, Sum):
            run = run._replace(
                array=over_ranks(run.array, m.every), by_rank=part.by_rank
            )
        micro_batch = MicroBatch(m.now, 0, ())
        leaves = run.array.leaves if run and isinstance(run.array, Sum) else 0
        want = Extent(
            Sum(part.flat, part.l, micro_batch, micro_batches, leaves, True),
            part.first,
            width,
            part.by_rank,
        )
        if run != want:
            m.fail(f"{where} holds {told(run)}, not {told(want)}")
