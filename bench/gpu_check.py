"""gpu_check.py -- checks out/train-cuda on a GPU against the CPU's program and against itself.

    gpu_check.py build OUT.json       objects and kernels' libraries; a program's --version
    gpu_check.py ready OUT.json       `losses` of programs that were built elsewhere
    gpu_check.py losses OUT.json      20 losses of tiny models equal the CPU's, within tests' bounds
    gpu_check.py law OUT.json         one hash over stages, prefetch, graphs, queues and two runs
    gpu_check.py tune-CASE OUT.json   the best algorithms of a model's products, kept for `speed`
    gpu_check.py profile OUT.json     a step of the first model, command by command
    gpu_check.py ranks OUT.json       two ranks on one GPU leave the hash of one rank
    gpu_check.py offload OUT.json     the optimizer on the host: the same hash, and its cost
    gpu_check.py memory OUT.json      device memory of two models is the plan's, and does not grow

Each writes its results after every run, and exits with 1 if something is wrong. The CPU's losses
are those of gpu_ready.py.
ZR_BENCH_KIND=emulated takes out/train-emulated instead, to try this script without a GPU.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

from gpu_cases import (
    CASES,
    LARGEST,
    LAYERS,
    LOOKED_AT,
    REHEARSAL,
    ROOM,
    ROOT,
    Case,
    Source,
    alone,
    places,
    tiny,
    together,
)
from gpu_report import write

sys.path[:0] = [str(ROOT), str(ROOT / "gen")]
import numpy as np

from tests.lib import trainer
from zg.facts import reserve
from zg.plan import text

MADE = ROOT / "out" / "bench"
KIND = trainer.EMULATED if REHEARSAL else trainer.CUDA
WORKERS = 2 if REHEARSAL else min(8, os.cpu_count() or 1)
CPUS_LOSSES = ROOM / "losses.json"
LIMIT = 60 if not REHEARSAL else 1000  # seconds of one run
PART = float(os.environ.get("ZR_BENCH_LIMIT", LIMIT)) - 4  # seconds of a part's one run
STEPS = 20 if not REHEARSAL else 12
FALLS, FEW_TOKENS = 0.5, 16  # a loss falls by so much on so few different tokens
FEW = STEPS if not REHEARSAL else 2  # steps of runs that are only compared
# Seconds that a step of these ranks may take
STUCK = 40 if not REHEARSAL else LIMIT
SOME = 6 if not REHEARSAL else 2  # steps of ranks that share a device
# Steps of the part `offload`, of which some are not counted, and the limit of a run. Steps may take
# 7 s with the optimizer on the host, and the start 20 s.
HOST_STEPS, HOST_DROPPED = (6, 2) if not REHEARSAL else (3, 1)
HOST_LIMIT = LIMIT * 3 // 2
PAGE = 2 << 20  # bytes of device memory that are allocated at a time
GRAPHS = 8 << 20  # bytes by which graphs of more layers may differ
# Relative bounds of the first loss and of all twenty: see tests/cuda/test_emulated.py.
BOUNDS = {"f32": (2e-6, 2e-4), "bf16": (4e-3, 4e-2), "f16": (5e-4, 5e-3)}


@dataclass
class Run:
    """Result of a program: its exit code, its output and its log."""

    name: str
    code: int
    weights: str
    losses: list[float]
    said: str
    seconds: list[float]
    profile: list[str] = field(default_factory=list)  # the table of --profile


def tokens(vocab: int, count: int) -> Path:
    """Return a file of random tokens; equal arguments give equal files."""
    path = MADE / f"tokens-{vocab}-{count}.bin"
    MADE.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        part = path.with_suffix(f".{os.getpid()}")
        np.random.RandomState(1).randint(0, min(vocab, 65535), count).astype(
            "<u2"
        ).tofile(part)
        part.rename(path)
    return path


def program(source: Source, kind: trainer.Kind) -> Path:
    """Return a program that was built elsewhere, or else build it."""
    ready = trainer.READY / source.name
    return ready if ready.exists() else trainer.build(source.read(".c"), kind)


def ended(
    command: list[object], limit: float = PART, **env: object
) -> tuple[int, str, str]:
    """Run a command. Return its exit code, -1 after `limit` seconds, its output and its errors."""
    try:
        done = subprocess.run(
            [*map(str, command)],
            capture_output=True,
            text=True,
            timeout=limit,
            env=os.environ | {k: str(v) for k, v in env.items()},
        )
    except subprocess.TimeoutExpired as e:
        told = (e.stderr or b"").decode(errors="replace")
        return -1, "", f"not done in {limit:.0f} s\n{told}"
    return done.returncode, done.stdout, done.stderr


def run(
    source: Source,
    kind: trainer.Kind,
    data: Path,
    steps: int,
    *options: object,
    limit: float = LIMIT,
    label: str = "",
    **env: object,
) -> Run:
    name = "-".join(
        [source.name, *(Path(str(o)).name for o in options), *label.split()]
    ).replace("--", "")
    name += "-cpu" if kind is trainer.GCC else ""
    log = MADE / f"{name}.jsonl"
    log.unlink(missing_ok=True)
    command = [program(source, kind), "--data", data, "--steps", steps, "--hash"]
    code, out, err = ended([*command, "--log", log, *options], limit, **env)
    lines = (
        [json.loads(line) for line in log.read_text().splitlines()]
        if log.exists()
        else []
    )
    steps_ = [line for line in lines if "loss" in line]
    hashed = re.search(r"^weights (\w+)$", out, re.M)
    return Run(
        name,
        code,
        hashed[1] if hashed else "",
        [line["loss"] for line in steps_],
        (err + out)[-1500:],
        [line["seconds"] for line in steps_],
        table(out),
    )


def table(out: str) -> list[str]:
    """Return the table of --profile in a program's output, which ends at the last loss."""
    found = re.search(r"^profile of rank 0.*?(?=^loss |\Z)", out, re.M | re.S)
    return found[0].splitlines() if found else []


