"""test_examples.py -- tests examples/: each job runs with a stand-in for its launcher, is disturbed
as that launcher would, and restarts until it is done, with the weights of an undisturbed run. It
also tests launched ranks of which a single one is asked to leave. Another test cuts a run's
memory."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.lib import hosts, program, trainer
from tests.lib.hosts import AS_ROOT
from tests.lib.patience import LIMIT
from tests.lib.trainer import ROOT

STEPS = 20
LONG = 100000  # steps that no test waits for
KEYS = (
    "train.micro_batch=1",
    "train.global_batch=2",
    "train.sequence=8",
    "model.units[1].blocks=1",
    "cluster.ranks=2",
)


@functools.cache
def built() -> Path:
    """Return the program for GPUs, emulated, of two ranks."""
    spec = ROOT / "model_specs" / "gpt-tiny.yaml"
    return trainer.build(trainer.generate(spec, *KEYS), trainer.EMULATED)


def write_tokens(folder: Path) -> Path:
    path = folder / "tokens.bin"
    trainer.write_tokens(path, [i * i % 251 for i in range(3000)])
    return path


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return the hash of an undisturbed run."""
    data = write_tokens(tmp_path_factory.mktemp("peace"))
    done = program.run(built(), "--data", data, "--steps", STEPS, "--hash")
    assert done.code == 0, done.err
    return weights(done.out)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Return a user's folder with examples, a program, tokens, and launchers in bin/."""
    for name in ("bin", "out"):
        (tmp_path / name).mkdir()
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for folder in ("bin", "out"):  # of Dockerfile.cuda's path, and of a checkout
        (tmp_path / folder / "train-cuda").symlink_to(built())
    for name in ("srun", "scontrol", "torchrun", "nvidia-smi"):
        stand_in = ROOT / "tests" / "lib" / "launchers.py"
        (tmp_path / "bin" / name).symlink_to(stand_in)
    write_tokens(tmp_path)
    return tmp_path


Start = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def start(home: Path) -> Iterator[Start]:
    """Yield start(command): it starts a process group in the user's folder, which ends with the
    test and writes to `said`."""
    all_: list[subprocess.Popen[bytes]] = []

    def begin(*command: object, **settings: object) -> subprocess.Popen[bytes]:
        path = f"{home / 'bin'}:{os.environ['PATH']}"
        with open(home / "said", "a") as said:
            running = subprocess.Popen(
                list(map(str, command)),
                cwd=home,
                env=program.environment(PATH=path, NOTED=home, **settings),
                stdout=said,
                stderr=said,
                start_new_session=True,
            )
        all_.append(running)
        return running

    yield begin
    for running in all_:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(running.pid, signal.SIGKILL)
        running.wait(LIMIT)


def command(steps: int = STEPS) -> list[str]:
    return [
        *("out/train-cuda", "--data", "tokens.bin", "--steps", str(steps)),
        *("--checkpoints", "checkpoints", "--log", "log", "--hash"),
    ]


def logged(home: Path) -> list[int]:
    """Return the steps of the log so far."""
    log = home / "log"
    lines = log.read_text().splitlines() if log.exists() else []
    return [json.loads(x)["step"] for x in lines if '"loss"' in x]


def wait_for_step(home: Path, step: int) -> None:
    until = time.monotonic() + LIMIT
    while max(logged(home), default=0) < step:
        assert time.monotonic() < until, (home / "said").read_text()
        time.sleep(0.02)


def noted(home: Path) -> list[str]:
    """Return the exit codes of all tasks, a line for each start."""
    codes = home / "codes"
    return codes.read_text().splitlines() if codes.exists() else []


def tasks(home: Path) -> list[int]:
    return list(map(int, (home / "tasks").read_text().split()))


def weights(said: str) -> list[str]:
    return re.findall(r"^weights (\w+)$", said, re.M)


def went_on(home: Path, times: int) -> list[str]:
    """Return the hash of a run that resumed `times` times from a checkpoint."""
    said = (home / "said").read_text()
    assert said.count("resumes from step ") == times, said
    return weights(said)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


# ---- Slurm


