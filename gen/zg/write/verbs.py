"""verbs.py -- turns hops into functions such as gather_block(z, l, slot), with their waits and
records inside.

A hop is a step, or several of one unit that always follow each other on queues other than main.
Hops that differ only in numbers are calls of one verb. Numbers that are equal in all of them are
constants of its body, numbers that grow with the unit's number l are computed from l, and the rest
are parameters. If some of the hops lack the waits of the others, there are two verbs: NAME_now does
not wait.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import (
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, replace
from itertools import chain, count, groupby, takewhile

from ..plan.operand import Names
from ..plan.plan import Event, Events, Int, Ref, Step
from ..plan.roll import Parts, numbers, parts
from ..plan.size import Size, divided, minus, times, width_of
from .sizes import Sizes, What, held
from .words import lower

# Number of a step's shape: all of it except numbers, last uses, waits and records.
Shape = int
# For each place of a hop, whether it is a last use.
Marks = tuple[bool, ...]
Kind = tuple[tuple[Shape, ...], Marks]  # shape and marks of a hop
Hop = tuple[Step, ...]
Section = Sequence[Step]
BY = "l"  # a verb's parameter for the unit's number
# The first parameter that indexes a slot, or one that indexes several classes.
SLOT = "slot"
LINE = 3  # the fewest points that show a line


def names(events: Iterable[Event]) -> Names:
    return tuple(e.name for e in events)


def marks(hop: Hop) -> Marks:
    return tuple(r.last for s in hop for r in s.refs)


class _Follows:
    """Records which steps always follow each other."""

    def __init__(
        self, sections: Iterable[Section], shape: Callable[[Step], Shape]
    ) -> None:
        self.shape = shape
        self.next = defaultdict[Shape, set[Shape | None]](set)
        self.before = defaultdict[Shape, set[Shape | None]](set)
        self.waits = defaultdict[Shape, set[Names]](set)
        self.recs = defaultdict[Shape, set[Names]](set)
        for steps in sections:
            for _, run in groupby(steps, key=lambda s: s.unit):
                self.add([*run])

    def add(self, run: Section) -> None:
        """Add consecutive steps of one unit."""
        kinds = [None, *map(self.shape, run), None]
        for s, before, after in zip(run, kinds, kinds[2:], strict=False):
            kind = self.shape(s)
            self.before[kind].add(before)
            self.next[kind].add(after)
            self.waits[kind].add(names(s.waits))
            self.recs[kind].add(names(s.recs))

    def one(self, a: Step, b: Step) -> bool:
        """Return whether b belongs to the hop of a."""
        first, second = self.shape(a), self.shape(b)
        return (
            "main" not in (a.queue, b.queue)
            and self.next[first] == {second}
            and self.before[second] == {first}
            and len(self.recs[first]) == 1
            and len(self.waits[second]) == 1
        )


@dataclass(frozen=True)
class Affine:
    """A number of a hop: base + by * l, or base + by * a parameter. of: l or the parameter's
    name."""

    base: int
    by: int = 0
    of: str = ""

    def over(self, each: int) -> Affine:
        """Return a number of bytes as a number of elements of `each` bytes."""
        return replace(self, base=over(self.base, each), by=over(self.by, each))


@dataclass(frozen=True)
class Parameter:
    """A parameter of a verb.

    at: index of the number of the hop that it is taken from; what: the meaning of that number;
    each: factor from the parameter to the hop's number; uses: meanings of all numbers computed from
    it.
    """

    name: str
    at: int
    what: What
    each: int = 1
    uses: tuple[What, ...] = ()


@dataclass(frozen=True)
class Verb:
    """A function of steps.

    steps: those of one hop, with the waits and records that all hops share; values: their numbers,
    step by step; core: the verb that it calls after its waits; last: classes that it uses for the
    last time, unlike otherwise equal verbs.
    """

    name: str
    steps: Hop
    values: tuple[tuple[Affine, ...], ...]
    parameters: tuple[Parameter, ...]
    grows: bool  # whether numbers grow with l
    core: str = ""
    last: Names = ()

    @property
    def pairs(self) -> Iterator[tuple[Step, tuple[Affine, ...]]]:
        return zip(self.steps, self.values, strict=True)


class _Numbers:
    """Common structure of the numbers of alike hops. Parameters count elements, not bytes. core:
    the verb that these hops call after their waits."""

    def __init__(self, alike: Sequence[Hop], sizes: Sizes, core: Verb | None) -> None:
        self.hop = alike[0]
        rows = map(row_of, alike)
        self.columns = list(zip(*rows, strict=True))
        self.whats = []
        row = (w for s in self.hop for w in sizes.whats(s).row)
        for what, column in zip(row, self.columns, strict=True):
            self.whats.append(replace(what, width=width_of(column)))
        self.found: list[Parameter] = []
        self.known: list[Affine | None] = [None] * len(self.whats)
        if core:
            self.known = self.told(core)
        values = [self.number(n, w) for n, w in enumerate(self.whats)]
        names = self.names()
        self.values = [replace(v, of=names.get(v.of, v.of)) for v in values]
        self.parameters = []
        for x in self.found:
            name = names[x.name]
            what = replace(x.what, name=name)
            self.parameters.append(replace(x, name=name, what=what))

    def told(self, core: Verb) -> list[Affine | None]:
        """Express these numbers through those of the core, which lacks the first step's waits."""
        first, *others = core.values
        row: Parts[Affine | None] = parts(core.steps[0], [*first])
        waits = (None,) * len(self.hop[0].waits)
        return [*replace(row, waits=waits).row, *chain(*others)]

    def number(self, n: int, what: What) -> Affine:
        column, known = self.columns[n], self.known[n]
        if known and known.of in ("", BY):
            return known
        if len(set(column)) == 1:
            return Affine(column[0])
        return self.grown(column, what) or self.given(n, what)

    def grown(self, column: Sequence[int], what: What) -> Affine | None:
        """Return a number that grows with l, or None."""
        l = self.columns[0]
        if what == What(BY):
            return Affine(0, 1, BY)
        base = minus(column[0], times(what.by, l[0]))
        if what.by and on(column, base, what.by, l):
            return Affine(base, what.by, BY)
        found = line(column, l)
        if not found or what.turns:
            return None
        base, by = found
        steady = not what.cls or abs(by) == 1
        return Affine(base, by, BY) if steady else None

    def given(self, n: int, what: What) -> Affine:
        """Express a number through a parameter, an existing one if possible."""
        column, each = self.columns[n], max(what.width, 1)
        for i, x in enumerate(self.found):
            of = [over(v, x.each) for v in self.columns[x.at]]
            begin = minus(column[0], times(of[0], each))
            same = aside(begin) and on(column, begin, each, of)
            if same and alike_(x.what, what):
                self.found[i] = replace(x, uses=(*x.uses, what))
                return Affine(begin, each, x.name)
        name = f"#{n}"
        if any(v % each for v in self.columns[n]):
            each, what = 1, replace(what, width=0)
        counts = replace(what, width=min(what.width, 1))
        self.found.append(Parameter(name, n, counts, each, (what,)))
        return Affine(0, each, name)

    def names(self) -> dict[str, str]:
        """Return the final name of each parameter, by its preliminary one. It depends on all uses,
        which are known only at the end."""
        out: dict[str, str] = {}
        first = next((x for x in self.found if x.what.cls), None)
        for x in self.found:
            plain = SLOT if x is first else plain_name(x.uses)
            out[x.name] = free(plain, out.values())
        return out

    @property
    def ordered(self) -> tuple[Parameter, ...]:
        """Return the parameters in order: slots, offsets, other numbers."""

        def key(x: Parameter) -> tuple[bool, bool, int]:
            return not x.what.cls, not x.name.startswith("at"), x.at

        return tuple(sorted(self.parameters, key=key))

    @property
    def grows(self) -> bool:
        pairs = zip(self.values, self.whats, strict=True)
        return any(v.of == BY for v, w in pairs if w != What(BY))

    @property
    def split(self) -> tuple[tuple[Affine, ...], ...]:
        """Return the values, step by step."""
        left = iter(self.values)
        return tuple(tuple(next(left) for _ in numbers(s)) for s in self.hop)


