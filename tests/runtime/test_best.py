"""test_best.py -- tests --epochs, --keep-best and --patience: the last step of a run, the
checkpoints that stay, and both after a resume."""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.lib import choices, law, program, trainer

KEYS = ("train.global_batch=4", "train.micro_batch=1", "train.optimizer.lr=0.01")
LAYOUTS = {1: (), 2: ("zero.stage=2", "cluster.ranks=2")}
STEPS = 40


@functools.cache
def built(ranks: int = 1) -> Path:
    return trainer.build(trainer.generate(law.path("gpt"), *KEYS, *LAYOUTS[ranks]))


@pytest.fixture
def files(tmp_path: Path) -> list[object]:
    """Write random tokens: training on them soon makes the validation worse."""
    draw = np.random.default_rng(3)
    for name, n in (("train", 700), ("val", 300)):
        trainer.write_tokens(tmp_path / name, draw.integers(0, 256, n))
    return ["--data", tmp_path / "train", "--val", tmp_path / "val"]


def run(
    files: list[object], *options: object, ranks: int = 1, steps: int = STEPS
) -> program.Result:
    done = program.run(built(ranks), *files, "--steps", steps, "--hash", *options)
    assert done.code == 0, done.err
    return done


def losses(log: Path) -> dict[int, float]:
    records = map(json.loads, log.read_text().splitlines())
    return {x["step"]: x["val_loss"] for x in records if "val_loss" in x}


def expected(found: dict[int, float], patience: int) -> tuple[int, int]:
    """Return the best step and the step at which patience ends, of all validations."""
    best = worse = 0
    for step in sorted(found):
        if not best or found[step] < found[best]:
            best, worse = step, 0
        else:
            worse += 1
        if worse == patience:
            return best, step
    return best, max(found)


@pytest.fixture
def all_losses(files: list[object], tmp_path: Path) -> dict[int, float]:
    run(files, "--val-every", 2, "--log", tmp_path / "all")
    found = losses(tmp_path / "all")
    best, stop = expected(found, 3)
    assert 2 <= best < stop < STEPS
    return found


def tensors(folder: Path) -> bytes:
    """Return the bytes of all tensors of a saved model."""
    whole = (folder / "model.safetensors").read_bytes()
    found = whole[8 + int.from_bytes(whole[:8], "little") :]
    assert len(found) > 10_000
    return found


def there(folder: Path) -> list[int]:
    return sorted(int(x.name[5:]) for x in folder.glob("step-*"))


def test_patience_has_the_bits_of_that_many_steps(
    files: list[object], all_losses: dict[int, float], tmp_path: Path
) -> None:
    best, stop = expected(all_losses, 3)
    log = tmp_path / "log"
    done = run(files, "--val-every", 2, "--patience", 3, "--log", log)
    told = f"stops after step {stop} of {STEPS}: no validation was better than that of step {best}"
    assert told in done.err
    assert losses(log) == {n: x for n, x in all_losses.items() if n <= stop}
    plain = run(files, steps=stop)
    assert done.line("weights") == plain.line("weights")
    assert done.line("weights") != run(files, steps=stop + 1).line("weights")


@pytest.mark.parametrize("ranks", LAYOUTS)
def test_the_best_checkpoint_stays(
    ranks: int, files: list[object], all_losses: dict[int, float], tmp_path: Path
) -> None:
    """The best is kept beside the newest and linked; --save and --hash have its weights."""
    best, stop = expected(all_losses, 3)
    ck = tmp_path / "ck"
    rest = ("--val-every", 2, "--patience", 3, "--checkpoints", ck, "--keep", 1)
    more = ("--keep-best", "--save-every", 3, "--save", tmp_path / "best")
    done = run(files, *rest, *more, ranks=ranks)
    assert f"the best validation was at step {best}: loss " in done.err
    assert there(ck) == [best, stop]
    assert (ck / "best").resolve() == ck / f"step-{best:08}"
    plain = run(files, "--save", tmp_path / "plain", steps=best)
    assert done.line("weights") == plain.line("weights")
    assert tensors(tmp_path / "best") == tensors(tmp_path / "plain")

    again = run(files, *rest, *more, ranks=ranks)
    assert f"stops after step {stop}" in again.err and "step 1/" not in again.err
    assert again.line("weights") == done.line("weights")
    assert there(ck) == [best, stop]


