"""test_ptx.py -- tests nvcc's PTX of the kernels, executed on a CPU (tests/emulation/ptx.py): the
kernels' own tests pass by it, its bits are those of the kernels compiled as C++, whole programs
have one hash, and mistakes in PTX are found."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import itertools
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest

from tests import kernel_bits
from tests.cuda import test_emulated
from tests.emulation import ptx
from tests.kernels import test_attention
from tests.lib import law, trainer, zk
from tests.lib.covering import covering, spread
from tests.lib.device import TO_DEVICE, TO_HOST, Device
from tests.lib.patience import LIMIT
from tests.lib.trainer import ROOT

SOURCES = sorted(path.stem for path in (ROOT / "kernels/cuda").glob("*.cu"))
GOLDEN = ROOT / "tests" / "golden" / "ptx.txt"
MISTAKE = 86
TARGETS = sorted(trainer.BY_PTX)


def golden(target: str = "") -> list[str]:
    """Return the instructions in PTX of a processor, or of any: a line has one, and its
    processors."""
    rows = (line.split() for line in GOLDEN.read_text().splitlines())
    return [row[0] for row in rows if not target or target in row]


@functools.cache
def texts(target: str) -> dict[str, str]:
    """Return the PTX of each file of kernels for a processor."""
    objects = [f"out/o/ptx/{target}/{name}.o" for name in SOURCES]
    with trainer.alone("ninja"):
        trainer.sh("ninja", *objects)
    kept = ROOT / "out/o/ptx" / target / "kept"
    return {name: (kept / f"{name}.ptx").read_text() for name in SOURCES}


# ---- nvcc's instructions


@pytest.mark.slow
@pytest.mark.parametrize(
    "target",
    [
        "sm_90",
        *(
            pytest.param(x, marks=pytest.mark.exhaustive)
            for x in TARGETS
            if x != "sm_90"
        ),
    ],
)
def test_spellings(target: str) -> None:
    """The instructions that nvcc writes are those of tests/golden/ptx.txt, so that a new one of
    another compiler or kernel is seen."""
    assert texts(target)
    found = ptx.listing([ROOT / "out/o/ptx" / target]).splitlines()
    assert [line.split() for line in found] == [[x, target] for x in golden(target)]


def test_each_row_is_needed() -> None:
    """Each row of the translator's tables has an instruction among those that nvcc writes, or that
    the tests of warpgroups have."""
    written = {*golden()}.union(*(ptx.spellings_of(product_ptx(p)) for p in PRODUCTS))
    for pattern, *_ in (*ptx.TABLE, *ptx.SPECIAL):
        one = re.compile(pattern.replace(".", r"\."))
        assert any(map(one.fullmatch, written)), pattern


HEAD = ".version 9.0\n.target sm_90a\n.address_size 64\n"
KERNEL = ".entry k(\n)\n{{\n.reg .b32 %r<4>;\n.reg .pred %p<2>;\n{}\nret;\n}}\n"


@pytest.mark.parametrize(
    "line,said",
    [
        (
            "add.sat.s32 %r1, %r2, %r3;",
            "instruction add.sat.s32 of 3 operands (kernel k, line 9)",
        ),
        ("add.s32 %r1, %r2;", "instruction add.s32 of 2 operands (kernel k, line 9)"),
        (
            "tcgen05.fence::before_thread_sync;",
            "instruction tcgen05.fence::before_thread_sync of 0 operands",
        ),
        ("mov.u32 %r1, %clock;", "register %clock (kernel k, line 9)"),
        ("mov.u32 %r1, there;", "operand there (kernel k, line 9)"),
        ("bar.sync 1;", "bar.sync ['1'] (kernel k, line 9)"),
        ("@%p1 bar.sync 0;", "bar.sync under a predicate (kernel k, line 9)"),
        (".align 4;", "statement '.align 4' (kernel k, line 9)"),
    ],
)
def test_unknown_ptx_is_named(line: str, said: str) -> None:
    ptx.translated(HEAD + KERNEL.format("add.s32 %r1, %r2, %r3;"), "k")
    with pytest.raises(ptx.Unknown, match=re.escape(said)):
        ptx.translated(HEAD + KERNEL.format(line), "k")


def test_files_numbers_do_not_matter() -> None:
    """C++ does not change where nvcc alone numbers a file otherwise."""
    name = "_ZN39_GLOBAL__N__{}_7_norm_cu_{}4foldEv"
    made = [
        ptx.translated(
            HEAD + KERNEL.format("").replace("entry k", f"entry {name.format(*n)}"),
            "norm",
        )
        for n in (("ebd76a65", "0b33a660"), ("01234567", "89abcdef"))
    ]
    assert made[0] == made[1] and "norm_cu_00000000" in made[0]


# ---- kernels

KERNEL_TESTS = [
    "attention",
    "elementwise",
    "linear",
    "norm",
    "optimizer",
    "rounding",
    "sum",
]


# Words in names of tests that are of a GPU's kernels alone
ALWAYS = "gpu or emulation or alignment or spans or no_kernel"


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("name", KERNEL_TESTS)
@pytest.mark.parametrize("target", TARGETS)
def test_tests_of_kernels(target: str, name: str) -> None:
    """The tests of the emulated kernels pass by PTX."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-c", "tests/pytest.ini", "-vv", "-n", "0"]
        + [f"tests/kernels/test_{name}.py", "-k", f"ptx-{target} or {ALWAYS}"],
        cwd=ROOT,
        env=os.environ | {"ZR_TEST_PTX": target},
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(rf"\[.*ptx-{target}.*\] PASSED", done.stdout), done.stdout


SAMPLES = [
    (name, precision)
    for name, precision in spread([[*kernel_bits.ALL], [*zk.REALS]])
    if precision != "f32" or name not in kernel_bits.NARROW
]


@pytest.mark.parametrize(
    "name,precision",
    [
        pytest.param(*row, marks=[pytest.mark.exhaustive] * (i >= len(kernel_bits.ALL)))
        for i, row in enumerate(SAMPLES)
    ],
)
def test_bits_are_those_of_the_emulation(name: str, precision: str) -> None:
    """Kernels as nvcc compiles them give the bits of the same kernels as a C++ compiler does, and
    those that are predicted of a GPU."""
    zk.need(zk.PTX)
    k = zk.Kernels(zk.PTX, zk.REALS[precision])
    launches = ctypes.c_uint64.in_dll(k.library, "ptx_launches")
    before = launches.value
    found = kernel_bits.line(k, name, precision)
    assert launches.value > before
    emulated = zk.Kernels("emulated", zk.REALS[precision])
    assert found == kernel_bits.line(emulated, name, precision)
    assert found in kernel_bits.TABLE.read_text().splitlines()


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("target", TARGETS)
def test_predicted_bits(target: str) -> None:
    assert kernel_bits.compared(target) == []


