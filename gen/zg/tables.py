"""tables.py -- a Plan's records as rows of C: tables of train.c, and the words they are made of.

A row is an initialiser of a struct of kernels/zk.h or runtime/zr.h, its fields in order or by name.
"""
from __future__ import annotations

from typing import Sequence

from . import ops, plan
from .plan import Plan

STORED = {"f32": "ZR_F32", "bf16": "ZR_BF16"}   # how the runtime names a type
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

def braces(values: Sequence[int]) -> str:
    """An initialiser, without the zeros that C fills in at its end."""
    last = max((n for n, v in enumerate(values) if v), default=0)
    return f"{{{', '.join(map(str, values[:last + 1]))}}}"


def columns(p: Plan) -> list[str]:
    """zk_launch tables: a row for each target, in the order of the head."""
    runs: dict[str, list[str]] = {l.name: [] for l in p.launches}
    for r in p.runs:
        at = [p.head.targets.index(t) for t in r.targets]
        parts = [f"{{{g.x}, {g.y}, {g.z}, {g.block}, {g.shared}}}" for g in r.grids]
        has = {"tile": any(r.tile) and braces(r.tile), "slot": r.slot,
               "part": parts and f"{{{', '.join(parts)}}}"}
        row = ", ".join(f".{name} = {value}" for name, value in has.items() if value) or ".slot = 0"
        runs[r.launch] += [f"[{n}] = {{{row}}}" for n in at] if at != [*range(at[0], at[-1] + 1)] \
            else [(f"[{at[0]} ... {at[-1]}] = " if len(at) > 1 else f"[{at[0]}] = ") + f"{{{row}}}"]
    out = []
    for name, rows in runs.items():
        head, rest = f"LAUNCH({launch_name(name)}) = {{", f"{', '.join(rows)}}};"
        out += [head + rest] if len(head + rest) <= COLUMNS else [head, *wrap(rest, 4)]
    return out


def spans(p: Plan, flat: plan.Flat) -> list[str]:
    """zk_span rows: the instances of a flat lie one after the other, ranks * shard elements
    apart. Frozen tensors come last."""
    whole = flat.shard * p.head.ranks
    out = []
    for t in sorted(p.tensors, key=lambda t: t.frozen):
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
    numbers = {f.name: n + sum(x.near > 0 for x in p.flats[:n]) for n, f in enumerate(p.flats)}
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


def flats(p: Plan) -> list[str]:
    """zr_flat rows: where masters lie; first those that stay on the device of what is offloaded."""
    out = []
    for f, near in ((f, near) for f in p.flats for near in ["near_"] * (f.near > 0) + [""]):
        c, whole = p.masters(f, near)
        apart = c.name.partition(".")[0] != "real"
        kept = "f32" if apart else p.head.real
        at = {"hosted": "ZR_HOST", "filed": "ZR_STORE"}.get(c.kind, "ZR_MAIN")
        first, n = (0, f.near) if near or not f.near else (f.near, f.shard - f.near)
        begin = c.at + (0 if apart else first * ops.BYTES[p.head.real])
        out.append(f"{{{number(begin)}, {number(c.stride)}, {number(f.shard)}, {f.count}, "
                   f"{int(whole)}, {STORED[kept]}, {at}, {near}hash_{f.name}, "
                   f"{number(first)}, {number(n)}}},")
    return out


def filed(p: Plan, cost: dict[str, object]) -> list[str]:
    """What the runtime is told of the file arena, where there is one: a tile of masters comes to
    the largest class for them."""
    if not p.files:
        return []
    file, there = p.files[0], {p.masters(f)[0].name.partition(".")[0] for f in p.flats
                               if p.masters(f)[0].kind == "filed"}
    tile = max((p.cls(f"tile.{c}") for c in sorted(there)), key=lambda c: c.stride, default=None)
    at, elements = (tile.at, tile.stride // 4) if tile else (0, 0)
    return wrap(f".filed = {number(p.filed)}, .folder = \"{file.path}\", .block = {file.block}, "
                f".depth = {file.depth}, .loads = {number(cost['loads'])}, "
                f".stores = {number(cost['stores'])}, .brought = {number(at)}, "
                f".tile = {elements},", 0)


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


def recipe(p: Plan) -> list[str]:
    """zk_recipe's fields."""
    r, out = p.recipe, []
    for name, phases in (("rate", r.rate), ("momentum", r.momentum)):
        rows = [f"{{{number(x.until)}, {number(x.origin)}, {number(x.span)}, {real(x.begin)}, "
                f"{real(x.end)}, {ops.CURVES[x.curve]}, {x.stairs}}}" for x in phases]
        out.append(f".{name} = {{{', '.join(rows)}}},")
    out.append(f".beta2 = {real(r.beta2)}, .eps = {real(r.eps)}, .clip = {real(r.clip)}, "
               f".rule = {list(ops.OPTIMIZERS).index(r.optimizer)}, "
               f".moments = {ops.TYPES[r.moments]}, .rows = {p.head.batch * p.head.sequence}, "
               f".seed = {number(p.head.seed)},")
    out += [f".scaler = {{{real(s.first)}, {real(s.least)}, {s.window}, {s.hysteresis}, "
            f"{s.consecutive}}}," for s in r.scaler]
    return [line[4:] for text in out for line in wrap(text, 4)]
