"""bench.py -- measures how fast a program trains, as a share of the machine's peak.

A model (GPT-2 124M), 1024 tokens a step, f32, on two cores: 1 rank with both of them, and a rank
per core under ZeRO-0 and ZeRO-3. Programs run in turns (1 rank, ZeRO-0, ZeRO-3, 1 rank, ...), so
that a machine that slows down slows all of them; every figure is a median. A start lasts from the
call of a program to its first operation, when its memory is in place. Beside it stand the time that
the first touch of such memory takes, and the time to the beginning of step 1. The peak is the
faster of our own linear and OpenBLAS (numpy's) at 2048^3, one thread per core.

Tables go to stdout and to --out (results.py), all figures to out/bench.json. A run is invalid, with
exit code 1, if other processes took over 5 % of the processors' time that it took itself.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import resource
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import results
from results import Block

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "gen"))
from zg.plan import plan  # noqa: E402
from zg.plan.text import parse  # noqa: E402

MADE = ROOT / "out" / "bench"
TOKENS, SEQUENCE = 1024, 256
# Largest share of the processors' time, relative to the run's own
MOST_OTHERS = 0.05
CORETYPES = ("", "SkylakeX", "Cooperlake", "Haswell", "Zen")

# One process of the vendor's side: the best of the products that fit into a time, GFLOP/s.
VENDOR = """
import sys, time
import numpy as np
n, end = 2048, time.perf_counter() + float(sys.argv[1])
x = np.arange(n * n, dtype=np.float32).reshape(n, n) % 7 - 3
y = np.empty_like(x)
best = 1e9
while time.perf_counter() < end:
    t = time.perf_counter()
    np.matmul(x, x, out=y)
    best = min(best, time.perf_counter() - t)
print(2e-9 * n**3 / best)
"""

# A copy of 256 MB in each process: the median, in GB read and written per second.
COPY = """
import time, numpy as np
a, took = np.ones(1 << 26, np.float32), []
b = np.ones_like(a)
for _ in range(9):
    t = time.perf_counter()
    np.copyto(b, a)
    took.append(time.perf_counter() - t)
print(2e-9 * a.nbytes / sorted(took)[4])
"""

# First touch as the runtime takes arenas: every rank touches its part of one memory file, then
# private memory, in huge pages if there are any. Prints the seconds of both kinds, a line per rank.
TOUCH = """
import mmap, os, sys, time
ranks, shared, private, populate_write = *map(int, sys.argv[1:]), 23

def seconds(*where, **how):
    with mmap.mmap(*where, **how) as m:
        m.madvise(mmap.MADV_HUGEPAGE)
        t = time.perf_counter()
        m.madvise(populate_write)
        return time.perf_counter() - t

def rank(r):
    t = seconds(file, shared, offset=r * shared) if shared else 0.0
    f = seconds(-1, private, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    os.write(1, f"{t} {f}\\n".encode())
    os._exit(0)

file = os.memfd_create("arenas")
os.ftruncate(file, ranks * shared)
pids = [os.fork() or rank(r) for r in range(ranks)]
sys.exit(any(os.waitpid(pid, 0)[1] for pid in pids))
"""


@dataclass(frozen=True)
class Case:
    """A program: a model and the keys of its spec that are set."""

    spec: str
    name: str
    keys: tuple[str, ...]


@dataclass(frozen=True)
class Touch:
    """Seconds of a rank's first touch of memory that peers read, and of the rest."""

    shared: float
    private: float


@dataclass(frozen=True)
class Run:
    """One run of a program."""

    steps: list[float]  # seconds of each step except the first
    arena: int  # bytes of a rank
    start: float  # seconds from the call of the program to its first operation
    step_1: float  # seconds from the call to the beginning of step 1
    wire: int  # bytes received by a rank in a step
    touch: Touch  # first touch of an arena like its own, just before it


def sh(*command: object) -> str:
    return subprocess.run(
        [str(c) for c in command],
        cwd=ROOT,
        check=True,
        text=True,
        stdout=subprocess.PIPE,
    ).stdout


def together(
    words: Sequence[object], processes: int, env: dict[str, str]
) -> list[float]:
    """Run a command in several processes at once. Return the number that each prints."""
    running = [
        subprocess.Popen(
            list(map(str, words)),
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, **env},
        )
        for _ in range(processes)
    ]
    said = [p.communicate()[0] for p in running]
    return (
        [float(s) for s in said] if all(p.returncode == 0 for p in running) else [0.0]
    )


# ---- the machine


def clocks() -> tuple[float, float]:
    """Return the seconds of processor time so far: of the whole machine, and of this process with
    its ended children."""
    words = Path("/proc/stat").read_text().split(maxsplit=9)
    user, nice, system, _, _, irq, softirq, steal = map(int, words[1:9])
    busy = user + nice + system + irq + softirq + steal
    whose = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    own = sum(sum(resource.getrusage(who)[:2]) for who in whose)
    return busy / os.sysconf("SC_CLK_TCK"), own


BEGUN = clocks()


