"""test_loss_mean.py -- tests train.loss_mean: losses, gradients and steps of means over micro-batches
against PyTorch's float64, one hash however the work is spread, and refusals of the checker.

The tokens have ignored targets everywhere here: otherwise both means are the same.
"""

import dataclasses
import json
import pathlib
from collections.abc import Callable

import numpy as np
import pytest
from zg.check import check
from zg.facts.kernels import FACTOR, KERNELS, LOSS_SUMS, LOSSES, NULL
from zg.facts.ops import SCALE as PLACE
from zg.plan import plan
from zg.plan.operand import Operand
from zg.read import spec as reader
from zg.search import knobs, search
from zg.write import config

from tests.law import test_reference
from tests.lib import law, oracle, trainer
from tests.reference import known

MEANS = "train.loss_mean=micro_batch"
WHOLE = "zero.stage3_param_persistence_threshold=0"
SCALER = Operand("ctl", PLACE)
IGNORE = f"data.ignore={law.HOLE}"


def keys_of(name: str) -> tuple[str, ...]:
    """Return the keys of a model of means.npz."""
    return (
        MEANS,
        f"train.label_smoothing={known.MEANS[name]}",
        f"train.micro_batch={known.MEANS_BATCH}",
    )


def setting(
    name: str,
) -> tuple[pathlib.Path, oracle.Arrays, np.ndarray, dict[str, np.ndarray]]:
    """Return the path of a spec, initial weights, tokens and PyTorch's numbers."""
    path, params, tokens, _ = test_reference.setting(name)
    tokens = known.prompts(tokens, reader.load(str(path)).train.sequence)
    with np.load(trainer.ROOT / "tests" / "reference" / "means.npz") as file:
        ref = {key.partition("/")[2]: file[key] for key in file if key.startswith(name)}
    return path, params, tokens, ref


def given(tokens: np.ndarray) -> np.ndarray:
    """Return the tokens as a program's file has them."""
    return np.where(tokens == known.HOLE, law.HOLE, tokens)


# ---- values


@pytest.mark.parametrize("name", known.MEANS)
def test_the_evaluator(name: str) -> None:
    """The evaluator has PyTorch's losses, norms and gradients; with the mean over tokens it has
    others."""
    path, params, tokens, ref = setting(name)
    spec = reader.load(str(path), keys_of(name))
    _, losses, norms = oracle.train(spec, params, tokens, known.MEANS_STEPS, known.HOLE)
    assert test_reference.off(np.array(losses), ref["losses"]) <= 1e-12
    assert test_reference.off(np.array(norms), ref["norms"]) <= 1e-12
    T, G = spec.train.sequence, spec.train.global_batch
    batch = oracle.batch(tokens, T, 0, G, known.HOLE)
    _, _, grads = oracle.gradients(spec, params, *batch)
    for tensor, g in grads.items():
        want = ref[f"grad/{tensor}"]
        assert test_reference.off(known.digest(tensor, g), want) <= 1e-12, tensor
    plain = reader.load(str(path), keys_of(name)[1:])
    loss, _, _ = oracle.gradients(plain, params, *batch)
    assert abs(loss - losses[0]) > 1e-4 * losses[0]


@pytest.mark.parametrize("name", known.MEANS)
@pytest.mark.parametrize(
    "chunk", [(), ("train.head_chunk=11",)], ids=["whole", "chunks"]
)
def test_the_first_step(tmp_path: pathlib.Path, name: str, chunk: tuple[str]) -> None:
    """Loss and gradients are PyTorch's within f32's bound, also with the head in chunks, some of
    which have no target. The mean over tokens has other gradients."""
    path, params, tokens, ref = setting(name)
    chunk = tuple(key.replace("11", "20") if name == "llama" else key for key in chunk)
    keys = (*keys_of(name), IGNORE, *chunk)
    found = test_reference.shown(path, tmp_path, params, given(tokens), *keys)
    (loss,) = test_reference.losses(tmp_path)
    assert abs(loss - ref["losses"][0]) <= test_reference.LOSS * loss
    for tensor, g in found.items():
        error = test_reference.off(g, ref[f"grad/{tensor}"])
        assert error <= test_reference.GRADIENT, f"{tensor}: off by {error:.3g}"
    other = test_reference.shown(path, tmp_path, params, given(tokens), *keys[1:])
    apart = [
        test_reference.off(g, ref[f"grad/{tensor}"]) for tensor, g in other.items()
    ]
    assert max(apart) > 1e3 * test_reference.GRADIENT


