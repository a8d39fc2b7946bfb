"""precision.py -- measures the effect of 16-bit storage on a model's loss.

The model of `./run demo` on the demo's tokens (`./run demo` makes them), in f32, in f16, and in f32
from another seed. At first f16 follows f32 closely: its gradients have a relative error of some
2^-8 (tests/law/test_f16.py has the reason), and so has the decrease of the loss over FIRST steps.
That is the bound. Later the smallest difference leads to another path, as another seed does: f16's
validation loss may exceed f32's by as much as the other seed's differs. Losses do not depend on the
machine's load.

Tables go to stdout and to --out (results.py), all figures to out/precision.json; the exit code is 1
beyond a bound.
"""

from __future__ import annotations

import argparse
import json
import sys

import bench
import results
from bench import MADE, ROOT, Case
from results import Block

# Steps; relative error of the loss's decrease over them
FIRST, OFF = 100, 2.0**-8
WAYS = {
    "f32": (),
    "f32, another seed": ("train.seed=2",),
    "f16": ("train.precision=f16",),
}


def run(case: Case, steps: int) -> list[dict]:
    """Return the lines of its log."""
    log = MADE / f"{case.name}.jsonl"
    log.unlink(missing_ok=True)
    bench.sh(
        MADE / case.name,
        "--data",
        ROOT / "out" / "demo-train.bin",
        "--val",
        ROOT / "out" / "demo-val.bin",
        "--steps",
        steps,
        "--log",
        log,
    )
    return [json.loads(line) for line in log.read_text().splitlines()]


def figures(way: str, lines: list[dict], base: list[dict]) -> dict[str, object]:
    """Return the largest error of the first training losses relative to f32, and the validation
    loss."""
    losses, whole = (
        [line["loss"] for line in x if "loss" in line] for x in (lines, base)
    )
    val, true = (
        next(line["val_loss"] for line in reversed(x) if "val_loss" in line)
        for x in (lines, base)
    )
    return {
        "way": way,
        "first": max(abs(a - b) for a, b in zip(losses[:FIRST], whole, strict=False)),
        "fell": losses[0] - losses[:FIRST][-1],
        "val": val,
        "off": val - true,
        "skipped": sum(line["skipped"] for line in lines if "loss" in line),
    }


def tables(result: dict) -> list[Block]:
    return [
        results.table(
            f"stored as | losses of {FIRST} steps beside f32, at most | validation loss "
            "| beside f32 | skipped steps",
            (
                f"{w['way']} | {w['first']:.4f} | {w['val']:.4f} | {w['off']:+.4f} | "
                f"{w['skipped']}"
                for w in result["ways"]
            ),
        ),
        f"bound of the first column: {OFF * result['ways'][0]['fell']:.4f}",
    ]


def holds(ways: list[dict]) -> bool:
    full, other, half = ways
    return half["first"] <= OFF * full["fell"] and half["off"] <= abs(other["off"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=1200, help="steps of each run")
    given = bench.with_out(parser).parse_args()
    if not (ROOT / "out" / "demo-val.bin").exists():
        parser.error("out/demo-val.bin does not exist; ./run demo creates it")
    MADE.mkdir(parents=True, exist_ok=True)
    cases = {
        way: Case(
            "model_specs/demo.yaml",
            f"precision-{n}",
            (
                *keys,
                f"train.schedule.steps={given.steps}",
                f"train.schedule.warmup={given.steps // 16}",
            ),
        )
        for n, (way, keys) in enumerate(WAYS.items())
    }
    logs: dict[str, list[dict]] = {}
    for way, case in cases.items():
        print(way, file=sys.stderr)
        bench.build(case)
        logs[way] = run(case, given.steps)
    ways = [figures(way, lines, logs["f32"]) for way, lines in logs.items()]
    result = {
        "steps": given.steps,
        "machine": bench.machine(),
        "ways": ways,
    }
    (ROOT / "out" / "precision.json").write_text(json.dumps(result, indent=1) + "\n")
    results.finish(bench.head(result["machine"]), tables(result), given.out)
    return 0 if holds(ways) else 1


if __name__ == "__main__":
    sys.exit(main())
