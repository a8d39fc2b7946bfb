"""test_sets.py -- tests --set on items of lists; `--emit spec`, which gives a spec of the same
plan; and other files that are mistaken for a spec or a ds_config.json."""

import json
import pathlib
import re

import pytest
from zg.plan.text import print_plan
from zg.read import spec
from zg.read.node import Mistakes, SpecError
from zg.search import search

from tests.lib import trainer
from tests.write.test_command import zgen

SPECS = trainer.ROOT / "model_specs"
LLAMA = SPECS / "llama-tiny.yaml"
ITEMS = "model.units[0] to model.units[2]"


def planned(
    path: pathlib.Path, sets: tuple[str, ...] = (), zero: str | None = None
) -> str:
    return print_plan(search.find(spec.load(str(path), sets, zero)).plan)


def refused(*sets: str, path: pathlib.Path = LLAMA) -> str:
    with pytest.raises(SpecError) as e:
        spec.load(str(path), sets)
    return str(e.value)


def test_items_of_lists(tmp_path: pathlib.Path) -> None:
    sets = (
        "model.units[1].blocks=3",
        "model.units[1].ops[1].residual[1].linear.out[0]=96",
        "model.units[1].ops[1].residual[1].linear.out[1]=96",
        "train.optimizer.betas[1]=0.99",
        "targets[1]=sm_90",
    )
    text = LLAMA.read_text()
    for old, new in (
        ("blocks: 2", "blocks: 3"),
        ("[176, 176]", "[96, 96]"),
        ("betas: [0.9, 0.95]", "betas: [0.9, 0.99]"),
    ):
        assert text.count(old) == 1
        text = text.replace(old, new)
    (tmp_path / "spec.yaml").write_text(
        re.sub("targets: .*", "targets: [cpu, sm_90]", text)
    )
    short = spec.load(str(LLAMA), ("targets=[cpu, sm_80]", *sets))
    assert short.targets == ("cpu", "sm_90")
    assert planned(LLAMA, ("targets=[cpu, sm_80]", *sets)) == planned(
        tmp_path / "spec.yaml"
    )
    assert spec.load(str(LLAMA), ("targets[0]=sm_80", "targets=[cpu]")).targets == (
        "cpu",
    )


@pytest.mark.parametrize(
    "key,said",
    [
        (
            "model.units[3].blocks",
            f"model.units has 3 items; allowed: {ITEMS}, or the whole list (--set "
            "cannot append)",
        ),
        (
            "model.units[3]",
            f"model.units has 3 items; allowed: {ITEMS}, or the whole list",
        ),
        ("model.units.blocks", f"model.units holds a list; allowed: {ITEMS}"),
        ("zero[0]", r"zero holds a mapping; allowed: zero without [0]"),
        (
            "zero.stage[0]",
            r"zero.stage holds 3; allowed: zero.stage without [0]",
        ),
        (
            "zero.stage.x",
            "zero.stage holds 3; allowed: a key inside a mapping",
        ),
        (
            "train.optimizer.groups[0].frozen",
            "train.optimizer.groups is not given; allowed: the whole "
            "list, train.optimizer.groups=[...]",
        ),
    ],
)
def test_what_is_no_item(key: str, said: str) -> None:
    assert refused(f"{key}=1").startswith(f"--set: {key}: {said}")


@pytest.mark.parametrize(
    "text",
    [
        "model.units[-1]=1",
        "model.units[]=1",
        "model.units[x]=1",
        "model.units[1=1",
        "[0]=1",
        "model.units[1]blocks=1",
        "model.units [1].blocks=1",
        "model.units[1].=1",
    ],
)
def test_what_is_no_key(text: str) -> None:
    said = refused(text)
    assert (
        "is not KEY=VALUE; allowed: for example zero.stage=3 or model.units[1].blocks=3"
        in said
    )


def test_errors_of_items_are_of_the_option() -> None:
    assert refused("model.units[1].blocks=0").startswith(
        "--set: model.units[1].blocks: 0 is out of"
    )


# ---- --emit spec

