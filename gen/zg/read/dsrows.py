"""dsrows.py -- types of the rows of dskeys.py: the possible values of a key, and its effect."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .node import number

Number = int | float
# Returns a number of the spec by its key, or None.
Look = Callable[[str], Number | None]


# ---- possible values


@dataclass(frozen=True)
class Kind:
    """A kind of value. allowed: its description; fits: whether a value other than null and "auto"
    is of this kind."""

    allowed: str
    fits: Callable[[object], bool]


def numeric(value: object) -> Number | None:
    """Return a finite number: 5e8 and "5e8" are numbers, true is not."""
    found = number(value) if isinstance(value, str) else value
    if not isinstance(found, (int, float)) or isinstance(found, bool):
        return None
    return found if math.isfinite(found) else None


def integer(low: int, high: int = 2**63 - 1, step: int = 1) -> Kind:
    def fits(value: object) -> bool:
        n = numeric(value)
        return n is not None and n == int(n) and low <= n <= high and n % step == 0

    name = "an even integer" if step == 2 else "an integer"
    start = f" from {low}" if low > -(2**63) else ""
    return Kind(name + start + (f" to {high}" if high < 2**63 - 1 else ""), fits)


def real(low: float, high: float = math.inf) -> Kind:
    def fits(value: object) -> bool:
        n = numeric(value)
        return n is not None and low <= n <= high

    return Kind(
        f"a number from {low:g}" + (f" to {high:g}" if high < math.inf else ""),
        fits,
    )


def word(*words: str) -> Kind:
    """Return the kind of these words, in any case."""
    known = {w.lower() for w in words}
    return Kind(" or ".join(words), lambda v: isinstance(v, str) and v.lower() in known)


def listed(kind: Kind, length: int | None = None) -> Kind:
    many = "a list of" + (f" {length}, each" if length else "")
    return Kind(
        f"{many} {kind.allowed}",
        lambda v: (
            isinstance(v, list) and length in (None, len(v)) and all(map(kind.fits, v))
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


# ---- effects

Words = Mapping[Any, object]  # their words -> ours


@dataclass(frozen=True)
class Key:
    """A row of the table. stages: ZeRO stages at which the key has an effect."""

    kind: Kind
    stages: str = "0123"


@dataclass(frozen=True)
class Honour(Key):
    """Sets the spec's key.

    words: their values -> ours; weak: values that another key may override; auto: returns the value
    of "auto" if the spec does not give one, or None if the spec lacks a key that the rule reads;
    rule: that rule in words. Without `auto` the spec's own value stays. required: a spec without
    the rule's keys is refused anyway. quiet: values that ask for nothing, of a key that the spec
    refuses at other stages.
    """

    key: str = ""
    words: Words | None = None
    weak: tuple[object, ...] = ()
    auto: Callable[[Look], Number | None] | None = None
    rule: str = ""
    required: bool = True
    quiet: tuple[object, ...] = ()


@dataclass(frozen=True)
class Same(Key):
    """Must equal the spec's key. summed: fp32 is accepted with any precision, because exact sums
    over ranks are f32."""

    key: str = ""
    words: Words = field(default_factory=dict)
    summed: bool = False


@dataclass(frozen=True)
class Idle(Key):
    """Has no effect here. A note says so, except for the values in `quiet`."""

    why: str = ""
    quiet: tuple[object, ...] = ()


@dataclass(frozen=True)
class Refuse(Key):
    """Is refused, except for the values in `unless`, which ask for nothing."""

    why: str = ""
    unless: tuple[object, ...] = ()


@dataclass(frozen=True)
class Qualifier(Key):
    """Qualifies its section's switch, and has no effect without it."""


@dataclass(frozen=True)
class Moved(Key):
    """Is another name of a key. words: its values -> that key's; old: deprecated by DeepSpeed."""

    to: str = ""
    words: Words | None = None
    old: bool = True


def by_width(rule: Callable[[int], int]) -> Callable[[Look], Number | None]:
    """Return a rule for "auto" that depends on model.width."""

    def auto(spec: Look) -> Number | None:
        width = spec("model.width")
        return rule(int(width)) if width and COUNT.fits(width) else None

    return auto


def to(key: str, kind: Kind, **more: Any) -> Honour:
    """Return the row of a key that sets the spec's `key`."""
    return Honour(kind, key=key, **more)


def idle(why: str, kind: Kind = FLAG, **more: Any) -> Idle:
    return Idle(kind, why=why, **more)


def watch(why: str, kind: Kind = FLAG) -> Idle:
    """Return the row of a key that only observes; false asks for nothing."""
    return Idle(kind, why=why, quiet=(False,))


def no(
    why: str,
    kind: Kind = FLAG,
    unless: tuple[object, ...] = (False,),
    **more: Any,
) -> Refuse:
    """Return the row of a key that is refused, except for values that ask for nothing."""
    return Refuse(kind, why=why, unless=unless, **more)


def legacy(what: str, kind: Kind = OBJECT, unless: tuple[object, ...] = ()) -> Refuse:
    return no(
        f"is a legacy feature of DeepSpeed ({what}) and is not supported", kind, unless
    )


def parts(**kinds: Kind) -> dict[str, Key]:
    return {name: Qualifier(kind) for name, kind in kinds.items()}


def under(section: str, rows: Mapping[str, Key]) -> dict[str, Key]:
    return {f"{section}.{name}": row for name, row in rows.items()}
