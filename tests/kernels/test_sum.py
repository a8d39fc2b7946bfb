"""test_sum.py -- tests gradient sums: the canonical tree bit for bit, exact squares and losses.

Sources lie evenly spaced, as a GPU needs them.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import math
import re
from fractions import Fraction

import numpy as np
import pytest

from tests.lib import zk

ALL = 1 << 62  # leaves of a block, which is then one tree
SOURCE = (zk.ROOT / "kernels/cpu/sum.c").read_text()
STREAMED = 1 << int(re.search(r"STREAMED = 1 << (\d+)", SOURCE)[1])  # elements
BIAS = 448  # limbs.h: bit 0 of limb 0 weighs 2**-448


def tree(leaves: list[np.ndarray]) -> np.ndarray:
    """Return the canonical tree T(0, n), in f32."""
    if len(leaves) == 1:
        return leaves[0].astype(np.float32)
    p = 1 << (len(leaves) - 1).bit_length() - 1
    return tree(leaves[:p]) + tree(leaves[p:])


def blocks(leaves: list[np.ndarray], block: int) -> np.ndarray:
    """Return the trees of `block` consecutive leaves, added in order."""
    sums = [tree(leaves[at : at + block]) for at in range(0, len(leaves), block)]
    return functools.reduce(np.add, sums)


def spread(rng: np.random.Generator, n: int) -> np.ndarray:
    """Return numbers of both signs over six decades, so that another order of additions shows."""
    return (rng.normal(size=n) * 10 ** rng.uniform(-3, 3, n)).astype(np.float32)


def mask_of(cuts: list[int], total: int, block: int) -> int:
    """Return the levels of nodes that are ever pending; that of whole blocks is the highest."""
    mask = 0
    for lo in cuts:
        whole = block if lo >= block else 0
        mask |= whole | lo % block if lo < total else 0
    return mask


def off_line(n: int, shift: int) -> np.ndarray:
    """Return NaN [n] that starts `shift` elements after the start of a cache line."""
    room = np.full(n + 32, np.nan, np.float32)
    at = -room.ctypes.data % 64 // 4 + shift
    return room[at : at + n]


def push(
    k: zk.Kernels,
    leaves: list[np.ndarray],
    cuts: list[int],
    full: int,
    block: int = ALL,
    inplace: int | None = None,
    pad: int = 5,
    shift: int = 0,
) -> np.ndarray:
    """Push leaves in the batches that end at `cuts`. Return the whole sum.

    pad: elements between the end of a leaf or node and the next; shift: elements from the start of
    a cache line to the first node; inplace: the leaf of the first batch that lies on the first
    node.
    """
    n, total, mask = (
        len(leaves[0]),
        len(leaves),
        mask_of(cuts, len(leaves), block),
    )
    stride, buffers = n + pad, max(1, bin(mask).count("1"))
    room = off_line((buffers + 2 * total) * stride, shift).reshape(-1, stride)
    first, there = (0, buffers) if inplace is None else (inplace, 0)
    node = room[first : first + buffers]
    lo, ctl = 0, zk.Ctl()
    for hi in cuts:
        given = room[there:].view(leaves[0].dtype)
        step, there = given.shape[1] * given.itemsize, buffers + total
        for i, leaf in enumerate(leaves[lo:hi]):
            given[i, :n] = leaf
        pointers = (ctypes.c_void_p * (hi - lo))(
            *[given.ctypes.data + i * step for i in range(hi - lo)]
        )
        k.zk_push(
            node,
            stride,
            pointers,
            hi - lo,
            full,
            n,
            ctl if lo else None,
            total,
            mask,
            block,
        )
        k.zk_count(ctl, hi - lo)
        lo = hi
    assert np.isnan(node[:, n:]).all()
    return node[0, :n]


def same(a: np.ndarray, b: np.ndarray) -> bool:
    return a.tobytes() == b.tobytes()


@pytest.mark.parametrize("n,pad", [(37, 5), (36, 4)])
@pytest.mark.parametrize("W", [1, 2, 3, 4, 8, 9])
def test_tree_in_batches(kernels: zk.Kernels, W: int, n: int, pad: int) -> None:
    rng = np.random.default_rng(W)
    for total in [t for t in range(1, 41) if t % W == 0]:
        leaves = [spread(rng, n) for _ in range(total)]
        got = push(kernels, leaves, list(range(W, total + 1, W)), 1, pad=pad)
        assert same(got, tree(leaves)), (W, total)


def test_a_tree_of_many_ranks(kernels: zk.Kernels) -> None:
    leaves = [spread(np.random.default_rng(i), 5) for i in range(500)]
    for cuts in ([500], [250, 500], [125, 250, 375, 500]):
        assert same(push(kernels, leaves, cuts, 1), tree(leaves))


def test_tree_in_any_batches(kernels: zk.Kernels) -> None:
    rng = np.random.default_rng(7)
    for total in range(1, 41):
        leaves = [spread(rng, 19) for _ in range(total)]
        for _ in range(4):
            cuts = sorted(
                {
                    total,
                    *rng.integers(1, total + 1, rng.integers(0, 6)).tolist(),
                }
            )
            assert same(push(kernels, leaves, cuts, 1), tree(leaves)), (
                total,
                cuts,
            )


def test_the_order_shows() -> None:
    """Leaves added one after the other differ from the tree, so the tests above can fail (a
    control)."""
    leaves = [spread(np.random.default_rng(3), 1000) for _ in range(8)]
    row = leaves[0]
    for leaf in leaves[1:]:
        row = row + leaf
    assert not same(row, tree(leaves))


@pytest.mark.parametrize("block", [1, 2, 4, 8, 16, 32])
def test_blocks_in_any_batches(kernels: zk.Kernels, block: int) -> None:
    """Blocks' trees are added in order, wherever batches end; a block of 1 is a plain fold."""
    rng = np.random.default_rng(block)
    for total in (1, 7, 16, 17, 31, 64, 77):
        leaves = [spread(rng, 21) for _ in range(total)]
        want = blocks(leaves, block)
        for W in (1, 3, 8, total):
            whole = list(range(W, total, W)) + [total]
            drawn = sorted({total, *rng.integers(1, total + 1, 5).tolist()})
            for cuts, pad in ((whole, 5), (drawn, 3)):
                assert same(push(kernels, leaves, cuts, 1, block, pad=pad), want), (
                    total,
                    cuts,
                )


