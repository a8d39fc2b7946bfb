"""verbs.py -- hops as functions: gather_block(z, l, slot), with its waits and its records inside.

A hop is a step, or several of one unit that always follow each other on queues beside main. Hops
that are alike but for numbers are calls of one verb: what is the same for all of them stands in its
body, what grows with the unit's number l is said with that, and the rest are its parameters. Where
some do not wait for what most of them do, the verb is two: NAME_now does not wait.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise

from ..plan.plan import Event, Int, Ref, Step
from ..plan.roll import Parts, numbers, parts
from .sizes import Sizes, What, held
from .tables import lower

Shape = int  # the number of all of a step but numbers, last uses, waits and records
Marks = tuple[
    bool, ...
]  # whether each place of a hop is there for the last time
Kind = tuple[tuple[Shape, ...], Marks]  # of a hop
Hop = tuple[Step, ...]
Section = Sequence[Step]
BY = "l"  # what a verb calls the unit's number
SLOT = "slot"  # the first parameter that is a slot's number, or one of several classes
LINE = 3  # so many points show a line
REDUCTIONS = ("alltoall", "reducescatter")


def names(events: Iterable[Event]) -> tuple[str, ...]:
    return tuple(e.name for e in events)


def marks(hop: Hop) -> Marks:
    return tuple(r.last for s in hop for r in s.refs)


class _Follows:
    """What always follows what."""

    def __init__(
        self, sections: Iterable[Section], shape: Callable[[Step], Shape]
    ) -> None:
        self.shape = shape
        self.next: dict[Shape, set[Shape | None]] = {}
        self.before: dict[Shape, set[Shape | None]] = {}
        self.waits: dict[Shape, set[tuple[str, ...]]] = {}
        self.recs: dict[Shape, set[tuple[str, ...]]] = {}
        for steps in sections:
            for a, b in pairwise([None, *steps, None]):
                one = a and b and a.unit == b.unit
                if a:
                    after = shape(b) if b and one else None
                    self.next.setdefault(shape(a), set()).add(after)
                    self.recs.setdefault(shape(a), set()).add(names(a.recs))
                if b:
                    before = shape(a) if a and one else None
                    self.before.setdefault(shape(b), set()).add(before)
                    self.waits.setdefault(shape(b), set()).add(names(b.waits))

    def one(self, a: Step, b: Step) -> bool:
        """Whether b belongs to the hop of a."""
        first, second = self.shape(a), self.shape(b)
        alone = self.next[first] == {second} and self.before[second] == {first}
        alike = len(self.recs[first]) == 1 and len(self.waits[second]) == 1
        return alone and alike and "main" not in (a.queue, b.queue)


@dataclass(frozen=True)
class Number:
    """A number of a hop: base, and by so much for each l, or times a parameter."""

    base: int
    by: int = 0
    of: str = ""

    def over(self, each: int) -> Number:
        """A number of bytes as elements of so many."""
        assert not self.base % each and not self.by % each
        return replace(self, base=self.base // each, by=self.by // each)


@dataclass(frozen=True)
class Parameter:
    """Of a verb. at: which number of the hop it is; what: of what; each: so many times it; uses:
    what the hop's numbers are that it says."""

    name: str
    at: int
    what: What
    each: int = 1
    uses: tuple[What, ...] = ()


@dataclass(frozen=True)
class Verb:
    """A function of steps. steps: of one hop, with the waits and the records of all; values: of
    each of their numbers, step by step; core: the verb that it calls behind its waits; last: what
    it uses for the last time where others that do the same do not."""

    name: str
    steps: Hop
    values: tuple[tuple[Number, ...], ...]
    parameters: tuple[Parameter, ...]
    grows: bool  # with l
    core: str = ""
    last: tuple[str, ...] = ()

    def whats(self, s: Step) -> Parts[What]:
        """Of each number of a step that calls it."""
        slots_ = [x.what for x in self.parameters if x.what.cls]
        return Parts(
            What(BY),
            tuple((slot, What("at")) for slot in slots_),
            tuple(x.what for x in self.parameters if not x.what.cls),
            (What("event"),) * len(s.waits),
            (What("event"),) * len(s.recs),
        )


