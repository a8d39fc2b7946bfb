"""test_timeline.py -- tests that the picture of `--emit timeline` has every command of a step, none
beside another on its queue, and none before the events that it waits for."""

import xml.etree.ElementTree as ET
from dataclasses import replace
from itertools import combinations, pairwise

import pytest
from zg.facts.peaks import DISK, LAUNCH, PEAKS
from zg.facts.queues import QUEUES
from zg.plan.plan import Event, Plan, Step
from zg.write import cost, timeline

from tests.lib.pictures import SVG, boxes, hidden, meet
from tests.lib.plans import WAYS, keys, planned


def bars(p: Plan) -> list[ET.Element]:
    """Return the picture's commands, in order of issue."""
    root = ET.fromstring(timeline.text(p))
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
            name = s.op.partition(".")[0]
            far = s.group != "" and cost.far(p, s.group) > 0
            known = timeline.Bar("", 0, s, 0, 0, None, far)
            assert timeline.words(known)[1] in bar[0].text
            assert name in timeline.WORDS or s.op in bar[0].text
            if s.unit != "-":
                assert s.unit in bar[0].text
        done |= dict.fromkeys(s.recs, free[s.queue])
    assert next(left, None) is None

    for queue in QUEUES:
        mine = [ends(x) for x in drawn if x.get("class") == queue]
        assert all(a < b for a, b in mine)
        assert all(a[1] <= b[0] + 0.002 for a, b in pairwise(mine)), queue


def test_waits_show() -> None:
    """A gather that is made long delays its unit, and a line shows it."""
    p = planned("gpt-tiny")
    played = timeline.played(p)
    after = [b for b in played if b.step.op == "fwd.block" and b.cause is not None]
    # On a CPU, blocks after the first have their parameters in time
    assert not after[1:]
    ways = timeline.PEAKS["cpu"]
    slow = replace(ways, wire=1e8)
    with pytest.MonkeyPatch.context() as m:
        m.setitem(timeline.PEAKS, "cpu", slow)
        late = timeline.played(p)
    waiting = [b for b in late if b.step.op == "fwd.block"]
    assert waiting and all(
        late[b.cause].step.op == "gather" and b.begin == late[b.cause].end
        for b in waiting
        if b.cause is not None
    )
    assert len([b for b in waiting if b.cause is not None]) > len(after)


def test_times_are_worked_out_by_hand() -> None:
    """Times follow the data sheet's rates: bytes on the wire, flops of a product, bytes of a
    copy."""
    p = planned("gpt2-124m", "train.precision=bf16", "targets=[sm_90]")
    peaks = PEAKS["sm_90"]

    def step(op: str, unit: str = "") -> Step:
        steps = p.section("micro_batch").steps
        return next(s for s in steps if s.op == op and s.unit.startswith(unit))

    gather = step("gather", "block")
    assert timeline.seconds(p, gather, peaks) == 3_538_944 * 2 / 450e9
    flops = next(f.flops for f in p.fns if f.name == "fwd.block")
    took = timeline.seconds(p, step("fwd.block"), peaks)
    # Norms and sums are limited by bytes
    assert flops / 989e12 < took < 3 * flops / 989e12
    added = timeline.seconds(p, step("sum.block"), peaks)
    assert added == pytest.approx(3_538_944 * (2 * 2 + 2 * 4) / 3.35e12)
    assert timeline.seconds(p, step("count"), peaks) == LAUNCH

    p = planned("gpt-tiny", *keys("gpt-tiny", "stage 3, all in a file"))
    copies = [s for x in p.step for s in x.steps if s.op == "copy"]
    for s in copies:
        size = next(i.value for i in s.ints if i.name == "bytes")
        rate = DISK if s.queue in ("load", "store", "fetch") else 64e9
        assert timeline.seconds(p, s, peaks) == max(size / rate, LAUNCH)
    assert {s.queue for s in copies} >= {"load", "store", "fetch", "up"}


def test_a_gpu_plays_graphs_one_after_the_other() -> None:
    """Nothing of a micro-batch begins on a GPU before all of the last one has ended."""
    for targets, apart in (("[sm_90]", True), ("[cpu]", False)):
        p = planned("gpt-tiny", f"targets={targets}")
        played = timeline.played(p)
        first, second = (
            [b for b in played if (b.section, b.turn) == ("micro_batch", n)]
            for n in (0, 1)
        )
        begins = min(b.begin for b in second)
        assert (begins >= max(b.end for b in first)) == apart


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
    root = ET.fromstring(
        timeline.text(planned(name.partition(",")[0], *PICTURES[name]))
    )
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
    p = planned("gpt-tiny")
    played = timeline.played(p)
    (one, *_), (two, *_), (last, *_) = (
        [b for b in played if (b.section, b.turn) == of]
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
    text = timeline.text(p)
    assert "256 micro-batches" in text and "2 of them drawn" in text
    assert len(bars(p)) == len([s for s in issued(p) if s.op != "mark"])
    assert cost.commands(p) > 50 * len(bars(p))


def test_levels_are_drawn_by_their_links() -> None:
    """Transfers between hosts have a colour, a name and a rate of their own."""
    hosts = ("cluster.ranks=8", "cluster.local=4", "train.micro_batch=1")
    p = planned("gpt-tiny", *hosts, "targets=[sm_90]")
    text = timeline.text(p)
    for part in timeline.FAR.values():
        assert timeline.COLOURS[part] in text and part in text
    gathers = [b for b in timeline.played(p) if b.step.op == "gather"]
    for b in gathers:
        moved = cost.wire_of(p, b.step)
        rate = PEAKS["sm_90"].network if b.far else PEAKS["sm_90"].wire
        took = max(LAUNCH, moved.bytes / rate)
        assert b.end - b.begin == pytest.approx(took)
    assert {b.far for b in gathers} == {True, False}
