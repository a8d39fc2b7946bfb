"""test_runtime.py -- tests collectives and queues of the runtime, with runtime/program.c."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import numpy as np
import pytest

from tests.lib.program import (
    MICRO_BATCHES,
    PIECES,
    RANKS,
    RUNTIME,
    UNITS,
    N,
    T,
    built,
    children,
    masters,
    run,
    start,
    train,
    validation,
    wait_for_step,
    weights_line,
    written,
)

# ---- collectives


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("overlap,ahead", [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_every_number_of_ranks_computes_the_same(
    program: Path,
    data: Path,
    tmp_path: Path,
    ranks: int,
    overlap: int,
    ahead: int,
) -> None:
    done = train(
        program,
        data,
        "--val",
        data,
        "--val-every",
        2,
        "--sample",
        20,
        "--log",
        tmp_path / "log",
        RANKS=ranks,
        OVERLAP=overlap,
        AHEAD=ahead,
    )
    assert done.code == 0, done.err
    assert done.out.splitlines()[-1] == weights_line(data)
    # 6 digits printed
    assert float(done.line("val loss").split()[2]) == pytest.approx(
        validation(data), abs=1e-6
    )
    assert written(data, 20) in done.out
    # A gather brings the shards of all peers, and so do the all-to-alls of a unit; allreduces have
    # 2 + 1 integers.
    shard, units = 8 * N // ranks, MICRO_BATCHES // ranks * UNITS
    wire, count = (
        (ranks - 1) * (units * 2 * shard + 24),
        units * (1 + PIECES) + 2,
    )
    assert (
        done.line("wire")
        == f"wire {wire} bytes and {count} collectives per rank and step"
    )
    records = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    steps = [record for record in records if "loss" in record]
    assert [record["step"] for record in steps] == [1, 2, 3]
    assert [record["loss"] for record in steps] == [
        int((masters(data, step) & np.uint64(0xFF)).sum()) for step in (1, 2, 3)
    ]
    assert [record["norm"] for record in steps] == [
        ranks * ranks * step for step in (1, 2, 3)
    ]
    assert [record["step"] for record in records if "val_loss" in record] == [
        2,
        3,
    ]
    assert {record["val_loss"] for record in records if "val_loss" in record} == {
        validation(data)
    }
    assert records[-1]["wire"] == wire and records[-1]["collectives"] == count


def test_samples_wrap_at_the_end_of_the_file(program: Path, tmp_path: Path) -> None:
    path = tmp_path / "few.bin"
    # 7 samples; a step takes 48
    np.arange(7 * T + 1, dtype="<u2").tofile(path)
    assert train(program, path, RANKS=2).out.splitlines()[-1] == weights_line(path)


def test_peers_are_read_only_in_collectives(program: Path, data: Path) -> None:
    for overlap in (0, 1):
        settings = {"RANKS": 3, "OVERLAP": overlap, "AHEAD": overlap}
        done = train(program, data, ZR_UNMAP_PEERS=1, **settings)
        assert done.code == 0 and done.out.splitlines()[-1] == weights_line(data), (
            done.err
        )
        assert train(program, data, FAULT="peek", **settings).code == 0
        caught = train(program, data, FAULT="peek", ZR_UNMAP_PEERS=1, **settings)
        assert caught.code == 5 and "signal 11" in caught.err


@pytest.mark.parametrize("ranks", RANKS)
def test_what_was_given_may_be_written_after_a_collective(
    program: Path, data: Path, ranks: int
) -> None:
    done = train(program, data, EVENTS=3, RANKS=ranks)
    assert done.code == 0, done.err


@pytest.mark.parametrize("more", [12, 6])
@pytest.mark.parametrize("ranks", [2, 3])
def test_pieces_that_are_streamed(data: Path, ranks: int, more: int) -> None:
    """Streamed pieces arrive whole at places aligned to 16 bytes or not, and with a tail shorter
    than a cache line."""
    source = (RUNTIME / "cpu/collective.c").read_text()
    least = 1 << int(re.search(r"STREAMED = 1 << (\d+)", source)[1])
    unit = 3 * least // 8 + more
    binary = built("plain", f"-DUNIT={unit}", "-DTURNS=5")
    done = train(binary, data, steps=1, EVENTS=3, RANKS=ranks)
    assert done.code == 0, done.err


# ---- queues

MODES = ["late", *(f"shuffled:{seed}" for seed in range(20))]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_order_does_not_matter(program: Path, data: Path, ranks: int) -> None:
    said = {
        train(
            program, data, "--queue", mode, RANKS=ranks, OVERLAP=1, AHEAD=1
        ).out.splitlines()[-1]
        for mode in MODES
    }
    assert said == {weights_line(data)}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["full", "free", "made", "gone", "brought", "added"])
def test_a_missing_wait_shows(program: Path, data: Path, kind: str) -> None:
    right = weights_line(data)
    wrong = [
        mode
        for mode in MODES
        if train(
            program,
            data,
            "--queue",
            mode,
            SKIP=kind,
            RANKS=2,
            OVERLAP=1,
            AHEAD=1,
        ).out.splitlines()[-1:]
        != [right]
    ]
    # At least 19 of 20 seeds show each kind, as measured; a quarter of that is required.
    assert len(wrong) >= 5, f"the wait `{kind}` is missing, and only {wrong} saw it"


@pytest.mark.parametrize("what", ["unit", "grad"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_what_is_read_behind_a_last_use_shows(
    program: Path, data: Path, what: str, ranks: int
) -> None:
    """A read after a last use changes the weights in every mode but eager, whatever the order is,
    because the slot is poisoned."""
    for overlap in (0, 1):
        said = {
            mode: train(
                program,
                data,
                "--queue",
                mode,
                FAULT=what,
                RANKS=ranks,
                OVERLAP=overlap,
                AHEAD=1,
            ).out.splitlines()[-1]
            for mode in ("eager", *MODES[:5])
        }
        right = [mode for mode, line in said.items() if line == weights_line(data)]
        assert right == ["eager"]


def test_what_events_mean(program: Path, data: Path) -> None:
    for kind, mode in ((1, "eager"), (2, "late"), (4, "late")):
        done = train(program, data, "--queue", mode, EVENTS=kind, RANKS=2)
        assert done.code == 0, done.err


@pytest.mark.slow
@pytest.mark.parametrize("sanitizer", ["tsan", "asan"])
@pytest.mark.parametrize("mode", ["eager", "late", "shuffled:1", "shuffled:2"])
def test_sanitizers_are_silent(data: Path, sanitizer: str, mode: str) -> None:
    done = train(
        built(sanitizer),
        data,
        "--queue",
        mode,
        "--val",
        data,
        RANKS=2,
        OVERLAP=1,
        AHEAD=1,
        TSAN_OPTIONS="halt_on_error=1",
    )
    assert done.code == 0 and "Sanitizer" not in done.err, done.err
    assert done.out.splitlines()[-1] == weights_line(data)


@pytest.mark.slow
@pytest.mark.slow
def test_what_options_take_is_given_back(data: Path, tmp_path: Path) -> None:
    """The leak sanitizer finds nothing at the program's own end: after options that keep parts of
    their operands, and after options that end it at once."""
    asan = built("asan")
    sources = (f"--data={data}:0.5", f"--data={data.parent}/tokens.bin:2")
    all_of_it = (
        *(f"--val={data}", "--val-every=2", "--val-tokens=50"),
        *(f"--save={tmp_path}/w", "--save-dtype=bf16", "--sample=2"),
        *(f"--log={tmp_path}/log", "--hash"),
        *("--queue=shuffled:3", "--isa=avx512"),
    )
    for words in ((*sources, "--steps=3", *all_of_it), ("--help",)):
        done = run(asan, *words, ASAN_OPTIONS="detect_leaks=1")
        assert done.code == 0 and "Sanitizer" not in done.err, done.err
    missing = run(asan, f"--data={data}x:3", "--steps=1")
    assert missing.code == 2 and f"{data}x: No such file" in missing.err
    assert "Sanitizer" not in missing.err


def test_thread_sanitizer_sees_a_missing_wait(data: Path) -> None:
    done = train(
        built("tsan"),
        data,
        steps=200,
        SKIP="full",
        RANKS=1,
        OVERLAP=1,
        AHEAD=0,
        TSAN_OPTIONS="halt_on_error=1",
    )
    assert done.code == 5 and "data race" in done.err


@pytest.mark.parametrize("mode", ["eager", "late", "shuffled:3"])
def test_nothing_is_allocated_after_the_start(
    program: Path, data: Path, tmp_path: Path, mode: str
) -> None:
    """Nothing is allocated after the start: the program counts malloc from the first step on and
    makes the kernel end it at mmap or brk."""
    args = (
        "--queue",
        mode,
        "--log",
        tmp_path / "log",
        "--val",
        data,
        "--val-every",
        1,
    )
    settings = {"RANKS": 2, "OVERLAP": 1, "AHEAD": 1}
    done = train(program, data, *args, steps=20, **settings)
    assert done.code == 0, done.err
    for fault, sign in (
        ("malloc", "no allocation|signal 31"),
        ("mmap", "signal 31"),
    ):
        caught = train(program, data, *args, steps=20, FAULT=fault, **settings)
        assert caught.code == 5 and re.search(sign, caught.err)


@pytest.mark.alone
def test_gathers_hide_behind_work(program: Path, data: Path, tmp_path: Path) -> None:
    """9 gathers and 9 calls of 20 ms each take 360 ms one by one; a unit ahead, all gathers but one
    hide."""
    took = {}
    for ahead in (0, 1):
        log = tmp_path / str(ahead)
        done = train(
            program,
            data,
            "--log",
            log,
            steps=4,
            RANKS=8,
            OVERLAP=1,
            AHEAD=ahead,
            WORK_US=20000,
            ZR_GATHER_DELAY_US=20000,
        )
        assert done.code == 0, done.err
        took[ahead] = json.loads(log.read_text().splitlines()[-1])["seconds"] / 4
    assert took[0] >= 0.360  # a sleep is never shorter
    assert took[0] - took[1] >= 0.8 * 8 * 0.020


@pytest.mark.alone
def test_memory_is_the_arena_and_little_more(program: Path, data: Path) -> None:
    running = start(program, data, RANKS=2, FAULT="hang", PAD_MIB=32, OVERLAP=1)
    try:
        wait_for_step(running, 1)
        time.sleep(0.3)
        pss = [
            int(
                re.search(
                    r"^Pss:\s+(\d+)",
                    Path(f"/proc/{pid}/smaps_rollup").read_text(),
                    re.M,
                )[1]
            )
            / 1024
            for pid in children(running.pid)
        ]
    finally:
        running.terminate()
        running.wait()
    assert len(pss) == 2 and all(32 <= mib <= 32 + 16 for mib in pss), pss
