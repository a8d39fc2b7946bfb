"""knobs.py -- settings that save memory: the effect of each, and every combination of them.

A setting changes no bit (of exact reductions). RULES do change bits: another sum of gradients may
be worth that.
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
    """A value of a key, as it is typed and as it is read.

    price: rank of its cost in a step among the values of the key; only the order of sums of prices
    matters. moves: name of the state that it offloads to the host, which a budget may choose; else
    "".
    """

    key: str
    typed: str
    value: object
    price: int = 0
    moves: str = ""

    @property
    def text(self) -> str:
        return f"{self.key}={self.typed}"

    def held(self, spec: Spec) -> bool:
        """Return whether a spec has this value."""
        return bool(attrgetter(self.key)(spec) == self.value)

    def change(self, spec: Spec) -> Spec:
        """Return the spec with this value, and with a path for a disk."""
        made = _put(spec, self.key, self.value)
        return _put(made, _path(self.key), _file(spec)) if self.value == DISK else made

    def far(self, spec: Spec) -> int:
        """Return its price minus that of the key's value in a spec."""
        now = (s.price for s in KNOBS if s.key == self.key and s.held(spec))
        return self.price - next(now, 0)


# Settings of different keys may be combined; agree() refuses those that exclude each other. Prices
# stand for gathers in each micro-batch, gathers of stage 3, new parameters for replicas, gathers
# from all ranks, an update on the host, parameters from there, a disk, a second forward, copies
# beside compute.
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
# Rules of summation, from the one that needs the most memory.
RULES = (
    Setting("train.sum", "tree", "tree"),
    Setting("train.sum", "{block: 16}", {"block": 16}),
    Setting("train.sum", "fold", "fold"),
)


def typed(value: object) -> str:
    """Return a value as a user would type it."""
    words = {None: "auto", False: "false", True: "true", (): "none", RECOMPUTE: "full"}
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {x}" for key, x in value.items()) + "}"
    if value is None or isinstance(value, (bool, tuple)):
        return words.get(value) or f"[{','.join(value)}]"  # type: ignore[arg-type]
    return str(value)


Record = TypeVar("Record", bound=Any)
Made = TypeVar("Made")  # a plan, or a record that contains one


def _put(record: Record, key: str, value: object) -> Record:
    """Return a record with another value of a dotted key."""
    first, _, rest = key.partition(".")
    new = _put(getattr(record, first), rest, value) if rest else value
    return replace(record, **{first: new})


def _file(s: Spec) -> str:
    """Return the folder of a rank's file, or "DIR" as a placeholder for the user."""
    return s.zero.offload_optimizer.nvme_path or s.zero.offload_param.nvme_path or "DIR"


def _path(key: str) -> str:
    return key.replace("device", "nvme_path")


@dataclass(frozen=True)
class Way:
    """A spec with settings applied. far: key -> the price that its setting adds."""

    spec: Spec
    picked: tuple[Setting, ...] = ()
    far: Mapping[str, int] = field(default_factory=dict)

    @property
    def settings(self) -> Names:
        """The settings as a user would type them."""
        texts = []
        for s in self.picked:
            texts.append(s.text)
            if s.value == DISK:
                texts.append(f"{_path(s.key)}={_file(self.spec)}")
        return tuple(texts)

    @property
    def text(self) -> str:
        """The settings as one phrase."""
        first, *rest = self.settings
        return f"{first} with {' and '.join(rest)}" if rest else first

    def beyond(self, other: Way) -> bool:
        """Return whether it goes at least as far as another way in each key of that."""
        return all(self.far.get(key, 0) / far >= 1 for key, far in other.far.items())


def moving(spec: Spec) -> list[Setting]:
    """Return the offloading knobs of keys that the spec does not give."""
    return [s for s in KNOBS if s.moves and s.key not in spec.places]


def helpful(spec: Spec) -> list[Setting]:
    """Return the knobs that may make a spec fit. A disk only helps if the host's memory is limited.
    The knobs that a budget chooses have been tried already."""
    tried = (
        [s for s in KNOBS if s.value == DISK]
        if spec.cluster.memory.host is None
        else []
    )
    if spec.train.memory_budget is not None:
        tried += [s for s in KNOBS if s.key == "train.recompute"] + moving(spec)
    return [s for s in KNOBS if s not in tried]


def ways(spec: Spec, knobs: Sequence[Setting]) -> list[Way]:
    """Return every legal way of setting some keys to cheaper values, or some to more expensive
    ones, the cheapest first."""
    less = [s for s in knobs if s.far(spec) < 0]
    more = [s for s in knobs if s.far(spec) > 0]
    found = [*_changed(spec, less), *_changed(spec, more)]
    legal = (way for way in found if agrees(way.spec))
    return sorted(legal, key=lambda way: sum(way.far.values()))


def _changed(spec: Spec, knobs: Sequence[Setting]) -> Iterator[Way]:
    """Yield a way for every combination of at least one setting, at most one per key."""
    keys = [(None, *settings) for _, settings in groupby(knobs, attrgetter("key"))]
    for taken in product(*keys):
        picked = tuple(s for s in taken if s)
        made = spec
        for s in picked:
            made = s.change(made)
        if picked:
            yield Way(made, picked, {s.key: s.far(spec) for s in picked})


def agrees(spec: Spec) -> bool:
    """Return whether no key of a spec contradicts another."""
    try:
        agree(spec)
    except SpecError:
        return False
    return True


def planned(
    found: Iterable[Way], plan: Callable[[Spec], Made], wrong: list[SpecError]
) -> Iterator[tuple[Way, Made]]:
    """Yield the ways that can be planned, each with its plan. The errors of the others (a bound of
    the spec) are appended to `wrong`."""
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
    """Return the first ways that fit, at most `most`. A way that goes beyond one already found is
    skipped."""
    good: list[Way] = []
    new = (way for way in found if not any(way.beyond(x) for x in good))
    for way, made in planned(new, plan, []):
        if fits(made):
            good.append(way)
        if len(good) == most:
            break
    return good
