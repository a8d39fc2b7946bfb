"""test_ranks.py -- tests the start, the stop and failures of ranks, and the command line of a
program."""

from __future__ import annotations

import functools
import json
import os
import re
import resource
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.lib import law, namespaces, trainer
from tests.lib.patience import LIMIT, patient
from tests.lib.program import (
    IGNORE,
    RUNTIME,
    VOCAB,
    N,
    T,
    children,
    gone,
    run,
    start,
    train,
    unusual,
    wait_for_step,
)

pytestmark = pytest.mark.waits

# ---- failures


@pytest.mark.parametrize(
    "fault,sign,code",
    [
        ("kill", "rank 1 was ended by signal 9", 5),
        ("crash", "rank 1 was ended by signal 11", 5),
        ("exit9", "rank 1 ended with exit code 9, which this program does not use", 5),
        ("exit1", "rank 1 ended with exit code 1", 5),
        ("exit3", "rank 1 ended with exit code 3; all", 3),  # as kernels do
        ("exit7", "rank 1 ended with exit code 7", 7),
    ],
)
@pytest.mark.parametrize("mode", ["eager", "shuffled:1"])
def test_a_dead_rank_stops_all(
    program: Path, data: Path, fault: str, sign: str, code: int, mode: str
) -> None:
    done = train(
        program,
        data,
        "--queue",
        mode,
        steps=1000000,
        FAULT=fault,
        RANKS=4,
        OVERLAP=1,
        AHEAD=1,
    )
    assert done.code == code and sign in done.err and done.seconds < patient(5)
    assert done.err.count("rank 1") == 1


def test_a_rank_killed_from_outside(program: Path, data: Path) -> None:
    running = start(program, data, RANKS=3, FAULT="hang")
    wait_for_step(running, 1)
    ranks = children(running.pid)
    os.kill(ranks[2], signal.SIGKILL)
    assert (
        running.wait(LIMIT) == 5
        and "rank 2 was ended by signal 9" in running.stderr.read()
    )
    assert gone(ranks)


@pytest.mark.parametrize(
    "number,group",
    [
        (signal.SIGINT, True),
        (signal.SIGTERM, False),
        (signal.SIGTERM, True),
        (signal.SIGHUP, False),
        (signal.SIGQUIT, True),
        (signal.SIGUSR1, False),
        (signal.SIGUSR2, True),
        (signal.SIGALRM, True),
    ],
)
def test_signals_end_a_run_cleanly(
    program: Path,
    data: Path,
    tmp_path: Path,
    number: signal.Signals,
    group: bool,
) -> None:
    running = start(
        program,
        data,
        "--save",
        tmp_path / "w",
        "--profile",
        tmp_path / "p",
        "--profile-steps",
        "20-21",
        RANKS=3,
        FAULT="hang",
        OVERLAP=1,
    )
    wait_for_step(running, 1)
    ranks = children(running.pid)
    # The space that --save reserved
    assert len(ranks) == 3 and len(list((tmp_path / "w").iterdir())) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["p.part", "w"]
    (os.killpg if group else os.kill)(running.pid, number)
    assert running.wait(LIMIT) == 128 + number
    assert f"stopped by signal {int(number)}" in running.stderr.read()
    assert gone(ranks) and list(tmp_path.iterdir()) == [tmp_path / "w"]
    assert list((tmp_path / "w").iterdir()) == []


def test_ranks_do_not_outlive_the_parent(program: Path, data: Path) -> None:
    running = start(program, data, RANKS=3, FAULT="hang")
    wait_for_step(running, 1)
    ranks = children(running.pid)
    running.kill()
    running.wait()
    assert len(ranks) == 3 and gone(ranks)


def test_unlike_processors_train_together(program: Path, data: Path) -> None:
    """Ranks with different kernel objects of a CPU train together, because these have the same
    bits."""
    assert train(program, data, FAULT="object", RANKS=2).code == 0