def kept(r: Run) -> dict[str, object]:
    """Return a run as JSON values; its output is kept only if it failed."""
    return asdict(r) | {"said": "" if r.code == 0 else r.said, "seconds": None}


# ---- building


def warnings(said: str) -> list[str]:
    """Return the compilers' warnings: ninja prints those of gcc, nvcc's are in its logs."""
    logs = [said, *(log.read_text() for log in sorted(ROOT.glob("out/o/cuda/*.log")))]
    return [line for text in logs for line in text.splitlines() if "warning" in line]


def build(out: str) -> bool:
    """Build everything that programs are linked from, except train.c. An object of the CPU that
    fails costs only the tests that compare with it."""
    begun = time.monotonic()
    kinds = (KIND, trainer.GCC)
    parts = {part for kind in kinds for part in trainer.members(kind.program)}
    goals = [part for part in sorted(parts) if not part.endswith("/train.o")]
    goals += [f"{kind.program}-kernels.so" for kind in kinds]
    with trainer.alone("ninja"):
        done = subprocess.run(
            ["ninja", "-k", "0", *goals], cwd=ROOT, capture_output=True, text=True
        )
    found = {
        "ninja": done.returncode,
        "warnings": warnings(done.stdout)[:40],
        "said": done.stdout[-3000:] if done.returncode else "",
    }
    write(out, found)
    print(*found["warnings"], found["said"], sep="\n")
    trainer.sh("ninja", f"{KIND.program}-kernels.so")
    said = trainer.sh(program(CASES[0].source, KIND), "--version").splitlines()
    seconds = time.monotonic() - begun
    toolkit = (ROOT / "out" / "cuda.toolkit").read_text().split()
    write(out, found | {"seconds": seconds, "version": said, "toolkit": toolkit})
    print(*toolkit, *said, sep="\n")
    return True


# ---- losses


def compare(ours: Run, cpus: list[float], real: str) -> dict[str, object]:
    """Return a run and its losses' largest differences from the CPU's."""
    off = [abs(x - y) / y for x, y in zip(ours.losses, cpus, strict=False)]
    first, most = BOUNDS[real]
    return {
        "ours": kept(ours),
        "cpu": cpus,
        "first": off[:1],
        "most": max(off, default=None),
        "bounds": BOUNDS[real],
        "right": len(off) == STEPS
        and off[0] <= first
        and max(off) <= most
        and cpus[-1] < cpus[0] - FALLS,
    }


def losses(out: str, rows: Sequence[tuple[str, str]] = LOOKED_AT) -> bool:
    """Compare losses, first launch by launch, then with graphs."""
    data, found = tokens(FEW_TOKENS, 40000), []
    cpus = json.loads(CPUS_LOSSES.read_text())
    with ThreadPoolExecutor(WORKERS) as pool:
        jobs = [
            (row, pool.submit(run, tiny(*row, "plain"), KIND, data, STEPS, *options))
            for options in (("--no-graph",), ())
            for row in rows
        ]
        for (family, real), job in jobs:
            ours = job.result()
            found.append(compare(ours, cpus[f"{family}-{real}"], real))
            first, most, right = (found[-1][key] for key in ("first", "most", "right"))
            print(
                f"{ours.name:24} first {first} most {most} "
                f"{'right' if right else 'WRONG ' + ours.said[-300:]}",
                flush=True,
            )
            write(out, found)
    return all(row["right"] for row in found)


