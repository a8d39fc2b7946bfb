"""garbage.py -- Python's search for dead cycles is off where records are made by the hundred
thousand: it takes a quarter of the time there, and finds none.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def unsearched(act: Callable[P, T]) -> Callable[P, T]:
    """A function while which nothing is searched."""

    @wraps(act)
    def ran(*args: P.args, **rest: P.kwargs) -> T:
        was = gc.isenabled()
        gc.disable()
        try:
            return act(*args, **rest)
        finally:
            if was:
                gc.enable()

    return ran
