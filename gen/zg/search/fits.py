"""fits.py -- checks a plan against `cluster.memory`: a rank's arena and the memory besides it
against the device, its host arena against the host, its file against the disk."""

from __future__ import annotations

import math
from collections.abc import Callable

from ..facts import reserve
from ..plan.plan import Plan
from ..read.spec import Spec, SpecError
from .knobs import RULES

PAGE = 4096  # no memory of a rank has fewer bytes


def needs(p: Plan) -> dict[str, int]:
    """Return the bytes that a rank needs of each memory, on the target that needs the most."""
    gpu = set(p.head.targets) - {"cpu"}
    return {
        "device": reserve.most(p),
        "host": p.host if gpu else p.hosted,
        "file": p.filed,
    }


def gib(n: int, digits: Callable[[float], float] = round) -> str:
    """Return " (1.25 GiB)" for a message about bytes, '' if they are less than 0.01 GiB. digits:
    rounds hundredths."""
    return f" ({digits(100 * n / 2**30) / 100:.2f} GiB)" if 100 * n >= 2**30 else ""


def size(n: int) -> str:
    """Return bytes for a message."""
    return f"{n:,} byte{'s' * (n != 1)}{gib(n)}"


def least(n: int) -> str:
    """Return a lower limit for a message: bytes as a user may type them; its GiB are enough."""
    return f"at least {n}{gib(n, math.ceil)}"


def over(spec: Spec, p: Plan) -> list[tuple[str, int, int]]:
    """Return (memory, bytes needed, bytes there) for each memory that is too small for a plan."""
    limits = {name: getattr(spec.cluster.memory, name) for name in needs(p)}
    return [
        (name, need, limits[name])
        for name, need in needs(p).items()
        if limits[name] is not None and need > limits[name]
    ]


def unit(limit: int, need: int) -> str:
    """Return a hint for an error if a limit is too small to be meant in bytes and would be enough
    in GiB."""
    meant = limit < PAGE and limit << 30 >= need
    return f"did you mean {limit}GiB? " if meant else ""


def other_bits(spec: Spec, fits: Callable[[Spec], bool]) -> str:
    """Return a hint that names the first rule of summation with which the spec fits, or ""."""
    for rule in RULES:
        try:
            if fits(rule.change(spec)):
                return (
                    f"; or, with different bits, {rule.text}, which takes less memory for sums "
                    "of gradients"
                )
        except SpecError:
            pass
    return ""
