"""test_resume.py -- a run that goes on from a checkpoint has the bits of one that never stopped:
its weights, and its log's numbers, whatever ranks, stage and offloading each part had.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Mapping
from pathlib import Path

import law
import pytest
import trainer

STEPS, FIRST = 5, 2  # of all; before the checkpoint

BF16 = "train.precision=bf16"
RECIPES: Mapping[str, tuple[str, ...]] = {
    "AdamW": ("gpt",),
    "bf16": ("llama", BF16),
    "momentum, bf16": (
        "gpt",
        BF16,
        "train.optimizer={type: SGD, lr: 0.01, momentum: 0.9}",
    ),
    "f16, a scale that falls": (
        "gpt",
        "train.precision=f16",
        "train.loss_scale.initial_scale_power=32",
        "train.loss_scale.hysteresis=2",
    ),
    "Lion": ("qwen3", "train.optimizer={type: Lion, lr: 0.001}"),
    "frozen, bf16": (
        "llama",
        BF16,
        'train.optimizer.groups=[{match: ["*norm*"], frozen: true}]',
    ),
    "no masters": (
        "gpt",
        BF16,
        "train.optimizer.masters=false",
        "train.optimizer.moments=bf16",
    ),
    "Adagrad": ("gpt", "train.optimizer={type: Adagrad, lr: 0.01}"),
    "SGD, documents": (
        "llama",
        "train.optimizer={type: SGD, lr: 0.01}",
        "data.shuffle=true",
        *law.PACKED,
    ),
}
HOST = ("zero.offload_optimizer.device=cpu",)
NVME = (
    "zero.offload_optimizer.device=nvme",
    f"zero.offload_optimizer.nvme_path={tempfile.gettempdir()}",
)
# stage, ranks, more
WAYS: Mapping[str, tuple[int, int, tuple[str, ...]]] = {
    "0, 1 rank": (0, 1, ()),
    "0, 3 ranks": (0, 3, ()),
    "1, 4 ranks": (1, 4, ("train.recompute=full",)),
    "2, 8 ranks": (2, 8, ()),
    "2, on the host": (2, 2, HOST),
    "3, 2 ranks": (3, 2, ("zero.stage3_param_persistence_threshold=100",)),
    "3, layer by layer": (3, 4, ("train.accumulate=layers",)),
    "3, a part on the host": (
        3,
        2,
        (*HOST, "zero.offload_optimizer.ratio=0.5"),
    ),
    "3, all in a file": (
        3,
        2,
        (
            *NVME,
            "zero.offload_param.device=nvme",
            f"zero.offload_param.nvme_path={tempfile.gettempdir()}",
        ),
    ),
}
ROWS = [
    row
    for row in law.covering(
        {"recipe": list(RECIPES), "from": list(WAYS), "to": list(WAYS)}, 1
    )
    # what has no masters cannot be offloaded
    if row["recipe"] != "no masters"
    or not any("offload" in k for w in ("from", "to") for k in WAYS[row[w]][2])
]


def program(recipe: str, way: str) -> Path:
    family, *keys = RECIPES[recipe]
    stage, ranks, more = WAYS[way]
    spread = (
        "train.global_batch=24",
        "train.micro_batch=1",
        f"zero.stage={stage}",
        f"cluster.ranks={ranks}",
        "zero.sub_group_size=5000",
    )
    return trainer.build(
        trainer.generate(law.path(family), *keys, *spread, *more)
    )


@functools.cache
def folder() -> Path:
    made = Path(tempfile.mkdtemp())
    trainer.write_tokens(made / "tokens", law.tokens(256, 4000))
    return made


def run(
    recipe: str, way: str, steps: int, log: Path, *options: object
) -> law.Result:
    return law.run(
        program(recipe, way),
        "--data",
        folder() / "tokens",
        "--steps",
        steps,
        *options,
        log=log,
    )


@functools.cache
def undisturbed(recipe: str) -> law.Result:
    return run(recipe, "0, 1 rank", STEPS, folder() / "log")


def check(row: Mapping[str, str], tmp_path: Path) -> None:
    checkpoints = ("--checkpoints", tmp_path / "checkpoints")
    first = run(
        row["recipe"], row["from"], FIRST, tmp_path / "log", *checkpoints
    )
    second = run(
        row["recipe"], row["to"], STEPS, tmp_path / "log", *checkpoints
    )
    whole = undisturbed(row["recipe"])
    assert second.weights == whole.weights
    assert (*first.steps, *second.steps) == whole.steps
    assert len(second.steps) == STEPS - FIRST


def some() -> list[Mapping[str, str]]:
    """A row of each recipe; of these, both sides of most ways."""
    return [
        next(
            row
            for n, row in enumerate(ROWS + ROWS)
            if row["recipe"] == recipe
            and n >= len(ROWS) * at // len(RECIPES)
            and row["from"] != row["to"]
        )
        for at, recipe in enumerate(RECIPES)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("row", some(), ids=lambda row: row["recipe"])
def test_the_bits_of_a_run_that_never_stopped(
    row: Mapping[str, str], tmp_path: Path
) -> None:
    check(row, tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize("row", ROWS, ids=lambda row: ", ".join(row.values()))
def test_the_bits_of_a_run_that_never_stopped_in_all_ways(
    row: Mapping[str, str], tmp_path: Path
) -> None:
    check(row, tmp_path)


@pytest.mark.slow
def test_a_gpus_program_goes_on(tmp_path: Path) -> None:
    """Under emulation: from its own checkpoint to the bits of a run that never stopped, and from a
    CPU's, which are not the same."""
    source = trainer.generate(
        law.path("gpt"), BF16, "zero.stage=3", "cluster.ranks=2"
    )
    emulated = trainer.build(source, trainer.EMULATED)
    data = ("--data", folder() / "tokens")
    found = {}
    ways = {
        "whole": [(emulated, STEPS)],
        "in two": [(emulated, FIRST), (emulated, STEPS)],
        "after a CPU": [(trainer.build(source), FIRST), (emulated, STEPS)],
    }
    for name, parts in ways.items():
        where = ("--checkpoints", tmp_path / name)
        for binary, steps in parts:
            found[name] = law.run(
                binary, *data, "--steps", steps, *where, log=tmp_path / "log"
            )
    assert found["in two"].weights == found["whole"].weights
    assert found["in two"].steps == found["whole"].steps[FIRST:]
    assert found["after a CPU"].weights != found["whole"].weights


def test_a_step_more_is_another_run() -> None:
    """The control: what is compared tells runs apart."""
    a = undisturbed("AdamW")
    b = run("AdamW", "0, 1 rank", STEPS - 1, folder() / "other")
    assert a.weights != b.weights and a.steps[:-1] == b.steps
