"""lora.py -- compares training of adapters with training of the whole model.

A model (GPT-2 124M), f32, 1024 tokens a step: the whole model, and adapters of rank 16 on its
attention's inputs (c_attn) with a frozen base; on one rank of two threads, and on two ranks under
ZeRO-3. Programs run in turns; memory and wire are the plan's, which the programs report as well.
With --peers the same is done by PyTorch, and by PEFT's adapters of transformers' GPT-2
(cpu_peer.py); their memory is the peak of the resident set. --four-bit adds adapters of rank 16 on
all linears, with a base in f32 and in NF4; its peer is PEFT over bitsandbytes' base in NF4.

Tables go to stdout and to --out (results.py), all figures to out/lora.json. bench.py says when a
run is invalid.
"""

from __future__ import annotations

import statistics
import sys

import bench
import peers
import results
from bench import MADE, TOKENS, Case
from results import Block

ADAPTERS = "train.lora={rank: 16, alpha: 32, match: [c_attn]}"
ALL = "rank: 16, alpha: 32, match: all-linear"
FOUR_BIT = {
    "adapters of all linears": (f"train.lora={{{ALL}}}",),
    "adapters of all linears, NF4": (f"train.lora={{{ALL}, base: nf4}}",),
}
FOUR_BIT_PEERS = {"adapters of all linears, NF4, PEFT": ("--four-bit",)}
WAYS = {"1 rank": (1, 0), "2 ranks, ZeRO-3": (2, 3)}
WHAT = {"all": (), "adapters": (ADAPTERS,)}
PEERS = {
    "all, PyTorch": ("--precision", "f32"),
    "adapters, PEFT": ("--lora",),
}


def tables(result: dict) -> list[Block]:
    return [
        results.table(
            f"f32, {TOKENS} tokens a step | step, s | memory a rank, MB | MB received",
            (
                f"{x['name']} | {x['step']:.3f} | {1e-6 * x['memory']:.0f} "
                f"| {1e-6 * x['wire']:.0f}"
                for x in result["cases"]
            ),
        )
    ]


def main() -> int:
    parser = bench.options(__doc__, 4, 3)
    parser.add_argument("--peers", action="store_true", help="PEFT beside")
    parser.add_argument("--four-bit", action="store_true", help="a base in NF4")
    given = parser.parse_args()
    more = (FOUR_BIT, FOUR_BIT_PEERS) if given.four_bit else ({}, {})
    MADE.mkdir(parents=True, exist_ok=True)
    cases = [
        Case(given.spec, f"{what}, {way}", (*bench.spread(*of), *keys))
        for way, of in WAYS.items()
        for what, keys in (WHAT | more[0]).items()
    ]
    plans = {case: bench.build(case) for case in cases}
    model = peers.Model("", given.spec)
    beside = [
        peers.Row(name, 1, "f32", 0, words, model)
        for name, words in (PEERS | more[1]).items()
        if given.peers
    ]
    if beside:
        peers.venv()
    runs: dict[str, list[bench.Run]] = {case.name: [] for case in plans}
    theirs: dict[str, list[peers.Ran]] = {row.name: [] for row in beside}
    for _ in range(given.rounds):
        for name, found in bench.measure(plans, given.steps, 1).items():
            runs[name] += found
        for row in beside:
            ran = peers.torch(row, given.steps, MADE / "tokens.bin")
            theirs[row.name].append(ran)
    rows = [
        {
            "name": name,
            "step": statistics.median(s for r in of for s in r.steps),
            "memory": of[0].arena,
            "wire": of[0].wire,
        }
        for name, of in runs.items()
    ]
    rows += [
        {
            "name": name,
            "step": statistics.median(ran.step for ran in of),
            "memory": of[0].memory,
            "wire": 0,
        }
        for name, of in theirs.items()
    ]
    result = {
        "spec": given.spec,
        "cases": rows,
    }
    return bench.finish(result, "lora", tables, given.out)


if __name__ == "__main__":
    sys.exit(main())
