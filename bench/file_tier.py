"""file_tier.py -- measures an optimizer in a file, on a disk of a given rate.

A model (GPT-2 124M), one rank with all cores, f32. A step takes some time with the optimizer in the
host's memory. With it in a file, on a disk that serves one request after the other at a fixed rate,
a step should take little more than the longer of that time and bytes / rate: BOUND. No tile can be
updated before the norm of all gradients is known. From then on file access overlaps the next step's
forward, and the host's slots allow some reads before that and some writes after it. The disk is
slow_disk.c, preloaded; the file lies in memory (--dir), which is faster than any rate.

Tables go to stdout and to --out (results.py), all figures to out/file_tier.json. bench.py says when
a run is invalid.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path

import bench
import results
from bench import MADE, Case
from results import Block
from zg.predict import cost

BOUND = 1.15
# Bytes a second, micro-batches a step.
ROWS = ((0.5e9, 1), (1e9, 1), (2e9, 1), (4e9, 1), (1e9, 8))
HOST = ("zero.stage=1", "zero.offload_optimizer.device=cpu")
FILE = (
    "zero.stage=1",
    "zero.offload_optimizer.device=nvme",
    "zero.offload_optimizer.nvme_path=/dev/shm",
)


def run(case: Case, data: Path, steps: int, *options: str, **env: str) -> list[float]:
    """Return the seconds of each step, except the first, and the last, which waits for its
    writes."""
    log = MADE / f"{case.name}.jsonl"
    log.unlink(missing_ok=True)
    bench.sh(
        "env",
        *(f"{k}={v}" for k, v in env.items()),
        MADE / case.name,
        "--data",
        data,
        "--steps",
        steps + 2,
        "--log",
        log,
        *options,
    )
    took = [
        row["seconds"]
        for row in map(json.loads, log.read_text().splitlines())
        if "loss" in row
    ]
    return took[1:-1]


def tables(result: dict) -> list[Block]:
    moved, rows = result["moved"], []
    for row in result["rows"]:
        disk, host, file = moved / row["rate"], row["host"], row["file"]
        rows.append(
            f"{row['rate'] / 1e9:g} | {row['micro_batches']} | {disk:.3f} | {host:.3f} | "
            f"{file:.3f} | {file / max(host, disk):.2f} | {file / (host + disk):.2f}"
        )
    return [
        f"{Path(result['spec']).stem}, f32; the file moves {moved / 1e9:.2f} GB a step; bound: "
        f"{BOUND}",
        results.table(
            "rate, GB/s | micro-batches a step | bytes / rate, s | step on the host, s "
            "| in the file, s | of the longer | of their sum",
            rows,
        ),
    ]


def main() -> int:
    parser = bench.options(__doc__, 3, 2)
    parser.add_argument("--dir", default="/dev/shm", help="where the file lies")
    given = parser.parse_args()
    MADE.mkdir(parents=True, exist_ok=True)
    library = MADE / "slow_disk.so"
    bench.sh(
        "gcc",
        "-O1",
        "-Wall",
        "-Werror",
        "-shared",
        "-fPIC",
        "bench/slow_disk.c",
        "-o",
        library,
    )
    most = max(micro_batches for _, micro_batches in ROWS)
    samples = bench.TOKENS // bench.SEQUENCE
    cases = {
        (name, micro_batches): Case(
            given.spec,
            f"{name}{micro_batches}",
            (
                *bench.spread(1, 0),
                *keys,
                f"train.global_batch={micro_batches * samples}",
            ),
        )
        for micro_batches in sorted({micro_batches for _, micro_batches in ROWS})
        for name, keys in (("host", HOST), ("file", FILE))
    }
    plans = {key: bench.build(case) for key, case in cases.items()}
    moved = sum(cost.moved(plans["file", 1]))
    data = bench.tokens(plans["file", 1], most * (given.steps + 2) - 1)
    found: dict[tuple[str, float, int], list[float]] = {}
    for turn in range(given.rounds):
        print(f"round {turn + 1} of {given.rounds}", file=sys.stderr)
        for (name, micro_batches), case in cases.items():
            for rate in (
                [0.0] if name == "host" else [r for r, n in ROWS if n == micro_batches]
            ):
                slow = (
                    {"LD_PRELOAD": str(library), "ZR_DISK_RATE": str(rate)}
                    if rate
                    else {}
                )
                where = ("--nvme", given.dir) if rate else ()
                found.setdefault((name, rate, micro_batches), []).extend(
                    run(case, data, given.steps, *where, **slow)
                )
    middle = {key: statistics.median(times) for key, times in found.items()}
    rows = [
        {
            "rate": rate,
            "micro_batches": micro_batches,
            "host": middle["host", 0.0, micro_batches],
            "file": middle["file", rate, micro_batches],
        }
        for rate, micro_batches in ROWS
    ]
    result = {
        "spec": given.spec,
        "moved": moved,
        "rows": rows,
    }
    return bench.finish(result, "file_tier", tables, given.out)


if __name__ == "__main__":
    sys.exit(main())
