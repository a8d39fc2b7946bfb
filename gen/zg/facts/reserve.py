"""reserve.py -- memory that a rank needs besides its arena: an allowance for a GPU's, not measured,
and the exact bytes of pinned host memory.

Context, kernels and libraries are a round number. An all-to-all of NCCL has buffers of 10 + 2 MiB
per peer and channel, by the numbers of NVIDIA/nccl#1685 for eight H100. The runtime bounds the
channels (NCCL_MAX_P2P_NCHANNELS in runtime/cuda/device.c), and a margin of SMs bounds them further.
Peers are those of a node of at most eight GPUs: buffers for links between nodes are not counted.

Rings have buffers of their own: 10 MiB per channel, by NCCL's sizes for its three protocols (4 MiB,
4.7 and 0.5), and at most 32 channels unless blocks are bounded. NCCL connects a ring at its first
use: one communicator gathers, and with `reduction: fast` another one reduces. The communicator of
the small sums has one block if others run beside it. One that only exchanges has no rings. If NCCL
uses a switch (NVLS) instead, its buffers are 2 MiB per channel and GPU of a node, by its sources.
They are not counted in addition to the rings, which it then does not fill.

With several groups, each has its own communicator on each of its queues. That has rings if it
gathers or reduces, and buffers for its peers on the same host if it exchanges.
"""

from __future__ import annotations

from ..plan.plan import Head, Plan

LIBRARIES = 6 * 2**30 // 10
PEER = 12 * 2**20  # for a channel
CHANNELS = 8
RING = 10 * 2**20  # for a channel
RINGS = 32  # channels without a bound
BOUNCE = 2**20  # pinned memory besides the host arena: ZR_BOUNCE, for copies
NODE = 8  # ranks whose GPUs access each other's memory


def kept(h: Head) -> int:
    """Return the SMs that NCCL's blocks are bounded by, or 0 if no collective runs beside a
    product."""
    return h.margin if h.ranks > 1 and h.overlap else 0


def blocks(margin: int) -> int:
    """Return the blocks of a communicator, 0 for NCCL's default. A gather and a reduction may run
    beside one product, and each gets half of the SMs that it leaves."""
    return margin // 2


def channels(margin: int) -> int:
    """Return the channels of sends and receives, a block each. NCCL rounds their number up to a
    power of two, so this is one."""
    return min(CHANNELS, 1 << (blocks(margin) or CHANNELS).bit_length() - 1)


def rings(margin: int, fast: bool) -> int:
    """Return the bytes of the rings: for gathers, for fast reductions, and one block for small
    sums."""
    wide = blocks(margin) or RINGS
    communicators = 2 if fast else 1
    return RING * (wide * communicators + 1)


def nccl(target: str, ranks: int, margin: int = 0, fast: bool = False) -> int:
    """Return the bytes of NCCL's buffers. The runtime checks for this room before it starts
    NCCL."""
    if target == "cpu" or ranks == 1:
        return 0
    pairs = PEER * channels(margin) * (min(ranks, NODE) - 1)
    return pairs + rings(margin, fast)


def _grouped(p: Plan) -> int:
    """Return the bytes of NCCL's buffers for several groups. The group of all ranks has one
    block."""
    margin, size = kept(p.head), 0
    wide = blocks(margin) or RINGS
    for (_, name), ops in p.meetings.items():
        if "alltoall" in ops:
            peers = min(p.on_host(name), NODE) - 1
            size += PEER * channels(margin) * peers
        if ops & {"gather", "reducescatter"}:
            size += RING * wide
        elif "allreduce" in ops:
            size += RING
    return size


def nccl_of(p: Plan, target: str) -> int:
    """Return the bytes of NCCL's buffers for a plan."""
    h = p.head
    if p.axes and target != "cpu":
        return _grouped(p)
    return nccl(target, h.ranks, kept(h), h.reduction == "fast")


def bytes_of(target: str, ranks: int, margin: int = 0, fast: bool = False) -> int:
    """Return the bytes of device memory besides the arena; 0 for a CPU."""
    return 0 if target == "cpu" else LIBRARIES + nccl(target, ranks, margin, fast)


def device(p: Plan, target: str) -> int:
    """Return the bytes of device memory that a rank needs, including its arena."""
    beside = 0 if target == "cpu" else LIBRARIES + nccl_of(p, target)
    return p.arena(target) + beside


def neediest(p: Plan) -> str:
    """Return the target that needs the most device memory."""
    return max(p.head.targets, key=lambda t: device(p, t))


def most(p: Plan) -> int:
    """Return the bytes of device memory on that target."""
    return device(p, neediest(p))