@pytest.mark.parametrize("name", known.MEANS)
def test_steps(tmp_path: pathlib.Path, name: str) -> None:
    """Losses and norms of all steps are PyTorch's; errors of a step add to those of the next."""
    path, params, tokens, ref = setting(name)
    keys = (*keys_of(name), IGNORE)
    trainer.train(path, tmp_path, params, given(tokens), known.MEANS_STEPS, *keys)
    losses = test_reference.losses(tmp_path)
    assert len(losses) == known.MEANS_STEPS
    assert test_reference.off(losses, ref["losses"]) <= (
        known.MEANS_STEPS * test_reference.LOSS
    )
    lines = (tmp_path / "log.jsonl").read_text().splitlines()
    norms = [line["norm"] for line in map(json.loads, lines) if "norm" in line]
    assert test_reference.off(np.array(norms), ref["norms"]) <= (
        known.MEANS_STEPS * test_reference.GRADIENT
    )


# ---- bits

WAYS = (
    ("cluster.ranks=1", "zero.stage=0"),
    ("cluster.ranks=2", "zero.stage=1", "train.recompute=[linear]"),
    ("cluster.ranks=4", "zero.stage=2", "zero.overlap_comm=false"),
    ("cluster.ranks=2", "zero.stage=3", "train.recompute=full"),
    ("cluster.ranks=4", "zero.stage=3", WHOLE),
    ("cluster.ranks=2", "zero.stage=3", WHOLE, "train.accumulate=layers"),
    ("cluster.ranks=1", "train.offload_activations=true"),
    ("cluster.ranks=2", "zero.stage=2", "zero.offload_optimizer.device=cpu"),
    ("cluster.ranks=4", "cluster.local=2", "zero.stage=3", "zero.shard_size=2"),
    (
        *("cluster.ranks=2", "zero.stage=3", WHOLE),
        "zero.stage3_max_live_parameters=30000",
    ),
)
SOFT = ("train.label_smoothing=0.1", "train.z_loss=0.001")
LORA = ("train.lora={rank: 4, alpha: 6, dropout: 0.2}",)
RECIPES = {
    "f32": ("gpt",),
    "bf16, soft": ("llama", "train.precision=bf16", *SOFT),
    "f16, chunks": ("gpt", "train.precision=f16", "train.head_chunk=11"),
    "adapters": ("llama", "train.precision=bf16", *LORA),
    "documents": ("qwen3", *law.PACKED),
}


def runner(
    folder: pathlib.Path, holes: bool = True, steps: int = 3
) -> Callable[..., law.Result]:
    """Return a function that runs a program on tokens with or without ignored ones."""
    made = law.tokens(256, 40 * 8 * steps + 1, holes)
    trainer.write_tokens(folder / "tokens", made)
    hole = (IGNORE,) if holes else ()

    def run(
        name: str, *keys: str, options: tuple = (), kind: trainer.Kind = trainer.GCC
    ) -> law.Result:
        source = trainer.generate(law.path(name), "train.micro_batch=2", *hole, *keys)
        return law.run(
            trainer.build(source, kind),
            *("--data", folder / "tokens", "--val", folder / "tokens"),
            *("--steps", steps, *options),
            log=folder / "log",
        )

    return run


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_law(tmp_path: pathlib.Path, recipe: str) -> None:
    """All ways of spreading the work have one hash, log and validation. The mean over tokens has
    another hash, and so have other micro-batches."""
    run = runner(tmp_path)
    name, *keys = RECIPES[recipe]
    ways = WAYS if recipe == "f32" else WAYS[1::2]
    if recipe == "adapters":
        ways = [way for way in ways if "max_live" not in way[-1]]
    found = {run(name, MEANS, *keys, *way) for way in ways}
    assert len(found) == 1
    (one,) = found
    for other in (("train.loss_mean=tokens",), (MEANS, "train.micro_batch=1")):
        assert run(name, *other, *keys, *WAYS[1]).weights != one.weights


@pytest.mark.parametrize("precision", ["f32", "f16"])
def test_full_micro_batches(tmp_path: pathlib.Path, precision: str) -> None:
    """Both means have the same weights, bit for bit, if no token is ignored: the factor is 1 times
    the loss scale, and 1 / micro-batches is rows / all rows."""
    run = runner(tmp_path, holes=False)
    keys = "cluster.ranks=2", f"train.precision={precision}", "train.micro_batch=1"
    means, tokens = run("llama", MEANS, *keys), run("llama", *keys)
    assert means.weights == tokens.weights
    assert means.val == tokens.val
    for one, other in zip(means.steps, tokens.steps, strict=True):
        x, y = (json.loads(line)["loss"] for line in (one, other))
        assert abs(x - y) <= 2.0**-50 * y  # means and sums are rounded to f64


