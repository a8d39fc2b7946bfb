"""roll.py -- rolls flat steps into loops, and unrolls them without loss: unroll(roll(steps)) ==
steps.

A window of steps repeats if its copies differ only in numbers, and every number grows by the same
amount from copy to copy. Slots and events may be used in turn, so their numbers grow modulo their
count. Small windows are rolled first, so loops nest. A number that never wraps around is written
without the modulus.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, product
from typing import Generic, TypeVar

from .operand import Ints
from .plan import Event, Step, unit_of
from .size import minus


@dataclass(frozen=True)
class Line:
    """A step with the numbers of the first round of its loops.

    moduli: modulus of each number, 0 for none. growth: for each loop around it, the outermost
    first, the growth of each number per round.
    """

    step: Step
    moduli: Ints = ()
    growth: tuple[Ints, ...] = ()


@dataclass(frozen=True)
class Loop:
    count: int
    body: tuple[Node, ...]


Node = Line | Loop
Shape = tuple[object, ...]  # the common part of a loop's rounds
WINDOW = 64  # the longest loop body that is tried
DEPTH = 3  # largest nesting of loops


T = TypeVar("T")


@dataclass(frozen=True)
class Parts(Generic[T]):
    """One value for each number of a step that a loop may change, in this order: the unit's index;
    the slot and offset of each ref; numbers; waits; records."""

    unit: T
    refs: tuple[tuple[T, T], ...]
    ints: tuple[T, ...]
    waits: tuple[T, ...]
    recs: tuple[T, ...]

    @property
    def row(self) -> tuple[T, ...]:
        return (
            self.unit,
            *chain(*self.refs),
            *self.ints,
            *self.waits,
            *self.recs,
        )


def parts(step: Step, row: Sequence[T]) -> Parts[T]:
    """Split a row into the parts of a step."""
    left = iter(row)
    return Parts(
        next(left),
        tuple((next(left), next(left)) for _ in step.refs),
        tuple(next(left) for _ in step.ints),
        tuple(next(left) for _ in step.waits),
        tuple(next(left) for _ in step.recs),
    )


def numbers(step: Step) -> Ints:
    return Parts(
        unit_of(step.unit)[1],
        tuple((r.index, r.at) for r in step.refs),
        tuple(i.value for i in step.ints),
        tuple(e.index for e in step.waits),
        tuple(e.index for e in step.recs),
    ).row


def _counts(steps: Sequence[Step]) -> dict[str, int]:
    """Return how many slots of each class are used, and how many events of each name."""
    most: dict[str, int] = {}
    for s in steps:
        named = [(r.cls, r.index) for r in s.refs]
        named += [(e.name, e.index) for e in s.events]
        for name, index in named:
            most[name] = max(most.get(name, 0), index + 1)
    return most


def _moduli(step: Step, counts: Mapping[str, int]) -> Ints:
    """Return the modulus of each of `numbers(step)`."""
    return Parts(
        0,
        tuple((counts[r.cls], 0) for r in step.refs),
        (0,) * len(step.ints),
        tuple(counts[e.name] for e in step.waits),
        tuple(counts[e.name] for e in step.recs),
    ).row


def rebuild(step: Step, values: Sequence[int]) -> Step:
    """Return the step with these numbers."""
    made = parts(step, values)
    refs = [
        replace(r, index=index, at=at)
        for r, (index, at) in zip(step.refs, made.refs, strict=True)
    ]

    def events(old: Sequence[Event], index: Ints) -> tuple[Event, ...]:
        pairs = zip(old, index, strict=True)
        return tuple(replace(e, index=n) for e, n in pairs)

    name, _ = unit_of(step.unit)
    pairs = zip(step.ints, made.ints, strict=True)
    return replace(
        step,
        unit=f"{name}[{made.unit}]" if "[" in step.unit else step.unit,
        ins=tuple(refs[: len(step.ins)]),
        outs=tuple(refs[len(step.ins) :]),
        ints=tuple(replace(i, value=n) for i, n in pairs),
        waits=events(step.waits, made.waits),
        recs=events(step.recs, made.recs),
    )


def _shape(node: Node) -> Shape:
    """Return everything of a node except the numbers of its first round."""
    if isinstance(node, Loop):
        return ("loop", node.count, *map(_shape, node.body))
    s = node.step
    ins, outs = (tuple((r.cls, r.last) for r in refs) for refs in (s.ins, s.outs))
    return (
        s.queue,
        s.op,
        s.group,
        unit_of(s.unit)[0],
        ins,
        outs,
        tuple((i.name, i.per) for i in s.ints),
        tuple(e.name for e in s.waits),
        tuple(e.name for e in s.recs),
        node.moduli,
        node.growth,
    )


def _vector(node: Node) -> Ints:
    if isinstance(node, Loop):
        return sum((_vector(n) for n in node.body), ())
    return numbers(node.step)


def _cycles(node: Node) -> Ints:
    if isinstance(node, Loop):
        return sum((_cycles(n) for n in node.body), ())
    return node.moduli


def _depth(node: Node) -> int:
    """Return how many loops surround the node's innermost line."""
    return 1 + max(map(_depth, node.body)) if isinstance(node, Loop) else 0


def _wrap(node: Node, growth: list[int]) -> Node:
    """Return a node inside one more loop. Removes the node's part from the front of `growth`."""
    if isinstance(node, Loop):
        return replace(node, body=tuple(_wrap(n, growth) for n in node.body))
    size = len(numbers(node.step))
    mine, growth[:] = tuple(growth[:size]), growth[size:]
    return replace(node, growth=(mine, *node.growth))


