"""test_dsconfig.py -- tests ds_config.json: every key is known and typed, mistakes are reported
with file and line, and `auto` and missing keys are taken from the spec."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from zg.read import dsconfig, dsjson, dskeys, dsrows, dswords
from zg.read import spec as spec_module
from zg.read.node import Mistakes, Node
from zg.read.schema import Spec
from zg.read.spec import SpecError, load
from zg.write import config

from tests.lib.patience import LIMIT

ROOT = Path(__file__).resolve().parents[2]
# Stage 3, 2 ranks, 8 samples a step
GPT = (ROOT / "model_specs/gpt-tiny.yaml").read_text()
G, B, A = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
)
ZERO = "zero_optimization"


def read(
    tmp: Path, config: object, sets: tuple[str, ...] = (), spec: str = GPT
) -> Spec:
    """Return the spec with a config, given as an object or as text."""
    (tmp / "s.yaml").write_text(spec)
    text = config if isinstance(config, str) else json.dumps(config)
    (tmp / "ds.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    return load(str(tmp / "s.yaml"), sets, str(tmp / "ds.json"))


def refusal(tmp: Path, *args: object) -> str:
    """Return the message without the folder's name."""
    with pytest.raises(SpecError) as e:
        read(tmp, *args)
    return str(e.value).replace(f"{tmp}/", "")


def notes(tmp: Path, *args: object) -> list[str]:
    return [note.replace(f"{tmp}/", "") for note in read(tmp, *args).notes]


NOTHING = Node({}, "s.yaml:1")


def changes(text: str, spec: Node = NOTHING) -> dsconfig.Config:
    """Return a config's changes to a spec, without reading it; the default spec is empty."""
    node = dsjson.parse(text, lambda line: f"ds.json:{line + 1}")
    return dsconfig.read(node, spec)


def at(key: str, value: object) -> dict:
    """Return the object in which a dotted key has a value."""
    for word in reversed(key.split(".")):
        value = {word: value}
    return value


# ---- every key


def keys() -> list[str]:
    """Return DeepSpeed's keys from tests/data, independent of our table."""
    found = []
    for line in (ROOT / "tests/data/deepspeed_keys.txt").read_text().splitlines():
        section, colon, words = line.partition(":")
        if colon and not line.startswith("#"):
            found += [f"{section}.{word}".lstrip(".") for word in words.split()]
    return found


def test_every_key_of_deepspeed_is_known() -> None:
    assert len(keys()) > 250
    known = {key for key in keys() if dsconfig._row(key) or key in dswords.SECTIONS}
    assert set(keys()) - known == set()
    assert dsconfig._row("zero_optimization.no") is None and dsconfig._row("no") is None


# A fitting value for each kind of key; and a value that only a key of any type may hold.
GOOD = (
    False,
    2,
    0.5,
    1,
    "text",
    "cpu",
    "fp32",
    "mean",
    "log",
    "Ignore",
    "FAST",
    "REPLICA",
    "step",
    "get",
    "AdamW",
    "constant",
    [0.9, 0.95],
    ["a"],
    [1],
    {},
)
BAD = [{"x": 1}, 1]


def test_every_key_is_typed() -> None:
    """A wrong type is an error that names the key, also of a key without effect."""
    for key, row in dskeys.TABLE.items():
        if row.kind is dsrows.ANY:
            continue
        text = json.dumps(at(key, "@"), indent=1)
        line = text[: text.index('"@"')].count("\n") + 1
        with pytest.raises(SpecError) as said:
            changes(text.replace('"@"', json.dumps(BAD)))
        assert f"ds.json:{line}: {key}: is a list; allowed: " in str(said.value), said
        fits = next(value for value in GOOD if row.kind.fits(value))
        try:
            changes(text.replace('"@"', json.dumps(fits)))
        except SpecError as e:
            named = re.search(r"ds.json:\d+: ([A-Za-z0-9_.*/]+): ", str(e))[1]
            assert key.startswith(named) or named in ("scheduler.type", A), e


def test_no_key_is_silently_ignored() -> None:
    """No key is ignored silently: a key without a message belongs to a section with one."""
    for key, row in dskeys.TABLE.items():
        if isinstance(row, dsrows.Qualifier):
            section = key.rpartition(".")[0]
            assert section in dskeys.SWITCHES or isinstance(
                dskeys.TABLE[section], dsrows.Refuse
            ), key
        elif isinstance(row, dsrows.Moved):
            assert (
                row.to in dskeys.TABLE
                and row.words
                or dskeys.TABLE[row.to].kind == row.kind
            ), key


def test_null_and_auto_leave_every_key_to_the_spec() -> None:
    for key in dskeys.TABLE:
        for value in (None, "auto"):
            row = dskeys.TABLE[key]
            if "*" in key or key.rpartition(".")[0] in dskeys.TABLE:
                continue  # a section that is refused as a whole
            if value == "auto" and (
                isinstance(row, dsrows.Moved) or getattr(row, "auto", None)
            ):
                continue  # a rule: below
            assert changes(json.dumps(at(key, value))).changes == (), key


