"""test_spec.py -- tests the spec reader: accepted specs, refusals and their messages; no input
breaks it."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from zg.read.schema import TARGETS
from zg.read.spec import Spec, SpecError, load

from tests.lib import drawn
from tests.lib.parameters import elements

ROOT = Path(__file__).resolve().parents[2]
SPECS = ROOT / "model_specs"
LISTED = f"targets: [{', '.join(TARGETS)}]"
GPT, LLAMA, QWEN = (SPECS / f"{n}-tiny.yaml" for n in ("gpt", "llama", "qwen3"))


def read(
    tmp: Path,
    text: str | bytes,
    sets: tuple[str, ...] = (),
    zero: object = None,
) -> Spec:
    """Return the spec of a text, with a ds_config given as an object or as text."""
    (tmp / "s.yaml").write_bytes(text.encode() if isinstance(text, str) else text)
    if zero is not None:
        (tmp / "ds.json").write_text(
            zero if isinstance(zero, str) else json.dumps(zero)
        )
    return load(
        str(tmp / "s.yaml"),
        sets,
        str(tmp / "ds.json") if zero is not None else None,
    )


def refusal(tmp: Path, *args: object) -> str:
    """Return the message without the folder's name."""
    with pytest.raises(SpecError) as e:
        read(tmp, *args)
    return str(e.value).replace(f"{tmp}/", "")


def swap(text: str, old: str, new: str) -> str:
    assert text.count(old) == 1, old
    return text.replace(old, new)


def line_of(text: str, part: str) -> int:
    return text[: text.index(part)].count("\n") + 1


# ---- accepted specs


@pytest.mark.parametrize(
    "name, count",
    [
        ("gpt2-124m", 124_439_808),
        ("gpt2-1558m", 1_557_611_200),
        ("llama3-8b", 8_030_261_248),
        ("llama3-405b", 405_853_388_800),
        ("internlm2-20b", 19_861_149_696),
        ("qwen3-0.6b", 596_049_920),
    ],
)
def test_parameters_of_known_models(name: str, count: int) -> None:
    """Known models have the counts that Hugging Face shows for their files."""
    spec = load(str(SPECS / f"{name}.yaml"))
    assert spec.name == name
    assert elements(spec) == count


@pytest.mark.parametrize("path", sorted(SPECS.glob("*.yaml")), ids=lambda p: p.stem)
def test_every_committed_spec_is_read(path: Path) -> None:
    spec = load(str(path))
    assert spec.model.vocab >= 256
    assert spec.train.global_batch % (spec.train.micro_batch * spec.cluster.ranks) == 0


def test_fields_and_defaults() -> None:
    spec = load(str(GPT))
    embedding, blocks, head = spec.model.units
    assert [u.kind for u in spec.model.units] == [
        "embedding",
        "blocks",
        "head",
    ]
    found = [(unit.name, unit.repeat) for unit in (embedding, blocks)]
    assert found == [("", 1), ("h.{l}", 3)]
    assert dict(embedding.ops[0].args) == {
        "tokens": "wte",
        "positions": "wpe",
        "context": 33,
        "scale": None,
    }
    attention = blocks.ops[0].ops[1]
    assert dict(attention.args) == {
        "name": "attn",
        "heads": 3,
        "kv_heads": 3,
        "head_dim": 20,
        "bias": True,
        "out_bias": True,
        "rope": None,
        "local_rope": None,
        "rope_layers": None,
        "qk_norm": False,
        "window": None,
        "eps": 1e-6,
        "one_plus": False,
        "scale": None,
        "softcap": None,
    }
    assert (
        spec.places["model.units[1].ops[0].residual[1].attention"]
        == f"{GPT}:{line_of(GPT.read_text(), '- attention')}"
    )
    assert dict(blocks.ops[1].ops[2].args) == {"kind": "tanh"}
    layer = dict(blocks.ops[0].ops[0].args)
    assert layer == {"name": "ln_1", "eps": 1e-5, "weight": True, "bias": True}
    assert dict(head.ops[1].args) == {
        "name": (),
        "out": (256,),
        "bias": False,
        "tied": "wte",
        "softcap": None,
    }
    assert spec.zero.stage3_param_persistence_threshold == 100
    assert (
        spec.zero.reduce_bucket_size,
        spec.zero.overlap_comm,
        spec.zero.replicate,
    ) == (500_000_000, True, ())
    assert (spec.train.sum, spec.train.optimizer.decay, spec.data.ignore) == (
        {"block": 16},
        "matrices",
        65535,
    )


def test_llama_keys() -> None:
    blocks = load(str(LLAMA)).model.units[1]
    rope = blocks.ops[0].ops[1].args["rope"]
    assert (
        rope["theta"],
        rope["scaling"]["type"],
        rope["scaling"]["original_context"],
    ) == (500000.0, "llama3", 16)
    assert blocks.ops[1].ops[1].args["name"] == (
        "mlp.gate_proj",
        "mlp.up_proj",
    )
    assert blocks.ops[1].ops[1].args["out"] == (176, 176)
    assert load(str(QWEN)).model.units[1].ops[0].ops[1].args["head_dim"] == 24


