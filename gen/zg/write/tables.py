"""tables.py -- prints a Plan's records as rows of train.c's tables, and has the words that the
tables need.

A row is an initialiser of a struct of kernels/zk.h or runtime/zr.h, its fields in order or by name.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from decimal import Decimal
from typing import Any

from ..facts import kernels, ops, queues
from ..facts.commands import COLLECTIVES
from ..plan import plan
from ..plan.operand import Layers
from ..plan.plan import Plan
from ..plan.size import Size
from .letters import NAMED, Letters
from .words import group_name, in_c, lower, number, upper, word

# The runtime's name of each arena.
ARENAS = {"device": "ZR_MAIN", "host": "ZR_HOST", "file": "ZR_STORE"}
VARS = "ijk"  # variables of nested loops, roll.DEPTH of them
COLUMNS = 100
# For each first word of a function's name, its description, and the part of a step that a profile
# counts it to; '' is the optimizer's.
DOES = {
    "fwd": ("forward of {0}", "forward"),
    "bwd": ("backward of {0}", "backward"),
    "train": ("forward, loss and backward of {0}", "head"),
    "eval": ("forward and loss of {0}", ""),
    "own": ("adds a rank's own gradient of {0}", "reduce"),
    "sum": ("adds the ranks' gradients of {0}", "reduce"),
    "node": ("adds sums of some ranks of {0}", "reduce"),
    "join": ("adds the ranks' sums of {0}", "reduce"),
    "push": ("adds a gradient of {0} on the host", ""),
    "norm": ("square of the gradient norm of {0}", ""),
    "update": ("optimizer step of {0}", ""),
    "init": ("initial values of {0}", ""),
    "cast": ("rounds masters of {0} to parameters", ""),
    "hash": ("hash of {0}", ""),
    "next": ("begins a step: learning rate, clear sums", ""),
    "count": ("counts gradients", "reduce"),
    "counted": ("counts the gradients of a sample's blocks", ""),
    "recount": ("counts gradients anew", ""),
    "factor": ("factor of the gradients, from norm, clipping and loss scale", ""),
    "turn": ("angles of the rotary table {0}", ""),
}


# ---- words


def real(x: float, end: str = "") -> str:
    """Return a number with a point, exact: in decimal if that is exact, else in hexadecimal with a
    rounded form as a comment. end: f for a float."""
    if Decimal(x) == Decimal(repr(x)):
        return repr(x) + end
    return f"{x.hex()}{end} /* {x:.6g} */"


def wrap(text: str, indent: int) -> list[str]:
    """Break a statement into lines of at most COLUMNS, later ones indented by four more. It is cut
    after the last comma that fits and lies in the fewest braces."""
    out, pad = [], " " * indent
    while len(pad + text) > COLUMNS:
        room = COLUMNS - len(pad)
        cuts = [(depth, -n) for depth, n in _commas(text) if n <= room]
        if not cuts:
            break
        at = -min(cuts)[1]
        out.append(pad + text[:at])
        text = text[at + 1 :]
        pad = " " * (indent + 4)
    return [*out, pad + text]


def _commas(text: str) -> list[tuple[int, int]]:
    """Return the places where a text may be cut, each with the number of braces around it."""
    out, depth = [], 0
    for n, letter in enumerate(text[:-1]):
        depth += (letter in "({") - (letter in ")}")
        if letter == "," and text[n + 1] == " ":
            out.append((depth, n + 1))
    return out


def comment(text: str) -> list[str]:
    """Break a comment into lines of at most COLUMNS."""
    first, *rest = textwrap.wrap(text, COLUMNS - 6)
    lines = [f"/* {first}", *(f" * {line}" for line in rest)]
    lines[-1] += " */"
    return lines


def launch_name(name: str) -> str:
    return f"L_{lower(name)}"


# ---- rows


def row(values: Iterable[object]) -> str:
    """Return an initialiser with all its values."""
    return f"{{{', '.join(map(str, values))}}}"


def braces(values: Sequence[int]) -> str:
    """Return an initialiser without trailing zeros, which C fills in."""
    last = max((n for n, v in enumerate(values) if v), default=0)
    return f"{{{', '.join(map(str, values[: last + 1]))}}}"


def groups(p: Plan) -> list[str]:
    """Return the table of groups. With several groups the tables of their axes and of the queues of
    their collectives follow."""
    rows = row(f'{{"{g.name}", {g.ranks}}}' for g in p.groups)
    table = wrap(f"static const zr_group groups[] = {rows};", 0)
    if not p.axes:
        return table
    return [
        *table,
        "",
        "/* of each group: places along an axis, ranks from one to the next; the last counts "
        "fastest */",
        "static const zr_axis axes[] = {",
        *(f"    {line}" for line in _axes(p)),
        "};",
        "",
        "/* of each group: queues of its collectives */",
        "static const uint32_t meets[LEN(groups)] = {",
        *(f"    {line}" for line in _meets(p)),
        "};",
    ]


def _axes(p: Plan) -> list[str]:
    """Return the zr_axis rows of each group, starting with the axis along which places count
    slowest."""
    out = []
    known = {a.name: a for a in p.axes}
    for g in p.groups:
        for axis in (known[name] for name in g.axes):
            out.append(f"{{{group_name(g.name)}, {axis.size}, {axis.stride}}},")
    return out


def _meets(p: Plan) -> list[str]:
    """Return, for each group with collectives, the bits of their queues."""
    found = {
        g.name: [
            f"1 << ZR_{upper(queue)}"
            for queue in queues.QUEUES
            if p.meetings.get((queue, g.name), frozenset()) & set(COLLECTIVES)
        ]
        for g in p.groups
    }
    return [
        f"[{group_name(name)}] = {' | '.join(bits)},"
        for name, bits in found.items()
        if bits
    ]


def place(group: str) -> str:
    """Return this rank's place in a group, as C."""
    return "RANK" if group == plan.ALL else f"PLACE({group_name(group)})"


