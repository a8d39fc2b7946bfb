"""exchanges.py -- cuts blocks into functions at the exchanges around attention.

If samples are cut into blocks of tokens (`train.sequence_blocks`), a unit's calls work on one
block, except attention: it needs all tokens of a sample, for some of the heads. So a body becomes
several functions. Those before and after attention run once for each block of a rank, attention's
once for the sample. In between, an exchange takes each rank of a context group from the rows of its
blocks to its share of the heads, or back (Ulysses).

If one block at a time goes through a unit, it has temporary space to itself until a body's last
function has run. Otherwise only a value of one function lies there. The others lie in classes
`rows`, with a slot for each block, and `heads`, with a slot for each sample.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from ..facts.kernels import EXCHANGES, KERNELS
from ..graph.graph import BodyPart, Call, UnitKind
from ..plan.operand import whole


def cut(kind: UnitKind, together: int) -> UnitKind:
    """Cut the bodies of a kind at exchanges, if it has any. together: blocks and micro-batches that
    go through a unit before the next unit runs."""
    cuts = {
        name: _parts(body.calls)
        for name, body in kind.bodies.items()
        if any(c.kernel in EXCHANGES for c in body.calls)
    }
    heads: set[str] = set()
    bodies = dict(kind.bodies)
    for name, parts in cuts.items():
        calls = [c for part in parts for c in (*part.calls, *part.then)]
        bodies[name] = replace(bodies[name], calls=tuple(calls))
        for part in parts:
            heads |= {*values(*part.calls)} if part.sample else set()
            heads |= {values(c)[not EXCHANGES[c.kernel]] for c in part.then}
    return replace(
        kind,
        bodies=bodies,
        cuts=cuts,
        heads=frozenset(heads),
        between={
            name: _between(parts) if together > 1 else frozenset()
            for name, parts in cuts.items()
        },
    )


@dataclass
class _Run:
    """Calls on blocks, or on samples, and the exchanges that follow them."""

    sample: bool
    calls: list[Call] = field(default_factory=list)
    then: list[Call] = field(default_factory=list)


def _parts(calls: Iterable[Call]) -> tuple[BodyPart, ...]:
    """Return the parts of a body: the calls before, between and after its exchanges.

    Attention is computed for whole samples, all else for blocks. Recomputation may come after the
    exchange that a later one of its calls needs a result of: it moves before that exchange. Saved
    heads may be exchanged again before any call on samples.
    """
    runs = [_Run(False)]
    for c in calls:
        to_heads = EXCHANGES.get(c.kernel)
        mine = KERNELS[c.kernel].samples if to_heads is None else not to_heads
        run = runs[-1] if runs[-1].sample == mine or len(runs) == 1 else runs[-2]
        if to_heads is None:
            run.calls.append(c)
            continue
        run.then.append(c)
        if run is runs[-1]:
            runs.append(_Run(to_heads))
    return tuple(
        BodyPart(tuple(r.calls), n, sample=r.sample, then=tuple(r.then))
        for n, r in enumerate(runs)
    )


def values(*calls: Call) -> list[str]:
    """Return the values that calls name."""
    return [str(a) for c in calls for k, a in c.args if k == "value"]


def used(part: BodyPart) -> tuple[set[str], set[str]]:
    """Return the values that a part reads from elsewhere, and those that it makes."""
    reads: set[str] = set()
    made: set[str] = set()
    for c in part.calls:
        for f, (kind, name) in zip(KERNELS[c.kernel].formals, c.args, strict=True):
            if kind == "value" and f.mode == "<" and name not in made:
                reads.add(str(name))
        for f, (kind, name) in zip(KERNELS[c.kernel].formals, c.args, strict=True):
            if kind == "value" and f.mode != "<":
                made.add(str(name))
    return reads, made


def _between(parts: Iterable[BodyPart]) -> frozenset[str]:
    """Return the values that several parts use, or an exchange."""
    found: dict[str, set[int]] = {}
    for part in parts:
        for name in values(*part.calls):
            found.setdefault(name, set()).add(part.number)
        for name in values(*part.then):
            found.setdefault(name, set()).update((-1, part.number))
    return frozenset(
        name
        for name, where in found.items()
        if len(where) > 1 and name not in ("x", "y", "dx", "dy")
    )


@dataclass(frozen=True)
class Move:
    """One transfer of an exchange. slot: index of the block among those of the rank; rows, heads:
    offsets in bytes within the value of a block and within that of a sample; rows_step, heads_step:
    from the part of one rank to the next there."""

    slot: int
    rows: int
    heads: int
    rows_step: int
    heads_step: int
    bytes: int


def moves(exchange: Call, batch: int, ranks: int, real: int) -> list[Move]:
    """Return the transfers of an exchange, for each block of a rank and each of `batch` samples.

    Each rank of a context group has k blocks in a row. Rows lie as [rank][sample][token of the
    block][heads of the rank], heads as [sample][rank][block of the rank][token][heads].
    """
    n, k = (whole(a) for kind, a in exchange.args if kind == "number")
    forward = exchange.kernel in ("to_heads", "to_heads_bwd")
    block = (n if forward else n // k) * real  # bytes of the rows of a block
    piece = block // (batch * ranks)  # of a sample, for one rank
    return [
        Move(
            slot=j,
            rows=b * piece,
            heads=(b * ranks * k + j) * piece,
            rows_step=batch * piece,
            heads_step=k * piece,
            bytes=piece,
        )
        for j in range(k)
        for b in range(batch)
    ]
