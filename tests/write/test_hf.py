"""test_hf.py -- tests config.json for models like those of model_specs/: it is a family's if every
setting fits, and empty if one does not."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from zg.read import spec
from zg.read.node import SpecError
from zg.read.schema import Op, Spec
from zg.write import hf, view

SPECS = Path(__file__).resolve().parents[2] / "model_specs"
OPS = "model.units[1].ops"
ATTENTION = f"{OPS}[0].residual[1].attention"


def made(name: str, *sets: str) -> dict[str, Any]:
    """Return a spec's config.json; {} if there is none."""
    text = hf.config(spec.load(str(SPECS / f"{name}.yaml"), sets))
    return json.loads(text) if text else {}


@pytest.mark.parametrize("path", sorted(SPECS.glob("*.yaml")), ids=str)
def test_every_model_spec_has_a_family(path: Path) -> None:
    config = made(path.stem)
    assert config["architectures"] and config["torch_dtype"] == "float32"
    assert config["vocab_size"] == spec.load(str(path)).model.vocab


def test_numbers_of_gpt2() -> None:
    wanted = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": 50257,
        "n_positions": 1024,
        "n_embd": 768,
        "n_layer": 12,
        "n_head": 12,
        "n_inner": 3072,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-05,
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": None,
        "torch_dtype": "float32",
    }
    assert made("gpt2-124m") == wanted
    erf = made("gpt2-124m", f"{OPS}[1].residual[2].gelu=erf")
    assert erf == wanted | {"activation_function": "gelu"}


def test_numbers_of_llama() -> None:
    """The numbers are those of meta-llama/Llama-3.1-405B, except those that a spec does not
    have."""
    assert made("llama3-405b", "train.sequence=8192") == {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 16384,
        "intermediate_size": 53248,
        "num_hidden_layers": 126,
        "num_attention_heads": 128,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "hidden_act": "silu",
        "max_position_embeddings": 65536,
        "rms_norm_eps": 1e-05,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "torch_dtype": "float32",
    }


@pytest.mark.parametrize(
    ("sets", "family", "said"),
    [
        ([], "llama", {"attention_bias": False, "mlp_bias": False}),
        (["bias=true"], "llama", {"attention_bias": True}),
        (["bias=true", "out_bias=false"], "qwen2", {}),
        (["qk_norm=true"], "qwen3", {"attention_bias": False}),
        (["qk_norm=true", "bias=true"], "qwen3", {"attention_bias": True}),
        (["head_dim=24"], "llama", {"head_dim": 24}),
        (["out_bias=true"], "", {}),
        (["bias=true", "out_bias=false", "head_dim=24"], "", {}),
        (["qk_norm=true", "eps=1.0e-5"], "", {}),
        (["rope=null"], "", {}),
    ],
)
def test_attentions_of_families(
    sets: list[str], family: str, said: dict[str, object]
) -> None:
    config = made("llama-tiny", *(f"{ATTENTION}.{x}" for x in sets))
    assert config.get("model_type", "") == family
    assert config.items() >= said.items()


def test_biases_of_all_linears_are_said_once() -> None:
    both = [f"{OPS}[1].residual[{i}].linear.bias=true" for i in (1, 3)]
    assert made("llama-tiny", *both)["mlp_bias"] is True
    assert not made("llama-tiny", both[0])


@pytest.mark.parametrize(
    "other",
    [
        f"{OPS}[0].residual[0].rmsnorm.name=norm",
        f"{OPS}[0].residual[0].rmsnorm.eps=1.0e-5",
        f"{OPS}[1].residual[1].linear.name=[mlp.up_proj, mlp.gate_proj]",
        "model.units[1].name=layers.{l}",
        "model.units[0].embedding.tokens=embed",
        "model.units[2].head[1].linear.name=head",
        "model.units[2].head[1].linear.bias=true",
    ],
)
def test_a_setting_that_does_not_fit(other: str) -> None:
    assert made("llama-tiny") and not made("llama-tiny", other)


def test_gpt2_with_an_attention_that_it_has_not() -> None:
    for other in ("kv_heads=1", "head_dim=24", "bias=false", "qk_norm=true"):
        assert not made("gpt-tiny", f"{ATTENTION}.{other}")
    assert not made("gpt-tiny", f"{ATTENTION}.rope={{theta: 10000}}")
    assert not made("gpt-tiny", "model.names=llama")


def test_gpt_neox_has_a_key_a_query_and_a_value_in_each_head() -> None:
    with pytest.raises(SpecError) as caught:
        made("llama-tiny", "model.names=neox")
    said = (
        ".attention.kv_heads: 2 differs from heads 4, but files of neox have a q, a k"
    )
    assert said in str(caught.value)


Window = int | tuple[int | None, ...] | None


def windowed(s: Spec, window: Window) -> Spec:
    """Return the spec with a window for each attention."""

    def op(o: Op) -> Op:
        if o.kind == "attention":
            return replace(o, args={**o.args, "window": window})
        return replace(o, ops=tuple(map(op, o.ops)))

    units = [replace(u, ops=tuple(map(op, u.ops))) for u in s.model.units]
    return replace(s, model=replace(s.model, units=tuple(units)))


def test_a_window_makes_a_mistral() -> None:
    s = spec.load(str(SPECS / "llama-tiny.yaml"))
    config = json.loads(hf.config(windowed(s, 16)))
    assert config["model_type"] == "mistral" and config["sliding_window"] == 16
    assert "attention_bias" not in config
    assert json.loads(hf.config(windowed(s, None)))["model_type"] == "llama"


@pytest.mark.parametrize(
    "window,said",
    [
        (None, {}),
        (9, {"max_window_layers": 0}),
        ((None, 9), {"max_window_layers": 1}),
        ((9, None), {}),
        ((9, 8), None),
    ],
)
def test_windows_of_layers(window: Window, said: dict[str, object] | None) -> None:
    """Windows per layer are written as Qwen's layer_types, and as max_window_layers if that can
    express them. Mistral and others have no such keys."""
    s = spec.load(str(SPECS / "qwen3-tiny.yaml"))
    text = hf.config(windowed(s, window))
    config = json.loads(text or "{}")
    each = window if isinstance(window, tuple) else (window,) * 2
    types = [f"{'sliding' if n else 'full'}_attention" for n in each]
    keys = ("layer_types", "max_window_layers", "sliding_window")
    found = {k: config[k] for k in keys if k in config}
    on = {"layer_types": types, "sliding_window": 9} if window else {}
    assert found == (on | said if said is not None else {})
    assert config.get("use_sliding_window", False) == bool(found)
    if isinstance(window, tuple):
        mixed = spec.load(str(SPECS / "llama-tiny.yaml"))
        text = hf.config(windowed(mixed, window))
        assert bool(text) == (said is not None)
        assert not text or json.loads(text)["model_type"] == "smollm3"


def test_the_text_in_c() -> None:
    lines = view.said("config", '{\n  "a": "b\\c"\n}\n')
    assert lines == [
        ".config =",
        '    "{\\n"',
        '    "  \\"a\\": \\"b\\\\c\\"\\n"',
        '    "}\\n",',
    ]
    assert view.said("config", "") == []
