"""test_bytes.py -- compares the content that the checker finds in a slot with the memories of all
ranks.

The checker stores a slot's content once for all ranks. Here every rank has bytes of its own, and
the same writes are done one by one. The checker's answer for a place must hold on each rank.
"""

import itertools
import pathlib
import re
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from zg.check import check
from zg.check.memory import Extent, Slot
from zg.plan.mesh import Along, Members, plain
from zg.plan.plan import Step

from tests.check import test_mutants
from tests.lib import mutants

WIDTH, PART = 4, 64  # bytes of an element, and of a rank's smallest part
Bytes = list[object]


class Ranks:
    """A grid of ranks along two axes: the places of each rank, and the groups of the grid."""

    def __init__(self, x: int, y: int) -> None:
        self.places = [*itertools.product(range(x), range(y))]
        every = x * y
        # a group, and the bytes from one of its parts to the next
        self.ways = [
            (Members("x,y", every, (y, 1)), PART),
            (Members("y,x", every, (1, x)), PART),
            *((Members("x", x, (1, 0)), PART * n) for n in {1, y}),
            *((Members("y", y, (0, 1)), PART * n) for n in {1, x}),
        ]

    def place(self, group: Members, rank: int) -> int:
        return dot(group.steps, self.places[rank])


def dot(a: Along, b: Along) -> int:
    return sum(x * y for x, y in zip(a, b, strict=False))


def element(run: Extent, n: int, places: Along, part: int) -> tuple[object, int, int]:
    """Return a byte's content: its array, element, and byte within the element."""
    first = run.first + dot(run.by_rank, places) + part * run.by_part
    return run.array, first + n // run.width, n % run.width


def put(
    memory: Bytes, at: int, size: int, run: Extent, places: Along, part: int = 0
) -> None:
    for n in range(size):
        memory[at + n] = element(run, n, places, part)


def holds(
    memory: Bytes, at: int, size: int, run: Extent, places: Along, part: int = 0
) -> bool:
    return memory[at : at + size] == [
        element(run, n, places, part) for n in range(size)
    ]


@dataclass
class Write:
    how: str  # whole | own | parts
    group: Members
    step: int
    at: int
    size: int
    run: Extent


def write(slot: Slot, memories: list[Bytes], ranks: Ranks, one: Write) -> None:
    """Do a write in the checker's slot and on every rank."""
    at, step, size, run, group = (
        one.at,
        one.step,
        one.size,
        one.run,
        one.group,
    )
    if one.how == "whole":
        slot.write(at, size, run)
    elif one.how == "own":
        slot.write_own(at, step, size, run, group)
    else:
        slot.write_parts(at, step, size, run, group)
    for r, memory in enumerate(memories):
        places, mine = ranks.places[r], ranks.place(group, r)
        if one.how == "whole":
            put(memory, at, size, run, places)
        elif one.how == "own":
            put(memory, at + mine * step, size, run, places)
        else:
            for q in range(group.ranks):
                put(memory, at + q * step, size, run, places, q)


def agree(slot: Slot, memories: list[Bytes], ranks: Ranks, at: int, size: int) -> int:
    """Assert that the slot's answers for a place are right. Return how many answers it gave."""
    said = 0
    whole = slot.read(at, size)
    for r, memory in enumerate(memories):
        assert not whole or holds(memory, at, size, whole, ranks.places[r])
    for group, step in ranks.ways:
        end = at + step * (group.ranks - 1) + size
        # not in the first part of its page
        if (
            at // step % group.ranks
            or at % step + size > step
            or end > len(memories[0])
        ):
            continue
        own = slot.read_own(at, step, size, group)
        parts = slot.read_parts(at, step, size, group)
        said += (own is not None) + (parts is not None)
        for r, memory in enumerate(memories):
            places, mine = ranks.places[r], ranks.place(group, r)
            assert not own or holds(memory, at + mine * step, size, own, places)
            assert not parts or all(
                holds(memory, at + q * step, size, parts, places, q)
                for q in range(group.ranks)
            )
    return said + (whole is not None)


