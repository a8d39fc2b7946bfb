"""test_emulation.py -- tests the stand-in for GPUs: threads, barriers, warps, launches, streams,
graphs, collectives, and that it finds mistakes. The tested programs are in tests/emulation: demo.cu
(kernels), mistakes.cu (streams), ranks.cu (collectives)."""

from __future__ import annotations

import ctypes
import functools
import os
import re
import subprocess
import sys

import numpy as np
import pytest

from tests.lib import zk
from tests.lib.patience import LIMIT
from tests.lib.trainer import ROOT, alone, sh

LIBRARY = ROOT / "out/emulated-demo.so"
ORDERS = ["eager", "late", "shuffled:1", "shuffled:2"]
MISTAKE = 86


class Context(ctypes.Structure):
    """struct zk of kernels/cuda/cuda.h."""

    _fields_ = [
        ("stream", ctypes.c_void_p),
        ("device", ctypes.c_void_p),
        ("host", ctypes.c_void_p),
        ("dtype", ctypes.c_int),
        ("column", ctypes.c_int),
        ("lt", ctypes.c_void_p),
    ]


@functools.cache
def built() -> ctypes.CDLL:
    with alone("ninja"):
        sh("ninja", "--quiet", str(LIBRARY.relative_to(ROOT)))
    return ctypes.CDLL(str(LIBRARY))


def call(name: str, grid: tuple[int, ...], *args: object, dtype: int = zk.F32) -> None:
    """Call demo_NAME with a launch of grid (x, y, z, block, shared) in column 1."""
    launches = (zk.Launch * 2)()
    launches[1].part[0] = zk.Grid(*grid)
    context = Context(dtype=dtype, column=1)
    given = [
        a.ctypes.data_as(ctypes.c_void_p) if isinstance(a, np.ndarray) else a
        for a in args
    ]
    zk.allow(built(), [zk.extent(a) for a in args if isinstance(a, np.ndarray)])
    built()["demo_" + name](ctypes.byref(context), launches, *given)
    assert built().cudaStreamSynchronize(None) == 0


def places() -> None:
    to = np.full((2 * 3 * 2, 64, 6), -1, np.int32)
    call("places", (2, 3, 2, 64, 0), to)
    for z in range(2):
        for y in range(3):
            for x in range(2):
                for t in range(64):
                    assert to[x + 2 * (y + 3 * z), t].tolist() == [
                        x,
                        y,
                        z,
                        t,
                        64,
                        20302,
                    ]


def barriers() -> None:
    x = np.arange(96, dtype=np.int32)
    call("turn", (1, 1, 1, 96, 4 * 96), x, 5)
    assert (x == np.roll(np.arange(96), -5)).all()


def warps() -> None:
    to = np.zeros((32, 6), np.int32)
    call("warps", (1, 1, 1, 32, 0), to)
    lane = np.arange(32)
    assert (to[:, 0] == 5).all() and (to[:, 1] == lane ^ 3).all()
    assert (to[:, 2] == np.where(lane + 2 < 32, lane + 2, lane)).all()
    assert (to[:, 3] == np.where(lane % 8 >= 4, lane - 4, lane)).all()
    assert (to[:, 4].astype(np.uint32) == sum(1 << i for i in range(0, 32, 3))).all()
    assert to[0, 5] == 32


def warp_barrier() -> None:
    x = np.zeros(32, np.int32)
    call("warp_barrier", (1, 1, 1, 32, 0), x)
    assert (x == np.arange(32)[::-1]).all()