def sbatch(start: Start, *words: str, **settings: object) -> subprocess.Popen[bytes]:
    """Start a job's script like Slurm; options here precede those in the script."""
    n = next(i for i, word in enumerate(words) if not word.startswith("--"))
    inside = re.findall(r"^#SBATCH (--.*)$", (ROOT / words[n]).read_text(), re.M)
    has = dict(word.partition("=")[::2] for word in (*inside, *words[:n]))
    assert "--requeue" in has and has["--open-mode"] == "append"
    assert has["--signal"].startswith("USR1@")
    return start(
        "bash",
        *words[n:],
        SLURM_JOB_ID=free_port(),
        SLURM_NTASKS=int(has["--nodes"]) * int(has["--ntasks-per-node"]),
        **settings,
    )


@pytest.mark.slow
def test_slurm(home: Path, start: Start, undisturbed: list[str]) -> None:
    """A node fails, the next job reaches its time limit, and the third one its end."""
    here = ("--nodes=1", "--ntasks-per-node=2", "examples/slurm.sbatch")
    submitted = (*here, *command(), "--save-every", "2")
    requeue = home / "requeue"
    job = sbatch(start, *submitted)
    wait_for_step(home, 3)
    os.killpg(job.pid, signal.SIGKILL)
    assert job.wait(LIMIT) == -signal.SIGKILL and not requeue.exists()
    last = max(logged(home))
    job = sbatch(start, *submitted)
    wait_for_step(home, last + 2)
    for task in tasks(home):
        os.kill(task, signal.SIGUSR1)
    assert job.wait(LIMIT) == 75 and noted(home) == ["75 75"]
    requeue.unlink()
    job = sbatch(start, *submitted)
    assert job.wait(LIMIT) == 0 and not requeue.exists()
    assert noted(home) == ["75 75", "0 0"]
    assert went_on(home, 2) == undisturbed


@pytest.mark.slow
def test_slurm_with_a_spare_host(
    home: Path, start: Start, undisturbed: list[str]
) -> None:
    """A host loses its GPU, so its task dies: the spare host takes its place, in the same job. With
    two broken hosts nothing is started."""
    here = ("--nodes=3", "--ntasks-per-node=1", "examples/slurm-spare.sbatch")
    submitted = (*here, *command(), "--save-every", "2")
    of = {
        "SLURM_JOB_NODELIST": "a,b,c",
        "SLURM_NNODES": 3,
        "SLURM_NTASKS_PER_NODE": 1,
    }
    job = sbatch(start, *submitted, **of)
    wait_for_step(home, 3)
    (home / "broken").write_text("b")
    os.kill(tasks(home)[1], signal.SIGKILL)
    assert job.wait(LIMIT) == 0
    assert (home / "hosts").read_text().split() == ["a,b", "a,c"]
    assert [x.split()[1] for x in noted(home)] == ["137", "0"]
    assert went_on(home, 1) == undisturbed
    (home / "broken").write_text("b c")
    assert sbatch(start, *submitted, **of).wait(LIMIT) == 3
    assert len(noted(home)) == 2


@pytest.mark.slow
def test_slurm_with_a_spare_host_is_queued_again(home: Path, start: Start) -> None:
    here = ("--nodes=3", "--ntasks-per-node=1", "examples/slurm-spare.sbatch")
    of = {
        "SLURM_JOB_NODELIST": "a,b,c",
        "SLURM_NNODES": 3,
        "SLURM_NTASKS_PER_NODE": 1,
    }
    job = sbatch(start, *here, *command(LONG), **of)
    wait_for_step(home, 2)
    for task in tasks(home):
        os.kill(task, signal.SIGUSR1)
    assert job.wait(LIMIT) == 75 and (home / "requeue").exists()
    assert noted(home) == ["75 75"]


@pytest.mark.slow
def test_slurm_on_cpus(home: Path, start: Start) -> None:
    """Slurm starts one task, which starts its ranks itself."""
    spec = ROOT / "model_specs" / "gpt-tiny.yaml"
    binary = trainer.build(trainer.generate(spec, *KEYS))
    (home / "out" / "train").symlink_to(binary)
    here = ("--nodes=1", "--ntasks-per-node=1", "examples/slurm.sbatch")
    submitted = (*here, "out/train", *command(LONG)[1:])
    job = sbatch(start, *submitted, ZR_GATHER_DELAY_US=10000)
    wait_for_step(home, 3)
    for task in tasks(home):
        os.kill(task, signal.SIGUSR1)
    assert job.wait(LIMIT) == 75 and (home / "requeue").exists()
    assert weights((home / "said").read_text()) == []
    total = max(logged(home)) + 2
    submitted = (*here, "out/train", *command(total)[1:])
    assert sbatch(start, *submitted).wait(LIMIT) == 0
    alone = program.train(binary, home / "tokens.bin", steps=total)
    assert went_on(home, 1) == weights(alone.out) != []


