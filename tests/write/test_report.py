"""test_report.py -- tests that the page of `--emit report` states the plan's own numbers, needs
nothing from outside, and is drawn in a browser."""

from __future__ import annotations

import functools
import hashlib
import json
import pathlib
import re
from collections import Counter
from itertools import pairwise

import pytest
from zg import main
from zg.facts.queues import QUEUES
from zg.plan.plan import Plan
from zg.predict import clock as clocks
from zg.predict import cost, play
from zg.predict.seconds import Clock
from zg.read import spec as reader
from zg.read.schema import Spec
from zg.search import fit, search
from zg.write import config, emit, page, report, timeline, times
from zg.write.page import Bar, Chart, Curve, Page, Section, Track, table

from tests.lib import browser
from tests.lib.plans import SPECS
from tests.search.test_fit import holding

HOSTS = ("cluster.ranks=8", "cluster.local=4", "train.micro_batch=1", "targets=[sm_90]")
WAYS = {
    "as it stands": (),
    "one rank": ("cluster.ranks=1",),
    "hosts": HOSTS,
    "offloaded": (
        "zero.stage=2",
        "train.precision=bf16",
        "zero.offload_optimizer.device=cpu",
    ),
    "many micro-batches": ("train.global_batch=32", "train.micro_batch=1"),
    "fast": ("train.reduction=fast", *HOSTS),
}
STYLE = (pathlib.Path(main.home.HOME) / "templates" / "report.css.j2").read_text()


@functools.cache
def made(way: str, name: str = "gpt-tiny") -> tuple[Spec, Plan, Clock, str]:
    spec = reader.load(str(SPECS / f"{name}.yaml"), WAYS[way])
    p = search.find(spec).plan
    clock = clocks.of(spec, p)
    return spec, p, clock, report.text(clock, spec, ["a note"], "zgen x.yaml")


def number(text: str) -> int:
    return int(text.partition(" ")[0].replace(",", ""))


# ---- the file


@pytest.mark.parametrize("way", WAYS)
def test_nothing_comes_from_outside(way: str) -> None:
    text = made(way)[3]
    assert browser.outside(text) == []
    root = browser.parsed(text)
    ids = [e.attributes["id"] for e in root.all("section")]
    assert ids == ["model", "time", "memory", "wire", "recipe", "law", "notes"]
    links = [e.attributes["href"] for e in root.all("nav")[0].all("a")]
    assert links == [f"#{name}" for name in ids]
    assert "a note" in root.section("notes").whole()


def test_what_comes_from_outside_is_seen() -> None:
    text = made("one rank")[3]
    for bad in (
        "<img src='x.png'>",
        "<script src='https://example.org/x.js'></script>",
        "<a href='https://example.org'></a>",
        "<style>@import 'x.css';</style>",
    ):
        bad = bad.replace("<img src='x.png'>", "<img src='x.png'></img>")
        assert browser.outside(text.replace("</main>", f"{bad}</main>")), bad
    assert browser.outside(text.replace("default-src 'none'", "default-src *"))


def test_a_search_has_its_front(tmp_path: pathlib.Path) -> None:
    """The page of --fit draws and lists the front of the search."""
    keys = ("targets=[sm_90]", "cluster.ranks=4", *holding("zero.stage"))
    words = [str(SPECS / "gpt-tiny.yaml"), *(x for k in keys for x in ("--set", k))]
    out = tmp_path / "r.html"
    assert main.main([*words, "--fit", "--emit", "report", "-o", str(out)]) == 0
    found = fit.find(reader.load(words[0], keys))
    root = browser.parsed(out.read_text())
    rows = root.section("search").all("tbody")[0].all("tr")
    assert [row.all("th")[0].whole() for row in rows] == [
        row.way.words for row in fit.listed(found)
    ]
    (chart,) = [x for x in root.charts() if x["axis"]]
    (marks,) = [x for x in chart["tracks"][0]["curves"] if x["marks"]]
    assert sorted(marks["y"]) == sorted(1e3 * row.seconds for row in found.best)
    assert chart["first"] == min(marks["x"]) <= max(marks["x"]) <= chart["last"]


def test_names_end_no_element() -> None:
    odd = '</script><b onclick="x">&amp;\u202e\x00'
    bar = Bar(0, 0, 0, 5, odd, odd, odd)
    chart = Chart(
        odd, page.series([(odd, "#123456")]), (Track(odd, odd, (bar,)),), 0, 5
    )
    section = Section("x", odd, (odd,), (chart,), (table(odd, "a|b", [(odd, odd)]),))
    text = emit.page(Page(odd, odd, (section,)))
    root = browser.parsed(text)
    assert root.all("b") == []
    (found,) = root.charts()
    assert found == json.loads(json.dumps(chart.data()))
    assert found["words"] == ["", odd.replace("\u202e", "?").replace("\x00", "?")]


