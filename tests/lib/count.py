"""count.py -- the work of Python code as a number that is the same on every machine, however busy:
the lines that it runs. A loop counts by its turns, also where it is a comprehension; what is done
within C (a sort, `in` a list) counts as one line."""

import sys
from collections.abc import Callable
from types import FrameType


def lines(work: Callable[[], object]) -> int:
    count = 0

    def seen(frame: FrameType, event: str, arg: object):
        nonlocal count
        count += event == "line"
        return seen

    before = sys.gettrace()
    sys.settrace(seen)
    try:
        work()
    finally:
        sys.settrace(before)
    return count