def owners(p: Plan) -> str:
    """Return the group in whose order ranks own shards; '' for all ranks in order of rank."""
    (found,) = {f.owners for f in p.flats}
    return "" if found == plan.ALL else group_name(found)


# Content of a class, by the first word of its name.
HOLDS = {
    "intra": "sums on their way to other ranks",
    "inter": "data from other hosts",
    "sums": "norm, loss, tokens",
    "hsums": "norm, loss, tokens",
    "param": "parameters",
    "grad": "gradients",
    "ring": "gathered parameters",
    "staging": "parameters from the host",
    "fetched": "parameters from a file",
    "master": "masters",
    "near_master": "masters not offloaded",
    "m": "first moments",
    "near_m": "first moments not offloaded",
    "v": "second moments",
    "near_v": "second moments not offloaded",
    "sum": "sums of gradients",
    "pending": "sums not yet reduced",
    "part": "sums on their way to the host",
    "acc": "a gradient's f32 sum",
    "down": "gradients from the device",
    "up": "parameters for the device",
    "tile": "states from a file",
    "ctl": "a step's constants",
    "hctl": "a copy of CTL",
    "tokens": "tokens of a micro-batch",
    "targets": "their targets",
    "positions": "their positions in documents",
    "documents": "positions of whole samples",
    "keys": "keys of the samples' random numbers",
    "sample_keys": "keys of whole samples",
    "sample_targets": "targets of whole samples",
    "picked": "input of the logits that a token is drawn from",
    "table": "a rotary table",
    "x": "inputs of units",
    "dx": "their gradients",
    "save": "saved for backward",
    "save_heads": "saved for backward, of all tokens and some heads",
    "rows": "values between functions, of a block of a sample",
    "heads": "values between functions, of all tokens and some heads",
    "near": "values not offloaded",
    "far": "offloaded values",
    "tmp": "temporary values",
    "work": "kernels' scratch",
    "inbox": "received gradients",
    "workspace": "scratch of launches",
    "pinned_batch": "tokens on their way",
    "pinned_scratch": "results for the host",
}
ARENA = {
    "device": "the arena",
    "host": "the host arena",
    "file": "the file arena",
}
# Where a class is that some targets lack.
ONLY = {
    "unshared": "only on a GPU, and over MPI",
    "gpu": "only on a GPU",
}