def free(name: str, taken: Collection[str], between: str = "") -> str:
    """Return a name that is not taken: the name itself, or with a number."""
    tries = chain([name], (f"{name}{between}{n}" for n in count(2)))
    return next(x for x in tries if x not in taken)


def row_of(hop: Hop) -> list[int]:
    """Return all numbers of a hop."""
    return [n for s in hop for n in numbers(s)]


def alike_(a: What, b: What) -> bool:
    """Return whether one parameter may stand for both numbers."""
    return (
        bool(a.cls) == bool(b.cls)
        and bool(a.width) == bool(b.width)
        and (a.name == "at") == (b.name == "at")
    )


def plain_name(uses: Sequence[What]) -> str:
    """Return the name of a parameter with these uses: the name of its slot's class, if that is a
    single one."""
    first, classes = uses[0], {held(x.cls) for x in uses}
    if first.cls:
        return first.name if len(classes) == 1 else SLOT
    return {BY: "unit", "bytes": "n"}.get(first.name, first.name)


def over(n: int, each: int) -> int:
    """Return a number of bytes as a number of elements of `each` bytes."""
    assert not n % each
    return divided(n, each)


def aside(n: int) -> bool:
    """Return whether a parameter plus the constant `n` may express a number: n is 0, or the part of
    a shard that stays on the device."""
    near = isinstance(n, Size) and {u.name.partition(".")[0] for u, _ in n.terms}
    return not n or near == {"near"}