@pytest.mark.parametrize("have,order", [("all", "tiles"), ("some", "pairs")])
def test_tiles_are_taken_where_every_rank_has_them(
    program: Path, data: Path, tmp_path: Path, have: str, order: str
) -> None:
    """Tiles are used if every rank has them, and the start and the log's recipe say so."""
    log = ("--log", tmp_path / "log")
    done = train(program, data, *log, PRODUCTS=have, RANKS=3)
    assert done.code == 0 and f", products by {order}\n" in done.err
    first = json.loads((tmp_path / "log").read_text().splitlines()[0])
    assert f'train.products: "{order}"' in first["recipe"]


@pytest.mark.parametrize(
    "fault,code,sign",
    [
        ("plan", 4, "runs plan 012"),
        ("abi", 4, "made for runtime"),
        ("kernel", 3, "no AVX2"),
        (
            "skip",
            6,
            "20 steps in a row, up to step 20, were not finite or had no targets; lower the "
            "learning rate, or check the data",
        ),
        ("huge", 3, "of memory (2 ranks x"),
    ],
)
def test_what_cannot_go_on_says_why(
    program: Path, data: Path, fault: str, code: int, sign: str
) -> None:
    done = train(program, data, steps=30, FAULT=fault, RANKS=2, OVERLAP=1)
    assert done.code == code and sign in done.err and done.seconds < patient(5)
    assert len(unusual(done.err)) == 1, done.err


def test_memory_that_is_asked_for(program: Path, data: Path) -> None:
    """The requested memory is the arena and the kernels' share: program.c says 1 MiB per thread,
    and ZR_SUM has one."""
    asked = [
        int(re.search(r"2 ranks x (\d+) bytes", done.err)[1])
        for threads in (1, 5)
        for done in [train(program, data, "--threads", threads, FAULT="huge", RANKS=2)]
    ]
    assert asked == [(1 << 45) + (threads + 1 << 20) for threads in (1, 5)]


@pytest.mark.parametrize(
    "name",
    ["WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"],
)
def test_a_launcher_must_agree(program: Path, data: Path, name: str) -> None:
    for size, ranks, code in (
        (3, 2, 4),
        (2, 2, 4),
        (2, 1, 4),
        ("x", 2, 4),
        (1, 2, 0),
        (1, 1, 0),
    ):
        done = train(program, data, RANKS=ranks, **{name: size})
        assert done.code == code, done.err
        assert code == 0 or (name in done.err and done.out == "")


def test_limits_of_this_host(program: Path, data: Path, tmp_path: Path) -> None:
    def address_space() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (200 << 20, 200 << 20))

    def file_size() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))

    done = train(program, data, PAD_MIB=256, RANKS=2, limits=address_space)
    assert done.code == 3 and "of an arena" in done.err

    def stack() -> None:
        resource.setrlimit(resource.RLIMIT_STACK, (64 << 10, 64 << 10))

    done = train(program, data, PAD_MIB=256, RANKS=2, limits=file_size)
    assert done.code == 3 and "memory file" in done.err
    done = train(program, data, RANKS=2, limits=stack)
    assert (
        done.code == 3
        and "the stack limit is 64 KiB, but 128 KiB are needed (ulimit -s)" in done.err
    )


@pytest.mark.parametrize(
    "family,keys",
    [
        ("gpt", ()),
        ("llama", ("train.precision=bf16", "train.optimizer.masters=false")),
        (
            "qwen3",
            (
                "train.precision=f16",
                "zero.offload_optimizer.device=nvme",
                "zero.offload_optimizer.nvme_path=.",
            ),
        ),
    ],
)
def test_a_small_stack(tmp_path: Path, family: str, keys: tuple[str, ...]) -> None:
    """A stack of 128 KiB is enough for the ranks' own threads and those that they start."""
    source = trainer.generate(
        law.path(family), "zero.stage=3", "cluster.ranks=2", *keys
    )
    binary = trainer.build(source)
    trainer.write_tokens(tmp_path / "tokens", law.tokens(256, 5000))
    said = set()
    for limit in (128 << 10, 8 << 20):
        for load in ((), ("--load", tmp_path / "w")):
            done = run(
                binary,
                "--data",
                tmp_path / "tokens",
                "--steps",
                2,
                *load,
                "--save",
                tmp_path / "w",
                "--log",
                tmp_path / "log",
                "--profile",
                tmp_path / "p",
                "--val",
                tmp_path / "tokens",
                "--sample",
                3,
                "--hash",
                *(("--nvme", tmp_path) if "nvme" in str(keys) else ()),
                "--threads",
                2,
                limits=functools.partial(
                    resource.setrlimit, resource.RLIMIT_STACK, (limit, limit)
                ),
            )
            assert done.code == 0, done.err
            said.add((load, done.line("weights")))
    assert len(said) == 2


