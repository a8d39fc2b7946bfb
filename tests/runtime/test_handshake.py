"""test_handshake.py -- tests the digest of a program's sources, and the facts that separately
started ranks compare before they work together: started by hand, like a launcher, under
emulation."""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import socket
import struct
import subprocess
import time
from collections.abc import Mapping

import numpy as np
import pytest

from tests.cuda import test_cuda
from tests.lib import choices, namespaces, program, trainer
from tests.lib.choices import Example
from tests.lib.patience import LIMIT
from tests.lib.trainer import ROOT
from tests.runtime import test_launcher

pytestmark = pytest.mark.waits

# ---- the digest of the sources

DIGESTS = ("cpu", "cuda")
SHARED = [
    ROOT / "VERSION",
    *(path for path in ROOT.glob("runtime/*") if path.is_file()),
    *ROOT.glob("kernels/*.h"),
    *ROOT.glob("kernels/cpu/*"),
]
OF = {
    "cpu": [*SHARED, *ROOT.glob("runtime/cpu/*")],
    "cuda": [
        *SHARED,
        *ROOT.glob("runtime/cuda/*.*"),
        *ROOT.glob("kernels/cuda/*.cu"),
        *ROOT.glob("kernels/cuda/*.h"),
    ],
}


def digests(root: pathlib.Path) -> list[str]:
    files = [f"out/o/{name}.digest.c" for name in DIGESTS]
    subprocess.run(["ninja", "--quiet", *files], cwd=root, check=True, timeout=LIMIT)
    return [
        re.fullmatch(
            r'const char zr_digest\[\] = "([0-9a-f]{64})", .*;\n',
            (root / file).read_text(),
        )[1]
        for file in files
    ]


@pytest.mark.slow
def test_a_change_of_any_source_is_another_program(
    tmp_path: pathlib.Path,
) -> None:
    root = trainer.checkout(tmp_path / "sources")
    before = digests(root)
    assert len(OF["cpu"]) > 40 and len(OF["cuda"]) > 50
    for path in sorted({*OF["cpu"], *OF["cuda"]}):
        copy = root / path.relative_to(ROOT)
        text = copy.read_bytes()
        copy.write_bytes(text + b"\n")
        now = digests(root)
        want = [path in OF[name] for name in DIGESTS]
        assert [a != b for a, b in zip(before, now, strict=True)] == want, path
        copy.write_bytes(text)
    assert digests(root) == before


def test_the_same_sources_are_the_same_program(tmp_path: pathlib.Path) -> None:
    """The same sources give the same program in any folder and by any compiler, without a new
    build."""
    root = trainer.checkout(tmp_path / "sources")
    made = digests(root)
    stamp = (root / "out/o/cpu.digest.c").stat().st_mtime_ns
    assert (
        digests(root) == made
        and (root / "out/o/cpu.digest.c").stat().st_mtime_ns == stamp
    )
    assert digests(ROOT) == made
    source = trainer.generate(ROOT / "model_specs/gpt-tiny.yaml")
    for kind in (trainer.GCC, trainer.CLANG):
        if shutil.which(kind.compiler):
            done = program.run(trainer.build(source, kind), "--version")
            assert done.line("sources ") == f"sources {made[0]}"


def test_a_programs_object_follows_its_sources(tmp_path: pathlib.Path) -> None:
    """A linked program has a new digest after a kernel's header has changed."""
    root = trainer.checkout(tmp_path / "sources")
    header, held = root / "kernels/update.h", []
    for text in (
        header.read_text(),
        header.read_text().replace("eps", "eps * 3"),
    ):
        header.write_text(text)
        subprocess.run(
            ["ninja", "--quiet", "out/o/cc/digest.o"],
            cwd=root,
            check=True,
            timeout=LIMIT,
        )
        held += re.findall(rb"[0-9a-f]{64}", (root / "out/o/cc/digest.o").read_bytes())
        assert held[-1].decode() == digests(root)[0]
    assert len(set(held)) == len(held) == 2


# ---- ranks that are started separately


