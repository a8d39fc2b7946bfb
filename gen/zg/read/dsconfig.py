"""dsconfig.py -- applies a DeepSpeed ds_config.json to a spec, by the table of dskeys.py.

null leaves a key to the spec, and so does "auto" unless the row has a rule for it. Mistakes are
collected and reported together, in the order of the file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..facts.kinds import OPTIMIZERS, SCHEDULES
from . import dswords
from .dskeys import SCHEDULER_TYPES, SWITCHES, TABLE
from .dsrows import (
    Honour,
    Idle,
    Key,
    Moved,
    Number,
    Qualifier,
    Refuse,
    Same,
    numeric,
)
from .keytypes import RANKS
from .node import Names, Node, SpecError, printable, several, shown


class Config(NamedTuple):
    """Result of a config. changes: keys of the spec with their new values, None for a key that is
    removed."""

    changes: tuple[tuple[str, Node | None], ...]
    notes: Names


@dataclass
class Given:
    """A key of the file. key: its name in the file; name: its name in the table; value: may be None
    or "auto"."""

    key: str
    name: str
    node: Node
    value: Any
    row: Key

    @property
    def at(self) -> str:
        return f"{self.node.where}: {printable(self.key)}"


_BATCH = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
)
_SCHEDULE = "train.schedule"
_PLACE = re.compile(r".*?:(\d+): ")
# Optimizer keys of the spec that only some types take.
_OF_TYPE = tuple(dict.fromkeys(key for row in OPTIMIZERS.values() for key in row))


# ---- keys


def _row(key: str) -> Key | None:
    if key.startswith("_"):
        return TABLE["_*"]
    section = key.rpartition(".")[0]
    while section and f"{section}.*" not in TABLE:
        section = section.rpartition(".")[0]
    return TABLE.get(key) or TABLE.get(f"{section}.*")


@dataclass
class _Reader:
    """Reads one config. root: the spec with its --set values."""

    root: Node
    given: list[Given] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    changes: dict[str, Node | None] = field(default_factory=dict)
    # key of the spec -> the file's key that set it, and whether another key may override it
    by: dict[str, tuple[str, bool]] = field(default_factory=dict)
    # name -> the first of its spellings in the file
    twins: dict[str, Given] = field(default_factory=dict)

    def wrong(self, g: Given, what: str, allowed: str) -> None:
        self.errors.append(f"{g.at}: {what}; allowed: {allowed}")

    # ---- content of the file: the row of every key, the type of every value

    def walk(self, node: Node, prefix: str = "") -> Iterator[tuple[str, Node, Key]]:
        """Yield each known key of the file with its row. Note or refuse the others."""
        for word, below in node.value.items():
            key = f"{prefix}{word}"
            row = _row(key)
            if "." in word and not key.startswith("_"):
                self.errors.append(dswords.dotted(key, below))
                continue
            if row is None and key not in dswords.SECTIONS:
                told, bad = dswords.unknown(key, below)
                (self.errors if bad else self.notes).append(told)
                continue
            if row is not None:
                yield key, below, row
            if key not in dswords.SECTIONS or below.value is None:
                continue
            if isinstance(below.value, dict):
                yield from self.walk(below, f"{key}.")
            elif key == "zero_optimization" and isinstance(below.value, bool):
                self.notes.append(
                    f"{below.where}: {key}: true or false is deprecated: use "
                    "zero_optimization.stage"
                )
                stage = f"{key}.stage"
                yield stage, Node(int(below.value), below.where), TABLE[stage]
            elif row is None:
                self.errors.append(
                    f"{below.where}: {key}: is {shown(below.value)}; "
                    "allowed: an object {...}"
                )

    def take(self, key: str, node: Node, row: Key) -> None:
        """Append a key to `given`, under its name in the table."""
        g = Given(key, key, node, node.plain(), row)
        if isinstance(g.row, Moved):
            moved = g.row
            if moved.old:
                self.notes.append(f"{g.at}: is deprecated: its name is now {moved.to}")
            if not self.fits(g):
                return
            g.name, g.row = moved.to, TABLE[moved.to]
            if moved.words and not self.silent(g):
                g.value = moved.words[g.value]
                g.node = Node(g.value, g.node.where)
        if self.fits(g):
            self.given.append(g)

    def fits(self, g: Given) -> bool:
        good = self.silent(g) or g.row.kind.fits(g.value)
        if not good:
            self.wrong(g, f"is {shown(g.value)}", g.row.kind.allowed)
        return good

    def silent(self, g: Given) -> bool:
        return g.value is None or g.value == "auto"

    # ---- effect of each key

    def live(self) -> list[Given]:
        """Return the given keys, except keys of sections that are off and keys without effect at
        the stage."""
        switched = {g.name: g.value for g in self.given}
        stage = self.stage()
        found: list[Given] = []
        dead: dict[str, str] = {}
        for g in self.given:
            section = g.name.rpartition(".")[0]
            switch = SWITCHES.get(section)
            state = switched.get(switch) if switch else None
            if self.silent(g) and not isinstance(g.row, Honour):
                continue
            if switch and g.name != switch and state in (None, False, "none", "auto"):
                if state is None or (state == "auto" and isinstance(g.row, Qualifier)):
                    dead.setdefault(
                        section,
                        f"{g.node.where}: {section}: has no effect here while "
                        f"{switch} is off",
                    )
                if state != "auto" or isinstance(g.row, Qualifier):
                    continue
            if (
                g.row.stages != "0123"
                and stage is not None
                and str(stage) not in g.row.stages
            ):
                if (
                    not self.silent(g)
                    and not isinstance(g.row, Qualifier)
                    and self.asks(g)
                ):
                    self.notes.append(f"{g.at}: has no effect at stage {stage}")
                if (
                    isinstance(g.row, (Refuse, Idle))
                    or g.name in SWITCHES.values()
                    or isinstance(g.row, Honour)
                    and g.row.quiet
                ):
                    continue
            found.append(g)
        self.notes += dead.values()
        return found

    def stage(self) -> object:
        said = [
            g.value
            for g in self.given
            if g.name == "zero_optimization.stage" and not self.silent(g)
        ]
        set_ = _find(self.root, "zero.stage")
        if said and (set_ is None or set_.where != "--set"):
            return numeric(said[-1])
        return 0 if set_ is None else set_.value

    def asks(self, g: Given) -> bool:
        """Return whether the value asks for something, supported or not."""
        if isinstance(g.row, (Idle, Honour)):
            return not _among(g.value, g.row.quiet)
        return not (isinstance(g.row, Refuse) and _among(g.value, g.row.unless))

    def judge(self, g: Given) -> None:
        row = g.row
        if isinstance(row, Honour):
            if g.name not in _BATCH:
                self.honour(g, row)
        elif isinstance(row, Idle) and self.asks(g):
            self.notes.append(f"{g.at}: has no effect here: {row.why}")
        elif isinstance(row, Refuse) and self.asks(g):
            words = [
                str(u) if isinstance(u, str) else shown(u)
                for u in row.unless
                if not isinstance(u, dict)
            ]
            self.wrong(g, row.why, " or ".join(words) or "leave it out")

    def honour(self, g: Given, row: Honour) -> None:
        """Change the spec's key, unless another key of the file contradicts it."""
        twin = self.twins.setdefault(g.name, g)
        if not self.silent(g) and twin.value != g.value:
            return self.wrong(g, f"contradicts {twin.key}", "only one of them")
        if self.silent(g):
            made = self.auto(g, row)
        elif row.words is None:
            made = _named(g.node, g.key)
        else:
            lower = {w.lower(): o for w, o in row.words.items() if isinstance(w, str)}
            text = isinstance(g.value, str)
            if text and g.value.lower() not in lower:
                return self.wrong(
                    g, f"{shown(g.value)} is not supported", " or ".join(row.words)
                )
            word = lower[g.value.lower()] if text else row.words.get(g.value)
            made = Node(word, g.at) if word is not None else None
        if made is None:
            return None
        weak = _among(g.value, row.weak)
        if row.key in self.by:
            other, yields = self.by[row.key]
            told = self.changes[row.key]
            if told and not yields and not weak and made.plain() != told.plain():
                return self.wrong(g, f"contradicts {other}", "only one of them")
            if weak:
                return None
        self.changes[row.key], self.by[row.key] = made, (g.key, weak)
        return None

    def auto(self, g: Given, row: Honour) -> Node | None:
        """Return the value of "auto": the spec's own, otherwise that of the row's rule."""
        if g.value is None or row.auto is None:
            return None
        kind = self.changes.get(f"{_SCHEDULE}.type")
        section, _, word = row.key.rpartition(".")
        if kind and section == _SCHEDULE and word not in SCHEDULES[kind.value]:
            self.wrong(g, f"{kind.value} has no {word}", "leave it out")
            return None
        said = _find(self.root, row.key)
        if said is not None:
            return said
        value = row.auto(self.look)
        if value is not None:
            return Node(value, f"{g.at}: auto, {row.rule}")
        if not row.required:
            self.wrong(
                g,
                f'is "auto", but the spec has neither {row.key} nor {row.rule}',
                f"{row.kind.allowed}, or --set {row.key}=N",
            )
        return None

    def effective(self, key: str) -> Node | None:
        """Return the final value of a spec's key: --set takes precedence over this file, and this
        over the spec."""
        node = _find(self.root, key)
        return node if node and node.where == "--set" else self.changes.get(key) or node

    def look(self, key: str) -> Number | None:
        node = self.effective(key)
        return (
            None
            if node is None or isinstance(node.value, (dict, list))
            else numeric(node.value)
        )

    def same(self, g: Given, row: Same) -> None:
        """Refuse a value that contradicts the spec's key."""
        node = self.effective(row.key)
        ours = "f32" if node is None else node.value
        word = row.words[g.value.lower()]
        rule = self.effective("train.reduction")
        exact = row.summed and (rule is None or rule.value != "fast")
        if word == "f32" != ours and exact:
            self.notes.append(
                f"{g.at}: gradients are sent as {ours} and summed in f32, so the sum "
                "equals that of f32 gradients"
            )
        elif word != ours:
            theirs = [w for w, o in row.words.items() if o == ours]
            self.wrong(
                g,
                f"is {shown(g.value)}, but train.precision is {shown(ours)}",
                " or ".join([*theirs, "null"]),
            )

    # ---- sections as a whole

    def refused(self) -> None:
        """Drop other messages about a section whose type is refused."""
        for section in ("optimizer", "scheduler"):
            if any(f": {section}.type: " in told for told in self.errors):
                self.errors = [
                    told for told in self.errors if f": {section}.params" not in told
                ]
                self.notes = [
                    told for told in self.notes if f": {section}.params" not in told
                ]

    def schedule(self) -> None:
        """Replace the spec's whole schedule by the file's scheduler."""
        mine = [key for key in self.changes if key.startswith(f"{_SCHEDULE}.")]
        said = any(": scheduler.type: " in told for told in self.errors)
        if mine and not said and f"{_SCHEDULE}.type" not in mine:
            g = next(g for g in self.given if g.name.startswith("scheduler."))
            self.errors.append(
                f"{g.node.where}: scheduler.type: is missing; allowed: "
                f"{' or '.join(SCHEDULER_TYPES)}"
            )
        node = self.changes[mine[0]] if mine else None
        if node:
            whole = Node({}, node.where)
            self.changes = {_SCHEDULE: whole, **self.changes}

    def precision(self) -> None:
        """Note a change to f32 if the file switches off its 16-bit types."""
        old, node = (
            _find(self.root, "train.precision"),
            self.effective("train.precision"),
        )
        if (
            self.by.get("train.precision", ("", False))[1]
            and old
            and node
            and old.value != node.value
        ):
            self.notes.append(
                f"{node.where}: the precision is {node.value}, not the spec's "
                f"{old.value}: the file enables neither fp16 nor bf16"
            )

    def loss_scale(self) -> None:
        """Drop f16 settings, with a note, if the precision is not f16."""
        mine = [key for key in self.changes if key.startswith("train.loss_scale.")]
        node = self.effective("train.precision")
        if mine and (node is None or node.value != "f16"):
            g = next(g for g in self.given if g.name.startswith("fp16."))
            self.notes.append(
                f"{g.node.where}: fp16: has no effect here unless train.precision is "
                "f16"
            )
            self.changes = {k: v for k, v in self.changes.items() if k not in mine}

    def optimizer(self) -> None:
        """Remove the settings of another optimizer type from the spec."""
        made = self.changes.get("train.optimizer.type")
        old = _find(self.root, "train.optimizer.type")
        if made is None or made.value == ("AdamW" if old is None else old.value):
            return
        if {made.value, "AdamW" if old is None else old.value} != {
            "Adam",
            "AdamW",
        }:
            for key in _OF_TYPE:
                self.changes.setdefault(f"train.optimizer.{key}", None)

    def left_out(self) -> None:
        """Note optimizer settings that the file leaves to the spec, if they differ from DeepSpeed's
        defaults."""
        made = self.changes.get("train.optimizer.type")
        if made is None:
            return
        start = "optimizer.params."
        said = {
            g.name.removeprefix(start) for g in self.given if g.name.startswith(start)
        }
        usual = {
            key: n
            for key, n in {
                **OPTIMIZERS[made.value],
                "weight_decay": 0.0,
            }.items()
            if key not in said
            and f"train.optimizer.{key}" not in self.changes
            and not _usual(_find(self.root, f"train.optimizer.{key}"), n)
        }
        if usual:
            g = next(g for g in self.given if g.name.startswith("optimizer."))
            self.notes.append(
                f"{g.node.where}: optimizer: lacks {', '.join(usual)}: the "
                f"spec's values apply; DeepSpeed's defaults are "
                f"{', '.join(map(str, usual.values()))}"
            )


