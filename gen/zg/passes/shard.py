"""shard.py -- pass 1: lays out flat buffers and decides how they are sharded.

The parameters of a kind form a flat buffer, with one instance per unit. Persistent parameters
(stage 3) of all kinds form the flat `persistent`. A head that is tied to the embedding has few
parameters of its own, so it joins the flat `embed`. If only some tensors of a flat are frozen,
these form a flat of their own, `block.frozen`.
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
from .flats import BLOCK, FROZEN, PAGE, padded, persists
from .grid import RankGrid
from .levels import Sums

Places = dict[str, tuple[str, int]]  # tensor -> its flat and number of slices
# (kind, flat) -> elements from unit to unit
Distances = dict[tuple[str, str], int]


@dataclass(frozen=True, kw_only=True)
class Flat(plan.Flat):
    """A flat buffer. depth: at which its parameters are sharded (grid.py); states: its optimizer
    states; near: the first elements of each shard, whose states stay on the device (classes
    `near_`) though the others' are offloaded."""

    shard: Size
    depth: int
    near: Size
    states: Names = ()

    @property
    def far(self) -> Size:
        """Elements of a shard after the near ones."""
        if not self.near:
            return self.shard
        rest = int(self.shard) - int(self.near)
        return Size.of(f"far.{self.name}", rest, self.name)

    @property
    def trainable(self) -> bool:
        """True if some parameter is trainable, so that there are gradient sums."""
        return self.nodes > 0

    @property
    def gathered(self) -> bool:
        """True if each use gathers it, because no rank has all of it."""
        return self.depth > 0

    @property
    def plain(self) -> plan.Flat:
        """The flat as the plan has it."""
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
    """Flat buffers, tensors and their places.

    place: flat of a tensor and its offset in the first instance, in elements; step: by (kind,
    flat), elements from one unit to the next if all share an instance; states: depth at which
    optimizer states are sharded; offloaded: flats with offloaded parameters; offloaded_to_host:
    those of them that are not in the file.
    """

    grid: RankGrid
    flats: tuple[Flat, ...]
    tensors: tuple[plan.Tensor, ...]
    place: dict[str, tuple[str, int]]
    step: dict[tuple[str, str], int]
    states: int
    sums: Sums
    offloaded: frozenset[str]
    offloaded_to_host: frozenset[str]
    notes: Names

    def share(self, f: Flat, depth: int) -> Size:
        """Return the elements of an instance that a rank has at a depth."""
        n = int(f.shard) * self.grid.parts(depth)
        if self.grid.parts(depth) == 1:
            return f.shard
        word = f"split.{self.grid.over(depth)}" if depth else "flat"
        return Size.of(f"{word}.{f.name}", n, f.name)


def _near(spec: Spec, flat: str, shard: int) -> Size:
    """Return the elements of a shard whose states stay on the device: whole blocks, or whole pages
    if there is a file. At least one is left to the host."""
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


def _kept_on_host(spec: Spec, offloaded: list[Flat]) -> tuple[frozenset[str], Names]:
    """Return the offloaded flats that stay on the host, with notes. If parameters go to the file,
    flats stay in order while max_in_cpu holds them."""
    z, out = spec.zero.offload_param, []
    if z.device != "none" and not offloaded:
        why = "zero.offload_param: has no effect: every tensor is persistent"
        return frozenset(), (why,)
    if z.device != "nvme":
        return frozenset(f.name for f in offloaded), ()
    left = z.max_in_cpu
    for f in offloaded:
        if f.count * f.shard <= left:
            out.append(f.name)
            left -= f.count * f.shard
    least = min(f.count * f.shard for f in offloaded)
    said = (
        f"{z.max_in_cpu - left} elements of a rank stay on the host: {', '.join(out)}"
        if out
        else f"is too small for any unit's parameters; the smallest have {least} elements of a rank"
    )
    return frozenset(out), (f"zero.offload_param.max_in_cpu: {said}",) * (
        z.max_in_cpu > 0
    )


