"""test_ds_auto.py -- tests ds_config.json files whose keys are "auto", for Hugging Face's Trainer
to fill. If the spec lacks the values, the message has the command that works."""

import re
from pathlib import Path

import pytest

from tests.read.test_dsconfig import GPT, ZERO, A, B, G, read, refusal

# Keys that Hugging Face's Trainer fills if they are "auto".
FILLED = (
    *(G, B, A, "gradient_clipping", "fp16.enabled", "bf16.enabled"),
    *(f"optimizer.params.{key}" for key in ("lr", "betas", "eps", "weight_decay")),
    *(
        f"{ZERO}.{key}"
        for key in (
            "reduce_bucket_size",
            "stage3_prefetch_bucket_size",
            "stage3_param_persistence_threshold",
            "stage3_gather_16bit_weights_on_model_save",
        )
    ),
)
WARMUP = {
    "WarmupLR": ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps"),
    "WarmupDecayLR": (
        "warmup_min_lr",
        "warmup_max_lr",
        "warmup_num_steps",
        "total_num_steps",
    ),
    "WarmupCosineLR": ("warmup_num_steps", "total_num_steps"),
}
SCHEDULE = re.search(r"^  schedule: .*\n", GPT, re.M)[0]


def filled(schedule: str) -> dict:
    """Return a Trainer's ds_config.json with "auto" everywhere."""
    config: dict = {"scheduler": {"type": schedule}}
    for key in (
        *FILLED,
        *(f"scheduler.params.{word}" for word in WARMUP[schedule]),
    ):
        at = config
        *above, last = key.split(".")
        for word in above:
            at = at.setdefault(word, {})
        at[last] = "auto"
    return config


@pytest.mark.parametrize("schedule", WARMUP)
@pytest.mark.parametrize(
    "ours",
    [
        SCHEDULE,
        "",
        "  schedule: {type: constant}\n",
        "  schedule: {type: constant, warmup: 7}\n",
    ],
)
def test_the_advice_of_an_auto_is_a_command_that_works(
    tmp_path: Path, schedule: str, ours: str
) -> None:
    """The --set in a refusal is all that the command lacks."""
    spec, config = GPT.replace(SCHEDULE, ours), filled(schedule)
    sets: tuple[str, ...] = ()
    if "steps" not in ours and "total_num_steps" in WARMUP[schedule]:
        said = refusal(tmp_path, config, (), spec)
        (named,) = re.findall(r"--set (\S+)=N$", said)
        sets = (f"{named}=90",)
    made = read(tmp_path, config, sets, spec).train
    assert made.schedule.type == schedule
    assert made.schedule.total_num_steps == (
        None if schedule == "WarmupLR" else 100 if "steps" in ours else 90
    )


@pytest.mark.parametrize(
    "line,key",
    [
        ("  width: 60\n", "model.width"),
        ("lr: 1.0e-3, ", "train.optimizer.lr"),
        ("  global_batch: 8\n", "train.global_batch"),
        ("  micro_batch: 2\n", "train.micro_batch"),
    ],
)
def test_an_auto_of_what_a_spec_must_have_leaves_the_refusal_to_the_spec(
    tmp_path: Path, line: str, key: str
) -> None:
    spec = GPT.replace("  stage3_param_persistence_threshold: 100\n", "")
    assert line in spec
    config = filled("WarmupDecayLR")
    said = refusal(tmp_path, config, (), spec.replace(line, ""))
    assert re.fullmatch(rf"s.yaml:\d+: {key}: is missing; .*", said)


@pytest.mark.parametrize("width", ["1.0e300", "-3", "x"])
def test_an_auto_of_a_width_that_is_none_leaves_the_refusal_to_the_spec(
    tmp_path: Path, width: str
) -> None:
    said = refusal(tmp_path, filled("WarmupLR"), (f"model.width={width}",))
    assert said.startswith("--set: model.width: ")


@pytest.mark.parametrize("ours", ["", SCHEDULE])
def test_an_auto_that_the_schedule_does_not_take_is_advised_away(
    tmp_path: Path, ours: str
) -> None:
    config = filled("WarmupLR")
    config["scheduler"]["params"]["total_num_steps"] = "auto"
    assert (
        refusal(tmp_path, config, (), GPT.replace(SCHEDULE, ours))
        == "ds.json:1: scheduler.params.total_num_steps: WarmupLR has no "
        "total_num_steps; allowed: leave it out"
    )
