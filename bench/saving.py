"""saving.py -- measures the cost of settings that save memory on a CPU.

A model (GPT-2 124M), one rank with all cores, f32: as it is, with all blocks recomputed in
backward, with the optimizer or activations on the host, and with all of these and parameters.
Programs run in turns; figures are medians over pairs of neighbouring runs. Then the host's AdamW
alone, beside the memory's own rate at the same time: copies and in-place sums by as many threads
(numpy), bytes read and written.

Tables go to stdout and to --out (results.py), all figures to out/saving.json. bench.py says when a
run is invalid.
"""

from __future__ import annotations

import os
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import bench
import results
from bench import MADE, ROOT, Case
from results import Block

sys.path.append(str(ROOT))
import numpy as np  # noqa: E402

from tests.lib import zk  # noqa: E402
from zg.facts import ops
from zg.plan import plan
from zg.predict import cost  # noqa: E402

WAYS = {
    "as it is": (),
    "recompute full": ("train.recompute=full",),
    "optimizer on the host": (
        "zero.stage=1",
        "zero.offload_optimizer.device=cpu",
    ),
    "activations on the host": ("train.offload_activations=true",),
    "all on the host": (
        "zero.stage=3",
        "zero.offload_optimizer.device=cpu",
        "zero.offload_param.device=cpu",
        "train.offload_activations=true",
        "train.recompute=full",
    ),
}
# Elements of the update: 540 MB, far more than caches hold. Arrays a power of two apart would
# conflict in the caches.
ELEMENTS = 33000 * 1024
TRIES = 5  # the best of them counts


# ---- memory


def busy(work: Callable[[int], None], threads: int) -> float:
    """Return the seconds of work(0) .. work(threads - 1) at once."""
    all_of = [threading.Thread(target=work, args=(i,)) for i in range(threads)]
    t = time.perf_counter()
    for thread in all_of:
        thread.start()
    for thread in all_of:
        thread.join()
    return time.perf_counter() - t


def limits(arrays: list[np.ndarray], threads: int) -> dict[str, float]:
    """Return the GB/s of a copy and of an in-place sum over all arrays, from their second half to
    their first: the best of TRIES each."""
    half = len(arrays) // 2
    pairs = [
        list(zip(*(np.array_split(x, threads) for x in two), strict=True))
        for two in zip(arrays[:half], arrays[half:], strict=True)
    ]

    def copy(i):
        return [np.copyto(a, b) for a, b in (pair[i] for pair in pairs)]

    def add(i):
        return [np.add(a, b, out=a) for a, b in (pair[i] for pair in pairs)]

    n = sum(x.nbytes for x in arrays[:half])
    return {
        "copy": max(2e-9 * n / busy(copy, threads) for _ in range(TRIES)),
        "sum in place": max(3e-9 * n / busy(add, threads) for _ in range(TRIES)),
    }


def update(threads: int, rounds: int) -> dict[str, object]:
    """Time the host's AdamW: p, m, v read and written, g read: 28 bytes an element."""
    k = zk.Kernels(threads=threads)
    arrays = [np.ones(ELEMENTS, np.float32) for _ in range(4)]
    p, m, v, g = arrays
    r = zk.Recipe(
        rate=zk.phases([zk.held(1e-3)]),
        momentum=zk.phases([zk.held(0.9)]),
        beta2=0.999,
        eps=1e-8,
        clip=1.0,
        rows=1,
        rule=list(ops.OPTIMIZERS).index("AdamW"),
    )
    ctl = zk.Ctl(step=1, applied=1, beta1=0.9, lr=1e-3, factor=1, bias1=1, bias2=1)
    span = zk.spans([dict(at=0, elems=ELEMENTS, count=1, key=1)])

    def seconds() -> float:
        t = time.perf_counter()
        k.zk_update(ctl, r, None, p, m, v, g, span, 1, 0, ELEMENTS, 1)
        return time.perf_counter() - t

    ours, there = [], []
    for _ in range(rounds):
        there.append(limits(arrays, threads))
        ours.append(28e-9 * ELEMENTS / min(seconds() for _ in range(TRIES)))
    most = {name: statistics.median(x[name] for x in there) for name in there[0]}
    return {
        "gbs": statistics.median(ours),
        "limits": most,
        "limit": max(most.values()),
        "share": statistics.median(ours) / max(most.values()),
    }


# ---- programs


def activations(p: plan.Plan) -> int:
    return dict(cost.memory(p))["activations"]


def figures(
    cases: dict[str, Case],
    plans: dict[Case, plan.Plan],
    runs: dict[str, list[bench.Run]],
) -> list[dict[str, object]]:
    first = runs[next(iter(cases.values())).name]
    out = []
    for name, case in cases.items():
        pairs = [
            statistics.median(r.steps) / statistics.median(f.steps)
            for r, f in zip(runs[case.name], first, strict=True)
        ]
        p = plans[case]
        out.append(
            {
                "way": name,
                "keys": list(case.keys),
                "step": statistics.median(s for r in runs[case.name] for s in r.steps),
                "cost": statistics.median(pairs) - 1,
                "arena": p.arena("cpu"),
                "hosted": p.hosted,
                "activations": activations(p),
            }
        )
    return out


def tables(result: dict) -> list[Block]:
    u = result["update"]
    limits = ", ".join(f"{name} {gbs:.1f}" for name, gbs in u["limits"].items())
    return [
        results.table(
            f"{Path(result['spec']).stem}, f32, {bench.TOKENS} tokens a step | step, s | cost | "
            "arena, MB | of it activations | host arena, MB",
            (
                f"{w['way']} | {w['step']:.3f} | {100 * w['cost']:+.1f} % "
                f"| {w['arena'] / 1e6:.0f} | {w['activations'] / 1e6:.0f} "
                f"| {w['hosted'] / 1e6:.0f}"
                for w in result["ways"]
            ),
        ),
        f"AdamW on the host: {u['gbs']:.1f} GB/s, {100 * u['share']:.0f} % of the most "
        f"that memory moved ({limits} GB/s)",
    ]


def main() -> int:
    given = bench.options(__doc__, 4, 3).parse_args()
    cores = os.cpu_count() or 1
    MADE.mkdir(parents=True, exist_ok=True)
    cases = {
        name: Case(given.spec, f"saving-{n}", (*bench.spread(1, 0), *keys))
        for n, (name, keys) in enumerate(WAYS.items())
    }
    plans = {case: bench.build(case) for case in cases.values()}
    runs = bench.measure(plans, given.steps, given.rounds)
    result = {
        "spec": given.spec,
        "ways": figures(cases, plans, runs),
        "update": update(cores, 2 * given.rounds + 1),
    }
    return bench.finish(result, "saving", tables, given.out)


if __name__ == "__main__":
    sys.exit(main())
