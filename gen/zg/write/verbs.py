"""verbs.py -- hops as functions: gather_block(z, l, slot), with its waits and its records inside.

A hop is a step, or several of one unit that always follow each other on queues beside main. Hops
that are alike but for numbers are calls of one verb: what is the same for all of them stands in its
body, what grows with the unit's number l is said with that, and the rest are its parameters. Where
some do not wait for what most of them do, the verb is two: NAME_now does not wait.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ..plan.plan import Event, Int, Ref, Step
from ..plan.roll import numbers
from .tables import lower

Shape = tuple[object, ...]
Kind = tuple[Shape, ...]  # of a hop
Hop = tuple[Step, ...]
Section = Sequence[Step]
BY = "l"  # what a verb calls the unit's number

# What a verb is called, by the first step of its hop; else run_ and the function's name.
NAMES = {
    "gather": "gather",
    "alltoall": "reduce",
    "reducescatter": "reduce",
    "done": "done",
    "allreduce": "allreduce",
}
SLOT = "slot"  # the first parameter that is a slot's number


def shape(s: Step) -> Shape:
    """All of a step but numbers, and what it waits for and records."""
    ins, outs = (tuple((r.cls, r.last) for r in x) for x in (s.ins, s.outs))
    ints = tuple((i.name, i.per) for i in s.ints)
    return s.queue, s.op, s.group, ins, outs, ints


def names(events: Iterable[Event]) -> tuple[str, ...]:
    return tuple(e.name for e in events)


class _Follows:
    """What always follows what."""

    def __init__(self, sections: Iterable[Section]) -> None:
        self.next: dict[Shape, set[Shape | None]] = {}
        self.before: dict[Shape, set[Shape | None]] = {}
        self.waits: dict[Shape, set[tuple[str, ...]]] = {}
        self.recs: dict[Shape, set[tuple[str, ...]]] = {}
        for steps in sections:
            kinds = [None, *map(shape, steps), None]
            for n, s in enumerate(steps):
                kind = shape(s)
                last = n > 0 and steps[n - 1].unit == s.unit
                after = n + 1 < len(steps) and steps[n + 1].unit == s.unit
                self.before.setdefault(kind, set()).add(
                    kinds[n] if last else None
                )
                self.next.setdefault(kind, set()).add(
                    kinds[n + 2] if after else None
                )
                self.waits.setdefault(kind, set()).add(names(s.waits))
                self.recs.setdefault(kind, set()).add(names(s.recs))

    def one(self, a: Step, b: Step) -> bool:
        """Whether b belongs to the hop of a."""
        first, second = shape(a), shape(b)
        alone = self.next[first] == {second} and self.before[second] == {first}
        alike = len(self.recs[first]) == 1 and len(self.waits[second]) == 1
        return alone and alike and "main" not in (a.queue, b.queue)


def hops(sections: Sequence[Section]) -> list[list[Hop]]:
    """Each section's steps, in hops."""
    follows = _Follows(sections)
    out = []
    for steps in sections:
        made: list[list[Step]] = []
        for s in steps:
            if made and follows.one(made[-1][-1], s):
                made[-1].append(s)
            else:
                made.append([s])
        out.append([tuple(hop) for hop in made])
    return out


@dataclass(frozen=True)
class Number:
    """A number of a hop: base, and by so much for each l, or times a parameter."""

    base: int
    by: int = 0
    of: str = ""


@dataclass(frozen=True)
class Parameter:
    """Of a verb. cls: whose slot it numbers; '': it is a number of a step."""

    name: str
    at: int  # which number of the hop
    cls: str


@dataclass(frozen=True)
class Verb:
    """A function of steps. steps: of one hop, with the waits and the records of all; values: of
    each of their numbers, step by step; core: the verb that it calls behind its waits."""

    name: str
    steps: Hop
    values: tuple[tuple[Number, ...], ...]
    parameters: tuple[Parameter, ...]
    grows: bool  # with l
    core: str = ""


def _columns(hop: Hop) -> list[int]:
    return [n for s in hop for n in numbers(s)]


