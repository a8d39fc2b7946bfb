"""roll.py -- flat steps to loops and back, without loss: unroll(roll(steps)) == steps.

A window of steps repeats when its copies differ only in numbers, and every number grows by the same
amount from copy to copy; slots and events may be used in turn, so theirs grow modulo how many there
are. Small windows are rolled first, so loops nest. Where a loop never comes round to the first slot
again, its number is written without the modulus.
"""
from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from typing import Mapping, Sequence, Union

from .plan import Event, Int, Ref, Step


@dataclass(frozen=True)
class Line:
    """A step as it is in the first round of its loops; what its numbers grow by in each loop around
    it, the outermost first; the modulus of each number, 0 for none."""
    step: Step
    moduli: tuple[int, ...] = ()
    growth: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class Loop:
    count: int
    body: tuple["Node", ...]


Node = Union[Line, Loop]
WINDOW = 64                     # the longest body looked for
DEPTH = 3                       # of loops in loops


def unit_of(step: Step) -> tuple[str, int]:
    """`block[3]` -> (block, 3)."""
    name, _, index = step.unit.partition("[")
    return name, int(index[:-1]) if index else 0


def numbers(step: Step) -> tuple[int, ...]:
    """Every number of a step that a loop may change, in a fixed order."""
    out = [unit_of(step)[1]]
    for r in (*step.ins, *step.outs):
        out += (r.index, r.at)
    out += (i.value for i in step.ints)
    out += (e.index for e in (*step.waits, *step.recs))
    return tuple(out)


def _counts(steps: Sequence[Step]) -> dict[str, int]:
    """How many slots of each class are used, and how many events of each name."""
    most: dict[str, int] = {}
    for s in steps:
        named = [(r.cls, r.index) for r in (*s.ins, *s.outs)]
        named += [(e.name, e.index) for e in (*s.waits, *s.recs)]
        for name, index in named:
            most[name] = max(most.get(name, 0), index + 1)
    return most


def _moduli(step: Step, counts: Mapping[str, int]) -> tuple[int, ...]:
    """The modulus of each of `numbers`."""
    out = [0]
    for r in (*step.ins, *step.outs):
        out += (counts[r.cls], 0)
    out += (0 for _ in step.ints)
    out += (counts[e.name] for e in (*step.waits, *step.recs))
    return tuple(out)


def rebuild(step: Step, values: Sequence[int]) -> Step:
    """The step with these numbers."""
    left = iter(values)                         # in the order of `numbers`
    ref = lambda r: Ref(r.cls, next(left), next(left), r.last)
    event = lambda e: Event(e.name, next(left))
    name, index = unit_of(step)[0], next(left)
    unit = f"{name}[{index}]" if "[" in step.unit else step.unit
    ins = tuple([ref(r) for r in step.ins])
    outs = tuple([ref(r) for r in step.outs])
    ints = tuple([Int(i.name, next(left), i.per) for i in step.ints])
    waits = tuple([event(e) for e in step.waits])
    recs = tuple([event(e) for e in step.recs])
    return Step(step.queue, step.op, unit, ins, outs, ints, waits, recs, step.group)


def _shape(node: Node) -> tuple:
    """All of a node but the numbers of its first round."""
    if isinstance(node, Loop):
        return ("loop", node.count, *map(_shape, node.body))
    s = node.step
    ins, outs = (tuple((r.cls, r.last) for r in refs) for refs in (s.ins, s.outs))
    return (s.queue, s.op, s.group, unit_of(s)[0], ins, outs,
            tuple((i.name, i.per) for i in s.ints), tuple(e.name for e in s.waits),
            tuple(e.name for e in s.recs), node.moduli, node.growth)


def _vector(node: Node) -> tuple[int, ...]:
    if isinstance(node, Loop):
        return sum((_vector(n) for n in node.body), ())
    return numbers(node.step)


def _cycles(node: Node) -> tuple[int, ...]:
    if isinstance(node, Loop):
        return sum((_cycles(n) for n in node.body), ())
    return node.moduli


def _depth(node: Node) -> int:
    """Loops around its innermost line."""
    return 1 + max(map(_depth, node.body)) if isinstance(node, Loop) else 0


def _wrap(node: Node, growth: list[int]) -> Node:
    """A node inside one more loop; takes its part off `growth`."""
    if isinstance(node, Loop):
        return replace(node, body=tuple(_wrap(n, growth) for n in node.body))
    size = len(numbers(node.step))
    mine, growth[:] = tuple(growth[:size]), growth[size:]
    return replace(node, growth=(mine, *node.growth))


