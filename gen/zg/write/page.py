"""page.py -- the parts of a report: sections of tables and charts, which templates/report.html.j2
prints as one HTML file.

A chart has tracks above each other over one axis of times or steps: tracks of bars in lanes, or
tracks of curves. It travels as JSON in which bars are columns of whole numbers, and
templates/chart.js.j2 draws it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from . import svg

LIGHT, DARK = "#ffffff", "#15181d"  # paper by the reader's scheme, as in report.css.j2
SEEN = 3.0  # least contrast of a bar or a curve with the paper (WCAG 2, 1.4.11)
MOST = 2000  # points of a curve that are kept
# Patterns of series, so that none is told by its colour alone.
DASHES: tuple[tuple[int, ...], ...] = (
    (),
    (9, 7),
    (2, 4),
    (16, 4),
    (9, 3, 2, 3),
    (4, 10),
    (5, 3),
    (9, 2, 2, 2, 2, 2),
    (1, 2),
    (20, 6, 4, 6),
    (3, 1),
    (14, 3, 6, 3),
)

# ---- colours


def _rgb(colour: str) -> tuple[int, ...]:
    """Return the parts of #rrggbb or #rgb."""
    digits = len(colour) // 3
    parts = (colour[n : n + digits] for n in range(1, len(colour), digits))
    return tuple(int(x * (3 - digits), 16) for x in parts)


def _light(colour: str) -> float:
    """Return the relative luminance of WCAG 2."""
    parts = [c / 255 for c in _rgb(colour)]
    r, g, b = (
        c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts
    )
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


def contrast(a: str, b: str) -> float:
    """Return the contrast ratio of two colours, from 1 to 21."""
    low, high = sorted((_light(a), _light(b)))
    return (high + 0.05) / (low + 0.05)


def ink(colour: str) -> str:
    """Return black or white, whichever has the larger contrast with a colour: at least 4.5."""
    return max("#000000", "#ffffff", key=lambda x: contrast(x, colour))


def seen(colour: str, paper: str) -> str:
    """Return a colour mixed with the ink of the paper until it is seen on the paper."""
    towards = _rgb(ink(paper))
    for n in range(21):
        mixed = (
            round(c + (t - c) * n / 20)
            for c, t in zip(_rgb(colour), towards, strict=True)
        )
        found = "#{:02x}{:02x}{:02x}".format(*mixed)
        if contrast(found, paper) >= SEEN:
            break
    return found


# ---- tables


NUMBER = re.compile(
    r"-|[-+]?[\d,]+(\.\d+)?(e[-+]?\d+)?( ?(%|s|ms))?( \([\d.]+ [KMGT]iB\))?"
)


@dataclass(frozen=True)
class Cell:
    """A cell. kind: its CSS class, `n` in a column of numbers, else `t`."""

    text: str
    kind: str


@dataclass(frozen=True)
class Row:
    head: str
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class Table:
    title: str
    heads: tuple[Cell, ...]
    rows: tuple[Row, ...]


def table(title: str, heads: str, rows: Iterable[Sequence[object]]) -> Table:
    """Return a table. heads: of its columns, separated by `|`; the first cell of a row is its
    head."""
    texts = [tuple(map(clean, row)) for row in rows]
    columns = zip(*texts, strict=True)
    kinds = ["n" if all(map(NUMBER.fullmatch, x)) else "t" for x in columns]
    kinds = ["t", *kinds[1:]]
    names = [h.strip() for h in heads.split("|")]
    return Table(
        clean(title),
        tuple(map(Cell, map(clean, names), kinds)),
        tuple(Row(x[0], tuple(map(Cell, x[1:], kinds[1:]))) for x in texts),
    )


def clean(x: object) -> str:
    return svg.clean(str(x))


# ---- charts


@dataclass(frozen=True)
class Series:
    """Bars or curves of one kind. dash: its pattern."""

    name: str
    colour: str
    dash: tuple[int, ...]

    @property
    def dashes(self) -> str:
        return " ".join(map(str, self.dash)) or "none"

    @property
    def light(self) -> str:
        return seen(self.colour, LIGHT)

    @property
    def dark(self) -> str:
        return seen(self.colour, DARK)

    @property
    def ink(self) -> str:
        return ink(self.light)

    @property
    def dark_ink(self) -> str:
        return ink(self.dark)

    def data(self) -> list[object]:
        light, dark = (self.light, self.ink), (self.dark, self.dark_ink)
        return [self.name, light, dark, self.dash]


