"""test_ptx.py -- tests nvcc's PTX of the kernels, executed on a CPU (tests/emulation/ptx.py): the
kernels' own tests pass by it, its bits are those of the kernels compiled as C++, whole programs
have one hash, and mistakes in PTX are found."""

from __future__ import annotations

import functools
import os
import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest

from tests.emulation import ptx
from tests.lib import law, trainer, zk
from tests.lib.covering import covering
from tests.lib.patience import LIMIT
from tests.lib.trainer import ROOT

SOURCES = sorted(path.stem for path in (ROOT / "kernels/cuda").glob("*.cu"))
GOLDEN = ROOT / "tests" / "golden" / "ptx.txt"
MISTAKE = 86
TARGETS = sorted(trainer.PTX)


@functools.cache
def texts(target: str) -> dict[str, str]:
    """Return the PTX of each file of kernels for a processor."""
    objects = [f"out/o/ptx/{target}/{name}.o" for name in SOURCES]
    with trainer.alone("ninja"):
        trainer.sh("ninja", *objects)
    kept = ROOT / "out/o/ptx" / target / "kept"
    return {name: (kept / f"{name}.ptx").read_text() for name in SOURCES}


# ---- what nvcc writes


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
    """The instructions that nvcc writes are those of tests/golden/ptx.txt, so that another compiler
    or kernel with a new one is seen."""
    found = set().union(*map(ptx.spellings_of, texts(target).values()))
    assert sorted(found) == GOLDEN.read_text().split()


def test_each_row_is_needed() -> None:
    """Each row of the translator's tables has an instruction among those that nvcc writes."""
    written = GOLDEN.read_text().split()
    for pattern, *_ in (*ptx.TABLE, *ptx.SPECIAL):
        one = re.compile(pattern.replace(".", r"\."))
        assert any(map(one.fullmatch, written)), pattern


HEAD = ".version 9.0\n.target sm_90a\n.address_size 64\n"
KERNEL = ".entry k(\n)\n{{\n.reg .b32 %r<4>;\n.reg .pred %p<2>;\n{}\nret;\n}}\n"


@pytest.mark.parametrize(
    "line,said",
    [
        ("add.sat.s32 %r1, %r2, %r3;", "instruction add.sat.s32 of 3 operands (kernel k, line 9)"),
        ("add.s32 %r1, %r2;", "instruction add.s32 of 2 operands (kernel k, line 9)"),
        ("wgmma.fence.sync.aligned;", "instruction wgmma.fence.sync.aligned of 0 operands"),
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
            HEAD + KERNEL.format("").replace("entry k", f"entry {name.format(*n)}"), "norm"
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


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("name", KERNEL_TESTS)
@pytest.mark.parametrize("target", TARGETS)
def test_tests_of_kernels(target: str, name: str) -> None:
    """The tests of the emulated kernels pass by PTX."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-c", "tests/pytest.ini", "-q", "-n", "0"]
        + [f"tests/kernels/test_{name}.py", "-k", f"ptx-{target} and not tiles_of"],
        cwd=ROOT,
        env=os.environ | {"ZR_TEST_PTX": target},
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^[1-9]\d* passed", done.stdout, re.M), done.stdout


def drawn(seed: int, dtype: int, *shape: int) -> np.ndarray:
    return zk.store(np.random.default_rng(seed).standard_normal(shape), dtype)


def attention(k: zk.Kernels, D: int, T: int = 70) -> list[np.ndarray]:
    """Return all results of attention, forward and backward, of 2 heads on 1."""
    dtype = k.dtype
    qkv, dy = drawn(1, dtype, T, 4, D), drawn(2, dtype, T, 2, D)
    y, dqkv = zk.empty(dtype, T, 2, D), zk.empty(dtype, T, 4, D)
    lse, scratch = zk.empty(zk.F32, 2, T), zk.empty(zk.F32, 2, T)
    k.zk_attention_fwd(y, lse, qkv, 1, T, 2, 1, D, 0.125)
    k.zk_attention_bwd(dqkv, dy, y, qkv, lse, scratch, 1, T, 2, 1, D, 0.125)
    return [y, lse, dqkv]
