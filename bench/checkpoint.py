"""checkpoint.py -- measures the cost of a checkpoint on a CPU, beside the disk's own speed.

A model (GPT-2 124M, short samples), f32, two ranks under ZeRO-1: parameters and two states. Each
round has these parts: a run of whole samples, 1024 tokens a step, that verifies the ranks' copies
after each step; a run of short samples that saves nothing; a run that saves a checkpoint after each
step, all but the last beside the next step; then as many threads as ranks write as many bytes to a
file, in pieces of 1 MiB, and flush them to the disk, and the checkpoint's files are read; then a
run that resumes. The resumed run follows directly after another one, as the first run does: a
virtual machine's host takes back memory that is free for some seconds, and then its first touch is
slower. Figures are medians over rounds.

Tables go to stdout and to --out (results.py), all figures to out/checkpoint.json. bench.py says
when a run is invalid.
--folder: a disk other than that of out/.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import bench
import results
from bench import MADE, Case
from results import Block

RANKS, PIECE, TOKENS = 2, 1 << 20, 64
WHOLE = (
    "zero.stage=1",
    f"cluster.ranks={RANKS}",
    "train.precision=f32",
)
KEYS = (
    *WHOLE,
    "train.sequence=32",
    "train.micro_batch=1",
    f"train.global_batch={RANKS}",
)


@dataclass(frozen=True)
class Round:
    """Seconds of the parts of a round, and bytes of a checkpoint."""

    bytes: int
    whole: float  # a step of 1024 tokens
    verify: float  # after that step
    step: float  # a short step without a checkpoint
    beside: float  # a step with a checkpoint written beside it
    pause: float  # time that training stood still for it
    save: float  # the last checkpoint, with no step beside it
    write: float  # the same bytes, written plainly
    begin: float  # from the program's start to its first step
    resume: float  # the same when it resumes
    read: float  # reading the checkpoint's files


def records(log: Path) -> list[dict]:
    return [json.loads(line) for line in log.read_text().splitlines()]


def train(
    data: Path, steps: int, *more: object, name: str = "checkpoint"
) -> list[dict]:
    """Return the log of a run to `steps` steps."""
    log = MADE / "checkpoint.jsonl"
    log.unlink(missing_ok=True)
    rest = ("--steps", steps, "--log", log)
    bench.sh(MADE / name, "--data", data, *rest, *more)
    return records(log)


def of(log: list[dict], key: str, first: int = 0) -> list[float]:
    """Return a key's values in the records of steps after `first`."""
    found = [x for x in log if "step" in x and key in x]
    return [x[key] for x in found if x["step"] > first]


def begins(log: list[dict]) -> float:
    return next(line["start_step"] for line in log if "end" in line)


def threads(work, count: int) -> float:
    """Return the seconds until all threads have run work(i)."""
    all_ = [threading.Thread(target=work, args=(i,)) for i in range(count)]
    begun = time.perf_counter()
    for thread in all_:
        thread.start()
    for thread in all_:
        thread.join()
    return time.perf_counter() - begun


def plain_write(path: Path, size: int) -> float:
    """Return the seconds of a write in which each thread writes its part of one file."""
    part, piece = -(-size // RANKS), os.urandom(PIECE)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)

    def work(i):
        for at in range(i * part, min(size, (i + 1) * part), PIECE):
            os.pwrite(fd, piece, at)
        os.fsync(fd)

    took = threads(work, RANKS)
    os.close(fd)
    path.unlink()
    return took


def plain_read(files: list[Path]) -> float:
    room = [bytearray(PIECE) for _ in range(RANKS)]

    def work(i):
        for path in files:
            fd, size = os.open(path, os.O_RDONLY), path.stat().st_size
            part = -(-size // RANKS)
            for at in range(i * part, min(size, (i + 1) * part), PIECE):
                os.preadv(fd, [room[i]], at)
            os.close(fd)

    return threads(work, RANKS)


def measure(folder: Path, data: Path, steps: int) -> Round:
    shutil.rmtree(folder / "ck", ignore_errors=True)
    where = ("--checkpoints", folder / "ck", "--save-every", 1, "--keep", 1)
    whole = train(data, steps, "--verify-every", 1, name="whole")
    plain = train(data, steps)
    first = train(data, steps, *where)
    files = sorted((folder / "ck" / f"step-{steps:08d}").iterdir())
    size = sum(path.stat().st_size for path in files)
    write = plain_write(folder / "plain", size)
    read = plain_read(files)
    train(data, 1)  # makes sure that its memory is at hand
    again = train(data, steps + 1, *where)
    shutil.rmtree(folder / "ck")
    return Round(
        size,
        statistics.median(of(whole, "seconds", 1)),
        statistics.median(of(whole, "verification", 1)),
        statistics.median(of(plain, "seconds", 1)),
        statistics.median(of(first, "seconds", 1)),
        statistics.median(of(first, "pause")[:-1]),
        of(first, "checkpoint")[-1],
        write,
        begins(first),
        begins(again),
        read,
    )


def tables(result: dict) -> list[Block]:
    def median(of: Callable[[dict], float]) -> float:
        return statistics.median(of(r) for r in result["rounds"])

    m = {key: median(lambda r, key=key: r[key]) for key in result["rounds"][0]}

    def moved(what: str, key: str) -> str:
        return f"{what} | {m[key]:.2f} | {1e-9 * m['bytes'] / m[key]:.2f}"

    return [
        results.table(
            f"{Path(result['spec']).stem}, f32, {RANKS} ranks, ZeRO-1 | seconds | GB/s",
            [
                f"a step of {bench.TOKENS} tokens | {m['whole']:.3f} | ",
                f"verifying what it made | {m['verify']:.3f} | ",
                f"a step of {TOKENS} tokens | {m['step']:.3f} | ",
                f"the same, a checkpoint written beside it | {m['beside']:.3f} | ",
                f"for which training stood still | {m['pause']:.3f} | ",
                moved(f"a checkpoint of {m['bytes'] / 1e9:.2f} GB", "save"),
                moved(f"its bytes, written plainly by {RANKS} threads", "write"),
                f"to the first step, from the beginning | {m['begin']:.2f} | ",
                f"to the first step, from the checkpoint | {m['resume']:.2f} | ",
                moved(f"its files, read plainly by {RANKS} threads", "read"),
            ],
        ),
        "a checkpoint is written at "
        f"{100 * median(lambda r: r['write'] / r['save']):.0f} % of a plain write's rate",
        "a run that goes on comes to its first step "
        f"{median(lambda r: r['resume'] - r['read']):.2f} s later than its bytes are read, one "
        f"that begins {median(lambda r: r['begin'] - r['read']):.2f} s",
        f"verifying takes {100 * median(lambda r: r['verify'] / r['whole']):.2f} % of a step",
    ]


def main() -> int:
    parser = bench.options(__doc__, 4, 3)
    parser.add_argument("--folder", type=Path, default=MADE)
    given = parser.parse_args()
    MADE.mkdir(parents=True, exist_ok=True)
    bench.build(Case(given.spec, "whole", WHOLE))
    plan = bench.build(Case(given.spec, "checkpoint", KEYS))
    data = bench.tokens(plan, given.steps)
    rounds = [measure(given.folder, data, given.steps) for _ in range(given.rounds)]
    result = {
        "spec": given.spec,
        "rounds": [asdict(r) for r in rounds],
    }
    return bench.finish(result, "checkpoint", tables, given.out)


if __name__ == "__main__":
    sys.exit(main())
