"""overlap.py -- measures how much of a gather's time prefetching hides, beside the plan's
prediction.

GPT of three blocks on two ranks of one thread under ZeRO-3. ZR_GATHER_DELAY_US makes every gather
sleep, which takes no processor time; a block's forward takes a little longer than that. Without
prefetching every delay shows in a step. Prefetching one unit hides as much as a simulation of the
plan says. Runs with and without the delay take turns; each counts with the smaller of two medians.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from pathlib import Path

from bench import ROOT

sys.path.insert(0, str(ROOT))
from tests.lib import law, program, trainer  # noqa: E402
from tests.plan.test_overlap import Ahead, flops, gathers, simulated  # noqa: E402

DELAY = 0.020  # seconds added to every gather
ENOUGH = 1.4 * DELAY  # seconds of a block's forward, with room for variation
STEPS, MOST = 6, 1024


def step(made: Ahead, batch: int, ahead: str, delay: float) -> float:
    """Return the median seconds of a step, without the first, which is slower."""
    log = made.folder / "log"
    log.unlink(missing_ok=True)
    done = program.run(
        made.build(batch, ahead),
        *("--data", made.folder / "tokens", "--log", log),
        *("--steps", STEPS + 1, "--threads", 1),
        ZR_GATHER_DELAY_US=int(delay * 1e6),
    )
    if done.code:
        sys.exit(done.err)
    lines = log.read_text().splitlines()[2:-1]
    return statistics.median(json.loads(line)["seconds"] for line in lines)


def shown(made: Ahead, batch: int, ahead: str) -> float:
    """Return the seconds by which delays make a step longer."""
    bare, delayed = [], []
    for _ in range(2):
        bare.append(step(made, batch, ahead, 0))
        delayed.append(step(made, batch, ahead, DELAY))
    return min(delayed) - min(bare)


def fitting(made: Ahead) -> tuple[int, float]:
    """Return a batch with which a block's forward takes ENOUGH, and its flops a second."""
    batch = 2
    while True:
        p = made.plan(batch, "auto")
        rate = flops(p) / step(made, batch, "auto", 0)
        block = next(f.flops for f in p.fns if f.name == "fwd.block")
        forward = block / rate
        if forward >= ENOUGH or batch >= MOST:
            return batch, rate
        batch = int(batch * max(1.3, 1.1 * ENOUGH / forward))


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        made = Ahead(Path(folder))
        trainer.write_tokens(made.folder / "tokens", law.tokens(256, 40000))
        batch, rate = fitting(made)
        p = made.plan(batch, "auto")
        planned = simulated(p, rate, DELAY) - simulated(p, rate, 0)
        none, one = (shown(made, batch, ahead) for ahead in ("0", "auto"))
    print(f"micro-batch {batch}; {gathers(p)} gathers a step, {DELAY} s each")
    print(f"none ahead: a step takes {none:.3f} s longer")
    print(f"one ahead:  a step takes {one:.3f} s longer; by the plan {planned:.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
