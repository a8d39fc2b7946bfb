"""test_report_tool.py -- tests the command ./run report: its page states the numbers of logs, a
prediction and a trace, and is drawn in a browser."""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
import run_report as report
from logs import Log
from zg import main

from tests.lib import browser, law, program, trainer
from tests.lib.patience import LIMIT
from tests.tools.test_watch import put, run, step

REPORT = (sys.executable, str(trainer.ROOT / "tools" / "run_report.py"))
PLAN = {
    "device": "a device",
    "step": 1.0,
    "tokens_per_second": 100.0,
    "flops": 600,
    "plan": "abc",
    "mfu": 0.5,
    "busy": {"forward": 0.25, "all-gather": 0.5, "all-gather between hosts": 0.25},
}


def made(*words: object) -> subprocess.CompletedProcess[str]:
    path = f"{trainer.ROOT / 'gen'}:{os.environ.get('PYTHONPATH', '')}"
    return subprocess.run(
        [*REPORT, *map(str, words)],
        capture_output=True,
        text=True,
        timeout=LIMIT,
        env={**os.environ, "PYTHONPATH": path},
    )


def page(*words: object) -> browser.Element:
    """Return the page that a command writes."""
    done = made(*words)
    assert done.returncode == 0, done.stderr
    text = Path(str(words[-1])).read_text()
    assert browser.outside(text) == []
    return browser.parsed(text)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Return a log of a run that was killed after step 5 and resumed after step 3."""
    path = tmp_path / "one.jsonl"
    first = step(1, 9.0, tokens_per_second=10.0)
    put(path, run("a <b>", "--profile", str(tmp_path / "trace")))
    put(path, {**first, "seconds": 50.0}, *(step(n, 9.0 - n) for n in (2, 3, 4, 5)))
    put(path, run("a <b>") | {"time": "2026-11-23T04:32:56Z", "flops_per_step": 600})
    put(
        path,
        {**step(4, 4.5), "seconds": 30.0},
        step(5, 4.0),
        {"step": 5, "val_loss": 4.25},
    )
    put(
        path,
        {**step(6, 3.0), "seconds": 8.0},
        {"step": 6, "checkpoint": 3.0, "pause": 0.5},
    )
    put(path, {"end": 6})
    return path


def test_results(log: Path, tmp_path: Path) -> None:
    root = page(log, "-o", tmp_path / "r.html")
    assert root.all("h1")[0].text == "a <b>"
    found = {key: row[0] for key, row in root.table("Results").items()}
    assert found == {
        "steps": "6",
        "ended": "yes",
        "loss": "3 at step 6",
        "validation loss": "4.25 at step 5",
        "seconds of a step, median": "2",
        "tokens/s, median": "10",
        "slowest step": "step 6: 8 s, 4 times the median",
        "pauses for checkpoints": "1, 0.5 s together, the longest 0.5 s at step 6",
        "restarts": "1",
        "steps made again after restarts": "2",
        "skipped steps": "0",
    }
    assert root.table("Restarts of one") == {"4": ["2026-11-23T04:32:56Z", "", "2"]}
    assert root.table("Runs")["flops per step"] == ["600"]


def test_the_chart_has_the_points_of_each_log(log: Path, tmp_path: Path) -> None:
    other = tmp_path / "two.jsonl"
    put(other, run("b"), *(step(n, n / 2) for n in range(1, 9)))
    root = page(log, other, "-o", tmp_path / "r.html")
    assert root.all("h1")[0].text == "2 runs"
    (chart,) = root.charts()
    assert [s[0] for s in chart["series"]] == ["one", "two"]
    assert (chart["first"], chart["last"], chart["axis"]) == (1, 8, "step")
    tracks = {t["name"]: t["curves"] for t in chart["tracks"]}
    assert [*tracks] == ["loss", "throughput", "step time", "pauses for checkpoints"]
    drawn = [(c["series"], c["marks"], c["x"], c["y"]) for c in tracks["loss"]]
    assert drawn == [
        (0, False, [1, 2, 3, 4, 5, 6], [9.0, 7.0, 6.0, 4.5, 4.0, 3.0]),
        (0, True, [5], [4.25]),
        (1, False, [*range(1, 9)], [n / 2 for n in range(1, 9)]),
    ]
    assert root.table("Results")["steps"] == ["6", "8"]


def event(name: str, took: float, **said: object) -> dict[str, object]:
    return {"name": name, "ph": "X", "ts": 0, "dur": took, "pid": 0, "tid": 0} | (
        {"args": said} if said else {}
    )


def test_predicted_and_measured(log: Path, tmp_path: Path) -> None:
    plan = tmp_path / "time.json"
    plan.write_text(json.dumps(PLAN))
    words = [log, "--plan", plan, "-o", tmp_path / "r.html"]
    assert page(*words).table("one: a step") == {
        "seconds of a step": ["1", "2", "2.000"],
        "tokens/s": ["100", "10", "0.100"],
    }
    put(log, run("a", "--profile", str(tmp_path / "trace")), step(7, 1.0))
    assert "no trace that can be read" in page(*words).section("predicted").whole()
    events = [
        event("step 1", 9e6),
        event("fwd_block 0", 1e5, step=1),
        event("fwd_block 1", 2e5, step=2),
        event("gather", 3e6, step=2),
        event("wait", 7e6, step=2, **{"for": "gather"}),
        event("near_update_block 1", 2e5, step=2) | {"tid": 1},
        *(
            event("bwd_block 0", x, step=2) | {"pid": n}
            for n, x in ((1, 1e6), (2, 3e5))
        ),
        event("allreduce", 9e6, step=2) | {"pid": 1},
        event("update_block", 9e6, step=2) | {"pid": 1, "tid": 1},
        *(
            event("thread_name", 0) | {"ph": "M", "pid": n, "args": {"name": "main"}}
            for n in range(3)
        ),
    ]
    (tmp_path / "trace").write_text(json.dumps(events))
    root = page(*words)
    title = "one: seconds of rank 0 in a step by part, over all queues"
    assert root.table(title) == {
        "forward": ["0.25", "0.15", "0.600"],
        "all-gather": ["0.75", "1.5", "2.000"],
        "optimizer": ["0", "0.1", "-"],
    }
    title = "one: seconds in a step of queue main's kernels, the slowest ranks first"
    assert root.table(title) == {
        "1": ["0.5", "3.333"],
        "0": ["0.15", "1.000"],
        "2": ["0.15", "1.000"],
    }
    assert "not the predicted one" not in root.section("predicted").whole()
    os.mkfifo(tmp_path / "pipe")  # the trace is then looked for beside the log
    for name, there in (("elsewhere/trace", True), (str(tmp_path / "pipe"), False)):
        put(log, run("a", "--profile", name), step(7, 1.0))
        assert ("by part" in page(*words).section("predicted").whole()) == there
    for said, other in (("abc", False), ("abd", True)):
        put(log, run("a") | {"plan": said}, step(8, 1.0))
        whole = page(*words).section("predicted").whole()
        assert ("not the predicted one" in whole) == other


@pytest.mark.parametrize(
    "text,told",
    [
        (None, "No such file or directory"),
        ("{", "is not JSON; allowed: a prediction"),
        ("[]", "a list is not a JSON object"),
        ("{}", "step: empty is not a positive number"),
        (json.dumps(PLAN | {"step": 0}), "step: 0 is not a positive number"),
        (json.dumps(PLAN | {"flops": "x"}), "flops: 'x' is not a positive number"),
        (json.dumps(PLAN | {"busy": {"forward": "x"}}), "busy: is not a mapping"),
        (json.dumps(PLAN | {"busy": {"forward": math.inf}}), "busy: is not a mapping"),
        (json.dumps(PLAN | {"plan": None}), "plan: is no hash of a plan"),
    ],
)
def test_a_plan_that_is_none(
    log: Path, tmp_path: Path, text: str | None, told: str
) -> None:
    plan, out = tmp_path / "time.json", tmp_path / "r.html"
    if text is not None:
        plan.write_text(text)
    done = made(log, "--plan", plan, "-o", out)
    assert done.returncode == 2 and told in done.stderr and str(plan) in done.stderr
    assert len(done.stderr.splitlines()) == 1 and not out.exists()


def test_a_log_twice_has_two_names(log: Path, tmp_path: Path) -> None:
    (chart,) = page(log, log, "-o", tmp_path / "r.html").charts()
    assert [s[0] for s in chart["series"]] == ["one.jsonl", "one.jsonl (2)"]


def test_small_ratios_have_digits() -> None:
    assert [report.ratio(1e9, x)[2] for x in (2e9, 1e8, 123.4)] == [
        "2.000",
        "0.100",
        "1.23e-07",
    ]


def test_a_log_without_arguments() -> None:
    assert report.option({}, "--profile") == ""
    assert report.option({"arguments": ["--profile", "x"]}, "--profile") == "x"
    assert report.option({"arguments": ["--profile"]}, "--profile") == ""


def test_what_is_no_log(log: Path, tmp_path: Path) -> None:
    out, other = tmp_path / "r.html", tmp_path / "x"
    other.write_text("no record\n")
    done = made(log, other, "-o", out)
    assert done.returncode == 2 and f"{other}: not a record of a run" in done.stderr
    done = made(log, "-o", log)
    assert done.returncode == 2 and "is the input file" in done.stderr
    done = made(log, "-o", tmp_path / "none" / "r.html")
    assert done.returncode == 2 and "there is no folder" in done.stderr
    assert made(log).returncode == 2 and not out.exists()


def test_lines_that_are_no_records_are_told(log: Path, tmp_path: Path) -> None:
    with open(log, "a") as file:
        file.write("<b>\n")
    out = tmp_path / "r.html"
    done = made(log, "-o", out)
    line = f"{log}:{len(log.read_text().splitlines())}: not JSON, or cut off"
    assert done.returncode == 0 and f"run report: {line}; passed over\n" == done.stderr
    assert line in browser.parsed(out.read_text()).section("notes").whole()


def test_starts_are_those_of_the_kept_steps(tmp_path: Path) -> None:
    path = tmp_path / "log"
    put(path, run(), *(step(n, 9.0) for n in (1, 2, 3)), run(), step(3, 8.0))
    log = Log(path)
    log.read()
    assert [(s.step, s.repeated) for s in log.starts] == [(1, 0), (3, 1)]
    put(path, run("new"), step(1, 5.0))
    log.read()
    assert [(s.step, s.run["run"]) for s in log.starts] == [(1, "new")]


@pytest.mark.slow
def test_a_run_of_a_program(tmp_path: Path) -> None:
    """A real log, its trace and the program's own prediction belong together."""
    spec, keys = law.path("gpt"), ["zero.stage=3", "train.micro_batch=1"]
    binary = trainer.build(trainer.generate(spec, *keys))
    tokens, out = tmp_path / "tokens", tmp_path / "r.html"
    log, plan, trace = (tmp_path / name for name in ("log", "time.json", "trace"))
    trainer.write_tokens(tokens, law.tokens(256, 5000))
    options = ("--threads", 1, "--log", log, "--profile", trace)
    program.run(binary, "--data", tokens, "--steps", 5, *options)
    sets = [word for key in keys for word in ("--set", key)]
    assert main.main([str(spec), *sets, "--emit", "time.json", "-o", str(plan)]) == 0
    root = page(log, "--plan", plan, "-o", out)
    found = Log(log)
    found.read(True)
    assert len(found.steps) == 5
    took = statistics.median(x for n, x in found.points("seconds") if n > 1)
    rows = root.table("log: a step")
    assert rows["seconds of a step"][1] == report.number(took)
    assert "not the predicted one" not in root.section("predicted").whole()
    title = "log: seconds in a step of queue main's kernels, the slowest ranks first"
    assert {*root.table(title)} == {"0", "1"}
    parts = root.table("log: seconds of rank 0 in a step by part, over all queues")
    for part in ("forward", "backward", "all-gather", "reduce-scatter", "optimizer"):
        predicted, measured, ratio = map(float, parts[part])
        assert predicted > 0 and measured > 0
        assert ratio == pytest.approx(measured / predicted, rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("wide", browser.WIDTHS)
def test_a_browser_draws_it(wide: int, dark: bool, log: Path, tmp_path: Path) -> None:
    other, plan, out = (tmp_path / name for name in ("two", "time.json", "r.html"))
    put(other, run("b"), *(step(n, n / 2, norm=1.0) for n in range(1, 3000)))
    plan.write_text(json.dumps(PLAN))
    page(log, other, "--plan", plan, "-o", out)
    browser.check(out.read_text(), tmp_path, wide, dark)
