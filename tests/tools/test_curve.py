"""test_curve.py -- tests the picture of logs' losses by rules: curves can be told apart, and
everything lies in its place."""

import json
import math
import random
import re
import xml.etree.ElementTree as xml
from itertools import pairwise
from pathlib import Path

import curve
import pytest
from logs import Log

from tests.lib.pictures import SVG, hidden


def records(*losses: float | None) -> str:
    steps = [{"step": n, "loss": x} for n, x in enumerate(losses, 1)]
    found = {"step": len(losses), "val_loss": 1.5}
    records = [{"run": "some"}, *steps, found, {"end": len(losses)}]
    return "".join(json.dumps(r) + "\n" for r in records)


def logs(folder: Path, *runs: list[float | None], first: int = 1) -> list[Log]:
    made = []
    for number, losses in enumerate(runs):
        path = folder / f"log{number}"
        lines = [{"run": "demo", "arguments": []}]
        lines += [{"step": n, "loss": x} for n, x in enumerate(losses, first)]
        lines.append({"step": first + len(losses) - 1, "val_loss": 1.875})
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        made.append(Log(path))
        made[-1].read()
    return made


def falling(steps: int, seed: int = 0) -> list[float]:
    chance = random.Random(seed)
    return [
        1.7 + 3.9 * math.exp(-8 * n / steps) + chance.gauss(0, 0.1)
        for n in range(steps)
    ]


LONG = [f"{'a-long-name-of-a-run-' * 9}seed-{n}" for n in range(5)]
RUNS: dict[str, tuple[list[list[float | None]], list[str], int]] = {
    "1 point": ([[3.0]], [], 1),
    "2 points": ([[3.0, 2.5]], [], 1),
    "100 steps": ([falling(100)], [], 1),
    "10,000 steps": ([falling(10000)], [], 1),
    "equal curves": ([falling(60)] * 2, ["first", "second"], 1),
    "five equal points": ([[3.0]] * 5, list("abcde"), 1),
    "a constant": ([[2.0] * 50], [], 1),
    "zeros": ([[0.0] * 9], [], 1),
    "holes": ([[None, 4.0, None, 3.0, None, None, 2.0, None]], [], 1),
    "five runs with long names": (
        [falling(200, seed) for seed in range(5)],
        LONG,
        1,
    ),
    "28 runs": (
        [falling(50, n) for n in range(28)],
        [f"run {n}" for n in range(28)],
        1,
    ),
    "late steps": ([falling(50)], [], 10**17),
    "a step far beyond": ([[3.0, 3e6]], [], 1),
    "one level almost": ([[1 + 1e-8 * n for n in range(9)]], [], 1),
    "small and below zero": ([[-3e-20, 1e-21, -4e-20]], [], 1),
    "large": ([[1e29, -1e29]], [], 1),
    "wide names": ([falling(20), falling(20, 1)], ["漢" * 80, "W" * 99], 1),
}


def drawn(folder: Path, name: str, bigram: float | None = None) -> xml.Element:
    runs, names, first = RUNS[name]
    return xml.fromstring(curve.curve(logs(folder, *runs, first=first), names, bigram))


def points(path: xml.Element) -> list[tuple[float, float]]:
    found = re.findall(r"[ML](\S+?) (\S+?)(?=[MLhm]|$)", path.attrib["d"])
    return [(float(x), float(y)) for x, y in found]


def curves(svg: xml.Element) -> list[xml.Element]:
    """Return the curves of the plot, without those of the legend."""
    return [e for e in svg.findall(f"{SVG}path") if e.get("stroke-linejoin")]


@pytest.mark.parametrize("bigram", [None, 1.9], ids=["", "bigram"])
@pytest.mark.parametrize("name", RUNS)
def test_labels_have_their_own_places(
    tmp_path: Path, name: str, bigram: float | None
) -> None:
    svg = drawn(tmp_path, name, bigram)
    _, _, wide, high = map(float, svg.attrib["viewBox"].split())
    assert hidden(svg) == []
    for path in curves(svg):
        assert all(0 <= x <= wide and 0 <= y <= high for x, y in points(path))


@pytest.mark.parametrize("name", RUNS)
def test_axes_tell_what_is_where(tmp_path: Path, name: str) -> None:
    """Labels of each axis differ, are sorted at even distances, and bound all losses."""
    svg = drawn(tmp_path, name)
    for axis, place, sign in (("x", "x", 1), ("y", "y", -1)):
        labels = [e for e in svg.iter(f"{SVG}text") if e.get("class") == axis]
        assert len(labels) >= (2 if axis == "y" or len(RUNS[name][0][0]) > 1 else 1)
        values = [float(e.text) for e in labels]
        assert len({e.text for e in labels}) == len(labels)
        assert values == sorted(values)
        at = [sign * float(e.attrib[place]) for e in labels]
        apart = [b - a for a, b in pairwise(at)]
        inner = apart[1:-1] if axis == "x" else apart
        assert inner == pytest.approx(
            [min(inner)] * len(inner) if inner else [], abs=0.01
        )
    least = min(x for run in RUNS[name][0] for x in run if x is not None)
    least = min(least, 1.875)
    assert values[0] <= least * (1 - math.copysign(1e-6, -least))
    assert all(y <= -at[0] for path in curves(svg) for _, y in points(path))


