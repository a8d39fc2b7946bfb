"""test_launcher.py -- tests the place that a process takes under each launcher, and how ranks meet:
names that resolve late, ranks that never come, limits of open files."""

import functools
import os
import pathlib
import re
import resource
import signal
import socket
import struct
import subprocess
import tempfile
import time

import pytest

from tests.lib import trainer
from tests.lib.patience import LIMIT
from tests.lib.program import ROOT, RUNTIME

pytestmark = pytest.mark.waits

BASE = {
    name: text
    for name, text in os.environ.items()
    if not re.match(
        "ZR_|RANK|WORLD|LOCAL_|OMPI_|PMI|MPI_|SLURM_|MASTER_|JOB_|TORCH", name
    )
}


def program() -> pathlib.Path:
    parts = [*sorted(RUNTIME.glob("*.c")), *sorted(RUNTIME.glob("cpu/*.c"))]
    return trainer.compiled(ROOT / "tests/runtime/launcher.c", parts, "-O1")


def start(
    ranks: int, *words: str, limits=None, **variables: object
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [program(), str(ranks), *words],
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=limits,
        env=BASE | {name: str(x) for name, x in variables.items()},
    )


def said(ranks: int, **variables: object) -> str:
    run = start(ranks, **variables)
    out, error = run.communicate(timeout=LIMIT)
    return out.strip() if run.returncode == 0 else f"{run.returncode} {error.strip()}"


# ---- tables

