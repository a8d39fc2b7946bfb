"""test_chaos.py -- runs a bounded piece of `./run chaos`, and tests that it would report an
error."""

import pathlib
import random
import shutil

import pytest

from tests import chaos


@pytest.fixture(scope="module")
def disturbed(tmp_path_factory: pytest.TempPathFactory) -> chaos.Chaos:
    made = chaos.Chaos(
        tmp_path_factory.mktemp("chaos"),
        random.Random(1),
        ["f16, a scale that falls"],
    )
    made.prepare()
    return made


@pytest.mark.slow
def test_no_run_is_lost(disturbed: chaos.Chaos) -> None:
    while chaos.kills(disturbed) < 8:
        disturbed.life()
    print(chaos.report(disturbed))


@pytest.mark.slow
def test_other_bits_are_told(
    disturbed: chaos.Chaos, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = dict.fromkeys(disturbed.recipes, "weights 0")
    monkeypatch.setattr(disturbed, "wanted", wanted)
    shutil.rmtree(disturbed.checkpoints, ignore_errors=True)
    with pytest.raises(chaos.Lost, match="not weights 0"):
        disturbed.life()


@pytest.mark.slow
def test_a_checkpoint_that_goes_is_told(
    disturbed: chaos.Chaos, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(c: chaos.Chaos, binary: pathlib.Path) -> chaos.Ended:
        for path in c.checkpoints.glob("step-*"):
            path.rename(c.folder / path.name)
        return chaos.DIED, "", ""

    wanted = dict.fromkeys(disturbed.recipes, "weights 0")
    monkeypatch.setattr(disturbed, "wanted", wanted)
    monkeypatch.setattr(chaos, "FAULTS", {"asked": gone, "step": gone})
    shutil.rmtree(disturbed.checkpoints, ignore_errors=True)
    (disturbed.checkpoints / "step-00000001").mkdir(parents=True)
    with pytest.raises(chaos.Lost, match="1 was"):
        disturbed.life()
