"""kernels.py -- the kernel table: one row per kernel of kernels/zk.h, which tests compare with it.

An operand is `name mode type:elements`, in the order of zk.h after (k, L):
  y>real:M*C    written       x<real:M*C   read        sums+i64:72   added to
  w@real:C      a parameter   dw^real:C    its gradient: a leaf
  work$f32:2*C  scratch       M            an integer of the shape by which a launch is found
  at~           another integer            eps.        a floating-point number
Marks after a type: ? it may be null; & it is a by-product, which may go unread. A type that is the
name of a number means f32 if that number is not 0, else real. Elements `*C` are any number of rows
of C; operands without elements belong to the plan's own functions. `dx>real:n=dy` may lie exactly
where dy lies. `spans` stands for spans, nspans. A mark ! after a name or a type: no size determines
it, so the plan states it for each forward call (plan.Stated), as it does every floating-point
number; backward has forward's.

A backward kernel names its operands as forward does: x is forward's x, dx the gradient of it. A
norm with `more` adds it to x first and stores the result in `sum`; its backward adds `more` to dx.

Letters: B batch, T sequence, M = B*T, A tokens of a micro-batch that M are a block of, C width, V
vocab, R columns of logits: V padded with zeros to a multiple of VOCAB, H heads, G key-value heads,
D head size, W its rotated width, E = (H+2*G)*D, N and K a linear's output and input width, F a
gated branch's width, P positions, n elements.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

from ..plan.operand import Arg, Ints, Layers, Names, by_layer, whole

ADD, ROUND, NULL = "zk_add", "zk_round", "null"
DEQUANTIZE = "zk_dequantize"
# Exchanges between the ranks of a context group, which are no kernels, and whether they go from the
# rows of a block to the heads of a sample.
EXCHANGES = {
    "to_heads": True,
    "to_rows_bwd": True,
    "to_rows": False,
    "to_heads_bwd": False,
}
VOCAB = 8  # rows by token and columns of logits are a multiple of it: 16 bytes
WIDTHS = {"f32": 4, "i32": 4, "i64": 8, "f64": 8}  # bytes of an element


@dataclass(frozen=True)
class Formal:
    """An operand of a kernel. mode: > < + @ ^ $ # ~ or a point, as above; alias: operands that it
    may lie exactly on."""

    name: str
    mode: str
    type: str = ""
    elems: str = ""
    optional: bool = False
    spare: bool = False
    alias: Names = ()
    stated: bool = False

    @property
    def number(self) -> bool:
        return self.mode in "#~."


@dataclass(frozen=True)
class Kernel:
    """A row of the table.

    grid: its launches on a GPU, by a rule of grids.py; task: elements or rows that a CPU thread
    takes at a time (for sums and the optimizer blocks of 1024), 0 for the kernel's own choice; of:
    the forward kernel that it is the backward of; called: other names of its operands in that role;
    whole: the kernel that all its calls on slices of a weight equal together, with these `numbers`;
    host: it has a twin zk_host_NAME that runs on the host.
    """

    name: str
    formals: tuple[Formal, ...]
    grid: str
    flops: str = "0"
    task: int = 16
    of: str = ""
    called: Mapping[str, str] = field(default_factory=dict)
    whole: str = ""
    numbers: Mapping[str, int] = field(default_factory=dict)
    host: bool = False

    @functools.cached_property
    def at(self) -> Mapping[str, int]:
        """Index of each operand."""
        return {f.name: n for n, f in enumerate(self.formals)}

    @functools.cached_property
    def shape(self) -> Names:
        """Names of the integers by which a launch is found."""
        return tuple(f.name for f in self.formals if f.mode == "#")

    @property
    def exchange(self) -> bool:
        """True if it is an exchange, which is no kernel."""
        return self.name in EXCHANGES

    @property
    def samples(self) -> bool:
        """True if it needs all tokens of a sample, whose heads are independent."""
        return self.name.startswith("zk_attention")

    @property
    def own(self) -> bool:
        """True if only the plan's own functions call it."""
        return any(not f.number and not f.elems for f in self.formals)

    @property
    def params(self) -> bool:
        """True if it multiplies by parameters."""
        return any(f.mode == "@" for f in self.formals)