@pytest.mark.parametrize(
    "names",
    [
        ("memory.max", "memory.current", "inactive_file"),
        (
            "memory/memory.limit_in_bytes",
            "memory/memory.usage_in_bytes",
            "total_inactive_file",
        ),
    ],
)
def test_the_limit_of_the_memory_group(
    program: Path, data: Path, tmp_path: Path, names: tuple[str, str, str]
) -> None:
    """The limit of the memory group holds, with a made-up /sys/fs/cgroup of either version: of 80
    MiB 44 are in use, 4 of which can be reclaimed."""
    alone = namespaces.mounts("/sys/fs/cgroup")
    groups = tmp_path / "cgroup"
    (groups / "memory").mkdir(parents=True)
    (groups / names[0]).write_text(f"{80 << 20}\n")
    (groups / names[1]).write_text(f"{44 << 20}\n")
    (groups / names[0]).with_name("memory.stat").write_text(
        f"cache 7\n{names[2]} {4 << 20}\n"
    )
    for pad, code in ((16, 0), (21, 3)):
        command = (
            f"mount --bind {groups} /sys/fs/cgroup && "
            f"exec {program} --data {data} --steps 1 --threads 1"
        )
        done = run(
            Path("/usr/bin/env"),
            *alone,
            "sh",
            "-c",
            command,
            RANKS=2,
            PAD_MIB=pad,
        )
        assert done.code == code, done.err
        assert code == 0 or "allows 0.039 GiB more" in done.err


@pytest.mark.parametrize(
    "args,sign",
    [
        ((), "--steps N is needed"),
        (("--steps", "1"), "--data FILE is needed"),
        (("--steps",), "--steps needs N"),
        (("--data",), "--data needs FILE"),
        (("--nvme", ""), "--nvme needs DIR"),
        (("--steps", "x"), "whole number"),
        (("--steps", "-1"), "whole number"),
        (("--steps", "1e3"), "whole number"),
        (("--steps", "99999999999999999999"), "whole number"),
        (("--steps", ""), "--steps needs N"),
        (("--steps=",), "--steps needs N"),
        (("--steps=x",), "--steps x: a whole number"),
        (("--steps=0", "--threads=0"), "from 1 to"),
        (("--hash=1",), "--hash takes no value"),
        (("--step=1",), "--step=1: no such option; did you mean --steps? "),
        (("--bogus=1",), "--bogus=1: no such option; see --help"),
        (("--svae", "w"), "--svae: no such option; did you mean --save? "),
        (("--=1",), "no such option"),
        (("-x",), "-x: no such option"),
        (("--stepps", "1"), "no such option"),
        (("extra",), "no such option"),
        (("--steps", "0", "--threads", "0"), "from 1 to"),
        (("--steps", "0", "--queue", "fast"), "eager, late"),
        (("--steps", "0", "--queue", "shuffled:"), "whole number"),
        (("--steps", "0", "--val-every", "2"), "--val FILE"),
        (("--steps", "0", "--sample", "3"), "--val FILE, --data FILE or"),
        (
            ("--steps", "0", "--tokens", "uint16"),
            "--tokens needs --data FILE or --val FILE",
        ),
        (
            ("--steps", "0", "--val", "f", "--tokens", "int64"),
            "--tokens int64: uint16 or uint32 is needed",
        ),
        (
            ("--steps", "0", "--drop-unknown"),
            "--drop-unknown needs --load DIR",
        ),
        (
            ("--steps", "1", "--data", "/nonexistent"),
            "/nonexistent: No such file",
        ),
        (
            ("--steps", "0", "--val", "/nonexistent"),
            "/nonexistent: No such file",
        ),
        (("--steps", "0", "--load", "/nonexistent"), "/nonexistent"),
        (
            ("--steps", "0", "--log", "/nonexistent/log"),
            "/nonexistent/log: No such file",
        ),
    ],
)
def test_bad_options(program: Path, args: tuple[str, ...], sign: str) -> None:
    done = run(program, *args, RANKS=3)
    assert (
        done.code == 2
        and sign in done.err
        and done.out == ""
        and len(done.err.splitlines()) == 1
    ), done.err


