"""test_lora_files.py -- tests adapters saved and loaded in PEFT's format, and merged into the base.

Names and keys are those of PEFT 0.18: docs/source/developer_guides/checkpoint.md, LoraConfig.
"""

import json
import os
import pathlib
import re
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.lib import law, program, trainer

STEPS = 3
LORA = {
    "gpt": ("train.lora={rank: 4, alpha: 6}",),
    "llama": ("train.lora={rank: 4, alpha: 6}",),
    "gpt head": (
        "train.lora={rank: 4, alpha: 6, match: [c_attn, lm_head]}",
        "model.units[2].head[1]={linear: {name: lm_head, out: 256}}",
    ),
    "llama head": ("train.lora={rank: 4, alpha: 6, match: [lm_head]}",),
}
WHOLE = "zero.stage3_param_persistence_threshold=0"
WAYS = {
    "one": ("cluster.ranks=1", "zero.stage=0"),
    "three": ("cluster.ranks=4", "zero.stage=3", WHOLE),
}
LEAD = {"gpt": "base_model.model.transformer.", "llama": "base_model.model."}
HEAD = "base_model.model."  # prefix of a head's names
ADAPTED = {
    "gpt": ["h.{}.attn.c_attn"],
    "llama": [
        "model.layers.{}.self_attn.q_proj",
        "model.layers.{}.self_attn.v_proj",
    ],
    "gpt head": ["h.{}.attn.c_attn", "lm_head"],
    "llama head": ["lm_head"],
}
WIDTH = {"gpt": 60, "llama": 64}
OUT = {"c_attn": 180, "q_proj": 64, "v_proj": 32, "lm_head": 256}
LAYERS = {"gpt": 3, "llama": 2}
FAMILIES = [*LORA]


def of(family: str) -> str:
    return family.removesuffix(" head")


def named(family: str) -> list[str]:
    """Return the linears with adapters of a whole model, by PEFT's names."""
    model, found = of(family), []
    for name in ADAPTED[family]:
        layers = LAYERS[model] if "{}" in name else 1
        lead = HEAD if name == "lm_head" else LEAD[model]
        found += [lead + name.format(l) for l in range(layers)]
    return found


def built(family: str, way: str, *keys: str) -> pathlib.Path:
    every = (*LORA[family], *WAYS[way], *keys)
    return trainer.build(trainer.generate(law.path(of(family)), *every))


def plain(family: str) -> pathlib.Path:
    """Return the program of the base alone."""
    return trainer.build(trainer.generate(law.path(of(family)), *LORA[family][1:]))


