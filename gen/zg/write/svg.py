"""svg.py -- shared parts of pictures (SVG): text cut to its room, legends, round numbers on axes.

The reader's fonts are unknown, so the width of a text is an estimate: that of DejaVu Sans, which is
wider than most.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from unicodedata import east_asian_width
from xml.sax.saxutils import escape

INK, FAINT, GRID = "#222", "#666", "#ddd"
NARROW = set("ijlftI.,:;'|!()[]/ ")
WIDE = set("mwMW@%…&+=<>")


# ---- text


def clean(text: str) -> str:
    """Replace characters that XML may not hold or that break the line; names may come from any
    file."""
    return "".join(c if c.isprintable() else "?" for c in text)


def escaped(text: str) -> str:
    return escape(clean(text))


def _em(letter: str) -> float:
    if east_asian_width(letter) in "WF":
        return 1.0
    if letter in NARROW:
        return 0.4
    return 0.95 if letter in WIDE else 0.72 if letter.isupper() else 0.63


def width(text: str, size: float) -> float:
    """Estimate the width of a text, in pixels."""
    return size * sum(map(_em, text))


def fitted(text: str, size: float, room: float) -> str:
    """Shorten a text that is too wide by its middle: names of runs often differ at their ends."""
    text = clean(text)
    kept = len(text)
    short = text
    while kept and width(short, size) > room:
        kept -= 1
        short = f"{text[: (kept + 1) // 2]}…{text[len(text) - kept // 2 :]}"
    return short


def text(x: float, y: float, told: str, size: int = 12, more: str = "") -> str:
    return (
        f'<text x="{x:.3f}" y="{y:.3f}" font-size="{size}"{more}>{escaped(told)}</text>'
    )


def opened(wide: float, high: float, title: str) -> list[str]:
    """Return the first lines of a picture, with a white background for pages of any colour."""
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide:.0f} {high:.0f}" '
        f'font-family="DejaVu Sans, Verdana, sans-serif" fill="{INK}">',
        f"<title>{escaped(title)}</title>",
        '<rect width="100%" height="100%" fill="#fff"/>',
    ]


def flow(widths: Sequence[float], room: float) -> Iterator[tuple[float, int]]:
    """Yield the place of each entry of a legend: x from the left, and the row."""
    x, row = 0.0, 0
    for wide in widths:
        if x and x + wide > room:
            x, row = 0.0, row + 1
        yield x, row
        x += wide


# ---- round numbers


def _exponent(x: float) -> int:
    return int(f"{x:e}".partition("e")[2])


def apart(span: float, most: int) -> float:
    """Return the smallest of 1, 2 and 5 times a power of ten that cuts a span into at most `most`
    parts."""
    ten = 10.0 ** _exponent(span / most)
    return next(n * ten for n in (1, 2, 5, 10) if n * ten * most >= span * (1 - 1e-9))


def ticks(low: float, high: float, step: float) -> list[float]:
    """Return the multiples of a step between two numbers."""
    first, last = math.ceil(low / step - 1e-6), math.floor(high / step + 1e-6)
    return [n * step for n in range(first, last + 1)]


def labels(found: Sequence[float], step: float) -> list[str]:
    """Return the labels of an axis's ticks, with just enough digits to tell neighbours apart."""
    fine, size = _exponent(step), max(map(abs, found), default=0.0)
    if fine >= -9 and 1e-3 <= size < 1e6:
        return [f"{x:.{max(0, -fine)}f}" for x in found]
    return [f"{x:.{max(0, _exponent(x) - fine)}e}" if x else "0" for x in found]
