"""test_plan.py -- tests the Plan: its text, its digests, and the changes that a setting may make.

The golden plans in golden/ are whole texts. After an intended change, write them anew with
    .venv/bin/python tests/plan/test_plan.py
and read the difference before you commit it.
"""

import dataclasses
import difflib
import itertools
import os
import pathlib
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path[:0] = [str(HERE.parent), str(HERE.parent / "gen")]

import pytest
from hypothesis import given
from hypothesis import strategies as st
from zg.check import check
from zg.plan.operand import Arg, Index, Operand
from zg.plan.plan import Plan, Section, Step
from zg.plan.text import (
    PlanError,
    arg,
    digest,
    layout_digest,
    parse,
    print_plan,
)

from tests.lib.patience import LIMIT
from tests.lib.plans import EACH, keys, planned

GOLDEN = HERE / "golden"
SMALL = str(GOLDEN / "small.yaml")
GOLDEN_WAYS = {
    "stage0-local": ("zero.stage=0",),
    "stage1-bf16": ("zero.stage=1", "train.precision=bf16"),
    "stage2-pieces": (
        "zero.stage=2",
        "zero.reduce_bucket_size=5000",
        "zero.allgather_bucket_size=5000",
    ),
    "stage3-ahead": (),
    "stage3-one-queue": (
        "zero.overlap_comm=false",
        "zero.stage3_prefetch_bucket_size=0",
    ),
    "stage3-offload": (
        "train.precision=bf16",
        "zero.offload_optimizer.device=cpu",
        "zero.offload_optimizer.buffer_count=2",
        "zero.sub_group_size=5000",
    ),
    "stage2-on-gpus": (
        "zero.stage=2",
        "train.precision=bf16",
        "targets=[cpu, sm_80, sm_90, sm_100]",
    ),
    "stage3-layers": (
        "train.accumulate=layers",
        "train.precision=bf16",
        "train.recompute=full",
    ),
    "one-rank": ("zero.stage=3", "cluster.ranks=1", "train.global_batch=2"),
}


def golden_plan(name: str) -> Plan:
    return planned(SMALL, *GOLDEN_WAYS[name])


# ---- the text


@EACH
def test_text_is_lossless(name: str, way: str) -> None:
    p = planned(name, *keys(name, way))
    check.check(p)
    text = print_plan(p)
    assert parse(text) == p
    assert digest(parse(text)) == digest(p)


TEXT = print_plan(golden_plan("stage3-ahead"))
LINES = TEXT.splitlines()


def line_of(word: str) -> int:
    return next(n for n, line in enumerate(LINES) if line.startswith(word))


def with_line(n: int, *new: str) -> str:
    return "\n".join(LINES[:n] + [*new] + LINES[n + 1 :]) + "\n"


@pytest.mark.parametrize(
    "word,made",
    [
        ("w+4096", Operand("w", 4096)),
        ("table.0+0", Operand("table.0")),
        ("node+0+r*8192", Operand("node", 0, 8192)),
        ("x+64+c*12", Operand("x", 64, 0, 12)),
        ("l*8192+r*2048", Index(8192, 2048)),
        ("l*64", Index(64)),
        ("l*64+r*32+8", Index(64, 32, 8)),
        ("l*64+r*32+at", Index(64, 32, 0, "at")),
        ("-3", -3),
        ("1e-05", 1e-05),
        ("null", "null"),
        ("&leaf", "&leaf"),
        ("spans.persistent", "spans.persistent"),
    ],
)
def test_what_a_call_takes_is_a_record(word: str, made: Arg) -> None:
    assert arg(word) == made and str(made) == word


@pytest.mark.parametrize(
    "word",
    ["w+04096", "x+64+c*0", "007", "1_0", "1e5", "l*64+r*0+8", "x+0+r*00"],
)
def test_what_prints_otherwise_is_no_plan(word: str) -> None:
    p = golden_plan("one-rank")
    assert str(arg(word)) != word
    printed = print_plan(p).replace(" null ", f" {word} ", 1)
    with pytest.raises(PlanError, match="not as a plan is printed"):
        parse(printed)


@pytest.mark.parametrize(
    "start,old,new",
    [
        ("plan", "plan 4", "plan 3"),
        ("head", "ranks 2", "ranks two"),
        ("head", " zero 3", ""),
        ("head", "zero 3", "zeros 3"),
        ("flat", " shard ", " shard 1 shard "),
        ("tensor", "shape 304,24", "shape 304,x"),
        ("class", "slots", "slot"),
        ("class", "at 0", "at 00"),
        ("launch", " shape", "  shape"),
        ("run", " workspace", "  workspace"),
        ("fn", "flops 0", "flops"),
        ("events", "[", "("),
        ("section", "repeat 1", "repeat"),
        ("step", "with l=0", "with l"),
        ("step", "step", "stop"),
        ("step", "with l=0", "with l=0 with l=0"),
        ("step", "with l=0", "with l=0 more=words"),
        ("recipe", ":0.001", ":1e-3"),
        ("recipe", ":line:", ":line::"),
    ],
)
def test_a_broken_line_is_named(start: str, old: str, new: str) -> None:
    n = line_of(start)
    assert old in LINES[n]
    with pytest.raises(PlanError, match=f"^line {n + 1}:"):
        parse(with_line(n, LINES[n].replace(old, new, 1)))


