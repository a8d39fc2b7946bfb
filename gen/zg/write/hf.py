"""hf.py -- writes a transformers config.json for a model that is built here.

A model belongs to a family (read/hfmodels.py) if every setting agrees. Features that the row of the
family does not mention must be off.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from ..read.hfmodels import FAMILIES
from ..read.hfrows import (
    EACH,
    FIRST,
    FULL,
    IMPLIED,
    NOPE,
    ORIGINAL,
    SLIDING,
    SWITCH,
    THETA,
    ConfigKey,
    Derived,
    HfFamily,
    scaling_keys,
)
from ..read.schema import Op, Spec, Unit
from ..read.whole import is_whole, tied


def _agrees(want: object, value: object, found: dict[str, Any]) -> bool:
    """Return whether a setting agrees with the family's. found: value of each key so far, which
    must be the same at every place of the key."""
    if isinstance(want, Derived) and isinstance(value, (int, float)):
        of = want.back(value)
        if of is None or want.of(of) != value:
            return False
        return bool(found.setdefault(want, of) == of)
    if isinstance(want, Derived):
        return False
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
    if not tied:
        return _fits(f.head, logits, found)
    cap = _agrees(f.head.args.get("softcap"), logits.args["softcap"], found)
    return cap and not f.head.args["bias"]


def _share(width: int, head: int) -> float:
    """Return the share of a head that is rotated, from which readers compute the width."""
    share = width / head
    return share if int(head * share) == width else (width + 0.5) / head


def _scaling(given: Mapping[str, Any]) -> dict[str, Any]:
    names = scaling_keys(given["type"])
    said = {theirs: given[ours] for theirs, ours in names.items()}
    if given["type"] in IMPLIED:
        said.pop(ORIGINAL)
    return {"rope_type": given["type"], **said}


def _rope(
    f: HfFamily, found: dict[str, Any], head: int, sequence: int
) -> dict[str, object] | None:
    """Return the keys of rotary positions, as all versions of transformers read them, or None if
    the family cannot express them."""
    rope, local = found.pop("rope"), found.pop("local_rope", None)
    if not rope or rope["interleaved"] != f.interleaved:
        return None
    share = _share(rope["width"] or head, head)
    theta, part = f.rotary
    if share != 1 and part not in f.usual:
        return None
    scaling, context = None, sequence
    if given := rope["scaling"]:
        if f.scalings and given["type"] not in f.scalings.values():
            return None
        scaling = _scaling(given)
        reached = round(given["factor"] * scaling.get(ORIGINAL, 0))
        context = max(context, reached)
    scalings = [x["scaling"] for x in (rope, local) if x and x["scaling"]]
    if said := [x["original_context"] for x in scalings if x["type"] in IMPLIED]:
        if len(scalings) > 1:
            return None
        (context,) = said
    out: dict[str, object] = {"max_position_embeddings": context}
    if f.local:
        return {**out, "rope_parameters": _by_window(rope, local or rope)}
    out |= {theta: rope["theta"], "rope_scaling": scaling}
    out |= {part: share} if part in f.usual else {}
    if ORIGINAL in f.usual:
        out[ORIGINAL] = scaling[ORIGINAL] if scaling else context
    return out


def _by_window(
    rope: Mapping[str, Any], local: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """Return the rotary positions of layers without a window and of those with one."""
    return {
        layers: {
            THETA: one["theta"],
            **(
                _scaling(one["scaling"]) if one["scaling"] else {"rope_type": "default"}
            ),
        }
        for layers, one in ((FULL, rope), (SLIDING, local))
    }


def _windows(f: HfFamily, found: dict[str, Any], layers: int) -> bool:
    """Write to `found` which layers have a window, if the family has such keys. Return False if the
    family cannot express the windows."""
    said = found.get("sliding_window")
    each = said if isinstance(said, tuple) else (said,) * layers
    sizes = {n for n in each if n is not None}
    if not f.mixed:
        return not isinstance(said, tuple)
    types = [SLIDING if n else FULL for n in each]
    if not sizes:
        del found["sliding_window"]
        found |= {"layer_types": types} if f.pattern else {}
        return True
    found["sliding_window"] = max(sizes)
    if SWITCH in f.usual:
        found[SWITCH] = True
    found["layer_types"] = types
    first = each.count(None)
    if FIRST in f.usual and not any(each[:first]):
        found[FIRST] = first
    return len(sizes) == 1


def _of(f: HfFamily, spec: Spec) -> dict[str, object] | None:
    """Return a model's config.json as a family's, or None if it is not of that family."""
    m = spec.model
    sizes = (m.units[1].repeat, m.width, m.vocab)
    found: dict[str, Any] = dict(zip(f.sizes, sizes, strict=True))
    if m.names != f.names or not _units(f, m.units, found):
        return None
    rope: dict[str, object] | None = {}
    if "rope" in found:
        rope = _rope(f, found, found["head_dim"], spec.train.sequence)
    if rope is None or not _windows(f, found, m.units[1].repeat):
        return None
    if EACH in f.usual:
        found[NOPE] = [*map(int, found[NOPE] or (1,) * m.units[1].repeat)]
    if f.square and found[f.heads] * found.pop("head_dim") != m.width:
        return None
    for key, words in f.words.items():
        found[key] = words[found[key]]
    return {
        "architectures": [f.cls],
        "model_type": f.type,
        **rope,
        **found,
        **f.when,
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


def fields(spec: Spec) -> list[tuple[str, object]]:
    """Return the fields of zr_program for folders of transformers."""
    m = spec.model
    grown = [("vocab_from", m.vocab_from), ("vocab_drawn", int(m.vocab_rows == "init"))]
    return [("config", config(spec)), *((name, x) for name, x in grown if x)]


def mark(spec: Spec) -> Callable[[str], str]:
    """Return a function from a tensor's name to its mark in C: ZR_WHOLE | ... of zr.h."""
    lora, m = spec.train.lora, spec.model
    grown = m.by_token if m.vocab_from else ()
    shared = [f"{name}.weight" for name in tied(m)]

    def of(name: str) -> str:
        found = []
        if lora and is_whole(lora, name):
            found += ["ZR_WHOLE", *["ZR_TIED"] * (name in shared)]
        found += ["ZR_GROWN"] if name in grown else []
        return " | ".join(found) or "0"

    return of
