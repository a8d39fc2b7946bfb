"""check.py -- the verifier: proves of a Plan what the passes promise, and imports none of them.

It plays the plan (start, two training steps, an evaluation, a third step) on symbols. It proves:
 order     any two conflicting accesses are ordered by queue order and wait/record (check_order)
 content   every read sees the unit, the grain and the update it expects; nothing dead is read,
           nothing alive is overwritten (check_steps); so do the calls of a function (check_fns)
 sums      every leaf is complete when it is reduced, and reduced exactly once; every shard is
           summed, measured and updated once a step, after the factor is known (check_update)
 memory    classes do not overlap and hold what they are for; gathered elements stay in bounds
What one rank's plan proves holds across ranks: a gather is complete when every peer has read this
rank's piece, and so is `done`, so a peer's read lies inside this rank's own step.
"""
from __future__ import annotations

import math

from . import check_own, ops
from .check_fns import Facts, functions
from .check_order import CheckError, refusing
from .check_steps import UNITS, unit_of
from .check_update import Program
from .plan import Class, Flat, Phase, Plan, Tensor

__all__ = ["CheckError", "check"]

GRAINS = 2                      # played in the first step of a section that repeats more often:
# what one grain does to the next; one in later steps, which shows what steps do to each other
VOCAB = 8                       # of a multiple of this many tokens are rows that go by token
PHASES = 4                      # of a schedule
INLETS, PARTS = 4, 4            # batches on their way to a GPU; grids of a launch
# Bytes of shared memory that a block may have (CUDA C programming guide, compute capabilities).
SHARED = {"sm_80": 163 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10}
SECTIONS = ("init", "publish", "begin", "grain", "update", "eval")


# ---- what can be seen without playing

@refusing
def _classes(p: Plan) -> None:
    """Classes lie apart and in order, what peers read first, and hold what they are for."""
    ends, kinds, names = {"device": 0, "host": 0, "file": 0}, [c.kind for c in p.classes], \
        {c.name for c in p.classes}
    order = sorted(kinds, key=("shared", "private", "scratch", "gpu", "hosted", "host",
                               "filed").index)
    if kinds != order or len(names) < len(kinds):
        raise CheckError("classes are not in order of their kinds")
    for c in p.classes:
        arena = {"hosted": "host", "host": "host", "filed": "file"}.get(c.kind, "device")
        if c.at < ends[arena] or c.stride <= 0 or c.slots <= 0 or c.at % 4096 or c.stride % 4096:
            raise CheckError(f"class {c.name} overlaps the one before it or is empty")
        ends[arena] = c.at + c.slots * c.stride
    if len(p.files) != (ends["file"] > 0) or any(f.block % 4096 or f.depth < 1 for f in p.files):
        raise CheckError("what lies in a file, and how it moves, do not agree")
    _held(p, {c.name: c for c in p.classes})