def test_a_spec_cannot_be_changed() -> None:
    spec = load(str(GPT))
    with pytest.raises(AttributeError):
        spec.zero.stage = 1
    with pytest.raises(TypeError):
        spec.model.units[1].ops[0].ops[1].args["heads"] = 4


MINIMAL = """model:
  vocab: 70000
  width: 8
  names: llama
  units:
  - embedding: {tokens: e}
  - {blocks: 1, name: "h.{l}", ops: [residual: [attention: {name: a, heads: 2}]]}
  - head: [linear: {tied: e}]
train: {global_batch: 4, micro_batch: 1, sequence: 8, optimizer: {lr: 1e-3}}
"""


def test_the_least_spec(tmp_path: Path) -> None:
    spec = read(tmp_path, MINIMAL)
    assert (spec.name, spec.cluster.ranks, spec.targets, spec.zero.stage) == (
        "model",
        1,
        TARGETS,
        0,
    )
    assert spec.data.ignore is None  # token 65535 is one of 70000 words
    for vocab, ignore in (65536, None), (65535, 65535):
        changed = MINIMAL.replace("70000", str(vocab))
        assert read(tmp_path, changed).data.ignore == ignore
    assert (
        spec.train.optimizer.lr,
        spec.train.schedule.type,
        spec.train.precision,
    ) == (1e-3, "constant", "f32")


def test_a_model_that_grows_beyond_all_bounds(tmp_path: Path) -> None:
    text = (
        GPT.read_text()
        .replace("out: 240", "out: 2000000000")
        .replace("blocks: 3", "blocks: 2000")
    )
    with pytest.raises(
        SpecError, match=r"model.units.*has more than 281474976710656 elements"
    ):
        read(tmp_path, text)


@pytest.mark.parametrize(
    "text, value",
    [
        ("5e8", 500_000_000),
        ('"1e8"', 100_000_000),
        ("1000", 1000),
        ("2.0e3", 2000),
        ("'12'", 12),
    ],
)
def test_integers_as_deepspeed_writes_them(
    tmp_path: Path, text: str, value: int
) -> None:
    spec = read(tmp_path, MINIMAL + f"zero: {{reduce_bucket_size: {text}}}\n")
    assert spec.zero.reduce_bucket_size == value and isinstance(
        spec.zero.reduce_bucket_size, int
    )


def test_anchors_and_merges(tmp_path: Path) -> None:
    text = swap(MINIMAL, "{blocks: 1,", "&b {blocks: 1,")
    text = swap(text, "  - head", '  - {<<: *b, name: "g.{l}"}\n  - head')
    assert [u.name for u in read(tmp_path, text).model.units] == [
        "",
        "h.{l}",
        "g.{l}",
        "",
    ]


def test_set_wins_and_the_last_one(tmp_path: Path) -> None:
    sets = (
        "zero.stage=1",
        "zero.stage=2",
        "train.optimizer.betas=[0.5, 0.6]",
        "data.ignore=null",
        "train.schedule.type=linear",
        "train.schedule.steps=11",
    )
    spec = read(
        tmp_path,
        GPT.read_text(),
        sets,
        {"zero_optimization": {"stage": 3, "overlap_comm": False}},
    )
    assert (
        spec.zero.stage,
        spec.zero.overlap_comm,
        spec.train.optimizer.betas,
    ) == (2, False, (0.5, 0.6))
    assert (spec.data.ignore, spec.train.schedule.type) == (None, "linear")


# ---- refusals: (spec, its change, the message; @ is the line of the change)

