"""levels.py -- pass 1: chooses the levels of gradient sums, and where each level leaves its sums.

A gradient is reduced in phases from the rank that computed it to the sum of its owner. A phase adds
over the ranks of a group, over a rank's own micro-batches, or over both. A rank with several blocks
of a sample adds these first, at once. All layouts have the same bits if a level's addends form a
node of the canonical tree (design.md, Bits); only the last level may add anything.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..plan.operand import Names
from ..plan.plan import ALL, BLOCKS, STEP, Order
from ..read import context
from ..read.spec import Spec
from .grid import Level, RankGrid


@dataclass(frozen=True)
class Addition:
    """One addition on the way of a gradient to its sum.

    fn: the function that adds: `own`, `sum` (the first that adds over ranks), `node` (sums of
    several ranks) or `join` (the last of these); level: the ranks whose pieces are added, None for
    a rank's own gradients; sources: number of pieces that are added; counted: it also adds over
    micro-batches; inner: leaves in a piece; depth: at which its result is sharded.
    """

    fn: str
    level: Level | None
    sources: int
    counted: bool
    inner: int
    depth: int

    @property
    def adds_gradients(self) -> bool:
        """True if it adds gradients in the stored type."""
        return self.inner == 1 and self.fn in ("own", "sum")


@dataclass(frozen=True)
class Sums:
    """The rules by which gradients are summed. depth: at which a rank's sums are sharded; blocks:
    gradients of a rank that are added at once, before all else; turns: micro-batches of a step that
    are counted, or samples if blocks are added first."""

    order: Order
    phases: tuple[Addition, ...]  # () if the only gradient of a step is its sum
    depth: int
    blocks: int
    turns: int
    host: bool  # sums are on the host
    # A rank adds its own micro-batches in class `pending`, one unit at a time, before it reduces.
    pending: bool
    dtype: str  # of a rank's sums
    block: int  # addends of a tree over micro-batches
    nodes: int  # pending sums of such a tree
    mask: int  # a bit for each pending sum
    notes: Names

    @property
    def on_host(self) -> bool:
        """True if the host adds over micro-batches."""
        return self.host and not self.pending

    @property
    def per_micro_batch(self) -> tuple[Addition, ...]:
        """The phases that run for every micro-batch."""
        for n, x in enumerate(self.phases):
            if x.counted:
                return self.phases[: n + 1]
        return self.phases

    @property
    def per_step(self) -> tuple[Addition, ...]:
        """The phases that run once, after all micro-batches."""
        return self.phases[len(self.per_micro_batch) :]

    @property
    def own_first(self) -> bool:
        """True if a rank adds its own micro-batches before it reduces with others."""
        first = self.phases[:1]
        return any(x.counted and not x.level for x in first)

    @property
    def result_depth(self) -> int:
        """The depth at which the last phase's sums are sharded."""
        return self.phases[-1].depth if self.phases else self.depth


@dataclass(frozen=True)
class _Levels:
    """Levels of ranks, nearest first. step: the depth after which a rank adds its own
    micro-batches; blocks: gradients that it adds before the first level."""

    levels: list[Level]
    step: int
    blocks: int
    notes: list[str]

    @property
    def order(self) -> Order:
        """The order of levels, as the plan states it."""
        names = [x.group for x in self.levels] or [ALL]
        ends = [x.hi for x in self.levels]
        at = ends.index(self.step) + 1 if self.step in ends else 0
        first = [BLOCKS] * (self.blocks > 1)
        return Order((*first, *names[:at], STEP, *names[at:]))


def _own_first(spec: Spec) -> tuple[bool, list[str]]:
    """Return whether a rank adds its own micro-batches first, with notes: at stages 0 and 1 and
    with accumulate layers if the canonical tree allows it, and always on one rank."""
    A = spec.micro_batches
    z = spec.zero
    if spec.cluster.ranks == 1:
        return True, []
    over = z.stage > 1 or z.stage == 1 and z.replicates
    each = over and spec.train.accumulate == "micro_batches"
    if each or A == 1 or spec.cluster.context_parallel > 1:
        return False, []
    if spec.block % A == 0:
        return True, []
    once = "" if A & (A - 1) else f"; {{block: {A}}} reduces them once, with other bits"
    many, one = _words(spec.own_blocks)
    return False, [
        f"train.sum: a tree of {spec.block} leaves cannot add the {A} {many} of a rank first: "
        f"each {one} is reduced over the ranks by itself{once}"
    ]


def _words(blocks: int) -> tuple[str, str]:
    """Return the name of a rank's gradients, and of those that it adds at once, for notes."""
    return ("blocks", "sample") if blocks > 1 else ("micro-batches", "micro-batch")


