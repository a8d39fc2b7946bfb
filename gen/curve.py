"""curve.py -- the losses of a run as a picture (SVG), from its log.

curve.py LOG SVG BIGRAM: a curve of the last run's steps, a dot for each validation, a line at the
loss of a bigram model.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

WIDTH, HEIGHT, EDGE, SIDE = 800, 300, 40, 130


def line(points: list[tuple[float, float]], colour: str) -> str:
    path = "L".join(f"{x} {y}" for x, y in points)
    return f'<path d="M{path}" fill="none" stroke="{colour}"/>'


def text(x: float, y: float, told: str) -> str:
    return f'<text x="{x}" y="{y}">{told}</text>'


def curve(log: str, bigram: float) -> str:
    run, *steps = map(json.loads, log[log.rindex('{"run"') :].splitlines())
    train = [(r["step"], r["loss"]) for r in steps if r.get("loss")]
    found = [(r["step"], r["val_loss"]) for r in steps if r.get("val_loss")]
    last = max(step for step, _ in train)
    top = int(max(loss for _, loss in train)) + 1

    def at(step: float, loss: float) -> tuple[float, float]:
        x = EDGE + step / last * (WIDTH - EDGE - SIDE)
        y = HEIGHT - EDGE - loss / top * (HEIGHT - 2 * EDGE)
        return round(x, 1), round(y, 1)

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" font-size="12" '
        f'viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif">',
        '<rect width="100%" height="100%" fill="#fff"/>',
        text(EDGE, 24, f"{run['run']}: loss of {last} steps, nats a token"),
    ]
    for n in range(top + 1):
        x, y = at(0, n)
        out += [
            line([at(0, n), at(last, n)], "#ddd"),
            text(x - 16, y + 4, f"{n}"),
        ]
    out.append(line([at(0, bigram), at(last, bigram)], "#c33"))
    out.append(line([at(*point) for point in train], "#36c"))
    for (x, y), told in (
        (at(last, bigram), f"bigram model {bigram:.2f}"),
        *((at(*point), f"validation {point[1]:.2f}") for point in found),
    ):
        out += [f'<circle cx="{x}" cy="{y}" r="3"/>', text(x + 8, y + 4, told)]
    return "\n".join([*out, "</svg>\n"])


if __name__ == "__main__":
    log, svg, bigram = sys.argv[1:]
    Path(svg).write_text(curve(Path(log).read_text(), float(bigram)))