WAYS = [
    (),
    ("zero.stage=1",),
    ("zero.stage=2", "zero.offload_optimizer.device=cpu"),
    (
        "zero.stage=3",
        "zero.offload_param.device=nvme",
        "zero.offload_param.nvme_path=/tmp",
        'train.optimizer.groups=[{match: ["*.weight"], lr_factor: 5e-1}]',
    ),
    (
        "train.optimizer.betas[0]=0.8",
        "train.schedule={type: constant}",
        "data={ignore: 1}",
        'name="1e3"',
        "train.recompute=[rmsnorm, swiglu]",
    ),
]
CONFIG = {
    "zero_optimization": {
        "stage": 2,
        "reduce_bucket_size": "5e7",
        "overlap_comm": False,
    },
    "bf16": {"enabled": True},
    "gradient_clipping": 0.5,
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": 1e-3, "betas": [0.9, 0.98]},
    },
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"total_num_steps": 5000},
    },
}


@pytest.mark.parametrize(
    "path", sorted(SPECS.glob("*.yaml")), ids=lambda path: path.stem
)
def test_a_spec_of_the_same_plan(tmp_path: pathlib.Path, path: pathlib.Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(CONFIG))
    made = tmp_path / "made.yaml"
    for zero in (None, str(tmp_path / "ds.json")):
        for sets in WAYS[:2] if "405b" in path.stem else WAYS:
            text = spec.text(str(path), sets, zero)
            made.write_text(text)
            assert spec.text(str(made)) == text
            assert planned(made) == planned(path, sets, zero), text


def test_words_stay_words(tmp_path: pathlib.Path) -> None:
    """Words that YAML would read as another type are quoted."""
    words = [
        "1e3",
        "true",
        "no",
        "~",
        "",
        "a: b",
        "# x",
        "it's",
        "0x1F",
        ".inf",
        "a\nb",
        "12:30",
    ]
    text = LLAMA.read_text() + f"extra: {json.dumps(words)}\n"
    (tmp_path / "spec.yaml").write_text(text)
    root = spec._document(str(tmp_path / "spec.yaml"), Mistakes())
    (tmp_path / "again.yaml").write_text(spec.text(str(tmp_path / "spec.yaml")))
    again = spec._document(str(tmp_path / "again.yaml"), Mistakes())
    assert again.plain() == root.plain() and again.plain()["extra"] == words


@pytest.mark.slow
def test_the_command_writes_it(tmp_path: pathlib.Path) -> None:
    """A spec written by the command gives the same C. A spec that makes no plan is not written."""
    keys = ("--set", "zero.stage=1", "--set=model.units[1].blocks=1")
    done = zgen(LLAMA, *keys, "--emit=spec", "-o", tmp_path / "mine.yaml")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    made = zgen(tmp_path / "mine.yaml").stdout
    assert trainer.unsigned(made) == trainer.unsigned(zgen(LLAMA, *keys).stdout) != ""
    assert (
        zgen(LLAMA, "--set", "cluster.memory.device=1MB", "--emit", "spec").returncode
        == 2
    )


# ---- files of another kind

HF = '{"architectures": ["LlamaForCausalLM"], "hidden_size": 64}'
DS = '{"train_batch_size": 8, "zero_optimization": {"stage": 2}}'


@pytest.mark.parametrize(
    "text,said",
    [
        (
            DS,
            r":1: the file is a DeepSpeed config: it has zero_optimization, train_batch_size; "
            "allowed: a spec, with this file as --zero FILE",
        ),
        (
            HF,
            r":1: the file is a Hugging Face model config: .*its folder as --from",
        ),
        ("\x7fELF\x01\0", r":1: byte 0x00 is not text; allowed: UTF-8 text"),
        ("a\n\0" * 99999, r":2: byte 0x00 is not text; allowed: UTF-8 text"),
        ("x: 1\n", r":1: x: is not a key here; allowed: name, model, "),
    ],
)
def test_what_is_no_spec(tmp_path: pathlib.Path, text: str, said: str) -> None:
    (tmp_path / "file").write_text(text)
    assert re.search(said, refused(path=tmp_path / "file"))


@pytest.mark.parametrize(
    "text,said",
    [
        (
            LLAMA.read_text(),
            "the file is a spec: it has model, train, cluster, zero; allowed: a "
            "DeepSpeed config for --zero",
        ),
        (
            '{"model": {}, "train": {}}',
            "the file is a spec: it has model, train; allowed: a DeepSpeed config",
        ),
        (HF, "the file is a Hugging Face model config"),
        ("\0", "byte 0x00 is not text"),
    ],
)
def test_what_is_no_ds_config(tmp_path: pathlib.Path, text: str, said: str) -> None:
    (tmp_path / "file").write_text(text)
    with pytest.raises(
        SpecError, match=f"{re.escape(str(tmp_path))}/file:\\d+: {said}"
    ):
        spec.load(str(LLAMA), (), str(tmp_path / "file"))


