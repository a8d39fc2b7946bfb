"""grids.py -- how each kernel runs on a GPU: its device launches, from the numbers of the call.

A row of GRIDS is a function of the whole-number operands of a kernel (dims and flags, in the order
of kernels/zk.h), or of `n`, the most elements of any such call, for the plan's own kernels. A row
takes `target` ("sm_90" ...) or `real` (bytes of a real) by name where it depends on them.
"""
from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Callable, Mapping

from .ops import VOCAB
from .plan import Grid

GEMM = 32 << 20                 # bytes of workspace that a GEMM may use
WARP = 32
SIDE_MOST = 65535               # blocks of a grid in y and z
SHARED = {"sm_80": 163 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10}     # bytes of a block
PROCESSORS = {"sm_80": 108, "sm_90": 132, "sm_100": 148}        # of a whole device


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


def up(n: int, to: int = WARP) -> int:
    return -(-n // to) * to


def packed(C: int, real: int) -> int:
    """Elements that a thread takes at a time from rows of C: 16 bytes, where rows allow that."""
    return 16 // real if C % (16 // real) == 0 else 1


def rows(M: int, C: int, real: int, most: int = 256) -> Grid:
    """A block for each of M rows."""
    return Grid(M, 1, 1, min(most, up(C // packed(C, real))), 0)


# ---- norms: a team of threads has a run of C elements, and keeps packs of it

PLAIN = 512                     # threads of a team that keeps none


def team(C: int, real: int, most: int = 256) -> tuple[int, int]:
    """Threads and packs of one, as norm.cu wants them; a block of `most` threads has the registers,
    a processor those of two."""
    packs = C // packed(C, real)
    if packed(C, real) == 1 or packs > 4 * most:
        return min(PLAIN, up(packs)), 0
    if packs <= WARP:
        return 1 << (packs - 1).bit_length(), 1
    return (WARP if packs <= 4 * WARP else up(-(-packs // 4))), 4


def teams(threads: int, packs: int) -> int:
    """of a block"""
    return 128 // threads if packs and threads <= WARP else 1


def norm_fwd(runs: int, C: int, real: int, kinds: int = 1) -> How:
    threads, packs = team(C, real)
    n = teams(threads, packs)
    return run(Grid(-(-runs // n), kinds, 1, n * threads, 0), tile=(threads, packs, 0))


def norm_bwd(runs: int, C: int, real: int, target: str, lines: int, kinds: int = 1,
             most: int = 256) -> How:
    """Eight runs a team or more: sums are small beside them. Folding: 32 columns a block, and as
    many rows of threads as there are blocks' sums, up to 32."""
    threads, packs = team(C, real, most)
    n = teams(threads, packs)
    block = n * threads
    blocks = min(PROCESSORS[target] * max(1, 2 * most // block), -(-runs // (8 * n)))
    return run(Grid(blocks, kinds, 1, block, 4 * C if n > 1 else 0),
               Grid(-(-C // 32), lines, 1, 32 * min(32, blocks), 0), tile=(threads, packs, 0),
               space=4 * lines * blocks * C)


# ---- embedding's backward: blocks sort ranges of tokens, then a warp has a row's columns

def embed_bwd(M: int, V: int, C: int, real: int, target: str) -> How:
    each = max(64, -(-V // (2 * PROCESSORS[target])))
    return run(Grid(-(-V // each), 1, 1, min(1024, up(M)), 4 * each),
               Grid(-(-V // 8), -(-C // (WARP * packed(C, real))), 1, 8 * WARP, 0))


def elements(n: int, real: int) -> How:
    return run(flat(n, each=16 // real))


# ---- attention: tiles by the width of a head

SIDE = 64                       # queries and keys of a plain tile
WIDTHS = (64, 128, 256)
KEYS = {64: 64, 128: 64, 256: 32}
# backward: keys of a block, queries of a tile, threads; queries of a block, keys of a tile, threads
KEYS_BWD = {64: (128, 64, 128), 128: (128, 64, 256), 256: (64, 32, 128)}
QUERIES_BWD = {64: (128, 64, 128), 128: (128, 32, 128), 256: (64, 32, 128)}


def head_width(D: int, real: int) -> int:
    """of a head in shared memory of the tensor cores' kernels, 0 where they do not take it"""
    fits = [w for w in WIDTHS if D <= w]
    return fits[0] if real == 2 and D % 8 == 0 and fits else 0


def plain_attention(B: int, T: int, heads: int, D: int) -> Grid:
    """Blocks of 64 queries or keys, of 64 or 128 columns: two tiles of rows, two of scores."""
    C = head_columns(D)
    return Grid(-(-T // SIDE), heads * -(-D // C), B, 256, 8 * SIDE * (C + 4 + SIDE + 4))


def head_columns(D: int) -> int:
    return 64 if D <= 64 else 128


def attention_fwd(B: int, T: int, H: int, G: int, D: int, real: int, target: str) -> How:
    """128 queries, and two tiles each of keys and values; sm_80 holds two such blocks in its shared
    memory only with tiles of 32 keys."""
    W = head_width(D, real)
    if not W:
        return run(plain_attention(B, T, H, D), tile=(0, head_columns(D), 0))
    keys = 32 if target == "sm_80" and W == 128 else KEYS[W]
    return run(Grid(-(-T // 128), H, B, 256 if W == 256 else 128, 2 * W * (128 + 4 * keys)),
               tile=(W, keys, 0))


def attention_bwd(B: int, T: int, H: int, G: int, D: int, real: int) -> How:
    """Lines of numbers per query; dk and dv; dq."""
    W = head_width(D, real)
    lines = Grid(min(4096, -(-B * T * H // 8)), 1, 1, 256, 0)
    if not W:
        return run(lines, plain_attention(B, T, G, D), plain_attention(B, T, H, D),
                   tile=(0, head_columns(D), 0))
    (own, other, threads), (mine, tile, block) = KEYS_BWD[W], QUERIES_BWD[W]
    return run(lines,
               Grid(-(-T // own), G * -(-W // 128), B, threads, 4 * W * (own + 2 * other) + 2048),
               Grid(-(-T // mine), H, B, block, 4 * W * (mine + 2 * tile)), tile=(W, 0, 0))


GRIDS: Mapping[str, Callable[..., How]] = {
    "zk_attention_fwd": attention_fwd,
    "zk_attention_bwd": attention_bwd,
    "zk_embed_fwd": lambda B, T, C, real: run(rows(B * T, C, real)),
    "zk_embed_bwd": lambda M, V, C, add, real, target: embed_bwd(M, V, C, real, target),
    "zk_position_bwd": lambda B, T, C, P, real: run(rows(P, C, real)),
    "zk_layernorm_fwd": lambda M, C, real: norm_fwd(M, C, real),
    "zk_layernorm_bwd": lambda M, C, real, target: norm_bwd(M, C, real, target, 2, most=192),
    "zk_rmsnorm_fwd": lambda M, C, real: norm_fwd(M, C, real),
    "zk_rmsnorm_bwd": lambda M, C, real, target: norm_bwd(M, C, real, target, 1),
    "zk_qknorm_fwd": lambda M, H, G, D, real: norm_fwd(M * max(H, G), D, real, 3),
    "zk_qknorm_bwd": lambda M, H, G, D, real, target:
        norm_bwd(M * max(H, G), D, real, target, 2, 3),
    "zk_rope_table": lambda T, D: run(flat(T * (D // 2))),
    "zk_rope": lambda B, T, H, G, D, sign, real: run(rows(B * T, (H + G) * (D // 2), real)),
    "zk_gelu_fwd": lambda n, kind, real: elements(n, real),
    "zk_gelu_bwd": lambda n, kind, real: elements(n, real),
    "zk_swiglu_fwd": lambda M, F, real: run(rows(M, F, real)),
    "zk_swiglu_bwd": lambda M, F, real: run(rows(M, F, real)),
    "zk_add": lambda n, real: elements(n, real),
    "zk_round": lambda n, real: elements(n, real),
    "zk_cross_entropy": lambda M, V, _, real: run(rows(M, up(V, VOCAB), real, 512)),
    "zk_pick": lambda M, C: run(Grid(1, 1, 1, 256, 0)),
    "zk_loss_sum": lambda M: run(Grid(1, 1, 1, min(1024, up(M)), 0)),
    "zk_linear_fwd": lambda M, N, K, layout: run(space=GEMM),
    "zk_linear_bwd_x": lambda M, N, K, layout: run(space=GEMM),
    "zk_linear_bwd_w": lambda M, N, K, layout, full, carry=0: run(space=GEMM),
    "zk_linear_bwd_b": bias,
    "zk_slice_fwd": lambda M, N, K, *_: run(space=GEMM),
    "zk_slice_bwd_x": lambda M, N, K, *_: run(space=GEMM),
    "zk_slice_bwd_w": lambda M, N, K, *_: run(space=GEMM),
    # a thread takes 4 elements of a sum; a warp takes blocks of 1024 of a flat: 1, 8 or 32 at once
    "zk_push": lambda n: run(flat(n, each=4)),
    "zk_update": lambda n: run(flat(n, each=1024 // 32)),
    "zk_init": lambda n: run(flat(n, each=1024 // 32)),
    "zk_square_sum": lambda n: run(flat(n, 128, each=8 * 1024 // 32)),
    "zk_hash": lambda n: run(flat(n, 128, each=1024), space=16),
    "zk_begin": lambda *_: run(Grid(1, 1, 1, 96, 0)),
    "zk_factor": lambda *_: run(Grid(1, 1, 1, 32, 0)),
    "zk_count": lambda *_: run(Grid(1, 1, 1, 32, 0)),
}


def how(kernel: str, target: str, real: int, numbers: tuple[int, ...]) -> How:
    row = GRIDS[kernel]
    named = {"target": target, "real": real}
    wants = inspect.signature(row).parameters
    return row(*numbers, **{name: x for name, x in named.items() if name in wants})