@pytest.mark.parametrize(
    "text, value",
    [
        ("5e8", 500_000_000),
        ('"1e8"', 100_000_000),
        ("1000", 1000),
        ('"1000"', 1000),
        ("0.94e6", 940_000),
    ],
)
def test_numbers_as_users_write_them(tmp_path: Path, text: str, value: int) -> None:
    spec = read(tmp_path, f'{{"{ZERO}": {{"reduce_bucket_size": {text}}}}}')
    assert spec.zero.reduce_bucket_size == value and isinstance(
        spec.zero.reduce_bucket_size, int
    )


# ---- keys with an effect


def test_a_config_is_honoured(tmp_path: Path) -> None:
    spec = read(
        tmp_path,
        {
            G: 16,
            B: "auto",
            "gradient_clipping": 0.5,
            "steps_per_print": 10,
            "bf16": {"enabled": True},
            "fp16": {"enabled": False, "loss_scale": 0},
            "optimizer": {
                "type": "Adam",
                "params": {
                    "lr": 1e-4,
                    "betas": [0.8, 0.99],
                    "weight_decay": "auto",
                },
            },
            ZERO: {
                "stage": 2,
                "allgather_bucket_size": "2e8",
                "overlap_comm": False,
                "contiguous_gradients": True,
                "offload_optimizer": {"device": "none"},
            },
        },
    )
    z, t = spec.zero, spec.train
    assert (z.stage, z.allgather_bucket_size, z.overlap_comm) == (
        2,
        200_000_000,
        False,
    )
    assert (t.global_batch, t.micro_batch, t.precision, t.optimizer.clip) == (
        16,
        2,
        "bf16",
        0.5,
    )
    assert (t.optimizer.lr, t.optimizer.betas, t.optimizer.weight_decay) == (
        1e-4,
        (0.8, 0.99),
        0.1,
    )
    said = [
        re.match(r".*ds.json:\d+: ([a-z0-9_.]+): has no effect here", n)[1]
        for n in spec.notes
    ]
    assert said == ["steps_per_print", f"{ZERO}.contiguous_gradients"]


@pytest.mark.parametrize(
    "config, want",
    [  # two ranks; the spec says 8 and 2
        ({G: 32, B: 16, A: 1}, (32, 16)),
        ({G: 32, B: 8, A: 2}, (32, 8)),
        ({G: 32, B: 16}, (32, 16)),
        ({G: 32, A: 2}, (32, 8)),
        ({B: 8, A: 2}, (32, 8)),
        ({G: 32}, (32, 2)),
        ({B: 4}, (8, 4)),
        ({A: 3}, (12, 2)),
        ({G: "auto", B: 4, A: "auto"}, (8, 4)),
        ({G: 33, B: 17, A: 2}, None),
        ({G: 32, B: 18, A: 1}, None),
        ({G: 33, A: 2}, None),
        ({G: 33, B: 17}, None),
        ({G: 32, A: 0}, None),
        ({G: "many"}, None),
        ({B: True}, None),
    ],
)
def test_two_batch_keys_determine_the_third(
    tmp_path: Path, config: dict, want: tuple[int, int] | None
) -> None:
    if want is None:
        assert re.match(r"ds.json:1: .*; allowed: ", refusal(tmp_path, config))
        return
    spec = read(tmp_path, config)
    assert (spec.train.global_batch, spec.train.micro_batch) == want


def test_batch_keys_follow_the_ranks_that_are_set(tmp_path: Path) -> None:
    spec = read(tmp_path, {B: 3, A: 2}, ("cluster.ranks=4",))
    assert spec.train.global_batch == 24
    spec = read(tmp_path, {B: 3, A: 2}, ("train.micro_batch=4",))
    assert (spec.train.micro_batch, spec.train.global_batch) == (4, 16)
    spec = read(
        tmp_path,
        {ZERO: {"stage": 1}, G: 32},
        ("zero.stage=2", "train.global_batch=16"),
    )
    assert (spec.zero.stage, spec.train.global_batch) == (2, 16)


def test_auto_buckets_follow_the_width(tmp_path: Path) -> None:
    """`auto` buckets follow Hugging Face's rules for h = 60: h*h, 0.9*h*h, 10*h. The spec's own
    values stay."""
    auto = {
        ZERO: dict.fromkeys(
            (
                "reduce_bucket_size",
                "stage3_prefetch_bucket_size",
                "stage3_param_persistence_threshold",
                "stage3_max_live_parameters",
            ),
            "auto",
        )
    }
    z = read(tmp_path, auto).zero
    assert (z.reduce_bucket_size, z.stage3_prefetch_bucket_size) == (
        3600,
        3240,
    )
    assert (
        z.stage3_param_persistence_threshold,
        z.stage3_max_live_parameters,
    ) == (100, 10**9)
    spec = GPT.replace("  stage3_param_persistence_threshold: 100\n", "")
    assert read(tmp_path, auto, (), spec).zero.stage3_param_persistence_threshold == 600
    wide = read(
        tmp_path,
        auto,
        ("model.width=120", "zero.reduce_bucket_size=7"),
        re.sub(r"out: 60\b", "out: 120", spec),
    )
    assert (
        wide.zero.reduce_bucket_size,
        wide.zero.stage3_param_persistence_threshold,
    ) == (7, 1200)


