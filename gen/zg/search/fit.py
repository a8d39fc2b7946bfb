"""fit.py -- searches a spec's settings for the shortest predicted step that fits the memory
(`--fit`).

The search begins with the spec and changes one key at a time, or two if one alone contradicts the
others. It goes on from every row of the Pareto front of time and memory until no change of a row
improves the front. Rows that do not fit are part of it, because a change of theirs may fit.
Formulas drop candidates that are beaten before they are planned or played. All other memory is that
of a plan, and all time is predicted by playing the plan (predict/play.py).

Keys of the recipe come last, so rows with the same bits are complete before others are tried. Keys
that the command line sets stay as they are.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

from .. import build, progress
from ..passes.place import PAGE
from ..plan.plan import Plan
from ..predict import clock, cost, play
from ..predict.device import Device
from ..predict.seconds import Clock
from ..read.schema import Spec
from ..read.spec import SpecError
from . import fits, knobs, workers
from .formulas import Formulas
from .knobs import BITS, SHARED, VALUES, Setting, Way

MOST = 300  # candidates with the same bits after which no further row is changed
LEVELS = 100  # of time between t and e * t, so steps of 1 %
EQUAL = 0.001  # share of the shortest time that decides less than a change


# ---- rows


@dataclass(frozen=True)
class Row:
    """A candidate.

    way: its spec with the settings that differ from the first spec; needs: bytes by memory; same:
    whether its weights have the bits of the first spec; seconds: of a step, infinite if it is not
    played; wire: bytes that a rank receives in a step; again: FLOPs that are computed twice, as a
    share of the model's; guessed: its time follows from that of another row by formulas.
    """

    way: Way
    needs: dict[str, int]
    same: bool
    seconds: float = math.inf
    wire: int = 0
    again: float = 0.0
    guessed: bool = False

    @property
    def device(self) -> int:
        return self.needs["device"]

    @property
    def played(self) -> bool:
        return self.seconds < math.inf

    @property
    def plain(self) -> tuple[object, ...]:
        """Sorts rows that are equal in all else: the one with the fewest changes first."""
        return (
            self.needs["host"],
            not self.same,
            len(self.way.settings),
            self.way.settings,
        )

    @property
    def speed(self) -> tuple[object, ...]:
        """Sorts the fastest row first."""
        return self.seconds, self.device, self.plain

    @property
    def simple(self) -> tuple[object, ...]:
        """Sorts rows that are equally fast: the one with the fewest changes first."""
        return not self.same, len(self.way.settings), self.device, self.speed

    @property
    def level(self) -> tuple[object, ...]:
        """Sorts rows by level of time, of a level the one with the least memory first."""
        return _level(self.seconds), self.device, self.plain


def _level(seconds: float) -> int:
    return round(LEVELS * math.log(seconds))


def front(rows: Iterable[Row], equal: float = 0.0) -> list[Row]:
    """Return the fastest row, then those that need less memory than every faster one. equal: share
    of the shortest time by which the first one may be slower, if it has fewer changes."""
    played = sorted((row for row in rows if row.played), key=attrgetter("speed"))
    if not played:
        return []
    most = (1 + equal) * played[0].seconds
    fast = [row for row in played if row.seconds <= most]
    out = [min(fast, key=attrgetter("simple")) if equal else played[0]]
    for row in sorted(played, key=attrgetter("level")):
        if row.device < out[-1].device:
            out.append(row)
    return out


def _cut(p: Plan) -> list[tuple[str, int]]:
    """Return the tensors that are gathered in slices, which change the bits on a GPU."""
    return [(t.name, t.flat_step) for t in p.tensors if t.flat_step > 1]


@dataclass
class Search:
    """The candidates of a spec so far.

    limits: bytes by memory, None without a limit; equal: of the front; rows: by name, those that
    were planned; dropped: names of those that cannot be planned, do not fit or are beaten, by
    formulas; capped: the search ended before it was complete.
    """

    spec: Spec
    device: Device
    limits: dict[str, int | None]
    equal: float = 0.0
    rows: dict[str, Row] = field(default_factory=dict)
    planned: int = 0
    dropped: set[str] = field(default_factory=set)
    capped: bool = False

    def __post_init__(self) -> None:
        p = build.build(self.spec).plan
        self.formulas, self._cuts = Formulas(p, self.device), _cut(p)

    def of(self, spec: Spec) -> Row | None:
        """Return the row of a candidate, None if it was dropped."""
        return self.rows.get(_name(spec))

    @property
    def first(self) -> Row:
        """The spec as it is."""
        return self.rows[_name(self.spec)]

    @property
    def fitting(self) -> list[Row]:
        return [
            row for row in self.rows.values() if row.played and not self.over(row.needs)
        ]

    @property
    def best(self) -> list[Row]:
        """The front of the rows with the same bits."""
        return front((row for row in self.fitting if row.same), self.equal)

    @property
    def other(self) -> list[Row]:
        """The rows with other bits that no row with the same bits matches."""
        return [row for row in front(self.fitting, self.equal) if not row.same]

    def prove(self, check: Callable[[Plan], None]) -> None:
        """Check the plans of all rows that are printed, which the search itself does not prove."""
        rows = (*self.best, *self.other)
        workers.spread(lambda row: check(build.build(row.way.spec).plan), rows)

    # ---- a candidate

    def over(self, needs: dict[str, int]) -> float:
        """Return by how much a plan exceeds the memories, as a share of their limits."""
        shares = (
            needs.get(name, 0) / limit - 1
            for name, limit in self.limits.items()
            if limit
        )
        return sum(max(0.0, share) for share in shares)

    def hopeless(self, spec: Spec, beside: Row) -> bool:
        """Return whether formulas show that a candidate is beaten, or does not fit and leads to no
        other. beside: the row that it differs from."""
        f, old = self.formulas, beside.way.spec
        least = f.least(spec)
        if (
            replace(old, train=replace(old.train, recompute=spec.train.recompute))
            == spec
        ):
            # Recomputation changes saved values and temporary space alone.
            least = beside.device + f.activations(spec) - f.activations(old)
        apart = self.over({"device": least}) and not self.kept(spec)
        return apart or self.beaten(f.soonest(spec), least)

    def beaten(self, soonest: float, least: int) -> bool:
        """Return whether a candidate that takes at least this time and memory is neither the
        fastest that fits nor in the front. Rows that fit but for the device count, since one that
        needs less than the candidate fits where it does."""
        if not soonest:
            return False
        shortest = min((row.seconds for row in self.best), default=math.inf)
        if soonest <= (1 + self.equal) * shortest and not self.over({"device": least}):
            return False
        return any(
            row.device <= least and _level(row.seconds) <= _level(soonest)
            for row in self.rows.values()
            if row.same and row.played and not self.over(row.needs | {"device": 0})
        )

    def way(self, spec: Spec) -> Way:
        """Return a spec with the settings that differ from the first spec."""
        now = ((key, attrgetter(key)(spec)) for key in VALUES)
        new = (
            Setting(key, knobs.typed(value), value)
            for key, value in now
            if value != attrgetter(key)(self.spec)
        )
        return Way(spec, tuple(new))

    def row(self, spec: Spec) -> Row:
        """Plan a candidate, and predict its time if it fits."""
        return Row(self.way(spec), **self.numbers(spec))

    def kept(self, spec: Spec) -> bool:
        """Return whether a candidate has the recipe of the first spec."""
        return not any(s.key in BITS for s in self.way(spec).picked)

    def numbers(self, spec: Spec, climbs: bool = False) -> dict[str, Any]:
        """Return the fields of a candidate's row but `way`. climbs: predict the time unless it is
        beaten, even if it does not fit, for the search may go on from it."""
        p = self.formulas.p if spec is self.spec else build.build(spec).plan
        needs = fits.needs(p)
        gpu = set(p.head.targets) != {"cpu"}
        same = self.kept(spec) and not (gpu and _cut(p) != self._cuts)
        found = {"needs": needs, "same": same}
        if self.over(needs) and not (climbs and same):
            return found
        if climbs and self.beaten(self.formulas.soonest(spec), needs["device"]):
            return found
        return found | {
            "seconds": play.step(Clock(p, self.device)).seconds,
            "wire": cost.training_wire(p).bytes,
            "again": self.formulas.again(spec),
        }

    def add(self, specs: Iterable[Spec], beside: Row | None = None) -> None:
        """Plan candidates. Those that cannot be planned, and those of which formulas show that they
        are not better than the rows, are dropped. beside: a row that they differ from. None of
        them is compared with another, so they may be planned at the same time."""
        known = {*self.rows} | self.dropped
        new = {name: x for x in specs if (name := _name(x)) not in known}
        some = {
            name: spec
            for name, spec in new.items()
            if beside is None or not self._is_hopeless(spec, beside)
        }

        def numbers(spec: Spec) -> dict[str, Any] | None:
            try:
                return self.numbers(spec, climbs=beside is not None)
            except SpecError:
                return None

        made = workers.spread(numbers, [*some.values()])
        found = {
            name: Row(self.way(spec), **row)
            for (name, spec), row in zip(some.items(), made, strict=True)
            if row
        }
        self.planned += len(found)
        self.rows |= found
        self.dropped |= {*new} - {*found}

    def _is_hopeless(self, spec: Spec, beside: Row) -> bool:
        try:
            return self.hopeless(spec, beside)
        except SpecError:
            return True

    def vary(self, row: Row, words: Setting) -> None:
        """Add a candidate that differs from a row in its ops to recompute, without a plan. These
        change saved values, temporary space and functions of units alone: its memory is exact, and
        its time that of the row plus the difference of their work."""
        f, old, spec = self.formulas, row.way.spec, words.change(row.way.spec)
        more = {
            "device": f.activations(spec) - f.activations(old),
            "host": f.far(spec, PAGE) - f.far(old, PAGE),
        }
        needs = {name: n + more.get(name, 0) for name, n in row.needs.items()}
        self.rows[_name(spec)] = replace(
            row,
            way=self.way(spec),
            needs=needs,
            seconds=math.inf
            if self.over(needs)
            else row.seconds + f.work(spec) - f.work(old),
            again=f.again(spec),
            guessed=True,
        )

    def settle(self) -> None:
        """Plan and play the fastest row until its time is not a guess."""
        while self.best and self.best[0].guessed:
            spec = self.best[0].way.spec
            self.rows[_name(spec)] = self.row(spec)

    # ---- the search

    def climb(self, some: Sequence[Setting]) -> None:
        """Change rows until that improves no front, or at least MOST candidates are planned."""
        done: set[str] = set()
        while ahead := [
            row for row in self._ahead() if _name(row.way.spec) not in done
        ]:
            row = ahead[0]
            done.add(_name(row.way.spec))
            if self.planned >= MOST:
                self.capped = True
                return
            progress.doing(f"--fit: has planned {self.planned} settings; plans")
            steps = knobs.steps(row.way.spec, some)
            self.add((knobs.plain(x, self.spec) for x in steps), row)

    def _ahead(self) -> list[Row]:
        """Return the rows to change, in this order: the best, or the nearest to the limits if none
        fits, then the others of the fronts with and without limits, from the device's limit on."""
        rows = [row for row in self.rows.values() if row.same]
        best, limit = self.best, self.limits["device"]
        nearest = min(rows, key=lambda row: (self.over(row.needs), row.speed))
        others = [*best, *front(rows)]
        if limit is not None:
            others.sort(key=lambda row: abs(row.device - limit))
        return [*(best[:1] or [nearest]), *others]


