"""kernels.py -- reads calls by the kernel table: classes of their operands, and fused or sliced
calls as plain ones."""

from __future__ import annotations

from dataclasses import replace

from ..facts.kernels import ADD, KERNELS, NULL, Formal, Kernel
from ..facts.ops import LEAVES as COUNT
from ..facts.ops import SCALE
from ..plan.operand import Arg, Operand, base
from ..plan.operand import whole as number
from ..plan.plan import Call

# Prefixes of the names of units' functions.
BODIES = (
    "fwd",
    "bwd",
    "train",
    "eval",
)
# Rows of the kernels that units call.
UNITS = {name: row for name, row in KERNELS.items() if not row.own}
# Class of an operand, by its name. CTL: bytes [lo, hi) of zk_ctl that a micro-batch's kernels
# access through an operand.
CLASSES = {
    "token": "tokens",
    "target": "targets",
    "all": "targets",
    "position": "positions",
    "key": "keys",
    "table": "table",
    "table2": "table",
    "sums": "sums",
    "scale": "ctl",
}
LEAVES, SCALED = Operand("ctl"), Operand("ctl", SCALE)
CTL = {LEAVES: (COUNT, COUNT + 8), SCALED: (SCALE, SCALE + 8)}


def kept(f: Formal, arg: Arg) -> bool:
    """Return whether an operand lies in a class of its own. A scale may be a value, too."""
    return f.name in CLASSES and (f.name != "scale" or base(arg) != "tmp")


def parts(c: Call) -> list[Call]:
    """Return the plain calls that a call is bit-identical to: a norm and an addition, or itself."""
    at = KERNELS[c.kernel].at
    args = list(c.args)
    if "more" not in at:
        return [c]
    forward = "sum" in at
    total = at["sum"] if forward else at["dx"]  # result of the addition
    one = at["x"] if forward else at["dx"]
    more = args[at["more"]]
    summed = forward and args[total] != NULL
    if more == NULL and not summed:
        return [c]
    rows = args[at["M"]]
    columns = args[at["C"]]
    elems = number(rows) * number(columns)
    add = Call(ADD, "", (args[total], args[one], more, elems))
    args[at["more"]] = NULL
    if forward:  # the addition comes first
        args[one], args[total] = args[total], NULL
    norm = replace(c, args=tuple(args))
    return [add, norm] if forward else [norm, add]


def whole(c: Call, row: Kernel) -> Call:
    """Return the call on the whole weight that a call on a slice is part of."""
    named: dict[str, Arg] = dict(zip(row.at, c.args, strict=True))
    named |= row.numbers
    return Call(row.whole, "", tuple(named[name] for name in KERNELS[row.whole].at))
