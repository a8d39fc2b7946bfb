"""test_rows_by_head.py -- tests files whose rows of q, k and v are by head, as GPT-NeoX has them. The
same model with another order in its files (Phi-3's) has the same bits in memory, so every file of
the one is the other's with its rows in another order."""

from __future__ import annotations

import pathlib

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.lib import law, trainer

STEPS, HEADS = 3, 4
ATTENTION = "model.units[1].ops[0].residual[1].attention"
MODEL = (f"{ATTENTION}.kv_heads={HEADS}", f"{ATTENTION}.bias=true")
NAMES = {"neox": ("query_key_value", "dense"), "phi3": ("qkv_proj", "o_proj")}
WAYS = {
    "one rank": ("cluster.ranks=1", "zero.stage=0"),
    "shards that end within a head": (
        "cluster.ranks=4",
        "zero.stage=3",
        "zero.stage3_param_persistence_threshold=0",
        "train.precision=bf16",
    ),
}
LORA = "train.lora={{rank: 4, alpha: 6, match: [{}]{}}}"
Weights = dict[str, np.ndarray]


def program(names: str, *keys: str) -> pathlib.Path:
    every = (f"model.names={names}", *MODEL, *keys)
    return trainer.build(trainer.generate(law.path("llama"), *every))


def adapted(names: str, base: str, *keys: str) -> pathlib.Path:
    return program(names, LORA.format(NAMES[names][0], base), *keys)


def by_head(found: Weights) -> Weights:
    """Return Phi-3's tensors under GPT-NeoX's names and in its order."""
    out = {}
    for name, x in found.items():
        if "qkv_proj" in name and "lora_A" not in name:
            rows = x.reshape(3, HEADS, -1, *x.shape[1:]).swapaxes(0, 1)
            x = np.ascontiguousarray(rows).reshape(x.shape)
        for old, new in zip(NAMES["phi3"], NAMES["neox"], strict=True):
            name = name.replace(old, new)
        out[
            name.replace("base_model.model.model.", "base_model.model.gpt_neox.model.")
        ] = x
    return out


def same(a: Weights, b: Weights) -> bool:
    return a.keys() == b.keys() and all(a[n].tobytes() == b[n].tobytes() for n in a)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Return a folder with tokens and the model in both orders."""
    made = tmp_path_factory.mktemp("rows")
    trainer.write_tokens(made / "tokens", law.tokens(256, 40 * 8 * 4 + 1))
    trainer.sh(
        program("phi3", *WAYS["one rank"]), "--steps", 0, "--save", made / "phi3"
    )
    (made / "neox").mkdir()
    first = by_head(load_file(made / "phi3" / "model.safetensors"))
    save_file(first, made / "neox" / "model.safetensors")
    return made


def run(binary: pathlib.Path, folder: pathlib.Path, names: str, *more: object) -> str:
    """Return the hash after a run on a folder's model."""
    given = ("--data", folder / "tokens", "--load", folder / names)
    return law.run(binary, *given, *more, log=folder / "log").weights


@pytest.mark.parametrize("way", WAYS)
def test_weights(folder: pathlib.Path, tmp_path: pathlib.Path, way: str) -> None:
    found = {}
    for names in NAMES:
        save = ("--steps", STEPS, "--save", tmp_path / names)
        found[names] = run(program(names, *WAYS[way]), folder, names, *save)
    assert found["neox"] == found["phi3"]
    files = {n: load_file(tmp_path / n / "model.safetensors") for n in NAMES}
    assert same(files["neox"], by_head(files["phi3"]))
    name = "model.layers.0.self_attn.{}.weight"
    theirs, own = name.format("qkv_proj"), name.format("query_key_value")
    assert not np.array_equal(files["phi3"][theirs], files["neox"][own])


SLICES = (
    f"{ATTENTION}.head_dim=32",
    f"{ATTENTION}.bias=false",
    "zero.stage3_max_live_parameters=20000",
    "zero.stage3_param_persistence_threshold=64",
)


def test_slices(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """A weight that is gathered in slices, which end within the keys."""
    found, files = [], {}
    for names in NAMES:
        binary = program(names, *SLICES)
        given = ("--data", folder / "tokens")
        for load in ((), ("--load", tmp_path / names)):
            steps = ("--steps", 0 if load else STEPS, "--save", tmp_path / names)
            more = (*given, *steps, *load)
            found.append(law.run(binary, *more, log=tmp_path / "log").weights)
        files[names] = load_file(tmp_path / names / "model.safetensors")
    assert len({*found}) == 1
    assert same(files["neox"], by_head(files["phi3"]))


def test_a_checkpoint(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """A run goes on from a checkpoint of another layout, whose files have the order of a save."""
    one, shards = (program("neox", *WAYS[way][:3]) for way in WAYS)
    keeps = ("--checkpoints", tmp_path / "kept")
    whole = run(one, folder, "neox", "--steps", STEPS, "--save", tmp_path / "saved")
    run(one, folder, "neox", "--steps", STEPS - 1, *keeps)
    given = ("--data", folder / "tokens", "--steps", STEPS, *keeps)
    assert law.run(shards, *given, log=tmp_path / "log").weights == whole
    (last,) = (tmp_path / "kept").glob(f"*{STEPS}*/model.safetensors")
    assert same(load_file(last), load_file(tmp_path / "saved" / "model.safetensors"))


@pytest.mark.parametrize("base", ["", ", base: int8"])
@pytest.mark.parametrize("way", WAYS)
def test_adapters(
    folder: pathlib.Path, tmp_path: pathlib.Path, way: str, base: str
) -> None:
    """Adapters are saved, loaded and merged in the order of their linear, also over a quantized
    base."""
    found: dict[str, list[str]] = {}
    for names in NAMES:
        binary = adapted(names, base, *WAYS[way])
        saved, merged = (tmp_path / f"{names}{end}" for end in ("", "-merged"))
        after = run(binary, folder, names, "--steps", STEPS, "--save", saved)
        again = ("--steps", 0, "--adapter", saved, "--merge", "--save", merged)
        found[names] = [after, run(binary, folder, names, *again)]
        assert len({*found[names]}) == 1
    assert found["neox"] == found["phi3"]
    for file in ("{}/adapter_model", "{}-merged/model"):
        of = {n: load_file(tmp_path / f"{file.format(n)}.safetensors") for n in NAMES}
        assert same(of["neox"], by_head(of["phi3"]))
