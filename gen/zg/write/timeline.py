"""timeline.py -- a picture of a training step: the queues of a rank as rows, its commands as bars.

Commands are played in order of issue: each begins when its queue is free and all that it waits for
is done. How long it takes is an estimate by data sheets (facts/peaks.py), on the first target.
Micro-batches after the second are like it, and are left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from ..facts import ops
from ..facts.commands import COLLECTIVES
from ..facts.kernels import WIDTHS, kernel, letters, spent, value
from ..facts.peaks import DISK, LAUNCH, PEAKS, Peaks
from ..facts.queues import QUEUES, Queue
from ..plan.operand import of_layer, whole
from ..plan.plan import Call, Event, Plan, Step
from . import cost

DRAWN = 2  # micro-batches, at most

# ---- how long


def _moved(p: Plan, step: Step, call: Call) -> int:
    """Bytes that a call reads and writes."""
    row = kernel(call.kernel)
    given = {i.name: i.value for i in step.ints}
    operands = list(zip(row.formals, call.args, strict=True))
    whole = ((f.name, given.get(str(a), a)) for f, a in operands if f.number)
    numbers = {name: n for name, n in whole if isinstance(n, int)}
    known = letters(numbers)
    total = 0
    for f, a in operands:
        if f.number or a == "null":
            continue
        width = WIDTHS.get(f.type) or {
            "real": ops.BYTES[p.head.real],
            "moments": ops.BYTES[p.recipe.moments],
        }.get(f.type)
        if width is None and f.type in numbers:  # f32 where that is not 0
            width = 4 if numbers[f.type] else ops.BYTES[p.head.real]
        if width is None or f.elems == "" and "n" not in numbers:
            continue  # a table, or the step's constants
        rows = "B*T" if f.elems.startswith("*") else ""  # one for each token
        elems = value(rows + f.elems if f.elems else "n", known)
        times = (
            2
            if f.mode == "+"
            else numbers.get("count", 1)
            if a == "sources"
            else 1
        )
        total += elems * width * times
    return total


def _work(p: Plan, step: Step, peaks: Peaks) -> float:
    """Seconds of a function's calls."""
    width, total = ops.BYTES[p.head.real], 0.0
    for c in next(f for f in p.fns if f.name == step.op).calls:
        moved = _moved(p, step, c)
        if QUEUES[step.queue].reads == "host":
            total += c.rounds * moved / peaks.host
        else:
            once = spent(c.kernel, c.args, 1)
            products = whole(of_layer(once, step.layer))
            total += c.rounds * peaks.seconds(products, moved, width)
    return total


def seconds(p: Plan, step: Step, peaks: Peaks) -> float:
    """That a command takes."""
    took = 0.0
    if step.op in COLLECTIVES:
        took = cost.wire_of(p, step).bytes / peaks.wire
    elif step.op == "copy":
        (size,) = [i.value for i in step.ints if i.name == "bytes"]
        ends = {QUEUES[step.queue].reads, QUEUES[step.queue].writes}
        took = size / (
            DISK
            if "file" in ends
            else peaks.link
            if "host" in ends
            else peaks.memory / 2
        )
    elif any(f.name == step.op for f in p.fns):
        took = _work(p, step, peaks)
    return max(took, LAUNCH)


# ---- when


@dataclass(frozen=True)
class Bar:
    """A command of a section's turn: when it runs, in seconds, and the bar whose end it waits for
    longest, where that is later than its queue is free."""

    section: str
    turn: int
    step: Step
    begin: float
    end: float
    cause: int | None


def played(p: Plan) -> list[Bar]:
    """The commands of a training step in order of issue. A GPU plays a section as a graph, one
    after the other, unless the optimizer lies on the host."""
    target = p.head.targets[0]
    graphs = target != "cpu" and not p.offload
    free = dict.fromkeys(QUEUES, 0.0)
    done: dict[Event, tuple[float, int | None]] = {}
    last: dict[str, int | None] = dict.fromkeys(QUEUES)
    bars: list[Bar] = []
    length: dict[Step, float] = {}
    turns = [(s, n) for s in p.step for n in range(min(s.repeat, DRAWN))]
    for section, turn in turns:
        if graphs:
            free = dict.fromkeys(QUEUES, max(free.values()))
        for step in section.steps:
            begin, cause = max(
                (done[e] for e in step.waits if e in done),
                key=lambda d: d[0],
                default=(0.0, None),
            )
            if begin <= free[step.queue]:
                begin, cause = free[step.queue], None
            if step.op == "mark":
                last[step.queue] = last[step.queue] if cause is None else cause
                free[step.queue] = begin
            else:
                if step not in length:
                    length[step] = seconds(p, step, PEAKS[target])
                free[step.queue] = begin + length[step]
                last[step.queue] = len(bars)
                bars.append(
                    Bar(
                        section.name,
                        turn,
                        step,
                        begin,
                        free[step.queue],
                        cause,
                    )
                )
            for e in step.recs:
                done[e] = free[step.queue], last[step.queue]
    return bars


