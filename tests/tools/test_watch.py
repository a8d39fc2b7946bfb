"""test_watch.py -- tests the command ./run watch: it follows a growing log, and passes its numbers
on."""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
import pty
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as xml
from contextlib import ExitStack
from pathlib import Path

import pytest
from logs import Log
from watch import Watch, named

from tests.lib import trainer
from tests.lib.patience import LIMIT

WATCH = (sys.executable, str(trainer.ROOT / "tools" / "watch.py"))


def run(name: str = "some", *more: str) -> dict[str, object]:
    return {"run": name, "arguments": ["--data", "x", *more]}


def step(number: int, loss: float | None, **more: object) -> dict[str, object]:
    return {"step": number, "loss": loss, "seconds": 2.0, **more}


def put(path: Path, *records: dict[str, object]) -> None:
    with open(path, "a") as file:
        file.writelines(f"{json.dumps(record)}\n" for record in records)


def environment(**more: object) -> dict[str, str]:
    path = f"{trainer.ROOT / 'gen'}:{more.pop('PYTHONPATH', '')}"
    return {**os.environ, "PYTHONPATH": path} | {
        key: str(value) for key, value in more.items()
    }


def watch(*words: object, **more: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*WATCH, *map(str, words)],
        capture_output=True,
        text=True,
        timeout=LIMIT,
        env=environment(**more),
    )


# ---- a log


def test_what_is_new_comes_once(tmp_path: Path) -> None:
    path = tmp_path / "log"
    put(path, run(), step(1, 3.0), step(2, None))
    log = Log(path)
    assert list(log.read()) == [1, 2] and log.read() == {}
    with open(path, "a") as file:
        file.write('{"step": 3, "lo')
    assert log.read() == {}
    with open(path, "a") as file:
        file.write('ss": 2.5}\n')
    put(path, {"step": 3, "val_loss": 2.75}, {"end": 3})
    assert log.read() == {3: {"step": 3, "loss": 2.5, "val_loss": 2.75}}
    assert log.points("loss") == [(1, 3.0), (3, 2.5)]
    assert log.points("val_loss") == [(3, 2.75)]
    assert log.ended


def test_a_run_that_goes_on_keeps_the_steps_before(tmp_path: Path) -> None:
    path = tmp_path / "log"
    log = Log(path)
    put(path, run(), *(step(n, 9.0) for n in range(1, 6)))
    log.read()
    put(path, run(), {"step": 3, "val_loss": 7.0}, step(4, 8.0))
    assert list(log.read()) == [3, 4]
    losses = [(1, 9.0), (2, 9.0), (3, 9.0), (4, 8.0)]
    assert log.points("loss") == losses
    again = Log(path)
    assert list(again.read()) == [1, 2, 3, 4]
    assert again.points("loss") == losses


def test_another_run_keeps_none(tmp_path: Path) -> None:
    path = tmp_path / "log"
    put(path, run(), step(1, 9.0), step(2, 9.0), run("other"), step(1, 5.0))
    log = Log(path)
    assert list(log.read()) == [1]
    assert log.points("loss") == [(1, 5.0)] and log.run["run"] == "other"


def test_a_log_that_is_written_anew(tmp_path: Path) -> None:
    path = tmp_path / "log"
    put(path, run(), step(1, 9.0), step(2, 9.0))
    log = Log(path)
    log.read()
    path.write_text("")
    put(path, run(), step(1, 4.0))
    assert log.read() and log.points("loss") == [(1, 4.0)]