def of_mpi(home: Path, ranks: int) -> tuple[Path, Path]:
    """Return out/train-mpi, built in the folder, and out/train of the same train.c."""
    spec = ROOT / "model_specs" / "gpt-tiny.yaml"
    of = (f"train.global_batch={ranks}", f"cluster.ranks={ranks}")
    source = trainer.generate(spec, *KEYS, *of)
    made = trainer.build(source, trainer.MPI)
    (home / "out" / "train-mpi").symlink_to(made)
    return made, trainer.build(source)


@pytest.mark.slow
def test_slurm_with_mpi(home: Path, start: Start) -> None:
    """Slurm with MPI runs two hosts of 8 tasks each."""
    _, near = of_mpi(home, 16)
    here = ("--nodes=2", "--ntasks-per-node=8", "examples/slurm.sbatch")
    submitted = (*here, "out/train-mpi", *command(LONG)[1:])
    settings = {
        **AS_ROOT,
        "SLURM_MPI_TYPE": "pmix",
        "ZR_RANKS_PER_HOST": 8,
        "ZR_GATHER_DELAY_US": 10000,
    }
    job = sbatch(start, *submitted, **settings)
    wait_for_step(home, 3)
    for task in tasks(home):
        os.kill(task, signal.SIGUSR1)
    assert job.wait(LIMIT) == 75 and (home / "requeue").exists()
    total = max(logged(home)) + 2
    submitted = (*here, "out/train-mpi", *command(total)[1:])
    assert sbatch(start, *submitted, **settings).wait(LIMIT) == 0
    alone = program.train(near, home / "tokens.bin", steps=total)
    assert went_on(home, 1) == weights(alone.out) != []


# ---- mpirun


@pytest.mark.slow
def test_mpirun(home: Path, start: Start) -> None:
    """A rank dies and all are restarted; the job is told to end, and is run again."""
    _, near = of_mpi(home, 2)
    (home / "hosts").write_text("localhost slots=2\n")
    log = home / "log"  # a word that no other test uses

    def begun(steps: int) -> list[object]:
        words = [log if word == "log" else word for word in command(steps)[1:]]
        return ["examples/mpirun.sh", "hosts", "out/train-mpi", *words]

    slow = {**AS_ROOT, "ZR_GATHER_DELAY_US": 10000}
    running = start(*begun(LONG), "--save-every", 2, **slow)
    wait_for_step(home, 3)
    os.kill(hosts.running(Path("out/train-mpi"), log)[-1], signal.SIGKILL)
    wait_for_step(home, max(logged(home)) + 2)
    running.terminate()
    assert running.wait(LIMIT) == 75
    total = max(logged(home)) + 2
    assert start(*begun(total), **slow).wait(LIMIT) == 0
    alone = program.train(near, home / "tokens.bin", steps=total)
    assert went_on(home, 2) == weights(alone.out) != []


@pytest.mark.slow
def test_mpirun_does_what_the_exit_codes_say(home: Path, start: Start) -> None:
    """An exit code for an error is not retried."""
    of_mpi(home, 2)
    (home / "hosts").write_text("localhost slots=2\n")
    job = start(
        *("examples/mpirun.sh", "hosts", "out/train-mpi", "--data", "none"),
        **AS_ROOT,
    )
    assert job.wait(LIMIT) == 2
    # one of each rank, unless mpirun ended it first
    assert (home / "said").read_text().count("--steps N is needed") in (1, 2)


ONCE = """#!/bin/bash
trap 'exit 138' USR1
echo began >> "$NOTED/codes"
sleep 1000 &
wait
"""

# A replacement of the script's `kill`: when it returns, the run has ended and bash has reaped it.
LAST = """() {
    builtin kill "$@" || return
    while [ "$1" = -USR1 ] && [ -e "/proc/$2" ]; do sleep 0.02; done
}"""


