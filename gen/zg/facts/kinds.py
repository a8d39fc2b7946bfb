"""kinds.py -- types of optimizers, schedules and scalings of rotary positions: their keys with
defaults, and the optimizer states of an element.

Keys that all types of a section have are not listed. Defaults are DeepSpeed's and PyTorch's. None
means that another key gives the value (schema.py); NEEDED means that the key is required.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING
from typing import Any

NEEDED = MISSING
Rows = Mapping[str, Mapping[str, Any]]

_ADAM = {"betas": (0.9, 0.999), "eps": 1e-8}
# Name, optimizer states of an element (operands m and v of the kernel), and keys. The keys are None
# for a type that another type's keys choose: Momentum and Nesterov are SGD with a momentum. A row's
# number is its rule in kernels/update.h. Masters exist if parameters are stored in less than f32.
RULES = (
    ("AdamW", "m v", _ADAM),
    ("Adam", "m v", _ADAM),
    ("SGD", "", {"momentum": 0.0, "nesterov": False}),
    ("Momentum", "m", None),
    ("Nesterov", "m", None),
    ("Lion", "m", {"betas": (0.9, 0.999)}),
    ("Adagrad", "v", {"eps": 1e-10}),
)
OPTIMIZERS: Rows = {name: keys for name, _, keys in RULES if keys is not None}

CYCLED = [name for name, row in OPTIMIZERS.items() if "betas" in row]

_OURS = {"warmup": 0, "steps": 0, "min_lr": 0.0}
_WARMUP = {"warmup_num_steps": 1000, "warmup_type": "log"}
SCHEDULES: Rows = {
    "constant": _OURS,
    "linear": _OURS,
    "cosine": _OURS,
    "cosine_with_restarts": {**_OURS, "cycles": 1},
    "wsd": {**_OURS, "decay": NEEDED},
    "WarmupLR": {"warmup_min_lr": 0.0, "warmup_max_lr": None, **_WARMUP},
    "WarmupDecayLR": {
        "warmup_min_lr": 0.0,
        "warmup_max_lr": 0.001,
        **_WARMUP,
        "total_num_steps": NEEDED,
    },
    "WarmupCosineLR": {
        **_WARMUP,
        "total_num_steps": NEEDED,
        "warmup_min_ratio": 0.0,
        "cos_min_ratio": 0.0001,
    },
    "OneCycle": {
        "cycle_min_lr": NEEDED,
        "cycle_max_lr": NEEDED,
        "decay_lr_rate": 0.0,
        "cycle_first_step_size": 2000,
        "cycle_second_step_size": None,
        "cycle_first_stair_count": 0,
        "cycle_second_stair_count": None,
        "decay_step_size": 0,
        "cycle_momentum": True,
        "cycle_min_mom": 0.8,
        "cycle_max_mom": 0.9,
        "decay_mom_rate": 0.0,
    },
}
SCALINGS: Rows = {
    "linear": {},
    "dynamic": {"original_context": NEEDED},
    "llama3": {
        "low_freq_factor": NEEDED,
        "high_freq_factor": NEEDED,
        "original_context": NEEDED,
    },
    "yarn": {
        "original_context": NEEDED,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "attention_factor": None,
        "truncate": True,
    },
    "longrope": {
        "original_context": NEEDED,
        "short_factor": NEEDED,
        "long_factor": NEEDED,
        "attention_factor": None,
    },
}
