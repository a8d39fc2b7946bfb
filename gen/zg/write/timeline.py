"""timeline.py -- draws a training step: the queues of a rank as rows, its commands as bars.

Times are predicted for a device (predict/play.py). The step is the second one of a run.
Micro-batches after the second look like it and are left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ..facts.queues import QUEUES, Queue
from ..plan.plan import Plan
from ..predict import play
from ..predict.play import Bar
from ..predict.seconds import Clock
from . import svg
from .explain import counted

DRAWN = 2  # drawn micro-batches at most

# ---- in words

FORWARD, HEAD, BACKWARD = "forward", "head and loss", "backward"
GATHER, REDUCE, EXCHANGE = "all-gather", "reduce-scatter", "exchange"
FAR = {
    GATHER: "all-gather between hosts",
    REDUCE: "reduce-scatter between hosts",
}
NORM, OPTIMIZER = "gradient norm", "optimizer"
COPY, OTHER = "copy", "other"
COLOURS = {
    FORWARD: "#5b8ff9",
    HEAD: "#945fb9",
    BACKWARD: "#2f4b9b",
    GATHER: "#3aa675",
    FAR[GATHER]: "#14603f",
    REDUCE: "#e8684a",
    FAR[REDUCE]: "#96301a",
    EXCHANGE: "#c2548f",
    NORM: "#f6c945",
    OPTIMIZER: "#c98a00",
    COPY: "#6dc8ec",
    OTHER: "#9aa0a6",
}
# For each kind of command: its part of the step, and its name.
WORDS = {
    "fwd": (FORWARD, "forward"),
    "train": (HEAD, "forward and backward"),
    "bwd": (BACKWARD, "backward"),
    "gather": (GATHER, "all-gather"),
    "exchange": (EXCHANGE, "exchange of rows and heads"),
    "alltoall": (REDUCE, "reduce-scatter: all-to-all"),
    "reducescatter": (REDUCE, "reduce-scatter"),
    "own": (REDUCE, "sum of own gradients"),
    "sum": (REDUCE, "reduce-scatter: sum"),
    "node": (REDUCE, "reduce-scatter: sum"),
    "join": (REDUCE, "reduce-scatter: sum"),
    "push": (REDUCE, "sum of gradients"),
    "norm": (NORM, "gradient norm"),
    "allreduce": (NORM, "all-reduce of the norm and the loss"),
    "factor": (NORM, "gradient clipping"),
    "update": (OPTIMIZER, "update"),
    "near_update": (OPTIMIZER, "update on the device"),
    "copy": (COPY, "copy"),
    "next": (OTHER, "start of the step"),
    "batch": (OTHER, "batch of tokens"),
    "count": (OTHER, "count of summed gradients"),
    "recount": (OTHER, "count of summed gradients"),
    "counted": (OTHER, "count of summed gradients"),
    "done": (OTHER, "barrier after reading gradients"),
}
PALE = {NORM, COPY}  # parts with dark labels
ROWS = {
    "main": "compute",
    "gather": "all-gather",
    "reduce": "all-to-all",
    "sum": "sums of gradients",
    "host": "CPU",
}


def kind_of(name: str) -> str:
    """Return the kind of a command by its name in a plan or a trace, such as `fwd.block`,
    `fwd_block 3`, `near_update.block`; the name if it is no kind of WORDS."""
    found = re.match(rf"({'|'.join(WORDS)})(?![a-z])", name)
    return found[1] if found else name


def words(bar: Bar) -> tuple[str, str]:
    """Return the part of the step that a command belongs to, and its name."""
    step = bar.step
    part, name = WORDS.get(kind_of(step.op), (OTHER, step.op))
    if part == COPY:
        name = f"copy from {QUEUES[step.queue].reads} to {QUEUES[step.queue].writes}"
    if bar.far and part in FAR:
        part, name = FAR[part], f"{name} between hosts"
    return part, f"{name}, {step.unit}" if step.unit else name


def row(q: Queue) -> str:
    return ROWS.get(q.name, f"{q.reads} to {q.writes}")


# ---- drawn

LEFT, WIDTH, RIGHT, EDGE = 160, 740, 30, 10  # pixels
HEIGHT, GAP, LEVEL = 34, 10, 15  # of a row; below it; of a name above all rows
LABEL, NAME = 11, 12  # font sizes
APART = 5  # pixels between lines that join the same two rows


def _time(t: float) -> str:
    """Return seconds as people write them."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if t >= scale:
            return f"{t / scale:.4g} {unit}"
    return f"{t / 1e-6:.3g} µs"


