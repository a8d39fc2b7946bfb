"""dsrows.py -- rows of dskeys.py: what a key of a ds_config.json may hold, what becomes of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .node import number

Number = int | float
Look = Callable[
    [str], Number | None
]  # a number of the spec by its key; None: there is none


# ---- what a value may be


@dataclass(frozen=True)
class Kind:
    """allowed: in words; fits: whether a value that is not null or "auto" is one."""

    allowed: str
    fits: Callable[[object], bool]


def numeric(value: object) -> Number | None:
    """5e8 and "5e8" are numbers, true is none."""
    found = number(value) if isinstance(value, str) else value
    if not isinstance(found, (int, float)) or isinstance(found, bool):
        return None
    return found if math.isfinite(found) else None


def integer(low: int, high: int = 2**63 - 1, step: int = 1) -> Kind:
    def fits(value: object) -> bool:
        n = numeric(value)
        return (
            n is not None
            and n == int(n)
            and low <= n <= high
            and n % step == 0
        )

    name = "an even integer" if step == 2 else "an integer"
    start = f" from {low}" if low > -(2**63) else ""
    return Kind(
        name + start + (f" to {high}" if high < 2**63 - 1 else ""), fits
    )


def real(low: float, high: float = math.inf) -> Kind:
    def fits(value: object) -> bool:
        n = numeric(value)
        return n is not None and low <= n <= high

    return Kind(
        f"a number from {low:g}"
        + (f" to {high:g}" if high < math.inf else ""),
        fits,
    )


def word(*words: str) -> Kind:
    """One of these, in letters of any case."""
    known = {w.lower() for w in words}
    return Kind(
        " or ".join(words), lambda v: isinstance(v, str) and v.lower() in known
    )


def listed(kind: Kind, length: int | None = None) -> Kind:
    many = "a list of" + (f" {length}, each" if length else "")
    return Kind(
        f"{many} {kind.allowed}",
        lambda v: (
            isinstance(v, list)
            and length in (None, len(v))
            and all(map(kind.fits, v))
        ),
    )


def either(*kinds: Kind) -> Kind:
    return Kind(
        " or ".join(k.allowed for k in kinds),
        lambda v: any(k.fits(v) for k in kinds),
    )


FLAG = Kind("true or false", lambda v: isinstance(v, bool))
TEXT = Kind("text", lambda v: isinstance(v, str))
OBJECT = Kind("an object {...}", lambda v: isinstance(v, dict))
ANY = Kind("anything", lambda v: True)
COUNT, SIZE, INTEGER = integer(1), integer(0), integer(-(2**63))
EVEN, SHARE, POSITIVE, NUMBER = (
    integer(0, step=2),
    real(0, 1),
    real(0),
    real(-math.inf),
)
TEXTS, DTYPE = listed(TEXT), word("fp32", "fp16", "bf16")
LR = real(0)


# ---- what becomes of it

Words = Mapping[Any, object]  # their words to ours


@dataclass(frozen=True)
class Key:
    """stages: of ZeRO, where the key does something."""

    kind: Kind
    stages: str = "0123"


@dataclass(frozen=True)
class Honour(Key):
    """Sets the spec's key. words: theirs to ours; weak: those that yield to another key's; auto:
    the value that "auto" stands for where the spec is silent, else auto is the spec's own; it is
    None where the spec lacks what the rule reads. required: every spec must have that, and is
    refused without it. quiet: values that ask for nothing, of a key that the spec refuses at other
    stages."""

    key: str = ""
    words: Words | None = None
    weak: tuple[object, ...] = ()
    auto: Callable[[Look], Number | None] | None = None
    rule: str = ""  # auto, in words
    required: bool = True
    quiet: tuple[object, ...] = ()


@dataclass(frozen=True)
class Same(Key):
    """Must say what the spec's key says. summed: fp32 may be said of any, where sums over ranks are
    f32 whatever travels."""

    key: str = ""
    words: Words = field(default_factory=dict)
    summed: bool = False


@dataclass(frozen=True)
class Idle(Key):
    """No effect here; a note says so, but for the values of `quiet`."""

    why: str = ""
    quiet: tuple[object, ...] = ()


@dataclass(frozen=True)
class Refuse(Key):
    """unless: values that ask for nothing."""

    why: str = ""
    unless: tuple[object, ...] = ()


@dataclass(frozen=True)
class Part(Key):
    """Says how its section's switch is meant, and nothing without it."""


@dataclass(frozen=True)
class Moved(Key):
    """Another name of a key; words: its values to that key's; old: deprecated by DeepSpeed."""

    to: str = ""
    words: Words | None = None
    old: bool = True


def by_width(rule: Callable[[int], int]) -> Callable[[Look], Number | None]:
    """A number that follows from model.width."""

    def auto(spec: Look) -> Number | None:
        width = spec("model.width")
        return rule(int(width)) if width and COUNT.fits(width) else None

    return auto


def to(key: str, kind: Kind, **more: Any) -> Honour:
    return Honour(kind, key=key, **more)


def idle(why: str, kind: Kind = FLAG, **more: Any) -> Idle:
    return Idle(kind, why=why, **more)


def watch(why: str, kind: Kind = FLAG) -> Idle:
    """Only looks on; false asks for nothing."""
    return Idle(kind, why=why, quiet=(False,))


def no(
    why: str,
    kind: Kind = FLAG,
    unless: tuple[object, ...] = (False,),
    **more: Any,
) -> Refuse:
    return Refuse(kind, why=why, unless=unless, **more)


def legacy(
    what: str, kind: Kind = OBJECT, unless: tuple[object, ...] = ()
) -> Refuse:
    return no(
        f"is a legacy feature of DeepSpeed, {what}, and not here", kind, unless
    )


def parts(**kinds: Kind) -> dict[str, Key]:
    return {name: Part(kind) for name, kind in kinds.items()}


def under(section: str, rows: Mapping[str, Key]) -> dict[str, Key]:
    return {f"{section}.{name}": row for name, row in rows.items()}
