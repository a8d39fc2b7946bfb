"""workers.py -- spreads independent work over the processor's cores, by processes that begin with a
copy of this one."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

T = TypeVar("T")
R = TypeVar("R")

# The work of the processes that are forked next. They inherit it, so only results are sent.
_act: Callable[[Any], Any]
_items: Sequence[Any]


def _one(n: int) -> Any:
    return _act(_items[n])


def _begin() -> None:
    """Leave Ctrl-C to the first process, which ends the others."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def spread(act: Callable[[T], R], items: Sequence[T]) -> list[R]:
    """Return the result for each item in order. `act` may read everything that exists when this is
    called, but must change nothing: its process ends with the work."""
    global _act, _items
    _act, _items = act, items
    cores = min(len(os.sched_getaffinity(0)), len(items))
    if cores < 2:
        return [act(item) for item in items]
    with multiprocessing.get_context("fork").Pool(cores, _begin) as pool:
        return pool.map(_one, range(len(items)), chunksize=1)
