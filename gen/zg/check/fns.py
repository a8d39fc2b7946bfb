"""fns.py -- proves that the calls of the plan's functions fit together, call by call.

It proves:
 operands   every operand lies inside its buffer; a parameter starts at a tensor and has its size
 values     every read finds a whole value of its size and type, written before in this function or
            saved by the forward one, and not overwritten since; every value is used
 backward   each forward call has its backward calls, on the same numbers and the same values;
            evaluation runs the same forward calls
 again      backward recomputes missing values by forward's own calls, on the same operands
 additions  a value that is used twice has two gradients: backward adds as often as forward. A fused
            residual + norm is checked as an add followed by a norm
 rounds     calls in rounds go through the parts of whole values, each once and in order
 a draw     an evaluation ends with the logits of one row, made like the logits of the loss
 leaves     every tensor's gradient is written once, by the first function in backward that reads
            the tensor; the other readers add to it
 frozen     nothing runs backward for values that depend on no trainable tensor
 numbers    attributes that shapes do not determine equal the plan's `stated` lines (stated.py)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from ..facts.between import PASSED, SAVED
from ..facts.kernels import (
    BACK,
    FACTOR,
    FORWARD,
    KERNELS,
    LOSS_SUMS,
    LOSSES,
    NULL,
    ROUND,
    Formal,
    backward,
    forward,
    value,
)
from ..plan.operand import base
from ..plan.plan import Call, Fn, Plan
from . import grads, slices, stated
from .body import Exchanged, Frame, Made, Ran, Spot, Written
from .kernels import BODIES, SCALED, UNITS, kept, parts
from .leaves import leaves
from .order import CheckError, refusing
from .rounds import through


@dataclass(frozen=True)
class Facts:
    """Properties of functions that steps depend on.

    steps: (kind, flat) -> elements between neighbouring units of the kind within an instance of the
    flat; parts: (body, kind) -> the functions in order, each with the rows of its weight that it is
    called from; flats: function -> formal -> flat; took, gave: function of a body that is cut at
    exchanges -> values that it reads from before it, and that it leaves; exchanged: (kind, value)
    -> the exchange that brought it; samples: functions that work on whole samples.
    """

    steps: dict[tuple[str, str], int]
    parts: dict[tuple[str, str], list[tuple[str, list[int]]]]
    flats: dict[str, dict[str, str]]
    took: dict[str, list[Spot]]
    gave: dict[str, list[Spot]]
    exchanged: dict[tuple[str, Made], Exchanged]
    samples: frozenset[str]


def _numbered(c: Call, at: int) -> Call:
    """Return the call with the first row of a slice in place of `at`."""
    return replace(c, args=tuple(at if a == "at" else a for a in c.args))


Span = tuple[Formal, str, int, int]  # an operand: its formal, base, lo, hi


def _clear(out: Span, x: Span) -> bool:
    """Return whether an output is disjoint from another operand, or is allowed to alias it."""
    f, where, lo, hi = out
    formal, there, low, high = x
    if where != there or hi <= low or high <= lo:
        return True
    return formal.name in f.alias and (lo, hi) == (low, high)


def _apart(b: Frame, call: Call) -> None:
    """Require that outputs overlap no operand, except one that they may alias exactly. Outputs
    come first."""
    row = UNITS[call.kernel]
    dims = b.dims(call, row)
    spans: list[Span] = []
    for f, arg in zip(row.formals, call.args, strict=True):
        if f.mode not in "<>" and (f.mode, base(arg)) != ("@", "tmp"):
            continue
        if arg == NULL or kept(f, arg):
            continue
        size = value(f.elems, dims) * b.bytes_of(f.type)
        where, at = b.place(call, arg, size)
        spans.append((f, where, at, at + size))
    outs = [s for s in spans if s[0].mode == ">"]
    for n, out in enumerate(outs):
        others = [x for m, x in enumerate(spans) if m != n]
        if not all(_clear(out, x) for x in others):
            _, where, at, _ = out
            b.fail(call, f"{where}+{at} overlaps another operand")


def _ran_forward(b: Frame) -> list[Ran]:
    """Return the forward calls that ran."""
    return [r for r in b.ran if forward(r[0].kernel, r[0].args)]


def _wanted(b: Frame) -> Counter[Made]:
    """Return the backward calls that forward requires, as (kernel, numbers, forward's
    operands)."""
    out = []
    for c, _, is_ in _ran_forward(b):
        for kernel in FORWARD[c.kernel]:
            back = BACK[kernel]
            if any(b.moves(is_[n]) for n in back.makes):
                numbers = [c.args[n] for _, n in back.numbers]
                same = [is_[n] for _, n in back.same]
                out.append((kernel, *numbers, *same))
    return Counter(out)


def _ran_backward(b: Frame) -> Counter[Made]:
    """Return the backward calls that ran. None may take a forward result as its gradient."""
    made = {number for _, number, _ in _ran_forward(b)}
    out = []
    for c, _, is_ in b.ran:
        if backward(c.kernel, c.args):
            back = BACK[c.kernel]
            if is_[back.dy][0] in made:
                b.fail(c, f"{c.args[back.dy]} is no gradient")
            numbers = [c.args[n] for n, _ in back.numbers]
            same = [is_[n] for n, _ in back.same]
            out.append((c.kernel, *numbers, *same))
    return Counter(out)


def run(b: Frame) -> None:
    """Run the calls of a body's functions, and prove them one by one."""
    for fn in b.fns:
        b.fn = fn
        b.took[fn.name], b.wrote = {}, []
        _launched(b, fn.calls)
        for at in slices.rounds(b, fn):
            _calls(b, [_numbered(c, at) for c in fn.calls])
        if b.cut:
            _exchanged(b, fn)
    slices.end(b)


