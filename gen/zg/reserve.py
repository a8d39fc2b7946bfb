"""reserve.py -- what a rank holds of a GPU's memory beside its arena: an allowance, not measured.

The context, kernels and libraries: a round number. NCCL's buffers of an all-to-all: 10 + 2 MiB for
each peer and channel, by what NVIDIA/nccl#1685 shows of eight H100; the runtime bounds the
channels (NCCL_MAX_P2P_NCHANNELS in runtime/cuda/device.c). Peers are those of a node of at most
eight GPUs: what links between nodes take is not counted.
"""
from __future__ import annotations

from .plan import Plan

LIBRARIES = 6 * 2 ** 30 // 10
PEER = 12 * 2 ** 20             # for a channel
CHANNELS = 8
NODE = 8                        # ranks whose GPUs read and write each other's memory


def nccl(target: str, ranks: int) -> int:
    """Its buffers: the runtime looks for this room before it starts NCCL."""
    return 0 if target == "cpu" else PEER * CHANNELS * (min(ranks, NODE) - 1)


def bytes_of(target: str, ranks: int) -> int:
    """Beside the arena; nothing of a CPU's is counted here."""
    return 0 if target == "cpu" else LIBRARIES + nccl(target, ranks)


def device(p: Plan, target: str) -> int:
    """Bytes of device memory that a rank needs: its arena and what is beside it."""
    return p.arena(target) + bytes_of(target, p.head.ranks)


def most(p: Plan) -> int:
    """On the target that needs most."""
    return max(device(p, t) for t in p.head.targets)
