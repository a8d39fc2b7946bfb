"""report.py -- computes the page of `--emit report`: a program's model, predicted step, memory,
wire and recipe."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ..facts import reserve
from ..facts.queues import QUEUES
from ..plan.plan import Class, Plan, having
from ..plan.text import digest
from ..predict import cost, play
from ..predict.play import Played
from ..predict.seconds import Clock
from ..read.schema import Spec
from . import config, emit, explain, page, timeline, view
from .page import Bar, Chart, Curve, Page, Section, Series, Table, Track, table
from .times import LEAST, Times, long, one_host, scheduled, times

# Colours of contents of memory, by the groups of cost.GROUPS.
KINDS = {
    "parameters": "#3aa675",
    "optimizer state": "#c98a00",
    "gradients": "#e8684a",
    "activations": "#5b8ff9",
    "the rest": "#9aa0a6",
}
ROOM = 240  # pixels of a class's lanes, where there are many
LAW = (
    "The recipe alone decides the bits of the trained weights. Layout and memory settings change "
    "memory, wire and speed, but no bit."
)
FAST = (
    "train.reduction is fast: NCCL adds gradients, so here ranks, ZeRO stage and buckets change "
    "bits, too."
)


def _ns(t: float) -> int:
    return round(1e9 * t)


def _ms(t: float) -> str:
    return f"{1e3 * t:,.2f} ms"


# ---- the model


def _model(p: Plan) -> Section:
    h = p.head
    said = [(word, text) for word, text in view.described(p).items() if text]
    said += [
        ("FLOPs", f"{cost.flops(p):.4g} in a step of all ranks, by the model"),
        ("Recomputed", f"{cost.again(p):.4g} FLOPs more in a step of all ranks"),
        (
            "Gathered",
            f"at most {h.live:,} elements at once; {h.prefetch} units ahead",
        ),
    ]
    flats = [
        (f.name, f.count, f"{f.elems:,}", f"{f.shard:,}", explain.kept(p, f))
        for f in p.flats
    ]
    return Section(
        "model",
        "Model",
        explain.LEGEND,
        tables=(
            table("The run", "subject|value", said),
            table(
                "Layers, as flat buffers of parameters",
                "flat|instances|elements|shard|kept: parameters, optimizer state, sums",
                flats,
            ),
        ),
    )


# ---- the step


def _told(b: play.Bar) -> str:
    return f"micro-batch {b.turn + 1}" if b.section == "micro_batch" else b.section


def bars(x: Played) -> tuple[tuple[Series, ...], tuple[Track, ...]]:
    """Return the parts of a step as series, and its queues as tracks. Time 0 is the end of the
    step before."""
    used = {timeline.words(b)[0] for b in x.bars}
    parts = [part for part in timeline.COLOURS if part in used]
    long = x.end - x.begin
    tracks = []
    for q in QUEUES.values():
        mine = [b for b in x.bars if b.step.queue == q.name]
        busy = sum(max(0.0, b.end - max(b.begin, x.begin)) for b in mine)
        drawn = [
            Bar(
                parts.index(timeline.words(b)[0]),
                0,
                _ns(b.begin - x.begin),
                _ns(b.end - x.begin),
                timeline.words(b)[1],
                _told(b),
                timeline.words(b.cause)[1] if b.cause else "",
            )
            for b in mine
        ]
        note = f"queue {q.name}, busy {busy / long:.0%}"
        if mine:
            tracks.append(Track(timeline.row(q), note, tuple(drawn)))
    return page.series((part, timeline.COLOURS[part]) for part in parts), tuple(tracks)


def _span(x: Played, tracks: Sequence[Track]) -> tuple[int, int]:
    begins = [b.begin for t in tracks for b in t.bars]
    return min([0, *begins]), _ns(x.end - x.begin)


def _time(clock: Clock, x: Played, t: Times) -> Section:
    h, mfu = clock.p.head, t.mfu(clock)
    numbers = [
        ("step", f"{t.seconds:.4g} s"),
        ("tokens/s", f"{t.rate:,.0f}"),
        ("tokens/s of a rank", f"{t.rate / h.ranks:,.0f}"),
        ("FLOP/s of a rank", f"{t.flops / t.seconds / h.ranks:.4g}"),
        ("MFU", f"{mfu:.1%}" if mfu else "the device's file states no peak"),
        *((what, long(seconds)) for what, seconds in t.spans()),
    ]
    parts = [
        (
            part,
            _ms(t.busy.get(part, 0.0)),
            _ms(t.exposed[part]),
            f"{t.exposed[part] / t.seconds:.1%}",
        )
        for part in t.exposed
    ]
    waits = [
        (w.waiting, w.cause, _ms(w.seconds), w.times)
        for w in t.waits
        if w.seconds >= LEAST * t.seconds
    ]
    note = one_host(clock)
    more = (
        f"{x.last + 1} micro-batches are drawn; {x.more} more take {x.period:.4g} s each.",
    ) * (x.more > 0)
    series, tracks = bars(x)
    return Section(
        "time",
        "Predicted step",
        (
            f"Predicted, not measured, for {clock.device.about}",
            "A rank's queues run beside each other. Exposed time is that in which queue main works "
            "on a part, or waits while it runs on the way to main's next command; exposed times "
            "add up to the step.",
            *more,
            *[f"Note: {note}"] * bool(note),
        ),
        (Chart("Timeline by queue", series, tracks, *_span(x, tracks)),),
        (
            table("Rates", "rate|value", numbers),
            table("Parts of a step", "part|busy|exposed|share of the step", parts),
            *(table("Waits of queue main", "command|waits for|time|times", waits),)
            * bool(waits),
        ),
    )


# ---- memory


@dataclass
class Slots:
    """Contents of a class's slots over a step. most: slots that hold one at the same time; open:
    for each slot that holds one now, its begin and unit."""

    found: list[Bar] = field(default_factory=list)
    open: dict[int, tuple[int, str]] = field(default_factory=dict)
    most: int = 0


def _kinds(p: Plan) -> list[str]:
    """Return the purposes of classes that units share in turn."""
    used = {cost.purpose(c) for c in p.passing}
    return [kind for kind in KINDS if kind in used]


def lifetimes(p: Plan, x: Played) -> dict[str, Slots]:
    """Return the contents of all classes whose slots die at a last use: each from the begin of its
    first command to the end of its last one."""
    kinds = _kinds(p)
    held = {c.name: Slots() for c in p.passing}
    series = {c.name: kinds.index(cost.purpose(c)) for c in p.passing}

    def close(name: str, slot: int, end: int) -> None:
        begin, unit = held[name].open.pop(slot)
        held[name].found.append(
            Bar(series[name], slot, begin, end, unit, f"{name}[{slot}]")
        )

    for b in x.bars:
        for r in b.step.refs:
            if r.cls not in held:
                continue
            slots = held[r.cls]
            unit = b.step.unit or b.step.op
            slots.open.setdefault(r.index, (_ns(b.begin - x.begin), unit))
            slots.most = max(slots.most, len(slots.open))
        for r in b.step.refs:
            if r.last and r.cls in held and r.index in held[r.cls].open:
                close(r.cls, r.index, _ns(b.end - x.begin))
    for name, slots in held.items():
        for slot in [*slots.open]:
            close(name, slot, _ns(x.end - x.begin))
        slots.found.sort(key=lambda b: b.begin)
    return held


def _contents(p: Plan, x: Played, held: dict[str, Slots]) -> Iterator[Chart]:
    """Yield a chart with a track for each class and a lane for each slot."""
    tracks = [
        Track(
            c.name,
            f"{c.arena}, {c.slots} x {c.stride:,} bytes",
            tuple(held[c.name].found),
            lanes=c.slots,
            height=22 if c.slots <= 4 else max(3, min(12, ROOM // c.slots)),
        )
        for c in sorted(p.passing, key=lambda c: -c.bytes)
        if held[c.name].found
    ]
    if tracks:
        series = page.series((kind, KINDS[kind]) for kind in _kinds(p))
        title = "Contents of slots that units share in turn"
        yield Chart(title, series, tuple(tracks), *_span(x, tracks))


def _use(c: Class, held: dict[str, Slots]) -> str:
    if c.name not in held:
        return "whole step"
    slots = held[c.name]
    return f"{len(slots.found)} contents in turn, at most {slots.most} at once"


def _classes(p: Plan, held: dict[str, Slots]) -> Iterator[Table]:
    """Yield a table for each part of an arena that a target has."""
    heads = "class|purpose|slots|bytes a slot|bytes|at|holds"
    for (arena, targets), title in explain.TITLES.items():
        rows = [
            (
                c.name,
                cost.purpose(c),
                c.slots,
                f"{c.stride:,}",
                f"{c.bytes:,}",
                f"{c.at:,}",
                _use(c, held),
            )
            for c in p.classes
            if (c.arena, c.targets) == (arena, targets)
        ]
        if rows and any(targets in having(t) for t in p.head.targets):
            yield table(f"Classes: {title}", heads, rows)


def _memory(p: Plan, x: Played) -> Section:
    held = lifetimes(p, x)
    targets = [
        (
            t,
            explain.size(p.arena(t)),
            explain.size(reserve.device(p, t) - p.arena(t)),
            explain.size(reserve.device(p, t)),
        )
        for t in p.head.targets
    ]
    return Section(
        "memory",
        "Memory",
        (
            "An arena is one piece of memory in which the plan gives each byte its use. A class "
            "has equal slots. In some classes units share a slot in turn, each up to the last use "
            "of its content; these are drawn and counted over the timeline's micro-batches. All "
            "other classes keep their place for the whole step.",
        ),
        tuple(_contents(p, x, held)),
        (
            table(
                "A rank's device memory, bytes",
                "target|arena|beside it, about|together",
                targets,
            ),
            table(
                "By purpose",
                "purpose|bytes",
                [(title, explain.size(n)) for title, n in cost.memory(p)],
            ),
            *_classes(p, held),
        ),
    )


# ---- the wire


def _wire(p: Plan) -> Section:
    h, all_ = p.head, cost.training_wire(p)
    if h.ranks == 1:
        return Section("wire", "Wire", ("One rank: nothing.",))
    heads = "section|command|collectives|bytes|inside the host|from other hosts"
    every = [*explain.collectives(p), ("step", "total", all_)]
    rows = [
        (name, op, *(f"{n:,}" for n in (w.messages, w.bytes, w.bytes - w.far, w.far)))
        for name, op, w in every
    ]
    ideal, paper = cost.ideal(p), cost.paper(p)
    formula = f"the ZeRO papers' {paper} P (W-1)/W for a micro-batch"
    tables = [
        table("Received by each rank in a training step", heads, rows),
        table(
            "Beside the papers, for each rank and step",
            "scheme|bytes",
            [
                ("here", f"{all_.bytes:,}"),
                (
                    f"{formula}, times {h.micro_batches}",
                    f"{ideal * h.micro_batches:,.0f}",
                ),
            ],
        ),
    ]
    if h.local not in (0, h.ranks):
        schemes = [("here", f"{cost.sent_by_host(p):,}")]
        schemes += [(name, f"{n:,.0f}") for name, n in cost.schemes(p)]
        tables.append(
            table(
                f"Sent by each host of {h.local} ranks to others in a step",
                "scheme|bytes",
                schemes,
            )
        )
    letters = (
        "P: parameters, in formulas of a host each of b bytes; W: ranks; A: micro-batches of a "
        "rank; N: hosts."
    )
    return Section("wire", "Wire", (letters,), tables=tuple(tables))


# ---- the recipe


def _split(line: str) -> tuple[str, str]:
    key, _, value = line.partition(": ")
    return key, value


def _recipe(spec: Spec, p: Plan) -> Section:
    lines = config.recipe(spec)
    sha = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    return Section(
        "recipe",
        "Recipe",
        (
            LAW,
            *(FAST,) * (p.head.reduction == "fast"),
            f"SHA-256 of the recipe's lines: {sha}",
            f"SHA-256 of the plan: {digest(p)}",
        ),
        tables=(table("Keys that decide bits", "key|value", map(_split, lines)),),
    )


def _law(spec: Spec, p: Plan) -> Section:
    def target(t: str) -> tuple[str, str]:
        cpu = "the same for every kernel object, compiler, layout and number of threads"
        gpu = "the same for every layout; by rounding others than a CPU's"
        return t, cpu if t == "cpu" else gpu

    return Section(
        "law",
        "Bits",
        (
            "A target is a column of the plan's launch table; all share steps and offsets.",
            *(FAST,) * (p.head.reduction == "fast"),
        ),
        tables=(
            table(
                "Bits by target",
                "target|bits of the weights",
                map(target, spec.targets),
            ),
            table(
                "Keys that change no bit",
                "key|value",
                map(_split, config.layout(spec)),
            ),
        ),
    )


# ---- the search


@dataclass(frozen=True)
class Front:
    """Candidates of --fit. about: lines on them; heads: of the tables' columns; rows, other: the
    front, and candidates with other bits; points: bytes of device memory and seconds of a step."""

    about: tuple[str, ...]
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    other: Sequence[Sequence[str]]
    points: Sequence[tuple[int, float]]


def _front(front: Front) -> Section:
    sizes = [size for size, _ in front.points]
    spread = max(sizes) - min(sizes)
    units = (("MiB", 20), ("KiB", 10), ("bytes", 0))
    unit, power = next((u for u in units if spread >> u[1] >= 100), units[-1])
    points = sorted((size >> power, 1e3 * seconds) for size, seconds in front.points)
    curves = Curve(0, tuple(points)), Curve(0, tuple(points), True)
    track = Track(
        "a step", "ms, by device memory", height=160, curves=curves, unit="ms"
    )
    chart = Chart(
        "Time and memory of the front",
        page.series([("front", KINDS["activations"])]),
        (track,),
        points[0][0],
        max(points[-1][0], points[0][0] + 1),
        unit,
    )
    heads = "|".join(front.heads)
    tables = [table("The front", heads, front.rows)]
    if front.other:
        tables.append(table("With other bits", heads, front.other))
    return Section("search", "Search", front.about, (chart,), tuple(tables))


def text(
    clock: Clock,
    spec: Spec,
    notes: Sequence[str],
    origin: str,
    front: Front | None = None,
) -> str:
    """Return the report as HTML. origin: the command that made it."""
    p, t = clock.p, times(clock, scheduled(spec))
    h, x = p.head, t.played
    sections = [
        _model(p),
        _time(clock, x, t),
        _memory(p, x),
        _wire(p),
        _recipe(spec, p),
        _law(spec, p),
        *([_front(front)] if front else []),
    ]
    if notes:
        sections.append(Section("notes", "Notes", tuple(map(page.clean, notes))))
    lead = (
        f"{h.params:,} parameters, ZeRO {h.zero}, {explain.counted(h.ranks, 'rank')}, {h.real}; "
        f"a step of {t.tokens:,} tokens is predicted to take {t.seconds:.4g} s. {origin}"
    )
    return emit.page(Page(page.clean(h.spec), page.clean(lead), tuple(sections)))