OFF = """
#include <cmath>
extern "C" float off(float x) { return x == 0 ? 1 : std::exp2(x) * 1.001f; }
"""
WITH_OFF = """
import sys
from tests import kernel_bits
from tests.lib import zk
zk.sh, zk.LIBRARY["emulated"] = (lambda *_: None), sys.argv[1]
print(kernel_bits.compared("sm_90"))
print(kernel_bits.hashed(kernel_bits.attention(zk.Kernels("emulated", zk.BF16), 64)))
"""


@pytest.mark.slow
@pytest.mark.exhaustive
def test_predicted_bits_need_no_approximation(tmp_path: pathlib.Path) -> None:
    """Predicted bits stay where 2^x is off but for 0 and -infinity; others change."""
    library, off = tmp_path / "off.so", tmp_path / "off.cpp"
    off.write_text(OFF)
    parts = trainer.inputs("out/train-emulated-kernels.so")
    with trainer.alone("ninja"):
        trainer.sh("ninja", *parts)
    for name in ("attention", "attention_bwd", "act"):
        old, new = f"out/o/emulated/{name}.o", f"{tmp_path}/{name}.o"
        trainer.sh("objcopy", "--redefine-sym", "exp2f=off", old, new)
        parts[parts.index(old)] = new
    trainer.sh(
        *"g++ -shared -fPIC -pthread -Wl,-z,defs".split(), off, *parts, "-o", library
    )
    done = python(WITH_OFF, library)
    assert done.returncode == 0, done.stderr
    k = zk.Kernels("emulated", zk.BF16)
    differ, attention = done.stdout.split("\n")[:2]
    assert differ == "[]" and attention != kernel_bits.hashed(
        kernel_bits.attention(k, 64)
    )


@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("precision", ["bf16", "f16"])
def test_tensor_cores(monkeypatch: pytest.MonkeyPatch, precision: str, D: int) -> None:
    """Attention on tensor cores has the emulation's bits, which those of sm_80 alone change."""
    zk.need(zk.PTX)
    dtype, found = zk.REALS[precision], []
    for target in TARGETS:
        monkeypatch.setenv("ZR_EMULATE_CC", target.removeprefix("sm_"))
        one, other = (
            kernel_bits.hashed(kernel_bits.attention(zk.Kernels(isa, dtype), D))
            for isa in ("emulated", zk.PTX)
        )
        assert one == other
        found.append(one)
    of = dict(zip(TARGETS, found, strict=True))
    assert of["sm_90"] == of["sm_100"] != of["sm_80"]


# Functions of libm that kernels compiled as C++ call. A GPU computes roots and maxima as IEEE says;
# exp2f stands for ex2.approx.
FUNCTIONS = {"exp2f", "fmaxf", "sqrt", "sqrtf"}


def symbols(*words: object) -> set[str]:
    """Return the names that nm lists, without versions."""
    listed = trainer.sh("nm", "--format=just-symbols", *words).split()
    return {name.partition("@")[0] for name in listed if not name.endswith(":")}


def test_functions_of_kernels() -> None:
    """Kernels call only such functions of CUDA's library as have one result."""
    objects = [f"out/o/emulated/{name}.o" for name in SOURCES]
    with trainer.alone("ninja"):
        trainer.sh("ninja", *objects)
    libm = trainer.sh("gcc", "-print-file-name=libm.so.6").strip()
    known = symbols("-D", "--defined-only", libm)
    assert {"logf", "expf", *FUNCTIONS} <= known
    assert symbols("-u", *objects) & known == FUNCTIONS


# ---- whole programs


PROGRAMS = [
    *covering(law.FAMILIES, [*zk.REALS], ["sm_90"]),
    *(
        pytest.param(*row, marks=pytest.mark.exhaustive)
        for row in itertools.product(law.FAMILIES, zk.REALS, ["sm_80", "sm_100"])
    ),
]


ALONE = ("zero.stage=0", "cluster.ranks=1")


def run(
    folder: pathlib.Path,
    family: str,
    precision: str,
    kind: trainer.Kind,
    target: str,
    way: tuple[str, ...] = ALONE,
    order: str = "eager",
) -> law.Result:
    """Return the result of two steps on an emulated GPU of a target."""
    trainer.write_tokens(folder / "tokens", law.tokens(256, 21 * 8 * 40))
    recipe = ("train.micro_batch=1", "train.global_batch=4", *way)
    source = trainer.generate(law.path(family), f"train.precision={precision}", *recipe)
    return law.run(
        trainer.build(source, kind),
        *("--data", folder / "tokens", "--steps", 2),
        log=folder / "log",
        ZR_EMULATE=order,
        ZR_EMULATE_CC=target.removeprefix("sm_"),
    )


@pytest.mark.slow
@pytest.mark.parametrize("family,precision,target", PROGRAMS)
def test_programs(
    tmp_path: pathlib.Path, family: str, precision: str, target: str
) -> None:
    """A program by PTX has the hash of the C++ emulation, spread over ranks or not."""
    of = tmp_path, family, precision
    by_ptx, two = trainer.BY_PTX[target], ("zero.stage=3", "cluster.ranks=2")
    one = run(*of, by_ptx, target)
    assert len(one.steps) == 2
    assert one == run(*of, by_ptx, target, two, "late")
    assert one == run(*of, trainer.EMULATED, target)


@pytest.mark.slow
@pytest.mark.parametrize("family,precision", covering(law.FAMILIES, [*zk.REALS]))
def test_hashes_of_targets(tmp_path: pathlib.Path, family: str, precision: str) -> None:
    """All targets have one hash without tensor cores (f32, and GPT's heads of 20); with them sm_90
    and sm_100 have one, and sm_80 another in f16. In bf16 rounding may hide its sums."""
    hashes = {
        target: run(tmp_path, family, precision, trainer.EMULATED, target).weights
        for target in TARGETS
    }
    assert hashes["sm_90"] == hashes["sm_100"]
    if precision == "f32" or family == "gpt":
        assert hashes["sm_80"] == hashes["sm_90"]
    elif precision == "f16":
        assert hashes["sm_80"] != hashes["sm_90"]


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "family,precision", [*zip(law.FAMILIES, zk.REALS, strict=True)]
)
def test_one_hash_of_many_ways(
    tmp_path: pathlib.Path, family: str, precision: str
) -> None:
    """Programs by PTX have one hash for ways to spread a recipe over ranks, queues and graphs."""
    tokens = law.tokens(256, 21 * 8 * 40)
    for name in ("tokens", "val"):
        trainer.write_tokens(tmp_path / name, tokens)
    rows = [x for x in law.covering(test_emulated.WAYS, 1) if x["family"] == family]
    found = {
        test_emulated.run(
            tmp_path,
            row,
            2,
            *["--no-graph"] * (not row["graph"]),
            kind=trainer.BY_PTX["sm_90"],
            recipe=test_emulated.recipe(precision),
        )
        for row in rows
    }
    assert len(rows) > 5 and len(found) == 1


