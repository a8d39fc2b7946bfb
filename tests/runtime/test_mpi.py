"""test_mpi.py -- tests out/train-mpi: it has the weights of out/train on one host and on several,
receives the planned bytes from other hosts, and reports starts that cannot work."""

import contextlib
import os
import pathlib
import re
import signal
import subprocess
import time

import pytest
from zg.predict import cost
from zg.read import spec
from zg.search import search

from tests.lib import choices, hosts, law, trainer
from tests.lib.hosts import mpirun, mpirun_of
from tests.lib.patience import LIMIT, busy
from tests.lib.program import children

pytestmark = pytest.mark.waits

STEPS = 4
SIZE = 125_248  # parameters of llama-tiny
WAYS = (
    ("eager", "cluster.ranks=1"),
    ("late", "cluster.ranks=2", "zero.stage=0"),
    (
        "shuffled:1",
        "cluster.ranks=2",
        "zero.stage=1",
        "zero.offload_optimizer.device=cpu",
    ),
    ("eager", "cluster.ranks=4", "zero.stage=2"),
    ("late", "cluster.ranks=4", "zero.stage=3", "train.accumulate=layers"),
    (
        "shuffled:2",
        "cluster.ranks=2",
        "zero.stage=3",
        "zero.offload_optimizer.device=nvme",
        "zero.offload_optimizer.nvme_path=/tmp",
        "zero.offload_param.device=cpu",
    ),
    ("eager", "cluster.ranks=8", "zero.stage=3", "zero.overlap_comm=false"),
    ("shuffled:6", "cluster.ranks=4", "zero.stage=3", "cluster.local=2"),
    (
        "shuffled:7",
        "cluster.ranks=8",
        "zero.stage=3",
        "cluster.local=4",
        "zero.shard_size=2",
        "zero.states=shard",
    ),
)


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("mpi") / "tokens"
    trainer.write_tokens(path, law.tokens(256, 40 * law.SAMPLES + 1))
    return path


def programs(family: str, *keys: str) -> list[pathlib.Path]:
    """Return out/train and out/train-mpi of one train.c."""
    source = trainer.generate(
        law.path(family),
        "train.micro_batch=1",
        "train.global_batch=8",
        *keys,
    )
    return [trainer.build(source, kind) for kind in (trainer.GCC, trainer.MPI)]


def weights(run) -> str:
    done = hosts.ended(run)
    assert done.returncode == 0, done.stderr
    return re.search(r"^weights (\w+)$", done.stdout, re.M)[1]


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["f32", "bf16"])
def test_one_hash_on_one_host(tokens: pathlib.Path, precision: str) -> None:
    """The hash is that of one rank of out/train, also if each rank or each two act as a host of
    their own."""
    said = ("--data", tokens, "--steps", STEPS, "--hash")
    type_ = f"train.precision={precision}"
    alone, _ = programs("gpt", type_, "cluster.ranks=1")
    want = trainer.sh(alone, *said)
    for n, (queue, *way) in enumerate(WAYS):
        _, made = programs("gpt", type_, *way)
        ranks = int(way[0].partition("=")[2])
        for here in {0, 1 + n % 2} if ranks > 1 else {0}:
            run = mpirun(made, ranks, *said, "--queue", queue, ZR_RANKS_PER_HOST=here)
            assert f"weights {weights(run)}\n" in want, (way, here)