ODD = {  # a line, and the reason why it is no record
    b"\xff": "not UTF-8",
    b'{"run": "\\ud800"}': "not UTF-8",
    b"\0" * 9: "not JSON, or cut off",
    b'{"step": 4, "lo': "not JSON, or cut off",
    b"[" * 100000: "not JSON, or cut off",
    b"[]": "a list is not a JSON object",
    b"5": "5 is not a JSON object",
    b"null": "empty is not a JSON object",
    b'{"loss": 2}': "a record must have one of `run`, `step` and `end`",
    b'{"run": 5}': "run: 5 is not a name",
    b'{"run": "a", "arguments": 5}': "arguments: 5 is not a list of words",
    b'{"run": "a", "arguments": [5]}': "arguments: a list is not a list of words",
    b'{"step": 4, "loss": "x"}': "loss: 'x' is not a number or null",
    b'{"step": 4, "val_loss": true}': "val_loss: true is not a number or null",
    b'{"step": 4, "loss": 1, "seconds": []}': "seconds: a list is not a number or null",
} | {
    f'{{"step": {text}, "loss": 4}}'.encode(): f"step: {told} is not a whole number from 0 "
    "to below 10^18"
    for text, told in (
        ("-1", "-1"),
        ("true", "true"),
        ("null", "empty"),
        ('"x"', "'x'"),
        ("2.5", "2.5"),
        ("1" + "0" * 18, "1e+18"),
        ("9" * 400, "empty"),
        ("9" * 5000, "empty"),
        ("Infinity", "empty"),
    )
}


@pytest.mark.parametrize("line", ODD, ids=lambda x: x[:40])
def test_lines_that_are_no_records(tmp_path: Path, line: bytes) -> None:
    """Each line that is no record is reported once and skipped; lines around it count."""
    path = tmp_path / "log"
    put(path, run())
    path.write_bytes(path.read_bytes() + line + b"\n\n")
    put(path, step(1, 2.0))
    log = Log(path)
    assert log.read() == {1: step(1, 2.0)} and log.read() == {}
    assert log.unread == [f"{path}:2: {ODD[line]}"]


@pytest.mark.parametrize(
    "text", ["NaN", "Infinity", "-Infinity", "1e999", "9" * 400, "null"]
)
def test_what_is_not_finite_is_none(tmp_path: Path, text: str) -> None:
    path = tmp_path / "log"
    put(path, run(), step(1, 2.0))
    with open(path, "a") as file:
        file.write(f'{{"step": 2, "loss": {text}, "norm": {text}}}\n')
    log = Log(path)
    assert log.read()[2] == {"step": 2, "loss": None, "norm": None}
    assert log.points("loss") == [(1, 2.0)] and not log.unread


def test_a_line_without_its_end(tmp_path: Path) -> None:
    path = tmp_path / "log"
    put(path, run(), step(1, 2.0))
    path.write_text(path.read_text().rstrip())
    log = Log(path)
    assert log.read() == {} and log.read(True) == {1: step(1, 2.0)}
    path.write_text(path.read_text()[:-9])
    log = Log(path)
    log.read(True)
    assert log.unread == [f"{path}:2: not JSON, or cut off"]


# ---- the command


def test_once(tmp_path: Path) -> None:
    """The output is text alone if there is no terminal."""
    one, other = tmp_path / "one.jsonl", tmp_path / "other.jsonl"
    put(one, run("a", "--steps", "30"), *(step(n, 5 / n) for n in range(1, 6)))
    put(other, run("b", "--steps=2"), step(1, 4.0, tokens_per_second=12.0))
    put(other, step(2, 3.0, tokens_per_second=34.4), {"end": 2})
    done = watch(one, other, "--once")
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout
    *plot, a, b = done.stdout.splitlines()
    assert a == "one  step 5/30  loss 1.0000  0:00:50 left"
    assert b == "other  step 2/2  loss 3.0000  23 tokens/s  ended"
    assert any("one loss" in line for line in plot)
    assert any(line.startswith("5┤") for line in plot)  # the highest loss


def test_losses_that_cannot_be_drawn(tmp_path: Path) -> None:
    log = tmp_path / "one.jsonl"
    put(log, run("a"), step(1, 2.0), step(2, math.nan), step(3, 1e308))
    put(log, step(4, -math.inf), step(5, 1.0))
    done = watch(log, "--once")
    assert done.returncode == 0, done.stderr
    assert "step 5  loss 1.0000" in done.stdout
    put(log, step(6, None))
    assert "step 6  loss 1.0000 at step 5" in watch(log, "--once").stdout


