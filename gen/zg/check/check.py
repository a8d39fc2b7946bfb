"""check.py -- the verifier: proves the passes' promises about a Plan, and imports none of them.

It plays the plan twice (step.py, play.py): start, two training steps, an evaluation, a third step;
and start, two evaluations. Each step moves bytes (copies.py, reductions.py) or makes new ones, by
kernels (own.py; once.py, sums.py, updates.py) or by a function of a unit (units.py). The content of
every byte is known as elements of named arrays (memory.py, arrays.py). The parts share one state
(order.py); step.py puts them together. It proves:
 order     any two conflicting accesses are ordered by queue order and wait/record (order.py)
 numbers   calls and tensors have the numbers that the plan states of its spec (stated.py)
 content   each function of a unit, and each of its calls, reads the right values (units.py,
           fns.py); an update reads parameters and states of the last step, the sum of all
           gradients, each complete and included once, and the step's factor
 states    after every step each place of each state holds all its elements, of this step
           (states.py)
 saving    only an update changes the states of a run, so a checkpoint can be written meanwhile
           (order.py)
 memory    classes do not overlap and are large enough; gathered elements stay within the bound
The checker has no notion of offloading or sharding: it tracks the content of bytes. A proof for one
rank's plan holds across ranks, because a peer's read lies inside this rank's own step: an
all-gather completes when every peer has read this rank's piece, and so does `done`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..facts import grids, ops
from ..facts.grids import How
from ..facts.kernels import LOSS_SUMS, PRODUCTS, TWINS, spent, total
from ..plan.garbage import unsearched
from ..plan.mesh import members
from ..plan.operand import bases
from ..plan.plan import (
    ALL,
    BLOCKS,
    STEP,
    Class,
    Flat,
    Launch,
    Phase,
    Plan,
    Ref,
    Run,
    Tensor,
    unit_of,
)
from . import stores
from .fns import Facts, functions
from .kernels import BODIES
from .order import REDUCTIONS, CheckError, arrays, refusing
from .step import Program

__all__ = ["CheckError", "check"]

# Micro-batches played in the first step, if the section repeats: the second shows the effect of one
# micro-batch on the next. Later steps play one.
MICRO_BATCHES = 2
PHASES = 4  # most phases of a schedule
PARTS = 4  # most grids of a launch
# Kinds of classes as (arena, targets that allocate it, readers), in the order in which they are
# listed. Peers read classes that lie on the device and exist on all targets.
KINDS = (
    ("device", "all", "peers"),
    ("device", "all", "own"),
    ("device", "unshared", "own"),
    ("device", "gpu", "own"),
    ("host", "all", "own"),
    ("host", "gpu", "own"),
    ("file", "all", "own"),
)
# Classes that exist on some targets only, with their arena and these targets: receive buffers where
# peers' memory cannot be read, and buffers that a GPU's kernels share with its host.
SENT = ("device", "unshared")
SOME = {
    "workspace": ("device", "gpu"),
    "pinned_batch": ("host", "gpu"),
    "pinned_scratch": ("host", "gpu"),
}
# Classes that only kernels and the runtime use.
THEIRS = {
    "workspace",
    "pinned_batch",
    "pinned_scratch",
}
# Classes that are allocated for every kind of unit, whether or not it runs backward.
SCRATCH = {
    "tmp",
    "work",
}
SECTIONS = ("init", "publish", "begin", "micro_batch", "update", "eval")


# ---- checks that need no play


@refusing
def _classes(p: Plan) -> None:
    """Prove that classes are disjoint, sorted by kind, and large enough for their use."""
    ends = {"device": 0, "host": 0, "file": 0}
    names = {c.name for c in p.classes}
    kinds = [(c.arena, c.targets, c.readers) for c in p.classes]
    if any(k not in KINDS for k in kinds) or kinds != sorted(kinds, key=KINDS.index):
        raise CheckError("classes are not in order of their kinds")
    if len(names) < len(kinds):
        raise CheckError("a class is listed twice")
    some = SOME | {
        r.cls: SENT
        for s in p.sections
        for x in s.steps
        if x.op in REDUCTIONS
        for r in x.outs
    }
    for c in p.classes:
        if (c.arena, c.targets) != some.get(c.name, (c.arena, "all")):
            raise CheckError(
                f"class {c.name} is in the {c.arena} arena of target {c.targets}"
            )
        if (
            c.at < ends[c.arena]
            or c.stride <= 0
            or c.slots <= 0
            or c.at % 4096
            or c.stride % 4096
        ):
            raise CheckError(f"class {c.name} overlaps the one before it or is empty")
        ends[c.arena] = c.at + c.bytes
    bad = any(f.block < 4096 or f.block % 4096 or f.depth < 1 for f in p.files)
    if len(p.files) != (ends["file"] > 0) or bad:
        raise CheckError("what lies in a file, and how it moves, do not agree")
    _held(p, {c.name: c for c in p.classes})


def _held(p: Plan, have: dict[str, Class]) -> None:
    """Prove that each class is large enough for its use."""
    value = p.head.value
    for name in ("x", "near.x", "dx"):
        if name in have and have[name].stride < value:
            raise CheckError(f"class {name} does not hold a value")
    if p.recipe.optimizer not in ops.OPTIMIZERS:
        raise CheckError(f"there is no optimizer {p.recipe.optimizer}")
    if p.recipe.moments not in ("f32", "bf16"):
        raise CheckError(f"moments are not stored in {p.recipe.moments}")
    stores.prove(p, have)
    if not -1 <= p.head.end < p.head.vocab:
        raise CheckError(f"no token {p.head.end} ends a document")
    if p.head.loss_mean not in LOSS_SUMS:
        raise CheckError(f"there is no mean over {p.head.loss_mean}")
    if p.head.keyed not in (0, 1):
        raise CheckError(f"samples have {p.head.keyed} keys")
    held = arrays(p)
    array = max(4 * p.head.rows, 8 * p.head.batch * p.head.keyed)
    if {"documents", "sample_targets"} & {*held}:
        array = max(array, 4 * p.head.batch * p.head.sequence)
    need = {
        "workspace": (1, max(r.workspace for r in p.runs)),
        "pinned_scratch": (1, max(ops.PINNED_SCRATCH, 4 * p.head.vocab)),
        "pinned_batch": (ops.PINNED_BATCHES, array * len(held)),
    }
    each = max(array, *(have[name].stride for name in held))
    need.update(dict.fromkeys(held, (p.together, each)))
    if p.head.own_blocks > 1:
        need[ops.PICKED] = 1, p.head.width * p.head.bytes
    for name, (slots, bytes_) in need.items():
        if have[name].slots != slots or have[name].stride < bytes_:
            raise CheckError(f"class {name} does not hold {slots} x {bytes_} bytes")


@refusing
def _samples(p: Plan) -> None:
    """Prove that the blocks of samples are equal, and dealt evenly to the ranks that share them."""
    h = p.head
    positive = min(h.blocks, h.context) > 0
    if not positive or h.sequence % h.blocks or h.blocks % h.context:
        raise CheckError(
            f"{h.blocks} blocks of {h.sequence} tokens on {h.context} ranks"
        )
    if h.ranks % h.context or h.micro_batches % h.own_blocks:
        raise CheckError(f"{h.ranks} ranks do not share samples by {h.context}")


@refusing
def _runs(p: Plan) -> None:
    """Prove that each launch belongs to a call and runs once on every target, within its limits."""
    if {c.launch for fn in p.fns for c in fn.calls} != {l.name for l in p.launches}:
        raise CheckError("launches are not those of calls")
    columns = sorted((r.launch, t) for r in p.runs for t in r.targets)
    if columns != sorted((l.name, t) for l in p.launches for t in p.head.targets):
        raise CheckError("launches do not run once on every target")
    launches = {l.name: l for l in p.launches}
    products = {l.name for l in p.launches if l.kernel in PRODUCTS}
    for r in p.runs:
        if any(
            r.margin != (p.head.margin if t != "cpu" and r.launch in products else 0)
            for t in r.targets
        ):
            raise CheckError(
                f"launch {r.launch} leaves {r.margin} SMs, not {p.head.margin}"
            )
        shared = min((grids.SHARED[t] for t in r.targets if t != "cpu"), default=0)
        for g in r.grids:
            if not (
                0 < g.x < 2**31
                and 0 < g.y < 2**16
                and 0 < g.z < 2**16
                and 0 < g.block <= 1024
                and 0 <= g.shared <= shared
            ):
                raise CheckError(
                    f"launch {r.launch}: {g} cannot run on {','.join(r.targets)}"
                )
        if (r.grids and "cpu" in r.targets) or len(r.grids) > PARTS:
            raise CheckError(
                f"launch {r.launch}: {len(r.grids)} grids on {','.join(r.targets)}"
            )
        _as_rules_say(p, launches[r.launch], r)


def _as_rules_say(p: Plan, l: Launch, r: Run) -> None:
    """Prove that a GPU's grids, tile and workspace follow the kernel's rule for this shape. A CPU
    has no grids, and its tile changes no bit."""
    real = p.head.bytes
    for target in r.targets:
        host = target == "cpu" or l.kernel in TWINS
        try:
            how = How(()) if host else grids.how(l.kernel, target, real, l.shape)
        except NameError as e:
            raise CheckError(
                f"launch {l.name}: its shape lacks what the rule names: {e}"
            ) from e
        tile = r.tile if host else how.tile
        if (r.grids, r.workspace, r.tile) != (
            how.grids,
            how.workspace,
            tile,
        ) or min(r.tile) < 0:
            raise CheckError(
                f"launch {r.launch} does not run on {target} by its kernel's rule"
            )


def _schedule(name: str, phases: tuple[Phase, ...], most: float) -> None:
    """Prove that phases follow each other from step 1 on without end, with values from 0 to
    `most`."""
    begin = 1
    for n, x in enumerate(phases):
        last = n == len(phases) - 1
        where = f"phase {n} of the schedule of {name}"
        if (
            len(phases) > PHASES
            or (x.until != 0) == last
            or (not last and x.until <= begin)
        ):
            raise CheckError(f"{where} does not end where it should")
        if (
            not x.span
            or x.curve not in ops.CURVES
            or not 0 <= x.begin <= most
            or x.stairs < 0
            or (x.stairs and x.curve not in ("line", "restarts"))
        ):
            raise CheckError(f"{where} has no curve")
        way = [(step - x.origin) / x.span for step in (begin, x.until - 1)]
        inside = not last and 0 <= min(way) and max(way) <= 1
        good = {
            "line": inside or (x.begin == x.end and not x.stairs),
            "cosine": inside,
            "restarts": inside and 0 < x.stairs * x.span < 2**63,
            "log": not last and x.span > 1 and begin > x.origin and max(way) <= 1,
            "inverse": x.end >= 0 and x.span > 0 and begin >= x.origin,
        }[x.curve]
        if not good or (x.curve != "inverse" and not 0 <= x.end <= most):
            raise CheckError(f"{where} leaves its curve")
        begin = x.until
    if not phases:
        raise CheckError(f"there is no schedule of {name}")


@refusing
def _flats(p: Plan) -> None:
    """Prove the groups, that flats and tensors have unique names, and that tensors cover all
    parameters."""
    flats = {f.name: f for f in p.flats}
    _groups(p)
    if len(flats) < len(p.flats):
        raise CheckError("a flat is listed twice")
    used: dict[str, list[tuple[int, int]]] = {f: [] for f in flats}
    for t in p.tensors:
        _tensor(p, t, flats)
        n = math.prod(t.shape) // max(1, t.flat_step)
        for i in range(1 if t.flat_step else t.count):
            used[t.flat].append((t.offset + i * t.offset_step, n))
    for name, spans in used.items():
        _spans(p, flats[name], sorted(spans))
    _own_names(p)
    if p.head.params != sum(t.count * t.params for t in p.tensors):
        raise CheckError("the tensors are not all parameters")
    for f in p.flats:
        if p.head.ranks > 1:  # one rank has everything
            _shared(p, f)


def _groups(p: Plan) -> None:
    """Prove that the groups belong to one grid of ranks and the first one has all ranks."""
    try:
        groups = members(p)
    except ValueError as e:
        raise CheckError(str(e)) from e
    first = p.groups[0]
    told = first.name, first.ranks, first.axes
    others = [g for g in p.groups[1:] if not g.axes]
    if told != (ALL, p.head.ranks, ()) or others or len(groups) < len(p.groups):
        raise CheckError(f"groups are {[g.name for g in p.groups]}")
    local = p.head.local
    across = [a for a in p.axes if a.stride < local < a.stride * a.size]
    if local and (local < 0 or p.head.ranks % local or across):
        raise CheckError(f"hosts of {local} ranks cut the axes of the grid")
    for f in p.flats:
        if f.owners not in groups or groups[f.owners].ranks != p.head.ranks:
            raise CheckError(f"flat {f.name}: {f.owners} are not all ranks")
    levels = p.head.order.levels
    known = {STEP, BLOCKS, *groups}
    blocks = BLOCKS in levels[1:] or BLOCKS in levels and p.head.own_blocks == 1
    if len(set(levels)) < len(levels) or not {STEP} <= set(levels) <= known or blocks:
        raise CheckError(f"sums have levels {levels}")


def _spans(p: Plan, f: Flat, spans: list[tuple[int, int]]) -> None:
    """Prove that a flat's tensors, given as (first element, elements), are disjoint, and that its
    shards cover them."""
    frozen = {t.frozen for t in p.tensors if t.flat == f.name}
    if len(frozen) > 1:  # an update covers all of a flat
        raise CheckError(f"flat {f.name} trains in part")
    end = 0
    for at, n in spans:
        if at < end or at % 1024:
            raise CheckError(f"flat {f.name}: tensors overlap at element {at}")
        end = at + n
    if (
        f.elems != -(-end // 1024) * 1024
        or f.elems > f.shard * p.head.ranks
        or f.shard % 1024
    ):
        raise CheckError(f"flat {f.name}: {end} elements do not fit its shards")


def _own_names(p: Plan) -> None:
    """Prove that tensors have unique keys, and unique names in the plan and in the weights'
    file."""
    keys = [t.key + i * t.key_step for t in p.tensors for i in range(t.count)]
    distinct = {t.name for t in p.tensors}
    if sorted(keys) != [*range(len(keys))] or len(distinct) < len(p.tensors):
        raise CheckError("tensors do not have names and keys of their own")
    names = [
        ops.layer(part.rpartition("=")[0], i)
        for t in p.tensors
        for part in t.parts
        for i in range(t.count)
    ]
    if len(set(names)) < len(names):
        raise CheckError("two tensors have one name in the weights' file")


def _shared(p: Plan, f: Flat) -> None:
    """Prove the promises of a ZeRO stage for a flat: 1 shards the states (stores.py), 2 also the
    sums, 3 also the parameters except persistent ones."""
    stage = p.head.zero
    (params,) = p.stored("params", f.name)
    name, _, _ = f.name.partition(".")
    whole = stage < 3 or name == "persistent"
    sums = {s.over for s in p.stored("sum", f.name)}
    bad = {0: sums - {""}, 1: set()}.get(stage, sums & {""})
    known = stage in range(4)
    if not known or params.whole != whole or bad:
        raise CheckError(f"flat {f.name} is not shared as stage {stage} of ZeRO says")


@refusing
def _tables(p: Plan) -> None:
    """Prove that each rotary table has one frequency per pair of elements of a head."""
    if len({t.name for t in p.tables}) < len(p.tables):
        raise CheckError("a table is listed twice")
    for t in p.tables:
        if len(t.freq) != t.head // 2 or not all(0 < f <= 1 for f in t.freq):
            raise CheckError(
                f"table {t.name}: {len(t.freq)} frequencies of heads of {t.head}"
            )


@refusing
def _flops(p: Plan) -> None:
    """Prove that a unit's function has the flops of its calls, and that other functions have
    none."""
    for f in p.fns:
        calls = f.calls if f.body in BODIES else ()
        each = [spent(c.kernel, c.args, c.rounds) for c in calls]
        if f.flops != total(each):
            raise CheckError(
                f"function {f.name}: {f.flops} flops, its calls have {total(each)}"
            )


def _quantized(p: Plan, t: Tensor, stored: list[int]) -> None:
    """Prove that a quantized tensor is frozen, and that its parts have the size of their format."""
    few = t.quantized
    good = len(few.rows) == len(stored) and min((few.columns, *few.rows)) > 0
    if (
        not good
        or not few.whole
        or [*few.stored(p.head.bytes)] != stored
        or len(t.shape) != 1
        or t.flat_step > 1
        or not t.frozen
    ):
        raise CheckError(f"tensor {t.name}: {few} does not have {stored} elements")


def _tensor(p: Plan, t: Tensor, flats: dict[str, Flat]) -> None:
    """Prove that a tensor has a place in its flat and that its parts' rows add up. Rows by token
    are padded to a multiple of ops.VOCAB."""
    rows = [part.rpartition("=")[2] for part in t.parts]
    good = all(r.isdigit() for r in rows) and min(t.shape) > 0
    padded = (p.head.vocab, ops.up(p.head.vocab, ops.VOCAB))
    if (
        not good
        or t.shape[0] != (n := sum(map(int, rows)))
        and (n, t.shape[0]) != padded
    ):
        raise CheckError(f"tensor {t.name}: its parts' rows do not add up to {t.shape}")
    file = t.quantized.rows or (t.shape[0],)
    if t.heads and (len(t.parts) > 1 or t.heads < 0 or file[0] % (3 * t.heads)):
        raise CheckError(f"tensor {t.name}: {t.heads} heads do not divide its rows")
    if t.quantized.format:
        _quantized(p, t, [*map(int, rows)])
    if t.frozen not in (0, 1) or not 0 <= t.rate < 1e30 or not 0 <= t.decay < 1e30:
        raise CheckError(f"tensor {t.name}: no rate or decay")
    if not -1e30 < t.mean < 1e30 or not -1e30 < t.std < 1e30:
        raise CheckError(f"tensor {t.name}: no initial values")
    step = (t.flat_step, t.offset_step)
    if t.flat_step > 1:  # slices of rows, which fill all shards
        whole = flats[t.flat].shard * p.head.ranks
        shared = all(s.over for s in p.stored("params", t.flat))
        good = (
            not t.offset
            and not t.offset_step
            and shared
            and whole * t.flat_step == math.prod(t.shape)
            and not t.shape[0] % t.flat_step
        )
    else:
        good = (
            t.flat in flats
            and t.count > 0
            and (
                step == (0, 0)
                if t.count == 1
                else step[0] == 1
                if step[1] == 0
                else not step[0]
            )
        )
    if not good or t.flat_step and flats[t.flat].count != t.count * t.flat_step:
        raise CheckError(
            f"tensor {t.name}: its {t.count} instances have no place in {t.flat}"
        )


@refusing
def _nodes(p: Plan) -> None:
    """Prove that a flat has a pending sum for each bit of its mask; sums.py proves the
    mask."""
    h = p.head
    block = h.block
    every = h.micro_batches * h.ranks
    power = block > 0 and not block & (block - 1)
    if not power or block >= 2 * every:
        raise CheckError(f"{block} leaves are no tree of {every}")
    own = h.own.get(h.order.levels[0], 1)
    if h.ranks > 1 and block % own:
        raise CheckError("a rank's own gradients first: that is another tree")
    for f in p.flats:
        if f.nodes != max(p.moves(f), f.mask.bit_count()):
            raise CheckError(f"flat {f.name}: {f.nodes} pending sums at {f.mask:#b}")


@refusing
def sections(p: Plan) -> None:
    """Prove that the sections are those of a program, and that every event of the plan is recorded
    by some step."""
    wrong = CheckError("sections are not those of a program")
    if tuple(s.name for s in p.sections) != SECTIONS:
        raise wrong
    for s in p.sections:
        each = p.head.own_blocks
        most = p.head.micro_batches // each if s.name == "micro_batch" else 1
        if s.repeat not in (1, most):
            raise wrong
    limits = {e.name: e.index for e in p.events}
    fns = {f.name for f in p.fns}
    if len(limits) < len(p.events) or len(fns) < len(p.fns):
        raise CheckError("an event or a function is listed twice")
    if p.head.overlap not in (0, 1):
        raise CheckError(f"overlap is {p.head.overlap}, neither 0 nor 1")
    steps = [(s.name, step) for s in p.sections for step in s.steps]
    made = {e for _, step in steps for e in step.recs}
    recorded = {e.name for e in made}
    if idle := limits.keys() - recorded:
        raise CheckError(f"nothing records {sorted(idle)}")
    named = {b for f in p.fns for c in f.calls for a in c.args for b in bases(a)}
    for _, step in steps:
        named |= {r.cls for r in step.refs}
    classes = {c.name for c in p.classes}
    if idle := classes - named - THEIRS - SCRATCH:
        raise CheckError(f"nothing uses {sorted(idle)}")
    for name, step in steps:
        where = f"section {name}: {step.queue} {step.op} {step.unit}"
        for e in step.events:
            limit = limits.get(e.name, 0)
            if not 0 <= e.index < limit:
                raise CheckError(f"{where}: no event {e}")
        for e in step.waits:
            if e not in made:
                raise CheckError(f"{where}: nothing records {e}")


# ---- the play


@refusing
def units(p: Plan) -> dict[str, int]:
    """Return the number of units of each kind, in forward order."""
    counts: dict[str, int] = {}
    last = ""
    for s in p.section("eval").steps:
        if s.kind in BODIES:
            kind, index = unit_of(s.unit)
            # A further part of the same unit, or another block of a sample.
            name = s.op.split(".")
            again = s.unit == last and (len(name) > 2 or p.head.own_blocks > 1)
            if index != counts.get(kind, 0) - again or name[1] != kind:
                raise CheckError(f"section eval: {s.unit} is out of order")
            counts[kind] = index + 1
            last = s.unit
    return counts


def _slots(refs: Sequence[Ref]) -> frozenset[tuple[str, int]]:
    """Return the slots among `refs` that hold gathered parameters."""
    return frozenset((r.cls, r.index) for r in refs if r.cls.startswith("ring."))


@refusing
def _ahead(p: Plan) -> None:
    """Prove that no unit is gathered farther ahead than the head says: other units are used at most
    that often between a gather and its own use. (Fewer, if units stay gathered between uses.)"""
    # slot -> number of uses before its gather
    issued: dict[tuple[str, int], int] = {}
    uses, last, most = 0, None, 0
    for s in p.section("micro_batch").steps:
        if s.op == "gather":
            for slot in _slots(s.outs):
                issued.setdefault(slot, uses)
        read = _slots(s.ins) if s.kind in BODIES else ()
        use = (s.op, s.unit, read)
        if not read:
            continue
        if use != last:  # else another micro-batch goes through the same unit
            uses, last = uses + 1, use
        for slot in read & issued.keys():
            before = issued.pop(slot)
            most = max(most, uses - 1 - before)
    if most > p.head.prefetch:
        raise CheckError(f"{most} units are gathered ahead, not {p.head.prefetch}")


@refusing
def _recipe(p: Plan) -> None:
    _schedule("rate", p.recipe.rate, 1e30)
    _schedule("momentum", p.recipe.momentum, 1 - 1e-9)
    r = p.recipe
    if not 0 <= r.beta2 < 1 or not 0 <= r.eps < 1e30 or not 0 <= r.clip < 1e30:
        raise CheckError(f"recipe: beta2 {r.beta2}, eps {r.eps}, clip {r.clip}")
    _scaler(p)


def _scaler(p: Plan) -> None:
    """Prove that f16 has exactly one loss scaler, and that other types have none."""
    if len(p.recipe.scaler) != (p.head.real == "f16") or p.recipe.skips < 1:
        raise CheckError(f"{p.head.real} with {len(p.recipe.scaler)} scalers")
    for s in p.recipe.scaler:
        if (
            not 0 < s.first < 2.0**128
            or not 0 < s.least < 2.0**128
            or s.window < 0
            or s.hysteresis < 1
            or s.consecutive not in (0, 1)
        ):
            raise CheckError(f"recipe: {s} is no scaler")


@unsearched
def check(p: Plan) -> None:
    """Prove a plan.

    Raises CheckError, which names the first broken promise.
    """
    _classes(p)
    _runs(p)
    _recipe(p)
    _samples(p)
    _flats(p)
    _nodes(p)
    _tables(p)
    sections(p)
    _ahead(p)
    facts = functions(p, units(p))
    _flops(p)
    play(p, facts)


@refusing
def play(p: Plan, facts: Facts) -> None:
    """Play the sections. facts: proven properties of the plan's functions."""
    player = Program(p, facts)
    player.start()
    player.train(MICRO_BATCHES)
    player.train()
    player.evaluate()
    player.train()
    player.finished()
    other = Program(p, facts)  # a run may never train
    other.start()
    other.evaluate()
    other.evaluate()
    if player.copies.most != p.head.live or p.head.live > p.head.bound:
        raise CheckError(
            f"{player.copies.most} elements are gathered at once, {p.head.live} were "
            f"promised, the bound is {p.head.bound}"
        )
