"""rings.py -- chooses the prefetch distance, the units that stay gathered for reuse, and all ring
slots.

Uses that need gathered parameters are numbered. The all-gather for use n is issued before use n -
ahead and waits for the end of the use before that. So all units whose last use is n - ahead or
later are live together: `_peak` adds up their elements. The bound on live parameters comes first,
then the prefetch distance, then reuse.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from ..graph.graph import BodyPart, UnitKind
from ..plan.plan import Ref
from ..read.spec import Spec
from .flats import persists, stem
from .shard import Shards

Key = tuple[str, int]  # a flat and its instance
# A gradient: flat, instance, and its number among the flat's gradients in order of first write.
Gradient = tuple[str, int, int]


@dataclass(frozen=True)
class Gathered:
    """A flat instance that a use needs, and its slot in a ring."""

    flat: str
    instance: int
    ring: str  # its slot is in class ring.RING
    slot: int = 0
    reused: bool = False  # it was gathered for an earlier use
    retained: bool = False  # it stays gathered for a later one

    @property
    def key(self) -> Key:
        return self.flat, self.instance

    @property
    def ref(self) -> Ref:
        return Ref(f"ring.{self.ring}", self.slot)


@dataclass(frozen=True)
class Use:
    """A call of a function for one unit: a body of the unit's kind, a part of it, or a part on one
    slice of a weight."""

    kind: UnitKind
    index: int
    body: str  # fwd | bwd | train | eval
    x: int  # slot of its input in class x, below 0 if backward does not need it
    part: BodyPart
    slice: int  # of the part's slices
    gathered: tuple[Gathered, ...] = ()
    gradients: tuple[Gradient, ...] = ()

    @property
    def y(self) -> int:
        """Slot of its output in class x."""
        return self.x + 1

    @property
    def fn(self) -> str:
        number = self.part.number
        return f"{self.body}.{self.kind.name}" + (f".{number}" if number >= 0 else "")

    @property
    def first(self) -> bool:
        """True for the first call of the unit's body."""
        return self.part.number <= 0 == self.slice

    @property
    def last(self) -> bool:
        """True for the last call of the unit's body."""
        last = self.part.number in (-1, len(self.kind.parts(self.body)) - 1)
        return last and self.slice == self.part.slices - 1

    def transfer_unit(self, flat: str, instance: int) -> str:
        """Return the unit that steps name when they gather or reduce a flat: an instance of the
        flat if the unit has several flats."""
        several = stem(flat) != flat or flat in dict(self.kind.flats.values())
        return f"{flat}[{instance}]" if several else self.unit

    @property
    def unit(self) -> str:
        return f"{self.kind.name}[{self.index}]"


def through(uses: Sequence[Use]) -> list[Use]:
    """Keep the parameters of a body that is cut at exchanges gathered from its first function to
    its last one."""
    out: list[Use] = []
    body: tuple[str, str] = "", ""
    there: set[Key] = set()
    for u in uses:
        cut = u.body in u.kind.between
        if (u.unit, u.body) != body or not cut:
            body, there = (u.unit, u.body), set()
        reused = {g.key for g in u.gathered} & there
        there |= {g.key for g in u.gathered}
        own = [replace(g, reused=g.key in reused) for g in u.gathered]
        out.append(replace(u, gathered=tuple(own)))
    later: set[Key] = set()
    for n in reversed(range(len(out))):
        u = out[n]
        kept = [replace(g, retained=g.key in later) for g in u.gathered]
        out[n] = replace(u, gathered=tuple(kept))
        for g in u.gathered:
            later.discard(g.key)
        later |= {g.key for g in u.gathered if g.reused}
    return out


@dataclass(frozen=True)
class _Lifetime:
    """The numbers of the first and last use for which a flat instance is gathered."""

    gathered: Gathered
    first: int
    last: int


def retain(uses: Sequence[Use], retained: Collection[Key]) -> list[Use]:
    """Mark gathers of `retained` instances: one use gathers, the next one reuses."""
    there: set[Key] = set()

    def kept(g: Gathered) -> Gathered:
        if g.key not in retained:
            return g
        reused = g.key in there
        there.symmetric_difference_update({g.key})
        return replace(g, reused=reused, retained=not reused)

    return [replace(u, gathered=tuple(map(kept, u.gathered))) for u in uses]


