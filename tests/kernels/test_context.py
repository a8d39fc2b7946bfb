"""test_context.py -- tests the kernels' context: refusals of zk_open, its object, threads and
memory."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys

import numpy as np
import pytest

from tests.lib import zk
from tests.lib.patience import LIMIT
from tests.lib.trainer import ROOT, generate

PLAIN = """
import ctypes, sys
lib, why = ctypes.CDLL(sys.argv[1]), ctypes.c_char_p()
lib.zk_open.restype = ctypes.c_void_p
lib.zk_object.restype = ctypes.c_char_p
k = lib.zk_open(None, None, None, 0, 0, 2, ctypes.byref(why))
if not k:
    sys.exit(why.value.decode())
x = (ctypes.c_float * 21)(*range(21))
y = (ctypes.c_float * 21)()
lib.zk_add(ctypes.c_void_p(k), None, y, x, x, ctypes.c_int64(21))
assert list(y) == [2.0 * i for i in range(21)]
lib.zk_close(ctypes.c_void_p(k))
lib.zk_target.restype = ctypes.c_char_p
assert lib.zk_target() == b"cpu"
print(lib.zk_object().decode())
"""


def plain(isa: str | None, library: str = "gcc", **settings: str) -> tuple[int, str]:
    """Call a plain name in a new process with ZK_ISA set. Return the exit status and output."""
    zk.library(library)
    environment = {
        name: value for name, value in os.environ.items() if name != "ZK_ISA"
    }
    if isa is not None:
        environment["ZK_ISA"] = isa
    done = subprocess.run(
        [sys.executable, "-c", PLAIN, str(ROOT / zk.LIBRARY[library])],
        env=environment | settings,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    return done.returncode, (done.stdout + done.stderr).strip()


AVX2 = "avx2 fma bmi2 f16c"
AVX512 = f"{AVX2} avx512f avx512bw avx512cd avx512dq avx512vl"


@pytest.mark.parametrize(
    "processor,features,taken",
    [
        ("Haswell, Zen 2", AVX2, "avx2"),
        ("AVX-512 in part", f"{AVX2} avx512f avx512cd", "avx2"),
        ("Skylake-X, Ice Lake", AVX512, "avx512"),
        ("Sapphire Rapids", f"{AVX512} avx512bf16 intel", "avx512"),
        ("Zen 4, Zen 5", f"{AVX512} avx512bf16 amd", "avx512bf16"),
        ("Sapphire Rapids with AMX", f"{AVX512} avx512bf16 intel amx", "amx"),
    ],
)
def test_a_processor_gets_its_fastest_object(
    processor: str, features: str, taken: str
) -> None:
    if taken != "avx2":
        zk.need("avx512")
    for isa in (None, ""):
        found = plain(isa, "tiles", ZR_TEST_CPU=features)
        assert found == (0, taken), processor


def test_a_processor_that_is_too_old_is_refused() -> None:
    status, said = plain(None, "tiles", ZR_TEST_CPU="avx2 fma bmi2 amd")
    assert status == 1 and "F16C" in said


def test_a_lower_object_may_be_named() -> None:
    for isa in zk.isas((*zk.ISAS, zk.BEST, "amx")):
        assert plain(isa) == (0, isa)


def test_the_faster_order_is_the_processors() -> None:
    """The faster order is the processor's, whatever object is named: tiles with AMX (emulated
    here)."""
    zk.need("tiles")
    emulated, own = zk.library("tiles"), zk.library("gcc")
    # its own, whatever class the tests run as, unless AMX is emulated in every object
    emulates = zk.LIBRARY["gcc"] == zk.LIBRARY["tiles"]
    has = emulates or "amx_tile" in zk.features()
    assert emulated.zk_products(None, -1) == zk.TILED
    assert own.zk_products(None, -1) == (zk.TILED if has else zk.PAIRS)


def test_an_emulated_gpu_is_asked_for_no_tiles(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(zk, "processor", lambda: zk.NEEDED["amx"])
    assert zk.runs("amx") and zk.library.__wrapped__(zk.EMULATED).zk_open


@pytest.mark.slow
@pytest.mark.parametrize("isa", zk.CLASSES)
def test_kernels_are_tested_on_each_class_of_processors(isa: str) -> None:
    """Tests run as on a processor with fewer features than this one, or with emulated AMX, for a
    CPU's objects and the emulated GPU."""
    if os.environ.get("ZR_TEST_ISA"):
        pytest.skip("tests run as on one class already")
    zk.need("tiles" if isa == "amx" else isa)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"),
            *("-c", "tests/pytest.ini", "-m", "quick"),
            "tests/kernels/test_context.py",
            "tests/kernels/test_linear.py",
            "tests/kernels/test_elementwise.py",
        ],
        cwd=ROOT,
        env=os.environ | {"ZR_TEST_ISA": isa},
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert done.returncode == 0 and "[100%]" in done.stdout, done.stdout


def test_an_unknown_object_is_refused() -> None:
    status, said = plain("sse")
    assert status == 1 and "ZK_ISA" in said and "avx2, avx512, avx512bf16, amx" in said


