"""queues.py -- the queues of a rank, in the order of zr.h: their arenas and their kinds of
steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Queue:
    """A row of the table.

    reads, writes: arenas; kernels: it runs functions; wire: it has collectives; beside: it runs
    concurrently with main if collectives overlap, otherwise its steps are main's.
    """

    name: str
    reads: str
    writes: str
    kernels: bool = False
    wire: bool = False
    beside: bool = False


_ROWS = (
    Queue("main", "device", "device", kernels=True, wire=True),
    Queue("gather", "device", "device", wire=True, beside=True),
    Queue("reduce", "device", "device", wire=True, beside=True),
    Queue("sum", "device", "device", kernels=True, beside=True),
    Queue("host", "host", "host", kernels=True),
    Queue("up", "host", "device"),
    Queue("down", "device", "host"),
    Queue("load", "file", "host"),
    Queue("store", "host", "file"),
    Queue("fetch", "file", "host"),
)
QUEUES: Mapping[str, Queue] = {row.name: row for row in _ROWS}