def _exchanged(b: Frame, fn: Fn) -> None:
    """Run the exchange that follows a function. Its temporary values end here, and all else that
    later functions read is among its outputs."""
    for v in b.held.pop("tmp", []) if "tmp" not in b.shared else ():
        if not b.done(v):
            b.fail(None, f"tmp+{v.lo} is written and not read")
    b.gave[fn.name] = b.left()
    if len({KERNELS[c.kernel].samples for c in fn.calls}) > 1:
        b.fail(None, "works on a block and on whole samples")
    for c in fn.then:
        b.call(c)


def _calls(b: Frame, calls: list[Call]) -> None:
    for rounds, some in groupby(calls, key=lambda c: c.rounds):
        group = list(some)
        if rounds < 1:
            b.fail(group[0], f"is called {rounds} times")
        for c in through(b, rounds, group) if rounds > 1 else group:
            _one(b, c)


def _one(b: Frame, c: Call) -> None:
    """Check one call, and run it as the plain calls that it is made of."""
    _averaged(b, c)
    _apart(b, c)
    if KERNELS[c.kernel].whole:
        slices.call(b, c)
    elif c.kernel == ROUND and not base(c.args[1]).startswith("acc"):
        slices.rounded(b, c)
    else:
        for part in parts(c):
            b.call(part)


def _averaged(b: Frame, c: Call) -> None:
    """Require that calls of the loss compute the mean that the head names. In f16 the loss scale is
    in the factor of a micro-batch, if there is one. The only value that fits a scale is a factor
    that this body has made."""
    trains = not b.fn.name.startswith("eval.")
    scaler = SCALED if b.head.real == "f16" else NULL
    mean = b.head.loss_mean if trains else "tokens"
    if c.kernel in LOSS_SUMS.values() and c.kernel != LOSS_SUMS[mean]:
        b.fail(c, f"the mean is over {mean}")
    if c.kernel == FACTOR and c.args[2] != scaler:
        b.fail(c, "f16 needs a scale to train, nothing else does")
    if c.kernel not in LOSSES:
        return
    if trains != (c.args[1] != NULL):
        b.fail(c, "training needs the gradient, evaluation does not")
    if mean == "micro_batch":
        if base(c.args[4]) != "tmp":
            b.fail(c, "needs the factor of its micro-batch")
    elif c.args[4] != (scaler if trains else NULL):
        b.fail(c, "f16 needs a scale to train, nothing else does")


def _launched(b: Frame, calls: Sequence[Call]) -> None:
    """Require that each call has the kernel and the integers of its launch."""
    for c in calls:
        launch = next((l for l in b.p.launches if l.name == c.launch), None)
        shape = tuple(a for a in c.args if isinstance(a, int))
        if not launch or launch.kernel != c.kernel or launch.shape != shape:
            b.fail(c, f"launch {c.launch} is of another shape")