def classes(p: Plan) -> list[str]:
    """Return the macros of classes: the place of a slot, with the number of slots and their content
    as a comment."""
    heads = [f"#define {upper(c.name)}(i)" for c in p.classes]
    slots_ = [f"SLOT({c.at}, {c.stride}, i)" for c in p.classes]
    first = max(map(len, heads))
    second = max(map(len, slots_))
    nodes = {c.name: 1 for c in p.classes} | {f"sum.{f.name}": f.nodes for f in p.flats}
    out, arena = [], ""
    for c, head, slot in zip(p.classes, heads, slots_, strict=True):
        if c.arena != arena:
            arena = c.arena
            pinned = arena == "host" and not p.hosted
            where = "pinned memory of the host" if pinned else ARENA[arena]
            out += comment(f"of {where}{_lacking(p, arena)}")
        beside = str(c.slots)
        if holds := HOLDS.get(word(c.name)):
            beside += f": {holds}"
        if nodes[c.name] > 1:
            beside += f", {nodes[c.name]} nodes"
        line = f"{head:<{first}} {slot:<{second}}"
        out.append(f"{line} /* {beside} */")
    return out


def _lacking(p: Plan, arena: str) -> str:
    """Return which classes of an arena lie on some targets only; '' if all lie on all."""
    text = ""
    for targets, where in ONLY.items():
        names = [
            upper(c.name) for c in p.classes if (c.arena, c.targets) == (arena, targets)
        ]
        text += f"; {' and '.join(names)} {where}" * bool(names)
    return text


def columns(p: Plan, letters: Letters) -> list[str]:
    """Return the zk_launch tables, with a row per target in the order of the head. A launch without
    settings has no rows."""
    runs: dict[str, list[str]] = {}
    for r in p.runs:
        at = [p.head.targets.index(t) for t in r.targets]
        if made := _run(r):
            rows = runs.setdefault(r.launch, [])
            rows += [f"[{n}] = {made}," for n in _ranges(p, at)]
    rounds: dict[str, int] = {}
    for c in (c for fn in p.fns for c in fn.calls):
        rounds[c.launch] = max(c.rounds, rounds.get(c.launch, 1))
    out = []
    for launch in p.launches:
        beside = _shape(launch, letters, rounds[launch.name])
        said = runs.get(launch.name, [])
        rows = [line for text in said for line in wrap(text, 4)]
        head = f"LAUNCH({launch_name(launch.name)})"
        out += [f"{head} = {{{beside}", *rows, "};"] if rows else [f"{head};{beside}"]
    return out


def _shape(
    launch: plan.Launch,
    letters: Letters,
    rounds: int,
) -> str:
    """Return a launch's shape as a comment. rounds: of its calls."""
    row = kernels.kernel(launch.kernel)
    said = []
    for name, n in zip(row.shape, launch.shape, strict=False):
        text = in_c(n) if isinstance(n, Size) else letters.said(name, n, rounds)
        if text.lstrip("-").isdigit():
            text = NAMED[name][n] if name in NAMED else f"{name} = {n}"
        said.append(text)
    return f" /* {', '.join(said)} */" if said else ""


def _run(r: plan.Run) -> str:
    """Return a zk_launch with the fields that are not 0; '' if all are."""
    said = []
    if any(r.tile):
        said.append(f".tile = {braces(r.tile)}")
    if r.margin:
        said.append(f".margin = {r.margin}")
    if r.grids:
        parts = [row((g.x, g.y, g.z, g.block, g.shared)) for g in r.grids]
        said.append(f".part = {row(parts)}")
    return row(said) if said else ""


def _ranges(p: Plan, at: list[int]) -> list[str]:
    """Return designators of equal rows: a single range if the rows are consecutive."""
    names = [upper(p.head.targets[n]) for n in at]
    together = at == [*range(at[0], at[-1] + 1)]
    if len(at) > 1 and together:
        return [f"{names[0]} ... {names[-1]}"]
    return names


