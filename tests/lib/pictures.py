"""pictures.py -- finds the places of texts in a picture (SVG)."""

import xml.etree.ElementTree as xml
from itertools import combinations

SVG = "{http://www.w3.org/2000/svg}"
Box = tuple[float, float, float, float]


def em(letter: str) -> float:
    """Return about the width of a letter, in a wide font."""
    return 1.0 if ord(letter) > 0x2E80 else 0.9 if letter.isupper() else 0.55


def boxes(svg: xml.Element) -> list[tuple[str, Box]]:
    """Return texts with their approximate boxes: left, top, right, bottom."""
    found = []
    for e in svg.iter(f"{SVG}text"):
        size = float(e.attrib["font-size"])
        wide = size * sum(map(em, e.text))
        x, y = float(e.attrib["x"]), float(e.attrib["y"])
        shift = {"middle": wide / 2, "end": wide}
        left = x - shift.get(e.get("text-anchor"), 0.0)
        found.append((e.text, (left, y - size, left + wide, y + size / 4)))
    return found


def meet(a: Box, b: Box) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def hidden(svg: xml.Element) -> list[tuple[str, ...]]:
    """Return pairs of texts that overlap, and texts that are cut off at an edge."""
    _, _, wide, high = map(float, svg.attrib["viewBox"].split())
    found = boxes(svg)
    pairs = combinations(found, 2)
    return [
        *((a, b) for (a, at), (b, there) in pairs if meet(at, there)),
        *(
            (text,)
            for text, (left, top, right, bottom) in found
            if left < 0 or top < 0 or right > wide or bottom > high
        ),
    ]
