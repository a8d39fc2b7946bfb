"""test_reference.py -- compares the trained program with PyTorch's float64 numbers
(tests/reference), by weights loaded and saved: loss, every gradient, and 20 AdamW steps."""

import json
import pathlib
from collections.abc import Callable

import numpy as np
import pytest
from zg.read import spec as reader

from tests.lib import oracle, trainer
from tests.reference import known

FAMILIES = ["gpt", "llama", "qwen3"]
CASES = ["plain", "ignored"]
HOLE = 65535  # token of a uint16 file that stands for none

# One AdamW step from zero moments, without decay and clipping, moves a weight by
# lr * g / (|g| + eps): with eps = 1 and lr = 512 the saved weights show g. A weight's own rounding
# (2^-24 of at most 1.25 + 512 |g|) then disturbs g by less than 1.5e-10 + 2^-24 |g|.
RATE = 512.0
SHOW = [
    f"train.optimizer.lr={RATE}",
    "train.optimizer.eps=1.0",
    "train.optimizer.weight_decay=0.0",
    "train.optimizer.clip=0.0",
    "train.schedule.type=constant",
    "train.schedule.warmup=0",
    "train.schedule.min_lr=0.0",
]

# float32 gradients. An element is a sum over 264 or 320 tokens of products that went through about
# 30 chains of at most 240 roundings of 2^-24 each. Random signs give sqrt(30 * 240) * 2^-24 = 5e-6
# of the largest element (a third of that is measured); equal signs would give 4e-4.
GRADIENT = 5e-6
# bf16 gradients. A number is stored some 80 times on its way, each time with a mean error of 2^-9 /
# sqrt(3), so a tensor is off by sqrt(80) times that in the mean, 1 %. Queries and keys get
# differences of near numbers and are off by 3 %, and so are the gradients computed from theirs.
BF16 = 0.05
# Mean over tokens of losses of about 6, each off by 30 roundings of 2^-24
LOSS = 2e-7


def setting(
    name: str,
) -> tuple[pathlib.Path, oracle.Arrays, np.ndarray, dict[str, np.ndarray]]:
    """Return the path of a tiny spec, initial weights, tokens and the reference."""
    path = trainer.ROOT / "model_specs" / f"{name}-tiny.yaml"
    spec = reader.load(str(path))
    params = {
        tensor: known.weight(tensor, shape, known.is_norm_weight(tensor))
        for tensor, shape in oracle.shapes(spec).items()
    }
    with np.load(trainer.ROOT / "tests" / "reference" / f"{name}.npz") as file:
        return (
            path,
            params,
            known.stream(name, spec.train.sequence, spec.model.vocab),
            dict(file),
        )


def losses(folder: pathlib.Path) -> np.ndarray:
    lines = [
        json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()
    ]
    return np.array(
        [line["loss"] for line in lines if "step" in line and "loss" in line]
    )


def off(found: np.ndarray, expected: np.ndarray) -> float:
    """Return the largest difference over the largest element."""
    return float(np.abs(found - expected).max() / max(np.abs(expected).max(), 1e-30))


def apart(found: np.ndarray, expected: np.ndarray) -> float:
    """Return the norm of the difference over the norm."""
    return float(
        np.linalg.norm(found - expected) / max(np.linalg.norm(expected), 1e-30)
    )


def shown(
    path: pathlib.Path,
    folder: pathlib.Path,
    params: oracle.Arrays,
    tokens: np.ndarray,
    *keys: str,
) -> oracle.Arrays:
    """Return digests of the gradients of the first step."""
    after = trainer.train(path, folder, params, tokens, 1, *SHOW, *keys)
    assert after.keys() == params.keys()
    moved = {name: (p - np.float64(after[name])) / RATE for name, p in params.items()}
    return {name: known.digest(name, u / (1 - np.abs(u))) for name, u in moved.items()}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", FAMILIES)
def test_gradients(tmp_path: pathlib.Path, name: str, case: str) -> None:
    path, params, tokens, ref = setting(name)
    if case == "ignored":
        tokens = np.where(tokens == known.HOLE, HOLE, tokens)
    found = shown(path, tmp_path, params, tokens, f"data.ignore={HOLE}")
    assert off(losses(tmp_path), ref[f"{case}/loss"]) <= LOSS
    for tensor, g in found.items():
        error = off(g, ref[f"{case}/grad/{tensor}"])
        assert error <= GRADIENT, f"{tensor}: off by {error:.3g} of the largest element"