@pytest.mark.parametrize("columns,lines", [(1, 1), (80, 24), (300, 90)])
def test_any_log_is_drawn(tmp_path: Path, columns: int, lines: int) -> None:
    """Any log is drawn without a traceback. Lines that are no records are reported, at most five
    per log."""
    log = tmp_path / "one.jsonl"
    log.write_bytes(b"".join(line + b"\n" for line in ODD))
    put(log, run("a", "--steps", "9" * 30), {"end": 1})
    steps = (1, 2, 10**17, 10**18 - 1)
    losses = (1e308, -1e308, 5e-324, 1e29)
    for key in ("loss", "val_loss", "seconds", "tokens_per_second", "log", ""):
        put(
            log,
            *({"step": n, key: x} for n, x in zip(steps, losses, strict=True)),
        )
    done = watch(
        log,
        "--once",
        *("--svg", tmp_path / "p.svg", "--csv", tmp_path / "t.csv"),
        **{"COLUMNS": columns, "LINES": lines, "PYTHONIOENCODING": "ascii"},
    )
    assert done.returncode == 0, done.stderr
    told = [f"{log}:{n}: {why}" for n, why in enumerate(ODD.values(), 1)]
    assert done.stderr.splitlines() == [
        *(f"run watch: {text}; passed over" for text in told[:5]),
        f"run watch: {log}: {len(told) - 5} more lines passed over",
    ]
    xml.fromstring((tmp_path / "p.svg").read_text())
    with open(tmp_path / "t.csv", newline="") as file:
        assert [row["log"] for row in csv.DictReader(file)] == ["one"] * 4


def test_the_table_has_all_numbers(tmp_path: Path) -> None:
    log, table = tmp_path / "a.jsonl", tmp_path / "table.csv"
    put(log, run(), step(1, 0.1 + 0.2, skipped=0), step(2, None))
    put(log, {"step": 2, "val_loss": 1e-300}, {"end": 2})
    assert watch(log, "--csv", table).returncode == 0
    with open(table, newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows] == ["1", "2"]
    assert float(rows[0]["loss"]) == 0.1 + 0.2 and rows[1]["loss"] == ""
    assert rows[0]["skipped"] == "0" and rows[0]["val_loss"] == ""
    assert float(rows[1]["val_loss"]) == 1e-300


def test_logs_of_one_name_are_told_apart_by_their_folders() -> None:
    """Logs of one name are told apart by their folders, and no name leads out of the folder made
    for it."""
    a, b = Path("../a/log.jsonl"), Path("../b/c/log.jsonl")
    assert named([a, b]) == ["a/log.jsonl", "b/c/log.jsonl"]
    assert named([Path("log.jsonl"), Path("/log.jsonl")])[1] == "log.jsonl"
    assert named([a, Path("other.jsonl")]) == ["log", "other"]


def test_the_picture_has_a_curve_for_each(tmp_path: Path) -> None:
    logs = [tmp_path / "a.jsonl", tmp_path / "b<&.jsonl"]
    for number, log in enumerate(logs, 1):
        put(log, run(), *(step(n, 3.0 / number) for n in (1, 2)), {"end": 2})
    assert watch(*logs, "--svg", tmp_path / "p.svg").returncode == 0
    svg = xml.fromstring((tmp_path / "p.svg").read_text())
    told = [e.text for e in svg.iter() if e.tag.endswith("text")]
    assert told[0] == "2 runs: loss of 2 steps, nats a token"
    assert told[1:3] == ["a: loss 3.00", "b<&: loss 1.50"]


@pytest.mark.parametrize(
    "text,told",
    [
        (None, "No such file or directory"),
        ("", "not a record of a run"),
        ("\n\n", "not a record of a run"),
    ],
)
def test_what_is_no_log_is_told(tmp_path: Path, text: str | None, told: str) -> None:
    path = tmp_path / "log"
    if text is not None:
        path.write_text(text)
    done = watch(path, "--once")
    assert done.returncode == 2 and not done.stdout
    assert done.stderr == f"run watch: {path}: {told}\n"