def test_validation_is_over_tokens(tmp_path: pathlib.Path) -> None:
    """Before any step the validations of both means are the same number."""
    run = runner(tmp_path)
    still = "train.optimizer.lr=0", "train.schedule={type: constant}"
    means, tokens = (run("gpt", *still, *keys) for keys in ((MEANS,), ()))
    assert means.val and means.val == tokens.val
    assert means.steps != tokens.steps


def test_no_target_at_all(tmp_path: pathlib.Path) -> None:
    """A micro-batch without a target counts in the divisor: the other one's mean is halved. A step
    without any target is skipped, as with the mean over tokens."""
    T, losses = 33, []
    keys = ("train.global_batch=2", "train.micro_batch=1", "cluster.ranks=1")
    tokens = law.tokens(256, 4 * T + 1)
    for gone in (slice(0, 0), slice(T + 1, 2 * T + 1)):
        holed = tokens.copy()
        holed[gone] = holed[2 * T + 1 :] = law.HOLE
        trainer.write_tokens(tmp_path / "tokens", holed)
        out = law.run(
            trainer.build(trainer.generate(law.path("gpt"), MEANS, IGNORE, *keys)),
            *("--data", tmp_path / "tokens", "--steps", 2),
            log=tmp_path / "log",
        )
        one, two = map(json.loads, out.steps)
        losses.append(one["loss"])
        assert two["loss"] is None and two["skipped"]
    trainer.write_tokens(tmp_path / "tokens", tokens[: T + 1])
    half = law.run(
        trainer.build(trainer.generate(law.path("gpt"), *keys)),
        *("--data", tmp_path / "tokens", "--steps", 1),
        log=tmp_path / "log",
    )
    assert losses[1] == json.loads(half.steps[0])["loss"] / 2
    assert losses[0] > 1.9 * losses[1]


def test_resume(tmp_path: pathlib.Path) -> None:
    """A run that another layout resumes has the bits of one that never stopped. A program with the
    other mean refuses to resume."""
    run = runner(tmp_path, steps=4)
    whole = run("gpt", MEANS, *WAYS[0])
    where = ("--checkpoints", tmp_path / "kept")
    run("gpt", MEANS, *WAYS[4], options=(*where, "--steps", 2))
    rest = run("gpt", MEANS, *WAYS[5], options=where)
    assert rest.weights == whole.weights
    assert rest.steps == whole.steps[2:]
    with pytest.raises(AssertionError, match="train.loss_mean"):
        run("gpt", *WAYS[5], options=(*where, "--steps", 5))


@pytest.mark.slow
def test_under_emulation(tmp_path: pathlib.Path) -> None:
    """The GPU's kernels have one hash, too, and the CPU's loss at the first step up to the order of
    f32 additions. In f16 the factor includes the loss scale."""
    run = runner(tmp_path, steps=2)
    short = ("train.global_batch=4", "train.micro_batch=1", "train.sequence=12")
    small = ("model.units[1].blocks=1",)
    for precision in ("f32", "f16"):
        keys = (MEANS, *short, *small, f"train.precision={precision}")
        first, second = (
            run("gpt", *keys, *way, kind=trainer.EMULATED)
            for way in (WAYS[0], (*WAYS[4], "cluster.ranks=2"))
        )
        cpu = run("gpt", *keys, *WAYS[0])
        assert first == second
        x, y = (json.loads(r.steps[0])["loss"] for r in (first, cpu))
        assert abs(x - y) <= {"f32": 1e-6, "f16": 1e-3}[precision] * y


# ---- the plan


def test_the_recipe() -> None:
    """The mean is a line of the recipe, which is left out at its default. Searches keep the
    micro-batch: another one is another loss."""
    path = str(law.path("gpt"))
    means, tokens = (reader.load(path, keys) for keys in ([MEANS], []))
    assert {*config.recipe(means)} - {*config.recipe(tokens)} == {
        'train.loss_mean: "micro_batch"'
    }
    keys = {s.key for s in knobs.settings(tokens, knobs.VALUES)}
    assert keys - {s.key for s in knobs.settings(means, knobs.VALUES)} == {
        "train.micro_batch"
    }


