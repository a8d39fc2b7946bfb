"""shared_samples.py -- measures a step of ranks that share a sample, without attention.

The demo's model in bf16 on two ranks of one thread: one sample of T tokens for both
(`cluster.context_parallel`), beside a sample of half as many for each. Attention is taken out, as
its work grows with the square of the length. Its time for the second program is that of the same
one with `train.sequence_blocks: 2`, which computes attention in functions of its own. Programs run
in turns; figures are medians of rank 0's profile.

Tables go to stdout and to --out (results.py), all figures to out/shared_samples.json. bench.py says
when a run is invalid.
"""

from __future__ import annotations

import re
import statistics
import subprocess
import sys
from pathlib import Path

import bench
import results
from bench import MADE, ROOT
from results import Block

sys.path.append(str(ROOT))
from tests.lib import law, trainer  # noqa: E402

SPEC = ROOT / "model_specs" / "demo.yaml"
WARM = 2  # steps before the profiled ones
MAIN = re.compile(r"^main +works ([\d.]+) ms \(([\d.]+) %", re.M)
ATTENTION = re.compile(r"^ +(?:fwd|bwd)_block_1 +\d+ +([\d.]+)", re.M)
EXCHANGE = re.compile(r"^  exchange +\d+ +([\d.]+)", re.M)


def keys(samples: int, length: int, *more: str) -> tuple[str, ...]:
    return (
        "train.precision=bf16",
        f"train.global_batch={samples}",
        "train.micro_batch=1",
        f"train.sequence={length}",
        f"model.units[0].embedding.context={length}",
        *more,
    )


def ways(length: int) -> dict[str, tuple[str, ...]]:
    """Return the keys of the programs. length: tokens of a shared sample."""
    half = length // 2
    blocks = "train.sequence_blocks=2"
    return {
        "shared": keys(1, length, blocks, "cluster.context_parallel=2"),
        "apart": keys(2, half),
        "apart in blocks": keys(2, half, blocks),
    }


def run(program: Path, steps: int) -> dict[str, float]:
    """Run a program. Return the milliseconds of a step, and of its attention and exchanges where
    they have functions of their own."""
    command = [
        *(program, "--data", MADE / "shared_samples.bin", "--steps", WARM + steps),
        *("--threads", 1, "--profile", MADE / "shared_samples.json"),
        *("--profile-steps", f"{WARM + 1}-{WARM + steps}"),
    ]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True)
    main = MAIN.search(done.stdout)
    if done.returncode or not main:
        sys.exit(done.stderr)
    found = {
        "attention": sum(map(float, ATTENTION.findall(done.stdout))),
        "exchange": sum(map(float, EXCHANGE.findall(done.stdout))),
    }
    return {"step": 100 * float(main[1]) / float(main[2]), **found}


def tables(result: dict) -> list[Block]:
    shared, apart = result["shared"], result["apart"]
    return [
        results.table(
            f"two ranks, {result['length']} tokens a step | step, ms | attention | exchanges | "
            "the rest",
            (
                f"{name} | {x['step']:.0f} | {x['attention']:.0f} | {x['exchange']:.0f} "
                f"| {x['rest']:.0f}"
                for name, x in (
                    ("one sample for both", shared),
                    ("a sample of half the length for each", apart),
                )
            ),
        ),
        f"Without attention a step takes {result['ratio']:.2f} times as long if ranks share a "
        "sample, exchanges included",
    ]


def main() -> int:
    parser = bench.options(__doc__, 4, 7)
    parser.add_argument("--length", type=int, default=4096, help="tokens of a sample")
    given = parser.parse_args()
    MADE.mkdir(parents=True, exist_ok=True)
    many = (WARM + given.steps) * given.length + 1
    trainer.write_tokens(MADE / "shared_samples.bin", law.tokens(256, many))
    programs = {
        name: trainer.build(trainer.generate(SPEC, *some))
        for name, some in ways(given.length).items()
    }
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in programs}
    for _ in range(given.rounds):
        for name, program in programs.items():
            runs[name].append(run(program, given.steps))
    attention = statistics.median(x["attention"] for x in runs["apart in blocks"])
    for x in runs["apart"]:
        x["attention"] = attention
    for x in (*runs["shared"], *runs["apart"]):
        x["rest"] = x["step"] - x["attention"] - x["exchange"]
    result: dict = {"length": given.length, "runs": runs}
    for name in ("shared", "apart"):
        some = runs[name]
        result[name] = {k: statistics.median(x[k] for x in some) for k in some[0]}
    whole = {
        name: statistics.median(x["step"] - x["attention"] for x in runs[name])
        for name in ("shared", "apart")
    }
    result["ratio"] = whole["shared"] / whole["apart"]
    return bench.finish(result, "shared_samples", tables, given.out)


if __name__ == "__main__":
    sys.exit(main())
