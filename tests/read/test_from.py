"""test_from.py -- tests config.json of a Hugging Face folder as the model of a spec: every key is
honoured, without effect, or refused by name."""

from __future__ import annotations

import json
import math
import pathlib
import re
import subprocess

import hf_doc
import pytest
from zg.read import hf, hfkeys, spec
from zg.read.hfmodels import FAMILIES
from zg.read.hfrows import HfFamily, Number
from zg.read.node import SpecError
from zg.write import hf as writer

from tests.lib import trainer
from tests.lib.parameters import elements

SPECS = trainer.ROOT / "model_specs"
TINY = trainer.ROOT / "tests" / "reference" / "hf"
# Keys of the hub's files that define these models.
LLAMA = {
    "model_type": "llama",
    "hidden_act": "silu",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
YARN = {
    "type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 2048,
}
GPT2 = {
    "model_type": "gpt2",
    "architectures": ["GPT2LMHeadModel"],
    "activation_function": "gelu_new",
    "attn_pdrop": 0.1,
    "n_ctx": 1024,
    "n_embd": 768,
    "n_head": 12,
    "n_layer": 12,
    "n_positions": 1024,
    "task_specific_params": {"text-generation": {"max_length": 50}},
    "vocab_size": 50257,
}
QWEN3 = {
    "model_type": "qwen3",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}

# Keys of the base class of configurations, by to_json_string(use_diff=False) of transformers 4.46.
DUMP = {
    "_attn_implementation_autoset": False,
    "_name_or_path": "",
    "add_cross_attention": False,
    "architectures": None,
    "bad_words_ids": None,
    "begin_suppress_tokens": None,
    "bos_token_id": 1,
    "chunk_size_feed_forward": 0,
    "cross_attention_hidden_size": None,
    "decoder_start_token_id": None,
    "diversity_penalty": 0.0,
    "do_sample": False,
    "early_stopping": False,
    "encoder_no_repeat_ngram_size": 0,
    "eos_token_id": 2,
    "exponential_decay_length_penalty": None,
    "finetuning_task": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "id2label": {"0": "LABEL_0", "1": "LABEL_1"},
    "initializer_range": 0.02,
    "is_decoder": False,
    "is_encoder_decoder": False,
    "label2id": {"LABEL_0": 0, "LABEL_1": 1},
    "length_penalty": 1.0,
    "max_length": 20,
    "min_length": 0,
    "no_repeat_ngram_size": 0,
    "num_beam_groups": 1,
    "num_beams": 1,
    "num_return_sequences": 1,
    "output_attentions": False,
    "output_hidden_states": False,
    "output_scores": False,
    "pad_token_id": None,
    "prefix": None,
    "problem_type": None,
    "pruned_heads": {},
    "remove_invalid_values": False,
    "repetition_penalty": 1.0,
    "return_dict": True,
    "return_dict_in_generate": False,
    "sep_token_id": None,
    "suppress_tokens": None,
    "task_specific_params": None,
    "temperature": 1.0,
    "tf_legacy_loss": False,
    "tie_encoder_decoder": False,
    "tokenizer_class": None,
    "top_k": 50,
    "top_p": 1.0,
    "torch_dtype": None,
    "torchscript": False,
    "transformers_version": "4.46.3",
    "typical_p": 1.0,
    "use_bfloat16": False,
    "use_cache": True,
}
DATA = trainer.ROOT / "tests" / "data"
PUBLISHED = json.loads((DATA / "configs.json").read_text())


def folder(tmp_path: pathlib.Path, config: dict[str, object]) -> str:
    made = tmp_path / "some model"
    made.mkdir(exist_ok=True)
    text = json.dumps(config, indent=1)
    (made / "config.json").write_text(text)
    return str(made)


def model(tmp_path: pathlib.Path, config: dict[str, object]) -> spec.Model:
    return spec.load(None, (), None, folder(tmp_path, config)).model


def wrong(tmp_path: pathlib.Path, config: dict[str, object], *sets: str) -> str:
    """Return the error from its line on."""
    there = folder(tmp_path, config)
    with pytest.raises(SpecError) as caught:
        spec.load(None, sets, None, there)
    said = str(caught.value)
    assert said.startswith(f"{there}/config.json:"), said
    return said.removeprefix(f"{there}/config.json:")


# ---- the model of a folder


@pytest.mark.parametrize(
    "config,name",
    [(GPT2, "gpt2-124m"), (LLAMA, "llama3-8b"), (QWEN3, "qwen3-0.6b")],
)
def test_models_of_the_hub(
    tmp_path: pathlib.Path, config: dict[str, object], name: str
) -> None:
    """A folder of the hub gives the same model as its spec."""
    want = spec.load(str(SPECS / f"{name}.yaml")).model
    assert model(tmp_path, config) == want


@pytest.mark.parametrize("name", sorted(p.stem for p in TINY.glob("*.npz")))
def test_what_is_written_is_read_again(tmp_path: pathlib.Path, name: str) -> None:
    """config.json written for a model read from one gives the same model again."""
    first = spec.load(None, ("train.sequence=32",), None, str(TINY / name))
    text = writer.config(first)
    again = spec.load(None, (), None, folder(tmp_path, json.loads(text)))
    assert again.model == first.model


def test_every_default_is_transformers(tmp_path: pathlib.Path) -> None:
    """Every default is transformers': a file with its type alone has the numbers in the row."""
    for family in FAMILIES:
        sets = ("train.sequence=8",)
        there = folder(tmp_path, {"model_type": family.type})
        made = spec.load(None, sets, None, there).model
        layers, width, vocab = (family.usual[key] for key in family.sizes)
        assert (made.units[1].repeat, made.width, made.vocab) == (
            layers,
            width,
            vocab,
        )


def test_both_spellings_of_rope(tmp_path: pathlib.Path) -> None:
    scaling = {
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    old = {**LLAMA, "rope_scaling": {**scaling, "rope_type": "llama3"}}
    older = {**LLAMA, "rope_scaling": {**scaling, "type": "llama3"}}
    new = {k: x for k, x in LLAMA.items() if k != "rope_theta"}
    new["rope_parameters"] = {
        **scaling,
        "rope_type": "llama3",
        "rope_theta": 500000.0,
    }
    first, *others = (model(tmp_path, x) for x in (old, older, new))
    assert all(other == first for other in others)
    attention = first.units[1].ops[0].ops[1]
    assert attention.args["rope"]["scaling"]["original_context"] == 8192
    assert first != model(tmp_path, LLAMA)


def test_a_scaling_has_the_defaults_of_transformers(
    tmp_path: pathlib.Path,
) -> None:
    """A null key is as good as a missing one."""

    def scaling(**more: object) -> dict[str, object]:
        config = LLAMA | {"rope_scaling": YARN | more}
        attention = model(tmp_path, config).units[1].ops[0].ops[1]
        return dict(attention.args["rope"]["scaling"])

    usual = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True}
    grown = 0.1 * math.log(4) + 1
    found = scaling(attention_factor=None, mscale=0.7, beta_slow=None)
    assert found.pop("attention_factor") == pytest.approx(grown, rel=1e-15)
    assert found == usual | {
        "type": "yarn",
        "factor": 4.0,
        "original_context": 2048,
    }
    both = scaling(mscale=2, mscale_all_dim=1)["attention_factor"]
    assert both == pytest.approx((0.2 * math.log(4) + 1) / grown, rel=1e-15)
    said = scaling(mscale=2, mscale_all_dim=1, attention_factor=1.5)
    assert said["attention_factor"] == 1.5
    silent = scaling(original_max_position_embeddings=None)
    assert silent["original_context"] == LLAMA["max_position_embeddings"]


def test_a_spec_says_the_rest(tmp_path: pathlib.Path) -> None:
    own = tmp_path / "own.yaml"
    text = (SPECS / "gpt-tiny.yaml").read_text()
    own.write_text(re.sub(r"(?ms)^model:\n.*?(?=^zero:)", "", text))
    there = folder(tmp_path, GPT2)
    read = spec.load(str(own), ("train.micro_batch=1",), None, there)
    tiny = spec.load(str(SPECS / "gpt-tiny.yaml"), ("train.micro_batch=1",))
    assert read.train == tiny.train and read.zero == tiny.zero
    assert read.model.width == 768
    with pytest.raises(SpecError, match="is given both in the spec and by --from"):
        spec.load(str(SPECS / "gpt-tiny.yaml"), (), None, there)


def test_without_a_spec_all_is_told(tmp_path: pathlib.Path) -> None:
    read = spec.load(None, (), None, folder(tmp_path, GPT2))
    t = read.train
    assert (t.optimizer.type, t.optimizer.lr) == ("AdamW", 1e-5)
    assert (t.schedule.type, t.precision, t.seed) == ("constant", "f32", 1)
    assert (read.cluster.ranks, read.zero.stage, t.sequence) == (1, 0, 1024)
    told = "\n".join(read.notes)
    for said in ("sequence: 1024", "lr: 1e-05", "ranks: 1", "stage: 0"):
        assert said in told
    own = spec.load(None, ("train.seed=7",), None, folder(tmp_path, GPT2))
    assert "seed: 1" in told and "seed" not in "\n".join(own.notes)
    short = {**GPT2, "n_positions": 77}
    assert spec.load(None, (), None, folder(tmp_path, short)).train.sequence == 77
    assert read.name == "some-model"


def test_dropout_is_told(tmp_path: pathlib.Path) -> None:
    there = folder(tmp_path, {**GPT2, "resid_pdrop": 0.1})
    notes = spec.load(None, (), None, there).notes
    for said in (
        "attn_pdrop: 0.1 is ignored: train.attention_dropout sets it",
        "resid_pdrop: 0.1 is ignored: train.dropout sets it",
    ):
        assert any(note.endswith(said) for note in notes)


def test_more_positions_than_the_model_has_are_told(
    tmp_path: pathlib.Path,
) -> None:
    there = folder(tmp_path, {**LLAMA, "max_position_embeddings": 64})
    for n, told in ((64, False), (65, True)):
        notes = spec.load(None, (f"train.sequence={n}",), None, there).notes
        said = f"train.sequence: {n} exceeds the 64 positions"
        assert any(said in note for note in notes) == told


# ---- refusals by name and line


@pytest.mark.parametrize(
    "changes,said",
    [
        (
            {"model_type": "bert"},
            "2: model_type: 'bert' is not a supported model family",
        ),
        ({"hidden_act": "gelu"}, "3: hidden_act: is 'gelu'; allowed: 'silu'"),
        (
            {"quantization_config": {}},
            "15: quantization_config: the weights are quantized; only those of bits",
        ),
        ({"quantization": {"bits": 4}}, "15: quantization: the weights are"),
        (
            {"auto_map": {"AutoConfig": "x.Y"}},
            "15: auto_map: the model has custom code",
        ),
        (
            {"cross_attention_hidden_size": 8},
            "15: cross_attention_hidden_size: is",
        ),
        ({"tie_encoder_decoder": True}, "15: tie_encoder_decoder: is true"),
        ({"attention_dropout": "0.1"}, "15: attention_dropout: is '0.1'"),
        (
            {"rope_scaling": {"type": "ntk"}},
            "15: rope_scaling: scaling 'ntk'",
        ),
        (
            {
                "rope_scaling": {
                    "type": "dynamic",
                    "factor": 2.0,
                    "original_max_position_embeddings": 8,
                }
            },
            "18: rope_scaling.original_max_position_embeddings: is not a key of dynamic; ",
        ),
        ({"rope_parameters": {"beta": 1}}, "16: rope_parameters.beta: is no"),
        ({"rope_parameters": False}, "15: rope_parameters: is false; allowed"),
        ({"rope_parameters": []}, "15: rope_parameters: is a list; allowed"),
        ({"rope_scaling": 0}, "15: rope_scaling: is 0; allowed"),
        (
            {"rope_scaling": YARN | {"rope_type": "linear"}},
            "15: rope_scaling: rope_type 'linear' contradicts type 'yarn'; allowed",
        ),
        (
            {"rope_scaling": YARN | {"mscale": True}},
            "19: rope_scaling.mscale: is true; allowed: a number above 0",
        ),
        (
            {"rope_scaling": {"type": "linear", "mscale": 1}},
            "17: rope_scaling.mscale: is not a key of linear",
        ),
        (
            {"rope_scaling": YARN | {"mscale": 1, "mscale_all_dim": "x"}},
            "20: rope_scaling.mscale_all_dim: is 'x'",
        ),
        (
            {"rope_scaling": YARN | {"beta_fast": 1}},
            "15: model.units[1].ops[0].residual[1].attention.rope.scaling.beta_slow",
        ),
        (
            {"rope_scaling": {"type": "llama3", "beta": 1}},
            "17: rope_scaling.beta",
        ),
        (
            {"rope_theta": 0},
            "11: model.units[1].ops[0].residual[1].attention.rope.theta: 0",
        ),
        ({"rope_scaling": 8}, "15: rope_scaling: is 8; allowed: an object"),
        ({"partial_rotary_factor": 0.5}, "15: partial_rotary_factor: is 0.5"),
        ({"vocab_size": "many"}, "9: vocab_size: is 'many'; allowed: an integer"),
        (
            {"rope_scaling": YARN | {"factor": "4"}},
            "17: rope_scaling.factor: is '4'; allowed: a number",
        ),
        (
            {"rope_parameters": {"rope_theta": "1e4"}},
            "16: rope_theta: is '1e4'; allowed: a number",
        ),
        ({"hidden_size": 0}, "5: model.width: 0"),
        ({"tie_word_embeddings": "false"}, "13: tie_word_embeddings: is '"),
        ({"sliding_window": "64", "model_type": "mistral"}, "15: sliding_w"),
        ({"max_position_embeddings": None}, "12: max_position_embeddings: is"),
        ({"num_key_value_heads": 5}, "8: model.units[1].ops[0].residual[1]"),
        (
            {"rms_norm_eps": None},
            "10: rms_norm_eps: is null; allowed: a num",
        ),
        (
            {"rms_norm_eps": "1e-5"},
            "10: rms_norm_eps: is '1e-5'; allowed: a n",
        ),
        ({"rope_theta": "1e4"}, "11: rope_theta: is '1e4'; allowed: a number"),
        ({"num_hidden_layers": 10**30}, "4: num_hidden_layers: is 1000000"),
        ({"num_hidden_layers": 10**10}, "4: num_hidden_layers: is 1000000"),
    ],
)
def test_wrong_values(
    tmp_path: pathlib.Path, changes: dict[str, object], said: str
) -> None:
    found = wrong(tmp_path, LLAMA | changes)
    assert found.startswith(said) and "; allowed: " in found, found


def config_of(name: str, **changes: object) -> dict[str, object]:
    """Return the config.json of a reference model, without changed keys that are None."""
    said = json.loads((TINY / name / "config.json").read_text()) | changes
    return {key: x for key, x in said.items() if x is not None or key not in changes}


def test_rotary_positions_that_could_be_of_other_layers(tmp_path: pathlib.Path) -> None:
    """Layers with a window have a rotary table of their own: a config that does not say which
    layers it is about is refused."""
    theta = config_of("olmo3-plain", rope_theta=1e6)
    assert "rope_theta: is 1000000.0, which versions of" in wrong(tmp_path, theta)
    flat = {"rope_type": "default", "rope_theta": 5000.0}
    given = config_of("olmo3-plain", rope_theta=None, rope_scaling=None)
    said = wrong(tmp_path, given | {"rope_parameters": flat})
    assert "rope_parameters: does not say which layers it is of" in said


def test_a_part_of_a_head_of_its_own_size(tmp_path: pathlib.Path) -> None:
    """partial_rotary_factor is a share of head_dim, where that is given."""
    there = folder(tmp_path, config_of("phi3", head_dim=32, partial_rotary_factor=0.75))
    block = spec.load(None, ("train.sequence=32",), None, there).model.units[1]
    (attention,) = [x for op in block.ops for x in op.ops if x.kind == "attention"]
    assert attention.args["head_dim"] == 32 and attention.args["rope"]["width"] == 24


def test_rotary_positions_of_gpt_neox(tmp_path: pathlib.Path) -> None:
    """Its own keys, rope_parameters, and defaults where both are silent or null."""
    own = config_of("neox", rotary_emb_base=10000, rotary_pct=0.25, hidden_size=64)
    rope = {"rope_type": "default", "rope_theta": 10000, "partial_rotary_factor": 0.25}
    bare = {k: x for k, x in own.items() if not k.startswith("rotary_")}
    want = model(tmp_path, own)
    for said in ({"rope_parameters": rope}, {}, dict.fromkeys(["rotary_emb_base"])):
        assert model(tmp_path, bare | said) == want
    assert model(tmp_path, bare | {"rotary_pct": 1}) != want
    said = wrong(tmp_path, bare | {"rotary_pct": 1.5})
    assert ": rotary_pct: is 1.5; allowed: a number above 0" in said
    said = wrong(tmp_path, bare | {"rotary_emb_base": "1e4"})
    assert ": rotary_emb_base: is '1e4'; allowed: a number" in said


@pytest.mark.parametrize("name", ["neox", "stablelm"])
def test_attention_beside_the_mlp(tmp_path: pathlib.Path, name: str) -> None:
    """use_parallel_residual chooses one of two blocks. Absent or null it has its default."""
    both = [config_of(name, use_parallel_residual=x) for x in (True, False)]
    beside, after = (model(tmp_path, config) for config in both)
    usual = config_of(name, use_parallel_residual=None)
    null = {**usual, "use_parallel_residual": None}
    assert [len(m.units[1].ops) for m in (beside, after)] == [1, 2]
    assert model(tmp_path, usual) == (beside if name == "neox" else after)
    if name == "stablelm":
        assert model(tmp_path, null) == after
    for bad in ("true", 1, *[None] * (name == "neox")):
        said = wrong(tmp_path, usual | {"use_parallel_residual": bad})
        assert ": use_parallel_residual: is " in said and "; allowed: true or f" in said


def test_words_of_gelu(tmp_path: pathlib.Path) -> None:
    words = {"erf": ("gelu", "gelu_python"), "tanh": ("gelu_new", "gelu_fast")}
    for kind, theirs in words.items():
        for word in theirs:
            block = model(tmp_path, config_of("phi", hidden_act=word)).units[1]
            (_, beside) = block.ops[0].ops
            assert beside.ops[1].ops[1].args["kind"] == kind
    assert "is 'relu'; allowed: " in wrong(
        tmp_path, config_of("phi", hidden_act="relu")
    )


@pytest.mark.parametrize(
    "name,key,value,said",
    [
        ("cohere", "use_qk_norm", True, "is true; allowed: false"),
        ("olmo", "clip_qkv", 8.0, "is 8.0; allowed: null"),
        ("stablelm", "qk_layernorm", True, "is true; allowed: false"),
        ("phi", "tie_word_embeddings", True, "is true, but the logits of phi have a b"),
    ],
)
def test_what_is_not_supported(
    tmp_path: pathlib.Path, name: str, key: str, value: object, said: str
) -> None:
    assert f": {key}: {said}" in wrong(tmp_path, config_of(name, **{key: value}))


def windows(there: str, *sets: str) -> set[object]:
    """Return the windows of all attentions of a model, with samples longer than any of them."""
    read = spec.load(None, ("train.sequence=8192", *sets), None, there)
    ops = [op for unit in read.model.units for op in unit.ops]
    return {
        inner.args["window"]
        for op in ops
        for inner in op.ops
        if inner.kind == "attention"
    }


def test_a_window(tmp_path: pathlib.Path) -> None:
    """A window of every layer is one number for the model, windows of some layers are a list."""
    long = {"max_position_embeddings": 8192, "sliding_window": 512}
    mistral = LLAMA | long | {"model_type": "mistral"}
    assert windows(folder(tmp_path, mistral)) == {512}
    none = mistral | {"sliding_window": None}
    assert windows(folder(tmp_path, none)) == {None}
    silent = {k: x for k, x in mistral.items() if k != "sliding_window"}
    # transformers' own default
    assert windows(folder(tmp_path, silent)) == {4096}
    assert "but llama has no sliding window" in wrong(tmp_path, LLAMA | long)
    qwen = QWEN3 | long | {"max_window_layers": 0}
    assert windows(folder(tmp_path, qwen)) == {None}
    on = qwen | {"use_sliding_window": True}
    assert windows(folder(tmp_path, on)) == {512}
    off = on | {"max_window_layers": QWEN3["num_hidden_layers"]}
    assert windows(folder(tmp_path, off)) == {None}
    some = on | {"max_window_layers": 1}
    each = (None, *[512] * 27)
    assert windows(folder(tmp_path, some)) == {each}
    types = ["sliding_attention"] * QWEN3["num_hidden_layers"]
    assert windows(folder(tmp_path, some | {"layer_types": types})) == {512}
    types[5] = "full_attention"
    there = folder(tmp_path, some | {"layer_types": types})
    assert windows(there) == {(*[512] * 5, None, *[512] * 22)}
    off = {"layer_types": types, "use_sliding_window": False}
    assert windows(folder(tmp_path, some | off)) == {None}
    for bad in (types[1:], [*types, types[0]], [None] * 28, "sliding", {}, 28):
        said = wrong(tmp_path, on | {"layer_types": bad})
        assert "allowed: 28 of full_attention, sliding_attention" in said
    for key in ({"layer_types": types[4:20]}, {"max_window_layers": 1}):
        assert (
            ": has layers without a window, but mistral has a window in all layers or n"
            in (wrong(tmp_path, mistral | {"num_hidden_layers": 16} | key))
        )
    for key in ("use_sliding_window", "max_window_layers"):
        said = wrong(tmp_path, on | {key: "x"})
        assert f"{key}: is 'x'; allowed: " in said


def test_the_end_of_documents(tmp_path: pathlib.Path) -> None:
    """eos_token_id ends documents if a spec masks documents and does not name the token that ends
    one."""
    mask = "data={documents: mask}"
    there = folder(tmp_path, GPT2 | {"eos_token_id": 50256})
    assert spec.load(None, (mask,), None, there).data.end == 50256
    assert spec.load(None, (), None, there).data.end is None
    said = "data={documents: mask, end: 9}"
    assert spec.load(None, (said,), None, there).data.end == 9
    for eos in ({}, {"eos_token_id": [1, 2]}):  # Llama 3 has three
        there = folder(tmp_path, GPT2 | eos)
        with pytest.raises(SpecError, match="mask needs `end`"):
            spec.load(None, (mask,), None, there)


def test_keys_of_published_files(tmp_path: pathlib.Path) -> None:
    gpt2 = {"n_special": 0, "predict_special_tokens": True, "_num_labels": 1}
    assert model(tmp_path, GPT2 | gpt2) == model(tmp_path, GPT2)
    qwen = {"use_mrope": False, "_attn_implementation_autoset": True}
    assert model(tmp_path, QWEN3 | qwen) == model(tmp_path, QWEN3)


@pytest.mark.parametrize("type_", ["llama", "mistral", "qwen2"])
def test_null_heads_follow_from_others(tmp_path: pathlib.Path, type_: str) -> None:
    """Null heads follow transformers: as many as queries, with the model's width divided by their
    number."""
    said = {k: x for k, x in LLAMA.items() if k != "head_dim"}
    said |= {"model_type": type_, "architectures": None}
    heads = said["num_attention_heads"]
    null = {"num_key_value_heads": None, "head_dim": None}
    if type_ == "qwen2":
        del null["head_dim"]
    found = model(tmp_path, said | null)
    assert found == model(tmp_path, said | {"num_key_value_heads": heads})


def test_no_key_is_in_two_places() -> None:
    tables = (hfkeys.FREE, hfkeys.TOLD, hfkeys.FIXED, hfkeys.REFUSED)
    lists = [*map(tuple, tables), hfkeys.DROPOUTS, hf.WINDOWS, hf.ROPE]
    words = [key for names in lists for key in names]
    assert len(words) == len(set(words))


def told(tmp_path: pathlib.Path, config: dict[str, object]) -> list[str]:
    """Return the notes on keys without effect."""
    there = folder(tmp_path, config)
    said = f"{there}/config.json: without effect on training: "
    notes = spec.load(None, (), None, there).notes
    return [n.removeprefix(said) for n in notes if n.startswith(said)]


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models(tmp_path: pathlib.Path, name: str) -> None:
    """Published configurations are read; parameters are as transformers counts them on its meta
    device."""
    case = PUBLISHED[name]
    if "refused" in case:
        assert f": {case['refused']}: " in wrong(tmp_path, case["config"])
        return
    made = spec.load(None, (), None, folder(tmp_path, case["config"]))
    assert elements(made) == case["parameters"]


@pytest.mark.parametrize("config", [GPT2, LLAMA, QWEN3])
def test_keys_without_effect_are_one_note(
    tmp_path: pathlib.Path, config: dict[str, object]
) -> None:
    """Keys without effect that transformers 4.46 writes for its base class, and that tools add,
    give one note."""
    want = model(tmp_path, config)
    assert told(tmp_path, config) == []
    assert model(tmp_path, DUMP | config) == want
    (note,) = told(tmp_path, DUMP | config)
    for said in (
        "do_sample",
        "max_length",
        "cross_attention_hidden_size: null",
    ):
        assert said in note.split(", ")
    assert not {"use_cache", "torchscript"} & {*note.split(", ")}
    marks = {"unsloth_fixed": True, "unsloth_version": "2024.9"}
    marks |= {"_commit_hash": "0" * 40, "temperature": 0.6, "do_sample": True}
    assert model(tmp_path, config | marks) == want
    assert told(tmp_path, config | marks) == [", ".join(marks)]


def test_null_is_no_value(tmp_path: pathlib.Path) -> None:
    none = {"quantization_config": None, "auto_map": None, "new_key": None}
    none |= {"mlp_bias": None, "tie_word_embeddings": None, "hidden_act": None}
    assert model(tmp_path, LLAMA | none) == model(tmp_path, LLAMA)
    assert told(tmp_path, LLAMA | {"rope_scaling": None}) == []
    (note,) = told(tmp_path, LLAMA | none)
    assert {*note.split(", ")} == {f"{key}: null" for key in none}
    for family in FAMILIES:
        for key, usual in family.usual.items():
            config = {"model_type": family.type, key: None}
            if usual and key not in hfkeys.NULLS:
                said = f"3: {key}: is null; allowed: "
                assert wrong(tmp_path, config).startswith(said)
            else:
                spec.load(None, (), None, folder(tmp_path, config))


OTHERS = {
    int: ("32", 32.0, True, [32]),
    float: ("1e-5", 1, True),
    Number: ("1", True, [1]),
    bool: ("true", 0, 1),
    str: (1, True),
}


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.type)
def test_values_have_the_type_that_transformers_demands(
    tmp_path: pathlib.Path, family: HfFamily
) -> None:
    """Values must have the type that transformers' strict dataclasses demand: "32" and 32.0 are no
    int, and 1 is no float and no bool."""
    for key, usual in family.usual.items():
        kind = int if usual is None else type(usual)
        for value in OTHERS[kind]:
            said = wrong(tmp_path, {"model_type": family.type, key: value})
            assert re.match(rf"\d+: {key}: is .*; allowed: ", said), said