def test_the_command_writes_it(tmp_path: pathlib.Path) -> None:
    out = tmp_path / "r.html"
    words = [str(SPECS / "gpt-tiny.yaml"), "--emit", "report", "-o", str(out)]
    assert main.main(words) == 0
    text = out.read_text()
    spec = reader.load(words[0], ())
    p = search.find(spec).plan
    command = main.origin(main.arguments(words))
    assert text == report.text(clocks.of(spec, p), spec, [], command)
    assert main.main([*words, "--set", "cluster.device=none"]) == 2
    assert out.read_text() == text


@pytest.mark.slow
def test_a_large_plan_has_a_small_page() -> None:
    spec = reader.load(
        str(SPECS / "llama3-405b.yaml"), ("cluster.ranks=16384", "cluster.local=8")
    )
    p = search.find(spec).plan
    text = report.text(clocks.of(spec, p), spec, [], "")
    drawn = [c for f in browser.parsed(text).charts() for c in f["tracks"]]
    assert sum(len(t["begin"]) for t in drawn) > 5000
    assert len(text) < 1_500_000


# ---- the numbers


@pytest.mark.parametrize("way", WAYS)
def test_the_timeline_is_the_played_step(way: str) -> None:
    _, _, clock, text = made(way)
    x = play.step(clock)
    (chart,) = browser.parsed(text).section("time").charts()
    words, parts = chart["words"], [s[0] for s in chart["series"]]
    queues = [q for q in QUEUES if any(b.step.queue == q for b in x.bars)]
    assert [t["note"].split(",")[0] for t in chart["tracks"]] == [
        f"queue {q}" for q in queues
    ]
    assert chart["last"] == round(1e9 * (x.end - x.begin))
    for queue, t in zip(queues, chart["tracks"], strict=True):
        bars = [b for b in x.bars if b.step.queue == queue]
        columns = ("begin", "long", "word", "more", "cause", "series")
        rows = list(zip(*(t[c] for c in columns), strict=True))
        assert len(rows) == len(bars)
        for b, (begin, long, word, more, cause, series) in zip(bars, rows, strict=True):
            part, name = timeline.words(b)
            assert abs(begin - 1e9 * (b.begin - x.begin)) <= 1
            assert abs(long - 1e9 * (b.end - b.begin)) <= 1
            assert (words[word], parts[series]) == (name, part)
            assert words[cause] == (timeline.words(b.cause)[1] if b.cause else "")
            assert (words[more] == f"micro-batch {b.turn + 1}") == (
                b.section == "micro_batch"
            )


@pytest.mark.parametrize("way", WAYS)
def test_the_parts_are_the_predicted_ones(way: str) -> None:
    _, _, clock, text = made(way)
    t = times.times(clock)
    found = browser.parsed(text).section("time").table("Parts of a step")
    assert [*found] == [*t.exposed]
    for part, (busy, exposed, share) in found.items():
        assert busy == f"{1e3 * t.busy.get(part, 0):,.2f} ms"
        assert exposed == f"{1e3 * t.exposed[part]:,.2f} ms"
        assert share == f"{t.exposed[part] / t.seconds:.1%}"
    assert sum(t.exposed.values()) == pytest.approx(t.seconds)
    rates = browser.parsed(text).section("time").table("Rates")
    assert rates["step"] == [f"{t.seconds:.4g} s"]
    assert rates["tokens/s"] == [f"{t.rate:,.0f}"]


@pytest.mark.parametrize("way", WAYS)
def test_contents_last_from_the_first_to_the_last_use(way: str) -> None:
    """Every command lies within a content of each slot that it uses, contents of a slot do not
    overlap, and each marked last use ends one."""
    _, p, clock, text = made(way)
    x = play.step(clock)
    ends = Counter(
        r.cls
        for b in x.bars
        for r in {(r.cls, r.index): r for r in b.step.refs if r.last}.values()
    )
    held = report.lifetimes(p, x)
    assert {*held} == {c.name for c in p.passing}
    for name, slots in held.items():
        lanes: dict[int, list[Bar]] = {}
        for b in slots.found:
            lanes.setdefault(b.lane, []).append(b)
        assert {*lanes} <= {*range(p.cls(name).slots)}
        assert slots.most <= p.cls(name).slots
        for mine in lanes.values():
            assert all(a.end <= b.begin for a, b in pairwise(mine)), name
        open_ = [b for b in slots.found if b.end == round(1e9 * (x.end - x.begin))]
        assert ends[name] <= len(slots.found) <= ends[name] + len(open_)
        for b in x.bars:
            begin, end = (round(1e9 * (t - x.begin)) for t in (b.begin, b.end))
            for r in b.step.refs:
                if r.cls == name:
                    assert any(
                        c.begin <= begin and end <= c.end for c in lanes[r.index]
                    ), b
    charts = browser.parsed(text).section("memory").charts()
    drawn = {t["name"]: len(t["begin"]) for c in charts for t in c["tracks"]}
    assert drawn == {name: len(s.found) for name, s in held.items() if s.found}


