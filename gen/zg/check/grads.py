"""grads.py -- proves that a block's backward carries each gradient to its place.

A gradient is identified by its value and by the set of uses of that value it covers. A gradient of
a sum that covers all of the sum's uses is also a part of each summand's gradient.
 a backward call   takes the whole gradient of a forward call's result, reads that call's operands
                   and results, on its numbers, and writes the gradients of its parameters
 an addition       adds two parts of one value's gradient that have no use in common
 dx                is the whole gradient of x
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NoReturn

from ..facts.kernels import ADD, BACK, FORWARD, KERNELS, NULL, Back
from ..facts.ops import PASSES
from ..plan.operand import Arg, Operand
from ..plan.plan import Call
from .body import Frame, Made, Ran

# Uses of a value: (call that reads it, operand index), or "y" for the output.
Uses = frozenset[tuple[int, int] | str]
Part = tuple[Made, Uses]


class _Gradients:
    """Map from each value of backward to the gradients that it is."""

    def __init__(self, fwd: list[Ran], y: Made) -> None:
        self.calls = {number: (call, is_) for call, number, is_ in fwd}
        self.uses: dict[Made, set[tuple[int, int] | str]] = {y: {"y"}}
        for _, number, is_ in fwd:
            for n, what in enumerate(is_):
                if isinstance(what, tuple) and what[0] != number:
                    uses = self.uses.setdefault(what, set())
                    uses.add((number, n))
        whole = set(self.parts(y, frozenset({"y"})))
        self.of: dict[Made, set[Part]] = {("dy",): whole}

    def whole(self, value: Made) -> Part:
        return value, frozenset(self.uses.get(value, ()))

    def parts(self, value: Made, uses: Uses) -> Iterator[Part]:
        """Yield the gradients that a gradient of `value` by `uses` is a part of."""
        yield value, uses
        call, is_ = self.calls.get(value[0], (None, []))
        if call and (value, uses) == self.whole(value):
            for n in _summands(call):
                yield from self.parts(is_[n], frozenset({(value[0], n)}))

    def sums(self, a: Made, b: Made) -> Iterator[Part]:
        for value, uses in self.of.get(a, ()):
            for other, more in self.of.get(b, ()):
                if value == other and not uses & more:
                    yield from self.parts(value, uses | more)

    def forward(self, kernel: str, dy: Made) -> list[tuple[int, Call, list[Any]]]:
        """Return the forward calls whose result has `dy` as its whole gradient."""
        return [
            (number, call, is_)
            for number, (call, is_) in self.calls.items()
            if call.kernel == kernel and self.whole((number, 0)) in self.of.get(dy, ())
        ]


def _summands(call: Call) -> list[int]:
    """Return the operands of a forward call whose gradient equals that of its result."""
    at = KERNELS[call.kernel].at
    return [at[name] for name in PASSES.get(call.kernel, ())]


def _read(call: Call) -> set[int]:
    """Return the operands of a forward call whose gradients backward calls compute."""
    backs = [BACK[name] for name in FORWARD.get(call.kernel, ())]
    return {back.x for back in backs if back.x is not None}


def _once(what: Any) -> Any:
    """Return the whole value for its first part and () for the others: rounds count as one use."""
    if isinstance(what, tuple) and what[-3:-2] == ("part",):
        return () if what[-2] else what[:-3]
    return what


def adds_back(fwd: Frame, bwd: Frame) -> bool:
    """Return whether backward, apart from recomputation, has one addition less than uses for each
    value with a gradient."""
    uses: Counter[Made] = Counter()
    for call, _, is_ in fwd.ran:
        for n in (*_summands(call), *_read(call)):
            what = _once(is_[n])
            if fwd.moves(what):
                uses[what] += 1
    again = {n for _, n, _ in fwd.ran}
    adds = [n for call, n, _ in bwd.ran if call.kernel == ADD]
    added = [n for n in adds if n not in again]
    used = sum(uses.values())
    return len(added) == used - len(uses)


def prove(
    fwd: list[Ran],
    bwd: list[Ran],
    y: Made,
    dx: Made,
    fail: Callable[[Call | None, str], NoReturn],
) -> None:
    """Prove the backward calls against the forward ones. y, dx: the output and the gradient of x;
    fail: called with the call and the reason."""
    g = _Gradients(fwd, y)
    for call, number, is_ in bwd:
        if number in g.calls:  # recomputed
            continue
        if call.kernel == ADD:
            g.of[number, 0] = set(g.sums(is_[1], is_[2]))
            if not g.of[number, 0]:
                fail(call, "adds what are no two parts of one gradient")
        if call.kernel not in BACK:
            continue
        back = BACK[call.kernel]
        for of, first, was in g.forward(back.of, is_[back.dy]):
            if _belongs(back, call, is_, first, was):
                parts = (
                    ()
                    if back.x is None
                    else g.parts(was[back.x], frozenset({(of, back.x)}))
                )
                g.of[number, 0] = set(parts)
                break
        else:
            fail(call, "is not of the whole gradient of what forward made")
    if dx and g.whole(("x",)) not in g.of.get(dx, ()):
        fail(None, "dx is not the whole gradient of x")


def _belongs(
    back: Back, call: Call, is_: list[Any], first: Call, was: list[Any]
) -> bool:
    """Return whether a backward call belongs to a forward call: it reads its operands and results,
    has its numbers, and writes its parameters' gradients."""
    alike = all(call.args[n] == first.args[p] for n, p in back.numbers)
    same = all(is_[n] == was[forward] for n, forward in back.same)
    leaves = all(
        call.args[n] in (_leaf(first.args[p]), NULL, Operand("acc"))
        for n, p in back.params
    )
    return alike and same and leaves


def _leaf(param: Arg) -> Arg:
    return replace(param, base=f"d{param.base}") if isinstance(param, Operand) else NULL
