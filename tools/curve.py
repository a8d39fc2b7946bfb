"""curve.py -- draws the losses of runs as SVG, from their logs.

curve.py LOG SVG BIGRAM: with a line at the loss of a bigram model.

Exit codes: 0; 2 an argument is wrong, or a file cannot be read or written; 3 a disk is full or
failing.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from checkpoint import STDOUT, Bad, code_of, command
from logs import Log
from zg import output
from zg.commandline import Parser
from zg.write import svg

Point = tuple[float, float]

MOST = 1e30  # largest loss that is drawn
# Pixels: width of the picture, height of the plot, margins.
WIDTH, HEIGHT, EDGE = 800, 240, 16
# Pixels of the legend: a row, a sample of a curve, a sample with the space after it.
ROW, SAMPLE, SWATCH = 20, 44, 52
LABEL = 12  # font size
BIGRAM = "#c33"
COLOURS = ("#36c", "#b50", "#393", "#936", "#088", "#663", "#c5c")
DASH, GAP, DASHED = 16, 6, 5  # pixels; number of curves with different dashes
MARKS = (  # of validations, from their middle; none hides another
    "m-3 0a3 3 0 1 0 6 0a3 3 0 1 0 -6 0",
    "m-5 -5h10v10h-10z",
    "m0 -9l9 9l-9 9l-9 -9z",
    "m-6 -6l12 12m0 -12l-12 12",
    "m-9 0h18m-9 -9v18",
)


# ---- axes


@dataclass(frozen=True)
class Axes:
    """Range of steps, and round bounds of the losses, which are `every` apart."""

    first: int
    last: int
    low: float
    high: float
    every: float

    def at(self, step: float, loss: float) -> Point:
        """Return a point as fractions of width and height, from the lower left corner."""
        return (
            (step - self.first) / (self.last - self.first),
            (loss - self.low) / (self.high - self.low),
        )

    def losses(self) -> list[tuple[float, str]]:
        found = svg.ticks(self.low, self.high, self.every)
        return list(zip(found, svg.labels(found, self.every), strict=True))

    def steps(self, most: int) -> list[tuple[int, str]]:
        every = max(1, round(svg.apart(self.last - self.first, max(most, 1))))
        first = -(-self.first // every) * every
        return [(n, str(n)) for n in range(first, self.last + 1, every)]


def drawable(log: Log, key: str) -> list[tuple[int, float]]:
    return [(n, x) for n, x in log.points(key) if abs(x) < MOST]


def axes(logs: Sequence[Log], most: int, *levels: float) -> Axes:
    """Return axes around all losses of logs, with about `most` ticks. levels: other losses to
    include."""
    found = [p for log in logs for k in ("loss", "val_loss") for p in drawable(log, k)]
    steps = [step for step, _ in found] or [0]
    losses = [loss for _, loss in found] + list(levels) or [0.0]
    first, last = min(steps), max(steps)
    if first == last:
        first, last = first - (first > 0), last + 1
    low, high = min(losses), max(losses)
    size = max(abs(low), abs(high))
    if high - low <= 1e-9 * size or size < 1e-30:  # all losses are equal
        spare = size / 10 if size > 1e-30 else 1.0
        low, high = low - spare, high + spare
    every = svg.apart(high - low, most)
    below, above = low // every, -(-high // every)
    return Axes(first, last, below * every, above * every, every)


def shown(loss: float) -> str:
    return f"{loss:.2f}" if 0.01 <= abs(loss) < 1e6 else f"{loss:.3g}"


# ---- drawing


def path(found: str, colour: str, more: str = "") -> str:
    return f'<path d="{found}" fill="none" stroke="{colour}"{more}/>'


def through(points: Sequence[Point]) -> str:
    """Return a curve as a path. A single point becomes a short line."""
    if len(points) == 1:
        ((x, y),) = points
        return f"M{x - 12:.1f} {y:.1f}h24"
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)


@dataclass(frozen=True)
class Style:
    """Look of a log's curve and its validations; the first 28 all differ."""

    colour: str
    dash: str
    mark: str

    def curve(self, points: Sequence[Point]) -> str:
        dash = f' stroke-dasharray="{self.dash}"' if self.dash else ""
        more = f' stroke-width="1.5" stroke-linejoin="round"{dash}'
        return path(through(points), self.colour, more)

    def marks(self, points: Sequence[Point]) -> list[str]:
        """Return white outlines that lift the marks off the curves, then the marks."""
        at = "".join(f"M{x:.1f} {y:.1f}{self.mark}" for x, y in points)
        drawn = ("#fff", 4.5, "halo"), (self.colour, 1.5, "mark")
        return [
            path(at, colour, f' stroke-width="{wide}" class="{kind}"')
            for colour, wide, kind in drawn
            if points
        ]


