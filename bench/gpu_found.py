"""gpu_found.py -- prints the GPUs of this machine, as CUDA's driver shows them.

Each has a line: its processor (90: sm_90), the target of its plans, bytes of memory, and name. The
exit code is 1 if there is none.
"""

from __future__ import annotations

import ctypes
import sys
from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """A GPU. code: its compute capability without the point, as of sm_90."""

    code: int
    memory: int
    name: str

    @property
    def column(self) -> str:
        """Return the target of its plans, which sm_100 and sm_103 share."""
        return "sm_100" if self.code // 10 == 10 else f"sm_{self.code}"


def gpus() -> list[Gpu]:
    """Return the GPUs that CUDA's driver shows."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return []
    n = ctypes.c_int()
    if cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(n)):
        return []
    found = []
    for device in range(n.value):
        major, minor, size = ctypes.c_int(), ctypes.c_int(), ctypes.c_size_t()
        name = ctypes.create_string_buffer(100)
        for attribute, to in ((75, major), (76, minor)):
            cuda.cuDeviceGetAttribute(ctypes.byref(to), attribute, device)
        cuda.cuDeviceTotalMem_v2(ctypes.byref(size), device)
        cuda.cuDeviceGetName(name, 100, device)
        code = 10 * major.value + minor.value
        found.append(Gpu(code, size.value, name.value.decode()))
    return found


if __name__ == "__main__":
    here = gpus()
    for gpu in here:
        print(gpu.code, gpu.column, gpu.memory, gpu.name)
    sys.exit(not here)
