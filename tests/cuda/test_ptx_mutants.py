"""test_ptx_mutants.py -- tests that a mistake in one instruction of a kernel's PTX shows: in the results, or
as an error of the emulation."""

from __future__ import annotations

import functools
import pathlib
import re
import subprocess
import tempfile
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest

from tests.cuda.test_ptx import MISTAKE, linked, python, texts
from tests.kernels import test_attention
from tests.lib import trainer, zk

OTHER = "other bits"


def attention_fwd(k: zk.Kernels, D: int = 64) -> list[np.ndarray]:
    """Return y of one head of D elements, 150 tokens."""
    qkv, y = test_attention.drawn(1, k.dtype, 150, 3, D)[0], zk.empty(k.dtype, 150, D)
    lse = zk.empty(zk.F32, 150)
    k.zk_attention_fwd(y, lse, qkv, 1, 150, 1, 1, D, 0.125)
    return [y]


def attention_bwd(k: zk.Kernels, D: int = 64) -> list[np.ndarray]:
    """Return gradients of 2 heads of D elements on 1, 150 tokens."""
    qkv, dy = (test_attention.drawn(n, k.dtype, 1, 150, n, D)[0] for n in (4, 2))
    return [test_attention.attention(k, k.dtype, qkv, dy, 1, 0.125)[2]]


def wide_fwd(k: zk.Kernels) -> list[np.ndarray]:
    return attention_fwd(k, 128)


def wide_bwd(k: zk.Kernels) -> list[np.ndarray]:
    return attention_bwd(k, 128)


def layer_norm(k: zk.Kernels) -> list[np.ndarray]:
    """Return y and statistics of rows that need a block of many warps each."""
    M, C = 700, 4000
    x, w, b = (
        test_attention.drawn(i, k.dtype, M if i == 1 else 1, C)[0] for i in (1, 2, 3)
    )
    y, stat = zk.empty(k.dtype, M, C), zk.empty(zk.F32, M, 2)
    k.zk_layernorm_fwd(y, stat, None, x, None, w, b, M, C, 1e-5)
    return [y, stat]


def cross_entropy(k: zk.Kernels, *soft: float) -> list[np.ndarray]:
    """Return losses and gradients of 3 rows. In the first the last lane of a warp has a number
    far above all others.

    soft: smoothing, penalty and cap, if the loss is the soft one."""
    M, V = 3, 4999
    x = test_attention.drawn(1, k.dtype, M, V + 1)[0]
    x[0, 8 * 511] = zk.store(np.array([300.0]), k.dtype)[0]
    loss, d = zk.empty(zk.F32, M), zk.empty(k.dtype, M, V + 1)
    of_loss = k.zk_soft_cross_entropy if soft else k.zk_cross_entropy
    of_loss(loss, d, x, np.array([7, 4998, -1], np.int32), None, M, V, M, *soft)
    return [loss, d]


def soft_cross_entropy(k: zk.Kernels) -> list[np.ndarray]:
    """Return losses and gradients of the same rows by the soft loss."""
    return cross_entropy(k, 0.1, 1e-3, 320.0)


class Mutated(NamedTuple):
    """A kernel in which mistakes are made: its file, the names of all kernels of that file that a
    call launches, itself first, the call, and the processor."""

    source: str
    names: tuple[str, ...]
    call: Callable[[zk.Kernels], list[np.ndarray]]
    target: str = "sm_90"


_KEYS, _QUERIES = (f"{x}_bwdI4bf16Li64E.*ELb0ELi0E" for x in ("keys", "queries"))
_GROUPS = [f"{x}_groupI4bf16Li64E" for x in ("keys", "queries")]
_WIDE = [f"{x}_groupI4bf16Li128E" for x in ("keys", "queries")]
KERNELS = {
    "forward": Mutated(
        "attention", ("forwardI4bf16Li64E.*ELb0ELi0E",), attention_fwd, "sm_80"
    ),
    "keys": Mutated("attention_bwd", (_KEYS, _QUERIES), attention_bwd, "sm_80"),
    "queries": Mutated("attention_bwd", (_QUERIES, _KEYS), attention_bwd, "sm_80"),
    "forward by groups": Mutated(
        "attention", ("forward_groupI4bf16Li64E",), attention_fwd
    ),
    "keys by groups": Mutated("attention_bwd", (*_GROUPS,), attention_bwd),
    "queries by groups": Mutated("attention_bwd", (*_GROUPS[::-1],), attention_bwd),
    "forward by wide groups": Mutated(
        "attention", ("forward_groupI4bf16Li128E",), wide_fwd
    ),
    "keys by wide groups": Mutated("attention_bwd", (*_WIDE,), wide_bwd),
    "queries by wide groups": Mutated("attention_bwd", (*_WIDE[::-1],), wide_bwd),
    "norm": Mutated("norm", (r"norm_fwdI4bf16Li8ELi4ELi1E\w*layout",), layer_norm),
    "entropy": Mutated("loss", ("7entropyI4bf16Li8E",), cross_entropy),
    "soft entropy": Mutated("loss", ("12soft_entropyI4bf16Li8E",), soft_cross_entropy),
}
# Other files whose kernels the calls of a file launch
ALSO = {"attention_bwd": ("attention", "attention_plain")}

