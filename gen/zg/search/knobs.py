"""knobs.py -- the settings that a memory may ask for: what each changes, and every way to set them.

A setting changes no bit (of exact reductions). RULES do, which another sum of gradients may be
worth.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, product
from operator import attrgetter
from typing import Any, TypeVar

from .. import progress
from ..plan.operand import Names
from ..plan.plan import Plan
from ..read.keytypes import RECOMPUTE
from ..read.spec import Spec, SpecError, agree


@dataclass(frozen=True)
class Setting:
    """A key's value, as it is typed and as it is read. price: what it adds to a step beside the
    key's other values; of a sum of prices only the order counts. moves: what it puts on the host,
    which a budget may choose."""

    key: str
    typed: str
    value: object
    price: int = 0
    moves: str = ""

    @property
    def text(self) -> str:
        return f"{self.key}={self.typed}"

    def held(self, spec: Spec) -> bool:
        return bool(attrgetter(self.key)(spec) == self.value)

    def change(self, spec: Spec) -> Spec:
        made = _put(spec, self.key, self.value)
        return (
            _put(made, _path(self.key), _file(spec))
            if self.value == DISK
            else made
        )

    def far(self, spec: Spec) -> int:
        """What it adds to the price of the key's value in a spec."""
        now = (s.price for s in KNOBS if s.key == self.key and s.held(spec))
        return self.price - next(now, 0)


# Settings of unlike keys may be taken together; agree() knows which exclude each other. What prices
# stand for: gathers for each micro-batch, those of stage 3, new parameters for replicas, gathers
# from all ranks, an update on the host, parameters from there, a disk, a second forward, copies
# beside the work.
KNOBS = (
    Setting("train.accumulate", "micro_batches", "micro_batches", 16),
    Setting("zero.stage", "3", 3, 10),
    Setting("zero.states", "shard", "shard"),
    Setting("zero.states", "all", "all", 4),
    Setting("zero.shard_size", "0", 0, 12),
    Setting("zero.offload_optimizer.device", "none", "none"),
    Setting("zero.offload_optimizer.device", "cpu", "cpu", 40, "optimizer"),
    Setting("zero.offload_optimizer.device", "nvme", "nvme", 100),
    Setting("zero.offload_param.device", "none", "none"),
    Setting("zero.offload_param.device", "cpu", "cpu", 30, "parameters"),
    Setting("zero.offload_param.device", "nvme", "nvme", 60),
    Setting("train.recompute", "full", RECOMPUTE, 14),
    Setting("train.offload_activations", "false", False),
    Setting("train.offload_activations", "true", True, 15, "activations"),
)
DISK = "nvme"
# Rules of summation, from what takes most.
RULES = (
    Setting("train.sum", "tree", "tree"),
    Setting("train.sum", "{block: 16}", {"block": 16}),
    Setting("train.sum", "fold", "fold"),
)


Record = TypeVar("Record", bound=Any)
Made = TypeVar("Made")  # a plan, or more


def _put(record: Record, key: str, value: object) -> Record:
    """A record with another value of a dotted key."""
    first, _, rest = key.partition(".")
    new = _put(getattr(record, first), rest, value) if rest else value
    return replace(record, **{first: new})


def _file(s: Spec) -> str:
    """The directory of a rank's file; DIR: one for the user to say."""
    return (
        s.zero.offload_optimizer.nvme_path
        or s.zero.offload_param.nvme_path
        or "DIR"
    )


def _path(key: str) -> str:
    return key.replace("device", "nvme_path")


@dataclass(frozen=True)
class Way:
    """A spec that settings have changed; far: what each of their keys adds to its price."""

    spec: Spec
    picked: tuple[Setting, ...] = ()
    far: Mapping[str, int] = field(default_factory=dict)

    @property
    def settings(self) -> Names:
        """As they are typed."""
        texts = []
        for s in self.picked:
            texts.append(s.text)
            if s.value == DISK:
                texts.append(f"{_path(s.key)}={_file(self.spec)}")
        return tuple(texts)

    @property
    def text(self) -> str:
        """One way among others: its settings belong together."""
        first, *rest = self.settings
        return f"{first} with {' and '.join(rest)}" if rest else first

    def beyond(self, other: Way) -> bool:
        """It goes at least as far as another, key by key."""
        return all(
            self.far.get(key, 0) / far >= 1 for key, far in other.far.items()
        )


def moving(spec: Spec) -> list[Setting]:
    """The knobs that put something on the host, of keys that the spec does not have."""
    return [s for s in KNOBS if s.moves and s.key not in spec.places]


def helpful(spec: Spec) -> list[Setting]:
    """The knobs that may make a spec fit: a disk takes from the host what has room there, if the
    host has no end. What a budget chooses has been tried."""
    tried = (
        [s for s in KNOBS if s.value == DISK]
        if spec.cluster.memory.host is None
        else []
    )
    if spec.train.memory_budget is not None:
        tried += [s for s in KNOBS if s.key == "train.recompute"] + moving(
            spec
        )
    return [s for s in KNOBS if s not in tried]


def ways(spec: Spec, knobs: Sequence[Setting]) -> list[Way]:
    """Every way of setting some keys of a spec to what costs less, or some to what costs more; from
    what costs least."""
    less = [s for s in knobs if s.far(spec) < 0]
    more = [s for s in knobs if s.far(spec) > 0]
    found = [*_changed(spec, less), *_changed(spec, more)]
    legal = (way for way in found if _agrees(way.spec))
    return sorted(legal, key=lambda way: sum(way.far.values()))


def _changed(spec: Spec, knobs: Sequence[Setting]) -> Iterator[Way]:
    """In every way of taking one of some keys' settings, or more."""
    keys = [
        (None, *settings) for _, settings in groupby(knobs, attrgetter("key"))
    ]
    for taken in product(*keys):
        picked = tuple(s for s in taken if s)
        made = spec
        for s in picked:
            made = s.change(made)
        if picked:
            yield Way(made, picked, {s.key: s.far(spec) for s in picked})


def _agrees(spec: Spec) -> bool:
    try:
        agree(spec)
    except SpecError:
        return False
    return True


def planned(
    found: Iterable[Way], plan: Callable[[Spec], Made], wrong: list[SpecError]
) -> Iterator[tuple[Way, Made]]:
    """The ways of which a plan can be made; why others cannot (a bound of the spec) is added to
    `wrong`."""
    for way in found:
        progress.doing(f"plans {way.text}" if way.settings else "plans")
        try:
            made = plan(way.spec)
        except SpecError as e:
            wrong.append(e)
            continue
        yield way, made


def first(
    found: Iterable[Way],
    fits: Callable[[Plan], bool],
    plan: Callable[[Spec], Plan],
    most: int,
) -> list[Way]:
    """The first ways that fit, at most so many; one that goes beyond another of them is none."""
    good: list[Way] = []
    new = (way for way in found if not any(way.beyond(x) for x in good))
    for way, made in planned(new, plan, []):
        if fits(made):
            good.append(way)
        if len(good) == most:
            break
    return good