PLACES = (
    st.tuples(st.integers(0, PART // 8), st.integers(1, PART // 8))
    .map(lambda x: (8 * x[0], min(8 * x[1], PART - 8 * x[0])))
    .filter(lambda x: x[1] > 0)
)
MORE = st.integers(0, 4).map(lambda n: n * PART // WIDTH)


@st.composite
def writes(draw: st.DrawFn, ranks: Ranks, size: int) -> Write:
    """Draw a write that mostly continues the runs of other writes."""
    how = draw(st.sampled_from(["whole", "own", "parts"]))
    group, step = draw(st.sampled_from(ranks.ways))
    at, n = draw(PLACES)
    if draw(st.booleans()):
        at, n = 0, step
    page = step * group.ranks
    at += page * draw(st.integers(0, size // page - 1))
    if how == "whole" and draw(st.booleans()):
        at, n = 0, size
    along = group.times(step // WIDTH)
    if draw(st.booleans()):
        along = plain((draw(MORE), draw(MORE)))
    run = Extent(
        draw(st.sampled_from("ab")),
        at // WIDTH if draw(st.booleans()) else 0,
        WIDTH,
    )
    if how == "own":
        run = run._replace(by_rank=along)
    elif how == "parts":
        run = run._replace(by_part=step // WIDTH)
        if draw(st.booleans()):
            run = run._replace(by_rank=group.without(along))
    elif draw(st.booleans()):
        run = run._replace(by_rank=along)
    return Write(how, group, step, at, n, run)


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 2), st.data())
def test_a_slot_says_what_every_rank_holds(
    x: int, y: int, pages: int, data: st.DataObject
) -> None:
    """After writes of whole runs, own parts and all parts of any group, in any order and
    overlapping, the slot's answers hold on every rank."""
    ranks, size = Ranks(x, y), pages * x * y * PART
    slot, memories = Slot(), [[None] * size for _ in range(x * y)]
    for _ in range(data.draw(st.integers(1, 6))):
        write(slot, memories, ranks, data.draw(writes(ranks, size)))
        for at in range(0, size, PART // 2):
            for n in (8, PART, x * PART, y * PART, size):
                if at + n <= size:
                    agree(slot, memories, ranks, at, n)


def row(ranks: int) -> Members:
    """Return the group of all ranks along one axis."""
    return Members("all", ranks, (1,))


@pytest.mark.parametrize("ranks", [1, 2, 5, 16384])
def test_what_a_gather_brings_is_one_run(ranks: int) -> None:
    """Shards gathered in two pieces are one run, but only after the last piece."""
    slot, every = Slot(), row(ranks)
    first = Extent("w", 0, WIDTH, by_part=PART // WIDTH)
    slot.write_parts(0, PART, PART // 2, first, every)
    assert slot.read(0, ranks * PART) is None
    rest = first.after(PART // 2)
    slot.write_parts(PART // 2, PART, PART // 2, rest, every)
    assert slot.read(0, ranks * PART) == Extent("w", 0, WIDTH)
    assert slot.read_own(0, PART, PART, every) == Extent(
        "w", 0, WIDTH, by_rank=(PART // WIDTH,)
    )


def test_what_two_gathers_bring_is_one_run() -> None:
    """Two all-gathers make one run: the first over hosts, of 6 ranks with 2 on each host, brings
    every third pair of shards."""
    slot = Slot()
    between, inside = Members("hosts", 3, (1, 0)), Members("local", 2, (0, 1))
    shard = PART // WIDTH
    far = Extent("w", 0, WIDTH, (0, 3 * shard), shard)
    slot.write_parts(0, PART, PART, far, between)
    assert slot.read(0, 3 * PART) == Extent("w", 0, WIDTH, (0, 3 * shard))
    near = Extent("w", 0, WIDTH, by_part=3 * shard)
    slot.write_parts(0, 3 * PART, 3 * PART, near, inside)
    assert slot.read(0, 6 * PART) == Extent("w", 0, WIDTH)


def test_an_own_part_changes_the_rest_does_not() -> None:
    slot, every, shard = Slot(), row(3), PART // WIDTH
    old, new = Extent("old", 0, WIDTH), Extent("new", 0, WIDTH, (shard,))
    slot.write(0, 3 * PART, old)
    slot.write_own(0, PART, PART, new, every)
    assert slot.read(0, 3 * PART) is None
    assert slot.read_parts(0, PART, PART, every) is None
    assert slot.read_own(0, PART, PART, every) == new
    parts = new._replace(by_rank=(), by_part=shard)
    slot.write_parts(0, PART, PART, parts, every)
    assert slot.read(0, 3 * PART) == Extent("new", 0, WIDTH)


def test_an_element_that_is_cut_is_gone() -> None:
    slot = Slot()
    slot.write(0, 16, Extent("a", 0, WIDTH))
    slot.write(0, 5, Extent("b"))
    assert slot.read(5, 8) is slot.read(8, 8) is None and slot.read(0, 5) == Extent("b")


# ---- the play


def test_checking_knows_no_feature() -> None:
    """The checker's source names no feature: the location and the way of bytes are the plan's
    matter."""
    words = re.compile(
        r"\b(tiles?|shel(f|ves)|ratio|tiers?|stages?|offload\w*|activations?|ring"
        r"|pinned_batch|near)\b",
        re.I,
    )
    folder = pathlib.Path(check.__file__).parent
    for name in (
        "memory",
        "order",
        "play",
        "copies",
        "reductions",
        "own",
        "operands",
        "constants",
        "once",
        "sums",
        "updates",
        "uses",
        "units",
        "states",
        "repeats",
        "step",
    ):
        text = (folder / f"{name}.py").read_text()
        assert [line for line in text.splitlines() if words.search(line)] == [], name


def unmarked(s: Step, cls: str) -> Step:
    """Remove the marks of last uses of a class from a step."""
    return replace(
        s, ins=tuple(replace(r, last=r.last and r.cls != cls) for r in s.ins)
    )


@pytest.mark.parametrize(
    "name,op,broken,said",
    [
        (
            "stage 2",
            "update",
            lambda s: replace(s, outs=(s.outs[0], *s.outs[:0:-1])),
            r"section update, step \d+: main update.embed embed\[0\]: .* holds v of embed\[0\] as step 0 "
            r"left it, .*, not m of embed",
        ),
        (
            "stage 2",
            "bwd",
            lambda s: unmarked(s, "dx"),
            r"is overwritten while it holds dx of head",
        ),
        ("stage 2", "norm", lambda s: None, "norms are not complete"),
        (
            "stage 2",
            "count",
            lambda s: None,
            "holds what is pending of 2 micro-batches of embed.* not the sum of 4",
        ),
        (
            "all in a file",
            "copy",
            lambda s: None,
            r"holds no one array|left it, .*, not p of",
        ),
    ],
)
def test_what_an_error_says(name: str, op: str, broken: object, said: str) -> None:
    """An error names the place, its content and the expected content, for a change in each kind of
    step."""
    p = test_mutants.planned(*test_mutants.PLANS[name])
    for section in p.sections:
        steps = [
            broken(s) if s.op.partition(".")[0] == op else s for s in section.steps
        ]
        p = mutants.changed(p, p.section(section.name), [s for s in steps if s])
    with pytest.raises(check.CheckError, match=said):
        check.play(p, check.functions(p, check.units(p)))


@pytest.mark.parametrize("name", ["begin", "micro_batch", "eval"])
def test_what_is_saved_changes_in_an_update_alone(name: str) -> None:
    """Saved states change only during an update, so all other sections may run beside a save."""
    p = test_mutants.planned(*test_mutants.PLANS["stage 2"])
    again = p.section("init").steps[0]
    section = p.section(name)
    p = mutants.changed(p, section, [*section.steps, again])
    said = rf"^section {name}, .* is written while a checkpoint may read it$"
    with pytest.raises(check.CheckError, match=said):
        check.play(p, check.functions(p, check.units(p)))


@pytest.mark.parametrize("ranks", [1, 2, 3, 64])
def test_ranks_of_any_number(ranks: int) -> None:
    """The checker plays all ranks: a missing step is found with any number of them."""
    p = test_mutants.planned(
        "gpt-tiny",
        "zero.stage=3",
        f"cluster.ranks={ranks}",
        f"train.global_batch={4 * ranks}",
        "train.micro_batch=2",
    )
    check.check(p)
    for section in p.sections:
        n = next(
            (
                n
                for n, s in enumerate(section.steps)
                if s.op in ("gather", "alltoall") or s.op.startswith(("update", "init"))
            ),
            None,
        )
        if n is not None:
            steps = [*section.steps[:n], *section.steps[n + 1 :]]
            assert mutants.refused(mutants.changed(p, section, steps)), (
                section.name,
                n,
            )
