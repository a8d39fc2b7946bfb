"""gpu_speed.py -- measures a model's speed on a GPU, ours and PyTorch's in turns.

    gpu_speed.py CASE OUT.json      with TORCH_PYTHON (default: this Python) for PyTorch's side

Ours is out/train-cuda on one rank, PyTorch's is torch_peer.py: equal shapes, tokens, recipe and
micro-batches of one step. Turns: ours, PyTorch, ours, and PyTorch once more if ZR_BENCH_LIMIT
(seconds) allows it; ours alone in a rehearsal without PyTorch. A step's time is the median over all
steps of all runs except the first few of each.
Operations of a step, by two conventions:
    causal   6 per parameter and token, and attention's lower triangle
    full     6 per parameter and token, and all of attention, as in PaLM's and nanoGPT's MFU
A parameter is any of the model's, embeddings too.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import gpu_check
from gpu_cases import CASES, REHEARSAL, ROOM, ROOT, Case
from gpu_check import KIND, MADE, memory_of, tokens
from gpu_report import write

from zg.plan import plan
from zg.plan.text import parse
from zg.predict import cost

LIMIT = float(os.environ.get("ZR_BENCH_LIMIT", "150"))
PYTHON = os.environ.get("TORCH_PYTHON", sys.executable)


def data_of(case: Case, vocab: int) -> Path:
    return tokens(vocab, case.tokens * (case.steps + 1) + 1)


def ours(case: Case, data: Path, limit: float) -> dict[str, object]:
    # Written by the part `tune`, if that ran before
    table = gpu_check.table_of(case)
    gemms = ("--gemms", table) if table.exists() else ()
    r = gpu_check.run(
        case.source, KIND, data, case.steps, *gemms, limit=limit, label="speed"
    )
    found = memory_of(r.said)
    graphs = [line for line in r.said.splitlines() if line.startswith("graphs:")]
    return {
        "code": r.code,
        "seconds": r.seconds,
        "losses": r.losses,
        "peak": found["arena"] + found["libraries"],
        **found,
        "graphs": graphs,
        "said": r.said[-600:] if r.code else "",
    }


def theirs(case: Case, data: Path, limit: float, params: int) -> dict[str, object]:
    out, device = (
        MADE / f"{case.name}-torch.json",
        "cpu" if REHEARSAL else "cuda",
    )
    out.unlink(missing_ok=True)
    command = [
        PYTHON,
        ROOT / "bench" / "torch_peer.py",
        ROOM / f"{case.name}.yaml",
        "--batch",
        case.batch,
        "--sequence",
        case.sequence,
        "--data",
        data,
        "--steps",
        case.steps,
        "--out",
        out,
        "--device",
        device,
        "--compile",
        "none" if REHEARSAL else case.compile,
    ]
    env = os.environ | {
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        "TORCHINDUCTOR_CACHE_DIR": str(MADE / "inductor"),
    }
    try:
        done = subprocess.run(
            [str(word) for word in command],
            capture_output=True,
            text=True,
            timeout=limit,
            env=env,
        )
        code, said = done.returncode, done.stdout + done.stderr
    except subprocess.TimeoutExpired as e:
        code, said = (
            -1,
            f"not done in {limit:.0f} s\n{(e.stderr or b'').decode()}",
        )
    found = json.loads(out.read_text()) if out.exists() else {"seconds": [], "peak": 0}
    if out.exists() and found["params"] != params:
        code, said = -2, f"{found['params']} parameters, ours has {params}"
    return {"code": code, **found, "said": said[-600:] if code else ""}


def figures(case: Case, p: plan.Plan, runs: list[dict]) -> dict[str, object]:
    """Return one side's figures: medians over its runs that succeeded."""
    steps = [s for r in runs if r["code"] == 0 for s in r["seconds"][case.dropped :]]
    if not steps:
        return {"step": None, "peak": None}
    step, causal = statistics.median(steps), cost.flops(p)
    dense = 6 * p.head.params * case.tokens
    return {
        "step": step,
        "least": min(steps),
        "most": max(steps),
        "tokens_per_s": case.tokens / step,
        "tflops_causal": 1e-12 * causal / step,
        "tflops_full": 1e-12 * (dense + 2 * (causal - dense)) / step,
        "peak": max(r["peak"] for r in runs if r["code"] == 0),
    }


def turns() -> list[str]:
    """Return the sides; a rehearsal without PyTorch has ours alone."""
    here = (
        not REHEARSAL
        or not subprocess.run(
            [PYTHON, "-c", "import torch"], capture_output=True, check=False
        ).returncode
    )
    return ["ours", "torch"] if here else ["ours"]


def measure(case: Case, out: str) -> bool:
    begun, sides = time.monotonic(), turns()

    def left():
        return LIMIT - (time.monotonic() - begun) - 2

    p = parse(case.source.read(".plan"))
    data = data_of(case, p.head.vocab)
    runs: dict[str, list[dict]] = {"ours": [], "torch": []}
    took = {"ours": 0.0, "torch": 0.0}
    found: dict[str, object] = {}
    for who in 2 * sides:
        if left() < max(5, 1.2 * took[who]):
            continue
        t = time.monotonic()
        runs[who].append(
            ours(case, data, left())
            if who == "ours"
            else theirs(case, data, left(), p.head.params)
        )
        took[who] = time.monotonic() - t
        found = {
            "batch": case.batch,
            "sequence": case.sequence,
            "compile": case.compile,
            "params": p.head.params,
            "ours": figures(case, p, runs["ours"]),
            "torch": figures(case, p, runs["torch"]),
            "took": took,
            "runs": runs,
        }
        if found["ours"]["step"] and found["torch"]["step"]:
            found["ratio"] = found["torch"]["step"] / found["ours"]["step"]
        write(out, found)
    for who in runs:
        print(
            f"{case.name} {who}:",
            {k: v for k, v in found[who].items()},
            *(r["said"] for r in runs[who] if r["code"]),
        )
    print(
        f"{case.name}: ours over PyTorch, tokens/s: {found.get('ratio')}",
        *runs["ours"][0]["graphs"],
    )
    well = all(r["code"] == 0 for side in runs.values() for r in side)
    return well and ("ratio" in found or sides == ["ours"])


def main(argv: list[str]) -> int:
    named = [c for c in CASES if argv and c.name == argv[0]]
    if len(argv) != 2 or not named:
        print(
            f"{__doc__}cases: {' '.join(c.name for c in CASES)}",
            file=sys.stderr,
        )
        return 2
    return 0 if measure(named[0], argv[1]) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
