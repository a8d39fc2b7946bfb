"""workers.py -- spreads independent work over the processor's cores, by processes that begin with a
copy of this one."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

MOST = 8  # processes: each has a plan of its own in memory
DEATH = 1  # prctl's PR_SET_PDEATHSIG
T = TypeVar("T")
R = TypeVar("R")

# The work of the processes that are forked next. They inherit it, so only results are sent.
_act: Callable[[Any], Any]
_items: Sequence[Any]


def _one(n: int) -> Any:
    return _act(_items[n])


def _begin() -> None:
    """Leave Ctrl-C to the first process, and end with it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(DEATH, signal.SIGKILL)


def spread(act: Callable[[T], R], items: Sequence[T]) -> list[R]:
    """Return the result for each item in order. `act` may read everything that exists when this is
    called, but must change nothing: its process ends with the work. Raises ChildProcessError if a
    process is killed, and any exception of `act`."""
    global _act, _items
    _act, _items = act, items
    count = min(len(os.sched_getaffinity(0)), len(items), MOST)
    if count < 2:
        return [act(item) for item in items]
    fork = multiprocessing.get_context("fork")
    try:
        with ProcessPoolExecutor(count, fork, _begin) as pool:
            return [*pool.map(_one, range(len(items)))]
    except BrokenProcessPool:
        raise ChildProcessError(
            f"one of {count} processes that plan was killed, perhaps for lack of memory"
        ) from None
