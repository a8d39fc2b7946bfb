"""ops.py -- the op table: the formula of each op, and its kernels forward and backward.

A line is a kernel of kernels.py with its operands under their own names,
  x y ...   a value of the op        dx dy ...  its gradient
  w b ...   a parameter              dw db ...  its gradient: a leaf
  M N eps   a dimension or attribute of the op
except those that the line renames, NAME=WORD. In backward, `more` is the gradient that x already
has, or null; in forward, `more` and `sum` are null. A parameter that an op lacks is a null pointer.
The operands of the forward line are the op's values; those that backward lines name must be saved.
`pass da dy`: the gradient of a equals that of y.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from ..plan.operand import Names
from . import kinds
from .kernels import FACTOR, KERNELS, LOSS_SUMS, LOSSES, NULL, Formal
from .kernels import VOCAB as VOCAB

# Operands of an op other than its values.
GIVEN = (
    "token",
    "target",
    "position",
    "document",
    "key",
    "table",
    "table2",
    "scaler",
    NULL,
)


@dataclass(frozen=True)
class OpRow:
    """One row of the table. fwd, bwd: calls, each the kernel and the word of every operand."""

    name: str
    ins: Names
    params: Names
    outs: tuple[Formal, ...]
    fwd: str
    bwd: Names


def _words(line: str) -> list[str]:
    kernel, *said = line.split()
    if kernel == "pass":
        return [kernel, *said]
    row = KERNELS[kernel]
    usual = {f.name: "$" if f.mode == "$" else f.name for f in row.formals}
    if "more" in usual:
        usual |= {"more": "+dx"} if row.of else {"more": NULL, "sum": NULL}
    usual |= dict(word.split("=") for word in said)
    return [kernel, *usual.values()]


def _call(line: str) -> str:
    return " ".join(_words(line))


def _op(name: str, fwd: str, *bwd: str) -> OpRow:
    kernel, *words = _words(fwd)
    ins, params, outs = [], [], []
    for f, word in zip(KERNELS[kernel].formals, words, strict=True):
        if f.mode == "<" and word not in GIVEN:
            ins.append(word)
        elif f.mode == "@":
            params.append(word)
        elif f.mode == ">" and not f.optional:
            outs.append(f)
    return OpRow(
        name,
        tuple(ins),
        tuple(params),
        tuple(outs),
        _call(fwd),
        tuple(map(_call, bwd)),
    )


_ROWS = (
    # y = wte[token] + wpe[position]
    _op(
        "embed",
        "zk_embed_fwd w=wte p=wpe",
        "zk_embed_bwd dw=dwte V=R add=full",
        "zk_position_bwd dp=dwpe",
    ),
    # the same with positions in documents
    _op(
        "embed_packed",
        "zk_embed_packed_fwd w=wte p=wpe",
        "zk_embed_bwd dw=dwte V=R add=full",
        "zk_position_packed_bwd dp=dwpe",
    ),
    # y = (x - mean) / std * w + b
    _op("layernorm", "zk_layernorm_fwd", "zk_layernorm_bwd"),
    # y = x / rms * w
    _op("rmsnorm", "zk_rmsnorm_fwd", "zk_rmsnorm_bwd"),
    # y = x / rms * (1 + w)
    _op("rmsnorm1", "zk_rmsnorm1_fwd", "zk_rmsnorm1_bwd"),
    # y = x . w + b
    _op(
        "linear",
        "zk_linear_fwd",
        "zk_linear_bwd_x",
        "zk_linear_bwd_w",
        "zk_linear_bwd_b",
    ),
    # y = base, and scale * x . w added to its columns [at, at + n)
    _op(
        "lora",
        "zk_lora_fwd",
        "zk_lora_bwd_x",
        "zk_lora_bwd_w",
        "pass dbase dy",
    ),
    # q, k heads of y = x / rms * w; v heads copied
    _op("qknorm", "zk_qknorm_fwd in=x", "zk_qknorm_bwd din=dx in=x"),
    # the same with factors 1 + w
    _op("qknorm1", "zk_qknorm1_fwd in=x", "zk_qknorm1_bwd din=dx in=x"),
    # q, k heads with all q heads as one, and all k heads as one
    _op(
        "qknorm_whole",
        "zk_qknorm_whole_fwd in=x",
        "zk_qknorm_whole_bwd din=dx in=x",
    ),
    # q, k heads of y = x rotated by position; v heads copied
    _op("rope", "zk_rope in=x sign=1", "zk_rope y=dx in=dy sign=-1"),
    # the same with positions in documents
    _op(
        "rope_packed",
        "zk_rope_packed in=x sign=1",
        "zk_rope_packed y=dx in=dy sign=-1",
    ),
    # a part of each head, in some layers, by one of two tables
    _op("rope_part", "zk_rope_part in=x sign=1", "zk_rope_part y=dx in=dy sign=-1"),
    # heads of x by the rank of a context group that they go to, and back
    _op("cut_heads", "zk_cut_heads_fwd", "zk_cut_heads_bwd"),
    _op("join_heads", "zk_join_heads sign=1", "zk_join_heads y=dx x=dy sign=-1"),
    # exchanges between the ranks of a context group: a block's rows for all rows of some heads
    _op("to_heads", "to_heads", "to_heads_bwd"),
    _op("to_rows", "to_rows", "to_rows_bwd"),
    # y = softmax(causal(q k' scale)) v
    _op("attention", "zk_attention_fwd qkv=x", "zk_attention_bwd dqkv=dx qkv=x"),
    # within a row's own document, over its last `window` rows
    _op(
        "attention_local",
        "zk_attention_local_fwd qkv=x",
        "zk_attention_local_bwd dqkv=dx qkv=x",
    ),
    # the same with scores cap * tanh(score / cap)
    _op(
        "attention_capped",
        "zk_attention_capped_fwd qkv=x",
        "zk_attention_capped_bwd dqkv=dx qkv=x",
    ),
    # within documents and the window, with dropout of probabilities
    _op(
        "attention_dropped",
        "zk_attention_dropped_fwd qkv=x",
        "zk_attention_dropped_bwd dqkv=dx qkv=x",
    ),
    _op("gelu", "zk_gelu_fwd", "zk_gelu_bwd"),
    # y = max(x, 0) ** 2
    _op("relu2", "zk_relu2_fwd", "zk_relu2_bwd"),
    # y = scale * x
    _op("scale", "zk_scale_fwd", "zk_scale_bwd"),
    # y = silu(gate) * up, where x = gate, up
    _op("swiglu", "zk_swiglu_fwd", "zk_swiglu_bwd"),
    # y = gelu(gate) * up by tanh, where x = gate, up
    _op("geglu", "zk_geglu_fwd", "zk_geglu_bwd"),
    # y = x / (1 - p), or 0 with probability p
    _op("dropout", "zk_dropout_fwd", "zk_dropout_bwd"),
    # the same on the input of an adapter
    _op("lora_dropout", "zk_dropout_fwd", "zk_dropout_bwd"),
    # y = a + b
    _op("add", "zk_add", "pass da dy", "pass db dy"),
    # loss = cross entropy of x against target
    _op("loss", "zk_cross_entropy dlogits=null logits=x scale=null"),
    # the same of smoothed targets, with a penalty on the logits' scale; x may be capped
    _op("soft_loss", "zk_soft_cross_entropy dlogits=null logits=x scale=null"),
    # y = cap * tanh(x / cap), logits; soft_loss computes the gradient of x
    _op("softcap", "zk_softcap"),
)
OPS: Mapping[str, OpRow] = {row.name: row for row in _ROWS}

# Forward kernel -> operands whose gradient equals that of the result.
PASSES: Mapping[str, Names] = {
    op.fwd.split()[0]: tuple(line.split()[1][1:] for line in passes)
    for op in _ROWS
    if (passes := [line for line in op.bwd if line.startswith("pass ")])
}

# The head's losses in training, by train.loss_mean: the gradient overwrites the logits. Both bodies
# end with the sum of losses; evaluation then computes the logits of one row again, from which a
# token is drawn. Before losses that are averaged over their micro-batch, its tokens are counted.
_SCALES = {"tokens": "scaler", "micro_batch": "factor"}
TRAIN_LOSS = {
    mean: {
        name: _call(f"{kernel} dlogits=x logits=x scale={scale}")
        for name, kernel in zip(("loss", "soft_loss"), LOSSES, strict=True)
    }
    for mean, scale in _SCALES.items()
}
LOSS_FACTOR = _call(f"{FACTOR} scale=scaler A=all_rows")
LOSS_SUM = {
    "tokens": _call(f"{LOSS_SUMS['tokens']} M=rows"),
    "micro_batch": _call(f"{LOSS_SUMS['micro_batch']} M=rows A=all_rows"),
}
PICK = _call("zk_pick y=row M=rows C=K")
# Class of the row that is picked, if a rank evaluates several blocks of a sample in turn.
PICKED = "picked"

# Names of a block's ops in train.recompute.
WORDS = {
    name: name
    for name in OPS
    if name not in ("embed", "embed_packed", "softcap", "loss", "soft_loss")
} | {
    "add": "residual",
    "attention_capped": "attention",
    "attention_dropped": "attention",
    "attention_local": "attention",
    "cut_heads": "attention",
    "join_heads": "attention",
    "to_heads": "attention",
    "to_rows": "attention",
    "dropout": "residual",
    "lora": "linear",
    "lora_dropout": "linear",
    "qknorm1": "qknorm",
    "qknorm_whole": "qknorm",
    "rmsnorm1": "rmsnorm",
    "rope_packed": "rope",
    "rope_part": "rope",
}

# Ops whose results are never saved: backward recomputes them from their inputs.
AGAIN = ("lora_dropout",)

# Optimizer states of an element.
OPTIMIZERS: Mapping[str, Names] = {
    name: tuple(kept.split()) for name, kept, _ in kinds.RULES
}
UPDATE = "zk_update"
STATES = ("master", "m", "v")
MOMENTUM = ("Momentum", "Nesterov")  # rules whose m is a momentum

# Fields of a zk_ctl that a step takes over from the last one.
CONTROL = {
    "step": "I64",
    "applied": "I64",
    "skipped": "I64",
    "scale": "F64",
    "clean": "I64",
    "hysteresis": "I64",
}


def saved(rule: str, state: str) -> str:
    """Return a state's name in a checkpoint, as PyTorch's optimizers name it."""
    if state == "m" and rule in MOMENTUM:
        return "momentum"
    return {"m": "exp_avg", "v": "exp_avg_sq"}.get(state, state)


KINDS = {"tanh": 0, "erf": 1}
CURVES = {"line": 0, "cosine": 1, "log": 2, "inverse": 3, "restarts": 4}
BYTES = {"f32": 4, "bf16": 2, "f16": 2}
# A part of a sum of products starts at a multiple: AVX512_BF16 takes 2 terms at a time, AMX 32.
TERMS = {"f32": 1, "bf16": 32, "f16": 1}
TYPES = {name: f"ZK_{name.upper()}" for name in BYTES}

LAYER = re.compile(r"\{l(?:\+(\d+))?\}")


# Classes of a micro-batch -> those of whole samples, which attention and means of losses read if
# blocks of a sample are micro-batches.
OF_SAMPLES = {
    "positions": "documents",
    "keys": "sample_keys",
    "targets": "sample_targets",
}


def batch(ends: bool, keyed: bool, means: bool, cut: bool) -> Names:
    """Return the classes that hold a micro-batch. ends: documents end; keyed: a sample has a key of
    random numbers; means: losses are averaged over a micro-batch; cut: that is a block of a
    sample."""
    return (
        "tokens",
        "targets",
        *["positions"] * (ends or cut),
        *["keys"] * keyed,
        *["documents"] * (ends and cut),
        *["sample_keys"] * (keyed and cut),
        *["sample_targets"] * (means and cut),
    )


# Sizes of kernels/zk.h that a plan needs: ZK_SUMS integers of 8 bytes; bytes of a zk_ctl.
SUMS = 72
CTL = 128
LEAVES = 72  # offset of the leaf count in a zk_ctl
SCALE = 80  # offset of the loss scale in a zk_ctl
PINNED_BATCHES = 4  # batches of tokens on their way to a GPU at once
# Bytes of host memory that kernels need besides a row of logits.
PINNED_SCRATCH = 4096


def layer(name: str, l: int) -> str:
    """Return a tensor's name in a layer: {l} is the layer's number, {l+N} the number plus N."""
    return LAYER.sub(lambda found: str(l + int(found[1] or 0)), name)


def up(n: int, to: int) -> int:
    """Return the smallest multiple of `to` that is at least n."""
    return -(-n // to) * to
