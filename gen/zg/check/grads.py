"""grads.py -- proves that a block's backward carries each gradient to its place.

A gradient is identified by its value and by the set of uses of that value it covers. A gradient of
a sum that covers all of the sum's uses is also a part of each summand's gradient. Calls in rounds
go through parts of values: to go through them is one use of the whole value, and a part of a
gradient is the gradient of that part.
 a backward call   takes the whole gradient of a forward call's result, reads that call's operands
                   and results, on its numbers, and writes the gradients of its parameters, or
                   goes on with the f32 sum of one, which is rounded to that gradient
 an addition       adds two parts of one value's gradient that have no use in common
 dx                is the whole gradient of x
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NoReturn

from ..facts.kernels import ADD, BACK, FORWARD, KERNELS, NULL, ROUND, Back
from ..facts.ops import PASSES
from ..plan.operand import Arg, Operand
from ..plan.plan import Call
from .body import Frame, Made, Ran, joined, part_of

# Uses of a value: (call that reads it, operand index), "y" for the output, ("rounds", N) for calls
# in N rounds, or ("in", value) for the value that it is a part of.
Uses = frozenset[Any]
Part = tuple[Made, Uses]


class _Gradients:
    """Map from each value of backward to the gradients that it is."""

    def __init__(self, fwd: list[Ran], y: Made) -> None:
        self.calls = {number: (call, is_) for call, number, is_ in fwd}
        self.uses: dict[Made, set[Any]] = {}
        self.use(y, "y")
        for _, number, is_ in fwd:
            for n, what in enumerate(is_):
                if isinstance(what, tuple) and what[0] != number:
                    self.use(what, (number, n))
        whole = set(self.parts(y, frozenset({"y"})))
        self.known: dict[Made, set[Part]] = {("dy",): whole}

    def use(self, value: Made, by: Any) -> None:
        """Record a use of a value, of the parts that it is made of, and of the value that it is a
        part of."""
        self.uses.setdefault(value, set()).add(by)
        for part in value if joined(value) else ():
            self.uses.setdefault(part, set()).add(("in", value))
        if value[-3:-2] == ("part",):
            self.uses.setdefault(value[:-3], set()).add(("rounds", value[-1]))

    def of(self, made: Made) -> set[Part]:
        """Return the gradients that a value of backward is."""
        if made not in self.known:
            parts: set[Part] = set()
            if made[-3:-2] == ("part",):
                parts = {*self.split(made[:-3], *made[-2:])}
            elif joined(made):
                parts = {*self.join(made)}
            self.known[made] = parts
        return self.known[made]

    def split(self, made: Made, n: int, rounds: int) -> Iterator[Part]:
        """Yield the gradients that the n-th part of a gradient is."""
        for value, uses in self.of(made):
            if joined(value) and (value, uses) == self.whole(value):
                yield part_of(value, n, rounds), frozenset({("in", value)})

    def join(self, made: Made) -> Iterator[Part]:
        """Yield the gradients of a value of which each part of `made` is the gradient of a
        part."""
        rounds = len(made)
        for first, _ in self.of(made[0]):
            value = first[:-3]
            if first[-3:] == ("part", 0, rounds) and all(
                self.whole(part_of(value, n, rounds)) in self.of(part)
                for n, part in enumerate(made)
            ):
                yield from self.parts(value, frozenset({("rounds", rounds)}))

    def whole(self, value: Made) -> Part:
        return value, frozenset(self.uses.get(value, ()))

    def parts(self, value: Made, uses: Uses) -> Iterator[Part]:
        """Yield the gradients that a gradient of `value` by `uses` is a part of."""
        yield value, uses
        call, is_ = self.calls.get(value[0], (None, []))
        if call and value == (value[0], 0) and (value, uses) == self.whole(value):
            for n in _summands(call):
                yield from self.parts(is_[n], frozenset({(value[0], n)}))

    def sums(self, a: Made, b: Made) -> Iterator[Part]:
        for value, uses in self.of(a):
            for other, more in self.of(b):
                if value == other and not uses & more:
                    yield from self.parts(value, uses | more)

    def forward(self, kernel: str, dy: Made) -> list[tuple[int, Call, list[Any]]]:
        """Return the forward calls whose result has `dy` as its whole gradient."""
        return [
            (number, call, is_)
            for number, (call, is_) in self.calls.items()
            if call.kernel == kernel and self.whole((number, 0)) in self.of(dy)
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
    totals: dict[Made, Arg] = {}  # f32 sum -> the gradient that it is of
    for call, number, is_ in bwd:
        if call.kernel == ROUND and is_[1] in totals:
            if totals[is_[1]] != call.args[0]:
                fail(call, "rounds the sum of another gradient")
        if number in g.calls:  # recomputed
            continue
        if call.kernel == ADD:
            g.known[number, 0] = set(g.sums(is_[1], is_[2]))
            if not g.known[number, 0]:
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
                g.known[number, 0] = set(parts)
                for n, p in back.params:
                    leaf = _leaf(first.args[p])
                    if _summed(is_[n]) and totals.setdefault(is_[n], leaf) != leaf:
                        fail(call, "goes on with the sum of another gradient")
                break
        else:
            fail(call, "is not of the whole gradient of what forward made")
    if dx and g.whole(("x",)) not in g.of(dx):
        fail(None, "dx is not the whole gradient of x")


def _belongs(
    back: Back, call: Call, is_: list[Any], first: Call, was: list[Any]
) -> bool:
    """Return whether a backward call belongs to a forward call: it reads its operands and results,
    has its numbers, and writes its parameters' gradients."""
    alike = all(call.args[n] == first.args[p] for n, p in back.numbers)
    same = all(is_[n] == was[forward] for n, forward in back.same)
    leaves = all(
        call.args[n] in (_leaf(first.args[p]), NULL, Operand("acc")) or _summed(is_[n])
        for n, p in back.params
    )
    return alike and same and leaves


def _summed(what: Any) -> bool:
    """Return whether an operand is the f32 sum of a gradient over rounds."""
    return isinstance(what, tuple) and what[:1] == ("total",)


def _leaf(param: Arg) -> Arg:
    return replace(param, base=f"d{param.base}") if isinstance(param, Operand) else NULL
