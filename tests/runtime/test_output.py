"""test_output.py -- tests a run's outputs other than weights: the effect of a failure, and files
that they must not overwrite."""

from __future__ import annotations

import fcntl
import json
import os
import re
import resource
import subprocess
import time
from pathlib import Path
from typing import IO

import numpy as np
import pytest

from tests.lib.patience import LIMIT
from tests.lib.program import (
    IGNORE,
    STEPS,
    T,
    environment,
    run,
    start,
    train,
    wait_for_step,
    weights_line,
)

pytestmark = pytest.mark.waits

FULL = Path("/dev/full")


# ---- output that fails


def to(
    stdout: IO[bytes] | int, binary: Path, *args: object, **settings: object
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(word) for word in (binary, *args)],
        stdout=stdout,
        text=True,
        stderr=subprocess.PIPE,
        timeout=LIMIT,
        env=environment(**settings),
    )


def closed() -> int:
    """Return a pipe without a reader."""
    readable, writable = os.pipe()
    os.close(readable)
    return writable


@pytest.mark.parametrize(
    "sink,why", [("full", "No space left on device"), ("pipe", "Broken pipe")]
)
def test_a_failing_stdout_does_not_end_training(
    program: Path, data: Path, tmp_path: Path, sink: str, why: str
) -> None:
    stdout = os.open(FULL, os.O_WRONLY) if sink == "full" else closed()
    done = to(
        stdout,
        program,
        "--data",
        data,
        "--steps",
        5,
        "--val",
        data,
        "--val-every",
        2,
        "--log",
        tmp_path / "log",
        "--save",
        tmp_path / "w",
        RANKS=2,
    )
    os.close(stdout)
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stderr.splitlines() if "standard output" in line]
    assert said == [
        f"cannot write standard output: {why}; the run continues without it",
        f"standard output is incomplete: {why}",
    ]
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert [x["step"] for x in lines if "loss" in x] == [
        1,
        2,
        3,
        4,
        5,
    ] and "end" in lines[-1]
    assert (tmp_path / "w" / "model.safetensors").exists()


@pytest.mark.slow
def test_a_pipe_that_does_not_wait(program: Path, data: Path) -> None:
    """No line is lost in a non-blocking pipe that is read only after it is full."""
    readable, writable = os.pipe()
    fcntl.fcntl(writable, fcntl.F_SETPIPE_SZ, 4096)
    os.set_blocking(writable, False)
    running = subprocess.Popen(
        [
            program,
            "--data",
            data,
            "--val",
            data,
            "--val-every",
            "1",
            "--steps",
            "1000",
            "--hash",
        ],
        stdout=writable,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    os.close(writable)
    time.sleep(3)
    said = b""
    while some := os.read(readable, 65536):
        said += some
    os.close(readable)
    assert running.wait(LIMIT) == 0, running.stderr.read()
    assert said.count(b"val loss") == 1000 and b"\nweights " in said


@pytest.mark.parametrize(
    "args",
    [("--steps", 2, "--hash"), ("--steps", 2, "--sample", 3), ("--steps", 0)],
)
def test_what_was_asked_for_on_stdout_must_be_written(
    program: Path, data: Path, args: tuple[object, ...]
) -> None:
    """A result that was asked for on stdout must be written: a hash, a sample, or a loss without
    training."""
    with FULL.open("wb") as full:
        done = to(full, program, "--data", data, "--val", data, *args, RANKS=2)
    assert done.returncode == 3 and done.stderr.count("No space left on device") == 2
    assert (
        done.stderr.splitlines()[-1]
        == "rank 0: the requested output could not be written"
    )


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_what_a_program_says_of_itself_must_be_written(
    program: Path, option: str
) -> None:
    with FULL.open("wb") as full:
        done = to(full, program, option)
    assert (done.returncode, done.stderr) == (
        3,
        "cannot write standard output: No space left on device\n",
    )


def test_a_failing_log_does_not_end_training(program: Path, data: Path) -> None:
    done = train(program, data, "--log", FULL, RANKS=2)
    assert done.code == 0 and done.out.splitlines()[-1] == weights_line(data)
    said = [line for line in done.err.splitlines() if str(FULL) in line]
    assert said == [
        f"cannot write {FULL}: No space left on device; the run continues without it",
        f"{FULL} is incomplete: No space left on device",
    ]


@pytest.mark.slow
def test_a_log_that_may_not_grow_ends_with_a_whole_line(
    program: Path, data: Path, tmp_path: Path
) -> None:
    most = 320 << 10  # larger than the arena, which is a file, too

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))

    (tmp_path / "log").write_text("")
    done = train(program, data, "--log", tmp_path / "log", steps=3000, limits=limit)
    text = (tmp_path / "log").read_text()
    assert (
        done.code == 0 and "File too large; the run continues without it" in done.err
    ), done.err
    assert most - 400 < len(text) < most and text.endswith("}\n")
    steps = [json.loads(line)["step"] for line in text.splitlines()[1:]]
    assert steps == list(range(1, len(steps) + 1))