def block_sums(dtype: int) -> None:
    """Compare a sum with the order of cuda.h: strided partial sums, then lanes folded, then warps
    folded."""
    x = np.random.default_rng(1).normal(size=1000).astype(np.float32)
    stored = zk.to_bf16(x) if dtype == zk.BF16 else x
    x = zk.from_bf16(stored) if dtype == zk.BF16 else x
    part = np.zeros(128, np.float32)
    for row in np.concatenate([x, np.zeros(24, np.float32)]).reshape(-1, 128):
        part = part + row
    warps_of = part.reshape(4, 32)
    for apart in (16, 8, 4, 2, 1):
        warps_of = warps_of + warps_of[:, np.arange(32) ^ apart]
    last = np.concatenate([warps_of[:, 0], np.zeros(28, np.float32)])
    for apart in (16, 8, 4, 2, 1):
        last = last + last[np.arange(32) ^ apart]
    sum_, most = np.zeros(128, np.float32), np.zeros(128, np.float32)
    call("sums", (1, 1, 1, 128, 0), sum_, most, stored, 1000, dtype=dtype)
    assert (sum_ == last[0]).all() and (most == x.max()).all()


def puts() -> None:
    odd = np.array(
        [
            0,
            0x80000000,
            0x7F800000,
            0xFF800000,
            0x7FC00000,
            0x7F800001,
            0x3F808000,
            0x3F818000,
            0x3F808001,
            0x7F7FFFFF,
            1,
            0x807FFFFF,
        ],
        np.uint32,
    )
    bits = np.concatenate(
        [odd, np.random.default_rng(2).integers(0, 1 << 32, 500, np.uint32)]
    )
    x = bits.view(np.float32)
    to = np.zeros(512, np.uint16)
    call("puts", (1, 1, 1, 512, 0), to, x, dtype=zk.BF16)
    with np.errstate(invalid="ignore"):
        assert (to == zk.to_bf16(x)).all()


RIGHT = {
    "places": places,
    "barriers": barriers,
    "warps": warps,
    "puts": puts,
    "warp_barrier": warp_barrier,
    "f32": lambda: block_sums(zk.F32),
    "bf16": lambda: block_sums(zk.BF16),
}


def other_process(body: str, order: str = "eager") -> subprocess.CompletedProcess:
    """Run `body` with this file's names in a new process, because ZR_EMULATE is read once."""
    built()
    code = f"import numpy as np\nfrom tests.cuda import test_emulation as t\n{body}"
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=LIMIT,
        cwd=ROOT,
        env={
            **os.environ,
            "ZR_EMULATE": order,
            "PYTHONPATH": f"{ROOT}/gen:{ROOT}",
        },
    )


@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", RIGHT)
def test_kernels_run_as_on_a_gpu(name: str, order: str) -> None:
    done = other_process(f"t.RIGHT[{name!r}]()", order)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    "name,said",
    [
        ("some_at_barrier", "divergent barrier"),
        ("two_barriers", "divergent barrier"),
        ("some_in_warp", "not all lanes come to a collective of their warp"),
        ("half_a_mask", "needs all its 32 lanes (mask 0xffff"),
    ],
)
def test_divergence_is_found(name: str, said: str, order: str) -> None:
    done = other_process(
        f"t.call({name!r}, (1, 1, 1, 64, 0), np.zeros(64, np.int32))", order
    )
    assert done.returncode == MISTAKE and said in done.stderr
    assert f"kernel {name}, " in done.stderr or f"kernel {name}: " in done.stderr
    assert "demo.cu:" in done.stderr


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    "name,threads",
    [("no_barrier", 64), ("one_barrier", 64), ("shuffle_is_no_barrier", 32)],
)
def test_a_missing_barrier_is_found(name: str, threads: int, order: str) -> None:
    done = other_process(
        f"t.call({name!r}, (1, 1, 1, {threads}, 256), np.zeros(64, np.int32))",
        order,
    )
    assert (
        done.returncode == MISTAKE
        and "of block 0, with no barrier between" in done.stderr
    )
    assert f"kernel {name}: hazard at byte" in done.stderr


def turn_round(barrier: int) -> None:
    x = np.zeros((2, 64), np.int32)
    call("turn_round", (1, 1, 1, 64, 0), x, barrier)
    assert (x == [np.arange(64), np.arange(64)[::-1]]).all()


