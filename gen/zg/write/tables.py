"""tables.py -- a Plan's records as rows of C: tables of train.c, and the words they are made of.

A row is an initialiser of a struct of kernels/zk.h or runtime/zr.h, its fields in order or by name.
"""
from __future__ import annotations

from typing import Iterable, Sequence

from ..facts import ops, stores
from ..plan import plan
from ..plan.plan import Plan

# By whose name the runtime knows an arena.
ARENAS = {"device": "ZR_MAIN", "host": "ZR_HOST", "file": "ZR_STORE"}
VARS = "ijk"                    # of nested loops: roll.DEPTH of them
COLUMNS = 100
# What a function is a part of, by the first word of its name; else of the optimizer's step.
PARTS = {"fwd": "forward", "train": "head", "bwd": "backward", "own": "reduce", "sum": "reduce",
         "join": "reduce", "count": "reduce"}


# ---- words

def upper(name: str) -> str:
    return name.replace(".", "_").upper()


def lower(name: str) -> str:
    return name.replace(".", "_")


def number(n: int) -> str:
    kind = "INT64_C" if n < 2**63 else "UINT64_C"
    return str(n) if abs(n) < 2**31 else f"{kind}({n})"


def real(x: float) -> str:
    return float(x).hex() if x not in (0.0, 1.0) else repr(x)


def affine(value: int, growth: Sequence[int], per: int = 0) -> str:
    """value + sum of growth[d] * loop variable d + per * grain."""
    parts = [number(value)] if value or not (any(growth) or per) else []
    for var, g in [*zip(VARS, growth), ("g", per)]:
        if g:
            term = var if abs(g) == 1 else f"{number(abs(g))} * {var}"
            sign = ("+ " if parts else "") if g > 0 else "- " if parts else "-"
            parts.append(sign + term)
    return " ".join(parts)


def wrap(text: str, indent: int) -> list[str]:
    """A statement over lines of at most COLUMNS, later ones indented by four more."""
    out, pad = [], " " * indent
    while len(pad + text) > COLUMNS and ", " in text[:COLUMNS - len(pad)]:
        cut = text.rfind(", ", 0, COLUMNS - len(pad)) + 1
        out.append(pad + text[:cut])
        text, pad = text[cut + 1:], " " * (indent + 4)
    return [*out, pad + text]


def launch_name(name: str) -> str:
    return f"L_{lower(name)}"


# ---- rows

def row(values: Iterable[object]) -> str:
    """An initialiser, all of it."""
    return f"{{{', '.join(map(str, values))}}}"


def braces(values: Sequence[int]) -> str:
    """An initialiser, without the zeros that C fills in at its end."""
    last = max((n for n, v in enumerate(values) if v), default=0)
    return f"{{{', '.join(map(str, values[:last + 1]))}}}"


def groups(p: Plan) -> str:
    """zr_group rows, and the braces around them."""
    rows = ", ".join(f'{{"{g.name}", {g.ranks}}}' for g in p.groups)
    return f"{{{rows}}}"


def columns(p: Plan) -> list[str]:
    """zk_launch tables: a row for each target, in the order of the head."""
    runs: dict[str, list[str]] = {l.name: [] for l in p.launches}
    for r in p.runs:
        launch = _run(r)
        at = [p.head.targets.index(t) for t in r.targets]
        runs[r.launch] += [f"[{n}] = {launch}" for n in _ranges(at)]
    out = []
    for name, rows in runs.items():
        head = f"LAUNCH({launch_name(name)}) = {{"
        rest = ", ".join(rows) + "};"
        if len(head + rest) <= COLUMNS:
            out.append(head + rest)
        else:
            out += [head, *wrap(rest, 4)]
    return out


def _run(r: plan.Run) -> str:
    """A zk_launch, of the fields that are not 0."""
    said = []
    if any(r.tile):
        said.append(f".tile = {braces(r.tile)}")
    if r.margin:
        said.append(f".margin = {r.margin}")
    if r.grids:
        parts = [row((g.x, g.y, g.z, g.block, g.shared)) for g in r.grids]
        said.append(f".part = {row(parts)}")
    return row(said or [".tile = {0}"])


def _ranges(at: list[int]) -> list[str]:
    """Designators of rows that are alike: one, where they follow each other."""
    first, last = at[0], at[-1]
    if len(at) > 1 and at == [*range(first, last + 1)]:
        return [f"{first} ... {last}"]
    return [str(n) for n in at]


def spans(p: Plan, flat: plan.Flat) -> list[str]:
    """zk_span rows: the instances of a flat lie one after the other, ranks * shard elements
    apart."""
    whole = flat.shard * p.head.ranks
    out = []
    for t in p.tensors:
        if t.flat == flat.name:
            stride = whole * t.flat_step or t.offset_step
            out.append(f"{{{number(t.offset)}, {number(t.elems)}, {t.count}, {number(stride)}, "
                       f"{t.key}, {t.key_step}, "
                       f"{real(t.mean)}f, {real(t.std)}f, {real(t.rate)}, {real(t.decay)}}},  "
                       f"/* {t.name}{', frozen' * t.frozen} */")
    return out


