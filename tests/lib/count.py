"""count.py -- measures the work of Python code as the number of lines that it runs.

The number is the same on every machine, however busy. Each iteration of a loop counts, also in a
comprehension; work within C (a sort, `in` a list) counts as one line.
"""

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