_OPERAND = re.compile(r"(\w+)([><+@^$])(\w+)([?&!]*)(?::([^=]+))?(?:=(.+))?")


def _formal(text: str) -> Formal:
    if found := _OPERAND.fullmatch(text):
        name, mode, type_, marks, elems, alias = found.groups()
        others = tuple(alias.split(",")) if alias else ()
        return Formal(
            name,
            mode,
            type_,
            elems or "",
            "?" in marks,
            "&" in marks,
            others,
            "!" in marks,
        )
    word = text.rstrip("!")
    mode = word[-1] if word[-1] in "~." else "#"
    return Formal(word.rstrip("~."), mode, stated=mode == "." or word != text)


def _row(name: str, operands: str, grid: str, **more: object) -> Kernel:
    formals = tuple(map(_formal, operands.split()))
    return Kernel(name, formals, grid, **more)  # type: ignore[arg-type]


# fmt: off
_ROWS = (
    _row("zk_embed_fwd", "y>real:B*T*C token<i32:B*T w@real:*C p@real?:*C B T C",
         "run(each_row(B*T, C, real))"),
    _row("zk_embed_bwd", "dw^add:V*C dy<real:M*C token<i32:M index$i32:V+1+M M V C add",
         "embed_bwd(M, V, C, real, target)"),
    _row("zk_position_bwd", "dp^real:P*C dy<real:B*T*C B T C P", "run(each_row(P, C, real))"),
    _row("zk_embed_packed_fwd", "y>real:M*C token<i32:M position<i32:M w@real:*C p@real:*C M C",
         "run(each_row(M, C, real))"),
    _row("zk_position_packed_bwd", "dp^real:P*C dy<real:M*C position<i32:M index$i32:P+1+M M C P",
         "embed_bwd(M, P, C, real, target)"),

    _row("zk_layernorm_fwd", "y>real:M*C stat>f32&:M*2 sum>real?:M*C x<real:M*C more<real?:M*C "
         "w@real?:C b@real?:C M C eps.", "norm_fwd(M, C, real)"),
    _row("zk_layernorm_bwd", "dx>real:M*C dw^real?:C db^real?:C dy<real:M*C more<real?:M*C "
         "x<real:M*C stat<f32:M*2 w@real?:C scratch$f32:2*C M C",
         "norm_bwd(M, C, real, target, 2, most=192)", of="zk_layernorm_fwd"),
    _row("zk_rmsnorm_fwd", "y>real:M*C stat>f32&:M sum>real?:M*C x<real:M*C more<real?:M*C "
         "w@real:C M C eps.", "norm_fwd(M, C, real)"),
    _row("zk_rmsnorm_bwd", "dx>real:M*C dw^real?:C dy<real:M*C more<real?:M*C x<real:M*C "
         "stat<f32:M w@real:C scratch$f32:2*C M C",
         "norm_bwd(M, C, real, target, 1)", of="zk_rmsnorm_fwd"),
    _row("zk_rmsnorm1_fwd", "y>real:M*C stat>f32&:M sum>real?:M*C x<real:M*C more<real?:M*C "
         "w@real:C M C eps.", "norm_fwd(M, C, real)"),
    _row("zk_rmsnorm1_bwd", "dx>real:M*C dw^real?:C dy<real:M*C more<real?:M*C x<real:M*C "
         "stat<f32:M w@real:C scratch$f32:2*C M C",
         "norm_bwd(M, C, real, target, 1)", of="zk_rmsnorm1_fwd"),
    _row("zk_qknorm_fwd", "y>real:M*E stat>f32&:M*(H+G) in<real:M*E wq@real:D wk@real:D "
         "M H! G! D! eps.", "norm_fwd(M*max(H, G), D, real, 3)"),
    _row("zk_qknorm_bwd", "din>real:M*E dwq^real?:D dwk^real?:D dy<real:M*E in<real:M*E "
         "stat<f32:M*(H+G) wq@real:D wk@real:D scratch$f32:2*D*(1+M) M H G D",
         "norm_bwd(M*max(H, G), D, real, target, 2, 3)", of="zk_qknorm_fwd"),
    _row("zk_qknorm1_fwd", "y>real:M*E stat>f32&:M*(H+G) in<real:M*E wq@real:D wk@real:D "
         "M H! G! D! eps.", "norm_fwd(M*max(H, G), D, real, 3)"),
    _row("zk_qknorm1_bwd", "din>real:M*E dwq^real?:D dwk^real?:D dy<real:M*E in<real:M*E "
         "stat<f32:M*(H+G) wq@real:D wk@real:D scratch$f32:2*D*(1+M) M H G D",
         "norm_bwd(M*max(H, G), D, real, target, 2, 3)", of="zk_qknorm1_fwd"),
    _row("zk_qknorm_whole_fwd", "y>real:M*E stat>f32&:M*2 in<real:M*E wq@real:H*D wk@real:G*D "
         "M H! G! D! eps.", "norm_fwd(M, H*D, real, 3, G*D)"),
    _row("zk_qknorm_whole_bwd", "din>real:M*E dwq^real?:H*D dwk^real?:G*D dy<real:M*E in<real:M*E "
         "stat<f32:M*2 wq@real:H*D wk@real:G*D M H G D",
         "norm_bwd(M, H*D, real, target, 2, 3, beside=G*D)", of="zk_qknorm_whole_fwd"),

    _row("zk_linear_fwd", "y>real:M*N x<real:M*K w@real:N*K b@real?:N M N K layout!",
         "run(workspace=GEMM)", flops="2*M*N*K", task=0),
    _row("zk_linear_bwd_x", "dx>real:M*K dy<real:M*N w@real:N*K M N K layout",
         "run(workspace=GEMM)", flops="2*M*N*K", task=0, of="zk_linear_fwd"),
    _row("zk_linear_bwd_w", "dw^full:N*K dy<real:M*N x<real:M*K M N K layout full carry",
         "run(workspace=GEMM)", flops="2*M*N*K", task=0, of="zk_linear_fwd"),
    _row("zk_linear_bwd_b", "db^real:N dy<real:M*N M N", "bias(M, N)", of="zk_linear_fwd"),
    _row("zk_slice_fwd", "y>real:M*N x<real:M*K w@real:n*K b@real?:N M N K at~ n",
         "run(workspace=GEMM)", flops="2*M*n*K", task=0,
         whole="zk_linear_fwd", numbers={"layout": 1}),
    _row("zk_slice_bwd_x", "dx>f32:M*K dy<real:M*N w@real:n*K M N K at~ n",
         "run(workspace=GEMM)", flops="2*M*n*K", task=0,
         of="zk_slice_fwd", whole="zk_linear_bwd_x", numbers={"layout": 1}),
    _row("zk_slice_bwd_w", "dw^real:n*K dy<real:M*N x<real:M*K M N K at~ n",
         "run(workspace=GEMM)", flops="2*M*n*K", task=0,
         of="zk_slice_fwd", whole="zk_linear_bwd_w",
         numbers={"layout": 1, "full": 0, "carry": 0}),

    _row("zk_lora_fwd", "y>real:M*N=base base<real:M*N x<real:M*K w@real:n*K M N K at! n scale.",
         "run(workspace=GEMM)", flops="2*M*n*K", task=0),
    _row("zk_lora_bwd_x", "dx>real:M*K dy<real:M*N w@real:n*K M N K at n scale.",
         "run(workspace=GEMM)", flops="2*M*n*K", task=0, of="zk_lora_fwd"),
    _row("zk_lora_bwd_w", "dw^full:n*K dy<real:M*N x<real:M*K M N K at n scale. full carry",
         "run(workspace=GEMM)", flops="2*M*n*K", task=0, of="zk_lora_fwd"),

    _row("zk_rope_table", "table>f32 freq<f64 T D", "run(flat(T*(D//2)))"),
    _row("zk_rope", "y>real:M*E=in in<real:M*E table<f32!:T*D B T H! G! D! sign",
         "run(each_row(B*T, (H+G)*(D//2), real))", of="zk_rope", called={"y": "din", "in": "dy"}),
    _row("zk_rope_packed", "y>real:M*E=in in<real:M*E table<f32!:T*D position<i32:M "
         "B T H! G! D! sign", "run(each_row(B*T, (H+G)*(D//2), real))",
         of="zk_rope_packed", called={"y": "din", "in": "dy"}),
    _row("zk_rope_part", "y>real:M*E=in in<real:M*E table<f32!:T*W table2<f32?!:T*W "
         "position<i32?:M B T H! G! D! W! pairs! which! factor. factor2. sign",
         "run(each_row(B*T, (H+G)*D, real))", of="zk_rope_part", called={"y": "din", "in": "dy"}),
    _row("zk_cut_heads_fwd", "y>real:M*(H+2*G*copies)*D x<real:M*E M H! G! D! ranks! copies!",
         "run(each_row(M, (H+2*G)*D, real))"),
    _row("zk_cut_heads_bwd", "dx>real:M*E dy<real:M*(H+2*G*copies)*D M H G D ranks copies",
         "run(each_row(M, (H+2*G)*D, real))", of="zk_cut_heads_fwd"),
    _row("zk_join_heads", "y>real:M*H*D x<real:M*H*D M H! D! ranks! sign",
         "run(each_row(M, H*D, real))", of="zk_join_heads", called={"y": "dx", "x": "dy"}),
    _row("to_heads", "y>real:n*k x<real:n n k", ""),
    _row("to_heads_bwd", "dx>real:n dy<real:n*k n k", "", of="to_heads"),
    _row("to_rows", "y>real:n//k x<real:n n k", ""),
    _row("to_rows_bwd", "dx>real:n dy<real:n//k n k", "", of="to_rows"),
    _row("zk_attention_fwd", "y>real:M*H*D lse>f32&:B*H*T qkv<real:M*E B T H! G! D! scale.",
         "attention_fwd(B, T, H, G, D, real, target)", flops="2*B*T*T*H*D"),
    _row("zk_attention_bwd", "dqkv>real:M*E dy<real:M*H*D y<real:M*H*D qkv<real:M*E lse<f32:B*H*T "
         "scratch$f32:M*H+M*E B T H G D scale.", "attention_bwd(B, T, H, G, D, real, target)",
         flops="4*B*T*T*H*D", of="zk_attention_fwd"),
    _row("zk_attention_local_fwd", "y>real:M*H*D lse>f32&:B*H*T qkv<real:M*E position<i32?:M "
         "B T H! G! D! window! scale.", "attention_fwd(B, T, H, G, D, real, target, 1)",
         flops="2*B*window*(2*T-window)*H*D"),
    _row("zk_attention_local_bwd", "dqkv>real:M*E dy<real:M*H*D y<real:M*H*D qkv<real:M*E "
         "lse<f32:B*H*T scratch$f32:M*H+M*E position<i32?:M B T H G D window scale.",
         "attention_bwd(B, T, H, G, D, real, target, 1)", flops="4*B*window*(2*T-window)*H*D",
         of="zk_attention_local_fwd"),
    _row("zk_attention_capped_fwd", "y>real:M*H*D lse>f32&:B*H*T qkv<real:M*E position<i32?:M "
         "B T H! G! D! window! scale. cap.", "attention_fwd(B, T, H, G, D, real, target, 1)",
         flops="2*B*window*(2*T-window)*H*D"),
    _row("zk_attention_capped_bwd", "dqkv>real:M*E dy<real:M*H*D y<real:M*H*D qkv<real:M*E "
         "lse<f32:B*H*T scratch$f32:M*H+M*E position<i32?:M B T H G D window scale. cap.",
         "attention_bwd(B, T, H, G, D, real, target, 1)", flops="4*B*window*(2*T-window)*H*D",
         of="zk_attention_capped_fwd"),
    _row("zk_attention_dropped_fwd", "y>real:M*H*D lse>f32&:B*H*T qkv<real:M*E position<i32?:M "
         "key<i64:B B T H! G! D! window! place~ head~ scale. p.",
         "attention_fwd(B, T, H, G, D, real, target, 1)", flops="2*B*window*(2*T-window)*H*D"),
    _row("zk_attention_dropped_bwd", "dqkv>real:M*E dy<real:M*H*D y<real:M*H*D qkv<real:M*E "
         "lse<f32:B*H*T scratch$f32:M*H+M*E position<i32?:M key<i64:B B T H G D window place~ "
         "head~ scale. p.", "attention_bwd(B, T, H, G, D, real, target, 1)",
         flops="4*B*window*(2*T-window)*H*D", of="zk_attention_dropped_fwd"),

    _row("zk_gelu_fwd", "y>real:n x<real:n n kind!", "elements(n, real)", task=8192),
    _row("zk_gelu_bwd", "dx>real:n=dy dy<real:n x<real:n n kind", "elements(n, real)",
         task=8192, of="zk_gelu_fwd"),
    _row("zk_relu2_fwd", "y>real:n x<real:n n", "elements(n, real)", task=8192),
    _row("zk_relu2_bwd", "dx>real:n=dy dy<real:n x<real:n n", "elements(n, real)", task=8192,
         of="zk_relu2_fwd"),
    _row("zk_scale_fwd", "y>real:n=x x<real:n n scale.", "elements(n, real)", task=8192),
    _row("zk_scale_bwd", "dx>real:n=dy dy<real:n n scale.", "elements(n, real)", task=8192,
         of="zk_scale_fwd"),
    _row("zk_swiglu_fwd", "y>real:M*F x<real:M*2*F M F!", "run(each_row(M, F, real))"),
    _row("zk_swiglu_bwd", "dx>real:M*2*F dy<real:M*F x<real:M*2*F M F",
         "run(each_row(M, F, real))", of="zk_swiglu_fwd"),
    _row("zk_geglu_fwd", "y>real:M*F x<real:M*2*F M F!", "run(each_row(M, F, real))"),
    _row("zk_geglu_bwd", "dx>real:M*2*F dy<real:M*F x<real:M*2*F M F",
         "run(each_row(M, F, real))", of="zk_geglu_fwd"),
    _row("zk_dropout_fwd", "y>real:B*n=x x<real:B*n key<i64:B B n place~ p.", "elements(B*n, real)",
         task=8192),
    _row("zk_dropout_bwd", "dx>real:B*n=dy dy<real:B*n key<i64:B B n place~ p.",
         "elements(B*n, real)", task=8192, of="zk_dropout_fwd"),
    _row("zk_add", "y>real:n=a,b a<real:n b<real:n n", "elements(n, real)", task=8192),
    _row("zk_round", "y^real:n x<f32:n n", "elements(n, real)", task=8192, host=True),
    _row("zk_dequantize", "y>real:n w@real:m n m format", "elements(n, real)", task=8192),

    _row("zk_cross_entropy", "loss>f32:M dlogits>real?:M*R=logits logits<real:M*R target<i32:M "
         "scale<f64?:1 M V rows", "run(each_row(M, up(V, VOCAB), real, 512))"),
    _row("zk_soft_cross_entropy", "loss>f32:M dlogits>real?:M*R=logits logits<real:M*R "
         "target<i32:M scale<f64?:1 M V rows smoothing. penalty. cap.",
         "run(each_row(M, up(V, VOCAB), real, 512))"),
    _row("zk_softcap", "y>real:M*R=x x<real:M*R M V cap.", "elements(M*up(V, VOCAB), real)",
         task=8192),
    _row("zk_pick", "y>real:C x<real:M*C target<i32:M M C", "run(Grid(1, 1, 1, 256, 0))"),
    _row("zk_loss_sum", "sums+i64:72 loss<f32:M target<i32:M M",
         "run(Grid(1, 1, 1, min(1024, up(M)), 0))"),
    _row("zk_loss_mean", "sums+i64:72 loss<f32:M target<i32:M all<i32:A M A",
         "run(Grid(1, 1, 1, min(1024, up(M)), 0))"),
    _row("zk_loss_factor", "factor>f64:1 all<i32:A scale<f64?:1 A",
         "run(Grid(1, 1, 1, min(1024, up(A)), 0))"),

    # a thread takes 4 elements of a sum; a warp takes 1, 8 or 32 blocks of 1024 of a flat at once
    _row("zk_push", "node+f32 stride~ src<full count~ full~ n ctl<ctl? total~ mask~ block~",
         "run(flat(n, each=4))", host=True),
    _row("zk_count", "ctl+ctl leaves~", "run(Grid(1, 1, 1, 32, 0))", host=True),
    _row("zk_begin", "ctl+ctl sums>i64 r<recipe", "run(Grid(1, 1, 1, 96, 0))"),
    _row("zk_factor", "ctl+ctl sums<i64 r<recipe", "run(Grid(1, 1, 1, 32, 0))"),
    _row("zk_square_sum", "sums+i64 g<full spans<span first~ n full~",
         "run(flat(n, 128, each=8*1024//32))", host=True),
    _row("zk_update", "ctl<ctl r<recipe w>real? p+f32? m+moments? v+moments? g<full "
         "spans<span first~ n full~", "run(flat(n, each=1024//32))", host=True),
    _row("zk_init", "p>full spans<span first~ n seed~ full~", "run(flat(n, each=1024//32))",
         host=True),
    _row("zk_hash", "sum+u64 p<full spans<span first~ n full~",
         "run(flat(n, 128, each=1024), workspace=16)", host=True),
)
# fmt: on
KERNELS: Mapping[str, Kernel] = {row.name: row for row in _ROWS}
# Kernels that are cuBLASLt's products on a GPU.
PRODUCTS = frozenset(row.name for row in _ROWS if row.grid == "run(workspace=GEMM)")