SLURM = {
    "SLURM_PROCID": 9,
    "SLURM_STEP_NUM_TASKS": 16,
    "SLURM_LOCALID": 1,
    "SLURM_JOB_ID": 123,
    "SLURM_STEP_ID": 0,
    "SLURM_STEP_NODELIST": "node[03-04]",
    "SLURM_JOB_NODELIST": "node[03-04]",
}
PROXY = SLURM | {
    "SLURM_PROCID": 1,
    "SLURM_STEP_NUM_TASKS": 2,
    "SLURM_LOCALID": 0,
}
MPICH = {
    "PMI_RANK": 9,
    "PMI_SIZE": 16,
    "MPI_LOCALRANKID": 1,
    "MPI_LOCALNRANKS": 8,
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": 9,
    "OMPI_COMM_WORLD_SIZE": 16,
    "OMPI_COMM_WORLD_LOCAL_RANK": 1,
    "OMPI_COMM_WORLD_LOCAL_SIZE": 8,
}
TORCHRUN = {
    "RANK": 9,
    "WORLD_SIZE": 16,
    "LOCAL_RANK": 1,
    "LOCAL_WORLD_SIZE": 8,
    "MASTER_ADDR": "first",
    "MASTER_PORT": 29500,
}
INDEXED = {"JOB_COMPLETION_INDEX": 9, "ZR_WORLD_SIZE": 16}
NOWHERE = "2 .* 1 of 16 ranks are known to be on this host.*, and the address of .*ZR_ADDR=HOST:PORT"
LAUNCHERS = {
    "srun, no plugin": (SLURM, "rank 9 here 1 local 1 of 0 at node03:20123"),
    "srun, pmi2": (
        SLURM | {"PMI_RANK": 9, "PMI_SIZE": 16, "PMI_FD": 5, "PMI_JOBID": "123.0"},
        "rank 9 here 1 local 1 of 0 at node03:20123",
    ),
    "srun, pmix": (
        SLURM | {"PMIX_RANK": 9, "PMIX_NAMESPACE": "slurm.pmix.123.0"},
        "rank 9 here 1 local 1 of 0 at node03:20123",
    ),
    "another step of the job": (
        SLURM | {"SLURM_STEP_ID": 3},
        "rank 9 here 1 local 1 of 0 at node03:23054",
    ),
    "a late job": (
        SLURM | {"SLURM_JOB_ID": 67043327},
        "rank 9 here 1 local 1 of 0 at node03:31327",
    ),
    "a range of ports": (
        SLURM | {"ZR_PORTS": "40000-40099"},
        "rank 9 here 1 local 1 of 0 at node03:40023",
    ),
    "Hydra in Slurm": (
        PROXY | MPICH,
        "rank 9 here 1 local 1 of 0 at node03:20123",
    ),
    "Open MPI in Slurm": (
        PROXY | OPEN_MPI,
        "rank 9 here 1 local 1 of 0 at node03:20123",
    ),
    "Open MPI in Slurm, on a host of another step": (
        PROXY | OPEN_MPI | {"SLURM_STEP_ID": 4294967290},
        "rank 9 here 1 local 1 of 0 at node03:20123",
    ),
    "Hydra on one host": (
        MPICH | {"MPI_LOCALNRANKS": 16},
        "rank 9 here 1 local 1 of 0 at 127.0.0.1:29411 own",
    ),
    "Hydra on one host, at an address of it": (
        MPICH | {"MPI_LOCALNRANKS": 16, "ZR_BIND": "::1", "ZR_PORTS": "7-7"},
        "rank 9 here 1 local 1 of 0 at ::1:7 own",
    ),
    "Hydra on two hosts": (
        MPICH | {"ZR_ADDR": "first:1234"},
        "rank 9 here 1 local 1 of 0 at first:1234",
    ),
    "PALS": (
        {
            "PMI_RANK": 9,
            "PMI_SIZE": 16,
            "PMI_LOCAL_RANK": 1,
            "PMI_LOCAL_SIZE": 16,
        },
        "rank 9 here 1 local 1 of 0 at 127.0.0.1:29411 own",
    ),
    "Open MPI 4 on one host": (
        OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": 16, "PMIX_RANK": 9},
        "rank 9 here 1 local 1 of 0 at 127.0.0.1:29411 own",
    ),
    "Open MPI 5 on two hosts": (
        OPEN_MPI | {"PMIX_RANK": 9, "ZR_ADDR": "first:1234"},
        "rank 9 here 1 local 1 of 0 at first:1234",
    ),
    "torchrun": (
        TORCHRUN | {"TORCHELASTIC_RUN_ID": "none"},
        "rank 9 here 1 local 1 of 0 at first:29501",
    ),
    "torchrun at the last port": (
        TORCHRUN | {"TORCHELASTIC_RUN_ID": "none", "MASTER_PORT": 65535},
        "rank 9 here 1 local 1 of 0 at first:65534",
    ),
    "deepspeed": (
        TORCHRUN | {"CROSS_RANK": 1, "CROSS_SIZE": 2, "LOCAL_SIZE": 8},
        "rank 9 here 1 local 1 of 0 at first:29500",
    ),
    "PyTorchJob, a pod of 8": (
        {
            "RANK": 1,
            "WORLD_SIZE": 2,
            "MASTER_ADDR": "job-master-0",
            "MASTER_PORT": 23456,
            "PET_NNODES": 2,
        },
        "rank 8 here 8 local -1 of 0 at job-master-0:23456",
    ),
    "indexed Job, a pod a rank": (
        INDEXED | {"ZR_ADDR": "job-0.svc:7000"},
        "rank 9 here 1 local -1 of 0 at job-0.svc:7000",
    ),
    "by hand": (
        {
            "ZR_RANK": 9,
            "ZR_WORLD_SIZE": 16,
            "ZR_LOCAL_RANK": 1,
            "ZR_ADDR": "10.0.0.1:80",
        },
        "rank 9 here 1 local 1 of 0 at 10.0.0.1:80",
    ),
    "by hand on one host": (
        {"ZR_RANK": 9, "ZR_WORLD_SIZE": 16, "ZR_LOCAL_WORLD_SIZE": 16},
        "rank 9 here 1 local -1 of 0 at 127.0.0.1:29411 own",
    ),
    "nobody": ({}, "rank 0 here 16 local 0 of 0 at -:0 alone"),
    "one task": (
        {"SLURM_PROCID": 0, "SLURM_STEP_NUM_TASKS": 1, "SLURM_LOCALID": 0},
        "rank 0 here 16 local 0 of 0 at -:0 alone",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LAUNCHERS)
def test_each_launcher(name: str) -> None:
    variables, want = LAUNCHERS[name]
    assert said(16, **variables) == want


@pytest.mark.parametrize(
    "nodes,first",
    [
        ("n1", "n1"),
        ("n1,n2", "n1"),
        ("n[03-17,20]", "n03"),
        ("n[1-2]-ib", "n1-ib"),
        ("r[1-2]n[7-8],x", "r1n7"),
        ("gpu[5,7-9]-a,b[1-2]", "gpu5-a"),
    ],
)
def test_the_first_host_of_a_list(nodes: str, first: str) -> None:
    assert f" at {first}:" in said(16, **SLURM | {"SLURM_STEP_NODELIST": nodes})


@pytest.mark.parametrize("text", ["[fe80::1%eth0]:80", "fe80::1%eth0:80"])
def test_an_address_of_ipv6(text: str) -> None:
    assert " at fe80::1%eth0:80" in said(2, ZR_RANK=1, ZR_WORLD_SIZE=2, ZR_ADDR=text)


@pytest.mark.parametrize(
    "variables,what",
    [
        (MPICH, "2 .*8 of 16 ranks .*MPI_LOCALNRANKS, .*ZR_ADDR=HOST:PORT"),
        (
            OPEN_MPI,
            "2 .*8 of 16 ranks .*OMPI_COMM_WORLD_LOCAL_SIZE, .*ZR_ADDR=HOST:PORT",
        ),
        (INDEXED, NOWHERE),
        (
            INDEXED | {"ZR_WORLD_SIZE": 2, "JOB_COMPLETION_INDEX": 1},
            NOWHERE.replace("1 of", "8 of"),
        ),
        ({"ZR_RANK": 1, "ZR_WORLD_SIZE": 16}, NOWHERE),
        ({"RANK": 1, "WORLD_SIZE": 16, "MASTER_PORT": 29500}, NOWHERE),
        ({"RANK": 1, "WORLD_SIZE": 16, "MASTER_ADDR": "first"}, NOWHERE),
        (TORCHRUN | {"WORLD_SIZE": 12}, "4 .*the launcher has 12 ranks"),
        (TORCHRUN | {"RANK": 16}, "4 .*RANK=16: is out of range: there are 16 ranks"),
        (
            TORCHRUN | {"MASTER_PORT": 65536},
            "2 .*MASTER_PORT 65536: a whole number",
        ),
        *(
            (SLURM | {"ZR_ADDR": text}, f"2 .*ZR_ADDR {re.escape(text)}: must be HOST")
            for text in ("nowhere", ":80", "[]:80", "[::1:80", "n1:0", "n1:x")
        ),
        *(
            (SLURM | {"ZR_PORTS": text}, f"2 .*ZR_PORTS {text}: must be FIRST-LAST")
            for text in ("5", "0-7", "9-5", "1-65536", "1-5x", "a-b")
        ),
    ],
)
def test_what_does_not_agree(variables: dict[str, object], what: str) -> None:
    assert re.match(what, said(16, **variables))


# ---- meeting

MAGIC = 0x7A72706E
NO_RUN = 0xCBF29CE484222325  # hash of an empty name


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def rank(
    r: int, ranks: int, port: int, host: str = "127.0.0.1", **more: object
) -> dict[str, object]:
    return {
        "ZR_RANK": r,
        "ZR_WORLD_SIZE": ranks,
        "ZR_ADDR": f"{host}:{port}",
        "ZR_MEET_S": 20,
    } | more


def ended(run: subprocess.Popen[str]) -> tuple[int, str]:
    out, error = run.communicate(timeout=LIMIT)
    return run.returncode, out + error


def test_ranks_learn_their_place_on_their_host() -> None:
    """Ranks learn their place on their host without a launcher's help; a host name of its own, like
    a pod's, makes another host."""
    port = free_port()
    runs = [start(3, "meet", **rank(r, 3, port)) for r in (2, 0, 1)]
    assert [ended(run) for run in runs] == [
        (0, f"sharing 3 rank {r} here 1 local {r} of 3 at 127.0.0.1:{port}\n")
        for r in (2, 0, 1)
    ]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="this process has one CPU")
