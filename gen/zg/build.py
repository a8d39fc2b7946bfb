"""build.py -- Spec to Plan: calls the passes, and says which classes of buffers there are."""
from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from . import activations, budget, fits, launch, offload, ops, place, plan, recipe, sched
from . import shard, slices
from .graph import Graph
from .spec import Spec


class Built(NamedTuple):
    """A plan and what the user should hear about it; choices: a table of what a memory budget
    chose from; spec: with what was chosen."""
    plan: plan.Plan
    notes: tuple[str, ...]
    spec: Spec
    choices: str = ""


def _wanted(spec: Spec, graph: Graph, shards: shard.Shards, bodies: place.Bodies,
            schedule: sched.Schedule, runs: tuple[plan.Run, ...],
            ) -> list[tuple[str, str, int, int]]:
    """Every class: name, kind, slots, bytes of a slot."""
    W, real = spec.cluster.ranks, ops.BYTES[spec.train.precision]
    M, C = graph.dims["M"], graph.dims["C"]
    common, tile = "shared" if W > 1 else "private", schedule.tile
    grains, turns = spec.together, _turns(schedule)
    out = [("ctl", "private", 1, ops.CTL), ("sums", common, 2, 8 * ops.SUMS),
           ("tokens", "private", grains, 4 * M), ("targets", "private", grains, 4 * M)]
    for n, t in enumerate(graph.tables):
        out.append((f"table.{n}", "private", 1, spec.train.sequence * t.head * 4))
    lies = lambda c, f: offload.arena(spec, shards, c, f)
    tiles: dict[str, int] = {}                          # that come from the file: bytes
    for f in shards.flats:
        size = {"whole": f.shard * W, "shard": f.shard}
        gathered = common if f.state == "shard" else "private"
        away = f.name in schedule.stage
        bytes_of = lambda c: real if c == "real" else ops.width(c, spec.train.optimizer.moments)
        out.append((f"real.{f.name}", lies("real", f) or gathered, f.count, size[f.real] * real))
        out += [(f"{s}.{f.name}", lies(s, f) or "private", f.count,
                 (size[f.state] - f.near) * bytes_of(s)) for s in f.states]
        out += [(f"{s}.{f.name}", "private", f.count, f.near * bytes_of(s.removeprefix("near_")))
                for s in offload.near_states(spec, shards, f) if f.near]
        for c in (c for c in ("real", *f.states) if lies(c, f) == "filed"):
            tiles[c] = max(tiles.get(c, 0), min(tile, f.shard - f.near) * bytes_of(c))
        kept = "hosted" if shards.below else common if f.sum == "whole" else "private"
        if f.moves:
            out.append((f"sum.{f.name}", kept, f.count,
                        (1 if shards.apart else f.nodes) * size[f.sum] * 4))
        if schedule.ring[f.name]:
            out.append((f"ring.{f.name}", "private", schedule.ring[f.name], size["whole"] * real))
            if away:
                way = [("stage", common), *[("shelf", "hosted")] * (f"shelf.{f.name}" in turns)]
                out += [(f"{name}.{f.name}", kind, schedule.stage[f.name], f.shard * real)
                        for name, kind in way]
        if schedule.leaf[f.name]:
            brought = common if shards.order == "ranks" else "private"
            out.append((f"leaf.{f.name}", brought, schedule.leaf[f.name], size["whole"] * real))
    if shards.apart:
        out.append(("pend", common, 1, max(f.nodes * f.shard * W * 4 for f in shards.flats)))
    if graph.acc:
        out.append(("acc", "private", grains if graph.tied else 1, 4 * graph.acc))
    units = sum(k.count for k in graph.kinds) - max(1, graph.still)
    out += _kept(spec, "x", units, M * C * real)
    out += [("dx", "private", grains + 1, M * C * real)]
    for k in graph.kinds:
        if bodies.save[k.name].size:
            out += _kept(spec, f"save.{k.name}", k.count, bodies.save[k.name].size)
    out.append(("tmp", "private", 1, max(p.size for p in bodies.tmp.values())))
    out.append(("work", "scratch", 1, max(bodies.work, 64)))
    brought = [i.value for s in schedule.sections for step in s.steps
               if step.op in sched.REDUCES.values() for i in step.ints if i.name == "bytes"]
    if brought:
        out.append(("inbox", "gpu", 1, shards.sources * max(brought)))
    out.append(("space", "gpu", 1, max([1, *(r.space for r in runs)])))
    if tile:
        lowered = schedule.piece * (4 if W > 1 else real) if shards.below else \
            max(min(tile, f.shard - f.near) for f in shards.flats if f.moves) * 4
        out += [("hctl", "hosted", 1, ops.CTL)]
        out += [("down", "hosted", turns["down"], lowered)] if "down" in turns else []
        out += [("hsums", "hosted", 1, 8 * ops.SUMS)] if shards.below else []
        out += [("part", "private", turns["part"], lowered)] if "part" in turns else []
        rise = [min(tile, f.shard - f.near) for f in shards.flats if f.name not in schedule.stage]
        out += [("up", "hosted", turns["up"], max(rise) * real)] if "up" in turns else []
        out += [(f"tile.{c}", "hosted", turns[f"tile.{c}"], size) for c, size in tiles.items()]
    out.append(("inlet", "host", ops.INLETS, 2 * 4 * M))
    out.append(("desk", "host", 1, max(ops.DESK, 4 * graph.dims["V"])))
    return out