def series(colours: Iterable[tuple[str, str]]) -> tuple[Series, ...]:
    """Return series of (name, colour), each with a pattern."""
    return tuple(
        Series(clean(name), colour, DASHES[n % len(DASHES)])
        for n, (name, colour) in enumerate(colours)
    )


@dataclass(frozen=True)
class Bar:
    """A bar. series: its index; more: further words; cause: the command that it waits for."""

    series: int
    lane: int
    begin: int
    end: int
    name: str
    more: str = ""
    cause: str = ""


@dataclass(frozen=True)
class Curve:
    """A curve. marks: points without lines between them."""

    series: int
    points: tuple[tuple[int, float], ...]
    marks: bool = False


@dataclass(frozen=True)
class Track:
    """Bars in lanes, or curves, over the chart's axis. height: pixels of a lane; unit: of values on
    curves."""

    name: str
    note: str
    bars: tuple[Bar, ...] = ()
    lanes: int = 1
    height: int = 28
    curves: tuple[Curve, ...] = ()
    unit: str = ""

    def data(self, words: dict[str, int]) -> dict[str, object]:
        def word(text: str) -> int:
            return words.setdefault(clean(text), len(words))

        found: dict[str, object] = {
            "name": clean(self.name),
            "note": clean(self.note),
            "lanes": self.lanes,
            "height": self.height,
            "series": [b.series for b in self.bars],
            "lane": [b.lane for b in self.bars],
            "begin": [b.begin for b in self.bars],
            "long": [b.end - b.begin for b in self.bars],
            "word": [word(b.name) for b in self.bars],
            "more": [word(b.more) for b in self.bars],
            "cause": [word(b.cause) for b in self.bars],
        }
        return found | (self._values() if self.curves else {"curves": []})

    def _values(self) -> dict[str, object]:
        """Return the curves with a range of values and round ticks."""
        values = [y for c in self.curves for _, y in c.points]
        low, high = min(values, default=0.0), max(values, default=0.0)
        spare = (high - low) / 20 or abs(high) / 10 or 1.0
        low, high = low - spare, high + spare
        every = svg.apart(high - low, 5)
        at = svg.ticks(low, high, every)
        return {
            "unit": self.unit,
            "low": low,
            "high": high,
            "ticks": list(zip(at, svg.labels(at, every), strict=True)),
            "curves": [
                {
                    "series": c.series,
                    "marks": c.marks,
                    "x": [x for x, _ in c.points],
                    "y": [y for _, y in c.points],
                }
                for c in self.curves
            ],
        }


def thinned(points: Sequence[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    """Return a curve of at most MOST points: of each stretch the lowest and the highest."""
    if len(points) <= MOST:
        return tuple(points)
    long = -(-2 * len(points) // MOST)
    kept: set[tuple[int, float]] = {points[0], points[-1]}
    for at in range(0, len(points), long):
        part = points[at : at + long]
        kept |= {min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])}
    return tuple(sorted(kept))


@dataclass(frozen=True)
class Chart:
    """A chart from `first` to `last`: whole nanoseconds if axis is empty, else numbers of axis."""

    title: str
    series: tuple[Series, ...]
    tracks: tuple[Track, ...]
    first: int
    last: int
    axis: str = ""

    def data(self) -> dict[str, object]:
        words: dict[str, int] = {"": 0}
        tracks = [t.data(words) for t in self.tracks]
        return {
            "first": self.first,
            "last": self.last,
            "axis": self.axis,
            "series": [s.data() for s in self.series],
            "tracks": tracks,
            "words": [*words],
        }

    def __html__(self) -> str:
        """Return the JSON for an element `script`, in which nothing can end the element."""
        said = json.dumps(self.data(), separators=(",", ":"))
        for letter in "<>&":
            said = said.replace(letter, f"\\u{ord(letter):04x}")
        return said


# ---- the page


@dataclass(frozen=True)
class Section:
    name: str  # of its place in the page
    title: str
    lines: tuple[str, ...] = ()
    charts: tuple[Chart, ...] = ()
    tables: tuple[Table, ...] = ()


@dataclass(frozen=True)
class Page:
    title: str
    lead: str
    sections: tuple[Section, ...] = field(default_factory=tuple)