def _fast_note(spec: Spec) -> list[str]:
    """Return a note about the bits of fast reductions."""
    if spec.train.reduction == "exact" or spec.cluster.ranks == 1:
        return []
    cut = {spec.cluster.local, spec.zero.shared} - {0, 1, spec.cluster.ranks}
    levels = (
        "; all ranks meet in one level, whatever cluster.local and zero.shard_size are"
        if cut
        else ""
    )
    return [
        "reduction fast: NCCL sums over ranks, in its ring's order and rounded to the "
        "stored type at every rank; runs repeat on the same GPUs with the same NCCL, and "
        f"other ranks, stages or buckets have other bits{levels}"
    ]


def _on_host(
    spec: Spec, own_first: bool, sources: int, blocks: int
) -> tuple[bool, list[str]]:
    """Return whether sums are on the host, with notes. They are beside an offloaded optimizer if
    all ranks' gradients of a micro-batch form one node of the tree, since the host then pushes one
    part per micro-batch, or per sample if its blocks are added first. sources: ranks whose
    gradients are added; blocks: gradients of each that are added first."""
    A, W = spec.micro_batches, spec.cluster.ranks
    off = spec.zero.offload_optimizer
    if off.device == "none":
        return False, []
    if off.ratio < 1:
        why = "stay on the device with a ratio below 1"
    elif spec.together > blocks:
        if own_first and W > 1 and spec.together == A:
            return True, []
        many, _ = _words(spec.own_blocks)
        why = f"stay on the device if several {many} go through a unit together"
        if W > 1:
            why += ", unless all of a step do and each rank adds its own first"
    elif W == 1 or (
        not own_first and (A == blocks or spec.block % (sources * blocks) == 0)
    ):
        return True, []
    elif own_first:
        why = (
            "stay on the device: a rank's own micro-batches are summed first; zero.stage 2 sums "
            "on the host"
        )
    else:
        why = (
            f"stay on the device: the sum of a {_words(blocks)[1]} over {sources} ranks is not a "
            "node of the tree of train.sum"
        )
    return False, [f"zero.offload_optimizer: sums of gradients {why}"]


def _levels(
    spec: Spec, grid: RankGrid, own_first: bool, blocks: int, host: bool
) -> _Levels:
    """Return the levels, with notes on those left out: each but the last needs a node of the
    canonical tree. blocks: gradients that a rank adds before the first level."""
    A, k = spec.micro_batches, grid.depth
    if spec.train.reduction == "fast" or not grid.axes:
        levels = [x for x in grid.levels(0, k) if x.ranks > 1]
        return _Levels(levels, 0 if own_first else k, blocks, [])
    step, cuts, notes = 0 if own_first else k, [], []
    many, each = _words(blocks)
    if 0 < grid.context < k:
        cuts.append(grid.context)
        node = spec.block % (grid.size(0, grid.context) * A) == 0
        if spec.zero.stage == 1 and node and not host:
            step = grid.context
    elif not own_first and A > blocks and grid.shared < k and spec.zero.stage:
        inner = grid.size(0, grid.shared)
        if host:
            notes.append(
                "zero.offload_optimizer: each sum is in the host memory of its owner, so replicas "
                f"exchange gradients in every {each}"
            )
        elif spec.block % (inner * A) == 0:
            step = grid.shared
            cuts.append(step)
        else:
            notes.append(
                f"train.sum: a tree of {spec.block} leaves has no node of the {A} {many} of "
                f"{inner} ranks, so replicas exchange gradients in every {each}{_other(inner * A)}"
            )
    if 0 < grid.host < k:
        inner = grid.size(0, grid.host)
        leaves = inner * (A if step <= grid.host else blocks)
        if spec.block % leaves == 0:
            cuts.append(grid.host)
        else:
            lo = step if step < grid.host else 0
            notes.append(_host_note(spec, grid, lo, leaves))
    return _Levels(grid.levels(0, k, *cuts), step, blocks, notes)