def others() -> float:
    """Return the processor time of other processes since this one began, as a share of its own."""
    busy, own = (now - was for now, was in zip(clocks(), BEGUN, strict=True))
    return max(0.0, busy / own - 1)


def cpu() -> str:
    found = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    return found[1] if found else platform.processor()


def machine() -> dict[str, object]:
    wide = "avx512f" in Path("/proc/cpuinfo").read_text().split()
    used = "linear_avx512.o" if wide else "linear_avx2.o"
    commands = sh("ninja", "-t", "commands", "out/train").splitlines()
    command = next(c for c in commands if used in c)
    flags = re.sub(r".*?(-std.*?) -MMD.*", r"\1", command)
    compiler = os.environ.get("CC", "gcc")
    return {
        "cpu": cpu(),
        "cores": os.cpu_count(),
        "others": others(),
        "compiler": sh(compiler, "--version").splitlines()[0],
        "flags": sh("sh", "-c", f'echo "{flags}"').strip(),
    }


def gemm(cores: int, seconds: float, pairs: int) -> dict[str, object]:
    """Alternate our linear and the vendor's product. Return the GFLOP/s of all cores."""

    def vendor(coretype: str, t: float) -> float:
        one = {
            "OPENBLAS_NUM_THREADS": "1",
            **({"OPENBLAS_CORETYPE": coretype} if coretype else {}),
        }
        return sum(together([sys.executable, "-c", VENDOR, t], cores, one))

    sh("ninja", "--quiet", "out/train-peak")
    coretype = max(CORETYPES, key=lambda c: vendor(c, 1.0))
    rates = [
        (
            float(sh("out/train-peak", cores, 2048, seconds)),
            vendor(coretype, seconds),
        )
        for _ in range(pairs)
    ]
    ours, theirs = (statistics.median(side) for side in zip(*rates, strict=True))
    return {
        "ours": ours,
        "openblas": theirs,
        "openblas_coretype": coretype or "its own choice",
        "peak": max(ours, theirs),
    }


def touch(p: plan.Plan) -> Touch:
    """Return the mean over a plan's ranks, which touch at once: they wait for one another."""
    said = sh(
        sys.executable,
        "-c",
        TOUCH,
        p.head.ranks,
        p.shared,
        p.arena("cpu") - p.shared,
    )
    kinds = zip(*(map(float, line.split()) for line in said.splitlines()), strict=True)
    return Touch(*(statistics.mean(kind) for kind in kinds))


# ---- the programs


def spread(ranks: int, stage: int, sequence: int = SEQUENCE) -> tuple[str, ...]:
    """Return the keys that spread a step's tokens over ranks."""
    keys = {
        "zero.stage": stage,
        "cluster.ranks": ranks,
        "train.sequence": sequence,
        "train.global_batch": TOKENS // sequence,
        "train.precision": "f32",
        "train.micro_batch": TOKENS // sequence // ranks,
    }
    return tuple(f"{key}={value}" for key, value in keys.items())


def settings(case: Case) -> list[str]:
    return [word for key in case.keys for word in ("--set", key)]


def flops(case: Case) -> float:
    """Return the flops of a step: 6 per parameter and token, and causal attention."""
    said = sh("gen/zgen", case.spec, *settings(case), "--emit", "explain")
    return float(re.search(r"flops of a step of all ranks: (\S+)", said)[1])


def build(case: Case) -> plan.Plan:
    source = sh("gen/zgen", case.spec, *settings(case))
    (ROOT / "out" / "train.c").write_text(source)
    sh("ninja", "--quiet", "out/train")
    shutil.copy(ROOT / "out" / "train", MADE / case.name)
    return parse(sh("gen/zgen", case.spec, *settings(case), "--emit", "plan"))


def run(case: Case, p: plan.Plan, steps: int, data: Path) -> Run:
    log, touched, called = (
        MADE / f"{case.name}.jsonl",
        touch(p),
        time.monotonic(),
    )
    log.unlink(missing_ok=True)
    sh(MADE / case.name, "--data", data, "--steps", steps + 1, "--log", log)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    took, last = (
        [line["seconds"] for line in lines if "loss" in line],
        lines[-1],
    )
    return Run(
        took[1:],
        last["arena"],
        last["started"] + last["start_arena"] - called,
        last["started"] + last["start_step"] - called,
        last["wire"],
        touched,
    )


def tokens(p: plan.Plan, steps: int, name: str = "tokens") -> Path:
    """Write tokens for `steps` timed steps and one before them, uint16 within the vocabulary."""
    data, count = MADE / f"{name}.bin", TOKENS * (steps + 1) + 1
    drawn = np.random.RandomState(1).randint(0, min(p.head.vocab, 1 << 16), count)
    data.write_bytes(drawn.astype("<u2").tobytes())
    return data


def measure(
    plans: dict[Case, plan.Plan], steps: int, rounds: int
) -> dict[str, list[Run]]:
    data = tokens(next(iter(plans.values())), steps)
    runs: dict[str, list[Run]] = {case.name: [] for case in plans}
    for turn in range(rounds):
        for case, p in plans.items():
            print(f"round {turn + 1} of {rounds}: {case.name}", file=sys.stderr)
            runs[case.name].append(run(case, p, steps, data))
    return runs


