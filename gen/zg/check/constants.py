"""constants.py -- reads and writes the constants of a step and its exact sums."""

from __future__ import annotations

from ..facts import ops
from .arrays import Control, Totals
from .kernels import CTL, LEAVES
from .memory import Extent
from .order import Memory, Place, told

SUMS = ops.SUMS  # integers of a step's exact sums
CONTROL = ops.CTL  # bytes of a step's constants


def control(m: Memory, where: Place) -> Control:
    """Return the constants at a place. Arenas start as zeros."""
    run = where.buffer.read(where.at, CONTROL)
    if not where.buffer.held and not where.at:
        return Control(0, 0, False)
    if not run or run.first or not isinstance(run.array, Control):
        m.fail(f"{where} holds {told(run)}, not a step's constants")
    return run.array


def set_control(where: Place, now: Control) -> None:
    where.buffer.write(where.at, CONTROL, Extent(now))


def constants(m: Memory, where: Place, write: bool = False) -> Control:
    """Access all constants of a step and return them."""
    m.access(where, CONTROL if write else where.buffer.stride, write)
    return control(m, where)


def leaf_count(m: Memory, where: Place, write: bool) -> Control:
    """Access only the count of leaves among the constants."""
    lo, hi = CTL[LEAVES]
    m.touch(where.buffer, where.at + lo, where.at + hi, write)
    return control(m, where)


def totals(m: Memory, where: Place, write: bool) -> Totals:
    """Access the sums of the current step and return them."""
    slot = m.access(where, 8 * SUMS, write)
    run = slot.read(where.at, 8 * SUMS)
    sums = run.array if run and not run.first else None
    if not isinstance(sums, Totals):
        m.fail(f"{where} holds {told(run)}, not the step's sums")
    if sums.step != m.now:
        m.fail(f"{where} holds the sums of step {sums.step}, not {m.now}")
    return sums


def set_totals(where: Place, now: Totals) -> None:
    where.buffer.write(where.at, 8 * SUMS, Extent(now))
