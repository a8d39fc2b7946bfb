"""ops.py -- the op table: what each op computes, its kernels forward and backward, its cost.

A kernel line is `symbol operand ...` in the order of kernels/zk.h after (k, L). Operands:
  x y ...   a value of the op, by the names in `ins` and `outs`     dx dy ...  its gradient
  w b ...   a parameter, by the names in `params`                    dw db ...  its gradient: a leaf
  M N eps   a dimension or attribute of the op                       $n  workspace, by its name
  +dx       the gradient that x has already, to add to dx; null where it has none
A line that starts with `?p` is dropped where the op lacks the parameter p; a missing parameter
elsewhere is a null pointer. What backward lines name of forward values is what must be saved.

Letters: B batch, T sequence, M = B*T, C width, V vocab, R rows of a table of tokens as stored: V
and zeros up to a multiple of VOCAB, H heads, G key-value heads, D head size, N and K
a linear's output and input width, F a gated branch's width, n elements.
"""
from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Mapping

Dims = Mapping[str, object]


@dataclass(frozen=True)
class Out:
    """A value an op makes: its name, its type (`real` or `f32`), its elements as a product of
    dims."""
    name: str
    dtype: str
    dims: tuple[str, ...]


@dataclass(frozen=True)
class Op:
    """One row of the table. `work` is bytes of workspace, `flops` forward; backward costs twice
    that."""
    name: str
    synopsis: str
    ins: tuple[str, ...]
    params: tuple[str, ...]
    outs: tuple[Out, ...]
    fwd: tuple[str, ...]
    bwd: tuple[str, ...]
    work: Mapping[str, str]
    flops: str = "0"


def _op(name: str, synopsis: str, ins: str, params: str, outs: str, fwd: str, bwd: str,
        work: Mapping[str, str] | None = None, flops: str = "0") -> Op:
    made = tuple(Out(n, t, tuple(d.split("*"))) for n, t, d in (o.split(":") for o in outs.split()))
    lines = [tuple(line.strip() for line in text.split(";") if line.strip()) for text in (fwd, bwd)]
    return Op(name, synopsis, tuple(ins.split()), tuple(params.split()), made, lines[0], lines[1],
              dict(work or {}), flops)


_ROWS = (
    _op("embed", "y = wte[token] + wpe[position]", "", "wte wpe", "y:real:M*C",
        "zk_embed_fwd y token wte wpe B T C",
        "zk_embed_bwd dwte dy token $index M R C full; ?wpe zk_position_bwd dwpe dy B T C P",
        {"$index": "4*(R+1+M)"}),
    _op("layernorm", "y = (x - mean) / std * w + b", "x", "w b", "y:real:M*C stat:f32:M*2",
        "zk_layernorm_fwd y stat null x null w b M C eps",
        "zk_layernorm_bwd dx dw db dy +dx x stat w $sum M C", {"$sum": "4*2*C"}),
    _op("rmsnorm", "y = x / rms * w", "x", "w", "y:real:M*C stat:f32:M",
        "zk_rmsnorm_fwd y stat null x null w M C eps",
        "zk_rmsnorm_bwd dx dw dy +dx x stat w $sum M C", {"$sum": "4*2*C"}),
    _op("linear", "y = x . w + b", "x", "w b", "y:real:M*N",
        "zk_linear_fwd y x w b M N K layout",
        "zk_linear_bwd_x dx dy w M N K layout; zk_linear_bwd_w dw dy x M N K layout full carry;"
        "?b zk_linear_bwd_b db dy M N", flops="2*M*N*K"),
    _op("qknorm", "q, k heads of y = x / rms * w; v heads copied", "x", "wq wk",
        "y:real:M*E stat:f32:M*J",
        "zk_qknorm_fwd y stat x wq wk M H G D eps",
        "zk_qknorm_bwd dx dwq dwk dy x stat wq wk $sum M H G D", {"$sum": "4*2*D*(1+M)"}),
    _op("rope", "q, k heads of y = x turned by position; v heads copied", "x", "", "y:real:M*E",
        "zk_rope y x table B T H G D 1",
        "zk_rope dx dy table B T H G D -1"),
    _op("attention", "y = softmax(causal(q k' scale)) v", "x", "", "y:real:M*Q lse:f32:M*H",
        "zk_attention_fwd y lse x B T H G D scale",
        "zk_attention_bwd dx dy y x lse $sum B T H G D scale",
        {"$sum": "4*(M*H+M*E)"}, flops="2*M*T*Q"),
    _op("gelu", "y = gelu(x)", "x", "", "y:real:M*F",
        "zk_gelu_fwd y x n kind", "zk_gelu_bwd dx dy x n kind"),
    _op("swiglu", "y = silu(gate) * up, x = gate, up", "x", "", "y:real:M*F",
        "zk_swiglu_fwd y x M F", "zk_swiglu_bwd dx dy x M F"),
    _op("add", "y = a + b", "a b", "", "y:real:M*C", "zk_add y a b n", "pass da dy; pass db dy"),
    _op("loss", "loss = cross entropy of x against target", "x", "", "loss:f32:M",
        "zk_cross_entropy loss null x target null M V rows", ""),
)
OPS: Mapping[str, Op] = {row.name: row for row in _ROWS}

