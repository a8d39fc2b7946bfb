"""rope.py -- a rotary table's inverse frequencies, in decimal arithmetic, so that no libm decides a
bit of them."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from decimal import Decimal, getcontext

SCALING = ("factor", "low_freq_factor", "high_freq_factor", "original_context")


def fields(scaling: Mapping[str, float] | None) -> tuple[float, ...]:
    """Of a spec's scaling, if it has one."""
    return tuple(float(scaling[key]) for key in SCALING) if scaling else ()


@functools.cache
def frequencies(
    head: int, theta: float, scaling: tuple[float, ...]
) -> tuple[float, ...]:
    """[head/2]: theta^(-2i/head), with Llama 3's scaling, where there is one."""
    getcontext().prec = 40
    base = Decimal(str(theta))
    powers = [
        float(base ** (Decimal(-2 * i) / Decimal(head)))
        for i in range(head // 2)
    ]
    return (
        tuple(_scaled(f, scaling) for f in powers)
        if scaling
        else tuple(powers)
    )


def _scaled(f: float, scaling: Sequence[float]) -> float:
    """Llama 3.1's report, section 3.2's reference code: long waves are divided by the factor, short
    ones kept, a linear blend between."""
    factor, low, high, context = scaling
    wave = 2.0 * math.pi / f
    turns = context / wave
    if turns < low:
        return f / factor
    if turns > high:
        return f
    blend = (turns - low) / (high - low)
    return (1.0 - blend) * f / factor + blend * f
