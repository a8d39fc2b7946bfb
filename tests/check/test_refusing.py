"""test_refusing.py -- tests that broken plans of any kind are refused in the checker's own words.

A text is a plan or a PlanError; a plan passes or is a CheckError. Golden plans are changed at
random, from a seed: numbers, names, words and lines of their texts, and fields of their records.
"""

import dataclasses
import pathlib
import random
import re
from collections.abc import Callable

import pytest
from zg.check import check, updates
from zg.facts.grids import Grid
from zg.plan.plan import Int, Plan, Ref, Step
from zg.plan.text import PlanError, parse

from tests.check import test_mutants
from tests.lib import mutants
from tests.lib.plans import planned

GOLDEN = sorted((pathlib.Path(__file__).resolve().parents[1] / "golden").glob("*.plan"))
TEXTS = [path.read_text() for path in GOLDEN]
NUMBER, WORD = (
    re.compile(r"(?<![\w.])-?\d+(\.\d+)?"),
    re.compile(r"[A-Za-z_][\w.]*"),
)
NUMBERS = [
    "0",
    "1",
    "-1",
    "7",
    "4096",
    "1000000000",
    "18446744073709551616",
    "1e400",
    "nan",
]
NAMES = [
    "",
    "x",
    "block",
    "persistent",
    "param.persistent",
    "fwd.block",
    "main",
    "-",
    "a[0]",
    "b[x]",
    "c[",
    "+",
    "w+x",
    "c",
    "&",
    "tmp+64",
    "l*3",
    "embed[0]",
]


def swapped(items: list, rnd: random.Random) -> list:
    i, j = rnd.randrange(len(items)), rnd.randrange(len(items))
    items[i], items[j] = items[j], items[i]
    return items


def of_text(text: str, rnd: random.Random) -> str:
    """Return a text with one thing changed in one line, or with lines reordered, dropped or
    repeated."""
    lines = text.split("\n")[:-1]
    n = rnd.randrange(len(lines))
    kind = rnd.choice(["number", "name", "word", "gone", "twice", "swapped"])
    pattern = {"number": NUMBER, "name": WORD}.get(kind)
    found = list(pattern.finditer(lines[n])) if pattern else []
    if found:
        old = rnd.choice(found)
        new = (
            rnd.choice(NUMBERS) if kind == "number" else rnd.choice(WORD.findall(text))
        )
        lines[n] = lines[n][: old.start()] + new + lines[n][old.end() :]
    elif kind == "word":
        words = lines[n].split(" ")
        words[rnd.randrange(len(words))] = "-"
        lines[n] = " ".join(words)
    elif kind == "swapped":
        swapped(lines, rnd)
    else:
        lines[n : n + 1] = [lines[n]] * (2 if kind == "twice" else 0)
    return "\n".join(lines) + "\n"


def of_value(value: object, rnd: random.Random) -> object:
    """Return a value with one change: somewhere inside a record or list, or to a number or name."""
    if isinstance(value, int):
        return rnd.choice(
            [0, 1, -1, value + 1, value - 1, value * 2, 2**31, 2**63, 10**20]
        )
    if isinstance(value, float):
        return rnd.choice([0.0, -1.0, float("nan"), float("inf"), 1e300])
    if isinstance(value, str):
        return rnd.choice([*NAMES, value + "x", value[:-1], value.replace("0", "1")])
    if dataclasses.is_dataclass(value):
        name = rnd.choice(dataclasses.fields(value)).name
        return dataclasses.replace(value, **{name: of_value(getattr(value, name), rnd)})
    items = list(value)
    if not items:
        return value
    n, kind = (
        rnd.randrange(len(items)),
        rnd.choice(["gone", "twice", "swapped", *["below"] * 5]),
    )
    if kind == "below":
        items[n] = of_value(items[n], rnd)
    elif kind == "swapped":
        swapped(items, rnd)
    else:
        items[n : n + 1] = [items[n]] * (2 if kind == "twice" else 0)
    return tuple(items)


def outcome(p: Plan) -> str:
    """Return '' if a plan passes, else the message of its CheckError. Other exceptions
    propagate."""
    try:
        check.check(p)
    except check.CheckError as e:
        assert str(e)
        return str(e)
    return ""


@pytest.mark.slow
def test_texts() -> None:
    rnd, kinds = (
        random.Random(1),
        {"none": 0, "refused": 0, "lacks": 0, "passes": 0},
    )
    for _ in range(400):
        try:
            p = parse(of_text(rnd.choice(TEXTS), rnd))
        except PlanError as e:
            assert re.match(r"line \d+: |no head or no recipe$", str(e))
            kinds["none"] += 1
            continue
        said = outcome(p)
        kinds["lacks" if "lacks" in said else "refused" if said else "passes"] += 1
    assert (
        min(kinds["none"], kinds["refused"]) > 50 and kinds["lacks"] and kinds["passes"]
    ), kinds


@pytest.mark.slow
def test_records() -> None:
    rnd, plans = random.Random(1), [parse(text) for text in TEXTS]
    said = [outcome(of_value(rnd.choice(plans), rnd)) for _ in range(400)]
    assert any("lacks" in s for s in said) and sum(not s for s in said) < 250


def without(part: str, name: str) -> Callable[[Plan], Plan]:
    return lambda p: dataclasses.replace(
        p, **{part: tuple(x for x in getattr(p, part) if x.name != name)}
    )