WRONG = [
    (
        GPT,
        "vocab: 256",
        "vocab: yes",
        r"@: model.vocab: 'yes' is not an integer; allowed: an integer from 2 to 2147483647",
    ),
    (GPT, "vocab: 256", "vocab: true", r"@: model.vocab: true is not an integer"),
    (
        GPT,
        "vocab: 256",
        "vocab: 256.5",
        r"@: model.vocab: 256.5 is not an integer",
    ),
    (
        GPT,
        "vocab: 256",
        "vocab: 0400",
        r"@: model.vocab: '0400' is not an integer",
    ),
    (
        GPT,
        "vocab: 256",
        "vocab: .inf",
        r"@: model.vocab: inf is not a finite number",
    ),
    (
        GPT,
        "vocab: 256",
        "vocab: " + "9" * 5000,
        r"@: model.vocab: inf is not a finite number",
    ),
    (
        GPT,
        "vocab: 256",
        "vocab: 4000000000",
        r"@: model.vocab: 4000000000 is out of range",
    ),
    (GPT, "vocab: 256", "vocab:", r"@: model.vocab: empty is not an integer"),
    (
        GPT,
        "vocab: 256",
        "vocab: 256\n  vocab: 257",
        r"s.yaml:5: 'vocab' is given twice; allowed: each key once",
    ),
    (
        GPT,
        "vocab: 256",
        "vocabs: 256",
        r"@: model.vocabs: is not a key here; did you mean vocab\? allowed: vocab, vocab_from, vocab_rows, width",
    ),
    (
        GPT,
        "names: gpt2 ",
        "names: gpt3 ",
        r"@: model.names: 'gpt3' is not known; did you mean gpt2\? allowed: gpt2 or llama",
    ),
    (GPT, "name: gpt-tiny", "name: 124", r"@: name: 124 is not text; .*quotes"),
    (GPT, "name: gpt-tiny", 'name: "a\\nb"', r"@: name: 'a\\nb' is not valid"),
    (
        GPT,
        "width: 60",
        "width: 1099511627776",
        r"@: model.width: 1099511627776 is out of range",
    ),
    (
        GPT,
        "width: 60",
        "width: 600000000",
        r"200000000 is too large; allowed: up to 1024",
    ),
    (
        GPT,
        "heads: 3,",
        "heads: 7,",
        r"@: model.units\[1\].ops\[0\].residual\[1\].attention.heads: 7 does not divide width 60; "
        r"allowed: a divisor of width, or head_dim",
    ),
    (
        GPT,
        "heads: 3,",
        "heads: 3, kv_heads: 2,",
        r"@: .*kv_heads: 2 does not divide heads 3",
    ),
    (
        GPT,
        "heads: 3,",
        "heads: 4, rope: {theta: 10000},",
        r"@: .*rope: rotates pairs, and head_dim 15 is odd",
    ),
    (
        GPT,
        "heads: 3,",
        "heads: 3, widht: 2,",
        r"@: .*attention.widht: is not a key here; .*allowed: name, heads",
    ),
    (GPT, "heads: 3, ", "", r"@: .*attention.heads: is missing"),
    (
        GPT,
        "blocks: 3",
        "blocks: 0",
        r"@: model.units\[1\].blocks: 0 is out of range",
    ),
    (
        GPT,
        "name: h.{l}",
        "name: h",
        r"@: model.units\[1\].name: 'h' is not valid; .*\{l\}",
    ),
    (
        GPT,
        "name: h.{l}",
        "name: h.{l}.{l}",
        r"@: model.units\[1\].name: .*is not valid",
    ),
    (
        GPT,
        "name: mlp.c_proj, out: 60",
        "name: mlp.c_proj, out: 61",
        r"s.yaml:15: model.units\[1\].ops\[1\].residual: the branch's input is 60 wide and its output 61",
    ),
    (
        GPT,
        "name: mlp.c_fc, out: 240",
        "name: [a, b], out: [120, 120]",
        r"@: .*linear.name: several linears in one product need weights stored as \[out,in\]",
    ),
    (
        GPT,
        "name: mlp.c_fc, out: 240",
        "name: mlp.c_proj, out: 240",
        r".*there is already a tensor h.0.mlp.c_proj.weight; allowed: each name once",
    ),
    (
        GPT,
        "name: mlp.c_fc, out: 240",
        "out: 240",
        r"@: .*linear.name: is missing",
    ),
    (
        GPT,
        "name: mlp.c_fc, out: 240",
        "tied: wte, out: 240",
        r"@: .*linear.bias: is set by `tied`",
    ),
    (
        GPT,
        "gelu: tanh",
        "gelu: relu",
        r"@: .*gelu: 'relu' is not known; allowed: tanh or erf",
    ),
    (
        GPT,
        "gelu: tanh",
        "silu: {}",
        r"@: .*residual\[2\].silu: is not a key here; .*allowed: residual, parallel, layernorm",
    ),
    (
        GPT,
        "gelu: tanh",
        "{gelu: tanh, swiglu: {}}",
        r"@: .*residual\[2\]: has 2 ops; allowed: one of residual",
    ),
    (GPT, "gelu: tanh", "{}", r"@: .*residual\[2\]: has 0 ops"),
    (
        GPT,
        "linear: {tied: wte}",
        "linear: {tied: wpe}",
        r"@: .*tied: there is no embedding 'wpe'; allowed: wte",
    ),
    (
        GPT,
        "- linear: {tied: wte}",
        "- linear: {tied: wte}\n    - linear: {name: o, out: 256}",
        r"s.yaml:2\d: model.units\[2\].head\[1\].linear.tied: is not the last op of the head; allowed: "
        "the last op of the head",
    ),
    (
        GPT,
        "gelu: tanh",
        "linear: {tied: wte}",
        r"@: .*residual\[2\].linear.tied: is not in the head; allowed: the last op of the head",
    ),
    (
        GPT,
        "linear: {tied: wte}",
        "linear: {name: o, out: 255}",
        r"@: model.units\[2\].head\[1\]: the head does not end with a linear to the vocabulary; .*256",
    ),
    (
        GPT,
        "- linear: {tied: wte}",
        "",
        r"s.yaml:2\d: model.units\[2\].head\[0\]: the head does not end",
    ),
    (
        GPT,
        "context: 33",
        "context: 32",
        r"@: .*context: 32 positions are fewer than train.sequence 33; .*context >= train.sequence",
    ),
    (GPT, ", context: 33", "", r"@: .*positions: is given without the other"),
    (
        GPT,
        "- head:",
        "- tail:",
        r"@: model.units\[2\].tail: is not a key here; .*allowed: embedding, blocks",
    ),
    (
        GPT,
        "  - embedding: {tokens: wte, positions: wpe, context: 33}\n",
        "",
        r"model.units\[0\]: is blocks instead of embedding",
    ),
    (GPT, "zero:", "zeros:", r"@: zeros: is not a key here; did you mean zero\?"),
    (
        GPT,
        "stage: 3",
        "stage: 4",
        r"@: zero.stage: 4 is out of range; allowed: an integer from 0 to 3",
    ),
    (
        GPT,
        "stage: 3",
        "stage: 3\n  overlap_comm: 1",
        r"s.yaml:2\d: zero.overlap_comm: 1 is not a boolean; .*true or false",
    ),
    (
        GPT,
        "stage: 3",
        "stage: 3\n  replicate: [lm_head*]",
        r"zero.replicate\[0\]: 'lm_head\*' matches no tensor",
    ),
    (
        GPT,
        "stage: 3",
        "stage: 3\n  replicate: [wte]",
        r"zero.replicate\[0\]: 'wte' matches no tensor \(wte.weight is one\); allowed: a pattern of",
    ),
    (
        GPT,
        "stage: 3",
        "stage: 3\n  replicate: ln_f.bias",
        r"zero.replicate: is 'ln_f.bias'; did you mean \[ln_f.bias\]\? allowed: a list",
    ),
    (
        GPT,
        "global_batch: 8",
        "global_batch: 9",
        r"@: train.global_batch: train.micro_batch 2 x cluster.ranks 2 = 4 does "
        r"not divide train.global_batch 9; allowed: train.global_batch 8 or 12",
    ),
    (
        GPT,
        "  micro_batch: 2\n",
        "",
        r"s.yaml:\d+: train.micro_batch: is missing",
    ),
    (
        GPT,
        "micro_batch: 2",
        "micro_batch: .nan",
        r"@: train.micro_batch: nan is not a finite number",
    ),
    (
        GPT,
        "sequence: 33",
        "sequence: -1",
        r"@: train.sequence: -1 is out of range",
    ),
    (
        GPT,
        "precision: f32",
        "precision: f64",
        r"@: train.precision: 'f64' is not known; allowed: f32 or bf16 or f16",
    ),
    (
        GPT,
        "precision: f32",
        "precision: bf16\n  loss_scale: {window: 100}",
        r"s.yaml:\d+: train.loss_scale: bf16 uses no loss scale; allowed: train.precision f16, or leave it out",
    ),
    (
        GPT,
        "precision: f32",
        "precision: f16\n  loss_scale: {hysteresis: 0}",
        r"s.yaml:\d+: train.loss_scale.hysteresis: 0 is out of range; allowed: an integer from 1",
    ),
    (
        GPT,
        "precision: f32",
        "precision: f16\n  max_skips: 0",
        r"s.yaml:\d+: train.max_skips: 0 is out of range",
    ),
    (
        GPT,
        "precision: f32",
        "precision: f32\n  recompute: [gelu, glue]",
        r"s.yaml:\d+: train.recompute: 'glue' is not an op of a block; allowed: none, full or a list of "
        r"layernorm, .*, gelu, relu2, scale, swiglu, geglu, residual$",
    ),
    (
        GPT,
        "precision: f32",
        "precision: f32\n  recompute: {gelu: 1}",
        r"train.recompute: a mapping is not an op of a block; allowed: none",
    ),
    (
        GPT,
        "lr: 1.0e-3",
        "lr: fast",
        r"@: train.optimizer.lr: 'fast' is not a number",
    ),
    (
        GPT,
        "lr: 1.0e-3",
        "lr: -1",
        r"@: train.optimizer.lr: -1 is out of range",
    ),
    (
        GPT,
        "[0.9, 0.95]",
        "[0.9]",
        r"@: train.optimizer.betas: is a list of 1; allowed: a list of 2",
    ),
    (
        GPT,
        "[0.9, 0.95]",
        "[0.9, 1]",
        r"@: train.optimizer.betas\[1\]: 1 is out of range",
    ),
    (
        GPT,
        "eps: 1.0e-8",
        "eps: 0",
        r"@: train.optimizer.eps: 0 is out of range",
    ),
    (
        GPT,
        "type: AdamW",
        "type: Adamax",
        r"@: train.optimizer.type: 'Adamax' is not known; did you mean Adam\? allowed: AdamW or Adam or SGD or Lion or",
    ),
    (
        GPT,
        "type: AdamW",
        "type: SGD",
        r"@: train.optimizer.betas: SGD has no betas; allowed: lr, type, momentum, nesterov, weight",
    ),
    (
        GPT,
        "type: AdamW",
        "type: Lion",
        r"@: train.optimizer.eps: Lion has no eps; allowed: lr, ",
    ),
    (
        GPT,
        "clip: 1.0",
        "momentum: 0.9",
        r"@: train.optimizer.momentum: AdamW has no momentum; ",
    ),
    (
        GPT,
        "type: AdamW, lr: 1.0e-3, betas: [0.9, 0.95], eps: 1.0e-8",
        "type: SGD, lr: 1, nesterov: true",
        r"@: train.optimizer.nesterov: needs a momentum; ",
    ),
    (
        GPT,
        "clip: 1.0",
        "groups: [{match: ['*.biases'], frozen: true}]",
        r"@: train.optimizer.groups\[0\].match\[0\]: '\*.biases' matches no tensor",
    ),
    (
        GPT,
        "clip: 1.0",
        "groups: [{match: [], frozen: true}]",
        r"@: train.optimizer.groups\[0\].match: is empty",
    ),
    (
        GPT,
        "clip: 1.0",
        "groups: [{match: [wte.*], frozen: true, lr_factor: 2}]",
        r"@: train.optimizer.groups\[0\].frozen: a frozen group has no learning rate or weight decay",
    ),
    (
        GPT,
        "clip: 1.0",
        "groups: [{match: [wte.*], lr: 2}]",
        r"@: train.optimizer.groups\[0\].lr: is not a key here; .*allowed: match, lr_factor, weight_de",
    ),
    (
        GPT,
        "steps: 100",
        "steps: 10",
        r"@: train.schedule.steps: 10 steps leave none for the decay after a warmup of 10",
    ),
    (
        GPT,
        "type: cosine",
        "type: wsd",
        r"@: train.schedule.decay: is missing; wsd requires it; allowed: a value for it",
    ),
    (
        GPT,
        "type: cosine",
        "decay: 91, type: wsd",
        r"@: train.schedule.steps: 100 steps are too few for a warmup of 10 and a decay of 91; .* 101",
    ),
    (
        GPT,
        "type: cosine",
        "type: OneCycle",
        r"@: train.schedule.warmup: OneCycle has no warmup; allowed: type, cycle_min_lr, cycle_max",
    ),
    (
        GPT,
        "{type: cosine, warmup: 10, steps: 100, min_lr: 1.0e-4}",
        "{type: WarmupCosineLR, total_num_steps: 1000}",
        r"@: train.schedule.total_num_steps: 1000 steps end before the decay begins; .*more than 1000",
    ),
    (
        GPT,
        "{type: cosine, warmup: 10, steps: 100, min_lr: 1.0e-4}",
        "{type: OneCycle, cycle_min_lr: 0, cycle_max_lr: 1, decay_mom_rate: 0.1}",
        r"@: train.schedule.decay_mom_rate: 0.1 is out of range; allowed: a number from 0 to 0",
    ),
    (
        GPT,
        "{type: cosine, warmup: 10, steps: 100, min_lr: 1.0e-4}",
        "{type: OneCycle, cycle_min_lr: 2, cycle_max_lr: 1}",
        r"@: train.schedule.cycle_min_lr: 2 is above cycle_max_lr 1; allowed: 0 to 1",
    ),
    (
        GPT,
        "min_lr: 1.0e-4",
        "min_lr: 1",
        r"@: train.schedule.min_lr: 1 is above the lr 0.001 given at .*yaml:\d+; allowed: 0 to 0.001",
    ),
    (
        GPT,
        "cluster: {ranks: 2}",
        "cluster: 2",
        r"@: cluster: is 2; allowed: a mapping with the keys ranks",
    ),
    (
        GPT,
        "cluster: {ranks: 2}",
        "cluster: [2]",
        r"@: cluster: is a list; allowed: a mapping with the keys ranks",
    ),
    (
        GPT,
        LISTED,
        "targets: [cpu, sm_91]",
        r"@: targets\[1\]: 'sm_91' is not a target; allowed: cpu or sm_80 or sm_90 or sm_100",
    ),
    (
        GPT,
        "precision: f32",
        "reduction: fast",
        r"@: train.reduction: fast sums with NCCL, which the target cpu does not have; allowed: exact, or",
    ),
    *(
        (
            GPT,
            "precision: f32",
            f"sm_margin: {n}",
            rf"@: train.sm_margin: {n} is out of range or odd; allowed: 0 or an even integer from 2 to 64$",
        )
        for n in (-2, 3, 66)
    ),
    (
        GPT,
        "precision: f32",
        "sm_margin: 2.5",
        r"@: train.sm_margin: 2.5 is out of range or odd; ",
    ),
    (
        GPT,
        "precision: f32",
        "sm_margin: some",
        r"@: train.sm_margin: 'some' is not an integer; ",
    ),
    (
        GPT,
        "precision: f32",
        "sm_margin: true",
        r"@: train.sm_margin: true is not an integer; ",
    ),
    (
        GPT,
        LISTED,
        "targets: [tpu]",
        r"@: targets\[0\]: 'tpu' is not a target; allowed: cpu or sm_80",
    ),
    (GPT, LISTED, "targets: []", r"@: targets: is empty"),
    (GPT, LISTED, "targets: [cpu, cpu]", r"@: targets: names a target twice"),
    (
        GPT,
        LISTED,
        "data: {ignore: 4294967296}",
        r"@: data.ignore: 4294967296 is out of range",
    ),
    (
        GPT,
        LISTED,
        "data: {documents: mask}",
        r"@: data.documents: mask needs `end`; allowed: with `end: TOKEN`",
    ),
    (
        GPT,
        LISTED,
        "data: {documents: mask, end: 256}",
        r"@: data.end: 256 is not below model.vocab 256; allowed: 0 to 255",
    ),
    (
        GPT,
        LISTED,
        "data: {documents: mask, end: -1}",
        r"@: data.end: -1 is out of range",
    ),
    (
        GPT,
        LISTED,
        "data: {documents: mask, end: 7, ignore: 7}",
        r"@: data.end: equals data.ignore, which the model reads as token 0; allowed: another",
    ),
    (
        GPT,
        LISTED,
        "data: {end: 7}",
        r"@: data.end: has no effect unless documents are masked; allowed: with `documents: mask`",
    ),
    (
        GPT,
        LISTED,
        "data: {documents: packed}",
        r"@: data.documents: 'packed' is not known; allowed: join or mask",
    ),
    (
        LLAMA,
        "out: [176, 176]",
        "out: [176, 177]",
        r"s.yaml:\d+: .*residual\[2\].swiglu: its input is 353 wide; allowed: an even width",
    ),
    (LLAMA, "swiglu: {}", "swiglu:", r"@: .*swiglu: is empty; allowed: \{\}"),
    (
        LLAMA,
        "swiglu: {}",
        "swiglu: {beta: 1}",
        r"@: .*swiglu.beta: is not a key here; allowed: none",
    ),
    (
        LLAMA,
        "out: [176, 176]",
        "out: [176]",
        r"@: .*linear.out: has 1 widths for 2 names",
    ),
    (
        LLAMA,
        "high_freq_factor: 4",
        "high_freq_factor: 1",
        r"@: .*low_freq_factor: 1 is not below high_freq_factor 1",
    ),
    (
        LLAMA,
        "type: llama3",
        "type: ntk",
        r"@: .*scaling.type: 'ntk' is not known; allowed: linear or dynamic or llama3 or yarn or ",
    ),
    (
        LLAMA,
        "type: llama3",
        "type: yarn",
        r"@: .*scaling.low_freq_factor: yarn has no low_freq_factor; allowed: type, factor, ",
    ),
    (
        LLAMA,
        "low_freq_factor: 1, ",
        "",
        r"@: .*scaling.low_freq_factor: is missing; llama3 requires it",
    ),
    (
        LLAMA,
        "theta: 500000, scaling: {type: llama3, factor: 8, low_freq_factor: 1, "
        "high_freq_factor: 4,",
        "theta: 1, scaling: {type: yarn, factor: 8,",
        r"@: .*rope.theta: with 1 all frequencies are equal; allowed: above 1, with yarn",
    ),
    (LLAMA, "factor: 8, ", "", r"@: .*scaling.factor: is missing"),
    (
        LLAMA,
        "kv_heads: 2",
        "kv_heads: 3",
        r"@: .*kv_heads: 3 does not divide heads 4",
    ),
]