def ready(out: str) -> bool:
    """Compare the losses of programs that were built elsewhere."""
    return losses(
        out,
        [
            row
            for row in LOOKED_AT
            if (trainer.READY / tiny(*row, "plain").name).exists()
        ],
    )


# ---- the law


def one_hash(out: str, jobs: dict[str, list[tuple]]) -> bool:
    """Compare the hashes of runs. jobs: recipe -> runs whose weights must all be equal."""
    found, good = {}, True
    with ThreadPoolExecutor(WORKERS) as pool:
        waiting = {
            recipe: [pool.submit(run, *args, **env) for args, env in rows]
            for recipe, rows in jobs.items()
        }
        for recipe, rows in waiting.items():
            runs = [row.result() for row in rows]
            hashes = {r.weights for r in runs}
            right = len(hashes) == 1 and "" not in hashes
            found[recipe] = {
                "right": right,
                "hashes": sorted(hashes),
                "runs": [kept(r) for r in runs],
            }
            print(
                f"{recipe:14} {len(runs)} runs, {'one hash' if right else 'WRONG'}",
                flush=True,
            )
            for r in runs if not right else []:
                print(
                    f"    {r.name:40} {r.code} {r.weights} {r.said[-200:] if r.code else ''}"
                )
            good &= right
            write(out, found)
    return good


def law(out: str) -> bool:
    """Check the law of bits. Equal runs come twice, to show effects of chance first."""
    data, jobs = tokens(256, 40000), {}
    ways = [(), ("--no-graph",), ("--queue", "late")]
    for family, real in LOOKED_AT:
        again = [
            (
                (tiny(family, real, "plain"), KIND, data, FEW),
                {"label": "again"},
            )
        ]
        jobs[f"{family} {real}"] = again + [
            ((tiny(family, real, way), KIND, data, FEW, *options), {})
            for way in alone()
            for options in (
                ways if way == "stage3-ahead" or not REHEARSAL else ways[:1]
            )
        ]
    return one_hash(out, jobs)


def ranks(out: str) -> bool:
    """Compare ranks on one device. They take turns over sockets: this is slow, and NCCL does not
    guarantee that it works."""
    data, jobs = tokens(256, 40000), {}
    for file in MADE.glob("nccl.*.txt"):
        file.unlink()
    reals = [real for family, real in LOOKED_AT if family == "gpt"]
    for real in reals:
        rows = [
            (
                (tiny("gpt", real, "plain"), KIND, data, SOME),
                {"label": "alone"},
            )
        ]
        for way in together() if not REHEARSAL else together()[-1:]:
            rows += [
                (
                    (tiny("gpt", real, way), KIND, data, SOME, *options),
                    {"ZR_SHARE_GPU": 1, "ZR_TIMEOUT_S": STUCK},
                )
                for options in ((), ("--no-graph",))
            ]
        jobs[f"gpt {real}"] = rows
    listening = jobs[f"gpt {reals[0]}"][1][1]  # one run reports NCCL's choices
    listening |= {
        "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_FILE": MADE / "nccl.%p.txt",
    }
    good = one_hash(out, jobs)
    for line in (
        line
        for file in sorted(MADE.glob("nccl.*.txt"))  # one file per process
        for line in file.read_text(errors="replace").splitlines()
    ):
        if re.search("NCCL version|Using network|coll channels|WARN", line):
            print(line[:150])
    return good


# ---- algorithms of products, profile of a step


def table_of(case: Case) -> Path:
    """Return the file of --gemms."""
    return MADE / f"{case.name}.gemms"


def tune(case: Case, out: str) -> bool:
    """Find the best algorithms of a model's products, for later parts."""
    table_of(case).unlink(missing_ok=True)
    vocab = text.parse(case.source.read(".plan")).head.vocab
    data = tokens(vocab, 2 * case.tokens + 1)
    command = [program(case.source, KIND), "--data", data]
    code, output, error = ended([*command, "--gemms", table_of(case), "--tune"])
    right = code == 0 and table_of(case).exists()
    table = table_of(case).read_text().splitlines() if right else []
    said = (output + error)[-600:]
    write(out, {"right": right, "said": said, "table": table})
    print(f"{case.name}: {len(table) - 1} products, {'right' if right else said}")
    return right