# ---- figures


def figures(
    case: Case,
    p: plan.Plan,
    runs: list[Run],
    peak: float,
    work: float,
) -> dict[str, object]:
    """Return a program's figures. work: floating-point operations of a step; peak: GFLOP/s.

    To its first operation a program may take 1.3 x the first touch of its arena, and 0.2 s for the
    rest.
    """
    step = statistics.median(s for r in runs for s in r.steps)
    touched = statistics.median(r.touch.shared + r.touch.private for r in runs)
    return {
        **asdict(case),
        "step": step,
        "gflops": 1e-9 * work / step,
        "share": 1e-9 * work / step / peak,
        "arena": runs[0].arena,
        "shared": p.shared,
        "wire": runs[0].wire,
        "start": statistics.median(r.start for r in runs),
        "start_bound": 1.3 * touched + 0.2,
        "step_1": statistics.median(r.step_1 for r in runs),
        "runs": [asdict(r) for r in runs],
    }


def overhead(whole: list[Run], split: list[Run]) -> float:
    """Return how much longer a step of `split` takes: the median over pairs of neighbouring
    runs."""
    pairs = [
        statistics.median(s.steps) / statistics.median(w.steps)
        for w, s in zip(whole, split, strict=True)
    ]
    return statistics.median(pairs) - 1


def head(m: dict) -> list[str]:
    """Return the lines that tell the machine."""
    return [f"{m['cpu']}, {m['cores']} cores", m["compiler"], m["flags"]]


def tables(result: dict) -> list[Block]:
    g = result["gemm"]
    found: list[Block] = [
        f"f32 GEMM 2048^3: ours {g['ours']:.0f} GFLOP/s, OpenBLAS "
        f"({g['openblas_coretype']}) {g['openblas']:.0f} GFLOP/s",
        results.table(
            f"{Path(result['spec']).stem}, f32, {TOKENS} tokens a step | step, s | GFLOP/s | "
            "share of peak | arena a rank, MB | of it shared | start, s | bound, s | "
            "to step 1, s",
            (
                f"{c['name']} | {c['step']:.3f} | {c['gflops']:.0f} | {100 * c['share']:.0f} % | "
                f"{c['arena'] / 1e6:.0f} | {c['shared'] / 1e6:.0f} | {c['start']:.2f} | "
                f"{c['start_bound']:.2f} | {c['step_1']:.2f}"
                for c in result["cases"]
            ),
        ),
    ]
    if "overhead" in result:
        found.append(f"ZeRO-3 over ZeRO-0: {100 * result['overhead']:+.1f} %")
    return found


def options(says: str, steps: int, rounds: int) -> argparse.ArgumentParser:
    """Return the options of a benchmark in this folder. says: its docstring."""
    parser = argparse.ArgumentParser(description=says.split("\n")[0])
    parser.add_argument("--steps", type=int, default=steps, help="timed steps of a run")
    parser.add_argument(
        "--rounds", type=int, default=rounds, help="runs of each program"
    )
    parser.add_argument(
        "--spec", default="model_specs/gpt2-124m.yaml", help="the model"
    )
    return with_out(parser)


def with_out(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser.add_argument(
        "--out", type=Path, help="writes the tables to this file of bench/results/, too"
    )
    return parser


def finish(
    result: dict, name: str, tables: Callable[[dict], list[Block]], out: Path | None
) -> int:
    """Write figures to out/NAME.json, tables to stdout and `out`. Return the exit code."""
    result["machine"] = machine()
    result["valid"] = result["machine"]["others"] <= MOST_OTHERS
    (ROOT / "out" / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
    load = f"others {100 * result['machine']['others']:.1f} %"
    load += "" if result["valid"] else ", invalid"
    results.finish(head(result["machine"]), tables(result), out, load)
    if not result["valid"]:
        print(
            f"INVALID: other processes took over {100 * MOST_OTHERS:.0f} % of this run's "
            f"time; measure on "
            "an idle machine"
        )
    return 0 if result["valid"] else 1


def main() -> int:
    given = options(__doc__, 5, 3).parse_args()
    cores = min(os.cpu_count() or 1, 2)
    MADE.mkdir(parents=True, exist_ok=True)
    cases = [Case(given.spec, "rank-1", spread(1, 0))]
    cases += [
        Case(given.spec, f"zero-{stage}", spread(cores, stage))
        for stage in (0, 3)
        if cores > 1
    ]
    plans = {case: build(case) for case in cases}
    peak = gemm(cores, 2.0, given.rounds)
    runs = measure(plans, given.steps, given.rounds)
    result = {
        "spec": given.spec,
        "gemm": peak,
        "cases": [
            figures(c, p, runs[c.name], peak["peak"], flops(c))
            for c, p in plans.items()
        ],
    }
    if cores > 1:
        result["overhead"] = overhead(runs["zero-0"], runs["zero-3"])
    return finish(result, "bench", tables, given.out)


if __name__ == "__main__":
    sys.exit(main())
