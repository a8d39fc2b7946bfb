"""budget.py -- what backward makes again where `train.memory_budget` bounds the arena: of all
choices of ops, the one that costs least of those that fit every target.

What a choice holds is exact: only saved values and temporary space depend on it. What it costs is
an estimate, good enough to put choices in order: each call that runs again takes its products at
the processor's peak rate, or its bytes at the memory's, whichever is longer.
"""
from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import combinations
from typing import Iterator

from . import activations, model, ops, place, plan
from .graph import Graph
from .schema import RECOMPUTE
from .spec import Spec

# Peak flops a second by bytes of a number, without sparsity, bytes a second: NVIDIA's data sheets
# of A100 SXM 80 GB, H100 SXM, B200; for a CPU a core with AVX2 and its share of the memory.
PEAKS = {"cpu": ({4: 1e11, 2: 1e11}, 1e10),
         "sm_80": ({4: 19.5e12, 2: 312e12}, 2.0e12),
         "sm_90": ({4: 67e12, 2: 989e12}, 3.35e12),
         "sm_100": ({4: 80e12, 2: 2250e12}, 8.0e12)}


@dataclass(frozen=True)
class Choice:
    """words: of train.recompute. arena: bytes on the target that holds most. cost: what it adds to
    a grain's forward and backward as the spec has them, on the target where that is most."""
    words: tuple[str, ...]
    arena: int
    cost: float

    @property
    def name(self) -> str:
        return "full" if set(self.words) == set(RECOMPUTE) else ", ".join(self.words) or "none"


def _seconds(spec: Spec, graph: Graph, target: str) -> float:
    """Of all functions of a grain."""
    real = ops.BYTES[spec.train.precision]
    rates, memory = PEAKS[target]
    total = 0.0
    for kind, body in ((k, b) for k in graph.kinds for n, b in k.bodies.items() if n != "eval"):
        size = {v.name: v.elems * (real if v.dtype == "real" else 4) for v in body.values}
        size |= {t.name: t.elems * real for t in kind.tensors}
        for c in body.calls:
            moved = sum(size.get(str(a), 0) for k, a in c.args if k in ("value", "param", "grad"))
            once = max(c.flops * c.rounds / rates[real], moved / memory)
            total += once * kind.count
    return total


def _held(spec: Spec, graph: Graph) -> int:
    """Bytes of the classes that a choice changes."""
    real, grains = ops.BYTES[spec.train.precision], spec.together
    bodies = place.bodies(graph, real)
    saved = sum(activations.slots(spec, "save", k.count) *
                ops.up(bodies.save[k.name].size, place.PAGE) for k in graph.kinds)
    return grains * saved + ops.up(max(p.size for p in bodies.tmp.values()), place.PAGE)


def _all(spec: Spec, p: plan.Plan) -> Iterator[Choice]:
    """Every choice of ops that holds those that the spec names; p: the plan of these alone."""
    graph = model.build(spec)
    most = max(p.arena(t) for t in spec.targets) - _held(spec, graph)
    once = {t: _seconds(spec, graph, t) for t in spec.targets}
    named = spec.train.recompute
    free = [w for w in RECOMPUTE if w in graph.ops and w not in named]
    for n in range(len(free) + 1):
        for more in combinations(free, n):
            words = RECOMPUTE if n == len(free) else tuple(
                w for w in RECOMPUTE if w in named or w in more)
            made = model.build(replace(spec, train=replace(spec.train, recompute=words)))
            cost = max(_seconds(spec, made, t) / once[t] - 1 for t in spec.targets)
            yield Choice(words, most + _held(spec, made), cost)


def choices(spec: Spec, p: plan.Plan) -> tuple[Choice, ...]:
    """Those worth a thought: each holds less than every one that costs less."""
    out: list[Choice] = []
    for c in sorted(_all(spec, p), key=lambda c: (c.cost, c.arena, len(c.words))):
        if not out or c.arena < out[-1].arena:
            out.append(c)
    return tuple(out)


def choose(spec: Spec, found: tuple[Choice, ...]) -> Choice:
    """The cheapest that fits."""
    limit = spec.train.memory_budget
    for c in found:
        if c.arena <= limit:
            return c
    raise spec.wrong("train.memory_budget", f"{limit} bytes hold no plan; the least arena has "
                     f"train.recompute [{found[-1].name}]", f"at least {found[-1].arena}")


def table(spec: Spec, found: tuple[Choice, ...], chosen: Choice) -> str:
    """For people."""
    lines = [f"train.memory_budget {spec.train.memory_budget:,}: more time by estimate, the arena, "
             "what is made again", f"  {'time':>8}{'arena':>22}  train.recompute"]
    for c in found:
        mark = "*" if c == chosen else " "
        lines.append(f"{mark} {100 * c.cost:>7.2f}%{c.arena:>22,}  {c.name}")
    return "\n".join(lines) + "\n"