# Kernels that compute the loss.
LOSSES = ("zk_cross_entropy", "zk_soft_cross_entropy")
# train.loss_mean -> the kernel that adds the losses of a micro-batch in training.
LOSS_SUMS = {"tokens": "zk_loss_sum", "micro_batch": "zk_loss_mean"}
FACTOR = "zk_loss_factor"  # a micro-batch's tokens per valid one

HOST = "zk_host_"  # prefix of a twin's name
TWINS: Mapping[str, Kernel] = {
    HOST + row.name.removeprefix("zk_"): row for row in _ROWS if row.host
}


def kernel(name: str) -> Kernel:
    """Return the row of a kernel, or of the kernel whose host twin it is."""
    return TWINS[name] if name in TWINS else KERNELS[name]


# Integers that may differ between layers: no size and no launch depends on them.
BY_LAYER = ("window", "which")
# Letters that follow from others, if a call has those named first.
FOLLOWS = {
    "M": ("BT", "B*T"),
    "E": ("HGD", "(H+2*G)*D"),
    "R": ("V", f"-(-V//{VOCAB})*{VOCAB}"),
}


Numbers = dict[str, int | float]  # numbers of a call by name


def letters(numbers: Mapping[str, int | float]) -> Numbers:
    """Return the numbers of a call and those that follow from them."""
    out = dict(numbers)
    for name, (needs, expression) in FOLLOWS.items():
        if out.keys() >= set(needs):
            out[name] = value(expression, out)
    return out


