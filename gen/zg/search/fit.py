"""fit.py -- searches a spec's settings for the shortest predicted step that fits the memory
(`--fit`).

The search begins with the spec and changes one key at a time, or two if one alone contradicts the
others. It goes on from every row of the Pareto front of time and memory until no change of a row
improves the front. Formulas drop candidates that need too much memory before they are planned. All
other memory is that of a plan, and all time is predicted by playing the plan (predict/play.py).

Keys of the recipe come last, so rows with the same bits are complete before others are tried. Keys
that the command line sets stay as they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter

from .. import build, progress
from ..facts import ops
from ..passes import grid, shard, slices
from ..plan.operand import Names
from ..plan.plan import Plan
from ..predict import clock, cost, play
from ..predict.device import Device
from ..predict.seconds import Clock
from ..read.keytypes import RECOMPUTE
from ..read.schema import Spec
from ..read.spec import SpecError
from . import budget, fits, knobs
from .knobs import DISK, Setting, Way

MOST = 300  # candidates with the same bits that are planned at most
LEVELS = 100  # of time between t and e * t, so steps of 1 %


# ---- the keys that are searched, and their values


def _shards(spec: Spec) -> list[int]:
    """Return the numbers of ranks that may share parameters: parts of a host, or some hosts."""
    ranks, local = spec.cluster.ranks, spec.cluster.local or spec.cluster.ranks
    some = [n for n in range(2, local + 1) if local % n == 0]
    while some and some[-1] >= local and ranks % (2 * some[-1]) == 0:
        some.append(2 * some[-1])
    return [0, *(n for n in some if n < ranks)]


def _devices(spec: Spec) -> tuple[str, ...]:
    z = spec.zero
    disk = z.offload_optimizer.nvme_path or z.offload_param.nvme_path
    return ("none", "cpu", DISK) if disk else ("none", "cpu")


def _ahead(spec: Spec) -> tuple[int | None, ...]:
    """Return prefetch buckets for no unit, one unit (auto) and at least two units ahead."""
    units = [sum(t.elems for t in k.tensors) for k in slices.graph(spec).kinds]
    return 0, None, 3 * max(units)


def _batches(spec: Spec) -> list[int]:
    """Return micro-batches that divide a rank's samples. A chunk of the head that the spec gives
    may not divide others."""
    own = spec.train.global_batch // spec.cluster.ranks
    some = (2**n for n in range(own.bit_length()) if own % 2**n == 0)
    return [] if spec.train.head_chunk else [*some]


def _words(spec: Spec) -> list[tuple[str, ...]]:
    """Return all sets of ops that blocks have."""
    have = [w for w in RECOMPUTE if w in slices.graph(spec).ops]
    sets = (
        tuple(w for n, w in enumerate(have) if chosen >> n & 1)
        for chosen in range(2 ** len(have))
    )
    return [RECOMPUTE if len(words) == len(have) else words for words in sets]


SHARED = ("zero.shard_size", "zero.mics_shard_size", "zero.hpz_partition_size")
VALUES: dict[str, Callable[[Spec], Iterable[object]]] = {
    "zero.stage": lambda spec: range(4),
    "zero.shard_size": _shards,
    "zero.mics_shard_size": lambda spec: (0,),
    "zero.hpz_partition_size": lambda spec: (0,),
    "zero.states": lambda spec: ("all", "shard"),
    "zero.offload_optimizer.device": _devices,
    "zero.offload_param.device": _devices,
    "zero.stage3_prefetch_bucket_size": _ahead,
    "zero.allgather_bucket_size": lambda spec: (5 * 10**8, 2 * 10**9),
    "zero.reduce_bucket_size": lambda spec: (10**8, 5 * 10**8, 2 * 10**9),
    "zero.stage3_param_persistence_threshold": lambda spec: (0, 10**5, 10**6),
    "train.accumulate": lambda spec: ("micro_batches", "layers"),
    "train.recompute": _words,
    "train.offload_activations": lambda spec: (False, True),
    "train.micro_batch": _batches,
    "train.sum": lambda spec: [rule.value for rule in knobs.RULES],
}
BITS = ("train.micro_batch", "train.sum")  # keys of the recipe


def settings(spec: Spec) -> list[Setting]:
    """Return the values of the keys that the command line does not set."""
    held = {key for key in VALUES if spec.places.get(key) == "--set"}
    held |= {*SHARED} if held & {*SHARED} else set()
    found = []
    for key, values in VALUES.items():
        some = [] if key in held else [*values(spec)]
        own = attrgetter(key)(spec)
        some += [own] if some and own not in some else []
        found += [Setting(key, knobs.typed(value), value) for value in some]
    return found


def steps(spec: Spec, some: Sequence[Setting]) -> Iterator[Spec]:
    """Yield the legal specs one change away: of one key, or of two if one alone is not legal. A set
    of ops changes by one op, or to none or all."""
    sets = [
        s.value for s in some if s.key == "train.recompute" and s.value != RECOMPUTE
    ]
    have = {w for words in sets for w in words}  # type: ignore[attr-defined]

    def near(s: Setting) -> bool:
        if s.key != "train.recompute" or s.value in ((), RECOMPUTE):
            return True
        return len({*s.value} ^ {*spec.train.recompute} & have) == 1  # type: ignore[misc]

    new = [s for s in some if not s.held(spec) and near(s)]
    for s in new:
        made = s.change(spec)
        if knobs.agrees(made):
            if not _idle(s, made):
                yield made
            continue
        pairs = (t.change(made) for t in new if t.key != s.key)
        yield from filter(knobs.agrees, pairs)


def _idle(s: Setting, made: Spec) -> bool:
    """Return whether a setting has no effect on a spec."""
    return (
        s.key.startswith("zero.stage3_")
        and made.zero.stage < 3
        or s.key in SHARED
        and grid.idle(made)
    )


# ---- rows


@dataclass(frozen=True)
class Row:
    """A candidate.

    way: its spec with the settings that differ from the first spec; needs: bytes by memory; same:
    whether its weights have the bits of the first spec; seconds: of a step, infinite if it does not
    fit; busy: seconds of a step in functions of units; wire: bytes that a rank receives in a step;
    again: FLOPs that are computed twice, as a share of the model's.
    """

    way: Way
    needs: dict[str, int]
    same: bool
    seconds: float = math.inf
    busy: float = 0.0
    wire: int = 0
    again: float = 0.0

    @property
    def device(self) -> int:
        return self.needs["device"]

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
    def level(self) -> tuple[object, ...]:
        """Sorts rows by level of time, of a level the one with the least memory first."""
        return _level(self.seconds), self.device, self.plain


def _level(seconds: float) -> int:
    return round(LEVELS * math.log(seconds))


def front(rows: Iterable[Row]) -> list[Row]:
    """Return the fastest row, then those that need less memory than every faster one."""
    fit = [row for row in rows if row.seconds < math.inf]
    out = [min(fit, key=attrgetter("speed"))] if fit else []
    for row in sorted(fit, key=attrgetter("level")):
        if row.device < out[-1].device:
            out.append(row)
    return out


def _busy(timed: Clock) -> float:
    """Return the seconds of a step that queue main spends in functions of units."""
    section = timed.p.section("micro_batch")
    run = (
        s for s in section.steps if s.op.partition(".")[0] in ("fwd", "bwd", "train")
    )
    return section.repeat * sum(map(timed.seconds, run))


def _cut(p: Plan) -> list[tuple[str, int]]:
    """Return the tensors that are gathered in slices, which change the bits on a GPU."""
    return [(t.name, t.flat_step) for t in p.tensors if t.flat_step > 1]


@dataclass
class Search:
    """The candidates of a spec so far.

    limits: bytes by memory, None without a limit; rows: by name, those that were planned; dropped:
    names of those that cannot be planned, do not fit or are beaten, by formulas; capped: the search
    ended before it was complete.
    """

    spec: Spec
    device: Device
    limits: dict[str, int | None]
    rows: dict[str, Row] = field(default_factory=dict)
    planned: int = 0
    dropped: set[str] = field(default_factory=set)
    capped: bool = False
    _kept: dict[object, int] = field(default_factory=dict)
    _busy: dict[object, list[tuple[Names, float]]] = field(default_factory=dict)
    _cuts: list[tuple[str, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._graph = slices.graph(self.spec)

    @property
    def first(self) -> Row:
        """The spec as it is."""
        return self.rows[_name(self.spec)]

    @property
    def best(self) -> list[Row]:
        """The front of the rows with the same bits."""
        return front(row for row in self.rows.values() if row.same)

    @property
    def other(self) -> list[Row]:
        """The rows with other bits that no row with the same bits matches."""
        return [row for row in front(self.rows.values()) if not row.same]

    def plans(self) -> Iterator[Plan]:
        """Yield the plans of all rows that are printed, which the search itself does not prove."""
        return (build.build(row.way.spec).plan for row in (*self.best, *self.other))

    # ---- a candidate

    def over(self, needs: dict[str, int]) -> float:
        """Return by how much a plan exceeds the memories, as a share of their limits."""
        shares = (
            needs[name] / limit - 1 for name, limit in self.limits.items() if limit
        )
        return sum(max(0.0, share) for share in shares)

    def least(self, spec: Spec) -> int:
        """Return bytes of device memory that a plan needs at least: parameters, optimizer states
        and activations."""
        z, W = spec.zero, spec.cluster.ranks
        every = [(t, k.count) for k in self._graph.kinds for t in k.tensors]
        params = sum(n * t.params for t, n in every)
        trained = sum(n * t.params for t, n in every if not t.group[2])
        part = (
            1 - z.offload_optimizer.ratio
            if z.offload_optimizer.device != "none"
            else 1.0
        )
        states = shard.update_states(spec, False, False)
        width = sum(
            4 if s == "master" else ops.BYTES[spec.train.optimizer.moments]
            for s in states
        )
        owners = min(W, z.shared if z.replicates else W) if z.stage else 1
        sharers = min(W, z.shared or W) if z.stage == 3 else 1
        here = z.offload_param.device == "none"
        return (
            here * params * ops.BYTES[spec.train.precision] // sharers
            + int(part * width * trained) // owners
            + self._activations(spec)
        )

    def _alike(self, spec: Spec) -> tuple[object, ...]:
        """Return the settings on which the functions of units depend, but for recomputation."""
        t, z = spec.train, spec.zero
        apart = z.stage == 3 and z.stage3_param_persistence_threshold
        return t.micro_batch, t.accumulate, z.stage == 3, apart

    def _activations(self, spec: Spec) -> int:
        t = spec.train
        key = self._alike(spec), t.recompute, t.offload_activations
        if key not in self._kept:
            self._kept[key] = budget.near(spec, budget.recomputed(spec, t.recompute))
        return self._kept[key]

    def soonest(self, spec: Spec) -> float:
        """Return seconds that a step takes at least: those of a plan's functions that recompute the
        same ops or fewer."""
        words = {*spec.train.recompute}
        known = self._busy.get(self._alike(spec), ())
        return max((busy for fewer, busy in known if {*fewer} <= words), default=0.0)

    def hopeless(self, spec: Spec, beside: Row) -> bool:
        """Return whether formulas show that a candidate does not fit or is beaten. beside: the row
        that it differs from."""
        least, old = self.least(spec), beside.way.spec
        if (
            replace(old, train=replace(old.train, recompute=spec.train.recompute))
            == spec
        ):
            # Recomputation changes saved values and temporary space alone.
            least = beside.device + self._activations(spec) - self._activations(old)
        limit = self.limits["device"]
        return (
            limit is not None
            and least > limit
            or self.beaten(self.soonest(spec), least)
        )

    def beaten(self, soonest: float, least: int) -> bool:
        """Return whether a candidate that takes at least this time and memory is neither the
        fastest nor in the front."""
        rows = [
            row for row in self.rows.values() if row.same and row.seconds < math.inf
        ]
        if not soonest or not rows or soonest < min(row.seconds for row in rows):
            return False
        return any(
            row.device <= least and _level(row.seconds) <= _level(soonest)
            for row in rows
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

    def row(self, spec: Spec) -> Row | None:
        """Plan a candidate, and predict its time if it fits. Return None if it is beaten."""
        p = build.build(spec).plan
        self.planned += 1
        if self.planned % 25 == 0:
            progress.doing(f"--fit: has planned {self.planned} settings; plans")
        way, needs = self.way(spec), fits.needs(p)
        if not self.rows:
            self._cuts = _cut(p)
        gpu = set(p.head.targets) != {"cpu"}
        same = not any(s.key in BITS for s in way.picked) and not (
            gpu and _cut(p) != self._cuts
        )
        if self.over(needs):
            return Row(way, needs, same)
        timed = Clock(p, self.device)
        busy = _busy(timed)
        # Which bytes come from a cache depends on the whole plan.
        if not self.device.cache:
            self._busy.setdefault(self._alike(spec), []).append(
                (spec.train.recompute, busy)
            )
        return Row(
            way,
            needs,
            same,
            seconds=play.step(timed).seconds,
            busy=busy,
            wire=cost.training_wire(p).bytes,
            again=cost.again(p) / cost.flops(p),
        )

    def add(self, spec: Spec, beside: Row | None = None) -> None:
        """Add a candidate, unless formulas show that it is not better than the rows. beside: a row
        that fits, and that it differs from."""
        name = _name(spec)
        if name in self.rows or name in self.dropped:
            return
        try:
            hopeless = beside is not None and self.hopeless(spec, beside)
            row = None if hopeless else self.row(spec)
        except SpecError:
            if spec is self.spec:
                raise
            row = None
        if row is None:
            self.dropped.add(name)
        else:
            self.rows[name] = row

    # ---- the search

    def climb(self, some: Sequence[Setting]) -> None:
        """Change rows of the front until that improves nothing, or MOST candidates are planned."""
        done: set[str] = set()
        while True:
            best = self.best
            ahead = [
                row for row in best or self._tight() if _name(row.way.spec) not in done
            ]
            if not ahead:
                return
            done.add(_name(ahead[0].way.spec))
            for made in steps(ahead[0].way.spec, some):
                if self.planned >= MOST:
                    self.capped = True
                    return
                self.add(made, ahead[0] if best else None)

    def _tight(self) -> list[Row]:
        """Return the candidates while none fits, the nearest to the limits first."""
        return sorted(
            self.rows.values(), key=lambda row: (self.over(row.needs), row.speed)
        )


def _name(spec: Spec) -> str:
    return repr((spec.zero, spec.train))


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
    found, some = Search(spec, device, limits), settings(spec)
    found.add(spec)
    found.climb([s for s in some if s.key not in BITS])
    for row in found.best or [found.first]:
        for s in some:
            if s.key in BITS:
                found.add(s.change(row.way.spec), row if found.best else None)
    if not found.best:
        raise _nothing(found)
    return found


def _nothing(found: Search) -> SpecError:
    """Return the error of a search in which nothing with the same bits fits."""
    spec = found.spec
    rows = [row for row in found.rows.values() if row.same]
    tight = min(rows, key=lambda row: (found.over(row.needs), row.speed))
    name, limit = next(
        (name, limit)
        for name, limit in found.limits.items()
        if limit is not None and tight.needs[name] > limit
    )
    other = [" ".join(row.way.settings) for row in found.other[:1]]
    hint = f"; or, with other bits, {other[0]}" if other else ""
    given = getattr(spec.cluster.memory, name) is not None
    raise spec.wrong(
        f"cluster.memory.{name}",
        f"--fit finds no settings that fit in {fits.size(limit)}"
        + ("" if given else f", the memory of {found.device.about}")
        + f"; nearest is {' '.join(tight.way.settings) or 'the spec as it is'}",
        f"{fits.least(tight.needs[name])}{hint}",
        fits.unit(limit),
    )


# ---- the table


def _short(n: int) -> str:
    """Return bytes for a column."""
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if n >= 2**power:
            return f"{n / 2**power:,.2f} {unit}"
    return f"{n} B"


def _line(mark: str, row: Row, best: Row) -> str:
    took = longer = wire = again = ""
    if row.seconds < math.inf:
        took, longer = f"{row.seconds:.4g} s", f"{row.seconds / best.seconds - 1:+.1%}"
        wire, again = _short(row.wire), f"{row.again:.1%}"
    device, host = _short(row.device), _short(row.needs["host"])
    words = " ".join(row.way.settings) or "the spec as it is"
    return (
        f"{mark:<2}{took or '-':>10}{longer:>9}{device:>14}{host:>14}{wire:>14}{again:>8}"
        f"  {words}"
    )


def table(found: Search) -> str:
    """Format the front as a table for people."""
    best, *rest = found.best
    limits = [
        f", {name} memory at most {fits.size(limit)}"
        for name, limit in found.limits.items()
        if limit is not None
    ]
    first = [] if found.first in found.best else [found.first]
    lines = [
        f"--fit: predicted, not measured, for {found.device.about}{''.join(limits)}",
        f"{found.planned} candidates were planned, and {len(found.dropped)} dropped"
        + ("; the search stopped there and may have missed better ones" * found.capped),
        "Each row needs less device memory than the one above it, and gives up what the columns "
        "say" + "; the last one is the spec as it is" * bool(first),
        f"{'':<2}{'a step':>10}{'longer':>9}{'device':>14}{'host':>14}{'a rank gets':>14}"
        f"{'twice':>8}  settings",
        _line("*", best, best),
        *(_line("", row, best) for row in [*rest, *first]),
    ]
    if found.other:
        lines += ["with other bits", *(_line("", row, best) for row in found.other)]
    return "\n".join(lines) + "\n"