def test_precision_and_what_must_agree_with_it(tmp_path: Path) -> None:
    def precision(config: dict) -> str:
        return read(tmp_path, config).train.precision

    assert (
        precision({"bf16": {"enabled": True}, "communication_data_type": "bf16"})
        == "bf16"
    )
    assert (
        precision(
            {
                "bfloat16": {"enabled": True},
                "data_types": {"param_dtype": "BF16"},
            }
        )
        == "bf16"
    )
    assert (
        precision({"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}}) == "f32"
    )
    assert precision({"communication_data_type": "fp32"}) == "f32"
    fp32 = {"bf16": {"enabled": True}, "communication_data_type": "fp32"}
    assert precision(fp32) == "bf16"
    (note,) = read(tmp_path, fp32).notes
    assert note.endswith(
        "ds.json:1: communication_data_type: gradients are sent as bf16 and summed in f32, so the "
        "sum equals that of f32 gradients"
    )
    fast = "train.reduction=fast", "targets=[sm_90]"
    assert refusal(tmp_path, fp32, fast) == (
        "ds.json:1: communication_data_type: is 'fp32', but train.precision is 'bf16'; "
        "allowed: bf16 or null"
    )
    assert refusal(tmp_path, {"communication_data_type": "fp16"}) == (
        "ds.json:1: communication_data_type: is 'fp16', but train.precision is 'f32'; "
        "allowed: fp32 or null"
    )


def test_adam_without_decoupled_decay(tmp_path: Path) -> None:
    """DeepSpeed's Adam is AdamW unless adam_w_mode is false; AdamW always is."""

    def kind(name: str, mode: bool) -> str:
        (tmp_path / "ds.json").write_text(
            json.dumps({"optimizer": {"type": name, "params": {"adam_w_mode": mode}}})
        )
        return load(
            str(ROOT / "model_specs/gpt-tiny.yaml"),
            (),
            str(tmp_path / "ds.json"),
        ).train.optimizer.type

    assert kind("adam", True) == kind("AdamW", True) == "AdamW"
    with pytest.raises(SpecError, match="adam_w_mode: contradicts optimizer.type"):
        kind("AdamW", False)


def test_another_type_takes_nothing_of_the_specs_type() -> None:
    """An optimizer of another type takes nothing of the spec's. A scheduler replaces the spec's
    whole schedule; betas of AdamW are no momentum of SGD."""
    path = str(ROOT / "model_specs/gpt-tiny.yaml")
    spec = spec_module._document(path, Mistakes())
    made = changes(
        '{"scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": "auto",'
        '"warmup_max_lr": "auto", "total_num_steps": "auto"}},'
        '"optimizer": {"type": "SGD", "params": {"lr": 2e-3}}}',
        spec,
    ).changes
    assert made[0][0] == "train.schedule" and {
        key: node and node.plain() for key, node in made
    } == {
        "train.schedule": {},
        "train.schedule.type": "WarmupDecayLR",
        "train.schedule.warmup_num_steps": 10,
        "train.schedule.warmup_max_lr": 2e-3,
        "train.schedule.total_num_steps": 100,
        "train.optimizer.type": "SGD",
        "train.optimizer.lr": 2e-3,
        **{f"train.optimizer.{k}": None for k in dsconfig._OF_TYPE},
    }
    adam = changes(
        '{"optimizer": {"type": "Adam", "params": {"adam_w_mode": false}}}',
        spec,
    ).changes
    assert [(key, node.plain()) for key, node in adam] == [
        ("train.optimizer.type", "Adam")
    ]
    with pytest.raises(
        SpecError,
        match='total_num_steps: is "auto", but the spec has neither',
    ):
        changes(
            '{"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}}}'
        )


# ---- keys without effect, renamed or refused


def test_keys_at_a_stage_where_they_do_nothing(tmp_path: Path) -> None:
    config = {
        ZERO: {
            "stage": 2,
            "stage3_prefetch_bucket_size": 5,
            "offload_param": {"device": "cpu"},
            "zero_quantized_weights": True,
        }
    }
    said = notes(tmp_path, config)
    assert said == [
        f"ds.json:1: {ZERO}.{key}: has no effect at stage 2"
        for key in (
            "stage3_prefetch_bucket_size",
            "offload_param.device",
            "zero_quantized_weights",
        )
    ]
    message = refusal(tmp_path, config, ("zero.stage=3",))
    assert "zero_quantized_weights: is not supported yet" in message
    del config[ZERO]["zero_quantized_weights"]
    assert read(tmp_path, config, ("zero.stage=3",)).zero.offload_param.device == "cpu"


@pytest.mark.parametrize(
    "config, said",
    [
        ({ZERO: {"prefetch_bucket_size": 7}}, []),
        (
            {ZERO: {"cpu_offload": False}},
            [
                f"{ZERO}.cpu_offload: is deprecated: its name is now {ZERO}.offload_optimizer.device"
            ],
        ),
        (
            {ZERO: {"stage3_gather_fp16_weights_on_model_save": True}},
            [
                "is deprecated: its name is now zero_optimization.stage3_gather_16bit_weights_on_model_save",
                "has no effect here: weights are always saved unsharded",
            ],
        ),
        ({ZERO: True}, ["zero_optimization: true or false is deprecated"]),
        (
            {"steps_per_print": 5},
            ["steps_per_print: has no effect here: every step"],
        ),
        ({"wall_clock_breakdown": False}, []),
        (
            {"wall_clock_breakdown": True},
            ["wall_clock_breakdown: has no effect here: `out/train --prof"],
        ),
        (
            {"flops_profiler": {"enabled": True, "profile_step": 3}},
            ["`out/train --profile FILE` times every function"],
        ),
        (
            {"comms_logger": {"enabled": True}},
            ["`out/train --profile FILE` times every collective"],
        ),
        (
            {"wandb": {"project": "x"}},
            ["wandb: has no effect here while wandb.enabled"],
        ),
        ({"wandb": {"enabled": False, "project": "x"}}, []),
        (
            {"fp16": {"enabled": "auto", "loss_scale": 0}},
            ["fp16: has no effect here unless train.prec"],
        ),
        ({"fp16": {"enabled": "auto"}}, []),
        (
            {"aio": {"thread_count": 1}},
            ["DeepSpeed ignores it: it reads intra_op_parallelism"],
        ),
        (
            {"elasticity": {"prefer_large_batch": True}},
            ["elasticity: has no effect here while"],
        ),
        ({"bfloat16": {"enabled": False}}, []),
        (
            {"_comment": "hello"},
            ["_comment: has no effect here: is a comment"],
        ),
        (
            {"_read_the_docs": 1},
            ["_read_the_docs: has no effect here: is a comment"],
        ),
        (
            {"disable_fused_adam": True},
            ["is not a DeepSpeed key; DeepSpeed ignores it, too"],
        ),
        (
            {"pipeline": {"chunks": 4}},
            ["pipeline.chunks: has no effect here: there is no pipeline parallelism"],
        ),
        ({ZERO: {"stage": 3, "zero_hpz_partition_size": 2}}, []),
        (
            {ZERO: {"stage": 2, "zero_hpz_partition_size": 8}},
            ["has no effect at stage 2"],
        ),
        (
            {A: 1},
            [f"{A}: train.global_batch becomes 4: train_batch_size is not given"],
        ),
        ({A: 2}, []),
        ({A: 1, B: 2}, []),
        (
            {"optimizer": {"type": "Adam", "params": {"eps": 1e-8}}},
            [
                "optimizer: lacks betas, weight_decay: the spec's values apply; DeepSpeed's defaults are (0.9, 0.999), 0.0"
            ],
        ),
        (
            {"optimizer": {"type": "Lion"}},
            [
                "lacks weight_decay: the spec's values apply; DeepSpeed's defaults are 0.0"
            ],
        ),
        (
            {"wandb": {"enabled": "auto", "project": "x"}},
            ["wandb: has no effect here while wandb.enabled"],
        ),
        ({ZERO: {"stage": 2, "zero_hpz_partition_size": 1}}, []),
        ({"_comment.1": 1}, ["is a comment"]),
        (
            {
                "optimizer": {
                    "type": "AdamW",
                    "params": {"betas": "auto", "weight_decay": None},
                }
            },
            [],
        ),
        ({"optimizer": {"params": {"lr": 1e-3}}}, []),
        ({"optimizer": {"type": "SGD", "params": {"weight_decay": 0}}}, []),
    ],
)
def test_notes(tmp_path: Path, config: dict, said: list[str]) -> None:
    found = notes(tmp_path, config)
    assert len(found) == len(said), found
    for note, part in zip(found, said, strict=True):
        assert note.startswith("ds.json:1: ") and part in note


@pytest.mark.parametrize(
    "config, said",
    [
        (
            {ZERO: {"allgather_bucket_size": 1001}},
            rf"{ZERO}.allgather_bucket_size: is 1001; allowed: an even integer from 0",
        ),
        (
            {ZERO: {"grad_hooks": True}},
            rf"{ZERO}.grad_hooks: appears only in DeepSpeed's documentation",
        ),
        (
            {ZERO: {"stage": 5}},
            rf"{ZERO}.stage: is 5; allowed: an integer from 0 to 3",
        ),
        ({ZERO: 3}, rf"{ZERO}: is 3; allowed: an object"),
        (
            {"bf16": {"check_overflow": False}},
            r"bf16.check_overflow: is not a DeepSpeed key: use ",
        ),
        (
            {"bf16": {"enabled": 1}},
            r"bf16.enabled: is 1; allowed: true or false",
        ),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": False}}, None),
        (
            {"bf16": {"enabled": True}, "bfloat16": {"enabled": False}},
            r"bfloat16.enabled: contradicts bf16.enabled; allowed: only one of them",
        ),
        (
            {"bfloat16": {"enabled": True}, "bf16": {"enabled": False}},
            r"bf16.enabled: contradicts",
        ),
        (
            {
                "fp16": {"enabled": False},
                "bfloat16": {"enabled": False},
                "bf16": {"enabled": True},
            },
            r"bf16.enabled: contradicts bfloat16.enabled",
        ),
        (
            {"pipelines": {}},
            r"pipelines: is not a key here; did you mean pipeline\?",
        ),
        (
            {ZERO: {"_comment": 1}},
            rf"{ZERO}._comment: is a comment inside a section; allowed: at the top",
        ),
        (
            {ZERO: {"aio": {}}},
            rf"{ZERO}.aio: is not a key here; did you mean aio at the top level\?",
        ),
        (
            {"fp16": {"enabled": True}, "bf16": {"enabled": True}},
            r"bf16.enabled: contradicts fp16.enabled; allowed: only one of them",
        ),
        (
            {"fp16": {"enabled": True, "fp16_master_weights_and_grads": True}},
            r"fp16.fp16_master_weights_and_grads: masters and gradient sums are f32.*; allowed: false",
        ),
        (
            {"data_types": {"grad_accum_dtype": "fp16"}},
            r"data_types.grad_accum_dtype: gradients are always "
            r"summed in f32; allowed: fp32",
        ),
        (
            {ZERO: {"offload_param": {"device": "disk"}}},
            r".*device: is 'disk'; allowed: none or cpu or nv",
        ),
        (
            {"optimizer": {"type": "Lamb"}},
            r"optimizer.type: 'Lamb' is not supported; allowed: Adam or AdamW or",
        ),
        ({"optimizer": {"type": 3}}, r"optimizer.type: is 3; allowed: text"),
        (
            {"optimizer": {"params": {"max_grad_norm": 1.0}}},
            r"optimizer.params.max_grad_norm: .*use grad",
        ),
        (
            {"optimizer": {"params": {"bias_correction": False}}},
            r".*: bias correction is always on; allo",
        ),
        (
            {"scheduler": {"type": "LRRangeTest"}},
            r"scheduler.type: 'LRRangeTest' is not supported; allowed: War",
        ),
        (
            {"scheduler": {"params": {"warmup_min_lr": 0}}},
            r"scheduler.type: is missing; allowed: WarmupLR or ",
        ),
        (
            {"amp": {"enabled": True, "opt_level": "O1"}},
            r"amp.enabled: is a legacy feature of DeepSpeed \(A",
        ),
        (
            {"sparse_attention": {"mode": "fixed"}},
            r"sparse_attention: is a legacy feature of DeepSpeed",
        ),
        (
            {"quantize_training": {"quantize_groups": 1}},
            r"quantize_training: is a legacy feature of DeepSp",
        ),
        (
            {"curriculum_learning": {"enabled": True}},
            r"curriculum_learning.enabled: is a legacy feature",
        ),
        (
            {"elasticity": {"enabled": True}},
            r"elasticity.enabled: results are bit-identical on any number",
        ),
        (
            {"tensor_parallel": {"autotp_size": 2}},
            r"tensor_parallel.autotp_size: is not supported",
        ),
        (
            {"seed": 1},
            r"seed: is not a DeepSpeed key: use train.seed in the spec",
        ),
        (
            {"optimizer": {"params": {"betas": [0.9, 1]}}},
            r"optimizer.params.betas: train.optimizer.betas\[1\]: 1 is out of range",
        ),
        (
            {"optimizer": {"params": {"betas": [0.9]}}},
            r"optimizer.params.betas: is a list; allowed: a list"
            r" of 2, each a number from 0 to 1",
        ),
        (
            {"deterministic": 1},
            r"deterministic: is not a DeepSpeed key: training is always deterministic; allowed: true",
        ),
        (
            {"gradient_clipping": "much"},
            r"gradient_clipping: is 'much'; allowed: a number from 0",
        ),
        (
            {"gradient_clipping": 1e31},
            r"gradient_clipping: train.optimizer.clip: 1e\+31 is out of range",
        ),
        ({"stage": 3}, rf"stage: is not a key here; did you mean {ZERO}.stage\?"),
        (
            {"overlap_com": True},
            rf"overlap_com: is not a key here; did you mean {ZERO}.overlap_comm\?",
        ),
        (
            {"offload_optimizer": {}},
            rf"offload_optimizer: .*did you mean {ZERO}.offload_optimizer\?",
        ),
        ({"lr": 1}, r"lr: is not a key here; did you mean optimizer.params.lr\?"),
        (
            {"optimizer": {"lr": 1}},
            r"optimizer.lr: is not a key here; did you mean optimizer.params.lr\?",
        ),
        (
            {ZERO: {"gradient_clipping": 1}},
            rf"{ZERO}.gradient_clipping: .*did you mean gradient_clipping",
        ),
        (
            {ZERO: {"stagee": 1}},
            rf"{ZERO}.stagee: is not a key here; did you mean stage\?",
        ),
        (
            {"train_batch_sze": 1},
            r"train_batch_sze: is not a key here; did you mean train_batch_size\?",
        ),
        (
            {"lr_scheduler": {}},
            r"lr_scheduler: is not a key here; did you mean scheduler\?",
        ),
        (
            {G: 32, B: 4, A: 1},
            rf"{A}: {G} 32 is not 4 per rank x 1 accumulation steps x 2 ranks; "
            rf"allowed: {G} 8, or --set cluster.ranks=8$",
        ),
        (
            {G: 2**21, B: 1, A: 1},
            rf"{A}: {G} 2097152 is not 1 .*; allowed: {G} 2$",
        ),
        (
            {G: 33, B: 4, A: 1},
            rf"{A}: {G} 33 is not 4 per rank x 1 accumulation steps x 2 ranks; allowed: {G} 8$",
        ),
        (
            {G: 3, A: 1},
            rf"{A}: {G} 3 is not a multiple of 1 accumulation steps x 2 ranks; allowed: {G} a multiple of 2",
        ),
    ],
)
def test_refusals(tmp_path: Path, config: dict, said: str | None) -> None:
    if said is None:
        # False gives way: fp16 may be meant
        assert read(tmp_path, config).train.precision == "bf16"
        return
    message = refusal(tmp_path, config)
    assert re.match(rf"ds.json:1: {said}", message), message


def test_what_an_optimizer_leaves_out(tmp_path: Path) -> None:
    """No note is given for keys that --set sets, or that the spec sets to DeepSpeed's value."""
    config = {
        "optimizer": {"type": "AdamW"},
        "autotuning": {"weight_decay": 1},
    }

    def told(*sets):
        return [note for note in notes(tmp_path, config, sets) if "lacks" in note]

    own = (
        "train.optimizer.betas=[0.9, 0.95]",
        "train.optimizer.weight_decay=0.1",
    )
    assert len(told(own[0])) == len(told(own[1])) == 1 and told(*own) == []
    spec = re.sub(
        r"optimizer: .*",
        "optimizer: {type: SGD, lr: 1.0e-3, momentum: 0.9, nesterov: false}",
        GPT,
    )
    sgd = {"optimizer": {"type": "SGD", "params": {"lr": 0.001, "momentum": 0.9}}}
    assert spec != GPT and notes(tmp_path, sgd, (), spec) == []


def test_what_contradicts_the_spec_names_both_places(tmp_path: Path) -> None:
    assert refusal(tmp_path, {"optimizer": {"params": {"lr": 1e-5}}}) == (
        "s.yaml:32: train.schedule.min_lr: 0.0001 is above the lr 1e-05 given at ds.json:1: "
        "optimizer.params.lr; allowed: 0 to 1e-05"
    )


def test_all_mistakes_are_told_at_once(tmp_path: Path) -> None:
    message = refusal(
        tmp_path,
        '{\n"stage": 1,\n"zero_optimization": {"stage": 9,\n"b": 2},\n"seed": 3\n}',
    )
    assert [line.partition(": ")[0] for line in message.splitlines()] == [
        "ds.json:2",
        "ds.json:3",
        "ds.json:4",
        "ds.json:5",
    ]
    late = refusal(
        tmp_path,
        '{"amp": {"enabled": true},\n"zero_optimization": {"stage": 9}}',
    )
    assert [line.partition(": ")[0] for line in late.splitlines()] == [
        "ds.json:1",
        "ds.json:2",
    ]
    many = refusal(tmp_path, {ZERO: {f"k{n}": 1 for n in range(22)}}).splitlines()
    assert len(many) == 20 and many[-1] == "and 3 more"


def test_optimizers_and_schedulers_are_the_specs(tmp_path: Path) -> None:
    """Params of the spec's own types are keys of train.optimizer and train.schedule."""
    train = read(
        tmp_path,
        {
            "optimizer": {
                "type": "SGD",
                "params": {"lr": 0.1, "momentum": 0.9, "nesterov": True},
            },
            "scheduler": {
                "type": "WarmupDecayLR",
                "params": {
                    "warmup_num_steps": "auto",
                    "warmup_max_lr": "auto",
                    "warmup_min_lr": "auto",
                    "total_num_steps": 50,
                    "warmup_type": "linear",
                },
            },
        },
    ).train
    o, s = train.optimizer, train.schedule
    assert (o.type, o.lr, o.momentum, o.nesterov, o.betas, o.weight_decay) == (
        "SGD",
        0.1,
        0.9,
        True,
        None,
        0.1,
    )
    assert (
        s.type,
        s.warmup_num_steps,
        s.warmup_max_lr,
        s.warmup_min_lr,
        s.total_num_steps,
        s.warmup_type,
        s.steps,
        s.min_lr,
    ) == ("WarmupDecayLR", 10, 0.1, 0.0, 50, "linear", None, None)
    zero = {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 0}}}
    assert read(tmp_path, zero).train.schedule.warmup_num_steps == 0
    for changed, said in (
        (
            {"optimizer": {"type": "SGD", "params": {"betas": [0.9, 0.99]}}},
            r"ds.json:5: optimizer.params.betas: train.optimizer.betas: SGD has no betas; allowed",
        ),
        (
            {
                "scheduler": {
                    "type": "WarmupLR",
                    "params": {"total_num_steps": 5},
                }
            },
            r"ds.json:5: scheduler.params.total_num_steps: .*WarmupLR has no total_num_steps",
        ),
        (
            {"scheduler": {"type": "OneCycle"}},
            r"ds.json:3: .*cycle_min_lr: is missing; OneCycle",
        ),
    ):
        message = refusal(tmp_path, json.dumps(changed, indent=1))
        assert re.match(said, message), message


