"""families.py -- a row a family of models: names of an attention's tensors, how linears lie.

What a spec names itself (its embedding, norms, other linears, head) is in no row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..plan.operand import Names


@dataclass(frozen=True)
class Family:
    """qkv: the linears of an attention's q, k and v heads: one of all three, or one of each, which
    then lie side by side. out: the linear behind the heads; norms: of q's and k's. out_in: weights
    of linears are [out,in], else [in,out], where none lie side by side; a head's is [V,C] in every
    family, as an embedding and Hugging Face's lm_head are. base: what names of a whole model of
    transformers begin with; lora: the linears that have adapters where a spec does not say which,
    as in PEFT."""

    qkv: Names
    out: str
    norms: tuple[str, str]
    out_in: bool
    base: str
    lora: Names


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
}