def _name(spec: Spec) -> str:
    return repr((spec.zero, spec.train, spec.cluster.context_parallel))


def settings(spec: Spec) -> list[Setting]:
    """Return the values of the keys that the command line does not set."""
    held = {key for key in VALUES if spec.places.get(key) == "--set"}
    held |= {*SHARED} if held & {*SHARED} else set()
    return knobs.settings(spec, VALUES, held)


def find(spec: Spec) -> Search:
    """Return the finished search of a spec. Raises SpecError if nothing with the same bits fits."""
    if spec.train.memory_budget is not None:
        raise spec.wrong(
            "train.memory_budget",
            "makes choices of its own, beside those of --fit",
            "cluster.memory.device, or without --fit",
        )
    if spec.train.reduction == "fast":
        raise spec.wrong(
            "train.reduction",
            "with fast reductions the bits depend on the settings that --fit changes",
            "exact, or without --fit",
        )
    device, memory = clock.device_of(spec), spec.cluster.memory
    there = None if device.target == "cpu" else device.memory or None
    limits = {
        "device": memory.device or there,
        "host": memory.host,
        "file": memory.file,
    }
    found, some = Search(spec, device, limits, EQUAL), settings(spec)
    _require(found, some)
    found.add([spec])
    found.climb([s for s in some if s.key not in BITS])
    for row in found.best or [found.first]:
        other = (s.change(row.way.spec) for s in some if s.key in BITS)
        found.add(other, row if found.best else None)
    if not found.best:
        raise _nothing(found)
    return found