def _lifetimes(uses: Sequence[Use]) -> list[_Lifetime]:
    """Return the lifetime of each gather. An instance that is retained for no further use lives to
    the end."""
    users = [u for u in uses if u.gathered]
    found = [(i, g) for i, u in enumerate(users) for g in u.gathered]
    out: list[_Lifetime] = []
    last: dict[Key, int] = {}  # of reuses, from here to the next gather
    for i, g in reversed(found):
        if g.reused:
            last.setdefault(g.key, i)
            continue
        end = last.pop(g.key, len(users))
        out.append(_Lifetime(g, i, end if g.retained else i))
    return out[::-1]


def _peak(spans: Sequence[_Lifetime], sizes: Mapping[str, int], ahead: int) -> int:
    """Return the most elements that are live when an all-gather starts. sizes: elements per
    flat."""
    ends = sorted((s.last, sizes[s.gathered.flat]) for s in spans)
    most = now = gone = 0
    for s in spans:
        now += sizes[s.gathered.flat]
        over = s.first - ahead
        while ends[gone][0] < over:
            now -= ends[gone][1]
            gone += 1
        most = max(most, now)
    return most


def slot_count(uses: Sequence[Use], ring: str, ahead: int) -> int:
    """Return the fewest slots of a ring with which every gather finds a free slot."""
    mine = [s for s in _lifetimes(uses) if s.gathered.ring == ring]
    return _peak(mine, {s.gathered.flat: 1 for s in mine}, ahead)


def assign_slots(uses: Sequence[Use], counts: Mapping[str, int]) -> list[Use]:
    """Return the uses with ring slots. Each gather takes the slot that is free for longest."""
    freed = {ring: [s - n for s in range(n)] for ring, n in counts.items()}
    taken = []  # slots in order of the gathers
    for s in _lifetimes(uses):
        at = freed[s.gathered.ring]
        taken.append(at.index(min(at)))
        at[taken[-1]] = s.last
    now: dict[Key, int] = {}
    turn = iter(taken)

    def placed(g: Gathered) -> Gathered:
        if not g.reused:
            now[g.key] = next(turn)
        return replace(g, slot=now.get(g.key, 0))

    return [replace(u, gathered=tuple(map(placed, u.gathered))) for u in uses]


def choose(
    spec: Spec, shards: Shards, uses: Sequence[Use]
) -> tuple[int, set[Key], int]:
    """Return the prefetch distance in uses, the instances to retain, and the most live elements.
    These exceed stage3_max_live_parameters only if the largest use alone does."""
    z, W = spec.zero, spec.cluster.ranks
    sizes = {f.name: f.shard * W for f in shards.flats}
    gathered = [sum(sizes[g.flat] for g in u.gathered) for u in uses if u.gathered]
    kept = sum(size for flat, size in sizes.items() if persists(flat))

    def live(d: int, uses: Sequence[Use]) -> int:
        return kept + _peak(_lifetimes(uses), sizes, d)

    most = max(z.stage3_max_live_parameters, live(0, uses))
    if not gathered:
        return 0, set(), live(0, uses)
    want = z.stage3_prefetch_bucket_size
    ahead = 1 if want is None else want and max(1, want // max(gathered))
    ahead = min(ahead, len(gathered) - 1) if z.overlap_comm else 0
    while live(ahead, uses) > most:
        ahead -= 1
    # A split unit leaves no room for reuse.
    cut = any(u.part.number >= 0 for u in uses)
    nearest = [] if cut else _nearest_reuses(uses, sizes, z.stage3_max_reuse_distance)
    few, many = 0, len(nearest) + 1  # `few` of the nearest fit, `many` do not
    while many - few > 1:
        half = (few + many) // 2
        fits = live(ahead, retain(uses, set(nearest[:half]))) <= most
        few, many = (half, many) if fits else (few, half)
    retained = set(nearest[:few])
    return ahead, retained, live(ahead, retain(uses, retained))


def _nearest_reuses(
    uses: Sequence[Use], sizes: Mapping[str, int], most: int
) -> list[Key]:
    """Return the instances used again after at most `most` elements of other uses, nearest
    first."""
    used: dict[Key, int] = {}  # elements up to the end of its last use
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
