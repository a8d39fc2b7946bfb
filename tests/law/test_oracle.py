"""test_oracle.py -- tests the float64 evaluator of the other tests against PyTorch's numbers
(tests/reference), and against finite differences of its own loss on drawn models."""

import math
import pathlib

import numpy as np
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from zg.read import spec as reader

from tests.lib import drawn, oracle
from tests.reference import known

ROOT = pathlib.Path(__file__).resolve().parents[2]
FAMILIES = ["gpt", "llama", "qwen3"]

# Both sides are float64 with sums of at most a few thousand terms, so they are about 1e-15 of a
# tensor's largest element apart if all is well. A wrong formula is off by 1e-6 or more.
CLOSE = 1e-12


def reference(name: str) -> dict[str, np.ndarray]:
    with np.load(ROOT / "tests" / "reference" / f"{name}.npz") as file:
        return dict(file)


def start(spec) -> oracle.Arrays:
    return {
        name: known.weight(name, shape, known.is_norm_weight(name))
        for name, shape in oracle.shapes(spec).items()
    }


def setting(name: str):
    """Return the spec, initial weights, tokens and reference of a tiny model."""
    spec = reader.load(str(ROOT / "model_specs" / f"{name}-tiny.yaml"))
    tokens = known.stream(name, spec.train.sequence, spec.model.vocab)
    return spec, start(spec), tokens, reference(name)


def assert_close(
    found: np.ndarray, expected: np.ndarray, bound: float, what: str
) -> None:
    error = np.abs(found - expected).max() / max(np.abs(expected).max(), 1e-300)
    assert error <= bound, f"{what}: off by {error:.3g} of the largest element"


@pytest.mark.parametrize("name", FAMILIES)
def test_shapes(name: str) -> None:
    spec, _, _, ref = setting(name)
    expected = {n[6:]: tuple(x) for n, x in ref.items() if n.startswith("shape/")}
    assert oracle.shapes(spec) == expected


@pytest.mark.parametrize("case", ["plain", "ignored"])
@pytest.mark.parametrize("name", FAMILIES)
def test_gradients(name: str, case: str) -> None:
    spec, params, tokens, ref = setting(name)
    ignore = known.HOLE if case == "ignored" else -1
    now = oracle.batch(tokens, spec.train.sequence, 0, spec.train.global_batch, ignore)
    loss, valid, grads = oracle.gradients(spec, params, *now)
    assert (valid < now[1].size) == (case == "ignored")
    assert_close(loss, ref[f"{case}/loss"], CLOSE, "loss")
    for tensor, g in grads.items():
        expected = ref[f"{case}/grad/{tensor}"]
        assert_close(known.digest(tensor, g), expected, CLOSE, tensor)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_twenty_steps(name: str) -> None:
    spec, params, tokens, ref = setting(name)
    last, losses, norms = oracle.train(spec, params, tokens, known.STEPS)
    assert_close(np.array(losses), ref["losses"], CLOSE, "losses")
    assert_close(np.array(norms), ref["norms"], CLOSE, "norms")
    for tensor, x in last.items():
        # A key's bias moves every score of a row alike, so its gradient is zero except for rounding
        # (1e-17). Adam divides that by eps = 1e-8 and moves the bias by about 1e-9 of a step.
        bound = 1e-9 if tensor.endswith("c_attn.bias") else CLOSE
        assert_close(known.digest(tensor, x), ref[f"last/{tensor}"], bound, tensor)


def test_a_wrong_formula_shows() -> None:
    """The bounds above notice an eps of 1.1e-5 in a LayerNorm."""
    spec, params, tokens, ref = setting("gpt")
    plain = oracle.Net.layernorm
    net = oracle.Net(spec, params)
    net.layernorm = lambda x, name, eps, bias: plain(net, x, name, 1.1 * eps, bias)
    net.run(*oracle.batch(tokens, spec.train.sequence, 0, spec.train.global_batch))
    off = [
        np.abs(known.digest(n, g) - ref[f"plain/grad/{n}"]).max() / np.abs(g).max()
        for n, g in net.grads.items()
    ]
    assert max(off) > 100 * CLOSE


@pytest.mark.slow
@settings(
    max_examples=40,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(mapping=drawn.specs())
def test_finite_differences(tmp_path: pathlib.Path, mapping: drawn.Mapping) -> None:
    """Every tensor's gradient along a random direction matches the finite difference of training's
    loss."""
    path = tmp_path / "spec.yaml"
    path.write_text(yaml.safe_dump(mapping))
    spec = reader.load(str(path))
    params = start(spec)
    T, rng = spec.train.sequence, np.random.Generator(np.random.Philox(7))
    tokens = rng.integers(0, spec.model.vocab, (3, T))
    targets = rng.integers(-1, spec.model.vocab, (3, T))
    _, _, grads = oracle.gradients(spec, params, tokens, targets)
    h = 1e-6
    for name, x in params.items():
        d = rng.standard_normal(x.shape)
        high, low = (
            oracle.gradients(spec, {**params, name: x + s * h * d}, tokens, targets)[0]
            for s in (1, -1)
        )
        # Error of the difference: the loss's rounding 1e-14/h, and h^2 times a third derivative
        # (about 1e5 if queries of a single number are normalized).
        assert math.isclose(
            (high - low) / (2 * h),
            float((grads[name] * d).sum()),
            rel_tol=1e-5,
            abs_tol=1e-6,
        ), name