def _require(found: Search, some: Sequence[Setting]) -> None:
    """Raise SpecError if formulas show that no settings fit the device."""

    def states(spec: Spec) -> int:
        with contextlib.suppress(SpecError):
            return found.formulas.states(spec)
        return sys.maxsize

    places = [s for s in some if s.key in knobs.STATES]
    least = max(fits.PAGE, min(map(states, knobs.combinations(found.spec, places))))
    if found.over({"device": least}):
        raise _refused(found, "device", "", f"more than {fits.size(least)}", least)


def _nothing(found: Search) -> SpecError:
    """Return the error of a search in which nothing with the same bits fits."""
    rows = [row for row in found.rows.values() if row.same]
    tight = min(rows, key=lambda row: (found.over(row.needs), row.speed))
    name, limit = next(
        (name, limit)
        for name, limit in found.limits.items()
        if limit is not None and tight.needs[name] > limit
    )
    other = [" ".join(row.way.settings) for row in found.other[:1]]
    least = f"{fits.least(tight.needs[name])}, the least found"
    early = " before the search stopped" * found.capped
    hint = f"; or, with other bits, {other[0]}" if other else ""
    near = f"; nearest is {tight.way.words}"
    return _refused(found, name, near, least + early + hint, tight.needs[name])


def _refused(
    found: Search, memory: str, nearest: str, allowed: str, least: int
) -> SpecError:
    """Return the error of a memory that is too small. least: bytes that are needed."""
    limit, memories = found.limits[memory], found.spec.cluster.memory
    assert limit is not None
    given = getattr(memories, memory) is not None
    return found.spec.wrong(
        f"cluster.memory.{memory}",
        f"--fit finds no settings that fit in {fits.size(limit)}"
        + ("" if given else f", the memory of {found.device.about}")
        + nearest,
        allowed,
        fits.unit(limit, least),
    )