@dataclass
class _List:
    """Nodes with their shapes (as small numbers), number vectors and moduli."""

    nodes: list[Node]
    shapes: list[int]
    vectors: list[Ints]
    cycles: list[Ints]


def _grown(old: list[int], new: list[int], cycles: list[int]) -> list[int]:
    return [
        (b - a) % m if m else b - a for a, b, m in zip(old, new, cycles, strict=True)
    ]


def _named(l: _List, i: int, p: int, growth: list[int]) -> list[int]:
    """Return the growth of a loop's numbers by name, from its first two rounds."""
    pairs = zip(
        chain(*l.vectors[i : i + p]),
        chain(*l.vectors[i + p : i + 2 * p]),
        chain(*l.cycles[i : i + p]),
        growth,
        strict=True,
    )
    return [g if m else minus(b, a) for a, b, m, g in pairs]


def _run(l: _List, i: int, p: int) -> tuple[int, list[int]]:
    """Return how many copies of the window [i, i+p) follow one another, and their numbers'
    growth."""

    def numbers_from(vectors: Sequence[Sequence[int]], at: int) -> list[int]:
        return list(chain(*vectors[at : at + p]))

    shapes = l.shapes[i : i + p]
    cycles = numbers_from(l.cycles, i)
    old = numbers_from(l.vectors, i)
    growth: list[int] = []
    count = 1
    at = i + p
    while l.shapes[at : at + p] == shapes:
        new = numbers_from(l.vectors, at)
        grown = _grown(old, new, cycles)
        if count > 1 and grown != growth:
            break
        growth, old = grown, new
        count += 1
        at += p
    return count, growth


def _pass(l: _List, p: int, ids: dict[Shape, int]) -> bool:
    """Roll every run of windows of p nodes. Return whether there was any."""
    i, found = 0, False
    while i + 2 * p <= len(l.nodes):
        count, growth = _run(l, i, p)
        some = count >= 3 or (count == 2 and p >= 6)
        window = l.nodes[i : i + p]
        if some and max(map(_depth, window)) < DEPTH:
            growth = _named(l, i, p, growth)
            body = tuple(_wrap(n, growth) for n in window)
            loop = Loop(count, body)
            shape = _shape(loop)
            end = i + count * p
            l.nodes[i:end] = [loop]
            l.shapes[i:end] = [ids.setdefault(shape, len(ids))]
            l.vectors[i:end] = [_vector(loop)]
            l.cycles[i:end] = [_cycles(loop)]
            found = True
        i += 1
    return found


def roll(steps: Sequence[Step]) -> tuple[Node, ...]:
    counts = _counts(steps)
    nodes: list[Node] = [Line(s, _moduli(s, counts)) for s in steps]
    ids: dict[Shape, int] = {}
    l = _List(
        nodes,
        [ids.setdefault(_shape(n), len(ids)) for n in nodes],
        [_vector(n) for n in nodes],
        [_cycles(n) for n in nodes],
    )
    p = 1
    while p <= min(WINDOW, len(l.nodes) // 2):
        p = 1 if _pass(l, p, ids) and p > 1 else p + 1
    return tuple(_plain(n, ()) for n in l.nodes)


def _plain(node: Node, rounds: Ints) -> Node:
    """Return a node that keeps moduli only for numbers that wrap around. rounds: counts of the
    loops around it."""
    if isinstance(node, Loop):
        inner = (*rounds, node.count)
        return replace(node, body=tuple(_plain(n, inner) for n in node.body))
    first = numbers(node.step)
    grows = list(zip(*node.growth, strict=True)) if rounds else [()] * len(first)
    made = [
        _straight(v, m, g, rounds)
        for v, m, g in zip(first, node.moduli, grows, strict=True)
    ]
    growth = tuple(zip(*(g for _, g in made), strict=True)) if rounds else ()
    return Line(node.step, tuple(m for m, _ in made), growth)


def _straight(
    first: int,
    modulus: int,
    growth: Ints,
    rounds: Ints,
) -> tuple[int, Ints]:
    """Return the modulus and growth of a number. The modulus is dropped if some signed growth keeps
    the number in range."""
    if not modulus:
        return modulus, growth
    for signed in product(*((g, g - modulus) if g else (0,) for g in growth)):
        ends = [g * (n - 1) for g, n in zip(signed, rounds, strict=True)]
        least = first + sum(min(e, 0) for e in ends)
        most = first + sum(max(e, 0) for e in ends)
        if 0 <= least and most < modulus:
            return 0, signed
    return modulus, growth


def _expand(node: Node, turns: Ints) -> list[Step]:
    if isinstance(node, Loop):
        return [
            s
            for i in range(node.count)
            for n in node.body
            for s in _expand(n, (*turns, i))
        ]
    values = list(numbers(node.step))
    for turn, growth in zip(turns, node.growth, strict=True):
        values = [v + turn * g for v, g in zip(values, growth, strict=True)]
    return [
        rebuild(
            node.step,
            [v % m if m else v for v, m in zip(values, node.moduli, strict=True)],
        )
    ]


def unroll(nodes: Sequence[Node]) -> tuple[Step, ...]:
    return tuple(s for n in nodes for s in _expand(n, ()))
