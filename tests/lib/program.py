"""program.py -- runs runtime/program.c for the tests of the runtime, and computes its results
again.

Its sums of integers wrap and commute, so that equality with numpy is exact.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from tests.lib import trainer
from tests.lib.patience import LIMIT, patient

ROOT = Path(__file__).resolve().parents[2]
RUNTIME = ROOT / "runtime"
# constants of program.c
UNITS, N, MICRO_BATCHES, PIECES, B, T, VOCAB, IGNORE = (
    3,
    3072,
    24,
    4,
    2,
    5,
    100,
    99,
)
STEPS = 3
SANITIZERS = {
    "plain": ["-DCOUNT"],
    "tsan": ["-fsanitize=thread"],
    "asan": ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
}
RANKS = [1, 2, 3, 4, 8]


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str
    seconds: float

    def line(self, start: str) -> str:
        return next(text for text in self.out.splitlines() if text.startswith(start))


def built(name: str, *more: str) -> Path:
    """Return the program, plain or with a sanitizer."""
    own = ROOT / "tests/runtime/program.c"
    parts = [*sorted(RUNTIME.glob("*.c")), *sorted(RUNTIME.glob("cpu/*.c"))]
    return trainer.compiled(own, parts, "-O1", "-g1", *SANITIZERS[name], *more)


@pytest.fixture
def program() -> Path:
    return built("plain")


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write 601 samples, with some ignored tokens, and a rest that is too short for a sample."""
    path = tmp_path_factory.mktemp("data") / "tokens.bin"
    np.random.default_rng(1).integers(0, VOCAB, 601 * T + 3).astype("<u2").tofile(path)
    return path


def environment(**settings: object) -> dict[str, str]:
    launcher = (
        "WORLD_SIZE",
        "OMPI_COMM_WORLD_SIZE",
        "PMI_SIZE",
        "SLURM_STEP_NUM_TASKS",
    )
    base = {
        key: value
        for key, value in os.environ.items()
        if key not in launcher and not key.startswith("ZR_")
    }
    return base | {key: str(value) for key, value in settings.items()}


@functools.cache
def in_place() -> list[str]:
    """Return a prefix that disables address randomization: gcc 12's thread sanitizer fails if the
    kernel scatters mappings widely."""
    still = ["setarch", "-R"]
    works = shutil.which("setarch") and subprocess.run(
        [*still, "true"], capture_output=True
    )
    return still if works and works.returncode == 0 else []


def run(
    binary: Path,
    *args: object,
    limits: Callable[[], None] | None = None,
    **settings: object,
) -> Result:
    begun = time.monotonic()
    prefix = in_place() if binary.name == "tsan" else []
    done = subprocess.run(
        [*prefix, str(binary), *map(str, args)],
        env=environment(**settings),
        capture_output=True,
        timeout=LIMIT,
        preexec_fn=limits,
    )
    return Result(
        done.returncode,
        done.stdout.decode(errors="replace"),
        done.stderr.decode(errors="replace"),
        time.monotonic() - begun,
    )


def train(
    binary: Path,
    data: Path,
    *args: object,
    steps: int = STEPS,
    **settings: object,
) -> Result:
    return run(binary, "--data", data, "--steps", steps, "--hash", *args, **settings)


# ---- the program's results, computed again


