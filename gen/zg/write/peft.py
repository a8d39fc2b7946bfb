"""peft.py -- writes PEFT's adapter_config.json for a spec's adapters, and the prefix of the names
in its files."""

from __future__ import annotations

import json

from ..facts.families import FAMILIES
from ..read.schema import Lora, Spec

LEAD = "base_model.model."  # prefix of names in PEFT's files


def config(spec: Spec, lora: Lora) -> str:
    """Return the text. The program fills in the path of the base model."""
    alpha = lora.alpha
    made = {
        "base_model_name_or_path": None,
        "bias": "none",
        "fan_in_fan_out": not FAMILIES[spec.model.names].out_in,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "lora_dropout": lora.dropout,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": lora.rank,
        "target_modules": lora.match,
        "task_type": "CAUSAL_LM",
    }
    if lora.rslora:
        made["use_rslora"] = True
    return json.dumps(made, indent=2) + "\n"


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
    ]