def of_its_thread(blocks: int) -> None:
    x = np.zeros(64, np.int32)
    call("of_its_thread", (blocks, 1, 1, 64, 0), x)
    assert (x == 1).all()


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    "right,wrong,said",
    [
        (
            "t.turn_round(1)",
            "t.turn_round(0)",
            r"turn_round: .* of device memory: a (read|write) by thread \d+ of block 0 and "
            r"a (read|write) by thread \d+ of block 0, with no barrier between",
        ),
        (
            "t.of_its_thread(1)",
            "t.of_its_thread(2)",
            r"of_its_thread: .* of device memory: a write by thread (\d+) of block [01] and "
            r"a write by thread \1 of block [01], with no barrier between",
        ),
    ],
)
def test_a_race_in_operands_is_found(
    right: str, wrong: str, said: str, order: str
) -> None:
    """A test's arrays are watched like the device's memory, in each of its calls."""
    done = other_process(f"{right}\n{right}", order)
    assert done.returncode == 0, done.stderr
    done = other_process(f"{right}\n{wrong}", order)
    assert done.returncode == MISTAKE and re.search(said, done.stderr), done.stderr


@pytest.mark.parametrize(
    "grid,said",
    [
        (
            (1, 1, 1, 1025, 0),
            "invalid configuration argument (grid 1x1x1, 1025 threads, 0 bytes of",
        ),
        (
            (1, 1, 1, 0, 0),
            "invalid configuration argument (grid 1x1x1, 0 threads, 0 bytes of",
        ),
        (
            (0, 1, 1, 32, 0),
            "invalid configuration argument (grid 0x1x1, 32 threads, 0 bytes of",
        ),
        (
            (1, 65536, 1, 32, 0),
            "invalid configuration argument (grid 1x65536x1, 32 threads",
        ),
        (
            (1, 1, 1, 32, 232449),
            "invalid argument (grid 1x1x1, 32 threads, 232449 bytes of",
        ),
    ],
)
def test_a_launch_that_no_gpu_can_do_is_refused(
    grid: tuple[int, ...], said: str
) -> None:
    done = other_process(f't.call("turn", {grid}, np.zeros(2000, np.int32), 0)')
    assert done.returncode == 3 and f"kernel turn: {said}" in done.stderr


def test_all_shared_memory_of_a_block_can_be_had() -> None:
    done = other_process(
        't.call("turn", (1, 1, 1, 32, 232448), np.zeros(32, np.int32), 1)'
    )
    assert done.returncode == 0, done.stderr


def test_an_unknown_order_is_refused() -> None:
    done = other_process(
        't.call("turn", (1, 1, 1, 32, 128), np.zeros(32, np.int32), 1)', "soon"
    )
    assert done.returncode == MISTAKE and "eager, late, shuffled:SEED" in done.stderr


# ---- streams, events, graphs, and which memory each may touch


@functools.cache
def program(name: str) -> str:
    with alone("ninja"):
        sh("ninja", "--quiet", f"out/{name}")
    return str(ROOT / "out" / name)


def ran(
    name: str, *words: str, order: str, **settings: str
) -> subprocess.CompletedProcess:
    return subprocess.run(
        [program(name), *words],
        capture_output=True,
        text=True,
        timeout=LIMIT,
        env={
            **os.environ,
            "ZR_EMULATE": order,
            "NCCL_LAUNCH_ORDER_IMPLICIT": "1",
            **settings,
        },
    )


@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    "case",
    [
        "right_wait",
        "right_overwrite",
        "right_readers",
        "host_between",
        "host_asks",
        "right_memset",
        "right_staging",
        "right_pinned",
        "right_result",
        "plain_memory",
        "within",
        "within_shared",
        "aligned",
        "fresh",
        "right_instructions",
        "function_counts",
        "right_branches",
        "captured",
        "after_graph",
        "threads_count",
    ],
)
def test_ordered_work_is_accepted(case: str, order: str) -> None:
    done = ran("emulated-mistakes", case, order=order)
    assert done.returncode == 0, done.stdout + done.stderr


