"""uses.py -- looks up the parameters that functions of units use, and the gradients that they
write."""

from __future__ import annotations

from typing import NamedTuple

from ..plan.plan import unit_of
from .arrays import Key, Leaf
from .fns import Facts
from .kernels import BODIES
from .order import Memory


class UnitUse(NamedTuple):
    """Use of a unit's function. of: the flat and instance of each of its parameters; at: the byte
    offset of the unit's part of a flat; writer: the name under which its share of a gradient is
    counted."""

    body: str
    of: dict[str, Key]
    at: dict[str, int]
    writer: str

    def key(self, formal: str) -> Key:
        return self.of[formal.removeprefix("d")]


class Uses:
    """Knows the units of a plan in forward order, and the parameters of each."""

    def __init__(self, m: Memory, facts: Facts) -> None:
        self.m = m
        self.facts = facts
        self.order = list(
            dict.fromkeys(s.unit for s in m.p.section("eval").steps if s.kind in BODIES)
        )
        self.writers = {key: frozenset(names) for key, names in self._writers().items()}

    def _writers(self) -> dict[Key, set[str]]:
        """Return the functions that write each gradient in backward."""
        out: dict[Key, set[str]] = {
            (f.name, l): set() for f in self.m.p.flats for l in range(f.count)
        }
        for unit in self.order:
            kind, index = unit_of(unit)
            body = "bwd" if ("bwd", kind) in self.facts.parts else "train"
            for op, rows in self.facts.parts.get((body, kind), ()):
                for n in range(len(rows)):
                    use = self.use(unit, op, n)
                    for formal in self.m.fns[op].outs:
                        if self.m.fns[op].flat(formal):
                            out[use.key(formal)].add(use.writer)
        return out

    def use(self, unit: str, op: str, n: int) -> UnitUse:
        """Return the use of a unit's function on slice n of its weight."""
        body, kind, *number = op.split(".")
        index = unit_of(unit)[1]
        writer = f"{unit}.{number[0]}.{n}" if number else unit
        flats = self.facts.flats[op]
        steps = self.facts.steps
        of = {
            formal: (flat, self.instance(flat, kind, index, n))
            for formal, flat in flats.items()
        }
        at = {flat: index * steps[kind, flat] * self.m.real for flat in flats.values()}
        return UnitUse(body, of, at, writer)

    def instance(self, flat: str, kind: str, index: int, n: int) -> int:
        """Return the instance of a flat that holds slice n of a unit's parameters."""
        if self.m.flats[flat].count == 1:
            return 0
        slices = {
            len(rows)
            for (_, name), parts in self.facts.parts.items()
            if name == kind
            for op, rows in parts
            if flat in self.facts.flats[op].values()
        }
        if len(slices) > 1:
            self.m.fail(f"{flat} is in {sorted(slices)} slices")
        return index * slices.pop() + n

    def complete(self, leaf: Leaf) -> bool:
        return leaf.writers == self.writers[leaf.flat, leaf.l]

    def beside(self, unit: str) -> tuple[str, str]:
        """Return the units before and after this one, "" for none."""
        around = ["", *self.order, ""]
        at = self.order.index(unit)
        return around[at], around[at + 2]