@pytest.mark.parametrize("name", RUNS)
def test_curves_are_told_apart(tmp_path: Path, name: str) -> None:
    """Each log has a curve and a mark of its own, and the legend shows them. The lower of two equal
    curves shows in the gaps of the upper one."""
    svg = drawn(tmp_path, name)
    runs, names, _ = RUNS[name]
    look = [(e.get("stroke"), e.get("stroke-dasharray", "")) for e in curves(svg)]
    assert len(look) == len(set(look)) == len(runs)
    assert [dash for _, dash in look].index("") == 0
    marks = [e for e in svg.findall(f"{SVG}path") if e.get("class") == "mark"]
    shapes = [re.sub(r"^M\S+ \S+?(?=m)", "", e.get("d")) for e in marks]
    assert len(set(zip(shapes, (e.get("stroke") for e in marks), strict=True))) == len(
        runs
    )
    entries = svg.findall(f"{SVG}g")
    assert [
        (e.get("stroke"), e.get("stroke-dasharray", ""))
        for g in entries
        for e in g.findall(f"{SVG}path")
        if not e.get("class")
    ] == look
    whole = [g.find(f"{SVG}title").text for g in entries]
    cut = [g.find(f"{SVG}text").text for g in entries]
    assert len(set(cut)) == len(runs)
    for title, text, of in zip(whole, cut, names or [""], strict=True):
        assert title.startswith(of)
        before, _, after = text.partition("…")
        assert title.startswith(before) and title.endswith(after)


@pytest.mark.parametrize("many", range(2, 6))
def test_equal_curves_are_all_seen(many: int) -> None:
    """Every one of several equal curves is the uppermost somewhere along a period of the dashes."""
    looks = [curve.style(n, many) for n in range(many)]
    spans = [tuple(map(int, s.dash.split())) or (1, 0) for s in looks]
    (period,) = {sum(span) for span in spans[1:]}
    spans[0] = (period, 0)
    seen = [
        max(n for n, (on, _) in enumerate(spans) if at < on) for at in range(period)
    ]
    assert set(seen) == set(range(many))
    assert min(map(seen.count, set(seen))) >= 6


def test_curves_lie_at_their_losses(tmp_path: Path) -> None:
    """Curves lie at the losses of a log's last run; steps without a target are left out."""
    found, picture = tmp_path / "log", tmp_path / "svg"
    found.write_text(records(9.0) + records(2.5, None, 1.0, 2.0))
    assert curve.main([str(found), str(picture), "2.0"]) == 0
    svg = xml.fromstring(picture.read_text())
    place = {
        (e.get("class"), float(e.text)): float(e.attrib[e.get("class")])
        for e in svg.iter(f"{SVG}text")
        if e.get("class")
    }
    x = [place["x", n] for n in (1, 3, 4)]
    one, two = (place["y", level] - 4 for level in (1.0, 2.0))

    def y(loss: float) -> float:
        return one + (loss - 1) * (two - one)

    bigram, losses = map(points, curves(svg))
    (mark,) = [e for e in svg.findall(f"{SVG}path") if e.get("class") == "mark"]
    assert [*losses, *bigram, *points(mark)] == [
        pytest.approx(point, abs=0.06)
        for point in (
            *zip(x, map(y, (2.5, 1.0, 2.0)), strict=True),
            (x[0], y(2.0)),
            (x[2], y(2.0)),
            (x[2], y(1.5)),
        )
    ]
    told = [e.text for e in svg.iter(f"{SVG}text")]
    assert told[:3] == [
        "some: loss of 4 steps, nats a token",
        "loss 2.00, validation 1.50",
        "bigram model 2.00",
    ]


def test_a_run_that_diverges_is_drawn_as_well(tmp_path: Path) -> None:
    """A run that diverges is drawn with a bounded number of grid lines; a line for each whole
    number would be three million."""
    found, picture = tmp_path / "log", tmp_path / "svg"
    found.write_text(records(3.0, 3e6))
    assert curve.main([str(found), str(picture), "2.0"]) == 0
    assert picture.stat().st_size < 6000


def test_names_of_others_are_letters_of_xml(tmp_path: Path) -> None:
    found = logs(tmp_path, [2.0], [3.0])
    names = ["a\x00\x1b[2J\udcff\n", '<&">']
    svg = xml.fromstring(curve.curve(found, names))
    told = [e.text for e in svg.iter(f"{SVG}text")]
    assert "a??[2J??: loss 2.00, validation 1.88" in told
    assert '<&">: loss 3.00, validation 1.88' in told


@pytest.mark.parametrize(
    "text,to,told,code",
    [
        (None, "svg", "{log}: No such file or directory", 2),
        ("{}\n", "svg", "{log}: no step to draw", 2),
        (records(2.0), "/dev/full", "/dev/full: No space left on device", 3),
    ],
)
def test_what_is_wrong_is_one_line(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    text: str | None,
    to: str,
    told: str,
    code: int,
) -> None:
    log = tmp_path / "log"
    if text is not None:
        log.write_text(text)
    assert curve.main([str(log), str(tmp_path / to), "2.0"]) == code
    assert capsys.readouterr().err == f"curve.py: {told.format(log=log)}\n"
