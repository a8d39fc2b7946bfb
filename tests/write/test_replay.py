"""test_replay.py -- tests the comparison of replay.py: equal means equal texts of programs that
ended well."""

import subprocess
import sys

import pytest

from tests import replay
from tests.replay import ROOT

WELL = {"a/plan": "p", "a/weights": "loss 1\nexit 0\n"}
FAILED = {**WELL, "a/weights": "exit 2\n"}


@pytest.mark.parametrize(
    "old,new,wrong",
    [
        (WELL, WELL, 0),
        (WELL, {**WELL, "a/plan": "q"}, 1),
        (WELL, {"a/plan": "p"}, 1),
        (FAILED, FAILED, 1),
        (WELL, FAILED, 1),
        ({}, {}, 1),
    ],
)
def test_what_differs(old: dict[str, str], new: dict[str, str], wrong: int) -> None:
    assert replay.compare(old, new) == wrong


def test_no_case_is_an_error() -> None:
    """A word that no case has in its name is an error; both trees use one list of cases."""
    assert replay.cases("gpt-tiny, stage 0, 1 rank") == [
        ["gpt-tiny", "stage 0, 1 rank", ("zero.stage=0", "cluster.ranks=1")]
    ]
    done = subprocess.run(
        [sys.executable, "tests/replay.py", "HEAD", "--only", "no such case"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1 and done.stderr.strip().endswith(
        "no case has this in its name"
    )
