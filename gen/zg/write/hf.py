"""hf.py -- config.json of transformers for a model that is built here.

A family is a row: its block as ops of a spec, with a Key wherever config.json has a key of its own.
A model is of a family where every setting agrees; what a row does not mention must be off.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..read.schema import Op, Spec, Unit


class Key(str):
    """A key of config.json, whose value stands here in the spec."""


@dataclass(frozen=True)
class Family:
    """cls, type: of transformers. names: the spec's. embedding, block, norm: as in a spec; layers:
    the name of a block. sizes: keys of layers, width and vocabulary; heads: of heads. said: what is
    so in every model of the family. words: of a key, its values in config.json by the spec's.
    square: heads have width / heads, of which config.json says nothing."""

    cls: str
    type: str
    names: str
    embedding: Op
    layers: str
    block: tuple[Op, ...]
    norm: Op
    sizes: tuple[str, str, str]
    heads: str
    said: Mapping[str, object] = field(default_factory=dict)
    words: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    square: bool = False


def _residual(*ops: Op) -> Op:
    return Op("residual", {}, ops)


def _linear(*names: str, out: str, bias: str | bool = False) -> Op:
    said = {"name": names, "out": (Key(out),) * len(names), "bias": bias}
    return Op("linear", said)


def _heads(name: str, H: str, G: str, **more: object) -> dict[str, object]:
    said = {"heads": Key(H), "kv_heads": Key(G), "head_dim": Key("head_dim")}
    return {"name": name, **said, **more}


def _rms(name: str) -> Op:
    return Op("rmsnorm", {"name": name, "eps": Key("rms_norm_eps")})


def _layer(name: str, eps: str) -> Op:
    return Op("layernorm", {"name": name, "eps": Key(eps), "bias": True})


def _llama(cls: str, type: str, mlp: str | bool, **more: object) -> Family:
    """What Llama is, with an attention of its own. mlp: the key of biases there."""
    H, G, F = (
        "num_attention_heads",
        "num_key_value_heads",
        "intermediate_size",
    )
    attention = _heads("self_attn", H, G, rope=Key("rope"), **more)
    return Family(
        cls,
        type,
        "llama",
        Op("embedding", {"tokens": "model.embed_tokens"}),
        "model.layers.{l}",
        (
            _residual(_rms("input_layernorm"), Op("attention", attention)),
            _residual(
                _rms("post_attention_layernorm"),
                _linear("mlp.gate_proj", "mlp.up_proj", out=F, bias=mlp),
                Op("swiglu", {}),
                _linear("mlp.down_proj", out="hidden_size", bias=mlp),
            ),
        ),
        _rms("model.norm"),
        ("num_hidden_layers", "hidden_size", "vocab_size"),
        H,
        {"hidden_act": "silu", "attention_dropout": 0.0},
        square=type == "qwen2",
    )


_BIAS = Key("attention_bias")
_GPT2 = Family(
    "GPT2LMHeadModel",
    "gpt2",
    "gpt2",
    Op(
        "embedding",
        {"tokens": "wte", "positions": "wpe", "context": Key("n_positions")},
    ),
    "h.{l}",
    (
        _residual(
            _layer("ln_1", "layer_norm_epsilon"),
            Op(
                "attention",
                _heads("attn", "n_head", "n_head", bias=True, out_bias=True),
            ),
        ),
        _residual(
            _layer("ln_2", "layer_norm_epsilon"),
            _linear("mlp.c_fc", out="n_inner", bias=True),
            Op("gelu", {"kind": Key("activation_function")}),
            _linear("mlp.c_proj", out="n_embd", bias=True),
        ),
    ),
    _layer("ln_f", "layer_norm_epsilon"),
    ("n_layer", "n_embd", "vocab_size"),
    "n_head",
    {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0},
    {"activation_function": {"tanh": "gelu_new", "erf": "gelu"}},
    square=True,
)
FAMILIES = (
    _GPT2,
    _llama(
        "LlamaForCausalLM",
        "llama",
        Key("mlp_bias"),
        bias=_BIAS,
        out_bias=_BIAS,
    ),
    _llama(
        "MistralForCausalLM", "mistral", False, window=Key("sliding_window")
    ),
    _llama("Qwen2ForCausalLM", "qwen2", False, bias=True),
    _llama(
        "Qwen3ForCausalLM",
        "qwen3",
        False,
        bias=_BIAS,
        out_bias=_BIAS,
        qk_norm=True,
        eps=Key("rms_norm_eps"),
    ),
)


def _agrees(want: object, value: object, found: dict[str, Any]) -> bool:
    """found: of each key so far, its value, the same wherever the key stands."""
    if isinstance(want, Key):
        before = found.setdefault(want, value)
        return bool(before == value)
    if isinstance(want, tuple) and isinstance(value, tuple):
        if len(want) != len(value):
            return False
        pairs = zip(want, value, strict=True)
        return all(_agrees(w, v, found) for w, v in pairs)
    if not want:
        return not value
    return want == value


def _settings(op: Op) -> dict[str, object]:
    """Those that have an effect."""
    args = dict(op.args)
    if op.kind == "attention" and not args["qk_norm"]:
        del args["eps"]
    return args


def _fits(want: Op, op: Op, found: dict[str, Any]) -> bool:
    if want.kind != op.kind:
        return False
    for key, value in _settings(op).items():
        if not _agrees(want.args.get(key), value, found):
            return False
    return _all_fit(want.ops, op.ops, found)


def _all_fit(
    want: tuple[Op, ...], ops: tuple[Op, ...], found: dict[str, Any]
) -> bool:
    if len(want) != len(ops):
        return False
    pairs = zip(want, ops, strict=True)
    return all(_fits(w, op, found) for w, op in pairs)


def _units(f: Family, units: tuple[Unit, ...], found: dict[str, Any]) -> bool:
    embedding, block, *others, head = units
    *norms, logits = head.ops
    if others or block.name != f.layers:
        return False
    tied = bool(logits.args["tied"])
    found["tie_word_embeddings"] = tied
    want = (f.embedding, *f.block, f.norm)
    there = (*embedding.ops, *block.ops, *norms)
    if not _all_fit(want, there, found):
        return False
    vocab = f.sizes[2]
    return tied or _fits(_linear("lm_head", out=vocab), logits, found)


# Keys of a scaling that transformers calls otherwise.
_SCALING = {
    "type": "rope_type",
    "original_context": "original_max_position_embeddings",
}


def _rope(found: dict[str, Any], sequence: int) -> dict[str, object]:
    """Of rotary positions, as all versions of transformers read them."""
    rope = found.pop("rope")
    scaling, context = None, sequence
    if given := rope["scaling"]:
        scaling = {_SCALING.get(k, k): v for k, v in given.items()}
        original = given.get("original_context") or sequence
        reached = round(given["factor"] * original)
        context = max(context, reached)
    return {
        "max_position_embeddings": context,
        "rope_theta": rope["theta"],
        "rope_scaling": scaling,
    }


def _of(f: Family, spec: Spec) -> dict[str, object] | None:
    """A model's config.json; None where it is of another family."""
    m = spec.model
    sizes = (m.units[1].repeat, m.width, m.vocab)
    found: dict[str, Any] = dict(zip(f.sizes, sizes, strict=True))
    if m.names != f.names or not _units(f, m.units, found):
        return None
    turned = "rope" in found
    if turned and not found["rope"]:
        return None
    if f.square and found[f.heads] * found.pop("head_dim") != m.width:
        return None
    for key, words in f.words.items():
        found[key] = words[found[key]]
    return {
        "architectures": [f.cls],
        "model_type": f.type,
        **(_rope(found, spec.train.sequence) if turned else {}),
        **found,
        **f.said,
        "bos_token_id": None,
        "eos_token_id": None,
        "torch_dtype": "float32",
    }


def config(spec: Spec) -> str:
    """config.json's text; '' where no family has such a model."""
    made = (_of(f, spec) for f in FAMILIES)
    first = next((c for c in made if c is not None), None)
    return json.dumps(first, indent=2) + "\n" if first else ""
