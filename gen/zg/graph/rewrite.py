"""rewrite.py -- a function's calls, once they are there: recomputed in backward, two as one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from ..facts.kernels import ADD, KERNELS, NULL
from .graph import Call, Made


def values(calls: Iterable[Call]) -> set[str]:
    return {str(a) for c in calls for k, a in c.args if k == "value"}


def again(
    fwd: Sequence[Made], bwd: Sequence[Call], kept: set[str]
) -> tuple[list[Call], set[str]]:
    """Backward's calls, and before each, as late as can be, those of forward that make what it
    reads and is not kept; the values recomputed."""
    made_again: set[str] = set()
    out: list[Call] = []
    for call in bwd:
        want = values([call])
        before: list[Call] = []
        for _, made, calls in reversed(fwd):
            if made & want - kept - made_again:
                want |= values(calls)
                made_again |= made
                before[:0] = calls
        out += [*before, call]
    return out, made_again


def fused(calls: Sequence[Call]) -> list[Call]:
    """Calls of which one does what two do: an addition and the norm of its sum."""
    out: list[Call] = []
    for call in calls:
        norm = joined(out[-1], call) if out else None
        if norm:
            out.pop()
        out.append(norm or call)
    return out


def joined(add: Call, norm: Call) -> Call | None:
    """The norm that adds, too, where a kernel's row has operands for it."""
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
