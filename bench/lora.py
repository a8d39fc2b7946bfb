"""lora.py -- what training adapters takes beside training all, and beside PEFT.

A model (GPT-2 124M), f32, 1024 tokens a step: all of it, and adapters of rank 16 on its attention's
inputs (c_attn), whose base is frozen; on one rank of two threads, and on two ranks under ZeRO-3.
Programs take turns; memory and wire are the plan's, which the programs say as well. --peft PYTHON:
a Python that has torch, transformers and peft trains the same shapes on the same tokens (AdamW,
eager), the base frozen or not, on two threads; its memory is the most that the process had
resident, beside what it had before the model.

The table goes to stdout, all figures to out/lora.json. A load average above 0.3 at the start makes
a run invalid.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys

import bench
from bench import MADE, TOKENS, Case

ADAPTERS = "train.lora={rank: 16, alpha: 32, match: [c_attn]}"
WAYS = {"1 rank": (1, 0), "2 ranks, ZeRO-3": (2, 3)}
WHAT = {"all": (), "adapters": (ADAPTERS,)}

# One run of PEFT's side; prints JSON.
PEFT = """
import json, resource, sys, time
import numpy as np, torch, peft, transformers
data, what, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
torch.set_num_threads(2)
resident = lambda: 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
before = resident()
drop = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**drop))
if what == "adapters":
    how = peft.LoraConfig(r=16, lora_alpha=32, target_modules=["c_attn"], fan_in_fan_out=True)
    model = peft.get_peft_model(model, how)
trained = [p for p in model.parameters() if p.requires_grad]
optimizer = torch.optim.AdamW(trained, lr=1e-4)
tokens = torch.from_numpy(np.fromfile(data, np.uint16).astype(np.int64))
took = []
for step in range(steps + 1):
    x = tokens[step * 1024 : step * 1024 + 1024].view(4, 256)
    begin = time.perf_counter()
    loss = model(input_ids=x, labels=x).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(trained, 1.0)
    optimizer.step()
    optimizer.zero_grad()
    took.append(time.perf_counter() - begin)
print(json.dumps({"steps": took[1:], "memory": resident() - before,
                  "versions": [torch.__version__, transformers.__version__, peft.__version__]}))
"""


def peft(python: str, what: str, steps: int) -> dict:
    words = (python, "-P", "-c", PEFT, str(MADE / "tokens.bin"), what, steps)
    done = subprocess.run([*map(str, words)], check=True, capture_output=True)
    return json.loads(done.stdout.splitlines()[-1])


def table(result: dict) -> str:
    lines = [
        *bench.head(result["machine"]),
        f"| f32, {TOKENS} tokens a step | step, s | memory a rank, MB | MB received |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {x['name']} | {x['step']:.3f} | {1e-6 * x['memory']:.0f} | {1e-6 * x['wire']:.0f} |"
        for x in result["cases"]
    ]
    return "\n".join(lines)


def main() -> int:
    options = bench.options(__doc__, 4, 3)
    options.add_argument("--peft", help="a Python with torch and peft")
    given = options.parse_args()
    load = os.getloadavg()[0]
    MADE.mkdir(parents=True, exist_ok=True)
    cases = [
        Case(given.spec, f"{what}, {way}", (*bench.spread(*of), *keys))
        for way, of in WAYS.items()
        for what, keys in WHAT.items()
    ]
    plans = {case: bench.build(case) for case in cases}
    runs = bench.measure(plans, given.steps, given.rounds)
    rows = [
        {
            "name": name,
            "step": statistics.median(s for r in of for s in r.steps),
            "memory": of[0].arena,
            "wire": of[0].wire,
        }
        for name, of in runs.items()
    ]
    for what in WHAT if given.peft else ():
        found = [
            peft(given.peft, what, given.steps) for _ in range(given.rounds)
        ]
        torch, transformers, version = found[0]["versions"]
        rows.append(
            {
                "name": f"{what}, PEFT {version}, PyTorch {torch}, "
                f"transformers {transformers}",
                "step": statistics.median(
                    s for r in found for s in r["steps"]
                ),
                "memory": statistics.median(r["memory"] for r in found),
                "wire": 0,
            }
        )
    result = {
        "spec": given.spec,
        "machine": bench.machine(load),
        "cases": rows,
    }
    return bench.finish(result, "lora", table(result))


if __name__ == "__main__":
    sys.exit(main())
