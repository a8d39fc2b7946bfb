"""rounds.py -- proves that calls in rounds go through all parts of whole values in order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TypeGuard

from ..facts.kernels import KERNELS, NULL
from ..plan.operand import Arg, Operand
from ..plan.plan import Call
from .body import Frame
from .kernels import CLASSES


def through(b: Frame, rounds: int, calls: list[Call]) -> Iterator[Call]:
    """Yield the calls of each round in turn."""
    made: set[Arg] = set()  # results of earlier calls of a round
    for c in calls:
        pairs = [*zip(KERNELS[c.kernel].formals, c.args, strict=False)]
        read = {arg for f, arg in pairs if f.mode == "<"}
        if "c" not in c.args and not made & read and not any(map(_moves, c.args)):
            b.fail(c, f"is called {rounds} times alike")
        made |= {arg for f, arg in pairs if f.mode == ">" and arg != NULL}
    moving = {arg for c in calls for arg in c.args if _moves(arg)}
    places = {
        (arg.base, arg.at, arg.by_round)
        for arg in moving
        if arg.base not in CLASSES.values()
    }
    whole = {place: b.split(*place, rounds) for place in sorted(places)}
    before = len(b.ran)
    for b.round in range(rounds):
        now: dict[Arg, Arg] = {"c": b.round}
        now |= {
            arg: replace(arg, at=arg.at + b.round * arg.by_round, by_round=0)
            for arg in moving
        }
        for c in calls:
            yield replace(c, args=tuple(now.get(a, a) for a in c.args))
    b.round = 0
    for place, old in whole.items():
        b.join(*place, rounds, old)
    ran = {number for _, number, _ in b.ran[before:]}
    for values in b.held.values():  # only the last round's values are left
        values[:] = [v for v in values if not v.used or v.made[0] not in ran]


def _moves(arg: Arg) -> TypeGuard[Operand]:
    """Return whether an operand has another place in each round."""
    return isinstance(arg, Operand) and arg.by_round != 0
