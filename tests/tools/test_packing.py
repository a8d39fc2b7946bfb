"""test_packing.py -- tests ./run data --pack: whole documents in samples, against a plain
search."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import packing
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.lib.program import program, run  # noqa: F401 -- a fixture
from tests.tools.test_data_tool import (  # noqa: F401 -- a fixture
    jsonl,
    made,
    meta,
    near,
    tokens,
)

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=60)


def searched(lengths: list[int], size: int) -> list[list[int]]:
    """Put the longest first into the fullest sample that has room; the newest of equal ones."""
    found: list[list[int]] = []
    newest: list[
        int
    ] = []  # numbers of samples, in the order in which they were last filled
    for n in sorted(range(len(lengths)), key=lambda n: -lengths[n]):
        room = {k: size - sum(lengths[x] for x in found[k]) for k in newest}
        fits = [k for k in newest if room[k] >= lengths[n]]
        least = min((room[k] for k in fits), default=None)
        if least is None:
            found.append([])
            k = len(found) - 1
        else:
            k = [k for k in fits if room[k] == least][-1]
            newest.remove(k)
        found[k].append(n)
        newest.append(k)
    return [sorted(x) for x in sorted(found, key=lambda x: x[0])]


@given(LENGTHS)
def test_the_best_fit(lengths: list[int]) -> None:
    ends = np.cumsum(lengths).tolist()
    spans, cut = packing.parts(ends, 16)
    assert cut == sum(n > 16 for n in lengths)
    assert sum(end - start for start, end in spans) == sum(lengths)
    each = [end - start for start, end in spans]
    assert max(each) <= 16
    assert packing.samples(spans, 16) == searched(each, 16)


@given(LENGTHS)
def test_every_document_is_whole_in_a_sample(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int]
) -> None:
    """Each part is once in one sample, without its first target; the rest is padding."""
    folder = tmp_path_factory.mktemp("pack")
    stream = np.arange(100, 100 + sum(lengths), dtype="<u2")
    ends = np.cumsum(lengths).tolist()
    files = folder / "a.bin", folder / "b.bin"
    for file in files:
        stream.tofile(file)
    done = packing.pack(*files, ends, 16, 7, 9, "uint16")
    ids, labels = (np.fromfile(x, "<u2") for x in files)
    assert len(ids) == len(labels) == 16 * done.samples + 1
    assert (ids[-1], labels[-1]) == (7, 9) and sorted(folder.iterdir()) == [*files]
    assert sorted(ids[ids != 7]) == stream.tolist()
    heads = [100 + start for start, _ in packing.parts(ends, 16)[0]]
    for token, label in zip(ids, labels, strict=True):
        assert label == (9 if token == 7 or token in heads else token)
    for start, end in packing.parts(ends, 16)[0]:
        at = int(np.flatnonzero(ids == 100 + start)[0])
        assert (ids[at : at + end - start] == stream[start:end]).all()
        assert at // 16 == (at + end - start - 1) // 16
    assert done.filled == len(stream)


def test_blocks_are_as_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ends = np.cumsum([3, 9, 2, 16, 40, 7] * 20).tolist()
    written = []
    for at_once in (1, 1 << 20):
        monkeypatch.setattr(packing, "AT_ONCE", at_once)
        files = tmp_path / "a.bin", tmp_path / "b.bin"
        for file in files:
            np.arange(ends[-1], dtype="<u4").tofile(file)
        packing.pack(*files, ends, 16, 0, 2**32 - 1, "uint32")
        written.append([file.read_bytes() for file in files])
    assert written[0] == written[1]


def test_the_command(
    near: None,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Texts, too, get labels; the samples, the share filled and the cut ones are told."""
    file = jsonl(tmp_path / "a", [{"text": x} for x in ("aaaa", "b" * 9, "cc", "dddd")])
    out = tmp_path / "out"
    assert made("jsonl", file, "--pack", 8, "-o", out) == 0
    told = capsys.readouterr()
    assert (
        "train: 4 documents in 3 samples of 8 tokens, 79.2% filled; 1 documents"
        in told.err
    )
    assert "--set train.sequence=8" in told.out
    text = bytes(tokens(out)).decode().replace("\0", ".")
    assert text == "aaaadddd" + "bbbbbbbb" + "bcc....." + "."
    labels = tokens(out, "train.labels.bin")
    unlearned = [at for at, x in enumerate(labels) if x == 65535]
    assert unlearned == [0, 4, 8, 16, 17, *range(19, 25)]
    assert meta(out)["sequence"] == 8 and meta(out)["ignore"] == 65535
    assert meta(out)["files"]["train.bin"]["tokens"] == 25


def test_a_program_of_another_sequence_refuses_it(
    program: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    said = {
        "format": 1,
        "vocab": 8,
        "dtype": "uint16",
        "end": None,
        "ignore": None,
        "sequence": 3,
        "files": {"train.bin": {"tokens": 400, "labels": None}},
    }
    (tmp_path / "meta.json").write_text(json.dumps(said))
    np.zeros(400, "<u2").tofile(tmp_path / "train.bin")
    done = run(program, "--data", tmp_path, "--steps", 1)
    assert done.code == 2
    assert "sequence: documents are packed into samples of 3 tokens, but" in done.err
