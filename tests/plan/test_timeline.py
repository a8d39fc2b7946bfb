"""test_timeline.py -- tests that the picture of `--emit timeline` has every command of a step, none
beside another on its queue, and none before the events that it waits for."""

import xml.etree.ElementTree as ET
from dataclasses import replace
from itertools import combinations, pairwise

import pytest
from zg.facts.queues import QUEUES
from zg.plan.plan import Event, Plan, Step
from zg.predict import cost, device, play
from zg.predict.seconds import Clock
from zg.write import timeline

from tests.lib.law import PACKED
from tests.lib.pictures import SVG, boxes, hidden, meet
from tests.lib.plans import NAMES, WAYS, keys, planned


def clock(p: Plan) -> Clock:
    """Return the plan's clock on the usual device of its first target."""
    return Clock(p, device.load(device.DEFAULT[p.head.targets[0]]))


def bars(p: Plan) -> list[ET.Element]:
    """Return the picture's commands, in order of issue."""
    root = ET.fromstring(timeline.text(clock(p)))
    return [x for x in root.iter(f"{SVG}rect") if x.get("id")]


def ends(bar: ET.Element) -> tuple[float, float]:
    x = float(bar.attrib["x"])
    return x, x + float(bar.attrib["width"])


def issued(p: Plan) -> list[Step]:
    """Return the commands of a rank in a step with its first micro-batches."""
    return [
        s
        for section in p.step
        for _ in range(min(section.repeat, timeline.DRAWN))
        for s in section.steps
    ]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["gpt-tiny", "llama-tiny"])
def test_a_picture_keeps_the_plan(name: str, way: str) -> None:
    p = planned(name, *keys(name, way))
    drawn = bars(p)
    assert [x.get("id") for x in drawn] == [f"c{n}" for n in range(len(drawn))]

    left = iter(drawn)
    free = dict.fromkeys(QUEUES, 0.0)  # marks take no time
    done: dict[Event, float] = {}
    for s in issued(p):
        after = max([free[s.queue], *(done.get(e, 0.0) for e in s.waits)])
        free[s.queue] = after
        if s.op != "mark":
            bar = next(left)
            begin, free[s.queue] = ends(bar)
            assert bar.get("class") == s.queue
            assert begin >= after - 0.002, bar[0].text
            far = s.group != "" and cost.far(p, s.group) > 0
            known = play.Bar("", 0, s, 0, 0, None, far)
            assert timeline.words(known)[1] in bar[0].text
            if s.unit != "-":
                assert s.unit in bar[0].text
        done |= dict.fromkeys(s.recs, free[s.queue])
    assert next(left, None) is None

    for queue in QUEUES:
        mine = [ends(x) for x in drawn if x.get("class") == queue]
        assert all(a < b for a, b in mine)
        assert all(a[1] <= b[0] + 0.002 for a, b in pairwise(mine)), queue


LARGE = ("cluster.ranks=8", "targets=[sm_90]")
PICTURES = {
    "llama3-8b": LARGE,
    "llama3-8b, on the host": (*LARGE, "zero.offload_optimizer.device=cpu"),
    "gpt2-124m-8gpu": ("targets=[sm_90]",),
    "gpt-tiny": (),
    "gpt-tiny, 1 micro-batch": ("train.global_batch=4",),
} | {f"llama-tiny, {way}": keys("llama-tiny", way) for way in WAYS}


@pytest.mark.parametrize("name", PICTURES)
def test_labels_and_lines_have_their_own_places(name: str) -> None:
    """Labels are complete and do not overlap; lines of waits keep their places, however many there
    are."""
    p = planned(name.partition(",")[0], *PICTURES[name])
    root = ET.fromstring(timeline.text(clock(p)))
    assert hidden(root) == []
    told = {text for text, _ in boxes(root)}
    assert {"micro-batch 1", "optimizer step", "compute", "0"} <= told
    rows: dict[tuple[str, ...], list[float]] = {}
    (lines,) = [g for g in root.iter(f"{SVG}g")]
    for line in lines:
        (_, y1), (x2, y2) = (
            end.split() for end in line.attrib["d"].lstrip("M").split("L")
        )
        rows.setdefault((y1, y2), []).append(float(x2))
    for found in rows.values():
        assert all(b - a >= 5 - 0.002 for a, b in pairwise(found))


