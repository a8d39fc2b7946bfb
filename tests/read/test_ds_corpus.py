"""test_ds_corpus.py -- tests sixty ds_config.json files as found in public: how many are read, and
the messages for the others. tests/data/ds_configs/said.txt lists them; run this file to write it
anew."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "gen"))

from zg.check import check
from zg.read import dskeys
from zg.read.spec import SpecError, load
from zg.search import search

FILES = sorted((ROOT / "tests/data/ds_configs").glob("*.json"))
SAID = ROOT / "tests/data/ds_configs/said.txt"
# read; refused for a missing feature; mistakes
READ, MISSING, WRONG = 50, 5, 5


def spec_without_min_lr(folder: Path) -> Path:
    """Return a spec without a least learning rate, because its own is above the rate of some
    configs."""
    path = folder / "spec.yaml"
    text = (ROOT / "model_specs/gpt-tiny.yaml").read_text()
    path.write_text(text.replace("min_lr: 1.0e-4", "min_lr: 0"))
    return path


def outcome(spec: Path, path: Path) -> list[str]:
    """Return a config's refusals as LINE: KEY: WHAT; none if it is read."""
    try:
        load(str(spec), (), str(path))
    except SpecError as e:
        return [line.removeprefix(f"{path}:") for line in str(e).splitlines()]
    return []


def named(line: str) -> str:
    """Return the key of a refusal for a missing feature; '' for a mistake in the file."""
    key = re.match(r"\d+: ([A-Za-z0-9_.]+): (?!is a list)", line)
    return key[1] if key and key[1] in dskeys.TABLE else ""


def table(spec: Path) -> str:
    lines = []
    for path in FILES:
        found = outcome(spec, path)
        kind = "read" if not found else "missing" if all(map(named, found)) else "wrong"
        lines.append(f"{path.stem}: {kind}")
        lines += [f"    {line}" for line in found]
    return "\n".join(lines) + "\n"


def test_what_becomes_of_each(tmp_path: Path) -> None:
    said = table(spec_without_min_lr(tmp_path))
    assert said == SAID.read_text()
    kinds = re.findall(r"^\S.*: (\w+)$", said, re.M)
    counts = tuple(kinds.count(kind) for kind in ("read", "missing", "wrong"))
    assert counts == (READ, MISSING, WRONG) and sum(counts) == 60
    for line in re.findall(r"^    (.*)$", said, re.M):
        assert re.match(r"\d+: .+; (did you mean .+\? )?allowed: .", line), line


@pytest.mark.slow
def test_the_plans_of_what_is_read_pass_the_checker(tmp_path: Path) -> None:
    spec = spec_without_min_lr(tmp_path)
    for path in FILES:
        if not outcome(spec, path):
            check.check(search.find(load(str(spec), (), str(path))).plan)


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        SAID.write_text(table(spec_without_min_lr(Path(folder))))