BAD = (-1, 0, 7, 10**40, 1e-30)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.type)
def test_errors_name_the_file(tmp_path: pathlib.Path, family: HfFamily) -> None:
    """Every error line, whatever the value, names the file and a line of it, or says that no spec
    has the model."""
    refused = 0
    keys = [*family.usual, *hf.ROPE, *hf.WINDOWS]
    scaling = {"rope_type": "yarn", "factor": 2.0, "beta_fast": 0.1}
    many = [{key: x} for key in keys for x in BAD]
    many += [{"rope_scaling": scaling | {"factor": x}} for x in BAD]
    for change in many:
        config = {"model_type": family.type, **change}
        there = folder(tmp_path, config)
        said = rf"{re.escape(there)}/config\.json:\d+: \w|--from {re.escape(there)} "
        try:
            spec.load(None, (), None, there)
        except SpecError as error:
            refused += 1
            lines = str(error).split("\n")
            assert all(re.match(said, line) for line in lines), lines
    assert refused > len(keys) / 2


def test_errors_of_what_no_spec_says(tmp_path: pathlib.Path) -> None:
    there = folder(tmp_path, LLAMA)
    with pytest.raises(SpecError) as caught:
        spec.load(None, ("train.schedule.type=linear",), None, there)
    assert str(caught.value).startswith(
        f"--from {there} without a spec: train.schedule.steps: "
    )