@pytest.mark.parametrize("name", ["folder", "fifo"])
def test_what_is_no_file_of_lines_is_told(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    {"folder": os.mkdir, "fifo": os.mkfifo}[name](path)
    done = watch(path, "--once")
    assert done.returncode == 2 and not done.stdout
    assert done.stderr == f"run watch: {path}: not a regular file\n"


def test_a_log_that_cannot_be_read_is_told() -> None:
    done = watch("/proc/self/mem", "--once")  # nothing lies at address 0
    told = "run watch: /proc/self/mem: Input/output error\n"
    assert (done.returncode, done.stderr) == (3, told)


def test_a_file_of_something_else_is_told(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"\x7fELF\2\n\xff\n")
    done = watch(path, "--once")
    assert done.returncode == 2 and not done.stdout
    assert done.stderr.splitlines() == [
        f"run watch: {path}:1: not JSON, or cut off; passed over",
        f"run watch: {path}:2: not UTF-8; passed over",
        f"run watch: {path}: not a record of a run",
    ]


@pytest.mark.parametrize("option", ["--svg", "--csv"])
@pytest.mark.parametrize(
    "file,told,code",
    [
        ("/dev/full", "No space left on device", 3),
        ("/", "Is a directory", 2),
        ("log/x", "Not a directory", 2),
    ],
)
def test_what_cannot_be_written_is_told(
    tmp_path: Path, option: str, file: str, told: str, code: int
) -> None:
    log = tmp_path / "log"
    put(log, run(), step(1, 2.0))
    done = watch(log, "--once", option, tmp_path / file)
    assert done.stderr == f"run watch: {tmp_path / file}: {told}\n"
    assert done.returncode == code


@pytest.mark.parametrize("option", ["--svg", "--csv"])
def test_folders_are_made_below_the_current_one_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    """Folders are made below the current one alone, and another place is reported at once, before a
    run has ended."""
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    put(here / "log", run(), step(1, 2.0))
    done = watch("log", option, "../a/b/x")
    assert done.returncode == 2 and not done.stdout
    assert done.stderr == (
        f"run watch: {option} ../a/b/x: there is no folder {tmp_path / 'a'}; allowed: an existing "
        "folder, or one below the current folder, which is created\n"
    )
    assert watch("log", "--once", option, "a/b/x").returncode == 0
    assert (here / "a/b/x").is_file() and not (tmp_path / "a").exists()


def test_a_full_disk_for_stdout(tmp_path: Path) -> None:
    log = tmp_path / "log"
    put(log, run(), step(1, 2.0))
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*WATCH, str(log), "--once"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(),
        )
    assert done.stderr == "run watch: standard output: No space left on device\n"
    assert done.returncode == 3


def test_nothing_to_draw_yet(tmp_path: Path) -> None:
    path = tmp_path / "log"
    put(path, run())
    picture = tmp_path / "p.svg"
    done = watch(path, "--once", "--svg", picture)
    assert done.returncode == 2 and not picture.exists()
    assert f"{path}: no step to draw yet" in done.stderr


@pytest.mark.parametrize("end", ["end", "interrupt"])
def test_it_draws_while_the_log_grows(tmp_path: Path, end: str) -> None:
    """The plot follows the log on a terminal until the run ends or the user stops it; files are
    complete then."""
    path, table = tmp_path / "log", tmp_path / "table.csv"
    put(path, run(), step(1, 3.0))
    ours, theirs = pty.openpty()
    running = subprocess.Popen(
        [*WATCH, str(path), "--csv", str(table)],
        stdin=theirs,
        stdout=theirs,
        env=environment(TERM="xterm"),
        start_new_session=True,
    )
    os.close(theirs)
    seen = b""
    until = time.monotonic() + LIMIT

    def see(text: bytes) -> None:
        nonlocal seen
        while text not in seen:
            assert time.monotonic() < until, seen
            seen += os.read(ours, 65536)

    see(b"step 1  loss 3.0000")
    put(path, step(2, 2.5))
    see(b"step 2  loss 2.5000")
    if end == "end":
        put(path, {"end": 2})
    else:
        running.send_signal(signal.SIGINT)
    assert running.wait(LIMIT) == 0
    os.close(ours)
    assert table.read_text().splitlines()[2].startswith("log,2,2.5,")


def test_a_log_that_is_emptied_is_watched_on(tmp_path: Path) -> None:
    path = tmp_path / "log"
    put(path, run(), step(1, 3.0), step(2, 2.0))
    chosen = argparse.Namespace(log=[path], once=False, tensorboard=None, wandb=None)
    watched = Watch(chosen)
    with ExitStack() as closing:
        watched.open(closing)
        path.write_text("")
        assert not watched.look() and watched.goes_on()
        put(path, run(), step(1, 1.5), {"end": 1})
        assert watched.look() and not watched.goes_on()
    assert watched.logs[0].points("loss") == [(1, 1.5)]


