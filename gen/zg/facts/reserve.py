"""reserve.py -- what a rank holds of a GPU's memory beside its arena: an allowance, not measured;
and, exactly, what it pins of the host's.

The context, kernels and libraries: a round number. NCCL's buffers of an all-to-all: 10 + 2 MiB for
each peer and channel, by what NVIDIA/nccl#1685 shows of eight H100; the runtime bounds the
channels (NCCL_MAX_P2P_NCHANNELS in runtime/cuda/device.c), and a margin of SMs does so further.
Peers are those of a node of at most eight GPUs: what links between nodes take is not counted.

Rings have buffers of their own: 10 MiB a channel, by NCCL's sizes for its three protocols (4 MiB,
4.7 and 0.5), and 32 channels at most unless blocks are bounded. NCCL connects a ring when it is
first used: one communicator gathers, and with `reduction: fast` another reduces. That of the small
sums has one block where others are beside it. One of exchanges alone has no rings. Where NCCL takes
a switch (NVLS) instead, its buffers are 2 MiB for each channel and GPU of a node, by its sources:
they are not counted beside the rings, which it then does not fill.

Of several groups each has a communicator of its own on each queue that it meets on, with rings
where it gathers or reduces; where it exchanges, for its peers of the same host.
"""

from __future__ import annotations

from ..plan.plan import Head, Plan

LIBRARIES = 6 * 2**30 // 10
PEER = 12 * 2**20  # for a channel
CHANNELS = 8
RING = 10 * 2**20  # for a channel
RINGS = 32  # channels, where nobody bounds them
BOUNCE = 2**20  # of pinned memory beside the host arena: ZR_BOUNCE, for copies
NODE = 8  # ranks whose GPUs read and write each other's memory


def kept(h: Head) -> int:
    """What NCCL keeps to: nothing, where no collective runs beside a product."""
    return h.margin if h.ranks > 1 and h.overlap else 0


def blocks(margin: int) -> int:
    """Of a communicator: a gather and a reduction may be under way beside one product, and each has
    half of what that leaves. 0: as many as NCCL wants."""
    return margin // 2


def channels(margin: int) -> int:
    """Of sends and receives, a block each. NCCL rounds their number up to a power of two: so this
    is one."""
    return min(CHANNELS, 1 << (blocks(margin) or CHANNELS).bit_length() - 1)


def rings(margin: int, fast: bool) -> int:
    """Of what gathers, of fast reductions, and of one block for small sums."""
    wide = blocks(margin) or RINGS
    communicators = 2 if fast else 1
    return RING * (wide * communicators + 1)


def nccl(target: str, ranks: int, margin: int = 0, fast: bool = False) -> int:
    """Its buffers: the runtime looks for this room before it starts NCCL."""
    if target == "cpu" or ranks == 1:
        return 0
    pairs = PEER * channels(margin) * (min(ranks, NODE) - 1)
    return pairs + rings(margin, fast)


def _grouped(p: Plan) -> int:
    """Of the communicators of several groups. That of all ranks has one block."""
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
    """What it takes by a plan."""
    h = p.head
    if p.axes and target != "cpu":
        return _grouped(p)
    return nccl(target, h.ranks, kept(h), h.reduction == "fast")


def bytes_of(
    target: str, ranks: int, margin: int = 0, fast: bool = False
) -> int:
    """Beside the arena; nothing of a CPU's is counted here."""
    return (
        0 if target == "cpu" else LIBRARIES + nccl(target, ranks, margin, fast)
    )


def device(p: Plan, target: str) -> int:
    """Bytes of device memory that a rank needs: its arena and what is beside it."""
    beside = 0 if target == "cpu" else LIBRARIES + nccl_of(p, target)
    return p.arena(target) + beside


def neediest(p: Plan) -> str:
    """The target that needs most of a device."""
    return max(p.head.targets, key=lambda t: device(p, t))


def most(p: Plan) -> int:
    """Bytes of device memory on that target."""
    return device(p, neediest(p))
