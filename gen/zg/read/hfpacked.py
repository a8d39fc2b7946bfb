"""hfpacked.py -- reads quantization_config of config.json: linears that bitsandbytes has quantized.

A program dequantizes them when it loads (runtime/zr_packed.c), so a spec has the plain model. The
files say how each tensor is stored; here only the method is checked.
"""

from __future__ import annotations

from .hfkeys import REFUSED
from .node import Names, Node, SpecError, shown

KEY = "quantization_config"
METHOD = "bitsandbytes"
# key of config.json -> train.lora.base of as many bits, and the formats of the linears: in 4 bits
# the type says which, and transformers take the first one if there is none
BITS = {"load_in_8bit": ("int8", ("int8",)), "load_in_4bit": ("nf4", ("fp4", "nf4"))}
TYPE = "bnb_4bit_quant_type"


def base(said: object) -> str | None:
    """Return the train.lora.base with as many bits as quantization_config says."""
    keys = said if isinstance(said, dict) else {}
    return next(
        (base for key, (base, _) in BITS.items() if keys.get(key) is True), None
    )


def format_of(node: Node, out_in: bool) -> str:
    """Return the format of a folder's linears. out_in: weights of linears are [out,in].

    Raises SpecError if another method than bitsandbytes has quantized them.
    """
    said = node.plain()
    keys = said if isinstance(said, dict) else {}
    wrong, good = REFUSED[KEY]
    on = [key for key in BITS if keys.get(key) is True]
    method = keys.get("quant_method", METHOD if on else None)
    if method != METHOD:
        named = f" by {shown(method)}" if method is not None else ""
        raise SpecError(
            f"{node.where}: {KEY}: {wrong.format(method=named)}; allowed: {good}"
        )
    if len(on) != 1:
        raise SpecError(
            f"{node.where}: {KEY}: {len(on)} of {', '.join(BITS)} are true; allowed: one"
        )
    if not out_in:
        raise SpecError(
            f"{node.where}: {KEY}: {METHOD} stores this family's linears as [out,in], but its "
            f"tensors are [in,out]; allowed: {good}"
        )
    _, formats = BITS[on[0]]
    found = keys.get(TYPE, formats[0]) if len(formats) > 1 else formats[0]
    if found not in formats:
        where, good = node.value[TYPE].where, ", ".join(formats)
        raise SpecError(f"{where}: {KEY}.{TYPE}: is {shown(found)}; allowed: {good}")
    return str(found)


def note(node: Node, format_: str, root: Node) -> Names:
    """Return a note about a folder whose linears are in a format, for the spec at `root`."""
    lora = root.at(("train", "lora")).plain()
    adapters = lora if isinstance(lora, dict) and "rank" in lora else {}
    given, likely = adapters.get("base"), base(node.plain())
    plain = "the program dequantizes them when it loads them"
    kept = f"train.lora.base: {given or likely} " + (
        "keeps their numbers where the form is the same"
        if (given or likely) == format_
        else "quantizes them anew"
    )
    told = f"{plain}, and all parameters are trained"
    if adapters:
        told = kept if given else f"{plain}; {kept}"
    return (f"{node.where}: {KEY}: the linears are in {METHOD}' {format_}: {told}",)
