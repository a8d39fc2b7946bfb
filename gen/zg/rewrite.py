"""rewrite.py -- a function's calls, once they are there: made again in backward, two as one."""
from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Iterable, Mapping, Sequence

from . import ops

if TYPE_CHECKING:
    from .graph import Call
    from .model import _Calls


def values(calls: Iterable[Call]) -> set[str]:
    return {str(a) for c in calls for k, a in c.args if k == "value"}


def again(fwd: _Calls, bwd: Sequence[Call], kept: set[str]) -> tuple[list[Call], set[str]]:
    """Backward's calls, and before each, as late as can be, those of forward that make what it
    reads and is not kept; the values made again."""
    made_again: set[str] = set()
    out: list[Call] = []
    for call in bwd:
        want, before = values([call]), []
        for _, made, calls in reversed(fwd.made):
            if made & want - kept - made_again:
                want |= values(calls)
                made_again |= made
                before[:0] = calls
        out += [*before, call]
    return out, made_again


Operand = tuple[str, object]


def matched(words: list[str], call: Call, known: Mapping[str, Operand] = {},
            ) -> dict[str, Operand] | None:
    """What a row's words stand for where a call is these words; some may be known already."""
    found = dict(known)
    is_ = lambda word, arg: arg == ("fixed", word) if word == "null" else \
        arg == ("number", int(word)) if word.isdigit() else found.setdefault(word, arg) == arg
    same = call.kernel == words[0] and all(map(is_, words[1:], call.args))
    return found if same else None


def fused(calls: Sequence[Call]) -> list[Call]:
    """Calls of which one does what two do: the table's FUSED."""
    out: list[Call] = []
    for call in calls:
        for first, then, both in ops.FUSED:
            is_ = matched(first, out[-1]) if out else None
            is_ = is_ and matched(then, call, is_)
            if is_:
                call = replace(call, kernel=both[0], args=tuple(is_[word] for word in both[1:]),
                               flops=out.pop().flops + call.flops)
        out.append(call)
    return out