@pytest.mark.parametrize("block", [1, 4, 16])
def test_blocks_of_more_ranks_than_a_tree_may_have(
    kernels: zk.Kernels, block: int
) -> None:
    """A GPU's tree has up to 4096 leaves of one push; a sum of blocks has any number."""
    leaves = [spread(np.random.default_rng(i), 3) for i in range(4200)]
    assert same(push(kernels, leaves, [4200], 1, block), blocks(leaves, block))


def test_blocks_round_in_another_way() -> None:
    """The rules that the test above compares differ in bits from a number of leaves on (a control):
    three blocks' trees are those of one tree."""
    leaves = [spread(np.random.default_rng(i), 1000) for i in range(112)]
    assert (
        len({blocks(leaves, block).tobytes() for block in (1, 2, 4, 8, 16, 32, ALL)})
        == 7
    )
    assert same(blocks(leaves, ALL), tree(leaves))
    assert all(same(blocks(leaves[:n], 16), tree(leaves[:n])) for n in (16, 31, 48))


def test_own_blocks_then_ranks(kernels: zk.Kernels) -> None:
    """Sums of 4 leaves on each of 12 ranks, pushed as leaves of blocks of 4, are blocks of 16."""
    leaves = [spread(np.random.default_rng(6), 100) for _ in range(48)]
    parts = [
        push(kernels, leaves[4 * r : 4 * r + 4], [1, 2, 3, 4], 1, 16).copy()
        for r in range(12)
    ]
    assert same(push(kernels, parts, [12], 1, 4), blocks(leaves, 16))


