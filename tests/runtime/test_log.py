"""test_log.py -- tests the messages of a run: the log of JSON lines, the start block, the progress
of long work, the time left; and the part of a file that validation uses."""

from __future__ import annotations

import json
import os
import pty
import re
import socket
import subprocess
import time
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest
from logs import Log
from safetensors.numpy import load_file

from tests.lib import law, trainer
from tests.lib.patience import patient
from tests.lib.program import (
    MICRO_BATCHES,
    STEPS,
    UNITS,
    B,
    N,
    T,
    environment,
    run,
    samples,
    start,
    train,
    validation,
    wait_for_step,
)

pytestmark = pytest.mark.waits

SAMPLES = 601  # of `data`
TOKENS = SAMPLES * T + 3
GFLOP = 1e-3  # per step of program.c


def records(log: Path) -> list[dict]:
    return [json.loads(line) for line in log.read_text().splitlines()]


# ---- the log


def test_a_run_says_what_it_is(program: Path, data: Path, tmp_path: Path) -> None:
    """The log has the arguments as given, except those that are not UTF-8, which JSON cannot
    hold."""
    log = tmp_path / os.fsdecode(b'a "log"\\\n\x01\xc3\xa9\xff')
    before = datetime.now(UTC).replace(microsecond=0)
    done = train(program, data, "--threads", 2, "--log", log, RANKS=2)
    assert done.code == 0, done.err
    found = records(log)[0]
    assert datetime.fromisoformat(found.pop("time")) >= before
    words = "--data --steps --hash --threads --log".split()
    said = found.pop("arguments")
    assert [word for word in said if word.startswith("--")] == words
    assert said[0] == str(program) and said[2] == str(data)
    assert said[-1] == str(log.parent / 'a "log"\\\n\x01é?')
    assert found == {
        "run": "program",
        "host": socket.gethostname(),
        "version": "1.2.3",
        "plan": "0123",
        "summary": "by hand",
        "kernels": "avx512",
        "data": [
            {
                "file": str(data),
                "type": "uint16",
                "tokens": TOKENS,
                "samples": SAMPLES,
                "labels": False,
                "weight": 1,
            }
        ],
        "ranks": 2,
        "threads": 2,
        "recipe": [],
        "parameters": N,
        "tokens_per_step": MICRO_BATCHES * B * T,
        "flops_per_step": 1e9 * GFLOP,
    }


@pytest.mark.parametrize("peak", [None, 0.5])
def test_a_step_has_its_own_time(
    program: Path, data: Path, tmp_path: Path, peak: float | None
) -> None:
    """The time of a step is its own: a micro-batch's calls sleep, so no step is shorter than they
    are."""
    log = tmp_path / "log"
    settings = {"ZR_PEAK_GFLOPS": peak} if peak else {}
    begun = time.monotonic()
    done = train(program, data, "--log", log, RANKS=2, WORK_US=5000, **settings)
    took = time.monotonic() - begun
    assert done.code == 0, done.err
    _, *steps, end = records(log)
    assert len(steps) == STEPS
    for number, found in enumerate(steps, 1):
        seconds = found["seconds"]
        assert MICRO_BATCHES / 2 * UNITS * 0.005 <= seconds <= took
        assert found["tokens_per_second"] == pytest.approx(
            MICRO_BATCHES * B * T / seconds, rel=1e-6
        )
        assert found["epoch"] == pytest.approx(
            number * MICRO_BATCHES * B / SAMPLES, rel=1e-15
        )
        if peak:
            assert found["share_of_peak"] == pytest.approx(
                GFLOP / seconds / peak, rel=1e-4
            )
        assert list(found) == [
            *("step", "loss", "norm", "lr", "tokens", "valid", "skipped"),
            *("epoch", "seconds", "tokens_per_second"),
            *(["share_of_peak"] if peak else []),
        ]
    assert end["seconds"] <= took
    assert end["seconds"] == pytest.approx(
        sum(found["seconds"] for found in steps), rel=1e-6
    )


