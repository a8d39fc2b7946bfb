"""grids.py -- how each kernel runs on a GPU: its device launches, from the numbers of the call.

A row of GRIDS is a function of the whole-number operands of a kernel (dims and flags, in the order
of kernels/zk.h), or of `n`, the most elements of any such call, for the plan's own kernels. A row
takes `target` ("sm_90" ...) or `real` (bytes of a real) by name where it depends on them.
"""
from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Callable, Mapping

from .plan import Grid

GEMM = 32 << 20                 # bytes of workspace that a GEMM may use


@dataclass(frozen=True)
class How:
    """One kernel's call on one target; space: bytes of the class `space` that it needs."""
    grids: tuple[Grid, ...]
    tile: tuple[int, int, int] = (0, 0, 0)
    slot: int = 0
    space: int = 0


def run(*grids: Grid, tile: tuple[int, int, int] = (0, 0, 0), slot: int = 0,
        space: int = 0) -> How:
    return How(grids, tile, slot, space)


def flat(n: int, block: int = 256, most: int = 4096, each: int = 1) -> Grid:
    """One thread for `each` elements of n; a block goes on to others where `most` do not do."""
    return Grid(max(1, min(most, -(-n // (block * each)))), 1, 1, block, 0)


GRIDS: Mapping[str, Callable[..., How]] = {
    "zk_linear_fwd": lambda M, N, K, layout: run(space=GEMM),
    "zk_linear_bwd_x": lambda M, N, K, layout: run(space=GEMM),
    "zk_linear_bwd_w": lambda M, N, K, layout, full: run(space=GEMM),
}


def how(kernel: str, target: str, real: int, numbers: tuple[int, ...]) -> How:
    row = GRIDS.get(kernel, lambda *numbers: run(Grid(1, 1, 1, 1, 0)))
    named = {"target": target, "real": real}
    wants = inspect.signature(row).parameters
    return row(*numbers, **{name: x for name, x in named.items() if name in wants})
