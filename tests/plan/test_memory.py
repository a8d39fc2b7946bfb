"""test_memory.py -- tests the memory of a rank of an emitted program: the arena that its plan
prints, a small constant beside it, nothing more after the start, and no access to peers outside
collectives.

A rank's memory is its proportional set size (PSS): a page that n processes map counts 1/n, so the
mean over ranks counts every page once. Linux reports anonymous pages, shared memory and files
separately; the part of files (the program and libc) depends on other processes of the machine.
"""

import contextlib
import dataclasses
import itertools
import pathlib
import re
import subprocess
import sys
import time
from collections.abc import Sequence

import pytest
from zg.facts import reserve
from zg.predict import cost
from zg.write import explain

from tests.lib import law, plans, program, trainer
from tests.lib.patience import LIMIT

KIB = 1024

# Old and new blocks and sizes of the compared specs: arenas from 5 to 150 MiB on one rank.
OFFLOAD = ("zero.stage=1", "zero.offload_optimizer.device=cpu")
SIZES = {
    "small": (3, {}),
    "middle": (6, {60: 120, 240: 480}),
    "large": (8, {60: 240, 240: 960}),
}


@dataclasses.dataclass(frozen=True)
class Taken:
    """KiB as means over ranks: the arenas, the rest without files, and all with files."""

    arena: float
    rest: float
    pss: float


def arena_of(source: str) -> int:
    """Return the bytes of a rank's device arena and host arena."""
    return sum(
        int(re.search(rf"{name}(?:INT64_C\()?(\d+)", source)[1])
        for name in (r'\{"cpu", ', r"\.hosted = ")
    )


def pss(pid: int) -> dict[str, int]:
    """Return KiB by kind."""
    text = pathlib.Path(f"/proc/{pid}/smaps_rollup").read_text()
    return {name: int(n) for name, n in re.findall(r"^(\w+):\s+(\d+) kB", text, re.M)}


