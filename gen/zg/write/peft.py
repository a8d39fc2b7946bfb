"""peft.py -- writes PEFT's adapter_config.json for a spec's adapters, and the prefix of the names
in its files."""

from __future__ import annotations

import json

from ..facts.families import FAMILIES
from ..read.schema import Lora, Spec
from ..read.shapes import ends, group_of, sized
from ..read.whole import tied

LEAD = "base_model.model."  # prefix of names in PEFT's files


def config(spec: Spec, lora: Lora) -> str:
    """Return the text. The program fills in the path of the base model."""
    made: dict[str, object] = {
        "base_model_name_or_path": None,
        "bias": "none",
        "fan_in_fan_out": not FAMILIES[spec.model.names].out_in,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": _short(lora.alpha),
        "lora_dropout": lora.dropout,
        "modules_to_save": lora.whole or None,
        "peft_type": "LORA",
        "r": lora.rank,
        "target_modules": lora.match,
        "task_type": "CAUSAL_LM",
    }
    if _second(spec):
        made["ensure_weight_tying"] = True
    if lora.rslora:
        made["use_rslora"] = True
    if lora.groups:
        made |= _patterns(lora)
    return json.dumps(made, indent=2) + "\n"


def _short(x: float) -> float:
    return int(x) if x == int(x) else x


def _patterns(lora: Lora) -> dict[str, object]:
    """Return PEFT's rank_pattern and alpha_pattern. Both have every name of the groups: in PEFT the
    first pattern that matches a module applies, for the rank and for alpha."""
    names = dict.fromkeys(name for group in lora.groups for name in group.match)
    of = {n.replace(".", r"\."): sized(lora, group_of(lora, n)) for n in names}
    return {
        "rank_pattern": {name: own.rank for name, own in of.items()},
        "alpha_pattern": {name: _short(own.alpha) for name, own in of.items()},
    }


def _second(spec: Spec) -> str:
    """Return the name of the head's weight if it is the embedding's, which is trained whole: PEFT's
    files have it under both names."""
    lora, both = spec.train.lora, tied(spec.model)
    whole = lora and both and ends(both[0], lora.whole)
    return f"{both[1]}.weight" if whole else ""


def lead(spec: Spec) -> str:
    """Return the prefix of the names, with the model's own part if the spec leaves that out."""
    base = FAMILIES[spec.model.names].base
    blocks = spec.model.units[1].name
    return LEAD + ("" if blocks.startswith(base) else base)


def fields(spec: Spec) -> list[tuple[str, object]]:
    """Return the fields of zr_program that describe adapters, or none."""
    lora = spec.train.lora
    if not lora:
        return []
    return [
        ("adapter", config(spec, lora)),
        ("lead", lead(spec)),
        ("lora", lora.scale),
        ("second", _second(spec)),
    ]
