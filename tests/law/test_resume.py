"""test_resume.py -- tests that a resumed run has the bits of one that never stopped, in its weights
and its log, whatever ranks, hosts, stage and offloading both parts had."""

from __future__ import annotations

import functools
import itertools
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.lib import files, law, trainer, zk
from tests.lib import program as runner

STEPS, FIRST = 5, 2  # in all; before the checkpoint

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
    "shared samples": ("llama", "train.sequence_blocks=2", "train.sum=tree"),
    "adapters, dropout": (
        "llama",
        BF16,
        "train.lora={rank: 4, alpha: 6, dropout: 0.2}",
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
SHARES = "two ranks share samples"
LAYOUTS: Mapping[str, tuple[str, ...]] = {
    "flat": (),
    "hosts": ("cluster.local=2",),
    "hosts share parameters": SHARED,
    "hosts share states": (*SHARED, "zero.states=shard"),
    "sets of two hosts": ("cluster.local=2", "zero.shard_size=4"),
    "sets in a host": ("cluster.local=4", "zero.shard_size=2"),
    SHARES: ("cluster.context_parallel=2",),
}


class Way(NamedTuple):
    """A way to compute a recipe."""

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
    before: Way  # of the run that writes the checkpoint
    behind: Way

    def __str__(self) -> str:
        return f"{self.recipe}: {self.before} -> {self.behind}"


@functools.cache
def possible(recipe: str, way: Way) -> bool:
    """Return whether a way exists: only sharded states with masters can be offloaded, and hosts
    have 2 or 4 ranks."""
    least = {"none": 0, "nvme, params too": 3}
    shared = way.layout == SHARES
    if shared and (recipe != "shared samples" or way.ranks % 2):
        return False
    if recipe == "shared samples" and not shared and way.ranks > 1:
        return False
    if way.layout != "flat" and not shared:
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


SIDES = {
    side: itemgetter(*(f"{side} {name}" for name in FACTORS))
    for side in ("before", "behind")
}


def row_of(drawn: Mapping[str, Any]) -> Row:
    return Row(drawn["recipe"], *(Way(*of(drawn)) for of in SIDES.values()))


def fits(drawn: Mapping[str, Any]) -> bool:
    return all(possible(drawn["recipe"], Way(*of(drawn))) for of in SIDES.values())


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
    """Return the ways in which the rows compute a recipe."""
    return sorted({way for row in ROWS if row.recipe == recipe for way in row[1:]})


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


def run(recipe: str, way: Way, steps: int, log: Path, *options: object) -> law.Result:
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


# A row of each recipe. Together they have all offloads on both sides, and most change the layout.
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
def test_the_bits_of_a_run_that_never_stopped(row: Row, tmp_path: Path) -> None:
    check(row, tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_the_bits_of_a_run_that_never_stopped_in_all_ways(
    row: Row, tmp_path: Path
) -> None:
    check(row, tmp_path)


def test_any_two_choices_meet() -> None:
    """Any choice of a recipe meets any choice before and after the checkpoint."""
    every = [Way(*values) for values in itertools.product(*FACTORS.values())]
    for recipe in RECIPES:
        can = [way for way in every if possible(recipe, way)]
        for side in (1, 2):
            does = [row[side] for row in ROWS if row.recipe == recipe]
            for of in range(len(FACTORS)):
                assert {w[of] for w in does} == {w[of] for w in can}
    can = [way for way in every for recipe in RECIPES if possible(recipe, way)]
    for side, (a, b) in itertools.product(
        (1, 2), itertools.combinations(range(len(FACTORS)), 2)
    ):
        does = [row[side] for row in ROWS]
        assert {(w[a], w[b]) for w in does} == {(w[a], w[b]) for w in can}
    for a, values in enumerate(FACTORS.values()):
        pairs = {(row.before[a], row.behind[a]) for row in ROWS}
        # a layout of shared samples meets itself and that of one rank
        alone = [x for x in values if x != SHARES]
        some = len(alone) ** 2 + 3 * (len(alone) < len(values))
        assert len(pairs) == some


@pytest.mark.slow
def test_a_gpus_program_goes_on(tmp_path: Path) -> None:
    """An emulated GPU resumes its own checkpoint to the bits of a run that never stopped. It also
    resumes a CPU's, with other bits."""
    source = trainer.generate(law.path("gpt"), BF16, "zero.stage=3", "cluster.ranks=2")
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


def products(*words: object) -> tuple[str, str, str]:
    """Return the order, the hash and all messages of a run."""
    source = trainer.generate(law.path("gpt"), BF16, "zero.stage=3")
    data = ("--data", folder() / "tokens", "--hash")
    done = runner.run(trainer.build(source), *data, *words)
    assert done.code == 0, done.err
    order = re.search(r", products by (\w+)", done.err)[1]
    return order, done.line("weights "), done.err


def test_an_order_of_products_goes_on(tmp_path: Path) -> None:
    """A run keeps the order that it began with, whatever is fastest here and with whatever kernels
    it resumes."""
    for order, other in (("pairs", "tiles"), ("tiles", "pairs")):
        begun = ("--products", order)
        _, whole, _ = products(*begun, "--steps", STEPS)
        for isa in zk.isas((*zk.ISAS, zk.BEST)):
            where = ("--checkpoints", tmp_path / order / isa)
            products(*begun, *where, "--steps", FIRST, "--isa", "avx2")
            *found, said = products(*where, "--steps", STEPS, "--isa", isa)
            assert found == [order, whole] and "sums are" not in said
        assert products("--products", other, "--steps", STEPS)[1] != whole


def test_a_processor_with_amx_begins_by_tiles(tmp_path: Path) -> None:
    """A processor with AMX (emulated) begins with the order of tiles, like --products tiles
    elsewhere. Two orders are two recipes."""
    zk.need("tiles")
    source = trainer.generate(law.path("gpt"), BF16, "zero.stage=3")
    words = ("--data", folder() / "tokens", "--hash", "--steps", STEPS)
    logs = [("--log", tmp_path / name) for name in ("tiles", "pairs")]
    done = runner.run(trainer.build(source, trainer.TILES), *words, *logs[0])
    assert done.code == 0 and "kernels amx, products by tiles" in done.err
    own = products("--products", "tiles", "--steps", STEPS)
    assert done.line("weights ") == own[1]
    products("--products", "pairs", "--steps", STEPS, *logs[1])
    told = subprocess.run(
        [sys.executable, "tools/compare.py", logs[1][1], logs[0][1]],
        cwd=trainer.ROOT,
        env={**os.environ, "PYTHONPATH": "gen"},
        capture_output=True,
        text=True,
    ).stdout
    assert 'two recipes: train.products: "pairs" -> "tiles"' in told


@pytest.mark.slow
@pytest.mark.parametrize("order", ["pairs", "tiles"])
def test_a_gpu_keeps_the_order_of_products(tmp_path: Path, order: str) -> None:
    """A GPU (emulated) keeps the order of products in its checkpoints, so a CPU can resume with it
    whatever is faster there."""
    source = trainer.generate(law.path("gpt"), BF16, "zero.stage=3")
    emulated = trainer.build(source, trainer.EMULATED)
    where = ("--checkpoints", tmp_path / "c")
    products(*where, "--steps", FIRST, "--products", order)
    words = ("--data", folder() / "tokens", *where, "--steps", FIRST + 1)
    done = runner.run(emulated, *words)
    assert done.code == 0 and "products by" not in done.err, done.err
    assert products(*where, "--steps", STEPS)[0] == order


def test_a_program_of_before_the_orders_is_refused() -> None:
    source = trainer.generate(law.path("gpt"), BF16, "zero.stage=3")
    line = ".products = products, .order = -1,"
    assert source.count(line) == 1
    binary = trainer.build(source.replace(line, ""))
    done = runner.run(binary, "--data", folder() / "tokens", "--steps", 1)
    assert done.code == 4 and "regenerate it" in done.err


def test_an_order_of_products_is_not_changed_by_chance(tmp_path: Path) -> None:
    where = ("--checkpoints", tmp_path / "c")
    begun, _, _ = products(*where, "--steps", FIRST, "--products", "tiles")
    (record,) = tmp_path.glob("c/*/run.json")
    assert 'train.products: \\"tiles\\"' in record.read_text()
    source = trainer.generate(law.path("gpt"), BF16, "zero.stage=3")
    words = ("--data", folder() / "tokens", *where, "--steps", STEPS)
    done = runner.run(trainer.build(source), *words, "--products", "pairs")
    assert done.code == 4 and (
        f"--products pairs: the run in {tmp_path / 'c'} sums products by tiles; leave --products out"
        in done.err
    )
    pinned = trainer.generate(law.path("gpt"), BF16, "train.products=pairs")
    done = runner.run(trainer.build(pinned), *words)
    assert done.code == 4 and "generate with train.products tiles" in done.err
    done = runner.run(trainer.build(pinned), *words, "--products", "tiles")
    assert done.code == 2 and "generated with train.products pairs" in done.err
    plain = trainer.generate(law.path("gpt"))
    done = runner.run(trainer.build(plain), *words, "--products", "tiles")
    assert done.code == 2 and "has another type; leave it out" in done.err
    accepted = ("--products", "pairs", "--accept-change", "train.products")
    assert products(*where, "--steps", STEPS, *accepted)[0] == "pairs"


@pytest.mark.parametrize("kernels,order", [("amx", "tiles"), ("avx512bf16", "pairs")])
def test_a_checkpoint_older_than_the_orders(
    tmp_path: Path, kernels: str, order: str
) -> None:
    """A checkpoint without an order resumes by its run's kernels: AMX summed by tiles, all others
    by pairs."""
    where = ("--checkpoints", tmp_path / "c")
    _, whole, _ = products("--products", order, "--steps", STEPS)
    products(*where, "--steps", FIRST, "--products", order)
    (record,) = tmp_path.glob("c/*/run.json")
    text = re.sub(r',\n  "train.products: [^,\n]*"', "", record.read_text())
    text = re.sub(r'"kernels": "\w+"', f'"kernels": "{kernels}"', text)
    assert "train.products" not in text
    record.write_bytes(files.sealed(text.encode()))
    *found, _ = products(*where, "--steps", STEPS)
    assert found == [order, whole]


def test_a_step_more_is_another_run() -> None:
    """The comparison tells runs of different length apart (a control)."""
    a = undisturbed("AdamW")
    b = run("AdamW", ALONE, STEPS - 1, folder() / "other")
    assert a.weights != b.weights and a.steps[:-1] == b.steps
