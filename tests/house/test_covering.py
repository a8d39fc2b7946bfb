"""test_covering.py -- covering.py: the rows that a shorter run takes have each choice."""

from collections import Counter
from itertools import combinations, product

import pytest

from tests.lib.covering import covering, spread

AXES = [
    (("a", "b", "c"), (1, 2)),
    (tuple(range(12)), (None, "emulated"), (0, 1, 2)),
    (tuple("abcdefgh"),),
]


def taken(rows: list) -> list[tuple]:
    return [x.values for x in rows if not x.marks]


@pytest.mark.parametrize("axes", AXES, ids=len)
def test_every_row_is_there_once(axes: tuple[tuple, ...]) -> None:
    rows = [x.values for x in covering(*axes)]
    assert len(rows) == len(set(rows)) and set(rows) == {*product(*axes)}
    assert rows == spread(axes)


@pytest.mark.parametrize("axes", AXES, ids=len)
def test_each_choice_is_taken(axes: tuple[tuple, ...]) -> None:
    """The fewest rows have each choice of each axis, as often as any other of it, give or take
    one."""
    few = taken(covering(*axes))
    assert len(few) == max(map(len, axes))
    for at, axis in enumerate(axes):
        found = Counter(row[at] for row in few)
        assert {*found} == {*axis}
        assert max(found.values()) - min(found.values()) <= 1


def test_pairs_are_taken_before_they_are_repeated() -> None:
    """A third of the rows is enough to meet each pair of the choices of three axes."""
    axes = AXES[1]
    few = taken(covering(*axes, budget=36))
    assert len(few) == 36
    for a, b in combinations(range(3), 2):
        assert {(row[a], row[b]) for row in few} == {*product(axes[a], axes[b])}