@pytest.mark.parametrize(
    "spec, old, new, said",
    WRONG,
    ids=lambda v: str(getattr(v, "stem", v))[:30],
)
def test_refusals_name_line_key_and_what_is_allowed(
    tmp_path: Path, spec: Path, old: str, new: str, said: str
) -> None:
    text = spec.read_text()
    message = refusal(tmp_path, swap(text, old, new))
    said = said.replace("@", f"s.yaml:{line_of(text, old)}")
    assert re.search(said, message), message
    assert (
        "; allowed: " in message
        or "; a value is required" in message
        or "? allowed: " in message
    )


@pytest.mark.parametrize(
    "text, said",
    [
        (b"", r"s.yaml:1: is empty"),
        (b"# nothing\n", r"s.yaml:1: is empty"),
        (
            b"- a\n- b\n",
            r"s.yaml:1: the file holds a list; allowed: a mapping with the keys name, model",
        ),
        (
            b"model: [1, 2\n",
            r"s.yaml:2: broken syntax: while parsing a flow sequence",
        ),
        (
            b"train:\n  lr: 1\n  seed:1\n  batch: 2\n",
            r"s.yaml:3: broken syntax: 'seed:1' is not a key; did you mean 'seed: 1'\? a space",
        ),
        (
            b"seed:1\nx: 2\n",
            r"s.yaml:1: broken syntax: 'seed:1' is not a key; did you mean",
        ),
        (
            b"train:\n  lr: 1\n  batch 2\n  seed: 1\n",
            r"s.yaml:3: broken syntax: 'batch 2' has no colon after its key",
        ),
        (
            b"a: 1\nb: c: d\n",
            r"s.yaml:2: broken syntax: mapping values are not allowed",
        ),
        (b"a: 1\nb: \xff\n", r"s.yaml:2: byte 0xff is not UTF-8"),
        (
            b"a: 1\n\x00b: 1\n",
            r"s.yaml:2: byte 0x00 is not text; allowed: UTF-8 text",
        ),
        (b"a: 1\n\x03b: 1\n", r"s.yaml:2: the character '\\x03' is not printable"),
        (
            b"a: !!python/object/apply:os.system [x]\n",
            r"s.yaml:1: the tag 'tag:yaml.org,2002:python",
        ),
        (
            b"a: !mine 3\n",
            r"s.yaml:1: the tag '!mine' is not supported; allowed: plain YAML without tags",
        ),
        (
            b"a: 1\n---\nb: 1\n",
            r"s.yaml:2: broken syntax: expected a single document",
        ),
        (b"? [a]\n: 1\n", r"s.yaml:1: a key that is not a scalar"),
        (b"<<: 3\n", r"s.yaml:1: << of a value that is not a mapping"),
        (b"a: &a [*a]\n", r"is too large or nested too deeply"),
        (b"a: *b\n", r"s.yaml:1: broken syntax: found undefined alias"),
        (b"[" * 100_000, r"s.yaml:1: is nested too deeply"),
        (b"#" * 200_000, r"s.yaml: is too long for a spec"),
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
            r"s.yaml: is a Git LFS pointer, not the file itself; allowed: the file",
        ),
        (b'a: "\\U0011FFFF"\n', r"s.yaml:1: broken syntax"),
        (b"%YAML " + b"9" * 5000 + b".1\n--- a\n", r"s.yaml:1: broken syntax"),
        (
            b"a0: &a0 [x,x]\n"
            + b"".join(
                b"a%d: &a%d [*a%d,*a%d]\n" % (i, i, i - 1, i - 1) for i in range(1, 39)
            ),
            r"is too large or nested too deeply \(each use of an alias counts\)",
        ),
    ],
)
def test_broken_files(tmp_path: Path, text: bytes, said: str) -> None:
    start = time.process_time()
    message = refusal(tmp_path, text)
    assert re.search(said, message), message
    # Seconds of work; the bomb would hold 2^39 values
    assert time.process_time() - start < 10


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    for path in (tmp_path / "none.yaml", tmp_path, "", "a\0b", "a\nb"):
        with pytest.raises(SpecError, match="cannot be read") as e:
            load(str(path))
        assert "\n" not in str(e.value)
    with pytest.raises(SpecError, match="none.json: cannot be read"):
        load(str(GPT), (), str(tmp_path / "none.json"))


