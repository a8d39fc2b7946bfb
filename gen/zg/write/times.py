"""times.py -- prints the predicted time of a training step, as a table (`--emit time`) and as data
(`--emit time.json`).

A second of the step belongs to the part that queue main works on or, where main waits, to the part
that it waits for: that much of a collective is exposed. So the parts add up to the step.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass

from ..facts import ops
from ..predict import cost, play
from ..predict.play import Played
from ..predict.seconds import Clock
from .timeline import COLOURS, OTHER, words

WAITS = 8  # waits that are printed
LEAST = 1e-3  # smallest share of a step for which a wait is printed
DAY = 86400


@dataclass(frozen=True)
class Wait:
    """A wait of queue main. seconds: in a step, over all its times; waiting, cause: the commands
    that wait and are waited for; part: of the step that cause belongs to."""

    seconds: float
    waiting: str
    cause: str
    part: str
    times: int


@dataclass(frozen=True)
class Times:
    """A predicted step. busy: seconds by part, over all queues; exposed: seconds by part in which
    main works on it or waits for it; flops: of the model, by all ranks; tokens: of all ranks;
    played: the step's commands."""

    seconds: float
    busy: dict[str, float]
    exposed: dict[str, float]
    waits: tuple[Wait, ...]
    flops: int
    tokens: int
    played: Played

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds

    def mfu(self, clock: Clock) -> float | None:
        """Return the share of the ranks' peak, None if the device states no peak."""
        peak = clock.device.peak.get(clock.p.head.real)
        return self.flops / self.seconds / (peak * clock.p.head.ranks) if peak else None


def _waits(x: Played) -> tuple[list[Wait], dict[str, float]]:
    """Return the waits of queue main, the longest first, and its seconds by part."""
    exposed: dict[str, float] = dict.fromkeys(COLOURS, 0.0)
    found: dict[tuple[str, str, str], list[float]] = {}
    free = x.begin
    for b in x.bars:
        if b.step.queue != "main":
            continue
        times, gap = x.times(b), max(0.0, b.begin - free)
        if gap and b.cause is not None:
            part, name = words(b.cause)
            exposed[part] += gap * times
            kind = words(b)[1], name, part
            found.setdefault(kind, []).extend([gap] * times)
        else:
            exposed[OTHER] += gap * times
        exposed[words(b)[0]] += (b.end - b.begin) * times
        free = b.end
    waits = [Wait(sum(gaps), *kind, len(gaps)) for kind, gaps in found.items()]
    return sorted(waits, key=lambda w: -w.seconds), exposed


def times(clock: Clock) -> Times:
    """Return the predicted times of a plan on a device."""
    p, x = clock.p, play.step(clock)
    busy: Counter[str] = Counter()
    for b in x.bars:
        busy[words(b)[0]] += (b.end - b.begin) * x.times(b)  # type: ignore[assignment]
    waits, exposed = _waits(x)
    head = p.head
    return Times(
        seconds=x.seconds,
        busy={part: busy[part] for part in COLOURS if busy[part]},
        exposed={part: s for part, s in exposed.items() if s or busy[part]},
        waits=tuple(waits),
        flops=cost.flops(p),
        tokens=head.batch * head.sequence * head.micro_batches * head.ranks,
        played=x,
    )


def long(t: float) -> str:
    """Return a time as people say it."""
    for unit, scale in (("days", DAY), ("hours", 3600.0), ("minutes", 60.0)):
        if t >= 2 * scale:
            return f"{t / scale:.1f} {unit}"
    return f"{t:.4g} s"


def table(clock: Clock) -> str:
    """Return the prediction as a table for people."""
    p, t = clock.p, times(clock)
    h = p.head
    many = "" if clock.threads == 1 else "s"
    cpu = clock.device.target == "cpu"
    threads = f", {clock.threads} thread{many} a rank" if cpu else ""
    mfu = t.mfu(clock)
    lines = [
        f"{h.spec}: predicted, not measured, for {clock.device.about}",
        f"ZeRO {h.zero}, {h.ranks} ranks{threads}, {h.real}, {h.micro_batches} micro-batches of "
        f"{h.batch} x {h.sequence} tokens",
        "",
        f"a step      {t.seconds:.4g} s",
        f"tokens/s    {t.rate:,.0f}, {t.rate / h.ranks:,.0f} a rank",
        f"FLOP/s      {t.flops / t.seconds / h.ranks:.4g} a rank"
        + (f", MFU {mfu:.1%}" if mfu else ""),
        f"1e9 tokens  {long(1e9 / t.rate)}",
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
        "longest waits of queue main" if most else "queue main waits for nothing",
    ]
    for w in most:
        lines.append(
            f"{1e3 * w.seconds:>9.2f} ms  {w.waiting} waits for {w.cause}"
            + (f" ({w.times} times)" if w.times > 1 else "")
        )
    return "\n".join(lines) + "\n"


def data(clock: Clock) -> str:
    """Return the prediction as JSON. Times are in seconds."""
    p, t = clock.p, times(clock)
    return (
        json.dumps(
            {
                "device": clock.device.about,
                "step": t.seconds,
                "tokens_per_second": t.rate,
                "flops": t.flops,
                "mfu": t.mfu(clock),
                "threads": clock.threads,
                "precision": p.head.real,
                "bytes": ops.BYTES[p.head.real],
                "busy": t.busy,
                "exposed": t.exposed,
                "waits": [vars(w) for w in t.waits],
            },
            indent=1,
        )
        + "\n"
    )
