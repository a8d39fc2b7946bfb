"""kernels.py -- calls of a plan by the kernel table: where what they take lies, and what several
calls are together."""

from __future__ import annotations

from dataclasses import replace

from ..facts.kernels import ADD, KERNELS, NULL, Kernel
from ..facts.ops import LEAVES as COUNT
from ..facts.ops import SCALE
from ..plan.operand import Arg, Operand
from ..plan.operand import whole as number
from ..plan.plan import Call

BODIES = (
    "fwd",
    "bwd",
    "train",
    "eval",
)  # of a unit: what its functions' names begin with
# Rows of kernels that units call.
UNITS = {name: row for name, row in KERNELS.items() if not row.own}
# The class in which an operand of this name lies. Of a zk_ctl, what kernels of a micro-batch use by
# an
# operand: from which byte to which.
CLASSES = {
    "token": "tokens",
    "target": "targets",
    "position": "positions",
    "key": "keys",
    "table": "table",
    "sums": "sums",
    "scale": "ctl",
}
LEAVES, SCALED = Operand("ctl"), Operand("ctl", SCALE)
CTL = {LEAVES: (COUNT, COUNT + 8), SCALED: (SCALE, SCALE + 8)}


def parts(c: Call) -> list[Call]:
    """A call as those that have the same bits together: a norm and an addition, or itself."""
    at, args = KERNELS[c.kernel].at, list(c.args)
    if "more" not in at:
        return [c]
    forward = "sum" in at
    total = at["sum"] if forward else at["dx"]  # what the addition makes
    one = at["x"] if forward else at["dx"]
    more = args[at["more"]]
    summed = forward and args[total] != NULL
    if more == NULL and not summed:
        return [c]
    rows, columns = args[at["M"]], args[at["C"]]
    elems = number(rows) * number(columns)
    add = Call(ADD, "", (args[total], args[one], more, elems))
    args[at["more"]] = NULL
    if forward:  # before it
        args[one], args[total] = args[total], NULL
    norm = replace(c, args=tuple(args))
    return [add, norm] if forward else [norm, add]


def whole(c: Call, row: Kernel) -> Call:
    """The call of which one on a slice is a part: on all of the weight."""
    named: dict[str, Arg] = dict(zip(row.at, c.args, strict=True))
    named |= row.numbers
    return Call(
        row.whole, "", tuple(named[name] for name in KERNELS[row.whole].at)
    )
