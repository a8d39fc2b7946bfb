#!/usr/bin/env python3
"""config_doc.py -- writes docs/config.md from the schema and the table of ds_config.json's keys.

PYTHONPATH=gen .venv/bin/python tools/config_doc.py > docs/config.md
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Callable, Iterator
from typing import cast

from config_keys import DOES
from pydantic import BeforeValidator, PlainValidator
from pydantic_core import PydanticCustomError
from zg.read import dskeys, dsrows, schema
from zg.read.keytypes import LeftOut

HEAD = """# Every key

Made by `PYTHONPATH=gen .venv/bin/python tools/config_doc.py > docs/config.md`; a test
compares. `gen/zgen SPEC --emit config` prints the values in effect, and where each came from: a
line of a file, `--set`, a default, or other keys.

## The spec

`[]` stands for an item of a list. A key without a default must be given. In `ops` and `head` an
item is one of the ops that a `residual` can hold. `data.ignore` is a token that is never a target;
where it is the input, for the target behind it, the model reads token 0.

| key | what it does | allowed | default |
|---|---|---|---|
"""
# Text in place of a default of null, by the end of the key: other keys give the value.
DERIVED = {
    "attention.kv_heads": "`heads`",
    "attention.head_dim": "`model.width` / `heads`",
    "attention.out_bias": "`bias`",
    "attention_factor.yarn": "1 + ln(`factor`) / 10",
    "attention_factor.longrope": "sqrt(1 + ln(`factor`) / ln(`original_context`))",
    "rope.width": "`head_dim`",
    "attention.rope_layers": "all have them",
    "attention.scale": "1 / sqrt(`head_dim`)",
    "embedding.scale": "1",
    "data.ignore": "`65535`, in a file of uint32 `4294967295`; `null` where the vocabulary has it",
}
DEEPSPEED = """
## ds_config.json

`gen/zgen SPEC --zero ds_config.json` reads DeepSpeed's configuration as it is, with Hjson's
comments and commas. A key that is left out, null or `"auto"` is the spec's; where an `auto` below
has a rule, it holds unless the spec says the key itself. `--set` comes last. Every value is
checked, also where it has no effect. A key that is not here is an error; at the top level, where
it is near to none of DeepSpeed's, it is a note, as DeepSpeed ignores it. At another stage than a
key's, a note says that it has no effect. "With X" is a key that says how X is meant, and nothing
while X is off.
"""


# ---- the spec's keys


def missing(value: object) -> bool:
    return value is dataclasses.MISSING or repr(value) == "PydanticUndefined"


def record(kind: object) -> type | None:
    """Return the record inside a type, or None."""
    if isinstance(kind, type) and (
        hasattr(kind, "model_fields") or dataclasses.is_dataclass(kind)
    ):
        return kind
    return next((r for r in map(record, typing.get_args(kind)) if r), None)


def fields(kind: type) -> Iterator[tuple[str, object, object]]:
    """Yield a record's keys with their types and defaults."""
    hints = typing.get_type_hints(kind, include_extras=True)
    if hasattr(kind, "model_fields"):
        yield from ((n, hints[n], f.default) for n, f in kind.model_fields.items())
        return
    for f in dataclasses.fields(kind):
        made = f.default_factory
        yield (
            f.name,
            hints[f.name],
            f.default if made is dataclasses.MISSING else made(),
        )


def allowed(kind: object) -> str:
    """Return the allowed values of a type, in the words of its error."""
    args = typing.get_args(kind)
    for meta in getattr(kind, "__metadata__", ()):
        if isinstance(meta, LeftOut):
            return allowed(typing.get_args(args[0])[0])
        if isinstance(meta, PlainValidator):
            try:
                cast(Callable[[object], object], meta.func)(object())
            except PydanticCustomError as e:
                return str((e.context or {})["allowed"])
    if isinstance(kind, type):
        return kind.__name__
    if hasattr(kind, "__metadata__"):
        one = any(isinstance(meta, BeforeValidator) for meta in kind.__metadata__)
        return ("one or " if one else "") + allowed(args[0])
    if typing.get_origin(kind) is tuple:
        return f"a list of {allowed(args[0])}"
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return " or ".join("null" if a is type(None) else allowed(a) for a in args)
    raise TypeError(kind)