@pytest.mark.parametrize("name", FAMILIES)
def test_gradients_in_bf16(tmp_path: pathlib.Path, name: str) -> None:
    path, params, tokens, ref = setting(name)
    found = shown(path, tmp_path, params, tokens, "train.precision=bf16")
    # the loss: logits of about 1 are off by 1 % at random, averaged over 264 tokens and more
    assert off(losses(tmp_path), ref["plain/loss"]) <= 1e-3
    errors = {
        tensor: apart(g, ref[f"plain/grad/{tensor}"]) for tensor, g in found.items()
    }
    assert max(errors.values()) <= BF16, max(errors, key=errors.get)
    assert min(errors.values()) >= 2.0**-11, "this was not computed in bf16"


def with_errors(rng: np.random.Generator) -> Callable:
    """Return a function that adds errors like float32's to gradients: up to GRADIENT of the largest
    element in the row. Exact zeros (the row of a token that never came) stay zero."""

    def disturb(g: np.ndarray) -> np.ndarray:
        row = np.abs(g).max(-1, keepdims=True) * (g != 0)
        return g + GRADIENT * row * rng.uniform(-1, 1, g.shape)

    def gradients(*args, **named) -> tuple[float, int, oracle.Arrays]:
        loss, valid, grads = oracle.gradients(*args, **named)
        return loss, valid, {name: disturb(g) for name, g in grads.items()}

    return gradients


def without_key_bias(name: str, x: np.ndarray) -> np.ndarray:
    """Drop a key's bias before comparisons. It moves all scores of a row alike, so its gradient is
    zero except for rounding, and Adam turns that into steps of any size up to lr."""
    return (
        np.delete(x, np.s_[x.size // 3 : x.size // 3 * 2])
        if name.endswith("c_attn.bias")
        else x
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_twenty_steps(tmp_path: pathlib.Path, name: str) -> None:
    """Twenty steps stay within the bound that errors like float32's give in the evaluator's own
    run. Adam divides by the gradient's size, so errors in small gradients count as much as in large
    ones."""
    path, params, tokens, ref = setting(name)
    after = trainer.train(path, tmp_path, params, tokens, known.STEPS)
    spec, rng = (
        reader.load(str(path)),
        np.random.Generator(np.random.Philox(3)),
    )
    exact, _, _ = oracle.train(spec, params, tokens, known.STEPS)
    shaken, _, _ = oracle.train(
        spec, params, tokens, known.STEPS, gradients=with_errors(rng)
    )
    assert off(losses(tmp_path), ref["losses"]) <= LOSS
    for tensor, x in exact.items():
        found, expected, other = (
            without_key_bias(tensor, known.digest(tensor, y))
            for y in (after[tensor], x, shaken[tensor])
        )
        reference = without_key_bias(tensor, ref[f"last/{tensor}"])
        moved = np.abs(
            without_key_bias(tensor, known.digest(tensor, x - params[tensor]))
        ).max()
        # twice one drawing of the errors; a step rounds a weight twice (decay, move)
        rounded = 2 * known.STEPS * 2.0**-24 * np.abs(expected).max()
        bound = 2 * np.abs(other - expected).max() + rounded
        assert bound <= 0.01 * moved, f"{tensor}: the bound {bound:.3g} says nothing"
        error = np.abs(found - reference).max()
        assert error <= bound, f"{tensor}: off by {error:.3g}, bound {bound:.3g}"


@pytest.mark.parametrize("name", FAMILIES)
def test_twenty_steps_in_bf16(tmp_path: pathlib.Path, name: str) -> None:
    """The way of a tensor is off by at most twice the error of its gradients, because Adam counts
    errors of small gradients as much as of large ones."""
    path, params, tokens, ref = setting(name)
    after = trainer.train(
        path, tmp_path, params, tokens, known.STEPS, "train.precision=bf16"
    )
    assert off(losses(tmp_path), ref["losses"]) <= 1e-3
    for tensor, x in after.items():
        start = known.digest(tensor, params[tensor])
        way, expected = (
            without_key_bias(tensor, end - start)
            for end in (known.digest(tensor, x), ref[f"last/{tensor}"])
        )
        error = apart(way, expected)
        assert error <= 2 * BF16, f"{tensor}: off by {error:.3g} of its way"