def mix(x: np.ndarray) -> np.ndarray:
    x = (x ^ x >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    return x ^ x >> np.uint64(27)


def samples(data: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return inputs and targets, int64 [samples, T]."""
    tokens = np.fromfile(data, "<u2").astype(np.int64)
    count = (len(tokens) - 1) // T
    inputs, targets = (
        tokens[: count * T].reshape(count, T),
        tokens[1 : count * T + 1].reshape(count, T),
    )
    return np.where(inputs == IGNORE, 0, inputs), np.where(
        targets == IGNORE, -1, targets
    )


def masters(data: Path, steps: int) -> np.ndarray:
    """Return the masters after `steps` steps, uint64 [UNITS, N]."""
    return masters_of(*samples(data), steps)


def masters_of(inputs: np.ndarray, targets: np.ndarray, steps: int) -> np.ndarray:
    """Return the masters for samples, int64 [samples, T], in this order."""
    master = mix(np.arange(1, UNITS * N + 1, dtype=np.uint64)).reshape(UNITS, N)
    for step in range(steps):
        total = np.zeros_like(master)
        for micro_batch in range(MICRO_BATCHES):
            which = ((step * MICRO_BATCHES + micro_batch) * B + np.arange(B)) % len(
                inputs
            )
            key = 0
            for token, target in zip(
                inputs[which].ravel(), targets[which].ravel(), strict=True
            ):
                key = (key * 31 + int(token) * 7 + int(target)) % 2**64
            total += mix(master + np.uint64(key))
        master = master + np.uint64(3) * total
    return master


def weights_line(data: Path, steps: int = STEPS) -> str:
    return line_of(masters(data, steps))


def line_of(master: np.ndarray) -> str:
    place = np.arange(UNITS * N, dtype=np.uint64).reshape(UNITS, N)
    return f"weights {int(mix(master + place).sum()):016x}{int(master.sum()):016x}"


def validation(data: Path) -> float:
    inputs, targets = samples(data)
    there = targets >= 0
    return float((inputs + 1000 * targets)[there].sum()) / there.sum()


def written(data: Path, count: int) -> str:
    """Return the output of --sample: the prompt, continued as by program.c's `sample`."""
    context = list(samples(data)[0][0])
    said = list(context)
    for _ in range(count):
        said.append((context[-1] * 5 + 1 + T - 1) % (VOCAB - 1))
        context = context[1:] + said[-1:]
    return "".join(
        chr(token) if token >= 32 or token in (9, 10) else "." for token in said
    )


# ---- runs that are watched


def start(
    binary: Path,
    data: Path,
    *args: object,
    limits: Callable[[], None] | None = None,
    **settings: object,
) -> subprocess.Popen[str]:
    """Start a run in its own process group."""
    return subprocess.Popen(
        [str(binary), "--data", str(data), "--steps", "30", *map(str, args)],
        text=True,
        env=environment(**settings),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=limits,
    )


# lines on stderr of a run without errors
USUAL = re.compile(
    r"\S+: \d+ parameters; |ranks x threads |memory of a rank: |.*: \d+ tokens, |a step is "
    r"|the first step took |step |profile: |file arena: |the learning rate.s schedule "
    r"|--save .* gets no config.json: |--threads \d+: a rank's share "
)


def unusual(err: str) -> list[str]:
    return [line for line in err.splitlines() if not USUAL.match(line)]


def wait_for_step(running: subprocess.Popen[str], step: int) -> str:
    """Return the line of the first step that has one."""
    line = running.stderr.readline()
    while USUAL.match(line) and not line.startswith("step "):
        line = running.stderr.readline()
    if not line.startswith(f"step {step}/"):
        running.kill()
        pytest.fail(line)
    return line


def children(pid: int) -> list[int]:
    return [
        int(child)
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    ]


def gone(pids: list[int]) -> bool:
    """Return whether all these processes are gone after two seconds; a zombie counts as gone."""

    def alive(pid: int) -> bool:
        try:
            return (
                Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
                not in "ZX"
            )
        except OSError:
            return False

    for _ in range(int(patient(40))):
        if not any(map(alive, pids)):
            return True
        time.sleep(0.05)
    return False


# ---- faults


def chaos_library(folder: Path) -> Path:
    """Build faults/chaos.c, for LD_PRELOAD: kills, a disk that fails or is slow."""
    library = folder / "chaos.so"
    made = ["gcc", "-shared", "-fPIC", "-o", str(library)]
    subprocess.run([*made, ROOT / "tests/faults/chaos.c"], check=True)
    return library
