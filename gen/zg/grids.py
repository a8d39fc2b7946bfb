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


STRIPES = 64                    # of rows, at most, that a bias' gradient is summed in


def bias(M: int, N: int) -> How:
    """Stripes of at least 32 rows by 128 columns; then one thread for a column of their sums."""
    stripes = max(1, min(STRIPES, M // 32))
    return run(Grid(-(-N // 128), stripes, 1, 256, 0), flat(N, 128), space=4 * N * stripes)


GRIDS: Mapping[str, Callable[..., How]] = {
    "zk_linear_fwd": lambda M, N, K, layout: run(space=GEMM),
    "zk_linear_bwd_x": lambda M, N, K, layout: run(space=GEMM),
    "zk_linear_bwd_w": lambda M, N, K, layout, full: run(space=GEMM),
    "zk_linear_bwd_b": bias,
    # a thread takes 4 elements of a sum; a warp takes blocks of 1024 of a flat: 1, 8 or 32 at once
    "zk_push": lambda n: run(flat(n, each=4)),
    "zk_adamw": lambda n: run(flat(n, each=1024 // 32)),
    "zk_init": lambda n: run(flat(n, each=1024 // 32)),
    "zk_square_sum": lambda n: run(flat(n, 128, each=8 * 1024 // 32)),
    "zk_hash": lambda n: run(flat(n, 128, each=1024), space=16),
    "zk_begin": lambda *_: run(Grid(1, 1, 1, 96, 0)),
    "zk_factor": lambda *_: run(Grid(1, 1, 1, 32, 0)),
    "zk_count": lambda *_: run(Grid(1, 1, 1, 32, 0)),
}


def how(kernel: str, target: str, real: int, numbers: tuple[int, ...]) -> How:
    row = GRIDS.get(kernel, lambda *numbers: run(Grid(1, 1, 1, 1, 0)))
    named = {"target": target, "real": real}
    wants = inspect.signature(row).parameters
    return row(*numbers, **{name: x for name, x in named.items() if name in wants})