@pytest.fixture(scope="module", params=FAMILIES)
def folder(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> pathlib.Path:
    """Return a family's folder: tokens, its `base`, and `new`, its adapters after STEPS steps."""
    made = tmp_path_factory.mktemp(request.param)
    made = made.rename(made.with_name(request.param))
    trainer.write_tokens(made / "tokens", law.tokens(256, 40 * 8 * 4 + 1))
    trainer.sh(plain(request.param), "--steps", 0, "--save", made / "base")
    (made / "base" / "tokenizer.json").write_text("{}")
    run(built(request.param, "three"), made, STEPS, "--save", made / "new")
    return made


def run(binary: pathlib.Path, folder: pathlib.Path, steps: int, *more: object) -> str:
    """Return the hash of a run on the base."""
    given = ("--data", folder / "tokens", "--load", folder / "base")
    log = folder / "log"
    return law.run(binary, *given, "--steps", steps, *more, log=log).weights


def test_a_folder_is_pefts(folder: pathlib.Path) -> None:
    family, new = folder.name, folder / "new"
    assert sorted(os.listdir(new)) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    found = load_file(new / "adapter_model.safetensors")
    shapes = {}
    for full in named(family):
        x, y = WIDTH[of(family)], OUT[full.rpartition(".")[2]]
        shapes |= {
            f"{full}.lora_A.weight": (4, x),
            f"{full}.lora_B.weight": (y, 4),
        }
    assert {n: x.shape for n, x in found.items()} == shapes
    assert all(x.dtype == np.float32 and x.any() for x in found.values())
    said = json.loads((new / "adapter_config.json").read_text())
    assert said == {
        "base_model_name_or_path": str(folder / "base"),
        "bias": "none",
        "fan_in_fan_out": of(family) == "gpt",
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": 6,
        "lora_dropout": 0.0,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": 4,
        "target_modules": [n.rpartition(".")[2] for n in ADAPTED[family]],
        "task_type": "CAUSAL_LM",
    }


def test_out_and_in(folder: pathlib.Path) -> None:
    """Saved adapters load to the same weights, whoever reads or wrote them. A save into the base's
    own folder leaves the base as it is."""
    family = folder.name
    one, three = built(family, "one"), built(family, "three")
    after = run(one, folder, STEPS, "--save", folder / "base")
    assert set(os.listdir(folder / "base")) >= {"model.safetensors"}
    for name in ("base", "new"):
        for binary in (one, three):
            assert run(binary, folder, 0, "--adapter", folder / name) == after
    assert (folder / "base" / "adapter_model.safetensors").read_bytes()[4096:] == (
        folder / "new" / "adapter_model.safetensors"
    ).read_bytes()[4096:]


@pytest.mark.parametrize("folder", ["llama"], indirect=True)
def test_in_halves(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Adapters are saved in 16 bits as --save-dtype says, each number rounded once, and they
    load."""
    binary, given = built("llama", "three"), ("--adapter", folder / "new")
    more = ("--save", tmp_path, "--save-dtype", "f16")
    run(binary, folder, 0, *given, *more)
    new = load_file(folder / "new" / "adapter_model.safetensors")
    found = load_file(tmp_path / "adapter_model.safetensors")
    assert found.keys() == new.keys()
    for name, x in new.items():
        assert (found[name] == x.astype(np.float16)).all()
        assert found[name].dtype == np.float16
    again = run(binary, folder, 0, "--adapter", tmp_path)
    assert again != run(binary, folder, 0, *given)


@pytest.mark.parametrize("way", WAYS)
def test_merged(folder: pathlib.Path, tmp_path: pathlib.Path, way: str) -> None:
    """Merged weights are W + scale * B A in float64, rounded once. All others are as before, and no
    adapter is saved beside them."""
    family = folder.name
    binary, given = built(family, way), ("--adapter", folder / "new")
    run(binary, folder, 0, *given, "--save", tmp_path, "--merge")
    assert {*os.listdir(tmp_path)} == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    }
    base = load_file(folder / "base" / "model.safetensors")
    made = load_file(tmp_path / "model.safetensors")
    new = load_file(folder / "new" / "adapter_model.safetensors")
    assert made.keys() == base.keys()
    moved = 0
    for name, w in base.items():
        lead = HEAD if name == "lm_head.weight" else LEAD[of(family)]
        full = lead + name.removesuffix("weight")
        delta = 0
        if f"{full}lora_A.weight" in new:
            A, B = (np.float64(new[f"{full}lora_{x}.weight"]) for x in "AB")
            delta = 1.5 * (B @ A)
            delta = delta.T if "c_attn" in name else delta
            moved += 1
        # sums of four products in doubles may differ in order, which changes few roundings to f32
        want = np.float32(np.float64(w) + delta)
        assert np.abs(made[name] - want).max() <= np.spacing(np.abs(want).max())
        assert (made[name] != want).mean() <= 1e-3
    assert moved == len(named(family))


@pytest.mark.parametrize("folder", ["llama"], indirect=True)
def test_whole_weights_do_not_come_beside_adapters(
    folder: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """Merged weights are not saved beside adapters: loading the folder would add these once
    more."""
    own = tmp_path / "own"
    shutil.copytree(folder / "base", own)
    for path in (folder / "new").iterdir():
        shutil.copy(path, own)
    kept = {path.name: path.read_bytes() for path in own.iterdir()}
    given = ("--load", own, "--steps", 0, "--save", own)
    adapted = (*given, "--adapter", own, "--merge")
    for binary, words in (
        (built("llama", "one"), adapted),
        (plain("llama"), given),
    ):
        code, err = program_said(binary, *words)
        assert code == 2
        assert f"--save {own}/adapter_config.json: a program that loads" in err
    assert {path.name: path.read_bytes() for path in own.iterdir()} == kept


def test_a_merged_model_has_the_loss_of_its_parts(
    folder: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """A merged model has the loss of its parts in f32, and the base another."""
    family = folder.name
    run(
        built(family, "three"),
        *(folder, 0, "--adapter", folder / "new"),
        *("--save", tmp_path, "--merge"),
    )

    def loss(binary: pathlib.Path, base: pathlib.Path, *more: object) -> float:
        given = ("--data", folder / "tokens", "--load", base, "--steps", 0)
        val = ("--val", folder / "tokens")
        result = law.run(binary, *given, *val, *more, log=folder / "log")
        return json.loads(result.val)["val_loss"]

    parts = loss(built(family, "one"), folder / "base", "--adapter", folder / "new")
    merged, base = (loss(plain(family), made) for made in (tmp_path, folder / "base"))
    assert abs(merged - parts) <= 1e-6 < 1e-5 < abs(base - parts)


def test_a_draw_is_of_all(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """The likeliest tokens with strong adapters are those of the merged model."""
    family, rng = folder.name, np.random.Generator(np.random.Philox(3))
    config = (folder / "new" / "adapter_config.json").read_text()
    (tmp_path / "adapter_config.json").write_text(config)
    tensors = load_file(folder / "new" / "adapter_model.safetensors")
    much = {n: rng.standard_normal(x.shape, np.float32) for n, x in tensors.items()}
    save_file(much, tmp_path / "adapter_model.safetensors")
    given = ("--adapter", tmp_path, "--save", tmp_path / "merged", "--merge")
    run(built(family, "three"), folder, 0, *given)
    prompt = tmp_path / "prompt"
    np.arange(4, dtype=np.int32).tofile(prompt)

    def drawn(binary: pathlib.Path, base: pathlib.Path, *more: object) -> list[str]:
        given = "--steps", 0, "--sample", 12, "--prompt-tokens", prompt
        text = trainer.sh(*(binary, "--load", base, *given, "--temperature", 0, *more))
        return text.split()[-12:]

    parts = drawn(built(family, "one"), folder / "base", "--adapter", tmp_path)
    assert parts == drawn(plain(family), tmp_path / "merged")
    assert parts != drawn(plain(family), folder / "base")


@pytest.mark.parametrize("folder", ["llama head"], indirect=True)
@pytest.mark.parametrize("change", [0, 1])
def test_pefts_own_copy_of_the_head(
    folder: pathlib.Path, tmp_path: pathlib.Path, change: float
) -> None:
    """PEFT's copy of the weight of a head with an adapter is accepted if it is the base's."""
    config = (folder / "new" / "adapter_config.json").read_text()
    (tmp_path / "adapter_config.json").write_text(config)
    tensors = load_file(folder / "new" / "adapter_model.safetensors")
    own = load_file(folder / "base" / "model.safetensors")["lm_head.weight"]
    tensors[f"{HEAD}lm_head.base_layer.weight"] = own + np.float32(change)
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    given = ("--load", folder / "base", "--steps", 0, "--adapter", tmp_path)
    code, err = program_said(built("llama head", "three"), *given)
    assert code == (2 if change else 0)
    assert not change or "differs from --load's, or --load is missing" in err


def test_a_run_goes_on(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """A run resumes from a checkpoint of another way with the bits of one that never stopped."""
    family, kept = folder.name, ("--checkpoints", tmp_path)
    one, three = built(family, "one"), built(family, "three")
    whole = run(one, folder, STEPS)
    first = run(three, folder, 2, *kept)
    given = ("--data", folder / "tokens", "--steps", STEPS, *kept)
    after = law.run(one, *given, log=folder / "log").weights
    assert after == whole != first


# ---- refusals


def program_said(binary: pathlib.Path, *words: object) -> tuple[int, str]:
    done = program.run(binary, *words)
    return done.code, done.err


@pytest.mark.parametrize("folder", ["llama"], indirect=True)
@pytest.mark.parametrize(
    "change,why",
    [
        ({"lora_alpha": 8}, "adapter_config.json: lora_alpha is 8; the program has 6"),
        ({"lora_alpha": 6.5}, "lora_alpha is 6.5; the program has 6"),
        ({"r": 8, "lora_alpha": 12}, "adapter_config.json: r is 8; the program has 4"),
        ({"r": "4"}, 'r: "4" is not supported; allowed: a number'),
        ({"task_type": "SEQ_CLS"}, 'task_type: "SEQ_CLS" is not supported; allowed: "CAUSAL_LM"'),
        ({"target_modules": ["q_proj"]}, "target_modules: does not list "
         "model.layers.0.self_attn.v_proj, for which the program has an adapter"),
        ({"target_modules": ["proj", "_proj"]}, "self_attn.q_proj, for which the program has an adapter"),
        ({"target_modules": ["q_proj", "v_proj", "k_proj"]}, "target_modules: "
         "model.layers.0.self_attn.k_proj is listed, but the program has no adapter for it"),
        ({"target_modules": ["q_proj", "v_proj", "lm_head"]}, "lm_head is listed, but"),
        ({"target_modules": ["q_proj", "model.layers.0.self_attn.v_proj"]},
         "does not list model.layers.1.self_attn.v_proj, for which"),
        ({"exclude_modules": ["layers.1.self_attn.q_proj"]}, "exclude_modules: lists "
         "model.layers.1.self_attn.q_proj, for which the program has an adapter"),
        ({"target_modules": ".*", "exclude_modules": ["v_proj"]}, "v_proj, for which the program has an adapter"),
        ({"target_modules": 3}, "target_modules: 3 is not supported; allowed: a list of names"),
        ({"target_modules": [3]}, "expected a string"),
        ({"use_rslora": True}, "use_rslora: true is not supported; allowed: false"),
        ({"use_rslora": "true"}, 'use_rslora: "true" is not supported; allowed: false'),
        ({"use_dora": True}, "use_dora: true is not supported; allowed: null"),
        ({"alpha_pattern": {"q_proj": 64}}, "alpha_pattern is 64; the program has 6 for model.layers.0"),
        ({"rank_pattern": {"q_proj": 8}}, "rank_pattern is 8; the program has 4 for model.layers.0"),
        ({"alora_invocation_tokens": [1, 2]}, "alora_invocation_tokens: [1, 2] is"),
        ({"layer_replication": [[0, 1]]}, "layer_replication: [[0, 1]] is"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save: lists lm_head, which the program does not"),
        ({"layers_to_transform": [0]}, "layers_to_transform: [0] is"),
        ({"something_new": 1}, "something_new: 1 is not supported"),
        ({"bias": "all"}, 'bias: "all" is not supported; allowed: "none"'),
        ({"init_lora_weights": "pissa"}, "init_lora_weights: "),
        ({"peft_type": "IA3"}, 'peft_type: "IA3" is not supported; allowed: "LORA"'),
        ({"fan_in_fan_out": True}, "fan_in_fan_out: true is not supported; allowed: false"),
        ({"lora_dropout": "0.1"}, 'lora_dropout: "0.1" is not supported; allowed: a number'),
    ],
)  # fmt: skip
def test_another_adapter(
    folder: pathlib.Path,
    tmp_path: pathlib.Path,
    change: dict[str, object],
    why: str,
) -> None:
    new = json.loads((folder / "new" / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps({**new, **change}))
    tensors = load_file(folder / "new" / "adapter_model.safetensors")
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    given = ("--load", folder / "base", "--steps", 0, "--adapter", tmp_path)
    code, err = program_said(built("llama", "one"), *given)
    assert code == 2 and "--adapter" in err and why in err


@pytest.mark.parametrize("folder", ["llama"], indirect=True)
@pytest.mark.parametrize(
    "change,why",
    [
        ({}, ""),
        ({"target_modules": ["v_proj", "self_attn.q_proj"]}, ""),
        ({"target_modules": None}, ""),
        ({"target_modules": ["q_proj", "v_proj", "k_proj"], "exclude_modules": ["k_proj"]}, ""),
        ({"target_modules": ["q_proj", "v_proj", "c_attn"]},
         "target_modules lists a name that is not in the model: c_attn"),
        ({"target_modules": "(?:.*)[qv]_proj"}, "target_modules is a pattern, which is not"),
        ({"exclude_modules": "lm_head"}, "exclude_modules is a pattern, which is not checked"),
        ({"base_model_name_or_path": "some/base/"}, ""),
        ({"base_model_name_or_path": "meta-llama/Llama-3.2-1B"},
         "base_model_name_or_path is meta-llama/Llama-3.2-1B, --load "),
        ({"use_rslora": None}, ""),
        ({"lora_dropout": 0}, ""),
        ({"lora_dropout": None}, ""),
        ({"lora_dropout": 0.05},
         "lora_dropout is 0.05; the program trains with 0 (train.lora.dropout)"),
    ],
)  # fmt: skip
def test_what_is_told_of_an_adapter(
    folder: pathlib.Path,
    tmp_path: pathlib.Path,
    change: dict[str, object],
    why: str,
) -> None:
    """Settings of an adapter that change no weight, or cannot be compared, are accepted with a
    line."""
    new = json.loads((folder / "new" / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps({**new, **change}))
    tensors = load_file(folder / "new" / "adapter_model.safetensors")
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    given = ("--load", folder / "base", "--steps", 0, "--adapter", tmp_path)
    code, err = program_said(built("llama", "one"), *given)
    assert code == 0 and why in err
    assert ("adapter_config.json: " in err) == bool(why)


@pytest.mark.parametrize("folder", ["gpt", "llama"], indirect=True)
@pytest.mark.parametrize("way", WAYS)
def test_untrained_adapters_merged_are_the_base(
    folder: pathlib.Path, tmp_path: pathlib.Path, way: str
) -> None:
    """Merging untrained adapters, whose B is 0, keeps every bit of the base, also of -0."""
    base = tmp_path / "base"
    shutil.copytree(folder / "base", base)
    tensors = load_file(base / "model.safetensors")
    for x in tensors.values():
        x.reshape(-1)[::3] = -0.0
    save_file(tensors, base / "model.safetensors", {"format": "pt"})
    given = ("--load", base, "--steps", 0, "--save", tmp_path / "made")
    assert program_said(built(folder.name, way), *given, "--merge")[0] == 0
    made = load_file(tmp_path / "made" / "model.safetensors")
    assert made.keys() == tensors.keys()
    for name, x in tensors.items():
        assert made[name].tobytes() == x.tobytes()


@pytest.mark.parametrize("folder", ["llama"], indirect=True)
@pytest.mark.parametrize(
    "there,why",
    [
        ((), "has no adapter_model.safetensors\n"),
        (("adapter_model.bin",), "adapter_model.bin is not read, as a pickle may"),
        (("config.json",), "; for a whole model use --load"),
        (("adapter_model.safetensors",), "has no adapter_config.json\n"),
    ],
)
def test_a_folder_without_adapters(
    folder: pathlib.Path,
    tmp_path: pathlib.Path,
    there: tuple[str, ...],
    why: str,
) -> None:
    for name in there:
        (tmp_path / name).write_bytes(b"")
    given = ("--load", folder / "base", "--steps", 0, "--adapter", tmp_path)
    code, err = program_said(built("llama", "one"), *given)
    assert code == 2 and why in err


@pytest.mark.parametrize("folder", ["llama"], indirect=True)
@pytest.mark.parametrize(
    "name",
    [
        "base/config.json",
        "base/model.safetensors",
        "base/tokenizer.json",
        "new/adapter_config.json",
        "new/adapter_model.safetensors",
    ],
)
def test_pointers_of_git_lfs(
    folder: pathlib.Path, tmp_path: pathlib.Path, name: str
) -> None:
    """A pointer of Git LFS in any file of a folder is reported before the first step."""
    for part in ("base", "new"):
        shutil.copytree(folder / part, tmp_path / part)
    (tmp_path / name).write_text(
        "version https://git-lfs.github.com/spec/v1\n"
        f"oid sha256:{'0' * 64}\nsize 4096\n"
    )
    given = ("--load", tmp_path / "base", "--adapter", tmp_path / "new")
    saved = ("--save", tmp_path / "made", "--merge", "--steps", 0)
    code, err = program_said(built("llama", "one"), *given, *saved)
    assert code == 2
    assert (
        f"{name}: is a Git LFS pointer, not the file itself; run git lfs pull there"
        in err
    )
    assert not (tmp_path / "made").exists() or not os.listdir(tmp_path / "made")


@pytest.mark.parametrize("folder", ["llama"], indirect=True)
def test_names_of_adapters_in_memory(
    folder: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """A state dict that PEFT has not saved itself loads, with the adapter's name inside its
    names."""
    config = (folder / "new" / "adapter_config.json").read_text()
    (tmp_path / "adapter_config.json").write_text(config)
    tensors = load_file(folder / "new" / "adapter_model.safetensors")
    other = {n.replace(".weight", ".default.weight"): x for n, x in tensors.items()}
    save_file(other, tmp_path / "adapter_model.safetensors")
    given = ("--load", folder / "base", "--steps", 0, "--adapter", tmp_path)
    code, err = program_said(built("llama", "one"), *given)
    assert code == 2 and 'have "default.weight", which is PEFT\'s in' in err


# Further keys that PEFT 0.21.2 writes (LoraConfig().to_dict()).
PEFTS = {
    "auto_mapping": None, "peft_version": "0.21.2", "revision": None, "exclude_modules": None,
    "lora_dropout": 0.05, "use_rslora": False, "init_lora_weights": "gaussian",
    "layers_to_transform": None, "layers_pattern": None, "rank_pattern": {}, "alpha_pattern": {},
    "megatron_config": None, "megatron_core": "megatron.core", "trainable_token_indices": None,
    "loftq_config": {}, "eva_config": None, "corda_config": None, "lora_ga_config": None,
    "use_dora": False, "velora_config": None, "alora_invocation_tokens": None,
    "use_qalora": False, "qalora_group_size": 16, "monteclora_config": None,
    "layer_replication": None, "lora_bias": False, "target_parameters": None,
    "use_bdlora": None, "arrow_config": None, "kasa_config": None, "ensure_weight_tying": False,
    "target_modules": "all-linear",
}  # fmt: skip


@pytest.mark.parametrize("folder", ["llama"], indirect=True)
@pytest.mark.parametrize("order", [1, -1])
def test_what_peft_writes_is_taken(
    folder: pathlib.Path, tmp_path: pathlib.Path, order: int
) -> None:
    """PEFT's own configuration is accepted in any order of keys, and with blanks in empty
    values."""
    new = json.loads((folder / "new" / "adapter_config.json").read_text())
    keys = [*{**new, **PEFTS}.items()][::order]
    text = json.dumps(dict(keys), indent=1).replace("{}", "{ }")
    (tmp_path / "adapter_config.json").write_text(text)
    tensors = load_file(folder / "new" / "adapter_model.safetensors")
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    wanted = run(built("llama", "one"), folder, 0, "--adapter", folder / "new")
    got = run(built("llama", "one"), folder, 0, "--adapter", tmp_path)
    assert got == wanted


@pytest.mark.parametrize("folder", ["llama"], indirect=True)
def test_rslora(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """alpha / sqrt(rank) is a scale like any other, and PEFT's key says which one it is."""
    binary = built("llama", "one", "train.lora={rank: 4, alpha: 3, rslora: true}")
    hashed = run(binary, folder, 1, "--save", tmp_path / "saved")
    assert hashed == run(built("llama", "one"), folder, 1)
    new = json.loads((tmp_path / "saved" / "adapter_config.json").read_text())
    assert (new["r"], new["lora_alpha"], new["use_rslora"]) == (4, 3, True)
    back = run(binary, folder, 0, "--adapter", tmp_path / "saved")
    assert back == run(built("llama", "one"), folder, 1)
    given = ("--load", folder / "base", "--steps", 0, "--adapter")
    code, err = program_said(binary, *given, folder / "new")
    assert code == 2 and "has no use_rslora; the program has it" in err
    (tmp_path / "saved" / "adapter_config.json").write_text(
        json.dumps({**new, "use_rslora": False})
    )
    code, err = program_said(binary, *given, tmp_path / "saved")
    assert code == 2 and "use_rslora: false is not supported; allowed: true" in err


GROUPED = "train.lora={rank: 4, alpha: 6, groups: [{match: q_proj, rank: 2, alpha: 5}]}"


@pytest.fixture(scope="module")
def grouped(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Return a folder with a `base`, and `new`, its trained adapters of two ranks and alphas."""
    made = tmp_path_factory.mktemp("grouped")
    trainer.write_tokens(made / "tokens", law.tokens(256, 40 * 8 * 4 + 1))
    trainer.sh(plain("llama"), "--steps", 0, "--save", made / "base")
    run(built("llama", "three", GROUPED), made, STEPS, "--save", made / "new")
    return made


def test_groups_out_in_and_merged(
    grouped: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """Adapters of two ranks and alphas are saved with PEFT's patterns, load again, and are merged
    with a scale each."""
    binary, given = built("llama", "one", GROUPED), ("--adapter", grouped / "new")
    said = json.loads((grouped / "new" / "adapter_config.json").read_text())
    assert (said["r"], said["lora_alpha"]) == (4, 6)
    assert said["rank_pattern"] == {"q_proj": 2}
    assert said["alpha_pattern"] == {"q_proj": 5}
    after = run(binary, grouped, 0, *given, "--save", tmp_path / "again")
    assert after == run(binary, grouped, STEPS)
    new = load_file(grouped / "new" / "adapter_model.safetensors")
    again = load_file(tmp_path / "again" / "adapter_model.safetensors")
    assert all((again[name] == x).all() for name, x in new.items())
    run(binary, grouped, 0, *given, "--save", tmp_path / "merged", "--merge")
    base = load_file(grouped / "base" / "model.safetensors")
    made = load_file(tmp_path / "merged" / "model.safetensors")
    for name, scale, rank in (("q_proj", 5 / 2, 2), ("v_proj", 6 / 4, 4)):
        for layer in range(LAYERS["llama"]):
            full = f"model.layers.{layer}.self_attn.{name}."
            A, B = (np.float64(new[f"{HEAD}{full}lora_{x}.weight"]) for x in "AB")
            assert len(A) == rank
            want = np.float32(np.float64(base[f"{full}weight"]) + scale * (B @ A))
            # as in test_merged
            off = np.abs(made[f"{full}weight"] - want)
            assert off.max() <= np.spacing(np.abs(want).max())
            assert (off > 0).mean() <= 1e-3


def pefts(patterns: dict[str, float], usual: float, module: str) -> float:
    """Return the number of a module, as PEFT finds it (get_pattern_key)."""
    for pattern, x in patterns.items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return x
    return usual


@pytest.mark.parametrize(
    "patterns",
    [
        {"q_proj": 2},
        {"self_attn.q_proj": 2, "q_proj": 3},
        {"q_proj": 3, "self_attn.q_proj": 2},
        {"proj": 2},
        {".*q_proj": 2},
        {"model.layers.0.self_attn.q_proj": 2, "layers.1.self_attn.q_proj": 2},
        {"model.layers.0.self_attn.q_proj": 2},
        {"^q_proj": 2},
        {r"^model\.layers\.[0-9]+\.self_attn\.q_proj$": 2},
        {"(q|k)_proj": 2, "up_proj": 7},
        {"[qk]_pro?j": 2},
        {".*": 2},
        {"v_proj": 4, ".*": 2},
        {"_proj": 2},
    ],
)
def test_patterns_are_read_as_peft_reads_them(
    grouped: pathlib.Path, tmp_path: pathlib.Path, patterns: dict[str, float]
) -> None:
    """A folder is taken if PEFT's own reading of its patterns gives the program's ranks."""
    said = json.loads((grouped / "new" / "adapter_config.json").read_text())
    said = {**said, "rank_pattern": patterns}
    (tmp_path / "adapter_config.json").write_text(json.dumps(said))
    shutil.copy(grouped / "new" / "adapter_model.safetensors", tmp_path)
    given = ("--load", grouped / "base", "--steps", 0, "--adapter", tmp_path)
    code, err = program_said(built("llama", "one", GROUPED), *given)
    modules = [
        (f"model.layers.{layer}.self_attn.{name}", rank)
        for name, rank in (("q_proj", 2), ("v_proj", 4))
        for layer in range(LAYERS["llama"])
    ]
    fits = all(pefts(patterns, 4, name) == rank for name, rank in modules)
    assert code == (0 if fits else 2), err
    assert fits or re.search(
        r"(r|rank_pattern) is \d; the program has \d for model", err
    )


@pytest.mark.parametrize(
    "change,why",
    [
        ({"alpha_pattern": {"q_proj": 6}}, "alpha_pattern is 6; the program has 5 for model.layers.0.self_attn.q_proj"),
        ({"alpha_pattern": {}}, "lora_alpha is 6; the program has 5 for model.layers.0.self_attn.q_proj"),
        ({"rank_pattern": None}, "r is 4; the program has 2 for model.layers.0.self_attn.q_proj"),
        ({"rank_pattern": {"q_proj": "2"}}, "rank_pattern: q_proj: 2 is not supported; allowed: a number"),
        ({"rank_pattern": {r"layers\.\d+\.self_attn.q_proj": 2}}, 'is not supported; allowed: a name, or a pattern without'),
        ({"rank_pattern": {"(?:q)_proj": 2}}, 'rank_pattern: "(?:q)_proj" is not supported; allowed: '),
        ({"rank_pattern": {".*?q_proj": 2}}, 'rank_pattern: ".*?q_proj" is not supported; allowed: '),
        ({"rank_pattern": {"q_pro{1}j": 2}}, 'rank_pattern: "q_pro{1}j" is not supported; allowed: '),
        ({"rank_pattern": {"(q_proj": 2}}, 'rank_pattern: "(q_proj" is not supported; allowed: '),
        ({"rank_pattern": {"q_proj" * 90: 2}}, 'is not supported; allowed: a name, or a pattern'),
        ({"rank_pattern": ["q_proj"]}, 'rank_pattern: ["q_proj'),
    ],
)  # fmt: skip
def test_patterns_that_do_not_fit(
    grouped: pathlib.Path, tmp_path: pathlib.Path, change: dict[str, object], why: str
) -> None:
    said = json.loads((grouped / "new" / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps({**said, **change}))
    shutil.copy(grouped / "new" / "adapter_model.safetensors", tmp_path)
    given = ("--load", grouped / "base", "--steps", 0, "--adapter", tmp_path)
    code, err = program_said(built("llama", "one", GROUPED), *given)
    assert code == 2 and "--adapter" in err and why in err


@pytest.mark.parametrize("folder", ["llama"], indirect=True)
def test_dropout(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """A saved configuration has the program's dropout. Another one is told, whatever it is."""
    binary = built("llama", "one", "train.lora.dropout=0.05")
    given = ("--load", folder / "base", "--steps", 0, "--adapter")
    code, err = program_said(
        binary, *given, folder / "new", "--save", tmp_path / "saved"
    )
    why = "lora_dropout is 0.0; the program trains with 0.05 (train.lora.dropout)"
    assert code == 0 and why in err
    new = json.loads((tmp_path / "saved" / "adapter_config.json").read_text())
    assert new["lora_dropout"] == 0.05
    code, err = program_said(binary, *given, tmp_path / "saved")
    assert code == 0 and "lora_dropout" not in err


@pytest.mark.parametrize("folder", ["llama"], indirect=True)
@pytest.mark.parametrize("more", [False, True])
def test_other_tensors(
    folder: pathlib.Path, tmp_path: pathlib.Path, more: bool
) -> None:
    """An adapter with a tensor too few or too many is refused."""
    config = (folder / "new" / "adapter_config.json").read_text()
    (tmp_path / "adapter_config.json").write_text(config)
    tensors = load_file(folder / "new" / "adapter_model.safetensors")
    name, x = tensors.popitem()
    if more:
        tensors |= {name: x, name.replace("_proj", "_other"): x}
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    given = ("--load", folder / "base", "--steps", 0, "--adapter", tmp_path)
    code, err = program_said(built("llama", "one"), *given)
    wrong = (
        "does not belong to an adapter of this program (train.lora)"
        if more
        else "is missing"
    )
    assert code == 2 and wrong in err


def test_options(tmp_path: pathlib.Path) -> None:
    none = "the program has no adapters; a spec with train.lora has"
    for words in (["--adapter", tmp_path], ["--save", tmp_path, "--merge"]):
        code, err = program_said(plain("gpt"), "--steps", 0, *words)
        assert code == 2 and none in err
    code, err = program_said(built("gpt", "one"), "--steps", 0, "--merge")
    assert code == 2 and "--merge needs --save DIR" in err
