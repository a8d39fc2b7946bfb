"""test_size.py -- plan/size.py: arithmetic with Sizes is that of ints, and keeps their names."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from zg.plan.size import Size, pieces
from zg.write.words import in_c

SHARD = Size.of("shard.block", 10 * 1024, "block")
TILE = Size.of("tile.block", 3 * 1024, "block")
NUMBERS = st.integers(-50, 50)
SIZES = st.builds(
    lambda a, b, c, width: (SHARD * a + TILE * b + c).bytes(width),
    NUMBERS,
    NUMBERS,
    NUMBERS,
    st.sampled_from([1, 2, 4]),
)


@given(SIZES, st.one_of(SIZES, NUMBERS), NUMBERS)
def test_as_ints(a: Size, b: int, n: int) -> None:
    """Each operation has the value that it has of plain ints."""
    x, y = int(a), int(b)
    assert (a + b, b + a, a - b, a * n, n * a) == (
        x + y,
        y + x,
        x - y,
        x * n,
        n * x,
    )
    assert (-a, a == x, hash(a), str(a), f"{a}") == (
        -x,
        True,
        hash(x),
        str(x),
        str(x),
    )
    if n:
        assert (a // n, a % n, divmod(a, n)) == (x // n, x % n, divmod(x, n))
    assert a.over(a.width) * a.width == x


@pytest.mark.parametrize("n", [0.5, Fraction(1, 3), 2.0])
def test_fractions(n: float) -> None:
    """A fraction makes a plain number, with nothing lost."""
    x = int(SHARD)
    assert (SHARD * n, n * SHARD, SHARD + n, SHARD - n, SHARD // n) == (
        x * n,
        n * x,
        x + n,
        x - n,
        x // n,
    )


@given(
    st.one_of(SIZES, NUMBERS),
    st.lists(st.tuples(st.sampled_from("ij"), st.one_of(SIZES, NUMBERS))),
)
def test_in_c(a: int, terms: list[tuple[str, int]]) -> None:
    """C's expression has the number's value in each round, whatever is mixed in it."""
    said = in_c(a, terms).replace("INT64_C", "")
    names = {"SHARD_BLOCK": int(SHARD), "TILE_BLOCK": int(TILE)}
    for i, j in ((0, 0), (1, 0), (0, 1), (5, 7)):
        grown = sum(int(by) * (i if name == "i" else j) for name, by in terms)
        assert eval(said, {**names, "i": i, "j": j}) == int(a) + grown


def test_what_c_says() -> None:
    near = Size.of("near.block", 2048, "block")
    far = Size.of("far.block", 8 * 1024, "block")
    (_, one), (at, _), (_, rest) = pieces(far, 3 * 1024, "tile")
    assert in_c(SHARD.bytes(4)) == "4 * SHARD_BLOCK"
    assert in_c(near + at * 2) == "NEAR_BLOCK + 2 * TILE_BLOCK"
    said = in_c((near + one).bytes(4), [("i", one.bytes(4))])
    assert said == "4 * (NEAR_BLOCK + (1 + i) * TILE_BLOCK)"
    assert in_c(rest.bytes(2)) == "2 * (FAR_BLOCK % TILE_BLOCK)"
    assert in_c(Size.none("block")) == "0"
    assert in_c(SHARD + 5) == "SHARD_BLOCK + 5"


@given(st.integers(1, 40), st.integers(1, 40))
def test_pieces(whole: int, most: int) -> None:
    """They follow each other, none is larger than asked, and together they are the whole."""
    cut = pieces(Size.of("shard.x", whole, "x"), most, "gather")
    at = 0
    for offset, n in cut:
        assert offset == at and 0 < n <= most
        at += int(n)
    assert at == whole