@pytest.mark.parametrize("begin", [0.0, 0.02, 0.5, 0.9, 0.97, 1.0])
def test_names_of_parts_keep_clear_of_each_other(begin: float) -> None:
    """Names of parts do not overlap, wherever the second micro-batch and the optimizer's step
    begin, and lines lie below names."""
    found = timeline.drawn(clock(planned("gpt-tiny")))
    (one, *_), (two, *_), (last, *_) = (
        [b for b in found if (b.section, b.turn) == of]
        for of in (("micro_batch", 0), ("micro_batch", 1), ("update", 0))
    )
    for after in (0.0, 0.03, 0.5):
        at = (0.0, begin, min(begin + after, 1.0))
        bars = [
            replace(b, begin=x, step=replace(b.step, queue="main"))
            for b, x in zip((one, two, last), at, strict=True)
        ]
        names = timeline._parts(bars, timeline.WIDTH)
        root = ET.fromstring(
            f'<svg xmlns="{SVG[1:-1]}" viewBox="0 -300 930 330">'
            f"{''.join(timeline._named(names, 10))}</svg>"
        )
        found = [box for _, box in boxes(root)]
        assert len(found) == 3 and all(box[2] <= 930 for box in found)
        pairs = combinations(found, 2)
        assert not any(meet(a, b) for a, b in pairs), at
        assert [e.tag for e in root] == [f"{SVG}path"] * 3 + [f"{SVG}text"] * 3


def test_a_long_step_is_drawn_short() -> None:
    p = planned("gpt2-124m", "train.global_batch=1024")
    text = timeline.text(clock(p))
    assert "256 micro-batches" in text and "2 of them drawn" in text
    assert len(bars(p)) == len([s for s in issued(p) if s.op != "mark"])
    assert cost.commands(p) > 50 * len(bars(p))


def test_levels_are_drawn_by_their_links() -> None:
    """Transfers between hosts have a colour, a name and a rate of their own."""
    hosts = ("cluster.ranks=8", "cluster.local=4", "train.micro_batch=1")
    p = planned("gpt-tiny", *hosts, "targets=[sm_90]")
    text = timeline.text(clock(p))
    for part in timeline.FAR.values():
        assert timeline.COLOURS[part] in text and part in text
    drawn = timeline.drawn(clock(p))
    assert {b.far for b in drawn if b.step.op == "gather"} == {True, False}


LEVELS = ("cluster.ranks=8", "cluster.local=4", "train.micro_batch=1")
MORE = {
    "levels": LEVELS,
    "levels, one sum": (*LEVELS, "train.reduction=fast", "targets=[sm_90]"),
    "sets of two ranks": (*LEVELS, "zero.stage=3", "zero.shard_size=2"),
    "packed documents": PACKED,
    "a scaled loss": ("train.precision=f16", "train.loss_mean=micro_batch"),
    "shared samples": (
        "train.sequence_blocks=4",
        "cluster.context_parallel=2",
        "train.global_batch=2",
    ),
    "samples in blocks": ("train.sequence_blocks=4", "zero.stage=1"),
    "adapters": ("train.lora={rank: 2, alpha: 4, base: nf4}", "train.precision=bf16"),
}


@pytest.mark.parametrize("name", NAMES)
def test_every_command_has_words(name: str) -> None:
    """Commands of plans and of their programs' traces, where an op's point is an underscore."""
    ways = [keys(name, way) for way in WAYS] if "tiny" in name else [()]
    ways += MORE.values() if name == "llama-tiny" else ()
    for way in ways:
        for s in (s for x in planned(name, *way).step for s in x.steps):
            if s.op != "mark":
                kind = timeline.kind_of(s.op)
                assert kind in timeline.WORDS, s.op
                assert timeline.kind_of(s.op.replace(".", "_") + " 3") == kind


def test_a_settled_step_is_drawn() -> None:
    """The step that is drawn begins with the waits that the one before left, as in the report; in a
    run's first step there are none."""
    p = planned("gpt-tiny", *keys("gpt-tiny", "stage 2, the optimizer on the host"))
    bars, x = timeline.drawn(clock(p)), play.step(clock(p))
    assert min(b.begin for b in bars) >= 0
    main = [b for b in bars if b.step.queue == "main"]
    first = next(b for b in x.bars if b.step.queue == "main")
    assert main[0].begin == pytest.approx(first.begin - x.begin) and main[0].begin > 0
