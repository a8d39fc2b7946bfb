"""keytypes.py -- types of a spec's keys.

A key's type describes its allowed values in the words of the error.
"""

from __future__ import annotations

import math
import re
from decimal import Decimal
from functools import partial
from typing import Annotated, Any, TypeVar, get_args

from pydantic import GetCoreSchemaHandler, PlainValidator
from pydantic_core import CoreSchema, PydanticCustomError

from ..facts import ops
from .node import Names, meant, number, shown

DIM = 2**31 - 1  # largest dimension: kernels count rows and columns in 31 bits
RANKS = 2**20
LAYERS = 2048  # most layers of a model: each takes some lines of the plan
# Most elements of a model, over all values: byte offsets fit in 63 bits
ELEMS = 2**48
TOKEN = 65535  # largest uint16 token
RECOMPUTE = tuple(dict.fromkeys(ops.WORDS.values()))
ALL_LINEAR = "all-linear"  # PEFT's word for all linears but that of the logits
TARGETS = ("cpu", "sm_80", "sm_90", "sm_100")
# GPUs by name, in any case.
GPUS = {"a100": "sm_80", "h100": "sm_90", "h200": "sm_90", "b200": "sm_100"}


# ---- optional keys

Kind = TypeVar("Kind")
Items = tuple[Any, ...]
Windows = tuple[int | None, ...]


class LeftOut:
    """Marks an optional key: None stands for a key that is left out."""

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        kind, _ = get_args(source)
        return handler(kind)


Unsaid = Annotated[Kind | None, LeftOut()]

# ---- types of keys: PydanticCustomError has the mistake and the allowed values


def refuse(wrong: str, allowed: str, hint: str = "") -> PydanticCustomError:
    """Return the error of a wrong value."""
    return PydanticCustomError(
        "zg",
        "{wrong}; {hint}allowed: {allowed}",
        {"wrong": wrong, "hint": hint, "allowed": allowed},
    )


def _numeric(value: object, kind: str, allowed: str) -> int | float:
    found = number(value) if isinstance(value, str) else value
    if isinstance(found, bool) or not isinstance(found, (int, float)):
        raise refuse(f"{shown(value)} is not {kind}", allowed)
    if not math.isfinite(found):
        raise refuse(f"{shown(value)} is not a finite number", allowed)
    return found


def Integer(low: int, high: int) -> PlainValidator:
    """Return the type of an integer. 5e8 and "1e8" are integers, too, as DeepSpeed's users write
    them."""
    allowed = f"an integer from {low} to {high}"

    def check(value: object) -> int:
        found = _numeric(value, "an integer", allowed)
        whole = int(found)
        if found != whole:
            raise refuse(f"{shown(value)} is not an integer", allowed)
        if not low <= whole <= high:
            raise refuse(f"{shown(value)} is out of range", allowed)
        return whole

    return PlainValidator(check)


def Auto(low: int, high: int) -> PlainValidator:
    """Return the type of an integer or the word auto (None), which leaves it to the generator."""
    allowed = f"auto or an integer from {low} to {high}"

    def check(value: object) -> int | None:
        if value in ("auto", None):
            return None
        found = _numeric(value, "an integer", allowed)
        if found != int(found) or not low <= found <= high:
            raise refuse(f"{shown(value)} is out of range or not an integer", allowed)
        return int(found)

    return PlainValidator(check)


def real(value: object, low: float, high: float) -> float:
    """Return a value as a number of a range."""
    allowed = f"a number from {low:g} to {high:.9g}"
    found = _numeric(value, "a number", allowed)
    if not low <= found <= high:
        raise refuse(f"{shown(value)} is out of range", allowed)
    return float(found)


def Real(low: float, high: float) -> PlainValidator:
    return PlainValidator(partial(real, low=low, high=high))


def Choice(*words: str) -> PlainValidator:
    def check(value: object) -> str:
        if value not in words or not isinstance(value, str):
            raise refuse(
                f"{shown(value)} is not known",
                " or ".join(words),
                meant(str(value), words, 0.7),
            )
        return value

    return PlainValidator(check)


def Text(pattern: str, allowed: str) -> PlainValidator:
    def check(value: object) -> str:
        if not isinstance(value, str):
            raise refuse(
                f"{shown(value)} is not text",
                f"{allowed} (in quotes where it looks like a number)",
            )
        if not re.fullmatch(pattern, value):
            raise refuse(f"{shown(value)} is not valid", allowed)
        return value

    return PlainValidator(check)


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise refuse(f"{shown(value)} is not a boolean", "true or false")
    return value


def two(value: Items) -> Items:
    if len(value) != 2:
        raise refuse(f"is a list of {len(value)}", "a list of 2")
    return value


def some(value: Items) -> Items:
    if not value:
        raise refuse("is empty", "a list of at least one")
    return value


def target(value: object) -> str:
    found = GPUS.get(value.lower(), value) if isinstance(value, str) else value
    if found not in TARGETS:
        names = ", ".join(f"{gpu} for {sm}" for gpu, sm in GPUS.items())
        raise refuse(
            f"{shown(value)} is not a target", f"{' or '.join(TARGETS)} ({names})"
        )
    return str(found)


def unique(value: Items) -> Items:
    if len(set(value)) < len(value):
        raise refuse("names a target twice", "each target once")
    return value


_UNITS = {
    "": 1,
    "B": 1,
    "kB": 10**3,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}