def test_ranks_that_are_bound_share_no_cpus() -> None:
    """Ranks with the same CPUs divide them: a launcher binds ranks 0 and 1 to a CPU each, and rank
    2 may use all."""
    port, cpus = free_port(), sorted(os.sched_getaffinity(0))
    bound = {0: {cpus[0]}, 1: {cpus[1]}, 2: set(cpus)}
    runs = [
        start(
            3,
            "meet",
            limits=functools.partial(os.sched_setaffinity, 0, bound[r]),
            **rank(r, 3, port),
        )
        for r in (0, 1, 2)
    ]
    assert [re.match(r"sharing \d+", text)[0] for _, text in map(ended, runs)] == [
        "sharing 1"
    ] * 3


LATE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <netdb.h>
#include <string.h>
int getaddrinfo(const char *host, const char *port, const struct addrinfo *hints,
                struct addrinfo **found)
{
    static int asked;
    int (*real)(const char *, const char *, const struct addrinfo *, struct addrinfo **) =
        (int (*)(const char *, const char *, const struct addrinfo *, struct addrinfo **))
            dlsym(RTLD_NEXT, "getaddrinfo");
    if (strcmp(host, "job-master-0")) return real(host, port, hints, found);
    return asked++ < 5 ? asked % 2 ? EAI_NONAME : EAI_AGAIN : real("127.0.0.1", port, hints, found);
}
"""


# Linux may give a connecting socket the very port that it connects to.
SELF = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sys/socket.h>
int connect(int fd, const struct sockaddr *to, socklen_t n)
{
    static int asked;
    int (*real)(int, const struct sockaddr *, socklen_t) =
        (int (*)(int, const struct sockaddr *, socklen_t))dlsym(RTLD_NEXT, "connect");
    if (asked++ < 5) bind(fd, to, n);
    return real(fd, to, n);
}
"""