@pytest.mark.parametrize("n", [1, 16, 1023, 1024, 1025, 9000])
@pytest.mark.parametrize("total", [1, 2, 3, 5, 8])
def test_sizes_and_sources_in_place(kernels: zk.Kernels, total: int, n: int) -> None:
    leaves = [spread(np.random.default_rng(n + r), n) for r in range(total)]
    for i in range(total):
        got = push(kernels, leaves, [total], 1, inplace=i)
        assert same(got, tree(leaves)), i


def test_sources_in_place_before_others(kernels: zk.Kernels) -> None:
    leaves = [spread(np.random.default_rng(r), 9000) for r in range(8)]
    for cuts in ([1, 8], [2, 8], [3, 8], [4, 5, 8]):
        for i in range(cuts[0]):
            got = push(kernels, leaves, cuts, 1, inplace=i)
            assert same(got, tree(leaves)), (cuts, i)


@pytest.mark.parametrize("pad,shift", [(11, 0), (11, 1), (10, 0)])
def test_nodes_that_are_streamed(isa: str, pad: int, shift: int) -> None:
    """Nodes of whole cache lines are written with non-temporal stores, others are not, and both are
    right."""
    k, rng = zk.Kernels(isa), np.random.default_rng(pad + shift)
    leaves = [spread(rng, STREAMED + 5) for _ in range(8)]
    for total, cuts, block in (
        (7, [7], ALL),
        (7, [2, 4, 7], ALL),
        (7, [1, 2, 3, 7], 2),
        (8, [2, 4, 8], ALL),
    ):
        got = push(k, leaves[:total], cuts, 1, block, pad=pad, shift=shift)
        assert same(got, blocks(leaves[:total], block)), (cuts, block)
    for i in (0, 6):
        got = push(k, leaves[:7], [7], 1, inplace=i, pad=pad, shift=shift)
        assert same(got, tree(leaves[:7])), i


def test_local_sums_then_ranks(kernels: zk.Kernels) -> None:
    """Trees of 4 leaves on each of 3 ranks, then a tree over ranks, are the tree over all 12."""
    leaves = [spread(np.random.default_rng(5), 100) for _ in range(12)]
    parts = [
        push(kernels, leaves[4 * r : 4 * r + 4], [1, 2, 3, 4], 1).copy()
        for r in range(3)
    ]
    assert same(push(kernels, parts, [3], 1), tree(leaves))


@pytest.mark.parametrize("n,pad", [(300, 5), (300, 4), (STREAMED + 5, 11)])
@pytest.mark.parametrize("dtype", [zk.BF16, zk.F16])
def test_leaves_of_halves(target: str, dtype: int, n: int, pad: int) -> None:
    leaves = [zk.store(spread(np.random.default_rng(r), n), dtype) for r in range(6)]
    want = tree([zk.load(leaf).astype(np.float32) for leaf in leaves])
    k = zk.Kernels(target, dtype)
    assert same(push(k, leaves, [2, 4, 6], 0, pad=pad), want)


# ---- exact sums


def exact(limbs: np.ndarray) -> Fraction:
    return sum(int(x) * Fraction(2) ** (32 * i - BIAS) for i, x in enumerate(limbs))


def block_sum(g: np.ndarray) -> float:
    """Return the squares of a block in f64: element i goes to lane i % 16, and lanes are folded 8,
    4, 2, 1."""
    lane = np.zeros(16)
    for row in np.pad(g.astype(np.float64) ** 2, (0, -len(g) % 16)).reshape(-1, 16):
        lane = lane + row
    for w in (8, 4, 2, 1):
        lane = lane[:w] + lane[w : 2 * w]
    return float(lane[0])


def squares(k: zk.Kernels, g: np.ndarray, spans: list, cuts: list[int]) -> np.ndarray:
    sums = np.zeros(zk.SUMS, np.int64)
    table = zk.spans(spans)
    for lo, hi in itertools.pairwise(cuts):
        k.zk_square_sum(sums, g[lo:hi], table, len(spans), lo, hi - lo, 1)
    return sums