_PAGES = f"a multiple of 4096 from 4096 to {2**30}"
_MARGIN = "0 or an even integer from 2 to 64"
_BYTES = re.compile(r"(\d{1,18}(?:\.\d{1,9})?) ?([kKMGT]i?B|B|)", re.ASCII)


def whole_bytes(value: object) -> int:
    """Return bytes: 80GiB, 500 MB, 1.5TB, or a plain number."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    text = (
        str(value)
        if isinstance(value, (int, str)) and not isinstance(value, bool)
        else ""
    )
    found = _BYTES.fullmatch(text)
    if (
        not found
        or found[2] not in _UNITS
        or not Decimal(found[1]) * _UNITS[found[2]] >= 1
    ):
        raise refuse(
            f"{shown(value)} is not a size",
            "bytes, or a number with kB, MB, GB, TB, KiB, MiB, GiB or TiB",
        )
    return int(Decimal(found[1]) * _UNITS[found[2]])


def pages(value: object) -> int:
    """Return bytes in whole pages of 4096."""
    found = _numeric(value, "an integer", _PAGES)
    if found != int(found) or not 4096 <= found <= 2**30 or found % 4096:
        raise refuse(
            f"{shown(value)} is out of range or not a multiple of 4096", _PAGES
        )
    return int(found)


def margin(value: object) -> int:
    """Return the SMs of a margin: each of two communicators gets half, at most 32."""
    found = _numeric(value, "an integer", _MARGIN)
    if found not in range(0, 65, 2):
        raise refuse(f"{shown(value)} is out of range or odd", _MARGIN)
    return int(found)


def again(value: object) -> Names:
    """Return the ops of a block whose values are recomputed."""
    named = {"none": [], "full": [*RECOMPUTE]}
    words = named.get(value, [value]) if isinstance(value, str) else value
    words = words if isinstance(words, list) else [words]
    for word in words:
        if word not in RECOMPUTE:
            raise refuse(
                f"{shown(word)} is not an op of a block",
                f"none, full or a list of {', '.join(RECOMPUTE)}",
            )
    return tuple(dict.fromkeys(words))


def rule(value: object) -> str | dict[str, int]:
    """Return the rule by which gradients are summed."""
    allowed = f"tree, fold or {{block: a power of two up to {2**30}}}"
    if value in ("tree", "fold"):
        return value
    if not isinstance(value, dict) or value.keys() != {"block"}:
        raise refuse(f"{shown(value)} is not a rule", allowed)
    block = value["block"]
    n = _numeric(block, "an integer", allowed)
    if n not in (2**i for i in range(31)):
        raise refuse(f"a block of {shown(block)} is not a power of two", allowed)
    return {"block": int(n)}


def normed(value: object) -> bool | str:
    """Return whether query and key heads are normalized: each on its own, or "whole" for all as
    one."""
    if not isinstance(value, bool) and value != "whole":
        raise refuse(f"{shown(value)} is not one of these", "true, false or whole")
    return value


def windows(value: object) -> int | Windows | None:
    """Return the tokens that a token sees, in every layer or by layer; None means all before it."""
    allowed = f"an integer from 1 to {DIM} or null, or a list of them, one per layer"
    some = value if isinstance(value, list) else [value]
    for said in some:
        n = 1 if said is None else _numeric(said, "an integer", allowed)
        if n != int(n) or not 1 <= n <= DIM:
            raise refuse(f"{shown(said)} is not a number of tokens", allowed)
    each = tuple(None if n is None else int(_numeric(n, "", "")) for n in some)
    return each if isinstance(value, list) else each[0]


def as_list(value: object) -> object:
    return value if isinstance(value, list) else [value]


Count = Annotated[int, Integer(1, DIM)]
Flag = Annotated[bool, PlainValidator(_flag)]
Bytes = Annotated[int, PlainValidator(whole_bytes)]
Elems = Annotated[int, Integer(1, ELEMS)]
ElemsOrNone = Annotated[int, Integer(0, ELEMS)]
# An epsilon: f32 would flush a smaller one to 0, and 0 / 0 is NaN.
Tiny = Annotated[float, Real(1e-30, 1.0)]
_CHARS = "letters, digits, '_', '-' and single dots"
Name = Annotated[str, Text(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*", _CHARS)]
Layered = Annotated[
    str,
    Text(
        r"([A-Za-z0-9_-]+\.)*\{l\}(\.[A-Za-z0-9_-]+)*",
        f"a name in which one part is {{l}}, the layer's number; {_CHARS}",
    ),
]
Pattern = Annotated[
    str,
    Text(r"[][A-Za-z0-9_.*?!-]+", "a pattern of tensor names, such as '*.bias'"),
]
Folder = Annotated[
    str,
    Text(
        r"[^\s\"\\%?\x00-\x1f\x7f]{1,1000}",
        "the path of a folder, without spaces, quotes, backslashes, '%' and '?'",
    ),
]
DeviceName = Annotated[
    str,
    Text(
        r"[^\x00-\x1f\x7f]{1,1000}",
        "the name of a device, or the path of a file that ./run calibrate wrote",
    ),
]
Title = Annotated[
    str,
    Text(
        r"[A-Za-z0-9][A-Za-z0-9_.+-]{0,63}",
        "up to 64 letters, digits, '_', '.', '+', '-'",
    ),
]