def _held(p: Plan, have: dict[str, Class]) -> None:
    """What classes are for."""
    W, real = p.head.ranks, 4 if p.head.real == "f32" else 2
    value = p.head.batch * p.head.sequence * p.head.width * real
    for name in ("x", "near.x", "dx"):
        if name in have and have[name].stride < value:
            raise CheckError(f"class {name} does not hold a value")
    if p.recipe.optimizer not in ops.OPTIMIZERS:
        raise CheckError(f"there is no optimizer {p.recipe.optimizer}")
    if p.recipe.moments not in ("f32", "bf16"):
        raise CheckError(f"moments are not stored in {p.recipe.moments}")
    states = ops.OPTIMIZERS[p.recipe.optimizer]
    own = any("master" in f.states for f in p.flats)
    if p.head.real == "f16" and not own and not p.offload:
        raise CheckError("parameters of f16 have no masters")
    for f in p.flats:
        away = have[f"real.{f.name}"].kind in ("hosted", "filed")
        if away and f.real != "shard":
            raise CheckError(f"flat {f.name}: parameters elsewhere that every rank keeps")
        apart = real < 4 and (own or p.offload) or p.offload != away
        moves = [t for t in p.tensors if t.flat == f.name and not t.frozen]
        if f.states != (*["master"] * apart, *(states if moves else ())) or \
                bool(moves) != f.moves or f"sum.{f.name}" in have and not moves:
            raise CheckError(f"flat {f.name} has the states {f.states}, sums: {f.sum}")
        size = {"whole": f.shard * W, "shard": f.shard}
        if f.near and not (p.offload and moves and f.near < f.shard and f.near % 1024 == 0):
            raise CheckError(f"flat {f.name}: {f.near} elements of a shard cannot stay")
        need = {"real": size[f.real] * real}
        if moves:
            need["sum"] = size[f.sum] * 4 * (1 if p.apart else f.nodes)
        need.update({s: (size[f.state] - f.near) * ops.width(s, p.recipe.moments)
                     for s in f.states})
        stay = (*["master"] * (real < 4 or away), *states) if f.near else ()
        if p.states(f, "near_") != tuple(f"near_{s}" for s in stay) or f.near < 0:
            raise CheckError(f"flat {f.name}: what stays has the states {p.states(f, 'near_')}")
        need.update({f"near_{s}": f.near * ops.width(s, p.recipe.moments) for s in stay})
        for name, bytes_ in need.items():
            c = have.get(f"{name}.{f.name}")
            if not c or c.slots != f.count or c.stride < bytes_:
                raise CheckError(f"class {name}.{f.name} does not hold {f.count} x {bytes_} bytes")
            off = p.offload and name in f.states or away and name == "real"
            below = p.below and name == "sum"
            if (c.kind in ("hosted", "filed")) != (off or below) or below and c.kind == "filed":
                raise CheckError(f"class {name}.{f.name} lies in the wrong arena")
    if p.offload and (W > 1 and any(f.state == "whole" for f in p.flats) or
                      have["hctl"].stride < have["ctl"].stride):
        raise CheckError("the host has no place for an owner's update")
    if p.below and (any(f.sum == "whole" for f in p.flats) or
                    have["hsums"].stride < have["sums"].stride):
        raise CheckError("the host has no place for an owner's sums")
    need = {"space": (1, max(r.space for r in p.runs)), "desk": (1, max(4096, 4 * p.head.vocab)),
            "inlet": (INLETS, 2 * 4 * p.head.batch * p.head.sequence)}
    if p.apart:
        need["pend"] = (1, max(f.shard * W * 4 * f.nodes for f in p.flats))
    both = max(4 * p.head.batch * p.head.sequence, have["tokens"].stride, have["targets"].stride)
    need.update({name: (p.together, both) for name in ("tokens", "targets")})
    for name, (slots, bytes_) in need.items():
        if have[name].slots != slots or have[name].stride < bytes_:
            raise CheckError(f"class {name} does not hold {slots} x {bytes_} bytes")


@refusing
def _runs(p: Plan) -> None:
    """Every launch is a call's, and runs in one way on every target, within what it can do."""
    if {c.launch for fn in p.fns for c in fn.calls} != {l.name for l in p.launches}:
        raise CheckError("launches are not those of calls")
    columns = sorted((r.launch, t) for r in p.runs for t in r.targets)
    if columns != sorted((l.name, t) for l in p.launches for t in p.head.targets):
        raise CheckError("launches do not run once on every target")
    for r in p.runs:
        shared = min((SHARED[t] for t in r.targets if t != "cpu"), default=0)
        for g in r.grids:
            if not (0 < g.x < 2**31 and 0 < g.y < 2**16 and 0 < g.z < 2**16 and
                    0 < g.block <= 1024 and 0 <= g.shared <= shared):
                raise CheckError(f"launch {r.launch}: {g} cannot run on {','.join(r.targets)}")
        if (r.grids and "cpu" in r.targets) or len(r.grids) > PARTS:
            raise CheckError(f"launch {r.launch}: {len(r.grids)} grids on {','.join(r.targets)}")


def _schedule(name: str, phases: tuple[Phase, ...], most: float) -> None:
    """One phase after the other, from step 1 on and for ever; values from 0 to `most`."""
    begin = 1
    for n, x in enumerate(phases):
        last, where = n == len(phases) - 1, f"phase {n} of the schedule of {name}"
        if len(phases) > PHASES or (x.until != 0) == last or (not last and x.until <= begin):
            raise CheckError(f"{where} does not end where it should")
        if not x.span or x.curve not in ops.CURVES or not 0 <= x.begin <= most or x.stairs < 0 or \
                (x.stairs and x.curve != "line"):
            raise CheckError(f"{where} has no curve")
        way = [(step - x.origin) / x.span for step in (begin, x.until - 1)]
        inside = not last and 0 <= min(way) and max(way) <= 1
        good = {"line": inside or (x.begin == x.end and not x.stairs), "cosine": inside,
                "log": not last and x.span > 1 and begin > x.origin and max(way) <= 1,
                "inverse": x.end >= 0 and x.span > 0 and begin >= x.origin}[x.curve]
        if not good or (x.curve != "inverse" and not 0 <= x.end <= most):
            raise CheckError(f"{where} leaves its curve")
        begin = x.until
    if not phases:
        raise CheckError(f"there is no schedule of {name}")