def _classes(hop: Hop) -> list[tuple[str, str]]:
    """Of each number of a hop, a name for it, and the class or event that it numbers."""
    out = []
    for s in hop:
        out.append(("", "unit"))
        for r in (*s.ins, *s.outs):
            out += [(lower(r.cls.partition(".")[0]), r.cls), ("at", "")]
        out += [(i.name, "") for i in s.ints]
        out += [("event", e.name) for e in (*s.waits, *s.recs)]
    return out


class _Numbers:
    """What the numbers of alike hops have in common."""

    def __init__(self, alike: Sequence[Hop]) -> None:
        self.rows = [_columns(hop) for hop in alike]
        self.l = [row[0] for row in self.rows]
        self.kinds = _classes(alike[0])
        self.parameters: list[Parameter] = []
        self.known: dict[str, list[int]] = {}
        self.values = [self.number(n) for n in range(len(self.kinds))]

    def number(self, n: int) -> Number:
        column = [row[n] for row in self.rows]
        name, cls = self.kinds[n]
        if len(set(column)) == 1:
            return Number(column[0])
        if cls == "unit":
            return Number(0, 1, BY)
        grown = self.line(column, self.l)
        if grown and (not cls or abs(grown[1]) == 1):
            return Number(*grown, BY)
        for known, values in self.known.items():
            by = self.times(column, values)
            if by and (not cls or by == 1):
                return Number(0, by, known)
        return Number(0, 1, self.parameter(n, name, cls, column))

    def line(
        self, column: Sequence[int], of: Sequence[int]
    ) -> tuple[int, int] | None:
        """base and by, where a column is base + by * of."""
        pairs = sorted(set(zip(of, column, strict=True)))
        if len({x for x, _ in pairs}) < 2 or len(pairs) > len(
            {x for x, _ in pairs}
        ):
            return None
        (x0, y0), (x1, y1) = pairs[:2]
        by, rest = divmod(y1 - y0, x1 - x0)
        base = y0 - by * x0
        straight = not rest and all(y == base + by * x for x, y in pairs)
        return (base, by) if straight else None

    def times(self, column: Sequence[int], of: Sequence[int]) -> int:
        """How many times another it is; 0: it is not."""
        found = self.line(column, of)
        return found[1] if found and not found[0] else 0

    def parameter(self, n: int, name: str, cls: str, column: list[int]) -> str:
        first = cls and not any(p.cls for p in self.parameters)
        plain = SLOT if first else name
        same = sum(
            p.name.rstrip("0123456789") == plain for p in self.parameters
        )
        named = f"{plain}{same + 1}" if same else plain
        self.parameters.append(Parameter(named, n, cls))
        self.known[named] = column
        return named

    @property
    def grows(self) -> bool:
        pairs = zip(self.values, self.kinds, strict=True)
        return any(v.of == BY for v, (_, cls) in pairs if cls != "unit")

    def split(self, hop: Hop) -> tuple[tuple[Number, ...], ...]:
        """The values, step by step."""
        out, left = [], iter(self.values)
        for s in hop:
            out.append(tuple(next(left) for _ in numbers(s)))
        return tuple(out)


def _common(hops_: Sequence[Hop]) -> int:
    """How many records at the end all have."""
    all_ = [names(hop[-1].recs) for hop in hops_]
    least = min(all_, key=len)
    same = [
        n for n in range(len(least)) if any(r[n] != least[n] for r in all_)
    ]
    return same[0] if same else len(least)


def _waited(hops_: Sequence[Hop]) -> tuple[str, ...]:
    """The last waits that the most hops have, as many as all of these have."""
    found: Counter[tuple[str, ...]] = Counter()
    for hop in hops_:
        all_ = names(hop[0].waits)
        found.update(all_[n:] for n in range(len(all_)))
    return max(found, key=lambda x: (found[x], len(x)), default=())