@functools.cache
def code(expression: str) -> CodeType:
    """Compile an expression of a table, which is evaluated many times. It never comes from
    input."""
    return compile(expression, expression, "eval")


def value(expression: str, numbers: Mapping[str, int | float]) -> int:
    """Evaluate sums and products of letters as an integer."""
    return int(eval(code(expression), {"__builtins__": {}}, dict(numbers)))


def shaped(row: Kernel, shape: Ints) -> dict[str, Any]:
    """Return the numbers of a shape by name. The shape ends before a number that belongs to a round
    or a function."""
    return dict(zip(row.shape, shape, strict=False))


@functools.cache
def flops(name: str, shape: Ints) -> int:
    """Return the flops of a call with these integers."""
    row = kernel(name)
    return value(row.flops, letters(shaped(row, shape)))


def spent(name: str, args: Sequence[Arg], rounds: int) -> int | Layers:
    """Return the flops of a call in all its rounds."""

    def once(some: Sequence[Arg]) -> int:
        return flops(name, tuple(a for a in some if isinstance(a, int)))

    return by_layer(args, lambda some: rounds * once(some))


def total(each: Sequence[int | Layers]) -> int | Layers:
    """Return the sum of several calls' flops."""
    return by_layer(each, lambda some: sum(map(whole, some)))


