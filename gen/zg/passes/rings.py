"""rings.py -- pass 2, its first part: which units are gathered ahead, which stay gathered from one
use to the next, and in which ring slots.

A use has a number among the uses that need a gathered unit. A gather is issued `ahead` uses before
its own and waits for the end of the use before that, so what it meets is what was gathered and not
yet over by then: `_peak`. The bound on gathered elements comes first, then the prefetch distance,
then what stays.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from ..graph.graph import Kind, Part
from ..plan.plan import Ref
from ..read.spec import Spec
from .flats import persists, stem
from .shard import Shards

Key = tuple[str, int]  # a flat and its instance
Leaf = tuple[
    str, int, int
]  # a flat, its instance, how many of the flat's came before


@dataclass(frozen=True)
class Gathered:
    """What a use needs gathered: an instance of a flat, in a slot of a ring."""

    flat: str
    instance: int
    ring: str  # class of its slot
    slot: int = 0
    held: bool = False  # it was gathered for an earlier use
    stays: bool = False  # it stays gathered for a later one

    @property
    def key(self) -> Key:
        return self.flat, self.instance

    @property
    def ref(self) -> Ref:
        return Ref(f"ring.{self.ring}", self.slot)


@dataclass(frozen=True)
class Use:
    """A function, all of a body or a part of it, run for an instance of a kind, or for a slice of
    its weight; what is gathered for it, and what it writes of leaves."""

    kind: Kind
    index: int
    body: str  # fwd | bwd | train | eval
    x: int  # slot of its input in class x; below 0: backward needs it not
    part: Part
    slice: int  # of the part's
    gathered: tuple[Gathered, ...] = ()
    leaves: tuple[Leaf, ...] = ()

    @property
    def y(self) -> int:  # slot of its output
        return self.x + 1

    @property
    def fn(self) -> str:
        number = self.part.number
        return f"{self.body}.{self.kind.name}" + (
            f".{number}" if number >= 0 else ""
        )

    @property
    def first(self) -> bool:  # of the body's parts
        return self.part.number <= 0 == self.slice

    @property
    def last(self) -> bool:
        last = self.part.number in (-1, len(self.kind.parts(self.body)) - 1)
        return last and self.slice == self.part.slices - 1

    def moved(self, flat: str, instance: int) -> str:
        """What a gather or a reduction is for: the unit, or what is moved of one that has several
        flats."""
        several = stem(flat) != flat or flat in dict(self.kind.flats.values())
        return f"{flat}[{instance}]" if several else self.unit

    @property
    def unit(self) -> str:
        return f"{self.kind.name}[{self.index}]"


@dataclass(frozen=True)
class _Span:
    """What stays gathered from one use to another: their numbers."""

    what: Gathered
    first: int
    last: int


def stay(uses: Sequence[Use], staying: Collection[Key]) -> list[Use]:
    """What is of `staying` is gathered for its first use and stays to its next."""
    there: set[Key] = set()

    def kept(g: Gathered) -> Gathered:
        if g.key not in staying:
            return g
        held = g.key in there
        there.symmetric_difference_update({g.key})
        return replace(g, held=held, stays=not held)

    return [replace(u, gathered=tuple(map(kept, u.gathered))) for u in uses]


def _spans(uses: Sequence[Use]) -> list[_Span]:
    """What stays without another use does so to the end."""
    users = [u for u in uses if u.gathered]
    found = [(i, g) for i, u in enumerate(users) for g in u.gathered]
    last = {g.key: i for i, g in found if g.held}
    return [
        _Span(g, i, last.get(g.key, len(users)) if g.stays else i)
        for i, g in found
        if not g.held
    ]


def _peak(spans: Sequence[_Span], sizes: Mapping[str, int], ahead: int) -> int:
    """The most that lives at once when something is gathered; sizes of flats."""
    ends = sorted((s.last, sizes[s.what.flat]) for s in spans)
    most = now = gone = 0
    for s in spans:
        now += sizes[s.what.flat]
        over = s.first - ahead
        while ends[gone][0] < over:
            now -= ends[gone][1]
            gone += 1
        most = max(most, now)
    return most


def count(uses: Sequence[Use], ring: str, ahead: int) -> int:
    """The fewest slots of a class with which every gather finds one free."""
    mine = [s for s in _spans(uses) if s.what.ring == ring]
    return _peak(mine, {s.what.flat: 1 for s in mine}, ahead)


def slots(uses: Sequence[Use], counts: Mapping[str, int]) -> list[Use]:
    """Chooses slots: the one that is free for longest, so that they are used in turn."""
    freed = {ring: [s - n for s in range(n)] for ring, n in counts.items()}
    taken = []  # of what is gathered, in order
    for s in _spans(uses):
        at = freed[s.what.ring]
        taken.append(at.index(min(at)))
        at[taken[-1]] = s.last
    now: dict[Key, int] = {}
    turn = iter(taken)

    def placed(g: Gathered) -> Gathered:
        if not g.held:
            now[g.key] = next(turn)
        return replace(g, slot=now.get(g.key, 0))

    return [replace(u, gathered=tuple(map(placed, u.gathered))) for u in uses]


def choose(
    spec: Spec, shards: Shards, uses: Sequence[Use]
) -> tuple[int, set[Key], int]:
    """How many uses to gather ahead, which units stay gathered, and the most elements gathered at
    once: at most the bound, or what the largest unit needs where that is more."""
    z, W = spec.zero, spec.cluster.ranks
    sizes = {f.name: f.shard * W for f in shards.flats}
    gathered = [
        sum(sizes[g.flat] for g in u.gathered) for u in uses if u.gathered
    ]
    kept = sum(size for flat, size in sizes.items() if persists(flat))

    def live(d: int, uses: Sequence[Use]) -> int:
        return kept + _peak(_spans(uses), sizes, d)

    most = max(z.stage3_max_live_parameters, live(0, uses))
    if not gathered:
        return 0, set(), live(0, uses)
    want = z.stage3_prefetch_bucket_size
    ahead = 1 if want is None else want and max(1, want // max(gathered))
    ahead = min(ahead, len(gathered) - 1) if z.overlap_comm else 0
    while live(ahead, uses) > most:
        ahead -= 1
    cut = any(
        u.part.number >= 0 for u in uses
    )  # then there is no room for what stays
    near = [] if cut else _near(uses, sizes, z.stage3_max_reuse_distance)
    few, many = 0, len(near) + 1  # how many of the nearest fit, and do not
    while many - few > 1:
        half = (few + many) // 2
        fits = live(ahead, stay(uses, set(near[:half]))) <= most
        few, many = (half, many) if fits else (few, half)
    staying = set(near[:few])
    return ahead, staying, live(ahead, stay(uses, staying))


def _near(
    uses: Sequence[Use], sizes: Mapping[str, int], most: int
) -> list[Key]:
    """Units that are used again after at most so many elements of others, the nearest first."""
    used: dict[Key, int] = {}  # elements until the end of the last use
    out: list[tuple[int, int, Key]] = []
    total = 0
    for u in uses:
        for g in u.gathered:
            distance = total - used.get(g.key, -1 - most)
            if distance <= most > 0:
                out.append((distance, len(out), g.key))
        total += sum(sizes[g.flat] for g in u.gathered)
        used |= {g.key: total for g in u.gathered}
    return [key for _, _, key in sorted(out)]