def test_a_resumed_run_is_as_one_that_did_not_stop(
    files: list[object], all_losses: dict[int, float], tmp_path: Path
) -> None:
    """Validations, the end and the best are the same after a resume from any checkpoint."""
    best, stop = expected(all_losses, 3)
    whole = tmp_path / "whole"
    rest = ("--val-every", 2, "--patience", 3, "--keep-best", "--keep", STEPS)
    done = run(files, *rest, "--save-every", 1, "--checkpoints", whole)
    assert there(whole) == [*range(1, stop + 1)]
    for step in range(1, stop + 1):
        part = tmp_path / f"ck{step}"
        part.mkdir()
        for known in range(1, step + 1):
            shutil.copytree(whole / f"step-{known:08}", part / f"step-{known:08}")
        log = tmp_path / f"log{step}"
        ranks = 1 + step % 2
        again = run(files, *rest, "--checkpoints", part, "--log", log, ranks=ranks)
        assert losses(log) == {n: x for n, x in all_losses.items() if step < n <= stop}
        assert again.line("weights") == done.line("weights")
        assert f"stops after step {stop}" in again.err
        if step < best:
            assert (part / "best").resolve() == part / f"step-{best:08}"


@pytest.mark.parametrize("later", [(), ("--patience", 9)])
def test_the_link_goes_with_the_best(
    files: list[object],
    all_losses: dict[int, float],
    tmp_path: Path,
    later: tuple[object, ...],
) -> None:
    """A later run without --keep-best removes the best like any other, and the link to it, whichever
    step is its own best."""
    best, _ = expected(all_losses, 3)
    ck = tmp_path / "ck"
    rest = ("--checkpoints", ck, "--keep", 1, "--save-every", 1, "--val-every", best)
    run(files, *rest, "--keep-best", steps=best)
    assert (ck / "best").resolve() == ck / f"step-{best:08}"
    run(files, *rest, *later, "--val-every", 1, steps=best + 1)
    assert there(ck) == [best + 1] and not (ck / "best").is_symlink()


def test_questions_are_logged_at_the_step_of_the_weights(
    files: list[object], all_losses: dict[int, float], tmp_path: Path
) -> None:
    """The log of --eval with --keep-best has the step of the best weights."""
    best, stop = expected(all_losses, 3)
    questions, log = tmp_path / "questions", tmp_path / "log"
    questions.write_bytes(choices.file([choices.Example([1, 2], [[3], [4]], 0)]))
    rest = ("--val-every", 2, "--patience", 3, "--keep-best", "--log", log)
    run(files, *rest, "--checkpoints", tmp_path / "ck", "--eval", questions)
    records = map(json.loads, log.read_text().splitlines())
    assert [x["step"] for x in records if "eval_right" in x] == [best] and best < stop


def test_the_last_validation_counts(
    files: list[object], all_losses: dict[int, float], tmp_path: Path
) -> None:
    """A run whose last step is its best has that checkpoint alone, and validates once there."""
    best, _ = expected(all_losses, 3)
    log, ck = tmp_path / "log", tmp_path / "ck"
    rest = ("--val-every", 1000, "--keep-best", "--checkpoints", ck, "--log", log)
    done = run(files, *rest, steps=best)
    assert losses(log) == {best: all_losses[best]}
    assert there(ck) == [best] and (ck / "best").is_symlink()
    assert done.out.count("val loss") == 1


@pytest.mark.parametrize("epochs, weights", [(1, ""), (3, ""), (2, ":3")])
def test_epochs_are_steps(
    epochs: int, weights: str, files: list[object], tmp_path: Path
) -> None:
    """An epoch has as many samples as all files together; the last step may go beyond."""
    sequence, batch = 33, 4
    count = 699 // sequence
    given: list[object] = ["--data", f"{files[1]}{weights}"]
    if weights:
        trainer.write_tokens(tmp_path / "more", np.arange(300) % 256)
        given += ["--data", f"{tmp_path / 'more'}:1"]
        count += 299 // sequence
    steps = -(-epochs * count // batch)
    log = tmp_path / "log"
    done = program.run(built(), *given, "--epochs", epochs, "--log", log)
    assert done.code == 0, done.err
    assert f"--epochs {epochs}: {steps} steps of {batch} samples" in done.err
    records = [json.loads(x) for x in log.read_text().splitlines()]
    seen = [x["epoch"] for x in records if "epoch" in x]
    assert len(seen) == steps and seen[-1] >= epochs > seen[-2]


@pytest.mark.parametrize(
    "options, told",
    [
        ((), "--steps N is needed (0 trains nothing), or --epochs N"),
        (("--epochs", 1, "--steps", 1), "--steps and --epochs both say"),
        (("--epochs", 0), "--epochs 0: a whole number from 1"),
        (("--epochs", 999999999), "--epochs 999999999: more than 1000000000 steps"),
        (("--epochs", 1, "--profile", "p"), "--profile needs --steps N"),
        (("--steps", 1, "--patience", 1), "--patience needs --val-every N"),
        (("--steps", 1, "--keep-best"), "--keep-best needs --checkpoints DIR"),
        (
            ("--steps", 1, "--keep-best", "--checkpoints", "c"),
            "--keep-best needs --val-e",
        ),
    ],
)
def test_what_options_must_say(
    options: tuple[object, ...], told: str, files: list[object]
) -> None:
    done = program.run(built(), *files, *options)
    assert done.code == 2 and told in done.err
    assert len(done.err.splitlines()) == 1
