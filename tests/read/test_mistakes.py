"""test_mistakes.py -- tests that all mistakes in a spec are reported at once, without errors that
merely follow from them, and that suggestions in messages work."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from zg.read.schema import TARGETS
from zg.read.spec import load, text

from tests.read.test_spec import GPT, refusal


def test_several_errors_are_said_at_once(tmp_path: Path) -> None:
    keys = ", ".join(f"k{n}: {n}" for n in range(18))
    message = refusal(tmp_path, f"zero: {{{keys}, stage: 9}}\nmodel: 3\n")
    lines = message.split("\n")
    assert len(lines) == 20 and lines[-1] == "and 2 more"
    assert all(line.startswith("s.yaml:") for line in lines[:-1])


LAYERS = """model:
  vocab: 96
  width: 32
  names: gpt2
  units:
  - embedding: {tokens: wte, positions: wpe, context: 32}
  - blocks: 2
    name: h.{l}
    ops:
    - residual:
      - layernorm: {name: ln_1}
      - attention: {name: attn, heads: 5}
    - residual:
      - layernorm: {name: ln_2}
      - linear: {name: mlp.c_fc, out: 64}
  - head:
    - layernorm: {name: ln_f}
    - linear: {tied: wtf}
zero: {offload_param: {device: cpu}}
train:
  lr: 1.0e-3
  global_batch: 8
  micro_batch: 3
  sequence: 64
  seed: x
  schedule: {type: linear, steps: 3, warmup: 5}
  optimizer: {type: AdamW, momentum: 0.9, betas: [0.9, 2]}
  head_chunk: 7