@functools.cache
def scratch(name: str, shape: Ints) -> int:
    """Return the bytes of workspace that such a call takes."""
    row = KERNELS[name]
    numbers = letters(shaped(row, shape))
    return sum(
        value(f.elems, numbers) * WIDTHS[f.type] for f in row.formals if f.mode == "$"
    )


# ---- forward and backward

# Operands of backward that are not forward's: a gradient to add, and a sign (1 forward, -1
# backward).
ASIDE = ("more", "sign")


Pairs = tuple[tuple[int, int], ...]  # pairs of operand indices


@dataclass(frozen=True)
class Back:
    """Relation of a backward kernel's operands to those of its forward kernel.

    dy: the gradient that it takes; x: the forward operand that it computes a gradient of, None if
    it computes gradients of parameters alone; params: (gradient, parameter); same, numbers:
    operands and numbers that both take.
    """

    of: str
    dy: int
    x: int | None
    params: Pairs
    same: Pairs
    numbers: Pairs

    @property
    def makes(self) -> Ints:
        """The forward operands that it computes gradients of."""
        mine = () if self.x is None else (self.x,)
        return (*mine, *(p for _, p in self.params))


def _back(row: Kernel) -> Back:
    """Match operands by name: x is forward's, dx the gradient of it."""
    theirs = KERNELS[row.of].at
    dy, x = 0, None
    params, same, numbers = [], [], []
    for n, f in enumerate(row.formals):
        name = row.called.get(f.name, f.name)
        of = theirs.get(name[1:]) if name[0] == "d" else None
        if name == "dy":
            dy = n
        elif of is not None and f.mode == ">":
            x = of
        elif of is not None:
            params.append((n, of))
        elif name not in theirs or name in ASIDE:
            continue
        elif f.number:
            numbers.append((n, theirs[name]))
        else:
            same.append((n, theirs[name]))
    return Back(row.of, dy, x, tuple(params), tuple(same), tuple(numbers))


BACK: Mapping[str, Back] = {row.name: _back(row) for row in _ROWS if row.of}
FORWARD: dict[str, Names] = {}  # forward kernel -> its backward kernels
for _name, _made in BACK.items():
    FORWARD[_made.of] = (*FORWARD.get(_made.of, ()), _name)


def forward(name: str, args: Sequence[object]) -> bool:
    """Return whether a call is forward of a kernel that has a backward."""
    return name in FORWARD and _sign(name, args) != -1


def backward(name: str, args: Sequence[object]) -> bool:
    """Return whether a call is backward of some kernel."""
    return name in BACK and _sign(name, args) != 1


def _sign(name: str, args: Sequence[object]) -> object:
    at = KERNELS[name].at.get("sign")
    return 0 if at is None else args[at]