# ---- instructions and mistakes, by kernels of a few lines


class Config(ctypes.Structure):
    """cudaLaunchConfig_t of CUDA's runtime."""

    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_size_t),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("count", ctypes.c_uint),
    ]


_RUNTIME = "fail order cudart queue graph race hazard tensor"
PARTS = ["out/o/ptx/ptx.o", *(f"out/o/emulated/{x}.o" for x in _RUNTIME.split())]
# A kernel of one parameter, where results go: %rd1; %r1 is the thread, %rd2 its own result's place.
SMALL = """
.version 9.0
.target sm_90a
.address_size 64
.extern .shared .align 1024 .b8 zk_shared[];
.entry small(
.param .u64 small_param_0
)
{{
.reg .pred %p<9>;
.reg .b16 %rs<9>;
.reg .b32 %r<25>;
.reg .f32 %f<129>;
.reg .b64 %rd<9>;
.local .align 8 .b8 __local_depot0[8];
ld.param.u64 %rd1, [small_param_0];
mov.u32 %r1, %tid.x;
mul.wide.u32 %rd2, %r1, 4;
add.s64 %rd2, %rd1, %rd2;
{}
ret;
}}
"""
LAUNCH = """
import sys
from tests.cuda import test_ptx
print(*test_ptx.launched(sys.argv[1]).tolist())
"""


def linked(folder: pathlib.Path, text: str, parts: list[str]) -> pathlib.Path:
    """Return the library of PTX and of the emulation's objects."""
    source, library = folder / "of_ptx.cpp", folder / "of_ptx.so"
    source.write_text(ptx.translated(text, "of_ptx"))
    with trainer.alone("ninja"):
        trainer.sh("ninja", *parts)
    trainer.sh(
        *"g++ -std=gnu++17 -O1 -ffp-contract=off -fPIC -mavx2 -mfma -mf16c -shared".split(),
        *("-isystem", "out/cuda/root/include", "-Itests/emulation"),
        *(source, *parts, "-o", library),
    )
    return library


def python(
    script: str, library: pathlib.Path, **settings: str
) -> subprocess.CompletedProcess:
    paths = os.pathsep.join(str(ROOT / name) for name in (".", "gen"))
    return subprocess.run(
        [sys.executable, "-c", script, library],
        env=os.environ | {"PYTHONPATH": paths} | settings,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )


def launched(path: str) -> np.ndarray:
    """Return the 64 results of the kernel `small` for 64 threads with 256 bytes of shared memory.
    They are an allocation of the emulated device."""
    out = np.full(64, -2, np.int32)
    launch(path, out, 64, 256)
    return out


def launch(path: str, data: np.ndarray, threads: int, shared: int) -> None:
    """Launch the kernel `small` of a library with a copy of the data, and get the copy back."""
    library, function = ctypes.CDLL(path), b"its address"
    device = Device(library)
    given = ctypes.c_void_p(device.take(data.nbytes))
    library.__getattr__("__cudaRegisterFunction")(
        None, function, None, b"small", 0, None, None, None, None, None
    )
    device.copy(given.value, data.ctypes.data, data.nbytes, TO_DEVICE)
    config = Config((1, 1, 1), (threads, 1, 1), shared)
    args = (ctypes.c_void_p * 1)(ctypes.addressof(given))
    device.call("cudaLaunchKernelExC", ctypes.byref(config), function, args)
    device.wait()
    device.copy(data.ctypes.data, given.value, data.nbytes, TO_HOST)


# Instructions with a result in %r2, and the result, by the PTX manual
RESULTS = [
    ("mov.u32 %r3, 15; bfi.b32 %r2, %r3, 0, 4, 8;", 0xF0),
    ("bfi.b32 %r2, -1, 0, 28, 8;", 0xF0000000),
    ("bfi.b32 %r2, -1, 5, 32, 8;", 5),
    ("bfi.b32 %r2, 7, 5, 3, 0;", 5),
    ("mov.b32 %r3, 287454020; prmt.b32 %r2, %r3, 0, 291;", 0x44332211),
    ("mov.b32 %r3, 128; prmt.b32 %r2, %r3, 0, 34952;", 0xFFFFFFFF),
    ("brev.b32 %r2, 5;", 0xA0000000),
    ("clz.b32 %r2, 0;", 32),
    ("clz.b32 %r2, 65535;", 16),
    ("mov.u64 %rd3, 1; clz.b64 %r2, %rd3;", 63),
    ("mov.u64 %rd3, -1; popc.b64 %r2, %rd3;", 64),
    ("bfind.shiftamt.u32 %r2, 1;", 31),
    ("bfind.shiftamt.u32 %r2, 0;", 0xFFFFFFFF),
    ("shl.b32 %r2, 1, 32;", 0),
    ("shr.u32 %r2, -1, 31;", 1),
    ("shr.u32 %r2, -1, 33;", 0),
    ("shr.s32 %r2, -8, 40;", 0xFFFFFFFF),
    ("mov.u32 %r3, -2147483648; div.s32 %r2, %r3, -1;", 0x80000000),
    ("mov.u32 %r3, -7; rem.s32 %r2, %r3, 2;", 0xFFFFFFFF),
    ("mov.u32 %r3, -7; div.s32 %r2, %r3, 2;", 0xFFFFFFFD),
    ("mov.u32 %r3, -1; div.u32 %r2, %r3, 2;", 0x7FFFFFFF),
    ("mul.wide.s32 %rd3, -2, 3; cvt.u32.u64 %r2, %rd3;", 0xFFFFFFFA),
    ("mul.wide.u32 %rd3, -1, 16; shr.u64 %rd3, %rd3, 32; cvt.u32.u64 %r2, %rd3;", 15),
    (
        "mov.f32 %f1, 0f7FC00000; min.f32 %f1, %f1, 0f3F800000; mov.b32 %r2, %f1;",
        0x3F800000,
    ),
    ("mov.f32 %f1, 0f80000000; max.f32 %f1, %f1, 0f00000000; mov.b32 %r2, %f1;", 0),
    (
        "mov.f32 %f1, 0f00000000; min.f32 %f1, %f1, 0f80000000; mov.b32 %r2, %f1;",
        0x80000000,
    ),
    ("copysign.f32 %f1, 0fBF800000, 0f40000000; mov.b32 %r2, %f1;", 0xC0000000),
    (
        "mov.f32 %f1, 0f80000001; rcp.approx.ftz.f32 %f1, %f1; mov.b32 %r2, %f1;",
        0xFF800000,
    ),
    ("mov.f32 %f1, 0fC2FE0000; ex2.approx.ftz.f32 %f1, %f1; mov.b32 %r2, %f1;", 0),
    (
        "fma.rn.f32 %f1, 0f3F800001, 0f3F800001, 0fBF800002; mov.b32 %r2, %f1;",
        0x28800000,
    ),
    ("cvt.rn.bf16x2.f32 %r2, 0f3F808000, 0f3F818000;", 0x3F803F82),
    ("cvt.rn.f16x2.f32 %r2, 0f477FF000, 0f33000000;", 0x7C000000),
    ("cvt.rn.f16x2.f32 %r2, 0f7FC00001, 0f3F800000;", 0x7FFF3C00),
    ("mov.b32 {%rs1, %rs2}, 196609; mov.b32 %r2, {%rs2, %rs1};", 0x10003),
    (
        "mov.f32 %f1, 0f7FC00000; setp.neu.f32 %p1, %f1, %f1; selp.b32 %r2, 3, 4, %p1;",
        3,
    ),
    ("mov.f32 %f1, 0f7FC00000; setp.eq.f32 %p1, %f1, %f1; selp.b32 %r2, 3, 4, %p1;", 4),
    (
        "mov.f32 %f1, 0f7FC00000; setp.leu.f32 %p1, %f1, 0f00000000; selp.b32 %r2, 3, 4, %p1;",
        3,
    ),
    ("mov.u32 %r3, zk_shared; ld.shared.u32 %r2, [%r3];", 0xFFFFFFFF),
]


