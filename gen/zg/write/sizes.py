"""sizes.py -- what each number of a step counts, and that said by name: elements of flat buffers,
or their bytes, as shards and pieces, which are constants of train.c.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ..facts import ops
from ..plan import plan, roll
from ..plan.plan import Event, Plan, Ref, Step
from .letters import number, of_unit
from .tables import flat_names, linear, lower, shares, upper, word

# A piece of a flat's shard, by what takes so much of it at a time.
PIECES = {
    "GATHER": "of these, gathered at a time",
    "REDUCE": "of these, reduced at a time",
    "TILE": "of these, updated at a time on the host",
}
PIECE_OF = {
    "gather": "GATHER",
    "alltoall": "REDUCE",
    "reducescatter": "REDUCE",
    "own": "REDUCE",
    "sum": "REDUCE",
    "node": "REDUCE",
    "join": "REDUCE",
    "push": "REDUCE",
    "done": "REDUCE",
}  # by a step's command, or the first word of its function; else TILE
ELEMENTS = ("n", "at")  # numbers of steps, in elements of a flat
BYTES = ("step", "from_step", "bytes", "from_rank", "to_rank")
SUMS = (
    "pending",
    "intra",
    "part",
    "down",
    "acc",
)  # classes of f32, beside states
ACTIVATIONS = ("near", "far")  # classes of no flat
VALUES = ("x", "save", "far")  # classes with a slot for each unit
Terms = Sequence[tuple[str, int]]  # variables, and what each is multiplied by


@dataclass(frozen=True)
class What:
    """What a number of a step is. cls: the class or event that it numbers; width: bytes of the
    elements that it counts, 1 where it counts them and not their bytes, 0 where neither; by: what
    it grows by from a unit to the next, where that is so in every plan; turns: units take turns in
    the class; flat, piece: of which it counts; part: it begins, or is, what of the shard stays on
    the device; begin: in bytes, where in a shard begins what lies in the class."""

    name: str
    cls: str = ""
    width: int = 0
    by: int = 0
    turns: bool = False
    flat: str = ""
    piece: str = ""
    part: bool = False
    begin: int = 0


class Sizes:
    """Of a plan."""

    def __init__(self, p: Plan) -> None:
        self.p = p
        self.fns = {f.name: f for f in p.fns}
        self.flats = {f.name: f for f in p.flats}
        self.stores = {s.cls: s for s in p.stores}
        self.slots = {c.name: c.slots for c in p.classes}
        self.widths = dict.fromkeys(SUMS, 4)
        for store in p.stores:
            width = ops.BYTES[store.dtype]
            self.widths[store.cls] = width
            self.widths.setdefault(word(store.cls), width)
        self.of: dict[object, str] = {}  # the flat of each step
        self.pieces: dict[tuple[str, str], int] = {}
        self.units: dict[tuple[str, str], int] = {}  # parts of a flat
        for section in p.sections:
            self.find(section.steps)
            for s in section.steps:
                self.measure(s)

    # ---- the flat that a step is of

    def find(self, steps: Sequence[Step]) -> None:
        """Shared buffers are of no flat: then a neighbour that has the same slot says it."""
        for before, s, after in zip(
            [None, *steps], steps, [*steps[1:], None], strict=False
        ):
            slots = _slots(s)
            known = [self.known(s)]
            for x in (after, before):
                if x and slots & _slots(x) and not self.model(x):
                    known.append(self.known(x))
            found = next(filter(None, known), "") or self.likely(s)
            self.of.setdefault(_bare(s), found)

    def known(self, s: Step) -> str:
        """By its function, or the states that it reads or writes."""
        name = s.op.partition(".")[2]
        if self.model(s) or name in self.flats:
            return name
        stores = [self.stores[r.cls] for r in s.refs if r.cls in self.stores]
        return stores[0].flat if stores else ""

    def likely(self, s: Step) -> str:
        """By its unit; a unit that has no flat has its buffers' (a tied head the embedding's). This
        only chooses a name: what is said is what the flat of that name makes the same number."""
        if any(word(r.cls) in ACTIVATIONS for r in s.refs):
            return ""
        unit = roll.unit_of(s)[0]
        found = [r.cls.partition(".")[2] for r in s.refs]
        parts = [x for x in found if x in self.flats]
        own = [x for x in parts if word(x) == unit]
        if unit in self.flats:
            own.append(unit)
        own += parts
        return own[0] if own else ""

    def flat(self, s: Step) -> str:
        return self.of.get(_bare(s), "")

    # ---- what numbers count

    def width(self, cls: str) -> int:
        """Bytes of an element of a class."""
        name = cls.removeprefix("tile.")
        return self.widths.get(name, self.p.head.bytes)

    def whats(self, s: Step) -> roll.Parts[What]:
        """Of each of a step's numbers."""
        fn = self.fns.get(s.op)
        called = [*fn.ins, *fn.outs] if fn else []
        called += [word(r.cls) for r in s.refs[len(called) :]]
        refs = []
        for r, name in zip(s.refs, called, strict=True):
            refs.append((self.slot(lower(name), r.cls), self.begin(s, r)))
        return roll.Parts(
            What("l"),
            tuple(refs),
            tuple(self.count(s, i.name) for i in s.ints),
            tuple(map(self.event, s.waits)),
            tuple(map(self.event, s.recs)),
        )

    def counted(self, s: Step) -> What:
        """What a number of elements of a step is."""
        sums = s.op == "copy" and s.ins[0].cls == "part"
        piece = "REDUCE" if sums else PIECE_OF.get(s.kind, "TILE")
        return What("", flat=self.flat(s), piece=piece)

    def begin(self, s: Step, r: Ref) -> What:
        """Where in a slot what a step reads or writes begins."""
        store, of = self.stores.get(r.cls), r.cls.partition(".")[2]
        width = self.width(r.cls)
        at = replace(self.counted(s), name="at", width=width, part=True)
        unit = self.units.get((of, roll.unit_of(s)[0]), 0)
        if unit and self.model(s):
            return replace(at, flat=of, by=width * unit)
        if store and self.cut(store):
            return replace(at, part=False, begin=width * store.first)
        return at

    def count(self, s: Step, name: str) -> What:
        """A number of a step by its name."""
        width = self.width(s.ins[0].cls) if name in BYTES else 0
        if name in ELEMENTS and not self.model(s):
            width = 1
        return replace(
            self.counted(s),
            name=name,
            width=width,
            part=name == "at" or self.stays(s),
            by=int(name == "l"),
        )

    def stays(self, s: Step) -> bool:
        """Whether what a step works on is what stays on the device, or lies as that does."""
        if s.op.startswith("near_"):
            return True
        for r in s.refs:
            store = self.stores.get(r.cls)
            whole = store and not r.at and not self.cut(store)
            if whole or r.cls.startswith("near_"):
                return True
        return False

    def model(self, s: Step) -> bool:
        """Whether it is a function of a unit of the model."""
        return s.op in self.fns and of_unit(self.fns[s.op])

    def cut(self, store: plan.Store) -> bool:
        """Whether it is a part of a shard's elements."""
        return store.n < self.flats[store.flat].shard

    def slot(self, name: str, cls: str) -> What:
        """The number of a slot; a state of a flat's instance l is in slot l."""
        of = held(cls)
        return What(name, cls, by=int(of in self.stores), turns=self.turns(of))

    def turns(self, cls: str) -> bool:
        """Whether units take turns in a class: it has not a slot for each."""
        kind, _, of = cls.partition(".")
        f = self.flats.get(of)
        each = f and self.slots.get(cls, 0) >= f.count
        return kind not in VALUES and not each

    def event(self, e: Event) -> What:
        return self.slot(lower(e.name.partition(".")[2]), e.name)

    def measure(self, s: Step) -> None:
        """Pieces of a step's flat, and a unit's part of a flat that has all units'."""
        unit, l = roll.unit_of(s)
        for r in s.refs if l and self.model(s) else ():
            of = r.cls.partition(".")[2]
            if r.at and of in self.flats:
                self.units[of, unit] = r.at // self.width(r.cls) // l
        f = self.flats.get(self.flat(s))
        for i in s.ints if f else ():
            if f and i.name in ("n", "bytes"):
                self.piece(f, self.count(s, i.name), i.value)

    def piece(self, f: plan.Flat, w: What, value: int) -> None:
        """A number that may be a piece of a flat's shard."""
        n, key = value // max(w.width, 1), (w.piece, f.name)
        if 0 < n < f.shard and n not in flat_names(self.p, f):
            self.pieces[key] = max(n, self.pieces.get(key, 0))

    def rows(self) -> Iterator[tuple[str, str]]:
        """Enumerators of flats, their parts and pieces, and what each is."""
        for f in self.p.flats:
            name, near = upper(f.name), self.p.near(f)
            whole = f.shard * self.p.head.ranks
            yield f"FLAT_{name} = {number(whole)}", f"instances: {f.count}"
            yield f"SHARD_{name} = {number(f.shard)}", "a rank's of each"
            for size, share in shares(self.p, f).items():
                yield f"{share} = {number(size)}", "of a rank of that group"
            if near:
                yield (
                    f"NEAR_{name} = {number(near)}",
                    "of these, on the device",
                )
                yield (
                    f"FAR_{name} = {number(f.shard - near)}",
                    "of these, elsewhere",
                )
            for piece, text in PIECES.items():
                if n := self.pieces.get((piece, f.name)):
                    yield f"{piece}_{name} = {number(n)}", text
            for (of, unit), n in self.units.items():
                if of == f.name:
                    yield (
                        f"{name}_{upper(unit)} = {number(n)}",
                        f"of it, each {unit}'s",
                    )

    # ---- numbers by name

    def said(self, w: What, n: int, terms: Terms = ()) -> str:
        """n and what grows with variables, which are loops' or l."""
        f = self.flats.get(w.flat)
        terms = [(name, by) for name, by in terms if by]
        plain = linear(n, terms)
        if not f or not w.width or not (n or terms):
            return plain
        if any(x % w.width for x in (n, *(by for _, by in terms))):
            return plain
        each = [(name, by // w.width) for name, by in terms]
        return self.elements(f, w, n // w.width, each) or plain

    def elements(self, f: plan.Flat, w: What, n: int, terms: Terms) -> str:
        """So many elements of a flat, in the unit of a number; '': they have no name."""
        value, each = n * w.width, self.each(f, w.piece)
        names = {} if terms else flat_names(self.p, f, w.part)
        if n in names:
            return product("", w.width, names[n], value)
        near = self.p.near(f) if w.part else 0
        if near:
            times, name = counted(each, n - near, terms)
            more = product(times, 1, name, 0)
            text = closed(f"NEAR_{upper(f.name)} + {more}", w)
            if name:
                return product("", w.width, text, value)
        times, name = counted(each, n, terms)
        if name:
            return product(times, w.width, name, value)
        for whole, of in reversed([*names.items()][1:]):
            for name, size in each.items():
                if whole % size == n:
                    text = closed(f"{of} % {name}", w)
                    return product("", w.width, text, value)
        return ""

    def each(self, f: plan.Flat, piece: str) -> dict[str, int]:
        """What elements of a flat come in: units' parts, and pieces of this kind."""
        out = {
            f"{upper(of)}_{upper(unit)}": size
            for (of, unit), size in self.units.items()
            if of == f.name
        }
        if size := self.pieces.get((piece, f.name)):
            out[f"{piece}_{upper(f.name)}"] = size
        return out


def counted(each: Mapping[str, int], n: int, terms: Terms) -> tuple[str, str]:
    """n and what grows as so many times the first of these that fits, and that."""
    for name, size in each.items():
        grown = [(v, by // size) for v, by in terms]
        rest = any(x % size for x in (n, *(by for _, by in terms)))
        if n >= 0 and not rest:
            return linear(n // size, grown), name
    return "", ""


def held(cls: str) -> str:
    """The class that an event says is full or free, or a class itself."""
    return cls.removeprefix("full.").removeprefix("free.")


def _slots(s: Step) -> set[tuple[str, int]]:
    return {(r.cls, r.index) for r in s.refs}


def _bare(s: Step) -> object:
    """A step without its events."""
    return s.op, s.unit, s.ins, s.outs, s.ints


def closed(text: str, w: What) -> str:
    return f"({text})" if w.width > 1 else text


def product(times: str, width: int, name: str, value: int) -> str:
    """width * times * name, in as many bits as its value needs."""
    times = f"({times})" if " " in times else times
    factors = [str(width)] * (width > 1) + [times] * (times not in ("", "1"))
    if factors and value >= 2**31 and factors[0].isdigit():
        factors[0] = f"INT64_C({factors[0]})"
    return " * ".join([*factors, name])
