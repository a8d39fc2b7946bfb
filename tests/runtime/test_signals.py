"""test_signals.py -- tests signals that are ignored when a run starts, and that a failing rank says
why."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.lib.patience import LIMIT
from tests.lib.program import (
    children,
    environment,
    gone,
    start,
    wait_for_step,
    weights_line,
)

ENDINGS = [
    signal.SIGHUP,
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGALRM,
]


def ignoring(*numbers: signal.Signals) -> Callable[[], None]:
    def ignore() -> None:
        for number in numbers:
            signal.signal(number, signal.SIG_IGN)

    return ignore


# ---- signals that are ignored when a run starts


@pytest.mark.parametrize("number", ENDINGS)
def test_an_ignored_signal_stays_ignored(
    program: Path, data: Path, number: signal.Signals
) -> None:
    """A signal that is ignored at the start, as after nohup or a script's `&`, stays ignored.
    SIGTERM ends the run in any case."""
    limits = ignoring(number, signal.SIGTERM)
    running = start(program, data, RANKS=2, FAULT="hang", limits=limits)
    wait_for_step(running, 1)
    for _ in range(3):
        os.killpg(running.pid, number)
        time.sleep(0.1)
    assert running.poll() is None
    os.killpg(running.pid, signal.SIGTERM)
    assert running.wait(LIMIT) == 128 + signal.SIGTERM
    assert "stopped by signal 15" in running.stderr.read()


@pytest.mark.slow
def test_what_is_stopped_has_been_saved(
    program: Path, data: Path, tmp_path: Path
) -> None:
    running = start(program, data, "--save", tmp_path, "--sample", 10**9, RANKS=2)
    try:
        while not (tmp_path / "model.safetensors").exists() and running.poll() is None:
            time.sleep(0.1)
        time.sleep(0.5)  # in the sample
        running.terminate()
        assert running.wait(3) == 143
    finally:
        running.kill()
    assert "(Terminated) with weights saved after step 30\n" in running.stderr.read()
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_ranks_are_taken_in_where_nobody_takes_in_children(
    program: Path, data: Path
) -> None:
    limits = ignoring(signal.SIGCHLD)
    running = start(program, data, "--hash", RANKS=3, limits=limits)
    try:
        assert running.wait(LIMIT) == 0
    finally:
        running.kill()
    assert running.stdout.read().splitlines()[-1] == weights_line(data, 30)
    running = start(program, data, RANKS=3, FAULT="kill", limits=limits)
    try:
        assert (
            running.wait(LIMIT) == 5
            and "rank 1 was ended by signal 9" in running.stderr.read()
        )
    finally:
        running.kill()
    running = start(program, data, RANKS=3, FAULT="hang", limits=limits)
    wait_for_step(running, 1)
    ranks = children(running.pid)
    running.terminate()
    try:
        assert running.wait(LIMIT) == 143 and gone(ranks)
    finally:
        running.kill()


# ---- a failing rank gives its reason before all leave


OPEN_MPI = {"OMPI_COMM_WORLD_RANK": 1, "OMPI_COMM_WORLD_SIZE": 4}
INDEXED = {"JOB_COMPLETION_INDEX": 1}
BY_HAND = {"ZR_RANK": 1}


@pytest.mark.parametrize(
    "launcher,ranks,named",
    [
        (OPEN_MPI, 4, True),
        (INDEXED, 4, True),
        (BY_HAND, 4, True),
        # More ranks than pods, but not the same number in each
        (INDEXED, 6, True),
        (INDEXED, 8, False),  # each pod starts two ranks
        ({}, 4, False),  # no launcher
    ],
)
def test_what_is_wrong_before_ranks_start_names_who_says_it(
    program: Path,
    data: Path,
    launcher: dict[str, object],
    ranks: int,
    named: bool,
) -> None:
    running = start(program, data, "--sped", RANKS=ranks, ZR_WORLD_SIZE=4, **launcher)
    error = running.communicate(timeout=LIMIT)[1]
    who = f"rank 1 on host {socket.gethostname()}" if named else "program"
    assert running.returncode == 2 and error.startswith(
        f"{who}: --sped: no such option"
    ), error


@pytest.mark.parametrize(
    "fault,code,sign", [("kernel", 3, b"no AVX2"), ("plan", 4, b"runs plan")]
)
def test_a_reason_is_told_before_all_are_stopped(
    program: Path, data: Path, fault: str, code: int, sign: bytes
) -> None:
    """A reason of one or all ranks is printed before the ranks are stopped, even if stderr is
    slow."""
    readable, writable = os.pipe()
    fcntl.fcntl(writable, fcntl.F_SETPIPE_SZ, 4096)
    os.write(writable, bytes(4096))
    running = subprocess.Popen(
        [program, "--data", data, "--steps", "30"],
        stderr=writable,
        stdout=subprocess.DEVNULL,
        env=environment(RANKS=4, FAULT=fault),
    )
    os.close(writable)
    time.sleep(0.7)
    said = b""
    while some := os.read(readable, 65536):
        said += some
    os.close(readable)
    assert running.wait(LIMIT) == code and sign in said and said.count(b"\n") == 1


def test_a_reader_that_sleeps_does_not_hold_up_the_end(
    program: Path, data: Path
) -> None:
    readable, writable = os.pipe()
    fcntl.fcntl(writable, fcntl.F_SETPIPE_SZ, 4096)
    os.write(writable, bytes(4096))
    done = subprocess.run(
        [program, "--data", "/nonexistent", "--steps", "30"],
        stderr=writable,
        timeout=LIMIT,
        env=environment(RANKS=4),
    )
    os.close(readable)
    os.close(writable)
    assert done.returncode == 2