def _added_at_once(spec: Spec, own_first: bool) -> int:
    """Return how many gradients of a sample a rank adds before all else. Raises SpecError if the
    gradients of a sample are no node of the canonical tree."""
    if own_first:
        return 1
    n, W = spec.train.sequence_blocks, spec.cluster.ranks
    leaves = n if spec.cluster.context_parallel < W else spec.own_blocks
    if spec.block % leaves:
        power = 1 << (leaves - 1).bit_length()
        some = [f"{{block: {power}}}, another recipe"] * (leaves == power)
        some += ["train.sequence_blocks that is a power of two, another recipe"] * (
            leaves < power
        )
        shared = n % W == 0 and context.most(spec) % W == 0
        some += [f"cluster.context_parallel {W}"] * (
            shared and spec.block % (n // W) == 0
        )
        raise spec.wrong(
            "train.sum",
            f"a tree of {spec.block} gradients has no node of the {leaves} of a sample, which are "
            "added first",
            f"{', '.join(some)}, or cluster.ranks 1",
        )
    return spec.own_blocks


def _other(leaves: int) -> str:
    """Return the sum rule that has such a node, '' if none does."""
    if leaves & (leaves - 1):
        return ""
    return f"; train.sum={{block: {leaves}}} has it, with different bits"


def _host_note(spec: Spec, grid: RankGrid, lo: int, leaves: int) -> str:
    """Return a note that a host's ranks are not summed first, with its cost. lo: the depth at which
    their level would start."""
    k = grid.depth
    far = grid.size(lo, k) - grid.size(lo, grid.host)
    return (
        f"cluster.local: a tree of {spec.block} leaves has no node of {leaves}, so a host's "
        f"gradients are not summed before they leave it: each rank gets {far} pieces from "
        f"other hosts instead of {grid.size(grid.host, k) - 1}{_other(leaves)}"
    )


def _phases(spec: Spec, grid: RankGrid, found: _Levels) -> tuple[Addition, ...]:
    """Return a phase for each level. A rank's own micro-batches are added in the phase of the level
    before them, its blocks of a sample in a phase before all others."""
    first = found.step == 0
    turns, out, inner = spec.micro_batches // found.blocks, [], 1
    if first or found.blocks > 1:
        out.append(
            Addition(
                fn="own",
                level=None,
                sources=found.blocks,
                counted=first,
                inner=1,
                depth=0,
            )
        )
        inner = turns if first else found.blocks
    exact = spec.train.reduction == "exact"
    for n, x in enumerate(found.levels):
        counted = x.hi == found.step
        leaves = n == 0 and found.step > 0
        last = n == len(found.levels) - 1
        fn = "sum" if leaves else "join" if last else "node"
        sources = x.ranks if exact else 1
        out.append(
            Addition(
                fn=fn,
                level=x,
                sources=sources,
                counted=counted,
                inner=inner,
                depth=x.hi,
            )
        )
        inner *= sources * (turns if counted else 1)
    return tuple(out)


def sums(spec: Spec, grid: RankGrid, states: int) -> Sums:
    """Return the rules of a spec's gradient sums. states: depth at which optimizer states are
    sharded."""
    z, A, W = spec.zero, spec.micro_batches, spec.cluster.ranks
    own_first, notes = _own_first(spec)
    blocks = _added_at_once(spec, own_first)
    exact = spec.train.reduction == "exact"
    sources = W if exact else 1
    host, host_notes = _on_host(spec, own_first, sources, blocks)
    found = _levels(spec, grid, own_first, blocks, host)
    # The only gradient is its sum. Tiles of a host's optimizer take f32.
    suits = spec.train.precision == "f32" or z.offload_optimizer.device == "none"
    only = W == A == 1 and not host and suits
    whole = (
        z.stage == 0
        or found.step == 0
        and not host
        and (z.stage == 1 and states == grid.depth or W == 1)
    )
    pending = own_first and W > 1 and not whole
    on_host = host and not pending
    phases = () if only else _phases(spec, grid, found)
    counted = next((x for x in phases if x.counted), None)
    each, inner = (counted.sources, counted.inner) if counted else (1, 1)
    block = spec.block // inner
    if on_host:  # all ranks' gradients arrive as one addend
        each, block = 1, spec.block // math.gcd(spec.block, sources * blocks)
    turns = A // blocks
    nodes, mask = tree_nodes(turns, each, block)
    depth = 0 if whole else grid.depth
    if 0 < found.step < depth and not pending:
        depth = found.step
    depth = min(depth, states)
    all_notes = (*notes, *_fast_note(spec), *host_notes, *found.notes)
    return Sums(
        order=found.order,
        phases=phases,
        depth=depth,
        blocks=blocks,
        turns=turns,
        host=host,
        pending=pending,
        dtype=spec.train.precision if only else "f32",
        block=block,
        nodes=nodes,
        mask=mask,
        notes=all_notes,
    )


def tree_nodes(micro_batches: int, each: int, block: int) -> tuple[int, int]:
    """Return the number of pending sums and their mask: the bits set in any number of leaves after
    a micro-batch, with `each` leaves per micro-batch. Numbers of `block` or more share one bit."""
    whole = block if (micro_batches - 1) * each >= block else 0
    mask = _counts(micro_batches, each) & (block - 1) | whole
    return max(1, bin(mask).count("1")), mask


def _counts(micro_batches: int, step: int) -> int:
    """Return the bits set in any of step, 2 step, ... (micro_batches - 1) step. Low bits repeat
    after at most 2 step multiples. A bit above `step` is set in the first multiple that reaches
    it."""
    mask = 0
    for a in range(1, min(micro_batches, 2 * step + 1)):
        mask |= a * step
    for bit in range(step.bit_length(), ((micro_batches - 1) * step).bit_length()):
        if -(-(1 << bit) // step) < micro_batches:
            mask |= 1 << bit
    return mask
