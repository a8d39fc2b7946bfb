"""graph.py -- the graph of a model: units of kernel calls over named operands, and their tensors.

Operands of a call, as (kind, name): value (activation or its gradient), param, grad (of a
parameter), fixed (token, target, sums, table.N), work (workspace), number, int (of the step).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from ..facts import kernels
from ..facts.ops import OpRow
from ..plan.operand import Index, Ints, Layers, Names
from ..plan.quantized import Quantized


@dataclass(frozen=True)
class Tensor:
    """A parameter tensor of a kind of unit.

    `name` holds {l} or {l+N} if the unit is repeated. `parts` are its (name, rows) in the weights'
    file, several if tensors share one linear. Further rows of `shape` are zeros: padding of the
    vocabulary. A quantized tensor has one row of stored elements, and `parts` count these.
    heads: as of a Weight.
    """

    name: str
    parts: tuple[tuple[str, int], ...]
    shape: Ints
    mean: float
    std: float
    group: tuple[float, float, int]  # factor of lr, weight decay, frozen
    quantized: Quantized = Quantized()
    heads: int = 0

    @property
    def elems(self) -> int:
        """Elements as stored."""
        return math.prod(self.shape)

    @property
    def params(self) -> int:
        """Parameters of the model, without padding."""
        if self.quantized.format:
            return self.quantized.elems
        return sum(rows for _, rows in self.parts) * math.prod(self.shape[1:])


@dataclass(frozen=True)
class Value:
    """An array that functions of a unit compute: an activation, a gradient or statistics."""

    name: str
    dtype: str  # real | f32 | f64
    elems: int

    def bytes(self, real: int) -> int:
        return self.elems * kernels.WIDTHS.get(self.dtype, real)


# An operand: its kind, and its name or number.
Word = tuple[str, str | int | float | Index | Layers]


@dataclass(frozen=True)
class Call:
    """One kernel call: symbol and operands in order. Neighbours with `rounds` > 1 are called in
    turn, round by round. grow: bytes by which each operand advances per round."""

    kernel: str
    args: tuple[Word, ...]
    rounds: int = 1
    grow: Ints = ()

    @property
    def shape(self) -> Ints:
        return tuple(a for k, a in self.args if k == "number" and isinstance(a, int))

    @property
    def flops(self) -> int | Layers:
        args = [a for _, a in self.args]
        return kernels.spent(self.kernel, args, self.rounds)

    @property
    def scratch(self) -> int:
        return kernels.scratch(self.kernel, self.shape)


@dataclass
class OpNode:
    """An op of a unit, and the values and parameters that its words stand for."""

    op: OpRow
    dims: dict[str, Any]
    bind: dict[str, str]


class Forward(NamedTuple):
    """Values that an op makes in forward, and its calls."""

    op: str
    values: set[str]
    calls: list[Call]


@dataclass(frozen=True)
class Body:
    """The calls of one function and the values they use."""

    calls: tuple[Call, ...]
    values: tuple[Value, ...]

    @cached_property
    def whole(self) -> BodyPart:
        return BodyPart(self.calls)


@dataclass(frozen=True)
class BodyPart:
    """A run of a body's calls that is a function of its own.

    number: its index in the body, -1 if it is the whole body. A part of a split unit uses only one
    of UnitKind.flats. slices: it is called for each slice of a weight, with `rows` rows of it from
    operand `at` on. sample: it runs once for all blocks of a sample, on the rank's heads. then: the
    exchanges that follow it.
    """

    calls: tuple[Call, ...]
    number: int = -1
    slices: int = 1
    rows: int = 0
    sample: bool = False
    then: tuple[Call, ...] = ()

    @cached_property
    def ints(self) -> Names:
        """Numbers that it takes: the first row of a slice, the index of the unit in its kind."""
        words = (a for c in self.calls for _, a in c.args)
        numbered = any(isinstance(a, Index | Layers) for a in words)
        return ("at",) * (self.slices > 1) + ("l",) * numbered

    @cached_property
    def params(self) -> frozenset[str]:
        """Tensors that it reads."""
        return self._named("param")

    @cached_property
    def grads(self) -> frozenset[str]:
        """Tensors whose gradients it writes."""
        return self._named("grad")

    def _named(self, kind: str) -> frozenset[str]:
        return frozenset(str(a) for c in self.calls for k, a in c.args if k == kind)


@dataclass(frozen=True)
class UnitKind:
    """A kind of unit with `count` instances. x and y name its input and output value ('' for none).
    A kind without trainable tensors up to its output has no bwd."""

    name: str
    count: int
    tensors: tuple[Tensor, ...]
    bodies: dict[str, Body]  # fwd, bwd | train, eval
    saved: tuple[Value, ...]  # made by fwd and read by bwd, other than x and y
    x: str
    y: str
    tied: str = ""  # tensor of the embedding that this unit also reads
    # tensor -> its flat and number of slices, if the kind is split
    flats: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    # body -> its parts, if the kind is split
    cuts: Mapping[str, tuple[BodyPart, ...]] = field(default_factory=dict)
    # values of all tokens of a sample, for the rank's heads
    heads: frozenset[str] = frozenset()
    # body -> values that pass from one part to another, if samples are cut into blocks
    between: Mapping[str, frozenset[str]] = field(default_factory=dict)

    def parts(self, body: str) -> tuple[BodyPart, ...]:
        """Return the parts of a body. A body that is not split is one part."""
        return self.cuts.get(body) or (self.bodies[body].whole,)

    def slices(self, flat: str) -> int:
        """Return the number of slices of a flat's weight."""
        return next((n for name, n in self.flats.values() if name == flat), 1)


@dataclass(frozen=True)
class Table:
    """A rotary table: inverse frequencies [D/2]."""

    head: int
    freq: tuple[float, ...]


@dataclass(frozen=True)
class Graph:
    """A model: its kinds of units, rotary tables and dimensions."""

    kinds: tuple[UnitKind, ...]
    tables: tuple[Table, ...]
    dims: dict[str, int]  # B T M C V R, rows (all of a micro-batch)
    acc: int  # elements of the f32 sum of a gradient, 0 if none is needed
    tied: str
    ops: frozenset[str]  # words of train.recompute that occur in blocks
    # tensors that every rank keeps whole: pass slices finds them
    persistent: frozenset[str] = frozenset()

    @property
    def still(self) -> int:
        """Number of units below the lowest trainable one."""
        return sum(k.count for k in self.kinds if set(k.bodies) == {"fwd"})