@pytest.mark.parametrize(
    "text, said",
    [
        (
            "zero.stages=3",
            r"--set: zero.stages: is not a key here; did you mean stage\?",
        ),
        (
            "zeros.stage=3",
            r"--set: zeros: is not a key here; did you mean zero\?",
        ),
        (
            "train.lora={rank:16}",
            r"--set: train.lora.rank:16: .*did you mean 'rank: 16'\? a space after the colon(.|\n)*",
        ),
        ("zero.stage", r"--set: 'zero.stage' is not KEY=VALUE"),
        ("=3", r"--set: '=3' is not KEY=VALUE"),
        ("zero..stage=3", r"--set: 'zero..stage=3' is not KEY=VALUE"),
        ("zero.stage=", r"--set: zero.stage: has no value"),
        ("zero.stage=#", r"--set: zero.stage: is empty"),
        ("zero.stage=[", r"--set: zero.stage: broken syntax"),
        (
            "zero.stage.deep=3",
            r"--set: zero.stage.deep: zero.stage holds 3; allowed: a key inside a mapping",
        ),
        ("zero=3", r"--set: zero: is 3; allowed: a mapping"),
        ("zero.stage=!!python/name:os.system", r"--set: zero.stage: the tag"),
        (
            "cluster.ranks=1e30",
            r"--set: cluster.ranks: 1e\+30 is out of range",
        ),
        (
            "cluster.ranks=3",
            r"--set: cluster.ranks: train.micro_batch 2 x cluster.ranks 3 = 6 does not divide train.global_batch 8; "
            r"allowed: cluster.ranks 2 or 4, or train.global_batch 6 or 12",
        ),
        (
            "train.micro_batch=3",
            r"--set: train.micro_batch: .*allowed: train.global_batch 6 or 12",
        ),
        (
            "train.global_batch=1",
            r"--set: train.global_batch: .*allowed: train.global_batch 4",
        ),
    ],
)
def test_bad_sets(tmp_path: Path, text: str, said: str) -> None:
    message = refusal(tmp_path, GPT.read_text(), (text,))
    assert re.fullmatch(f"{said}.*", message), message


