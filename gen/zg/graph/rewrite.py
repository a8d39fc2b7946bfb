"""rewrite.py -- rewrites a function's calls: recomputation in backward, fusion of two calls."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import groupby

from ..facts.kernels import ADD, KERNELS, NULL
from .graph import Call, Forward


def values(calls: Iterable[Call]) -> set[str]:
    """Return the names of the values that calls use."""
    return {str(a) for c in calls for k, a in c.args if k == "value"}


def again(
    fwd: Sequence[Forward], bwd: Sequence[Call], kept: set[str]
) -> tuple[list[Call], set[str]]:
    """Insert recomputation before backward's calls. Return the calls and the recomputed values.

    A value that is read and not kept is recomputed by forward's calls, as late as possible: values
    with the rows of one round among the calls in rounds that read them, all others before these.
    """
    few = {
        str(name)
        for made in fwd
        for call in made.calls
        for (kind, name), grows in zip(call.args, call.grow, strict=False)
        if kind == "value" and not grows
    }
    whole: set[str] = set()  # recomputed values with all rows
    every: set[str] = set()
    out: list[Call] = []

    def before(want: set[str], some: set[str], within: bool) -> list[Call]:
        """Return the calls that recompute wanted values. some: values of these rounds that were
        recomputed; within: only such values."""
        calls: list[Call] = []
        for _, made, of in reversed(fwd):
            if made & want - kept - whole - some and (made <= few or not within):
                want |= values(of)
                (some if made <= few else whole).update(made)
                every.update(made)
                calls[:0] = of
        return calls

    for rounds, group in groupby(bwd, key=lambda call: call.rounds):
        if rounds == 1:
            for call in group:
                out += [*before(values([call]), set(), False), call]
            continue
        some: set[str] = set()
        body: list[Call] = []
        for call in group:
            body += [*before(values([call]), some, True), call]
        out += [*before(values(body) - few, set(), False), *body]
    return out, every


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