# Messages that must come whatever ran first: the two pieces of work, and their places.
FILL, TWICE = "a write by fill on stream 1", "a read by twice on stream 2"
COPIED = "a read by cudaMemcpyAsync on stream 1"
RACES = [
    ("no_wait", FILL, TWICE),
    ("wrong_event", FILL, TWICE),
    ("never_recorded", FILL, TWICE),
    ("record_too_late", FILL, TWICE),
    ("early_overwrite", FILL, TWICE),
    ("missed_reader", FILL, TWICE),
    (
        "hasty_memset",
        "a write by cudaMemsetAsync on the default stream",
        TWICE,
    ),
    ("early_staging", COPIED, "a write by host code on the host"),
    (
        "early_pinned",
        "a read by twice on stream 1",
        "a write by host code on the host",
    ),
    (
        "early_result",
        "a write by cudaMemcpyAsync on stream 1",
        "a read by host code on the host",
    ),
    (
        "loose_branches",
        "a write by fill on a graph's part of stream 1",
        "a read by twice on a graph's part of stream 2",
    ),
    ("beside_graph", "a write by fill on a graph's part of stream 1", TWICE),
]


@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("case,one,other", RACES)
def test_a_race_is_found_in_every_order(
    case: str, one: str, other: str, order: str
) -> None:
    done = ran("emulated-mistakes", case, order=order)
    assert done.returncode == MISTAKE, done.stdout + done.stderr
    assert "race at byte" in done.stderr and one in done.stderr and other in done.stderr


@pytest.mark.parametrize(
    "case,said",
    [
        ("host_reads", "host code touches byte 0 of device memory"),
        ("host_writes", "host code touches byte 20 of device memory"),
        ("host_copies", "host code touches byte 0 of device memory"),
        (
            "beyond",
            "reach on stream 1 touches byte 16384 of device memory, which is not allocated",
        ),
        (
            "freed",
            "reach on stream 1 touches byte 0 of device memory, which is not allocated",
        ),
        (
            "beyond_shared",
            "kernel share writes byte 128 of 128 of dynamic shared memory",
        ),
        ("deep_stack", "kernel deep: thread 1 needs a stack of more than"),
        ("misaligned", "vectors on stream 1, tests/emulation/mistakes.cu:"),
        (
            "copy16_to",
            "cp.async of 16 bytes: an address that is not a multiple of 16",
        ),
        (
            "copy16_from",
            "cp.async of 16 bytes: an address that is not a multiple of 16",
        ),
        (
            "copy4_to",
            "cp.async of 4 bytes: an address that is not a multiple of 4",
        ),
        ("matrices_at", "ldmatrix: an address that is not a multiple of 16"),
        ("turned_at", "ldmatrix: an address that is not a multiple of 16"),
        ("load16_at", "ld.shared.v4: an address that is not a multiple of 16"),
        ("load_pair_at", "ld.shared.v2: an address that is not a multiple of 8"),
        ("store4_at", "st.shared.u32: an address that is not a multiple of 4"),
    ],
)
def test_memory_that_may_not_be_touched(case: str, said: str) -> None:
    done = ran("emulated-mistakes", case, order="eager")
    assert done.returncode == MISTAKE and said in done.stderr


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    "case,said",
    [
        ("blocks_read_others", "of block 1"),
        ("threads_write_one", "a write by thread"),
        ("threads_write_twice", "a write by thread"),
    ],
)
def test_threads_of_a_launch_must_not_meet(case: str, said: str, order: str) -> None:
    done = ran("emulated-mistakes", case, order=order)
    assert done.returncode == MISTAKE and said in done.stderr
    assert (
        "of device memory" in done.stderr and "with no barrier between" in done.stderr
    )


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    "case,what", [("function_launches", "fill"), ("function_waits", "waiting")]
)
def test_a_function_of_the_host_may_not_call(case: str, what: str, order: str) -> None:
    done = ran("emulated-mistakes", case, order=order)
    assert done.returncode == MISTAKE
    assert f"a function of cudaLaunchHostFunc calls CUDA: {what}" in done.stderr


