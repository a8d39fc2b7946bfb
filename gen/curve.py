"""curve.py -- the losses of a run as a picture (SVG), from its log.

curve.py LOG SVG BIGRAM: a curve of the last run's steps, a dot for each validation, a line at the
loss of a bigram model.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

WIDTH, HEIGHT, EDGE, SIDE = 800, 300, 40, 130


def line(points: list[tuple[float, float]], colour: str) -> str:
    path = "L".join(f"{x} {y}" for x, y in points)
    return f'<path d="M{path}" fill="none" stroke="{colour}"/>'


def text(x: float, y: float, told: str) -> str:
    return f'<text x="{x}" y="{y}">{told}</text>'


def dot(at: tuple[float, float], told: str) -> list[str]:
    x, y = at
    return [f'<circle cx="{x}" cy="{y}" r="3"/>', text(x + 8, y + 4, told)]


def points(steps: list[Any], key: str) -> list[tuple[float, float]]:
    return [(r["step"], r[key]) for r in steps if r.get(key)]


def curve(log: str, bigram: float) -> str:
    begin = log.rindex('{"run"')
    run, *steps = map(json.loads, log[begin:].splitlines())
    train = points(steps, "loss")
    found = points(steps, "val_loss")
    last = max(step for step, _ in train)
    most = max(loss for _, loss in train)
    top = int(most) + 1
    title = f"{run['run']}: loss of {last} steps, nats a token"

    def at(step: float, loss: float) -> tuple[float, float]:
        wide = WIDTH - EDGE - SIDE
        high = HEIGHT - 2 * EDGE
        x = EDGE + step / last * wide
        y = HEIGHT - EDGE - loss / top * high
        return round(x, 1), round(y, 1)

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" font-size="12" '
        f'viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif">',
        '<rect width="100%" height="100%" fill="#fff"/>',
        text(EDGE, 24, title),
    ]
    for n in range(top + 1):
        x, y = at(0, n)
        out.append(line([(x, y), at(last, n)], "#ddd"))
        out.append(text(x - 16, y + 4, str(n)))
    end = at(last, bigram)
    out.append(line([at(0, bigram), end], "#c33"))
    out.append(line([at(*point) for point in train], "#36c"))
    out += dot(end, f"bigram model {bigram:.2f}")
    for step, loss in found:
        out += dot(at(step, loss), f"validation {loss:.2f}")
    return "\n".join([*out, "</svg>\n"])


if __name__ == "__main__":
    log, svg, bigram = sys.argv[1:]
    Path(svg).write_text(curve(Path(log).read_text(), float(bigram)))
