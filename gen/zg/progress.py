"""progress.py -- reports zgen's current phase on stderr if a command takes long.

A phase is named when it begins, but not before SECONDS of processor time, with that of child
processes that have ended.
"""

from __future__ import annotations

import os
import sys
from threading import Timer

SECONDS = 3.0
_phase = ""
_loud = False  # SECONDS have passed


def begin(phase: str) -> None:
    """Start to report, with the first phase of a command."""
    doing(phase)
    _wait(SECONDS)


def doing(phase: str) -> None:
    """Begin another phase."""
    global _phase
    _phase = phase
    if _loud:
        _say()


def _wait(seconds: float) -> None:
    timer = Timer(seconds, _passed)
    timer.daemon = True
    timer.start()


def _passed() -> None:
    global _loud
    left = SECONDS - sum(os.times()[:4])
    if left > 0:
        _wait(max(left, 0.1))
        return
    _loud = True
    _say()


def _say() -> None:
    print(f"zgen: {_phase} ...", file=sys.stderr, flush=True)
