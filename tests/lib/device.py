"""device.py -- a GPU by CUDA's runtime, for tests of its kernels: memory, copies, time, graphs.

CUDA's functions are looked up in the kernels' own library, which is linked with them.

Invariants
 1. A span of host memory and its copy on the device start at the same offset from a multiple of 256
    bytes, so that effects of alignment are tested; no byte after the copy belongs to it.
 2. Spans that overlap share one copy: operands that alias on the host alias on the device.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator

TO_DEVICE, TO_HOST, ON_DEVICE = 1, 2, 3
ALIGNED = 256

Span = tuple[int, int]  # of host memory: start, end


class Device:
    """Calls of CUDA's runtime; each must succeed."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        library.cudaGetErrorString.restype = ctypes.c_char_p

    def call(self, name: str, *operands: object) -> None:
        error = getattr(self.library, name)(*operands)
        assert error == 0, f"{name}: {self.library.cudaGetErrorString(error).decode()}"

    # ---- memory

    def take(self, size: int) -> int:
        at = ctypes.c_void_p()
        self.call("cudaMalloc", ctypes.byref(at), ctypes.c_size_t(max(size, 1)))
        return at.value or 0

    def free(self, at: int) -> None:
        self.call("cudaFree", ctypes.c_void_p(at))

    def copy(self, to: int, start: int, size: int, way: int) -> None:
        self.call(
            "cudaMemcpy",
            ctypes.c_void_p(to),
            ctypes.c_void_p(start),
            ctypes.c_size_t(size),
            way,
        )

    def wait(self) -> None:
        self.call("cudaDeviceSynchronize")

    # ---- time: milliseconds between two events

    def stream(self) -> ctypes.c_void_p:
        made = ctypes.c_void_p()
        # A stream that waits for no other.
        self.call("cudaStreamCreateWithFlags", ctypes.byref(made), 1)
        return made

    def event(self) -> ctypes.c_void_p:
        made = ctypes.c_void_p()
        self.call("cudaEventCreate", ctypes.byref(made))
        return made

    def record(self, event: ctypes.c_void_p, stream: ctypes.c_void_p) -> None:
        self.call("cudaEventRecord", event, stream)

    def between(self, first: ctypes.c_void_p, last: ctypes.c_void_p) -> float:
        found = ctypes.c_float()
        self.call("cudaEventSynchronize", last)
        self.call("cudaEventElapsedTime", ctypes.byref(found), first, last)
        return found.value

    # ---- graphs

    @contextlib.contextmanager
    def graph(self, stream: ctypes.c_void_p) -> Iterator[ctypes.c_void_p]:
        """Capture the launches inside as a graph, which can be launched afterwards."""
        record, ready = ctypes.c_void_p(), ctypes.c_void_p()
        self.call("cudaStreamBeginCapture", stream, 2)  # relaxed
        yield ready
        self.call("cudaStreamEndCapture", stream, ctypes.byref(record))
        self.call(
            "cudaGraphInstantiate",
            ctypes.byref(ready),
            record,
            ctypes.c_ulonglong(0),
        )
        self.call("cudaGraphDestroy", record)

    def play(self, graph: ctypes.c_void_p, stream: ctypes.c_void_p) -> None:
        self.call("cudaGraphLaunch", graph, stream)


# ---- operands in host memory, on the device for the duration of one call


def joined(spans: list[Span]) -> list[Span]:
    """Return the spans merged where they overlap, ascending."""
    found: list[Span] = []
    for start, end in sorted(spans):
        if found and start < found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((start, end))
    return found


class Mirror:
    """Copies of spans of host memory on a device; written back when the `with` ends."""

    def __init__(self, device: Device, spans: list[Span]) -> None:
        self.device, self.rooms = (
            device,
            [(s, e, 0) for s, e in joined(spans) if e > s],
        )

    def __enter__(self) -> Mirror:
        for i, (start, end, _) in enumerate(self.rooms):
            shift = start % ALIGNED
            room = self.device.take(shift + end - start)
            self.rooms[i] = start, end, room + shift
            self.device.copy(room + shift, start, end - start, TO_DEVICE)
        return self

    def __exit__(self, *_: object) -> None:
        for start, end, at in self.rooms:
            self.device.copy(start, at, end - start, TO_HOST)
            self.device.free(at - start % ALIGNED)

    def at(self, address: int) -> int:
        """Return the place on the device of a byte of the host."""
        for start, end, room in self.rooms:
            if start <= address < end:
                return room + address - start
        raise KeyError(address)