def _with(hop: Hop, waits: tuple[Event, ...], recs: tuple[Event, ...]) -> Hop:
    """A hop that waits for these at first and records those at last."""
    out = (replace(hop[0], waits=waits), *hop[1:])
    return (*out[:-1], replace(out[-1], recs=recs))


class Verbs:
    """The verbs of a program's sections. but: those that are none, as they would be called once."""

    def __init__(
        self,
        sections: Mapping[str, Section],
        suffix: Callable[[Step], str],
        but: frozenset[Kind] = frozenset(),
    ) -> None:
        self.suffix, self.but = suffix, but
        self.verbs: dict[str, Verb] = {}
        self.of: dict[str, Kind] = {}
        made = hops(list(sections.values()))
        groups: dict[Kind, list[Hop]] = {}
        for hop in (h for section in made for h in section):
            groups.setdefault(tuple(map(shape, hop)), []).append(hop)
        self.calls: dict[Hop, list[Step]] = {}
        for kind, alike in groups.items():
            if kind not in but and alike[0][0].op != "mark":
                self.verb(kind, alike)
        self.sections = {
            name: [s for hop in section for s in self.calls.get(hop, hop)]
            for name, section in zip(sections, made, strict=True)
        }

    def name(self, hop: Hop) -> str:
        s = hop[0]
        plain = NAMES.get(s.op) or (s.queue if s.op == "copy" else "run")
        end = self.suffix(s) if plain != "run" else lower(s.op)
        text = f"{plain}_{end}".rstrip("_")
        numbered = re.compile(rf"{re.escape(text)}(_v\d+)?")
        same = sum(bool(numbered.fullmatch(name)) for name in self.verbs)
        return f"{text}_v{same + 1}" if same else text

    def verb(self, kind: Kind, alike: list[Hop]) -> None:
        """Of hops that are alike: their verb, and how each is called."""
        count = _common(alike)
        most = _waited(alike)
        inside = len(most)
        if len(alike[0]) == 1 and not inside and not count:
            return

        def tail(hop: Hop) -> tuple[Event, ...]:
            return hop[0].waits[len(hop[0].waits) - inside :]

        def recs(hop: Hop) -> tuple[Event, ...]:
            return hop[-1].recs[:count]

        name = self.name(alike[0])
        waiting = [h for h in alike if names(tail(h)) == most]
        others = [h for h in alike if names(tail(h)) != most]
        core = (
            self.made(f"{name}_now", [_with(h, (), recs(h)) for h in alike])
            if others
            else None
        )
        whole = [_with(h, tail(h), recs(h)) for h in waiting]
        self.made(name, whole, core)
        self.of[name] = kind
        for h in waiting:
            extra = h[0].waits[: len(h[0].waits) - inside]
            self.calls[h] = [
                self.call(
                    name, _with(h, tail(h), recs(h)), extra, h[-1].recs[count:]
                )
            ]
        for h in others:
            step = self.call(
                f"{name}_now",
                _with(h, (), recs(h)),
                h[0].waits,
                h[-1].recs[count:],
            )
            self.calls[h] = [step]

    def made(
        self, name: str, alike: list[Hop], core: Verb | None = None
    ) -> Verb:
        found = _Numbers(alike)
        first = alike[0]
        below = core is not None and core.grows and found.values[0].of == BY
        self.verbs[name] = Verb(
            name,
            first,
            found.split(first),
            tuple(sorted(found.parameters, key=lambda x: not x.cls)),
            found.grows or below,
            core.name if core else "",
        )
        return self.verbs[name]

    def call(
        self,
        name: str,
        hop: Hop,
        waits: tuple[Event, ...],
        recs: tuple[Event, ...],
    ) -> Step:
        """A hop as a step whose op is the verb: l, then the parameters."""
        row, first = _columns(hop), hop[0]
        given = self.verbs[name].parameters
        refs = tuple(Ref(x.cls, row[x.at]) for x in given if x.cls)
        ints = tuple(Int(x.name, row[x.at]) for x in given if not x.cls)
        return Step(first.queue, name, first.unit, refs, (), ints, waits, recs)