@pytest.mark.parametrize(
    "broken,said",
    [
        (without("classes", "tokens"), "classes: .*KeyError: 'tokens'"),
        (without("classes", "param.block"), "there is no class param.block"),
        (
            without("sections", "micro_batch"),
            "class inbox is in the device arena",
        ),
        (without("flats", "block"), "there is no flat block"),
        (without("fns", "fwd.block"), "launches are not those of calls"),
        (without("fns", "count"), "launches are not those of calls"),
        (lambda p: dataclasses.replace(p, runs=()), "classes: .*ValueError"),
        (
            lambda p: dataclasses.replace(
                p, head=dataclasses.replace(p.head, targets=("tpu",))
            ),
            "target",
        ),
    ],
)
def test_what_is_lacking_is_named(broken: Callable[[Plan], Plan], said: str) -> None:
    p = parse(GOLDEN[[path.stem for path in GOLDEN].index("stage3-ahead")].read_text())
    assert outcome(p) == ""
    assert re.search(said, outcome(broken(p))), outcome(broken(p))


def golden(name: str) -> Plan:
    return parse(GOLDEN[[path.stem for path in GOLDEN].index(name)].read_text())


def test_a_fault_of_the_checker_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An error of the checker itself, such as a missing name or a wrong call, is not turned into a
    CheckError."""
    p = golden("stage3-ahead")
    for fault, kind in (
        (lambda self, *rest: self.nothing, AttributeError),
        (lambda self: None, TypeError),
    ):
        monkeypatch.setattr(updates.Updates, "update", fault)
        with pytest.raises(kind):
            check.check(p)


def with_first(p: Plan, part: str, **changes: object) -> Plan:
    first, *rest = getattr(p, part)
    return dataclasses.replace(
        p, **{part: (dataclasses.replace(first, **changes), *rest)}
    )


def with_run(p: Plan, **changes: object) -> Plan:
    """Return the plan with changes to the first launch that has grids on a GPU."""
    n = next(n for n, r in enumerate(p.runs) if r.grids)
    run = dataclasses.replace(p.runs[n], **changes)
    return dataclasses.replace(p, runs=(*p.runs[:n], run, *p.runs[n + 1 :]))


@pytest.mark.parametrize(
    "broken,said",
    [
        (
            lambda p: with_first(p, "fns", flops=p.fns[0].flops + 1),
            "flops, its calls have",
        ),
        (lambda p: with_run(p, grids=()), "by its kernel's rule"),
        (
            lambda p: with_run(p, grids=(Grid(1, 1, 1, 32, 0),)),
            "by its kernel's rule",
        ),
        (
            lambda p: with_run(p, workspace=4096 * 1024),
            "does not hold|by its kernel's rule",
        ),
        (lambda p: with_run(p, tile=(1, 2, 3)), "by its kernel's rule"),
        (
            lambda p: dataclasses.replace(p, head=dataclasses.replace(p.head, zero=3)),
            "not shared as stage 3",
        ),
        (
            lambda p: dataclasses.replace(p, head=dataclasses.replace(p.head, zero=4)),
            "not shared as stage 4",
        ),
    ],
)
def test_what_a_plan_promises_beside_its_steps(
    broken: Callable[[Plan], Plan], said: str
) -> None:
    p = golden("stage2-on-gpus")
    assert outcome(p) == ""
    assert re.search(said, outcome(broken(p))), outcome(broken(p))


def test_a_frequency_for_each_pair() -> None:
    p = planned("llama-tiny")
    assert outcome(p) == ""
    freq = p.tables[0].freq
    for wrong in (freq[:-1], (*freq, freq[-1]), (0.0, *freq[1:])):
        assert re.search(
            "frequencies of heads",
            outcome(with_first(p, "tables", freq=wrong)),
        )


def test_pending_sums_are_nobody_elses() -> None:
    """A step that writes into the pending nodes of a tree, in its turn or not, is refused."""
    p = planned(
        "gpt-tiny",
        "zero.stage=2",
        "train.global_batch=12",
        "train.micro_batch=1",
    )
    assert outcome(p) == ""
    flat = next(f for f in p.flats if f.name == "block")
    assert flat.nodes > 1
    micro_batch, behind = (
        p.section("micro_batch"),
        p.cls("sum.block").stride // flat.nodes,
    )
    for queue, said in (
        ("sum", "not pending sums of block"),
        ("main", "not ordered after"),
    ):
        stray = Step(
            queue,
            "copy",
            "",
            ins=(Ref("sum.embed", 0),),
            outs=(Ref("sum.block", 0, behind),),
            ints=(Int("from_rank", 0), Int("to_rank", 0), Int("bytes", 4096)),
        )
        assert said in outcome(
            mutants.changed(p, micro_batch, [*micro_batch.steps, stray])
        )


@pytest.mark.parametrize(
    "keys",
    [
        (),
        ("zero.stage=3", "zero.stage3_max_live_parameters=20000"),
        ('train.optimizer.groups=[{match: ["*attn*"], frozen: true}]',),
    ],
)
def test_a_formal_of_another_flat_is_refused(keys: tuple[str, ...]) -> None:
    """A function with a formal of another flat, or of none, is always refused."""
    p = test_mutants.planned(
        "gpt-tiny", "cluster.ranks=2", "train.global_batch=8", *keys
    )
    check.check(p)
    tried = 0
    for n, fn in enumerate(p.fns):
        for at, (formal, flat) in enumerate(fn.flats):
            others = [f.name for f in p.flats if f.name != flat]
            made = [mutants.put(fn.flats, at, (formal, f)) for f in others]
            for flats in (*made, mutants.without(fn.flats, at)):
                wrong = dataclasses.replace(fn, flats=flats)
                fns = mutants.put(p.fns, n, wrong)
                assert mutants.refused(dataclasses.replace(p, fns=fns)), (
                    fn.name,
                    flats,
                )
                tried += 1
    assert tried > 10
