"""stated.py -- lists the numbers of ops and tensors that a spec determines, as lines of the plan.

The lines come from the spec without the graph, so the checker can compare calls and tensors, which
the graph made, with them. A new op only needs a row of FIRST for each of its tensors.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import groupby, product
from typing import Any, NamedTuple

from ..facts import ops
from ..facts.kernels import KERNELS
from ..facts.rope import Rotation
from ..graph import quantize
from ..plan.recipe import OF_TENSORS, Stated, Turn
from ..read import context
from ..read.schema import Op, Row, Weight
from ..read.spec import Spec, Unit

STD = 0.02  # standard deviation of initial weights, as in GPT-2
# Initial values of an op's tensors: mean, and factor of the deviation.
FIRST: Mapping[tuple[str, str], tuple[float, float]] = {
    ("embed", "wte"): (0.0, 1.0),
    ("embed", "wpe"): (0.0, 0.5),
    ("embed_packed", "wte"): (0.0, 1.0),
    ("embed_packed", "wpe"): (0.0, 0.5),
    ("layernorm", "w"): (1.0, 0.0),
    ("layernorm", "b"): (0.0, 0.0),
    ("rmsnorm", "w"): (1.0, 0.0),
    ("rmsnorm1", "w"): (0.0, 0.0),
    ("qknorm1", "wq"): (0.0, 0.0),
    ("qknorm1", "wk"): (0.0, 0.0),
    ("qknorm", "wq"): (1.0, 0.0),
    ("qknorm", "wk"): (1.0, 0.0),
    ("qknorm_whole", "wq"): (1.0, 0.0),
    ("qknorm_whole", "wk"): (1.0, 0.0),
    ("linear", "w"): (0.0, 1.0),
    ("linear", "b"): (0.0, 0.0),
    ("lora", "w"): (0.0, 0.0),
}


# Words of an op that stand for rotary tables -> the dims that describe these.
TABLES = {"table": "rope", "table2": "rope2"}


class Placed(NamedTuple):
    """A row of the op table and the standard deviation of its weights."""

    row: Row
    std: float


def _rows(spec: Spec, op: Op, std: float = STD) -> Iterator[Placed]:
    """Yield an op's rows in order of forward. The last linear of a residual has a smaller deviation
    (GPT-2, section 2.3)."""
    if op.kind == "parallel":
        for branch in op.ops:
            yield from _inner(spec, branch.ops, std)
        return
    if op.ops:
        yield from _inner(spec, op.ops, STD / math.sqrt(_residuals(spec)))
        for row in context.rows(spec, op):
            yield from _placed(row, STD)
        return
    *first, last = context.rows(spec, op)
    for row in first:
        yield from _placed(row, STD)
    yield from _placed(last, std)


def _inner(spec: Spec, ops: Sequence[Op], std: float) -> Iterator[Placed]:
    """Yield the rows of ops in order. std: of the last one."""
    for op in ops[:-1]:
        yield from _rows(spec, op)
    yield from _rows(spec, ops[-1], std)


def _placed(row: Row, std: float) -> Iterator[Placed]:
    """Yield a row and its adapters. A LoRA adapter's A is uniform within 1 / sqrt(inputs), as in
    PEFT, which a negative deviation states."""
    for one in row.order:
        low = -1 / math.sqrt(one.dims["K"]) if one.name == "linear" else STD
        yield Placed(one, std if one is row else low)


def _residuals(spec: Spec) -> int:
    """Return the number of residuals of the model, at least 1."""
    each = [
        unit.repeat
        for unit in spec.model.units
        for op in unit.ops
        if op.kind == "residual"
    ]
    return max(1, sum(each))


# ---- calls


def _calls(rows: list[Placed], layer: int) -> dict[str, list[int | float | Turn]]:
    """Return the stated operands of a layer: by name, a value for each call."""
    out: dict[str, list[int | float | Turn]] = {}
    for row, _ in rows:
        kernel, *words = ops.OPS[row.name].fwd.split()
        formals = KERNELS[kernel].formals
        for formal, word in zip(formals, words, strict=True):
            value = _value(row, word, layer) if formal.stated else None
            if value is not None:
                out.setdefault(formal.name, []).append(value)
    return out


def _value(row: Row, word: str, layer: int) -> Any:
    """Return the value that a word of an op stands for in a layer."""
    n = row.dims[TABLES.get(word, word)]
    if isinstance(n, Rotation):
        return Turn(n.head, n.theta, n.scaling)
    return n[layer] if isinstance(n, tuple) else n


# ---- tensors


def _tensors(
    spec: Spec, unit: Unit, rows: list[Placed], layer: int
) -> list[tuple[int | float, ...]]:
    """Return the numbers OF_TENSORS of each tensor of a unit."""
    prefix = f"{unit.name}." if unit.name else ""
    out: list[tuple[int | float, ...]] = []
    for row, std in rows:
        for word, weight in row.weights.items():
            mean, times = FIRST[row.name, word]
            names = [ops.layer(prefix + name, layer) for name, _ in weight.parts]
            group = _group(spec, names, weight)
            sizes = tuple(n for _, n in weight.parts)
            few = quantize.format_of(spec, sizes, weight.shape, group[2])
            if unit.kind == "blocks" and few.format:  # weights are loaded
                mean = times = 0.0
            out.append((mean, times * std, *group, weight.heads))
    return out


def _group(spec: Spec, names: list[str], weight: Weight) -> tuple[float, float, int]:
    """Return (factor of lr, weight decay, frozen) by the first group that matches a name."""
    o = spec.train.optimizer
    decays = o.decay == "all" or len(weight.shape) > 1
    own = o.weight_decay if decays else 0.0
    for group in o.groups:
        pairs = product(names, group.match)
        if any(fnmatchcase(name, pattern) for name, pattern in pairs):
            decay = own if group.weight_decay is None else group.weight_decay
            return group.lr_factor, decay, int(group.frozen)
    return 1.0, own, 0


# ---- lines


def _unit(spec: Spec, unit: Unit, first: int) -> Iterator[Stated]:
    """Yield the lines of an entry, whose first unit has number `first`. Layers that differ have
    lines of their own."""
    rows = [placed for op in unit.ops for placed in _rows(spec, op)]
    if unit.kind == "head":
        rows.append(Placed(spec.loss, STD))
    layers = range(unit.repeat)
    calls = [_calls(rows, layer) for layer in layers]
    for what in calls[0]:
        yield from _alike(what, first, [tuple(c[what]) for c in calls])
    tensors = [_tensors(spec, unit, rows, layer) for layer in layers]
    for n, what in enumerate(OF_TENSORS):
        each = [tuple(of[n] for of in some) for some in tensors]
        if what != "heads" or any(map(any, each)):
            yield from _alike(what, first, each)


def _alike(what: str, first: int, each: list[tuple[Any, ...]]) -> Iterator[Stated]:
    """Yield a line for each run of units with the same values, if they have any."""
    for values, alike in groupby(each):
        count = len(list(alike))
        if values:
            yield Stated(what, first, count, values)
        first += count


def lines(spec: Spec) -> tuple[Stated, ...]:
    """Return all lines of a spec."""
    out: list[Stated] = []
    first = 0
    for unit in spec.model.units:
        out += _unit(spec, unit, first)
        first += unit.repeat
    return tuple(out)