def test_all_errors_at_once(tmp_path: pathlib.Path) -> None:
    """Errors of config.json, of --set and of the rest come together, but none about a model that is
    missing."""
    bad = {"hidden_size": "64", "new_key": 1, "mlp_bias": 1, "rope_theta": "x"}
    there = folder(tmp_path, LLAMA | bad)
    sets = ("zero.stage=7", "lr", "cluster.ranks=3")
    with pytest.raises(SpecError) as caught:
        spec.load(None, sets, None, there)
    found = [line.split(": ")[1] for line in str(caught.value).split("\n")]
    keys = ["hidden_size", "rope_theta", "new_key", "mlp_bias"]
    file, rest = found[:4], found[4:]
    assert sorted(file) == sorted(keys)
    assert rest == [
        "'lr' is not KEY=VALUE; allowed",
        "zero.stage",
        "cluster.ranks",
    ]


def test_a_long_config(tmp_path: pathlib.Path) -> None:
    tensors = {f"model.layers.{n}.mlp": [4] * 8 for n in range(5000)}
    there = folder(tmp_path, LLAMA | {"tensors": tensors})
    with pytest.raises(SpecError) as caught:
        spec.load(None, (), None, there)
    assert str(caught.value) == (
        f"{there}/config.json: is too long for a model's config.json, which usually has a few "
        "thousand bytes; lists of quantized tensors or labels make it longer; allowed: up to 131072 "
        "bytes"
    )


