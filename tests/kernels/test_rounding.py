"""test_rounding.py -- tests stochastic rounding of moments and parameters stored in bf16, to the
bit.

The kernel stores its own f32 result, rounded up or down by words of Philox; these are computed here
once more, in numpy.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from zg.facts import ops

from tests.kernels import test_optimizer as one
from tests.lib import zk
from tests.lib.chance import philox

Array = np.ndarray
SEED = 0x123456789ABCDEF0
STEP, SECOND = 0xD1342543DE82EF95, 1 << 63  # kernels/update.h


def places() -> tuple[Array, Array]:
    """Return for each element of the flat buffer its index in its tensor and the tensor's key; 0 in
    gaps."""
    elem, key = np.zeros((2, one.FLAT), np.uint64)
    for s in one.SPANS:
        for i in range(s["count"]):
            at = s["at"] + i * s.get("stride", 0)
            elem[at : at + s["elems"]] = np.arange(s["elems"])
            key[at : at + s["elems"]] = s["key"] + i * s.get("key_stride", 0)
    return elem, key


def words(step: int, second: int = 0) -> Array:
    elem, key = places()
    counter = elem // np.uint64(4) | np.uint64(second)
    every = philox(counter, key, (SEED + step * STEP) % 2**64)
    return every[np.arange(one.FLAT), (elem % np.uint64(4)).astype(int)].astype(
        np.uint32
    )


def dithered(x: Array, chance: Array) -> Array:
    u = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((u + (chance & np.uint32(0xFFFF))) >> np.uint32(16)).astype(np.uint16)


def step(
    k: zk.Kernels,
    n: int,
    cuts: list[int],
    name: str,
    moments: int,
    p: Array | None,
    w: Array | None,
    state: dict[str, Array],
    narrow: bool,
) -> None:
    """Do the n-th update of p or w and the states, in place. narrow: gradients have the values of
    bf16, and are stored in it if moments are."""
    r = one.recipe(
        rule=one.RULES.index(name), moments=moments, seed=SEED, rate=one.HELD
    )
    ctl, g = zk.Ctl(step=n - 1, applied=n), one.drawn(n)
    half = narrow and moments == zk.BF16
    if narrow:
        g = zk.to_bf16(g) if half else zk.from_bf16(zk.to_bf16(g))
    k.zk_begin(ctl, np.zeros(zk.SUMS, np.int64), r)
    k.zk_factor(ctl, one.made(1.0, 1.0, 66), r)
    for lo, hi in itertools.pairwise(cuts):
        pieces = [
            None if a is None else a[lo:hi]
            for a in (w, p, state.get("m"), state.get("v"))
        ]
        k.zk_update(
            ctl,
            r,
            *pieces,
            g[lo:hi],
            zk.spans(one.SPANS),
            len(one.SPANS),
            lo,
            hi - lo,
            int(not half),
        )


def first() -> Array:
    p = one.drawn(0, 0) / 32
    p[~one.used()] = 0
    return p


@pytest.mark.parametrize("cuts", one.CUTS[:2], ids=["whole", "pieces"])
@pytest.mark.parametrize("masters", [True, False], ids=["masters", "none"])
@pytest.mark.parametrize("half", [True, False], ids=["bf16", "f32"])
@pytest.mark.parametrize("name", one.RULES)
def test_bits(
    target: str, name: str, half: bool, masters: bool, cuts: list[int]
) -> None:
    """Moments, and parameters without masters, are those of f32 after three steps, rounded by words
    of (seed, step, key, element)."""
    k, inside = zk.Kernels(target, zk.BF16), one.used()
    narrow = {s: np.zeros(one.FLAT, np.uint16) for s in ops.OPTIMIZERS[name]}
    p, w = (first(), None) if masters else (None, zk.to_bf16(first()))
    for n in (1, 2, 3):
        wide = {s: zk.from_bf16(a) for s, a in narrow.items()}
        q = p.copy() if masters else zk.from_bf16(w)
        step(k, n, one.CUTS[0], name, zk.F32, q, None, wide, half)
        step(k, n, cuts, name, zk.BF16, p, w, narrow, half)
        chance = words(n)
        for s, shift in (("m", 0), ("v", 16)):
            if s in narrow:
                want = dithered(wide[s], chance >> np.uint32(shift))
                assert (narrow[s] == want)[inside].all() and not narrow[s][
                    ~inside
                ].any(), s
        if masters:
            assert p.tobytes() == q.tobytes()
        else:
            assert (w == dithered(q, words(n, SECOND)))[inside].all() and not w[
                ~inside
            ].any()


def test_words_differ() -> None:
    """Words differ between steps, between elements, and between moments and parameters."""
    drawn = [words(1), words(2), words(1, SECOND)]
    inside = one.used()
    for n, a in enumerate(drawn):
        assert len(np.unique(a[inside])) > 0.999 * inside.sum()
        for b in drawn[:n]:
            assert np.mean(a[inside] == b[inside]) < 0.001


def test_what_is_not_finite_stays(target: str) -> None:
    """Rounding makes no infinite moment NaN, and no NaN finite."""
    k, r = (
        zk.Kernels(target, zk.BF16),
        one.recipe(moments=zk.BF16, rule=one.RULES.index("Adagrad")),
    )
    bad = np.array([np.inf, np.nan, 3e38, 1] * 75, np.float32)
    v, p, g = (
        zk.to_bf16(bad),
        np.zeros(300, np.float32),
        np.zeros(300, np.float32),
    )
    # A GPU's NaN: all bits
    g[3::4] = np.array(0x7FFFFFFF, np.uint32).view(np.float32)
    bad[3::4] = np.nan
    span = zk.spans([dict(at=0, elems=300, count=1, key=1)])
    k.zk_update(zk.Ctl(step=1, factor=1), r, None, p, None, v, g, span, 1, 0, 300, 1)
    assert np.array_equal(
        zk.from_bf16(v), zk.from_bf16(zk.to_bf16(bad)), equal_nan=True
    )


def test_small_steps_add_up(target: str) -> None:
    """Small steps add up in a mean of squares with steps of a tenth of bf16's resolution.

    Rounded to nearest it would stay as it is. Stochastically it goes where f32 goes: a rounding has
    the mean 0 and is off by at most an ulp, 2^-7 of v, so after t steps the mean over n elements is
    off by less than six standard deviations, each at most 2^-7 v sqrt(t / n).
    """
    k, n, steps = zk.Kernels(target, zk.BF16), 4096, 40
    r = one.recipe(
        moments=zk.BF16,
        seed=SEED,
        rule=one.RULES.index("AdamW"),
        beta2=1 - 2**-10,
    )
    span = zk.spans([dict(at=0, elems=n, count=1, key=9)])
    v, g = zk.to_bf16(np.ones(n, np.float32)), np.full(n, 2.0, np.float32)
    m, p, want = np.zeros(n, np.uint16), np.zeros(n, np.float32), 1.0
    for t in range(1, steps + 1):
        k.zk_update(
            zk.Ctl(step=t, factor=1, bias1=1, bias2=1),
            r,
            None,
            p,
            m,
            v,
            g,
            span,
            1,
            0,
            n,
            1,
        )
        want = want * (1 - 2**-10) + 4 * 2**-10
    found = zk.from_bf16(v).astype(float)
    assert (
        abs(found.mean() - want)
        < 6 * 2**-7 * want * (steps / n) ** 0.5
        < 0.1 * (want - 1)
    )
    assert len(np.unique(found)) > 4