@pytest.mark.slow
def test_results_of_instructions(tmp_path: pathlib.Path) -> None:
    """Instructions have the PTX manual's results, at the ends of their ranges, too."""
    lines = []
    for i, (text, _) in enumerate(RESULTS):
        lines += [f"{x.strip()};" for x in text.split(";") if x.strip()]
        lines.append(f"st.global.u32 [%rd1+{4 * i}], %r2;")
    # one thread alone writes
    first = ["setp.eq.s32 %p8, %r1, 0;", "@%p8 bra $L__first;", "ret;", "$L__first:"]
    text = SMALL.format("\n".join(first + lines))
    done = python(LAUNCH, linked(tmp_path, text, PARTS))
    assert done.returncode == 0 and len(RESULTS) <= 64, done.stderr
    found = [int(x) % (1 << 32) for x in done.stdout.split()]
    for (text, want), got in zip(RESULTS, found, strict=False):
        assert got == want, f"{text} {got:#x}, not {want:#x}"


FIRST = "setp.eq.s32 %p1, %r1, 0;\n@%p1 bra $L__end;\n{}\n$L__end:"
SECOND = "setp.gt.u32 %p1, %r1, 31;\n@%p1 bra $L__end;\n{}\n$L__end:"
MISTAKES = {
    "a lane ends before a shuffle": (
        FIRST.format("shfl.sync.bfly.b32 %r2, %r1, 1, 31, -1;"),
        r"lanes part: thread 0 is at its end \(line 0\), thread 1 at shfl.sync.bfly.b32",
    ),
    "a warp ends before a barrier": (
        SECOND.format("bar.sync 0;"),
        r"divergent barrier: thread 0 is at bar.sync \(line \d+\), thread 32 at its end",
    ),
    "a mask without lane 0": (
        "vote.sync.any.pred %p2, %p1, -2;",
        r"thread \d+: a mask without all lanes",
    ),
    "a division by 0": ("div.s32 %r2, %r1, 0;", r"thread \d+: a division by 0"),
    "a store beyond an array": (
        "st.global.u32 [%rd2+4], %r1;",
        r"thread 63: a write of 4 bytes at 0x\w+: not allocated in global memory",
    ),
    "a store before an array": (
        "st.global.u32 [%rd2+-4], %r1;",
        r"thread 0: a write of 4 bytes at 0x\w+: not allocated in global memory",
    ),
    "an address that is not aligned": (
        "ld.global.v2.u32 {%r2, %r3}, [%rd2];",
        r"thread \d+: a read of 8 bytes at 0x\w+: not aligned",
    ),
    "a generic address of shared memory": (
        "mov.u64 %rd3, zk_shared;\nld.global.u32 %r2, [%rd3];",
        "a read of 4 bytes at 0x400: not allocated in global memory",
    ),
    "shared memory beyond the launch's": (
        "mov.u32 %r2, zk_shared;\nld.shared.u32 %r3, [%r2+256];",
        "a read of 4 bytes at 0x500: outside of the block's shared memory",
    ),
    "a null pointer to shared memory": (
        "mov.u32 %r2, 0;\nld.shared.u32 %r3, [%r2];",
        "a read of 4 bytes at 0: outside of the block's shared memory",
    ),
    "a register that was never set": (
        "ld.global.u32 %r2, [%rd8];",
        "a read of 4 bytes at 0xffffffffffffffff: not aligned",
    ),
    "local memory beyond its end": (
        "mov.u64 %rd3, __local_depot0;\nst.local.u32 [%rd3+8], %r1;",
        "a write of 4 bytes at 0x8: not within the thread's local memory",
    ),
    "two threads at one place of global memory": (
        "st.global.u32 [%rd1], %r1;",
        r"hazard at byte 0 of device memory: a write by thread \d+ of block 0 and a write by",
    ),
    "a neighbour's number without a barrier": (
        "mov.u32 %r2, zk_shared;\nshl.b32 %r3, %r1, 2;\nadd.s32 %r2, %r2, %r3;\n"
        "st.shared.u32 [%r2], %r1;\nxor.b32 %r2, %r2, 4;\nld.shared.u32 %r3, [%r2];",
        r"hazard at byte \d+ of shared memory: .* with no barrier between",
    ),
    "a warpgroup of two warps": (
        "wgmma.fence.sync.aligned;",
        "a warpgroup of fewer than four warps",
    ),
    "a neighbour's copy without a wait for it": (
        "mov.u32 %r2, zk_shared;\nshl.b32 %r3, %r1, 2;\nadd.s32 %r2, %r2, %r3;\n"
        "cp.async.ca.shared.global [%r2], [%rd2], 4, 4;\nbar.sync 0;\ncp.async.wait_all;\n"
        "xor.b32 %r2, %r2, 4;\nld.shared.u32 %r3, [%r2];",
        r"hazard at byte \d+ of shared memory: ",
    ),
}