def on(column: Sequence[int], base: int, by: int, of: Sequence[int]) -> bool:
    """Return whether a column is base + by * of."""
    return all(y == base + by * x for x, y in zip(of, column, strict=True))


def line(column: Sequence[int], of: Sequence[int]) -> tuple[int, int] | None:
    """Return base and by if a column is base + by * of in at least LINE points, else None."""
    at = dict(zip(of, column, strict=True))
    if len(at) < LINE:
        return None
    first, second, *_ = sorted(at)
    by = divided(minus(at[second], at[first]), second - first)
    base = minus(at[first], times(by, first))
    return (base, by) if on(column, base, by, of) else None


def _common(hops_: Sequence[Hop]) -> int:
    """Return how many first records of their last step all hops share."""
    found = zip(*(names(hop[-1].recs) for hop in hops_), strict=False)
    same = takewhile(lambda each: len(set(each)) == 1, found)
    return sum(1 for _ in same)


def _waited(hops_: Sequence[Hop]) -> Names:
    """Return the run of last waits that most hops share; of equally common ones the longest."""
    found: Counter[Names] = Counter()
    for hop in hops_:
        all_ = names(hop[0].waits)
        found.update(all_[n:] for n in range(len(all_)))
    return max(found, key=lambda x: (found[x], len(x)), default=())


def _inside(alike: Sequence[Hop]) -> bool:
    """Return whether alike hops are worth a verb: they have several steps, or waits or records."""
    several = len(alike[0]) > 1 or _common(alike) or _waited(alike)
    return bool(several) and alike[0][0].op != "mark"


@dataclass(frozen=True)
class _Cut:
    """A hop as a call of a verb, with the waits and records that stay outside the verb."""

    hop: Hop
    waits: Events
    recs: Events


def _cut(hop: Hop, waits: int, recs: int) -> _Cut:
    """Cut a hop: the verb gets the last `waits` waits and the first `recs` records."""
    given = hop[0].waits
    made = hop[-1].recs
    at = len(given) - waits
    steps = list(hop)
    steps[0] = replace(steps[0], waits=given[at:])
    steps[-1] = replace(steps[-1], recs=made[:recs])
    return _Cut(tuple(steps), given[:at], made[recs:])


def _waits(hop: Hop, last: Names) -> bool:
    """Return whether these are a hop's last waits."""
    all_ = names(hop[0].waits)
    return all_[len(all_) - len(last) :] == last


def _group(hop: Hop) -> str:
    """Return the group of a hop's collective, or ''."""
    return next((s.group for s in hop if s.group), "")