# ---- in words

FORWARD, HEAD, BACKWARD = "forward", "head and loss", "backward"
GATHER, REDUCE = "all-gather", "reduce-scatter"
NORM, OPTIMIZER = "gradient norm", "optimizer"
COPY, OTHER = "copy", "other"
COLOURS = {
    FORWARD: "#5b8ff9",
    HEAD: "#945fb9",
    BACKWARD: "#2f4b9b",
    GATHER: "#3aa675",
    REDUCE: "#e8684a",
    NORM: "#f6c945",
    OPTIMIZER: "#c98a00",
    COPY: "#6dc8ec",
    OTHER: "#9aa0a6",
}
# By the first word of a command's name: what it is a part of, and a word of its own.
WORDS = {
    "fwd": (FORWARD, "forward"),
    "train": (HEAD, "forward and backward"),
    "bwd": (BACKWARD, "backward"),
    "gather": (GATHER, "all-gather"),
    "alltoall": (REDUCE, "reduce-scatter: all-to-all"),
    "reducescatter": (REDUCE, "reduce-scatter"),
    "own": (REDUCE, "sum of own gradients"),
    "sum": (REDUCE, "reduce-scatter: sum"),
    "join": (REDUCE, "reduce-scatter: sum"),
    "push": (REDUCE, "sum of gradients"),
    "norm": (NORM, "gradient norm"),
    "allreduce": (NORM, "all-reduce of the norm and the loss"),
    "factor": (NORM, "gradient clipping"),
    "update": (OPTIMIZER, "update"),
    "copy": (COPY, "copy"),
    "next": (OTHER, "constants of the step"),
    "batch": (OTHER, "tokens"),
    "count": (OTHER, "count of gradients that are summed"),
    "recount": (OTHER, "count of gradients that are summed"),
    "done": (OTHER, "all ranks have read the gradients"),
}
ROWS = {
    "main": "compute",
    "gather": "all-gather",
    "reduce": "reduce-scatter: all-to-all",
    "sum": "reduce-scatter: sums",
    "host": "CPU",
}


def words(step: Step) -> tuple[str, str]:
    """What a command is a part of, and its name."""
    first = step.op.partition(".")[0]
    part, name = WORDS.get(first, (OTHER, step.op))
    return part, name if step.unit == "-" else f"{name}, {step.unit}"


def _row(q: Queue) -> str:
    return ROWS.get(q.name, f"copies, {q.reads} to {q.writes}")


# ---- drawn

LEFT, WIDTH, TOP, HEIGHT, GAP = 190, 1200, 98, 34, 10  # pixels
LETTER = 6.6  # of a label, about


def _time(t: float) -> str:
    """Seconds, as people say it."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if t >= scale:
            return f"{t / scale:.4g} {unit}"
    return f"{t / 1e-6:.3g} µs"


def _ticks(end: float) -> tuple[float, ...]:
    """Round times, at most some ten."""
    step = 10.0**-9
    while end / step > 10:
        step *= 2.5 if f"{step:e}"[0] == "2" else 2
    return tuple(n * step for n in range(int(end / step) + 1))


def _label(bar: Bar, room: float, many: set[str]) -> str:
    """As much of a command's name as its bar holds; many: kinds of more than one unit."""
    part, name = words(bar.step)
    unit = bar.step.unit
    kind, _, number = unit.rstrip("]").partition("[")
    short = number if kind in many else kind
    for label in (name, f"{part} {unit}", unit, short):
        if len(label) * LETTER <= room:
            return label
    return ""


def _text(
    x: float, y: float, text: str, size: int = 12, more: str = ""
) -> str:
    return (
        f'<text x="{x:.3f}" y="{y:.3f}" font-size="{size}"{more}>'
        f"{escape(text)}</text>"
    )


def _bars(
    bars: Sequence[Bar], at: dict[str, int], scale: float
) -> Iterator[str]:
    def px(t: float) -> float:
        return round(LEFT + t * scale, 3)

    units = {b.step.unit for b in bars}
    many = {u.partition("[")[0] for u in units if not u.endswith("[0]")}
    for n, b in enumerate(bars):
        part, name = words(b.step)
        x, width = px(b.begin), round(px(b.end) - px(b.begin), 3)
        y = at[b.step.queue]
        after = (
            ""
            if b.cause is None
            else f"; after {words(bars[b.cause].step)[1]}"
        )
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
            f"<title>{escape(told)}</title></rect>"
        )
        if label := _label(b, width - 4, many):
            yield _text(
                x + width / 2,
                y + HEIGHT / 2 + 4,
                label,
                11,
                ' text-anchor="middle" fill="#fff" pointer-events="none"',
            )


