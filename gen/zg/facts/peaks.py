"""peaks.py -- what each target can do at most, by data sheets: for estimates of time, never for
what a plan does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Peaks:
    """flops a second by bytes of a number, without sparsity; bytes a second of the device's memory,
    of its link to the host in one direction, of the host's memory for each device, of the wire to
    the peers of one host, and of its share of the network to other hosts, in one direction."""

    flops: Mapping[int, float]
    memory: float
    link: float
    host: float
    wire: float
    network: float

    def seconds(self, flops: float, moved: float, width: int) -> float:
        """Of a kernel call: its products at the processor's rate, or its bytes at the memory's,
        whichever is longer."""
        return max(flops / self.flops[width], moved / self.memory)


# NVIDIA's data sheets of A100 SXM 80 GB, H100 SXM, B200. A link is PCIe x16 of generation 4, 5,
# 5; a host's memory an eighth of that of the DGX's two processors: 16 channels of DDR4-3200,
# DDR5-4800, DDR5-5600; the wire is NVLink, the network InfiniBand HDR, NDR, NDR, a card for each
# GPU. For a CPU, round numbers of a core with AVX2 and its share of the memory, which is its wire,
# too; 10 Gbit/s of network.
PEAKS = {
    "cpu": Peaks({4: 1e11, 2: 1e11}, 1e10, 1e10, 1e10, 1e10, 1.25e9),
    "sm_80": Peaks({4: 19.5e12, 2: 312e12}, 2.0e12, 32e9, 51e9, 300e9, 25e9),
    "sm_90": Peaks({4: 67e12, 2: 989e12}, 3.35e12, 64e9, 76e9, 450e9, 50e9),
    "sm_100": Peaks({4: 80e12, 2: 2250e12}, 8.0e12, 64e9, 89e9, 900e9, 50e9),
}
DISK = 7e9  # an NVMe drive on four lanes of PCIe 4
LAUNCH = 1e-6  # seconds that any command takes: a round number