@functools.cache
def preload(source: str) -> pathlib.Path:
    folder = pathlib.Path(tempfile.mkdtemp())
    (folder / "it.c").write_text(source)
    subprocess.run(
        [
            "gcc",
            "-shared",
            "-fPIC",
            folder / "it.c",
            "-o",
            folder / "it.so",
            "-ldl",
        ],
        check=True,
    )
    return folder / "it.so"


def test_a_name_that_resolves_late() -> None:
    port = free_port()
    runs = [
        start(
            2,
            "meet",
            **rank(r, 2, port, "job-master-0", LD_PRELOAD=preload(LATE)),
        )
        for r in (0, 1)
    ]
    assert [code for code, _ in map(ended, runs)] == [0, 0]


def test_a_connection_to_itself() -> None:
    """A connection to itself is not taken for rank 0 and does not keep rank 0 from the port."""
    port = free_port()
    other = start(2, "meet", **rank(1, 2, port, LD_PRELOAD=preload(SELF)))
    time.sleep(2)
    first = start(2, "meet", **rank(0, 2, port))
    assert [code for code, _ in map(ended, (first, other))] == [0, 0]


def test_something_else_answers() -> None:
    with socket.create_server(("127.0.0.1", 0)) as door:
        port = door.getsockname()[1]
        other = start(2, "meet", **rank(1, 2, port))
        with door.accept()[0] as line:
            line.sendall(b"220 mail.example.org")
            code, text = ended(other)
    assert (
        code == 3
        and f"the server at 127.0.0.1:{port} is not rank 0; set another" in text
    )


def test_a_name_that_never_resolves() -> None:
    code, text = ended(
        start(2, "meet", **rank(1, 2, 1234, "no.such.host.invalid", ZR_MEET_S=1))
    )
    assert code == 3 and "no.such.host.invalid:1234 (ZR_MEET_S): " in text


def test_each_address_has_its_reason() -> None:
    port = free_port()
    where = "127.0.0.1,no.such.host.invalid,127.0.0.2"
    code, text = ended(start(2, "meet", **rank(1, 2, port, where, ZR_MEET_S=1)))
    refused = "Connection refused"
    assert code == 3 and re.search(
        rf": 127.0.0.1: {refused}, no.such.host.invalid: [A-Z][^,:;]*, "
        rf"127.0.0.2: {refused}; set ZR_ADDR=",
        text,
    ), text


def test_reasons_have_an_end() -> None:
    """A reason with too many addresses is cut to fit its line, but the advice stays."""
    port = free_port()
    where = ",".join(f"127.0.0.{n}" for n in range(1, 24))
    code, text = ended(start(2, "meet", **rank(1, 2, port, where, ZR_MEET_S=1)))
    assert code == 3 and len(text) < 1000, text
    assert "127.0.0.9: Connection refused, " in text
    assert re.search(r" \.\.\.; set ZR_ADDR=HOST:PORT to a reachable address\n$", text)


def test_ranks_that_never_come() -> None:
    """Rank 0 names the ranks that never come, and the rank that did come gets the message."""
    port = free_port()
    first, third = (start(5, "meet", **rank(r, 5, port, ZR_MEET_S=2)) for r in (0, 3))
    code, text = ended(first)
    assert (
        code == 5 and f"3 of 5 ranks have not connected to port {port} in time" in text
    )
    assert ": 1, 2, 4; " in text
    assert ended(third)[0] == 5