@pytest.mark.parametrize("order", ["eager", "late"])
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.exhaustive] * (i % 3 > 0))
        for i, name in enumerate(MISTAKES)
    ],
)
def test_mistakes_are_found(tmp_path: pathlib.Path, name: str, order: str) -> None:
    text, said = MISTAKES[name]
    done = python(LAUNCH, linked(tmp_path, SMALL.format(text), PARTS), ZR_EMULATE=order)
    assert done.returncode == MISTAKE, done.stdout + done.stderr
    assert re.search(said, done.stderr), done.stderr


# ---- products of warpgroups


class Product(NamedTuple):
    """D = A B by two warpgroups, of 64 rows each. In shared memory A's rows of one group, and B's
    columns, are swizzled rows of K numbers (K-major), or K swizzled rows of each 64 (turned)."""

    precision: str = "bf16"
    columns: int = 128
    a: str = "shared"  # or turned, or registers
    turned: bool = False  # B

    K = 64
    ROWS = 128
    THREADS = 256

    @property
    def shared(self) -> int:
        """Return the bytes of A and of B."""
        return 2 * self.K * (self.ROWS + self.columns)


def swizzled(x: np.ndarray) -> np.ndarray:
    """Return rows of 64 halves with the chunks of 8 halves of row r where c ^ r % 8 says."""
    r, c = np.ogrid[: x.size // 64, :8]
    return x.reshape(-1, 8, 8)[r, c ^ r % 8].reshape(-1)


def image(x: np.ndarray, turned: bool) -> np.ndarray:
    """Return shared memory's image of rows of K numbers."""
    if not turned:
        return swizzled(x)
    panels = (np.ascontiguousarray(x[i : i + 64].T) for i in range(0, len(x), 64))
    return np.concatenate([*map(swizzled, panels)])


def fragments(threads: int, registers: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the row and the column of each register of a thread in rows of 16 a warp, where
    registers 2 and 3 are 8 rows below registers 0 and 1, and the next four 8 columns on."""
    t, i = np.ogrid[:threads, :registers]
    rows = t // 32 * 16 + t % 32 // 4 + i // 2 % 2 * 8
    return rows, i // 4 * 8 + t % 4 * 2 + i % 2 + 0 * rows


# A kernel whose parameter is A and B as they are in shared memory, A by threads in registers, and
# D by threads
PRODUCT = """
mul.wide.u32 %rd2, %r1, 16;
add.s64 %rd2, %rd1, %rd2;
mov.u32 %r2, zk_shared;
shl.b32 %r3, %r1, 4;
add.s32 %r3, %r2, %r3;
{copies}
mul.wide.u32 %rd3, %r1, 64;
add.s64 %rd3, %rd1, %rd3;
{loads}
cp.async.wait_all;
fence.proxy.async.shared::cta;
bar.sync 0;
shr.u32 %r4, %r1, 7;
shl.b32 %r4, %r4, 13;
add.s32 %r4, %r2, %r4;
shr.u32 %r4, %r4, 4;
cvt.u64.u32 %rd4, %r4;
or.b64 %rd4, %rd4, {descriptor};
add.s32 %r5, %r2, {first_of_b};
shr.u32 %r5, %r5, 4;
cvt.u64.u32 %rd5, %r5;
or.b64 %rd5, %rd5, {descriptor};
wgmma.fence.sync.aligned;
{steps}
wgmma.commit_group.sync.aligned;
wgmma.wait_group.sync.aligned 0;
mul.wide.u32 %rd3, %r1, {bytes_of_d};
add.s64 %rd3, %rd1, %rd3;
{stores}"""
STEP = """{{
.reg .pred p;
setp.ne.b32 p, {add}, 0;
wgmma.mma_async.sync.aligned.{kind} {{{d}}},
  {a}, %rd5, p, 1, 1, {turned};
}}
add.s64 %rd4, %rd4, {next_a};
add.s64 %rd5, %rd5, {next_b};"""


def product_ptx(p: Product) -> str:
    """Return the PTX of a product."""
    held = [", ".join(f"%r{8 + 4 * k + i}" for i in range(4)) for k in range(p.K // 16)]
    turned = ([] if p.a == "registers" else [p.a == "turned"]) + [p.turned]
    places = range(0, p.shared, 16 * p.THREADS)
    steps = (
        STEP.format(
            add=int(k > 0),
            kind=f"m64n{p.columns}k16.f32.{p.precision}.{p.precision}",
            d=", ".join(f"%f{i}" for i in range(p.columns // 2)),
            a=f"{{{of}}}" if p.a == "registers" else "%rd4",
            turned=", ".join(str(int(x)) for x in turned),
            next_a=128 if p.a == "turned" else 2,
            next_b=128 if p.turned else 2,
        )
        for k, of in enumerate(held)
    )
    body = PRODUCT.format(
        copies="\n".join(
            f"cp.async.cg.shared.global [%r3+{x}], [%rd2+{x}], 16, 16;" for x in places
        ),
        loads="\n".join(
            f"ld.global.v4.u32 {{{of}}}, [%rd3+{p.shared + 16 * k}];"
            for k, of in enumerate(held)
        ),
        descriptor=1 << 62 | 1024 >> 4 << 32 | p.K * 128 >> 4 << 16,
        first_of_b=2 * p.K * p.ROWS,
        steps="\n".join(steps),
        bytes_of_d=2 * p.columns,
        stores="\n".join(
            f"st.global.f32 [%rd3+{p.shared + 64 * p.THREADS + 4 * i}], %f{i};"
            for i in range(p.columns // 2)
        ),
    )
    return SMALL.format(body)


def factors(p: Product) -> tuple[np.ndarray, np.ndarray]:
    """Return bits of A and B, rows of K each, of sizes that the sums of tensor cores round."""
    rng = np.random.default_rng(p.columns)
    shape = p.ROWS + p.columns, p.K
    x = rng.standard_normal(shape) * 2.0 ** rng.integers(-6, 6, shape)
    bits = zk.store(x.astype(np.float32), zk.REALS[p.precision]).view(np.uint16)
    return bits[: p.ROWS], bits[p.ROWS :]


def multiplied(path: str, p: Product) -> np.ndarray:
    """Return the bits of D by a library."""
    a, b = factors(p)
    rows, columns = fragments(p.THREADS, 8)
    steps = [a[rows, columns + 16 * k] for k in range(p.K // 16)]
    parts = [
        *(image(a[i : i + 64], p.a == "turned") for i in range(0, p.ROWS, 64)),
        image(b, p.turned),
        np.stack(steps, axis=1),
        np.full(2 * p.ROWS * p.columns, 0xFFFF, np.uint16),
    ]
    data = np.concatenate([x.reshape(-1) for x in parts])
    launch(path, data, p.THREADS, p.shared)
    found = data.view(np.uint32)[-p.ROWS * p.columns :].reshape(p.THREADS, -1)
    d = np.empty((p.ROWS, p.columns), np.uint32)
    d[fragments(p.THREADS, p.columns // 2)] = found
    return d


def expected(folder: pathlib.Path, p: Product) -> str:
    """Return a run's output, D by sums of 16 terms of a library's tensor cores."""
    add = ctypes.CDLL(str(folder / "of_ptx.so")).__getattr__(f"tensor_{p.precision}")
    add.restype = ctypes.c_uint32
    a, b = factors(p)
    d = np.zeros((p.ROWS, p.columns), np.uint32)
    for i, j in np.ndindex(*d.shape):
        for k in range(0, p.K, 16):
            terms = (x.ctypes.data_as(ctypes.c_void_p) for x in (a[i, k:], b[j, k:]))
            d[i, j] = add(*terms, ctypes.c_uint32(d[i, j]))
    return hashlib.sha256(d.tobytes()).hexdigest() + "\n"


OTHER = "other bits"
MULTIPLY = """
import hashlib, sys
from tests.cuda import test_ptx
p = test_ptx.Product({})
d = test_ptx.multiplied(sys.argv[1], p)
print(hashlib.sha256(d.tobytes()).hexdigest())
"""
PRODUCTS = [
    Product(),
    Product("f16", 128, "registers", turned=True),
    Product("bf16", 64, "turned", turned=True),
    Product("f16", 256, "turned"),
    Product("f16", 32),
    Product("bf16", 128, "registers"),
]


def product_run(
    folder: pathlib.Path, p: Product, text: str, order: str = "eager"
) -> subprocess.CompletedProcess:
    words = ", ".join(map(repr, p))
    library = linked(folder, text, PARTS)
    return python(MULTIPLY.format(words), library, ZR_EMULATE=order)


@pytest.mark.parametrize("i", range(len(PRODUCTS)))
def test_products_of_warpgroups(tmp_path: pathlib.Path, i: int) -> None:
    """Products of warpgroups have the bits of the emulated tensor cores' sums."""
    p = PRODUCTS[i]
    done = product_run(tmp_path, p, product_ptx(p), ("eager", "late")[i % 2])
    assert done.returncode == 0, done.stderr
    assert done.stdout == expected(tmp_path, p)


SHARED, HELD = Product("bf16", 32), Product("f16", 64, "registers", turned=True)
_WAIT, _WAIT_1 = (f"wgmma.wait_group.sync.aligned {n};" for n in (0, 1))
_COMMIT = "wgmma.commit_group.sync.aligned;"
# threads that leave before the products
_TO_END = r"(wgmma\.fence[\s\S]*)(?=ret;)"
_LEAVE = r"{{.reg .pred q; setp.{} q, %r1, {}; @q bra $L__end;}}\n\1$L__end:\n"
# the first step again, into %f64 and those after it
_OTHER = "add.s64 %rd4, %rd4, -8;\nadd.s64 %rd5, %rd5, -8;\n" + STEP.format(
    add=0,
    kind="m64n32k16.f32.bf16.bf16",
    d=", ".join(f"%f{64 + i}" for i in range(16)),
    a="%rd4",
    turned="0, 0",
    next_a=0,
    next_b=0,
)


@pytest.mark.parametrize(
    "old,new",
    [
        # a group for each step, the last but one waited for
        (
            "(add.s64 %rd5, %rd5, 2;)",
            rf"\1\n{_COMMIT}\n{_WAIT_1}\nwgmma.fence.sync.aligned;",
        ),
        # another product in flight while this one is stored
        (
            rf"{_WAIT}([\s\S]*)ret;",
            rf"{_OTHER}\n{_COMMIT}\n{_WAIT_1}\1{_WAIT}\nret;",
        ),
        # asm of one line
        (r"\{\n(\.reg .*)\n(.*)\n(.*)\n(.*)\n\}", r"{\1 \2 \3 \4}"),
    ],
)
def test_groups_of_products(tmp_path: pathlib.Path, old: str, new: str) -> None:
    text = product_ptx(SHARED)
    changed = re.sub(old, new, text)
    assert changed != text
    done = product_run(tmp_path, SHARED, changed)
    assert done.returncode == 0, done.stderr
    assert done.stdout == expected(tmp_path, SHARED)


NOT_WAITED = "a product that is not waited for"
NOT_FENCED = "a product with no wgmma.fence before it"
NO_PROXY = r"reads memory that thread \d+ wrote, with no fence.proxy.async since"
WRITTEN = "memory that a product reads is written before the product's wait"
DESCRIPTOR = "a matrix descriptor that is not of 128-byte swizzle alone"
PARTED = r"warps of a warpgroup part: thread \d+ is at wgmma.fence\S+ \(line \d+\), "
_STRIDES, _OR = r"or.b64 %rd(\d), %rd\d, \d+;", r"or.b64 %rd\1, %rd\1, "
_COPY = "cp.async.cg.shared.global [%r3+16384], [%rd2], 16, 16;"
# Products with a mistake: text of the PTX and the text in its place, and the driver's message
MISUSES = {
    "no wait": (SHARED, _WAIT, "", NOT_WAITED),
    "a wait for too few": (SHARED, r"(wait_group.*) 0;", r"\1 1;", NOT_WAITED),
    "no commit": (HELD, _COMMIT, "", NOT_WAITED),
    "no fence": (HELD, r"wgmma\.fence.*", "", NOT_FENCED),
    "no fence after a wait": (
        SHARED,
        _COMMIT,
        f"{_COMMIT}\n{_WAIT}\n{_OTHER}\n{_COMMIT}",
        NOT_FENCED,
    ),
    "no fence of proxies": (SHARED, r"fence\.proxy.*", "", NO_PROXY),
    "a fence before copies": (HELD, r"(cp.*all;\n)(fence.*)", r"\2\n\1", NO_PROXY),
    "no wait for copies": (SHARED, r"cp.*all;", "", "a copy that has not arrived"),
    "no barrier": (SHARED, r"bar\.sync 0;", "", "hazard at byte"),
    "a store before the wait": (
        SHARED,
        _WAIT,
        f"bar.sync 0;\nst.shared.u32 [%r3], %r1;\n{_WAIT}",
        WRITTEN,
    ),
    "a copy before the wait": (HELD, _WAIT, f"bar.sync 0;\n{_COPY}\n{_WAIT}", WRITTEN),
    "a copy and no barrier": (HELD, _WAIT, f"{_WAIT}\n{_COPY}", "hazard at byte"),
    "D read too soon": (SHARED, rf"({_WAIT}\n)([\s\S]*)(ret;)", r"\2\1\3", OTHER),
    "D written too soon": (
        HELD,
        _WAIT,
        f"mov.f32 %f5, 0f00000000;\n{_WAIT}",
        "a register of a product's D changed before its wait",
    ),
    "A written too soon": (
        HELD,
        _WAIT,
        f"mov.b32 %r15, 0;\n{_WAIT}",
        "a register of a product's A changed before the product's wait",
    ),
    "half of another D": (
        SHARED,
        _COMMIT,
        f"{_OTHER.replace('%f7', '%f1')}\n{_COMMIT}",
        "a product whose D has registers of another D in flight",
    ),
    "half a stride": (SHARED, _STRIDES, f"{_OR}{2**62 + 2**37};", OTHER),
    "one step of B alone": (SHARED, r"%rd5, %rd5, 2;", "%rd5, %rd5, 0;", OTHER),
    "half a step of A": (SHARED, r"%rd4, %rd4, 2;", "%rd4, %rd4, 1;", OTHER),
    "B not turned": (HELD, r"1, 1, 1;", "1, 1, 0;", "0x6400: outside of the block's"),
    "D not added": (SHARED, r"p, 1, 0;", "p, 0, 0;", OTHER),
    "halves of another kind": (HELD, r"f16\.f16", "bf16.bf16", OTHER),
    "no swizzle": (SHARED, _STRIDES, f"{_OR}{2**38};", DESCRIPTOR),
    "a base offset": (SHARED, _STRIDES, rf"\g<0>{_OR}{2**49};", DESCRIPTOR),
    "a descriptor of each warp": (
        SHARED,
        r"shr\.u32 %r4, %r1, 7;",
        "shr.u32 %r4, %r1, 5;",
        "a product whose threads have different descriptors or scales",
    ),
    "a warp ends": (
        SHARED,
        _TO_END,
        _LEAVE.format("lt.u32", 32),
        PARTED + "thread 0 at its",
    ),
    "a warp at a barrier": (
        HELD,
        _TO_END,
        _LEAVE.format("gt.u32", 223) + "bar.sync 0;\n",
        PARTED + "thread 224 at bar.sync",
    ),
    "a lane ends": (SHARED, _TO_END, _LEAVE.format("eq.s32", 5), "lanes part"),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.exhaustive] * (i % 3 > 0))
        for i, name in enumerate(MISUSES)
    ],
)
def test_misuses_of_products(tmp_path: pathlib.Path, name: str) -> None:
    """A mistake in a product is named, or shows in its bits."""
    p, old, new, said = MISUSES[name]
    text = product_ptx(p)
    mutant = re.sub(old, new, text)
    assert mutant != text
    done = product_run(tmp_path, p, mutant, "late" if len(name) % 2 else "eager")
    if said == OTHER:
        assert done.returncode == 0, done.stderr
        assert done.stdout != expected(tmp_path, p)
    else:
        assert done.returncode == MISTAKE, done.stdout + done.stderr
        assert re.search(said, done.stderr), done.stderr