ACCELERATE = """compute_environment: LOCAL_MACHINE
distributed_type: DEEPSPEED
deepspeed_config:
  zero_stage: 2
"""
FSDP = """compute_environment: LOCAL_MACHINE
fsdp_config:
  fsdp_sharding_strategy: FULL_SHARD
"""
TRAINER = """# LLaMA-Factory
bf16: true
gradient_accumulation_steps: 2
per_device_train_batch_size: 1
learning_rate: 1.0e-4
output_dir: saves
deepspeed: ds_z3.json
"""
TITAN = """[job]
dump_folder = "out"

[model]
name = "llama3"
"""
COMMENTED = """{
  // ours
  "train_batch_size": 8,
  "zero_optimization": {
    "model": 1, "stage": 2}
}
"""
# Its program, the line of its first key, and the advice in place of a spec and after --zero
STRANGERS = [
    (
        ACCELERATE,
        1,
        "an Accelerate config: it has compute_environment, distributed_type, "
        "deepspeed_config",
        "the ds_config.json named by its key deepspeed_config_file, or, if it names none, "
        "one with zero_optimization.stage set to its zero_stage",
    ),
    (
        FSDP,
        2,
        "an FSDP config: it has fsdp_config",
        "FULL_SHARD is --set zero.stage=3",
    ),
    (
        '{"fsdp_backward_prefetch": "x", "activation_checkpointing": true}',
        1,
        "an FSDP config: it has fsdp_backward_prefetch",
        "FULL_SHARD is --set zero.stage=3",
    ),
    (
        TRAINER,
        6,
        "arguments for a Hugging Face Trainer: it has output_dir, deepspeed",
        "the ds_config.json named by its key deepspeed",
    ),
    (
        '{"output_dir": "o", "fp16": false, "learning_rate": 5e-5}',
        1,
        "arguments for a Hugging Face Trainer: it has output_dir",
        "the ds_config.json named by its key deepspeed",
    ),
    (
        "base_model: a/b\noptimizer: adamw_8bit\nbf16: auto\n",
        1,
        "arguments for a Hugging Face Trainer: it has base_model",
        "the ds_config.json named by its key deepspeed",
    ),
    (TITAN, 1, r"a torchtitan config: it has \[job\]", ""),
    (
        '{"peft_type": "LORA", "lora_alpha": 16}',
        1,
        "a PEFT adapter config: it has peft_type, lora_alpha",
        "train.lora",
    ),
]


@pytest.mark.parametrize("text,line,what,allowed", STRANGERS)
def test_whose_a_file_is_that_is_neither(
    tmp_path: pathlib.Path, text: str, line: int, what: str, allowed: str
) -> None:
    file = tmp_path / "file"
    file.write_text(text)
    said = f"file:{line}: the file is {what}; allowed: .*{allowed}"
    assert re.search(said, refused(path=file))
    with pytest.raises(SpecError, match=said):
        spec.load(str(LLAMA), (), str(file))


def test_a_ds_config_that_is_no_yaml_is_known_by_its_lines(
    tmp_path: pathlib.Path,
) -> None:
    (tmp_path / "file").write_text(COMMENTED)
    assert re.search(
        "file:4: the file is a DeepSpeed config: it has zero_optimization, "
        "train_batch_size; allowed: a spec, with this file as --zero FILE",
        refused(path=tmp_path / "file"),
    )


def test_keys_of_another_beside_its_own_are_no_other_file(
    tmp_path: pathlib.Path,
) -> None:
    """Foreign keys beside a ds_config's own do not make it another file, because DeepSpeed ignores
    them. A syntax error is reported as one."""
    file = tmp_path / "file"
    file.write_text('{"output_dir": "o", "zero_optimization": {"stage": 1}}')
    read = spec.load(str(LLAMA), (), str(file))
    assert read.zero.stage == 1
    assert any("output_dir: has no effect here" in n for n in read.notes)
    file.write_text('{\n"output_dir": "o",\n"zero_optimization": {"stage" 1}\n}')
    with pytest.raises(SpecError, match="file:3: broken syntax"):
        spec.load(str(LLAMA), (), str(file))


def test_an_old_spelling_is_read_and_noted() -> None:
    said = spec.load(str(LLAMA), ("train.accumulate=grains",))
    assert said.train.accumulate == "micro_batches"
    (note,) = (n for n in said.notes if "train.accumulate" in n)
    assert note.endswith("train.accumulate: grains is now called micro_batches")
    assert said.notes != spec.load(str(LLAMA)).notes
