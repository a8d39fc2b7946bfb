"""curve.py -- the losses of runs as a picture (SVG), from their logs.

curve.py LOG SVG BIGRAM: with a line at the loss of a bigram model.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from logs import Log

WIDTH, HEIGHT, EDGE, SIDE = 800, 300, 40, 130
COLOURS = ("#36c", "#393", "#c63", "#936", "#399", "#663")


def line(points: list[tuple[float, float]], colour: str) -> str:
    path = "L".join(f"{x} {y}" for x, y in points)
    return f'<path d="M{path}" fill="none" stroke="{colour}"/>'


def escaped(told: str) -> str:
    return told.replace("&", "&amp;").replace("<", "&lt;")


def text(x: float, y: float, told: str) -> str:
    return f'<text x="{x}" y="{y}">{escaped(told)}</text>'


def dot(at: tuple[float, float], told: str) -> list[str]:
    x, y = at
    return [f'<circle cx="{x}" cy="{y}" r="3"/>', text(x + 8, y + 4, told)]


def curve(
    logs: Sequence[Log], names: Sequence[str], bigram: float | None = None
) -> str:
    """A curve of each log's training steps, a dot for each validation. names: of several logs."""
    trains = [log.points("loss") for log in logs]
    last = max(step for train in trains for step, _ in train)
    most = max(loss for train in trains for _, loss in train)
    top = int(most) + 1
    told = (
        logs[0].run.get("run", "?") if len(logs) == 1 else f"{len(logs)} runs"
    )
    title = f"{told}: loss of {last} steps, nats a token"

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
    for n in range(0, top + 1, max(1, top // 8)):
        x, y = at(0, n)
        out.append(line([(x, y), at(last, n)], "#ddd"))
        out.append(text(x - 16, y + 4, str(n)))
    if bigram is not None:
        end = at(last, bigram)
        out.append(line([at(0, bigram), end], "#c33"))
        out += dot(end, f"bigram model {bigram:.2f}")
    for number, train in enumerate(trains):
        colour = COLOURS[number % len(COLOURS)]
        out.append(line([at(*point) for point in train], colour))
        if len(logs) > 1:
            out += dot(at(*train[-1]), names[number])
    for log in logs:
        for step, loss in log.points("val_loss"):
            out += dot(at(step, loss), f"validation {loss:.2f}")
    return "\n".join([*out, "</svg>\n"])


def main(path: str, svg: str, bigram: str) -> None:
    log = Log(Path(path))
    log.read()
    try:
        Path(svg).write_text(curve([log], [], float(bigram)))
    except OSError as e:
        sys.exit(f"{svg}: {e.strerror}")


if __name__ == "__main__":
    main(*sys.argv[1:])