# ---- no input breaks it: the result is a Spec or a SpecError of few printable lines


def survives(read_it: Callable[[], Spec]) -> None:
    try:
        spec = read_it()
    except SpecError as e:
        lines = str(e).split("\n")
        assert 1 <= len(lines) <= 20
        assert all(line.isprintable() and len(line) < 2000 for line in lines)
        assert re.match(r".*\.(yaml|json)(:\d+)?: .|--set: .", lines[0])
        return
    assert math.isfinite(spec.train.optimizer.lr) and elements(spec) <= 2**48


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(
        [
            "cpu",
            "wte",
            "{l}",
            "h.{l}",
            "1e8",
            "llama",
            "tanh",
            -1,
            0,
            1,
            2,
            2**31,
            2**63,
        ]
    ),
)
KEYS = sorted(
    set(
        re.findall(
            r"([a-z_0-9]+):",
            GPT.read_text() + LLAMA.read_text() + QWEN.read_text(),
        )
    )
)
trees = st.recursive(
    scalars,
    lambda t: st.one_of(
        st.lists(t, max_size=3),
        st.dictionaries(
            st.one_of(st.sampled_from(KEYS), st.text(max_size=4)),
            t,
            max_size=3,
        ),
    ),
    max_leaves=6,
)


@settings(max_examples=150)
@given(data=st.data(), source=st.sampled_from([GPT, LLAMA, QWEN]))
def test_fuzz_text(folder: Path, data: st.DataObject, source: Path) -> None:
    """Pieces of a good spec are cut out, doubled or replaced by noise."""
    raw = source.read_bytes()
    for _ in range(data.draw(st.integers(1, 3))):
        i = data.draw(st.integers(0, len(raw)))
        j = data.draw(st.integers(i, min(len(raw), i + 30)))
        noise = st.one_of(
            st.binary(max_size=4),
            st.sampled_from(
                [
                    b"\n",
                    b": ",
                    b"- ",
                    b"{",
                    b"]",
                    b"&a ",
                    b"*a",
                    b"!!x ",
                    b"|\n",
                    b".nan",
                    b"9" * 50,
                    b"\t",
                    b"'",
                    raw[i:j] * 2,
                ]
            ),
        )
        raw = raw[:i] + data.draw(noise) + raw[j:]
    survives(lambda: read(folder, raw))


