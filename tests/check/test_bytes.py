"""test_bytes.py -- what the checker says that a slot holds, against the memories of all ranks.

The checker writes a slot down once for all ranks. Here every rank has bytes of its own, and the
same writes are done one by one: what the checker finds in a place must be there, on each of them.
"""

import pathlib
import re
from dataclasses import replace

import mutants
import pytest
import test_mutants
from hypothesis import given
from hypothesis import strategies as st
from zg.check import check
from zg.check.memory import Run, Slot
from zg.plan.plan import Step

WIDTH, PART = 4, 64  # bytes of an element, of a rank's part
Bytes = list[object]


def element(run: Run, n: int, rank: int, part: int) -> tuple[object, int, int]:
    """A byte: of which element, and which of its bytes."""
    first = run.first + rank * run.by_rank + part * run.by_part
    return run.array, first + n // run.width, n % run.width


def put(
    memory: Bytes, at: int, size: int, run: Run, rank: int, part: int = 0
) -> None:
    for n in range(size):
        memory[at + n] = element(run, n, rank, part)


def holds(
    memory: Bytes, at: int, size: int, run: Run, rank: int, part: int = 0
) -> bool:
    return memory[at : at + size] == [
        element(run, n, rank, part) for n in range(size)
    ]


def write(
    slot: Slot, memories: list[Bytes], how: str, at: int, size: int, run: Run
) -> None:
    """In the checker's slot and on every rank."""
    ranks = range(len(memories))
    if how == "whole":
        slot.write(at, size, run)
        for r in ranks:
            put(memories[r], at, size, run, r)
    elif how == "own":
        slot.write_own(at, PART, size, run)
        for r in ranks:
            put(memories[r], at + r * PART, size, run, r)
    else:
        parts = run._replace(by_rank=0, by_part=run.by_rank)
        slot.write_parts(at, PART, size, parts)
        for r in ranks:
            for q in ranks:
                put(memories[r], at + q * PART, size, parts, r, q)


def agree(slot: Slot, memories: list[Bytes], at: int, size: int) -> int:
    """What the slot says of a place is so; how much it says."""
    ranks = range(len(memories))
    said = (
        slot.read(at, size),
        slot.read_own(at, PART, size),
        slot.read_parts(at, PART, size),
    )
    whole, own, parts = said
    assert not whole or all(
        holds(memories[r], at, size, whole, r) for r in ranks
    )
    if (
        at // PART % len(memories) or at % PART + size > PART
    ):  # in the first part of its page
        return sum(x is not None for x in said[:1])
    assert not own or all(
        holds(memories[r], at + r * PART, size, own, r) for r in ranks
    )
    assert not parts or all(
        holds(memories[r], at + q * PART, size, parts, r, q)
        for r in ranks
        for q in ranks
    )
    return sum(x is not None for x in said)