# ---- a new feature changes only rows


def test_what_is_built_later_changes_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later features change only rows: Apex and another offload work by exchanging rows, with keys
    of the spec as stand-ins."""
    config = {
        "amp": {"enabled": True, "opt_level": 12},
        "bf16": {"enabled": False},
        ZERO: {
            "stage": 3,
            "cpu_offload": True,
            "offload_optimizer": {"pin_memory": True},
        },
    }
    with pytest.raises(SpecError, match="amp.enabled"):
        read(tmp_path, config)
    rows = {
        "amp.enabled": dskeys.to("train.precision", dskeys.FLAG, words={True: "bf16"}),
        "amp.opt_level": dskeys.to("train.seed", dskeys.SIZE),
        f"{ZERO}.offload_optimizer.device": dskeys.to(
            "name", dskeys.TEXT, words={"cpu": "host"}
        ),
        f"{ZERO}.offload_optimizer.pin_memory": dskeys.to(
            "zero.overlap_comm", dskeys.FLAG
        ),
    }
    monkeypatch.setattr(dsconfig, "TABLE", {**dskeys.TABLE, **rows})
    spec = read(tmp_path, config)
    assert (
        spec.train.precision,
        spec.train.seed,
        spec.name,
        spec.zero.overlap_comm,
    ) == ("bf16", 12, "host", True)
    # "auto": the spec may enable it
    for switch, seed in (
        (False, 1),
        ("auto", 12),
        (None, 1),
    ):
        spec = read(tmp_path, {"amp": {"enabled": switch, "opt_level": 12}})
        assert (spec.train.precision, spec.train.seed) == ("f32", seed)


# ---- no input breaks it


def survives(read_it: Callable[[], Spec]) -> None:
    try:
        read_it()
    except SpecError as e:
        lines = str(e).split("\n")
        assert 1 <= len(lines) <= 20
        assert all(line.isprintable() and len(line) < 2000 for line in lines)
        assert re.match(r".*\.(yaml|json)(:\d+)?: .", lines[0])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


WORDS = sorted(
    {word for key in dskeys.TABLE for word in key.split(".")}
    | {"stagee", "", "a b", "é"}
)
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["auto", "cpu", "AdamW", "WarmupLR", "1e8", 0, 1, 2, 3, 8, 0.9]),
)
trees = st.recursive(
    scalars,
    lambda t: st.one_of(
        st.lists(t, max_size=2),
        st.dictionaries(st.sampled_from(WORDS), t, max_size=3),
    ),
    max_leaves=8,
)
dotted = st.sampled_from(sorted(dskeys.TABLE))


@settings(max_examples=100)
@given(config=st.dictionaries(st.sampled_from(WORDS), trees, max_size=4))
def test_fuzz_trees(folder: Path, config: dict) -> None:
    survives(lambda: read(folder, config))


@settings(max_examples=100)
@given(given_=st.lists(st.tuples(dotted, scalars | trees), min_size=1, max_size=6))
def test_fuzz_values_of_known_keys(folder: Path, given_: list) -> None:
    config: dict = {}
    for key, value in given_:
        *above, last = key.split(".")
        place = config
        for word in above:
            place = place.setdefault(word, {})
            if not isinstance(place, dict):
                break
        else:
            place[last] = value
    survives(lambda: read(folder, config))


GOOD_TEXTS = sorted((ROOT / "tests/data/ds_configs").glob("*.json"))


@settings(max_examples=100)
@given(data=st.data(), source=st.sampled_from(GOOD_TEXTS))
def test_fuzz_text(folder: Path, data: st.DataObject, source: Path) -> None:
    """Pieces of a config are cut out, doubled or replaced by noise, and the reader gives a Spec or
    a SpecError."""
    text = source.read_text()
    for _ in range(data.draw(st.integers(1, 3))):
        i = data.draw(st.integers(0, len(text)))
        j = data.draw(st.integers(i, min(len(text), i + 30)))
        noise = st.one_of(
            st.text(max_size=4),
            st.sampled_from(
                [
                    "\n",
                    ": ",
                    ",",
                    "{",
                    "}",
                    "[",
                    "]",
                    '"',
                    "'",
                    "'''",
                    "//",
                    "/*",
                    "*/",
                    "#",
                    "\\",
                    "\\u12",
                    "{{",
                    "${",
                    "$A",
                    "<a>",
                    "```",
                    "NaN",
                    "True",
                    "9" * 50,
                    "\t",
                    "\0",
                    text[i:j] * 2,
                ]
            ),
        )
        text = text[:i] + data.draw(noise) + text[j:]
    survives(lambda: read(folder, text))


# ---- --emit config


def test_where_every_value_comes_from(tmp_path: Path) -> None:
    from zg.write import config

    spec = read(
        tmp_path,
        f'{{"{ZERO}":\n {{"stage": 2, "reduce_bucket_size": "auto"}},\n"{A}": 4}}',
        ("train.seed=7",),
    )
    lines = config.text(spec).replace(f"{tmp_path}/", "").splitlines()
    said = {
        line.split(": ")[0]: re.split(r" +# ", line.split(": ", 1)[1], maxsplit=1)
        for line in lines
        if not line.startswith("#")
    }
    line = GPT[: GPT.index("  global_batch")].count("\n") + 1
    assert said["zero.stage"] == ["2", f"ds.json:2: {ZERO}.stage"]
    assert said["zero.reduce_bucket_size"] == [
        "3600",
        f"ds.json:2: {ZERO}.reduce_bucket_size: auto, width x width",
    ]
    assert said["zero.overlap_comm"] == ["true", "default"]
    assert said["train.global_batch"] == ["16", f"ds.json:3: {A}"]
    assert said["train.sequence"] == ["33", f"s.yaml:{line + 2}"]
    assert said["train.seed"] == ["7", "--set"]
    assert said["model.units[1].ops[0].residual[1].attention.head_dim"] == [
        "20",
        "derived",
    ]
    assert said["model.units[1].blocks"] == ["3", "s.yaml:9"]
    assert (
        len(
            {
                line.index("#")
                for line in lines
                if len(line.split(" #")[0]) <= config.WIDTH
            }
        )
        <= 2
    )


@pytest.mark.parametrize(
    "path", sorted((ROOT / "model_specs").glob("*.yaml")), ids=lambda p: p.stem
)
def test_the_lines_can_be_given_back(tmp_path: Path, path: Path) -> None:
    """Every line outside the model, given back as --set, gives the same spec and the same text
    except for origins."""
    from zg.write import config

    groups = (
        "[{match: ['*.weight'], lr_factor: 0.5}, {match: ['*'], weight_decay: 0.1}]"
    )
    first = load(str(path), [f"train.optimizer.groups={groups}"])
    lines = config.text(first).splitlines()
    sets = [
        re.sub(r" +# .*", "", line).replace(": ", "=", 1)
        for line in lines
        if not line.startswith(("model.", "#"))
    ]
    again = load(str(path), sets)
    assert dataclasses.replace(again, places={}) == dataclasses.replace(
        first, places={}
    )
    values = [re.sub(r" +# .*", "", line) for line in config.text(again).splitlines()]
    assert values == [re.sub(r" +# .*", "", line) for line in lines]


def test_the_command(tmp_path: Path) -> None:
    """The command prints notes on stderr, and nothing on stdout if there is a mistake."""

    def zgen(config: dict) -> subprocess.CompletedProcess[str]:
        (tmp_path / "ds.json").write_text(json.dumps(config, indent=1))
        return subprocess.run(
            [
                ROOT / "gen/zgen",
                ROOT / "model_specs/gpt-tiny.yaml",
                "--zero",
                tmp_path / "ds.json",
                "--emit",
                "config",
            ],
            capture_output=True,
            text=True,
            timeout=LIMIT,
        )

    done = zgen({ZERO: {"stage": 1, "contiguous_gradients": True}})
    assert (
        done.returncode == 0 and done.stdout.count(f"/ds.json:3: {ZERO}.stage\n") == 1
    )
    assert re.fullmatch(
        rf"zgen: note: .*/ds.json:4: {ZERO}.contiguous_gradients: .*\n",
        done.stderr,
    )
    done = zgen({ZERO: {"stage": 4}, "bf16": {"enabled": 1}})
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (
        2,
        "",
        2,
    )


def test_the_page_of_all_keys_is_the_tables() -> None:
    """docs/config.md is the output of PYTHONPATH=gen .venv/bin/python tools/config_doc.py."""
    import config_doc

    page = (ROOT / "docs/config.md").read_text()
    assert page == config_doc.page()
    derived = [
        line
        for line in page.splitlines()
        if re.match(rf"\| `[^`]*\.({'|'.join(config.DERIVED)})` ", line)
    ]
    assert len(derived) == len(config.DERIVED)
    assert not [line for line in derived if line.endswith("| `null` |")]
