"""peft.py -- adapter_config.json of PEFT for a spec's adapters, and how its files name them."""

from __future__ import annotations

import json

from ..facts.families import FAMILIES
from ..read.schema import Lora, Spec

LEAD = "base_model.model."  # what names begin with in PEFT's files


def config(spec: Spec, lora: Lora) -> str:
    """The text; where the base lies the program puts in."""
    alpha = lora.alpha
    made = {
        "base_model_name_or_path": None,
        "bias": "none",
        "fan_in_fan_out": not FAMILIES[spec.model.names].out_in,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "lora_dropout": 0.0,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": lora.rank,
        "target_modules": lora.match,
        "task_type": "CAUSAL_LM",
    }
    return json.dumps(made, indent=2) + "\n"


def lead(spec: Spec) -> str:
    """Of the names: a spec may leave out the model's own part."""
    base = FAMILIES[spec.model.names].base
    blocks = spec.model.units[1].name
    return LEAD + ("" if blocks.startswith(base) else base)


def fields(spec: Spec) -> list[tuple[str, object]]:
    """Of a program with adapters, what zr_program has of them."""
    lora = spec.train.lora
    if not lora:
        return []
    return [
        ("adapter", config(spec, lora)),
        ("lead", lead(spec)),
        ("lora", lora.alpha / lora.rank),
    ]