@pytest.mark.parametrize(
    "case,error",
    [
        ("wait_from_outside", "cudaErrorStreamCaptureIsolation"),
        ("unjoined", "cudaErrorStreamCaptureUnjoined"),
        ("joined_too_early", "cudaErrorStreamCaptureUnjoined"),
        ("sync_in_capture", "cudaErrorStreamCaptureUnsupported"),
        ("spoiled", "cudaErrorStreamCaptureInvalidated"),
        ("malloc_in_capture", "cudaErrorStreamCaptureUnsupported"),
        ("captured_event_outside", "cudaErrorCapturedEvent"),
    ],
)
def test_what_a_capture_does_not_allow(case: str, error: str) -> None:
    done = ran("emulated-mistakes", case, order="eager")
    assert (done.returncode, done.stdout.strip()) == (4, error)


# ---- collectives


@pytest.mark.parametrize("order", ["eager", "late", "shuffled:1"])
@pytest.mark.parametrize("ranks", ["1", "2", "4"])
@pytest.mark.parametrize(
    "case",
    ["gathers", "exchanges", "sums", "both", "graphs", "groups", "registers"],
)
def test_collectives_move_what_they_should(case: str, ranks: str, order: str) -> None:
    done = ran("emulated-ranks", case, ranks, order=order)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("order", ["eager", "late", "shuffled:1"])
@pytest.mark.parametrize(
    "case,said",
    [
        (
            "race",
            "a write by ncclAllGather on stream 1 and a read by cudaMemcpyAsync on stream 2",
        ),
        (
            "changed",
            "a read by ncclAllGather on stream 1 and a write by cudaMemsetAsync on stream 2",
        ),
        ("different", "and rank 1 in ncclSend/ncclRecv of 800024 bytes"),
        ("other_size", "and rank 1 in ncclAllGather of 64 bytes"),
        ("unlike_orders", "in orders that differ a GPU may hang"),
        ("graph_left", "ends a communicator that a graph names"),
        ("registered_host", "64 bytes that are not those of one allocation of"),
        ("registered_more", "800025 bytes that are not those of one allocation of"),
        ("registered_twice", "registers memory twice"),
        ("registered_left", "ends a communicator with registered memory"),
        ("deregistered_other", "deregisters memory that is not registered"),
        ("not_in_place", "rank 1 gathers from memory that it gathers to, but not in"),
    ],
)
def test_mistakes_with_collectives_are_found(case: str, said: str, order: str) -> None:
    done = ran("emulated-ranks", case, "2", order=order)
    assert done.returncode == MISTAKE and said in done.stderr


@pytest.mark.parametrize("order", ["eager", "late", "shuffled:1"])
@pytest.mark.parametrize(
    "case,said",
    [
        (
            "wrong_key",
            "NCCL: rank 2 splits with color 1 and key 2, and would be number 0 of 2",
        ),
        (
            "wrong_color",
            "NCCL: rank 3 splits with color 0 and key 1, and would be number 2 of 3",
        ),
        ("unlike_groups", "in orders that differ a GPU may hang"),
    ],
)
def test_mistakes_with_groups_are_found(case: str, said: str, order: str) -> None:
    done = ran("emulated-ranks", case, "4", order=order)
    assert done.returncode == MISTAKE and said in done.stderr, done.stderr


def test_launches_of_two_communicators_need_an_order() -> None:
    done = ran(
        "emulated-ranks",
        "both",
        "2",
        order="eager",
        NCCL_LAUNCH_ORDER_IMPLICIT="0",
    )
    assert done.returncode == MISTAKE
    assert (
        "of a second communicator without NCCL_LAUNCH_ORDER_IMPLICIT=1" in done.stderr
    )


@pytest.mark.parametrize("order", ["eager", "late", "shuffled:1"])
@pytest.mark.parametrize("ranks", ["2", "4"])
def test_a_rank_that_is_gone_is_noticed(ranks: str, order: str) -> None:
    done = ran("emulated-ranks", "gone", ranks, order=order)
    assert done.returncode == 5, done.stderr