# ---- other libraries: these stand-ins record the calls to them

TENSORBOARD = """
import json
class Writer:
    def __init__(self, folder):
        self.to = open(folder.replace("/", "_"), "w")
    def add_scalar(self, key, x, step):
        print(json.dumps([step, key, x]), file=self.to)
    def close(self):
        print("closed", file=self.to)
"""
WANDB = """
import json
class Run:
    def __init__(self, to):
        self.to = to
    def log(self, found, step):
        print(json.dumps([step, found]), file=self.to)
    def finish(self):
        print("closed", file=self.to)
class Error(Exception):
    pass
def init(project, name, config, reinit):
    import sys
    if project == "no key":
        raise Error("No API key configured." + sys.stdin.read())
    to = open("asked", "w")
    print(json.dumps([project, name, config["run"]]), file=to)
    return Run(to)
"""


FULL = """
import threading
class Writer:
    def __init__(self, folder):
        self.thread = threading.Thread(target=self.write)
        self.thread.start()
    def write(self):
        self.error = OSError(28, "No space left on device")
        raise self.error
    def add_scalar(self, key, x, step):
        pass
    def close(self):
        self.thread.join()
        raise self.error
"""


def stand_in(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_tensorboard_has_each_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    stand_in(tmp_path, "tensorboard/__init__.py", "")
    stand_in(tmp_path, "tensorboard/summary.py", TENSORBOARD)
    put(tmp_path / "a.jsonl", run(), step(1, 3.0), {"step": 1, "val_loss": 4})
    put(tmp_path / "a.jsonl", step(2, None), {"end": 2})
    done = watch("a.jsonl", "--tensorboard", "tb", PYTHONPATH=tmp_path)
    assert done.returncode == 0, done.stderr
    *asked, closed = (tmp_path / "tb_a").read_text().splitlines()
    assert closed == "closed"
    assert list(map(json.loads, asked)) == [
        [1, "loss", 3.0],
        [1, "seconds", 2.0],
        [1, "val_loss", 4],
        [2, "seconds", 2.0],
    ]


@pytest.mark.parametrize("words,project", [((), "zero"), (("mine",), "mine")])
def test_wandb_has_each_step(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...],
    project: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    stand_in(tmp_path, "wandb.py", WANDB)
    put(tmp_path / "a.jsonl", run(), step(1, 3.0), step(2, 2.0), {"end": 2})
    done = watch("a.jsonl", "--wandb", *words, PYTHONPATH=tmp_path)
    assert done.returncode == 0, done.stderr
    first, *asked, closed = (tmp_path / "asked").read_text().splitlines()
    assert json.loads(first) == [project, "a", "some"]
    assert list(map(json.loads, asked)) == [
        [n, {"loss": x, "seconds": 2.0}] for n, x in ((1, 3.0), (2, 2.0))
    ]
    assert closed == "closed"


def test_tensorboard_on_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk ends TensorBoard's output without its thread's traceback."""
    monkeypatch.chdir(tmp_path)
    stand_in(tmp_path, "tensorboard/__init__.py", "")
    stand_in(tmp_path, "tensorboard/summary.py", FULL)
    put(tmp_path / "a.jsonl", run(), step(1, 3.0), {"end": 1})
    done = watch("a.jsonl", "--tensorboard", "tb", PYTHONPATH=tmp_path)
    assert done.stderr == "run watch: tb: No space left on device\n"
    assert done.returncode == 3


def test_wandb_without_a_key_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A missing key of W&B is one line, and the user is not asked for it."""
    monkeypatch.chdir(tmp_path)
    stand_in(tmp_path, "wandb.py", WANDB)
    put(tmp_path / "a.jsonl", run(), step(1, 3.0), {"end": 1})
    done = watch("a.jsonl", "--wandb", "no key", PYTHONPATH=tmp_path)
    assert done.returncode == 2 and not done.stdout
    assert done.stderr == (
        "run watch: --wandb: No API key configured. (.venv/bin/wandb login stores a key; "
        "WANDB_MODE=offline needs none)\n"
    )
