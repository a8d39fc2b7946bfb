"""roll.py -- flat steps to loops and back, without loss: unroll(roll(steps)) == steps.

A window of steps repeats when its copies differ only in numbers, and every number grows by the same
amount from copy to copy; slots that are used in turn (rings, leaves, their events) grow modulo
their count. Small windows are rolled first, so loops nest.
"""
from __future__ import annotations

from dataclasses import dataclass, replace
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
# whose slots are used in turn
TURNS = ("ring", "leaf", "dx", "full", "grad", "done", "down", "up", "here", "used", "made", "gone",
         "stage", "staged", "read", "part", "summed", "taken", "tile", "loaded", "changed",
         "stored", "shelf", "shelved", "lifted", "laid", "sunk", "near", "past", "shed", "raised",
         "spent")


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


def _turns(steps: Sequence[Step]) -> dict[str, int]:
    """How many slots there are of each class and event whose slots are used in turn."""
    most: dict[str, int] = {}
    for s in steps:
        named = [(r.cls, r.index) for r in (*s.ins, *s.outs)]
        named += [(e.name, e.index) for e in (*s.waits, *s.recs)]
        for name, index in named:
            if name.split(".")[0] in TURNS:
                most[name] = max(most.get(name, 0), index + 1)
    return most


def _moduli(step: Step, turns: Mapping[str, int]) -> tuple[int, ...]:
    """The modulus of each of `numbers`."""
    out = [0]
    for r in (*step.ins, *step.outs):
        out += (turns.get(r.cls, 0), 0)
    out += (0 for _ in step.ints)
    out += (turns.get(e.name, 0) for e in (*step.waits, *step.recs))
    return tuple(out)


def rebuild(step: Step, values: Sequence[int]) -> Step:
    """The step with these numbers."""
    it = iter(values)
    unit, index = unit_of(step)[0], next(it)
    refs = [Ref(r.cls, next(it), next(it)) for r in (*step.ins, *step.outs)]
    ints = tuple(Int(i.name, next(it), i.per) for i in step.ints)
    events = [Event(e.name, next(it)) for e in (*step.waits, *step.recs)]
    n, w = len(step.ins), len(step.waits)
    return replace(step, unit=f"{unit}[{index}]" if "[" in step.unit else step.unit,
                   ins=tuple(refs[:n]), outs=tuple(refs[n:]), ints=ints,
                   waits=tuple(events[:w]), recs=tuple(events[w:]))


def _shape(node: Node) -> tuple:
    """All of a node but the numbers of its first round."""
    if isinstance(node, Loop):
        return ("loop", node.count, *map(_shape, node.body))
    s = node.step
    return (s.queue, s.op, unit_of(s)[0], tuple(r.cls for r in s.ins), tuple(r.cls for r in s.outs),
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
    turns = _turns(steps)
    nodes: list[Node] = [Line(s, _moduli(s, turns)) for s in steps]
    ids: dict[tuple, int] = {}
    l = _List(nodes, [ids.setdefault(_shape(n), len(ids)) for n in nodes],
              [_vector(n) for n in nodes], [_cycles(n) for n in nodes])
    p = 1
    while p <= min(WINDOW, len(l.nodes) // 2):
        p = 1 if _pass(l, p, ids) and p > 1 else p + 1
    return tuple(l.nodes)


def _expand(node: Node, turns: tuple[int, ...]) -> list[Step]:
    if isinstance(node, Loop):
        return [s for i in range(node.count) for n in node.body for s in _expand(n, (*turns, i))]
    values = list(numbers(node.step))
    for turn, growth in zip(turns, node.growth):
        values = [v + turn * g for v, g in zip(values, growth)]
    return [rebuild(node.step, [v % m if m else v for v, m in zip(values, node.moduli)])]


def unroll(nodes: Sequence[Node]) -> tuple[Step, ...]:
    return tuple(s for n in nodes for s in _expand(n, ()))