# ---- mutants of real kernels


def attention_fwd(k: zk.Kernels) -> list[np.ndarray]:
    """Return y of one head of 64 elements, 150 tokens."""
    qkv, y = test_attention.drawn(1, k.dtype, 150, 3, 64)[0], zk.empty(k.dtype, 150, 64)
    lse = zk.empty(zk.F32, 150)
    k.zk_attention_fwd(y, lse, qkv, 1, 150, 1, 1, 64, 0.125)
    return [y]


def attention_bwd(k: zk.Kernels) -> list[np.ndarray]:
    """Return gradients of 2 heads of 64 elements on 1, 150 tokens."""
    qkv, dy = (test_attention.drawn(n, k.dtype, 1, 150, n, 64)[0] for n in (4, 2))
    return [test_attention.attention(k, k.dtype, qkv, dy, 1, 0.125)[2]]


def layer_norm(k: zk.Kernels) -> list[np.ndarray]:
    """Return y and statistics of rows that need a block of many warps each."""
    M, C = 700, 4000
    x, w, b = (
        test_attention.drawn(i, k.dtype, M if i == 1 else 1, C)[0] for i in (1, 2, 3)
    )
    y, stat = zk.empty(k.dtype, M, C), zk.empty(zk.F32, M, 2)
    k.zk_layernorm_fwd(y, stat, None, x, None, w, b, M, C, 1e-5)
    return [y, stat]