@pytest.mark.parametrize("kill", [{}, {"BASH_FUNC_kill%%": LAST}])
def test_mpirun_is_not_started_anew_for_who_was_told_to_end(
    home: Path, start: Start, kill: dict[str, str]
) -> None:
    """mpirun is not restarted for a run that was told to end, whatever its code, for example
    because a rank died meanwhile. The exit code is the run's own, not the signal's, if the run ends
    as the signal comes."""
    (home / "bin" / "mpirun").write_text(ONCE)
    (home / "bin" / "mpirun").chmod(0o755)
    job = start("examples/mpirun.sh", "hosts", "out/train-mpi", **kill)
    until = time.monotonic() + LIMIT
    while not noted(home):
        assert time.monotonic() < until
        time.sleep(0.02)
    job.terminate()
    assert job.wait(LIMIT) == 138 and noted(home) == ["began"]


# ---- torchrun


@pytest.mark.slow
def test_torchrun(home: Path, start: Start, undisturbed: list[str]) -> None:
    """A worker dies and all are restarted; torchrun itself is told to end, and is run again."""
    job = ("examples/torchrun.sh", *command(), "--save-every", "2")
    running = start(*job, PORT=free_port())
    wait_for_step(home, 3)
    os.kill(tasks(home)[1], signal.SIGKILL)
    until = time.monotonic() + LIMIT
    while not noted(home):
        assert time.monotonic() < until
        time.sleep(0.02)
    assert noted(home)[0].endswith("137")
    wait_for_step(home, max(logged(home)) + 2)
    running.terminate()
    assert running.wait(LIMIT) == 1 and noted(home)[1:] == ["75 75"]
    again = start(*job, PORT=free_port())
    assert again.wait(LIMIT) == 0 and noted(home)[2:] == ["0 0"]
    assert went_on(home, 2) == undisturbed


@pytest.mark.slow
def test_torchrun_with_a_spare_host(
    home: Path, start: Start, undisturbed: list[str]
) -> None:
    """Only the command is tested: the stand-in has no hosts."""
    job = ("examples/torchrun-spare.sh", "here", "1", *command())
    assert start(*job, PORT=free_port()).wait(LIMIT) == 0
    assert noted(home) == ["0 0"] and went_on(home, 0) == undisturbed


# ---- Kubernetes


def manifests() -> Mapping[str, Any]:
    """Return the manifests by kind."""
    path = ROOT / "examples" / "kubernetes.yaml"
    return {x["kind"]: x for x in yaml.safe_load_all(path.read_text())}


def action(code: int) -> str:
    """Return the Job's action after a container has ended with this code."""
    for rule in manifests()["Job"]["spec"]["podFailurePolicy"]["rules"]:
        on = rule.get("onExitCodes")
        if on and (code in on["values"]) == (on["operator"] == "In"):
            return str(rule["action"])
    return "Count"


def pods(start: Start, home: Path) -> list[subprocess.Popen[bytes]]:
    """Start pods like the Job does; names of the Service resolve to this host."""
    of, service = (manifests()[kind] for kind in ("Job", "Service"))
    job, pod = of["spec"], of["spec"]["template"]["spec"]
    assert job["completionMode"] == "Indexed"
    assert job["parallelism"] == job["completions"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"job-name": of["metadata"]["name"]}
    assert service["metadata"]["name"] == pod["subdomain"]
    (container,) = pod["containers"]
    env = {x["name"]: x["value"] for x in container["env"]}
    assert int(env["ZR_WORLD_SIZE"]) == job["completions"]
    host, _, port = env["ZR_ADDR"].partition(":")
    assert host == f"{of['metadata']['name']}-0.{pod['subdomain']}"
    assert int(port) < 32768
    env["ZR_ADDR"] = f"127.0.0.1:{free_port()}"
    said = [*container["command"], *container["args"]]
    data = [re.sub(r"^/data/", f"{home}/", word) for word in said]
    return [
        start(*data, "--steps", STEPS, "--hash", JOB_COMPLETION_INDEX=n, **env)
        for n in range(job["completions"])
    ]


@pytest.mark.slow
def test_kubernetes(home: Path, start: Start, undisturbed: list[str]) -> None:
    """A pod is evicted: both pods save, and both are restarted."""
    first = pods(start, home)
    wait_for_step(home, 3)
    first[1].terminate()
    codes = [pod.wait(LIMIT) for pod in first]
    assert codes == [75, 75] and set(map(action, codes)) == {"Ignore"}
    assert [pod.wait(LIMIT) for pod in pods(start, home)] == [0, 0]
    assert went_on(home, 1) == undisturbed