@refusing
def _flats(p: Plan) -> None:
    """Shards cover their flats; tensors lie apart, with their parts' shapes and their own keys."""
    flats = {f.name: f for f in p.flats}
    if len(flats) < len(p.flats):
        raise CheckError("a flat is listed twice")
    used: dict[str, list[tuple[int, int]]] = {f: [] for f in flats}
    for t in p.tensors:
        _tensor(t, flats, p.head.vocab, p.head.ranks)
        used[t.flat] += [(t.offset + i * t.offset_step, math.prod(t.shape) // max(1, t.flat_step))
                         for i in range(1 if t.flat_step else t.count)]
    for name, spans in used.items():
        end = 0
        for at, n in sorted(spans):
            if at < end or at % 1024:
                raise CheckError(f"flat {name}: tensors overlap at element {at}")
            end = at + n
        f = flats[name]
        if f.elems != -(-end // 1024) * 1024 or f.elems > f.shard * p.head.ranks or f.shard % 1024:
            raise CheckError(f"flat {name}: {end} elements do not fit its shards")
    keys = [t.key + i * t.key_step for t in p.tensors for i in range(t.count)]
    if sorted(keys) != list(range(len(keys))) or len({t.name for t in p.tensors}) != len(p.tensors):
        raise CheckError("tensors do not have names and keys of their own")
    if p.head.params != sum(t.count * t.elems for t in p.tensors):
        raise CheckError("the tensors are not all parameters")


def _tensor(t: Tensor, flats: dict[str, Flat], vocab: int, ranks: int) -> None:
    """Rows by token are stored in multiples of VOCAB; all others are those of the parts."""
    rows = [part.rpartition("=")[2] for part in t.parts]
    good = all(r.isdigit() for r in rows) and min(t.shape) > 0
    padded = (vocab, -(-vocab // VOCAB) * VOCAB)
    if not good or t.shape[0] != (n := sum(map(int, rows))) and (n, t.shape[0]) != padded:
        raise CheckError(f"tensor {t.name}: its parts' rows do not add up to {t.shape}")
    if t.frozen not in (0, 1) or not 0 <= t.rate < 1e30 or not 0 <= t.decay < 1e30:
        raise CheckError(f"tensor {t.name}: no rate or decay")
    step = (t.flat_step, t.offset_step)
    if t.flat_step > 1:                         # slices of rows, which fill all shards
        f = flats[t.flat]
        good = not t.offset and not t.offset_step and f.real == "shard" and \
            f.shard * ranks * t.flat_step == math.prod(t.shape) and not t.shape[0] % t.flat_step
    else:
        good = t.flat in flats and t.count > 0 and (
            step == (0, 0) if t.count == 1 else step[0] == 1 if step[1] == 0 else not step[0])
    if not good or t.flat_step and flats[t.flat].count != t.count * t.flat_step:
        raise CheckError(f"tensor {t.name}: its {t.count} instances have no place in {t.flat}")


@refusing
def _nodes(p: Plan) -> None:
    """Pending sums: one for each bit that a count of leaves ever has at a grain's end. The host
    pushes what comes from all ranks in a grain as one: it must be a node of the tree."""
    grains, W, block = p.head.grains, p.head.ranks, p.head.block
    each = W if p.head.reduction == "exact" else 1          # leaves that a grain's reduction brings
    if block < 1 or block & (block - 1) or block >= 2 * grains * W:
        raise CheckError(f"{block} leaves are no tree of {grains * W}")
    if p.pushes and W > 1 and (p.head.order != "ranks" or grains > 1 and block % each):
        raise CheckError("what comes in a grain is no node of the host's tree")
    step, counter = each if p.head.order == "ranks" and not p.below else 1, 0
    block = check_own.host_block(block, each) if p.pushes else block
    for b in range((block - 1).bit_length()):               # bit b repeats after 2^(b+1) multiples
        tried = range(-(-2**b // step), min(grains, 2**(b + 1)))
        counter |= any(a * step >> b & 1 for a in tried) << b
    counter |= block * ((grains - 1) * step >= block)       # of all whole ones, one bit
    for f in p.flats:
        mask = counter if f.moves else 0
        if f.mask != mask or f.nodes != max(f.moves, bin(mask).count("1")):
            raise CheckError(f"flat {f.name}: pending sums do not fit {grains} grains")
    if p.head.order == "local" and W > 1 and p.head.block % grains:
        raise CheckError("a rank's own grains first: that is another tree")


@refusing
def sections(p: Plan) -> None:
    """Sections are a program's; every event is one of the plan's, and recorded somewhere."""
    if tuple(s.name for s in p.sections) != SECTIONS or \
            any(s.repeat not in ((1, p.head.grains) if s.name == "grain" else (1,))
                for s in p.sections):
        raise CheckError("sections are not those of a program")
    limits = {e.name: e.index for e in p.events}
    if len(limits) < len(p.events) or len({f.name for f in p.fns}) < len(p.fns):
        raise CheckError("an event or a function is listed twice")
    if p.head.overlap not in (0, 1):
        raise CheckError(f"overlap is {p.head.overlap}, neither 0 nor 1")
    steps = [(s.name, step) for s in p.sections for step in s.steps]
    made = {(e.name, e.index) for _, step in steps for e in step.recs}
    for name, step in steps:
        where = f"section {name}: {step.queue} {step.op} {step.unit}"
        for e in (*step.waits, *step.recs):
            if not 0 <= e.index < limits.get(e.name, 0):
                raise CheckError(f"{where}: no event {e}")
        for e in step.waits:
            if (e.name, e.index) not in made:
                raise CheckError(f"{where}: nothing records {e}")


# ---- the play

def _run(player: Program, name: str) -> None:
    player.section = name
    for s in player.p.section(name).steps:
        player.play(s)


def _train(player: Program, most: int = 1) -> None:
    """One training step, of at most so many grains."""
    last, repeat = len(player.order) - 1, player.p.section("grain").repeat
    player.begin()
    _run(player, "begin")
    player.grains = player.together * min(repeat, most)
    for player.local in range(player.grains // player.together):
        player.grain += 1
        _run(player, "grain")
        forward = [("fwd", n) for n in range(last)]
        kinds = [unit_of(unit)[0] for unit in player.order]
        back = [("bwd", n) for _, n in reversed(forward) if kinds[n] in player.facts.alive]
        player.ran([*forward, ("train", last), *back])
        player.empty(("ring", "x", "dx", "save", "leaf", "acc", "pend", "part", "down", "near"))
        player.grain += player.together - 1
    player.local = 0
    _run(player, "update")
    player.empty(())
    if player.together > 1 and player.counted:
        raise CheckError("the leaves' count does not go back")
    if player.updated != player.moving:
        raise CheckError(f"section update: {len(player.updated)} shards of {len(player.moving)}")


def _evaluate(player: Program) -> None:
    player.grain += 1
    _run(player, "eval")
    last = len(player.order) - 1
    player.ran([("fwd", n) for n in range(last)] + [("eval", last)])
    player.empty(("ring", "x", "save", "near"))


@refusing
def units(p: Plan) -> dict[str, int]:
    """Units of each kind, in order of forward."""
    counts: dict[str, int] = {}
    last = ""
    for s in p.section("eval").steps:
        if s.op.split(".")[0] in UNITS:
            kind, index = unit_of(s.unit)
            again = s.unit == last and len(s.op.split(".")) > 2     # another part of it
            if index != counts.get(kind, 0) - again or s.op.split(".")[1] != kind:
                raise CheckError(f"section eval: {s.unit} is out of order")
            counts[kind], last = index + 1, s.unit
    return counts


@refusing
def _recipe(p: Plan) -> None:
    _schedule("rate", p.recipe.rate, 1e30)
    _schedule("momentum", p.recipe.momentum, 1 - 1e-9)
    _scaler(p)


def _scaler(p: Plan) -> None:
    """f16 has one, and no other type."""
    if len(p.recipe.scaler) != (p.head.real == "f16") or p.recipe.skips < 1:
        raise CheckError(f"{p.head.real} with {len(p.recipe.scaler)} scalers")
    for s in p.recipe.scaler:
        if not 0 < s.first < 2.0 ** 128 or not 0 < s.least < 2.0 ** 128 or s.window < 0 or \
                s.hysteresis < 1 or s.consecutive not in (0, 1):
            raise CheckError(f"recipe: {s} is no scaler")


def check(p: Plan) -> None:
    """CheckError names the first thing that breaks a promise."""
    _classes(p)
    _runs(p)
    _recipe(p)
    _flats(p)
    _nodes(p)
    sections(p)
    play(p, functions(p, units(p)))


@refusing
def play(p: Plan, facts: Facts) -> None:
    """What the sections' steps do; facts: of the plan's functions."""
    player = Program(p, facts)
    _run(player, "init")
    player.forget()
    _run(player, "publish")
    player.published()
    _train(player, GRAINS)
    _train(player)
    _evaluate(player)
    _train(player)
    if player.most != p.head.live or p.head.live > p.head.bound:
        raise CheckError(f"{player.most} elements are gathered at once, {p.head.live} were "
                         f"promised, the bound is {p.head.bound}")