def _find(root: Node, key: str) -> Node | None:
    """Return the node of a dotted key, or None."""
    node: Node | None = root
    for step in key.split("."):
        node = node.value.get(step) if node and isinstance(node.value, dict) else None
    return node


def _named(node: Node, key: str) -> Node:
    """Return a value for the spec whose errors also name the file's key."""
    items = node.value if isinstance(node.value, list) else None
    return Node(
        node.value if items is None else [_named(item, key) for item in items],
        f"{node.where}: {printable(key)}",
    )


def _usual(node: Node | None, default: object) -> bool:
    """Return whether a value of the spec equals DeepSpeed's default or comes from --set."""
    if node is None or node.where == "--set":
        return True
    some = node.value if isinstance(node.value, list) else [node]
    theirs = default if isinstance(default, tuple) else (default,)
    return all(
        d in (n.value, numeric(n.value)) for n, d in zip(some, theirs, strict=False)
    )


def _line(told: str) -> int:
    """Return the line number of an error or note, FILE:LINE: ..."""
    place = _PLACE.match(told)
    return int(place[1]) if place else 0


def _among(value: object, values: tuple[object, ...]) -> bool:
    """Return whether a value is one of these. 1, 1.0 and "1" are equal; true is not 1."""
    number = numeric(value)
    return any(
        number == u
        if number is not None and not isinstance(u, bool)
        else value == u and isinstance(value, bool) == isinstance(u, bool)
        for u in values
    )


