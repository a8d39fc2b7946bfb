"""fits.py -- does a plan fit `cluster.memory`: a rank's arena on each target, and what a GPU holds
beside it, the device; its host arena the host; its file the disk."""

from __future__ import annotations

from collections.abc import Callable

from ..facts import reserve
from ..plan.plan import Plan
from ..read.spec import Spec, SpecError
from .knobs import RULES

PAGE = 4096  # no memory of a rank has fewer bytes


def needs(p: Plan) -> dict[str, int]:
    """Bytes of a rank, on the target that needs most."""
    gpu = set(p.head.targets) - {"cpu"}
    return {
        "device": reserve.most(p),
        "host": p.host if gpu else p.hosted,
        "file": p.filed,
    }


def over(spec: Spec, p: Plan) -> list[tuple[str, int, int]]:
    """(memory, needed, there) where a plan does not fit."""
    limits = {name: getattr(spec.cluster.memory, name) for name in needs(p)}
    return [
        (name, need, limits[name])
        for name, need in needs(p).items()
        if limits[name] is not None and need > limits[name]
    ]


def unit(limit: int) -> str:
    """A hint where a limit says too few bytes to be meant as bytes."""
    return f"did you mean {limit}GiB? " if limit < PAGE else ""


def other_bits(spec: Spec, fits: Callable[[Spec], bool]) -> str:
    """What to say of the first rule of summation with which it fits, if there is one."""
    for rule in RULES:
        try:
            if fits(rule.change(spec)):
                return f"; with other bits {rule.text}, whose sums of gradients take less"
        except SpecError:
            pass
    return ""
