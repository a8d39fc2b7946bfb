"""test_resume.py -- a run that goes on from a checkpoint has the bits of one that never stopped:
its weights, and its log's numbers, whatever ranks, hosts, stage and offloading each part had.
"""

from __future__ import annotations

import functools
import itertools
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import law
import program as runner
import pytest
import trainer
import zk

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
    "Adam, dropout": (
        "gpt",
        "train.optimizer={type: Adam, lr: 0.001}",
        "train.dropout=0.1",
    ),
    "Nesterov, f16": (
        "llama",
        "train.precision=f16",
        "train.optimizer={type: SGD, lr: 0.01, momentum: 0.9, nesterov: true}",
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
    "SGD, documents, dropout": (
        "llama",
        "train.optimizer={type: SGD, lr: 0.01}",
        "train.dropout=0.1",
        "data.shuffle=true",
        *law.PACKED,
    ),
}
STAGES, RANKS = (0, 1, 2, 3), (1, 2, 3, 4, 8)
HOST = ("zero.offload_optimizer.device=cpu",)
NVME = (
    "zero.offload_optimizer.device=nvme",
    f"zero.offload_optimizer.nvme_path={tempfile.gettempdir()}",
)
OFFLOADS: Mapping[str, tuple[str, ...]] = {
    "none": (),
    "cpu": HOST,
    "nvme": NVME,
    "ratio": (*HOST, "zero.offload_optimizer.ratio=0.5"),
    "nvme, params too": (
        *NVME,
        "zero.offload_param.device=nvme",
        f"zero.offload_param.nvme_path={tempfile.gettempdir()}",
    ),
}
ORDERS: Mapping[str, tuple[str, ...]] = {
    "as usual": (),
    "recompute": ("train.recompute=full",),
    "layer by layer": ("train.accumulate=layers",),
}
SHARED = "cluster.local=2", "zero.shard_size=2"
LAYOUTS: Mapping[str, tuple[str, ...]] = {
    "flat": (),
    "hosts": ("cluster.local=2",),
    "hosts share parameters": SHARED,
    "hosts share states": (*SHARED, "zero.states=shard"),
    "sets of two hosts": ("cluster.local=2", "zero.shard_size=4"),
    "sets in a host": ("cluster.local=4", "zero.shard_size=2"),
}


class Way(NamedTuple):
    """How a recipe is computed."""

    stage: int
    ranks: int
    offload: str
    order: str
    layout: str = "flat"

    def __str__(self) -> str:
        return f"stage {self.stage}, {self.ranks} ranks, {', '.join(self[2:])}"


ALONE = Way(0, 1, "none", "as usual")
FACTORS = {
    "stage": STAGES,
    "ranks": RANKS,
    "offload": [*OFFLOADS],
    "order": [*ORDERS],
    "layout": [*LAYOUTS],
}


class Row(NamedTuple):
    recipe: str
    before: Way  # the checkpoint
    behind: Way

    def __str__(self) -> str:
        return f"{self.recipe}: {self.before} -> {self.behind}"


def possible(recipe: str, way: Way) -> bool:
    """What all ranks have is not offloaded, nor what has no masters; hosts are of 2 or 4 ranks."""
    least = {"none": 0, "nvme, params too": 3}
    if way.layout != "flat":
        said = dict(key.split("=") for key in LAYOUTS[way.layout])
        sizes = {name.partition(".")[2]: said[name] for name in said}
        params = 0 if way.offload == "nvme, params too" else "none"
        laid = {
            "stage": way.stage,
            "ranks": way.ranks,
            "local": int(sizes["local"]),
            "shard": int(sizes.get("shard_size", 0)),
            "states": sizes.get("states", "all"),
            "offload": way.offload,
            "params": params,
        }
        if not law.fits(laid):
            return False
    return way.stage >= least.get(way.offload, 1) and (
        way.offload == "none" or recipe != "no masters"
    )


def row_of(drawn: Mapping[str, Any]) -> Row:
    before, behind = (
        Way(*(drawn[f"{side} {name}"] for name in FACTORS))
        for side in ("before", "behind")
    )
    return Row(drawn["recipe"], before, behind)


def fits(drawn: Mapping[str, Any]) -> bool:
    row = row_of(drawn)
    return all(possible(row.recipe, way) for way in row[1:])


ROWS = [
    row_of(drawn)
    for drawn in law.covering(
        {
            "recipe": [*RECIPES],
            **{
                f"{side} {name}": values
                for side in ("before", "behind")
                for name, values in FACTORS.items()
            },
        },
        1,
        fits,
    )
]


def ways(recipe: str) -> list[Way]:
    """Those in which the rows have it."""
    return sorted(
        {way for row in ROWS if row.recipe == recipe for way in row[1:]}
    )


