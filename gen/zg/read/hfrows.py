"""hfrows.py -- families of models of transformers: each row describes a model as a spec.

A row is the block as ops of a spec, with a ConfigKey for each setting that config.json gives; other
settings are off. hf.py reads config.json by it, write/hf.py writes one. Keys, their meaning and
their defaults are those of transformers 5.23: configuration_*.py and modeling_*.py of the family.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..facts.kinds import SCALINGS
from .node import Names
from .schema import VALUES, Op


class ConfigKey(str):
    """A key of config.json that stands for its value in the spec."""


class Derived(ConfigKey, ABC):
    """A key that stands for a number computed from its value."""

    @abstractmethod
    def of(self, x: float) -> float:
        """Return the number of a value."""

    @abstractmethod
    def back(self, y: float) -> float | None:
        """Return the value of a number, None if there is none."""


class Twice(Derived):
    """A key that stands for twice its value."""

    def of(self, x: float) -> float:
        return 2 * x

    def back(self, y: float) -> float | None:
        return None if y % 2 else y // 2


class Reciprocal(Derived):
    """A key that stands for 1 / its value."""

    def of(self, x: float) -> float:
        return 1 / x

    def back(self, y: float) -> float | None:
        near = float(round(1 / y))
        return near if near and self.of(near) == y else 1 / y


class Root(Derived):
    """A key that stands for the root of its value, a whole number."""

    def of(self, x: float) -> float:
        return math.sqrt(x)

    def back(self, y: float) -> float | None:
        return round(y * y)


class InverseRoot(Root):
    """A key that stands for 1 / the root of its value, a whole number."""

    def of(self, x: float) -> float:
        return 1 / math.sqrt(x)

    def back(self, y: float) -> float | None:
        return round(1 / (y * y)) or None


class Number(float):
    """A default of transformers whose key takes integers, too."""


# Keys of rope_parameters: theta, and the share of a head that is rotated.
THETA, PARTIAL = "rope_theta", "partial_rotary_factor"


@dataclass(frozen=True)
class HfFamily:
    """A family of models.

    cls, type: names in transformers; names: the family in a spec; embedding, block, last: ops as in
    a spec, those of the head without its linear; layers: the name of a block; sizes: keys of
    layers, width and vocabulary; heads, context: keys of the numbers of heads and of positions;
    said: values that all models of the family have; words: key -> values of the spec -> those of
    config.json; square: heads have width / heads, which config.json does not give; usual: defaults,
    None if `times` gives the value; times: key -> (another key, factor); interleaved: rotary pairs
    are neighbours; theta: default of rope_theta; local: key and default of theta of layers with a
    window, if these have rotary positions of their own; pattern: number n if by default every
    n-th layer has no window; scalings: types of scalings -> the types that the family means, if it
    takes no others; adopted: auto_map names code that transformers has itself; when: keys whose
    values choose one of the rows of a type (the first by default); head: the linear of the logits,
    of which a tied one has the cap alone; rotary: keys of theta and of the rotated share of a head.
    """

    cls: str
    type: str
    names: str
    embedding: Op
    layers: str
    block: tuple[Op, ...]
    last: tuple[Op, ...]
    sizes: tuple[str, str, str]
    heads: str
    context: str
    usual: Mapping[str, object]
    said: Mapping[str, object] = field(default_factory=dict)
    words: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    square: bool = False
    times: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    interleaved: bool = False
    theta: float = 10000.0
    local: tuple[str, float] | None = None
    pattern: int | ConfigKey = 0
    scalings: Mapping[str, str] = field(default_factory=dict)
    adopted: bool = False
    when: Mapping[str, bool] = field(default_factory=dict)
    head: Op = field(default_factory=lambda: linear("lm_head", out="vocab_size"))
    rotary: tuple[str, str] = (THETA, PARTIAL)

    @property
    def mixed(self) -> bool:
        """True if some layers may have a window and others none."""
        return SWITCH in self.usual or bool(self.pattern)


ORIGINAL = "original_max_position_embeddings"
# Keys of a family with windows in some layers: whether it has windows at all, and the number of
# first layers without one. layer_types gives the type of each layer instead.
SWITCH, FIRST = "use_sliding_window", "max_window_layers"
FULL, SLIDING = "full_attention", "sliding_attention"
# Scalings whose original context is the family's number of positions.
IMPLIED = ("dynamic",)
# Whether each layer has rotary positions, or the number n of a model in which each n-th has none.
NOPE, EACH = "no_rope_layers", "no_rope_layer_interval"
# transformers' words that no family writes -> ours.
SYNONYMS: Mapping[str, str] = {
    "gelu_accurate": "tanh",
    "gelu_fast": "tanh",
    "gelu_python": "erf",
}


Norm = Callable[[str], Op]


def scaling_keys(type: str) -> Mapping[str, str]:
    """Return the keys of a scaling of rotary positions except its type: config.json's -> a spec's.
    "default" has none."""
    own = ("factor", *SCALINGS[type]) if type in SCALINGS else ()
    return {ORIGINAL if k == "original_context" else k: k for k in own}


def residual(*ops: Op) -> Op:
    return Op("residual", {}, ops)


def _normed(norm: Norm, names: Names, *ops: Op) -> Op:
    return residual(norm(names[0]), *ops)


def _renormed(norm: Norm, names: Names, *ops: Op) -> Op:
    """Return a residual whose branch ends with a norm."""
    return residual(*ops, norm(names[0]))


def _around(norm: Norm, names: Names, *ops: Op) -> Op:
    """Return a residual whose branch begins and ends with a norm."""
    return residual(norm(names[0]), *ops, norm(names[1]))


def linear(*names: str, out: str, bias: str | bool = False) -> Op:
    said = {"name": names, "out": (ConfigKey(out),) * len(names), "bias": bias}
    return Op("linear", said)


def beside(*branches: tuple[Op, ...]) -> Op:
    return Op("parallel", {}, tuple(Op("branch", {}, ops) for ops in branches))


def _joined(name: str, out: str) -> Op:
    """Return a linear of gate and up, which the file holds as one tensor."""
    return Op("linear", {"name": (name,), "out": (Twice(out),), "bias": False})


def heads(name: str, H: str, G: str, **more: object) -> dict[str, object]:
    said = {
        "heads": ConfigKey(H),
        "kv_heads": ConfigKey(G),
        "head_dim": ConfigKey("head_dim"),
    }
    return {"name": name, **said, **more}


def _rms(name: str) -> Op:
    return Op("rmsnorm", {"name": name, "eps": ConfigKey("rms_norm_eps")})


def _scale(key: ConfigKey) -> Op:
    return Op("scale", {VALUES["scale"]: key})


def _rms1(name: str) -> Op:
    return Op("rmsnorm", {**_rms(name).args, "one_plus": True})


def layer_norm(name: str, eps: str, bias: bool = True) -> Op:
    said = {"name": name, "eps": ConfigKey(eps), "weight": True, "bias": bias}
    return Op("layernorm", said)


def _bare(name: str) -> Op:
    """Return a layer norm without tensors."""
    return Op("layernorm", {"name": name, "eps": 1e-5, "weight": False, "bias": False})


H, G, F = "num_attention_heads", "num_key_value_heads", "intermediate_size"
SIZES = ("num_hidden_layers", "hidden_size", "vocab_size")
TOKENS = Op("embedding", {"tokens": "model.embed_tokens"})
_LLAMA: Mapping[str, object] = {
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "vocab_size": 32000,
    "intermediate_size": 11008,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "head_dim": None,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
}


_SILU: Mapping[str, object] = {"hidden_act": "silu", "attention_dropout": 0.0}
# transformers' default of pad_token_id may be beyond the vocabulary.
UNPADDED: Mapping[str, object] = {**_SILU, "pad_token_id": None}
GATES = linear("mlp.gate_proj", "mlp.up_proj", out=F)
_GATE_UP = _joined("mlp.gate_up_proj", F)


def _llama(
    cls: str,
    type: str,
    usual: Mapping[str, object],
    *,
    names: str = "llama",
    gates: Op = GATES,
    gate: str = "swiglu",
    mlp: str | bool = False,
    norm: Norm = _rms,
    branch: Callable[..., Op] = _normed,
    norms: tuple[Names, Names] = (
        ("input_layernorm",),
        ("post_attention_layernorm",),
    ),
    embedding: Op = TOKENS,
    ends: tuple[Op, ...] = (),
    last: tuple[Op, ...] = (),
    about: Mapping[str, Any] | None = None,
    **more: object,
) -> HfFamily:
    """Return a family like Llama with its own attention. gates, gate: the linear of gate and up,
    and the op behind it; mlp: key of the MLP's biases; norms: of each branch; ends: ops at the end
    of both branches; last: those behind the last norm; about: other fields of the row."""
    attention = heads("self_attn", H, G, rope=ConfigKey("rope"), **more)
    first, second = norms
    gates = Op("linear", {**gates.args, "bias": mlp})
    return HfFamily(
        cls,
        type,
        names,
        embedding,
        "model.layers.{l}",
        (
            branch(norm, first, Op("attention", attention), *ends),
            branch(
                norm,
                second,
                gates,
                Op(gate, {}),
                linear("mlp.down_proj", out="hidden_size", bias=mlp),
                *ends,
            ),
        ),
        (norm("model.norm"), *last),
        SIZES,
        H,
        "max_position_embeddings",
        {**_LLAMA, **usual},
        **{"said": _SILU, **(about or {})},
    )


BIAS = ConfigKey("attention_bias")
_QWEN: Mapping[str, object] = {
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
    SWITCH: False,
    FIRST: 28,
}
_GPT2 = HfFamily(
    "GPT2LMHeadModel",
    "gpt2",
    "gpt2",
    Op(
        "embedding",
        {"tokens": "wte", "positions": "wpe", "context": ConfigKey("n_positions")},
    ),
    "h.{l}",
    (
        residual(
            layer_norm("ln_1", "layer_norm_epsilon"),
            Op(
                "attention",
                heads("attn", "n_head", "n_head", bias=True, out_bias=True),
            ),
        ),
        residual(
            layer_norm("ln_2", "layer_norm_epsilon"),
            linear("mlp.c_fc", out="n_inner", bias=True),
            Op("gelu", {"kind": ConfigKey("activation_function")}),
            linear("mlp.c_proj", out="n_embd", bias=True),
        ),
    ),
    (layer_norm("ln_f", "layer_norm_epsilon"),),
    ("n_layer", "n_embd", "vocab_size"),
    "n_head",
    "n_positions",
    {
        "n_layer": 12,
        "n_embd": 768,
        "vocab_size": 50257,
        "n_head": 12,
        "n_inner": None,
        "n_positions": 1024,
        "layer_norm_epsilon": 1e-5,
        "activation_function": "gelu_new",
        "tie_word_embeddings": True,
    },
    {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0},
    {"activation_function": {"tanh": "gelu_new", "erf": "gelu"}},
    square=True,
    times={"n_inner": ("n_embd", 4)},
)
_ALL = ConfigKey("use_bias")
_STARCODER2 = HfFamily(
    "Starcoder2ForCausalLM",
    "starcoder2",
    "llama",
    TOKENS,
    "model.layers.{l}",
    (
        residual(
            layer_norm("input_layernorm", "norm_epsilon"),
            Op(
                "attention",
                heads(
                    "self_attn",
                    H,
                    G,
                    rope=ConfigKey("rope"),
                    window=ConfigKey("sliding_window"),
                    bias=_ALL,
                    out_bias=_ALL,
                ),
            ),
        ),
        residual(
            layer_norm("post_attention_layernorm", "norm_epsilon"),
            linear("mlp.c_fc", out=F, bias=_ALL),
            Op("gelu", {"kind": ConfigKey("hidden_act")}),
            linear("mlp.c_proj", out="hidden_size", bias=_ALL),
        ),
    ),
    (layer_norm("model.norm", "norm_epsilon"),),
    SIZES,
    H,
    "max_position_embeddings",
    {
        "num_hidden_layers": 30,
        "hidden_size": 3072,
        "vocab_size": 49152,
        "intermediate_size": 12288,
        "num_attention_heads": 24,
        "num_key_value_heads": 2,
        "norm_epsilon": 1e-5,
        "hidden_act": "gelu_pytorch_tanh",
        "max_position_embeddings": 4096,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "use_bias": True,
    },
    {
        "attention_dropout": 0.0,
        "embedding_dropout": 0.0,
        "residual_dropout": 0.0,
    },
    {"hidden_act": {"tanh": "gelu_pytorch_tanh", "erf": "gelu"}},
    square=True,
)
_COHERE = HfFamily(
    "CohereForCausalLM",
    "cohere",
    "llama",
    TOKENS,
    "model.layers.{l}",
    (
        residual(
            layer_norm("input_layernorm", "layer_norm_eps", bias=False),
            beside(
                (
                    Op(
                        "attention",
                        heads(
                            "self_attn",
                            H,
                            G,
                            rope=ConfigKey("rope"),
                            bias=BIAS,
                            out_bias=BIAS,
                        ),
                    ),
                ),
                (GATES, Op("swiglu", {}), linear("mlp.down_proj", out="hidden_size")),
            ),
        ),
    ),
    (
        layer_norm("model.norm", "layer_norm_eps", bias=False),
        _scale(ConfigKey("logit_scale")),
    ),
    SIZES,
    H,
    "max_position_embeddings",
    {
        "num_hidden_layers": 40,
        "hidden_size": 8192,
        "vocab_size": 256000,
        "intermediate_size": 22528,
        "num_attention_heads": 64,
        "num_key_value_heads": None,
        "layer_norm_eps": 1e-5,
        "max_position_embeddings": 8192,
        "logit_scale": 0.0625,
        "tie_word_embeddings": True,
        "attention_bias": False,
    },
    UNPADDED,
    square=True,
    interleaved=True,
    theta=500000.0,
)

_WINDOW = ConfigKey("sliding_window")
_SQUARE: Mapping[str, Any] = {"square": True}
_NORMS_AFTER = (
    ("post_attention_layernorm",),
    ("post_feedforward_layernorm",),
)
_NORMS_OF_GEMMA = (
    ("input_layernorm", "post_attention_layernorm"),
    ("pre_feedforward_layernorm", "post_feedforward_layernorm"),
)
_NORMS_AROUND = (
    ("input_layernorm", "post_self_attn_layernorm"),
    ("post_attention_layernorm", "post_mlp_layernorm"),
)
_GEMMA: Mapping[str, object] = {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
_GEMMA_SAID: Mapping[str, object] = {
    "hidden_activation": "gelu_pytorch_tanh",
    "attention_dropout": 0.0,
    "pad_token_id": None,
}
_CAPPED = Op(
    "linear",
    {
        **linear("lm_head", out="vocab_size").args,
        "softcap": ConfigKey("final_logit_softcapping"),
    },
)


def _gemma(
    cls: str,
    type: str,
    usual: Mapping[str, object],
    about: Mapping[str, Any],
    **more: Any,
) -> HfFamily:
    """Return a family like Gemma 2. usual, about: its own keys and fields; more: of its
    attention."""
    return _llama(
        cls,
        type,
        {**_GEMMA, **usual},
        gate="geglu",
        norm=_rms1,
        branch=_around,
        norms=_NORMS_OF_GEMMA,
        embedding=Op("embedding", {**TOKENS.args, "scale": Root("hidden_size")}),
        about={"said": _GEMMA_SAID, **about},
        bias=BIAS,
        out_bias=BIAS,
        window=_WINDOW,
        scale=InverseRoot("query_pre_attn_scalar"),
        **more,
    )


ROWS = (
    _GPT2,
    _llama(
        "LlamaForCausalLM",
        "llama",
        {},
        mlp=ConfigKey("mlp_bias"),
        bias=BIAS,
        out_bias=BIAS,
    ),
    _llama(
        "MistralForCausalLM",
        "mistral",
        {
            "intermediate_size": 14336,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "sliding_window": 4096,
        },
        window=_WINDOW,
    ),
    _llama(
        "Qwen2ForCausalLM",
        "qwen2",
        _QWEN,
        about=_SQUARE,
        bias=True,
        window=_WINDOW,
    ),
    _llama(
        "Qwen3ForCausalLM",
        "qwen3",
        {**_QWEN, "head_dim": 128},
        bias=BIAS,
        out_bias=BIAS,
        window=_WINDOW,
        qk_norm=True,
        eps=ConfigKey("rms_norm_eps"),
    ),
    _llama(
        "Olmo2ForCausalLM",
        "olmo2",
        {"vocab_size": 50304, "rms_norm_eps": 1e-5},
        branch=_renormed,
        norms=_NORMS_AFTER,
        about=_SQUARE,
        bias=BIAS,
        out_bias=BIAS,
        qk_norm="whole",
        eps=ConfigKey("rms_norm_eps"),
    ),
    _STARCODER2,
    _llama(
        "GraniteForCausalLM",
        "granite",
        {
            "embedding_multiplier": Number(1.0),
            "attention_multiplier": Number(1.0),
            "residual_multiplier": Number(1.0),
            "logits_scaling": Number(1.0),
        },
        mlp=ConfigKey("mlp_bias"),
        embedding=Op(
            "embedding",
            {**TOKENS.args, "scale": ConfigKey("embedding_multiplier")},
        ),
        ends=(_scale(ConfigKey("residual_multiplier")),),
        last=(_scale(Reciprocal("logits_scaling")),),
        about=_SQUARE,
        bias=BIAS,
        out_bias=BIAS,
        scale=ConfigKey("attention_multiplier"),
    ),
    _llama(
        "SmolLM3ForCausalLM",
        "smollm3",
        {
            "vocab_size": 128256,
            "hidden_size": 2048,
            "num_hidden_layers": 36,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "tie_word_embeddings": True,
            "sliding_window": None,
            SWITCH: False,
            EACH: 4,
        },
        mlp=ConfigKey("mlp_bias"),
        about={**_SQUARE, "said": UNPADDED, "theta": 2000000.0},
        bias=BIAS,
        out_bias=BIAS,
        window=_WINDOW,
        rope_layers=ConfigKey(NOPE),
    ),
    _llama(
        "Phi3ForCausalLM",
        "phi3",
        {
            "vocab_size": 32064,
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "sliding_window": None,
            PARTIAL: Number(1.0),
            ORIGINAL: 4096,
        },
        names="phi3",
        gates=_GATE_UP,
        about={
            **_SQUARE,
            "said": UNPADDED,
            "scalings": dict.fromkeys(("longrope", "su", "yarn"), "longrope"),
            "adopted": True,
        },
        window=_WINDOW,
    ),
    _llama(
        "Glm4ForCausalLM",
        "glm4",
        {
            "vocab_size": 151552,
            "intermediate_size": 13696,
            "num_hidden_layers": 40,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1.5625e-07,
            "attention_bias": True,
            PARTIAL: Number(0.5),
        },
        gates=_GATE_UP,
        branch=_around,
        norms=_NORMS_AROUND,
        about={"said": UNPADDED, "interleaved": True},
        bias=BIAS,
    ),
    _llama(
        "Olmo3ForCausalLM",
        "olmo3",
        {"vocab_size": 50304, "rms_norm_eps": 1e-5, "sliding_window": 4096},
        branch=_renormed,
        norms=_NORMS_AFTER,
        about={
            **_SQUARE,
            "said": UNPADDED,
            "theta": 500000.0,
            "local": ("", 500000.0),
            "pattern": 4,
        },
        bias=BIAS,
        out_bias=BIAS,
        window=_WINDOW,
        local_rope=ConfigKey("local_rope"),
        qk_norm="whole",
        eps=ConfigKey("rms_norm_eps"),
    ),
    _llama(
        "OlmoForCausalLM",
        "olmo",
        {"vocab_size": 50304},
        norm=_bare,
        about={**_SQUARE, "said": UNPADDED},
        bias=BIAS,
        out_bias=BIAS,
    ),
    _COHERE,
    _gemma(
        "Gemma2ForCausalLM",
        "gemma2",
        {
            "vocab_size": 256000,
            "max_position_embeddings": 8192,
            "final_logit_softcapping": Number(30.0),
            "attn_logit_softcapping": Number(50.0),
            "hidden_act": "gelu_pytorch_tanh",  # of older versions; not read
        },
        {"pattern": 2, "head": _CAPPED},
        softcap=ConfigKey("attn_logit_softcapping"),
    ),
    _gemma(
        "Gemma3ForCausalLM",
        "gemma3_text",
        {
            "vocab_size": 262208,
            "max_position_embeddings": 131072,
            "sliding_window_pattern": 6,
            "rope_local_base_freq": Number(10000.0),
        },
        {
            "theta": 1000000.0,
            "local": ("rope_local_base_freq", 10000.0),
            "pattern": ConfigKey("sliding_window_pattern"),
        },
        local_rope=ConfigKey("local_rope"),
        qk_norm=True,
        one_plus=True,
        eps=ConfigKey("rms_norm_eps"),
    ),
)