# One call, its kernels from a library of a test's own
RUN = """
import hashlib, sys
from tests.cuda import test_ptx_mutants
from tests.lib import zk
zk.sh, zk.LIBRARY[zk.PTX] = (lambda *_: None), sys.argv[1]
k = zk.Kernels(zk.PTX, zk.BF16)
for x in test_ptx_mutants.KERNELS["{}"].call(k):
    print(hashlib.sha256(x.tobytes()).hexdigest())
"""


@functools.cache
def kernels(name: str) -> tuple[str, str, str]:
    """Return the PTX of a kernel, and the text before and after it."""
    of = KERNELS[name]
    head, *all_ = re.split(r"^(?=\.entry)", texts(of.target)[of.source], flags=re.M)
    found = []
    for pattern in of.names:
        (one,) = [x for x in all_ if re.match(rf"\.entry \w*{pattern}", x)]
        found.append(one)
    return found[0], head, "".join(found[1:])


def attempt(folder: pathlib.Path, name: str, text: str) -> subprocess.CompletedProcess:
    """Make a kernel's call with this PTX of the kernel."""
    target = KERNELS[name].target
    with trainer.alone("ninja"):
        every = trainer.inputs(f"out/train-ptx-{target}-kernels.so")
    # the host's half of all files, and no kernels but those that the call launches
    kept = {f"{x}_ptx.o" for x in ALSO.get(KERNELS[name].source, ())}
    parts = [x for x in every if not x.endswith("_ptx.o") or x.split("/")[-1] in kept]
    assert len(parts) == len(every) - len(texts(target)) + len(kept)
    _, head, rest = kernels(name)
    library = linked(folder, head + text + rest, parts)
    return python(RUN.format(name), library, ZR_TEST_PTX=target)


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


ATTENTION = ("forward", "keys", "queries")
FOLDS = ("norm", "entropy", "soft entropy")
GROUPS = tuple(f"{name} by groups" for name in ATTENTION)
WIDE = tuple(f"{name} by wide groups" for name in ATTENTION)
# a barrier before which shared memory is written and after which it is read
_BARRIER = r"bar\.sync\s+0;(?=(?:(?!bar\.sync)[\s\S])*?(?:ld\.shared|ldmatrix))"
# descriptor of the second 16 columns of a tile, without its address: swizzle, strides, 32 bytes
_SECOND = 1 << 62 | 1024 >> 4 << 32 | 16 >> 4 << 16 | 32 >> 4
_WGMMA = r"(wgmma\.mma_async\S+\s+\{[^}]*\}, \{)(%r\d+), ?(%r\d+)"
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
    "no wait for copies of groups": Mutant(
        GROUPS, r"cp\.async\.wait_all;", "", "has not arrived|no fence.proxy.async"
    ),
    "no barrier": Mutant(ATTENTION + FOLDS, _BARRIER, "", "hazard at byte"),
    "no barrier of groups": Mutant(
        GROUPS, r"(fence\.proxy\S+\s[^;]*)bar\.sync\s+0;", r"\1", "hazard at byte"
    ),
    # at width 64 each warp stores over its own rows
    "no barrier at the end of groups": Mutant(
        WIDE, r"bar\.sync\s+0;", "", "hazard at byte", (1,)
    ),
    "one block's place for all": Mutant(
        GROUPS + FOLDS,
        r"(mov\.u32\s+%r\d+, )%ctaid\.x;",
        r"\g<1>0;",
        "hazard at byte .* of device memory: a write by thread .* and a write by",
        (0,),
    ),
    "no fence of shared memory": Mutant(
        GROUPS, r"fence\.proxy\.async\S+;", "", "with no fence.proxy.async since"
    ),
    "no fence of registers": Mutant(
        GROUPS, r"wgmma\.fence\S+;", "", "with no wgmma.fence before it"
    ),
    "no wait for products": Mutant(
        GROUPS, r"wgmma\.wait_group\S+ \d;", "", f"{OTHER}|product"
    ),
    "rows of A swapped in groups": Mutant(GROUPS, _WGMMA, r"\1\3, \2"),
    "not turned in groups": Mutant(
        GROUPS, r"(p, 1, 1, )1;", r"\g<1>0;", f"{OTHER}|has not arrived"
    ),
    "the same columns again": Mutant(GROUPS, str(_SECOND), str(_SECOND - 2)),
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
        ATTENTION + GROUPS,
        r"(st\.global\S+\s+\[%rd\d+)\]",
        r"\1+1073741824]",
        "not allocated",
    ),
    "a query too many": Mutant(
        ATTENTION + GROUPS,
        _QUERIES_OF,
        r"\1\nadd.s32 \2, \2, 1;",
        "not allocated",
        (0,),
    ),
    "a query too few": Mutant(
        ATTENTION + GROUPS, _QUERIES_OF, r"\1\nadd.s32 \2, \2, -1;", OTHER, (0,)
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


def some(number: int, mutant: Mutant) -> tuple[str, float] | None:
    """Return the kernel and the place of a mutant in `./run test`: every third mutant, in kernels
    of sm_90, whose PTX other tests need too."""
    names = [x for x in mutant.kernels if KERNELS[x].target == "sm_90"]
    turn, rest = divmod(number, 3)
    if rest or not names:
        return None
    return names[turn % len(names)], mutant.places[turn % len(mutant.places)]


CASES = [
    pytest.param(
        *(name, kernel, place),
        marks=[pytest.mark.exhaustive] * ((kernel, place) != some(number, mutant)),
    )
    for number, (name, mutant) in enumerate(MUTANTS.items())
    for kernel in mutant.kernels
    for place in mutant.places
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