class Verbs:
    """The verbs of a program's sections."""

    def __init__(self, sections: Mapping[str, Section], sizes: Sizes) -> None:
        self.sizes = sizes
        self.shapes: dict[object, Shape] = {}
        self.known: dict[int, Shape] = {}  # by id of the step
        self.hops = _hops(sections, self.shape)
        self.groups = defaultdict[Kind, list[Hop]](list)
        for hop in chain(*self.hops.values()):
            self.groups[self.kind(hop)].append(hop)
        self.define(frozenset())

    def define(self, but: frozenset[Kind]) -> None:
        """Make the verbs. but: kinds that get none because they would be called once."""
        self.verbs: dict[str, Verb] = {}
        self.of: dict[str, Kind] = {}
        self.calls: dict[Hop, list[Step]] = {}
        some = {
            kind: alike
            for kind, alike in self.groups.items()
            if kind not in but and _inside(alike)
        }
        named = self.named(some)
        for kind, (name, last) in zip(some, named, strict=True):
            self.of[name] = kind
            self.verb(name, last, some[kind])
        self.sections = {
            name: [s for hop in section for s in self.calls.get(hop, hop)]
            for name, section in self.hops.items()
        }

    # ---- hops

    def shape(self, s: Step) -> Shape:
        """Return the shape of a section's step."""
        if id(s) not in self.known:
            said = (
                s.queue,
                s.op,
                s.group,
                self.sizes.flat(s),
                tuple(r.cls for r in s.ins),
                tuple(r.cls for r in s.outs),
                tuple((i.name, i.per) for i in s.ints),
            )
            self.known[id(s)] = self.shapes.setdefault(said, len(self.shapes))
        return self.known[id(s)]

    def kind(self, hop: Hop) -> Kind:
        return tuple(map(self.shape, hop)), marks(hop)

    # ---- names

    def plain(self, hop: Hop) -> str:
        """Return a hop's plain name: by its collective and flat, else by its function, else by its
        queue and the class that it copies."""
        first, *_ = hop
        flat = lower(self.sizes.flat(first))
        fn = met = ""
        for s in hop:
            if s.op in self.sizes.fns:
                fn = fn or s.op
            elif s.group and s.op != "done":
                met = met or s.op
        if met == "reducescatter" or (met == "alltoall" and fn):
            return f"reduce_{flat}"
        if fn and not met:
            return f"run_{lower(fn)}"
        does, of = met or first.op, flat
        if does == "copy":
            does, of = first.queue, self.copied(first, flat)
        return f"{does}_{of}".rstrip("_")

    def copied(self, s: Step, flat: str) -> str:
        """Return the name of the state that a step copies, else the class and flat."""
        for r in s.refs:
            if r.cls in self.sizes.stores:
                return lower(r.cls)
        return lower(f"{s.ins[0].cls}.{flat}")

    def named(
        self, groups: Mapping[Kind, Sequence[Hop]]
    ) -> Iterator[tuple[str, Names]]:
        """Yield the name of each kind, and the last uses that tell it from a kind with the same
        steps. The name has the group if kinds of several groups have the same plain name, and the
        last uses of a kind with more of them."""
        plain = {kind: self.plain(x[0]) for kind, x in groups.items()}
        met = defaultdict[str, set[str]](set)
        for kind, name in plain.items():
            met[name].add(_group(groups[kind][0]))
        for kind, name in plain.items():
            if len(met[name]) > 1:
                plain[kind] = f"{name}_over_{_group(groups[kind][0])}"
        taken: set[str] = set()
        for kind, name in plain.items():
            does = name, kind[0]
            same = [k for k in groups if (plain[k], k[0]) == does]
            least = min(same, key=lambda k: sum(k[1]))
            last = self.more(groups[kind][0], least[1])
            words = [name]
            if last:
                words.append("last")
            if len(same) > 2:
                words += map(lower, last)
            text = free("_".join(words), taken, "_")
            taken.add(text)
            yield text, tuple(dict.fromkeys(last))

    def more(self, hop: Hop, least: Marks) -> list[str]:
        """Return the classes that a hop uses for the last time in addition to these marks."""
        refs = [r for s in hop for r in s.refs]
        pairs = zip(refs, least, strict=True)
        return [r.cls for r, other in pairs if r.last and not other]

    # ---- verbs

    def verb(self, name: str, last: Names, alike: list[Hop]) -> None:
        """Make the verb of alike hops, and the call of each hop."""
        recs = _common(alike)
        most = _waited(alike)
        own = [h for h in alike if _waits(h, most)]
        core = None
        if len(own) < len(alike):
            hops = [_cut(h, 0, recs).hop for h in alike]
            core = self.made(f"{name}_now", hops, last)
        hops = [_cut(h, len(most), recs).hop for h in own]
        self.made(name, hops, last, core)
        for h in alike:
            called, waits = name, len(most)
            if not _waits(h, most):
                called, waits = f"{name}_now", 0
            self.calls[h] = self.call(called, _cut(h, waits, recs))

    def made(
        self,
        name: str,
        alike: list[Hop],
        last: Names,
        core: Verb | None = None,
    ) -> Verb:
        found = _Numbers(alike, self.sizes, core)
        self.verbs[name] = Verb(
            name=name,
            steps=alike[0],
            values=found.split,
            parameters=found.ordered,
            grows=found.grows,
            core=core.name if core else "",
            last=last,
        )
        return self.verbs[name]

    def call(self, name: str, cut: _Cut) -> list[Step]:
        """Return a hop as a step whose op is the verb: l, then the parameters. Records outside the
        verb go to the queue of the hop's last step."""
        first, last = cut.hop[0], cut.hop[-1]
        row = row_of(cut.hop)
        refs, ints = [], []
        for x in self.verbs[name].parameters:
            n = over(row[x.at], x.each)
            if x.what.cls:
                refs.append(Ref(x.what.cls, n))
            else:
                ints.append(Int(x.name, n))
        called = Step(
            first.queue,
            name,
            first.unit,
            tuple(refs),
            ints=tuple(ints),
            waits=cut.waits,
            recs=cut.recs,
        )
        if last.queue == first.queue or not cut.recs:
            return [called]
        behind = Step(last.queue, "mark", first.unit, recs=cut.recs)
        return [replace(called, recs=()), behind]


def _hops(
    sections: Mapping[str, Section], shape: Callable[[Step], Shape]
) -> dict[str, list[Hop]]:
    """Return each section's steps, grouped in hops."""
    follows = _Follows(sections.values(), shape)
    out = {}
    for name, steps in sections.items():
        made: list[list[Step]] = []
        for s in steps:
            if made and follows.one(made[-1][-1], s):
                made[-1].append(s)
            else:
                made.append([s])
        out[name] = [tuple(hop) for hop in made]
    return out