@contextlib.contextmanager
def running(binary: pathlib.Path, folder: pathlib.Path, *options: object):
    """Yield a run that has done some steps: queues have gone round their rings, and peers' parts
    were read."""
    trainer.write_tokens(folder / "tokens", law.tokens(256, 5000))
    log = folder / "log"
    log.unlink(missing_ok=True)
    run = subprocess.Popen(
        [
            str(binary),
            "--data",
            str(folder / "tokens"),
            "--steps",
            "1000000",
            "--log",
            str(log),
            *map(str, options),
        ],
        env=program.environment(),
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        deadline = time.monotonic() + LIMIT
        while not log.exists() or log.read_text().count("\n") < 40:
            assert run.poll() is None and time.monotonic() < deadline, (
                "the run does not go on"
            )
            time.sleep(0.05)
        yield run
    finally:
        run.terminate()
        run.communicate()


def taken(
    folder: pathlib.Path,
    size: str,
    ranks: int,
    *options: object,
    keys: Sequence[str] = (),
) -> Taken:
    blocks, sizes = SIZES[size]
    folder = folder / f"{size}{ranks}"
    folder.mkdir(exist_ok=True)
    spec = law.changed("gpt", folder, blocks, sizes)
    source = trainer.generate(
        spec,
        f"cluster.ranks={ranks}",
        "train.micro_batch=1",
        "train.global_batch=4",
        "train.sequence=16",
        *keys,
    )
    with running(trainer.build(source), folder, *options) as run:
        each = [pss(pid) for pid in program.children(run.pid)]
    assert len(each) == ranks
    arena = arena_of(source) / KIB
    own = sum(part["Pss_Anon"] + part["Pss_Shmem"] for part in each) / ranks
    return Taken(arena, own - arena, sum(part["Pss"] for part in each) / ranks)


# ---- a rank's memory


@pytest.mark.parametrize(
    "ranks,keys",
    [(1, ()), pytest.param(2, (), marks=pytest.mark.slow), (1, OFFLOAD)],
)
def test_a_rank_takes_its_arena_and_the_same_beside_it(
    tmp_path: pathlib.Path, ranks: int, keys: Sequence[str]
) -> None:
    """A rank takes its arena and at most 16 MiB beside it, the same within 64 KiB whatever the
    model's size: kernels' scratch, which is taken at the start, rings of commands, stacks, and
    libc's data."""
    found = [taken(tmp_path, size, ranks, "--threads", 1, keys=keys) for size in SIZES]
    assert max(t.arena for t in found) > 15 * min(t.arena for t in found)
    for t in found:
        assert 0 < t.rest and t.pss - t.arena <= 16 * KIB, found
    assert max(t.rest for t in found) - min(t.rest for t in found) <= 64, found


@pytest.mark.slow
def test_two_threads_take_no_more_than_16_mib_beside_the_arena(
    tmp_path: pathlib.Path,
) -> None:
    """One rank on two cores, which has two threads by default, takes no more than 16 MiB beside the
    arena."""
    found = taken(tmp_path, "small", 1, "--threads", 2)
    assert found.pss - found.arena <= 16 * KIB, found


@pytest.mark.slow
def test_more_ranks_take_less_each(tmp_path: pathlib.Path) -> None:
    """More ranks take less memory each, as their plans say, within 192 KiB: a rank with peers has
    one more queue, whose ring of commands takes 156."""
    found = [taken(tmp_path, "large", ranks, "--threads", 1) for ranks in (1, 2, 4)]
    for a, b in itertools.pairwise(found):
        assert b.arena < 0.7 * a.arena
        assert abs(a.rest - b.rest) <= 192, found


@pytest.mark.alone
def test_no_page_is_left_for_later(tmp_path: pathlib.Path) -> None:
    """A running rank has all its pages: no page fault in hundreds of steps."""
    source = trainer.generate(law.path("gpt"), "train.micro_batch=1", "cluster.ranks=2")
    with running(trainer.build(source), tmp_path, "--threads", 1) as run:

        def faults() -> list[int]:
            stats = [
                pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
                for pid in program.children(run.pid)
            ]
            return [int(stat[7]) for stat in stats]

        before = faults()
        time.sleep(0.5)
        after = faults()
    assert [b - a for a, b in zip(before, after, strict=True)] == [0, 0]


# ---- memory as zgen and the program print it


def classes(said: str) -> list[list[list[int]]]:
    """Return the rows of --emit memory for the device and the host: slots, bytes of a slot, bytes,
    offset."""
    device, host = said.split("in a GPU's host arena")
    return [
        [
            [int(n.replace(",", "")) for n in row]
            for row in re.findall(
                r"^[\w.]+ +(\d+) +([\d,]+) +([\d,]+) +([\d,]+)$", text, re.M
            )
        ]
        for text in (device, host)
    ]


@pytest.mark.parametrize(
    "family",
    [
        "gpt",
        *(pytest.param(family, marks=pytest.mark.slow) for family in law.FAMILIES[1:]),
    ],
)
@pytest.mark.parametrize(
    "keys",
    [
        ("zero.stage=0", "cluster.ranks=1"),
        ("zero.stage=1", "cluster.ranks=2"),
        ("zero.stage=2", "cluster.ranks=4"),
        ("zero.stage=3", "train.precision=bf16"),
    ],
)
def test_one_number_everywhere(family: str, keys: tuple[str, ...]) -> None:
    """--emit memory, its classes and groups, --emit plan and train.c print one total."""
    keys = ("train.micro_batch=1", *keys)
    flags = [word for key in keys for word in ("--set", key)]
    said = trainer.sh("gen/zgen", law.path(family), *flags, "--emit", "memory")
    total = int(re.search(r"^cpu +([\d,]+) ", said, re.M)[1].replace(",", ""))
    ends = []
    for part in classes(said):
        end = 0
        for slots, stride, size, at in part:
            assert at == end and size == slots * stride
            end += size
        ends.append(end)
    *groups, gpu, host, pinned = [
        int(n.replace(",", ""))
        for n in re.findall(
            r"^[a-zGPU ]+? {2,}([\d,]+)(?: \([\d.]+ \w+\))?$",
            said[said.index("\nparameters") :],
            re.M,
        )
    ]
    assert len(groups) == 5 and sum(groups) == total and [gpu, host] == ends
    assert pinned == reserve.BOUNCE
    assert arena_of(trainer.generate(law.path(family), *keys)) == total


def test_the_program_says_it_too() -> None:
    source = trainer.generate(law.path("gpt"), "zero.stage=2")
    said = trainer.sh(trainer.build(source), "--version")
    line = re.search(
        r"^memory arena of a rank, bytes: cpu (\d+), (.*); beside it on a GPU about "
        r"(\d+); parts: (.*)$",
        said,
        re.M,
    )
    assert int(line[1]) == arena_of(source)
    p = plans.planned(str(law.path("gpt")), "zero.stage=2")
    assert dict(re.findall(r"(sm_\d+) (\d+)", line[2])) == {
        t: str(p.arena(t)) for t in p.head.targets[1:]
    }
    assert int(line[3]) == reserve.bytes_of("sm_90", p.head.ranks)
    assert sum(int(n) for n in re.findall(r" (\d+)(?:,|$)", line[4])) == arena_of(
        source
    )


def test_each_target_has_a_line_of_its_own() -> None:
    """Each target has a line with the memory that a device must hold: the arena to the byte, and on
    a GPU the allowance beside it."""
    keys = ("zero.stage=3", "cluster.ranks=4", "targets=[sm_90, cpu]")
    p = plans.planned("gpt-tiny", *keys)
    said = explain.memory(p)
    n, beside = p.arena("sm_90"), reserve.bytes_of("sm_90", 4)
    assert re.search(
        rf"^sm_90 +{n:,} \(.*\) +{beside:,} \(.*\) +{n + beside:,} \(",
        said,
        re.M,
    )
    assert re.search(rf"^cpu +{p.arena('cpu'):,} \([^)]*\)$", said, re.M)
    assert "allowance" in said
    alone = explain.memory(plans.planned("gpt-tiny", *keys[:2], "targets=[sm_90]"))
    assert not re.search("^cpu", alone, re.M) and "on a CPU" not in alone
    assert "allowance" not in explain.memory(plans.planned("gpt-tiny", "targets=[cpu]"))


def test_what_lies_beside_a_gpus_arena() -> None:
    """The allowance on a GPU covers libraries, and buffers for each peer of a node; one rank has no
    buffers."""
    alone, *more = (
        reserve.bytes_of("sm_90", ranks) for ranks in (1, 2, 4, 8, 16, 16384)
    )
    assert alone == reserve.LIBRARIES
    assert [n - alone for n in more] == [
        (peers * 8 * 12 + 33 * 10) * 2**20 for peers in (1, 3, 7, 7, 7)
    ]
    fast = reserve.bytes_of("sm_90", 8, fast=True)
    assert fast - reserve.bytes_of("sm_90", 8) == 32 * 10 * 2**20
    assert reserve.bytes_of("cpu", 8) == 0


def test_communicators_of_several_groups() -> None:
    """Each queue and group has a communicator: with buffers for rings if it all-gathers, for the
    peers of a host if it exchanges pieces."""
    keys = (
        *("train.micro_batch=1", "zero.stage=3", "cluster.ranks=8"),
        *("cluster.local=4", "zero.shard_size=2", "targets=[cpu, sm_90]"),
    )
    ring, peer = 10 * 2**20, 12 * 2**20
    for more, wide, channels in (
        ((), 32, 8),
        (("train.sm_margin=12",), 6, 4),
    ):
        p = plans.planned("gpt-tiny", *keys, *more)
        gathers, exchanges = (
            {pair for pair, ops in p.meetings.items() if op in ops}
            for op in ("gather", "alltoall")
        )
        assert gathers == {
            ("gather", name) for name in ("shard", "replica", "local", "hosts")
        }
        assert exchanges == {("reduce", "local"), ("reduce", "hosts")}
        assert reserve.nccl_of(p, "sm_90") == (
            4 * wide * ring + 3 * channels * peer + ring
        )
        assert reserve.nccl_of(p, "cpu") == 0
    p = plans.planned("gpt-tiny", *keys, "zero.overlap_comm=false")
    assert {queue for queue, _ in p.meetings} == {"main"}


# ---- sums of gradients


@pytest.mark.parametrize(
    "keys",
    [
        ("zero.stage=3",),
        ("zero.stage=1",),
        ("zero.stage=2", "zero.offload_optimizer.device=cpu"),
        ("zero.stage=3", "train.accumulate=layers"),
    ],
)
@pytest.mark.parametrize("own", ["tree", "fold", "{block: 16}", "{block: 4}"])
def test_what_each_rule_of_sums_takes(keys: tuple[str, ...], own: str) -> None:
    """--emit memory prints the sums of each rule as that rule's plan has them."""
    keys = *keys, "train.micro_batch=1", "train.global_batch=64"
    said = trainer.sh(
        "gen/zgen",
        law.path("gpt"),
        *(w for k in (*keys, f"train.sum={own}") for w in ("--set", k)),
        "--emit",
        "memory",
    )
    rows = dict(
        re.findall(
            r"^(as planned, .*?|train\.sum=.*?) {2,}([\d,]+(?: \(.*?\))? +[\d,]+)$",
            said,
            re.M,
        )
    )
    rules = {
        f"train.sum={rule}": rule
        for rule in ("tree", "{block: 16}", "fold")
        if rule != own
    }
    planned = f"as planned, {own}"
    assert set(rows) == {planned, *rules}
    for text, rule in {planned: own, **rules}.items():
        p = plans.planned("gpt-tiny", *keys, f"train.sum={rule}")
        names = [
            c for c in p.classes if c.name.startswith("sum.") or c.name == "pending"
        ]
        want = [
            sum(c.slots * c.stride for c in names),
            cost.training_wire(p).bytes,
        ]
        found = re.sub(r"\(.*?\)", "", rows[text]).replace(",", "").split()
        assert [int(n) for n in found] == want


# ---- peers' memory


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_peers_are_not_read_outside_collectives(
    tmp_path: pathlib.Path, stage: int
) -> None:
    """A run has the same bits if peers' arenas are unreadable outside collectives."""
    trainer.write_tokens(tmp_path / "tokens", law.tokens(256, 5000))
    binary = trainer.build(
        trainer.generate(
            law.path("qwen3"),
            f"zero.stage={stage}",
            "cluster.ranks=3",
            "train.global_batch=6",
            "zero.reduce_bucket_size=9000",
        )
    )
    one, other = [
        law.run(
            binary,
            "--data",
            tmp_path / "tokens",
            "--val",
            tmp_path / "tokens",
            "--steps",
            3,
            "--queue",
            mode,
            log=tmp_path / "log",
            ZR_UNMAP_PEERS=unmap,
        )
        for unmap, mode in ((0, "eager"), (1, "shuffled:4"))
    ]
    assert one == other


# ---- no allocation after the start

# Inserted into train.c: counts allocations from the first step on, in all threads, and makes the
# kernel end a process that asks it for memory then. FAULT makes the program do a forbidden thing.
WATCH = r"""
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

static int counting, allocations;
void *__libc_malloc(size_t n);
void *__libc_calloc(size_t n, size_t size);
void *__libc_realloc(void *at, size_t n);
void *malloc(size_t n) { return allocations += counting, __libc_malloc(n); }
void *calloc(size_t n, size_t size) { return allocations += counting, __libc_calloc(n, size); }
void *realloc(void *at, size_t n) { return allocations += counting, __libc_realloc(at, n); }

static void forbid(void)
{
    struct sock_filter f[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_mmap, 3, 0),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_mremap, 2, 0),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_brk, 1, 0),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS),
    };
    struct sock_fprog p = {sizeof f / sizeof *f, f};
    prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
    if (syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC, &p)) _exit(9);
    counting = 1;
}

static void watch(void)
{
    static int steps;
    const char *fault = getenv("FAULT");
    if (steps++ == 0) forbid();
    if (steps == 3 && fault && !strcmp(fault, "malloc")) {
        void *volatile at = malloc(10);
        free(at);
    }
    if (steps == 3 && fault && !strcmp(fault, "mmap"))
        mmap(NULL, 4096, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (allocations) {
        fprintf(stderr, "%d allocations by step %d\n", allocations, steps);
        _exit(9);
    }
}
"""


def watched(family: str, *keys: str) -> pathlib.Path:
    source = trainer.generate(law.path(family), *keys)
    head, body = source.split("/* ---- memory:", 1)
    begin = "static void step(zr *z)\n{\n"
    assert body.count(begin) == 1
    made = f"{head}{WATCH}/* ---- memory:{body.replace(begin, begin + '    watch();' + chr(10))}"
    return trainer.build(made)


@pytest.mark.skipif(sys.platform != "linux", reason="seccomp is of Linux")
@pytest.mark.parametrize(
    "stage,mode,keys",
    [
        (3, "eager", ()),
        *(
            pytest.param(*way, marks=pytest.mark.slow)
            for way in (
                (0, "eager", ()),
                (1, "late", ()),
                (2, "shuffled:2", ()),
                (3, "shuffled:1", ()),
                (2, "eager", OFFLOAD[1:]),
            )
        ),
    ],
)
def test_nothing_is_allocated_after_the_start(
    tmp_path: pathlib.Path, stage: int, mode: str, keys: Sequence[str]
) -> None:
    trainer.write_tokens(tmp_path / "tokens", law.tokens(256, 5000))
    binary = watched(
        "llama",
        f"zero.stage={stage}",
        "cluster.ranks=2",
        "train.precision=bf16",
        *keys,
    )
    run = [
        binary,
        "--data",
        tmp_path / "tokens",
        "--steps",
        6,
        "--val",
        tmp_path / "tokens",
        "--val-every",
        2,
        "--log",
        tmp_path / "log",
        "--queue",
        mode,
        "--threads",
        2,
    ]
    done = program.run(*run)
    assert done.code == 0, done.err
    caught = program.run(*run, FAULT="malloc")
    assert caught.code == 5 and "1 allocations by step 3" in caught.err
    caught = program.run(*run, FAULT="mmap")
    assert caught.code == 5 and "signal 31" in caught.err