@pytest.fixture(scope="module")
def emulated() -> pathlib.Path:
    return trainer.build(
        trainer.generate(test_cuda.SPEC, *test_cuda.SMALL), trainer.EMULATED
    )


@pytest.fixture(scope="module")
def files(
    tmp_path_factory: pytest.TempPathFactory, emulated: pathlib.Path
) -> pathlib.Path:
    """Return a folder of tokens; copies elsewhere, others of the same size, and more of them; equal
    files of multiple choice; weights of this model, a copy, and others."""
    folder = tmp_path_factory.mktemp("handshake")
    tokens = np.arange(2_000_000) ** 2 % 251
    trainer.write_tokens(folder / "tokens", tokens)
    trainer.write_tokens(folder / "again", tokens)
    trainer.write_tokens(folder / "few", tokens[:500])
    trainer.write_tokens(folder / "as-few", tokens[:500])
    trainer.write_tokens(folder / "more", [*tokens, 1])
    for name, context in (("asked", 1), ("as-asked", 1), ("otherwise", 2)):
        example = Example([context], [[3], [4, 5]], 1)
        (folder / name).write_bytes(choices.file([example] * 3))
    tokens[1_000_000:1_100_000] = 7
    trainer.write_tokens(folder / "other", tokens)
    for name, steps in (("weights", 0), ("same", 0), ("trained", 1)):
        trainer.sh(
            emulated,
            "--data",
            folder / "tokens",
            "--steps",
            steps,
            "--save",
            folder / name,
        )
    return folder


def together(
    programs: list[pathlib.Path],
    folder: pathlib.Path,
    *options: str,
    more: Mapping[int, dict[str, str]] = {},
) -> list[tuple[int, str]]:
    """Return the exit codes and messages of ranks 0 and 1, each started with options of its own."""
    port = test_cuda.free_port()
    runs = [
        subprocess.Popen(
            [binary, *given.split()],
            cwd=folder,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=os.environ
            | {k: str(v) for k, v in test_cuda.torchrun(port, rank).items()}
            | more.get(rank, {}),
        )
        for rank, (binary, given) in enumerate(zip(programs, options, strict=True))
    ]
    try:
        said = [run.communicate(timeout=LIMIT)[1] for run in runs]
    finally:
        for run in runs:
            run.kill()
    return [(run.returncode, text) for run, text in zip(runs, said, strict=True)]


