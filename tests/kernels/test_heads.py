"""test_heads.py -- tests the kernels that sort heads by rank against numpy, bit by bit."""

import numpy as np
import pytest

from tests.lib import zk

M, H, G, D = 3, 8, 2, 5
CASES = [(1, 1), (2, 1), (1, 4), (2, 4), (4, 2), (8, 4)]  # ranks, copies


def sorted_heads(x: np.ndarray, ranks: int, copies: int) -> np.ndarray:
    """Return the heads of each rank: [ranks, M, heads of a rank, D]."""
    q, k, v = np.split(x, [H, H + G], axis=1)
    parts = [q, *(np.repeat(y, copies, axis=1) for y in (k, v))]
    each = [np.split(y, ranks, axis=1) for y in parts]
    return np.stack([np.concatenate(some, axis=1) for some in zip(*each, strict=True)])


@pytest.mark.parametrize("ranks,copies", CASES)
def test_cut(ranks: int, copies: int) -> None:
    x = np.random.default_rng(1).normal(size=(M, H + 2 * G, D)).astype(np.float32)
    want = sorted_heads(x, ranks, copies)
    y = np.full(want.shape, np.nan, np.float32)
    zk.Kernels().zk_cut_heads_fwd(y, x, M, H, G, D, ranks, copies)
    assert np.array_equal(y, want)


@pytest.mark.parametrize("ranks,copies", CASES)
def test_gradients_of_copies_are_added_in_order(ranks: int, copies: int) -> None:
    """The gradient of a key or value head is the sum of its copies' gradients, from the first to
    the last in f32."""
    one = np.zeros((M, H + 2 * G, D), np.float32)
    shape = sorted_heads(one, ranks, copies).shape
    dy = np.random.default_rng(2).normal(size=shape).astype(np.float32)
    dy *= np.float32(10) ** np.random.default_rng(3).integers(-4, 5, shape)
    number = np.arange(one.size, dtype=np.float32).reshape(one.shape)
    to = sorted_heads(number, ranks, copies).astype(np.int64)
    want = np.zeros(one.size, np.float32)
    # in order of the copies, which are neighbours within a rank and follow each other over ranks
    for rank in range(ranks):
        for head in range(shape[2]):
            np.add.at(want, to[rank, :, head], dy[rank, :, head])
    dx = np.full(one.shape, np.nan, np.float32)
    zk.Kernels().zk_cut_heads_bwd(dx, dy, M, H, G, D, ranks, copies)
    assert np.array_equal(dx.reshape(-1), want)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_join(ranks: int) -> None:
    """Joined heads lie side by side, and sign -1 is the way back."""
    x = np.random.default_rng(4).normal(size=(ranks, M, H // ranks, D))
    x = x.astype(np.float32)
    y = np.full((M, H, D), np.nan, np.float32)
    zk.Kernels().zk_join_heads(y, x, M, H, D, ranks, 1)
    assert np.array_equal(y, np.concatenate(list(x), axis=1))
    back = np.full(x.shape, np.nan, np.float32)
    zk.Kernels().zk_join_heads(back, y, M, H, D, ranks, -1)
    assert np.array_equal(back, x)