def style(number: int, of: int) -> Style:
    """Return the look of curve `number`. All dashes start at the same place, and each curve has
    shorter ones than the curve below it, so equal curves are all visible."""
    many = min(of, DASHED)
    turn = 1 + (number - 1) % (many - 1) if number else 0
    return Style(
        COLOURS[number % len(COLOURS)],
        f"{DASH + GAP * (many - 1 - turn)} {GAP * turn}" if turn else "",
        MARKS[number % len(MARKS)],
    )


@dataclass(frozen=True)
class Entry:
    """An entry of the legend: a name that may be cut, the text after it, and a sample."""

    name: str
    told: str
    style: Style
    marked: bool = False

    def words(self, room: float) -> str:
        room -= SWATCH + svg.width(self.told, LABEL)
        return svg.fitted(self.name, LABEL, room) + self.told

    def drawn(self, x: float, y: float, room: float) -> list[str]:
        told = self.name + self.told
        at = [(x + SAMPLE / 2, y - 4)] if self.marked else []
        return [
            f"<g><title>{svg.escaped(told)}</title>",
            self.style.curve([(x, y - 4), (x + SAMPLE, y - 4)]),
            *self.style.marks(at)[1:],
            svg.text(x + SWATCH, y, self.words(room), LABEL),
            "</g>",
        ]


def entry(log: Log, name: str, look: Style) -> Entry:
    """Return the entry of a log. name: its name among several logs, "" if it is alone."""
    words = {"loss": "loss", "val_loss": "validation"}
    last = {key: found[-1] for key in words if (found := drawable(log, key))}
    told = ", ".join(f"{words[key]} {shown(x)}" for key, (_, x) in last.items())
    name = f"{name}: " if name else ""
    return Entry(name, told, look, "val_loss" in last)


def legend(entries: Sequence[Entry], top: float) -> tuple[list[str], int]:
    """Return the lines of the legend, and the number of rows they take."""
    room = WIDTH - 2 * EDGE
    wide = [SWATCH + svg.width(e.words(room), LABEL) + EDGE for e in entries]
    places = list(svg.flow(wide, room + EDGE))
    lines = [
        line
        for e, (x, row) in zip(entries, places, strict=True)
        for line in e.drawn(EDGE + x, top + row * ROW, room)
    ]
    return lines, places[-1][1] + 1