STEP = "--data tokens --steps 1"
FOUR = ("train.micro_batch=1", "train.global_batch=4", "cluster.ranks=4")
SAMPLES = r"samples [0-9a-f]{16}"
UNLIKE = {
    "steps": (
        STEP,
        "--data tokens --steps 2",
        "was started with --data --steps 2, rank 0 with --data --steps 1; start all ranks",
    ),
    "hash": (
        STEP,
        f"{STEP} --hash",
        "with --data --steps 1 --hash, rank 0 with --data --steps 1;",
    ),
    "val": (
        f"{STEP} --val tokens",
        STEP,
        "with --data --steps 1, rank 0 with .* --val;",
    ),
    "val-every": (
        f"{STEP} --val tokens --val-every 3",
        f"{STEP} --val tokens --val-every 4",
        "--val-every 4, rank 0 with .* --val-every 3;",
    ),
    "load": (
        STEP,
        f"{STEP} --load weights",
        "--steps 1 --load, rank 0 with --data --steps 1;",
    ),
    "save": (
        STEP,
        f"{STEP} --save unused",
        "--steps 1 --save, rank 0 with --data --steps 1;",
    ),
    "queue": (
        STEP,
        f"{STEP} --queue shuffled:3",
        "--queue shuffled:3, rank 0 with",
    ),
    "sample": (
        f"{STEP} --sample 3",
        f"{STEP} --sample 5",
        "--sample 5, rank 0 with .* --sample 3",
    ),
    "graphs": (
        STEP,
        f"{STEP} --no-graph",
        "--no-graph, rank 0 with --data --steps 1;",
    ),
    "profile": (
        STEP,
        f"{STEP} --profile unused",
        "--profile, rank 0 with --data --steps 1;",
    ),
    "a token": (
        STEP,
        "--data other --steps 1",
        f"has --data of 1 file, 4000000 bytes, {SAMPLES}, rank 0 --data of 1 file, 4000000 "
        f"bytes, {SAMPLES}; give all ranks the same tokens",
    ),
    "tokens": (
        STEP,
        "--data more --steps 1",
        "has --data of 1 file, 4000002 bytes, .* 4000000 ",
    ),
    "sources": (
        STEP,
        f"{STEP} --data other",
        "with --data of 2 sources --steps 1, rank 0 with --data --steps 1;",
    ),
    "shares of sources": (
        f"{STEP} --data other",
        f"{STEP} --data other:2",
        "has --data of 2 files, .*, weights .*, rank 0 --data of 2 files, .*, weights ",
    ),
    "tokens of val": (
        f"{STEP} --val tokens",
        f"{STEP} --val other",
        "has --val of 1 file",
    ),
    "multiple choice": (
        f"{STEP} --eval asked",
        f"{STEP} --eval otherwise",
        "has --eval of 1 file, 1096 bytes",
    ),
    "weights": (
        f"{STEP} --load weights",
        f"{STEP} --load trained",
        r"has --load of 1 file, \d+ bytes, .*, rank 0 --load of .* the same weights",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", UNLIKE)
def test_ranks_that_were_told_otherwise_do_not_mix(
    emulated: pathlib.Path, files: pathlib.Path, what: str
) -> None:
    *given, said = UNLIKE[what]
    first, other = together([emulated, emulated], files, *given)
    assert other[0] == 4 and re.fullmatch(
        f"rank 1 on host \\S+: .*{said}.*\n", other[1]
    ), other
    assert first[0] == 5 and "rank 1 at 127.0.0.1 is lost" in first[1]
    assert not (files / "unused").exists()


@pytest.mark.slow
def test_ranks_may_have_places_and_threads_of_their_own(
    emulated: pathlib.Path, files: pathlib.Path
) -> None:
    ended = together(
        [emulated, emulated],
        files,
        "--data again --steps 1 --val few --eval asked --load weights --threads 1 --log its-own",
        f"{STEP} --val as-few --eval as-asked --load same --threads 2",
    )
    assert [code for code, _ in ended] == [0, 0], ended


@pytest.mark.slow
@pytest.mark.parametrize("slow", [0, 1])
def test_a_rank_may_take_its_time_once_all_have_met(
    emulated: pathlib.Path, files: pathlib.Path, monkeypatch, slow: int
) -> None:
    """Pinning hundreds of GiB, which takes minutes, is no part of the time to meet. Rank 0 names
    the rank that it waits for."""
    monkeypatch.setenv("ZR_MEET_S", "10")
    ended = together(
        [emulated, emulated],
        files,
        STEP,
        STEP,
        more={slow: {"ZR_EMULATE_PINNING_S": "13"}},
    )
    assert [code for code, _ in ended] == [0, 0], ended
    waited = re.findall(r"^start(.*), \d+ s$", ended[0][1], re.M)
    assert waited == [f", waits for rank {slow}" if slow else ""], ended


def changed(
    binary: pathlib.Path, folder: pathlib.Path, what: str
) -> tuple[pathlib.Path, str, str]:
    """Return the program with one fact of `--version` changed, the new fact and the old one."""
    own = program.run(binary, "--version").line(f"{what} ").split()[1]
    mine, other = binary.read_bytes(), folder / "program"
    assert own.encode() in mine
    foreign = own[:-1] + "01"[own[-1] == "0"]
    other.write_bytes(mine.replace(own.encode(), foreign.encode()))
    other.chmod(0o755)
    return other, foreign, own


@pytest.mark.slow
def test_ranks_of_other_sources_do_not_mix(
    emulated: pathlib.Path, files: pathlib.Path
) -> None:
    other, foreign, own = changed(emulated, files, "sources")
    assert own == digests(ROOT)[1]
    first, second = together([emulated, other], files, STEP, STEP)
    assert second[0] == 4 and second[1] == (
        f"rank 1 on host {socket.gethostname()}: is built from sources {foreign}, rank 0 sources {own}; build all ranks from the "
        "same sources\n"
    )
    assert first[0] == 5


def fnv(text: bytes) -> str:
    """Return the 64-bit FNV-1a hash of a text."""
    hash_ = 0xCBF29CE484222325
    for byte in text:
        hash_ = (hash_ ^ byte) * 0x100000001B3 % 2**64
    return f"{hash_:016x}"


@pytest.mark.slow
def test_ranks_of_an_edited_source_do_not_mix(
    emulated: pathlib.Path, files: pathlib.Path
) -> None:
    """A train.c that was edited keeps the hash of its plan; the hash of its text differs, which
    --version states."""
    source = (emulated.parent / "train.c").read_text()
    edited = re.sub(r"(\.clip = )1\.0", r"\g<1>0.5", source)
    assert edited != source
    other = trainer.build(edited, trainer.EMULATED)
    said = [program.run(x, "--version") for x in (emulated, other)]
    own, foreign = (x.line("train.c ").split()[1] for x in said)
    assert (own, foreign) == (fnv(source.encode()), fnv(edited.encode()))
    assert said[0].line("plan ") == said[1].line("plan ")
    first, second = together([emulated, other], files, STEP, STEP)
    assert second == (
        4,
        f"rank 1 on host {socket.gethostname()}: is built from train.c {foreign}, rank 0 train.c "
        f"{own}; one train.c was edited, or zgen was called otherwise: start the same binary on "
        "all ranks\n",
    )


@pytest.mark.slow
def test_ranks_of_another_nccl_do_not_mix(
    emulated: pathlib.Path, files: pathlib.Path
) -> None:
    """NCCL itself would not say which rank has another version."""
    first, second = together(
        [emulated] * 2, files, STEP, STEP, more={1: {"ZR_EMULATE_NCCL": "22900"}}
    )
    assert second[0] == 4 and re.fullmatch(
        r"rank 1 on host \S+: has NCCL 22900, rank 0 NCCL 2\d{4}; all ranks need the same NCCL\n",
        second[1],
    ), second
    assert first[0] == 5


NOTE = r"(several hosts with NCCL .*\n)*"
GONE = r"rank [01] on host \S+: the connection to rank [023] at 127.0.0.1 is lost; check that rank's output\n"
TWICE = (
    r"rank \d on host \S+: rank 2 on host far and rank 3 on host far both have GPU-6f6e6500-0000-0000-0000-"
    r"000000000000; .*\n"
)
# Differences of the far pod in its program or environment, and the exit codes and last words of the
# near pod and the far one.
PODS = {
    "sources": (
        "sources",
        {},
        (5, GONE),
        (4, r"rank [23] on host \S+: is built from sources {}, rank 0 .*\n"),
    ),
    "plan": (
        "plan",
        {},
        (5, GONE),
        (4, r"rank [23] on host \S+: runs plan {}, rank 0 plan .*\n"),
    ),
    "a device twice": ("", {"ZR_EMULATE_UUID": "one"}, (3, TWICE), (3, TWICE)),
    "a full device": (
        "",
        {"ZR_EMULATE_FREE": 4096, "ZR_SHARE_GPU": 1},
        (5, GONE),
        (
            3,
            r"rank [23] on host \S+: needs .* GiB of contiguous device memory, .*; device [01] has 0.000 .*\n",
        ),
    ),
    "another device": (
        "",
        {"ZR_EMULATE_CC": 80, "ZR_SHARE_GPU": 1},
        (5, GONE),
        (
            4,
            r"rank [23] on host \S+: has kernels for .* sm_80, .*, rank 0 .*\n",
        ),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", PODS)
def test_a_pod_that_is_refused(
    files: pathlib.Path, tmp_path: pathlib.Path, what: str
) -> None:
    """Two hosts start two ranks each, and all of them end, long before the time to meet is over."""
    namespaces.need(("unshare", "-ru", "true"))
    fact, more, *wanted = PODS[what]
    binary = trainer.build(trainer.generate(test_cuda.SPEC, *FOUR), trainer.EMULATED)
    other, foreign, _ = changed(binary, tmp_path, fact) if fact else (binary, "", "")
    port, begun = test_cuda.free_port(), time.monotonic()
    runs = []
    for pod, (name, mine) in enumerate((("near", binary), ("far", other))):
        place = test_cuda.torchrun(port, pod) | (more if pod else {})
        del place["LOCAL_RANK"]
        runs.append(
            subprocess.Popen(
                [
                    "unshare",
                    "-ru",
                    "sh",
                    "-c",
                    f'hostname {name} && exec "$@"',
                    "sh",
                    mine,
                    *STEP.split(),
                ],
                cwd=files,
                text=True,
                stderr=subprocess.PIPE,
                env=os.environ | {k: str(v) for k, v in place.items()},
            )
        )
    try:
        said = [run.communicate(timeout=120)[1] for run in runs]
    finally:
        for run in runs:
            run.kill()
    for run, text, (code, words) in zip(runs, said, wanted, strict=True):
        assert run.returncode == code and re.fullmatch(
            NOTE + words.format(foreign), text
        ), said
    assert time.monotonic() - begun < 60
    assert fact or said[0].startswith("several hosts with NCCL ")


OLDER = b"older".ljust(512, b"\0")


def alone(
    binary: pathlib.Path,
    folder: pathlib.Path,
    port: int,
    rank: int,
) -> subprocess.Popen[str]:
    """Start one of two ranks."""
    return subprocess.Popen(
        [binary, *STEP.split()],
        cwd=folder,
        text=True,
        stderr=subprocess.PIPE,
        env=os.environ | {k: str(v) for k, v in test_cuda.torchrun(port, rank).items()},
    )


def told(line: socket.socket) -> str:
    line.settimeout(60)
    return line.recv(512, socket.MSG_WAITALL).rstrip(b"\0").decode()


@pytest.mark.slow
def test_rank_0_says_first_what_it_is_built_from(
    emulated: pathlib.Path, files: pathlib.Path
) -> None:
    """Rank 0 first states its sources, so a rank of another build that knows only how to meet gets
    that answer before any other question, and no rank waits until the time to meet is over."""
    port = test_cuda.free_port()
    with (
        alone(emulated, files, port, 0) as first,
        test_launcher.greet(port, 1, 2) as line,
    ):
        assert len(line.recv(16, socket.MSG_WAITALL)) == 16
        line.sendall(OLDER)
        assert told(line) == digests(ROOT)[1]
        line.close()
        said = first.communicate(timeout=LIMIT)[1]
    assert first.returncode == 5 and "rank 1 at 127.0.0.1 is lost" in said, said


@pytest.mark.slow
def test_other_ranks_ask_first_what_it_is_built_from(
    emulated: pathlib.Path, files: pathlib.Path
) -> None:
    port = test_cuda.free_port()
    with (
        socket.create_server(("127.0.0.1", port)) as door,
        alone(emulated, files, port, 1) as second,
    ):
        with door.accept()[0] as line:
            assert len(line.recv(40, socket.MSG_WAITALL)) == 40
            line.sendall(struct.pack("<I3i", test_launcher.MAGIC, 1, 2, 2))
            assert told(line) == digests(ROOT)[1]
            line.sendall(OLDER)
            said = second.communicate(timeout=LIMIT)[1]
    assert second.returncode == 4 and "rank 0 sources older;" in said, said


def test_a_file_that_is_missing_is_no_disagreement(
    tmp_path: pathlib.Path,
) -> None:
    source = trainer.generate(test_cuda.SPEC, *test_cuda.SMALL)
    trainer.write_tokens(tmp_path / "tokens", [1, 2, 3] * 1000)
    for options in (
        ("--data", "none", "--steps", 1),
        ("--steps", 0, "--val", "none"),
        ("--steps", 0, "--load", "none"),
    ):
        done = program.run(trainer.build(source), *options)
        assert done.code == 2 and "none: No such file" in done.err, done.err