def _label(bar: Bar, room: float, many: set[str]) -> str:
    """Return as much of a command's name as its bar holds. many: kinds of more than one unit."""
    part, name = words(bar)
    unit = bar.step.unit
    kind, _, number = unit.rstrip("]").partition("[")
    short = number if kind in many else kind
    for label in (name, f"{part} {unit}", unit, short):
        if svg.width(label, LABEL) <= room:
            return label
    return ""


def _bars(bars: Sequence[Bar], at: dict[str, int], scale: float) -> Iterator[str]:
    def px(t: float) -> float:
        return round(LEFT + t * scale, 3)

    units = {b.step.unit for b in bars}
    many = {u.partition("[")[0] for u in units if not u.endswith("[0]")}
    for n, b in enumerate(bars):
        part, name = words(b)
        x, width = px(b.begin), round(px(b.end) - px(b.begin), 3)
        y = at[b.step.queue]
        after = "" if b.cause is None else f"; after {words(b.cause)[1]}"
        micro_batch = (
            f"; micro-batch {b.turn + 1}" if b.section == "micro_batch" else ""
        )
        told = (
            f"{name}{micro_batch}: from {_time(b.begin)}, for {_time(b.end - b.begin)}"
            f"{after}"
        )
        yield (
            f'<rect id="c{n}" class="{b.step.queue}" x="{x}" y="{y}" '
            f'width="{width}" height="{HEIGHT}" fill="{COLOURS[part]}">'
            f"<title>{svg.escaped(told)}</title></rect>"
        )
        if label := _label(b, width - 2, many):
            ink = svg.INK if part in PALE else "#fff"
            yield svg.text(
                x + width / 2,
                y + HEIGHT / 2 + 4,
                label,
                LABEL,
                f' text-anchor="middle" fill="{ink}" pointer-events="none"',
            )


def _causes(bars: Sequence[Bar], at: dict[str, int], scale: float) -> Iterator[str]:
    """Yield a line from the command that was waited for to the start of the waiting one, unless
    another such line is close."""
    last: dict[tuple[str, str], float] = {}
    for b in bars:
        if b.cause is None:
            continue
        rows = b.cause.step.queue, b.step.queue
        y1, y2 = (at[queue] for queue in rows)
        if y1 < y2:
            y1 += HEIGHT
        else:
            y2 += HEIGHT
        x = LEFT + b.begin * scale
        if x - last.get(rows, -APART) >= APART:
            last[rows] = x
            yield f'<path d="M{x:.3f} {y1}L{x:.3f} {y2}"/>'


@dataclass(frozen=True)
class Name:
    """Name of a part of the step, beside a line at its start. level: how many names lie below
    it."""

    text: str
    begin: float
    x: float
    level: int


def _parts(bars: Sequence[Bar], scale: float) -> list[Name]:
    """Return the names at the start of each micro-batch and of the optimizer's step on queue
    main."""
    first: dict[tuple[str, int], float] = {}
    for b in bars:
        if b.step.queue == "main":
            first.setdefault((b.section, b.turn), b.begin)
    names: list[Name] = []
    # left end of the names on each level; names come from the right
    begins: list[float] = []
    for (section, turn), begin in reversed(first.items()):
        told = {
            "micro_batch": f"micro-batch {turn + 1}",
            "update": "optimizer step",
        }.get(section)
        if told is None:
            continue
        at, wide = LEFT + begin * scale, svg.width(told, LABEL)
        fits = at + 4 + wide <= LEFT + WIDTH + RIGHT
        x = at + 4 if fits else at - 4 - wide
        free = (n for n, end in enumerate(begins) if x + wide + 4 <= end)
        level = next(free, len(begins))
        begins[level : level + 1] = [min(x, at)]
        names.append(Name(told, at, x, level))
    return names


def _named(names: Sequence[Name], top: float) -> Iterator[str]:
    """Yield lines, and names over them with a white outline."""
    for name in names:
        y = top - name.level * LEVEL
        yield f'<path d="M{name.begin:.3f} {y - 16:.3f}V{top}" stroke="{svg.INK}"/>'
    white = ' paint-order="stroke" stroke="#fff" stroke-width="3"'
    for name in names:
        y = top - name.level * LEVEL
        yield svg.text(name.x, y - 6, name.text, LABEL, white)