@pytest.mark.slow
def test_samples_that_hosts_share(tokens: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Rows and heads that ranks exchange go over the wire between hosts, with the planned bytes,
    and the token that some ranks draw goes to all."""
    prompt = tmp_path / "prompt"
    prompt.write_bytes(b"".join(n.to_bytes(4, "little") for n in range(5)))
    draws = "--sample", 50, "--prompt-tokens", prompt
    said = ("--data", tokens, "--steps", STEPS, "--hash", *draws)
    keys = "train.sequence_blocks=4", "train.sum={block: 32}"
    alone, _ = programs("llama", *keys, "cluster.ranks=1")
    want = trainer.sh(alone, *said)
    for ranks, context, here in ((4, 4, 1), (4, 4, 2), (4, 2, 1), (8, 4, 4), (2, 2, 0)):
        way = f"cluster.ranks={ranks}", f"cluster.context_parallel={context}"
        _, made = programs("llama", *keys, *way)
        done = hosts.ended(mpirun(made, ranks, *said, ZR_RANKS_PER_HOST=here))
        assert done.returncode == 0, done.stderr
        *_, drawn, hashed = done.stdout.splitlines()
        assert len({*drawn.split()}) > 5 and hashed.startswith("weights ")
        assert f"{drawn}\n{hashed}\n" in want, (way, here)


@pytest.mark.slow
def test_ranks_that_are_dealt_over_hosts_are_refused(
    tokens: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """A start is refused if the launcher does not deal ranks over hosts in order, as the plan
    requires. The message names the first rank on another host and the remedy."""
    way = ("cluster.ranks=4", "zero.stage=3", "cluster.local=2")
    _, made = programs("gpt", *way)
    said = ("--data", tokens, "--steps", 1, "--hash")
    with hosts.network(2) as two:
        where = {"hosts": two, "folder": tmp_path}
        refused = hosts.ended(mpirun(made, 4, *said, by="node", **where))
        assert refused.returncode == 4, refused.stderr
        assert re.search(
            r"rank 1 \(.*\) is on another host than rank 0 \(\S+\), .* ranks 0 to 1 on one host "
            r"\(cluster.local: 2\); .*--distribution=block.*cluster.local: 1$",
            refused.stderr,
            re.M,
        ), refused.stderr
        good = hosts.ended(mpirun(made, 4, *said, **where))
        assert good.returncode == 0, good.stderr
        assert "hosts of 2 ranks: " in good.stdout


@pytest.mark.slow
def test_a_host_sends_the_planned_bytes(tokens: pathlib.Path) -> None:
    """The summary has the plan's bytes from other hosts, and those that a host sends."""
    keys = ("train.micro_batch=1", "train.global_batch=8", "cluster.ranks=4")
    keys += ("zero.stage=3", "cluster.local=2")
    made = trainer.build(trainer.generate(law.path("gpt"), *keys), trainer.MPI)
    plan = search.find(spec.load(str(law.path("gpt")), keys)).plan
    said = ("--data", tokens, "--steps", STEPS)
    done = hosts.ended(mpirun(made, 4, *said, ZR_RANKS_PER_HOST=2))
    assert done.returncode == 0, done.stderr
    (found,) = re.findall(
        r"^hosts of 2 ranks: (\d+) of these bytes are from other hosts; a host sends (\d+) to "
        r"others in a step$",
        done.stdout,
        re.M,
    )
    far = cost.training_wire(plan).far
    assert far and tuple(map(int, found)) == (far, cost.sent_by_host(plan))


@pytest.mark.slow
def test_hosts_of_fewer_ranks_are_refused(
    tokens: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """Hosts with fewer ranks than planned are refused; the remedy is the most consecutive ranks
    that every host has."""
    way = ("cluster.ranks=8", "zero.stage=3", "cluster.local=4")
    _, made = programs("gpt", *way)
    with hosts.network(4) as four:
        said = ("--data", tokens, "--steps", 1)
        where = {"hosts": four, "folder": tmp_path}
        refused = hosts.ended(mpirun(made, 8, *said, **where))
    assert refused.returncode == 4 and re.search(
        r"rank 2 .* another host than rank 0 .* generate with cluster.local: 2$",
        refused.stderr,
        re.M,
    ), refused.stderr


@pytest.mark.slow
def test_a_start_without_mpi_says_how(tokens: pathlib.Path) -> None:
    _, made = programs("gpt", "cluster.ranks=2")
    run = hosts.ended(mpirun(made, 1, "--data", tokens, "--steps", 1))
    assert run.returncode == 2 and "mpirun -n 2 " in run.stderr
    run = hosts.ended(mpirun(made, 3, "--data", tokens, "--steps", 1))
    assert run.returncode == 4 and "cluster.ranks=3" in run.stderr


@pytest.mark.slow
def test_each_rank_sees_the_folder_of_checkpoints(
    tokens: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """A start is refused if a rank does not see the folder of checkpoints: otherwise each one would
    be given up, unnoticed until the end."""
    _, made = programs("gpt", "cluster.ranks=2")
    words = ("--data", tokens, "--steps", STEPS, "--checkpoints", "ck")
    each = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        each += [":", "-n", 1, "-wdir", tmp_path / name, made, *words]
    run = hosts.ended(mpirun_of(*each[1:]))
    assert run.returncode == 2
    assert re.search(
        r"rank 1.*: --checkpoints ck/\.room-0/model\.safetensors: No such file "
        "or directory; all ranks write into the folder that rank 0 creates",
        run.stderr,
    )
    assert not list(tmp_path.glob("*/ck/step-*"))


@pytest.mark.parametrize("name", ["far.c", "wire.c"])
def test_mpich_takes_it(tmp_path: pathlib.Path, name: str) -> None:
    source = trainer.ROOT / "runtime" / "mpi" / name
    made = ("-Iruntime", "-c", source, "-o", tmp_path / "made.o")
    trainer.sh("mpicc.mpich", *trainer.flags("warn", "code"), *made)


# ---- several hosts


@pytest.fixture(scope="module")
def two():
    with hosts.network(2) as found:
        yield found


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_one_hash_on_two_hosts(
    tokens: pathlib.Path, tmp_path: pathlib.Path, two, stage: int
) -> None:
    """Two hosts have the hash of one.

    A host receives the bytes that the plan has for its ranks' steps. Before them come at most all
    parameters once (half of them for each of two ranks, a tenth more with padding), and beside them
    no more than a twentieth and 200 kB: headers and answers of TCP and MPI, and the ranks' meeting.
    """
    near, made = programs("llama", "cluster.ranks=4", f"zero.stage={stage}")
    said = ("--data", tokens, "--steps", STEPS, "--hash")
    want = trainer.sh(near, *said)
    before = two[1].received()
    got = weights(mpirun(made, 4, *said, hosts=two, folder=tmp_path))
    came = two[1].received() - before
    assert f"weights {got}\n" in want
    wire = int(re.search(r"^wire (\d+) bytes", want, re.M)[1])
    # two of a rank's three peers are on the other host; the host has two ranks
    planned = 2 * STEPS * wire * 2 // 3
    assert planned <= came <= 1.05 * (planned + 1.1 * 4 * SIZE) + 200_000


@pytest.mark.slow
def test_a_checkpoint_of_one_host_goes_on_on_two(
    tokens: pathlib.Path, tmp_path: pathlib.Path, two
) -> None:
    """A checkpoint of one host resumes on twice the ranks under another stage, with the optimizer
    on the host, as if the run had never stopped."""
    near, _ = programs("llama", "cluster.ranks=2", "zero.stage=1")
    _, made = programs(
        "llama",
        "cluster.ranks=4",
        "zero.stage=3",
        "zero.offload_optimizer.device=cpu",
    )
    kept = ("--checkpoints", tmp_path / "ck")
    said = ("--data", tokens, "--hash", "--steps")
    want = trainer.sh(near, *said, 2 * STEPS)
    trainer.sh(near, *said, STEPS, *kept)
    run = mpirun(made, 4, *said, 2 * STEPS, *kept, hosts=two, folder=tmp_path)
    assert f"weights {weights(run)}\n" in want


def there(host: hosts.Host, folder: pathlib.Path, does: str) -> pathlib.Path:
    """Return a program that behaves differently on one of the hosts."""
    made = folder / f"on-{host.name}"
    made.write_text(
        f'#!/bin/sh\nif [ "$(hostname)" = {host.name} ]; then {does}; fi\nexec "$@"\n'
    )
    made.chmod(0o755)
    return made


@pytest.mark.slow
def test_one_hash_on_three_hosts_of_which_one_is_slow(
    tokens: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """Three hosts have the same hash. Two have two ranks; the last has one and sends 40 Mbit/s, as
    many bytes as it receives."""
    near, made = programs(
        "llama", "cluster.ranks=5", "train.global_batch=10", "zero.stage=3"
    )
    said = ("--data", tokens, "--steps", STEPS, "--hash")
    want = trainer.sh(near, *said)
    with hosts.network(3) as three:
        three[2].slow_down(40e6)
        begin = time.monotonic()
        got = weights(mpirun(made, 5, *said, hosts=three, folder=tmp_path))
        passed = time.monotonic() - begin
    assert f"weights {got}\n" in want
    wire = int(re.search(r"^wire (\d+) bytes", want, re.M)[1])
    assert passed > 8 * STEPS * wire / 40e6


@pytest.mark.slow
def test_one_hash_where_a_host_comes_late(
    tokens: pathlib.Path, tmp_path: pathlib.Path, two
) -> None:
    near, made = programs("gpt", "cluster.ranks=2", "zero.stage=3")
    said = ("--data", tokens, "--steps", STEPS, "--hash")
    late = there(two[1], tmp_path, "sleep 3")
    run = mpirun(late, 2, made, *said, hosts=two, folder=tmp_path)
    assert f"weights {weights(run)}\n" in trainer.sh(near, *said)


@pytest.mark.slow
def test_another_program_on_a_host_is_named(
    tokens: pathlib.Path, tmp_path: pathlib.Path, two
) -> None:
    _, made = programs("gpt", "cluster.ranks=2", "zero.stage=3")
    _, other = programs("gpt", "cluster.ranks=2", "zero.stage=2")
    wrong = there(two[1], tmp_path, f'shift; set -- {other} "$@"')
    run = mpirun(
        wrong,
        2,
        made,
        *("--data", tokens, "--steps", 1),
        hosts=two,
        folder=tmp_path,
    )
    done = hosts.ended(run)
    assert done.returncode == 4, done.stderr
    assert re.search(
        r"rank 1 on host h2: runs plan \w+, rank 0 plan \w+; start the same binary",
        done.stderr,
    )


@pytest.mark.slow
@pytest.mark.parametrize("other", ["ZR_TOKEN=other", "ZR_PORTS=31000-31001"])
def test_another_setting_on_a_host_is_told_at_once(
    tokens: pathlib.Path, tmp_path: pathlib.Path, two, other: str
) -> None:
    _, made = programs("gpt", "cluster.ranks=2", "zero.stage=3")
    wrong = there(two[1], tmp_path, f"export {other}")
    said = ("--data", tokens, "--steps", 1)
    run = mpirun(wrong, 2, made, *said, hosts=two, folder=tmp_path)
    done = hosts.ended(run)
    assert done.returncode == 4, done.stderr
    assert re.search(
        r"rank 1 on host h2: ZR_TOKEN or ZR_PORTS differs from rank 0's",
        done.stderr,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "ranks,words,code,what",
    [
        (3, (), 4, "the launcher has 3 ranks"),
        (2, ("--sped",), 2, "--sped: no such option"),
    ],
)
def test_what_is_wrong_before_ranks_meet_names_host_and_rank(
    tokens: pathlib.Path,
    tmp_path: pathlib.Path,
    two,
    ranks: int,
    words: tuple[str, ...],
    code: int,
    what: str,
) -> None:
    _, made = programs("gpt", "cluster.ranks=2", "zero.stage=3")
    said = ("--data", tokens, "--steps", 1, *words)
    done = hosts.ended(mpirun(made, ranks, *said, hosts=two, folder=tmp_path))
    assert done.returncode == code, done.stderr
    assert re.search(rf"rank \d on host h[12]: {what}", done.stderr)


# ---- failures


def begun(made: pathlib.Path, log: pathlib.Path, *words, **settings):
    """Yield a run of many steps that has done some."""
    said = ("--steps", 1000000, "--log", log)
    run = mpirun(made, 4, *words, *said, **settings)
    until(lambda: log.exists() and log.read_text().count('"loss"') > 3)
    return run


def until(holds) -> None:
    end = time.monotonic() + LIMIT
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.1)


@pytest.mark.slow
def test_a_rank_that_dies_ends_all(
    tokens: pathlib.Path, tmp_path: pathlib.Path, two
) -> None:
    _, made = programs("llama", "cluster.ranks=4", "zero.stage=3")
    log = tmp_path / "log"
    where = {"hosts": two, "folder": tmp_path}
    run = begun(made, log, "--data", tokens, **where)
    os.kill(hosts.running(made, log)[-1], signal.SIGKILL)
    done = hosts.ended(run)
    assert done.returncode != 0
    assert re.search(r"rank \d on host h\d was ended by signal 9", done.stderr)
    until(lambda: not hosts.running(made, log))


def parent_of(made: pathlib.Path, log: pathlib.Path, rank: int) -> int:
    own = f"OMPI_COMM_WORLD_RANK={rank}".encode()
    found = [
        pid
        for pid in hosts.running(made, log)
        if own in pathlib.Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    ]
    (parent,) = (pid for pid in found if set(children(pid)) & set(found))
    return parent


@pytest.mark.slow
@pytest.mark.parametrize(
    "kept,number,what",
    [
        (("--checkpoints", "ck"), signal.SIGUSR1, "saves after this step"),
        (
            (),
            signal.SIGTERM,
            r"in step \d+; nothing is saved \(--checkpoints DIR saves\)$",
        ),
    ],
)
def test_who_was_sent_a_signal_says_so(
    tokens: pathlib.Path,
    tmp_path: pathlib.Path,
    two,
    kept: tuple[str, ...],
    number: signal.Signals,
    what: str,
) -> None:
    """A rank that was sent a signal is named with its host."""
    _, made = programs("llama", "cluster.ranks=4", "zero.stage=3")
    log = tmp_path / "log"
    words = [tmp_path / word if word == "ck" else word for word in kept]
    where = {"hosts": two, "folder": tmp_path}
    run = begun(made, log, "--data", tokens, *words, **where)
    os.kill(parent_of(made, log, 3), number)
    done = hosts.ended(run)
    assert re.search(
        rf"^rank 3 on host h2: (stopped by )?signal {number:d} \(.*\):? {what}",
        done.stderr,
        re.M,
    ), done.stderr


def waiting_for_stopped(
    run: subprocess.Popen[str], made: pathlib.Path, log: pathlib.Path
) -> str:
    """Stop rank 1 in a step; return the lines that name waiting ranks."""
    until(lambda: log.exists() and '"step": 2' in log.read_text())
    time.sleep(0.2)
    own = b"OMPI_COMM_WORLD_RANK=1"
    stopped = [
        pid
        for pid in hosts.running(made, log)
        if own in pathlib.Path(f"/proc/{pid}/environ").read_bytes()
    ]
    assert len(stopped) == 2  # the rank and its parent
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    try:
        said = [x for x in run.stderr if "no command has finished" in x]
    finally:
        for pid in stopped:
            with contextlib.suppress(ProcessLookupError):  # mpirun may have ended it
                os.kill(pid, signal.SIGKILL)
        hosts.ended(run)
    return "".join(said)


@pytest.mark.slow
@pytest.mark.parametrize(
    "local,way,waits",
    [
        (1, ("cluster.ranks=2",), ("0", "1", "")),
        (2, ("cluster.ranks=4", "cluster.local=2"), ("3", "1", " of group hosts")),
    ],
    ids=["flat", "groups"],
)
def test_who_is_waited_for_is_told(
    tokens: pathlib.Path,
    tmp_path: pathlib.Path,
    local: int,
    way: tuple[str, ...],
    waits: tuple[str, str, str],
) -> None:
    """Every report names the rank that is waited for when rank 1 is stopped in a step. A stop outside
    a gather is tried again, as ranks then wait for the norm in no group. So is a stop that mpirun
    answers so fast that rank 2 alone reports, which waits for one of the ranks that wait."""
    _, made = programs("gpt", *way, "zero.stage=3")
    ranks = 2 * local
    true = {("0", "1"), ("3", "1"), ("2", "0"), ("2", "3")}
    lines = []
    for attempt in range(3):
        log = tmp_path / f"log{attempt}"
        words = ("--data", tokens, "--steps", 1000000, "--log", log)
        run = mpirun(made, ranks, *words, ZR_RANKS_PER_HOST=local, ZR_TIMEOUT_S=2)
        lines.append(waiting_for_stopped(run, made, log))
        found = re.findall(
            r"finished.*: rank (\d) on host \S+ waits in step \d+ for rank (\d)( of group \w+)? on "
            r"host \S+;",
            lines[-1],
        )
        assert found and len(found) == lines[-1].count("\n"), lines[-1]
        assert {(who, whom) for who, whom, _ in found} <= true
        if waits in found:
            return
    pytest.fail("".join(lines))


HOLD = """
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>
static void hold(void)
{
    static int times;
    if (access(ASKED, F_OK) || times++) return;
    sleep(SECONDS);
    if (SECONDS) return;
    kill(getppid(), SIGSTOP);
    raise(SIGSTOP);
}
#ifdef BETWEEN
ssize_t send(int f, const void *at, size_t n, int flags)
{
    if (n > 1) hold();
    return sendto(f, at, n, flags, NULL, 0);
}
#else
int fsync(int f) { return hold(), fdatasync(f); }
#endif
"""


def held(
    tokens: pathlib.Path,
    folder: pathlib.Path,
    two: list[hosts.Host],
    on: int,
    *how: str,
    words: tuple[str | int, ...] = (),
):
    """Run on two hosts with a rank each and hold one of them after some steps, for a number of
    seconds; 0: stop the rank and its parent."""
    _, made = programs("gpt", "cluster.ranks=2", "zero.stage=3")
    log, asked = folder / "log", folder / "asked"
    (folder / "hold.c").write_text(HOLD)
    gcc = ("gcc", "-shared", "-fPIC", f'-DASKED="{asked}"', *how)
    trainer.sh(*gcc, folder / "hold.c", "-o", folder / "hold.so")
    there_ = there(two[on], folder, f"export LD_PRELOAD={folder}/hold.so")
    said = ("--data", tokens, "--checkpoints", folder / "ck", "--log", log)
    run = mpirun(
        there_,
        2,
        *(made, *said, "--steps", 60, *words),
        hosts=two,
        folder=folder,
        ZR_TIMEOUT_S=(limit := 3 * busy()),
    )
    until(lambda: log.exists() and log.read_text().count('"loss"') > 2)
    asked.touch()
    return hosts.ended(run), limit


@pytest.mark.slow
@pytest.mark.parametrize(
    "on,how", [(1, "-DBETWEEN"), (0, "-DBETWEEN"), (1, "-DSAVING")]
)
def test_a_host_that_stands_still_is_named(
    tokens: pathlib.Path, tmp_path: pathlib.Path, two, on: int, how: str
) -> None:
    """A host that stands still, between two steps or in a checkpoint, cannot report it, so the
    other host does."""
    done, _ = held(tokens, tmp_path, two, on, how, "-DSECONDS=0")
    assert done.returncode == 7, done.stderr
    assert (
        f"rank {1 - on} on host h{2 - on} waits in step" in done.stderr
        and f" for rank {on} on host h{1 + on};" in done.stderr
    ), done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("words", [(), ("--save-every", 8)])
def test_a_slow_disk_of_another_host_is_no_stall(
    tokens: pathlib.Path, tmp_path: pathlib.Path, two, words: tuple
) -> None:
    """A slow disk of another host is no stall: a rank saves far longer than the limit and lives,
    also beside a step whose update waits."""
    begin = time.monotonic()
    done, limit = held(
        tokens,
        tmp_path,
        two,
        1,
        "-DSAVING",
        f"-DSECONDS={8 * busy()}",
        words=words,
    )
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - begin > 2 * limit


SLOW = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
ssize_t pread(int f, void *to, size_t n, off_t at)
{
    char link[64], path[4096] = "";
    ssize_t (*next)(int, void *, size_t, off_t) = dlsym(RTLD_NEXT, "pread");
    snprintf(link, sizeof link, "/proc/self/fd/%d", f);
    if (!access(ASKED, F_OK) && getenv("OMPI_COMM_WORLD_RANK")[0] == '1' &&
        readlink(link, path, sizeof path - 1) > 0 && strstr(path, "/slow"))
        sleep(SECONDS);
    return next(f, to, n, at);
}
"""


@pytest.mark.slow
@pytest.mark.parametrize("option", ["--val", "--eval"])
def test_a_rank_that_is_long_at_an_evaluation_is_no_stall(
    tokens: pathlib.Path, tmp_path: pathlib.Path, option: str
) -> None:
    """A long evaluation is no stall: at stage 0 each rank evaluates by itself, and the one that is
    done waits for longer than the limit."""
    _, made = programs("gpt", "cluster.ranks=2", "zero.stage=0")
    log, asked = tmp_path / "log", tmp_path / "asked"
    limit = 3 * busy()
    example = choices.Example([1, 2, 3], [[4], [5]], 0)
    slow = tmp_path / "slow"
    if option == "--eval":
        slow.write_bytes(choices.file([example] * 12))
    else:
        trainer.write_tokens(slow, law.tokens(256, 33 * 12 + 1))
    (tmp_path / "slow.c").write_text(SLOW)
    trainer.sh(
        *("gcc", "-shared", "-fPIC", f'-DASKED="{asked}"'),
        f"-DSECONDS={busy()}",
        *(tmp_path / "slow.c", "-o", tmp_path / "slow.so"),
    )
    run = mpirun(
        made,
        2,
        *("--data", tokens, "--steps", 2000, "--log", log, option, slow),
        ZR_RANKS_PER_HOST=1,
        ZR_TIMEOUT_S=limit,
        LD_PRELOAD=tmp_path / "slow.so",
    )
    until(lambda: log.exists() and log.read_text().count('"loss"') > 2)
    asked.touch()
    begin = time.monotonic()
    done = hosts.ended(run)
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - begin > limit + 2


def cut(host: hosts.Host) -> None:
    hosts.sh(*host.at(), "ip", "link", "set", host.name, "down")


@pytest.mark.slow
@pytest.mark.parametrize("breaks", [cut, hosts.Host.kill])
def test_a_host_that_is_gone_ends_all(
    tokens: pathlib.Path, tmp_path: pathlib.Path, breaks
) -> None:
    """A host that is gone ends all ranks. One message names the missing rank, or mpirun names the
    missing host, or Open MPI reports and ends the rank whose connection broke (255). The checkpoint
    before it is valid."""
    near, made = programs("llama", "cluster.ranks=4", "zero.stage=3")
    log = tmp_path / "log"
    kept = ("--checkpoints", tmp_path / "ck", "--save-every", 20)
    with hosts.network(2) as two_more:
        run = begun(
            made,
            log,
            "--data",
            tokens,
            *kept,
            hosts=two_more,
            folder=tmp_path,
            ZR_TIMEOUT_S=10,
        )
        until(lambda: '"checkpoint"' in log.read_text())
        breaks(two_more[1])
        until(lambda: not hosts.running(made, log))
        os.killpg(run.pid, signal.SIGKILL)  # mpirun waits for its daemon there
        _, err = run.communicate()
    assert re.search(
        r"rank [01] on host h1 waits in step \d+ for (rank [23] on host h2;|ranks of)"
        r"|rank 0 on host h1: the connection to rank [23] at 10.99.0.2 has ended"
        r"|Remote daemon: .* on node 10.99.0.2"
        r"|\[h1\].* writev failed: (?s:.*)\n.*: rank [01] on host h1 ended with exit code 255, which",
        err,
    ), err
    last = max(int(p.name[5:]) for p in (tmp_path / "ck").glob("step-*"))
    assert last >= 20
    said = ("--data", tokens, *kept[:2], "--steps", last + 1, "--hash")
    assert re.search(r"^weights \w+$", trainer.sh(near, *said), re.M)


@pytest.mark.slow
def test_memory_is_what_the_generator_says(tokens: pathlib.Path) -> None:
    keys = ("cluster.ranks=4", "zero.stage=3", "train.global_batch=8")
    said = trainer.sh(
        trainer.ROOT / "gen" / "zgen",
        law.path("gpt"),
        *(w for key in keys for w in ("--set", key)),
        "--set",
        "train.micro_batch=1",
        "--emit",
        "memory",
    )
    (size,) = re.findall(r"^arena of train-mpi .*\((.*)\)$", said, re.M)
    _, made = programs("gpt", *keys)
    run = hosts.ended(mpirun(made, 4, "--data", tokens, "--steps", 1))
    (told,) = re.findall(r"^memory of a rank: arena (.*) MiB$", run.stderr, re.M)
    assert round(float(size.removesuffix(" MiB")), 1) == float(told)


@pytest.mark.slow
def test_a_launch_is_told_of(tmp_path: pathlib.Path, two) -> None:
    near, made = programs("gpt", "cluster.ranks=4")
    told = trainer.sh(near, "--check-launch")
    assert len(re.findall(r"^rank \d: .* \d of 4 there", told, re.M)) == 4
    run = mpirun(made, 4, "--check-launch", hosts=two, folder=tmp_path)
    done = hosts.ended(run)
    assert done.returncode == 0, done.stderr
    where = re.findall(r"^rank (\d): host (\w+), (\d) of 2 there", done.stdout, re.M)
    assert sorted(where) == [
        ("0", "h1", "0"),
        ("1", "h1", "1"),
        ("2", "h2", "0"),
        ("3", "h2", "1"),
    ]
    assert told.splitlines()[0] in done.stdout  # the plan


@pytest.mark.slow
def test_a_launch_is_told_of_on_gpus() -> None:
    source = trainer.generate(law.path("gpt"), "cluster.ranks=2")
    told = trainer.sh(trainer.build(source, trainer.EMULATED), "--check-launch")
    assert len(re.findall(r"^rank \d: .* \d of 2 there", told, re.M)) == 2