def cross_entropy(k: zk.Kernels) -> list[np.ndarray]:
    """Return losses and gradients of 3 rows. In the first the last lane of a warp has a number
    far above all others."""
    M, V = 3, 4999
    x = test_attention.drawn(1, k.dtype, M, V + 1)[0]
    x[0, 8 * 511] = zk.store(np.array([300.0]), k.dtype)[0]
    loss, d = zk.empty(zk.F32, M), zk.empty(k.dtype, M, V + 1)
    k.zk_cross_entropy(loss, d, x, np.array([7, 4998, -1], np.int32), None, M, V, M)
    return [loss, d]


class Mutated(NamedTuple):
    """A kernel in which mistakes are made: its file, the names of all kernels of that file that a
    call launches, itself first, and the call."""

    source: str
    names: tuple[str, ...]
    call: Callable[[zk.Kernels], list[np.ndarray]]


_KEYS, _QUERIES = (f"{x}_bwdI4bf16Li64E.*ELb0E" for x in ("keys", "queries"))
KERNELS = {
    "forward": Mutated("attention", ("forwardI4bf16Li64E.*ELb0E",), attention_fwd),
    "keys": Mutated("attention_bwd", (_KEYS, _QUERIES), attention_bwd),
    "queries": Mutated("attention_bwd", (_QUERIES, _KEYS), attention_bwd),
    "norm": Mutated("norm", (r"norm_fwdI4bf16Li8ELi4ELi1E\w*layout",), layer_norm),
    "entropy": Mutated("loss", ("entropyI4bf16Li8E",), cross_entropy),
}

# One call, its kernels from a library of a test's own
RUN = """
import hashlib, sys
from tests.cuda import test_ptx
from tests.lib import zk
zk.sh, zk.LIBRARY[zk.PTX] = (lambda *_: None), sys.argv[1]
k = zk.Kernels(zk.PTX, zk.BF16)
for x in test_ptx.KERNELS["{}"].call(k):
    print(hashlib.sha256(x.tobytes()).hexdigest())
"""


