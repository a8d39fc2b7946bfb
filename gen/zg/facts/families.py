"""families.py -- a row per family of models: names of an attention's tensors, layouts of linears.

Names that a spec gives itself (of its embedding, norms, other linears, head) are in no row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..plan.operand import Names


@dataclass(frozen=True)
class Family:
    """A row of the table.

    qkv: the linears of an attention's q, k and v heads: one of all three, or one of each, stored
    side by side; out: the linear behind the heads; norms: the norms of q and k.

    out_in: weights of linears are [out,in]; otherwise [in,out], and none are stored side by side. A
    head's weight is [V,C] in every family, like an embedding and Hugging Face's lm_head.

    by_head: the rows of the one linear of q, k and v are by head in files: q, k and v of the first
    head, then of the second. Here they are the q of all heads, the k and the v.

    base: prefix of the names of a whole model in transformers; head: its linear of the logits;
    lora: the linears with adapters if a spec does not say which, as in PEFT.
    """

    qkv: Names
    out: str
    norms: tuple[str, str]
    out_in: bool
    base: str
    lora: Names
    by_head: bool = False
    head: str = "lm_head"


_NORMS = ("q_norm", "k_norm")
FAMILIES: Mapping[str, Family] = {
    "gpt2": Family(
        ("c_attn",),
        "c_proj",
        _NORMS,
        out_in=False,
        base="transformer.",
        lora=("c_attn",),
    ),
    "llama": Family(
        ("q_proj", "k_proj", "v_proj"),
        "o_proj",
        _NORMS,
        out_in=True,
        base="model.",
        lora=("q_proj", "v_proj"),
    ),
    "phi3": Family(
        ("qkv_proj",),
        "o_proj",
        _NORMS,
        out_in=True,
        base="model.",
        lora=("qkv_proj",),
    ),
    "neox": Family(
        ("query_key_value",),
        "dense",
        _NORMS,
        out_in=True,
        base="gpt_neox.",
        lora=("query_key_value",),
        by_head=True,
        head="embed_out",
    ),
    "phi": Family(
        ("q_proj", "k_proj", "v_proj"),
        "dense",
        _NORMS,
        out_in=True,
        base="model.",
        lora=("q_proj", "v_proj", "fc1", "fc2"),
    ),
}
