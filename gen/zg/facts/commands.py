"""commands.py -- steps that call no function: their numbers, how many places they read and write,
and what arrives.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..plan.operand import Names
from ..plan.plan import ALL, Order

BATCH = -1  # places: as many as a micro-batch has


def of_group(name: str) -> str:
    """The number of `batch` by which micro-batches grow with a rank's place in a group."""
    return "of_rank" if name == ALL else f"of_{name}"


def batch_numbers(order: Order) -> Names:
    """The numbers of `batch` where gradients are summed in this order."""
    return *map(of_group, order.groups), "micro_batch"


@dataclass(frozen=True)
class Command:
    """A row. numbers: of the step, in this order (those of `batch` are batch_numbers'); outs: or
    BATCH. meets: ranks of a group do it together; wire: bytes that arrive from each of them, so
    many of the number named first."""

    name: str
    numbers: Names
    ins: int
    outs: int
    meets: bool = False
    wire: tuple[str, int] = ("", 0)

    @property
    def moves(self) -> bool:  # a collective, which has bytes on the wire
        return self.wire != ("", 0)


_ROWS = (
    Command("copy", ("from_rank", "to_rank", "bytes"), 1, 1),
    Command("batch", ("of_rank", "micro_batch"), 0, BATCH),
    Command("mark", (), 0, 0),
    Command(
        "gather", ("from_step", "step", "bytes"), 1, 1, True, ("bytes", 1)
    ),
    Command("alltoall", ("step", "bytes"), 1, 1, True, ("bytes", 1)),
    Command(
        "reducescatter", ("step", "bytes", "width"), 1, 1, True, ("bytes", 1)
    ),
    Command("allreduce", ("count",), 1, 1, True, ("count", 8)),
    Command("done", (), 2, 0, True),
)
COMMANDS: Mapping[str, Command] = {row.name: row for row in _ROWS}
COLLECTIVES = tuple(row.name for row in _ROWS if row.moves)