def said(value: object, key: str = "") -> str:
    """Return the text of a default."""
    derived = [text for end, text in DERIVED.items() if key.endswith(end)]
    if derived:
        return derived[0]
    if missing(value):
        return ""
    return f"`{json.dumps(list(value) if isinstance(value, tuple) else value)}`"


def spec(kind: type, path: str = "") -> Iterator[str]:
    for name, hint, default in fields(kind):
        key = f"{path}{name}"
        below = record(hint)
        if below is None:
            types = schema.TYPES.get(kind, {})
            rows = {
                t: said(row[name], f"{key}.{t}")
                for t, row in types.items()
                if name in row
            }
            either = [f"{t}: {x}".rstrip(": ") for t, x in rows.items()]
            yield (
                f"| `{key}` | {DOES[key]} | {allowed(hint)} | "
                f"{', '.join(either) or said(default, key)} |"
            )
        elif name == "parallel":
            yield f"| `{key}` | {DOES[key]} | a list of lists of ops | |"
        elif below is schema.OpKeys and name in ("residual", "head"):
            yield f"| `{key}` | {DOES[key]} | a list of ops | |"
        elif below is schema.LocalRope:
            yield f"| `{key}` | {DOES[key]} | keys of `rope` | `null` |"
        elif not list(fields(below)):
            yield f"| `{key}` | {DOES[key]} | {{}} | |"
        else:
            yield from spec(below, f"{key}[]." if "tuple" in str(hint) else f"{key}.")


# ---- a ds_config.json's keys


def words(row: dsrows.Honour | dsrows.Same | dsrows.Moved) -> str:
    def plain(x: object) -> str:
        return json.dumps(x).strip('"')

    pairs = [
        f"{plain(a)} is {plain(b)}"
        for a, b in (row.words or {}).items()
        if str(a) != str(b)
    ]
    return f" ({', '.join(pairs)})" if pairs else ""


def becomes(name: str, row: dsrows.Key) -> str:
    if isinstance(row, dsrows.Honour):
        key = f"`{row.key}`" if row.key else "`train.global_batch` follows from it"
        return key + words(row) + (f'; "auto": {row.rule}' if row.auto else "")
    if isinstance(row, dsrows.Same):
        return f"must agree with `{row.key}`"
    if isinstance(row, dsrows.Idle):
        return f"no effect: {row.why}"
    if isinstance(row, dsrows.Moved):
        return f"{'deprecated' if row.old else 'another name'}: `{row.to}`{words(row)}"
    if isinstance(row, dsrows.Qualifier):
        above = name.rpartition(".")[0]
        return f"with `{dskeys.SWITCHES.get(above, above)}`"
    assert isinstance(row, dsrows.Refuse)
    rest = [json.dumps(u).strip('"') for u in row.unless]
    return f"refused{' unless ' * bool(rest)}{' or '.join(rest)}: {row.why}"


def deepspeed() -> Iterator[str]:
    sections: dict[str, list[str]] = {}
    for name, row in dskeys.TABLE.items():
        section, _, key = name.rpartition(".")
        stage = "" if row.stages == "0123" else f" (stage {' '.join(row.stages)})"
        same = isinstance(row, dsrows.Moved) and not row.words
        kind = "the same" if same else row.kind.allowed
        ours = becomes(name, row) + stage
        rows = sections.setdefault(section, [])
        rows.append(f"| `{key}` | {kind} | {ours} |")
    for section, rows in sections.items():
        title = f"`{section}`" if section else "At the top"
        yield f"\n### {title}\n\n| key | holds | here |\n|---|---|---|"
        yield from rows


def page() -> str:
    keys, theirs = "\n".join(spec(schema.SpecKeys)), "\n".join(deepspeed())
    return f"{HEAD}{keys}\n{DEEPSPEED}{theirs}\n"


if __name__ == "__main__":
    print(page(), end="")
