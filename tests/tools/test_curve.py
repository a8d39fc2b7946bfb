"""test_curve.py -- the picture of a log's losses."""

import json
import xml.etree.ElementTree as xml
from pathlib import Path

import curve
import pytest


def log(*losses: float | None) -> str:
    steps = [{"step": n, "loss": x} for n, x in enumerate(losses, 1)]
    found = {"step": len(losses), "val_loss": 1.5}
    records = [{"run": "some"}, *steps, found, {"end": len(losses)}]
    return "".join(json.dumps(r) + "\n" for r in records)


def points(path: str) -> list[tuple[float, float]]:
    found = path.removeprefix("M").split("L")
    return [tuple(map(float, point.split())) for point in found]


def test_the_last_run_is_drawn(tmp_path: Path) -> None:
    """Losses of 2.5 and less: an edge of 40, then a third of 220 for each whole number."""
    found, picture = tmp_path / "log", tmp_path / "svg"
    found.write_text(log(9.0) + log(2.5, None, 1.0, 2.0))
    curve.main(str(found), str(picture), "2.0")
    svg = xml.fromstring(picture.read_text())
    lines = [e.get("d") for e in svg if e.tag.endswith("path")]
    *_, bigram, losses = map(points, lines)
    (left, _), (right, level) = bigram
    assert level == pytest.approx(40 + 220 / 3, abs=0.1)
    width = (right - left) / 4
    assert [x for x, _ in losses] == pytest.approx(
        [left + width, left + 3 * width, right], abs=0.1
    )
    assert [y for _, y in losses] == pytest.approx(
        [260 - 220 * loss / 3 for loss in (2.5, 1.0, 2.0)], abs=0.1
    )
    told = [e.text for e in svg if e.tag.endswith("text")]
    assert told[0] == "some: loss of 4 steps, nats a token"
    assert told[1:5] == ["0", "1", "2", "3"]
    assert told[5:] == ["bigram model 2.00", "validation 1.50"]


def test_a_run_that_diverges_is_drawn_as_well(tmp_path: Path) -> None:
    """A line for each whole number would be three million."""
    found, picture = tmp_path / "log", tmp_path / "svg"
    found.write_text(log(3.0, 3e6))
    curve.main(str(found), str(picture), "2.0")
    assert picture.stat().st_size < 5000


def test_a_full_disk_is_told_with_its_file(tmp_path: Path) -> None:
    (tmp_path / "log").write_text(log(3.0))
    with pytest.raises(SystemExit) as e:
        curve.main(str(tmp_path / "log"), "/dev/full", "2.0")
    assert e.value.code == "/dev/full: No space left on device"
