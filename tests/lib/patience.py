"""patience.py -- decides how long tests wait: longer if many processes share a core."""

import math
import os

LIMIT = 1200  # seconds: no run of a test takes so long, however busy the machine is


def busy() -> int:
    """Return the processes per core of the last minute, from 1 to 4: tests sleep that much
    longer."""
    share = os.getloadavg()[0] / len(os.sched_getaffinity(0))
    return min(max(1, math.ceil(share)), 4)


def patient(seconds: float) -> float:
    """Return the time limit for work that takes less than these seconds on an idle machine."""
    return seconds * (2 * busy() - 1)
