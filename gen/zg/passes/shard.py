"""shard.py -- pass 1: which flat buffers there are, what lies where in them, what each rank keeps.

A kind's parameters form one flat buffer per instance; persistent ones (stage 3) of all kinds form
the flat `persistent`. A head that is tied to the embedding has too little of its own and joins the
flat `embed`. Where a part of a flat is frozen, that part is a flat of its own: `block.frozen`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fnmatch import fnmatchcase
from fractions import Fraction

from ..facts import ops
from ..graph.graph import Graph, Kind, Tensor
from ..plan import plan
from ..plan.operand import Names
from ..read.spec import Spec
from . import recipe

BLOCK = 1024  # elements: tensors start at multiples; norms and hashes use it
PAGE = 4096  # bytes: a shard is a multiple, in the narrowest stored type
FROZEN = (
    ".frozen"  # what the name of a flat ends with, of which the rest trains
)

Places = dict[str, tuple[str, int]]  # of tensors: a flat, and the offset in it
Distances = dict[
    tuple[str, str], int
]  # of a flat in a kind: from unit to unit


def stem(flat: str) -> str:
    """What a flat was before its frozen part was taken out."""
    return flat.removesuffix(FROZEN)


def persists(flat: str) -> bool:
    """Every rank keeps it whole at stage 3, too."""
    return stem(flat) == "persistent"


@dataclass(frozen=True)
class Flat(plan.Flat):
    """A flat. params: what a rank keeps of its parameters, whole | shard. states: the classes of
    its states. near: of a shard's elements, the first so many have their states on the device
    (classes `near_`) though the others' are offloaded."""

    params: str
    states: Names
    near: int

    @property
    def moves(self) -> bool:
        """Something in it trains: it has pending sums."""
        return self.nodes > 0

    @property
    def plain(self) -> plan.Flat:
        return plan.Flat(
            self.name,
            self.count,
            self.elems,
            self.shard,
            self.nodes,
            self.mask,
        )


@dataclass(frozen=True)
class Shards:
    """Flats and tensors, and for each kind where its functions find them. states, sums: what a rank
    keeps of every flat that trains: whole | shard."""

    flats: tuple[Flat, ...]
    tensors: tuple[plan.Tensor, ...]
    place: dict[
        str, tuple[str, int]
    ]  # tensor -> (flat, element offset of instance 0)
    step: dict[
        tuple[str, str], int
    ]  # kind, flat -> from an instance's elements there
    # to the next one's; 0: the flat has instances
    states: str
    sums: str
    order: str  # ranks | local
    away: frozenset[str]  # flats whose parameters are offloaded
    held: frozenset[str]  # of these, to the host, not to the file
    sources: int  # that an owner sums: a rank's each, or NCCL's sum
    below: bool  # sums of gradients lie in the host arena
    apart: bool  # own micro-batches are summed in `pending`, then over ranks
    once: bool  # a step has one leaf, of f32: it is the sum
    notes: Names

    @property
    def pushes(self) -> bool:
        """The host sums: leaves go down, and not what ranks have summed."""
        return self.below and not self.apart


def persistent(spec: Spec, kind: Kind, t: Tensor) -> bool:
    """Every rank keeps it whole."""
    if spec.zero.stage < 3:
        return False
    names = (ops.layer(n, l) for n, _ in t.parts for l in range(kind.count))
    hits = {any(fnmatchcase(n, p) for p in spec.zero.replicate) for n in names}
    if len(hits) > 1:
        raise spec.wrong(
            "zero.replicate",
            f"matches {t.name} in part",
            "patterns that name all layers of a tensor, and all that share its "
            "linear, or none",
        )
    return t.params <= spec.zero.stage3_param_persistence_threshold or all(
        hits
    )


def _order(spec: Spec, micro_batches: int) -> tuple[str, Names]:
    """Stages 0 and 1, and micro-batches that go through a unit together, add a rank's own
    micro-batches first, where the canonical tree allows it; so does one rank alone."""
    if spec.cluster.ranks == 1:
        return "local", ()
    if spec.zero.stage > 1 and spec.together == 1 or micro_batches == 1:
        return "ranks", ()
    if spec.block % micro_batches:
        once = (
            ""
            if micro_batches & (micro_batches - 1)
            else f"; {{block: {micro_batches}}} reduces them once, with other bits"
        )
        return "ranks", (
            f"train.sum: a tree of {spec.block} leaves cannot add the {micro_batches} "
            f"micro-batches of a rank first: each is reduced over the ranks by itself{once}",
        )
    return "local", ()


def _fast(spec: Spec) -> tuple[int, Names]:
    """Sources of a reduction."""
    if spec.train.reduction == "exact" or spec.cluster.ranks == 1:
        return spec.cluster.ranks, ()
    return 1, (
        "reduction fast: NCCL sums over ranks, in its ring's order and rounded to the "
        "stored type at every rank; runs repeat on the same GPUs with the same NCCL, and "
        "other ranks, stages or buckets have other bits",
    )