def test_options_with_their_values(program: Path, data: Path, tmp_path: Path) -> None:
    """--option=VALUE means --option VALUE, whatever else the value contains, and -h means
    --help."""
    said = [
        run(program, *words, RANKS=2)
        for words in (
            (
                "--data",
                data,
                "--steps",
                3,
                "--hash",
                "--log",
                tmp_path / "a=b",
            ),
            (
                f"--data={data}",
                "--steps=3",
                "--hash",
                f"--log={tmp_path / 'c=d'}",
            ),
        )
    ]
    assert [done.code for done in said] == [0, 0] and (tmp_path / "c=d").exists()
    assert said[0].out.splitlines()[-1] == said[1].out.splitlines()[-1]
    help_ = [
        run(program, *words, RANKS=2)
        for words in (("--help",), ("-h",), ("--steps=1", "-h"))
    ]
    assert {(done.code, done.out, done.err) for done in help_} == {
        (0, help_[0].out, "")
    }
    assert "--option=VALUE" in help_[0].out and "or -h" in help_[0].out


def test_tokens_beyond_the_vocabulary_are_found_at_the_start(
    program: Path, tmp_path: Path
) -> None:
    tokens = np.ones(600 * T + 1, "<u2")
    tokens[400 * T] = VOCAB
    tokens.tofile(tmp_path / "bad.bin")
    done = train(program, tmp_path / "bad.bin", steps=20, RANKS=3)
    assert (
        done.code == 2
        and f"token {400 * T} is {VOCAB}" in done.err
        and "step" not in done.err
    )
    # one step takes 48 samples; tokens that the run does not use are not checked
    assert train(program, tmp_path / "bad.bin", steps=1, RANKS=3).code == 0


@pytest.mark.parametrize("option", ["--data", "--val"])
def test_tokens_of_another_type_are_no_tokens(
    program: Path, tmp_path: Path, option: str
) -> None:
    """uint32 read as uint16 is refused, because every second token is 0, whoever named the type."""
    file, steps = tmp_path / "wide.bin", 1 if option == "--data" else 0
    np.arange(600 * T + 1, dtype="<u4").__mod__(VOCAB).tofile(file)
    args = option, file, "--steps", steps
    for more in (), ("--tokens", "uint16"):
        done = run(program, *args, *more, RANKS=2)
        assert done.code == 2 and f"{file}: looks like uint32" in done.err
        assert "): --tokens uint32" in done.err
    assert run(program, *args, "--tokens", "uint32", RANKS=2).code == 0


def test_weights_without_a_place_must_be_dropped_by_name(
    program: Path, data: Path, tmp_path: Path
) -> None:
    """Weights without a place must be dropped by name, or nothing is trained or saved without
    them."""
    loaded = tmp_path / "in" / "model.safetensors"
    assert train(program, data, "--save", loaded.parent, RANKS=2).code == 0
    save_file({**load_file(loaded), "q_norm.weight": np.zeros(3, np.float32)}, loaded)
    args = "--load", loaded.parent, "--save", tmp_path / "out"
    done = train(program, data, *args, RANKS=2)
    assert done.code == 2 and "q_norm.weight; use a spec that has them" in done.err
    assert "step" not in done.err and not [*(tmp_path / "out").iterdir()]
    done = train(program, data, *args, "--drop-unknown", RANKS=2)
    assert done.code == 0 and "ignored" in done.err and "q_norm.weight" in done.err
    assert "q_norm.weight" not in load_file(tmp_path / "out" / "model.safetensors")


