"""test_random_models.py -- tests drawn models. Programs of three steps match the evaluator of
oracle.py. With every key of a spec drawn, the checker proves the plan, the program compiles, and
its weights are those of the same recipe on one rank."""

import pathlib
import shutil
import tempfile
from collections.abc import Callable

import config_doc
import numpy as np
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from zg.read import schema
from zg.read import spec as reader
from zg.read.keytypes import RECOMPUTE
from zg.write import config

from tests.house.test_compilers import compiled
from tests.lib import drawn, law, oracle, trainer
from tests.reference import known

STEPS = 3

# The error of a float32 gradient depends on the model: with nearly even attention, say, the
# gradient of q is a difference of nearly equal numbers. So the bound is FACTOR times the error of
# the evaluator itself in float32, the largest of RUNS with weights 2^-24 apart. The program's
# gradients are between 0.8 and 1.4 times as far off as numpy's on the tiny specs; the rest of
# FACTOR is for tensors so small that RUNS errors say little. A step also rounds the weight twice:
# after its decay and after its move. A gradient that cancels (that of q and k, all of it, if T = 1)
# leaves roundings of its parts, which the evaluator's order of work may not have: CANCELLED of the
# largest gradient.
RUNS, FACTOR, CANCELLED = 4, 4, 2.0**-22


@st.composite
def spread(draw) -> drawn.Mapping:
    """Draw a spec and a way to spread its work."""
    mapping = draw(drawn.specs())
    train = mapping["train"]
    micro_batches = train["global_batch"] // train["micro_batch"]
    mapping["cluster"] = {
        "ranks": draw(st.sampled_from([w for w in (1, 2, 4) if micro_batches % w == 0]))
    }
    mapping["zero"] = {
        "stage": draw(st.integers(0, 3)),
        "overlap_comm": draw(st.booleans()),
        "reduce_bucket_size": draw(st.sampled_from([1024, 10000, 500000])),
        "stage3_prefetch_bucket_size": draw(st.sampled_from([0, 5000, 500000])),
        "stage3_param_persistence_threshold": draw(st.sampled_from([0, 50, 10000])),
    }
    train["recompute"] = draw(
        st.sampled_from(["none", "full"])
        | st.lists(st.sampled_from(RECOMPUTE), unique=True)
    )
    train["sum"] = draw(st.sampled_from(["tree", "fold"]))
    return mapping


def in_float32(seed: int) -> Callable:
    rng = np.random.Generator(np.random.Philox(seed))

    def gradients(
        spec, params: oracle.Arrays, *batch, **keys
    ) -> tuple[float, int, oracle.Arrays]:
        near = {
            n: x * (1 + 2.0**-24 * rng.uniform(-1, 1, x.shape))
            for n, x in params.items()
        }
        return oracle.gradients(spec, near, *batch, np.float32, **keys)

    return gradients


def both_compile(source: str, folder: pathlib.Path) -> None:
    for compiler in filter(shutil.which, ("gcc", "clang")):
        compiled(compiler, source, folder, "-fsyntax-only")


@pytest.mark.slow
@settings(max_examples=12, suppress_health_check=list(HealthCheck))
@given(mapping=spread())
def test_three_steps(mapping: drawn.Mapping) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        (folder / "spec.yaml").write_text(yaml.safe_dump(mapping))
        spec = reader.load(str(folder / "spec.yaml"))
        params = {
            tensor: known.weight(tensor, shape, known.is_norm_weight(tensor))
            for tensor, shape in oracle.shapes(spec).items()
        }
        tokens = known.stream("drawn", spec.train.sequence, spec.model.vocab)
        both_compile(trainer.generate(folder / "spec.yaml"), folder)
        found = trainer.train(folder / "spec.yaml", folder, params, tokens, STEPS)
    expected, _, _ = oracle.train(spec, params, tokens, STEPS)
    rough = [
        oracle.train(spec, params, tokens, STEPS, gradients=in_float32(seed))[0]
        for seed in range(RUNS)
    ]
    now = oracle.batch(tokens, spec.train.sequence, 0, spec.train.global_batch)
    grads = oracle.gradients(spec, params, *now)[2]
    cancelled = STEPS * CANCELLED * max(np.abs(g).max() for g in grads.values())
    assert found.keys() == expected.keys()
    for tensor, x in expected.items():
        error = np.abs(found[tensor] - x).max()
        rounded = (
            2 * STEPS * 2.0**-24 * max(np.abs(x).max(), np.abs(params[tensor]).max())
        )
        bound = (
            FACTOR * max(np.abs(r[tensor] - x).max() for r in rough)
            + rounded
            + cancelled
        )
        assert error <= bound, f"{tensor}: off by {error:.3g}, bound {bound:.3g}"