def places(node: object) -> list[tuple[object, object]]:
    """Return all (container, key) of a tree."""
    pairs: list[tuple[object, object]] = []
    if isinstance(node, (dict, list)):
        pairs = list(node.items() if isinstance(node, dict) else enumerate(node))
    return [(node, key) for key, _ in pairs] + [
        p for _, below in pairs for p in places(below)
    ]


@pytest.mark.slow
@settings(max_examples=150)
@given(data=st.data(), mapping=drawn.specs())
def test_fuzz_trees(folder: Path, data: st.DataObject, mapping: dict) -> None:
    """A good spec has one value replaced by any tree, or any additional key."""
    container, key = data.draw(st.sampled_from(places(mapping)))
    if isinstance(container, dict) and data.draw(st.booleans()):
        key = data.draw(st.sampled_from(KEYS))
    container[key] = data.draw(trees)
    survives(lambda: read(folder, json.dumps(mapping)))


@settings(max_examples=60)
@given(mapping=drawn.specs())
def test_drawn_specs_are_read(folder: Path, mapping: dict) -> None:
    """Specs from the strategies of other tests are read."""
    spec = read(folder, json.dumps(mapping))
    assert spec.model.width == mapping["model"]["width"]
    assert len(spec.model.units) == len(mapping["model"]["units"])


@settings(max_examples=100)
@given(
    key=st.one_of(
        st.text(max_size=20),
        st.sampled_from(["zero.stage", "train", "model.units", "data.ignore"]),
    ),
    value=st.one_of(st.text(max_size=20), scalars.map(str)),
)
def test_fuzz_sets(folder: Path, key: str, value: str) -> None:
    survives(lambda: read(folder, MINIMAL, (f"{key}={value}",)))