# ---- the table


def _short(n: int) -> str:
    """Return bytes for a column."""
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if abs(n) >= 2**power:
            return f"{n / 2**power:,.2f} {unit}"
    return f"{n} B"


# Columns of the table, and their widths.
HEADS = {
    "a step": 10,
    "longer": 9,
    "device": 14,
    "saves": 14,
    "host": 14,
    "a rank gets": 14,
    "twice": 8,
}
LAST = "settings"


def cells(row: Row, best: Row) -> list[str]:
    """Return a row of the table without its settings."""
    took, longer, wire, again = "-", "", "", ""
    if row.played:
        took = f"{row.seconds:.4g} s"
        longer = f"{row.seconds / best.seconds - 1:+z.1%}"
        wire = _short(row.wire)
        again = f"{row.again:.1%}"
    saves = best.device - row.device
    memory = [_short(n) for n in (row.device, saves, row.needs["host"])]
    return [took, longer, *memory, wire, again]


def listed(found: Search) -> list[Row]:
    """Return the front, and the spec as it is behind it."""
    return found.best + [row for row in [found.first] if row not in found.best]


def about(found: Search, said: str = "--fit") -> list[str]:
    """Return the lines above the table. said: begin of the first one."""
    limits = [
        f", {name} memory at most {fits.size(limit)}"
        for name, limit in found.limits.items()
        if limit is not None
    ]
    first = found.first not in found.best
    return [
        f"{said}: predicted, not measured, for {found.device.about}{''.join(limits)}",
        f"{found.planned} candidates were planned, and {len(found.dropped)} dropped"
        + ("; the search stopped there and may have missed better ones" * found.capped),
        "Each row needs less device memory than the one above it; the other columns show its "
        "price" + "; the last row is the spec as it is" * first,
    ]


def table(found: Search, said: str = "--fit") -> str:
    """Format the front as a table for people. said: begin of its first line."""
    best = found.best[0]

    def line(texts: Iterable[str], mark: str, last: str) -> str:
        some = zip(texts, HEADS.values(), strict=True)
        return f"{mark:<2}{''.join(f'{text:>{wide}}' for text, wide in some)}  {last}"

    def lines(rows: Iterable[Row]) -> list[str]:
        return [line(cells(r, best), "*" * (r is best), r.way.words) for r in rows]

    out = [*about(found, said), line(HEADS, "", LAST), *lines(listed(found))]
    if found.other:
        out += ["with other bits", *lines(found.other)]
    return "\n".join(out) + "\n"
