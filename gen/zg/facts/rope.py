"""rope.py -- inverse frequencies of a rotary table, in decimal arithmetic: no libm decides a
bit."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal, getcontext
from typing import Any

from ..plan.operand import Names

# Numbers of each scaling, in a plan's order. Those of longrope are 0, which no other begins with,
# and a divisor for each frequency; the count of the others identifies the scaling. Those of dynamic
# are its two and the tokens of a sample.
NUMBERS: Mapping[str, Names] = {
    "linear": ("factor",),
    "dynamic": ("factor", "original_context"),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_context",
    ),
    "yarn": (
        "factor",
        "beta_fast",
        "beta_slow",
        "original_context",
        "truncate",
    ),
}

DYNAMIC = 3  # count of the numbers of dynamic


@dataclass(frozen=True)
class Rotation:
    """The inputs of a rotary table: the number of rotated elements, theta, and the numbers of a
    scaling."""

    head: int
    theta: float
    scaling: tuple[float, ...]


def fields(scaling: Mapping[str, Any] | None, context: int) -> tuple[float, ...]:
    """Return the numbers of a spec's scaling for samples of `context` tokens, () if it has none."""
    if not scaling:
        return ()
    if scaling["type"] == "longrope":
        long = context > scaling["original_context"]
        return (0.0, *scaling["long_factor" if long else "short_factor"])
    numbers = tuple(float(scaling[key]) for key in NUMBERS[scaling["type"]])
    if scaling["type"] == "dynamic":
        return (
            (*numbers, float(context)) if context > scaling["original_context"] else ()
        )
    return numbers


@functools.cache
def frequencies(
    head: int, theta: float, scaling: tuple[float, ...]
) -> tuple[float, ...]:
    """Return the [head/2] frequencies theta^(-2i/head), scaled if there are numbers of a
    scaling."""
    getcontext().prec = 40
    base, divided = Decimal(str(theta)), scaling[:1] == (0.0,)
    if len(scaling) == DYNAMIC and not divided:
        base, scaling = _larger(base, head, *scaling), ()
    powers = [
        float(base ** (Decimal(-2 * i) / Decimal(head))) for i in range(head // 2)
    ]
    if divided:
        return tuple(f / by for f, by in zip(powers, scaling[1:], strict=True))
    kept = _KEPT[len(scaling)](head, base, powers, *scaling[1:])
    factor = scaling[0] if scaling else 1.0
    return tuple(map(_scaled, powers, kept, itertools.repeat(factor)))


def _larger(
    base: Decimal, head: int, factor: float, original: float, context: float
) -> Decimal:
    """Return the theta of dynamic NTK scaling, as transformers compute it."""
    times = Decimal(factor) * Decimal(context) / Decimal(original) - Decimal(factor - 1)
    return base * times ** (Decimal(head) / Decimal(head - 2))


def _scaled(f: float, kept: float, factor: float) -> float:
    """Return a frequency of which the share `kept` stays and the rest is divided by the factor."""
    return (1.0 - kept) * f / factor + kept * f


# ---- shares that are kept, for each frequency


def _every(head: int, base: Decimal, powers: list[float]) -> Iterable[float]:
    return itertools.repeat(1.0)


def _none(head: int, base: Decimal, powers: list[float]) -> Iterable[float]:
    return itertools.repeat(0.0)


def _llama3(
    head: int,
    base: Decimal,
    powers: list[float],
    low: float,
    high: float,
    context: float,
) -> Iterable[float]:
    """Yield shares as the reference code of Llama 3.1's report does (section 3.2): by the number of
    turns of a wave in the original context."""
    for f in powers:
        turns = context / (2.0 * math.pi / f)
        yield min(max((turns - low) / (high - low), 0.0), 1.0)


def _yarn(
    head: int,
    base: Decimal,
    powers: list[float],
    fast: float,
    slow: float,
    context: float,
    truncate: float,
) -> Iterable[float]:
    """Yield shares as YaRN (arXiv 2309.00071, section 3.2) and transformers do: by the index of a
    pair, between those that turn `fast` and `slow` times in the original context."""
    first, last = (
        head
        * (Decimal(context) / (Decimal(turns) * 2 * Decimal(math.pi))).ln()
        / (2 * base.ln())
        for turns in (fast, slow)
    )
    if truncate:
        first, last = Decimal(math.floor(first)), Decimal(math.ceil(last))
    first, last = max(first, Decimal(0)), min(last, Decimal(head - 1))
    if first == last:
        last += Decimal("0.001")
    for i in range(head // 2):
        yield 1.0 - min(max(float((i - first) / (last - first)), 0.0), 1.0)


_KEPT: Mapping[int, Callable[..., Iterable[float]]] = {
    0: _every,
    1: _none,
    4: _llama3,
    5: _yarn,
}


def stretched(factor: float, context: float) -> float:
    """Return longrope's factor of queries and keys: sqrt(1 + ln(factor) / ln(context))."""
    getcontext().prec = 40
    ratio = Decimal(str(factor)).ln() / Decimal(str(context)).ln()
    return float((1 + ratio).sqrt())


def grown(factor: float, times: float = 1.0) -> float:
    """Return YaRN's factor of queries and keys: 1 + times * ln(factor) / 10."""
    getcontext().prec = 40
    log = Decimal(str(factor)).ln()
    return float(1 + Decimal(str(times)) * log / 10)