def spans(p: Plan, flat: plan.Flat) -> list[str]:
    """Return zk_span rows, two lines each: a tensor's location, then its initial values and
    optimizer factors. The instances of a flat follow each other at distances of ranks * shard
    elements."""
    whole = flat.shard * p.head.ranks
    out = []
    for t in p.tensors:
        if t.flat != flat.name:
            continue
        stride = whole * t.flat_step or t.offset_step
        at = t.offset, t.elems, t.count, stride, t.key, t.key_step
        said = ", ".join(map(number, at))
        where = f"{{{said},"
        frozen = ", frozen" if t.frozen else ""
        name = f"/* {t.name}{frozen} */"
        first = f"{where} {name}"
        fits = len(first) <= COLUMNS - 4
        out += [first] if fits else [name, where]
        begins = f"{real(t.mean, 'f')}, {real(t.std, 'f')}"
        factors = f"{real(t.rate)}, {real(t.decay)}"
        out.append(f" {begins}, {factors}}},")
    return out


def files(p: Plan) -> list[str]:
    """Return zr_tensor rows, one for each name in the weights' file."""
    out = []
    numbers = {f.name: n for n, f in enumerate(p.flats)}
    for t in p.tensors:
        at = 0
        width = t.shape[1] if len(t.shape) > 1 else 1
        few = t.quantized
        for n, part in enumerate(t.parts):
            name, rows = part.split("=")
            shape = f"{{{rows}, {width}}}"
            if few.format:
                shape = f"{{{few.rows[n]}, {few.columns}}}"
            found = ops.LAYER.search(name) if t.count > 1 else None
            named = ops.LAYER.sub("%d", name) if found else ops.layer(name, 0)
            fields = [
                f'"{named}"',
                number(t.offset + at),
                number(t.offset_step),
                shape,
                2 if few.format else len(t.shape),
                numbers[t.flat],
                t.flat_step,
                t.count,
                int(found[1] or 0) if found else 0,
            ]
            out += [line[4:] for line in wrap(f"{row(fields)},", 4)]
            at += int(rows) * width
    return out


def states(p: Plan) -> list[str]:
    """Return zr_state rows: the stored states of each flat, the copies that several ranks have, and
    last the numbers that a step takes over from the one before, equal on all ranks."""
    rows = [
        _state(p, number, s)
        for number, f in enumerate(p.flats)
        for s in (*p.kept(f), *p.copies(f))
    ]
    control = [
        f'{{"{name}", CTL(0) + offsetof(zk_ctl, {name}), 0, 0, 0, 1, -1, 1, -1, ZR_MAIN, '
        f"ZR_{kind}, NULL}},"
        for name, kind in ops.CONTROL.items()
    ]
    lines = []
    for text in rows + control:
        lines += wrap(text, 4)
    return [line[4:] for line in lines]


def _state(p: Plan, flat: int, s: plan.Store) -> str:
    f, cls = p.flats[flat], upper(s.cls)
    first = in_c(s.first)
    at = f"{cls}(0)" + f" + {ops.BYTES[s.dtype]} * {first}" * bool(p.begin(s))
    over = "-1" if s.whole else group_name(s.over)
    near = "near_" if f.first_part(s) else ""
    hashed = f"{near}hash_{lower(f.name)}" if s.what == "master" else "NULL"
    fields = [
        f'"{ops.saved(p.recipe.optimizer, s.what)}"',
        at,
        f"SIZE({cls})",
        f"SHARD_{upper(f.name)}",
        first,
        in_c(s.n),
        str(flat),
        str(f.count),
        over,
        ARENAS[p.cls(s.cls).arena],
        f"ZR_{s.dtype.upper()}",
        hashed,
    ]
    return f"{row(fields)},"