def program(recipe: str, way: Way) -> Path:
    family, *keys = RECIPES[recipe]
    spread = (
        "train.global_batch=24",
        "train.micro_batch=1",
        f"zero.stage={way.stage}",
        f"cluster.ranks={way.ranks}",
        "zero.sub_group_size=5000",
        "zero.stage3_param_persistence_threshold=100",
        *OFFLOADS[way.offload],
        *ORDERS[way.order],
        *LAYOUTS[way.layout],
    )
    return trainer.build(trainer.generate(law.path(family), *keys, *spread))


@functools.cache
def folder() -> Path:
    made = Path(tempfile.mkdtemp())
    trainer.write_tokens(made / "tokens", law.tokens(256, 4000))
    return made


def run(
    recipe: str, way: Way, steps: int, log: Path, *options: object
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
    return run(recipe, ALONE, STEPS, folder() / "log")


def check(row: Row, tmp_path: Path) -> None:
    checkpoints = ("--checkpoints", tmp_path / "checkpoints")
    log = tmp_path / "log"
    first = run(row.recipe, row.before, FIRST, log, *checkpoints)
    second = run(row.recipe, row.behind, STEPS, log, *checkpoints)
    whole = undisturbed(row.recipe)
    assert second.weights == whole.weights
    assert (*first.steps, *second.steps) == whole.steps
    assert len(second.steps) == STEPS - FIRST


# Of each recipe a row; of these, both sides have all offloads, and most another layout.
SOME = [
    max(
        (row for row in ROWS if row.recipe == recipe),
        key=lambda row: (
            row.before.offload == [*OFFLOADS][at % len(OFFLOADS)],
            row.behind.offload == [*OFFLOADS][(at + 2) % len(OFFLOADS)],
            row.before.layout not in ("flat", row.behind.layout),
            row.before.stage != row.behind.stage,
            row.before.ranks != row.behind.ranks,
        ),
    )
    for at, recipe in enumerate(RECIPES)
]


@pytest.mark.slow
@pytest.mark.parametrize("row", SOME, ids=str)
def test_the_bits_of_a_run_that_never_stopped(
    row: Row, tmp_path: Path
) -> None:
    check(row, tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_the_bits_of_a_run_that_never_stopped_in_all_ways(
    row: Row, tmp_path: Path
) -> None:
    check(row, tmp_path)


def test_any_two_choices_meet() -> None:
    """Of a recipe, and of how it is computed before the checkpoint and behind it."""
    every = [Way(*values) for values in itertools.product(*FACTORS.values())]
    for recipe in RECIPES:
        can = [way for way in every if possible(recipe, way)]
        for side in (1, 2):
            does = [row[side] for row in ROWS if row.recipe == recipe]
            for of in range(len(FACTORS)):
                assert {w[of] for w in does} == {w[of] for w in can}
    can = [way for way in every if possible("AdamW", way)]
    for side, (a, b) in itertools.product(
        (1, 2), itertools.combinations(range(len(FACTORS)), 2)
    ):
        does = [row[side] for row in ROWS]
        assert {(w[a], w[b]) for w in does} == {(w[a], w[b]) for w in can}
    for a, values in enumerate(FACTORS.values()):
        pairs = {(row.before[a], row.behind[a]) for row in ROWS}
        assert len(pairs) == len(values) ** 2


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


def test_amx_goes_on(tmp_path: Path) -> None:
    """From its own checkpoint to the bits of a run that never stopped; another object, whose sums
    are others, is told."""
    zk.need("tiles")
    made = trainer.build(
        trainer.generate(law.path("gpt"), BF16, "zero.stage=3"), trainer.TILES
    )
    data = ("--data", folder() / "tokens", "--hash")

    def weights(name: str, *parts: tuple[str, int]) -> tuple[str, str]:
        for isa, steps in parts:
            words = ("--isa", isa, "--steps", steps)
            where = ("--checkpoints", tmp_path / name)
            done = runner.run(made, *data, *words, *where)
            assert done.code == 0, done.err
        return done.line("weights "), done.err

    whole, _ = weights("whole", ("amx", STEPS))
    found, said = weights("in two", ("amx", FIRST), ("amx", STEPS))
    assert found == whole and "sums of" not in said
    for isa in ("avx2", "avx512bf16"):
        found, said = weights(isa, ("amx", FIRST), (isa, STEPS))
        assert found != whole
        assert f"kernels amx, now {isa}, whose sums of bf16 are others" in said
    found, said = weights("alike", ("avx2", FIRST), ("avx512", STEPS))
    assert "sums of" not in said


def test_a_step_more_is_another_run() -> None:
    """The control: what is compared tells runs apart."""
    a = undisturbed("AdamW")
    b = run("AdamW", ALONE, STEPS - 1, folder() / "other")
    assert a.weights != b.weights and a.steps[:-1] == b.steps