@pytest.mark.parametrize("word", ["plan", "head", "recipe", "fn", "events", "section"])
def test_a_missing_line_is_missed(word: str) -> None:
    with pytest.raises((PlanError, check.CheckError)):
        check.check(parse(with_line(line_of(word))))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\n",
        "plan 1\n",
        "\0",
        "plan 1\nstep\n",
        TEXT + "\n",
        TEXT.replace("\n", "\r\n"),
        TEXT[:-1],
    ],
)
def test_no_plan_at_all(text: str) -> None:
    with pytest.raises(PlanError):
        parse(text)


@pytest.mark.slow
@given(st.data())
def test_a_text_is_one_plan_or_none(data: st.DataObject) -> None:
    """A text that parses prints as it was: no two texts are one plan, and nothing is ignored."""
    n = data.draw(st.integers(0, len(LINES) - 1))
    words = LINES[n].split(" ")
    odd = [
        "",
        "-",
        "-1",
        "0",
        "07",
        "1.0",
        "x",
        ">",
        "rec",
        "a[0]",
        "a=1",
        "1,2",
        "\u0661",
    ]
    w = data.draw(st.integers(0, len(words) - 1))
    words[w] = data.draw(
        st.sampled_from(odd) | st.sampled_from(sorted(set(TEXT.split())))
    )
    text = with_line(n, " ".join(words))
    try:
        p = parse(text)
    except PlanError as e:
        assert str(e).startswith("line ") or str(e) == "no head or no recipe"
        return
    assert print_plan(p) == text


# ---- twice the same


@pytest.mark.slow
@pytest.mark.parametrize("emit", ["c", "plan", "explain", "memory"])
def test_the_same_bytes_in_every_process(emit: str, tmp_path: pathlib.Path) -> None:
    """The output does not depend on Python's hash seed, the folder or the clock."""
    root = HERE.parent
    outputs = set()
    for seed, folder, zone in (
        ("0", root, "UTC"),
        ("1", tmp_path, "Asia/Tokyo"),
        ("4242", tmp_path, "UTC"),
    ):
        command = [
            sys.executable,
            root / "gen/zgen",
            root / "model_specs/qwen3-tiny.yaml",
        ]
        run = subprocess.run(
            [*command, "--emit", emit],
            cwd=folder,
            capture_output=True,
            timeout=LIMIT,
            check=True,
            env={**os.environ, "PYTHONHASHSEED": seed, "TZ": zone},
        )
        outputs.add(run.stdout)
    assert len(outputs) == 1 and outputs != {b""}


def test_the_digest_is_of_the_text() -> None:
    p = golden_plan("stage3-ahead")
    other = dataclasses.replace(
        p, recipe=dataclasses.replace(p.recipe, clip=p.recipe.clip * 2)
    )
    assert len({digest(p), digest(other), layout_digest(p)}) == 3


def test_none_is_a_name_like_others() -> None:
    """A step or store without a group has none in the text. Every other word there is the name of a
    group that the plan must have."""
    p = planned(SMALL, "zero.stage=1")
    assert (
        {s.over for s in p.stores}
        == {"", "all"}
        == {x.group for s in p.sections for x in s.steps}
    )
    assert "over -" not in print_plan(p)
    for store in p.stores:
        named = dataclasses.replace(store, over="none")
        other = dataclasses.replace(
            p, stores=tuple(named if s == store else s for s in p.stores)
        )
        assert parse(print_plan(other)) == other
        with pytest.raises(check.CheckError, match="there is no group none"):
            check.check(other)


# ---- golden plans


@pytest.mark.parametrize("name", GOLDEN_WAYS)
def test_golden(name: str) -> None:
    want = (GOLDEN / f"{name}.plan").read_text()
    got = print_plan(golden_plan(name))
    check.check(golden_plan(name))
    diff = list(
        difflib.unified_diff(
            want.splitlines(),
            got.splitlines(),
            f"golden/{name}.plan",
            "now",
            n=1,
            lineterm="",
        )
    )
    how = "the plan has changed; if that is meant: .venv/bin/python tests/plan/test_plan.py"
    assert not diff, "\n".join([how, *diff[:60]])
    assert want == got


