"""grids.py -- the device launches of each kernel on a GPU, from the shape of the call.

The rows of kernels.py name these rules. A rule gets the numbers of a launch's shape (for the plan's
own kernels n, the largest of all such calls), `target` ("sm_90" ...) and `real`, bytes of a real.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from ..plan.operand import Ints
from ..plan.plan import Grid
from .kernels import KERNELS, VOCAB, code, shaped

GEMM = 32 << 20  # bytes of workspace that a GEMM may use
WARP = 32
SIDE_MOST = 65535  # most blocks of a grid in y and z
# Leaves of the largest tree that a push may make a node of (sum.cu)
LEAVES = 4096
# Bytes of shared memory of a block.
SHARED = {
    "sm_80": 163 << 10,
    "sm_90": 227 << 10,
    "sm_100": 227 << 10,
}
# SMs of a whole device.
PROCESSORS = {"sm_80": 108, "sm_90": 132, "sm_100": 148}


@dataclass(frozen=True)
class How:
    """Device launches of one kernel call on one target. workspace: bytes that it needs of class
    `workspace`."""

    grids: tuple[Grid, ...]
    tile: tuple[int, int, int] = (0, 0, 0)
    workspace: int = 0


def run(
    *grids: Grid, tile: tuple[int, int, int] = (0, 0, 0), workspace: int = 0
) -> How:
    return How(grids, tile, workspace)


def flat(n: int, block: int = 256, most: int = 4096, each: int = 1) -> Grid:
    """Return a grid with one thread per `each` of n elements, of at most `most` blocks. Blocks loop
    if that is too few."""
    return Grid(max(1, min(most, -(-n // (block * each)))), 1, 1, block, 0)


STRIPES = 64  # most stripes of rows in which a bias gradient is summed


def bias(M: int, N: int) -> How:
    """Return stripes of at least 32 rows by 128 columns, then one thread per column of their
    sums."""
    stripes = max(1, min(STRIPES, M // 32))
    return run(
        Grid(-(-N // 128), stripes, 1, 256, 0),
        flat(N, 128),
        workspace=4 * N * stripes,
    )


def up(n: int, to: int = WARP) -> int:
    return -(-n // to) * to


def packed(C: int, real: int) -> int:
    """Return the elements that a thread loads at once from rows of C: 16 bytes if C allows it."""
    return 16 // real if C % (16 // real) == 0 else 1


def each_row(M: int, C: int, real: int, most: int = 256) -> Grid:
    """Return a grid with one block for each of M rows."""
    return Grid(M, 1, 1, min(most, up(C // packed(C, real))), 0)


# ---- norms: a team of threads has a run of C elements and keeps packs of it in registers

PLAIN = 512  # threads of a team that keeps none


def team(C: int, real: int, most: int = 256, beside: int = 0) -> tuple[int, int]:
    """Return the threads and packs of a team, as norm.cu takes them. A block of `most` threads has
    enough registers, an SM those of two blocks. beside: length of the runs that the same launch
    normalizes, too."""
    width = packed(math.gcd(C, beside), real)
    packs = C // width
    if width == 1 or packs > 4 * most:
        return min(PLAIN, up(packs)), 0
    if packs <= WARP:
        return 1 << (packs - 1).bit_length(), 1
    return (WARP if packs <= 4 * WARP else up(-(-packs // 4))), 4


def teams(threads: int, packs: int) -> int:
    """Return the teams of a block."""
    return 128 // threads if packs and threads <= WARP else 1


def norm_fwd(runs: int, C: int, real: int, kinds: int = 1, beside: int = 0) -> How:
    threads, packs = team(C, real, beside=beside)
    n = teams(threads, packs)
    return run(Grid(-(-runs // n), kinds, 1, n * threads, 0), tile=(threads, packs, 0))


def norm_bwd(
    runs: int,
    C: int,
    real: int,
    target: str,
    lines: int,
    kinds: int = 1,
    most: int = 256,
    beside: int = 0,
) -> How:
    """Return the launches of a norm's backward. A team has at least eight runs, so that its sums
    are small beside them. The sums are folded with 32 columns a block and as many rows of threads
    as there are blocks, up to 32."""
    threads, packs = team(C, real, most, beside)
    n = teams(threads, packs)
    block = n * threads
    blocks = min(PROCESSORS[target] * max(1, 2 * most // block), -(-runs // (8 * n)))
    return run(
        Grid(blocks, kinds, 1, block, 4 * C if n > 1 else 0),
        Grid(-(-C // 32), lines, 1, 32 * min(32, blocks), 0),
        tile=(threads, packs, 0),
        workspace=4 * lines * blocks * C,
    )


# ---- embedding's backward: blocks sort ranges of tokens, then a warp has the columns of a row


def embed_bwd(M: int, V: int, C: int, real: int, target: str) -> How:
    each = max(64, -(-V // (2 * PROCESSORS[target])))
    return run(
        Grid(-(-V // each), 1, 1, min(1024, up(M)), 4 * each),
        Grid(-(-V // 8), -(-C // (WARP * packed(C, real))), 1, 8 * WARP, 0),
    )


def elements(n: int, real: int) -> How:
    return run(flat(n, each=16 // real))


# ---- attention: tiles by the width of a head

SIDE = 64  # queries and keys of a plain tile
WIDTHS = (64, 128, 256)
KEYS = {64: 64, 128: 64, 256: 32}
# backward: keys of a block, queries of a tile, threads; queries of a block, keys of a tile, threads
KEYS_BWD = {64: (128, 64, 128), 128: (128, 64, 256), 256: (64, 32, 128)}
QUERIES_BWD = {64: (128, 64, 128), 128: (128, 32, 128), 256: (64, 32, 128)}
# the same for kernels that multiply by warpgroups
GROUPS_BWD = (128, 64, 256)


def head_width(D: int, real: int) -> int:
    """Return the width of a head in the shared memory of the tensor cores' kernels, or 0 if they do
    not take it."""
    fits = [w for w in WIDTHS if D <= w]
    return fits[0] if real == 2 and D % 8 == 0 and fits else 0


def plain_attention(B: int, T: int, heads: int, D: int) -> Grid:
    """Return blocks of 64 queries or keys by 64 or 128 columns, with two tiles of rows and two of
    scores."""
    C = head_columns(D)
    return Grid(
        -(-T // SIDE),
        heads * -(-D // C),
        B,
        256,
        8 * SIDE * (C + 4 + SIDE + 4),
    )


def head_columns(D: int) -> int:
    return 64 if D <= 64 else 128


def by_groups(width: int, target: str, local: int) -> int:
    """Return 1 if causal attention multiplies by warpgroups on this target."""
    return int(target == "sm_90" and width in (64, 128) and not local)


def attention_fwd(
    B: int,
    T: int,
    H: int,
    G: int,
    D: int,
    real: int,
    target: str,
    local: int = 0,
) -> How:
    """Return blocks of 128 queries with two tiles each of keys and values. sm_80 has shared memory
    for two such blocks only with tiles of 32 keys, and local attention has registers for no
    more."""
    W = head_width(D, real)
    if not W:
        return run(plain_attention(B, T, H, D), tile=(0, head_columns(D), 0))
    keys = 32 if W == 128 and (local or target == "sm_80") else KEYS[W]
    return run(
        Grid(
            -(-T // 128),
            H,
            B,
            256 if W == 256 else 128,
            2 * W * (128 + 4 * keys),
        ),
        tile=(W, keys, by_groups(W, target, local)),
    )


def attention_bwd(
    B: int, T: int, H: int, G: int, D: int, real: int, target: str, local: int = 0
) -> How:
    """Return three launches: lse and dot of each query, then dk and dv, then dq."""
    W = head_width(D, real)
    group = by_groups(W, target, local)
    lines = Grid(min(4096, -(-B * T * H // 8)), 1, 1, 256, 0)
    if not W:
        return run(
            lines,
            plain_attention(B, T, G, D),
            plain_attention(B, T, H, D),
            tile=(0, head_columns(D), 0),
        )
    (own, other, threads), (mine, tile, block) = (
        (GROUPS_BWD, GROUPS_BWD) if group else (KEYS_BWD[W], QUERIES_BWD[W])
    )
    return run(
        lines,
        Grid(
            -(-T // own),
            G * -(-W // 128),
            B,
            threads,
            4 * W * (own + 2 * other) + 2048,
        ),
        Grid(-(-T // mine), H, B, block, 4 * W * (mine + 2 * tile)),
        tile=(W, 0, group),
    )


# Names that a row's grid may use, beside the numbers of the launch.
NAMES = {
    "GEMM": GEMM,
    "Grid": Grid,
    "VOCAB": VOCAB,
    "attention_bwd": attention_bwd,
    "attention_fwd": attention_fwd,
    "bias": bias,
    "each_row": each_row,
    "elements": elements,
    "embed_bwd": embed_bwd,
    "flat": flat,
    "norm_bwd": norm_bwd,
    "norm_fwd": norm_fwd,
    "run": run,
    "up": up,
    "max": max,
    "min": min,
    "__builtins__": {},
}


@functools.cache
def how(kernel: str, target: str, real: int, shape: Ints) -> How:
    """Return how a call of this shape runs on one target, by its kernel's row.

    Raises NameError if the shape lacks a number that the rule names.
    """
    row = KERNELS[kernel]
    fixed = {"target": target, "real": real}
    found = eval(code(row.grid), NAMES, shaped(row, shape) | fixed)
    if not isinstance(found, How):
        raise TypeError(f"{kernel}: {row.grid} is no How")
    return found
