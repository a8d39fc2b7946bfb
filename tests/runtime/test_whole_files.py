"""test_whole_files.py -- tests folders of adapters with modules that are trained whole, PEFT's
modules_to_save: saved, loaded, merged, resumed, and read and written by PEFT 0.21.2
(tests/reference/whole.py)."""

import json
import os
import pathlib
from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.lib import law, program, trainer
from tests.reference import known

STEPS = 3
HEAD = "base_model.model."
EMBEDDING, LOGITS = f"{HEAD}model.embed_tokens.weight", f"{HEAD}lm_head.weight"
LORA = "train.lora={{rank: 4, alpha: 6, whole: {}}}"
# The head of qwen3 is tied to its embedding: its two names are one parameter.
FAMILIES = {"llama": "[embed_tokens, lm_head, model.norm]", "qwen3": "[embed_tokens]"}
SAVED = {
    "llama": {"modules_to_save": ["embed_tokens", "lm_head", "model.norm"]},
    "qwen3": {
        "modules_to_save": ["embed_tokens", "lm_head"],
        "ensure_weight_tying": True,
    },
}
NORM = f"{HEAD}model.norm.weight"
SHAPES = {
    "llama": {EMBEDDING: (256, 64), LOGITS: (256, 64), NORM: (64,)},
    "qwen3": {EMBEDDING: (256, 64), LOGITS: (256, 64)},
}
WHOLE = "zero.stage3_param_persistence_threshold=0"
WAYS = {
    "one": ("cluster.ranks=1", "zero.stage=0"),
    "three": ("cluster.ranks=4", "zero.stage=3", WHOLE),
}
REFERENCE = trainer.ROOT / "tests" / "reference" / "whole.npz"


def built(family: str, way: str, *keys: str) -> pathlib.Path:
    every = (LORA.format(FAMILIES[family]), *WAYS[way], *keys)
    return trainer.build(trainer.generate(law.path(family), *every))


def plain(family: str) -> pathlib.Path:
    return trainer.build(trainer.generate(law.path(family)))


