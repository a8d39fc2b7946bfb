"""test_stall.py -- tests stalled ranks, and states that must not be taken for a stall."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.lib.patience import LIMIT, busy, patient
from tests.lib.program import (
    built,
    children,
    environment,
    gone,
    start,
    train,
    wait_for_step,
    weights_line,
)

pytestmark = pytest.mark.waits

# A step of 0.7 s, nearly all of it in `use`
WORKS = {
    "RANKS": 2,
    "WORK_US": 20000,
}
SAID = re.compile(
    r"no command has finished for \d+ s \(ZR_TIMEOUT_S\): rank (\d) makes no progress in "
    r"step (\d+), queue (\w+), (?:at (\w+)|between two commands)"
    r"(?:; rank (\d) waits for it(?: at \w+)?(?: in group \w+)?)?; all ranks are stopped"
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "mode,ranks,which",
    [
        ("eager", 1, 0),
        ("eager", 2, 0),
        ("eager", 2, 1),
        ("eager", 3, 1),
        ("late", 2, 1),
        ("shuffled:1", 2, 1),
    ],
)
def test_a_stopped_rank_is_named(
    program: Path, data: Path, mode: str, ranks: int, which: int
) -> None:
    running = start(
        program,
        data,
        "--queue",
        mode,
        ZR_TIMEOUT_S=2 * busy(),
        OVERLAP=1,
        AHEAD=1,
        **WORKS | {"RANKS": ranks},
    )
    wait_for_step(running, 1)
    pids = children(running.pid)
    begun = time.monotonic()
    os.kill(pids[which], signal.SIGSTOP)
    error = running.communicate(timeout=LIMIT)[1]
    assert running.returncode == 7 and time.monotonic() - begun < patient(6), error
    found = SAID.search(error)
    assert found[1] == str(which) and gone(pids), error
    assert found[5] != found[1] and (found[5] is None) == (ranks == 1), error


@pytest.mark.parametrize("overlap", [0, 1])
def test_a_command_that_does_not_end_is_named(
    program: Path, data: Path, overlap: int
) -> None:
    done = train(
        program,
        data,
        steps=30,
        RANKS=3,
        OVERLAP=overlap,
        FAULT="hang",
        ZR_TIMEOUT_S=1,
    )
    assert done.code == 7 and done.seconds < patient(6)
    assert SAID.search(done.err).groups()[:4] == ("1", "2", "main", "use")


def test_ranks_that_wait_for_each_other(program: Path, data: Path) -> None:
    """Ranks that wait for each other, because one issues fewer gathers, are a stall though neither
    stands still by itself."""
    done = train(
        program,
        data,
        steps=30,
        RANKS=2,
        OVERLAP=1,
        FAULT="unequal",
        ZR_TIMEOUT_S=1,
    )
    assert done.code == 7 and done.seconds < patient(6)
    assert (
        "no command has finished for 1 s (ZR_TIMEOUT_S), and all ranks wait for each other"
        in done.err
    )


@pytest.mark.slow
def test_a_run_that_was_stopped_goes_on(program: Path, data: Path) -> None:
    """A run that was stopped as a whole, as by a terminal or a scheduler, goes on: the time does
    not count."""
    # commands take longer than the parent's 0.05 s between two looks, so it sees no progress
    limit = busy()
    running = start(
        program,
        data,
        "--hash",
        "--steps",
        "4",
        ZR_TIMEOUT_S=limit,
        **WORKS | {"WORK_US": 150000},
    )
    wait_for_step(running, 1)
    for _ in range(3):
        os.killpg(running.pid, signal.SIGSTOP)
        time.sleep(2.5 * limit)
        os.killpg(running.pid, signal.SIGCONT)
        time.sleep(0.3)
    out, error = running.communicate(timeout=LIMIT)
    assert running.returncode == 0, error
    assert out.splitlines()[-1] == weights_line(data, 4)


@pytest.mark.slow
def test_a_command_that_works_has_ten_times_as_long(program: Path, data: Path) -> None:
    """A command that uses a processor may take ten times as long, because a product may be slow on
    a slow or shared one."""
    done = train(
        program,
        data,
        steps=3,
        RANKS=2,
        OVERLAP=1,
        FAULT="busy",
        ZR_TIMEOUT_S=1,
    )
    assert done.code == 0 and done.seconds > 2, done.err


@pytest.mark.slow
def test_a_rank_that_is_stopped_between_steps(program: Path, data: Path) -> None:
    """Rank 0 stopped between steps, while it waits to print, is found, too."""
    readable, writable = os.pipe()
    fcntl.fcntl(writable, fcntl.F_SETPIPE_SZ, 4096)
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
            "400",
        ],
        stdout=writable,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(RANKS=2, ZR_TIMEOUT_S=2 * busy()),
    )
    os.close(writable)
    time.sleep(patient(2))  # the pipe is full by now
    pids = children(running.pid)
    os.kill(pids[0], signal.SIGSTOP)
    while os.read(readable, 65536):
        pass  # until all have ended
    os.close(readable)
    error = running.communicate(timeout=LIMIT)[1]
    assert running.returncode == 7 and SAID.search(error)[1] == "0" and gone(pids), (
        error
    )


@pytest.mark.slow
def test_a_long_command_is_no_stall(program: Path, data: Path) -> None:
    """Commands of 1.2 s are no stall, although all other ranks wait for one longer than the limit
    of 2 s."""
    limit = busy()
    done = train(
        program,
        data,
        steps=1,
        RANKS=8,
        OVERLAP=1,
        WORK_US=1200000 * limit,
        ZR_TIMEOUT_S=2 * limit,
    )
    assert done.code == 0, done.err


@pytest.mark.slow
def test_a_reader_that_sleeps_is_no_stall(program: Path, data: Path) -> None:
    """A reader that sleeps is no stall: rank 0 waits to print during training, and the others wait
    for rank 0."""
    readable, writable = os.pipe()
    fcntl.fcntl(writable, fcntl.F_SETPIPE_SZ, 4096)
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
            "400",
        ],
        stdout=writable,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(RANKS=2, ZR_TIMEOUT_S=(limit := busy())),
    )
    os.close(writable)
    time.sleep(4 * limit)
    assert running.poll() is None
    said = b""
    while some := os.read(readable, 65536):
        said += some
    os.close(readable)
    assert running.wait(LIMIT) == 0, running.stderr.read()
    assert said.count(b"val loss") == 400


@pytest.mark.slow
def test_a_slow_disk_before_and_after_training_is_no_stall(
    program: Path, data: Path, tmp_path: Path
) -> None:
    """Reserving space for the weights and saving them on a slow disk, each longer than the limit,
    is no stall."""
    limit = busy()
    (tmp_path / "slow.c").write_text(
        "#include <unistd.h>\n"
        "int fallocate(int f, int m, long at, long n)\n"
        "{\n    (void)m;\n    usleep(1600000 * LIMIT);\n    return ftruncate(f, at + n);\n}\n"
        "int fsync(int f)\n{\n    (void)f;\n    usleep(1600000 * LIMIT);\n    return 0;\n}\n"
    )
    subprocess.run(
        [
            "gcc",
            "-shared",
            "-fPIC",
            f"-DLIMIT={limit}",
            tmp_path / "slow.c",
            "-o",
            tmp_path / "slow.so",
        ],
        check=True,
    )
    done = train(
        program,
        data,
        "--save",
        tmp_path / "w",
        RANKS=2,
        ZR_TIMEOUT_S=limit,
        LD_PRELOAD=tmp_path / "slow.so",
    )
    assert done.code == 0 and done.seconds > 3 * 1.6 * limit, done.err
    assert (tmp_path / "w" / "model.safetensors").exists()


@pytest.mark.parametrize("sanitizer", ["tsan", "asan"])
def test_sanitizers_are_silent_about_a_stall(data: Path, sanitizer: str) -> None:
    done = train(
        built(sanitizer),
        data,
        steps=30,
        RANKS=2,
        OVERLAP=1,
        FAULT="hang",
        ZR_TIMEOUT_S=2,
    )
    assert done.code == 7 and "Sanitizer" not in done.err, done.err
