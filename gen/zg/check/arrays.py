"""arrays.py -- the arrays that bytes hold elements of, by name; and which class holds which
state."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from ..facts import ops
from ..facts.stores import begin
from ..plan import plan
from ..plan.mesh import Along, Members
from ..plan.plan import Flat, Plan

Key = tuple[str, int]  # a flat and its instance


class MicroBatch(NamedTuple):
    """Of a step (0: an evaluation), a micro-batch's number among all ranks': at + r * by_rank."""

    step: int
    at: int
    by_rank: Along

    def __str__(self) -> str:
        return f"micro-batch {self.at} + r*{self.by_rank} of step {self.step}"


class State(NamedTuple):
    """p (parameters, in whatever type), m or v of a flat's instance, as so many steps left it; -1:
    initial values, for which a run may put others before it publishes them."""

    what: str
    flat: str
    l: int
    step: int

    def __str__(self) -> str:
        return (
            f"{self.what} of {self.flat}[{self.l}] as step {self.step} left it"
        )


class Value(NamedTuple):
    """What a unit's functions make of a micro-batch, or its tokens."""

    what: str
    unit: str
    micro_batch: MicroBatch

    def __str__(self) -> str:
        return f"{self.what}{' of ' * bool(self.unit)}{self.unit} of {self.micro_batch}"


class Leaf(NamedTuple):
    """A micro-batch's gradient of a flat's instance, so far from these writers."""

    flat: str
    l: int
    micro_batch: MicroBatch
    writers: frozenset[str]

    def __str__(self) -> str:
        what = f"the leaf of {self.flat}[{self.l}] of {self.micro_batch}"
        return f"{what} from {len(self.writers)} units"


class Sum(NamedTuple):
    """The sum of so many micro-batches' leaves in a row, or, if not whole, what is pending of it.
    leaves: of its tree, which are micro-batches, or what NCCL summed over ranks."""

    flat: str
    l: int
    micro_batch: MicroBatch
    micro_batches: int
    leaves: int
    whole: bool

    def __str__(self) -> str:
        what = "the sum" if self.whole else "what is pending"
        of = f"{self.micro_batches} micro-batches of {self.flat}[{self.l}]"
        return f"{what} of {of} from {self.micro_batch} on"


class Pending(NamedTuple):
    """The nodes of a flat's tree, beside the first."""

    flat: str
    l: int

    def __str__(self) -> str:
        return f"pending sums of {self.flat}[{self.l}]"


class Totals(NamedTuple):
    """A step's exact sums: the norms of (flat, instance, first element, by rank, elements), the
    losses of micro-batches, or EVERY; everywhere: over all ranks."""

    step: int
    norms: frozenset[tuple[str, int, int, Along, int]]
    losses: frozenset[MicroBatch]
    everywhere: bool

    def __str__(self) -> str:
        ranks = "all ranks" if self.everywhere else "a rank"
        return (
            f"{ranks}' sums of step {self.step}: {len(self.norms)} norms, "
            f"{len(self.losses)} losses"
        )


class Control(NamedTuple):
    """A step's constants: leaves that are counted; whether the factor is known."""

    step: int
    leaves: int
    known: bool

    def __str__(self) -> str:
        factor = "the factor" if self.known else "no factor"
        return f"constants of step {self.step}: {factor}, {self.leaves} leaves are counted"


class Table(NamedTuple):
    """A rotary table."""

    name: str

    def __str__(self) -> str:
        return self.name


class Came(NamedTuple):
    """What a reduction brought, the n-th of the run."""

    number: int

    def __str__(self) -> str:
        return f"what reduction {self.number} brought"


EVERY = frozenset(
    {MicroBatch(-1, 0, ())}
)  # all micro-batches of a step, which may be too many to list


def over_ranks(s: Sum, group: Members) -> Sum | None:
    """The sum of what all ranks of a group have, in their order; none where theirs do not follow
    each other."""
    step, at, by_rank = s.micro_batch
    if group.ranks > 1 and group.each(by_rank) != s.micro_batches:
        return None
    return s._replace(
        micro_batch=MicroBatch(step, at, group.without(by_rank)),
        micro_batches=s.micro_batches * group.ranks,
        leaves=s.leaves * group.ranks,
    )


@dataclass(frozen=True)
class Store:
    """A state's place in a class: elements [lo, lo + n) of the shard from byte `at` on, or all of
    the flat, on every rank. given: initial values come here, and what a run loads, and by which
    function it takes their hash; or none."""

    what: str
    flat: Flat
    cls: str
    at: int
    lo: int
    n: int
    width: int
    over: str
    parts: int
    given: str = ""


def stores(p: Plan) -> list[Store]:
    """Where each state lies at the end of a step."""
    out = []
    for f in p.flats:
        (params,) = p.stored("params", f.name)
        out.append(_store(p, f, params, "p"))
        for s in p.masters(f):
            near = "near_" if f.first_part(s) else ""
            out.append(
                replace(
                    _store(p, f, s, "p"),
                    at=begin(p, s),
                    given=f"{near}hash.{f.name}",
                )
            )
        out += [
            _store(p, f, s, s.what)
            for s in p.stores
            if s.flat == f.name and s.what not in ("params", "master", "sum")
        ]
    return out


def _store(p: Plan, f: Flat, s: plan.Store, what: str) -> Store:
    return Store(
        what, f, s.cls, 0, s.first, s.n, ops.BYTES[s.dtype], s.over, p.parts(s)
    )
