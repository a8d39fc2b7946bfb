"""budget.py -- chooses recomputation and offloading if `train.memory_budget` bounds the device's
memory: of all choices that fit every target, the fastest by predicted time.

A choice is a set of ops to recompute and a set of knobs that offload something; keys that the spec
gives stay as they are. Each set of knobs is planned and played once (fit.py), with the ops that
leave the least memory to need. Its other sets of ops follow from that by formulas. Memory is that
of the target that needs the most, time that of `cluster.device` or the first target.
"""

from __future__ import annotations

from operator import attrgetter

from .. import build, progress
from ..build import Built
from ..facts import reserve
from ..plan.plan import Plan
from ..predict import clock
from ..read.keytypes import RECOMPUTE
from ..read.spec import Spec
from . import fits, knobs
from .fit import Row, Search, table
from .knobs import Setting

WORDS = "train.recompute"


def _sets(spec: Spec) -> list[Setting]:
    """Return every set of ops that includes those the spec names."""
    every = [(s, _words(s)) for s in knobs.settings(spec, {WORDS: knobs.VALUES[WORDS]})]
    have = {word for s, words in every if s.value != RECOMPUTE for word in words}
    named = {*spec.train.recompute} & have
    return [s for s, words in every if s.held(spec) or named <= words]


def _words(s: Setting) -> set[str]:
    assert isinstance(s.value, tuple)
    return {*s.value}


def search(spec: Spec, limit: int) -> Search:
    """Return all choices of a spec. limit: bytes of device memory.

    Raises SpecError if the spec as it is cannot be planned.
    """
    memory = spec.cluster.memory
    limits = {"device": limit, "host": memory.host, "file": memory.file}
    found, sets = Search(spec, clock.device_of(spec), limits), _sets(spec)
    some = knobs.settings(
        spec, {key: knobs.VALUES[key] for key in knobs.OFFLOADING}, spec.places
    )
    progress.doing("plans the choices of train.memory_budget")
    smallest = [
        min((s.change(way) for s in sets), key=found.formulas.activations)
        for way in knobs.combinations(spec, some)
    ]
    found.add(smallest)
    for row in filter(None, map(found.of, smallest)):
        for s in sets:
            found.vary(row, s)
    return found


def _held(found: Search, memory: str, rows: list[Row]) -> list[Row]:
    """Return the choices that fit one memory of the cluster ("host" or "file").

    Raises SpecError if none does.
    """
    limit = found.limits[memory]
    held = [row for row in rows if limit is None or row.needs[memory] <= limit]
    if not held:
        assert limit is not None
        need = min(row.needs[memory] for row in rows)
        raise found.spec.wrong(
            f"cluster.memory.{memory}",
            f"no plan's {memory} arena fits in {fits.size(limit)}",
            fits.least(need),
            fits.unit(limit, need),
        )
    return held


def least(found: Search) -> Row:
    """Return the choice that needs the least device memory and fits the host and the file.

    Raises SpecError if none does.
    """
    rows = [*found.rows.values()]
    for memory in ("host", "file"):
        rows = _held(found, memory, rows)
    return min(rows, key=attrgetter("device", "plain"))


def choose(spec: Spec, limit: int) -> tuple[Row, Search]:
    """Return the fastest choice that fits the budget `limit` and the cluster's device, with all
    choices. If none fits the device, return the smallest one if it is within the budget.

    Raises SpecError if none is within the budget.
    """
    found = search(spec, min(limit, spec.cluster.memory.device or limit))
    found.settle()
    if found.best:
        return found.best[0], found
    smallest = least(found)
    if smallest.device <= limit:
        return smallest, found
    p = build.build(smallest.way.spec).plan
    beside = smallest.device - p.arena(reserve.neediest(p))
    out = f", about {fits.size(beside)} of it outside the arena" if beside else ""
    more = fits.other_bits(spec, lambda s: least(search(s, 1)).device <= limit)
    raise spec.wrong(
        "train.memory_budget",
        f"no plan fits in {fits.size(limit)}{needy(p)}; the smallest one, "
        f"with the other keys of the spec unchanged, has {smallest.way.words}",
        f"{fits.least(smallest.device)}{out}{more}",
        fits.unit(limit, smallest.device),
    )


def needy(p: Plan) -> str:
    """Return a phrase that names the target of a plan's bytes, "" if there is only one target."""
    several = len(p.head.targets) > 1
    return f" on target {reserve.neediest(p)}, which needs the most" if several else ""


def built(spec: Spec, limit: int) -> Built:
    """Build the plan of the choice, with a note and the table of choices."""
    chosen, found = choose(spec, limit)
    made = build.build(chosen.way.spec)
    took = f"; predicted {chosen.seconds:.4g} s a step" * bool(found.best)
    note = (
        f"train.memory_budget: chose {chosen.way.words}, {chosen.device:,} bytes"
        f"{needy(made.plan)}{took}"
    )
    told = table(found, f"train.memory_budget{needy(made.plan)}") if found.best else ""
    return Built(made.plan, (*made.notes, note), made.spec, told)