# Two calls in a row, and the one with the same results: a word is the same operand in all three.
FUSED = tuple(tuple(call.split() for call in row.split(";")) for row in (
    "zk_add x a b n; zk_layernorm_fwd y stat null x null w bias M C eps;"
    "zk_layernorm_fwd y stat x a b w bias M C eps",
    "zk_add x a b n; zk_rmsnorm_fwd y stat null x null w M C eps;"
    "zk_rmsnorm_fwd y stat x a b w M C eps",
))

# A call on a weight [out,in], and the one on rows [at, at + n) of it, for each slice in turn. In
# halves dx is f32 until it is whole: ROUND makes a value of it then.
SLICED = tuple(tuple(call.split() for call in row.split(";")) for row in (
    "zk_linear_fwd y x w b M N K 1; zk_slice_fwd y x w b M N K at n",
    "zk_linear_bwd_x dx dy w M N K 1; zk_slice_bwd_x dx dy w M N K at n",
    "zk_linear_bwd_w dw dy x M N K 1 0 0; zk_slice_bwd_w dw dy x M N K at n",
))

ROUND = "zk_round"

# Kernels that may write their first operand where these lie: kernels/zk.h says so.
IN_PLACE = {"zk_add": (1, 2), "zk_rope": (1,), "zk_gelu_bwd": (1,)}

# The head's loss while training: the gradient takes the logits' place. Both bodies end with the sum
# of losses; evaluation then makes the logits of one row again, from which a token is drawn.
TRAIN_LOSS = "zk_cross_entropy loss x x target scaler M V rows"
LOSS_SUM = "zk_loss_sum sums loss target rows"
PICK = "zk_pick row x target rows K"

# What train.recompute calls the ops of a block.
WORDS = {name: name for name in OPS if name not in ("embed", "loss")} | {"add": "residual"}


# The optimizers: what each keeps of an element, operands m and v of its kernel. A row's number is
# its rule in kernels/update.h. Momentum and Nesterov are SGD with a momentum. The master is where
# parameters are stored in less than f32.
OPTIMIZERS: Mapping[str, tuple[str, ...]] = {
    "AdamW": ("m", "v"), "Adam": ("m", "v"), "SGD": (), "Momentum": ("m",), "Nesterov": ("m",),
    "Lion": ("m",), "Adagrad": ("v",),
}
UPDATE = "zk_update"
STATES = ("master", "m", "v")

# How a linear's weight lies in the weights' file of a family: [in,out] or [out,in].
LAYOUT = {"gpt2": 0, "llama": 1}
KINDS = {"tanh": 0, "erf": 1}
CURVES = {"line": 0, "cosine": 1, "log": 2, "inverse": 3}
BYTES = {"f32": 4, "bf16": 2, "f16": 2}
TYPES = {name: f"ZK_{name.upper()}" for name in BYTES}

LAYER = re.compile(r"\{l(?:\+(\d+))?\}")

# Sizes of kernels/zk.h that a plan needs: ZK_SUMS integers of 8 bytes; room for a zk_ctl in bytes.
SUMS = 72
VOCAB = 8                       # rows by token, and columns of logits, are a multiple: 16 bytes
CTL = 128
SCALE = 80                      # where a zk_ctl has the scale of gradients
INLETS = 4                      # batches of tokens on their way to a GPU at once
DESK = 4096                     # bytes of host memory that kernels need, beside a row of logits


def layer(name: str, l: int) -> str:
    """A tensor's name in a layer: {l} stands for its number, {l+N} for one that begins at N."""
    return LAYER.sub(lambda found: str(l + int(found[1] or 0)), name)


def width(state: str, moments: str) -> int:
    """Bytes of an element of a state: masters are f32, moments are stored as the recipe says."""
    return 4 if state == "master" else BYTES[moments]


def up(n: int, to: int) -> int:
    """The least multiple of `to` that is not less than n."""
    return -(-n // to) * to


def product(dims: Dims, names: tuple[str, ...]) -> int:
    """Elements of a value: the product of its dims; a name that is a number stands for itself."""
    total = 1
    for name in names:
        total *= int(name) if name.isdigit() else int(dims[name])  # type: ignore[call-overload]
    return total


def value(expression: str, dims: Dims) -> int:
    """An expression of the table (sums and products of dims) as an integer. It is the table's own
    text, never input."""
    return int(eval(expression, {"__builtins__": {}}, dict(dims)))