def _below(spec: Spec, order: str, sources: int) -> tuple[bool, Names]:
    """An offloaded optimizer's sums lie beside it where what comes from all ranks in a micro-batch
    is one node of the tree, for then the host pushes one part a micro-batch."""
    if spec.zero.offload_optimizer.device == "none":
        return False, ()
    if spec.zero.offload_optimizer.ratio < 1:
        return False, (
            "zero.offload_optimizer: sums of gradients stay on the device with a ratio "
            "below 1",
        )
    if spec.together > 1:
        return (
            (True, ())
            if order == "local" and spec.cluster.ranks > 1
            else (
                False,
                (
                    "zero.offload_optimizer: sums of gradients stay on the device: with "
                    "train.accumulate layers, they go down where ranks have summed their own",
                ),
            )
        )
    if (
        spec.cluster.ranks == 1
        or order == "ranks"
        and (spec.micro_batches == 1 or spec.block % sources == 0)
    ):
        return True, ()
    why = (
        "a rank's own micro-batches are summed first; zero.stage 2 sums on the host"
        if order == "local"
        else f"what comes from {sources} ranks in a micro-batch is no node of its own"
    )
    return False, (
        f"zero.offload_optimizer: sums of gradients stay on the device: {why}",
    )


def _near(spec: Spec, shard: int) -> int:
    """Elements of a shard whose states stay on the device, in blocks, in a file of whole pages; one
    is left to the host."""
    z = spec.zero
    unit = (
        PAGE // 2
        if "nvme" in (z.offload_optimizer.device, z.offload_param.device)
        else BLOCK
    )
    most = (shard - 1) // unit
    kept = shard * (1 - Fraction(repr(z.offload_optimizer.ratio))) // unit
    return (
        min(kept, most) * unit if z.offload_optimizer.device != "none" else 0
    )


def _held(spec: Spec, away: list[Flat]) -> tuple[frozenset[str], Names]:
    """Of the flats that go to the file those that may stay on the host: in order, what still
    fits."""
    z, out = spec.zero.offload_param, []
    if z.device != "none" and not away:
        why = "zero.offload_param: has no effect: every tensor is persistent"
        return frozenset(), (why,)
    if z.device != "nvme":
        return frozenset(f.name for f in away), ()
    left = z.max_in_cpu
    for f in away:
        if f.count * f.shard <= left:
            out.append(f.name)
            left -= f.count * f.shard
    least = min(f.count * f.shard for f in away)
    said = (
        f"{z.max_in_cpu - left} elements of a rank stay on the host: {', '.join(out)}"
        if out
        else f"holds no flat whole; the least has {least} elements of a rank"
    )
    return frozenset(out), (f"zero.offload_param.max_in_cpu: {said}",) * (
        z.max_in_cpu > 0
    )


def nodes(micro_batches: int, each: int, block: int) -> tuple[int, int]:
    """Pending sums and their mask: the bits set in any count of leaves at a micro-batch's end,
    where a micro-batch has so many; above those of a block there is one bit, of whole blocks."""
    whole = block if (micro_batches - 1) * each >= block else 0
    mask = _counts(micro_batches, each) & (block - 1) | whole
    return max(1, bin(mask).count("1")), mask


def host_block(block: int, sources: int) -> int:
    """Leaves of a block where what a micro-batch brings is one: a node of it, or all there is."""
    return block // math.gcd(block, sources)