def test_another_word_is_refused() -> None:
    with pytest.raises(reader.SpecError, match="train.loss_mean: .*tokens or micro_b"):
        reader.load(str(law.path("gpt")), ["train.loss_mean=samples"])


Calls = list[plan.Call]


def changed(p: plan.Plan, name: str, change: Callable[[Calls], None]) -> plan.Plan:
    """Return the plan with other calls of a function. Launches follow them."""
    fns, launches = [], [*p.launches]
    for fn in p.fns:
        calls = [*fn.calls]
        if fn.name == name:
            change(calls)
        for n, c in enumerate(calls if fn.name == name else ()):
            shape = tuple(a for a in c.args if isinstance(a, int))
            if not any(
                (x.name, x.kernel, x.shape) == (c.launch, c.kernel, shape)
                for x in launches
            ):
                launch = plan.Launch(f"other.{len(launches)}", c.kernel, shape)
                launches.append(launch)
                calls[n] = dataclasses.replace(c, launch=launch.name)
        fns.append(dataclasses.replace(fn, calls=tuple(calls)))
    return dataclasses.replace(p, fns=tuple(fns), launches=tuple(launches))


def at(calls: Calls, *kernels: str) -> int:
    return next(n for n, c in enumerate(calls) if c.kernel in kernels)


def put(
    kernel: tuple[str, ...], operand: str, value: object
) -> Callable[[Calls], None]:
    """Return a change of an operand of a kernel's call."""

    def change(calls: Calls) -> None:
        n = at(calls, *kernel)
        args = [*calls[n].args]
        args[KERNELS[calls[n].kernel].at[operand]] = value
        calls[n] = dataclasses.replace(calls[n], args=tuple(args))

    return change


def other_sum(calls: Calls) -> None:
    n = at(calls, *LOSS_SUMS.values())
    names = [*LOSS_SUMS.values()]
    kernel = names[1 - names.index(calls[n].kernel)]
    calls[n] = dataclasses.replace(calls[n], kernel=kernel)


def late(calls: Calls) -> None:
    """Count the tokens after the loss."""
    call = calls.pop(at(calls, FACTOR))
    calls.insert(at(calls, *LOSSES) + 1, call)


def twice(calls: Calls) -> None:
    calls.insert(at(calls, FACTOR), calls[at(calls, FACTOR)])


SCALE = "f16 needs a scale to train, nothing else does"
WRONG = {
    "late": ("train", late, "no value of 8 bytes"),
    "no factor": ("train", put(LOSSES, "scale", NULL), "needs the factor"),
    "the scaler": ("train", put(LOSSES, "scale", SCALER), "needs the factor"),
    "another value": (
        "train",
        put(LOSSES, "scale", Operand("tmp", 64)),
        "overlaps another",
    ),
    "a part of the rows": ("train", put((FACTOR,), "A", 33), "counts 33 of 66 rows"),
    "with the scaler": ("train", put((FACTOR,), "scale", SCALER), SCALE),
    "without the scaler": ("train", put((FACTOR,), "scale", NULL), SCALE),
    "of nothing": ("train", put((FACTOR,), "all", NULL), "a null operand"),
    "the sum": ("train", other_sum, "the mean is over micro_batch"),
    "evaluations": ("eval", other_sum, "the mean is over tokens"),
    "a factor that nobody reads": ("train", twice, "what nobody has read"),
}


def proven(p: plan.Plan) -> None:
    check.functions(p, check.units(p))


@pytest.mark.parametrize("precision", ["f32", "f16"])
def test_what_the_checker_refuses(precision: str) -> None:
    """A loss is scaled by the factor of its own micro-batch, made from all its targets before it,
    and its sum is by the head's mean."""
    keys = (f"train.precision={precision}", "train.micro_batch=2")
    p = search.find(reader.load(str(law.path("gpt")), [MEANS, *keys])).plan
    proven(p)
    own = {"f32": "without the scaler", "f16": "with the scaler"}[precision]
    proven(changed(p, "train.head", WRONG[own][1]))
    for what, (body, change, said) in WRONG.items():
        if what == own:
            continue
        with pytest.raises(check.CheckError, match=said):
            proven(changed(p, f"{body}.head", change))
    for mean, keys in (("tokens", (MEANS,)), ("micro_batch", ()), ("words", ())):
        p = search.find(reader.load(str(law.path("gpt")), keys)).plan
        head = dataclasses.replace(p.head, loss_mean=mean)
        with pytest.raises(check.CheckError, match="mean|factor|scale"):
            check.check(dataclasses.replace(p, head=head))