def test_no_golden_plan_is_left_over() -> None:
    assert {path.stem for path in GOLDEN.glob("*.plan")} == set(GOLDEN_WAYS)


# ---- changes that a setting may make


def layout(p: Plan) -> object:
    """Return the location and owner of every parameter, in another form than the digest's."""
    flats = {
        f.name: (
            f.count,
            f.elems,
            f.shard,
            p.stored("params", f.name)[0].over,
            p.head.zero == 0,
        )
        for f in p.flats
    }
    tensors = {
        t.name: (
            t.flat,
            t.offset,
            t.offset_step,
            t.flat_step,
            t.count,
            t.shape,
        )
        for t in p.tensors
    }
    return p.head.ranks, flats, tensors


def test_the_layout_digest_changes_when_the_layout_does() -> None:
    ways = [
        (),
        ("zero.stage=0",),
        ("zero.stage=1",),
        ("zero.stage=2",),
        ("cluster.ranks=4",),
        ("train.precision=bf16",),
        ("zero.stage3_param_persistence_threshold=0",),
        ("zero.replicate=[wpe.*]",),
        ("zero.overlap_comm=false",),
        ("zero.reduce_bucket_size=5000",),
        ("zero.stage3_prefetch_bucket_size=0",),
        ("train.global_batch=16",),
        ("train.sum=fold",),
        ("train.seed=2",),
        ("train.optimizer.lr=0.1",),
        ("train.optimizer.decay=all",),
        ("zero.stage=1", "train.global_batch=4"),
        ("zero.stage=1", "train.sum=fold"),
        ("model.vocab=301",),
    ]
    plans = [planned(SMALL, *way) for way in ways]
    seen = set()
    for a, b in itertools.combinations(plans, 2):
        assert (layout(a) == layout(b)) == (layout_digest(a) == layout_digest(b))
        seen.add(layout(a) == layout(b))
    assert seen == {True, False}


def queue(section: Section, name: str) -> list[Step]:
    return [s for s in section.steps if s.queue == name]


def without_rings(s: Step) -> tuple:
    """Return a step without the ring slot of its unit and without waits for that slot."""
    early = ("full.ring", "free.ring", "updated")
    refs = [r.cls if r.cls.startswith("ring") else r for r in (*s.ins, *s.outs)]
    return (
        s.op,
        s.unit,
        *refs,
        s.ints,
        *(e for e in s.waits if not e.name.startswith(early)),
        *(e for e in s.recs if not e.name.startswith(early)),
    )


@pytest.mark.parametrize(
    "way",
    [
        "stage 3, none kept, far ahead",
        "stage 3, units stay",
        "stage 3, four micro-batches through a unit",
        "stage 2 in bf16, pieces",
    ],
)
def test_the_head_says_how_far_ahead(way: str) -> None:
    """The checker counts how many units are gathered ahead, and the head must agree."""
    p = planned("gpt-tiny", *keys("gpt-tiny", way))
    fewer = dataclasses.replace(p.head, prefetch=p.head.prefetch - 1)
    with pytest.raises(
        check.CheckError, match=f"{p.head.prefetch} units are gathered ahead"
    ):
        check.check(dataclasses.replace(p, head=fewer))


def test_prefetch_changes_gathers_alone() -> None:
    now = planned(SMALL, "zero.stage3_prefetch_bucket_size=0")
    ahead = planned(SMALL)
    assert (now.head.prefetch, ahead.head.prefetch) == (
        0,
        1,
    ) and now.head.live < ahead.head.live
    assert dataclasses.replace(now.head, prefetch=1, live=ahead.head.live) == ahead.head
    for part in (
        "recipe",
        "groups",
        "flats",
        "tensors",
        "tables",
        "launches",
        "fns",
    ):
        assert getattr(now, part) == getattr(ahead, part)
    for a, b in zip(now.classes, ahead.classes, strict=True):
        assert (a.name, a.arena, a.readers, a.stride) == (
            b.name,
            b.arena,
            b.readers,
            b.stride,
        )
        assert a.slots == b.slots or a.name.startswith("ring")
    for a, b in zip(now.sections, ahead.sections, strict=True):
        if a.name not in ("micro_batch", "eval"):
            assert a == b
            continue
        assert queue(a, "reduce") == queue(b, "reduce")
        for name in ("main", "gather"):
            assert [*map(without_rings, queue(a, name))] == [
                *map(without_rings, queue(b, name))
            ]
        late, early = (
            [n for n, s in enumerate(x.steps) if s.queue == "gather"] for x in (a, b)
        )
        assert early != late and all(e <= l for e, l in zip(early, late, strict=True))


if __name__ == "__main__":
    for each in GOLDEN_WAYS:
        (GOLDEN / f"{each}.plan").write_text(print_plan(golden_plan(each)))