SPANS = [
    dict(at=0, elems=1500, count=3, stride=3072),
    dict(at=2048, elems=7, count=3, stride=3072),
    dict(at=9216, elems=5120, count=1, stride=0),
]
FLAT = 9216 + 6144


@pytest.mark.parametrize("dtype", [zk.BF16, zk.F16], ids=["bf16", "f16"])
def test_squares_of_halves(target: str, dtype: int) -> None:
    """Squares of a tensor in half precision are those of the same numbers in f32, with any number
    of elements. Numbers that are not finite are counted."""
    k = zk.Kernels(target, dtype)

    def summed(x: np.ndarray, n: int, full: int) -> np.ndarray:
        sums, table = (
            np.zeros(zk.SUMS, np.int64),
            zk.spans([dict(at=0, elems=n, count=1)]),
        )
        k.zk_square_sum(sums, x, table, 1, 0, len(x), full)
        return sums

    for n in (1, 7, 8, 9, 15, 16, 17, 31, 33, 1000, 1023, 1024, 1025, 2047):
        x = np.full(-(-n // 1024) * 1024, np.nan)
        x[:n] = np.random.default_rng(n).normal(size=n)
        half = zk.store(x, dtype)
        found = summed(half, n, 0)
        assert (found == summed(zk.load(half).astype(np.float32), n, 1)).all()
        assert found.any() and not found[zk.NONFINITE]
        for last in (np.inf, np.nan):
            x[n - 1] = last
            assert summed(zk.store(x, dtype), n, 0)[zk.NONFINITE] == 1


def test_squares_are_exact(kernels: zk.Kernels) -> None:
    rng = np.random.default_rng(8)
    g = (rng.normal(size=FLAT) * 10.0 ** rng.uniform(-30, 18, FLAT)).astype(np.float32)
    g[5] = 2**-149  # whose square has the lowest bit of all
    want, blocks = Fraction(0), 0
    used = np.zeros(FLAT, bool)
    for s in SPANS:
        for i in range(s["count"]):
            at = s["at"] + i * s["stride"]
            used[at : at + s["elems"]] = True
            for b in range(0, s["elems"], 1024):
                want += Fraction(block_sum(g[at + b : at + min(b + 1024, s["elems"])]))
                blocks += 1
    g[~used] = np.nan  # gaps between tensors are never read
    whole = squares(kernels, g, SPANS, [0, FLAT])
    assert exact(whole[:28]) == want and blocks == 14 and whole[zk.NONFINITE] == 0
    for cuts in (
        [0, 1024, FLAT],
        list(range(0, FLAT + 1, 3072)),
        [0, 4096, 5120, 10240, FLAT],
    ):
        assert np.array_equal(exact(squares(kernels, g, SPANS, cuts)[:28]), want)


def test_squares_at_the_ends_of_f32(kernels: zk.Kernels) -> None:
    g = np.zeros(2048, np.float32)
    g[:1024] = np.finfo(np.float32).max
    g[1024:] = 2**-149
    sums = squares(kernels, g, [dict(at=0, elems=2048, count=1, stride=0)], [0, 2048])
    assert exact(sums[:28]) == Fraction(block_sum(g[:1024])) + Fraction(
        block_sum(g[1024:])
    )
    assert sums[zk.NONFINITE] == 0


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_a_bad_block_is_counted_and_adds_nothing(
    kernels: zk.Kernels, bad: float
) -> None:
    g = np.ones(3072, np.float32)
    g[1500] = bad
    sums = squares(kernels, g, [dict(at=0, elems=3072, count=1, stride=0)], [0, 3072])
    assert sums[zk.NONFINITE] == 1 and exact(sums[:28]) == 2048


def test_losses_are_exact_sums(kernels: zk.Kernels) -> None:
    """Losses are exact sums of micro-batches. Inside one they are added in f64, on a CPU in order:
    33 positive numbers err by at most 32 half ulps of the sum, however they are added."""
    rng = np.random.default_rng(9)
    sums, want, true, valid = (
        np.zeros(zk.SUMS, np.int64),
        Fraction(0),
        Fraction(0),
        0,
    )
    for _ in range(50):
        target = rng.integers(-1, 5, 33).astype(np.int32)
        loss = (rng.exponential(size=33) * 10.0 ** rng.uniform(-40, 5, 33)).astype(
            np.float32
        )
        loss[target < 0] = 0
        kernels.zk_loss_sum(sums, loss, target, 33)
        total = 0.0
        for x in loss:
            total += float(x)
        want += Fraction(total)
        true += sum(map(Fraction, loss.tolist()))
        valid += int((target >= 0).sum())
    found = exact(sums[32:60])
    assert abs(found - true) <= 32 * true / 2**53 and sums[zk.VALID] == valid
    assert found == want or kernels.isa == zk.EMULATED
    mean, count = np.zeros(1), np.zeros(1)
    kernels.zk_mean(sums, mean, count)
    assert count[0] == valid
    assert mean[0] == float(found) / valid  # float() of a Fraction rounds once


def test_means_of_micro_batches(kernels: zk.Kernels) -> None:
    """The mean of each micro-batch is its sum over its own valid tokens, in f64, and the mean of
    several is over their number, with those that have none."""
    rng = np.random.default_rng(11)
    sums, want, valid, mean, count = (
        np.zeros(zk.SUMS, np.int64),
        Fraction(0),
        0,
        np.zeros(1),
        np.zeros(1),
    )
    for n in range(20):
        target = rng.integers(-1, 2, 33).astype(np.int32)
        if n % 5 == 0:
            target[:] = -1
        loss = np.where(target < 0, 0, rng.exponential(size=33)).astype(np.float32)
        one = np.zeros(zk.SUMS, np.int64)
        kernels.zk_loss_sum(one, loss, target, 33)
        kernels.zk_loss_mean(sums, loss, target, target, 33, 33)
        here = int((target >= 0).sum())
        valid += here
        want += Fraction(float(exact(one[32:60])) / max(here, 1))
        assert sums[zk.MEANS] == n + 1 and one[zk.MEANS] == 0
        assert exact(sums[32:60]) == want and sums[zk.VALID] == valid
        kernels.zk_mean(sums, mean, count)
        assert count[0] == valid and mean[0] == float(want) / (n + 1)
    bad = np.array([1, np.inf], np.float32)
    every = np.zeros(2, np.int32)
    kernels.zk_loss_mean(sums, bad, every, every, 2, 2)
    kernels.zk_mean(sums, mean, count)
    assert math.isnan(mean[0])


def test_means_of_blocks(kernels: zk.Kernels) -> None:
    """The blocks of a micro-batch add values whose mean is that over its valid tokens, up to a few
    roundings of double precision."""
    rng, sums = np.random.default_rng(13), np.zeros(zk.SUMS, np.int64)
    n, M = 4, 33
    target = rng.integers(-1, 2, n * M).astype(np.int32)
    loss = np.where(target < 0, 0, rng.exponential(size=n * M)).astype(np.float32)
    for block in range(n):
        own = slice(block * M, (block + 1) * M)
        kernels.zk_loss_mean(sums, loss[own], target[own], target, M, n * M)
    mean, count = np.zeros(1), np.zeros(1)
    kernels.zk_mean(sums, mean, count)
    valid = int((target >= 0).sum())
    assert count[0] == valid
    assert abs(mean[0] - loss.sum(dtype=np.float64) / valid) < 1e-14 * mean[0]


@pytest.mark.parametrize("M", [1, 33, 3000])
def test_the_factor_of_a_micro_batch(kernels: zk.Kernels, M: int) -> None:
    rng, factor = np.random.default_rng(12), np.full(1, np.nan)
    for valid in {0, 1, M // 3, M}:
        target = np.full(M, -1, np.int32)
        target[rng.permutation(M)[:valid]] = rng.integers(0, 9, valid)
        for scale in (None, np.array([2.0**16])):
            kernels.zk_loss_factor(factor, target, scale, M)
            times = 1 if scale is None else scale[0]
            assert factor[0] == (M / valid * times if valid else 0)


def test_the_loss_over_its_own_targets(kernels: zk.Kernels) -> None:
    """A loss has the gradient of the mean over the valid rows by its factor: that of these rows
    alone, up to three roundings."""
    M, V = 24, 40
    target = np.arange(M, dtype=np.int32) - 7
    x, factor = drawn_logits(M, V), np.zeros(1)
    kernels.zk_loss_factor(factor, target, None, M)
    loss, d = np.empty(M, np.float32), np.empty((M, V), np.float32)
    kernels.zk_cross_entropy(loss, d, x, target, factor, M, V, M)
    few = np.empty(17, np.float32), np.empty((17, V), np.float32)
    kernels.zk_cross_entropy(*few, x[7:], target[7:], None, 17, V, 17)
    assert not d[:7].any()
    np.testing.assert_allclose(d[7:], few[1], rtol=4 * 2.0**-24, atol=0)


def drawn_logits(M: int, V: int) -> np.ndarray:
    return np.random.default_rng(13).standard_normal((M, V)).astype(np.float32)


def test_mean_of_nothing_and_of_a_bad_loss(kernels: zk.Kernels) -> None:
    sums, mean, count = np.zeros(zk.SUMS, np.int64), np.ones(1), np.ones(1)
    kernels.zk_mean(sums, mean, count)
    assert mean[0] == 0 and count[0] == 0
    kernels.zk_loss_sum(
        sums, np.array([1, np.inf], np.float32), np.zeros(2, np.int32), 2
    )
    kernels.zk_mean(sums, mean, count)
    assert math.isnan(mean[0]) and count[0] == 2


def test_a_sum_rounds_to_nearest_even(kernels: zk.Kernels) -> None:
    """A sum rounds to nearest even: the f64 of the limbs equals exact fractions, with ties, long
    carries and far sticky bits."""
    rng = np.random.default_rng(10)
    mean, count = np.zeros(1), np.zeros(1)
    one, half = 1 << 400, 1 << 347
    cases = [one + half, one + 3 * half, one + half + 1, (1 << 700) - 1, 1, 3]
    for _ in range(300):
        head, shift, tail = (int(rng.integers(0, most)) for most in (1 << 62, 700, 9))
        cases.append(head << shift | tail)
    for x in cases:
        sums = np.zeros(zk.SUMS, np.int64)
        digits = [x >> 32 * i & 0xFFFFFFFF for i in range(28)]
        sums[32:60] = digits
        if digits[5]:  # a carry that waits in limb 4
            sums[32 + 5] -= 1
            sums[32 + 4] += 1 << 32
        sums[zk.VALID] = 1
        kernels.zk_mean(sums, mean, count)
        assert mean[0] == float(x * Fraction(2) ** -BIAS), hex(x)


@pytest.mark.parametrize("tile", [0, 1, 7])
@pytest.mark.parametrize("n,pad", [(50001, 5), (STREAMED + 5, 11)])
def test_objects_compilers_threads_and_tiles_change_no_bit(
    tile: int, n: int, pad: int
) -> None:
    rng, found = np.random.default_rng(11), set()
    leaves = [spread(rng, n) for _ in range(6)]
    g = spread(rng, 1 << 18)
    spans = [dict(at=0, elems=(1 << 18) - 100, count=1, stride=0)]
    for isa, compiler, threads in zk.variants():
        k = zk.Kernels(isa, zk.F32, threads, compiler, tile=(tile, 0, 0))
        sums = squares(k, g, spans, [0, 1 << 18])
        got = push(k, leaves, [3, 6], 1, pad=pad)
        found.add((got.tobytes(), sums.tobytes()))
    assert found == {(tree(leaves).tobytes(), sums.tobytes())}
