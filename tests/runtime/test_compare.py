"""test_compare.py -- tests tools/compare.py: it finds the first step whose numbers differ between two
logs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import compare
import pytest

from tests.lib import law, program, trainer
from tests.lib.patience import LIMIT

Tell = Callable[..., tuple[int, list[str]]]


@pytest.fixture
def tell(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Tell:
    """Return tell(A, B): it compares logs with these lines."""

    def call(*logs: str | bytes) -> tuple[int, list[str]]:
        for name, text in zip("AB", logs, strict=True):
            raw = text if isinstance(text, bytes) else text.encode()
            (tmp_path / name).write_bytes(raw)
        code = compare.main([str(tmp_path / "A"), str(tmp_path / "B")])
        said = capsys.readouterr()
        return code, (said.out + said.err).splitlines()

    return call


def line(step: int, **more: object) -> str:
    return json.dumps({"step": step, "loss": step / 3, **more}) + "\n"


RUN = '{"run": "some"}\n'
FOUR = RUN + "".join(map(line, range(1, 5)))


def test_equal_logs(tell: Tell) -> None:
    """Logs are equal if they differ only in times, other kinds of records, and steps that only one
    has."""
    other = '{"run": "other"}\n' + "".join(
        line(n, seconds=n, tokens_per_second=1, share_of_peak=2) for n in range(1, 4)
    )
    other += '{"step": 3, "checkpoint": 0.5}\n{"end": 3}\n'
    assert tell(FOUR, other) == (
        0,
        ["equal: all of 3 steps that both have, the last is 3"],
    )


def test_the_first_step_that_differs(tell: Tell) -> None:
    other = FOUR.replace(str(2 / 3), str(2 / 3)[:-1])
    other = other.replace(str(4 / 3), "null")
    assert tell(FOUR, other) == (
        1,
        [
            "step 2: loss 0.6666666666666666 -> 0.666666666666666",
            "2 of 4 steps that both have differ",
        ],
    )


def test_two_recipes_are_told_first(tell: Tell) -> None:
    def run(*recipe: str) -> str:
        return json.dumps({"run": "some", "recipe": recipe}) + "\n" + line(1)

    a, b = run("train.seed: 1", "model.width: 8"), run("train.seed: 2")
    told = "two recipes: train.seed: 1 -> 2; model.width: 8 -> not there"
    equal = "equal: all of 1 steps that both have, the last is 1"
    assert tell(a, b) == (0, [told, equal])
    assert tell(a, a) == (0, [equal])
    assert tell(a, line(1)) == (0, [equal])  # an older log has none
    many = [f"k{n}: {n}" for n in range(9)]
    assert "k5: 5 -> not there, and 4 more" in tell(run(*many), run("a: 1"))[1][0]


def test_every_digit_and_every_number_counts(tell: Tell) -> None:
    a = line(1, norm=0.0, val=1)
    for b in (line(1, norm=-0.0), line(1, norm=0), line(1, norm=5e-324)):
        assert tell(a, b)[0] == 1
    a = line(1) + '{"step": 1, "val_loss": 1.5, "val_tokens": 9}\n'
    assert tell(a, a.replace("1.5", "1.25"))[1][0] == ("step 1: val_loss 1.5 -> 1.25")
    assert tell(a, line(1))[0] == 0


def test_of_a_step_that_was_done_again_the_last_counts(tell: Tell) -> None:
    again = FOUR + RUN + line(3, norm=1) + line(4, norm=1)
    wrong = FOUR.replace("1.0", "1.5")
    assert tell(wrong, FOUR)[0] == 1
    assert tell(wrong + RUN + line(3) + line(4), again)[0] == 0


def test_what_is_unfinished_is_passed_over(tell: Tell) -> None:
    """An unfinished line is skipped at the end or before the record of the next run, but not
    elsewhere."""
    half = line(5)[:-4]
    assert tell(FOUR + half, FOUR)[0] == 0
    assert tell(FOUR + half + "\n" + RUN + line(5), FOUR + line(5))[0] == 0
    for bad in (
        FOUR + half + "\n",
        FOUR + half + "\n" + line(5),
        FOUR + half + "\n" + half,
    ):
        code, (said,) = tell(bad, FOUR)
        assert code == 2 and said.endswith("A:6: no record of JSON")


@pytest.mark.parametrize(
    "log,said",
    [
        ("", "have no step in common"),
        (RUN, "have no step in common"),
        (line(9), "have no step in common"),
        ("x\n" + FOUR, None),
        ("[1]\n{}\n", "A:1: no record of JSON"),
        (b"\xff\n{}\n", "A:1: no record of JSON"),
        ("[" * 100000 + "\n{}\n", "A:1: no record of JSON"),
        ('{"step": "x"}\n', "a record's step is not a number"),
        ('{"step": 1e9}\n', "a record's step is not a number"),
        ('{"step": [1]}\n', "a record's step is not a number"),
        ('{"step": ' + "9" * 5000 + "}\n", "a record's step is not a number"),
    ],
)
def test_what_is_no_log(tell: Tell, log: str | bytes, said: str | None) -> None:
    code, (told, *_) = tell(log, FOUR)
    if said is None:  # left by a run before the first record
        assert code == 0
    else:
        assert code == 2 and told.startswith("run compare: ") and said in told


def test_a_log_that_is_not_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare.main([str(tmp_path / "no"), str(tmp_path)]) == 2
    assert capsys.readouterr().err.endswith("no: No such file or directory\n")
    with pytest.raises(SystemExit) as left:
        compare.main([str(tmp_path)])
    assert left.value.code == 2


@pytest.mark.slow
def test_logs_of_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Logs of 1 and 2 ranks, and of one and two runs, are equal; another seed differs from the
    first step on."""
    trainer.write_tokens(tmp_path / "tokens", law.tokens(256, 4000))

    def run(log: str, ranks: int, seed: int, *steps: int) -> Path:
        keys = ("train.global_batch=4", "train.micro_batch=1")
        more = (f"cluster.ranks={ranks}", f"train.seed={seed}")
        made = trainer.generate(law.path("gpt"), *keys, *more)
        for number in steps:
            done = program.run(
                *(trainer.build(made), "--data", tmp_path / "tokens"),
                *("--steps", number, "--log", tmp_path / log),
                *("--checkpoints", tmp_path / f"{log}-ck"),
                *("--val", tmp_path / "tokens", "--val-tokens", 99),
            )
            assert done.code == 0, done.err
        return tmp_path / log

    one, two = run("one", 1, 1, 4), run("two", 2, 1, 2, 4)
    assert compare.main([str(one), str(two)]) == 0
    assert "all of 4 steps" in capsys.readouterr().out
    assert compare.main([str(one), str(run("other", 1, 2, 4))]) == 1
    said = capsys.readouterr().out
    assert (
        said.startswith("two recipes: train.seed: 1 -> 2\nstep 1: loss ")
        and "4 of 4 steps" in said
    )


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_stdout_that_is_full_is_told(tmp_path: Path, unbuffered: str) -> None:
    (tmp_path / "log").write_text(FOUR)
    tool = trainer.ROOT / "tools" / "compare.py"
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, tool, tmp_path / "log", tmp_path / "log"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=LIMIT,
            env={**os.environ, "PYTHONPATH": "gen", "PYTHONUNBUFFERED": unbuffered},
            cwd=trainer.ROOT,
        )
    assert (done.returncode, done.stderr) == (
        3,
        "run compare: standard output: No space left on device\n",
    )