class _Numbers:
    """What the numbers of alike hops have in common. Parameters count elements, not bytes. core:
    what more hops have in common, that these call behind their waits."""

    def __init__(
        self, alike: Sequence[Hop], sizes: Sizes, core: Verb | None
    ) -> None:
        self.hop = alike[0]
        rows = [[n for s in hop for n in numbers(s)] for hop in alike]
        self.columns = list(zip(*rows, strict=True))
        self.whats = [w for s in self.hop for w in sizes.whats(s).row]
        self.found: list[Parameter] = []
        self.known: list[Number | None] = [None] * len(self.whats)
        if core:
            first, *others = core.values
            row: Parts[Number | None] = parts(core.steps[0], [*first])
            waits = (None,) * len(self.hop[0].waits)
            self.known = [*replace(row, waits=waits).row, *chain(*others)]
        values = [self.number(n, w) for n, w in enumerate(self.whats)]
        names = self.names()
        self.values = [replace(v, of=names.get(v.of, v.of)) for v in values]
        self.parameters = [
            replace(
                x, name=names[x.name], what=replace(x.what, name=names[x.name])
            )
            for x in self.found
        ]

    def number(self, n: int, what: What) -> Number:
        column, l, known = self.columns[n], self.columns[0], self.known[n]
        if known and known.of in ("", BY):
            return known
        if len(set(column)) == 1:
            return Number(column[0])
        if what == What(BY):
            return Number(0, 1, BY)
        base = column[0] - what.by * l[0]
        if what.by and on(column, base, what.by, l):
            return Number(base, what.by, BY)
        grown = None if what.turns else line(column, l)
        if grown and (not what.cls or abs(grown[1]) == 1):
            return Number(*grown, BY)
        each = max(what.width, 1)
        for i, x in enumerate(self.found):
            of = [v // x.each for v in self.columns[x.at]]
            if alike_(x.what, what) and on(column, -what.begin, each, of):
                self.found[i] = replace(x, uses=(*x.uses, what))
                return Number(-what.begin, each, x.name)
        counts = replace(what, width=min(what.width, 1))
        self.found.append(Parameter(f"#{n}", n, counts, each, (what,)))
        return Number(0, each, f"#{n}")

    def names(self) -> dict[str, str]:
        """Of parameters, by those that they have until all their uses are found."""
        out: dict[str, str] = {}
        first = next((x for x in self.found if x.what.cls), None)
        for x in self.found:
            plain = SLOT if x is first else plain_name(x.uses)
            tries = chain([plain], (f"{plain}{i}" for i in range(2, 99)))
            out[x.name] = next(t for t in tries if t not in out.values())
        return out

    @property
    def ordered(self) -> tuple[Parameter, ...]:
        """Slots, where a piece begins, other numbers."""

        def key(x: Parameter) -> tuple[bool, bool, int]:
            return not x.what.cls, not x.name.startswith("at"), x.at

        return tuple(sorted(self.parameters, key=key))

    @property
    def grows(self) -> bool:
        pairs = zip(self.values, self.whats, strict=True)
        return any(v.of == BY for v, w in pairs if w != What(BY))

    @property
    def split(self) -> tuple[tuple[Number, ...], ...]:
        """The values, step by step."""
        left = iter(self.values)
        return tuple(tuple(next(left) for _ in numbers(s)) for s in self.hop)


def alike_(a: What, b: What) -> bool:
    """Whether one parameter may say both."""
    slots = bool(a.cls) == bool(b.cls)
    begins = (a.name == "at") == (b.name == "at")
    return slots and begins and bool(a.width) == bool(b.width)


def plain_name(uses: Sequence[What]) -> str:
    """What a parameter of these uses is called: by what has the slot, where that is one."""
    first, classes = uses[0], {held(x.cls) for x in uses}
    if first.cls:
        return first.name if len(classes) == 1 else SLOT
    return {BY: "unit", "bytes": "n"}.get(first.name, first.name)


def on(column: Sequence[int], base: int, by: int, of: Sequence[int]) -> bool:
    """Whether a column is base + by * of."""
    return all(y == base + by * x for x, y in zip(of, column, strict=True))


def line(column: Sequence[int], of: Sequence[int]) -> tuple[int, int] | None:
    """base and by, where a column is base + by * of in more points than two."""
    xs, at = sorted(set(of)), dict(zip(of, column, strict=True))
    if len(xs) < LINE:
        return None
    by = (at[xs[1]] - at[xs[0]]) // (xs[1] - xs[0])
    base = at[xs[0]] - by * xs[0]
    return (base, by) if on(column, base, by, of) else None


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


def _inside(alike: Sequence[Hop]) -> bool:
    """Whether hops that are alike are worth a verb: of several steps, or with waits or records."""
    several = len(alike[0]) > 1 or _common(alike) or _waited(alike)
    return bool(several) and alike[0][0].op != "mark"


def _with(hop: Hop, waits: tuple[Event, ...], recs: tuple[Event, ...]) -> Hop:
    """A hop that waits for these at first and records those at last."""
    out = (replace(hop[0], waits=waits), *hop[1:])
    return (*out[:-1], replace(out[-1], recs=recs))


class Verbs:
    """The verbs of a program's sections."""

    def __init__(self, sections: Mapping[str, Section], sizes: Sizes) -> None:
        self.sizes = sizes
        self.shapes: dict[object, Shape] = {}
        self.known: dict[int, Shape] = {}  # by the id of a step
        made = self.hops(list(sections.values()))
        self.in_hops = dict(zip(sections, made, strict=True))
        self.groups: dict[Kind, list[Hop]] = {}
        for hop in chain(*made):
            self.groups.setdefault(self.kind(hop), []).append(hop)
        self.define(frozenset())

    def define(self, but: frozenset[Kind]) -> None:
        """Makes them. but: those that are none, as they would be called once."""
        self.verbs: dict[str, Verb] = {}
        self.of: dict[str, Kind] = {}
        self.calls: dict[Hop, list[Step]] = {}
        some = {
            kind: alike
            for kind, alike in self.groups.items()
            if kind not in but and _inside(alike)
        }
        for (kind, alike), (name, last) in zip(
            some.items(), self.named(some), strict=True
        ):
            self.of[name] = kind
            self.verb(name, last, alike)
        self.sections = {
            name: [s for hop in section for s in self.calls.get(hop, hop)]
            for name, section in self.in_hops.items()
        }

    # ---- hops

    def shape(self, s: Step) -> Shape:
        """Of a step of a section."""
        if id(s) not in self.known:
            ins, outs = (tuple(r.cls for r in x) for x in (s.ins, s.outs))
            ints = tuple((i.name, i.per) for i in s.ints)
            flat = self.sizes.flat(s)
            all_ = s.queue, s.op, s.group, flat, ins, outs, ints
            self.known[id(s)] = self.shapes.setdefault(all_, len(self.shapes))
        return self.known[id(s)]

    def kind(self, hop: Hop) -> Kind:
        return tuple(map(self.shape, hop)), marks(hop)

    def hops(self, sections: Sequence[Section]) -> list[list[Hop]]:
        """Each section's steps, in hops."""
        follows = _Follows(sections, self.shape)
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

    # ---- names

    def plain(self, hop: Hop) -> str:
        """What a hop is called: by its collective and its flat, else by its function, else by its
        queue and what it copies."""
        first, flat = hop[0], lower(self.sizes.flat(hop[0]))
        fn = next((s.op for s in hop if s.op in self.sizes.fns), "")
        met = next((s.op for s in hop if s.group and s.op != "done"), "")
        if met in REDUCTIONS and (fn or met == "reducescatter"):
            return f"reduce_{flat}"
        if fn and not met:
            return f"run_{lower(fn)}"
        if first.op == "copy" and not met:
            stores = [r.cls for r in first.refs if r.cls in self.sizes.stores]
            copied = (stores or [f"{first.ins[0].cls}.{flat}"])[0]
            return f"{first.queue}_{lower(copied)}".rstrip("_")
        return f"{met or first.op}_{flat}".rstrip("_")

    def named(
        self, groups: Mapping[Kind, Sequence[Hop]]
    ) -> Iterator[tuple[str, tuple[str, ...]]]:
        """Names of kinds, and what tells those apart that do the same: who uses more for the last
        time has a name that says so."""
        plain = {kind: self.plain(x[0]) for kind, x in groups.items()}
        taken: set[str] = set()
        for kind, name in plain.items():
            same = [k for k in groups if plain[k] == name and k[0] == kind[0]]
            same.sort(key=lambda k: sum(k[1]))
            refs = [r.cls for s in groups[kind][0] for r in s.refs]
            flags = zip(refs, kind[1], same[0][1], strict=True)
            last = [cls for cls, mine, least in flags if mine and not least]
            words = ["_last"] * bool(last)
            if len(same) > 2:
                words += [f"_{lower(x)}" for x in last]
            full = text = "".join([name, *words])
            n = 1
            while text in taken:
                n += 1
                text = f"{full}_{n}"
            taken.add(text)
            yield text, tuple(dict.fromkeys(last))

    # ---- verbs

    def verb(self, name: str, last: tuple[str, ...], alike: list[Hop]) -> None:
        """Of hops that are alike: their verb, and how each is called."""
        count = _common(alike)
        most = _waited(alike)

        def part(hop: Hop, waits: int) -> tuple[Hop, Step]:
            """What a verb does of a hop, and what is beside that."""
            cut = len(hop[0].waits) - waits
            inside = _with(hop, hop[0].waits[cut:], hop[-1].recs[:count])
            beside = replace(
                hop[-1], waits=hop[0].waits[:cut], recs=hop[-1].recs[count:]
            )
            return inside, beside

        own = [
            names(h[0].waits)[len(h[0].waits) - len(most) :] == most
            for h in alike
        ]
        parts_ = [
            part(h, len(most) if mine else 0)
            for h, mine in zip(alike, own, strict=True)
        ]
        core = None
        if not all(own):
            hops = [part(h, 0)[0] for h in alike]
            core = self.made(f"{name}_now", hops, last)
        hops = [x[0] for x, mine in zip(parts_, own, strict=True) if mine]
        self.made(name, hops, last, core)
        for h, (hop, beside), mine in zip(alike, parts_, own, strict=True):
            called = name if mine else f"{name}_now"
            self.calls[h] = self.call(called, hop, beside.waits, beside.recs)

    def made(
        self,
        name: str,
        alike: list[Hop],
        last: tuple[str, ...],
        core: Verb | None = None,
    ) -> Verb:
        found = _Numbers(alike, self.sizes, core)
        self.verbs[name] = Verb(
            name,
            alike[0],
            found.split,
            found.ordered,
            found.grows,
            core.name if core else "",
            last,
        )
        return self.verbs[name]

    def call(
        self,
        name: str,
        hop: Hop,
        waits: tuple[Event, ...],
        recs: tuple[Event, ...],
    ) -> list[Step]:
        """A hop as a step whose op is the verb: l, then the parameters. What it records beside is
        recorded where its last step is."""
        row, first, last = (
            [n for s in hop for n in numbers(s)],
            hop[0],
            hop[-1],
        )
        given = self.verbs[name].parameters
        assert not any(row[x.at] % x.each for x in given)
        refs = tuple(Ref(x.what.cls, row[x.at]) for x in given if x.what.cls)
        ints = tuple(
            Int(x.name, row[x.at] // x.each) for x in given if not x.what.cls
        )
        called = Step(
            first.queue, name, first.unit, refs, (), ints, waits, recs
        )
        if last.queue == first.queue or not recs:
            return [called]
        behind = Step(last.queue, "mark", first.unit, recs=recs)
        return [replace(called, recs=()), behind]
