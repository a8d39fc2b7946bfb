"""place.py -- assigns offsets: to values in a function's temporary space, to classes in an arena.

`stack` never reuses a byte: an upper bound, and the oracle of tests. `pack` overlaps values whose
lifetimes do not meet: the largest first, each at the lowest free offset. A result that a kernel may
write in place takes the place of the operand.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ..facts import ops
from ..facts.between import BETWEEN, PASSED, SAVED
from ..facts.kernels import KERNELS
from ..graph.graph import Body, Graph
from ..plan import plan

ALIGN = 64  # bytes: a vector
PAGE = 4096  # bytes: slots of classes start on pages


@dataclass(frozen=True)
class Item:
    """A value to place: its bytes, and the first and last time of its use (inclusive)."""

    name: str
    size: int
    first: int
    last: int


@dataclass(frozen=True)
class Packed:
    """Offsets by name, and the bytes of all."""

    at: Mapping[str, int]
    size: int


def stack(items: Sequence[Item]) -> Packed:
    """Place items one after the other."""
    at, end = {}, 0
    for item in items:
        at[item.name] = end
        end += ops.up(item.size, ALIGN)
    return Packed(at, end)


def pack(items: Sequence[Item]) -> Packed:
    """Place items by size at the lowest gap between the placed items that live at the same time."""
    at: dict[str, int] = {}
    done: list[Item] = []
    end = 0
    for item in sorted(items, key=lambda i: (-i.size, i.first, i.name)):
        low = 0
        for other in sorted(
            (o for o in done if o.first <= item.last and item.first <= o.last),
            key=lambda o: at[o.name],
        ):
            if at[other.name] - low >= item.size:
                break
            low = max(low, at[other.name] + ops.up(other.size, ALIGN))
        at[item.name] = low
        done.append(item)
        end = max(end, low + ops.up(item.size, ALIGN))
    return Packed(at, end)


def times(body: Body) -> list[int]:
    """Return the time of each call. Calls of a loop share a time, so their values live as long as
    the loop."""
    out: list[int] = []
    before = 1
    for call in body.calls:
        out.append(out[-1] + (not 1 < call.rounds == before) if out else 0)
        before = call.rounds
    return out


def lifetimes(body: Body, outside: set[str], real: int) -> list[Item]:
    """Return the values that live only in a body's temporary space."""
    spans: dict[str, list[int]] = {}
    for t, call in zip(times(body), body.calls, strict=True):
        for kind, name in call.args:
            if kind == "value" and name not in outside:
                spans.setdefault(str(name), []).append(t)
    out = []
    size = {v.name: v.bytes(real) for v in body.values}
    for name, touched in spans.items():
        first, *_ = touched
        out.append(Item(name, size[name], first, touched[-1]))
    return out


def in_place(body: Body, items: Sequence[Item]) -> dict[str, str]:
    """Map results to the value whose place they take: the operand that their call reads last, if
    the kernel may write in place."""
    of = {item.name: item for item in items}
    owner: dict[str, str] = {}
    for t, call in zip(times(body), body.calls, strict=True):
        row, out = KERNELS[call.kernel], of.get(str(call.args[0][1]))
        for name in row.formals[0].alias if call.rounds == 1 else ():
            old = of.get(str(call.args[row.at[name]][1]))
            if (
                out
                and old
                and out.name not in owner
                and old.last == out.first == t
                and old.size == out.size
            ):
                owner[out.name] = owner.get(old.name, old.name)
    return owner


def pack_in_place(body: Body, items: Sequence[Item]) -> Packed:
    """Pack items; results written in place share the place of their operand."""
    owner, whole = in_place(body, items), {item.name: item for item in items}
    for name, first in owner.items():  # in order of the calls
        whole[first] = replace(whole[first], last=whole.pop(name).last)
    packed = pack(list(whole.values()))
    return replace(
        packed,
        at={i.name: packed.at[owner.get(i.name, i.name)] for i in items},
    )


OUTSIDE = {"x", "y", "dx", "dy"}


@dataclass(frozen=True)
class Bodies:
    """Places of values by (kind, body): those between functions also by their operand, and saved
    ones of body "". work: bytes of the largest kernel scratch."""

    between: dict[tuple[str, str, str], Packed]
    tmp: dict[tuple[str, str], Packed]
    work: int

    def operands(self, kind: str, body: str) -> dict[str, Packed]:
        """Return the places of a body's values by the base of their operands."""
        bodies = {n: "" if b.saved else body for n, b in BETWEEN.items()}
        places = {n: self.between[kind, of, n] for n, of in bodies.items()}
        return {**places, "tmp": self.tmp[kind, body]}

    def size(self, name: str, kind: str = "") -> int:
        """Return the bytes of the values of an operand: of a kind, or the most of any body."""
        found = (
            packed.size
            for (k, _, n), packed in self.between.items()
            if n == name and kind in ("", k)
        )
        return max(found, default=0)


def bodies(graph: Graph, real: int) -> Bodies:
    """Place the values of every body. real: bytes of the stored type."""
    out = Bodies({}, {}, 0)
    work = 0
    for kind in graph.kinds:
        for n in SAVED:
            kept = [v for v in kind.saved if (v.name in kind.heads) == BETWEEN[n].heads]
            items = [Item(v.name, v.bytes(real), 0, 0) for v in kept]
            out.between[kind.name, "", n] = stack(items)
        outside = OUTSIDE | {v.name for v in kind.saved}
        for name, body in kind.bodies.items():
            items = lifetimes(body, outside, real)
            between, at = kind.between.get(name, frozenset()), (kind.name, name)
            some = [i for i in items if i.name in between]
            for n in PASSED:
                side = [i for i in some if (i.name in kind.heads) == BETWEEN[n].heads]
                out.between[*at, n] = pack_in_place(body, side)
            out.tmp[at] = pack_in_place(
                body, [i for i in items if i.name not in between]
            )
            work = max([work, *(c.scratch for c in body.calls)])
    return replace(out, work=work)


@dataclass(frozen=True)
class Wanted:
    """A class without its place: its slots, bytes of a slot, and the other fields of plan.Class."""

    name: str
    slots: int
    size: int
    arena: str = "device"
    readers: str = "own"
    targets: str = "all"


def classes(wanted: Sequence[Wanted]) -> tuple[plan.Class, ...]:
    """Place classes: in each arena first those of all targets, and of these first those that peers
    read."""
    out, ends = [], {"device": 0, "host": 0, "file": 0}
    arenas = list(ends)

    def order(c: Wanted) -> tuple[int, int, bool]:
        targets = plan.TARGETS.index(c.targets)
        return arenas.index(c.arena), targets, c.readers == "own"

    for c in sorted(wanted, key=order):
        stride = ops.up(c.size, PAGE)
        made = plan.Class(
            name=c.name,
            arena=c.arena,
            readers=c.readers,
            targets=c.targets,
            slots=c.slots,
            stride=stride,
            at=ends[c.arena],
        )
        ends[c.arena] += made.bytes
        out.append(made)
    return tuple(out)
