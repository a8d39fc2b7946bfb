"""test_ds_words.py -- tests keys of a ds_config.json that DeepSpeed does not have, unknown types,
and text without quotes: an error if they were meant to have an effect, a note if DeepSpeed would
ignore them."""

import re
from pathlib import Path

import pytest

from tests.read.test_dsconfig import ZERO, notes, refusal

IGNORED = "has no effect here: it is not a DeepSpeed key; DeepSpeed ignores it, too"


@pytest.mark.parametrize(
    "key",
    [
        "cuda_visible_devices",
        "num_gpus",
        "logging",
        "moe",
        "a\nb",
        "*",
        "dataloader_settings",
        "comms_config",
        "num_nodes",
    ],
)
def test_what_deepspeed_ignores_at_the_top_is_a_note(tmp_path: Path, key: str) -> None:
    shown = repr(key) if "\n" in key else key
    assert f"ds.json:1: {shown}: {IGNORED}" in notes(tmp_path, {key: {"enabled": True}})


@pytest.mark.parametrize(
    "config,said",
    [
        (
            {"gradient_cliping": 1},
            r"gradient_cliping: is not a key here; did you mean gradient_clipping\?",
        ),
        (
            {"zero_optimisation": {}},
            rf"zero_optimisation: is not a key here; did you mean {ZERO}\?",
        ),
        (
            {"loss_scale": 1},
            r"loss_scale: is not a key here; did you mean fp16.loss_scale\?",
        ),
        ({"enabled": True}, r"enabled: is not a key here; allowed: "),
        (
            {ZERO: {"moe": 1}},
            rf"{ZERO}.moe: is not a key here; allowed: allgather_bucket_size",
        ),
        (
            {ZERO: {"mode": 1}},
            rf"{ZERO}.mode: is not a key here; did you mean comet.mode\?",
        ),
        (
            {f"{ZERO}.stage": 3},
            rf"{ZERO}.stage: has a dot in its name, but a section is an object; "
            rf'allowed: "{ZERO}": {{"stage": ...}}',
        ),
        (
            {ZERO: {"offload_optimizer.device": "cpu"}},
            rf"{ZERO}.offload_optimizer.device: has a dot in "
            rf'its name, .* allowed: "{ZERO}": {{"offload_optimizer": {{"device": ...}}}}',
        ),
    ],
)
def test_what_was_meant_is_an_error(tmp_path: Path, config: object, said: str) -> None:
    assert re.match(f"ds.json:1: {said}", refusal(tmp_path, config))


@pytest.mark.parametrize(
    "config,type_",
    [
        (
            {
                "scheduler": {
                    "type": "LRRangeTest",
                    "params": {"lr_range_test_min_lr": 1e-4, "foo": 3},
                }
            },
            "scheduler.type",
        ),
        (
            {
                "scheduler": {
                    "type": "CosineAnnealingLR",
                    "params": {"T_max": 9, "warmup_num_steps": "x"},
                }
            },
            "scheduler.type",
        ),
        (
            {"scheduler": {"type": 3, "params": {"warmup_num_steps": 5}}},
            "scheduler.type",
        ),
        (
            {
                "optimizer": {
                    "type": "Lamb",
                    "params": {"lr": 1e-3, "amsgrad": True},
                }
            },
            "optimizer.type",
        ),
    ],
)
def test_a_type_that_is_not_here_is_all_that_is_said(
    tmp_path: Path, config: object, type_: str
) -> None:
    (said,) = refusal(tmp_path, config).splitlines()
    assert said.startswith(f"ds.json:1: {type_}: ")


def test_a_type_that_is_not_here_hides_no_other_mistake(
    tmp_path: Path,
) -> None:
    config = {
        "optimizer": {"type": "Lamb", "params": {"foo": 1}},
        ZERO: {"stage": 7},
        "scheduler": {"type": "WarmupLR", "params": {"foo": 1}},
    }
    assert {line.split(": ")[1] for line in refusal(tmp_path, config).splitlines()} == {
        "scheduler.params.foo",
        f"{ZERO}.stage",
        "optimizer.type",
    }


def test_checkpointing_names_what_does_it_here(tmp_path: Path) -> None:
    config = {
        "activation_checkpointing": {
            "partition_activations": True,
            "number_checkpoints": 4,
        }
    }
    said = [
        note for note in notes(tmp_path, config) if "activation_checkpointing" in note
    ]
    assert len(said) == 2 and all(
        "`--set train.recompute=full`" in note for note in said
    )


@pytest.mark.parametrize("text", ["https://x.org/a", "a@b", "a,b", "one: two"])
def test_text_that_needs_quotes(tmp_path: Path, text: str) -> None:
    said = refusal(tmp_path, f"{{wandb: {{enabled: true, project: {text}\n}}}}")
    assert "broken syntax" in said and '"text" in quotes' in said
    assert any(
        "wandb" in note
        for note in notes(
            tmp_path, f'{{wandb: {{enabled: true, project: "{text}"\n}}}}'
        )
    )
