"""build.py -- turns a Spec into a Plan by calling the passes in order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from .facts import ops
from .graph import mlps, quantize
from .graph.graph import Graph
from .passes import (
    buffers,
    launch,
    place,
    recipe,
    sched,
    shard,
    slices,
    stated,
    stores,
)
from .passes.shard import Shards
from .passes.stores import Kept
from .plan import plan
from .plan.garbage import unsearched
from .plan.operand import Index, Names, Operand
from .read.spec import Spec


class Built(NamedTuple):
    """A plan with notes for the user. spec: the spec with the choices of a memory budget and the
    bound on live parameters that the plan keeps; choices: table of the alternatives."""

    plan: plan.Plan
    notes: Names
    spec: Spec
    choices: str = ""


def _files(spec: Spec) -> list[plan.File]:
    z = spec.zero
    path = next(
        part.nvme_path
        for part in (z.offload_optimizer, z.offload_param)
        if part.device == "nvme" and part.nvme_path
    )
    return [plan.File(path, z.aio.block_size, z.aio.queue_depth)]


def _events(sections: tuple[plan.Section, ...]) -> tuple[plan.Event, ...]:
    """Return every event's name and count."""
    most: dict[str, int] = {}
    for s in sections:
        for step in s.steps:
            for e in step.events:
                most[e.name] = max(most.get(e.name, 0), e.index + 1)
    return tuple(plan.Event(n, c) for n, c in sorted(most.items()))


def _idle(spec: Spec, graph: Graph) -> Names:
    """Return a note for each op to recompute that no block has; `full` names all ops and gets
    none."""
    named = set(spec.train.recompute)
    idle = sorted(named - graph.ops) if named != set(ops.WORDS.values()) else []
    return tuple(f"train.recompute: no block has {word}" for word in idle)


def build(spec: Spec) -> Built:
    """Build the plan of a spec. A bound on live parameters that no plan can keep is raised to the
    least possible one. Memory budgets are handled by search."""
    made, built = spec, _built(spec)
    while built.plan.head.live > built.plan.head.bound:
        bound = built.plan.head.live
        z = replace(spec.zero, stage3_max_live_parameters=bound)
        made = replace(spec, zero=z)
        built = _built(made)
    if made is spec:
        return built
    layers = "; with train.accumulate layers no block is split"
    note = (
        f"zero.stage3_max_live_parameters: {spec.zero.stage3_max_live_parameters:,} elements are "
        f"too few for any plan: the bound is {built.plan.head.bound:,}, the least possible"
        f"{layers if spec.together > 1 else ''}"
    )
    return built._replace(notes=(note, *built.notes))


def _groups(
    shards: Shards,
    kept: Kept,
    fns: Sequence[plan.Fn],
    schedule: sched.Schedule,
) -> tuple[plan.Group, ...]:
    """Return the groups that are used: all ranks, owners, and those of stores, operands and
    steps."""
    steps = [x for s in schedule.sections for x in s.steps]
    args = [a for fn in fns for c in fn.calls for a in c.args]
    used = {
        plan.ALL,
        shards.grid.owners,
        *(s.over for s in kept.states),
        *(a.group for a in args if isinstance(a, Operand | Index)),
        *(s.group for s in steps),
        *(r.group for s in steps for r in s.refs),
    }
    return tuple(g for g in shards.grid.groups() if g.name in used)


def _head(
    spec: Spec, graph: Graph, shards: Shards, schedule: sched.Schedule
) -> plan.Head:
    t, z = spec.train, spec.zero
    params = sum(k.count * sum(x.params for x in k.tensors) for k in graph.kinds)
    return plan.Head(
        spec=spec.name,
        ranks=spec.cluster.ranks,
        zero=z.stage,
        prefetch=schedule.prefetch,
        overlap=int(z.overlap_comm),
        real=t.precision,
        micro_batches=spec.micro_batches,
        order=shards.sums.order,
        block=spec.block,
        reduction=t.reduction,
        batch=t.micro_batch,
        sequence=t.sequence,
        width=spec.model.width,
        vocab=spec.model.vocab,
        ignore=-1 if spec.data.ignore is None else spec.data.ignore,
        seed=t.seed,
        params=params,
        live=schedule.live,
        bound=z.stage3_max_live_parameters or schedule.live,
        targets=spec.targets,
        margin=t.sm_margin,
        shuffle=int(spec.data.shuffle),
        end=-1 if spec.data.end is None else spec.data.end,
        keyed=int(spec.keyed),
        local=spec.cluster.local if spec.cluster.ranks > 1 else 0,
        products=t.products,
        loss_mean=t.loss_mean,
        blocks=t.sequence_blocks,
        context=spec.cluster.context_parallel,
    )


@unsearched
def _built(spec: Spec) -> Built:
    graph = slices.graph(spec)
    shards = shard.split(spec, graph)
    kept = stores.plan(spec, shards)
    bodies = place.bodies(graph, ops.BYTES[spec.train.precision])
    schedule = sched.schedule(spec, graph, shards, kept, bodies)
    fns, launches, runs = launch.functions(spec, graph, shards, kept, bodies, schedule)
    classes = place.classes(
        buffers.wanted(spec, graph, shards, bodies, schedule, kept.states, runs)
    )
    tables = tuple(
        plan.Table(f"table.{n}", x.head, x.freq) for n, x in enumerate(graph.tables)
    )
    made = plan.Plan(
        head=_head(spec, graph, shards, schedule),
        recipe=recipe.made(spec),
        stated=stated.lines(spec),
        groups=_groups(shards, kept, fns, schedule),
        flats=tuple(f.plain for f in shards.flats),
        stores=tuple(s.plain for s in kept.states),
        tensors=shards.tensors,
        classes=classes,
        tables=tables,
        launches=launches,
        runs=runs,
        fns=fns,
        events=_events(schedule.sections),
        sections=schedule.sections,
        files=tuple(_files(spec) if any(c.arena == "file" for c in classes) else ()),
        axes=shards.grid.axes,
    )
    return Built(
        made,
        (
            *spec.notes,
            *_idle(spec, graph),
            *slices.notes(spec, graph),
            *mlps.notes(spec),
            *quantize.notes(spec, graph.kinds),
            *shards.notes,
        ),
        spec,
    )