def _legend(bars: Sequence[Bar], top: float) -> tuple[list[str], int]:
    """Return the lines of the legend, and its number of rows."""
    used = {words(b)[0] for b in bars}
    parts = [part for part in COLOURS if part in used]
    wide = [32 + svg.width(part, NAME) for part in parts]
    places = list(svg.flow(wide, LEFT + WIDTH + RIGHT - EDGE))
    lines = []
    for part, (right, row) in zip(parts, places, strict=True):
        x, y = EDGE + right, top + 20 * row
        lines += [
            f'<rect x="{x:.3f}" y="{y}" width="14" height="14" fill="{COLOURS[part]}"/>',
            svg.text(x + 19, y + 11, part, NAME),
        ]
    return lines, places[-1][1] + 1


def _titles(p: Plan, device: str) -> tuple[str, str, str]:
    """Return the titles: the spec, the recipe, and a note on the times."""
    h, repeat = p.head, p.section("micro_batch").repeat
    shown = f", {DRAWN} of them drawn" if repeat > DRAWN else ""
    rank = f": one training step of one of {counted(h.ranks, 'rank')}"
    room = LEFT + WIDTH + RIGHT - 2 * EDGE - svg.width(rank, 15)
    return (
        svg.fitted(h.spec, 15, room) + rank,
        f"ZeRO {h.zero}, {h.real}, {counted(h.micro_batches, 'micro-batch', 'es')} of "
        f"{h.shape}{shown}",
        f"Times are predicted for {device}, not measured. Lines join commands to those that they "
        "waited for.",
    )


def _rows(
    bars: Sequence[Bar], used: Sequence[Queue], at: dict[str, int], end: float
) -> Iterator[str]:
    """Yield a row for each queue, with its name."""
    for q in used:
        own = (b.end - b.begin for b in bars if b.step.queue == q.name)
        y = at[q.name]
        yield f'<rect x="{LEFT}" y="{y}" width="{WIDTH}" height="{HEIGHT}" fill="#f1f3f4"/>'
        yield svg.text(EDGE, y + 15, row(q), NAME)
        yield svg.text(
            EDGE,
            y + 29,
            f"queue {q.name}, busy {sum(own) / end:.0%}",
            LABEL,
            f' fill="{svg.FAINT}"',
        )


def _axis(end: float, top: float, bottom: float) -> Iterator[str]:
    """Yield the axis: round times below all rows, at most ten parts of the step."""
    scale = WIDTH / end
    for t in svg.ticks(0, end, svg.apart(end, 10)):
        x = LEFT + t * scale
        yield f'<path d="M{x:.3f} {top - 4}V{bottom}" stroke="#ccc"/>'
        told = _time(t) if t else "0"
        yield svg.text(x, bottom + 16, told, LABEL, ' text-anchor="middle"')


def drawn(clock: Clock) -> list[Bar]:
    """Return the commands of a step that another one precedes. Time 0 is the end of queue main's
    work in that one, or the first command if it begins before."""
    before, bars = play.played(clock, DRAWN, 2)
    since = min(b.begin for b in bars)
    since = min(since, max(b.end for b in before if b.step.queue == "main"))
    mine = {id(b) for b in bars}
    return [
        replace(
            b,
            begin=b.begin - since,
            end=b.end - since,
            cause=b.cause if id(b.cause) in mine else None,
        )
        for b in bars
    ]


def text(clock: Clock) -> str:
    """Return the picture as SVG."""
    p, bars = clock.p, drawn(clock)
    end = max(b.end for b in bars)
    scale = WIDTH / end
    used = [q for q in QUEUES.values() if any(b.step.queue == q.name for b in bars)]
    title, recipe, how = _titles(p, clock.device.about)
    legend, rows = _legend(bars, 74)
    names = _parts(bars, scale)
    levels = 1 + max((name.level for name in names), default=0)
    top = 76 + 20 * rows + LEVEL * levels
    at = {q.name: top + n * (HEIGHT + GAP) for n, q in enumerate(used)}
    bottom = top + len(used) * (HEIGHT + GAP)
    lines = [
        *svg.opened(LEFT + WIDTH + RIGHT, bottom + 28, f"{title}, {recipe}"),
        svg.text(EDGE, 22, title, 15),
        svg.text(EDGE, 42, recipe, 13),
        svg.text(EDGE, 60, how, LABEL, f' fill="{svg.FAINT}"'),
        *legend,
        *_rows(bars, used, at, end),
        *_axis(end, top, bottom),
        '<g stroke="#777" stroke-width="0.8" fill="none">',
        *_causes(bars, at, scale),
        "</g>",
        *_named(names, top),
        *_bars(bars, at, scale),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"
