#!/usr/bin/env python3
"""launchers.py -- stand-ins for srun, scontrol, torchrun and nvidia-smi, chosen by the name of the
call.

They start a program, signal it, end it and restart it, and do nothing else.

In the folder $NOTED they record for tests the running processes (`tasks`), a line of exit codes for
each start (`codes`), a line of hosts if they are named (`hosts`), and a job that is to be queued
again (`requeue`). Hosts named in `broken` there have no GPU.
"""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

GPUS = 2  # GPUs of this host
LATER = 30  # seconds from torchrun's SIGTERM to SIGKILL
NOTED = pathlib.Path(os.environ.get("NOTED", "."))


def split(words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Return the options, all of them --NAME=VALUE or --NAME, and the program with its
    arguments."""
    n = next(i for i, word in enumerate(words) if not word.startswith("--"))
    pairs = (word.partition("=") for word in words[:n])
    return {name: value for name, _, value in pairs}, list(words[n:])


def start(
    words: Sequence[str], variables: Sequence[Mapping[str, object]]
) -> list[subprocess.Popen[bytes]]:
    tasks = [
        subprocess.Popen(
            words, env=os.environ | {name: str(x) for name, x in own.items()}
        )
        for own in variables
    ]
    (NOTED / "tasks").write_text(" ".join(str(task.pid) for task in tasks))
    return tasks


def end(tasks: Sequence[subprocess.Popen[bytes]]) -> list[int]:
    """Wait for tasks. Return their exit codes as a shell has them: 128 plus the number for a
    signal."""
    codes = [x if x >= 0 else 128 - x for x in (t.wait() for t in tasks)]
    with open(NOTED / "codes", "a") as f:
        f.write(" ".join(map(str, codes)) + "\n")
    return codes


# A task of Slurm whose daemon speaks PMIx, as mpirun's does.
OF_PMIX = """
export SLURM_PROCID=$OMPI_COMM_WORLD_RANK SLURM_LOCALID=$OMPI_COMM_WORLD_LOCAL_RANK
unset OMPI_COMM_WORLD_RANK
exec "$0" "$@"
"""


def srun(words: Sequence[str]) -> int:
    options, program = split(words)
    if program[0] == "nvidia-smi":
        host = {"SLURMD_NODENAME": options["--nodelist"]}
        return subprocess.run(program, env=os.environ | host).returncode
    n = int(options.get("--ntasks") or os.environ["SLURM_NTASKS"])
    if "--nodelist" in options:
        with open(NOTED / "hosts", "a") as f:
            f.write(options["--nodelist"] + "\n")
    of_all = {
        "SLURM_STEP_NUM_TASKS": n,
        "SLURM_STEP_ID": 0,
        "SLURM_STEP_NODELIST": "127.0.0.1",
    }
    of_each: list[dict[str, object]] = [
        {"SLURM_PROCID": rank, "SLURM_LOCALID": rank} for rank in range(n)
    ]
    if os.environ.get("SLURM_MPI_TYPE") == "pmix":
        begin = ("mpirun", "--oversubscribe", "-n", str(n))
        program = [*begin, "sh", "-c", OF_PMIX, *program]
        of_each = [{}]
    tasks = start(program, [of_all | own for own in of_each])
    while options.get("--kill-on-bad-exit") != "0" and None in [
        task.poll() for task in tasks
    ]:
        if any(task.poll() for task in tasks):
            for task in tasks:
                task.kill()
        time.sleep(0.02)
    return max(end(tasks))


def nvidia_smi(words: Sequence[str]) -> int:
    broken = NOTED / "broken"
    names = broken.read_text().split() if broken.exists() else []
    return int(os.environ["SLURMD_NODENAME"] in names)


def scontrol(words: Sequence[str]) -> int:
    if words[:2] == ["show", "hostnames"]:
        print(words[2].replace(",", "\n"))
        return 0
    assert words == ["requeue", os.environ["SLURM_JOB_ID"]]
    (NOTED / "requeue").touch()
    return 0


def torchrun(words: Sequence[str]) -> int:
    options, program = split(words)
    assert "--no-python" in options
    alone = "--standalone" in options
    assert alone or options["--rdzv-endpoint"].endswith(":29400")
    assert alone or (options["--nnodes"], options["--rdzv-backend"]) == ("1", "c10d")
    assert options["--nproc-per-node"] == "gpu"
    told: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: told.append(number))
    for _ in range(int(options["--max-restarts"]) + 1):
        workers = start(
            program,
            [
                {
                    "RANK": rank,
                    "WORLD_SIZE": GPUS,
                    "LOCAL_RANK": rank,
                    "LOCAL_WORLD_SIZE": GPUS,
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": os.environ["PORT"],
                    "TORCHELASTIC_RUN_ID": "none",
                }
                for rank in range(GPUS)
            ],
        )
        while not told and None in (codes := [w.poll() for w in workers]):
            if any(codes):
                break
            time.sleep(0.1)
        for worker in workers:
            if worker.poll() is None:
                worker.terminate()
        until = time.monotonic() + LATER
        while None in [w.poll() for w in workers] and time.monotonic() < until:
            time.sleep(0.02)
        for worker in workers:
            worker.kill()
        if not any(end(workers)):
            return 0
        if told:
            return 1
    return 1


if __name__ == "__main__":
    of = (srun, scontrol, torchrun, nvidia_smi)
    named = {f.__name__.replace("_", "-"): f for f in of}
    sys.exit(named[pathlib.Path(sys.argv[0]).name](sys.argv[1:]))
