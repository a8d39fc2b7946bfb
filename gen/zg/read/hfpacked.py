"""hfpacked.py -- reads quantization_config of config.json: linears that bitsandbytes has quantized.

A program dequantizes them when it loads (runtime/zr_packed.c), so a spec has the plain model. The
files say how each tensor is stored; here only the method is checked.
"""

from __future__ import annotations

from .hfkeys import REFUSED
from .node import Names, Node, SpecError, shown

KEY = "quantization_config"
METHOD = "bitsandbytes"
# key of config.json -> format of the linears; in 4 bits the type says which
BITS = {"load_in_8bit": "int8", "load_in_4bit": ""}
TYPE, TYPES = "bnb_4bit_quant_type", ("nf4", "fp4")
USUAL = "fp4"  # the type that transformers takes if config.json has none
FORMATS = ("int8", *TYPES)


def base(said: object) -> str | None:
    """Return the train.lora.base with as many bits as quantization_config says."""
    keys = said if isinstance(said, dict) else {}
    wanted = {"load_in_8bit": "int8", "load_in_4bit": "nf4"}
    return next((wanted[key] for key in wanted if keys.get(key) is True), None)


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
    found = BITS[on[0]] or keys.get(TYPE, USUAL)
    if found not in FORMATS:
        where = node.value[TYPE].where
        raise SpecError(
            f"{where}: {KEY}.{TYPE}: is {shown(found)}; allowed: {', '.join(TYPES)}"
        )
    return str(found)


def note(node: Node, format_: str, root: Node) -> Names:
    """Return a note about a folder whose linears are in a format, for the spec at `root`."""
    lora = root.at(("train", "lora")).value
    adapters = isinstance(lora, dict) and "rank" in lora
    plain = adapters and "base" not in lora
    kept = (
        f"; train.lora.base: {base(node.plain())} keeps them quantized" if plain else ""
    )
    more = "" if adapters else ", and all parameters are trained"
    return (
        f"{node.where}: {KEY}: the linears are in {METHOD}' {format_}: they are dequantized when "
        f"the program loads them{more}{kept}",
    )