@pytest.mark.parametrize(
    "name,said",
    [
        ("Org/Some-7B", "hf download Org/Some-7B --local-dir Some-7B "),
        ("none", "a folder with config.json; hf download ORG/NAME --local"),
        ("./Org/Some-7B", "a folder with config.json; hf download ORG/NAME"),
    ],
)
def test_a_name_of_the_hub(
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    said: str,
) -> None:
    """A name of the hub after --from, or in a spec's place, is refused with the way to get its
    folder."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SpecError) as caught:
        spec.load(None, (), None, name)
    there = f"--from {name}: does not exist; allowed: "
    assert str(caught.value).startswith(there + said)
    with pytest.raises(SpecError) as caught:
        spec.load(name)
    assert ("hf download" in str(caught.value)) == (name == "Org/Some-7B")


def test_a_yaml_that_is_not_there_is_no_name_of_the_hub() -> None:
    with pytest.raises(SpecError, match="cannot be read.*a text file"):
        spec.load("model_specs/none.yaml")


def test_what_is_no_folder(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = folder(tmp_path, LLAMA)
    monkeypatch.chdir(there)
    (tmp_path / "train.c").touch()
    for name, said in (
        (f"{there}/config.json", f"is a file; allowed: its folder, {there}"),
        ("config.json", "is a file; allowed: its folder, ."),
        (f"{tmp_path}/train.c", "is a file; allowed: a folder with"),
        (str(tmp_path), "has no config.json; allowed: a folder with"),
    ):
        with pytest.raises(SpecError) as caught:
            spec.load(None, (), None, name)
        assert str(caught.value).startswith(f"--from {name}: {said}")


# ---- the command


def zgen(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [trainer.ROOT / "gen" / "zgen", *map(str, words)],
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.slow
def test_the_command_tells_what_to_type(tmp_path: pathlib.Path) -> None:
    there = folder(tmp_path, GPT2)
    for given in (there, f"{there}/config.json"):
        done = zgen(given)
        assert done.returncode == 2 and "--from" in done.stderr, done.stderr
    done = zgen()
    assert done.returncode == 2 and "SPEC or --from DIR" in done.stderr
    done = zgen("--from", tmp_path / "none")
    assert done.returncode == 2 and "does not exist" in done.stderr


def test_the_spec_that_it_writes(tmp_path: pathlib.Path) -> None:
    there, out = folder(tmp_path, QWEN3), tmp_path / "mine.yaml"
    done = zgen("--from", there, "--emit", "spec", "-o", out)
    assert done.returncode == 0, done.stderr
    assert spec.load(str(out)).model == model(tmp_path, QWEN3)
    done = zgen("--from", there, "-o", f"{there}/config.json")
    assert done.returncode == 2 and "would be overwritten" in done.stderr


def test_the_page_has_every_key() -> None:
    page = (trainer.ROOT / "docs" / "hf_keys.md").read_text()
    assert hf_doc.text() + "\n" == page
