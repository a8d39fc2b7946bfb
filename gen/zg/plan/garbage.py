"""garbage.py -- switches Python's cycle collector off while many records are made.

A plan has hundreds of thousands of records and no reference cycles. The collector would take a
quarter of the time and find nothing.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def unsearched(act: Callable[P, T]) -> Callable[P, T]:
    """Wrap a function so that the cycle collector is off while it runs."""

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