# ---- every key


def keys(kind: type, path: str) -> list[str]:
    """Return the dotted keys of a record."""
    out = []
    for name, hint, _ in config_doc.fields(kind):
        below = config_doc.record(hint)
        if name not in ("name", "model"):
            out += keys(below, f"{path}{name}.") if below else [path + name]
    return out


def test_every_key_is_drawn() -> None:
    known = sorted([*drawn.KEYS, *drawn.BY_MODEL])
    assert known == sorted(keys(schema.SpecKeys, ""))


def a_program(given: drawn.Mapping) -> None:
    """Generate a program, or expect an error that names the refused key. Both compilers accept the
    program."""
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        both_compile(drawn.settled(given, folder / "spec.yaml"), folder)


@pytest.mark.slow
@settings(max_examples=15, suppress_health_check=list(HealthCheck))
@given(given=drawn.whole_specs())
def test_a_program_or_a_refusal(given: drawn.Mapping) -> None:
    a_program(given)


@pytest.mark.exhaustive
@settings(max_examples=2000, suppress_health_check=list(HealthCheck))
@given(given=drawn.whole_specs())
def test_many_programs_and_refusals(given: drawn.Mapping) -> None:
    a_program(given)


def one_hash(given: drawn.Mapping) -> None:
    """Assert that the weights are those of the recipe alone: without keys of `zero` and `cluster`,
    and without those of `train` that choose where and when work is done."""
    kept = {
        key: value
        for key, value in given.items()
        if not key.endswith(("max_skips", "memory_budget"))
    }
    kept |= {"targets": ["cpu"], "train.max_skips": 1000}
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        spread, alone = folder / "spread.yaml", folder / "alone.yaml"
        sources = [drawn.settled(kept, spread)]
        said = yaml.safe_load(spread.read_text())
        train = {
            key: value
            for key, value in said["train"].items()
            if f"train.{key}" not in config.FREE or key == "max_skips"
        }
        recipe = {k: said[k] for k in said if k not in ("zero", "cluster")}
        alone.write_text(yaml.safe_dump({**recipe, "train": train}))
        sources.append(trainer.generate(alone))
        spec = reader.load(str(alone))
        assert config.recipe(reader.load(str(spread))) == config.recipe(spec)
        samples = STEPS * spec.train.global_batch
        trainer.write_tokens(
            folder / "tokens",
            law.tokens(spec.model.vocab, samples * spec.train.sequence + 1),
        )
        found = [
            law.run(
                trainer.build(source),
                *("--data", folder / "tokens", "--steps", STEPS),
                *("--queue", queue, "--threads", 1),
                log=folder / "log",
            )
            for source, queue in zip(sources, ("shuffled:1", "eager"), strict=True)
        ]
        assert found[0] == found[1]


@pytest.mark.slow
@settings(max_examples=5, suppress_health_check=list(HealthCheck))
@given(given=drawn.whole_specs())
def test_one_hash(given: drawn.Mapping) -> None:
    one_hash(given)


@pytest.mark.exhaustive
@settings(max_examples=200, suppress_health_check=list(HealthCheck))
@given(given=drawn.whole_specs())
def test_many_hashes(given: drawn.Mapping) -> None:
    one_hash(given)