def filed(p: Plan, cost: dict[str, Any]) -> list[str]:
    """Return the fields of zr_program for the file arena, if there is one. Masters are loaded tile
    by tile into the largest class for them, counted in elements of the widest type."""
    if not p.files:
        return []
    file = p.files[0]
    there = [s for f in p.flats for s in p.masters(f) if p.cls(s.cls).arena == "file"]
    classes = {f"tile.{s.cls.partition('.')[0]}" for s in there}
    tile = max(
        (p.cls(c) for c in sorted(classes)),
        key=lambda c: c.stride,
        default=None,
    )
    widths = {ops.BYTES[s.dtype] for s in there} or {4}
    at = f"{upper(tile.name)}(0)" if tile else "0"
    elements = tile.stride // max(widths) if tile else 0
    # whole pages of 2-byte elements
    elements -= elements % 2048 if len(widths) > 1 else 0
    return [
        f'.folder = "{file.path}",',
        f".filed = {number(p.filed)}, .block = {file.block}, .depth = {file.depth},",
        f".loads = {number(cost['loads'])}, .stores = {number(cost['stores'])},",
        f".brought = {at}, .tile = {elements},",
    ]


def inbox(p: Plan) -> list[str]:
    """Return the fields of zr_program for the slots that receive pieces of gradients, if there are
    any."""
    found = [c for c in p.classes if c.name == "inbox"]
    return [
        f".inbox = INBOX(0), .inbox_step = SIZE(INBOX), .inboxes = {c.slots},"
        for c in found
    ]


def turns(p: Plan, name: str) -> tuple[int, int]:
    """Return for how many consecutive units of a micro-batch a function is called, negative if from
    last to first, and how often for each. The count is 0 for a single unit or any other order."""
    steps = p.section("micro_batch").steps
    called = [x.unit for x in steps if x.op == name]
    times = called.count(called[0]) if called else 1
    units = called[::times]
    n = len(units)
    unit = word(name.partition(".")[2])
    up = [f"{unit}[{i}]" for i in range(n)]
    if n > 1 and units == up:
        return n, times
    if n > 1 and units == up[::-1]:
        return -n, times
    return 0, p.together


def functions(p: Plan) -> list[str]:
    """Return zr_function rows of main's functions outside the optimizer's part: their part, number
    of units, and flops of a call."""
    main = {x.op for s in p.step for x in s.steps if x.queue == "main"}
    out = []
    for f in p.fns:
        _, part = DOES.get(f.body, ("", ""))
        if part and f.name in main:
            name = f'"{lower(f.name)}"'
            units, each = turns(p, f.name)
            flops = repr(_mean(f.flops))
            said = name, f'"{part}"', flops, units, each
            out.append(f"{row(said)},")
    return out


def _mean(flops: int | Layers) -> float:
    """Return the mean flops of a call."""
    each = flops.values if isinstance(flops, Layers) else (flops,)
    return sum(each) / len(each)


def slots(p: Plan) -> list[str]:
    """Return a row for each class whose slots die at a last use."""
    return [
        f"{{{name}(0), SIZE({name}), {c.slots}}},"
        for c in p.passing
        for name in [upper(c.name)]
    ]


def recipe(p: Plan) -> list[str]:
    """Return the fields of zk_recipe."""
    r, h = p.recipe, p.head
    out = [*_phases("rate", r.rate), *_phases("momentum", r.momentum)]
    fields = {
        "beta2": real(r.beta2),
        "eps": real(r.eps),
        "clip": real(r.clip),
        "rule": f"{list(ops.OPTIMIZERS).index(r.optimizer)} /* {r.optimizer} */",
        "moments": ops.TYPES[r.moments],
        "rows": h.rows,
        "seed": number(h.seed),
    }
    out += [f".{name} = {value}," for name, value in fields.items()]
    for s in r.scaler:
        scaler = (
            real(s.first),
            real(s.least),
            s.window,
            s.hysteresis,
            s.consecutive,
        )
        out.append(f".scaler = {row(scaler)},")
    return out


def _phases(name: str, phases: Sequence[plan.Phase]) -> list[str]:
    """Return a schedule, a line for each of its phases."""
    rows = [line[4:] for x in phases for line in wrap(f"{_phase(x)},", 8)]
    return [f".{name} = {{", *rows, "},"]


def _phase(x: plan.Phase) -> str:
    steps = (number(x.until), number(x.origin), number(x.span))
    return row((*steps, real(x.begin), real(x.end), f"ZK_{x.curve.upper()}", x.stairs))