def _flats(graph: Graph) -> Places:
    """Return the flat of each tensor, and the number of slices that it has there."""
    found: Places = {}
    for kind in graph.kinds:
        own = "embed" if kind.tied else kind.name
        for t in kind.tensors:
            cut = kind.flats.get(t.name, (own, 1))
            whole_ = t.name in graph.persistent
            found[t.name] = ("persistent", 1) if whole_ else cut
    frozen = {t.name for kind in graph.kinds for t in kind.tensors if t.group[2]}
    training = {flat for name, (flat, _) in found.items() if name not in frozen}
    for name in frozen:
        flat, slices = found[name]
        if flat in training:
            found[name] = flat + FROZEN, slices
    return found


def _steps(graph: Graph, flats: Places) -> Distances:
    """Return Shards.step."""
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
    """Return all tensors, the elements of an instance of each flat, and its number of instances."""
    out: list[plan.Tensor] = []
    sizes: dict[str, int] = {}
    counts: dict[str, int] = {}
    key = 0
    for kind in graph.kinds:
        within: dict[str, int] = {}  # elements of the first instance
        for i, t in enumerate(kind.tensors):
            flat, slices = flats[t.name]
            at = sizes.get(flat, 0) + within.get(flat, 0)
            within[flat] = within.get(flat, 0) + ops.up(t.elems // slices, BLOCK)
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
                    quantized=t.quantized,
                    heads=t.heads,
                )
            )
        for flat in sorted(within, key=persists):
            times = kind.count if persists(flat) else 1
            sizes[flat] = sizes.get(flat, 0) + within[flat] * times
        key += len(kind.tensors) * kind.count
    return out, sizes, counts


def update_states(spec: Spec, params_offloaded: bool, states_offloaded: bool) -> Names:
    """Return the states that an update needs. There is no `master` if parameters are as precise and
    in the same arena as the states."""
    narrow = spec.train.precision != "f32" and spec.train.optimizer.masters
    masters = ("master",) if narrow or states_offloaded != params_offloaded else ()
    return (*masters, *ops.OPTIMIZERS[recipe.rule(spec.train.optimizer)])


def _idle(spec: Spec) -> Names:
    """Return a note if `shard_size` has no effect."""
    if not grid.idle(spec):
        return ()
    why = f"parameters are whole at stage {spec.zero.stage}, and all ranks share states"
    return (f"zero.shard_size: has no effect: {why}; zero.states shard, or stage 3",)


def split(spec: Spec, graph: Graph) -> Shards:
    """Return the flats of a graph and their shards. Raises SpecError if every tensor is frozen."""
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
            "all tensors are frozen",
            "at least one tensor that is trained",
        )
    params_offloaded = (
        {f for f in sizes if stage == 3 and not persists(f)}
        if spec.zero.offload_param.device != "none"
        else set()
    )
    kept = []
    states_offloaded = spec.zero.offload_optimizer.device != "none"
    trains = {t.flat for t in found if not t.frozen}
    for name, size in sizes.items():
        shard, trainable = padded(spec, size) // W, name in trains
        whole_ = stage < 3 or persists(name)
        kept.append(
            Flat(
                name=name,
                count=counts[name],
                elems=size,
                shard=Size.of(f"shard.{name}", shard, name),
                nodes=sums.nodes if trainable else 0,
                mask=sums.mask if trainable else 0,
                owners=ranks.owners,
                depth=0 if whole_ else ranks.shared,
                states=update_states(spec, name in params_offloaded, states_offloaded)
                if trainable
                else (),
                near=_near(spec, name, shard) if trainable else Size.none(name),
            )
        )
    offloaded = [f for f in kept if f.name in params_offloaded]
    offloaded_to_host, said = _kept_on_host(spec, offloaded)
    return Shards(
        grid=ranks,
        flats=tuple(kept),
        tensors=tuple(found),
        place={t.name: (t.flat, t.offset) for t in found},
        step=steps,
        states=states,
        sums=sums,
        offloaded=frozenset(params_offloaded),
        offloaded_to_host=offloaded_to_host,
        notes=(*sums.notes, *said, *_idle(spec)),
    )
