"""test_dropout.py -- tests train.dropout and train.attention_dropout together: losses and gradients against float64 under the same mask,
one hash however the work is spread, and no dropout outside training."""

import dataclasses
import json
import pathlib
import re

import numpy as np
import pytest
from zg.check import check
from zg.facts.kernels import KERNELS
from zg.plan import plan
from zg.plan.operand import Index
from zg.read import spec as reader
from zg.search import search

from tests.law import test_reference
from tests.lib import chance, law, oracle, trainer

DROP = ("train.dropout=0.25", "train.attention_dropout=0.2")
WHOLE = "zero.stage3_param_persistence_threshold=0"
WAYS = (
    ("cluster.ranks=1", "zero.stage=0"),
    ("cluster.ranks=2", "zero.stage=1", "train.recompute=[linear]"),
    ("cluster.ranks=4", "zero.stage=2", "zero.overlap_comm=false"),
    ("cluster.ranks=2", "zero.stage=3", "train.recompute=full"),
    ("cluster.ranks=8", "zero.stage=3", WHOLE),
    ("cluster.ranks=2", "zero.stage=3", WHOLE, "train.accumulate=layers"),
    ("cluster.ranks=1", "train.offload_activations=true"),
    (
        "cluster.ranks=4",
        "cluster.local=2",
        "zero.stage=3",
        "zero.shard_size=2",
    ),
    (
        "cluster.ranks=2",
        "zero.stage=3",
        WHOLE,
        "zero.stage3_max_live_parameters=30000",
    ),
)


def keyed(spec) -> list[int]:
    """Return the keys of the samples of a run's first step."""
    return chance.keys(spec.train.seed, 0, spec.train.global_batch)


# ---- values


@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_the_evaluators_gradients(name: str) -> None:
    """The evaluator's gradients match differences of its own loss under one mask."""
    _, params, tokens, _ = test_reference.setting(name)
    spec = reader.load(str(law.path(name)), DROP)
    batch = oracle.batch(tokens, spec.train.sequence, 0, 2)
    given = [1, 2]
    _, _, grads = oracle.gradients(spec, params, *batch, keys=given)
    rng, step = np.random.Generator(np.random.Philox(1)), 1e-6
    way = {n: rng.uniform(-1, 1, x.shape) for n, x in params.items()}
    ends = [
        oracle.gradients(
            spec,
            {n: x + s * way[n] for n, x in params.items()},
            *batch,
            keys=given,
        )[0]
        for s in (-step, step)
    ]
    slope = sum(float((grads[n] * way[n]).sum()) for n in params)
    # as in test_lora.py, but all tensors change: the cubic term is at most some 1e-6
    assert abs((ends[1] - ends[0]) / (2 * step) - slope) <= 1e-6 * abs(slope)


@pytest.mark.parametrize("name", ["gpt", "llama", "qwen3"])
def test_gradients(tmp_path: pathlib.Path, name: str) -> None:
    """Gradients of the first step are within f32's bound for whole models. Without the mask, or
    with other samples' masks, they are far off."""
    path, params, tokens, _ = test_reference.setting(name)
    keys = (*test_reference.SHOW, *DROP)
    after = trainer.train(path, tmp_path, params, tokens, 1, *keys)
    spec = reader.load(str(path), keys)
    G = spec.train.global_batch
    batch = oracle.batch(tokens, spec.train.sequence, 0, G)
    moved = {
        n: (x - np.float64(after[n])) / test_reference.RATE for n, x in params.items()
    }
    found = {n: u / (1 - np.abs(u)) for n, u in moved.items()}

    def worst(given: list[int]) -> tuple[float, float]:
        loss, _, want = oracle.gradients(spec, params, *batch, keys=given)
        off = [test_reference.off(found[n], want[n]) for n in found]
        return max(off), abs(test_reference.losses(tmp_path)[0] - loss) / loss

    gradient, loss = worst(keyed(spec))
    assert gradient <= test_reference.GRADIENT
    assert loss <= test_reference.LOSS
    for other in ([], keyed(spec)[::-1]):
        assert worst(other)[0] > 1e3 * test_reference.GRADIENT


# ---- bits


@pytest.mark.slow
@pytest.mark.parametrize(
    "name,precision", [("gpt", "bf16"), ("llama", "f32"), ("qwen3", "f16")]
)
def test_law(tmp_path: pathlib.Path, name: str, precision: str) -> None:
    """All ways of spreading the work have one hash, also with documents. Other rates of dropout,
    and none, have other hashes."""
    trainer.write_tokens(tmp_path / "tokens", law.tokens(256, 40 * 8 * 3 + 1))

    def run(*keys: str) -> law.Result:
        keys = (f"train.precision={precision}", "train.micro_batch=1", *keys)
        return law.run(
            trainer.build(trainer.generate(law.path(name), *keys)),
            *("--data", tmp_path / "tokens", "--steps", 3),
            log=tmp_path / "log",
        )

    ways = WAYS if name == "gpt" else WAYS[1::3]
    found = {run(*DROP, *way) for way in ways}
    other = (
        (),
        (DROP[0], "train.attention_dropout=0.21"),
        ("train.dropout=0.26", DROP[1]),
    )
    others = [run(*keys, *WAYS[1]) for keys in other]
    assert len(found) == 1
    assert len({r.steps for r in others}) == 3
    (one,) = found
    assert one.weights not in {r.weights for r in others}
    packed = {run(*DROP, *law.PACKED, *way) for way in ways[:2]}
    assert len(packed) == 1 and packed != found