def test_a_rank_that_comes_and_says_nothing_more() -> None:
    """Waiting for a rank between the greeting and the handshake has an end, too."""
    port = free_port()
    first = start(3, "meet", **rank(0, 3, port, ZR_MEET_S=3))
    second = start(3, "meet", **rank(1, 3, port, ZR_MEET_S=30))
    time.sleep(1)
    second.send_signal(signal.SIGSTOP)
    code, text = ended(first)
    second.kill()
    second.communicate()
    assert code == 5 and "have not connected" in text and ": 2; " in text


def test_a_rank_that_comes_and_dies() -> None:
    """Rank 0 does not wait for the others when one dies, and names it."""
    port, begun = free_port(), time.monotonic()
    first = start(3, "meet", **rank(0, 3, port))
    greet(port, 1, 3).close()
    code, text = ended(first)
    assert code == 5 and "the connection to rank 1 at 127.0.0.1 is lost" in text
    assert time.monotonic() - begun < 15


def test_a_rank_that_is_told_to_wait_sees_another_die() -> None:
    """Rank 0 notices that rank 2, which has sent its facts, dies while it still waits for those of
    rank 1."""
    port, begun = free_port(), time.monotonic()
    first = start(3, "alone", "b", **rank(0, 3, port))
    lines = [greet(port, r, 3) for r in (1, 2)]
    lines[1].sendall(claim(b"a", b"host", 2))
    time.sleep(1)
    lines[1].close()
    code, text = ended(first)
    assert code == 5 and "the connection to rank 2 at 127.0.0.1 is lost" in text
    assert time.monotonic() - begun < 15
    lines[0].close()


def test_a_greeting_that_comes_late() -> None:
    """A rank that greets late is accepted as long as no other wants its place."""
    port = free_port()
    first = start(2, "meet", **rank(0, 2, port))
    line = reach(port)
    time.sleep(6)
    line.sendall(struct.pack("<4I3Q", MAGIC, 1, 2, 0, NO_RUN, 1, 1))
    assert ended(first)[0] == 0
    line.close()


def test_silent_strangers_hold_nobody_up() -> None:
    """Silent strangers, more of them than the queue for connections holds, delay no rank."""
    port = free_port()
    first = start(3, "meet", **rank(0, 3, port))
    strangers = [reach(port) for _ in range(40)]
    runs = [start(3, "meet", **rank(r, 3, port)) for r in (1, 2)]
    assert [ended(run)[0] for run in (first, *runs)] == [0] * 3
    for line in strangers:
        line.close()


def has(address: str) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as s:
        try:
            s.bind((address, 0))
        except OSError:
            return False
    return True


@pytest.mark.parametrize("address", ["127.0.0.2", "::1"])
def test_rank_0_listens_at_an_address(address: str) -> None:
    """Rank 0 listens at the given address and at no other of its host."""
    if not has(address):
        pytest.skip(f"this host has no {address}")
    port = free_port()
    host = f"[{address}]" if ":" in address else address
    first = start(2, "meet", **rank(0, 2, port, host, ZR_BIND=address))
    elsewhere = start(2, "meet", **rank(1, 2, port, ZR_MEET_S=1))
    code, text = ended(elsewhere)
    assert code == 3 and f"does not answer at 127.0.0.1:{port}" in text
    assert ended(start(2, "meet", **rank(1, 2, port, host)))[0] == 0
    assert ended(first)[0] == 0


@pytest.mark.parametrize(
    "address,code,why",
    [
        ("first", 2, "ZR_BIND first: must be an IPv4 or IPv6 address"),
        ("192.0.2.1", 3, "listening on port 1234 of 192.0.2.1: "),
    ],
)
def test_an_address_that_is_not_this_hosts(address: str, code: int, why: str) -> None:
    run = start(2, "meet", **rank(0, 2, 1234, ZR_BIND=address))
    found, text = ended(run)
    assert found == code and why in text


@pytest.mark.parametrize(
    "of,name",
    [
        ({"RANK": 1, "WORLD_SIZE": 2}, "TORCHELASTIC_RUN_ID"),
        ({"ZR_RANK": 1, "ZR_WORLD_SIZE": 2}, "ZR_TOKEN"),
        (
            {"OMPI_COMM_WORLD_RANK": 1, "OMPI_COMM_WORLD_SIZE": 2},
            "PMIX_NAMESPACE",
        ),
        ({"PMI_RANK": 1, "PMI_SIZE": 2, "PMI_LOCAL_RANK": 1}, "PMI_JOBID"),
    ],
)
def test_ranks_of_another_run(of: dict[str, object], name: str) -> None:
    """Rank 1 of a second run at the same port is refused, and the first run is not disturbed."""
    port = free_port()
    place = of | {"ZR_ADDR": f"127.0.0.1:{port}", "ZR_MEET_S": 20}
    first = place | {key: 0 for key in of if key.endswith("RANK")} | {name: "one"}
    run = start(2, "meet", **first)
    code, text = ended(start(2, "meet", **place, **{name: "two"}))
    assert (
        code == 3
        and f"rank 0 of another run answers at 127.0.0.1:{port}; set another" in text
    )
    assert ended(start(2, "meet", **place, **{name: "one"}))[0] == ended(run)[0] == 0