@pytest.mark.parametrize(
    "isa,lacking",
    [("avx512", "AVX-512"), ("avx512bf16", "AVX512_BF16"), ("amx", "AMX")],
)
def test_an_object_that_cannot_run_is_refused(isa: str, lacking: str) -> None:
    # Its own, whatever class the tests run as
    if zk.NEEDED[isa] <= zk.features():
        pytest.skip(f"this processor runs the {isa} object")
    status, said = plain(isa)
    assert status == 1 and isa in said and lacking in said


def opened(dtype: int, threads: int) -> str:
    """Return the reason why zk_open refuses; empty if it does not."""
    lib, why = zk.library("gcc"), ctypes.c_char_p()
    context = lib.zk_open(None, None, None, dtype, 0, threads, ctypes.byref(why))
    if context:
        lib.zk_close(ctypes.c_void_p(context))
    assert bool(context) == (why.value is None)
    return (why.value or b"").decode()


def test_open_says_why_not() -> None:
    assert opened(zk.F32, 1) == opened(zk.BF16, 5) == ""
    assert "f32, bf16 or f16" in opened(3, 1)
    assert "1 to 1024" in opened(zk.F32, 0) and "1 to 1024" in opened(zk.F32, 1025)


def mapped() -> int:
    with open("/proc/self/statm", encoding="ascii") as statm:
        return int(statm.read().split()[0]) * os.sysconf("SC_PAGESIZE")


@pytest.mark.parametrize("threads", [1, 4])
def test_overhead_is_what_open_maps(threads: int) -> None:
    lib, overhead = zk.library("gcc"), zk.library("gcc").zk_overhead(threads)
    # Use up stacks of closed contexts
    settings = {"dtype": zk.BF16, "threads": threads, "order": zk.TILED}
    kept = [zk.Kernels(**settings) for _ in range(8)]
    before = mapped()
    kept += [zk.Kernels(**settings) for _ in range(8)]
    assert lib.zk_overhead(1) <= overhead
    # a stack has a guard page beside it; Python's own heap may grow by 1 MiB
    assert 0 <= mapped() - before - 8 * overhead <= 8 * threads * 4096 + 2**20


TOUCHED = """
import ctypes, sys
lib, why = ctypes.CDLL(sys.argv[1]), ctypes.c_char_p()
lib.zk_open.restype = ctypes.c_void_p
def taken():
    with open("/proc/self/smaps_rollup") as f:
        return next(int(line.split()[1]) for line in f if line.startswith("Pss_Anon:"))
y, x = ((ctypes.c_float * 300000)(*[1] * 300000) for i in range(2))
before = taken()
k = lib.zk_open(None, None, None, int(sys.argv[2]), 0, 8, ctypes.byref(why))
lib.zk_products(ctypes.c_void_p(k), 1)
opened = taken()
size = ctypes.c_int64
for i in range(100):
    lib.zk_linear_fwd(ctypes.c_void_p(k), None, y, x, x, None, *map(size, [768, 384, 384]), 0)
print(opened - before, taken() - before)
"""


@pytest.mark.parametrize("dtype", [zk.F32, zk.BF16])
def test_scratch_is_taken_at_the_start(dtype: int) -> None:
    """8 threads take their 20 MiB of scratch at the start, and with AMX in bf16 16 MiB of panels;
    work takes at most a page of stack and globals more."""
    zk.library("gcc")
    done = subprocess.run(
        [sys.executable, "-c", TOUCHED, str(ROOT / zk.LIBRARY["gcc"]), str(dtype)],
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert done.returncode == 0, done.stderr
    opened, worked = map(int, done.stdout.split())
    panels = 16384 * (dtype == zk.BF16 and "amx_tile" in zk.features())
    least = 8 * 2560 + panels
    assert least <= opened < least + 4096 and worked - opened < 1024, (opened, worked)


def test_no_kernel_runs_where_there_is_no_context() -> None:
    source = generate(ROOT / "model_specs" / "demo.yaml", "zero.stage=3")
    assert "zr_gather(z, ZR_GATHER" in source and "zr_call(z, ZR_MAIN" in source
    assert not re.search(r"zr_call(_n)?\(z, ZR_GATHER", source)


def test_many_small_jobs(isa: str) -> None:
    """A worker that sleeps through a job does not disturb the next one."""
    k, ones = zk.Kernels(isa, threads=4), np.ones((7, 500), np.float32)
    sums = np.empty(500, np.float32)
    for job in range(4000):
        k.zk_linear_bwd_b(sums, ones, job % 7 + 1, 500)
        assert (sums == job % 7 + 1).all()


def test_errors_of_others_are_not_the_kernels(
    capfd: pytest.CaptureFixture,
) -> None:
    """An error that a library left for cudaGetLastError is not a launch's. A refused launch still
    ends the process with its name (test_emulation.py)."""
    k, library = zk.Kernels("emulated"), zk.library("emulated")
    invalid = library.cudaFree(ctypes.c_void_p(1))
    ones, sums = np.ones((7, 64), np.float32), np.empty(64, np.float32)
    k.zk_linear_bwd_b(sums, ones, 7, 64)
    assert invalid and (sums == 7).all() and "kernel" not in capfd.readouterr().err