def _end(b: Frame, *outs: str) -> None:
    """Require that `outs` are whole and that every value was used."""
    for name in outs:
        there = [(v.lo, v.hi, v.type) for v in b.held.get(name, [])]
        if any(name in f.outs for f in b.fns) and there != [(0, b.width, "real")]:
            b.fail(None, f"{name} is not written whole")
    for where, values in b.held.items():
        for v in values:
            if where in ("tmp", *PASSED) and not b.done(v):
                b.fail(None, f"{where}+{v.lo} is written and not read")
    for c, number, _ in b.ran:
        if number in b.again - b.of:
            b.fail(c, "is recomputed and not read")


def _drawn(b: Frame) -> None:
    """Prove that the last calls pick a row and compute its logits as the loss's logits are
    computed. They are removed from the calls of the loss."""
    at = max(n for n, (c, _, _) in enumerate(b.ran) if c.kernel == "zk_pick")
    (pick, _, (row, rows, *_)), *draws = b.ran[at:]
    b.ran = b.ran[:at]
    of = {row: rows}  # value of one row -> value of all rows
    # An evaluation drops nothing.
    kept = {(n, 0): is_[1] for c, n, is_ in b.ran if c.kernel == "zk_dropout_fwd"}
    for draw, number, is_ in draws:
        for c, made, its in reversed(b.ran):
            every = [kept.get(x, x) if isinstance(x, tuple) else x for x in its]
            if c.kernel == draw.kernel and _of_a_row(draw, is_, c, every, of):
                of[number, 0] = made, 0
                break
        else:
            b.fail(draw, "is not the logits of a row")
    losses = [is_ for c, _, is_ in b.ran if c.kernel in LOSSES]
    drawn = (number, 0)
    if pick.args[3] != b.head.rows or of[drawn] not in losses[-1]:
        b.fail(pick, "is not the logits of a row")
    held = (v for values in b.held.values() for v in values)
    logits = next(v for v in held if v.made == drawn)
    logits.used = True


def _capped(b: Frame) -> list[Made]:
    """Prove that each loss has the cap of its logits, and that no other call reads capped logits.
    Return the values of the losses' logits."""
    caps = {
        number: c.args[KERNELS[c.kernel].at["cap"]]
        for c, number, _ in b.ran
        if c.kernel == "zk_softcap"
    }
    out = []
    for c, _, is_ in b.ran:
        row = KERNELS[c.kernel]
        reads = [
            what
            for f, what in zip(row.formals, is_, strict=True)
            if f.mode == "<" and isinstance(what, tuple)
        ]
        if c.kernel not in LOSSES and any(what[0] in caps for what in reads):
            b.fail(c, "reads capped logits")
        if c.kernel in LOSSES:
            logits = is_[row.at["logits"]]
            cap = c.args[row.at["cap"]] if "cap" in row.at else 0.0
            if caps.get(logits[0], 0.0) != cap:
                b.fail(
                    c, f"cap is {cap}, that of its logits {caps.get(logits[0], 0.0)}"
                )
            out.append(logits)
    return out


def _of_a_row(
    draw: Call,
    is_: list[Any],
    call: Call,
    its: list[Any],
    of: Mapping[Made, Made],
) -> bool:
    """Return whether a call equals another one, applied to one row instead of all rows or a part of
    them."""
    for f, one, every in zip(KERNELS[call.kernel].formals, is_, its, strict=True):
        if f.mode == "<":
            whole = of.get(one, ("no",))
            if every[: len(whole)] != whole:
                return False
        elif f.mode != ">" and one != (1 if f.name == "M" else every):
            return False
    return True


