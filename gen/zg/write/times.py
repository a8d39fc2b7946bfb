"""times.py -- prints the predicted time of a training step, as a table (`--emit time`) and as data
(`--emit time.json`).

A second of the step belongs to the part that queue main works on or, where main waits, to the part
that runs meanwhile for its sake: the command that it waits for, or one that this command waited for
in turn. That much of a part is exposed, at most as much as it is busy, and the parts add up to the
step.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from ..plan.text import digest
from ..predict import cost, play
from ..predict.play import Played
from ..predict.seconds import Clock
from ..read.schema import Spec
from .explain import counted
from .timeline import COLOURS, words

WAITS = 8  # waits that are printed
LEAST = 1e-3  # smallest share of a step for which a wait is printed
DAY = 86400
GPUS = 8  # of most hosts


@dataclass(frozen=True)
class Wait:
    """A wait of queue main. seconds: in a step, over all its times; waiting: the command of main;
    cause: the command that runs meanwhile on the way to it; part: of the step that cause belongs
    to."""

    seconds: float
    waiting: str
    cause: str
    part: str
    times: int


@dataclass(frozen=True)
class Times:
    """A predicted step. busy: seconds by part, over all queues; exposed: seconds by part in which
    main works on it or waits for it; flops: of the model, by all ranks; tokens: of all ranks;
    steps: of the schedule, 0 if it has no end; played: the step's commands."""

    seconds: float
    busy: dict[str, float]
    exposed: dict[str, float]
    waits: tuple[Wait, ...]
    flops: int
    tokens: int
    steps: int
    played: Played

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds

    def spans(self) -> Iterator[tuple[str, float]]:
        """Yield seconds of training, for a number of tokens and for the schedule."""
        yield "1e9 tokens", 1e9 / self.rate
        if self.steps:
            yield counted(self.steps, "step"), self.steps * self.seconds

    def mfu(self, clock: Clock) -> float | None:
        """Return the share of the ranks' peak, None if the device states no peak."""
        peak = clock.device.peak.get(clock.p.head.real)
        return self.flops / self.seconds / (peak * clock.p.head.ranks) if peak else None


def _waits(x: Played) -> tuple[list[Wait], dict[str, float]]:
    """Return the waits of queue main, the longest first, and the step's seconds by part."""
    exposed: dict[str, float] = dict.fromkeys(COLOURS, 0.0)
    found: dict[tuple[str, str, str], list[float]] = {}
    for b, times in x.counted():
        if b.step.queue != "main":
            continue
        exposed[words(b)[0]] += (b.end - b.begin) * times
        for cause, seconds in b.path:
            part, name = words(cause)
            exposed[part] += seconds * times
            kind = words(b)[1], name, part
            found.setdefault(kind, []).extend([seconds] * times)
    waits = [Wait(sum(some), *kind, len(some)) for kind, some in found.items()]
    return sorted(waits, key=lambda w: -w.seconds), exposed


def times(clock: Clock, steps: int = 0) -> Times:
    """Return the predicted times of a plan on a device. steps: of its schedule."""
    p, x = clock.p, play.step(clock)
    busy: Counter[str] = Counter()
    for b, n in x.counted():
        busy[words(b)[0]] += (b.end - b.begin) * n  # type: ignore[assignment]
    waits, exposed = _waits(x)
    head = p.head
    return Times(
        seconds=x.seconds,
        busy={part: busy[part] for part in COLOURS if busy[part]},
        exposed={part: s for part, s in exposed.items() if s or busy[part]},
        waits=tuple(waits),
        flops=cost.flops(p),
        tokens=head.rows * head.micro_batches * head.ranks,
        steps=steps,
        played=x,
    )


def scheduled(spec: Spec) -> int:
    """Return the steps of a spec's schedule, 0 if it has no end."""
    schedule = spec.train.schedule
    return schedule.steps or schedule.total_num_steps or 0


def long(t: float) -> str:
    """Return a time as people say it."""
    for unit, scale in (("days", DAY), ("hours", 3600.0), ("minutes", 60.0)):
        if t >= 2 * scale:
            return f"{t / scale:.1f} {unit}"
    return f"{t:.4g} s"


def one_host(clock: Clock) -> str:
    """Return a note if more ranks than GPUs of a host count as one host, else ''."""
    h = clock.p.head
    if clock.device.target == "cpu" or h.local or h.ranks <= GPUS:
        return ""
    return f"all {h.ranks:,} ranks count as one host: set cluster.local"


def table(clock: Clock, steps: int = 0) -> str:
    """Return the prediction as a table for people."""
    t, h = times(clock, steps), clock.p.head
    cpu = clock.device.target == "cpu"
    threads = f", {counted(clock.threads, 'thread')} a rank" if cpu else ""
    mfu, note = t.mfu(clock), one_host(clock)
    rows = [
        ("a step", f"{t.seconds:.4g} s"),
        ("tokens/s", f"{t.rate:,.0f}, {t.rate / h.ranks:,.0f} a rank"),
        (
            "FLOP/s",
            f"{t.flops / t.seconds / h.ranks:.4g} a rank"
            + (f", MFU {mfu:.1%}" if mfu else ""),
        ),
        *((what, long(seconds)) for what, seconds in t.spans()),
    ]
    wide = max(len(what) for what, _ in rows)
    lines = [
        f"{h.spec}: predicted, not measured, for {clock.device.about}",
        f"ZeRO {h.zero}, {counted(h.ranks, 'rank')}{threads}, {h.real}, "
        f"{counted(h.micro_batches, 'micro-batch', 'es')} of {h.shape}",
        *[f"note: {note}"] * bool(note),
        "",
        *(f"{what:<{wide}}  {said}" for what, said in rows),
        "",
        f"{'part of a step':<30}{'busy':>12}{'of the step':>14}{'':>8}",
    ]
    for part in t.exposed:
        lines.append(
            f"{part:<30}{1e3 * t.busy.get(part, 0.0):>9.2f} ms{1e3 * t.exposed[part]:>11.2f} ms"
            f"{t.exposed[part] / t.seconds:>8.1%}"
        )
    most = [w for w in t.waits if w.seconds >= LEAST * t.seconds][:WAITS]
    lines += [
        "",
        "longest waits of queue main, by the parts that run on the way to its next command"
        if most
        else "queue main waits for nothing",
    ]
    for w in most:
        lines.append(
            f"{1e3 * w.seconds:>9.2f} ms  {w.waiting} waits for {w.cause}"
            + (f" ({w.times} times)" if w.times > 1 else "")
        )
    return "\n".join(lines) + "\n"


def data(clock: Clock, steps: int = 0) -> str:
    """Return the prediction as JSON. Times are in seconds."""
    p, t = clock.p, times(clock, steps)
    days = [seconds / DAY for _, seconds in t.spans()]
    return (
        json.dumps(
            {
                "device": clock.device.about,
                "plan": digest(p),
                "ranks": p.head.ranks,
                "tokens": t.tokens,
                "step": t.seconds,
                "tokens_per_second": t.rate,
                "flops": t.flops,
                "mfu": t.mfu(clock),
                "days_of_1e9_tokens": days[0],
                "schedule_steps": steps,
                "days_of_schedule": days[1] if steps else None,
                "busy": t.busy,
                "exposed": t.exposed,
                "waits": [vars(w) for w in t.waits],
            },
            indent=1,
        )
        + "\n"
    )
