"""test_results.py -- tests bench/results.py, which keeps the tables of benchmarks, and the page that
bench/report.py makes of them."""

import pathlib
import re
import sys

import pytest

from tests.lib.trainer import ROOT

sys.path.append(str(ROOT / "bench"))
import report
import results

FOUND = [
    "A sentence: with a colon, and more words than one line of the page has room for, so that it"
    " becomes two.",
    results.table("a | b, s |  | yes", ["1, x | 4.10 |  | no", "2 | 1e3 | - | null"]),
]


def test_the_page_is_made_of_the_results() -> None:
    """docs/performance.md is the output of .venv/bin/python bench/report.py."""
    assert (ROOT / "docs/performance.md").read_text() == report.page()


def test_every_file_of_results_has_its_place() -> None:
    named = [name for first, below in report.ORDER.items() for name in (first, *below)]
    assert sorted(named) == sorted(path.stem for path in report.FOLDER.glob("*.yaml"))


@pytest.mark.parametrize(
    "path", sorted(report.FOLDER.glob("*.yaml")), ids=lambda p: p.stem
)
def test_a_file_of_results_is_whole(path: pathlib.Path) -> None:
    """Each row has a cell for each column, and numbers of a run have a command and a date."""
    result = results.read(path)
    tables = [block for block in result.found if isinstance(block, results.Table)]
    for table in tables:
        assert {len(row) for row in table.rows} == {len(table.columns)}
    assert result.title and (result.command or not tables)
    assert not result.date or re.fullmatch(r"20\d\d-\d\d-\d\d", result.date)


def test_what_is_written_is_read(tmp_path: pathlib.Path) -> None:
    whole = results.Result(
        *("A title: of it", "./run bench --only 'x, 1'\nsecond", "2026-01-02"),
        *("others 0.0 %", "CPU, 2 cores; gcc"),
        *("- a list\n\n    code # of it\n", FOUND, "1.0"),
    )
    for result in (whole, results.Result("5")):
        results.write(tmp_path / "x.yaml", result)
        assert results.read(tmp_path / "x.yaml") == result


def test_blocks_are_markdown() -> None:
    assert results.text(FOUND).splitlines() == [
        "A sentence: with a colon, and more words than one line of the page has room for, so that it becomes",
        "two.",
        "",
        "| a | b, s | | yes |",
        "|---|---|---|---|",
        "| 1, x | 4.10 | | no |",
        "| 2 | 1e3 | - | null |",
    ]


def test_a_rerun_leaves_title_and_texts(
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "saving.yaml"
    words = ["bench/saving.py", "--rounds", "2", "--out", str(file), "--spec", "a b"]
    monkeypatch.setattr(sys, "argv", words)
    results.finish(["CPU, 2 cores", "gcc"], FOUND, file, "others 0.1 %")
    first = results.read(file)
    assert (first.title, first.machine) == ("saving", "CPU, 2 cores; gcc")
    assert first.command == ".venv/bin/python bench/saving.py --rounds 2 --spec 'a b'"
    assert (first.load, first.found) == ("others 0.1 %", FOUND)
    assert capsys.readouterr().out.startswith("CPU, 2 cores\ngcc\nothers 0.1 %\n\nA ")

    old = results.Result("T", "c", "d", "l", "m", "before", ["old"], "after")
    results.write(file, old)
    monkeypatch.setattr(sys, "argv", ["bench/peers.py", f"--out={file}"])
    results.finish(["CPU"], FOUND, file)
    again = results.read(file)
    assert (again.title, again.before, again.after) == ("T", "before", "after")
    assert (again.command, again.machine) == ("./run bench --peers", "CPU")
    assert again.found == FOUND and not again.load and again.date != "d"
    results.finish(["CPU"], FOUND, None)


def test_a_run_is_told_beside_its_command() -> None:
    def ran(machine: str) -> list[str]:
        made = results.Result("", "a \\\n  b", "2026-01-02", "idle", machine)
        return report.ran(made).splitlines()

    assert ran(report.USUAL) == ["    a \\", "      b  # 2026-01-02, idle"]
    long = "a CPU; " + "flags " * 15
    assert ran(long) == ["    a \\", "      b", f"    # 2026-01-02, idle, {long}"]