def test_files_do_not_take_the_place_of_what_is_closed(
    program: Path, data: Path, tmp_path: Path
) -> None:
    """A run without stdout and stderr does not write their text into a file that gets their
    descriptors."""
    command = [
        "sh",
        "-c",
        'exec "$@" <&- >&- 2>&-',
        "sh",
        str(program),
        "--data",
        str(data),
        "--steps",
        "30",
        "--save",
        str(tmp_path / "w"),
        "--log",
        str(tmp_path / "log"),
        "--val",
        str(data),
    ]
    for ranks in (1, 3):
        (tmp_path / "log").unlink(missing_ok=True)
        assert (
            subprocess.run(
                command, env=environment(RANKS=ranks), timeout=LIMIT
            ).returncode
            == 0
        )
        lines = [
            json.loads(line) for line in (tmp_path / "log").read_text().splitlines()
        ]
        assert len(lines) == 33 and "end" in lines[-1]
        raw = (tmp_path / "w" / "model.safetensors").read_bytes()
        size = int.from_bytes(raw[:8], "little")
        assert json.loads(raw[8 : 8 + size])["w"]["dtype"] == "F32"


@pytest.mark.slow
def test_the_time_that_is_left_of_a_very_long_run(program: Path, data: Path) -> None:
    """The time left is right for 10^9 steps of 2.7 s, more seconds than an int holds."""
    running = subprocess.Popen(
        [program, "--data", data, "--steps", "1000000000"],
        stderr=subprocess.PIPE,
        text=True,
        env=environment(RANKS=8, WORK_US=300000),
    )
    try:
        left = re.search(r"  (-?\d+):(-?\d+):(-?\d+) left  ", wait_for_step(running, 1))
    finally:
        running.terminate()
        running.communicate()
    assert int(left[1]) > 2**31 / 3600
    assert 0 <= int(left[2]) < 60 and 0 <= int(left[3]) < 60


# ---- files that must not be overwritten


@pytest.fixture
def weights(program: Path, tmp_path: Path) -> Path:
    """Return a directory of weights in two files behind an index, with a model's other files."""
    assert run(program, "--steps", 0, "--save", tmp_path / "w", RANKS=2).code == 0
    (tmp_path / "w" / "model.safetensors").rename(tmp_path / "w" / "part one")
    index = {"weight_map": {"w": "part one"}}
    (tmp_path / "w" / "model.safetensors.index.json").write_text(json.dumps(index))
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / "w" / name).write_text("{}")
    return tmp_path / "w"


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("option", ["--log", "--profile"])
def test_weights_are_not_written_over(
    program: Path, data: Path, weights: Path, option: str
) -> None:
    before = contents(weights)
    for name in before:
        done = train(program, data, "--load", weights, option, weights / name, RANKS=2)
        assert done.code == 2, done.err
        assert f"{option} {weights / name}: is the input file of --load" in done.err
        assert contents(weights) == before
    (weights / "model.safetensors.index.json").unlink()
    (weights / "part one").rename(weights / "model.safetensors")
    before = contents(weights)
    done = train(
        program,
        data,
        "--load",
        weights,
        option,
        weights / "model.safetensors",
        RANKS=2,
    )
    assert (
        done.code == 2
        and "is the input file of --load" in done.err
        and contents(weights) == before
    )
    # files that are not read may lie beside them
    done = train(program, data, "--load", weights, "--log", weights / "log", RANKS=2)
    assert done.code == 0, done.err


