"""sizes.py -- describes the numbers of a plan's steps for C. Elements of flat buffers and their
bytes carry their names (plan/size.py); every other number has a meaning here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..plan import roll
from ..plan.operand import Index, Operand
from ..plan.plan import Event, Plan, Ref, Step
from ..plan.size import Constant, Size, flat_of, width_of
from .letters import of_unit
from .words import constant, group_name, lower, number, upper, word

# Pieces of a flat's shard: the first word of their constants, and a comment.
PIECES = {
    "gather": "of each rank, in one all-gather",
    "reduce": "of each rank, in one reduce-scatter",
    "part": "of a shard, sent to the host at a time",
    "tile": "of a shard, updated at a time on the host",
}
VALUES = ("x", "save", "far")  # classes with a slot for each unit


@dataclass(frozen=True)
class What:
    """The meaning of a number of a step.

    cls: the class or event that it indexes. width: bytes of the elements that it counts: 1 if it
    counts elements and not bytes, 0 if it counts neither. by: its growth from one unit to the next,
    if that is the same in every plan. turns: units take turns in the class.
    """

    name: str
    cls: str = ""
    width: int = 0
    by: int = 0
    turns: bool = False


class Sizes:
    """Names and meanings of the numbers of a plan."""

    def __init__(self, p: Plan) -> None:
        self.p = p
        self.fns = {f.name: f for f in p.fns}
        self.flats = {f.name: f for f in p.flats}
        self.stores = {s.cls: s for s in p.stores}
        self.slots = {c.name: c.slots for c in p.classes}
        self.units: dict[str, dict[str, Constant]] = {f: {} for f in self.flats}
        for size in all_sizes(p):
            known = self.units.get(size.flat, {})
            for u, _ in size.terms:
                if known.setdefault(u.name, u) != u:
                    raise ValueError(f"{u.name} is {known[u.name].size} and {u.size}")

    def flat(self, s: Step) -> str:
        """Return the flat that a step works on: that of its function, else the one that its numbers
        count."""
        name = s.op.partition(".")[2]
        if self.model(s) or name in self.flats:
            return name
        return flat_of([*sizes_of(s)])

    def model(self, s: Step) -> bool:
        """Return whether a step calls a function of a unit of the model."""
        return s.op in self.fns and of_unit(self.fns[s.op])

    # ---- meanings of numbers

    def whats(self, s: Step) -> roll.Parts[What]:
        """Return the meaning of each of a step's numbers."""
        fn = self.fns.get(s.op)
        called = [*fn.ins, *fn.outs] if fn else []
        called += [word(r.cls) for r in s.refs[len(called) :]]
        refs = []
        for r, name in zip(s.refs, called, strict=True):
            refs.append((self.slot(lower(name), r.cls), begin(r)))
        ints = []
        for i in s.ints:
            by = int(i.name == "l")
            ints.append(What(i.name, width=width_of([i.value]), by=by))
        return roll.Parts(
            What("l"),
            tuple(refs),
            tuple(ints),
            tuple(map(self.event, s.waits)),
            tuple(map(self.event, s.recs)),
        )

    def slot(self, name: str, cls: str) -> What:
        """Return the meaning of a slot's index. A state of a flat's instance l is in slot l."""
        of = held(cls)
        return What(name, cls, by=int(of in self.stores), turns=self.turns(of))

    def turns(self, cls: str) -> bool:
        """Return whether units take turns in a class because it has no slot for each."""
        kind, _, of = cls.partition(".")
        f = self.flats.get(of)
        each = f and self.slots.get(cls, 0) >= f.count
        return kind not in VALUES and not each

    def event(self, e: Event) -> What:
        return self.slot(lower(e.name.partition(".")[2]), e.name)

    # ---- numbers by name

    def rows(self) -> Iterator[tuple[str, str]]:
        """Yield enumerators of flats, their parts and pieces, each with a comment."""
        for f in self.p.flats:
            name, units = upper(f.name), self.units[f.name]
            near = units.get(f"near.{f.name}")
            whole = f.shard * self.p.head.ranks
            yield (
                f"FLAT_{name} = {number(whole)}",
                f"of an instance; instances: {f.count}",
            )
            yield f"SHARD_{name} = {number(f.shard)}", "of a shard"
            for u in units.values():
                if word(u.name) == "split" and "%" not in u.name:
                    _, group, *_ = u.name.split(".")
                    yield (
                        f"{constant(u)} = {number(u.size)}",
                        f"of each rank's part if {group_name(group)} splits it",
                    )
            if near:
                yield (
                    f"NEAR_{name} = {number(near.size)}",
                    "of a shard, states on the device",
                )
                yield (
                    f"FAR_{name} = {number(f.shard - near.size)}",
                    "of a shard, states offloaded",
                )
            found = [u for u in units.values() if "%" not in u.name]
            for piece, text in PIECES.items():
                for u in found:
                    if word(u.name) == piece:
                        yield f"{constant(u)} = {number(u.size)}", text
            for u in found:
                if u.each:
                    unit = u.name.rpartition(".")[2]
                    yield (
                        f"{constant(u)} = {number(u.size)}",
                        f"of it, for each {unit}",
                    )


def all_sizes(p: Plan) -> Iterator[Size]:
    """Yield the Sizes of a plan's steps, calls and stores."""
    for section in p.sections:
        for s in section.steps:
            yield from sizes_of(s)
    found: list[object] = [n for s in p.stores for n in (s.first, s.n)]
    for a in (a for fn in p.fns for c in fn.calls for a in c.args):
        found.append(a)
        if isinstance(a, Index):
            found += [a.at, a.by_rank, a.by_layer]
        elif isinstance(a, Operand):
            found.append(a.by_rank)
    yield from (n for n in found if isinstance(n, Size))


def sizes_of(s: Step) -> Iterator[Size]:
    """Yield the Sizes among a step's numbers."""
    for i in s.ints:
        if isinstance(i.value, Size):
            yield i.value
    for r in s.refs:
        for n in (r.at, r.by_rank):
            if isinstance(n, Size):
                yield n


def begin(r: Ref) -> What:
    """Return the meaning of the offset in a slot."""
    by = 0
    for u, _ in r.at.terms if isinstance(r.at, Size) else ():
        if u.each:
            by = Size(((u, 1),), width=width_of([r.at]))
    return What("at", width=width_of([r.at]), by=by)


def held(cls: str) -> str:
    """Return the class that an event says is full or free; a class's name is unchanged."""
    return cls.removeprefix("full.").removeprefix("free.")