def _counts(micro_batches: int, step: int) -> int:
    """The bits set in any of step, 2 step, ... (micro_batches - 1) step. Low bits repeat after 2
    step multiples at most; of a bit above step, the first multiple that reaches it has it."""
    mask = 0
    for a in range(1, min(micro_batches, 2 * step + 1)):
        mask |= a * step
    for bit in range(
        step.bit_length(), ((micro_batches - 1) * step).bit_length()
    ):
        if -(-(1 << bit) // step) < micro_batches:
            mask |= 1 << bit
    return mask


def unit(spec: Spec) -> int:
    """Elements of which a shard is a multiple."""
    return max(PAGE // ops.BYTES[spec.train.precision], BLOCK)


def whole(spec: Spec, elems: int) -> int:
    """Elements of a flat that holds so many, with what fills its shards."""
    return ops.up(elems, spec.cluster.ranks * unit(spec))


def _flats(spec: Spec, graph: Graph) -> Places:
    """Of each tensor its flat, and in how many slices it is there."""
    found: Places = {}
    for kind in graph.kinds:
        own = "embed" if kind.tied else kind.name
        for t in kind.tensors:
            cut = kind.flats.get(t.name, (own, 1))
            found[t.name] = (
                ("persistent", 1) if persistent(spec, kind, t) else cut
            )
    frozen = {
        t.name for kind in graph.kinds for t in kind.tensors if t.group[2]
    }
    training = {
        flat for name, (flat, _) in found.items() if name not in frozen
    }
    for name in frozen:
        flat, slices = found[name]
        if flat in training:
            found[name] = flat + FROZEN, slices
    return found


def _steps(graph: Graph, flats: Places) -> Distances:
    """Shards.step."""
    out: Distances = {}
    for kind in (k for k in graph.kinds if k.count > 1):
        for t in kind.tensors:
            key = kind.name, flats[t.name][0]
            if persists(key[1]):
                out[key] = out.get(key, 0) + ops.up(t.elems, BLOCK)
    return out


def _tensors(
    graph: Graph,
    flats: Places,
    steps: Distances,
) -> tuple[list[plan.Tensor], dict[str, int], dict[str, int]]:
    """All tensors; of each flat its elements, and its instances."""
    out: list[plan.Tensor] = []
    sizes: dict[str, int] = {}
    counts: dict[str, int] = {}
    key = 0
    for kind in graph.kinds:
        within: dict[str, int] = {}  # elements of the first instance
        for i, t in enumerate(kind.tensors):
            flat, slices = flats[t.name]
            at = sizes.get(flat, 0) + within.get(flat, 0)
            within[flat] = within.get(flat, 0) + ops.up(
                t.elems // slices, BLOCK
            )
            count = counts.setdefault(
                flat, 1 if persists(flat) else kind.count * slices
            )
            out.append(
                plan.Tensor(
                    t.name,
                    flat,
                    at,
                    steps.get((kind.name, flat), 0),
                    slices if count > 1 else 0,
                    kind.count,
                    t.shape,
                    tuple(f"{n}={r}" for n, r in t.parts),
                    key + i,
                    len(kind.tensors),
                    t.mean,
                    t.std,
                    *t.group,
                )
            )
        for flat in sorted(within, key=persists):
            times = kind.count if persists(flat) else 1
            sizes[flat] = sizes.get(flat, 0) + within[flat] * times
        key += len(kind.tensors) * kind.count
    return out, sizes, counts


def states(spec: Spec, away: bool, low: bool) -> Names:
    """Of elements whose parameters lie off the device (away), what an update keeps there (low), or
    on it. Parameters are the masters where they are as exact, and lie with the rest."""
    narrow = spec.train.precision != "f32" and spec.train.optimizer.masters
    masters = ("master",) if narrow or low != away else ()
    return (*masters, *ops.OPTIMIZERS[recipe.rule(spec.train.optimizer)])


def split(spec: Spec, graph: Graph) -> Shards:
    W, stage = spec.cluster.ranks, spec.zero.stage
    micro_batches = spec.micro_batches
    order, notes = _order(spec, micro_batches)
    sources, fast = _fast(spec)
    below, above = _below(spec, order, sources)
    block = (
        host_block(spec.block, sources)
        if below and order == "ranks"
        else spec.block
    )
    pending, mask = nodes(
        micro_batches, 1 if order == "local" or below else sources, block
    )
    flats = _flats(spec, graph)
    steps = _steps(graph, flats)
    found, sizes, counts = _tensors(graph, flats, steps)
    place = {t.name: (t.flat, t.offset) for t in found}
    if all(t.frozen for t in found):
        raise spec.wrong(
            "train.optimizer.groups",
            "freeze every tensor",
            "at least one that moves",
        )
    hosted = (
        {f for f in sizes if stage == 3 and not persists(f)}
        if spec.zero.offload_param.device != "none"
        else set()
    )
    all_sums = (
        stage == 0 or order == "local" and not below and (stage == 1 or W == 1)
    )
    kept = []
    lowered = spec.zero.offload_optimizer.device != "none"
    trains = {t.flat for t in found if not t.frozen}
    for name, size in sizes.items():
        shard = whole(spec, size) // W
        params = "whole" if stage < 3 or persists(name) else "shard"
        if name in trains:
            own = states(spec, name in hosted, lowered)
            kept.append(
                Flat(
                    name,
                    counts[name],
                    size,
                    shard,
                    pending,
                    mask,
                    params,
                    own,
                    _near(spec, shard),
                )
            )
        else:
            kept.append(
                Flat(name, counts[name], size, shard, 0, 0, params, (), 0)
            )
    away = [f for f in kept if f.name in hosted]
    held, said = _held(spec, away)
    exact = spec.train.precision == "f32"
    return Shards(
        tuple(kept),
        tuple(found),
        place,
        steps,
        "whole" if stage == 0 else "shard",
        "whole" if all_sums else "shard",
        order,
        frozenset(hosted),
        held,
        sources,
        below,
        order == "local" and W > 1 and not all_sums,
        exact and W == micro_batches == 1 and not below,
        (*notes, *fast, *above, *said),
    )
