"""yardstick.py -- times fixed work on all cores, to tell a machine that has become slower from a
prediction that is wrong.

A pass is a product of our kernels (256 x 768 x 3072, f32) and a copy of 32 MiB, each about half of
its time, on every core at once. `./run calibrate` writes the seconds of a pass into the device's
file (`yardstick`), and bench/predict.py times it again around each program.
"""

from __future__ import annotations

import os
import statistics
import sys
import threading
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "gen")]
from tests.lib import zk

ROWS, IN, OUT, COPY = 256, 768, 3072, 32 << 20


class Yardstick:
    """Operands of a pass for some cores."""

    def __init__(self, cores: int) -> None:
        numbers = np.random.default_rng(1).standard_normal(COPY // 4, np.float32)
        self.x, self.w = numbers[: ROWS * IN], numbers[: OUT * IN]
        self.kernels = [zk.Kernels() for _ in range(cores)]
        self.results = [np.zeros(ROWS * OUT, np.float32) for _ in range(cores)]
        self.copies = [(numbers.copy(), np.zeros_like(numbers)) for _ in range(cores)]

    def _core(self, n: int, end: float, found: list[float]) -> None:
        run, (source, to) = self.kernels[n].zk_linear_fwd, self.copies[n]
        while not found or time.perf_counter() < end:
            begun = time.perf_counter()
            run(self.results[n], self.x, self.w, None, ROWS, OUT, IN, zk.OUT_IN)
            np.copyto(to, source)
            found.append(time.perf_counter() - begun)

    def seconds(self, long: float) -> float:
        """Return the median seconds of a pass, of passes for so many seconds."""
        end = time.perf_counter() + long
        found: list[list[float]] = [[] for _ in self.kernels]
        # Products and copies hold no lock of Python's.
        threads = [
            threading.Thread(target=self._core, args=(n, end, times))
            for n, times in enumerate(found)
        ]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        return statistics.median(x for times in found for x in times)


if __name__ == "__main__":
    print(Yardstick(len(os.sched_getaffinity(0))).seconds(float(sys.argv[1])))