def read(file: Node, root: Node) -> Config:
    """Read a config. root: the spec with its --set values.

    Raises SpecError, which lists every mistake.
    """
    r = _Reader(root)
    for key, node, row in r.walk(file):
        r.take(key, node, row)
    live = r.live()
    # "auto" depends on the values that the other keys set
    for g in sorted(live, key=r.silent):
        r.judge(g)
    for g in live:
        if isinstance(g.row, Same):
            r.same(g, g.row)
    r.schedule()
    r.optimizer()
    r.left_out()
    r.precision()
    r.loss_scale()
    r.refused()
    if r.errors:
        raise several(sorted(r.errors, key=_line))
    batch = {g.name: g for g in live if g.name in _BATCH and not r.silent(g)}
    shared = r.changes.get("cluster.context_parallel")
    r.changes |= dict(_batches(batch, root, shared))
    total = r.changes.get("train.global_batch")
    if (
        total
        and list(batch) == [_BATCH[2]]
        and total.value != _spec(root, "train.global_batch")
    ):
        r.notes.append(
            f"{total.where}: train.global_batch becomes {total.value}: train_batch_size is "
            "not given"
        )
    return Config(tuple(r.changes.items()), tuple(sorted(r.notes, key=_line)))


# ---- batch keys: train_batch_size = micro x accumulation x ranks


