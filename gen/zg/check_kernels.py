"""check_kernels.py -- what kernels take, stated again from kernels/zk.h, and which run backward for
which."""
from __future__ import annotations

from dataclasses import replace

from .plan import Call

# A kernel's operands, stated again from kernels/zk.h. `>` writes, `<` reads, `=` may be where
# another operand is, `@` parameter, `^` gradient of one, `$` scratch, `?` may be null, a bare word
# is a number. Then the type (r real, f float, F a float that must be used, or the class itself)
# and the elements.
KERNELS = {
    "zk_embed_fwd": ">r:B*T*C <tokens:B*T @r:*C @?r:*C B T C",
    "zk_embed_bwd": "^add:V*C <r:M*C <tokens:M $:4*(V+1+M) M V C add",
    "zk_position_bwd": "^r:P*C <r:B*T*C B T C P",
    "zk_layernorm_fwd": ">r:M*C >f:M*2 >?r:M*C <r:M*C <?r:M*C @r:C @?r:C M C eps",
    "zk_layernorm_bwd": ">r:M*C ^?r:C ^?r:C <r:M*C <?r:M*C <r:M*C <f:M*2 @r:C $:8*C M C",
    "zk_rmsnorm_fwd": ">r:M*C >f:M >?r:M*C <r:M*C <?r:M*C @r:C M C eps",
    "zk_rmsnorm_bwd": ">r:M*C ^?r:C <r:M*C <?r:M*C <r:M*C <f:M @r:C $:8*C M C",
    "zk_qknorm_fwd": ">r:M*E >f:M*(H+G) <r:M*E @r:D @r:D M H G D eps",
    "zk_qknorm_bwd": ">r:M*E ^?r:D ^?r:D <r:M*E <r:M*E <f:M*(H+G) @r:D @r:D $:8*D*(1+M) M H G D",
    "zk_linear_fwd": ">r:M*N <r:M*K @r:N*K @?r:N M N K layout",
    "zk_linear_bwd_x": ">r:M*K <r:M*N @r:N*K M N K layout",
    "zk_linear_bwd_w": "^full:N*K <r:M*N <r:M*K M N K layout full carry",
    "zk_linear_bwd_b": "^r:N <r:M*N M N",
    "zk_slice_fwd": ">r:M*N <r:M*K @r:n*K @?r:N M N K at n",
    "zk_slice_bwd_x": ">f:M*K <r:M*N @r:n*K M N K at n",
    "zk_slice_bwd_w": "^r:n*K <r:M*N <r:M*K M N K at n",
    "zk_rope": ">=r:M*E <r:M*E <table:T*D B T H G D sign",
    "zk_attention_fwd": ">r:M*H*D >f:M*H <r:M*E B T H G D scale",
    "zk_attention_bwd": ">r:M*E <r:M*H*D <r:M*H*D <r:M*E <f:M*H $:4*(M*H+M*E) B T H G D scale",
    "zk_gelu_fwd": ">r:n <r:n n kind",
    "zk_gelu_bwd": ">=r:n <r:n <r:n n kind",
    "zk_swiglu_fwd": ">r:M*F <r:M*2*F M F",
    "zk_swiglu_bwd": ">r:M*2*F <r:M*F <r:M*2*F M F",
    "zk_add": ">=r:n <r:n <r:n n",
    "zk_round": "^r:n <f:n n",
    "zk_cross_entropy": ">F:M >=?r:M*R <r:M*R <targets:M <?ctl:2 M V rows",
    "zk_pick": ">r:C <r:M*C <targets:M M C",
    "zk_loss_sum": ">sums:72 <F:M <targets:M M",
}
# Calls on all slices of a weight [N,K] are together one of these, with these numbers after M N K.
SLICES = {"zk_slice_fwd": ("zk_linear_fwd", "1"), "zk_slice_bwd_x": ("zk_linear_bwd_x", "1"),
          "zk_slice_bwd_w": ("zk_linear_bwd_w", "1", "0", "0")}
CLASSES = ("tokens", "targets", "table", "sums", "ctl")
# Of a zk_ctl, what kernels of a grain use by an operand: from which byte to which.
SCALE = 80
CTL = {"ctl+0": (72, 80), f"ctl+{SCALE}": (SCALE, SCALE + 8)}        # leaves, scale
# A kernel forward, and those that must run backward for it on the same numbers: of their operands,
# in order, which are operands of the one forward (. for none).
BACK = {
    "zk_layernorm_fwd": {"zk_layernorm_bwd": ".....315"},
    "zk_rmsnorm_fwd": {"zk_rmsnorm_bwd": "....315"},
    "zk_qknorm_fwd": {"zk_qknorm_bwd": "....2134"},
    "zk_linear_fwd": {"zk_linear_bwd_x": "..2", "zk_linear_bwd_w": "..1"},
    "zk_rope": {"zk_rope": "..2"},
    "zk_attention_fwd": {"zk_attention_bwd": "..021"},
    "zk_gelu_fwd": {"zk_gelu_bwd": "..1"},
    "zk_swiglu_fwd": {"zk_swiglu_bwd": "..1"},
}
# Where a norm has what it adds: forward the sum of two operands, backward one more for the result.
ADDS = {"zk_layernorm_fwd": (2, 3, 4), "zk_rmsnorm_fwd": (2, 3, 4),
         "zk_layernorm_bwd": (0, 0, 4), "zk_rmsnorm_bwd": (0, 0, 3)}
DY = {"zk_rmsnorm_bwd": 2, "zk_layernorm_bwd": 3, "zk_qknorm_bwd": 3}     # which operand; else 1
# Of a kernel forward, which operand must move for one to be run backward for it; else any. Of those
# backward that make more than one gradient, which operand is forward's input: it may need none.
NEEDS = {"zk_linear_bwd_x": 1, "zk_linear_bwd_w": 2, "zk_linear_bwd_b": 3}
INPUT = {"zk_rmsnorm_bwd": 4, "zk_layernorm_bwd": 5, "zk_qknorm_bwd": 4}
ASIDE = ("eps", "full", "add", "carry", "sign")                 # numbers that need not agree


def parts(c: Call) -> list[Call]:
    """A call as those that have the same bits together: a norm and an addition, or itself."""
    out, x, more = ADDS.get(c.kernel, (0, 0, 0))
    args = list(c.args)
    if not more or args[more] == "null" and (not out or args[out] == "null"):
        return [c]
    M, C = (int(a) for a in numbers(c))
    add = Call("zk_add", "", (args[out], args[x], args[more], str(M * C)))
    args[more] = "null"
    if out:                                                     # forward: before it
        args[out], args[x] = "null", args[out]
    norm = replace(c, args=tuple(args))
    return [add, norm] if out else [norm, add]


def numbers(c: Call) -> tuple[str, ...]:
    """A call's numbers that must agree forward and backward."""
    return tuple(a for w, a in zip(KERNELS[c.kernel].split(), c.args)
                 if w.isidentifier() and w not in ASIDE)


def backs() -> dict[str, str]:
    """Of kernels backward, which operands are forward's."""
    return {k: like for row in BACK.values() for k, like in row.items()} | {"zk_linear_bwd_b": ""}