def test_a_step_without_a_target_has_no_loss(
    program: Path, data: Path, tmp_path: Path
) -> None:
    """The loss of a step without a target is null in the log, as tools read it, and missing
    elsewhere; every second step here has none."""
    log = tmp_path / "log"
    given = ("--data", data, "--steps", 5, "--log", log)
    done = run(program, *given, FAULT="untargeted", RANKS=2)
    assert done.code == 0, done.err
    steps = [x for x in records(log) if "loss" in x]
    for found in steps:
        none = found["step"] % 2 == 0
        assert (found["loss"] is None) == none == (found["valid"] == 0)
        assert found["skipped"] == none
    assert done.err.count("step 2 has no target: it has no loss") == 1
    assert "step 4 has no target" not in done.err
    assert "\n2 steps of 5 had no target\n" in done.out
    assert "loss none" not in done.out
    read = Log(log)
    assert read.read()[2]["loss"] is None
    assert [n for n, _ in read.points("loss")] == [1, 3, 5]


def test_a_run_that_ends_without_a_target_says_none(program: Path, data: Path) -> None:
    given = ("--data", data, "--steps", 2)
    done = run(program, *given, FAULT="untargeted")
    assert done.code == 0, done.err
    assert done.out.startswith("loss none\n1 steps of 2 had no target\n")
    assert "step 2/2  loss none  0:00 left" in done.err