def _batches(
    config: Mapping[str, Given], root: Node, shared: Node | None
) -> list[tuple[str, Node]]:
    """Return changes so that two of the three keys determine the third. --set values stay.
    shared: the number of ranks with the same samples, if the file gives it."""
    given = {
        key: int(numeric(g.value) or 0)
        for key, g in config.items()
        if not _set(root, key)
    }
    at = {key: config[key].at for key in given}
    G, B, A = (given.get(key) for key in _BATCH)
    W = _spec(root, "cluster.ranks", 1)
    if W is None or A is None:
        return _changes(given, at)
    told = _find(root, "cluster.context_parallel")
    own = numeric(shared.value) if shared else None
    if not own or told and told.where == "--set":
        own = _spec(root, "cluster.context_parallel", 1)
    N = int(own or 1)
    W = max(1, W // N)
    if G is not None and B is None:
        if G % (A * W):
            raise _product(
                at[_BATCH[2]],
                f"train_batch_size {G} is not a multiple of {A} accumulation steps x {W} ranks",
                f"a multiple of {A * W}",
                G,
                A,
                N,
            )
        B = G // (A * W)
    B = B or _spec(root, "train.micro_batch")
    if B is None:
        return _changes(given, at)
    if G is not None and G != A * B * W:
        raise _product(
            at[_BATCH[2]],
            f"train_batch_size {G} is not {B} per rank x {A} accumulation steps x {W} ranks",
            str(A * B * W),
            G,
            A * B,
            N,
        )
    found = {
        key: n
        for key, n in zip(_BATCH, (A * B * W, B), strict=False)
        if not _set(root, key)
    }
    return _changes(found, {**dict.fromkeys(found, at[_BATCH[2]]), **at})


def _set(root: Node, key: str) -> bool:
    """Return whether --set gives the spec's key of a batch key."""
    node = _find(root, _ours(key)) if _ours(key) else None
    return node is not None and node.where == "--set"


def _changes(found: Mapping[str, int], at: Mapping[str, str]) -> list[tuple[str, Node]]:
    return [(_ours(key), Node(n, at[key])) for key, n in found.items() if _ours(key)]


def _ours(key: str) -> str:
    """Return the spec's key of a batch key, '' if it follows from the others."""
    row = TABLE[key]
    return row.key if isinstance(row, Honour) else ""


def _product(
    where: str, wrong: str, allowed: str, G: int, step: int, N: int
) -> SpecError:
    """Return the error of a product that does not match. step: samples of a rank in a step, or
    steps; N: ranks with the same samples."""
    W = G // step * N
    ranks = "" if G % step or W > RANKS else f", or --set cluster.ranks={W}"
    return SpecError(f"{where}: {wrong}; allowed: train_batch_size {allowed}{ranks}")


def _spec(root: Node, key: str, default: int | None = None) -> int | None:
    """Return a positive integer of the spec, or None if the value is not one (the schema reports
    it)."""
    node = _find(root, key)
    if node is None:
        return default
    n = numeric(node.value)
    return int(n) if n is not None and n == int(n) and 1 <= n < 2**31 else None