def test_a_rank_0_that_says_nothing() -> None:
    """Waiting for a rank 0 that accepts and never answers the greeting has an end, too."""
    with socket.create_server(("127.0.0.1", 0)) as door:
        other = start(2, "meet", **rank(1, 2, door.getsockname()[1], ZR_MEET_S=2))
        with door.accept()[0]:
            code, text = ended(other)
    assert code == 5 and "rank 0 has not answered in time (ZR_MEET_S)" in text


def test_open_files_of_many_ranks() -> None:
    """The soft limit of open files is raised; a hard limit that is too low is reported at once."""

    def soft() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (8, 4096))

    def hard() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))

    port = free_port()
    runs = [start(12, "meet", limits=soft, **rank(r, 12, port)) for r in range(12)]
    assert [ended(run)[0] for run in runs] == [0] * 12
    code, text = ended(start(12, "meet", limits=hard, **rank(0, 12, free_port())))
    assert code == 3 and "needs 76 open files for 12 ranks; the limit is 64" in text


def test_connections_are_kept_alive() -> None:
    """Both ends probe the connection every minute and give it up after two without an answer."""
    port = free_port()
    runs = [start(3, "alive", **rank(r, 3, port)) for r in range(3)]
    said = [ended(run)[1].splitlines()[:-1] for run in runs]
    told = "asks whether it lives after 60 s, then 4 times in 60 s; waits 120000 ms"
    assert said == [
        [f"to 1: {told}", f"to 2: {told}"],
        [f"to 0: {told}"],
        [f"to 0: {told}"],
    ]


# ---- facts that every rank must have for itself


def claim(what: bytes, host: bytes, number: int) -> bytes:
    return what.ljust(64, b"\0") + host.ljust(256, b"\0") + struct.pack("<i", number)


def greet(port: int, number: int, ranks: int) -> socket.socket:
    """Return a rank's connection to rank 0, already welcomed."""
    line = reach(port)
    line.sendall(struct.pack("<4I3Q", MAGIC, number, ranks, 0, NO_RUN, 1, 1))
    return line


def reach(port: int) -> socket.socket:
    for _ in range(100):
        try:
            return socket.create_connection(("127.0.0.1", port), timeout=LIMIT)
        except ConnectionRefusedError:
            time.sleep(0.1)
    raise TimeoutError(port)


@pytest.mark.parametrize(
    "what,code",
    [(("a", "b", "c"), 0), (("", "", ""), 0), (("a", "b", "a"), 3)],
)
def test_all_refuse_what_two_have(what: tuple[str, ...], code: int) -> None:
    """All ranks end with rank 0's reason and exit code if two have the same."""
    port, host = free_port(), socket.gethostname()
    runs = [start(3, "alone", word, **rank(r, 3, port)) for r, word in enumerate(what)]
    found = [ended(run) for run in runs]
    assert [n for n, _ in found] == [code] * 3, found
    said = [text for _, text in found]
    assert code == 0 or said == [
        f"rank {r} on host {host}: rank 0 on host {host} and rank 2 on host {host} both have a; look for another\n"
        for r in range(3)
    ]


def test_a_claim_without_an_end() -> None:
    """Text from the network is cut where its buffer ends: 64 letters become 63 and compare
    equal."""
    port = free_port()
    first = start(3, "alone", "b", **rank(0, 3, port))
    lines = [greet(port, r, 3) for r in (1, 2)]
    for r, line in enumerate(lines, 1):
        line.sendall(claim(64 * b"a", 256 * b"xy"[r - 1 : r], r) + bytes(512))
    code, text = ended(first)
    assert code == 3 and re.match(
        r"rank 0 on host \S+: rank 1 on host x{255} and rank 2 on host y+",
        text,
    ), text
    for line in lines:
        line.close()