@pytest.mark.parametrize("way", WAYS)
def test_memory_is_that_of_the_plan(way: str) -> None:
    _, p, _, text = made(way)
    memory = browser.parsed(text).section("memory")
    found = memory.table("Classes: the arena")
    classes = [c for c in p.classes if (c.arena, c.targets) == ("device", "all")]
    assert [*found] == [c.name for c in classes]
    for c in classes:
        assert [number(x) for x in found[c.name][1:5]] == [
            c.slots,
            c.stride,
            c.bytes,
            c.at,
        ]
    targets = memory.table("A rank's device memory, bytes")
    assert {t: number(row[0]) for t, row in targets.items()} == {
        t: p.arena(t) for t in p.head.targets
    }
    purposes = memory.table("By purpose")
    assert {t: number(row[0]) for t, row in purposes.items()} == dict(cost.memory(p))


@pytest.mark.parametrize("way", [way for way in WAYS if way != "one rank"])
def test_the_wire_is_that_of_the_plan(way: str) -> None:
    _, p, _, text = made(way)
    wire = browser.parsed(text).section("wire")
    whole = cost.training_wire(p)
    (all_,) = [
        [number(c.whole()) for c in row.all("td")[1:]]
        for row in wire.all("tr")
        if "total" in row.whole()
    ]
    assert all_ == [whole.messages, whole.bytes, whole.bytes - whole.far, whole.far]
    hosts = [t for t in wire.all("caption") if "each host" in t.text]
    assert len(hosts) == (p.head.local not in (0, p.head.ranks))
    if hosts:
        sent = wire.table(hosts[0].text)
        assert number(sent.pop("here")[0]) == cost.sent_by_host(p)
        assert {s: number(row[0]) for s, row in sent.items()} == {
            s: round(n) for s, n in cost.schemes(p)
        }


@pytest.mark.parametrize("way", WAYS)
def test_every_key_decides_bits_or_none(way: str) -> None:
    spec, _, _, text = made(way)
    root = browser.parsed(text)
    lines = config.recipe(spec)
    decides = root.section("recipe").table("Keys that decide bits")
    assert [f"{key}: {row[0]}" for key, row in decides.items()] == lines
    sha = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    assert sha in root.section("recipe").whole()
    others = root.section("law").table("Keys that change no bit")
    assert not decides.keys() & others.keys()
    said = {line.partition(": ")[0] for line in config.text(spec).splitlines()}
    left = {key for key in said - decides.keys() - others.keys() if key[0] != "#"}
    assert {key for key in left if not key.endswith((*config.LATER,))} == {
        "name",
        "targets",
    }
    assert (report.FAST in root.section("law").whole()) == (way == "fast")


# ---- as it is seen


def papers() -> list[dict[str, str]]:
    """Return the colours of the light and the dark scheme."""
    return [
        dict(re.findall(r"--(\w+): (#\w{6});", part))
        for part in re.findall(r":root \{(.*?)\}", STYLE, re.S)
    ]


def test_colours_have_contrast() -> None:
    light, dark = papers()
    assert (light["paper"], dark["paper"]) == (page.LIGHT, page.DARK)
    for scheme in (light, dark):
        for under in ("paper", "row"):
            for name in ("ink", "faint", "link"):
                assert page.contrast(scheme[name], scheme[under]) >= 4.5, name
    assert page.contrast("#000", "#ffffff") == pytest.approx(21)
    colours = {**timeline.COLOURS, **report.KINDS}
    for s in page.series(colours.items()):
        for fill, ink, paper in (
            (s.light, s.ink, page.LIGHT),
            (s.dark, s.dark_ink, page.DARK),
        ):
            assert page.contrast(fill, paper) >= 3, s.name
            assert page.contrast(ink, fill) >= 4.5, s.name


def test_series_differ_without_colour() -> None:
    found = page.series(timeline.COLOURS.items())
    assert len({s.dash for s in found}) == len(found)


def test_a_long_curve_keeps_its_extremes() -> None:
    points = [(n, float(n % 7)) for n in range(100_000)]
    points[50_001] = (50_001, 99.0)
    points[70_001] = (70_001, -99.0)
    kept = page.thinned(points)
    assert len(kept) <= page.MOST + 2 and kept == tuple(sorted(kept))
    assert {points[0], points[-1], points[50_001], points[70_001]} <= {*kept}
    assert page.thinned(points[:100]) == tuple(points[:100])


def test_a_curve_lies_in_its_range() -> None:
    for values in ([1.0], [0.0, 0.0], [3.0, -5.0, 1e9]):
        track = Track("x", "", curves=(Curve(0, tuple(enumerate(values))),))
        found = track.data({"": 0})
        assert found["low"] < min(values) <= max(values) < found["high"]
        ticks = [y for y, _ in found["ticks"]]
        assert ticks and found["low"] <= ticks[0] <= ticks[-1] <= found["high"]


@pytest.mark.slow
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("wide", browser.WIDTHS)
@pytest.mark.parametrize("way", ["hosts", "offloaded"])
def test_a_browser_draws_it(
    way: str, wide: int, dark: bool, tmp_path: pathlib.Path
) -> None:
    browser.check(made(way)[3], tmp_path, wide, dark)
