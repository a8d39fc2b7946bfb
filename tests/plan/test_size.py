"""test_size.py -- plan/size.py: arithmetic with Sizes is that of ints, and keeps their names."""

from hypothesis import given
from hypothesis import strategies as st
from zg.plan.size import Size, divided, minus, pieces, plus, times
from zg.write.words import in_c

SHARD = Size.of("shard.block", 10 * 1024, "block")
TILE = Size.of("tile.block", 3 * 1024, "block")
NUMBERS = st.integers(-50, 50)


def size(a: int, b: int, c: int, width: int) -> Size:
    return plus(plus(SHARD.many(a), TILE.many(b)), c).bytes(width)


SIZES = st.builds(size, NUMBERS, NUMBERS, NUMBERS, st.sampled_from([1, 2, 4]))
ANY = st.one_of(SIZES, NUMBERS)


@given(ANY, ANY, NUMBERS)
def test_values(a: int, b: int, n: int) -> None:
    """Each function has the value that ints have; operators make plain ints."""
    x, y = int(a), int(b)
    assert (plus(a, b), minus(a, b)) == (x + y, x - y)
    assert (times(a, n), a * n, a + b) == (x * n, x * n, x + y)
    assert type(SHARD + 1) is type(SHARD * 2) is int
    assert (hash(a), str(a), f"{a}") == (hash(x), str(x), str(x))
    if n:
        assert divided(a, n) == x // n


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
    assert in_c(plus(near, at.many(2))) == "NEAR_BLOCK + 2 * TILE_BLOCK"
    said = in_c(plus(near, one).bytes(4), [("i", one.bytes(4))])
    assert said == "4 * (NEAR_BLOCK + (1 + i) * TILE_BLOCK)"
    assert in_c(rest.bytes(2)) == "2 * (FAR_BLOCK % TILE_BLOCK)"
    assert in_c(Size.none("block")) == "0"
    assert in_c(plus(SHARD, 5)) == "SHARD_BLOCK + 5"


@given(st.integers(1, 40), st.integers(1, 40))
def test_pieces(whole: int, most: int) -> None:
    """They follow each other, none is larger than asked, and together they are the whole."""
    cut = pieces(Size.of("shard.x", whole, "x"), most, "gather")
    at = 0
    for offset, n in cut:
        assert offset == at and 0 < n <= most
        at += int(n)
    assert at == whole
