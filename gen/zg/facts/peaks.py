"""peaks.py -- peak rates of targets by data sheets: for estimates, never for a plan's decisions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Peaks:
    """Peak rates of a target, all per second.

    flops: by bytes of a number, without sparsity; memory: bytes of the device's memory; link: bytes
    to or from the host; host: bytes of the host's memory per device; wire: bytes to or from the
    peers on one host; network: its share of the bytes to or from other hosts.
    """

    flops: Mapping[int, float]
    memory: float
    link: float
    host: float
    wire: float
    network: float

    def seconds(self, flops: float, moved: float, width: int) -> float:
        """Return the seconds of a kernel call: flops at the peak rate or bytes at the memory's,
        whichever takes longer."""
        return max(flops / self.flops[width], moved / self.memory)


# NVIDIA's data sheets of A100 SXM 80 GB, H100 SXM, B200. The link is PCIe x16 of generation 4, 5,
# 5. A host's memory is an eighth of the memory bandwidth of a DGX with two processors: 16 channels
# of DDR4-3200, DDR5-4800, DDR5-5600. The wire is NVLink, the network InfiniBand HDR, NDR, NDR, a
# card per GPU. For a CPU: round numbers of a core with AVX2 and its share of the memory, which is
# also its wire; 10 Gbit/s of network.
PEAKS = {
    "cpu": Peaks({4: 1e11, 2: 1e11}, 1e10, 1e10, 1e10, 1e10, 1.25e9),
    "sm_80": Peaks({4: 19.5e12, 2: 312e12}, 2.0e12, 32e9, 51e9, 300e9, 25e9),
    "sm_90": Peaks({4: 67e12, 2: 989e12}, 3.35e12, 64e9, 76e9, 450e9, 50e9),
    "sm_100": Peaks({4: 80e12, 2: 2250e12}, 8.0e12, 64e9, 89e9, 900e9, 50e9),
}
DISK = 7e9  # an NVMe drive on four lanes of PCIe 4
LAUNCH = 1e-6  # seconds of overhead of any command: a round number
