"""stated.py -- proves that calls and tensors have the attributes that the plan states of its spec.

Forward calls are compared one by one, each operand by the mark in its kernel's row, in training and
in evaluation. Backward calls and recomputation have forward's numbers (fns.py). A tensor's
attributes follow from its place in the order in which forward calls first read tensors, and so does
the key of its random numbers. A call that draws random numbers has its place among all such calls
of the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import takewhile

from ..facts.kernels import KERNELS, NULL, backward
from ..facts.rope import frequencies
from ..plan.operand import Arg, Index, Layers, base, of_layer
from ..plan.plan import Call, Plan, Table, Tensor
from ..plan.recipe import OF_TENSORS, Stated, Turn
from .body import Frame
from .kernels import UNITS, whole
from .order import CheckError

Lines = Mapping[str, list[Stated]]
_MARKED = [f.name for row in UNITS.values() for f in row.formals if f.stated]
OF_CALLS = tuple(dict.fromkeys(_MARKED))


def prove(
    p: Plan, bodies: Mapping[str, Sequence[Frame]], counts: Mapping[str, int]
) -> None:
    """Prove the stated attributes. bodies: kind -> the forward function, followed by that of
    evaluation if it has its own."""
    lines = _lines(p.stated, sum(counts.values()))
    tensors = {t.name: t for t in p.tensors}
    first = 0
    key = 0
    place = 0
    for kind, count in counts.items():
        end = first + count
        units = range(first, end)
        forward = bodies[kind][0]
        last = bodies[kind][-1]
        _calls(p, lines, forward, forward.calls_of(), units)
        drawn = _drawn(forward, place)
        if last.fn.name.startswith("eval."):
            _calls(p, lines, last, takewhile(_no_draw, last.calls_of()), units)
            _drawn(last, place)
        place += count * drawn
        own = [tensors.pop(name) for name in forward.reads if name in tensors]
        _tensors(lines, own, units, key)
        first = end
        key += count * len(own)


def _no_draw(c: Call) -> bool:
    """Return False for the first call of an evaluation's draw, whose other calls repeat the
    loss's."""
    return c.kernel != "zk_pick"


def _lines(stated: Iterable[Stated], units: int) -> Lines:
    """Group the stated lines by their attribute."""
    out: dict[str, list[Stated]] = {what: [] for what in (*OF_CALLS, *OF_TENSORS)}
    for s in stated:
        inside = s.first >= 0 and s.end <= units
        full = s.count > 0 and s.values
        if s.what not in out or not inside or not full:
            raise CheckError(
                f"{s.what} of {s.count} units from {s.first} on is not a plan's"
            )
        out[s.what].append(s)
    return out


def _of(lines: Lines, what: str, units: range) -> tuple[object, ...]:
    """Return the values stated for these units, which must share one line."""
    found = [s for s in lines[what] if s.first < units.stop and units.start < s.end]
    if not found:
        return ()
    s = found[0]
    whole = s.first <= units.start and units.stop <= s.end
    if len(found) > 1 or not whole:
        raise CheckError(
            f"{what} is not stated once of units {units.start} to {units.stop - 1}"
        )
    return s.values


def _calls(
    p: Plan, lines: Lines, b: Frame, calls: Iterable[Call], units: range
) -> None:
    taken: dict[str, list[Arg]] = {what: [] for what in OF_CALLS}
    for c in calls:
        for what, arg in _marked(c):
            taken[what].append(arg)
    tables = {t.name: t for t in p.tables}
    for what, found in taken.items():
        for l, some in _layers(b, found, units):
            mine = [of_layer(arg, l) for arg in found]
            want = _of(lines, what, some)
            same = [
                _is(tables, arg, value) for arg, value in zip(mine, want, strict=False)
            ]
            if len(mine) != len(want) or not all(same):
                b.fail(
                    None,
                    f"{what} of its calls is {_told(mine)}, and stated as {_told(want)}",
                )


def _layers(b: Frame, args: Sequence[Arg], units: range) -> Iterator[tuple[int, range]]:
    """Yield groups of units with the same operands, each with its first unit's index within the
    kind."""
    each = [a for a in args if isinstance(a, Layers)]
    for a in each:
        if len(a.values) != len(units):
            b.fail(None, f"{a} is not of its {len(units)} units")
    if not each:
        yield 0, units
        return
    for l, unit in enumerate(units):
        yield l, range(unit, unit + 1)


def _drawn(b: Frame, first: int) -> int:
    """Return the number of forward calls of a unit that draw random numbers. first: the place of
    the first one."""
    found: list[Arg] = []
    for c in b.calls_of():
        if backward(c.kernel, c.args):
            continue
        at = KERNELS[c.kernel].at
        found += [c.args[at["place"]]] if "place" in at else []
    places = range(first, first + len(found))
    want = [Index(len(found), 0, place) for place in places]
    if found != want:
        b.fail(None, f"draws at {_told(found)}, not at {_told(want)}")
    return len(found)


def _marked(c: Call) -> Iterator[tuple[str, Arg]]:
    """Yield the stated operands of a forward call. A call on a slice counts as one on the
    weight."""
    row = KERNELS[c.kernel]
    if row.whole:
        c = whole(c, row)
        row = KERNELS[c.kernel]
    if backward(c.kernel, c.args):
        return
    for f, arg in zip(row.formals, c.args, strict=True):
        if f.stated and arg != NULL:
            yield f.name, arg


def _is(tables: Mapping[str, Table], arg: Arg, value: object) -> bool:
    """Return whether an argument equals a stated value, or is a table computed from it."""
    if not isinstance(value, Turn):
        return arg == value
    table = tables[base(arg)]
    if table.head != value.head:
        return False
    return table.freq == frequencies(value.head, value.theta, value.scaling)


def _told(values: Iterable[object]) -> str:
    return ",".join(map(str, values)) or "-"


def _tensors(lines: Lines, own: Sequence[Tensor], units: range, key: int) -> None:
    """Check the attributes of tensors. own: in forward order; key: that of the first."""
    for n, t in enumerate(own, key):
        if t.key != n or t.key_step != len(own):
            raise CheckError(f"tensor {t.name}: key {t.key} by {t.key_step}, not {n}")
    for what in OF_TENSORS:
        found = [getattr(t, what) for t in own]
        want = list(_of(lines, what, units))
        if what == "heads" and not want:
            want = [0] * len(own)
        if found != want:
            wrong = [
                t.name for t, a, b in zip(own, found, want, strict=False) if a != b
            ]
            raise CheckError(f"tensor {', '.join(wrong)}: {what} is not as stated")