@pytest.mark.slow
def test_law_of_what_is_rounded(tmp_path: pathlib.Path) -> None:
    """The law holds when dropout leaves hardly a value, and without masters, whose rounding draws
    random words of its own."""
    trainer.write_tokens(tmp_path / "tokens", law.tokens(256, 40 * 8 * 3 + 1))
    keys = (
        "train.dropout=0.9",
        "train.attention_dropout=0.9",
        "train.precision=bf16",
        "train.optimizer.masters=false",
        "train.sum=tree",
        "train.micro_batch=1",
    )
    found = {
        law.run(
            trainer.build(trainer.generate(law.path("llama"), *keys, *way)),
            *("--data", tmp_path / "tokens", "--steps", 3),
            log=tmp_path / "log",
        )
        for way in WAYS[:5]
    }
    assert len(found) == 1


STILL = ("train.optimizer.lr=0", "train.schedule={type: constant}")


def test_only_training_drops(tmp_path: pathlib.Path) -> None:
    """Validations equal those of the model without dropout, before the first step and after others,
    while training steps differ. The weights stay as they are."""
    trainer.write_tokens(tmp_path / "tokens", law.tokens(256, 40 * 8 * 3 + 1))

    def run(*keys: str) -> law.Result:
        return law.run(
            trainer.build(trainer.generate(law.path("gpt"), *STILL, *keys)),
            *("--data", tmp_path / "tokens", "--val", tmp_path / "tokens"),
            *("--steps", 2, "--val-every", 1),
            log=tmp_path / "log",
        )

    plain, dropped = run(), run(*DROP)
    assert plain.val and plain.val == dropped.val
    assert plain.steps != dropped.steps


def test_under_emulation(tmp_path: pathlib.Path) -> None:
    """The GPU's kernels have one hash, too, and the loss of the first step is a CPU's under its
    mask. The sums of 24 tokens differ only in the order of f32 additions."""
    trainer.write_tokens(tmp_path / "tokens", law.tokens(256, 40 * 8 * 3 + 1))
    short = (
        "train.global_batch=2",
        "train.micro_batch=1",
        "train.sequence=12",
        "model.units[1].blocks=1",
    )

    def run(kind: trainer.Kind, *keys: str) -> law.Result:
        source = trainer.generate(law.path("gpt"), *DROP, *short, *keys)
        return law.run(
            trainer.build(source, kind),
            *("--data", tmp_path / "tokens", "--steps", 2),
            log=tmp_path / "log",
        )

    first, second, cpu = (
        run(trainer.EMULATED, *WAYS[0]),
        run(trainer.EMULATED, *WAYS[4], "cluster.ranks=2"),
        run(trainer.GCC, *WAYS[0]),
    )
    assert first == second
    x, y = (json.loads(r.steps[0])["loss"] for r in (first, cpu))
    assert abs(x - y) <= 1e-6 * y


# ---- refusals of the checker


def changed(p: plan.Plan, name: str, at: dict[int, Index]) -> plan.Plan:
    """Return the plan with other places for some calls with dropout of a function."""
    fns = []
    for fn in p.fns:
        n, calls = 0, []
        for c in fn.calls:
            place = KERNELS[c.kernel].at.get("place")
            if fn.name == name and place is not None:
                args = [*c.args]
                args[place] = at.get(n, args[place])
                c, n = dataclasses.replace(c, args=tuple(args)), n + 1
            calls.append(c)
        fns.append(dataclasses.replace(fn, calls=tuple(calls)))
    return dataclasses.replace(p, fns=tuple(fns))


def test_places_are_checked() -> None:
    """Each dropout call has a place of its own, in the order of the model's calls, and backward
    uses that of forward."""
    p = search.find(reader.load(str(law.path("gpt")), DROP)).plan
    one, two, three = (Index(3, 0, n) for n in (1, 2, 3))
    check.check(changed(p, "fwd.block", {0: one, 1: two, 2: three}))
    check.check(changed(p, "bwd.block", {0: three, 1: two, 2: one}))
    for name, at in (
        ("bwd.block", {0: two, 1: three}),
        ("bwd.block", {1: one, 2: two}),
        ("fwd.block", {0: two, 1: one}),
        ("fwd.block", {1: three, 2: two}),
        ("fwd.block", {0: Index(1, 0, 1)}),
        ("fwd.embed", {0: Index(1, 0, 1)}),
    ):
        with pytest.raises(check.CheckError):
            check.check(changed(p, name, at))


def test_capped_scores_have_no_dropout() -> None:
    """Attention with a cap and with dropout is refused by the key of the dropout."""
    cap = "model.units[1].ops[0].residual[1].attention.softcap"
    said = rf"train.attention_dropout: 0.2 drops .* {re.escape(cap)} caps; allowed: 0"
    with pytest.raises(reader.SpecError, match=said):
        reader.load(str(law.path("gpt")), [*DROP, f"{cap}=2"])
    reader.load(str(law.path("gpt")), [DROP[0], f"{cap}=2"])