cluster: {ranks: 2}
targets: [h100, sm_90]
data: {end: 4}
"""


def test_errors_of_all_kinds_are_said_at_once(tmp_path: Path) -> None:
    """Errors of types, unknown and missing keys, shapes, and contradictory keys are reported
    together."""
    message = refusal(tmp_path, LAYERS, ("zero.stage",))
    found = [line.split(": ")[:2] for line in message.split("\n")]
    block = "model.units[1].ops"
    assert sorted(key for _, key in found) == sorted(
        [
            "'zero.stage' is not KEY=VALUE; allowed",
            "data.end",
            "model.units[0].embedding.context",
            f"{block}[0].residual[1].attention.heads",
            f"{block}[1].residual",
            "model.units[2].head[1].linear.tied",
            "targets",
            "train.global_batch",
            "train.head_chunk",
            "train.lr",
            "train.optimizer.betas[1]",
            "train.optimizer.lr",
            "train.optimizer.momentum",
            "train.schedule.steps",
            "train.seed",
        ]
    )
    for place, key in found[1:]:
        last = re.sub(r"\[\d+\]$", "", key).rpartition(".")[2]
        line = LAYERS.split("\n")[int(place.removeprefix("s.yaml:")) - 1]
        assert last in line or key.startswith("train.optimizer"), key


def test_a_key_that_stands_twice_hides_no_other_error(tmp_path: Path) -> None:
    twice = "zero: {stage: 0, stage: 3, stages: 1}\nmodel: 3\nname: '?'\n"
    message = refusal(tmp_path, twice)
    assert [line.partition("; ")[0] for line in message.split("\n")] == [
        "s.yaml:1: 'stage' is given twice",
        "s.yaml:3: name: '?' is not valid",
        "s.yaml:2: model: is 3",
        "s.yaml:1: zero.stages: is not a key here",
        "s.yaml:1: train: is missing",
    ]


def known(mapping: object, above: str = "") -> Iterator[str]:
    """Yield the dotted keys of a spec outside the model."""
    for key, value in mapping.items() if isinstance(mapping, dict) else ():
        if above or key != "model":
            yield f"{above}{key}"
            yield from known(value, f"{above}{key}.")


FULL = ("zero.stage=3", "zero.offload_optimizer={device: cpu, ratio: 0.5}")
FULL += ("train.lora={rank: 2, alpha: 4}", "zero.replicate=[ln_f.bias]")
FULL += ("train.head_chunk=2", "data={documents: mask, end: 3}")


@pytest.mark.parametrize("value", ["'?'", "[?]", None])
def test_an_error_brings_no_other(tmp_path: Path, value: str | None) -> None:
    """One mistake gives one error: each key in turn gets a value that no key has, or is
    misspelt."""
    whole = text(str(GPT), FULL)
    load(str(GPT), FULL)
    keys = [*known(yaml.safe_load(whole))]
    assert len(keys) > 25
    for key in keys:
        if value:
            (line,) = refusal(tmp_path, whole, (f"{key}={value}",)).split("\n")
            assert line.startswith(f"--set: {key}"), line
            continue
        message = refusal(tmp_path, whole, (f"{key}_={{}}",))
        above, _, word = key.rpartition(".")
        assert f"--set: {key}_: is not a key here; did you mean {word}" in message
        assert message.count("\n") == 0, message


@pytest.mark.parametrize("key", ["lr", "train.lr", "zero.lr", "model.lr"])
def test_a_key_of_another_section_is_named(tmp_path: Path, key: str) -> None:
    said = ": is not a key here; did you mean train.optimizer.lr? allowed: "
    message = refusal(tmp_path, GPT.read_text(), (f"{key}=1e-3",))
    assert message.startswith(f"--set: {key}{said}")
    assert "\n" not in message
    section, _, word = key.rpartition(".")
    spec = yaml.safe_load(GPT.read_text())
    (spec[section] if section else spec)[word] = 1e-3
    message = refusal(tmp_path, yaml.safe_dump(spec))
    assert re.fullmatch(rf"s.yaml:\d+: {key}{re.escape(said)}.*", message)


@pytest.mark.parametrize(
    "key,said",
    [
        ("device", "cluster.device or zero.offload_optimizer.device or zero.offload_param.device or cluster.memory.device"),
        ("cluster.rank", "ranks or train.lora.rank"),
        ("train.ranks", "cluster.ranks"),
        ("optimizer.lr", "train.optimizer"),
        ("train.optimizer.steps", "train.schedule.steps"),
        ("train.width", "model.width"),
    ],
)  # fmt: skip
def test_all_keys_that_may_be_meant(tmp_path: Path, key: str, said: str) -> None:
    message = refusal(tmp_path, GPT.read_text(), (f"{key}=1",))
    assert f": is not a key here; did you mean {said}? allowed: " in message


def test_a_rate_of_a_group_is_its_factor(tmp_path: Path) -> None:
    groups = "train.optimizer.groups=[{match: '*.bias', lr: 1e-3}]"
    said = refusal(tmp_path, GPT.read_text(), (groups,))
    assert "groups[0].lr: is not a key here; did you mean lr_factor or " in said


def test_gpus_are_targets_by_name(tmp_path: Path) -> None:
    def targets(said: str) -> tuple[str, ...]:
        return load(str(GPT), (f"targets={said}",)).targets

    assert targets("[cpu, a100, h100, b200]") == (*TARGETS,)
    assert targets("[H200]") == targets("[sm_90]")
    said = refusal(tmp_path, GPT.read_text(), ("targets=[h100, h200]",))
    assert said == "--set: targets: names a target twice; allowed: each target once"
    said = refusal(tmp_path, GPT.read_text(), ("targets=sm_90",))
    assert said == "--set: targets: is 'sm_90'; did you mean [sm_90]? allowed: a list"
    said = refusal(tmp_path, GPT.read_text(), ("targets=[l40s]",))
    assert "targets[0]: 'l40s' is not a target" in said and "h100 for sm_90" in said


@pytest.mark.parametrize(
    "batch,micro,ranks,allowed",
    [
        (8, 4, 4, "cluster.ranks 2, or train.global_batch 16, or train.micro_batch 2"),
        (24, 5, 4, "train.global_batch 20 or 40, or train.micro_batch 3 or 6"),
        (8, 2, 3, "cluster.ranks 2 or 4, or train.global_batch 6 or 12"),
        (4, 16, 2, "train.global_batch 32, or train.micro_batch 2"),
    ],
)
def test_what_divides_a_batch_is_offered(
    tmp_path: Path, batch: int, micro: int, ranks: int, allowed: str
) -> None:
    """Values that divide a batch are suggested, and each of them is accepted."""
    sets = (f"train.global_batch={batch}", f"train.micro_batch={micro}")
    text = GPT.read_text()
    message = refusal(tmp_path, text, (*sets, f"cluster.ranks={ranks}"))
    assert message.endswith(f"; allowed: {allowed}")
    for offer in allowed.split(", or "):
        key, *values = offer.replace(" or", "").split()
        for value in values:
            more = (f"cluster.ranks={ranks}", f"{key}={value}")
            load(str(GPT), (*sets, *more))