def profile(out: str) -> bool:
    """Profile one step of the first model, command by command."""
    case, traced = CASES[0], MADE / "profile.json"
    data = tokens(text.parse(case.source.read(".plan")).head.vocab, 5 * case.tokens + 1)
    command = [program(case.source, KIND), "--data", data, "--steps", "4"]
    code, output, error = ended(
        [*command, "--profile", traced, "--profile-steps", "3-3"]
    )
    found = {"code": code, "table": output.splitlines(), "said": error[-600:]}
    write(out, found)
    print(output, error)
    return code == 0 and traced.exists()


# ---- the optimizer on the host


def offload(out: str) -> bool:
    """Run the same steps with the optimizer states on the device and on the host. Compare the hash
    and the seconds of a step. The last step is profiled on the host: its queues show where the time
    is spent."""
    large = next(c for c in CASES if c.name.startswith(LARGEST))
    sources = places(large)
    vocab = text.parse(sources["device"].read(".plan")).head.vocab
    data = tokens(vocab, large.tokens * (HOST_STEPS + 1) + 1)
    traced = ("--profile", MADE / "offload.json")
    last = ("--profile-steps", f"{HOST_STEPS}-{HOST_STEPS}")
    runs: list[Run] = []
    step: dict[str, float] = {}
    for place, source in sources.items():
        more = (*traced, *last) if place == "host" else ()
        runs.append(run(source, KIND, data, HOST_STEPS, *more, limit=HOST_LIMIT))
        if times := runs[-1].seconds[HOST_DROPPED:-1]:  # the last step waits
            step[place] = statistics.median(times)
        speed = {p: step["device"] / s for p, s in step.items() if "device" in step}
        write(out, {"step": step, "speed": speed, "runs": [asdict(r) for r in runs]})
        print(
            f"{place}: {step.get(place)} s a step",
            runs[-1].said if runs[-1].code else "",
        )
        print(*runs[-1].profile, sep="\n")
    print("of the speed on the device:", speed)
    return all(r.code == 0 for r in runs) and len({r.weights for r in runs}) == 1


# ---- memory


def memory_of(said: str) -> dict[str, int]:
    """Return bytes: of the arena, of its allocation, of the libraries up to the end of the first
    step, lost after it, and in use before the arena."""
    arena = re.search(
        r"device memory: arena (\d+) bytes \((\d+) taken\), libraries (-?\d+)",
        said,
    )
    lost = re.search(r"device memory: (-?\d+) bytes less are free", said)
    found = re.search(r"device memory: (\d+) bytes before the arena", said)
    numbers = [int(n) for n in arena.groups()] if arena else [0, 0, 0]
    return dict(zip(("arena", "taken", "libraries"), numbers, strict=True)) | {
        "lost": int(lost[1]) if lost else 0,
        "found": int(found[1]) if found else 0,
    }


def memory(out: str) -> bool:
    """Check device memory while nothing else runs on the device.

    The arena must be the plan's. The context and libraries must fit in their allowance, and
    libraries take about the same for any number of layers, though graphs keep their launches in
    device memory, 2 MiB at a time. Nothing may be allocated after the first step.
    """
    found, good = [], True
    for source in LAYERS:
        r = run(source, KIND, tokens(256, 40000), FEW)
        f = memory_of(r.said) | {"run": kept(r)}
        right = (
            r.code == 0
            and 0 < f["arena"] <= f["taken"] < f["arena"] + PAGE
            and f["lost"] == 0
            and 0 < f["found"] + f["libraries"] <= reserve.LIBRARIES
        )
        found.append(f | {"right": right})
        good &= right and abs(f["libraries"] - found[0]["libraries"]) <= GRAPHS
        write(out, found)
        print({key: n for key, n in found[-1].items() if key != "run"})
    return good and found[0]["taken"] < found[-1]["taken"]


COMMANDS: dict[str, Callable[[str], bool]] = {
    "build": build,
    "ready": ready,
    "losses": losses,
    "law": law,
    "profile": profile,
    "ranks": ranks,
    "offload": offload,
    "memory": memory,
} | {f"tune-{case.name}": partial(tune, case) for case in CASES}


def main(argv: list[str]) -> int:
    if len(argv) != 2 or argv[0] not in COMMANDS:
        print(__doc__, "commands:", *COMMANDS, file=sys.stderr)
        return 2
    return 0 if COMMANDS[argv[0]](argv[1]) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
