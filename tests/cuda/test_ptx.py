"""test_ptx.py -- tests nvcc's PTX of the kernels, executed on a CPU (tests/emulation/ptx.py): the
kernels' own tests pass by it, its bits are those of the kernels compiled as C++, whole programs
have one hash, and mistakes in PTX are found."""

from __future__ import annotations

import ctypes
import functools
import itertools
import os
import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest

from tests import kernel_bits
from tests.cuda import test_emulated
from tests.emulation import ptx
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
    """Each row of the translator's tables has an instruction among those that nvcc writes."""
    written = golden()
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
    """Programs by PTX have one hash for ways to spread a recipe over ranks, queues, graphs and the
    places of states and parameters, also when another way goes on."""
    tokens = law.tokens(256, 21 * 8 * 40)
    for name in ("tokens", "val"):
        trainer.write_tokens(tmp_path / name, tokens)
    ways = test_emulated.WAYS, test_emulated.OFFLOADED
    every = [row for some in ways for row in law.covering(some, 1)]
    rows = [x for x in every if x["family"] == family]

    def run(row: law.Way, steps: int, *options: object) -> law.Result:
        graph = ["--no-graph"] * (not row["graph"])
        recipe = test_emulated.recipe(precision)
        kind = trainer.BY_PTX["sm_90"]
        given = (*graph, *options)
        return test_emulated.run(tmp_path, row, steps, *given, kind=kind, recipe=recipe)

    (one,) = {run(row, 2) for row in rows}
    assert len(rows) > 10
    kept = ("--checkpoints", tmp_path / "kept", "--save-every", 1)
    run(rows[0], 1, *kept)
    assert run(rows[-1], 2, *kept).weights == one.weights


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
    "shared memory between two arrays": (
        ".shared .align 4 .b8 few[16];\n.shared .align 4 .b8 next[16];\n"
        "mov.u32 %r2, few;\nmov.u32 %r4, next;\nld.shared.u32 %r3, [%r2+16];",
        "a read of 4 bytes at 0x410: outside of the block's shared memory",
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
    "a neighbour's number in global memory without a barrier": (
        "st.global.u32 [%rd2], %r1;\nxor.b64 %rd3, %rd2, 4;\nld.global.u32 %r3, [%rd3];",
        r"hazard at byte \d+ of device memory: .* with no barrier between",
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