def test_a_log_gets_what_a_run_says_that_goes_on(
    program: Path, data: Path, tmp_path: Path
) -> None:
    log, bad = tmp_path / "log", tmp_path / "bad.bin"
    log.write_text("of an earlier run\n")
    np.full(600 * T + 1, VOCAB, "<u2").tofile(bad)
    for args in (
        ("--data", "/nonexistent", "--steps", 1),
        ("--data", bad, "--steps", 1),
        ("--steps", 0, "--val", bad),
        ("--steps", 0, "--load", tmp_path),
        ("--steps", 0, "--save", log),
    ):
        assert run(program, *args, "--log", log, RANKS=3).code in (2, 3)
        assert log.read_text() == "of an earlier run\n", args
    assert train(program, data, "--log", log, RANKS=3).code == 0
    first, *lines = log.read_text().splitlines()
    assert first == "of an earlier run"
    assert [json.loads(line).get("step") for line in lines] == [
        None,
        1,
        2,
        3,
        None,
    ]


@pytest.mark.parametrize("option", ["--data", "--val"])
def test_a_log_is_not_written_over_the_data(
    program: Path, data: Path, tmp_path: Path, option: str
) -> None:
    tokens, other = tmp_path / "tokens.bin", tmp_path / "other"
    shutil.copy(data, tokens)
    other.hardlink_to(tokens)
    steps = 1 if option == "--data" else 0
    for log in (tokens, other):
        done = run(program, option, tokens, "--steps", steps, "--log", log, RANKS=2)
        assert done.code == 2 and f"is the input file of {option}" in done.err
        assert tokens.read_bytes() == data.read_bytes()


@pytest.mark.parametrize(
    "name,bad",
    [
        ("ZR_GATHER_DELAY_US", ("abc", "-1", "1.5", "99999999999")),
        ("ZR_UNMAP_PEERS", ("yes", "2")),
        ("ZR_PEAK_GFLOPS", ("abc", "-1", "nan", "inf", "1x")),
        ("ZR_TIMEOUT_S", ("abc", "-1", "1.5", "1000001")),
    ],
)
def test_settings_in_the_environment(
    program: Path, data: Path, name: str, bad: tuple[str, ...]
) -> None:
    for text in bad:
        done = train(program, data, RANKS=2, **{name: text})
        assert done.code == 2 and f"{name} {text}: a " in done.err and done.out == "", (
            text
        )
        assert len(done.err.splitlines()) == 1
    for text in ("", "0", "1"):
        assert train(program, data, RANKS=2, **{name: text}).code == 0, text


def test_validation_over_nothing(program: Path, tmp_path: Path) -> None:
    np.full(7 * T + 1, IGNORE, "<u2").tofile(tmp_path / "val.bin")
    done = run(
        program,
        "--steps",
        0,
        "--val",
        tmp_path / "val.bin",
        "--log",
        tmp_path / "log",
        RANKS=2,
    )
    assert done.code == 0 and "val.bin has no target" in done.line("val loss none")
    record = json.loads((tmp_path / "log").read_text().splitlines()[1])
    assert record == {"step": 0, "val_loss": None, "val_tokens": 0}


def test_numbers_that_json_lacks(program: Path, data: Path, tmp_path: Path) -> None:
    assert train(program, data, "--log", tmp_path / "log", FAULT="nan").code == 0
    assert json.loads((tmp_path / "log").read_text().splitlines()[1])["loss"] is None


# ---- the rest of the surface