@pytest.fixture(scope="module", params=FAMILIES)
def folder(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> pathlib.Path:
    """Return a family's folder: tokens, `base` of known weights, and `new`, adapters and whole
    modules after STEPS steps."""
    made = tmp_path_factory.mktemp("whole") / request.param
    made.mkdir()
    trainer.write_tokens(made / "tokens", known.stream("whole", 40, 256))
    trainer.sh(plain(request.param), "--steps", 0, "--save", made / "base")
    shapes = load_file(made / "base" / "model.safetensors")
    save_file(weights(shapes), made / "base" / "model.safetensors", {"format": "pt"})
    run(built(request.param, "three"), made, STEPS, "--save", made / "new")
    return made


def weights(like: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {
        n: np.float32(known.weight(n, x.shape, known.is_norm_weight(n)))
        for n, x in like.items()
    }


def run(binary: pathlib.Path, folder: pathlib.Path, steps: int, *more: object) -> str:
    """Return the hash of a run on the base."""
    given = ("--data", folder / "tokens", "--load", folder / "base")
    log = folder / "log"
    return law.run(binary, *given, "--steps", steps, *more, log=log).weights


def loss(
    binary: pathlib.Path, folder: pathlib.Path, base: pathlib.Path, *more: object
) -> float:
    given = ("--data", folder / "tokens", "--load", base, "--steps", 0)
    val = ("--val", folder / "tokens", "--val-tokens", 40 * 8)
    result = law.run(binary, *given, *val, *more, log=folder / "log")
    return json.loads(result.val)["val_loss"]


def tensors(path: pathlib.Path) -> dict[str, np.ndarray]:
    return load_file(path / "adapter_model.safetensors")


def test_a_folder_is_pefts(folder: pathlib.Path) -> None:
    """The folder has adapters and whole modules under PEFT's names; the head of a tied model comes
    once more under its own."""
    family, new = folder.name, tensors(folder / "new")
    said = json.loads((folder / "new" / "adapter_config.json").read_text())
    assert {key: said[key] for key in SAVED[family]} == SAVED[family]
    assert ("ensure_weight_tying" in said) == (family == "qwen3")
    kept = {n: x for n, x in new.items() if "lora_" not in n}
    assert {n: x.shape for n, x in kept.items()} == SHAPES[family]
    base = load_file(folder / "base" / "model.safetensors")
    for name, x in kept.items():
        before = base.get(name.removeprefix(HEAD), base["model.embed_tokens.weight"])
        assert x.dtype == np.float32 and (x != before).any()
    assert (new[EMBEDDING] == new[LOGITS]).all() == (family == "qwen3")


def test_out_and_in(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """A saved folder loads to the same weights, whoever reads or wrote it."""
    one, three = built(folder.name, "one"), built(folder.name, "three")
    after = run(one, folder, STEPS, "--save", tmp_path)
    for made in (tmp_path, folder / "new"):
        for binary in (one, three):
            assert run(binary, folder, 0, "--adapter", made) == after
    one_, other = tensors(tmp_path), tensors(folder / "new")
    assert one_.keys() == other.keys()
    assert all((one_[n] == x).all() for n, x in other.items())


@pytest.mark.parametrize("way", WAYS)
def test_merged(folder: pathlib.Path, tmp_path: pathlib.Path, way: str) -> None:
    """Merged weights have the whole modules as they were trained, and the loss of the parts."""
    given = ("--adapter", folder / "new", "--save", tmp_path, "--merge")
    run(built(folder.name, way), folder, 0, *given)
    base = load_file(folder / "base" / "model.safetensors")
    made, new = load_file(tmp_path / "model.safetensors"), tensors(folder / "new")
    assert made.keys() == base.keys()
    for name, x in made.items():
        if f"{HEAD}{name}" in new:
            assert (x == new[f"{HEAD}{name}"]).all()
        elif "q_proj" not in name and "v_proj" not in name:
            assert (x == base[name]).all()
    parts = loss(built(folder.name, way), folder, folder / "base", *given[:2])
    whole = loss(plain(folder.name), folder, tmp_path)
    assert abs(whole - parts) <= 1e-6
    assert abs(loss(plain(folder.name), folder, folder / "base") - parts) > 1e-4


def test_a_base_in_few_bits_is_merged(
    folder: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """Over a quantized base the whole modules are floats, as trained, and the others are those of
    the folder with the adapters."""
    lora = LORA.format(FAMILIES[folder.name] + ", base: nf4")
    binary = built(folder.name, "three", lora)
    given = ("--save", tmp_path / "new")
    run(binary, folder, STEPS, *given)
    given = ("--adapter", tmp_path / "new", "--save", tmp_path / "made", "--merge")
    run(binary, folder, 0, *given)
    made, new = (
        load_file(tmp_path / "made" / "model.safetensors"),
        tensors(tmp_path / "new"),
    )
    base = load_file(folder / "base" / "model.safetensors")
    name = "model.embed_tokens.weight"
    assert (made[name] == new[EMBEDDING]).all() and (made[name] != base[name]).any()
    name = "model.layers.0.mlp.up_proj.weight"
    assert (made[name] == base[name]).all()


def test_a_run_goes_on(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """A run resumes from a checkpoint of another way with the bits of one that never stopped."""
    kept = ("--checkpoints", tmp_path)
    one, three = built(folder.name, "one"), built(folder.name, "three")
    whole, first = run(one, folder, STEPS), run(three, folder, 2, *kept)
    given = ("--data", folder / "tokens", "--steps", STEPS, *kept)
    after = law.run(one, *given, log=folder / "log").weights
    assert after == whole != first


# ---- PEFT


def test_pefts_folder(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """A folder that PEFT wrote loads, with PEFT's loss in float64, and has the names of ours; and
    our folder has in PEFT the loss that it has here."""
    family = folder.name
    with np.load(REFERENCE) as file:
        found = {k.removeprefix(family): file[k] for k in file if k.startswith(family)}
    (tmp_path / "adapter_config.json").write_text(str(found["_config"]))
    new = tensors(folder / "new")
    assert [str(n) for n in found["_names"]] == sorted(new)
    own = weights(new)
    if family == "qwen3":
        own[LOGITS] = own[EMBEDDING]
    save_file(own, tmp_path / "adapter_model.safetensors")
    binary = built(family, "three")
    # mean losses of about 6 over 320 tokens in f32: see test_reference.LOSS
    for path, name in ((tmp_path, "_own"), (folder / "new", "_ours")):
        here = loss(binary, folder, folder / "base", "--adapter", path)
        assert abs(here - float(found[name])) <= 1e-6 * here
    assert abs(float(found["_own"]) - float(found["_ours"])) > 1e-2


def said_of(
    folder: pathlib.Path,
    tmp_path: pathlib.Path,
    change: dict[str, object],
    more: Mapping[str, np.ndarray | None] = MappingProxyType({}),
) -> tuple[int, str]:
    """Return code and errors of loading the folder with other keys and tensors."""
    new = json.loads((folder / "new" / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps({**new, **change}))
    made = {**tensors(folder / "new"), **more}
    made = {n: x for n, x in made.items() if x is not None}
    save_file(made, tmp_path / "adapter_model.safetensors")
    given = ("--load", folder / "base", "--steps", 0, "--adapter", tmp_path)
    done = program.run(built(folder.name, "one"), *given)
    return done.code, done.err


APART = "without ensure_weight_tying PEFT trains a tied weight apart"


@pytest.mark.parametrize(
    "folder,change,why",
    [
        ("llama", {}, ""),
        ("llama", {"modules_to_save": ["model.embed_tokens", "head", "model.norm"]}, ""),
        ("llama", {"modules_to_save": ["embed_tokens", "lm_head"]}, "modules_to_save: does not list model.norm, which the program trains whole (train.lora.whole)"),
        ("llama", {"modules_to_save": None}, "does not list model.embed_tokens, which the program trains whole"),
        ("llama", {"modules_to_save": ["embed_tokens", "lm_head", "norm"]}, "modules_to_save: lists model.layers.0.input_layernorm, which the program does not train whole"),
        ("llama", {"modules_to_save": "lm_head"}, 'modules_to_save: "lm_head" is not supported; allowed: '),
        ("llama", {"modules_to_save": ["embed_tokens", "lm_head", "model.norm", "score"]}, "modules_to_save lists a name that is not in the model: score"),
        ("qwen3", {}, ""),
        ("qwen3", {"modules_to_save": ["lm_head"]}, ""),
        ("qwen3", {"modules_to_save": ["model.embed_tokens"]}, ""),
        ("qwen3", {"ensure_weight_tying": False}, ""),
        ("qwen3", {"ensure_weight_tying": False, "modules_to_save": ["embed_tokens"]}, f"does not list lm_head, which the program trains whole ({APART})"),
        ("qwen3", {"ensure_weight_tying": None, "modules_to_save": ["lm_head"]}, f"does not list model.embed_tokens, which the program trains whole ({APART})"),
        ("qwen3", {"modules_to_save": []}, "does not list model.embed_tokens, which the program trains whole (train.lora.whole)"),
    ],
    indirect=["folder"],
)  # fmt: skip
def test_modules_to_save(
    folder: pathlib.Path, tmp_path: pathlib.Path, change: dict[str, object], why: str
) -> None:
    """A folder is accepted if PEFT trained the program's modules, and no other."""
    code, err = said_of(folder, tmp_path, change)
    refused = bool(why) and "not in the model" not in why
    assert code == (2 if refused else 0) and why in err, err
    assert ("adapter_config.json" in err) == bool(why)


@pytest.mark.parametrize("folder", ["qwen3"], indirect=True)
def test_two_values_of_a_tied_weight(
    folder: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """A tied weight whose two names have other values, or one of them none, is refused; a prefix of
    a name is not."""
    head = tensors(folder / "new")[LOGITS]
    renamed = {LOGITS: None, f"model.{LOGITS}": head.copy()}
    assert said_of(folder, tmp_path, {}, renamed)[0] == 0
    head[3, 4] += 1
    code, err = said_of(folder, tmp_path, {}, {LOGITS: head})
    assert code == 2
    assert (
        f"tensors {EMBEDDING} and {LOGITS} differ; in the program they are one" in err
    )
    code, err = said_of(folder, tmp_path, {}, {LOGITS: None})
    assert code == 2 and f"tensor {LOGITS} is missing" in err


def test_of_another_program(folder: pathlib.Path) -> None:
    """A program that trains adapters alone refuses the folder."""
    lora = "train.lora={rank: 4, alpha: 6}"
    binary = trainer.build(trainer.generate(law.path(folder.name), lora))
    given = ("--load", folder / "base", "--steps", 0, "--adapter", folder / "new")
    done = program.run(binary, *given)
    assert done.code == 2
    assert "modules_to_save: lists model.embed_tokens, which the program" in done.err
    assert not {*os.listdir(folder / "base")} & {"adapter_config.json"}
