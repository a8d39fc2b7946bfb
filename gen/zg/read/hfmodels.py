"""hfmodels.py -- all families of models of transformers: the rows of hfrows.py, and those of models
whose attention and MLP may add to one residual."""

from __future__ import annotations

from functools import partial

from .hfrows import (
    BIAS,
    GATES,
    PARTIAL,
    ROWS,
    SIZES,
    TOKENS,
    UNPADDED,
    ConfigKey,
    F,
    G,
    H,
    HfFamily,
    Norm,
    Number,
    beside,
    heads,
    layer_norm,
    linear,
    residual,
)
from .node import Names
from .schema import Op

PARALLEL = "use_parallel_residual"
_GELUS = {"hidden_act": {"tanh": "gelu_new", "erf": "gelu"}}


def _block(
    norm: Norm, names: Names, attention: Op, mlp: tuple[Op, ...], parallel: bool
) -> tuple[Op, ...]:
    """Return a block whose attention and MLP add to one residual (parallel) or to one each. names:
    of their norms, one if it is before both."""
    branches = (attention,), mlp
    if len(names) == 1:
        return (residual(norm(names[0]), beside(*branches)),)
    pairs = zip(names, branches, strict=True)
    normed = [(norm(name), *ops) for name, ops in pairs]
    return (
        (residual(beside(*normed)),)
        if parallel
        else tuple(residual(*ops) for ops in normed)
    )


def _neox(parallel: bool) -> HfFamily:
    norm = partial(layer_norm, eps="layer_norm_eps")
    attention = Op(
        "attention",
        heads("attention", H, H, rope=ConfigKey("rope"), bias=BIAS, out_bias=BIAS),
    )
    mlp = (
        linear("mlp.dense_h_to_4h", out=F, bias=True),
        Op("gelu", {"kind": ConfigKey("hidden_act")}),
        linear("mlp.dense_4h_to_h", out="hidden_size", bias=True),
    )
    return HfFamily(
        "GPTNeoXForCausalLM",
        "gpt_neox",
        "neox",
        Op("embedding", {"tokens": "gpt_neox.embed_in"}),
        "gpt_neox.layers.{l}",
        _block(
            norm,
            ("input_layernorm", "post_attention_layernorm"),
            attention,
            mlp,
            parallel,
        ),
        (norm("gpt_neox.final_layer_norm"),),
        SIZES,
        H,
        "max_position_embeddings",
        {
            "num_hidden_layers": 44,
            "hidden_size": 6144,
            "vocab_size": 50432,
            "intermediate_size": 24576,
            "num_attention_heads": 64,
            "layer_norm_eps": 1e-5,
            "hidden_act": "gelu",
            "max_position_embeddings": 2048,
            "tie_word_embeddings": False,
            "attention_bias": True,
            "rotary_pct": Number(0.25),
            PARALLEL: True,
        },
        {"attention_dropout": 0.0, "hidden_dropout": 0.0},
        _GELUS,
        square=True,
        when={PARALLEL: parallel},
        head=linear("embed_out", out="vocab_size"),
        rotary=("rotary_emb_base", "rotary_pct"),
    )


def _stablelm(parallel: bool) -> HfFamily:
    norm = partial(layer_norm, eps="layer_norm_eps")
    attention = heads(
        "self_attn", H, G, rope=ConfigKey("rope"), bias=ConfigKey("use_qkv_bias")
    )
    first, second = "input_layernorm", "post_attention_layernorm"
    return HfFamily(
        "StableLmForCausalLM",
        "stablelm",
        "llama",
        TOKENS,
        "model.layers.{l}",
        _block(
            norm,
            (first,) if parallel else (first, second),
            Op("attention", attention),
            (GATES, Op("swiglu", {}), linear("mlp.down_proj", out="hidden_size")),
            parallel,
        ),
        (norm("model.norm"),),
        SIZES,
        H,
        "max_position_embeddings",
        {
            "num_hidden_layers": 32,
            "hidden_size": 2560,
            "vocab_size": 50304,
            "intermediate_size": 6912,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "layer_norm_eps": 1e-5,
            "max_position_embeddings": 4096,
            "tie_word_embeddings": False,
            "use_qkv_bias": False,
            PARTIAL: Number(0.25),
            PARALLEL: False,
        },
        {**UNPADDED, "hidden_dropout": 0.0, "qk_layernorm": False},
        square=True,
        when={PARALLEL: parallel},
    )


_PHI = HfFamily(
    "PhiForCausalLM",
    "phi",
    "phi",
    TOKENS,
    "model.layers.{l}",
    _block(
        partial(layer_norm, eps="layer_norm_eps"),
        ("input_layernorm",),
        Op(
            "attention",
            heads("self_attn", H, G, rope=ConfigKey("rope"), bias=True, out_bias=True),
        ),
        (
            linear("mlp.fc1", out=F, bias=True),
            Op("gelu", {"kind": ConfigKey("hidden_act")}),
            linear("mlp.fc2", out="hidden_size", bias=True),
        ),
        parallel=True,
    ),
    (layer_norm("model.final_layernorm", "layer_norm_eps"),),
    SIZES,
    H,
    "max_position_embeddings",
    {
        "num_hidden_layers": 24,
        "hidden_size": 2048,
        "vocab_size": 51200,
        "intermediate_size": 8192,
        "num_attention_heads": 32,
        "num_key_value_heads": None,
        "layer_norm_eps": 1e-5,
        "hidden_act": "gelu_new",
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "attention_bias": False,
        PARTIAL: Number(0.5),
    },
    {
        "attention_dropout": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "qk_layernorm": False,
    },
    _GELUS,
    square=True,
    adopted=True,
    head=linear("lm_head", out="vocab_size", bias=True),
)
FAMILIES = (
    *ROWS,
    _neox(parallel=True),
    _neox(parallel=False),
    _stablelm(parallel=False),
    _stablelm(parallel=True),
    _PHI,
)