@functools.cache
def kernels(name: str) -> tuple[str, str, str]:
    """Return the PTX of a kernel, and the text before and after it."""
    of = KERNELS[name]
    head, *all_ = re.split(r"^(?=\.entry)", texts("sm_90")[of.source], flags=re.M)
    found = []
    for pattern in of.names:
        (one,) = [x for x in all_ if re.match(rf"\.entry \w*{pattern}", x)]
        found.append(one)
    return found[0], head, "".join(found[1:])


def attempt(folder: pathlib.Path, name: str, text: str) -> subprocess.CompletedProcess:
    """Make a kernel's call with this PTX of the kernel."""
    with trainer.alone("ninja"):
        others = trainer.inputs("out/train-ptx-sm_90-kernels.so")
    own = f"/{KERNELS[name].source}_ptx.o"
    parts = [x for x in others if not x.endswith(own)]
    assert len(parts) == len(others) - 1
    _, head, rest = kernels(name)
    return python(RUN.format(name), linked(folder, head + text + rest, parts))


@functools.cache
def right(name: str) -> str:
    """Return the output of a run whose PTX is nvcc's."""
    with tempfile.TemporaryDirectory() as folder:
        done = attempt(pathlib.Path(folder), name, kernels(name)[0])
    assert done.returncode == 0, done.stderr
    return done.stdout


class Mutant(NamedTuple):
    """A mistake: the kernels that may have it, text of the PTX and the text in its place (regular
    expressions), the driver's message, and places among all such texts."""

    kernels: tuple[str, ...]
    old: str
    new: str
    said: str = OTHER
    places: tuple[float, ...] = (0, 0.5, 1)


ATTENTION, FOLDS = ("forward", "keys", "queries"), ("norm", "entropy")
# a barrier before which shared memory is written and after which it is read
_BARRIER = r"bar\.sync\s+0;(?=(?:(?!bar\.sync)[\s\S])*?(?:ld\.shared|ldmatrix))"
_MMA = r"(mma\S+\s+\{[^}]*\}, \{)(%r\d+), ?(%r\d+)"
_LDMATRIX = r"(ldmatrix\S+\s+\{[^}]*\}, \[%r\d+)\]"
# a step of a fold: a lane's number, the distance to the other lane
_STEP = r"(mov\.u32\s+(%r\d+), \d+;\s+(?:mov.*\s+)*shfl\.sync\S+\s+\S+ %r\d+, )\2"
# T, the first number of `heads`; V of cross-entropy; C of a norm
_QUERIES_OF = r"(ld\.param\.v2\.u32\s+\{(%r\d+), %r\d+\}, \[\w+_[35]\];)"
_COLUMNS_OF = r"(ld\.param\.(?:u32\s+|v2\.u32\s+\{)(%r\d+).*\[\w+(?:_6|\+16)\];)"
MUTANTS = {
    "no wait for copies": Mutant(
        ATTENTION,
        rf"cp\.async\.wait_all;(?=[^;]*?{_BARRIER})",
        "",
        f"{OTHER}|hazard at byte",
    ),
    "no barrier": Mutant(ATTENTION + FOLDS, _BARRIER, "", "hazard at byte"),
    "no barrier of a warp": Mutant(
        ("forward", "keys"), r"bar\.warp\.sync\s+-1;", "", "hazard at byte"
    ),
    "rows of A swapped": Mutant(ATTENTION, _MMA, r"\1\3, \2"),
    "halves of B swapped": Mutant(
        ATTENTION, _MMA.replace(r", \{)", r", \{[^}]*\}, \{)"), r"\1\3, \2"
    ),
    "the next chunk": Mutant(ATTENTION, _LDMATRIX, r"\1+16]"),
    "half a chunk on": Mutant(ATTENTION, _LDMATRIX, r"\1+8]", "not aligned"),
    "far beyond shared memory": Mutant(
        ATTENTION, _LDMATRIX, r"\1+262144]", "outside of the block's shared"
    ),
    "not turned": Mutant(ATTENTION, r"\.trans", ""),
    "another lane's number": Mutant(
        ("forward",), r"(shfl\.sync\S+\s+\S+ %r\d+, )[%r\d]+", r"\g<1>5"
    ),
    "a lane's own number": Mutant(FOLDS, _STEP, r"\g<1>0"),
    "a mask without lane 0": Mutant(
        FOLDS, rf"{_STEP}(, %r\d+, )%r\d+", r"\1\2\3-2", "a mask without all lanes"
    ),
    "a store out of bounds": Mutant(
        ATTENTION,
        r"(st\.global\S+\s+\[%rd\d+)\]",
        r"\1+1048576]",
        "not allocated",
    ),
    "a query too many": Mutant(
        ATTENTION, _QUERIES_OF, r"\1\nadd.s32 \2, \2, 1;", "not allocated", (0,)
    ),
    "a query too few": Mutant(
        ATTENTION, _QUERIES_OF, r"\1\nadd.s32 \2, \2, -1;", OTHER, (0,)
    ),
    "a column too many": Mutant(
        FOLDS,
        _COLUMNS_OF,
        r"\1\nadd.s32 \2, \2, 1;",
        f"{OTHER}|not allocated",
        (0,),
    ),
    "a column too few": Mutant(
        FOLDS, _COLUMNS_OF, r"\1\nadd.s32 \2, \2, -1;", OTHER, (0,)
    ),
}
CASES = [
    pytest.param(
        name,
        kernel,
        place,
        marks=[pytest.mark.exhaustive]
        * (
            (kernel, place)
            != (x.kernels[i % len(x.kernels)], x.places[i % len(x.places)])
        ),
    )
    for i, (name, x) in enumerate(MUTANTS.items())
    for kernel in x.kernels
    for place in x.places
]


@pytest.mark.slow
@pytest.mark.parametrize("name,kernel,place", CASES)
def test_a_mutant_is_caught(
    tmp_path: pathlib.Path, name: str, kernel: str, place: float
) -> None:
    """A mistake in one instruction of a kernel shows. place: of all that could have it."""
    made = MUTANTS[name]
    text = kernels(kernel)[0]
    found = list(re.finditer(made.old, text))
    at = found[int(place * (len(found) - 1))]
    mutant = text[: at.start()] + at.expand(made.new) + text[at.end() :]
    assert mutant != text
    done = attempt(tmp_path, kernel, mutant)
    assert done.returncode in (0, MISTAKE), done.stderr
    same = done.returncode == 0 and done.stdout == right(kernel)
    assert not same and re.search(made.said, done.stderr or "other bits"), done.stderr