def files(p: Plan) -> list[str]:
    """zr_tensor rows: a row for each name in the weights' file."""
    out = []
    numbers = {f.name: n for n, f in enumerate(p.flats)}
    for t in p.tensors:
        at = 0
        width = t.shape[1] if len(t.shape) > 1 else 1
        for part in t.parts:
            name, rows = part.split("=")
            shape = f"{{{rows}, {t.shape[1] if len(t.shape) > 1 else 1}}}"
            found = ops.LAYER.search(name) if t.count > 1 else None
            named = ops.LAYER.sub("%d", name) if found else ops.layer(name, 0)
            out.append(f"{{\"{named}\", {number(t.offset + at)}, "
                       f"{number(t.offset_step)}, {shape}, "
                       f"{len(t.shape)}, {numbers[t.flat]}, {t.flat_step}, {t.count}, "
                       f"{int(found[1] or 0) if found else 0}}},")
            at += int(rows) * width
    return out


def states(p: Plan) -> list[str]:
    """zr_state rows: of each flat what is kept of it, and last the step's constants, of which every
    rank has the same."""
    rows = [_state(p, number, s) for number, f in enumerate(p.flats) for s in p.kept(f)]
    control = p.cls("ctl").at
    return [*rows, f'{{"control", {number(control)}, 0, 0, 0, {ops.CTL}, -1, 1, -1, ZR_MAIN, '
                   "ZR_BYTES, NULL},"]


def _state(p: Plan, flat: int, s: plan.Store) -> str:
    f, c = p.flats[flat], p.cls(s.cls)
    begin = c.at + stores.begin(p, s)
    over = "-1" if s.whole else upper(s.over)
    near = "near_" if f.first_part(s) else ""
    hashed = f"{near}hash_{lower(f.name)}" if s.what == "master" else "NULL"
    fields = [f'"{s.what}"', number(begin), number(c.stride),
              number(f.shard), number(s.first), number(s.n),
              str(flat), str(f.count), over,
              ARENAS[c.arena], f"ZR_{s.dtype.upper()}", hashed]
    return row(fields) + ","


def filed(p: Plan, cost: dict[str, object]) -> list[str]:
    """What the runtime is told of the file arena, where there is one: a tile of masters comes to
    the largest class for them, elements of whichever width."""
    if not p.files:
        return []
    file = p.files[0]
    there = [s for f in p.flats for s in p.masters(f) if p.cls(s.cls).arena == "file"]
    classes = {f"tile.{s.cls.partition('.')[0]}" for s in there}
    tile = max((p.cls(c) for c in sorted(classes)), key=lambda c: c.stride, default=None)
    widths = {ops.BYTES[s.dtype] for s in there} or {4}
    at, elements = (tile.at, tile.stride // max(widths)) if tile else (0, 0)
    elements -= elements % 2048 if len(widths) > 1 else 0       # whole pages of two bytes each
    return wrap(f".filed = {number(p.filed)}, .folder = \"{file.path}\", .block = {file.block}, "
                f".depth = {file.depth}, .loads = {number(cost['loads'])}, "
                f".stores = {number(cost['stores'])}, .brought = {number(at)}, "
                f".tile = {elements},", 0)


def inbox(p: Plan) -> list[str]:
    """What the runtime is told of the slots that pieces of leaves come to, where any do."""
    found = [c for c in p.classes if c.name == "inbox"]
    return [f".inbox = {number(c.at)}, .inbox_step = {number(c.stride)}, .inboxes = {c.slots},"
            for c in found]


def turns(p: Plan, name: str) -> tuple[int, int]:
    """How many units of a grain a function is for, one after the other, and from the last to the
    first where that is negative; 0: one, or in another order. And how often for each."""
    called = [x.unit for x in p.section("grain").steps if x.op == name]
    times = called.count(called[0]) if called else 1
    units = called[::times]
    n = len(units)
    up = [f"{name.partition('.')[2].partition('.')[0]}[{i}]" for i in range(n)]
    turn = 0 if n < 2 else n if units == up else -n if units == up[::-1] else 0
    return turn, times if turn else p.together


def functions(p: Plan) -> list[str]:
    """zr_function rows of those of ZR_MAIN that are more than a part of the optimizer's step: which
    part they are, of how many units, flops of a call."""
    main = {x.op for s in p.step for x in s.steps if x.queue == "main"}
    parts = [(f, PARTS.get(f.name.partition(".")[0])) for f in p.fns if f.name in main]
    rows = [f'{{"{lower(f.name)}", "{part}", {float(f.flops)!r}, {n}, {times}}}'
            for f, part in parts if part for n, times in [turns(p, f.name)]]
    return wrap(f"{', '.join(rows)},", 4)


def slots(p: Plan) -> list[str]:
    """Rows of slots: classes of what dies."""
    rows = [f"{{{upper(c.name)}(0), {number(c.stride)}, {c.slots}}}," for c in p.passing]
    return wrap(" ".join(rows), 4)


def recipe(p: Plan) -> list[str]:
    """zk_recipe's fields."""
    r, h = p.recipe, p.head
    out = [f".rate = {row(map(_phase, r.rate))},",
           f".momentum = {row(map(_phase, r.momentum))},"]
    fields = {"beta2": real(r.beta2), "eps": real(r.eps), "clip": real(r.clip),
              "rule": list(ops.OPTIMIZERS).index(r.optimizer), "moments": ops.TYPES[r.moments],
              "rows": h.batch * h.sequence, "seed": number(h.seed)}
    out.append(" ".join(f".{name} = {value}," for name, value in fields.items()))
    for s in r.scaler:
        scaler = (real(s.first), real(s.least), s.window, s.hysteresis, s.consecutive)
        out.append(f".scaler = {row(scaler)},")
    return [line[4:] for text in out for line in wrap(text, 4)]


def _phase(x: plan.Phase) -> str:
    steps = (number(x.until), number(x.origin), number(x.span))
    return row((*steps, real(x.begin), real(x.end), ops.CURVES[x.curve], x.stairs))
