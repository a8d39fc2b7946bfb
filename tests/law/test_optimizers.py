"""test_optimizers.py -- tests programs with each optimizer: against float64, by the bitwise law,
and by the memory they take. test_optimizer.py tests the arithmetic of a step."""

import pathlib

import numpy as np
import pytest
from zg.check import check
from zg.facts import ops
from zg.plan import plan
from zg.predict import cost
from zg.read import spec as reader
from zg.search import search

from tests.law import test_reference
from tests.lib import law, oracle, trainer

# Rates that change weights by about a hundredth in five steps.
SETTINGS = {
    "Adam": "{type: Adam, lr: 1e-3, betas: [0.9, 0.95], weight_decay: 0.1}",
    "SGD": "{type: SGD, lr: 0.03, weight_decay: 0.1}",
    "Momentum": "{type: SGD, lr: 0.01, momentum: 0.9, weight_decay: 0.1, decay: all}",
    "Nesterov": "{type: SGD, lr: 0.01, momentum: 0.9, nesterov: true, clip: 0}",
    "Lion": "{type: Lion, lr: 3e-4, betas: [0.9, 0.99], weight_decay: 0.1}",
    "Adagrad": "{type: Adagrad, lr: 3e-3, weight_decay: 0.1}",
}
# Stochastic rounding: bf16 beside f32 or bf16, and parameters without masters.
ROUNDED = {
    "moments": ["train.optimizer={type: AdamW, lr: 1e-3, moments: bf16}"],
    "one moment": ["train.optimizer={type: Lion, lr: 3e-4, moments: bf16}"],
    "moments, no masters": [
        "train.precision=bf16",
        "train.optimizer={type: AdamW, lr: 1e-3, moments: bf16, masters: false}",
    ],
    "no masters": [
        "train.precision=bf16",
        "train.optimizer={type: SGD, lr: 0.03, masters: false}",
    ],
}


def keys(name: str) -> list[str]:
    return [
        f"train.optimizer={SETTINGS[name]}",
        "train.schedule={type: constant, warmup: 2}",
    ]


def planned(family: str, *settings: str) -> plan.Plan:
    return search.find(reader.load(str(law.path(family)), settings)).plan


@pytest.mark.parametrize("name", SETTINGS)
def test_against_float64(tmp_path: pathlib.Path, name: str) -> None:
    """Five steps stay close to the float64 evaluator.

    Gradients are off by GRADIENT of a tensor's largest element. A rule that is linear in them is
    off by as much of the way, and twice that with the roundings. A rule that divides by their size,
    or takes their sign, may send small ones another way; these are few.
    """
    path, params, tokens, _ = test_reference.setting("llama")
    after = trainer.train(path, tmp_path, params, tokens, 5, *keys(name))
    spec = reader.load(str(path), keys(name))
    want, losses, _ = oracle.train(spec, params, tokens, 5)
    assert test_reference.off(test_reference.losses(tmp_path), np.array(losses)) <= 1e-6
    linear = spec.train.optimizer.type == "SGD"
    for tensor, x in want.items():
        way = np.abs(x - params[tensor]).max()
        rounded = 3 * 5 * 2.0**-24 * np.abs(x).max()
        error = np.abs(after[tensor] - x)
        bound = (10 * test_reference.GRADIENT if linear else 1e-3) * way + rounded
        assert way > 1e-6 and bound < 0.1 * way, tensor
        assert np.mean(error > bound) <= (0 if linear else 0.01), (
            f"{tensor}: {error.max() / way}"
        )


def lawful(folder: pathlib.Path, family: str, *recipe: str) -> set[law.Result]:
    """Return the results of three ways to spread a recipe over ranks and stages."""
    trainer.write_tokens(folder / "tokens", law.tokens(256, 40 * 8 * 5 + 1, holes=True))
    ways = (
        ["zero.stage=0", "cluster.ranks=1"],
        ["zero.stage=1", "cluster.ranks=2", "zero.reduce_bucket_size=5000"],
        [
            "zero.stage=3",
            "cluster.ranks=4",
            "zero.stage3_param_persistence_threshold=100",
        ],
        [
            "zero.stage=3",
            "cluster.ranks=8",
            "cluster.local=4",
            "zero.shard_size=2",
            "zero.states=shard",
        ],
    )
    sources = [
        trainer.generate(law.path(family), "train.micro_batch=1", *recipe, *way)
        for way in ways
    ]
    return {
        law.run(
            trainer.build(source),
            "--data",
            folder / "tokens",
            "--steps",
            5,
            "--queue",
            "shuffled:1",
            log=folder / "log",
        )
        for source in sources
    }


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["f32", "bf16"])
@pytest.mark.parametrize("name", SETTINGS)
def test_law(tmp_path: pathlib.Path, name: str, precision: str) -> None:
    family = "gpt" if precision == "f32" else "llama"
    found = lawful(tmp_path, family, f"train.precision={precision}", *keys(name))
    assert len(found) == 1


@pytest.mark.parametrize("name", ROUNDED)
def test_law_of_what_is_rounded(tmp_path: pathlib.Path, name: str) -> None:
    assert len(lawful(tmp_path, "gpt", *ROUNDED[name])) == 1


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("name", ROUNDED)
def test_memory_of_what_is_rounded(name: str, stage: int) -> None:
    p = planned("gpt", f"zero.stage={stage}", "cluster.ranks=2", *ROUNDED[name])
    states, width = (
        ops.OPTIMIZERS[p.recipe.optimizer],
        2 if p.recipe.moments == "bf16" else 4,
    )

    def owned(f):
        return f.shard * (p.head.ranks if p.head.zero == 0 else 1)

    # Whole pages.
    slots = sum(f.count * ops.up(width * owned(f), 4096) for f in p.flats)
    assert dict(cost.memory(p))["optimizer state"] == slots * len(states)


@pytest.mark.parametrize("precision", ["f32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("name", ["AdamW", *SETTINGS])
def test_memory(name: str, stage: int, precision: str) -> None:
    """A state is as large as the f32 parameters that its rank owns; a state that a rule lacks takes
    nothing."""
    chosen = keys(name) if name != "AdamW" else []
    p = planned("gpt", f"zero.stage={stage}", f"train.precision={precision}", *chosen)
    check.check(p)
    states = [
        *(["master"] if precision == "bf16" else []),
        *ops.OPTIMIZERS[name],
    ]
    owned = sum(
        f.count * f.shard * (p.head.ranks if p.head.zero == 0 else 1) for f in p.flats
    )
    assert {c.name.split(".")[0] for c in p.classes} & set(ops.STATES) == set(states)
    assert dict(cost.memory(p))["optimizer state"] == 4 * owned * len(states)