PLACES = (
    st.tuples(st.integers(0, PART // 8), st.integers(1, PART // 8))
    .map(lambda x: (8 * x[0], min(8 * x[1], PART - 8 * x[0])))
    .filter(lambda x: x[1] > 0)
)
RUNS = st.builds(
    lambda array, first, by: Run(array, first, WIDTH, by),
    st.sampled_from("ab"),
    st.integers(0, 4).map(lambda n: 4 * n),
    st.sampled_from([0, PART // WIDTH]),
)


@given(st.integers(1, 4), st.integers(1, 2), st.data())
def test_a_slot_says_what_every_rank_holds(
    ranks: int, pages: int, data: st.DataObject
) -> None:
    """Whole runs, own parts and all parts, over each other in any order."""
    size = pages * ranks * PART
    slot, memories = Slot(ranks), [[None] * size for _ in range(ranks)]
    for _ in range(data.draw(st.integers(1, 6))):
        how, run = (
            data.draw(st.sampled_from(["whole", "own", "parts"])),
            data.draw(RUNS),
        )
        at, n = data.draw(PLACES)
        if how == "whole" and data.draw(st.booleans()):
            at, n = 0, size
        at += data.draw(st.integers(0, pages - 1)) * ranks * PART * (n < size)
        write(slot, memories, how, at, n, run)
    for at in range(0, size, 8):
        for n in (8, PART, size):
            if at + n <= size:
                agree(slot, memories, at, n)


@pytest.mark.parametrize("ranks", [1, 2, 5, 16384])
def test_what_a_gather_brings_is_one_run(ranks: int) -> None:
    """Shards in two pieces: nothing is said of the whole before the last one."""
    slot, first = Slot(ranks), Run("w", 0, WIDTH, by_part=PART // WIDTH)
    slot.write_parts(0, PART, PART // 2, first)
    assert slot.read(0, ranks * PART) is None
    slot.write_parts(PART // 2, PART, PART // 2, first.after(PART // 2))
    assert slot.read(0, ranks * PART) == Run("w", 0, WIDTH)
    assert slot.read_own(0, PART, PART) == Run(
        "w", 0, WIDTH, by_rank=PART // WIDTH
    )


def test_an_own_part_changes_the_rest_does_not() -> None:
    slot, old, new = (
        Slot(3),
        Run("old", 0, WIDTH),
        Run("new", 0, WIDTH, PART // WIDTH),
    )
    slot.write(0, 3 * PART, old)
    slot.write_own(0, PART, PART, new)
    assert slot.read(0, 3 * PART) is slot.read_parts(0, PART, PART) is None
    assert slot.read_own(0, PART, PART) == new
    slot.write_parts(
        0, PART, PART, new._replace(by_rank=0, by_part=PART // WIDTH)
    )
    assert slot.read(0, 3 * PART) == Run("new", 0, WIDTH)


def test_an_element_that_is_cut_is_gone() -> None:
    slot = Slot(2)
    slot.write(0, 16, Run("a", 0, WIDTH))
    slot.write(0, 5, Run("b"))
    assert slot.read(5, 8) is slot.read(8, 8) is None and slot.read(
        0, 5
    ) == Run("b")


# ---- the play


def test_checking_knows_no_feature() -> None:
    """Where bytes lie and how they come there is the plan's matter, not the checker's."""
    words = re.compile(
        r"\b(tiles?|shel(f|ves)|ratio|tiers?|stages?|offload\w*|activations?|ring"
        r"|pinned_batch|near)\b",
        re.I,
    )
    folder = pathlib.Path(check.__file__).parent
    for name in ("memory", "copies", "effects", "units", "step"):
        text = (folder / f"{name}.py").read_text()
        assert [
            line for line in text.splitlines() if words.search(line)
        ] == [], name


def unmarked(s: Step, cls: str) -> Step:
    """nothing of the class dies with it"""
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
def test_what_an_error_says(
    name: str, op: str, broken: object, said: str
) -> None:
    """The place, what it holds and what it should hold, where a step of a sort is changed."""
    p = test_mutants.planned(*test_mutants.PLANS[name])
    for section in p.sections:
        steps = [
            broken(s) if s.op.partition(".")[0] == op else s
            for s in section.steps
        ]
        p = mutants.changed(
            p, p.section(section.name), [s for s in steps if s]
        )
    with pytest.raises(check.CheckError, match=said):
        check.play(p, check.functions(p, check.units(p)))


@pytest.mark.parametrize("name", ["begin", "micro_batch", "eval"])
def test_what_is_saved_changes_in_an_update_alone(name: str) -> None:
    """Beside all other sections it may be read."""
    p = test_mutants.planned(*test_mutants.PLANS["stage 2"])
    again = p.section("init").steps[0]
    section = p.section(name)
    p = mutants.changed(p, section, [*section.steps, again])
    said = rf"^section {name}, .* is written while a checkpoint may read it$"
    with pytest.raises(check.CheckError, match=said):
        check.play(p, check.functions(p, check.units(p)))


@pytest.mark.parametrize("ranks", [1, 2, 3, 64])
def test_ranks_of_any_number(ranks: int) -> None:
    """The play is of all of them; the same step left out is found at each number."""
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
                if s.op in ("gather", "alltoall")
                or s.op.startswith(("update", "init"))
            ),
            None,
        )
        if n is not None:
            steps = [*section.steps[:n], *section.steps[n + 1 :]]
            assert mutants.refused(mutants.changed(p, section, steps)), (
                section.name,
                n,
            )
