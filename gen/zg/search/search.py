"""search.py -- finds a plan that fits: makes the choices of `train.memory_budget`, and suggests
ways that would fit if `cluster.memory` is too small."""

from __future__ import annotations

import contextlib
import math
from itertools import groupby
from operator import attrgetter

from .. import build, progress
from ..build import Built
from ..facts import reserve
from ..plan import plan
from ..read.spec import Spec, SpecError
from . import fits, knobs
from .fits import size

MOST = 3  # ways that are suggested


def find(spec: Spec) -> Built:
    """Return the plan of a spec, which fits the cluster's memory. Raises SpecError if none does."""
    built = _budgeted(spec)
    _require(spec, built)
    return built


def other_rules(spec: Spec) -> tuple[tuple[str, plan.Plan], ...]:
    """Return (rule, plan) for each other rule of summation that the spec allows."""
    found = []
    for rule in knobs.RULES:
        if rule.held(spec):
            continue
        with contextlib.suppress(SpecError):
            found.append((rule.text, build.build(rule.change(spec)).plan))
    return tuple(found)


def _budgeted(spec: Spec) -> Built:
    """Build the plan, after the budget's choices if memory has a budget."""
    limit = spec.train.memory_budget
    if limit is None:
        return build.build(spec)
    from . import budget

    return budget.built(spec, limit)


def ways(spec: Spec, made: Spec) -> list[knobs.Way]:
    """Return up to MOST ways to change a spec so that it fits: those with the fewest settings, the
    fastest by predicted time first. made: the spec after the budget's choices."""
    from ..predict import clock
    from . import fit

    found = fit.Search(made, clock.device_of(spec), dict(vars(spec.cluster.memory)))
    limit = spec.cluster.memory.device or math.inf
    helpful = knobs.settings(made, knobs.helpful(spec))
    every = [found.way(x) for x in knobs.combinations(made, helpful)]
    every.sort(key=lambda way: len(way.picked))
    for _, few in groupby(every, lambda way: len(way.picked)):
        progress.doing("looks for settings that fit")
        some = (way.spec for way in few)
        found.add(x for x in some if found.formulas.least(x) <= limit)
        if found.best:
            break
    return [row.way for row in sorted(found.fitting, key=attrgetter("speed"))[:MOST]]


def _require(spec: Spec, built: Built) -> None:
    """Raise SpecError if the plan does not fit, with up to MOST ways that do."""
    p, over = built.plan, fits.over(spec, built.plan)
    if not over:
        return
    name, need, there = over[0]
    good = [way.text for way in ways(spec, built.spec)]
    none = (
        "more ranks, smaller micro-batches, a smaller model, or samples that ranks share "
        "(train.sequence_blocks): no other setting that zgen tries (stage 3, recompute, "
        "offloading, cluster.context_parallel) fits"
    )
    raise spec.wrong(
        f"cluster.memory.{name}",
        f"a rank needs {size(need)} of {name} memory"
        f"{_where(p) if name == 'device' else ''} but has only {size(there)}",
        (", or ".join(good) or none)
        + fits.other_bits(spec, lambda s: not fits.over(spec, _budgeted(s).plan))
        + (_processors(p, there) if name == "device" else ""),
        fits.unit(there, need),
    )


def _processors(p: plan.Plan, there: int) -> str:
    """Return a hint if a plan for several targets fits where it runs on processors alone."""
    targets = p.head.targets
    if "cpu" not in targets or len(targets) < 2 or p.arena("cpu") > there:
        return ""
    return f"; to run without a GPU, targets=[cpu], which needs {size(p.arena('cpu'))}"


def _where(p: plan.Plan) -> str:
    """Describe how device memory splits into the arena and the allowance beside it, if it is not a
    plain arena."""
    most = reserve.neediest(p)
    arena = p.arena(most)
    beside = reserve.device(p, most) - arena
    said = []
    if len(p.head.targets) > 1:
        said.append(f"target {most}")
    if beside:
        said.append(f"arena {size(arena)}, and about {size(beside)} outside it")
    if not said:
        return ""
    return f" ({': '.join(said)})"
