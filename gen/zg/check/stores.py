"""stores.py -- proves properties of states that the play cannot show: parameters and sums cover a
whole shard, and each state has its type."""

from __future__ import annotations

from collections.abc import Collection

from ..plan.plan import Class, Flat, Plan
from .order import CheckError


def prove(p: Plan, have: dict[str, Class]) -> None:
    """Prove the stores of a plan. have: its classes by name."""
    flats = {f.name: f for f in p.flats}
    names: dict[str, Collection[str]] = {
        "flat": flats,
        "cls": have,
        "over": {"", *(g.name for g in p.groups)},
    }
    said = {"flat": "flat", "cls": "class", "over": "group"}
    for s in p.stores:
        for what, known in names.items():
            if (name := getattr(s, what)) not in known:
                raise CheckError(f"there is no {said[what]} {name}")
        if have[s.cls].slots != flats[s.flat].count:
            raise CheckError(f"class {s.cls} does not have a slot for each {s.flat}")
        # Other classes hold copies of parameters, too.
        if s.what == "params" and s.cls != f"param.{s.flat}":
            raise CheckError(f"class {s.cls} is not the one of parameters")
        if p.parts(s) > 1 and (s.first, s.n) != (0, flats[s.flat].shard):
            raise CheckError(f"class {s.cls}: every rank has a part of every shard")
    if len({s.cls for s in p.stores}) < len(p.stores):
        raise CheckError("two states lie in one class")
    for f in p.flats:
        _flat(p, f)


def _flat(p: Plan, f: Flat) -> None:
    trains = any(t.flat == f.name and not t.frozen for t in p.tensors)
    every = [(0, f.shard)]
    wanted = {"params": every, "sum": every}
    if not trains:
        wanted["sum"] = []
    for what, want in wanted.items():
        stored = [(s.first, s.n) for s in p.stored(what, f.name)]
        if stored != want:
            raise CheckError(f"flat {f.name} has not all of its {what}")
    _types(p, f)
    masters = {s.dtype for s in p.masters(f)}
    if trains and "f16" in masters:
        raise CheckError(f"flat {f.name}: parameters of f16 have no masters")


def _types(p: Plan, f: Flat) -> None:
    """Require that each state has the type of its kind."""
    types = {"params": {p.head.real}, "sum": {"f32"}, "master": {"f32"}}
    if p.head.ranks * p.head.micro_batches == 1:  # the only gradient may be its sum
        types["sum"].add(p.head.real)
    for s in p.stores:
        allowed = types.get(s.what, {p.recipe.moments})
        if s.flat == f.name and s.dtype not in allowed:
            raise CheckError(f"flat {f.name}: {s.what} is of another type")