def test_runs_follow_each_other_in_a_log(
    program: Path, data: Path, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    for ranks in (1, 3):
        assert train(program, data, "--log", log, RANKS=ranks).code == 0
    found = records(log)
    kinds = ["run", *["step"] * STEPS, "end"]
    assert [next(iter(x)) for x in found] == kinds * 2
    first, second = found[: len(kinds)], found[len(kinds) :]
    assert (first[0]["ranks"], second[0]["ranks"]) == (1, 3)
    assert [x["loss"] for x in first[1:-1]] == [x["loss"] for x in second[1:-1]]


def test_the_run_of_a_model(tmp_path: Path) -> None:
    """The parameters are those that the model saves, tied weights counted once, and the summary is
    train.c's."""
    source = trainer.generate(law.path("gpt"), "cluster.ranks=2")
    trainer.write_tokens(tmp_path / "tokens", law.tokens(256, 5000))
    done = run(
        trainer.build(source),
        *("--data", tmp_path / "tokens", "--steps", 1),
        *("--save", tmp_path / "w", "--log", tmp_path / "log"),
    )
    assert done.code == 0, done.err
    found = records(tmp_path / "log")[0]
    saved = load_file(tmp_path / "w" / "model.safetensors")
    assert found["parameters"] == sum(x.size for x in saved.values())
    assert found["flops_per_step"] == float(
        re.search(r"\.flops = ([\d.e+]+),", source)[1]
    )
    assert f'.summary = "{found["summary"]}"' in source
    assert re.fullmatch(
        r"ZeRO \d, ranks 2, micro-batches \d+ of \d+ x \d+ tokens, .*",
        found["summary"],
    )


# ---- the start block


@pytest.mark.parametrize("peak,pace", [(None, 80 * 2), (40, 40)])
def test_what_is_said_before_the_first_step(
    program: Path, data: Path, peak: int | None, pace: float
) -> None:
    """The estimate uses the table's rate per thread, or the peak that was given."""
    settings = {"ZR_PEAK_GFLOPS": peak} if peak else {}
    done = train(program, data, "--threads", 1, RANKS=2, **settings)
    said = done.err.splitlines()
    step = MICRO_BATCHES * B * T
    assert said[:2] == [
        f"program: {N} parameters; by hand",
        "ranks x threads 2 x 1, kernels avx512",
    ]
    assert re.fullmatch(r"memory of a rank: arena \d+\.\d MiB", said[2])
    assert said[3] == (
        f"{data}: {TOKENS} tokens, {step} a step; --steps {STEPS} is "
        f"{STEPS * step / (SAMPLES * T):.3g} epochs"
    )
    assert said[4].startswith(
        f"a step is {GFLOP:.3g} GFLOP: estimated {GFLOP / pace:.3g} s, "
    )
    assert said[4].endswith(
        f"(at a peak of {peak} GFLOP/s; a step takes longer)"
        if peak
        else "(roughly: 80 GFLOP/s a thread are usual with avx512)"
    )
    assert "ZR_" not in done.err  # variables that the user need not have set
    assert re.fullmatch(
        r"the first step took \S+ s \(measured\), about 0:00 are left",
        said[5],
    )
    assert said[6].startswith("step 1/3 ") and len(said) == 8


def estimate(err: str) -> tuple[float, str]:
    """Return the estimated seconds of a step, and their reason."""
    said = re.search(r"^a step is .*: estimated (\S+) s, .* \((.*)\)$", err, re.M)
    return float(said[1]), said[2]


USUAL = {
    "amx": (80, 240),
    "avx512bf16": (80, 160),
    "avx512": (80, 80),
    "avx2": (55, 55),
}


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("kernels", USUAL)
def test_the_estimate_of_each_kernel_object(
    program: Path, data: Path, kernels: str, bf16: bool
) -> None:
    pace, kind = USUAL[kernels][bf16], {"PRODUCTS": "all"} if bf16 else {}
    done = train(program, data, "--threads", 1, RANKS=2, OBJECT=kernels, **kind)
    seconds, reason = estimate(done.err)
    assert reason == f"roughly: {pace} GFLOP/s a thread are usual with {kernels}"
    assert seconds == pytest.approx(GFLOP / (2 * pace), rel=1e-2)


@pytest.mark.parametrize("peak", [None, 40])
def test_a_predicted_step_is_the_estimate(
    program: Path, data: Path, peak: int | None
) -> None:
    settings = {"ZR_PEAK_GFLOPS": peak} if peak else {}
    done = train(program, data, RANKS=2, PREDICTED=1, **settings)
    assert estimate(done.err) == (0.25, "predicted for cluster.device")


def test_other_kernel_objects_have_no_estimate(program: Path, data: Path) -> None:
    done = train(program, data, OBJECT="other")
    assert f"\na step is {GFLOP:.3g} GFLOP\n" in done.err


def test_the_estimate_counts_cores_not_threads(program: Path, data: Path) -> None:
    done = train(program, data, "--threads", 64, RANKS=2)
    (cores,) = re.findall(r"share of the allowed cores is (\d+);", done.err)
    seconds, _ = estimate(done.err)
    assert seconds == pytest.approx(GFLOP / (2 * 80 * int(cores)), rel=1e-2)


def test_more_threads_than_cores_are_told_of(program: Path, data: Path) -> None:
    most = 1024
    part = max(1, len(os.sched_getaffinity(0)) // 2)
    done = run(program, "--steps", 0, "--val", data, "--threads", most, RANKS=2)
    (told,) = re.findall(
        r"^--threads (\d+): a rank's share of the allowed cores is (\d+);",
        done.err,
        re.M,
    )
    assert int(told[0]) == most and 1 <= int(told[1]) <= part


def test_a_run_without_steps_says_what_it_is(program: Path, data: Path) -> None:
    done = run(program, "--steps", 0, "--val", data, RANKS=2)
    assert done.code == 0 and len(done.err.splitlines()) == 3, done.err
    assert done.err.startswith(f"program: {N} parameters; ")


# ---- the time that is left


def test_validations_count_in_the_time_that_is_left(
    program: Path, data: Path, tmp_path: Path
) -> None:
    """Validations count in the time left. Before the first one its micro-batches are estimated as a
    third of a step's. They are as many here, so a step with its validation takes four thirds."""
    steps, log = 1000, tmp_path / "log"
    running = start(
        program,
        data,
        *("--steps", steps, "--val", data, "--val-every", 1),
        *("--val-tokens", MICRO_BATCHES * B * T, "--log", log),
        WORK_US=20000,
    )
    try:
        line = wait_for_step(running, 1)
    finally:
        running.terminate()
        running.communicate()
    took = records(log)[1]["seconds"]
    hours, minutes, seconds = re.search(
        r"  (?:(\d+):)?(\d+):(\d+) left  ", line
    ).groups()
    left = 3600 * int(hours or 0) + 60 * int(minutes) + int(seconds)
    assert left == pytest.approx(took * (steps - 1 + steps / 3), abs=1.5)


# ---- progress


def on_terminal(
    binary: Path, *args: object, code: int = 0, **settings: object
) -> tuple[str, float]:
    """Return the stderr that a terminal gets, and the seconds."""
    ours, its = pty.openpty()
    begun = time.monotonic()
    running = subprocess.Popen(
        [str(word) for word in (binary, *args)],
        stdout=subprocess.DEVNULL,
        stderr=its,
        env=environment(**settings),
    )
    os.close(its)
    text = b""
    while True:
        try:
            some = os.read(ours, 65536)
        except OSError:  # no process has it open any more
            break
        text += some
    os.close(ours)
    assert running.wait() == code, text
    said = text.decode().replace("\r\n", "\n")
    cut = re.sub(r"\r\x1b\[\?7l(.*?\x1b\[K)\x1b\[\?7h", r"\r\1", said)
    assert "?7" not in cut  # a terminal wraps the text after a line again
    return cut, time.monotonic() - begun


@pytest.mark.slow
def test_a_long_step_says_which_micro_batch_it_is_at(program: Path, data: Path) -> None:
    """A long step shows its micro-batch every two seconds on one line; the step's own line replaces
    it and stays."""
    said, took = on_terminal(program, "--data", data, "--steps", 2, WORK_US=75000)
    found = re.findall(
        rf"\r(step (\d)/2: micro-batch (\d+) of {MICRO_BATCHES}, (\d+) s(, \d:\d\d left)?)\x1b\[K",
        said,
    )
    assert 4 <= len(found) <= took / 2, said
    assert {step for _, step, *_ in found} == {"1", "2"}
    for _, step, at, seconds, left in found:
        whole = UNITS * MICRO_BATCHES * 0.075
        reached = MICRO_BATCHES * int(seconds) / whole
        assert int(at) <= reached + 2 and (took > 3 * whole or at > "1")
        assert bool(left) == (step == "2")  # nothing was measured before
    assert said.count("\n") >= 2
    lines = re.findall(r"step \d/2  loss [^\r\n\x1b]*\x1b\[K(.)", said, re.S)
    assert lines == ["\n", "\n"]  # no progress is written over a step's line


@pytest.mark.slow
def test_a_long_validation_says_which_micro_batch_it_is_at(
    program: Path, data: Path
) -> None:
    said, _ = on_terminal(program, "--steps", 0, "--val", data, RANKS=2, WORK_US=30000)
    turns = -(-SAMPLES // (2 * B))
    found = re.findall(rf"\rvalidation: micro-batch (\d+) of {turns}, ", said)
    assert found and [int(at) for at in found] == sorted(map(int, found))
    assert 1 < int(found[0]) <= turns


SLOW = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>
#include <sys/types.h>
#include <unistd.h>
#define MOVE(name, kind)                                                   \\
    ssize_t name(int fd, kind *at, size_t n, off_t where)                  \\
    {                                                                      \\
        if (n > 8192) usleep(2600000);                                     \\
        ssize_t (*real)(int, kind *, size_t, off_t) = dlsym(RTLD_NEXT, #name); \\
        return real(fd, at, n, where);                                     \\
    }
MOVE(pread, void)
MOVE(pwrite, const void)
"""


def preload(tmp_path: Path, source: str) -> Path:
    (tmp_path / "slow.c").write_text(source)
    slow = tmp_path / "slow.so"
    subprocess.run(
        ["gcc", "-shared", "-fPIC", tmp_path / "slow.c", "-o", slow],
        check=True,
    )
    return slow


@pytest.mark.slow
def test_slow_loading_and_saving_say_which_tensor_they_are_at(
    program: Path, data: Path, tmp_path: Path
) -> None:
    """Slow loading and saving show the current tensor: the disk takes 2.6 s for anything above 8
    KiB, a tensor's floats."""
    slow = preload(tmp_path, SLOW)
    weights = tmp_path / "w"
    assert run(program, "--steps", 0, "--save", weights).code == 0
    said, _ = on_terminal(
        program,
        *("--data", data, "--steps", 1, "--load", weights),
        *("--save", weights),
        LD_PRELOAD=slow,
    )
    for what in ("load", "save"):
        assert f"\r{what}: tensor 1 of 1, 2 s" in said, (what, said)
    assert said.index("load: ") < said.index("step 1/1") < said.index("save: ")


LATE = """
#define _GNU_SOURCE
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>
ssize_t write(int fd, const void *at, size_t n)
{
    if (fd == 2 && memmem(at, n, "micro-batch", 11)) usleep(3000000);
    return syscall(SYS_write, fd, at, n);
}
"""


@pytest.mark.slow
def test_a_step_that_ends_while_progress_is_written(
    program: Path, data: Path, tmp_path: Path
) -> None:
    """A step may end while progress is written, here 3 s of writing in steps of 3 s."""
    said, _ = on_terminal(
        program,
        *("--data", data, "--steps", 2),
        WORK_US=40000,
        LD_PRELOAD=preload(tmp_path, LATE),
    )
    assert "micro-batch" in said
    lines = re.findall(r"step \d/2  loss [^\r\n\x1b]*\x1b\[K(.)", said, re.S)
    assert lines == ["\n", "\n"], said


ALONE = """
#include <sys/syscall.h>
#include <unistd.h>
ssize_t write(int fd, const void *at, size_t n)
{
    int alone = fd == 2 && n == 1;
    return syscall(SYS_write, fd, alone ? "ALONE" : at, alone ? 5 : n) > 0 ? n : -1;
}
"""


def test_a_last_word_is_one_write(program: Path, data: Path, tmp_path: Path) -> None:
    """A last message below a step's progress is a single write, with the end of that line."""
    said, _ = on_terminal(
        program,
        *("--data", data, "--steps", 9),
        code=5,
        RANKS=2,
        FAULT="kill",
        LD_PRELOAD=preload(tmp_path, ALONE),
    )
    assert re.search(r"step \d/9  loss .*\nprogram: rank 1 was ended", said)
    assert "ALONE" not in said


@pytest.mark.slow
def test_progress_in_a_file_is_sparse(program: Path, data: Path) -> None:
    """Progress in a file is sparse and has no terminal codes: a step of 21 s has two lines, ten
    seconds apart."""
    done = train(program, data, steps=1, WORK_US=300000)
    assert done.code == 0 and "\r" not in done.err and "\x1b" not in done.err
    found = re.findall(
        rf"^step 1/1: micro-batch \d+ of {MICRO_BATCHES}, (\d+) s$",
        done.err,
        re.M,
    )
    assert [int(at) // 10 for at in found] == [1, 2] or done.seconds > 30


CYCLE = (
    "train.schedule={{type: OneCycle, cycle_min_lr: 1e-4, cycle_max_lr: 1e-3, "
    "cycle_first_step_size: {}}}"
)


@pytest.mark.parametrize(
    "keys,told",
    [
        ((), "step 3: --steps 2 ends before that"),
        (("train.schedule.steps=1",), "step 1: --steps 2 continues at the last"),
        (("train.schedule.steps=2",), None),
        (("train.schedule={type: constant}",), None),
        (
            (
                "train.schedule={type: WarmupDecayLR, total_num_steps: 7, "
                "warmup_num_steps: 2}",
            ),
            "step 7: --steps 2 ends before that",
        ),
        ((CYCLE.format("3"),), "step 6: --steps 2 ends before that"),
        (
            (CYCLE.format("1, cycle_second_step_size: 0"),),
            "step 1: --steps 2 continues",
        ),
        ((CYCLE.format("3, decay_step_size: 1, decay_lr_rate: 0.5"),), None),
        (
            (CYCLE.format("3, decay_step_size: 1"),),
            "step 6: --steps 2 ends before that",
        ),
    ],
)
def test_a_schedule_of_another_length_is_told(
    tmp_path: Path, keys: tuple[str, ...], told: str | None
) -> None:
    trainer.write_tokens(tmp_path / "tokens", law.tokens(256, 5000))
    usual = "train.schedule={type: cosine, warmup: 0, steps: 3, min_lr: 0}"
    binary = trainer.build(trainer.generate(law.path("gpt"), usual, *keys))
    done = run(binary, "--data", tmp_path / "tokens", "--steps", 2)
    said = re.findall(r"^the learning rate's schedule ends at (.*)$", done.err, re.M)
    assert len(said) == (told is not None)
    assert not told or said[0].startswith(told)


@pytest.mark.slow
def test_a_model_says_the_share_of_a_steps_commands(tmp_path: Path) -> None:
    """A model shows the share of a step's commands: with one micro-batch the count says nothing,
    and with accumulate: layers all begin at once. Slow gathers make a step long."""
    trainer.write_tokens(tmp_path / "tokens", law.tokens(256, 50000))
    layers = ("train.accumulate=layers", "train.micro_batch=1")
    for keys, part in (
        ((), r": micro-batch 1 of 1"),
        (layers, ""),
    ):
        keys = (
            "cluster.ranks=2",
            "zero.stage=3",
            "train.global_batch=4",
            *keys,
        )
        if not part:
            assert "zr_batch_at(z, " in trainer.generate(law.path("gpt"), *keys)
        said, _ = on_terminal(
            trainer.build(trainer.generate(law.path("gpt"), *keys)),
            *("--data", tmp_path / "tokens", "--steps", 1),
            ZR_GATHER_DELAY_US=800000,
        )
        found = re.findall(
            rf"\rstep 1/1{part}, (\d+)% of the step's commands, \d+ s\x1b",
            said,
        )
        shares = [int(share) for share in found]
        assert shares and 0 < shares[0] < 100 and shares == sorted(shares), said


@pytest.mark.slow
def test_an_emulated_gpu_says_which_micro_batch_it_is_at(
    tmp_path: Path,
) -> None:
    """An emulated GPU shows the micro-batch at work, far behind the issued one: its work is done as
    late as possible, like a device's."""
    keys = ("cluster.ranks=1", "train.global_batch=12", "train.micro_batch=2")
    trainer.write_tokens(tmp_path / "tokens", law.tokens(256, 50000))
    said, took = on_terminal(
        trainer.build(trainer.generate(law.path("gpt"), *keys), trainer.EMULATED),
        *("--data", tmp_path / "tokens", "--steps", 1),
        ZR_EMULATE="late",
    )
    found = re.findall(r"\rstep 1/1: micro-batch (\d) of 6, (\d+) s\x1b", said)
    at = [int(number) for number, _ in found]
    assert took < 5 or (at and at == sorted(at) and at[0] < 6), said
    assert "estimated" not in said


@pytest.mark.slow
def test_a_terminal_that_does_not_read_holds_up_nobody(
    program: Path, data: Path
) -> None:
    """A terminal that does not read delays no run: the parent cannot write progress and still ends
    the run when told to."""
    ours, its = pty.openpty()
    os.set_blocking(its, False)
    with pytest.raises(BlockingIOError):
        while True:
            os.write(its, b"x" * 65536)
    os.set_blocking(its, True)
    running = subprocess.Popen(
        [program, "--data", data, "--steps", "3"],
        stderr=its,
        stdout=subprocess.DEVNULL,
        env=environment(WORK_US=300000),
    )
    time.sleep(4)
    assert running.poll() is None
    begun = time.monotonic()
    running.terminate()
    assert running.wait(patient(10)) == 143
    assert time.monotonic() - begun < patient(5)
    os.close(its)
    os.close(ours)


# ---- the part of a file that validation uses


@pytest.mark.parametrize(
    "tokens,used",
    [(T, 1), (10 * T + T - 1, 10), (SAMPLES * T, SAMPLES), (10**15, SAMPLES)],
)
@pytest.mark.parametrize("ranks", [1, 3])
def test_val_tokens(
    program: Path,
    data: Path,
    tmp_path: Path,
    tokens: int,
    used: int,
    ranks: int,
) -> None:
    """Validation uses whole samples from the start of the file, as many as the given tokens
    hold."""
    log = tmp_path / "log"
    done = run(
        program,
        *("--steps", 0, "--val", data, "--val-tokens", tokens, "--log", log),
        RANKS=ranks,
    )
    assert done.code == 0, done.err
    inputs, targets = (x[:used] for x in samples(data))
    there = targets >= 0
    assert records(log)[1] == {
        "step": 0,
        "val_loss": float((inputs + 1000 * targets)[there].sum()) / there.sum(),
        "val_tokens": there.sum(),
    }
    if used == SAMPLES:
        assert records(log)[1]["val_loss"] == validation(data)


def test_tokens_that_are_not_used_are_not_looked_at(
    program: Path, tmp_path: Path
) -> None:
    stream = np.arange(20 * T + 1) % 50
    stream[10 * T + 1 :] = 200  # beyond the vocabulary
    stream.astype("<u2").tofile(tmp_path / "val")
    args = ("--steps", 0, "--val", tmp_path / "val")
    assert run(program, *args, "--val-tokens", 10 * T, RANKS=2).code == 0
    done = run(program, *args, "--val-tokens", 11 * T, RANKS=2)
    assert done.code == 2 and f"--val {tmp_path}/val: token 51 is 200" in done.err


@pytest.mark.parametrize(
    "args,why",
    [
        (("--val-tokens", 10), "--val-tokens needs --val FILE"),
        (("--val", "x", "--val-tokens", T - 1), "a sample has 5 tokens"),
        (("--val", "x", "--val-tokens", 0), "a whole number from 1 to"),
    ],
)
def test_val_tokens_that_are_refused(
    program: Path, args: tuple[object, ...], why: str
) -> None:
    done = run(program, "--steps", 0, *args)
    assert done.code == 2 and why in done.err and done.out == ""
