"""commands.py -- steps that call no function: their numbers, their operands, and the bytes that
they move."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..plan.operand import Names
from ..plan.plan import ALL, Order

BATCH = -1  # number of operands: one per array of a micro-batch


def of_group(name: str) -> str:
    """Return the name of the number of `batch` by which micro-batches grow with a rank's place in a
    group."""
    return "of_rank" if name == ALL else f"of_{name}"


def batch_numbers(order: Order) -> Names:
    """Return the names of the numbers of `batch` if gradients are summed in this order."""
    return *map(of_group, order.groups), "micro_batch"


@dataclass(frozen=True)
class Command:
    """A row of the table.

    numbers: of the step, in this order (for `batch` see batch_numbers); ins, outs: numbers of
    operands (outs may be BATCH); meets: ranks of a group execute it together; wire: (number,
    factor), the bytes that arrive from each of them.
    """

    name: str
    numbers: Names
    ins: int
    outs: int
    meets: bool = False
    wire: tuple[str, int] = ("", 0)

    @property
    def moves(self) -> bool:
        """True if it is a collective with bytes on the wire."""
        return self.wire != ("", 0)


_ROWS = (
    Command("copy", ("from_rank", "to_rank", "bytes"), 1, 1),
    Command("batch", ("of_rank", "micro_batch"), 0, BATCH),
    Command("mark", (), 0, 0),
    Command("gather", ("from_step", "step", "bytes"), 1, 1, True, ("bytes", 1)),
    Command("exchange", ("from_step", "step", "bytes"), 1, 1, True, ("bytes", 1)),
    Command("alltoall", ("step", "bytes"), 1, 1, True, ("bytes", 1)),
    Command("reducescatter", ("step", "bytes", "width"), 1, 1, True, ("bytes", 1)),
    Command("allreduce", ("count",), 1, 1, True, ("count", 8)),
    Command("done", (), 2, 0, True),
)
COMMANDS: Mapping[str, Command] = {row.name: row for row in _ROWS}
COLLECTIVES = tuple(row.name for row in _ROWS if row.moves)
