"""knobs.py -- settings that a search tries: the values of each key, and the specs one change away.

A setting changes no bit (of exact reductions) unless its key is in BITS.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, product
from operator import attrgetter
from typing import Any, TypeVar

from ..passes import grid, slices
from ..plan.operand import Names
from ..read import context
from ..read.keytypes import RECOMPUTE
from ..read.spec import Spec, SpecError, agree


@dataclass(frozen=True)
class Setting:
    """A value of a key, as it is typed and as it is read."""

    key: str
    typed: str
    value: object

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


DISK = "nvme"


def typed(value: object) -> str:
    """Return a value as a user would type it."""
    if isinstance(value, dict):
        pairs = [f"{key}: {x}" for key, x in value.items()]
        return "{" + ", ".join(pairs) + "}"
    if isinstance(value, tuple):
        words = {(): "none", RECOMPUTE: "full"}
        return words.get(value) or f"[{','.join(value)}]"
    if value is None:
        return "auto"
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)


Record = TypeVar("Record", bound=Any)


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
    """A spec with settings applied."""

    spec: Spec
    picked: tuple[Setting, ...] = ()

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

    @property
    def words(self) -> str:
        """The settings as words of a command line."""
        return " ".join(self.settings) or "the spec as it is"


# ---- the values of the keys


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


def _buckets(spec: Spec, own: int, *sizes: int) -> list[int]:
    """Return bucket sizes with different effects, one of them the spec's own. All that hold every
    parameter, with padding, have the same effect."""
    graph = slices.graph(spec)
    most = 2 * sum(t.elems * k.count for k in graph.kinds for t in k.tensors)
    return [*{min(n, most): n for n in (*sizes, own)}.values()]


def _thresholds(spec: Spec) -> list[int]:
    """Return thresholds of persistence with different effects, one of them the spec's own."""
    have = [t.params for k in slices.graph(spec).kinds for t in k.tensors]
    some = 10**6, 10**5, 0, spec.zero.stage3_param_persistence_threshold
    return [*{sum(size <= n for size in have): n for n in some}.values()]


def _batches(spec: Spec) -> list[int]:
    """Return micro-batches that divide a rank's samples. A chunk of the head that the spec gives
    may not divide others, and with loss_mean micro_batch others are another loss."""
    own = spec.train.global_batch * spec.cluster.context_parallel // spec.cluster.ranks
    some = (2**n for n in range(own.bit_length()) if own % 2**n == 0)
    held = spec.train.head_chunk or spec.train.loss_mean == "micro_batch"
    return [] if held else [*some]


def _contexts(spec: Spec) -> list[int]:
    """Return the numbers of ranks that can share a sample, if samples are cut into blocks."""
    if spec.train.sequence_blocks == 1:
        return []
    most = math.gcd(context.most(spec), spec.cluster.ranks)
    return [n for n in range(1, most + 1) if most % n == 0]


def _words(spec: Spec) -> list[tuple[str, ...]]:
    """Return all sets of ops that blocks have."""
    have = [w for w in RECOMPUTE if w in slices.graph(spec).ops]
    sets = (
        tuple(w for n, w in enumerate(have) if chosen >> n & 1)
        for chosen in range(2 ** len(have))
    )
    return [RECOMPUTE if len(words) == len(have) else words for words in sets]


Values = Mapping[str, Callable[[Spec], Iterable[object]]]
SUMS = ("tree", {"block": 16}, "fold")
SHARED = ("zero.shard_size", "zero.mics_shard_size", "zero.hpz_partition_size")
VALUES: Values = {
    "zero.stage": lambda spec: range(4),
    "cluster.context_parallel": _contexts,
    "zero.shard_size": _shards,
    "zero.mics_shard_size": lambda spec: (0,),
    "zero.hpz_partition_size": lambda spec: (0,),
    "zero.states": lambda spec: ("all", "shard"),
    "zero.offload_optimizer.device": _devices,
    "zero.offload_param.device": _devices,
    "zero.stage3_prefetch_bucket_size": _ahead,
    "zero.allgather_bucket_size": lambda spec: _buckets(
        spec, spec.zero.allgather_bucket_size, 2 * 10**9, 5 * 10**8
    ),
    "zero.reduce_bucket_size": lambda spec: _buckets(
        spec, spec.zero.reduce_bucket_size, 2 * 10**9, 5 * 10**8, 10**8
    ),
    "zero.stage3_param_persistence_threshold": _thresholds,
    "train.accumulate": lambda spec: ("micro_batches", "layers"),
    "train.recompute": _words,
    "train.offload_activations": lambda spec: (False, True),
    "train.micro_batch": _batches,
    "train.sum": lambda spec: SUMS,
}
BITS = ("train.micro_batch", "train.sum")  # keys of the recipe
# Rules of summation, from the one that needs the most memory.
RULES = tuple(Setting("train.sum", typed(rule), rule) for rule in SUMS)

