"""shard.py -- pass 1: which flat buffers there are, what lies where in them, what each rank keeps.

A kind's parameters form one flat buffer per instance; persistent ones (stage 3) of all kinds form
the flat `persistent`. A head that is tied to the embedding has too little of its own and joins the
flat `embed`. Where a part of a flat is frozen, that part is a flat of its own: `block.frozen`.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from ..facts import ops
from ..graph.graph import Graph
from ..plan import plan
from ..plan.operand import Names
from ..plan.size import Size
from ..read.spec import Spec
from . import grid, levels, recipe
from .flats import BLOCK, FROZEN, PAGE, persists, whole
from .grid import Grid
from .levels import Sums

Places = dict[str, tuple[str, int]]  # of tensors: a flat, and the offset in it
Distances = dict[
    tuple[str, str], int
]  # of a flat in a kind: from unit to unit


@dataclass(frozen=True, kw_only=True)
class Flat(plan.Flat):
    """A flat. depth: at which its parameters are shared (grid.py). states: the classes of its
    states. near: of a shard's elements, the first so many have their states on the device (classes
    `near_`) though the others' are offloaded."""

    shard: Size
    depth: int
    near: Size
    states: Names = ()

    @property
    def far(self) -> Size:
        """The elements of a shard behind the near ones."""
        if not self.near:
            return self.shard
        rest = int(self.shard) - int(self.near)
        return Size.of(f"far.{self.name}", rest, self.name)

    @property
    def moves(self) -> bool:
        """Something in it trains: it has pending sums."""
        return self.nodes > 0

    @property
    def gathered(self) -> bool:
        """Each use gathers it: no rank has it whole."""
        return self.depth > 0

    @property
    def plain(self) -> plan.Flat:
        return plan.Flat(
            name=self.name,
            count=self.count,
            elems=self.elems,
            shard=self.shard,
            nodes=self.nodes,
            mask=self.mask,
            owners=self.owners,
        )


@dataclass(frozen=True, kw_only=True)
class Shards:
    """Flats and tensors, and for each kind where its functions find them. place: of a tensor its
    flat, and its first instance's element in that. step: of a kind and a flat the elements from an
    instance to the next one's; 0: the flat has instances. states: the depth at which states are
    shared. away: the flats whose parameters are offloaded; held: of these, to the host and not to
    the file."""

    grid: Grid
    flats: tuple[Flat, ...]
    tensors: tuple[plan.Tensor, ...]
    place: dict[str, tuple[str, int]]
    step: dict[tuple[str, str], int]
    states: int
    sums: Sums
    away: frozenset[str]
    held: frozenset[str]
    notes: Names

    def share(self, f: Flat, depth: int) -> Size:
        """Elements of an instance that a rank has of what is shared at a depth."""
        n = int(f.shard) * self.grid.parts(depth)
        if self.grid.parts(depth) == 1:
            return f.shard
        word = f"share.{self.grid.over(depth)}" if depth else "flat"
        return Size.of(f"{word}.{f.name}", n, f.name)


def _near(spec: Spec, flat: str, shard: int) -> Size:
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
    near = min(kept, most) * unit
    if not near or z.offload_optimizer.device == "none":
        return Size.none(flat)
    return Size.of(f"near.{flat}", near, flat)


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


def _flats(graph: Graph) -> Places:
    """Of each tensor its flat, and in how many slices it is there."""
    found: Places = {}
    for kind in graph.kinds:
        own = "embed" if kind.tied else kind.name
        for t in kind.tensors:
            cut = kind.flats.get(t.name, (own, 1))
            whole_ = t.name in graph.persistent
            found[t.name] = ("persistent", 1) if whole_ else cut
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
                    name=t.name,
                    flat=flat,
                    offset=at,
                    offset_step=steps.get((kind.name, flat), 0),
                    flat_step=slices if count > 1 else 0,
                    count=kind.count,
                    shape=t.shape,
                    parts=tuple(f"{n}={r}" for n, r in t.parts),
                    key=key + i,
                    key_step=len(kind.tensors),
                    mean=t.mean,
                    std=t.std,
                    rate=t.group[0],
                    decay=t.group[1],
                    frozen=t.group[2],
                )
            )
        for flat in sorted(within, key=persists):
            times = kind.count if persists(flat) else 1
            sizes[flat] = sizes.get(flat, 0) + within[flat] * times
        key += len(kind.tensors) * kind.count
    return out, sizes, counts


def states_of(spec: Spec, away: bool, low: bool) -> Names:
    """Of elements whose parameters lie off the device (away), what an update keeps there (low), or
    on it. Parameters are the masters where they are as exact, and lie with the rest."""
    narrow = spec.train.precision != "f32" and spec.train.optimizer.masters
    masters = ("master",) if narrow or low != away else ()
    return (*masters, *ops.OPTIMIZERS[recipe.rule(spec.train.optimizer)])


def _idle(spec: Spec) -> Names:
    if not grid.idle(spec):
        return ()
    why = f"parameters are whole at stage {spec.zero.stage}, and all ranks share states"
    return (
        f"zero.shard_size: has no effect: {why}; zero.states shard, or stage 3",
    )


def split(spec: Spec, graph: Graph) -> Shards:
    ranks = grid.grid(spec)
    W, stage = spec.cluster.ranks, spec.zero.stage
    owned = ranks.shared if spec.zero.replicates else ranks.depth
    states = owned if stage else 0
    sums = levels.sums(spec, ranks, states)
    flats = _flats(graph)
    steps = _steps(graph, flats)
    found, sizes, counts = _tensors(graph, flats, steps)
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
    kept = []
    lowered = spec.zero.offload_optimizer.device != "none"
    trains = {t.flat for t in found if not t.frozen}
    for name, size in sizes.items():
        shard, moves = whole(spec, size) // W, name in trains
        whole_ = stage < 3 or persists(name)
        kept.append(
            Flat(
                name=name,
                count=counts[name],
                elems=size,
                shard=Size.of(f"shard.{name}", shard, name),
                nodes=sums.nodes if moves else 0,
                mask=sums.mask if moves else 0,
                owners=ranks.owners,
                depth=0 if whole_ else ranks.shared,
                states=states_of(spec, name in hosted, lowered)
                if moves
                else (),
                near=_near(spec, name, shard) if moves else Size.none(name),
            )
        )
    away = [f for f in kept if f.name in hosted]
    held, said = _held(spec, away)
    return Shards(
        grid=ranks,
        flats=tuple(kept),
        tensors=tuple(found),
        place={t.name: (t.flat, t.offset) for t in found},
        step=steps,
        states=states,
        sums=sums,
        away=frozenset(hosted),
        held=held,
        notes=(*sums.notes, *said, *_idle(spec)),
    )