def _causes(
    bars: Sequence[Bar], at: dict[str, int], scale: float
) -> Iterator[str]:
    """A line from what a command has waited for to its begin."""
    for b in bars:
        if b.cause is None:
            continue
        from_ = bars[b.cause]
        y1 = at[from_.step.queue]
        y2 = at[b.step.queue]
        if y1 < y2:
            y1 += HEIGHT
        else:
            y2 += HEIGHT
        x1 = LEFT + from_.end * scale
        x2 = LEFT + b.begin * scale
        yield f'<path d="M{x1:.3f} {y1}L{x2:.3f} {y2}"/>'


def _parts(bars: Sequence[Bar], scale: float) -> Iterator[str]:
    """Where each micro-batch and the optimizer's step begin on the queue main."""
    first: dict[tuple[str, int], float] = {}
    for b in bars:
        if b.step.queue == "main":
            first.setdefault((b.section, b.turn), b.begin)
    for (section, turn), begin in first.items():
        x = LEFT + begin * scale
        name = {
            "micro_batch": f"micro-batch {turn + 1}",
            "update": "optimizer step",
        }
        if section in name:
            yield f'<path d="M{x:.3f} {TOP - 16}V{TOP}" stroke="#222"/>'
            yield _text(x + 4, TOP - 7, name[section], 11, ' fill="#222"')


def text(p: Plan) -> str:
    """The picture, as SVG."""
    bars = played(p)
    end = max(b.end for b in bars)
    scale = WIDTH / end
    used = [
        q for q in QUEUES.values() if any(b.step.queue == q.name for b in bars)
    ]
    at = {q.name: TOP + n * (HEIGHT + GAP) for n, q in enumerate(used)}
    bottom = TOP + len(used) * (HEIGHT + GAP)
    h, repeat = p.head, p.section("micro_batch").repeat
    drawn = f", {DRAWN} of them drawn" if repeat > DRAWN else ""
    title = (
        f"{h.spec}: one training step of one of {h.ranks} ranks, ZeRO {h.zero}, {h.real}, "
        f"{h.micro_batches} micro-batch{'es' * (h.micro_batches > 1)} of "
        f"{h.batch} x {h.sequence} tokens{drawn}"
    )
    told = (
        f"Time is an estimate by data sheets ({h.targets[0]}), not measured. A line joins a "
        "command and what it had to wait for."
    )
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH + 20} {bottom + 40}" '
        'font-family="DejaVu Sans, Verdana, sans-serif" fill="#222">',
        f"<title>{escape(title)}</title>",
        '<rect width="100%" height="100%" fill="#fff"/>',
        _text(10, 22, title, 15),
        _text(10, 42, told, 11, ' fill="#555"'),
    ]
    x = 10.0
    for part in (
        c for c in COLOURS if any(words(b.step)[0] == c for b in bars)
    ):
        lines += [
            f'<rect x="{x:.3f}" y="54" width="14" height="14" fill="{COLOURS[part]}"/>',
            _text(x + 19, 65, part),
        ]
        x += 40 + 7.2 * len(part)
    for q in used:
        busy = (
            sum(b.end - b.begin for b in bars if b.step.queue == q.name) / end
        )
        y = at[q.name]
        lines += [
            f'<rect x="{LEFT}" y="{y}" width="{WIDTH}" height="{HEIGHT}" fill="#f1f3f4"/>',
            _text(10, y + 15, _row(q)),
            _text(
                10,
                y + 29,
                f"queue {q.name}, busy {busy:.0%}",
                10,
                ' fill="#777"',
            ),
        ]
    lines.append('<g stroke="#ccc" stroke-width="1">')
    for t in _ticks(end):
        x = LEFT + t * scale
        lines.append(f'<path d="M{x:.3f} {TOP - 4}V{bottom}"/>')
    lines.append("</g>")
    lines += [
        _text(
            LEFT + t * scale,
            bottom + 16,
            _time(t) if t else "0",
            11,
            ' text-anchor="middle"',
        )
        for t in _ticks(end)
    ]
    lines += [
        '<g stroke="#777" stroke-width="0.8" fill="none">',
        *_causes(bars, at, scale),
        "</g>",
        *_parts(bars, scale),
        *_bars(bars, at, scale),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"