@pytest.mark.parametrize("option", ["--log", "--profile"])
def test_what_is_read_is_not_written_over(
    program: Path, data: Path, tmp_path: Path, option: str
) -> None:
    """Inputs are not overwritten: token files and files beside them, by any of their names, and a
    prompt."""
    inputs = {
        "t.bin": ("--data", data.read_bytes()),
        "meta.json": ("--data", b"{}"),
        "t.idx": ("--data", b"none"),
        "v.idx": ("--val", b"none"),
        "v.bin": ("--val", data.read_bytes()),
        "prompt": ("--prompt-tokens", bytes(4)),
    }
    for name, (_, held) in inputs.items():
        (tmp_path / name).write_bytes(held)
    options = ("--val", tmp_path / "v.bin", "--sample", 1, "--prompt-tokens")
    options = (*options, tmp_path / "prompt", option)
    before = contents(tmp_path)
    (tmp_path / "link").symlink_to("t.idx")
    for name, of in [*inputs.items(), ("link", inputs["t.idx"])]:
        done = train(program, tmp_path / "t.bin", *options, tmp_path / name)
        assert (
            done.code == 2
            and f"{option} {tmp_path / name}: is the input file of {of[0]}" in done.err
        )
    (tmp_path / "link").unlink()
    assert contents(tmp_path) == before
    options = (*options[:-1], "--log")
    done = train(program, tmp_path / "t.bin", *options, tmp_path / "other")
    assert done.code == 0, done.err


@pytest.mark.slow
def test_two_runs_do_not_write_one_log(
    program: Path, data: Path, tmp_path: Path
) -> None:
    log, other = tmp_path / "log", tmp_path / "other"
    first = start(program, data, "--log", log, RANKS=2, WORK_US=1000)
    wait_for_step(first, 1)
    other.hardlink_to(log)
    for name in (log, other):
        second = train(program, data, "--log", name, RANKS=3)
        assert (
            second.code == 2
            and f"--log {name}: another run is writing to it" in second.err
        )
    first.communicate(timeout=LIMIT)
    assert first.returncode == 0
    assert len(log.read_text().splitlines()) == 32
    assert train(program, data, "--log", log, RANKS=2).code == 0
    both = [
        start(program, data, "--log", "/dev/null", RANKS=1, WORK_US=1000)
        for _ in range(2)
    ]
    assert [one.wait(LIMIT) for one in both] == [0, 0]


def test_two_runs_do_not_write_one_profile(
    program: Path, data: Path, tmp_path: Path
) -> None:
    """Two runs do not write one profile, and leftovers of a killed run belong to no other."""
    options = ("--profile", tmp_path / "p", "--profile-steps", "20-21")
    first = start(program, data, *options, RANKS=2, FAULT="hang")
    wait_for_step(first, 1)
    second = train(program, data, *options[:2], RANKS=2)
    assert second.code == 2 and "p.part: another run is saving there" in second.err
    assert [path.name for path in tmp_path.iterdir()] == ["p.part"]
    first.kill()
    first.communicate()
    assert [path.name for path in tmp_path.iterdir()] == ["p.part"]
    third = start(program, data, *options, RANKS=2, FAULT="hang")
    wait_for_step(third, 1)
    third.terminate()
    assert third.wait(LIMIT) == 143 and list(tmp_path.iterdir()) == []


def test_a_file_system_without_locks(program: Path, data: Path, tmp_path: Path) -> None:
    """A file system without flock lets the run go on, with a message that it cannot see another
    run."""
    (tmp_path / "no.c").write_text(
        "#include <errno.h>\nint flock(int f, int o)\n"
        "{\n    (void)f, (void)o;\n    errno = ENOSYS;\n    return -1;\n}\n"
    )
    subprocess.run(
        [
            "gcc",
            "-shared",
            "-fPIC",
            tmp_path / "no.c",
            "-o",
            tmp_path / "no.so",
        ],
        check=True,
    )
    done = train(
        program,
        data,
        "--log",
        tmp_path / "log",
        RANKS=2,
        LD_PRELOAD=tmp_path / "no.so",
    )
    assert done.code == 0 and "cannot be locked (Function not implemented)" in done.err
    assert len((tmp_path / "log").read_text().splitlines()) == STEPS + 2


