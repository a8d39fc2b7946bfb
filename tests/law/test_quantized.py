"""test_quantized.py -- tests a quantized base of LoRA adapters: its values, and one hash however
the work is spread."""

import pathlib

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from zg.read import spec as reader

from tests.lib import law, oracle, quantized, trainer
from tests.reference import known

# Parts of a linear that fill chunks of nf4, and a down_proj that does not.
WIDE = (
    "model.width=128",
    "model.units[1].blocks=2",
    "model.units[1].ops[0].residual[1].attention.kv_heads=4",
    "model.units[1].ops[1].residual[1].linear.out=[256, 256]",
    "model.units[1].ops[1].residual[3].linear.out=128",
    "train.sequence=12",
)
MATCH = "match: [q_proj, down_proj]"


def keys(format_: str, *more: str) -> tuple[str, ...]:
    base = f", base: {format_}" if format_ else ""
    lora = f"train.lora={{rank: 4, alpha: 6, {MATCH}{base}}}"
    return (*WIDE, lora, "train.micro_batch=1", *more)


def folder(at: pathlib.Path) -> oracle.Arrays:
    """Write a base of bf16's values, and return it."""
    spec = reader.load(str(law.path("llama")), keys(""))
    found = {}
    for name, shape in oracle.shapes(spec).items():
        if ".lora_" not in name:
            x = np.float32(known.weight(name, shape, known.is_norm_weight(name)))
            found[name] = (x.view(np.uint32) & 0xFFFF0000).view(np.float32)
    at.mkdir()
    save_file(found, at / "model.safetensors")
    return found


def in_few_bits(name: str) -> bool:
    return ".layers." in name and "norm" not in name


@pytest.mark.parametrize("format_", ("int8", "nf4"))
@pytest.mark.parametrize("precision", ("f32", "bf16"))
def test_values(tmp_path: pathlib.Path, format_: str, precision: str) -> None:
    """A quantized base trains adapters to the bits of a plain base that has its values."""
    base = folder(tmp_path / "base")
    plain = {
        n: quantized.weights(x, format_) if in_few_bits(n) else x
        for n, x in base.items()
    }
    (tmp_path / "plain").mkdir()
    save_file(plain, tmp_path / "plain" / "model.safetensors")
    trainer.write_tokens(tmp_path / "tokens", law.tokens(251, 12 * 8 * 3 + 1))
    found = []
    for name, stored in (("base", format_), ("plain", ""), ("base", "")):
        source = trainer.generate(
            law.path("llama"),
            *keys(stored, f"train.precision={precision}", "cluster.ranks=1"),
        )
        out = tmp_path / f"{name}-{stored}"
        law.run(
            trainer.build(source),
            *("--data", tmp_path / "tokens", "--steps", 3),
            *("--load", tmp_path / name, "--save", out),
            log=tmp_path / "log",
        )
        found.append(load_file(out / "adapter_model.safetensors"))
    few, same, other = found
    assert all(np.array_equal(few[n], same[n]) for n in few)
    assert not all(np.array_equal(few[n], other[n]) for n in few)
