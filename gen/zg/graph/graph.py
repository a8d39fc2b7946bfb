"""graph.py -- the graph of a model: units of kernel calls over named operands, and their tensors.

Operands of a call, as (kind, name): value (activation or its gradient), param, grad (a leaf),
fixed (token, target, sums, table.N), work (workspace), number, int (of the step).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..facts import kernels
from ..facts.ops import Op
from ..plan.operand import Index, Ints, Layers, Names


@dataclass(frozen=True)
class Tensor:
    """A parameter tensor of a unit kind. `name` holds {l} or {l+N} in a repeated unit; `parts` are
    the (name, rows) it has in the weights' file, more than one where several tensors share one
    linear. Rows of `shape` beyond those are zeros: the vocabulary's last rows."""

    name: str
    parts: tuple[tuple[str, int], ...]
    shape: Ints
    mean: float
    std: float
    group: tuple[float, float, int]  # factor of lr, weight decay, frozen

    @property
    def elems(self) -> int:  # as stored
        return math.prod(self.shape)

    @property
    def params(self) -> int:  # of the model
        return sum(rows for _, rows in self.parts) * math.prod(self.shape[1:])


@dataclass(frozen=True)
class Value:
    name: str
    dtype: str  # real | f32
    elems: int

    def bytes(self, real: int) -> int:
        return self.elems * (real if self.dtype == "real" else 4)


Word = tuple[
    str, str | int | float | Index | Layers
]  # an operand: of what kind, and its name or number


@dataclass(frozen=True)
class Call:
    """One kernel call: symbol, operands in order. Neighbours that are called `rounds` times are so
    in turn; `grow`: bytes by which operands move from round to round."""

    kernel: str
    args: tuple[Word, ...]
    rounds: int = 1
    grow: Ints = ()

    @property
    def shape(self) -> Ints:
        return tuple(
            a for k, a in self.args if k == "number" and isinstance(a, int)
        )

    @property
    def flops(self) -> int | Layers:
        args = [a for _, a in self.args]
        return kernels.spent(self.kernel, args, self.rounds)

    @property
    def scratch(self) -> int:
        return kernels.scratch(self.kernel, self.shape)


@dataclass
class Node:
    """An op of a unit, and what its names stand for there: values, parameters."""

    op: Op
    dims: dict[str, Any]
    bind: dict[str, str]


class Made(NamedTuple):
    """What an op of forward makes: values, by these calls."""

    op: str
    values: set[str]
    calls: list[Call]


@dataclass(frozen=True)
class Body:
    """The calls of one function and the values they touch."""

    calls: tuple[Call, ...]
    values: tuple[Value, ...]


@dataclass(frozen=True)
class Part:
    """A run of a body's calls that is a function of its own: the number-th of the body, -1 where it
    is all of it. Of a unit that is cut it touches one of Kind.flats. It is called for each of so
    many slices of a weight, `rows` rows of it each: operand `at` says from which on."""

    calls: tuple[Call, ...]
    number: int = -1
    slices: int = 1
    rows: int = 0

    @property
    def ints(self) -> Names:
        """The numbers that it takes: which rows of a weight, which unit of its kind."""
        words = (a for c in self.calls for _, a in c.args)
        numbered = any(isinstance(a, Index | Layers) for a in words)
        return ("at",) * (self.slices > 1) + ("l",) * numbered


@dataclass(frozen=True)
class Kind:
    """A unit kind: `count` instances; x and y name its input and output value ('' for none). Where
    nothing moves up to its output, it has no bwd."""

    name: str
    count: int
    tensors: tuple[Tensor, ...]
    bodies: dict[str, Body]  # fwd, bwd | train, eval
    saved: tuple[Value, ...]  # made by fwd, read by bwd, beside x and y
    x: str
    y: str
    tied: str = ""  # the embedding's tensor that this unit also reads
    flats: Mapping[str, tuple[str, int]] = field(
        default_factory=dict
    )  # of a kind that is cut:
    # of a tensor, its flat and in how many slices it is
    cuts: Mapping[str, tuple[Part, ...]] = field(
        default_factory=dict
    )  # and of a body, its parts

    def parts(self, body: str) -> tuple[Part, ...]:
        return self.cuts.get(body) or (Part(self.bodies[body].calls),)

    def slices(self, flat: str) -> int:
        return next((n for name, n in self.flats.values() if name == flat), 1)


@dataclass(frozen=True)
class Table:
    """A rotary table: inverse frequencies [D/2]."""

    head: int
    freq: tuple[float, ...]


@dataclass(frozen=True)
class Graph:
    kinds: tuple[Kind, ...]
    tables: tuple[Table, ...]
    dims: dict[str, int]  # B T M C V R, rows (all of a micro-batch)
    acc: int  # elements of the f32 sum of a gradient, 0: none is needed
    tied: str
    ops: frozenset[str]  # words of train.recompute that blocks have

    @property
    def still(self) -> int:  # units below the lowest that moves
        return sum(k.count for k in self.kinds if set(k.bodies) == {"fwd"})
