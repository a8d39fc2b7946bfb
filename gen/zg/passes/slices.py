"""slices.py -- blocks that `zero.stage3_max_live_parameters` does not hold whole.

Such a block is cut into flats that are gathered one after the other: tensors that follow each other
in forward, as many as the bound holds; a linear [out,in] that is larger still is a flat of its own,
with an instance for each slice of its output's columns. A body's calls become calls on slices, and
a function of each run that touches one of them. Slices fill their shards, so a tensor's follow each
other without a gap: what counts its elements (random numbers, norm, hash) sees one tensor.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import groupby

from ..facts import ops
from ..facts.kernels import KERNELS, ROUND
from ..graph import model
from ..graph.graph import Body, Call, Graph, Kind, Part, Tensor, Value
from ..plan.operand import Names, whole
from ..read.spec import Spec
from . import flats

MOST = 64  # slices of a linear
PARTS = 4096  # of all blocks: each is some lines of the plan
ROWS = 8  # a slice begins at a multiple of 16 bytes, of halves too


def graph(spec: Spec) -> Graph:
    """The graph of a spec, its blocks cut where they must be, into PARTS at most; with accumulate
    layers none is, for each part would be gathered for every micro-batch."""
    made = model.build(spec)
    made = replace(made, persistent=flats.persistent(spec, made))
    bound = spec.zero.stage3_max_live_parameters
    if spec.zero.stage < 3 or not bound or spec.together > 1:
        return made
    every = ((t, k.count) for k in made.kinds for t in k.tensors)
    kept = [(t, n) for t, n in every if t.name in made.persistent]
    room = bound - _whole(spec, kept)
    kinds = _kinds(spec, made, room)
    if _parted(kinds) > PARTS:
        rooms = range(
            room,
            max(
                flats.whole(spec, sum(t.elems for t in k.tensors))
                for k in made.kinds
            )
            + 1,
        )
        least = bisect_left(
            rooms, True, key=lambda r: _parted(_kinds(spec, made, r)) <= PARTS
        )
        kinds = _kinds(spec, made, rooms[least])
    return replace(made, kinds=kinds)


def _kinds(spec: Spec, made: Graph, room: int) -> tuple[Kind, ...]:
    return tuple(
        _cut(spec, made, k, room) if k.x and "fwd" in k.bodies else k
        for k in made.kinds
    )


def _whole(spec: Spec, tensors: Iterable[tuple[Tensor, int]]) -> int:
    """Elements of the flats of so many instances of tensors: what trains has its own."""
    sizes = [0, 0]
    for t, count in tensors:
        sizes[t.group[2]] += ops.up(t.elems, flats.BLOCK) * count
    return sum(flats.whole(spec, n) for n in sizes)


def _parted(kinds: Iterable[Kind]) -> int:
    """Parts of all blocks that are gathered by themselves."""
    return sum(
        k.count * sum(n for _, n in set(k.flats.values())) for k in kinds
    )


def notes(spec: Spec, made: Graph) -> Names:
    """What is cut."""
    out = []
    for k in (k for k in made.kinds if k.flats):
        parts = len({f for f, _ in k.flats.values()})
        many = ", ".join(
            f"{name} in {n} slices"
            for name, (_, n) in k.flats.items()
            if n > 1
        )
        out.append(
            f"zero.stage3_max_live_parameters: {k.name} is gathered in {parts} parts"
            + (f", of which {many}" if many else "")
        )
        if many and set(spec.targets) - {"cpu"}:
            out.append(
                "on a GPU a slice is a product of its own shape, which may sum in another "
                "order than the whole: there slices are a part of the recipe"
            )
    return tuple(out)


# ---- flats


def _cut(spec: Spec, made: Graph, kind: Kind, room: int) -> Kind:
    own = {t.name: t for t in kind.tensors if t.name not in made.persistent}

    def size(names: Iterable[str]) -> int:
        return _whole(spec, ((own[n], 1) for n in names))

    if size(own) <= room:
        return kind
    cut: list[tuple[list[str], int]] = []  # tensors, slices
    for call in kind.bodies["fwd"].calls:
        names = [
            str(a) for k, a in call.args if k == "param" and str(a) in own
        ]
        alone = len(names) == 1 and size(names) > room
        n = _slices(spec, call, own[names[0]], room) if alone else 1
        if (
            names
            and cut
            and n == cut[-1][1] == 1
            and size(cut[-1][0] + names) <= room
        ):
            cut[-1][0].extend(names)
        elif names:
            cut.append((names, n))
    of = {
        name: (f"{kind.name}_{i}", n)
        for i, (names, n) in enumerate(cut)
        for name in names
    }
    bodies = {
        name: _sliced(spec, body, {t: n for t, (_, n) in of.items() if n > 1})
        for name, body in kind.bodies.items()
    }
    cuts = {name: tuple(_parts(body, of)) for name, body in bodies.items()}
    return replace(
        kind, bodies=bodies, flats={name: of[name] for name in own}, cuts=cuts
    )


def _slices(spec: Spec, call: Call, t: Tensor, room: int) -> int:
    """The fewest slices of a linear that fit; where none does, the most that there can be."""
    if call.kernel != "zk_linear_fwd" or call.args[-1] != ("number", 1):
        return 1
    full = spec.cluster.ranks * flats.unit(spec)
    rows = max(ROWS, ops.TERMS[spec.train.precision])
    found = 1
    for n in range(2, MOST + 1):
        if t.shape[0] % (n * rows) or t.elems % (n * full):
            continue
        found = n
        if t.elems // n <= room:
            break
    return found


# ---- calls


def _sliced(spec: Spec, body: Body, slices: dict[str, int]) -> Body:
    """Calls on a slice, each of which is made for all of them; in halves what they sum is a value
    of its own."""
    out: list[Call] = []
    sums: list[Value] = []
    halves = spec.train.precision != "f32"
    for weight, calls in groupby(body.calls, key=lambda c: _weight(c, slices)):
        made = [_slice(c, slices[weight]) if weight else c for c in calls]
        for i, c in enumerate(made):
            if not halves or c.kernel != "zk_slice_bwd_x":
                continue
            dx, dy, w, M, N, K, *rest = c.args
            n = whole(M[1]) * whole(K[1])
            summed = Value(f"{dx[1]}.sum", "f32", n)
            sums.append(summed)
            total = ("value", summed.name)
            made[i] = replace(c, args=(total, dy, w, M, N, K, *rest))
            rounding = Call(ROUND, (dx, total, ("number", n)))
            made.append(rounding)
        out += made
    values = (*body.values, *sums)
    return Body(tuple(out), values)


def _weight(call: Call, among: Iterable[str]) -> str:
    """The weight of these that a call reads, or writes the gradient of."""
    return next(
        (
            str(a)
            for k, a in call.args
            if k in ("param", "grad") and str(a) in among
        ),
        "",
    )


def _slice(call: Call, slices: int) -> Call:
    """A call on all of a weight as the one on rows [at, at + n) of it."""
    row = next(row for row in KERNELS.values() if row.whole == call.kernel)
    is_ = dict(zip(KERNELS[call.kernel].at, call.args, strict=True))
    assert all(
        is_[name] == ("number", n) for name, n in row.numbers.items()
    ), call
    is_ |= {
        "at": ("int", "at"),
        "n": ("number", whole(is_["N"][1]) // slices),
    }
    return replace(
        call, kernel=row.name, args=tuple(is_[name] for name in row.at)
    )


def _parts(body: Body, of: dict[str, tuple[str, int]]) -> Iterator[Part]:
    """Runs of calls that touch one flat; those on slices keep to themselves."""
    runs: list[tuple[list[Call], str, int]] = []
    for c in body.calls:
        flat, n = of.get(_weight(c, of), ("", 1))
        calls, old, slices = runs[-1] if runs else ([], "", 0)
        alike = flat == old
        if n == 1 and "" in (flat, old):
            alike = True
        if not runs or n != slices or not alike:
            runs.append(([c], flat, n))
            continue
        calls.append(c)
        runs[-1] = calls, flat or old, n
    for number, (calls, _, n) in enumerate(runs):
        rows = 0
        if n > 1:
            rows = whole(calls[0].args[-1][1])
        yield Part(tuple(calls), number, n, rows)
