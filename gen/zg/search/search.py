"""search.py -- finds a plan that fits: makes the choices of `train.memory_budget`, and suggests
ways that would fit if `cluster.memory` is too small."""

from __future__ import annotations

import contextlib

from .. import build
from ..build import Built
from ..facts import reserve
from ..plan import plan
from ..read.spec import Spec, SpecError
from . import budget, fits, knobs
from .fits import size

MOST = 3  # ways that are suggested


def find(spec: Spec) -> Built:
    """Return the plan of a spec, which fits the cluster's memory. Raises SpecError if none does."""
    built = _budgeted(spec)
    _require(spec, built.plan)
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
    found = budget.choices(spec)
    chosen = budget.choose(spec, limit, found)
    built = build.build(chosen.spec)
    note = (
        f"train.memory_budget: chose {' '.join(chosen.keys)}, {chosen.device:,} bytes"
        f"{budget.needy(spec, chosen)}, by estimate {100 * chosen.cost:.2f} % more time"
    )
    return Built(
        built.plan,
        (*built.notes, note),
        chosen.spec,
        budget.table(spec, found, chosen),
    )


def _plan(spec: Spec) -> plan.Plan:
    return _budgeted(spec).plan


def _require(spec: Spec, p: plan.Plan) -> None:
    """Raise SpecError if the plan does not fit, with up to MOST ways that do."""
    over = fits.over(spec, p)
    if not over:
        return
    name, need, there = over[0]

    def fit(made: plan.Plan) -> bool:
        return not fits.over(spec, made)

    others = knobs.ways(spec, knobs.helpful(spec))
    good = [way.text for way in knobs.first(others, fit, _plan, MOST)]
    none = (
        "more ranks, smaller micro-batches or a smaller model: no other setting that zgen "
        "tries (stage 3, "
        "recompute, offloading) fits"
    )
    raise spec.wrong(
        f"cluster.memory.{name}",
        f"a rank needs {size(need)} of {name} memory"
        f"{_where(p) if name == 'device' else ''} but has only {size(there)}",
        (", or ".join(good) or none)
        + fits.other_bits(spec, lambda s: fit(_plan(s)))
        + (_processors(p, there) if name == "device" else ""),
        fits.unit(there),
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
