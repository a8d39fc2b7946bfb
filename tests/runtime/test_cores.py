"""test_cores.py -- tests the number of threads of a rank and its CPUs, with made-up trees of /proc
and /sys, and with programs that see such a tree instead of the host's."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.cuda import test_cuda
from tests.lib import namespaces, trainer
from tests.lib import program as programs
from tests.lib.program import children, run, wait_for_step

CPU = "sys/devices/system/cpu"


@pytest.fixture(scope="module")
def tool(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("cores") / "cores"
    trainer.sh(
        "gcc",
        "-std=gnu11",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-g1",
        "-O1",
        "-Iruntime",
        "-fsanitize=address,undefined",
        "-fno-sanitize-recover=all",
        "tests/runtime/cores.c",
        "runtime/zr_cores.c",
        "-o",
        made,
    )
    return made


def write(root: Path, name: str, text: object) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(f"{text}\n")


def sockets(
    root: Path,
    count: int,
    cores: int,
    siblings: int,
    shared: str = "cache",
    names: str = "core_cpus_list",
) -> Path:
    """Write a tree whose CPUs are numbered as Linux does: the first CPU of every core, then their
    siblings."""
    all_cores = count * cores
    for cpu in range(all_cores * siblings):
        core = cpu % all_cores
        mine = core // cores * cores
        same = [
            f"{mine + s * all_cores}-{mine + s * all_cores + cores - 1}"
            for s in range(siblings)
        ]
        each = ",".join(str(core + s * all_cores) for s in range(siblings))
        write(root, f"{CPU}/cpu{cpu}/topology/{names}", each)
        if shared == "cache":
            write(
                root,
                f"{CPU}/cpu{cpu}/cache/index3/shared_cpu_list",
                ",".join(same),
            )
        if shared == "node":
            write(
                root,
                f"sys/devices/system/node/node{core // cores}/cpulist",
                ",".join(same),
            )
    return root


def found(tool: Path, root: Path | str, cpus: str, ranks: int) -> tuple[int, list[str]]:
    cores, *parts = trainer.sh(tool, root, cpus, ranks).splitlines()
    return int(cores), parts


# ---- caches, nodes, siblings

FIRST, SECOND = "0-7,16-23", "8-15,24-31"


@pytest.mark.parametrize("shared", ["cache", "node"])
@pytest.mark.parametrize("names", ["core_cpus_list", "thread_siblings_list"])
@pytest.mark.parametrize(
    "cpus,ranks,cores,parts",
    [
        ("0-31", 1, 16, ["all"]),
        ("0-31", 2, 16, [FIRST, SECOND]),
        ("0-31", 3, 16, [FIRST, "all", SECOND]),
        ("0-31", 4, 16, [FIRST, FIRST, SECOND, SECOND]),
        ("0-31", 32, 16, [FIRST] * 16 + [SECOND] * 16),
        ("0-7,16-23", 2, 8, ["all", "all"]),
        ("0-7", 2, 8, ["all", "all"]),
        ("5,21", 2, 1, ["all", "all"]),
        ("21", 1, 1, ["all"]),
        ("6-9", 2, 4, ["6-7", "8-9"]),
        ("6-9,22", 2, 4, ["6-7,22", "8-9"]),
        ("3-7,8", 2, 6, ["3-7", "all"]),
    ],
)
def test_two_sockets_with_siblings(
    tool: Path,
    tmp_path: Path,
    shared: str,
    names: str,
    cpus: str,
    ranks: int,
    cores: int,
    parts: list[str],
) -> None:
    """A core counts once, and a rank gets the sockets that its even part of the cores touches."""
    root = sockets(tmp_path, 2, 8, 2, shared, names)
    assert found(tool, root, cpus, ranks) == (cores, parts)


@pytest.mark.slow
def test_more_cpus_than_a_cpu_set_t_holds(tool: Path, tmp_path: Path) -> None:
    root = sockets(tmp_path, 8, 256, 1)
    cores, parts = found(tool, root, "0-2047", 8)
    assert cores == 2048 and parts == [f"{256 * r}-{256 * r + 255}" for r in range(8)]
    assert found(tool, root, "1500-2047", 1) == (548, ["all"])


def test_a_host_that_tells_nothing(tool: Path, tmp_path: Path) -> None:
    assert found(tool, tmp_path, "0-2,9", 2) == (4, ["all", "all"])


def test_lists_that_make_no_sense(tool: Path, tmp_path: Path) -> None:
    """Lists of CPUs that make no sense are ignored: CPUs that are not in their own list, words, and
    numbers out of range."""
    for cpu, text in enumerate(
        ("5", "", "x", "3-", "-1", "99999999999", "6-2", "0-99999")
    ):
        write(tmp_path, f"{CPU}/cpu{cpu}/cache/index3/shared_cpu_list", text)
        write(tmp_path, f"{CPU}/cpu{cpu}/topology/core_cpus_list", text)
    cores, parts = found(tool, tmp_path, "0-7", 2)
    assert 1 <= cores <= 8 and len(parts) == 2


def test_this_process_may_run_where_it_may(tool: Path, tmp_path: Path) -> None:
    assert found(tool, tmp_path, "own", 1) == (
        len(os.sched_getaffinity(0)),
        ["all"],
    )


# ---- control groups

SLICE = "/pods/one"
V2 = "0::"
V1 = "4:cpu,cpuacct:"


@pytest.mark.parametrize(
    "line,files,cores",
    [
        (V2, {}, 16),
        (V2, {"pods/one/cpu.max": "400000 100000"}, 4),
        (V2, {"pods/one/cpu.max": "150000 100000"}, 1),
        (V2, {"pods/one/cpu.max": "50000 100000"}, 1),
        (V2, {"pods/one/cpu.max": "10000000 100000"}, 16),
        (
            V2,
            {"pods/one/cpu.max": "max 100000", "pods/cpu.max": "300000 50000"},
            6,
        ),
        (
            V2,
            {
                "pods/one/cpu.max": "200000 100000",
                "pods/cpu.max": "300000 100000",
            },
            2,
        ),
        (V2, {"cpu.max": "550000 100000"}, 5),
        (V2, {"pods/two/cpu.max": "100000 100000"}, 16),
        (
            V1,
            {
                "cpu/pods/one/cpu.cfs_quota_us": "350000",
                "cpu/pods/one/cpu.cfs_period_us": "100000",
            },
            3,
        ),
        (
            V1,
            {
                "cpu/pods/one/cpu.cfs_quota_us": "-1",
                "cpu/pods/one/cpu.cfs_period_us": "100000",
            },
            16,
        ),
        (
            V1,
            {
                "cpu/cpu.cfs_quota_us": "700000",
                "cpu/cpu.cfs_period_us": "100000",
            },
            7,
        ),
        (
            "5:cpuset:",
            {
                "cpuset/pods/one/cpu.cfs_quota_us": "100000",
                "cpuset/pods/one/cpu.cfs_period_us": "100000",
            },
            16,
        ),
    ],
)
def test_the_quota_of_the_groups(
    tool: Path, tmp_path: Path, line: str, files: dict[str, str], cores: int
) -> None:
    """The number of cores is the least quota of our group and those above it, in whole CPUs."""
    root = sockets(tmp_path, 2, 8, 2)
    write(root, "proc/self/cgroup", f"9:name=systemd:/x\n{line}{SLICE}")
    for name, text in files.items():
        write(root, f"sys/fs/cgroup/{name}", text)
    assert found(tool, root, "0-31", 1) == (cores, ["all"])


def test_the_folders_of_groups(tool: Path, tmp_path: Path) -> None:
    write(
        tmp_path,
        "proc/self/cgroup",
        "7:memory,hugetlb:/a\nnonsense\n3:cpu:/b\n0::/c/d",
    )
    top = f"{tmp_path}/sys/fs/cgroup"
    assert trainer.sh(tool, tmp_path, "memory").splitlines() == [
        f"1 {top}/memory/a",
        f"1 {top}/memory",
        f"1 {top}",
        f"2 {top}/c/d",
        f"2 {top}/c",
        f"2 {top}",
    ]


# ---- programs


def threads(done: programs.Result) -> int:
    """Return the number of threads, computed from the memory in the message: program.c asks for 1
    MiB per thread, and one more."""
    return (int(re.search(r"ranks? x (\d+) bytes", done.err)[1]) - (1 << 45) >> 20) - 1


@pytest.mark.parametrize(
    "names", [("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")]
)
def test_a_quota_sets_the_threads(
    program: Path,
    tool: Path,
    data: Path,
    tmp_path: Path,
    names: tuple[str, ...],
) -> None:
    alone = namespaces.mounts("/sys/fs/cgroup")
    cpus = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    here = found(tool, "", cpus, 1)[0]
    for quota, most in (("100000", 1), ("2000000000", here)):
        text = [quota, "100000"] if len(names) > 1 else [f"{quota} 100000"]
        for name, value in zip(names, text, strict=True):
            write(tmp_path, f"cgroup/{name}", value)
        command = (
            f"mount --bind {tmp_path}/cgroup /sys/fs/cgroup && "
            f"exec {program} --data {data} --steps 1"
        )
        for ranks in (1, 2):
            done = run(
                Path("/usr/bin/env"),
                *alone,
                "sh",
                "-c",
                command,
                FAULT="huge",
                RANKS=ranks,
            )
            assert done.code == 3 and threads(done) == max(1, most // ranks), done.err
    done = run(
        program,
        "--data",
        data,
        "--steps",
        1,
        "--threads",
        7,
        FAULT="huge",
        RANKS=2,
    )
    assert threads(done) == 7


@pytest.mark.skipif(
    len(os.sched_getaffinity(0)) < 2, reason="one CPU is not shared out"
)
def test_ranks_keep_to_their_part(program: Path, data: Path, tmp_path: Path) -> None:
    """Two ranks and all their threads have half of the CPUs each if each CPU has a cache of its
    own. No rank is bound if all share one."""
    alone = namespaces.mounts("/sys")
    cpus = sorted(os.sched_getaffinity(0))
    caches = [Path(f"/{CPU}/cpu{cpu}/cache/index3/shared_cpu_list") for cpu in cpus]
    if not all(path.exists() for path in caches):
        pytest.skip("this host names no caches")
    for apart in (True, False):
        mounts = ""
        for cpu, path in zip(cpus, caches, strict=True):
            write(
                tmp_path,
                f"list{cpu}",
                cpu if apart else ",".join(map(str, cpus)),
            )
            mounts += f"mount --bind {tmp_path}/list{cpu} {path} && "
        running = subprocess.Popen(
            [
                *alone,
                "sh",
                "-c",
                f"{mounts} exec {program} --data {data} --steps 30",
            ],
            env=programs.environment(RANKS=2, FAULT="hang", OVERLAP=1),
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            wait_for_step(running, 1)
            allowed = [
                {
                    frozenset(os.sched_getaffinity(int(task.name)))
                    for task in Path(f"/proc/{pid}/task").iterdir()
                }
                for pid in children(running.pid)
            ]
        finally:
            running.terminate()
            running.communicate()
        assert [len(sets) for sets in allowed] == [1, 1]
        first, second = (set(*sets) for sets in allowed)
        assert first | second == set(cpus)
        assert not first & second if apart else first == second


# ---- arenas are touched by all threads, and left out of core dumps

HUGEPAGE, DONTDUMP, TAKE = 14, 16, 23  # arguments of madvise
MIB = 1 << 20


@pytest.mark.parametrize(
    "ranks,threads,slices", [(1, 1, 1), (1, 3, 3), (2, 4, 4), (1, 40, 17)]
)
def test_arenas_are_taken_by_all_threads(
    program: Path,
    data: Path,
    tmp_path: Path,
    ranks: int,
    threads: int,
    slices: int,
) -> None:
    """The threads of a rank touch every byte of its 33 MiB once, in whole huge pages."""
    library = tmp_path / "advice.so"
    trainer.sh(
        "gcc",
        "-shared",
        "-fPIC",
        "-Wall",
        "-Wextra",
        "-Werror",
        "tests/runtime/advice.c",
        "-o",
        library,
    )
    done = run(
        program,
        "--data",
        data,
        "--steps",
        1,
        "--threads",
        threads,
        RANKS=ranks,
        PAD_MIB=33,
        LD_PRELOAD=library,
    )
    assert done.code == 0, done.err
    said = re.findall(r"^(\d+) (\d+)-(\d+) (\d+) (\d+)$", done.err, re.M)
    taken = [
        (pid, thread, int(at), int(bytes_))
        for advice, pid, thread, at, bytes_ in said
        if int(advice) == TAKE
    ]
    for rank in {pid for pid, *_ in taken}:
        mine = sorted(
            (at, size, thread) for pid, thread, at, size in taken if pid == rank
        )
        assert len(mine) == len({thread for *_, thread in mine}) == slices
        assert all(a + n == b for (a, n, _), (b, _, _) in itertools.pairwise(mine))
        assert all(n % (2 * MIB) == 0 for _, n, _ in mine[:-1])
        assert 33 * MIB < sum(n for _, n, _ in mine) < 34 * MIB
        for advice in (HUGEPAGE, DONTDUMP):
            given = [
                int(n)
                for a, pid, _, at, n in said
                if int(a) == advice and pid == rank and int(at) == mine[0][0]
            ]
            assert max(given) == sum(n for _, n, _ in mine)
    assert len({pid for pid, *_ in taken}) == ranks


def test_a_crash_dumps_no_arena(program: Path, data: Path) -> None:
    """A core dump has no arena, neither the rank's own nor its peers'. dd: the flag of a mapping
    that is left out."""
    running = programs.start(program, data, RANKS=2, FAULT="hang", PAD_MIB=33)
    try:
        wait_for_step(running, 1)
        maps = [Path(f"/proc/{pid}/smaps").read_text() for pid in children(running.pid)]
    finally:
        running.terminate()
        running.communicate()
    for text in maps:
        large = [
            flags.split()
            for kib, flags in re.findall(
                r"^Size: +(\d+) kB$.*?^VmFlags:([^\n]*)$", text, re.M | re.S
            )
            if int(kib) >= 33 * 1024
        ]
        assert len(large) == 2 and all("dd" in flags for flags in large)


# ---- a launcher's ranks


def tasks(binary: Path, tokens: Path, *options: str, **settings: object) -> int:
    """Return the number of threads of a rank at work, with the optimizer on the host; the other
    rank is started separately."""
    port = test_cuda.free_port()
    runs = [
        subprocess.Popen(
            [
                str(binary),
                "--data",
                str(tokens),
                "--steps",
                "1000000",
                *options,
            ],
            text=True,
            env=programs.environment(**test_cuda.torchrun(port, rank), **settings),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for rank in (0, 1)
    ]
    try:
        wait_for_step(runs[0], 1)
        (rank,) = children(runs[0].pid)
        return len(list(Path(f"/proc/{rank}/task").iterdir()))
    finally:
        for one in runs:
            one.terminate()
            one.communicate()


@pytest.mark.slow
def test_ranks_of_a_launcher_share_the_cores_of_their_host(
    tool: Path, tmp_path: Path
) -> None:
    """Ranks of a launcher share the cores of their host, counting those that run there on the same
    CPUs, whatever the launcher says."""
    cores, _ = found(tool, "", ",".join(map(str, sorted(os.sched_getaffinity(0)))), 1)
    trainer.write_tokens(tmp_path / "tokens", [i * i % 251 for i in range(3000)])
    binary = trainer.build(
        trainer.generate(
            test_cuda.SPEC,
            *test_cuda.SMALL,
            "zero.offload_optimizer.device=cpu",
        ),
        trainer.EMULATED,
    )
    own = {
        n: tasks(binary, tmp_path / "tokens", "--threads", str(n))
        for n in {1, max(1, cores // 2), cores}
    }
    assert len(set(own.values())) == len(own)
    for settings, ranks in (({}, 2), ({"LOCAL_WORLD_SIZE": 1}, 2)):
        assert (
            tasks(binary, tmp_path / "tokens", **settings)
            == own[max(1, cores // ranks)]
        )