def test_kubernetes_does_what_the_exit_codes_say() -> None:
    page = (ROOT / "docs" / "running.md").read_text()
    rows = re.findall(r"^\| (\d+) \|.*\| ([^|]+) \|$", page, re.M)
    advice = {int(code): text for code, text in rows if code != "0"}
    words = {"queue again": "Ignore", "stop": "FailJob", "retry": "Count"}
    told = {
        code: next(words[w] for w in words if w in text)
        for code, text in advice.items()
    }
    assert told == {code: action(code) for code in advice}
    assert set(told.values()) == set(words.values()) and len(told) == 8


def test_kubernetes_has_less_grace_than_it_gives() -> None:
    pod = manifests()["Job"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    grace = container["args"][container["args"].index("--grace") + 1]
    given = int(grace.removesuffix("s"))
    assert 5 <= pod["terminationGracePeriodSeconds"] - given <= 30
    assert pod["restartPolicy"] == "Never"  # required by podFailurePolicy


# ---- memory that is cut


@pytest.mark.slow
def test_memory_is_cut(tmp_path: Path) -> None:
    """zgen refuses stage 1 and names stage 3 with offloading, which resumes and ends with the
    weights of a run at stage 1. The printed seconds add up."""
    root = trainer.with_objects(trainer.checkout(tmp_path / "sources"))
    for name in ("examples/memory-cut.sh", "tests/data/kjv.txt"):
        (root / name).parent.mkdir(exist_ok=True)
        shutil.copy2(ROOT / name, root / name)
    done = subprocess.run(
        [root / "examples/memory-cut.sh"],
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert done.returncode == 0, done.stderr
    half, resumed, whole = weights(done.stdout)
    assert half != resumed == whole
    (refusal,) = re.findall(r"^--set: cluster\.memory\.device: .*$", done.stderr, re.M)
    assert "78,962,688 bytes" in refusal and "has only 64,000,000 bytes" in refusal
    ways = "train.offload_activations=true, or train.recompute=full"
    assert refusal.endswith(f"allowed: {ways}")
    assert re.findall(r"; ZeRO (\d), ranks 2,", done.stderr) == ["1", "3", "1"]
    assert re.findall(r"^resumes from step (\d+),", done.stderr, re.M) == ["10"]
    change = done.stdout.splitlines()[-2:]
    total, *parts = map(float, re.findall(r"(\d+\.\d) s", " ".join(change)))
    assert len(parts) == 4 and 0 < total
    assert abs(total - sum(parts)) < 0.26  # five numbers, each rounded to 0.1


# ---- one of several launched ranks


def launched(
    start: Start, home: Path, *options: object, **slow: object
) -> list[subprocess.Popen[bytes]]:
    """Start launched ranks. slow: settings of rank 0 alone."""
    port = free_port()
    return [
        start(
            *command(LONG),
            *options,
            ZR_RANK=rank,
            ZR_WORLD_SIZE=2,
            ZR_LOCAL_RANK=rank,
            ZR_ADDR=f"127.0.0.1:{port}",
            **({} if rank else slow),
        )
        for rank in range(2)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("to", ["the process", "its rank"])
def test_one_launched_rank_asks_all(home: Path, start: Start, to: str) -> None:
    running = launched(start, home)
    wait_for_step(home, 2)
    pid = running[1].pid
    os.kill(
        pid if to == "the process" else program.children(pid)[0],
        signal.SIGUSR1,
    )
    assert [rank.wait(LIMIT) for rank in running] == [75, 75]
    last = max(logged(home))
    assert (home / "checkpoints" / f"step-{last:08d}").is_dir()


@pytest.mark.slow
def test_one_launched_ranks_grace_is_all_ranks(home: Path, start: Start) -> None:
    """The grace of one rank holds for all: rank 1 gets the signal, rank 0 with its slow disk gives
    the checkpoint up, and both leave."""
    library = program.chaos_library(home)
    slow = {"LD_PRELOAD": library, "SLOW": 100000}
    running = launched(start, home, "--grace", "1s", **slow)
    wait_for_step(home, 2)
    running[1].terminate()
    assert [rank.wait(LIMIT) for rank in running] == [75, 75]
    said = (home / "said").read_text()
    assert "the time of --grace has passed\n" in said
    assert "; its checkpoint is incomplete\nthere is no checkpoint\n" in said
    assert not list((home / "checkpoints").glob("*step*"))