@dataclass(frozen=True)
class Plot:
    """Place of the plot in the picture."""

    axes: Axes
    left: float
    top: float

    @property
    def right(self) -> float:
        return WIDTH - 2 * EDGE

    @property
    def bottom(self) -> float:
        return self.top + HEIGHT

    def at(self, step: float, loss: float) -> Point:
        x, y = self.axes.at(step, loss)
        return (
            self.left + x * (self.right - self.left),
            self.bottom - y * HEIGHT,
        )

    def frame(self) -> Iterator[str]:
        """Yield the grid, ticks and their labels."""
        for loss, told in self.axes.losses():
            _, y = self.at(self.axes.first, loss)
            yield path(f"M{self.left:.1f} {y:.1f}H{self.right:.1f}", svg.GRID)
            end = ' text-anchor="end" class="y"'
            yield svg.text(self.left - 8, y + 4, told, LABEL, end)
        wide = svg.width(str(self.axes.last), LABEL) + EDGE
        for step, told in self.axes.steps(
            min(10, int((self.right - self.left) / wide))
        ):
            x, _ = self.at(step, self.axes.low)
            yield path(f"M{x:.1f} {self.bottom:.1f}v5", svg.FAINT)
            # not beyond the picture's edge
            half = svg.width(told, LABEL) / 2
            x = min(max(x, half), WIDTH - half)
            middle = ' text-anchor="middle" class="x"'
            yield svg.text(x, self.bottom + 19, told, LABEL, middle)
        yield path(
            f"M{self.left:.1f} {self.top:.1f}V{self.bottom:.1f}H{self.right:.1f}",
            svg.FAINT,
        )
        middle = ' text-anchor="middle"'
        between = (self.left + self.right) / 2
        yield svg.text(between, self.bottom + 38, "step", LABEL, middle)


def curve(
    logs: Sequence[Log], names: Sequence[str], bigram: float | None = None
) -> str:
    """Return a picture with a curve of each log's training steps and marks at its validations.
    names: of several logs."""
    level = [] if bigram is None else [bigram]
    found = axes(logs, 8, *level)
    told = logs[0].run.get("run", "?") if len(logs) == 1 else f"{len(logs)} runs"
    last = max((max(log.steps, default=0) for log in logs), default=0)
    title = f": loss of {last} step{'s' * (last != 1)}, nats a token"
    size, room = 15, WIDTH - 2 * EDGE
    title = svg.fitted(told, size, room - svg.width(title, size)) + title
    named = names if len(logs) > 1 else [""]
    looks = [style(n, len(logs)) for n in range(len(logs))]
    entries = [entry(*of) for of in zip(logs, named, looks, strict=True)]
    flat = Style(BIGRAM, "", "")
    entries += [Entry("", f"bigram model {x:.2f}", flat) for x in level]
    lines, rows = legend(entries, 46)
    wide = max(svg.width(label, LABEL) for _, label in found.losses())
    plot = Plot(found, EDGE + wide + 8, 46 + rows * ROW)
    out = [
        *svg.opened(WIDTH, plot.bottom + 50, title),
        svg.text(EDGE, 22, title, size),
        *lines,
        *plot.frame(),
    ]
    for loss in level:
        ends = [plot.at(step, loss) for step in (found.first, found.last)]
        out.append(flat.curve(ends))
    marks = []
    for log, look in zip(logs, looks, strict=True):
        if points := [plot.at(*p) for p in drawable(log, "loss")]:
            out.append(look.curve(points))
        points = [plot.at(*p) for p in drawable(log, "val_loss")]
        marks.append(look.marks(points))
    out += [line for drawn in marks for line in drawn[:1]]
    out += [line for drawn in marks for line in drawn[1:]]
    return "\n".join([*out, "</svg>\n"])


# ---- writing


def write(text: str, file: Path | None) -> None:
    """Write to stdout, or to a file that is replaced only as a whole."""
    with output.naming(file or STDOUT, anew=True):
        output.write(text, None if file is None else str(file))


def draw(chosen: argparse.Namespace) -> int:
    log = Log(chosen.log)
    log.read(True)
    if not drawable(log, "loss"):
        raise Bad(f"{log.path}: no step to draw")
    if not abs(chosen.bigram) < MOST:
        raise Bad(f"{chosen.bigram} is not a loss")
    write(curve([log], [], chosen.bigram), chosen.svg)
    return 0


def main(words: Sequence[str]) -> int:
    parser = Parser(prog="curve.py", description=__doc__.partition("\n\n")[2])
    parser.add_argument("log", type=Path)
    parser.add_argument("svg", type=Path)
    parser.add_argument("bigram", type=float)
    return code_of("curve.py", draw, parser.parse_args(words))


if __name__ == "__main__":
    command(main)