def weights(folder: Path) -> np.ndarray:
    raw = (folder / "model.safetensors").read_bytes()
    size = int.from_bytes(raw[:8], "little")
    entry = json.loads(raw[8 : 8 + size])["w"]
    assert entry["dtype"] == "F32" and entry["shape"] == [N // 8, 8]
    return np.frombuffer(raw[8 + size :], "<f4")[
        entry["data_offsets"][0] // 4 : entry["data_offsets"][1] // 4
    ]


def test_weights_go_out_and_in_over_any_ranks(program: Path, tmp_path: Path) -> None:
    """Weights pass between any numbers of ranks. The program's weights are 1 .. N, and it doubles
    the loaded ones."""
    for step, ranks in enumerate((3, 1, 8)):
        load = ("--load", tmp_path / str(step - 1)) if step else ()
        done = run(
            program,
            "--steps",
            0,
            *load,
            "--save",
            tmp_path / str(step),
            RANKS=ranks,
        )
        assert done.code == 0, done.err
        assert np.array_equal(
            weights(tmp_path / str(step)), np.arange(1, N + 1) * 2**step
        )
        assert [path.name for path in (tmp_path / str(step)).iterdir()] == [
            "model.safetensors"
        ]


def test_a_place_that_takes_no_weights_is_told_before_training(
    program: Path, data: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    for place in (
        tmp_path / "file",
        tmp_path / "file" / "sub",
        Path("/proc/weights"),
    ):
        done = train(program, data, "--save", place, RANKS=2)
        assert done.code == 2 and str(place) in done.err and "step" not in done.err


def test_two_runs_that_save_in_one_place(
    program: Path, data: Path, tmp_path: Path
) -> None:
    """The second of two runs that save in one place is refused, and the first ends undisturbed."""
    part = tmp_path / "w" / ".model.safetensors.part"
    first = start(program, data, "--save", tmp_path / "w", RANKS=2, WORK_US=1000)
    wait_for_step(first, 1)
    before = part.stat().st_ino
    for ranks in (1, 3):
        second = train(program, data, "--save", tmp_path / "w", RANKS=ranks)
        assert second.code == 2 and "another run is saving there" in second.err
        assert part.stat().st_ino == before
    first.communicate(timeout=LIMIT)
    assert first.returncode == 0
    assert [path.name for path in (tmp_path / "w").iterdir()] == ["model.safetensors"]
    assert np.array_equal(weights(tmp_path / "w"), np.arange(1, N + 1))


def test_weights_that_get_no_name_stay(
    program: Path, data: Path, tmp_path: Path
) -> None:
    """Weights that cannot get their name, because a folder takes it during training, stay under
    another."""
    running = start(program, data, "--save", tmp_path, RANKS=2, WORK_US=2000)
    wait_for_step(running, 1)
    (tmp_path / "model.safetensors").mkdir()
    _, err = running.communicate(timeout=LIMIT)
    assert running.returncode == 3
    part = tmp_path / ".model.safetensors.part"
    assert f"{part.name} (model.safetensors)" in err
    (tmp_path / "model.safetensors").rmdir()
    part.rename(tmp_path / "model.safetensors")
    assert np.array_equal(weights(tmp_path), np.arange(1, N + 1))


def test_what_a_killed_run_left_is_cleared(
    program: Path, data: Path, tmp_path: Path
) -> None:
    running = start(program, data, "--save", tmp_path, RANKS=2, FAULT="hang")
    wait_for_step(running, 1)
    running.kill()
    running.communicate()
    assert [path.name for path in tmp_path.iterdir()] == [".model.safetensors.part"]
    assert train(program, data, "--save", tmp_path, RANKS=2).code == 0
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_help_and_version(program: Path) -> None:
    said = run(program, "--help")
    assert said.code == 0 and all(
        f"  {code}  " in said.out for code in (0, 2, 3, 4, 5, 6)
    )
    for option in (
        "data",
        "steps",
        "val",
        "load",
        "save",
        "log",
        "threads",
        "queue",
        "hash",
        "version",
        "sample",
    ):
        assert f"--{option} " in said.out
    said = run(program, "--version")
    assert said.code == 0 and said.out.splitlines() == [
        "program, 1 ranks",
        "version 1.2.3",
        "plan 0123",
        "layout 4567",
        "train.c cbf29ce484222325",  # of an empty text
        "sources 89ab",
        "kernels avx512",
        "memory some",
    ]


def test_the_share_of_the_peak(program: Path, data: Path) -> None:
    assert "% of peak)" in train(program, data, ZR_PEAK_GFLOPS=100).err
    assert "peak" not in train(program, data).err
    low = train(program, data, ZR_PEAK_GFLOPS=1e-12).err
    assert "at a peak of 1e-12 GFLOP/s" in low and "% of peak" not in low


def lines_of(paths: Iterator[Path]) -> list[str]:
    return [
        f"{path.name}:{number}: {line}"
        for path in paths
        for number, line in enumerate(path.read_text().splitlines(), 1)
    ]


def test_the_runtime_decides_nothing() -> None:
    """The runtime decides nothing: its sources have no words for how state is split or for
    prefetch, and interpret nothing."""
    lines = lines_of(RUNTIME.rglob("*.[ch]"))
    assert not [line for line in lines if re.search(r"\bstage\b|prefetch|\bW\b", line)]
    assert not [line for line in lines if re.search(r"\bswitch\s*\(", line)]
