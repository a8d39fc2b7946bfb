"""arrays.py -- names of the arrays that slots hold, and the places of the states."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from ..facts import ops
from ..plan import plan
from ..plan.mesh import Along, Members
from ..plan.plan import Flat, Plan

Key = tuple[str, int]  # a flat's name and the index of its instance


class MicroBatch(NamedTuple):
    """Number of a micro-batch among those of all ranks, at + r * by_rank. Step 0 is an
    evaluation."""

    step: int
    at: int
    by_rank: Along

    def __str__(self) -> str:
        return f"micro-batch {self.at} + r*{self.by_rank} of step {self.step}"


class State(NamedTuple):
    """Parameters (p, in any type) or a moment (m, v) of a flat's instance after step `step`. Step
    -1 stands for initial values, which a run may replace before it publishes them."""

    what: str
    flat: str
    l: int
    step: int

    def __str__(self) -> str:
        return f"{self.what} of {self.flat}[{self.l}] as step {self.step} left it"


class Computed(NamedTuple):
    """Tokens of a micro-batch, or an activation or activation gradient that a unit makes of it."""

    what: str
    unit: str
    micro_batch: MicroBatch

    def __str__(self) -> str:
        return f"{self.what}{' of ' * bool(self.unit)}{self.unit} of {self.micro_batch}"


class Leaf(NamedTuple):
    """Gradient of a flat's instance from one micro-batch, as far as `writers` have written it."""

    flat: str
    l: int
    micro_batch: MicroBatch
    writers: frozenset[str]

    def __str__(self) -> str:
        what = f"the leaf of {self.flat}[{self.l}] of {self.micro_batch}"
        return f"{what} from {len(self.writers)} units"


class Sum(NamedTuple):
    """Sum of the gradients of consecutive micro-batches. `whole` is false while it is still a
    pending node. leaves: leaves of its tree, each a micro-batch's gradient or NCCL's sum over
    ranks."""

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
    """Pending nodes of a flat's tree except the first."""

    flat: str
    l: int

    def __str__(self) -> str:
        return f"pending sums of {self.flat}[{self.l}]"


class Totals(NamedTuple):
    """Exact sums of a step: squared norms and losses. A norm is listed as (flat, instance, first
    element, by rank, elements), a loss as its micro-batch or EVERY. everywhere: they are summed
    over all ranks."""

    step: int
    norms: frozenset[tuple[str, int, int, Along, int]] = frozenset()
    losses: frozenset[MicroBatch] = frozenset()
    everywhere: bool = False

    def __str__(self) -> str:
        ranks = "all ranks" if self.everywhere else "a rank"
        return (
            f"{ranks}' sums of step {self.step}: {len(self.norms)} norms, "
            f"{len(self.losses)} losses"
        )


class Control(NamedTuple):
    """Constants of a step: the number of leaves counted so far, and whether the clipping factor is
    known."""

    step: int
    leaves: int
    known: bool

    def __str__(self) -> str:
        factor = "the factor" if self.known else "no factor"
        return (
            f"constants of step {self.step}: {factor}, {self.leaves} leaves are counted"
        )


class RopeTable(NamedTuple):
    """Rotary table of cosines and sines."""

    name: str

    def __str__(self) -> str:
        return self.name


class Came(NamedTuple):
    """Pieces that the n-th reduction of the run delivered."""

    number: int

    def __str__(self) -> str:
        return f"what reduction {self.number} brought"


# All micro-batches of a step, which may be too many to list.
EVERY = frozenset({MicroBatch(-1, 0, ())})


def over_ranks(s: Sum, group: Members) -> Sum | None:
    """Return the sum over a group's ranks, in their order. None if the ranks' micro-batches are not
    consecutive."""
    step, at, by_rank = s.micro_batch
    if group.ranks > 1 and group.each(by_rank) != s.micro_batches:
        return None
    return s._replace(
        micro_batch=MicroBatch(step, at, group.without(by_rank)),
        micro_batches=s.micro_batches * group.ranks,
        leaves=s.leaves * group.ranks,
    )


@dataclass(frozen=True)
class Stored:
    """Place of a state in a class. From byte `at` on it holds elements [lo, lo + n) of the shard,
    or the whole flat on every rank.

    given: name of the function that hashes the state, if initial values and loaded ones are written
    here; else "".
    """

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


def stores(p: Plan) -> list[Stored]:
    """Return the place of each state at the end of a step."""
    out = []
    for f in p.flats:
        (params,) = p.stored("params", f.name)
        out.append(_store(p, f, params, "p"))
        for s in p.masters(f):
            near = "near_" if f.first_part(s) else ""
            out.append(
                replace(
                    _store(p, f, s, "p"),
                    at=p.begin(s) * ops.BYTES[s.dtype],
                    given=f"{near}hash.{f.name}",
                )
            )
        out += [
            _store(p, f, s, s.what)
            for s in p.stores
            if s.flat == f.name and s.what not in ("params", "master", "sum")
        ]
    return out


def _store(p: Plan, f: Flat, s: plan.Store, what: str) -> Stored:
    return Stored(
        what, f, s.cls, 0, s.first, s.n, ops.BYTES[s.dtype], s.over, p.parts(s)
    )
