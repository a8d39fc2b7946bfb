"""rope.py -- a rotary table's inverse frequencies, in decimal arithmetic, so that no libm decides a
bit of them."""
from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from decimal import Decimal, getcontext


@dataclass(frozen=True)
class Table:
    """A rotary table: inverse frequencies [D/2]."""
    head: int
    freq: tuple[float, ...]


@functools.cache
def frequencies(base: float, parts: tuple[tuple[str, object], ...], head: int
                ) -> tuple[float, ...]:
    """Inverse frequencies theta^(-2i/D), with Llama 3's scaling (Llama 3.1 report, section 3.2's
    reference code): long waves divided by factor, short ones kept, a linear blend between."""
    getcontext().prec = 40
    theta, scaling = Decimal(str(base)), dict(parts)
    out = []
    for i in range(head // 2):
        f = float(theta ** (Decimal(-2 * i) / Decimal(head)))
        if scaling:
            wave = 2.0 * math.pi / f
            low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
            turns = float(scaling["original_context"]) / wave
            if turns < low:
                f /= float(scaling["factor"])
            elif turns <= high:
                blend = (turns - low) / (high - low)
                f = (1.0 - blend) * f / float(scaling["factor"]) + blend * f
        out.append(f)
    return tuple(out)