def _turns(schedule: sched.Schedule) -> dict[str, int]:
    """How many slots of a class are used: at most `buffer_count` where they take turns."""
    most: dict[str, int] = {}
    for r in (r for s in schedule.sections for x in s.steps for r in (*x.ins, *x.outs)):
        most[r.cls] = max(most.get(r.cls, 0), r.index + 1)
    return most


def _files(spec: Spec) -> list[plan.File]:
    z = spec.zero
    path = next(part.nvme_path for part in (z.offload_optimizer, z.offload_param)
                if part.device == "nvme")
    return [plan.File(path, z.aio.block_size, z.aio.queue_depth)]


def _kept(spec: Spec, name: str, count: int, size: int) -> list[tuple[str, str, int, int]]:
    """The classes of `count` values of a grain that backward needs."""
    near = activations.slots(spec, name, count)
    if near == count:
        return [(name, "private", count * spec.together, size)]
    return [(f"near.{name}", "private", near, size), (f"far.{name}", "hosted", count - near, size)]


def _events(sections: tuple[plan.Section, ...]) -> tuple[plan.Event, ...]:
    """Every event's name and how many there are."""
    most: dict[str, int] = {}
    for s in sections:
        for step in s.steps:
            for e in (*step.waits, *step.recs):
                most[e.name] = max(most.get(e.name, 0), e.index + 1)
    return tuple(plan.Event(n, c) for n, c in sorted(most.items()))


def _idle(spec: Spec, graph: Graph) -> tuple[str, ...]:
    """Ops to make again that no block has; `full` names them all."""
    named = set(spec.train.recompute)
    idle = sorted(named - graph.ops) if named != set(ops.WORDS.values()) else []
    return tuple(f"train.recompute: no block has {word}" for word in idle)


def build(spec: Spec) -> Built:
    """The plan of a spec, which fits the cluster's memory."""
    built = _budgeted(spec)
    fits.require(spec, built.plan, lambda changed: _budgeted(changed).plan)
    return built


def other_rules(spec: Spec) -> tuple[tuple[str, plan.Plan], ...]:
    """What another rule of summation would make of a spec."""
    made = [(text, change(spec)) for text, change in fits.RULES]
    return tuple((text, _build(s).plan) for text, s in made if s.train.sum != spec.train.sum)


def _budgeted(spec: Spec) -> Built:
    """Where memory has a budget, the plan of what it leaves to choose."""
    if spec.train.memory_budget is None:
        return _build(spec)
    found = budget.choices(spec, lambda changed: _build(changed).plan)
    chosen = budget.choose(spec, found, lambda changed: _build(changed).plan)
    built = _build(chosen.spec)
    note = f"train.memory_budget: chose {' '.join(chosen.keys)}, {chosen.device:,} bytes, " \
           f"by estimate {100 * chosen.cost:.2f} % more time"
    return Built(built.plan, (*built.notes, note), chosen.spec, budget.table(spec, found, chosen))


def _build(spec: Spec) -> Built:
    t, z = spec.train, spec.zero
    graph = slices.graph(spec)
    shards = shard.split(spec, graph)
    bodies = place.bodies(graph, ops.BYTES[t.precision])
    schedule = sched.schedule(spec, graph, shards, {k: v.size for k, v in bodies.save.items()})
    fns, launches, runs = launch.functions(spec, graph, shards, bodies, schedule)
    classes = place.classes(_wanted(spec, graph, shards, bodies, schedule, runs))
    params = sum(k.count * sum(x.params for x in k.tensors) for k in graph.kinds)
    head = plan.Head(spec.name, spec.cluster.ranks, z.stage, schedule.prefetch, int(z.overlap_comm),
                     t.precision, spec.grains, shards.order, spec.block, t.reduction, t.micro_batch,
                     t.sequence, spec.model.width, spec.model.vocab,
                     -1 if spec.data.ignore is None else spec.data.ignore, t.seed, params,
                     schedule.live, z.stage3_max_live_parameters or schedule.live, spec.targets)
    tables = tuple(plan.Table(f"table.{n}", x.head, x.freq) for n, x in enumerate(graph.tables))
    made = plan.Plan(head, recipe.made(spec), (plan.Group("all", spec.cluster.ranks),),
                     shards.flats, shards.tensors, classes, tables, launches, runs, fns,
                     _events(schedule.sections), schedule.sections,
                     tuple(_files(spec) if any(c.kind == "filed" for c in classes) else ()))
    return Built(made, (*spec.notes, *_idle(spec, graph), *slices.notes(spec, graph),
                        *shards.notes), spec)
