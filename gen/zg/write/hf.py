"""hf.py -- writes a transformers config.json for a model that is built here.

A model belongs to a family (read/hfrows.py) if every setting agrees. Features that the family's row
does not mention must be off.
"""

from __future__ import annotations

import json
from typing import Any

from ..read.hfrows import (
    FAMILIES,
    FIRST,
    FULL,
    ORIGINAL,
    SLIDING,
    SWITCH,
    ConfigKey,
    HfFamily,
    linear,
    scaling_keys,
)
from ..read.schema import Op, Spec, Unit


def _agrees(want: object, value: object, found: dict[str, Any]) -> bool:
    """Return whether a setting agrees with the family's. found: value of each key so far, which
    must be the same at every place of the key."""
    if isinstance(want, ConfigKey):
        before = found.setdefault(want, value)
        return bool(before == value)
    if isinstance(want, tuple) and isinstance(value, tuple):
        if len(want) != len(value):
            return False
        pairs = zip(want, value, strict=True)
        return all(_agrees(w, v, found) for w, v in pairs)
    if not want:
        return not value
    return want == value


def _settings(op: Op) -> dict[str, object]:
    """Return the settings of an op that have an effect."""
    args = dict(op.args)
    if op.kind == "attention" and not args["qk_norm"]:
        del args["eps"]
    return args


def _fits(want: Op, op: Op, found: dict[str, Any]) -> bool:
    if want.kind != op.kind:
        return False
    for key, value in _settings(op).items():
        if not _agrees(want.args.get(key), value, found):
            return False
    return _all_fit(want.ops, op.ops, found)


def _all_fit(want: tuple[Op, ...], ops: tuple[Op, ...], found: dict[str, Any]) -> bool:
    if len(want) != len(ops):
        return False
    pairs = zip(want, ops, strict=True)
    return all(_fits(w, op, found) for w, op in pairs)


def _units(f: HfFamily, units: tuple[Unit, ...], found: dict[str, Any]) -> bool:
    embedding, block, *others, head = units
    *norms, logits = head.ops
    if others or block.name != f.layers:
        return False
    tied = bool(logits.args["tied"])
    found["tie_word_embeddings"] = tied
    want = (f.embedding, *f.block, *f.last)
    there = (*embedding.ops, *block.ops, *norms)
    if not _all_fit(want, there, found):
        return False
    vocab = f.sizes[2]
    return tied or _fits(linear("lm_head", out=vocab), logits, found)


def _rope(found: dict[str, Any], sequence: int) -> dict[str, object]:
    """Return the keys of rotary positions, as all versions of transformers read them."""
    rope = found.pop("rope")
    scaling, context = None, sequence
    if given := rope["scaling"]:
        names = scaling_keys(given["type"])
        scaling = {"rope_type": given["type"]}
        scaling |= {theirs: given[ours] for theirs, ours in names.items()}
        reached = round(given["factor"] * scaling.get(ORIGINAL, 0))
        context = max(context, reached)
    return {
        "max_position_embeddings": context,
        "rope_theta": rope["theta"],
        "rope_scaling": scaling,
    }


def _windows(f: HfFamily, found: dict[str, Any], layers: int) -> bool:
    """Write to `found` which layers have a window, if the family has such keys. Return False if the
    family cannot express the windows."""
    said = found.get("sliding_window")
    each = said if isinstance(said, tuple) else (said,) * layers
    sizes = {n for n in each if n is not None}
    if SWITCH not in f.usual:
        return not isinstance(said, tuple)
    if not sizes:
        del found["sliding_window"]
        return True
    found["sliding_window"] = max(sizes)
    found[SWITCH] = True
    found["layer_types"] = [SLIDING if n else FULL for n in each]
    first = each.count(None)
    if not any(each[:first]):
        found[FIRST] = first
    return len(sizes) == 1


def _inverse(x: float) -> float:
    """Return the number whose reciprocal x is, a whole one if there is one."""
    near = float(round(1 / x))
    return near if near and 1 / near == x else 1 / x


def _of(f: HfFamily, spec: Spec) -> dict[str, object] | None:
    """Return a model's config.json as a family's, or None if it is not of that family."""
    m = spec.model
    sizes = (m.units[1].repeat, m.width, m.vocab)
    found: dict[str, Any] = dict(zip(f.sizes, sizes, strict=True))
    if m.names != f.names or not _units(f, m.units, found):
        return None
    turned = "rope" in found
    if turned and not found["rope"]:
        return None
    if not _windows(f, found, m.units[1].repeat):
        return None
    if f.square and found[f.heads] * found.pop("head_dim") != m.width:
        return None
    for key, words in f.words.items():
        found[key] = words[found[key]]
    for key in f.inverse:
        found[key] = _inverse(found[key])
    return {
        "architectures": [f.cls],
        "model_type": f.type,
        **(_rope(found, spec.train.sequence) if turned else {}),
        **found,
        **f.said,
        "bos_token_id": None,
        "eos_token_id": None,
        "torch_dtype": "float32",
    }


def config(spec: Spec) -> str:
    """Return config.json's text, or '' if no family has such a model."""
    made = (_of(f, spec) for f in FAMILIES)
    first = next((c for c in made if c is not None), None)
    return json.dumps(first, indent=2) + "\n" if first else ""
