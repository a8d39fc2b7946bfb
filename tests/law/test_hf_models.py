"""test_hf_models.py -- compares models of gen/zgen --from with transformers' float64 numbers for
the same config.json (tests/reference/hf.py): loss, every gradient, and the losses of 10 AdamW
steps."""

from __future__ import annotations

import pathlib

import numpy as np
import pytest
from zg.read import spec as reader

from tests.law import test_reference as reference
from tests.lib import oracle, trainer
from tests.reference import known

HERE = trainer.ROOT / "tests" / "reference" / "hf"
FAMILIES = sorted(path.stem for path in HERE.glob("*.npz"))
STEPS = 10
KEYS = (
    "train.sequence=40",
    "train.global_batch=8",
    "train.optimizer={type: AdamW, lr: 1.0e-3, betas: [0.9, 0.95], weight_decay: 0.1}",
)


def setting(
    name: str, folder: pathlib.Path
) -> tuple[pathlib.Path, oracle.Arrays, np.ndarray, dict[str, np.ndarray]]:
    """Return a spec as --emit spec writes it, initial weights, tokens and the reference."""
    path = folder / "spec.yaml"
    path.write_text(reader.text(None, KEYS, None, str(HERE / name)))
    params = {
        tensor: known.of_model(name, tensor, shape)
        for tensor, shape in oracle.shapes(reader.load(str(path))).items()
    }
    tokens = known.stream(f"hf {name}", 40, 256)
    with np.load(HERE / f"{name}.npz") as file:
        return path, params, tokens, dict(file)


@pytest.mark.parametrize("name", FAMILIES)
def test_gradients(tmp_path: pathlib.Path, name: str) -> None:
    path, params, tokens, ref = setting(name, tmp_path)
    found = reference.shown(path, tmp_path, params, tokens)
    error = reference.off(reference.losses(tmp_path), ref["loss"])
    assert error <= reference.LOSS
    wanted = {key.removeprefix("grad/") for key in ref if "/" in key}
    assert found.keys() == wanted
    for tensor, g in found.items():
        error = reference.off(g, ref[f"grad/{tensor}"])
        assert error <= reference.GRADIENT, f"{tensor}: off by {error:.3g}"


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(
    "spread", [(), ("zero.stage=3", "cluster.ranks=2", "train.recompute=full")]
)
def test_ten_steps(tmp_path: pathlib.Path, name: str, spread: tuple[str, ...]) -> None:
    path, params, tokens, ref = setting(name, tmp_path)
    trainer.train(path, tmp_path, params, tokens, STEPS, *spread)
    error = reference.off(reference.losses(tmp_path), ref["losses"])
    # Weights are rounded twice a step, and Adam divides errors of small gradients by the gradients.
    # The bound is twice the error of forward's roundings.
    assert error <= 2 * reference.LOSS