@dataclass
class _List:
    """Nodes with their shapes (as small numbers) and vectors."""
    nodes: list[Node]
    shapes: list[int]
    vectors: list[tuple[int, ...]]
    cycles: list[tuple[int, ...]]


def _grown(old: list[int], new: list[int], cycles: list[int]) -> list[int]:
    return [(b - a) % m if m else b - a for a, b, m in zip(old, new, cycles)]


def _run(l: _List, i: int, p: int) -> tuple[int, list[int]]:
    """How many copies of the window [i, i+p) follow one another, and what they grow by."""
    if l.shapes[i:i + p] != l.shapes[i + p:i + 2 * p]:
        return 1, []
    flat = lambda a: [x for v in l.vectors[a:a + p] for x in v]
    cycles = [x for v in l.cycles[i:i + p] for x in v]
    old, new = flat(i), flat(i + p)
    growth = _grown(old, new, cycles)
    count = 2
    while l.shapes[i:i + p] == l.shapes[i + count * p:i + (count + 1) * p]:
        old, new = new, flat(i + count * p)
        if _grown(old, new, cycles) != growth:
            break
        count += 1
    return count, growth


def _pass(l: _List, p: int, ids: dict[tuple, int]) -> bool:
    """Rolls every run of windows of p nodes; True if any."""
    i, found = 0, False
    while i + 2 * p <= len(l.nodes):
        count, growth = _run(l, i, p)
        some = count >= 3 or (count == 2 and p >= 6)
        if some and max(map(_depth, l.nodes[i:i + p])) < DEPTH:
            body = tuple(_wrap(n, growth) for n in l.nodes[i:i + p])
            loop = Loop(count, body)
            end = i + count * p
            l.nodes[i:end] = [loop]
            l.shapes[i:end] = [ids.setdefault(_shape(loop), len(ids))]
            l.vectors[i:end] = [_vector(loop)]
            l.cycles[i:end] = [_cycles(loop)]
            found = True
        i += 1
    return found


def roll(steps: Sequence[Step]) -> tuple[Node, ...]:
    counts = _counts(steps)
    nodes: list[Node] = [Line(s, _moduli(s, counts)) for s in steps]
    ids: dict[tuple, int] = {}
    l = _List(nodes, [ids.setdefault(_shape(n), len(ids)) for n in nodes],
              [_vector(n) for n in nodes], [_cycles(n) for n in nodes])
    p = 1
    while p <= min(WINDOW, len(l.nodes) // 2):
        p = 1 if _pass(l, p, ids) and p > 1 else p + 1
    return tuple(_plain(n, ()) for n in l.nodes)


def _plain(node: Node, rounds: tuple[int, ...]) -> Node:
    """A node whose numbers have a modulus only where they come round; rounds: of loops around."""
    if isinstance(node, Loop):
        inner = (*rounds, node.count)
        return replace(node, body=tuple(_plain(n, inner) for n in node.body))
    first = numbers(node.step)
    grows = list(zip(*node.growth)) if rounds else [()] * len(first)
    made = [_straight(v, m, g, rounds) for v, m, g in zip(first, node.moduli, grows)]
    growth = tuple(zip(*(g for _, g in made))) if rounds else ()
    return Line(node.step, tuple(m for m, _ in made), growth)


def _straight(first: int, modulus: int, growth: tuple[int, ...], rounds: tuple[int, ...],
              ) -> tuple[int, tuple[int, ...]]:
    """Modulus and growth of a number: none, where it can grow or shrink and stays below."""
    if not modulus:
        return modulus, growth
    for signed in product(*((g, g - modulus) if g else (0,) for g in growth)):
        ends = [g * (n - 1) for g, n in zip(signed, rounds)]
        least = first + sum(min(e, 0) for e in ends)
        most = first + sum(max(e, 0) for e in ends)
        if 0 <= least and most < modulus:
            return 0, signed
    return modulus, growth


def _expand(node: Node, turns: tuple[int, ...]) -> list[Step]:
    if isinstance(node, Loop):
        return [s for i in range(node.count) for n in node.body for s in _expand(n, (*turns, i))]
    values = list(numbers(node.step))
    for turn, growth in zip(turns, node.growth):
        values = [v + turn * g for v, g in zip(values, growth)]
    return [rebuild(node.step, [v % m if m else v for v, m in zip(values, node.moduli)])]


def unroll(nodes: Sequence[Node]) -> tuple[Step, ...]:
    return tuple(s for n in nodes for s in _expand(n, ()))