def _unit_bodies(
    p: Plan, kind: str, fns: dict[str, Fn], count: int, below: bool
) -> list[Frame]:
    """Return the frames of a kind's forward functions, then of backward on the saved values. below:
    the input of its first unit has a gradient."""
    width = p.head.value
    known: dict[Made, int] = {}

    def value(name: str) -> list[Written]:
        return [Written(0, width, "real", (name,), True)]

    x: set[Made] = {("x",)} if below else set()
    forward, backward = (_functions(fns, body, kind) for body in ("fwd", "bwd"))
    if not forward:
        out, logits = [], []
        for body in ("train", "eval"):
            function = [fns[f"{body}.{kind}"]]
            b = Frame(p, function, {"x": value("x")}, known, apart=False, alive=x)
            run(b)
            if body == "eval":
                _drawn(b)
            _end(b, "dx")
            logits.append(_capped(b))
            out.append(b)
        if (
            not _wanted(out[0]) == _ran_backward(out[0]) == _wanted(out[1])
            or _ran_backward(out[1])
            or out[0].reads != out[1].reads
            or logits[0] != logits[1]
            or not grads.adds_back(out[1], out[0])
        ):
            out[0].fail(None, "forward, backward and evaluation do not agree")
        return out
    for _ in range(2):
        fwd = Frame(p, forward, {"x": value("x")}, known, alive={*x})
        run(fwd)
        # The input of the second unit depends on the first unit's tensors.
        if count > 1 and fwd.reads.keys() & fwd.moving:
            x = {("x",)}
    _end(fwd, "y")
    kept = {name: fwd.held.get(name, []) for name in SAVED}
    saved = [v for values in kept.values() for v in values]
    y = [replace(v, used=True) for v in fwd.held["y"]]
    if fwd.moves(y[0].made) != bool(backward) or not backward and saved:
        fwd.fail(None, "runs backward for what does not move, or not for what does")
    if not backward:
        return [fwd]
    bwd = Frame(
        p,
        backward,
        {"x": value("x"), "y": y, "dy": value("dy"), **kept},
        known,
        again=frozenset(n for _, n, _ in fwd.ran),
        twins=fwd.times,
        alive=fwd.alive,
        sorted=fwd.sorted,
        heads=fwd.heads,
    )
    for v in saved if fwd.cut else ():
        v.used = False  # forward's own functions may have read it
    for name in ("x", "y", "dy", *SAVED):
        if not any(name in f.ins for f in bwd.fns):
            bwd.held.pop(name)
    run(bwd)
    _end(bwd, "dx")
    if (
        _wanted(fwd) != _ran_backward(bwd)
        or _ran_backward(fwd)
        or not grads.adds_back(fwd, bwd)
    ):
        bwd.fail(None, "does not run backward what ran forward")
    dx = bwd.held["dx"][0].made if any("dx" in f.outs for f in bwd.fns) else ()
    grads.prove(fwd.ran, bwd.ran, y[0].made, dx, bwd.fail)
    for c, number, _ in _ran_forward(bwd):
        if number not in {n for _, n, _ in fwd.ran}:
            bwd.fail(c, "is not what ran forward")
    _saved(bwd, kept)
    return [fwd, bwd]


def _saved(bwd: Frame, kept: dict[str, list[Written]]) -> None:
    """Require that backward has read all values that forward saved, by formal."""
    for name, values in kept.items():
        for v in bwd.held.get(name, values):
            if not v.used:
                bwd.fail(None, f"{name}+{v.lo} is saved and not read")


def _functions(fns: dict[str, Fn], body: str, kind: str) -> list[Fn]:
    """Return the functions of a body: one, or its parts in order."""
    name = f"{body}.{kind}"
    if name in fns:
        return [fns[name]]
    many = sum(other.startswith(f"{name}.") for other in fns)
    return [fns[f"{name}.{n}"] for n in range(many)]


@refusing
def functions(p: Plan, counts: dict[str, int]) -> Facts:
    """Prove all functions of units. counts: units of each kind, in forward order.

    Raises CheckError.
    """
    fns = {f.name: f for f in p.fns}
    bodies: dict[str, list[Frame]] = {}
    alive: set[str] = set()
    for kind, count in counts.items():
        bodies[kind] = _unit_bodies(p, kind, fns, count, bool(alive))
        if len(bodies[kind]) > 1:
            alive.add(kind)
    stated.prove(p, bodies, counts)
    made = [b for kind in counts for b in bodies[kind]]
    idle = {f.name for f in p.fns if f.body in BODIES} - {
        f.name for b in made for f in b.fns
    }
    if idle:
        raise CheckError(f"no unit has {sorted(idle)}")
    parts = {
        (b.fn.body, b.kind): [(f.name, slices.rounds(b, f)) for f in b.fns]
        for b in made
    }
    flats = {f.name: b.flats.get(f.name, {}) for b in made for f in b.fns}
    cut = [b for b in made if b.cut]
    return Facts(
        steps=leaves(p, bodies, counts),
        parts=parts,
        flats=flats,
        took={name: [*some] for b in cut for name, some in b.took.items()},
        gave={name: some for b in cut for name, some in b.gave.items()},
        exchanged={(b.kind, m): x for b in cut for m, x in b.exchanged.items()},
        samples=frozenset(
            f.name
            for b in cut
            for f in b.fns
            if any(KERNELS[c.kernel].samples for c in f.calls)
        ),
    )
