"""config.py -- prints the effective value of each key of a spec, a line each, with its origin.

    zero.stage: 3                # ds_config.json:12: zero_optimization.stage

The comment is a place in a file, --set, `default`, or `derived` from other keys. Every line outside
the model can be given back as --set KEY=VALUE, with its first colon as =.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass

from ..read.schema import VALUES, LrSchedule, Op, Optimizer, Spec, Unit

# width of the left column; fixed, so that a change moves no other line
WIDTH = 66
# Keys that are derived from another key when left out; all others have a default.
DERIVED = ("kv_heads", "head_dim", "out_bias", "out", "ignore")


def _ops(path: str, ops: tuple[Op, ...]) -> Iterator[tuple[str, object]]:
    for i, op in enumerate(ops):
        yield from _op(f"{path}[{i}].{op.kind}", op)


def _op(path: str, op: Op) -> Iterator[tuple[str, object]]:
    if op.kind in VALUES:
        yield path, op.args[VALUES[op.kind]]
    elif op.kind == "parallel":
        for i, branch in enumerate(op.ops):
            yield from _ops(f"{path}[{i}]", branch.ops)
    elif not op.args and not op.ops:
        yield path, {}
    else:
        yield from _ops(path, op.ops)
        yield from _leaves(path, op.args)


def _unit(path: str, unit: Unit) -> Iterator[tuple[str, object]]:
    if unit.kind == "embedding":
        yield from _op(f"{path}.embedding", unit.ops[0])
    elif unit.kind == "head":
        yield from _ops(f"{path}.head", unit.ops)
    else:
        yield f"{path}.blocks", unit.repeat
        yield f"{path}.name", unit.name
        yield from _ops(f"{path}.ops", unit.ops)


def _leaves(path: str, value: object) -> Iterator[tuple[str, object]]:
    """Yield all keys below a record or mapping, with their values."""
    if isinstance(value, Unit):
        yield from _unit(path, value)
    elif isinstance(value, Mapping):
        for key, below in value.items():
            yield from _leaves(f"{path}.{key}", below)
    elif is_dataclass(value):
        for f in fields(value):
            below = getattr(value, f.name)
            foreign = below is None and isinstance(value, (Optimizer, LrSchedule))
            yield from () if foreign else _leaves(f"{path}.{f.name}", below)
    elif isinstance(value, tuple) and any(isinstance(x, Unit) for x in value):
        for i, below in enumerate(value):
            yield from _leaves(f"{path}[{i}]", below)
    else:
        yield path, value


def _given(record: object) -> dict[str, object]:
    """Return the fields that a record in a list sets; None means derived from another key."""
    return {key: value for key, value in vars(record).items() if value is not None}


def text(spec: Spec) -> str:
    lines = []
    for section in (
        "name",
        "model",
        "zero",
        "train",
        "cluster",
        "targets",
        "data",
    ):
        for key, value in _leaves(section, getattr(spec, section)):
            said = f"{key}: {json.dumps(value, default=_given)}"
            lines.append(f"{said:<{WIDTH}} # {_origin(spec, key)}")
    lines.append(
        "# derived: micro-batches of a rank and step: "
        f"{spec.micro_batches // spec.own_blocks}, each of {spec.train.micro_batch}"
    )
    return "\n".join(lines) + "\n"


# Keys of train that choose where and when work is done but change no bit of the weights.
FREE = (
    "train.max_skips",
    "train.recompute",
    "train.accumulate",
    "train.offload_activations",
    "train.memory_budget",
)
# Keys that were added after checkpoints existed. At these values they are left out of the recipe.
LATER = {
    "data.shuffle": False,
    "train.sequence_blocks": 1,
    "data.documents": "join",
    "data.end": None,
    "attention.one_plus": False,
    "attention.scale": None,
    "attention.local_rope": None,
    "attention.rope_layers": None,
    "layernorm.weight": True,
    "rmsnorm.one_plus": False,
    "rope.width": None,
    "rope.interleaved": False,
    "attention.window": None,
    "attention.softcap": None,
    "linear.softcap": None,
    "embedding.scale": None,
    "model.vocab_from": None,
    "model.vocab_rows": "mean",
    "train.lora": None,
    "train.lora.whole": (),
    "train.lora.base": None,
    "train.lora.dropout": 0.0,
    "train.lora.groups": (),
    "train.lora.rslora": False,
    "train.products": "auto",
    "train.mlp_chunk": None,
    "train.dropout": 0.0,
    "train.attention_dropout": 0.0,
    "train.label_smoothing": 0.0,
    "train.z_loss": 0.0,
    "train.loss_mean": "tokens",
}


def _later(key: str, value: object) -> bool:
    return any(key.endswith(k) and value == x for k, x in LATER.items())


def recipe(spec: Spec) -> list[str]:
    """Return everything that decides the bits of the weights except the data, as `key: value`
    lines. A run may resume from the checkpoint of any program with the same recipe."""
    return [
        f"{key}: {json.dumps(value, default=_given)}"
        for section in ("model", "train", "data")
        for key, value in _leaves(section, getattr(spec, section))
        if key not in FREE and not _later(key, value)
    ]


def layout(spec: Spec) -> list[str]:
    """Return everything that changes no bit of the weights, as `key: value` lines."""
    found = (
        (key, value)
        for section in ("zero", "train", "cluster")
        for key, value in _leaves(section, getattr(spec, section))
        if section != "train" or key in FREE
    )
    return [f"{key}: {json.dumps(value, default=_given)}" for key, value in found]


def _origin(spec: Spec, key: str) -> str:
    usual = "derived" if key.rpartition(".")[2] in DERIVED else "default"
    return spec.places.get(key) or usual
