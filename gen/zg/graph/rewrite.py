"""rewrite.py -- rewrites a function's calls: recomputation in backward, fusion of two calls."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from ..facts.kernels import ADD, KERNELS, NULL
from .graph import Call, Forward


def values(calls: Iterable[Call]) -> set[str]:
    """Return the names of the values that calls use."""
    return {str(a) for c in calls for k, a in c.args if k == "value"}


def again(
    fwd: Sequence[Forward], bwd: Sequence[Call], kept: set[str]
) -> tuple[list[Call], set[str]]:
    """Insert recomputation before backward's calls. Return the calls and the recomputed values.

    A value that is read and not kept is recomputed by forward's calls, as late as possible, but not
    between calls in rounds.
    """
    made_again: set[str] = set()
    out: list[Call] = []
    begin = 0  # of the rounds that the last call is one of
    for call in bwd:
        want = values([call])
        before: list[Call] = []
        for _, made, calls in reversed(fwd):
            if made & want - kept - made_again:
                want |= values(calls)
                made_again |= made
                before[:0] = calls
        if call.rounds == 1 or not out or out[-1].rounds != call.rounds:
            begin = len(out)
        # calls on all rows precede the rounds
        whole = [c for c in before if c.rounds != call.rounds]
        out[begin:begin] = whole
        begin += len(whole)
        out += [*(c for c in before if c.rounds == call.rounds), call]
    return out, made_again


def fused(calls: Sequence[Call]) -> list[Call]:
    """Return the calls with each addition fused into the norm of its sum."""
    out: list[Call] = []
    for call in calls:
        norm = joined(out[-1], call) if out else None
        if norm:
            out.pop()
        out.append(norm or call)
    return out


def joined(add: Call, norm: Call) -> Call | None:
    """Return the norm that includes the addition, or None if its kernel has no operands for it."""
    at = KERNELS[norm.kernel].at
    if add.kernel != ADD or "sum" not in at:
        return None
    total, one, more, _ = add.args
    args = list(norm.args)
    if args[at["x"]] != total or args[at["more"]] != ("fixed", NULL):
        return None
    said = {"sum": total, "x": one, "more": more}
    for name, value in said.items():
        args[at[name]] = value
    return replace(norm, args=tuple(args))