# Keys that decide where parameters and optimizer states are.
STATES = (
    "zero.stage",
    *SHARED,
    "zero.states",
    "zero.offload_optimizer.device",
    "zero.offload_param.device",
)
OFFLOADING = (
    "zero.offload_optimizer.device",
    "zero.offload_param.device",
    "train.offload_activations",
)
# Settings that are suggested if a plan does not fit. A disk only helps a host that is full.
SAVING: dict[str, Callable[[Spec], Iterable[object]]] = {
    "cluster.context_parallel": lambda spec: _contexts(spec)[-1:],
    **{key: VALUES[key] for key in ("zero.states", *OFFLOADING)},
    "train.accumulate": lambda spec: ("micro_batches",),
    "zero.stage": lambda spec: (3,),
    "zero.shard_size": lambda spec: (0,),
    "train.recompute": lambda spec: (RECOMPUTE,),
}
DISKS = dict.fromkeys(OFFLOADING[:2], lambda spec: ("none", "cpu", DISK))


def helpful(spec: Spec) -> Values:
    """Return the values of keys that may make a spec fit, without those that its budget has
    tried."""
    disks = {} if spec.cluster.memory.host is None else DISKS
    tried: set[str] = set()
    if spec.train.memory_budget is not None:
        tried = {
            "train.recompute",
            *(key for key in OFFLOADING if key not in spec.places),
        }
    return {key: some for key, some in (SAVING | disks).items() if key not in tried}


def settings(spec: Spec, values: Values, held: Iterable[str] = ()) -> list[Setting]:
    """Return the values of some keys, and the spec's own, without the keys in `held`."""
    found = []
    for key in (key for key in values if key not in held):
        some, own = [*values[key](spec)], attrgetter(key)(spec)
        some += [own] if some and own not in some else []
        found += [Setting(key, typed(value), value) for value in some]
    return found


def combinations(spec: Spec, some: Sequence[Setting]) -> Iterator[Spec]:
    """Yield every legal spec with a value for each key, the spec itself first."""
    yield spec
    for taken in product(*(list(x) for _, x in groupby(some, attrgetter("key")))):
        made = spec
        for s in taken:
            made = s.change(made)
        if made != spec and agrees(made):
            yield made


def agrees(spec: Spec) -> bool:
    """Return whether no key of a spec contradicts another."""
    at_once = spec.train.micro_batch * spec.cluster.ranks
    if spec.train.global_batch * spec.cluster.context_parallel % at_once:
        return False
    try:
        agree(spec)
    except SpecError:
        return False
    return True


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
        if agrees(made):
            yield made
            continue
        pairs = (t.change(made) for t in new if t.key != s.key)
        yield from filter(agrees, pairs)


def plain(spec: Spec, first: Spec) -> Spec:
    """Return a spec with the first one's values of the keys that have no effect on it."""

    def like(made: Spec, keys: Iterable[str]) -> Spec:
        for key in keys:
            made = _put(made, key, attrgetter(key)(first))
        return made

    if spec.zero.stage < 3:
        spec = like(spec, (key for key in VALUES if key.startswith("zero.stage3_")))
    made = like(spec, SHARED)
    return made if agrees(made) and _ranks(made) == _ranks(spec) else spec


def _ranks(spec: Spec) -> tuple[grid.RankGrid, bool]:
    """Return which ranks share parameters, and whether these also share states."""
    return grid.grid(spec), spec.zero.replicates