def test_a_log_is_not_what_is_saved(program: Path, data: Path, tmp_path: Path) -> None:
    """A log or profile is not written over saved weights, files beside them, or their temporary
    files."""
    (tmp_path / "w").mkdir()
    (tmp_path / "link").symlink_to("w")
    for option in ("--log", "--profile"):
        for file in (
            "w/model.safetensors",
            "link/model.safetensors",
            "w/.model.safetensors.part.1",
            "w/model-00001-of-00002.safetensors",
            "w/config.json",
            "w/tokenizer.json",
        ):
            done = train(
                program,
                data,
                "--save",
                tmp_path / "w",
                option,
                tmp_path / file,
            )
            assert (
                done.code == 2
                and f"{option} {tmp_path / file}: is a file that --save writes"
                in done.err
            )
    assert list((tmp_path / "w").iterdir()) == []


# ---- text for a terminal

EVIL = "\x1b[31m\n\r\x7f\x9b31m\u202eé"
# A C1 code has two bytes, the code that reverses a line three
SEEN = "?[31m?????31m???é"


def shown(text: str) -> None:
    """Assert that no control code is in a run's message."""
    assert SEEN in text
    assert all(line.isprintable() for line in text.split("\n"))


def operands(program: Path) -> list[str]:
    told = run(program, "--help").out
    return re.findall(r"^  (--[\w-]+) +[A-Z][A-Z-]* ", told, re.M)


def test_no_option_goes_to_the_terminal_as_it_is(program: Path, tmp_path: Path) -> None:
    """No option's operand reaches the terminal unescaped: a number, a word, or a file that is
    missing or cannot be made."""
    found = operands(program)
    assert {"--data", "--threads", "--resume", "--top-p"} < {*found}
    (tmp_path / "file").touch()
    for option in found:
        made = tmp_path / "file" / EVIL
        for value in (EVIL, made):
            done = run(program, "--steps=1", f"{option}={value}")
            assert done.code in (2, 3), (option, done.err)
            assert all(x.isprintable() for x in done.err.split("\n"))
            assert len(done.err.splitlines()) == 1, done.err
    for word in (f"--{EVIL}", EVIL, f"--steps={EVIL}", f"--threads={EVIL}"):
        shown(run(program, word).err)
    for given in "--queue", "--isa", "--save-dtype", "--max-time", "--top-p":
        words = ("--steps=0", given, EVIL)
        more = ["--save=x"] if given == "--save-dtype" else []
        if given == "--top-p":
            more = ["--sample=1", "--prompt-tokens=x"]
        shown(run(program, *words, *more).err)


@pytest.mark.parametrize("name", ["ZR_TIMEOUT_S", "ZR_PEAK_GFLOPS"])
def test_no_setting_goes_to_the_terminal_as_it_is(program: Path, name: str) -> None:
    shown(run(program, "--steps=0", **{name: EVIL}).err)


def test_no_name_of_a_file_goes_to_the_terminal_as_it_is(
    program: Path, data: Path, tmp_path: Path
) -> None:
    """No file name or file content reaches the terminal unescaped, from a run that goes well, one
    whose output fails, and a file's own text."""
    file = tmp_path / EVIL
    file.write_bytes(data.read_bytes())
    done = train(program, file, "--val", file, "--log", f"{file}.log")
    assert done.code == 0, done.err
    shown(done.err)
    records = (tmp_path / f"{EVIL}.log").read_bytes().split(b"\n")
    assert json.loads(records[0])["data"][0]["file"] == str(file)
    none = tmp_path / f"{EVIL}.none"
    np.full(7 * T + 1, IGNORE, "<u2").tofile(none)
    said = run(program, "--steps=0", "--val", none)
    assert said.code == 0 and "has no target" in said.out, said.err
    shown(said.out)
    twice = tmp_path / f"{EVIL}.d"
    twice.mkdir()
    (twice / "meta.json").write_text('{"format": 1')
    (twice / "train.bin").write_bytes(b"")
    shown(run(program, "--steps=1", "--data", twice).err)
    link = tmp_path / f"{EVIL}.program"
    link.symlink_to(program)
    shown(run(link, "--help").out)
    weights = tmp_path / f"{EVIL}.w"
    weights.mkdir()
    header = json.dumps(
        {EVIL: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}},
        ensure_ascii=False,
    )
    whole = header.replace("\x1b", "\\u001b").replace("\n", "\\n")
    whole = whole.encode()
    (weights / "model.safetensors").write_bytes(
        len(whole).to_bytes(8, "little") + whole + bytes(4)
    )
    shown(run(program, "--steps=0", "--load", weights).err)
