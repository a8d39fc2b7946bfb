"""slices.py -- splits blocks that `zero.stage3_max_live_parameters` cannot hold whole.

Such a block becomes several flats that are gathered one after the other. A flat holds consecutive
tensors of forward, as many as fit the bound. A larger linear [out, in] is a flat of its own with an
instance for each slice of its rows (DeepSpeed's TiledLinear). Each run of calls on one flat becomes
a function. Slices fill their shards, so the slices of a tensor are contiguous: random numbers, norm
and hash see one tensor.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import groupby

from ..facts import ops
from ..facts.kernels import KERNELS, ROUND
from ..graph import model
from ..graph.graph import Body, BodyPart, Call, Graph, Tensor, UnitKind, Value
from ..plan.operand import Names, whole
from ..read.spec import Spec
from . import exchanges, flats

MOST = 64  # most slices of a linear
PARTS = 4096  # most parts of all blocks, each of which is several lines of the plan
ROWS = 8  # rows of a slice are a multiple, so that it starts at 16 bytes in any type


def graph(spec: Spec) -> Graph:
    """Return the graph of a spec with blocks split as needed, into at most PARTS parts. With
    accumulate layers none is split, since each part would be gathered for every micro-batch."""
    made = model.build(spec)
    made = replace(made, persistent=flats.persistent(spec, made))
    bound = spec.zero.stage3_max_live_parameters
    if spec.train.sequence_blocks > 1:
        cut = (exchanges.cut(k, spec.together) for k in made.kinds)
        return replace(made, kinds=tuple(cut))
    if spec.zero.stage < 3 or not bound or spec.together > 1:
        return made
    every = ((t, k.count) for k in made.kinds for t in k.tensors)
    kept = [(t, n) for t, n in every if t.name in made.persistent]
    room = bound - _padded(spec, kept)
    kinds = _kinds(spec, made, room)
    if _part_count(kinds) > PARTS:
        rooms = range(
            room,
            max(flats.padded(spec, sum(t.elems for t in k.tensors)) for k in made.kinds)
            + 1,
        )
        least = bisect_left(
            rooms,
            True,
            key=lambda r: _part_count(_kinds(spec, made, r)) <= PARTS,
        )
        kinds = _kinds(spec, made, rooms[least])
    return replace(made, kinds=kinds)


def _kinds(spec: Spec, made: Graph, room: int) -> tuple[UnitKind, ...]:
    """Return the kinds with blocks split to `room` elements."""
    return tuple(
        _split(spec, made, k, room) if k.x and "fwd" in k.bodies else k
        for k in made.kinds
    )


def _padded(spec: Spec, tensors: Iterable[tuple[Tensor, int]]) -> int:
    """Return the elements of the flats of (tensor, instances) pairs. Trainable and frozen tensors
    have flats of their own."""
    sizes = [0, 0]
    for t, count in tensors:
        sizes[t.group[2]] += ops.up(t.elems, flats.BLOCK) * count
    return sum(flats.padded(spec, n) for n in sizes)


def _part_count(kinds: Iterable[UnitKind]) -> int:
    """Return the number of parts of all blocks that are gathered alone."""
    return sum(k.count * sum(n for _, n in set(k.flats.values())) for k in kinds)


def notes(spec: Spec, made: Graph) -> Names:
    """Return notes on the split blocks."""
    out = []
    for k in (k for k in made.kinds if k.flats):
        parts = len({f for f, _ in k.flats.values()})
        many = ", ".join(
            f"{name} in {n} slices" for name, (_, n) in k.flats.items() if n > 1
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


def _split(spec: Spec, made: Graph, kind: UnitKind, room: int) -> UnitKind:
    """Split a block into flats of at most `room` elements, if it has more."""
    own = {t.name: t for t in kind.tensors if t.name not in made.persistent}

    def size(names: Iterable[str]) -> int:
        return _padded(spec, ((own[n], 1) for n in names))

    if size(own) <= room:
        return kind
    if any(c.rounds > 1 for c in kind.bodies["fwd"].calls):
        raise spec.wrong(
            "train.mlp_chunk",
            f"{kind.name} is gathered in parts (zero.stage3_max_live_parameters)",
            "auto, or blocks that are gathered whole",
        )
    # Of each flat: its tensors and the number of slices.
    cut: list[tuple[list[str], int]] = []
    for call in kind.bodies["fwd"].calls:
        names = [str(a) for k, a in call.args if k == "param" and str(a) in own]
        alone = len(names) == 1 and size(names) > room
        n = _slices(spec, call, own[names[0]], room) if alone else 1
        if names and cut and n == cut[-1][1] == 1 and size(cut[-1][0] + names) <= room:
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
    """Return the fewest slices of a linear that fit, or the most there can be if none fit."""
    if call.kernel != "zk_linear_fwd" or call.args[-1] != ("number", 1):
        return 1
    full = spec.cluster.ranks * flats.shard_unit(spec)
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
    """Replace calls on a sliced weight by calls on a slice. Slices add up dx: in half precision its
    sum is an f32 value that is rounded at the end."""
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
    """Return the first weight of `among` that a call reads or computes the gradient of, else ''."""
    return next(
        (str(a) for k, a in call.args if k in ("param", "grad") and str(a) in among),
        "",
    )


def _slice(call: Call, slices: int) -> Call:
    """Return a call on a whole weight as a call on rows [at, at + n)."""
    row = next(row for row in KERNELS.values() if row.whole == call.kernel)
    is_ = dict(zip(KERNELS[call.kernel].at, call.args, strict=True))
    assert all(is_[name] == ("number", n) for name, n in row.numbers.items()), call
    is_ |= {
        "at": ("int", "at"),
        "n": ("number", whole(is_["N"][1]) // slices),
    }
    return replace(call, kernel=row.name, args=tuple(is_[name] for name in row.at))


def _parts(body: Body, of: dict[str, tuple[str, int]]) -> Iterator[BodyPart]:
    """Yield the runs of calls that use one flat. Calls on slices form parts of their own."""
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
        yield BodyPart(tuple(calls), number, n, rows)
